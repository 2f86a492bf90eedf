"""How a call of a learner runs: the step is bound to the model, its program is made
once, values go in and come out.

    learner(x)                 run_step
    etrace_grad                gradients_in_steps, gradients_at; windows: ``chunks.py``
    etrace_evolve              evolve
    etrace_online              ``online_training.py``
    streams                    ``stream.py``, ``stream_program.py``
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp

from ..errors import is_explained, three_parts
from ..frontends.brainstate import inputs_kept
from ..frontends.failures import explain_failure
from ..program import Path
from ..rules import Rule
from ..solver import Solved, Solver
from .access import alone
from .arguments import check_call, check_choice, length_of
from .batch import BatchError
from .binding import (
    StepBinding,
    bind_model,
    bind_step_fn,
    check_aux,
    recording_of,
)
from .carried import (
    check_modulated,
    next_rule_state,
    read_traces,
    rule_value,
    write_rule_state,
    write_traces,
)
from .losses import check_finite_values, loss_weights
from .model_states import start_values
from .models import interface_of
from .online import online_step
from .programs import program_of
from .sequences import evolution_program, gradient_program_of, options_of, solver_of
from .transaction import Transaction

if TYPE_CHECKING:
    from .learner import Learner


@dataclass(frozen=True)
class GradientCall:
    """What gradients are wanted of, as :meth:`Learner.etrace_grad` takes it.

    ``has_aux``: None where it does not matter what a step gives beside its loss.
    """

    sequences: tuple
    step_fn: Callable[..., Any]
    mask: Any = None
    reduction: str = 'mean'
    has_aux: bool | None = None
    fresh: bool = True

    def __post_init__(self) -> None:
        check_choice('reduction', self.reduction, ('mean', 'sum'))
        described = 'one slice of each sequence'
        check_call('step_fn', self.step_fn, self.sequences, described)
        length_of(self.sequences)

    @property
    def length(self) -> int:
        """Steps of the sequences."""
        return len(jax.tree.leaves(self.sequences)[0])


class SequenceGradients(NamedTuple):
    """Gradients by path, losses, what each of these counts, and auxiliary values."""

    by_path: dict[Path, Any]
    losses: jax.Array
    weights: jax.Array
    aux: Any


class SolvedCall(NamedTuple):
    """What ran, what it gave, and what each loss counted; nothing is written yet."""

    binding: StepBinding
    solver: Solver
    solved: Solved
    weights: jax.Array

    def gradients(self, has_aux: bool | None) -> SequenceGradients:
        """What the user is given of it."""
        binding, _, solved, weights = self
        aux = binding.aux(solved, len(weights)) if has_aux else None
        by_path = binding.gradients_by_path(solved.gradients)
        return SequenceGradients(by_path, solved.losses, weights, aux)


# ---------------------------------------------------------------- gradients


def gradients_in_steps(learner: Learner, call: GradientCall) -> SequenceGradients:
    """Gradients of a sequence, step by step; states and traces are written."""

    def write(found: SolvedCall) -> None:
        binding, solver, solved, weights = found
        after = (solved.states, solved.traces, next_rule_state(learner, solved))
        write_back(
            learner, binding, solver, *after, calls=len(weights), fresh=call.fresh
        )

    return solve(learner, call, write=write).gradients(call.has_aux)


def gradients_at(
    learner: Learner, call: GradientCall, params: Any, chunk_size: int | None
) -> SequenceGradients:
    """The same at parameters of the caller's, with nothing of the learner written."""
    with alone(learner):
        wrong = ['fresh=False'] * (not call.fresh) + ['chunk_size'] * bool(chunk_size)
        if wrong:
            raise ValueError(
                three_parts(
                    f'etrace_grad(..., params=..., {", ".join(wrong)})',
                    'a call with weights of its own leaves states and traces '
                    'alone, so it has no past to continue from',
                    'fresh=True and no chunk_size; or learner.params = ... '
                    '(Flax: the module itself) and no params',
                )
            )
        interface = interface_of(learner.model)

        def write(found: SolvedCall) -> None:
            paths, states = found.binding.paths.items(), found.solved.states
            new = {path: states[v] for v, path in paths if v in states}
            interface.write_at(params, new)

        found = solve(learner, call, at=interface.values_at(params), write=write)
    return found.gradients(call.has_aux)


