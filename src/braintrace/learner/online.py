"""Online gradients as derivatives: a step whose reverse mode in the parameters is the learning rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from ..compat import is_var
from ..engine.plan import Values
from ..errors import CompilationError, three_parts
from ..program import Path
from ..rules import SyntheticGradient
from .traced import Traced


def online_step(traced: Traced, window: bool, exact: bool, predictor: SyntheticGradient | None = None) -> Callable:
    """A step, or a window of steps, whose reverse derivative in the parameters is the online gradient.

    ``exact``: reverse mode reaches through the whole step inside the window; what its end gets from later, a
    ``predictor`` tells.
    """
    engine, plan = traced.engine, traced.plan
    outputs = plan.program.outputs
    gradient: Callable = engine.block_gradient
    if exact:
        gradient = partial(traced.sequencer.exact_window_gradient, predictor=predictor)
    stack = lambda tree: tree if window else jax.tree.map(lambda x: x[None], tree)
    single = lambda tree: tree if window else jax.tree.map(lambda x: x[0], tree)

    def run(parameters: Values, states: Values, traces: list, inputs: Values) -> tuple:
        values, new, traces = engine.run(parameters, states, traces, stack(inputs))
        values = single(values)
        return [values[v] if is_var(v) else v.val for v in outputs], new, traces

    def ahead(parameters: Values, states: Values, traces: list, inputs: Values) -> tuple:
        return run(parameters, states, traces, inputs), (parameters, states, traces, inputs)

    def back(kept: tuple, bars: tuple) -> tuple:
        parameters, states, traces, inputs = kept
        out_bars, state_bars, _ = bars
        length = len(jax.tree.leaves(inputs)[0]) if window else 1
        total = {v: jnp.zeros((length, *v.aval.shape), v.aval.dtype) for v in plan.targets}
        for v, bar in zip(outputs, out_bars, strict=True):
            if v in total:
                total[v] = total[v] + stack(bar)
        for old, new in plan.carried:
            if new in total:
                total[new] = total[new].at[-1].add(state_bars[old])
        gradients = gradient(parameters, states, traces, stack(inputs), [total[v] for v in plan.targets])
        return gradients, _no_tangent(states), _no_tangent(traces), _no_tangent(inputs)

    step = jax.custom_vjp(run)
    step.defvjp(ahead, back)
    return step


def _no_tangent(tree: Any) -> Any:
    def zero(x: jax.Array) -> Any:
        return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)

    return jax.tree.map(zero, tree)


Made = TypeVar('Made')


def made_beside(others: Mapping[Path, brainstate.State], make: Callable[[], Made]) -> Made:
    """What ``make`` gives; the states that it creates live as long as some other states.

    A state that is created inside a trace ends with it, so a compiled program would start from
    its first value at every call. Traces belong to a thread: another thread is outside of them.
    """
    level = min((state.stack_level for state in others.values()), default=0)
    if level >= brainstate.State(None).stack_level:
        return make()
    x64 = jnp.result_type(float) == jnp.float64  # a setting of this thread

    def run() -> tuple[Made, list[brainstate.State]]:
        with jax.enable_x64(x64), brainstate.catch_new_states() as new:
            made = make()
            states = list(new.states)
            if any(isinstance(x, jax.core.Tracer) for s in states for x in jax.tree.leaves(s.value)):
                raise jax.errors.UnexpectedTracerError('a state starts from a traced value')
            return made, states

    try:
        with ThreadPoolExecutor(1) as thread:
            made, states = thread.submit(run).result()
    except jax.errors.UnexpectedTracerError as error:
        raise CompilationError(
            three_parts(
                'the first use of an optimiser inside jit',
                'its state starts from the values of the weights, which are not known while a program is traced',
                'learner.optimizer_states(optimizer), which creates that state, before the call of the jitted function',
            )
        ) from error
    for state in states:
        state.stack_level = level
    return made


def apply_by(
    optimizer: Any, parameters: dict[Path, brainstate.State], held: dict[Any, brainstate.State]
) -> Callable[[dict, jax.Array], None]:
    """How to apply gradients: ``apply(gradients, wanted)``.

    A braintools optimiser keeps its own states; the state of an optax transformation is kept in ``held``, so that
    loops carry it. Where ``wanted`` is false, neither parameters nor optimiser move.
    """
    if hasattr(optimizer, 'register_trainable_weights'):
        unregistered = getattr(optimizer, 'opt_state', optimizer) is None
        if not optimizer.param_states or unregistered:
            register = lambda: optimizer.register_trainable_weights(parameters)
            made_beside(parameters, register)
        states = list(brainstate.graph.states(optimizer).values())
        update = optimizer.update
    else:
        if optimizer not in held:
            values = {path: state.value for path, state in parameters.items()}
            make = lambda: brainstate.ShortTermState(optimizer.init(values))
            held[optimizer] = made_beside(parameters, make)
        memory = held[optimizer]
        states = [memory]

        def update(gradients: dict) -> None:
            values = {path: state.value for path, state in parameters.items()}
            changes, memory.value = optimizer.update(gradients, memory.value, values)
            for path, state in parameters.items():
                state.value = jax.tree.map(jnp.add, state.value, changes[path])

    moving = list({id(state): state for state in (*parameters.values(), *states)}.values())

    def apply(gradients: dict, wanted: jax.Array) -> None:
        before = [state.value for state in moving]
        update(gradients)
        for state, old in zip(moving, before, strict=True):
            state.value = jax.tree.map(lambda a, b: jnp.where(wanted, a, b), state.value, old)

    return apply
