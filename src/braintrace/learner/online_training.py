"""Training along a sequence: weights change every few steps inside a compiled loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import jax.numpy as jnp

from ..compat import is_at_top
from ..frontends.module_states import known_states, state_places
from ..solver import Solved
from .access import undone_on_error
from .arguments import length_of
from .binding import StepBinding, bind_step_fn, check_aux
from .carried import (
    next_rule_state,
    prepare_traces,
    read_traces,
    rule_value,
    write_rule_state,
    write_traces,
)
from .losses import check_finite_values, loss_weights
from .optimizers import update_by
from .programs import loop_of, state_shapes_of, stored
from .sequences import gradient_program_of
from .settings import Settings
from .stream_program import StreamProgram, shapes_of_inputs

if TYPE_CHECKING:
    from .learner import Learner

Given = tuple[jax.Array, Any]
"""The losses of a sequence, and what else its steps give, if that is returned."""
Loop = Callable[..., tuple[Given, dict]]
"""Of the inputs of a call; also, by name, whether gradients are finite."""


@dataclass(frozen=True)
class OnlineCall:
    """How a sequence is trained along. ``masked``: the last input is a mask.
    ``has_aux``: what steps give beside their losses is returned."""

    step_fn: Callable[..., Any]
    optimizer: Any
    update_every: int
    masked: bool
    has_aux: bool


def train_online(
    learner: Learner,
    sequences: tuple,
    step_fn: Callable[..., Any],
    optimizer: Any,
    update_every: int,
    mask: Any,
    has_aux: bool,
) -> Given:
    """Losses of a sequence along which the weights change every few steps, and what
    else its steps give if ``has_aux``."""
    if mask is not None:
        mask, _ = loss_weights(mask, length_of(sequences), 'steps')
    inputs = sequences if mask is None else (*sequences, mask)
    call = OnlineCall(step_fn, optimizer, update_every, mask is not None, has_aux)
    # brainstate's own loop is needed inside another program, and where a call may be
    # undone. It tracks states in Python, which takes longer than 50 steps of a small
    # network.
    if is_at_top() and not learner.check_finite:
        program = _program(learner, call, inputs)
        arrays = program.arrays()
        if arrays is not None:
            found, _ = program(arrays, *inputs)
            return found
    return _by_brainstate(learner, call, inputs)


def _program(learner: Learner, call: OnlineCall, inputs: tuple) -> StreamProgram:
    """The compiled call for inputs of these shapes, made if there is none."""
    parts = ('online', call, shapes_of_inputs(inputs))
    key = lambda: (*parts, *learner._held(), state_shapes_of(learner))
    known = learner._kept.programs.get(key())
    if known is not None:
        return known
    settings = Settings()
    with undone_on_error(learner, call.optimizer):
        with settings.recorded():
            _, run = _loop(learner, call, inputs)  # makes traces, if there are none yet
        places, placement = state_places(learner.model), learner.placement
        given = (run, inputs, False, None, placement, places)
        make = lambda: StreamProgram(*given)
        return stored(learner, key(), make, settings=settings)


def _by_brainstate(learner: Learner, call: OnlineCall, inputs: tuple) -> Given:
    """The same by a loop that brainstate compiles."""
    binding, run = _loop(learner, call, inputs)
    length = length_of(inputs)
    loop = loop_of(learner, 'loop', (binding, call, length, *learner._held()), run)
    with undone_on_error(learner, call.optimizer):
        (losses, aux), finite = loop(*jax.tree.map(jnp.asarray, inputs))
        if learner.check_finite:
            marks = {name: jnp.where(ok, 0.0, jnp.nan) for name, ok in finite.items()}
            mask = inputs[-1] if call.masked else jnp.ones(length)
            check_finite_values(losses, mask, marks, 'step')
    return losses, aux


def _loop(
    learner: Learner, call: OnlineCall, inputs: tuple
) -> tuple[StepBinding, Loop]:
    """The step, and a loop along a sequence that reads and writes states."""
    masked, size = call.masked, call.update_every
    length, sequences = length_of(inputs), inputs[:-1] if masked else inputs
    binding = bind_step_fn(learner, call.step_fn, sequences)
    # Without has_aux, a pair (loss, aux) is accepted and its second part dropped.
    if call.has_aux:
        check_aux(binding.out_tree, True)
    step = online_step_of(learner, binding, masked)
    parameters = known_states(learner.model, brainstate.ParamState)
    update = update_by(call.optimizer, parameters, learner._kept.optimizers)

    def one(window: tuple, weights: jax.Array) -> tuple[Given, dict]:
        solved = step(window, weights)
        aux = binding.aux(solved, len(weights)) if call.has_aux else None
        wanted = jnp.any(weights != 0) if masked else None
        update(binding.gradients_by_path(solved.gradients), wanted)
        finite = {}
        if learner.check_finite:
            named = binding.gradients_by_name(solved.gradients)
            finite = {name: jnp.all(jnp.isfinite(g)) for name, g in named.items()}
        return (solved.losses, aux), finite

    def run(*inputs: Any) -> tuple[Given, dict]:
        weights = inputs[-1] if masked else jnp.ones(length)
        sequences = inputs[:-1] if masked else inputs
        found = _in_windows(one, length // size, size, sequences, weights)
        learner._count(length)
        return found

    return binding, run


def online_step_of(
    learner: Learner, binding: StepBinding, masked: bool
) -> Callable[[tuple, jax.Array], Solved]:
    """A function of a window and the weights of its losses that gives gradients; states
    and traces are read and written."""
    solver, program = gradient_program_of(learner, binding, learner.rule, fresh=False)
    prepare_traces(learner, solver)

    def step(window: tuple, weights: jax.Array) -> Solved:
        traces, inputs = read_traces(learner, solver), binding.inputs(window)
        given = (*binding.read(), traces, inputs, weights, 1.0, rule_value(learner))
        solved = program.run(*given, masked=masked)
        binding.write(solved.states)
        write_traces(learner, solver, solved.traces)
        write_rule_state(learner, next_rule_state(learner, solved))
        return solved

    return step


def _in_windows(
    one: Callable, count: int, length: int, sequences: tuple, weights: jax.Array
) -> tuple[Given, dict]:
    """Run ``one`` over windows of a length; the last one may be shorter."""
    given, results = (sequences, weights), []
    if count:
        cut = lambda x: x[: count * length].reshape(count, length, *x.shape[1:])
        found, finite = brainstate.transform.for_loop(one, *jax.tree.map(cut, given))
        joined = lambda x: x.reshape(count * length, *x.shape[2:])
        results.append((jax.tree.map(joined, found), finite))
    if len(weights) % length:
        found, finite = one(*jax.tree.map(lambda x: x[count * length :], given))
        results.append((found, jax.tree.map(lambda ok: ok[None], finite)))
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *results)
