"""Front ends: each turns a model of one framework into a step program, and none knows
another."""

from __future__ import annotations

import sys
from typing import Any

from .._brainstate import brainstate as brainstate
from ..errors import three_parts
from .pure import PureModel

_FRAMEWORKS = {'flax': ('flax.nnx', 'Module'), 'equinox': ('equinox', 'Module')}
"""The class of models of each framework: its module and its name."""


def pure_model(
    model: Any,
    args: tuple,
    state: Any = None,
    batch: int | None = None,
    seed: int | None = None,
) -> PureModel:
    """A model that is no brainstate module as a pure step, made by the front end of its
    framework.

    ``args``: examples of its inputs; for a plain function ``params, state, *inputs``.
    ``state``: where a model that takes its state as an argument starts. ``batch``: the
    model, its state and the examples are of one sample.
    """
    framework = framework_of(model)
    if framework == 'flax':
        from .flax import FlaxModel

        return FlaxModel(model, args, state, batch, seed or 0)
    if framework == 'equinox':
        from .equinox import EquinoxModel

        return EquinoxModel(model, args, state, batch)
    from .functions import FunctionModel

    check_function(model, args, state)
    return FunctionModel(model, args[0], args[1], args[2:], batch)


def framework_of(model: Any) -> str | None:
    """The name of the framework whose module a model is; None for any other."""
    for framework, (package, name) in _FRAMEWORKS.items():
        module = sys.modules.get(package)  # no model is of one that was not imported
        if module is not None and isinstance(model, getattr(module, name, ())):
            return framework
    return None


def class_as_model(kind: type) -> TypeError:
    """The error of a class that was given where a model is needed."""
    return TypeError(
        three_parts(
            f'the class {kind.__name__} as a model',
            'a class has no parameters and no states; its instances have',
            f'an instance: {kind.__name__}(...)',
        )
    )


def check_function(model: Any, args: tuple, state: Any) -> None:
    """Raise unless a model is a step function with examples of its arguments."""
    if isinstance(model, type):
        raise class_as_model(model)
    if not callable(model) or len(args) < 2 or state is not None:
        raise TypeError(
            three_parts(
                f'a model of type {type(model).__name__} with {len(args)} example(s) '
                'of its arguments' + ('' if state is None else ' and state=...'),
                'a model is a module of brainstate, Flax NNX or Equinox, or a function '
                'step(params, state, *inputs) -> (state, out)',
                'an instance of such a module and its inputs, or such a function '
                'with params, state and inputs',
            )
        )
