"""A learning rule as an object made of parts.

    trace      what is carried: a trace a parameter, factors, an influence on all
               states, or nothing
    recursion  how it continues: by D, or by a number
    reach      what credit passes beside a position's own states: nothing, or the memory
               of leaky read-outs
    filter     κ in place of the read-outs' decays; modulators read ε low-passed by κ
    signal     what it is multiplied by: the derivative of the loss, random feedback, or
               a modulator
    window     how far exact reverse mode reaches: not at all, k steps, a whole sequence

Parts that cannot be combined are refused where they meet, in
:meth:`Rule.__post_init__`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ..compiled_step import CompiledStep, Tap
from ..errors import ArgumentError, three_parts
from ..solver import (
    BlockSolver,
    Factorised,
    InfluenceSolver,
    JacobianRecursion,
    Modulated,
    PerParameter,
    RandomFeedback,
    RankOneInfluence,
    ScalarLeak,
    Solved,
    SparseInfluence,
    Symmetric,
    Traces,
    WholeInfluence,
)
from .parts import SyntheticGradient

# ------------------------------------------------------------- traces beyond a position


@dataclass(frozen=True)
class NoTrace:
    """Nothing is carried from window to window."""


@dataclass(frozen=True)
class Coupled:
    """The influence of every parameter on every state."""

    def influence(self, step: CompiledStep) -> WholeInfluence:
        """How it is held for a step."""
        return WholeInfluence(step)


@dataclass(frozen=True)
class CoupledWithin:
    """The influence of every parameter on the states that it reaches within n steps."""

    n: int

    def influence(self, step: CompiledStep) -> SparseInfluence:
        """How it is held for a step."""
        return SparseInfluence(step, self.n)


@dataclass(frozen=True)
class RandomProjection:
    """One random direction in place of the influence on all states."""

    seed: int = 0

    def influence(self, step: CompiledStep) -> RankOneInfluence:
        """How it is held for a step."""
        return RankOneInfluence(step, self.seed)


TracePart = (
    PerParameter | Factorised | NoTrace | Coupled | CoupledWithin | RandomProjection
)
RecursionPart = JacobianRecursion | ScalarLeak
SignalPart = Symmetric | RandomFeedback | Modulated


@dataclass(frozen=True)
class Window:
    """Exact reverse mode inside windows of ``steps``; None for one over the whole
    sequence.

    ``predictor``: of the credit that the end of a window gets from what follows it.
    """

    steps: int | None = None
    predictor: SyntheticGradient | None = None


# ---------------------------------------------------------------- the rule


@dataclass(frozen=True)
class Rule:
    """A learning rule: its parts, and facts about it.

    ``exact_when``: where its gradient is BPTT's. ``cost``: memory of what it carries
    and time, in B batch, I inputs, H units, S states of a unit, T steps. ``use``: what
    it is used for. ``reach``: 'local', or 'readout' for traces that hold the memory of
    leaky read-outs. ``deep``: credit passes from group to group inside a call.
    ``multi_step``: every call is an exact window.
    """

    name: str
    trace: TracePart = PerParameter()  # noqa: RUF009 - immutable
    recursion: RecursionPart = JacobianRecursion()  # noqa: RUF009 - immutable
    filter: float | None = None
    signal: SignalPart = Symmetric()  # noqa: RUF009 - immutable
    window: Window | None = None
    exact_when: str = 'no position feeds another across time'
    cost: tuple[str, str] = ('B·I·H·S', 'T·B·I·H')
    use: str = ''
    reach: str = 'local'
    deep: bool = False
    multi_step: bool = False

    def __post_init__(self) -> None:
        for is_wrong, why, fix in self._contradictions():
            if is_wrong:
                raise ArgumentError(three_parts(self.name, why, fix))

    def _contradictions(self) -> list[tuple[bool, str, str]]:
        """(whether parts contradict each other, why, the fix)."""
        windows = isinstance(self.trace, NoTrace)
        own_recursion = self.recursion != JacobianRecursion()
        own_signal = not isinstance(self.signal, Symmetric)
        per_parameter = "trace_factorization='per_param', recurrence_scope='diagonal'"
        to_readouts = self.reach == 'readout'
        return [
            (
                to_readouts and not isinstance(self.trace, PerParameter),
                'the memory of a read-out is kept beside one trace for each '
                'parameter and '
                'position',
                "reach='local', or rule 'd_rtrl', 'ostlrecurrent' or 'eprop'",
            ),
            (
                to_readouts and self.is_modulated,
                'a modulator replaces what the read-out sends back',
                "reach='local', or rule 'eprop'",
            ),
            (
                self.filter is not None and not (to_readouts or self.is_modulated),
                'the filter is the memory of a read-out',
                "reach='readout', or no filter",
            ),
            (
                self.filter is not None and not isinstance(self.trace, PerParameter),
                'the filter acts on one trace for each parameter and position',
                per_parameter,
            ),
            (
                not self.is_local and own_recursion,
                'states that feed each other do so by their Jacobian',
                "temporal_recursion='jacobian'",
            ),
            (
                not self.is_local and own_signal,
                'an influence on all states is read by the derivative of the loss',
                "learning_signal='symmetric'",
            ),
            (
                windows != (self.window is not None),
                'exact windows need no trace, and without a trace there are only '
                'windows',
                "trace_factorization='none' with update_schedule='window' or "
                "'sequence_end'",
            ),
            (
                windows and own_recursion,
                'without a trace nothing continues from step to step',
                "temporal_recursion='jacobian'",
            ),
            (
                windows and own_signal,
                'that signal multiplies a trace',
                "trace_factorization='per_param'",
            ),
        ]

    # ------------------------------------------------------------ what it is

    @property
    def is_local(self) -> bool:
        """Whether traces belong to positions; otherwise one influence on all states is
        kept."""
        return not isinstance(self.trace, Coupled | CoupledWithin | RandomProjection)

    @property
    def can_reach_readouts(self) -> bool:
        """Whether ``reach='readout'`` is possible."""
        return isinstance(self.trace, PerParameter) and not self.is_modulated

    @property
    def has_trace(self) -> bool:
        """Whether anything is carried from call to call."""
        return not isinstance(self.trace, NoTrace)

    @property
    def cuts(self) -> bool:
        """Whether credit from one position to another is cut at every step."""
        return self.is_local and self.has_trace

    @property
    def is_plain(self) -> bool:
        """Whether local traces follow D and are multiplied by the derivative of the
        loss."""
        exact = self.recursion == JacobianRecursion() and self.filter is None
        return self.is_local and exact and isinstance(self.signal, Symmetric)

    @property
    def has_own_signal(self) -> bool:
        """Whether local traces are read otherwise than by the derivative of the loss,
        so that the credit of a window's start does not enter them."""
        return self.is_local and not self.is_plain

    @property
    def is_modulated(self) -> bool:
        """Whether a modulator takes the place of the derivative of the loss."""
        return isinstance(self.signal, Modulated)

    @property
    def predictor(self) -> SyntheticGradient | None:
        """Predicts the credit at the end of a window."""
        return None if self.window is None else self.window.predictor

    @property
    def decay(self) -> tuple[float, float] | None:
        """The decays (x, f) of factors."""
        return self.trace.decay if isinstance(self.trace, Factorised) else None

    @property
    def has_exact_windows(self) -> bool:
        """Whether reverse mode goes through the whole of every step, not along kept
        paths only."""
        return self.multi_step or not self.has_trace

    @property
    def runs_in_two_passes(self) -> bool:
        """Whether a fresh sequence can be solved in reverse, without any trace."""
        return isinstance(self.trace, PerParameter) and self.window is None

    # ------------------------------------------------------------ what it does

    def solver(
        self,
        step: CompiledStep,
        is_traced: Callable[[Tap], bool] = lambda tap: True,
        dtype: Any = None,
        every_component: bool = False,
        has_readouts: bool = True,
    ) -> BlockSolver | InfluenceSolver:
        """Solves sequences of a step by this rule.

        ``is_traced``: whether the parameters of a tap are traced. ``dtype``: of stored
        traces. ``every_component``: windows may send credit to every state.
        ``has_readouts``: False for a model without any leaky read-out; κ then filters
        all that signals read.
        """
        trace = self.trace
        if isinstance(trace, Coupled | CoupledWithin | RandomProjection):
            return InfluenceSolver(step, trace.influence(step))
        storage = trace if isinstance(trace, Factorised) else PerParameter()
        to_readouts = self.reach == 'readout' and (has_readouts or self.filter is None)
        step = step.extend(self.filter, to_readouts)
        given = (self.recursion, is_traced, dtype, every_component)
        traces = Traces(step, storage, *given)
        return BlockSolver(step, traces, self.signal)

    def check_readouts(self, step: CompiledStep) -> None:
        """Raise if the rule's feedback weights do not fit the read-outs of a model."""
        if isinstance(self.signal, RandomFeedback):
            self.signal.check(step)

    def init_state(self, groups: list[tuple[int, tuple[int, ...], Any]] | None) -> Any:
        """What the rule keeps for itself at first: a modulator, a count, or a
        predictor's weights.

        ``groups``: states per position, shape and type of every group, once they are
        known.
        """
        if self.predictor is not None:
            return None if groups is None else self.predictor.init(groups)
        if self.is_modulated:
            return jnp.ones(())
        return jnp.zeros((), jnp.int32) if self._counts else None

    @property
    def _counts(self) -> bool:
        """Whether the number of gradients so far matters: to random signs, or aligned
        feedback."""
        if isinstance(self.trace, RandomProjection):
            return True
        return isinstance(self.signal, RandomFeedback) and self.signal.align is not None

    def next_state(self, state: Any, solved: Solved | None) -> Any:
        """The rule's state after a gradient; ``solved``: what a sequence gave, if it
        was one."""
        if self.predictor is not None:
            if solved is None:
                return state
            return [w + c for w, c in zip(state, solved.predictor_update, strict=True)]
        return state + 1 if self._counts else state
