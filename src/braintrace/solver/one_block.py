"""One block of a sequence: derivatives, the rule's signals, credit, gradients, traces.

Letters: t steps of the block, h positions, s components of a position, y results of
taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax

from ..compiled_step import CompiledStep, Components, Values
from .block import (
    Derivatives,
    backward_credit,
    completed,
    derivatives,
    forward,
    length_of,
    pull,
    weight_gradients,
)
from .masking import Block, Mask
from .signals import SignalInputs, Symmetric
from .solved import WeightSums, add
from .traces import RecursionView, Trace, Traces
from .visits import advance


class OneBlock:
    """Solves single blocks of a step. Pure: states and traces go in and come out.

    ``rule_state``, in every call, is what a rule keeps for itself: a modulator, a count
    of updates, the weights of a predictor.
    """

    def __init__(self, step: CompiledStep, traces: Traces, signal: Any = None):
        self.step = step
        self.traces = traces
        self.signal = Symmetric() if signal is None else signal
        self.sums = WeightSums(step)

    @cached_property
    def is_plain(self) -> bool:
        """Whether the traces are those of the local step, read by the true signal."""
        plain = self.traces.is_plain
        return plain and isinstance(self.signal, Symmetric)

    def view(
        self,
        constants: Values,
        block: Block,
        found: Derivatives,
        cotangents: Sequence[jax.Array],
        rule_state: Any,
    ) -> RecursionView:
        """The block's derivatives with the rule's own signals and matrices."""
        groups, steps = self.traces.groups, block.safe
        given = SignalInputs(
            self.step, constants, steps, found, cotangents, groups, rule_state
        )
        learning, feedback = self.signal(given), self.signal.feedback(given)
        slopes = self.traces.link_slopes(constants, block.safe)
        reads = self.traces.memory_reads(constants, block.safe, learning, feedback)
        return self.traces.view(found, learning, slopes, reads)

    def local_gradients(
        self,
        constants: Values,
        block: Block,
        found: Derivatives,
        view: RecursionView,
        credit: list[Components],
    ) -> list[Values]:
        """By group, what its credit adds to the one-step gradients of tap results."""
        if self.is_plain:
            credit = self.traces.folded(view, credit)
        else:
            credit = self.traces.added_credit(found, view, credit)
        local = pull(self.step, constants, block.safe, credit)
        return block.zero_if_dead(self.traces.of_traced(local))

    def solve(
        self,
        constants: Values,
        states: Values,
        traces: Trace,
        total: Values,
        inputs: Values,
        cotangents: Sequence[jax.Array],
        rule_state: Any,
        masked: bool = True,
    ) -> tuple[tuple[Values, Trace, Values], Derivatives]:
        """One block forward: next states, next traces, gradients added to ``total``.

        ``masked``: the cotangents of some steps may be zero.
        """
        step, traces_of = self.step, self.traces
        # Forward in time, then all that derivatives read, for every step at once.
        last, kept = forward(step, constants, states, inputs)
        mask = Mask.of(cotangents) if masked else None
        block = Block.of(completed(step, constants, inputs | kept, last), mask)
        # L, R and D of every step, and the same as the rule's recursion sees them.
        found = derivatives(step, constants, block, cotangents)
        total = add(total, self.sums.of_constants(cotangents))
        view = self.view(constants, block, found, cotangents, rule_state)
        # γ_{t-1} = D_tᵀ (L_t + γ_t) + R_t back to the start, and (∂h_t/∂y_t)ᵀ γ_t.
        local: list[Values] = [Values() for _ in step.groups]
        first = traces_of.empty_credit
        if traces_of.has_block_traces or not self.is_plain:
            length, last_credit = len(cotangents[0]), traces_of.zero_credit()
            every, first = backward_credit(*view[:3], last_credit, length, mask)
            local = self.local_gradients(constants, block, found, view, every)
        # One product for each weight, then the traces: γ_0 · ε_0, and ε_K.
        results = found.results
        if traces_of.factorised:
            results = self._less_factorised(constants, block, found, local)
        y_bars = self._summed_in_visits(block, results, local)
        gradients = weight_gradients(
            step, constants, block, results, local, traces_of.rest, y_bars
        )
        total = add(total, gradients)
        traces, total = advance(
            traces_of, constants, block, view, traces, total, first, y_bars
        )
        return (last, traces, total), found

    def _summed_in_visits(
        self, block: Block, results: Values, local: list[Values]
    ) -> Values:
        """The gradients of results that the visits of traces also sum over steps. There
        are some only in a block without a mask."""
        found = Values()
        if block.mask is None:
            summed = self.traces.summed_in_visits(length_of(block.values))
            for y in results:
                terms = [bars[y] for bars in local if y in bars]
                if terms and y in summed:
                    found[y] = sum(terms, results[y])
        return found

    def _less_factorised(
        self, constants: Values, block: Block, found: Derivatives, local: list[Values]
    ) -> Values:
        """One-step gradients without the part that factorised traces give.

        ``found.results[y]`` is the whole one-step gradient of y. The traces give the
        part of it that passes through their group. Where y acts on nothing else, y is
        left out of the result; otherwise that part is subtracted in ``local``, which is
        changed in place.
        """
        alone = {y for y, box in self.traces.rest.items() if box is None}
        results = found.results.pick(y for y in found.results if y not in alone)
        now = block.zero_if_silent(
            pull(self.step, constants, block.safe, found.signals)
        )
        for g, y in self.traces.factorised_results:
            local[g].pop(y, None)
            if y in results:
                local[g][y] = -now[g][y]
        return results
