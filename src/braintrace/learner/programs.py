"""The programs that a learner makes of its steps, each of them once, and what else it
stores between calls."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np

from ..compat import can_fail, is_at_top
from ..errors import RecompilationWarning, three_parts
from ..frontends.module_states import known_states
from ..source_lines import short_source

if TYPE_CHECKING:
    from .learner import Learner
    from .model_states import Shapes

_MOST_PROGRAMS = 32
"""More are dropped, the oldest first: a new step_fn for every call must not fill
memory."""
_MOST_COPIES = 4
"""From this many function objects of one code on, a step_fn was not defined once."""


def array_shapes(tree: Any) -> tuple:
    """Shapes and types of the arrays in a tree."""
    return tuple(map(shape_of, jax.tree.leaves(tree)))


def shape_of(x: Any) -> tuple:
    """Shape and type of an array; for one of JAX without its slower functions."""
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return x.shape, x.dtype
    return jnp.shape(x), jnp.result_type(x)


def shapes_of(tree: Any) -> tuple:
    """Structure of a tree, shapes and types of its arrays: what a program is
    specialised for."""
    return jax.tree.structure(tree), array_shapes(tree)


def in_trace() -> bool:
    """Whether new arrays are tracers, as inside jit."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


@dataclass
class Kept:
    """What a learner stores between calls beside its states. It is one object, so that
    brainstate does not find states in it.

    ``programs``: by what they depend on. ``optimizers``: states of optax
    transformations. ``shapes``: shapes of the hidden states when the learner was
    compiled. ``has_batch_size``: whether `compile` was given a batch size.
    ``settings``: the settings of brainstate at that time. ``said``: texts of warnings
    so far. ``codes``: how many step functions with the same code were
    traced.
    """

    programs: dict[tuple, Any] = field(default_factory=dict)
    optimizers: dict[Any, brainstate.State] = field(default_factory=dict)
    shapes: Shapes = field(default_factory=dict)
    has_batch_size: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)
    codes: Counter[tuple] = field(default_factory=Counter)


# ---------------------------------------------------------------- of a learner


def current_settings() -> dict[str, Any]:
    """The settings ``fit`` and ``dt`` of brainstate, as far as they are set to values
    that can be compared: a step reads them when it is traced."""
    settings, found = brainstate.environ.all(), {}
    for name in ('fit', 'dt'):
        value = settings.get(name)
        if isinstance(value, u.Quantity):
            value = (value.mantissa, value.unit)
        number = value[0] if isinstance(value, tuple) else value
        if isinstance(number, (bool, int, float, np.generic)):
            found[name] = value
    return found


def settings_of(learner: Learner) -> tuple:
    """The settings that a program is made for. One that is not set now is as it was
    when the learner was compiled."""
    settings = learner._kept.settings | current_settings()
    return tuple(settings.items())


def state_shapes_of(learner: Learner) -> tuple:
    """The shapes of all states that a program of the learner is made for, and the
    settings."""
    kinds = (brainstate.ParamState, brainstate.HiddenState)
    states = list(known_states(learner.model, *kinds).values())
    states += [] if learner.rule_state is None else [learner.rule_state]
    return *shapes_of([state.value for state in states]), settings_of(learner)


def warn_of_copies(learner: Learner, step_fn: Callable, parts: tuple) -> None:
    """Warn once of a step_fn that is defined anew for every call."""
    code = getattr(inspect.unwrap(step_fn), '__code__', None)
    if code is None:
        return
    codes = learner._kept.codes
    codes[code, parts] += 1
    if codes[code, parts] != _MOST_COPIES:
        return
    place = short_source(f'{code.co_filename}:{code.co_firstlineno}')
    warnings.warn(
        three_parts(
            f'the step_fn of {place} was compiled {_MOST_COPIES} times',
            'every call got a new function object of the same code, and a program '
            'is compiled for each',
            'define it once, outside the loop, and use the same object in every '
            'call; pass values that change as sequences',
        ),
        RecompilationWarning,
        stacklevel=2,
    )


def program_of(
    learner: Learner,
    kind: str,
    parts: tuple,
    make: Callable[[], Any],
    is_reusable: bool | Callable[[Any], bool] | None = None,
) -> Any:
    """A program of some kind, made once for these parts and the shapes of all
    states."""
    return stored(learner, (kind, *parts, state_shapes_of(learner)), make, is_reusable)


def stored(
    learner: Learner,
    key: tuple,
    make: Callable[[], Any],
    is_reusable: bool | Callable[[Any], bool] | None = None,
) -> Any:
    """The program of a key, made if there is none.

    A program that is made inside a trace, as inside jit, may close over tracers, which
    are of no use afterwards; it is not stored. ``is_reusable``: whether it can be
    stored, where that is known.
    """
    programs = learner._kept.programs
    if key in programs:
        programs[key] = programs.pop(key)  # the one used last is dropped last
        return programs[key]
    program = make()
    if callable(is_reusable):
        is_reusable = is_reusable(program)
    if is_reusable is None:
        is_reusable = not in_trace()
    if is_reusable:
        if len(programs) >= _MOST_PROGRAMS:
            programs.pop(next(iter(programs)))
        programs[key] = program
    return program


def loop_of(
    learner: Learner,
    kind: str,
    parts: tuple,
    run: Callable,
    step_fn: Callable | None = None,
) -> Callable:
    """A compiled loop of brainstate; ``step_fn``: what it calls."""

    def make() -> Callable:
        if step_fn is not None and not in_trace():
            warn_of_copies(learner, step_fn, (kind, state_shapes_of(learner)))
        jitted = brainstate.transform.jit(run)
        fails: list[bool] = []

        def loop(*inputs: Any) -> Any:
            results = jitted(*inputs)
            if is_at_top():
                if not fails:
                    fails.append(can_fail(jitted.trace(*inputs).jaxpr))
                if fails[0]:
                    # An error must be raised here, where the call can be undone.
                    jax.block_until_ready(results)
            return results

        return loop

    return program_of(learner, kind, parts, make)
