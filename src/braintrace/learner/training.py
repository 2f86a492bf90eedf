"""The calls of a :class:`Learner` that train it or move it on.

They check their arguments; how they run is in ``calls.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import brainstate
import jax
import jax.numpy as jnp

from ..errors import ArgumentError, three_parts
from ..program import Path
from ..program.data import MultiStepData, SingleStepData
from . import calls, chunks
from .access import place_inputs, synchronised
from .arguments import (
    LOSS_OUTPUTS,
    check_choice,
    check_optimizer,
    is_count,
    length_of,
)
from .batch import batch_explained, check_rank
from .calls import GradientCall
from .carried import next_rule_state, write_rule_state
from .losses import results
from .model_states import restored_on_error, state_shapes
from .models import interface_of
from .online_training import train_online
from .optimizers import update_by
from .programs import program_of
from .stream import Stream
from .weights import check_paths, selected

if TYPE_CHECKING:
    from .learner import Learner


# ------------------------------------------------------------ one step


def update(learner: Learner, *args: Any, modulator: Any = None) -> Any:
    """One step: the model's output; states and traces advance.

    Under ``brainstate.transform.grad`` the parameters' gradient is the rule's
    online gradient. Inputs wrapped in :class:`MultiStepData` are a window of steps:
    with ``vjp_method='multi-step'`` exact reverse mode inside, traces across. A
    plain call is a window of one step then. Inside a ``step_fn`` this is the call
    that is traced. ``modulator``: see :class:`ThreeFactor`.
    """
    window = any(isinstance(a, MultiStepData) for a in args)
    wrapped = (SingleStepData, MultiStepData)
    args = tuple(a.data if isinstance(a, wrapped) else a for a in args)
    args = place_inputs(learner, args, int(window))
    check_rank(args, learner._example, int(window))
    now = lambda: state_shapes(learner.hidden_states)
    compiled = (learner._example, learner._kept.shapes)
    explained = batch_explained(args, *compiled, now, window)
    with synchronised(learner), explained:
        return calls.run_step(learner, args, window, modulator)


# ------------------------------------------------------------ sequences


@overload
def etrace_grad(
    learner: Learner,
    *sequences: Any,
    step_fn: Callable[..., Any],
    mask: Any = None,
    chunk_size: int | None = None,
    weights: Any = None,
    reduction: str = 'mean',
    loss_output: str = 'per_step',
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    fresh: bool = False,
    params: Any = None,
) -> dict[Path, Any]: ...


@overload
def etrace_grad(
    learner: Learner,
    *sequences: Any,
    step_fn: Callable[..., Any],
    has_aux: Literal[True],
    **options: Any,
) -> tuple[Any, ...]: ...


@overload
def etrace_grad(
    learner: Learner,
    *sequences: Any,
    step_fn: Callable[..., Any],
    return_value: Literal[True],
    **options: Any,
) -> tuple[Any, ...]: ...


def etrace_grad(
    learner: Learner,
    *sequences: Any,
    step_fn: Callable[..., Any],
    mask: Any = None,
    chunk_size: int | None = None,
    weights: Any = None,
    reduction: str = 'mean',
    loss_output: str = 'per_step',
    has_aux: bool = False,
    return_value: bool = False,
    fresh: bool = False,
    params: Any = None,
) -> Any:
    """Gradients of a whole sequence, by path; those of a model that is no
    brainstate module in the structure that its framework's optimisers take.

    ``step_fn(*slices)`` calls the learner and returns a scalar loss (or ``(loss,
    aux)``). ``mask`` (T,) weights the losses; 'mean' divides by max(Σ mask, 1). A
    loss of mask 0 contributes nothing, even if it or the inputs of its step are
    NaN. ``fresh=True``: the sequence is whole, so states start from where they were
    compiled and the traces are discarded afterwards. ``weights`` selects
    parameters: a list of paths or states, or a mapping to states, whose keys the
    gradients then have.

    ``chunk_size=k`` passes windows of k steps to ``step_fn``, which wraps them in
    :class:`MultiStepData` and returns the k losses of a window, or one for the
    whole of it; then ``mask`` has one weight for each window. Reverse mode is exact
    inside each window, whatever ``vjp_method`` says, and traces go across. Without
    it, or with 1, a learner with ``vjp_method='multi-step'`` takes windows of one
    step.

    ``params`` (a Flax or Equinox module, or the params of a function): a fresh
    sequence with these weights, nothing of the learner changed; this also works
    inside ``jax.jit`` and the like.

    With ``return_value`` the losses follow: as they are ('per_step'), times their
    mask ('masked') or reduced to one number ('scalar'). With ``has_aux`` the
    auxiliary values follow, stacked over time.
    """
    check_choice('loss_output', loss_output, LOSS_OUTPUTS)
    chosen = None if weights is None else selected(weights, learner.param_states)
    how = (step_fn, mask, reduction, has_aux, fresh)
    if params is not None:
        call = GradientCall(sequences, *how)
        found = calls.gradients_at(learner, call, params, chunk_size)
    else:
        with synchronised(learner):
            call = GradientCall(place_inputs(learner, sequences, 1), *how)
            if chunk_size in (None, 1):
                found = calls.gradients_in_steps(learner, call)
            else:
                found = chunks.gradients_in_chunks(learner, call, chunk_size)
    gradients, losses, counts, aux = found
    if chosen is None:
        gradients = interface_of(learner.model).gradients(gradients)
    given = (mask, chosen, loss_output, return_value, has_aux)
    return results(gradients, losses, counts, aux, *given)


def etrace_evolve(
    learner: Learner,
    *sequences: Any,
    step_fn: Callable[..., Any] | None = None,
    chunk_size: int | None = None,
    return_outputs: bool = False,
) -> Any:
    """Advance states and traces along a sequence without a loss.

    ``step_fn(*slices)`` calls the learner, by default on all of them; what it
    returns is given, stacked over time, if ``return_outputs``. ``chunk_size=k``
    hands windows of k steps to it, as :meth:`etrace_grad` does; outputs are stacked
    over windows then.
    """
    with synchronised(learner):
        sequences = place_inputs(learner, sequences, 1)
        if chunk_size in (None, 1):
            outputs = calls.evolve(learner, sequences, step_fn)
        else:
            outputs = chunks.evolve_in_chunks(learner, sequences, step_fn, chunk_size)
    return outputs if return_outputs else None


@overload
def etrace_online(
    learner: Learner,
    *sequences: Any,
    step_fn: Callable[..., Any],
    optimizer: Any,
    update_every: int = 1,
    mask: Any = None,
    has_aux: Literal[False] = False,
) -> jax.Array: ...


@overload
def etrace_online(
    learner: Learner,
    *sequences: Any,
    step_fn: Callable[..., Any],
    optimizer: Any,
    has_aux: bool,
    **options: Any,
) -> Any: ...


def etrace_online(
    learner: Learner,
    *sequences: Any,
    step_fn: Callable[..., Any],
    optimizer: Any,
    update_every: int = 1,
    mask: Any = None,
    has_aux: bool = False,
) -> Any:
    """Train along a sequence: weights change every ``update_every`` steps inside
    the compiled loop.

    ``optimizer``: one of braintools, or any optax transformation; it is given the
    sum of the steps' gradients, and its state is kept from call to call. A masked
    step does not contribute to the gradient, and if all steps since the last update
    are masked, there is no update; states and traces advance. Returns the loss of
    every step; with ``has_aux`` the step function returns ``(loss, aux)``, and the
    auxiliary values follow, stacked over time.
    """
    interface_of(learner.model).check_loop_optimizer(optimizer)
    check_optimizer(optimizer)
    length_of(sequences, step_fn)
    if not is_count(update_every):
        raise ValueError(
            three_parts(
                f'update_every={update_every!r}',
                'weights change after so many steps',
                'a whole number of at least 1',
            )
        )
    with synchronised(learner):
        sequences = place_inputs(learner, sequences, 1)
        losses, aux = train_online(
            learner, sequences, step_fn, optimizer, update_every, mask, has_aux
        )
    return (losses, aux) if has_aux else losses


def stream(
    learner: Learner,
    step_fn: Callable[..., Any],
    optimizer: Any = None,
    *,
    chunk: int | None = None,
    decay: float | None = None,
) -> Stream:
    """Learn from data that arrive one step at a time.

    ``step_fn(*inputs)`` calls the learner and returns a scalar loss, or ``(loss,
    aux)``. ``optimizer``: as for :meth:`etrace_online`; None if weights are not to
    change. ``chunk``: calls bring 1 to so many steps, time first. ``decay``:
    gradients of :meth:`Stream.gradient` are added up, the sum multiplied by this
    number at every step, for rewards that come later.
    """
    learner.check_compiled()
    return Stream(learner, step_fn, optimizer, chunk=chunk, decay=decay)


# ------------------------------------------------------------ updates


def apply(learner: Learner, gradients: dict[Path, Any], optimizer: Any) -> None:
    """Change the parameters by an optimiser of braintools or optax, whose state is
    kept.

    Parameters without a gradient stay as they are.
    """
    parameters = learner.param_states
    if isinstance(optimizer, Mapping) and not isinstance(gradients, Mapping):
        raise ArgumentError(
            three_parts(
                'apply with an optimiser as its first argument',
                'the gradients come first',
                'learner.apply(gradients, optimizer)',
            )
        )
    gradients = interface_of(learner.model).by_path(gradients)
    check_paths('gradients', gradients, parameters)
    update = update_by(check_optimizer(optimizer), parameters, learner._kept.optimizers)
    make = lambda: brainstate.transform.jit(update)
    # It closes over states alone, so a trace around it does not matter.
    program = program_of(
        learner, 'apply', (optimizer, *parameters.values()), make, True
    )
    still = {path: s.value for path, s in parameters.items() if path not in gradients}
    moving = (*parameters.values(), *learner.optimizer_states(optimizer).values())
    with synchronised(learner), restored_on_error(moving):
        program({**jax.tree.map(jnp.zeros_like, still), **gradients})
        for path, value in still.items():
            parameters[path].value = value


def update_predictor(
    learner: Learner, sequences: tuple, step_fn: Callable[..., Any]
) -> float:
    """One update of the rule's predictor from a fresh sequence, nothing else
    changed; its error."""
    with synchronised(learner):
        solved = calls.solve(learner, GradientCall(sequences, step_fn)).solved
        write_rule_state(learner, next_rule_state(learner, solved))
    return float(solved.predictor_error)
