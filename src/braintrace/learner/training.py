"""The methods of a :class:`Learner` that train it or advance its states.

They check their arguments. ``calls.py`` lists what runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

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
from .programs import loop_of
from .stream import Stream
from .weights import check_paths, selected

if TYPE_CHECKING:
    from .learner import Learner


# ------------------------------------------------------------ one step


def update(learner: Learner, *args: Any, modulator: Any = None) -> Any:
    """Run one step and return the outputs of the model. States and traces advance.

    Under ``brainstate.transform.grad``, the gradients of parameters are those of the
    rule. Inputs wrapped in :class:`MultiStepData` are a window of steps. With
    ``vjp_method='multi-step'``, reverse mode is exact inside a window and traces carry
    credit from window to window; a plain call is then a window of one step.
    ``modulator``: see :class:`ThreeFactor`.
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
    """Compute the gradients of a sequence.

    Gradients are a dictionary by path. For models other than brainstate modules, they
    have the structure that the optimisers of the framework use.

    ``step_fn(*slices)`` calls the learner and returns a scalar loss, or ``(loss, aux)``
    with ``has_aux``.

    ``fresh=True``: the sequence is whole. It starts from the states at which the
    learner was compiled, and the traces are discarded afterwards. Otherwise states and
    traces continue from the last call.

    ``mask`` (T,): a weight for the loss of each step. The mean divides by max(Σ mask,
    1). A step with weight 0 contributes nothing, even if its loss is not finite. NaN
    and infinity in its inputs count as 0, also in its loss, its auxiliary values and
    the states after it.

    ``weights``: which parameters get a gradient: a list of paths or states, or a
    mapping to states, whose keys the gradients then have.

    ``chunk_size=k``: ``step_fn`` gets windows of k steps. It wraps them in
    :class:`MultiStepData` and returns the k losses of the window, or one loss for the
    whole window; in the latter case ``mask`` has one weight for each window. Reverse
    mode is exact inside each window, with any ``vjp_method``, and traces carry credit
    from window to window. Without ``chunk_size``, or with 1, a learner with
    ``vjp_method='multi-step'`` uses windows of one step.

    ``params`` (a Flax or Equinox module, or the params of a function): use these
    weights in a fresh sequence, without changing the learner. This also works inside
    ``jax.jit``.

    With ``return_value`` the losses are returned as well: 'per_step', multiplied by the
    mask ('masked'), or reduced to one number ('scalar'), as ``loss_output`` says. With
    ``has_aux`` the auxiliary values are returned as well, stacked over time.
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

    ``step_fn(*slices)`` calls the learner. By default, the learner is called on all
    slices. With ``return_outputs``, the results are returned, stacked over time. They
    are those of the inputs as they are; in traces, NaN in an input counts as 0.
    ``chunk_size=k``: ``step_fn`` gets windows of k steps, as in :meth:`etrace_grad`,
    and results are stacked over windows.
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
    """Train along a sequence. The weights change every ``update_every`` steps, inside
    the compiled loop.

    ``optimizer``: an optimiser of braintools or optax. It gets the sum of the gradients
    since the last update. Its state is kept from call to call.

    A masked step does not contribute to the gradient, but states and traces advance,
    with 0 in place of NaN and infinity in its inputs. If all steps since the last
    update are masked, there is no update.

    Returns the loss of every step. With ``has_aux``, ``step_fn`` returns ``(loss,
    aux)``, and the auxiliary values are returned as well, stacked over time.
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
    """Return a :class:`Stream`, which learns from data that arrive one step at a time.

    ``step_fn(*inputs)`` calls the learner and returns a scalar loss, or ``(loss,
    aux)``. ``optimizer``: as in :meth:`etrace_online`; None if weights do not change.
    ``chunk``: calls pass 1 to ``chunk`` steps, time first. ``decay``: the stream sums
    the gradients of :meth:`Stream.gradient` and multiplies the sum by this number at
    every step, for rewards that come later.
    """
    learner.check_compiled()
    return Stream(learner, step_fn, optimizer, chunk=chunk, decay=decay)


# ------------------------------------------------------------ updates


def apply(learner: Learner, gradients: dict[Path, Any], optimizer: Any) -> None:
    """Update the parameters with an optimiser of braintools or optax. The state of the
    optimiser is kept.

    Parameters without a gradient do not change.
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
    parts = (optimizer, *parameters.values())
    # It closes over states alone, so a trace around it does not matter.
    program = loop_of(learner, 'apply', parts, update, is_reusable=True)
    still = {path: s.value for path, s in parameters.items() if path not in gradients}
    moving = (*parameters.values(), *learner.optimizer_states(optimizer).values())
    with synchronised(learner), restored_on_error(moving):
        program({**jax.tree.map(jnp.zeros_like, still), **gradients})
        for path, value in still.items():
            parameters[path].value = value


def update_predictor(
    learner: Learner, sequences: tuple, step_fn: Callable[..., Any]
) -> float:
    """Update the predictor of the rule once, from a fresh sequence, and return its
    error. Nothing else changes."""
    with synchronised(learner):
        solved = calls.solve(learner, GradientCall(sequences, step_fn)).solved
        write_rule_state(learner, next_rule_state(learner, solved))
    return float(solved.predictor_error)
