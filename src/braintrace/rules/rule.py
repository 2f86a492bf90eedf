"""A learning rule as an object made of parts.

    trace      what is carried: a trace a parameter, factors, an influence on all
               states, or nothing, with exact reverse mode inside windows
    recursion  how it continues: by D, or by a number
    reach      what credit passes beside a position's own states: nothing, or the memory
               of leaky read-outs
    filter     κ in place of the read-outs' decays; modulators read ε low-passed by κ
    signal     what it is multiplied by: the derivative of the loss, random feedback, or
               a modulator

Every part says what it replaces of the exact gradient, which other parts it refuses and
what it keeps from call to call; the rule puts this together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..compiled_step import CompiledStep, Tap
from ..errors import ArgumentError, three_parts
from ..solver import (
    ExactWindows,
    JacobianRecursion,
    RecursionPart,
    SignalPart,
    SiteFacts,
    Solved,
    Solver,
    Symmetric,
)
from .parts import SyntheticGradient
from .trace_kinds import PerParameter, TracePart, Window


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
    exact_when: str = 'no position feeds another across time'
    cost: tuple[str, str] = ('B·I·H·S', 'T·B·I·H')
    use: str = ''
    reach: str = 'local'
    deep: bool = False
    multi_step: bool = False

    def __post_init__(self) -> None:
        for why, fix in self._contradictions():
            raise ArgumentError(three_parts(self.name, why, fix))

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """Why parts contradict each other, and the fix."""
        to_readouts = self.reach == 'readout'
        if to_readouts and not self.trace.holds_memories:
            yield (
                'the memory of a read-out is kept beside one trace for each parameter '
                'and position',
                "reach='local', or rule 'd_rtrl', 'ostlrecurrent' or 'eprop'",
            )
        if to_readouts and self.is_modulated:
            yield (
                'a modulator replaces what the read-out sends back',
                "reach='local', or rule 'eprop'",
            )
        if self.filter is not None and not (to_readouts or self.is_modulated):
            yield (
                'the filter is the memory of a read-out',
                "reach='readout', or no filter",
            )
        if self.filter is not None and not self.trace.holds_memories:
            yield (
                'the filter acts on one trace for each parameter and position',
                "trace_factorization='per_param', recurrence_scope='diagonal'",
            )
        yield from self.trace.refuses(self.recursion, self.signal)

    def replaces(self, site: SiteFacts) -> Iterator[str]:
        """What a local rule has in place of the exact trace and of the loss's own
        signal for one use of a parameter; nothing where it has both."""
        kappa = self.filter
        filtered = kappa is not None and (self.is_modulated or site.filtered)
        stored = site.stored is not None
        every = (
            self.trace.replaces_at(site, self.recursion),
            self.recursion.replaces(site),
            f'the trace is low-pass filtered (κ = {kappa:g})' if filtered else None,
            self.signal.replaces(site),
            f'the trace is stored in {site.stored}' if stored else None,
        )
        return (reason for reason in every if reason is not None)

    # ------------------------------------------------------------ what it is

    @property
    def is_local(self) -> bool:
        """Whether traces belong to positions; otherwise one influence on all states is
        kept."""
        return self.trace.is_local

    @property
    def can_reach_readouts(self) -> bool:
        """Whether ``reach='readout'`` is possible."""
        return self.trace.holds_memories and not self.is_modulated

    @property
    def has_trace(self) -> bool:
        """Whether anything is carried from call to call."""
        return self.trace.is_carried

    @property
    def cuts(self) -> bool:
        """Whether credit from one position to another is cut at every step."""
        return self.is_local and self.has_trace

    @property
    def is_plain(self) -> bool:
        """Whether local traces follow D and are multiplied by the derivative of the
        loss."""
        exact = self.recursion.is_exact and self.signal.is_exact
        return self.is_local and exact and self.filter is None

    @property
    def has_own_signal(self) -> bool:
        """Whether local traces are read otherwise than by the derivative of the loss,
        so that the credit of a window's start does not enter them."""
        return self.is_local and not self.is_plain

    @property
    def is_modulated(self) -> bool:
        """Whether a modulator takes the place of the derivative of the loss."""
        return self.signal.is_modulator

    @property
    def window(self) -> Window | None:
        """How far exact reverse mode reaches, for a rule without a trace."""
        return self.trace.window

    @property
    def predictor(self) -> SyntheticGradient | None:
        """Predicts the credit at the end of a window."""
        return None if self.window is None else self.window.predictor

    @property
    def decay(self) -> tuple[float, float] | None:
        """The decays (x, f) of factors."""
        return self.trace.decay

    @property
    def has_exact_windows(self) -> bool:
        """Whether reverse mode goes through the whole of every step, not along kept
        paths only."""
        return self.multi_step or not self.has_trace

    @property
    def windows(self) -> ExactWindows | None:
        """How sequences are solved in exact windows, by rules that are."""
        if self.multi_step and self.has_trace:
            return ExactWindows()
        if self.window is None and not self.deep:
            return None
        return ExactWindows(self.deep, self.predictor)

    def window_length(self, steps: int) -> int:
        """Steps of each of these windows in a sequence. With a trace and multi-step,
        every step is a window, and traces carry credit across windows."""
        if self.multi_step and self.has_trace:
            return 1
        return (self.window and self.window.steps) or steps

    @property
    def runs_in_two_passes(self) -> bool:
        """Whether a fresh sequence can be solved in reverse, without any trace."""
        return self.trace.has_two_passes and self.windows is None

    # ------------------------------------------------------------ what it does

    def solver(
        self,
        step: CompiledStep,
        is_traced: Callable[[Tap], bool] = lambda tap: True,
        dtype: Any = None,
        every_component: bool = False,
        has_readouts: bool = True,
    ) -> Solver:
        """Solves sequences of a step by this rule.

        ``is_traced``: whether the parameters of a tap are traced. ``dtype``: of stored
        traces. ``every_component``: windows may send credit to every state.
        ``has_readouts``: False for a model without any leaky read-out; κ then filters
        all that signals read.
        """
        to_readouts = self.reach == 'readout' and (has_readouts or self.filter is None)
        return self.trace.solver(
            step.extend(self.filter, to_readouts),
            self.recursion,
            self.signal,
            is_traced,
            dtype,
            every_component,
        )

    def check_readouts(self, step: CompiledStep) -> None:
        """Raise if the rule's feedback weights do not fit the read-outs of a model."""
        self.signal.check(step)

    def init_state(self, groups: list[tuple[int, tuple[int, ...], Any]] | None) -> Any:
        """What the rule keeps for itself at first: a modulator, a count, or a
        predictor's weights.

        ``groups``: states per position, shape and type of every group, once they are
        known.
        """
        # Parts that keep something are never combined: see their `refuses`.
        state = self.trace.init_state(groups)
        return self.signal.init_state() if state is None else state

    def next_state(self, state: Any, solved: Solved | None) -> Any:
        """The rule's state after a gradient; ``solved``: what a sequence gave, if it
        was one."""
        return self.signal.next_state(self.trace.next_state(state, solved))
