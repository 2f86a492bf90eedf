"""A sequence, block by block: one block with all of its parts in order; one pass over
blocks with traces, or two passes without any.

one pass    blocks forward in time, traces carried: memory does not grow with T
two passes  forward keeping states, then blocks in reverse carrying credit; no trace

Letters: T steps of the sequence, t of a block, h positions, s components of a position,
y results of taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..arrays import bytes_of
from ..compiled_step import Box, CompiledStep, Components, Jacobian, Key, Values
from ..derivatives import Derivatives
from .block import (
    Block,
    forward,
    length_of,
    losses_of_steps,
    over_blocks,
    weight_gradients,
    with_new_states,
)
from .block_credit import as_read, derivatives_of, less_factorised, local_gradients
from .interface import ExactWindows, SequencePlan
from .masking import Mask, without_nan
from .recursion import backward_credit, no_credit
from .signals import SignalInputs, SignalPart, Symmetric
from .solved import Solved, WeightSums, add
from .traces import Trace, Traces
from .visits import (
    Driven,
    advance,
    advance_silently,
    drive,
    summed_in_visits,
    visit,
)
from .window import run_window
from .window_solver import WindowSolver


class _SolvedBlock(NamedTuple):
    """What the steps of a block give once the credit of what follows it is known.

    ``credit``: γ_0. ``total``: gradients by weight, those in ``y_bars`` left out, which
    are summed with the visit of their trace.
    """

    found: Derivatives
    used: Derivatives
    credit: list[Components]
    total: Values
    y_bars: Values


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
    dead: jax.Array | None


@dataclass(frozen=True, eq=False)
class BlockSolver:
    """Solves sequences of one step by blocks. Pure: states and traces go in and come
    out.

    ``rule_state``, in every call, is what a rule keeps for itself: a modulator, a count
    of updates, the weights of a predictor.
    """

    step: CompiledStep
    traces: Traces
    signal: SignalPart = Symmetric()  # noqa: RUF009 - immutable

    @cached_property
    def sums(self) -> WeightSums:
        """Sums of gradients by weight."""
        return WeightSums(self.step)

    @cached_property
    def windows(self) -> WindowSolver:
        """Solves windows of the step by reverse mode."""
        return WindowSolver(self.step, self.traces, self.sums)

    @property
    def kept_bytes(self) -> int:
        """Bytes that a block keeps of one step."""
        return self.step.kept_bytes

    def is_complete(self, key: Key) -> bool:
        """Whether a parameter never reaches a state that is left out: traces hold those
        of a position only."""
        return False

    def init_traces(self) -> Trace:
        """Traces at the start of a sequence."""
        return self.traces.init()

    @property
    def owner(self) -> tuple[int, ...]:
        """For every trace the one that holds its state part, where factors share it."""
        sites, factorised = enumerate(self.traces.sites), self.traces.factorised
        return tuple(s.shares if n in factorised else n for n, s in sites)

    @property
    def trace_names(self) -> list[tuple]:
        """What each trace is of: parameters, operation, hidden states."""
        return [
            (
                tuple(p.name for p in tap.by_weight.get(site.weight, ())),
                tap.operation,
                self.step.groups[site.group].name,
            )
            for site, tap, *_ in self.traces.sites
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
        """Whether the true signal reads the traces of the states themselves."""
        filtered = any(group.filtered for group in self.step.groups)
        return not filtered and self.signal.is_exact

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
        # Forward in time, then all that derivatives read, for every step at once.
        last, kept = forward(self.step, constants, states, inputs)
        mask = Mask.of(cotangents) if masked else None
        block = Block.of(self.step, constants, inputs | kept, last, mask)
        # What the losses of the block give, then the traces: γ_0 · ε_0, and ε_K.
        solved = self._in_reverse(block, cotangents, rule_state, None, total)
        given = (traces, solved.total, solved.credit, solved.y_bars)
        traces, total = advance(self.traces, block, solved.used, *given)
        return (last, traces, total), solved.found

    def _in_reverse(
        self,
        block: Block,
        cotangents: Sequence[jax.Array],
        rule_state: Any,
        credit: list[Components] | None,
        total: Values,
    ) -> _SolvedBlock:
        """A block whose steps are known: derivatives, credit, gradients of weights.

        ``credit``: γ at its end; None where there is none because the traces are
        visited after this block.
        """
        traces_of = self.traces
        # L, R and D of every step, and the same with the signals that the rule uses.
        found = derivatives_of(traces_of.recursions, block, cotangents)
        given = SignalInputs(block, found, cotangents, traces_of, rule_state)
        used = as_read(traces_of.recursions, found, *self.signal(given))
        # γ_{t-1} = D_tᵀ (L_t + γ_t) + R_t back to the start, and (∂h_t/∂y_t)ᵀ γ_t.
        first: list[Components] = credit or []
        local: list[Values] = [Values() for _ in self.step.groups]
        # Factors read the signal of each step, not γ: a plain rule with nothing but
        # factors needs no credit.
        if traces_of.has_block_traces or not self.is_plain:
            last = no_credit(traces_of.recursions) if credit is None else credit
            every, first = backward_credit(used, block, last)
            local = local_gradients(traces_of, block, found, used, every, self.is_plain)
        # One product for each weight.
        results, y_bars = found.results, Values()
        boxes: Mapping[Key, Box | None] = {}
        if traces_of.factorised:
            results, boxes = less_factorised(traces_of, block, found, local)
        if credit is None:
            y_bars = summed_in_visits(traces_of, block, results, local)
        gradients = weight_gradients(block, results, local, boxes, y_bars)
        total = add(add(total, self.sums.of_constants(cotangents)), gradients)
        return _SolvedBlock(found, used, first, total, y_bars)

    # ------------------------------------------------------------ whole sequences

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
        """A sequence with weights (t,) of its losses, in windows or in blocks; see
        :class:`Solver`."""
        if plan.windows is not None:
            return self.windows.solve(
                parameters,
                states,
                traces,
                inputs,
                weights,
                plan.block,
                plan.windows.deep,
                plan.windows.predictor,
                plan.fresh,
                unit,
                rule_state,
                masked,
            )
        if plan.two_passes:
            return self.two_pass(
                parameters, states, inputs, weights, plan.block, rule_state, masked
            )
        return self.one_pass(
            parameters, states, traces, inputs, weights, plan.block, rule_state, masked
        )

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
        losses = losses_of_steps(self.step, constants, span.losses)
        gradients = self.sums.of_parameters(parameters, states, span.total)
        return Solved(gradients, losses, span.aux, states | span.states, [])

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
        step = self.step

        def ahead(states: Values, number: Any, inputs: Values) -> tuple[Values, Values]:
            return forward(step, constants, states, inputs)

        last, kept = over_blocks(ahead, states, inputs, block)
        # The hidden states at the end of each block are those at the start of the next.
        ends = Values()
        for key, _ in step.hidden:
            ends[key] = jnp.concatenate([kept[key][block::block], last[key][None]])

        def back(carry: tuple, number: Any, at: tuple) -> tuple[tuple, tuple]:
            credit, products, total = carry
            steps, weights, mask = at
            end = jax.tree.map(lambda x: x[number], ends)
            now = Block.of(step, constants, steps, end, mask)
            # γ continues from the block after this one, which was solved before it.
            solved = self._in_reverse(now, [weights], rule_state, credit, total)
            driven: list[Driven] = []
            if drives:
                # P continues in the same way, because the traces are advanced once,
                # after the span.
                driven, products = drive(self.traces, now, solved.used, products)
            carry = (solved.credit, products, solved.total)
            return carry, (solved.found.losses, solved.found.aux, driven)

        units: list[Jacobian] = []
        if drives:
            units = [recursion.unit_product() for recursion in self.traces.recursions]
        zero = no_credit(self.traces.recursions)
        # Of all blocks: later blocks may carry credit back into silent steps of one.
        mask = Mask.of([weights]) if masked else None
        start, given = (zero, units, total), (inputs | kept, weights, mask)
        (credit, products, total), (losses, aux, driven) = over_blocks(
            back, start, given, block, reverse=True
        )
        dead = None if mask is None else mask.dead[0]
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
            traces, total = visit(
                self.traces,
                constants,
                traces,
                span.driven,
                span.products,
                span.total,
                span.credit,
                span.dead,
            )
            return (span.states, traces, total), (span.losses, span.aux)

        start = (states.pick(self.step.written), traces, self.sums.zero())
        length = self.span_length(len(weights), block)
        body = by_block if length == block else by_span
        carry, (losses, aux) = over_blocks(body, start, (inputs, weights), length)
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
        # As few visits as memory allows, after about equal numbers of blocks.
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
            last, kept = forward(step, constants, states, inputs)
            steps = inputs | kept
            if traces:
                now = Block.of(step, constants, *without_nan((steps, last)))
                traces, _ = advance_silently(self.traces, now, traces, self.sums.zero())
            steps = with_new_states(step, steps, last)
            aux = jax.vmap(
                lambda values: step.outputs(constants, values).pick(step.aux)
            )(steps)
            return (last, traces), aux

        start = (states.pick(step.written), traces)
        (last, traces), aux = over_blocks(one, start, inputs, block)
        return Solved(Values(), jnp.zeros(0), aux, states | last, traces)

    # ------------------------------------------------------------ one call

    def run(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
        rule_state: Any = None,
    ) -> tuple[Values, Values, Trace]:
        """A call: targets and auxiliary values of each step, next states, next
        traces."""
        new, targets, aux = run_window(self.step, parameters, states, inputs)
        values = Values(zip(self.step.targets, targets, strict=True)) | aux
        if traces:
            constants = self.step.constants(parameters, states)
            traces, _ = self.windows.across(constants, states, inputs, traces)
        return values, new, traces

    def gradient(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
        cotangents: Sequence[jax.Array],
        windows: ExactWindows | None = None,
        rule_state: Any = None,
    ) -> Values:
        """Of a call, for cotangents (t, ...) of its targets, as one window or as one
        block."""
        if windows is not None:
            return self.windows.gradient(
                parameters,
                states,
                traces,
                inputs,
                cotangents,
                windows.deep,
                windows.predictor,
                rule_state,
            )
        constants = self.step.constants(parameters, states)
        old = states.pick(self.step.written)
        carry, _ = self.solve_block(
            constants,
            old,
            traces,
            self.sums.zero(),
            inputs,
            cotangents,
            rule_state,
            masked=length_of(inputs) > 1,
        )
        _, _, total = carry
        return self.sums.of_parameters(parameters, states, total)
