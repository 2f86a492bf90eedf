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
    framework = _framework_of(model)
    if framework == 'flax':
        from .flax import FlaxModel

        return FlaxModel(model, args, state, batch, seed or 0)
    if framework == 'equinox':
        from .equinox import EquinoxModel

        return EquinoxModel(model, args, state, batch)
    from .functions import FunctionModel

    _check_function(model, args, state)
    return FunctionModel(model, args[0], args[1], args[2:], batch)


def extract(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Trace one step of a model with the front end of its framework.

    A ``brainstate`` module is called with ``args``, and so is a module of Flax NNX or
    Equinox, with ``state`` where it takes one; any other callable is a plain function
    ``step(params, state, x) -> (state, out)``.
    """
    if _is_a(model, 'brainstate.nn', 'Module'):
        from .brainstate import extract_module_info

        return extract_module_info(model, *args, **kwargs)
    from .functions import extract_function_info, extract_pure_info

    if _framework_of(model) is not None:
        return extract_pure_info(pure_model(model, args, **kwargs))
    _check_function(model, args, kwargs.get('state'))
    return extract_function_info(model, *args, **kwargs)


def _framework_of(model: Any) -> str | None:
    found = (name for name, kind in _FRAMEWORKS.items() if _is_a(model, *kind))
    return next(found, None)


def _is_a(model: Any, package: str, name: str) -> bool:
    """Whether a model is of a class of a package; one that was not imported has no
    models."""
    module = sys.modules.get(package)
    return module is not None and isinstance(model, getattr(module, name, ()))


def class_as_model(kind: type) -> TypeError:
    """The error of a class that was given where a model is needed."""
    return TypeError(
        three_parts(
            f'the class {kind.__name__} as a model',
            'a class has no parameters and no states; its instances have',
            f'an instance: {kind.__name__}(...)',
        )
    )


def _check_function(model: Any, args: tuple, state: Any) -> None:
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