def solve(
    learner: Learner,
    call: GradientCall,
    rule: Rule | None = None,
    rule_state: Any = None,
    at: Mapping[Path, Any] = {},
    write: Callable[[SolvedCall], None] | None = None,
) -> SolvedCall:
    """Run a sequence by the learner's rule, or by another.

    ``at``: values of parameters and states in place of the current ones, by path.
    ``write``: puts what was found in place; without it nothing is written.
    """
    sequences, fresh = call.sequences, call.fresh
    weights, unit = loss_weights(call.mask, call.length, 'steps', call.reduction)
    binding = bind_step_fn(learner, call.step_fn, sequences, rule is not None)
    if call.has_aux is not None:
        check_aux(binding.out_tree, call.has_aux)
    solver, program = gradient_program_of(learner, binding, rule or learner.rule, fresh)
    parameters, states = binding.read()
    inputs = binding.inputs(sequences)
    if fresh:
        states = binding.with_values(states, start_values(learner))
    if at:
        parameters = binding.with_values(parameters, at)
        states = binding.with_values(states, at)
    if rule is None:
        rule_state = rule_value(learner)
    traces = [] if fresh else read_traces(learner, solver, program.donates)
    given = (parameters, states, traces, inputs, weights, unit, rule_state)
    masked = call.mask is not None

    def finish(solved: Solved) -> SolvedCall:
        found = SolvedCall(binding, solver, solved, weights)
        if write is not None:
            if learner.check_finite:
                named = binding.gradients_by_name(solved.gradients)
                check_finite_values(solved.losses, weights, named, 'step')
            write(found)
        return found

    program.compile(*given, masked=masked)
    return program(finish, *given, masked=masked)


def write_back(
    learner: Learner,
    binding: StepBinding,
    solver: Solver,
    states: Any,
    traces: list,
    rule_state: Any,
    calls: int,
    fresh: bool = False,
) -> None:
    """Put the states, the traces and the rule's own state after a call in place, and
    count the call."""
    binding.write(states)
    if fresh:
        learner._carried.clear()
    else:
        write_traces(learner, solver, traces)
    write_rule_state(learner, rule_state)
    learner._count(calls)


# ---------------------------------------------------------------- one step


def run_step(learner: Learner, args: tuple, window: bool, modulator: Any) -> Any:
    """The outputs of a step, or of a window of steps, whose derivative is the rule's;
    inside a step function those of the model alone."""
    record = recording_of(learner)
    if record is not None:
        record.calls += 1
        if record.runs_model:
            record.note_modulator(modulator)
            run = learner._run_model
            if window:
                run = partial(brainstate.transform.for_loop, learner._run_model)
            outputs = run(*args)
            if record.keeps_outputs:
                record.outputs = outputs
            return outputs
    learner.check_compiled()
    rule_state = rule_value(learner)
    if modulator is not None:
        check_modulated(learner, modulator)
        rule_state = jnp.asarray(modulator, jnp.result_type(float))
    binding, solver, step = _step_program(learner, args, window, record is not None)
    parameters, states = binding.read()
    traces = read_traces(learner, solver)
    given = (parameters, states, traces, binding.inputs(args), rule_state)

    def write(results: tuple) -> Any:
        values, states, traces = results
        rule_state = next_rule_state(learner, None)
        write_back(learner, binding, solver, states, traces, rule_state, calls=1)
        return binding.outputs(values)

    return step(write, *given)


def _step_program(
    learner: Learner, args: tuple, window: bool, in_chunk: bool
) -> tuple[StepBinding, Solver, Transaction]:
    """The step of the model alone, and its compiled form with the online gradient."""
    rule = learner.rule
    in_window = window and in_chunk and not rule.has_own_signal
    exact = rule.has_exact_windows or rule.deep or in_window
    deep = rule.deep and not in_window
    first = lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x))
    example = jax.tree.map(first, args) if window else args
    binding = bind_model(learner, example)
    # A rule that takes the window step by step holds no more than it does otherwise.
    every = in_chunk and not rule.has_own_signal
    solver = solver_of(learner, binding, rule, False, every)
    run = online_step(solver, rule, window, exact, deep, learner.placement)
    make = lambda: Transaction(run, None, binding.can_fail)
    parts = (solver, window, exact)
    program = program_of(learner, 'step', parts, make, binding.is_reusable)
    return binding, solver, program


# ---------------------------------------------------------------- without a loss


def evolve(learner: Learner, sequences: tuple, step_fn: Callable | None) -> Any:
    """Advance states and traces along a sequence; what the steps give, stacked over
    time."""
    length = length_of(sequences, step_fn)
    binding = bind_step_fn(learner, step_fn or learner, sequences)
    solver = solver_of(learner, binding, learner.rule, loss=False)
    run = evolution_program(solver, options_of(learner))
    make = lambda: Transaction(run, 2, binding.can_fail)
    program = program_of(learner, 'evolve', (solver,), make, binding.is_reusable)
    traces = read_traces(learner, solver, program.donates)
    given = (*binding.read(), traces, binding.inputs(sequences))

    def write(solved: Solved) -> Any:
        after = (solved.states, solved.traces, rule_value(learner))
        write_back(learner, binding, solver, *after, calls=length)
        return solved.aux

    program.compile(*given)
    return binding.stacked(program(write, *given), length)


@contextlib.contextmanager
def failure_explained(learner: Learner, sequences: tuple) -> Iterator[None]:
    """Around a loop that calls a step_fn: its errors as those of other calls."""
    try:
        with inputs_kept(learner.model):
            yield
    except BatchError as error:
        raise error.of_sequences(sequences) from error
    except (TypeError, ValueError, AttributeError) as error:
        if is_explained(error):
            raise
        drop_time = lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.int32)
        slices = jax.tree.map(drop_time, sequences)
        raise explain_failure(learner.model, slices, error, 'a step_fn') from error
