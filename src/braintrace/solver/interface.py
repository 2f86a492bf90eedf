"""What every solver offers: one call, whose gradient reverse mode asks for, or a whole
sequence with its losses.

Letters: t steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax

from ..compiled_step import CompiledStep, Components, Key, Values
from .solved import Solved
from .traces import Trace, Traces


class Predictor(Protocol):
    """Predicts the credit that states get from what follows, by group and component."""

    def __call__(
        self, weights: Sequence[jax.Array], states: list[Components]
    ) -> list[Components]:
        """The predicted credit."""
        ...

    def error_and_change(
        self,
        weights: Sequence[jax.Array],
        states: list[Components],
        target: list[Components],
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The distance of the prediction from a target, and the change of weights it
        calls for."""
        ...


class ExactWindows(NamedTuple):
    """Reverse mode through the whole of every step inside a window.

    ``deep``: paths from one position of a group to another across time are cut.
    ``predictor``: of the credit that the end of a window gets from what follows it.
    """

    deep: bool = False
    predictor: Predictor | None = None


class SequencePlan(NamedTuple):
    """How a sequence is solved.

    ``block``: steps solved together, those of a window if there are ``windows``.
    ``fresh``: nothing came before the sequence and nothing follows it.
    ``two_passes``: states are kept and no trace is carried.
    """

    block: int
    fresh: bool = False
    two_passes: bool = False
    windows: ExactWindows | None = None


class Solver(Protocol):
    """Solves a step by a rule. Pure: states and traces go in and come out.

    ``traces``: those of positions, None for an influence. ``owner``: for every trace
    the one that holds what it shares. ``trace_names``: what each trace is of.
    ``kept_bytes``: those that a block keeps of one step. ``rule_state``, in every
    method, is what a rule keeps for itself: a modulator, a count of gradients, the
    weights of a predictor.
    """

    @property
    def step(self) -> CompiledStep: ...

    @property
    def traces(self) -> Traces | None: ...

    @property
    def owner(self) -> tuple[int, ...]: ...

    @property
    def trace_names(self) -> list[tuple]: ...

    @property
    def trace_shapes(self) -> Trace: ...

    @property
    def kept_bytes(self) -> int: ...

    def is_complete(self, key: Key) -> bool:
        """Whether a parameter never reaches a state that is left out."""
        ...

    def init_traces(self) -> Trace:
        """Traces at the start of a sequence."""
        ...

    def block_length(self, steps: int, carried: bool, devices: int = 1) -> int:
        """Steps to solve together. ``carried``: traces are, too."""
        ...

    def run(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
        rule_state: Any,
    ) -> tuple[Values, Values, Trace]:
        """A call: targets and auxiliary values of each step, next states, next
        traces."""
        ...

    def gradient(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
        cotangents: Sequence[jax.Array],
        windows: ExactWindows | None,
        rule_state: Any,
    ) -> Values:
        """Of a call, for cotangents (t, ...) of its targets. ``windows``: reverse mode
        goes through the call as one window."""
        ...

    def evolve(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
        block: int,
    ) -> Solved:
        """A sequence without a loss."""
        ...

    def solve(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
        weights: jax.Array,
        plan: SequencePlan,
        unit: Any = 1.0,
        rule_state: Any = None,
        masked: bool = True,
    ) -> Solved:
        """A sequence with weights (t,) of its losses. ``unit``: the weight of a loss
        that is not masked (1/T for a mean). ``masked``: some weights may be zero."""
        ...
