"""What solves a step by a rule, and programs over sequences: how the rule is run along
one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

from ..compiled_step import Tap, Values
from ..program import Path
from ..rules import Rule
from ..solver import SequencePlan, Solved, Solver
from ..solver.block import length_of
from ..solver.masking import finite
from .binding import StepBinding, bind_model
from .parameter_gradients import without_gradient
from .placement import Placement, trace_axes
from .programs import program_of, stored
from .transaction import Transaction

if TYPE_CHECKING:
    from .learner import Learner

TraceChoice = str | Callable[[Path], bool]
"""Which parameters are traced: 'auto', 'marked', 'credited', or a predicate on their
paths."""


@dataclass(frozen=True)
class SequenceOptions:
    """How sequences are run; never visible in a result.

    ``block``: steps solved together. ``passes``: 1 carries traces, 2 keeps the states
    of a fresh sequence. ``most_bytes``: two passes are chosen up to so much memory.
    ``placement``: how arrays are split over devices.
    """

    block: int | None
    passes: int | None
    most_bytes: int
    placement: Placement | None = None

    def pinned(self, solver: Solver, solved: Solved) -> Solved:
        """States and traces split over devices as they were before."""
        if self.placement is None:
            return solved
        return solved._replace(
            losses=self.placement.everywhere(solved.losses),
            states=self.placement.pin(solved.states),
            traces=self.placement.pin(
                solved.traces, trace_axes(solver) if solved.traces else None
            ),
        )

    def block_length(self, solver: Solver, steps: int, carried: bool) -> int:
        """Steps to solve together."""
        if self.block:
            return min(self.block, steps)
        devices = 1 if self.placement is None else self.placement.device_count
        return solver.block_length(steps, carried, devices)

    def runs_twice(self, solver: Solver, steps: int) -> bool:
        """Whether to keep states and run in two passes, without traces."""
        if self.passes is not None:
            return self.passes == 2
        return steps * solver.kept_bytes <= self.most_bytes


def gradient_program(
    solver: Solver,
    rule: Rule,
    fresh: bool,
    options: SequenceOptions,
) -> Callable[..., Solved]:
    """Gradients of a sequence: a function of parameters, states, traces, inputs,
    weights of the losses, the weight of a loss that is not masked, the rule's state,
    and whether any weight may be 0."""

    def run(
        parameters: Values,
        states: Values,
        traces: list,
        inputs: Values,
        weights: jax.Array,
        unit: Any,
        rule_state: Any,
        masked: bool = True,
    ) -> Solved:
        length = len(weights)
        if masked:
            inputs = finite(inputs, weights == 0)
        may_run_twice = fresh and rule.runs_in_two_passes
        two_passes = may_run_twice and options.runs_twice(solver, length)
        if rule.windows is None:
            block = options.block_length(solver, length, carried=not two_passes)
        else:
            block = rule.window_length(length)
        # A deep rule takes the call as one window, so a fresh one needs no traces.
        if fresh and rule.has_trace and not rule.deep:
            traces = solver.init_traces()
        plan = SequencePlan(block, fresh, two_passes, rule.windows)
        return solver.solve(
            parameters, states, traces, inputs, weights, plan, unit, rule_state, masked
        )

    def solve(*given: Any, masked: bool = True) -> Solved:
        return options.pinned(solver, run(*given, masked=masked))

    return solve


def evolution_program(
    solver: Solver, options: SequenceOptions
) -> Callable[..., Solved]:
    """A sequence without a loss: a function of parameters, states, traces and
    inputs."""

    def evolve(
        parameters: Values, states: Values, traces: list, inputs: Values
    ) -> Solved:
        block = options.block_length(solver, length_of(inputs), carried=True)
        solved = solver.evolve(parameters, states, traces, inputs, block)
        return options.pinned(solver, solved)

    return evolve


# ---------------------------------------------------------------- of a learner


def solver_of(
    learner: Learner,
    binding: StepBinding,
    rule: Rule,
    loss: bool,
    in_chunk: bool = False,
    discarded: bool = False,
) -> Solver:
    """What solves sequences of a step, with the options of the learner.

    ``discarded``: the traces end with the sequence. Then those of parameters that the
    loss never depends on are left out: no other loss will read them.
    """
    trace = (
        partial(_is_credited, learner) if learner.trace == 'credited' else learner.trace
    )
    # A modulator takes the place of the loss.
    skips = discarded and loss and rule.has_trace and not rule.is_modulated
    idle = binding.without_effect_on_loss if skips else frozenset()

    def is_traced(tap: Tap) -> bool:
        if tap.parameters and idle.issuperset(p.invar for p in tap.parameters):
            return False
        if isinstance(trace, str):
            return trace == 'auto' or tap.marked
        return any(trace(p.path) for p in tap.parameters)

    def make() -> Solver:
        every = rule.has_exact_windows or rule.deep or in_chunk
        given = (binding.step(loss), is_traced, learner.trace_dtype, every)
        # A rule without a filter is the same in both cases.
        has_readouts = (
            rule.filter is None or bind_model(learner, learner._example).has_readouts
        )
        return rule.solver(*given, has_readouts)

    key = ('solver', binding, rule, loss, in_chunk, bool(idle))
    return stored(learner, key, make, binding.is_reusable)


def _is_credited(learner: Learner, path: Path) -> bool:
    """Whether the rule gives a parameter a gradient by the model's own outputs."""

    def make() -> frozenset[Path]:
        binding = bind_model(learner, learner._example)
        without = without_gradient(learner.rule, binding)
        arrays = binding.info.program.parameters
        credited = {p.path for p in arrays if p.name not in without}
        return frozenset(p.path for p in arrays) - credited

    return path not in stored(learner, ('credited',), make, True)


def options_of(learner: Learner) -> SequenceOptions:
    """How the learner runs sequences."""
    return SequenceOptions(
        learner.block, learner.passes, learner.max_trace_bytes, learner.placement
    )


def gradient_program_of(
    learner: Learner, binding: StepBinding, rule: Rule, fresh: bool
) -> tuple[Solver, Transaction]:
    """The solver of a step by a rule, and its compiled gradient of a sequence."""
    solver = solver_of(learner, binding, rule, loss=True, discarded=fresh)
    options = options_of(learner)

    # What a learner with check_finite computes may be refused, and then the old traces
    # must still be there.
    donated = None if fresh or learner.check_finite else 2

    def make() -> Transaction:
        run = gradient_program(solver, rule, fresh, options)
        return Transaction(run, donated, binding.can_fail, static_argnames='masked')

    parts = (solver, fresh, donated)
    return solver, program_of(learner, 'gradient', parts, make, binding.is_reusable)
