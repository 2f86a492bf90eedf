"""A sequence, block by block: one block with all of its parts in order; one pass over
blocks with traces, or two passes without any.

one pass    blocks forward in time, traces carried: memory does not grow with T
two passes  forward keeping states, then blocks in reverse carrying credit; no trace

Letters: T steps of the sequence, t of a block, h positions, s components of a position,
y results of taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..arrays import bytes_of
from ..compiled_step import CompiledStep, Components, Jacobian, Values
from .block import (
    Block,
    Derivatives,
    backward_credit,
    completed,
    derivatives,
    forward,
    length_of,
    losses_of_steps,
    over_blocks,
    pull,
    weight_gradients,
    with_new_states,
)
from .masking import Mask
from .signals import SignalInputs, Symmetric
from .solved import Solved, WeightSums, add
from .traces import RecursionView, Trace, Traces
from .visits import Driven, advance, advance_silently, drive, take_in, unit_products
from .window import run_window
from .window_solver import WindowSolver


class _SolvedSpan(NamedTuple):
    """What a few blocks give, forward and in reverse: results of every step, the states
    after them, and credit, products P_0 and gradients before them."""

    losses: jax.Array
    aux: Values
    driven: list[Driven]
    states: Values
    credit: list[Components]
    products: list[Jacobian]
    total: Values
    dead: jax.Array


class BlockSolver:
    """Solves sequences of one step by blocks. Pure: states and traces go in and come
    out.

    ``rule_state``, in every call, is what a rule keeps for itself: a modulator, a count
    of updates, the weights of a predictor.
    """

    def __init__(self, step: CompiledStep, traces: Traces, signal: Any = None):
        self.step = step
        self.traces = traces
        self.signal = Symmetric() if signal is None else signal
        self.sums = WeightSums(step)
        self.kept_bytes = step.kept_bytes

    @cached_property
    def windows(self) -> WindowSolver:
        """Solves windows of the step by reverse mode."""
        return WindowSolver(self.step, self.traces)

    def init_traces(self) -> Trace:
        """Traces at the start of a sequence."""
        return self.traces.init()

    @property
    def owner(self) -> tuple[int, ...]:
        """For every trace the one that holds its state part, where factors share it."""
        return self.traces.owner

    @property
    def trace_names(self) -> list[tuple]:
        """What each trace is of: parameters, operation, hidden states."""
        return [
            (
                tuple(p.name for p in tap.by_weight.get(site.weight, ())),
                tap.operation,
                self.step.groups[site.group].name,
            )
            for site, tap, _ in self.traces.sites
        ]

    def block_length(self, steps: int, carried: bool, devices: int = 1) -> int:
        """Steps to solve together: what a block keeps should stay in the processor's
        cache.

        A block that visits its traces reads and writes the gradients and all of the
        traces, so it may keep a quarter of what the former and half of what the latter
        take. Each device has a cache of its own. A length that divides the steps needs
        no second program for the rest.
        """
        least, room = 8, 2**20
        if carried and not self._has_spans:
            traces, gradients = map(bytes_of, (self.trace_shapes, self.sums.shapes))
            least, room = 4, min(max(gradients // 4 + traces // 2, 2**17), 2**23)
        longest = min(max(devices * room // self.kept_bytes, least), 50, steps)
        lengths = range(longest, longest // 2, -1)
        return next((k for k in lengths if steps % k == 0), longest)

    @property
    def _has_spans(self) -> bool:
        """Whether several blocks may pass before the traces are visited."""
        return self.traces.has_block_traces and not self.traces.factorised

    @cached_property
    def trace_shapes(self) -> Trace:
        """Shapes and types of the traces."""
        return jax.eval_shape(self.init_traces)

    # ------------------------------------------------------------ one block

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
        # Parameters without a trace get their one-step gradient only.
        traced = self.traces.traced_results
        of_traced = [
            Values((y, bar) for y, bar in bars.items() if (g, y) in traced)
            for g, bars in enumerate(local)
        ]
        return block.zero_if_dead(of_traced)

    def solve_block(
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
            zero = [recursion.zero_credit() for recursion in traces_of.recursions]
            length = len(cotangents[0])
            every, first = backward_credit(*view[:3], zero, length, mask)
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

    # ------------------------------------------------------------ whole sequences

    def two_pass(
        self,
        parameters: Values,
        states: Values,
        inputs: Values,
        weights: jax.Array,
        block: int,
        rule_state: Any = None,
        masked: bool = True,
    ) -> Solved:
        """Forward keeping old states, then blocks in reverse carrying credit; no trace
        at all.

        ``masked``: some of the weights may be zero.
        """
        constants = self.step.constants(parameters, states)
        old = states.pick(self.step.written)
        given = (constants, old, self.sums.zero(), inputs, weights, block)
        span = self._forward_and_back(*given, rule_state, masked)
        gradients = self.sums.of_parameters(parameters, states, span.total)
        return Solved(gradients, span.losses, span.aux, states | span.states, [])

    def _forward_and_back(
        self,
        constants: Values,
        states: Values,
        total: Values,
        inputs: Values,
        weights: jax.Array,
        block: int,
        rule_state: Any,
        masked: bool,
        drives: bool = False,
    ) -> _SolvedSpan:
        """Blocks forward keeping old states, then in reverse carrying credit.

        ``drives``: also what the steps add to the traces, for one visit after them.
        """
        step, traces_of = self.step, self.traces

        def ahead(states: Values, number: Any, inputs: Values) -> tuple[Values, Values]:
            return forward(step, constants, states, inputs)

        last, kept = over_blocks(ahead, states, inputs, block)
        # The hidden states at the end of each block are those at the start of the next.
        ends = Values()
        for key, _ in step.hidden:
            ends[key] = jnp.concatenate([kept[key][block::block], last[key][None]])

        def back(carry: tuple, number: Any, at: tuple) -> tuple[tuple, tuple]:
            credit, products, total, dead = carry
            steps, weights = at
            end = jax.tree.map(lambda x: x[number], ends)
            # Steps after this block may carry credit back into silent steps of it.
            mask = Mask.of([weights], dead) if masked else None
            now = Block.of(completed(step, constants, steps, end), mask)
            found = derivatives(step, constants, now, [weights])
            view = self.view(constants, now, found, [weights], rule_state)
            # γ continues from the block after this one, which was solved before it.
            every, first = backward_credit(*view[:3], credit, len(weights), mask)
            local = self.local_gradients(constants, now, found, view, every)
            gradients = weight_gradients(step, constants, now, found.results, local)
            total = add(add(total, gradients), self.sums.of_constants([weights]))
            dead = dead if mask is None else mask.dead[0]
            driven: list[Driven] = []
            if drives:
                # P continues in the same way, because the traces are advanced once,
                # after the span.
                driven, products = drive(traces_of, constants, now, view, products)
            return (first, products, total, dead), (found.losses, found.aux, driven)

        units = unit_products(traces_of) if drives else []
        zero = [recursion.zero_credit() for recursion in traces_of.recursions]
        start = (zero, units, total, jnp.asarray(True))
        given = (inputs | kept, weights)
        (credit, products, total, dead), (losses, aux, driven) = over_blocks(
            back, start, given, block, reverse=True
        )
        losses = losses_of_steps(step, constants, losses)
        return _SolvedSpan(losses, aux, driven, last, credit, products, total, dead)

    def one_pass(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
        weights: jax.Array,
        block: int,
        rule_state: Any = None,
        masked: bool = True,
    ) -> Solved:
        """Blocks forward, traces carried; ``masked``: some of the weights may be zero.

        Traces are visited after a span of several blocks, whose steps are kept as long
        as they need no more memory than the traces.
        """
        constants = self.step.constants(parameters, states)

        def by_block(carry: tuple, number: Any, at: tuple) -> tuple[tuple, tuple]:
            states, traces, total = carry
            inputs, weights = at
            carry, found = self.solve_block(
                constants, states, traces, total, inputs, [weights], rule_state, masked
            )
            return carry, (found.losses, found.aux)

        def by_span(carry: tuple, number: Any, at: tuple) -> tuple[tuple, tuple]:
            states, traces, total = carry
            given = (constants, states, total, *at, block, rule_state, masked)
            span = self._forward_and_back(*given, drives=True)
            traces, total = take_in(
                self.traces,
                constants,
                traces,
                span.driven,
                span.products,
                span.total,
                span.credit,
                span.dead if masked else None,
            )
            return (span.states, traces, total), (span.losses, span.aux)

        start = (states.pick(self.step.written), traces, self.sums.zero())
        length = self.span_length(len(weights), block)
        body = by_block if length == block else by_span
        carry, (losses, aux) = over_blocks(body, start, (inputs, weights), length)
        if length == block:
            losses = losses_of_steps(self.step, constants, losses)
        last, traces, total = carry
        gradients = self.sums.of_parameters(parameters, states, total)
        return Solved(gradients, losses, aux, states | last, traces)

    def span_length(self, steps: int, block: int) -> int:
        """Steps between two visits of the traces, a whole number of blocks."""
        if not self._has_spans:
            return block
        kept = self.kept_bytes + self.traces.driven_bytes
        most = max(bytes_of(self.trace_shapes) // kept // block, 1)
        count = -(-steps // block)
        visits = -(-count // most)
        return block * -(-count // visits)

    def evolve(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
        block: int,
    ) -> Solved:
        """Advance states and traces without a loss; auxiliary values of every step come
        along."""
        step = self.step
        constants = step.constants(parameters, states)

        def one(carry: tuple, number: Any, inputs: Values) -> tuple[tuple, Values]:
            states, traces = carry
            last, steps = forward(step, constants, states, inputs)
            steps = with_new_states(step, inputs | steps, last)
            if traces:
                done = jax.vmap(step.complete, (None, 0))(constants, steps)
                traces, _ = advance_silently(
                    self.traces,
                    constants,
                    done,
                    traces,
                    self.sums.zero(),
                    self.traces.empty_credit,
                )
            aux = jax.vmap(
                lambda values: step.outputs(constants, values).pick(step.aux)
            )(steps)
            return (last, traces), aux

        start = (states.pick(step.written), traces)
        (last, traces), aux = over_blocks(one, start, inputs, block)
        return Solved(Values(), jnp.zeros(0), aux, states | last, traces)

    # ------------------------------------------------------------ a few steps

    def run(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
    ) -> tuple[Values, Values, Trace]:
        """A few steps: targets and auxiliary values of each, next states, next
        traces."""
        new, targets, aux = run_window(self.step, parameters, states, inputs)
        values = Values(zip(self.step.targets, targets, strict=True)) | aux
        if traces:
            constants = self.step.constants(parameters, states)
            traces, _ = self.windows.across(
                constants,
                states,
                inputs,
                traces,
                self.sums.zero(),
                self.traces.empty_credit,
            )
        return values, new, traces

    def block_gradient(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
        cotangents: Sequence[jax.Array],
        rule_state: Any = None,
    ) -> Values:
        """Online gradient of a few steps for cotangents (t, ...) of their targets."""
        constants = self.step.constants(parameters, states)
        start = (states.pick(self.step.written), traces, self.sums.zero())
        carry, _ = self.solve_block(constants, *start, inputs, cotangents, rule_state)
        _, _, total = carry
        return self.sums.of_parameters(parameters, states, total)
