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
import jax
import jax.numpy as jnp

from ..compat import can_fail, is_at_top
from ..errors import RecompilationWarning, three_parts
from ..frontends.module_states import known_states
from ..source_lines import short_source
from .settings import Settings, with_settings_of

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


class Programs:
    """Programs by what they depend on: a key, and the settings of brainstate that were
    asked for while they were traced."""

    def __init__(self) -> None:
        self._found: dict[tuple, list[tuple[Settings, Any]]] = {}
        self._has_warned = False

    def get(self, key: tuple) -> Any:
        """The program of a key and of the present settings; None if there is none."""
        for settings, program in self._found.get(key, ()):
            if not settings.changed():
                self._found[key] = self._found.pop(key)  # used last, dropped last
                return program
        return None

    def put(self, key: tuple, settings: Settings, program: Any) -> None:
        """Store a program, in place of one for the same settings."""
        others = [one for one in self._found.pop(key, []) if one[0].changed()]
        if len(others) + 1 == _MOST_COPIES and not self._has_warned:
            self._has_warned = True
            _warn_of_settings({name for s, _ in others for name in s.changed()})
        while len(self) + len(others) >= _MOST_PROGRAMS:
            oldest = others if not self._found else next(iter(self._found.values()))
            oldest.pop(0)
            self._found = {key: found for key, found in self._found.items() if found}
        self._found[key] = [*others, (settings, program)]

    def clear(self) -> None:
        """Drop all programs."""
        self._found.clear()

    def __len__(self) -> int:
        return len(self.values())

    def values(self) -> list[Any]:
        """All programs."""
        return [program for found in self._found.values() for _, program in found]


@dataclass
class Kept:
    """What a learner stores between calls beside its states. It is one object, so that
    brainstate does not find states in it.

    ``programs``: what it has traced and compiled. ``optimizers``: states of optax
    transformations. ``shapes``: shapes of the hidden states when the learner was
    compiled. ``has_batch_size``: whether `compile` was given a batch size.
    ``settings``: the settings of brainstate that the step of the model asked for at
    that time. ``said``: texts of warnings
    so far. ``codes``: how many step functions with the same code were
    traced.
    """

    programs: Programs = field(default_factory=Programs)
    optimizers: dict[Any, brainstate.State] = field(default_factory=dict)
    shapes: Shapes = field(default_factory=dict)
    has_batch_size: bool = False
    settings: Settings = field(default_factory=Settings)
    said: set[str] = field(default_factory=set)
    codes: Counter[tuple] = field(default_factory=Counter)


# ---------------------------------------------------------------- of a learner


def compile_step(learner: Learner, args: tuple) -> None:
    """Trace and analyse the step of the model on example inputs, and record the
    settings that it asks for."""
    settings = Settings()
    with settings.recorded():
        learner.executor.compile_graph(*args)
    learner._kept.settings = settings


def state_shapes_of(learner: Learner) -> tuple:
    """The shapes of all states that a program of the learner is made for."""
    kinds = (brainstate.ParamState, brainstate.HiddenState)
    states = list(known_states(learner.model, *kinds).values())
    states += [] if learner.rule_state is None else [learner.rule_state]
    return shapes_of([state.value for state in states])


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


def _warn_of_settings(names: set[str]) -> None:
    shown = ', '.join(sorted(names))
    warnings.warn(
        three_parts(
            f'a step was compiled for {_MOST_COPIES} values of settings of brainstate: '
            f'{shown}',
            'the step reads them when it is traced, and a program is compiled for each '
            'value',
            'pass a value that changes as an input of the step, or keep it in a state',
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
    settings: Settings | None = None,
) -> Any:
    """A program of some kind, made once for these parts and the shapes of all
    states."""
    key = (kind, *parts, state_shapes_of(learner))
    return stored(learner, key, make, is_reusable, settings)


def stored(
    learner: Learner,
    key: tuple,
    make: Callable[[], Any],
    is_reusable: bool | Callable[[Any], bool] | None = None,
    settings: Settings | None = None,
) -> Any:
    """The program of a key and of the present settings, made if there is none.

    A program that is made inside a trace, as inside jit, may close over tracers, which
    are of no use afterwards; it is not stored. ``is_reusable``: whether it can be
    stored, where that is known. ``settings``: what it will ask for when it is called,
    if it is not traced until then.
    """
    programs, settings = learner._kept.programs, settings or Settings()
    program = programs.get(key)
    if program is not None:
        return program
    with settings.recorded():
        program = with_settings_of(learner._kept.settings, make)
    if callable(is_reusable):
        is_reusable = is_reusable(program)
    if is_reusable is None:
        is_reusable = not in_trace()
    if is_reusable:
        programs.put(key, settings, program)
    return program


def loop_of(
    learner: Learner,
    kind: str,
    parts: tuple,
    run: Callable,
    step_fn: Callable | None = None,
    is_reusable: bool | None = None,
) -> Callable:
    """A function that brainstate compiles when it is called; ``step_fn``: what it
    calls."""
    settings = Settings()

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

        def call(*inputs: Any) -> Any:
            with settings.recorded():
                return with_settings_of(learner._kept.settings, loop, *inputs)

        return call

    return program_of(learner, kind, parts, make, is_reusable, settings)
