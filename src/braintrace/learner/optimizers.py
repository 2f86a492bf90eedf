"""Optimisers of braintools and optax, applied to the parameters of a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import brainstate
import jax
import jax.numpy as jnp

from ..errors import CompilationError, RecompilationWarning, three_parts
from ..program import Path

Made = TypeVar('Made')

_MOST_COPIES = 4
"""From this many optimisers of one kind on, an optimiser was not made once."""


def made_beside(
    others: Mapping[Path, brainstate.State], make: Callable[[], Made]
) -> Made:
    """What ``make`` gives; the states that it creates live as long as some other
    states.

    A state that is created inside a trace ends with it, so a compiled program would
    start from its first value at every call. Traces belong to a thread: another thread
    is outside of them.
    """
    level = min((state.stack_level for state in others.values()), default=0)
    if level >= brainstate.State(None).stack_level:
        return make()
    x64 = jnp.result_type(float) == jnp.float64  # a setting of this thread

    def run() -> tuple[Made, list[brainstate.State]]:
        with jax.enable_x64(x64), brainstate.catch_new_states() as new:
            made = make()
            states = list(new.states)
            leaves = [x for s in states for x in jax.tree.leaves(s.value)]
            if any(isinstance(x, jax.core.Tracer) for x in leaves):
                raise jax.errors.UnexpectedTracerError(
                    'a state starts from a traced value'
                )
            return made, states

    try:
        with ThreadPoolExecutor(1) as thread:
            made, states = thread.submit(run).result()
    except jax.errors.UnexpectedTracerError as error:
        raise CompilationError(
            three_parts(
                'the first use of an optimiser inside jit',
                'its state starts from the values of the weights, which are not '
                'known while a '
                'program is traced',
                'learner.optimizer_states(optimizer), which creates that state, '
                'before the call of '
                'the jitted function',
            )
        ) from error
    for state in states:
        state.stack_level = level
    return made


def _warn_of_copies(optimizer: Any, held: Mapping[Any, Any]) -> None:
    """Warn once of an optimiser that is made anew for every update."""
    code_of = lambda each: getattr(each.update, '__code__', None)
    code = code_of(optimizer)
    copies = [each for each in held if code is not None and code_of(each) is code]
    if len(copies) != _MOST_COPIES:
        return
    warnings.warn(
        three_parts(
            f'{_MOST_COPIES} optimisers of the same kind were used with this learner',
            'each has a state of its own, as the moments of Adam, which starts at its '
            'first update; and each is compiled',
            'make it once, outside the loop, and use the same object in every call',
        ),
        RecompilationWarning,
        stacklevel=2,
    )


def update_by(
    optimizer: Any,
    parameters: dict[Path, brainstate.State],
    held: dict[Any, brainstate.State],
    of_stream: bool = False,
) -> Callable[..., None]:
    """How to apply gradients: ``update(gradients, wanted=None)``.

    A braintools optimiser keeps its own states; the state of an optax transformation is
    kept in ``held``, so that loops carry it. Where ``wanted`` is false, nothing
    changes. ``of_stream``: every stream may have an optimiser of its own.
    """
    if hasattr(optimizer, 'register_trainable_weights'):
        unregistered = getattr(optimizer, 'opt_state', optimizer) is None
        if not optimizer.param_states or unregistered:
            register = lambda: optimizer.register_trainable_weights(parameters)
            made_beside(parameters, register)
        states = list(brainstate.graph.states(optimizer).values())
        change = optimizer.update
    else:
        if optimizer not in held:
            values = {path: state.value for path, state in parameters.items()}
            make = lambda: brainstate.ShortTermState(optimizer.init(values))
            held[optimizer] = made_beside(parameters, make)
            if not of_stream:
                _warn_of_copies(optimizer, held)
        memory = held[optimizer]
        states = [memory]

        def change(gradients: dict) -> None:
            values = {path: state.value for path, state in parameters.items()}
            changes, memory.value = optimizer.update(gradients, memory.value, values)
            for path, state in parameters.items():
                state.value = jax.tree.map(jnp.add, state.value, changes[path])

    every = {id(state): state for state in (*parameters.values(), *states)}.values()

    def update(gradients: dict, wanted: jax.Array | None = None) -> None:
        if wanted is None:
            change(gradients)
            return
        before = [state.value for state in every]
        change(gradients)
        for state, old in zip(every, before, strict=True):
            choose = lambda a, b: jnp.where(wanted, a, b)
            state.value = jax.tree.map(choose, state.value, old)

    return update
