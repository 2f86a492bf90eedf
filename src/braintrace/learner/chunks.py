"""Sequences in windows of steps that a step function takes whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import jax.numpy as jnp

from ..frontends.module_states import module_states
from ..program.data import MultiStepData
from ..program.step import path_name
from ..solver.masking import finite
from .access import undone_on_error
from .arguments import length_of
from .binding import bind_model, recording
from .calls import GradientCall, SequenceGradients, failure_explained
from .carried import prepare_traces
from .losses import (
    check_finite_values,
    in_windows,
    never_called,
    weighted,
    weights_like,
    window_weights,
)
from .programs import loop_of
from .sequences import solver_of

if TYPE_CHECKING:
    from .learner import Learner


def gradients_in_chunks(
    learner: Learner, call: GradientCall, size: Any
) -> SequenceGradients:
    """SequenceGradients over windows of ``size`` steps that ``step_fn`` takes whole; it
    returns a loss for each step, or one for the window."""
    step_fn, mask, has_aux = call.step_fn, call.mask, call.has_aux
    chunks = in_windows(call.sequences, call.length, size)
    per_step, per_window = window_weights(mask, call.length, size, call.reduction)
    parameters = module_states(learner.model, brainstate.ParamState)

    def one(total: Any, xs: tuple) -> tuple:
        chunk, *weights = xs

        def loss() -> tuple:
            with recording(learner, runs_model=False) as record:
                result = step_fn(*chunk)
            if not record.calls:
                raise never_called()
            value, aux = result if has_aux else (result, None)
            weight = weights_like(value, size, *weights)
            return weighted(value, weight), (value, weight, aux)

        grads, (value, weight, aux) = brainstate.transform.grad(
            loss, parameters, has_aux=True
        )()
        counts = jnp.any(weight != 0)
        add = lambda total, g: total + jnp.where(counts, g, 0)
        return jax.tree.map(add, total, dict(grads)), (value, weight, aux)

    def run(chunks: tuple, *weights: Any) -> tuple:
        if mask is not None:
            (of_losses,) = (x for x in weights if x is not None)
            chunks = finite(chunks, of_losses == 0)
        states = parameters.items()
        zero = {path: jax.tree.map(jnp.zeros_like, s.value) for path, s in states}
        return brainstate.transform.scan(one, zero, (chunks, *weights))

    with undone_on_error(learner):
        if call.fresh:
            learner.reset_state()
        # Traces of windows may have components that those of single steps lack. Inside
        # the program it is no longer known whether the old ones are zero.
        binding = bind_model(learner, learner._example)
        every = not learner.rule.has_own_signal
        solver = solver_of(learner, binding, learner.rule, loss=False, in_chunk=every)
        prepare_traces(learner, solver)
        parts = (step_fn, size, has_aux, mask is None, *learner._held())
        program = loop_of(learner, 'chunks', parts, run)
        with failure_explained(learner, chunks):
            found = program(chunks, per_step, per_window)
        gradients, (losses, weights, aux) = found
        losses, weights = losses.reshape(-1), weights.reshape(-1)
        if learner.check_finite:
            named = {path_name(path): gradient for path, gradient in gradients.items()}
            check_finite_values(losses, weights, named, 'window')
        if call.fresh:
            learner._carried.clear()
    return SequenceGradients(gradients, losses, weights, aux)


def evolve_in_chunks(
    learner: Learner, sequences: tuple, step_fn: Callable | None, size: Any
) -> Any:
    """Advance states and traces by windows of ``size`` steps; outputs of each."""
    chunks = in_windows(sequences, length_of(sequences, step_fn), size)
    windowed = lambda *xs: learner(*map(MultiStepData, xs))
    one = windowed if step_fn is None else step_fn
    run = lambda *chunks: brainstate.transform.for_loop(one, *chunks)
    program = loop_of(learner, 'evolve chunks', (step_fn, *learner._held()), run)
    with undone_on_error(learner), failure_explained(learner, chunks):
        return program(*chunks)
