"""A whole sequence, block by block: one pass with traces, or two passes without any.

one pass     blocks forward in time, traces carried: memory does not grow with the sequence
two passes   forward keeping states, then blocks in reverse carrying credit; no trace
windows      reverse mode inside windows, traces or a predictor across them
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ..arrays import sum_type
from ..compiled_step import CompiledStep, Components, Jacobian, Values
from .block import (
    Derivatives,
    backward_credit,
    completed,
    derivatives,
    forward,
    pull,
    weight_gradients,
    with_new_states,
)
from .blocks import length_of, over_blocks
from .masking import Block, Mask, all_finite, finite, zero_at
from .signals import Symmetric
from .traces import Driven, RecursionView, Trace, Traces, add
from .window import run_window, window_gradient


class Solved(NamedTuple):
    """What a sequence gives: gradients of parameters, losses and auxiliary values of
    every step.

    ``predictor_update``, ``predictor_error``: the change of a predictor's weights, its
    error.
    """

    gradients: Values
    losses: jax.Array
    aux: Values
    states: Values
    traces: Trace
    predictor_update: Sequence[jax.Array] = ()
    predictor_error: Any = 0.0


class _Span(NamedTuple):
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

    def init_traces(self) -> Trace:
        """Traces at the start of a sequence."""
        return self.traces.init()

    @property
    def owner(self) -> tuple[int, ...]:
        """For every trace the one that holds its state part, where factors share it."""
        return self.traces.owner

    @property
    def labels(self) -> list[tuple]:
        """What each trace is of: parameters, operation, hidden states."""
        return [
            (
                tuple(p.name for p in tap.by_weight.get(site.weight, ())),
                tap.operation,
                self.step.groups[site.group].name,
            )
            for site, tap, _ in self.traces.sites
        ]

    @property
    def kept_bytes(self) -> int:
        """Bytes kept of one step."""
        return self.step.kept_bytes

    @cached_property
    def is_plain(self) -> bool:
        """Whether the traces are those of the local step, read by the true signal."""
        plain = self.traces.is_plain
        return plain and isinstance(self.signal, Symmetric)

    def block_length(self, steps: int, carried: bool) -> int:
        """Steps to solve together: what a block keeps should stay in the processor's
        cache.

        A block reads and writes the gradients and all of the traces it carries, so it
        may keep a quarter of what the former and half of what the latter take. A length
        that divides the steps needs no second program for the rest.
        """
        least, room = 8, 2**20
        if carried:
            traces, gradients = self._trace_bytes, _bytes(self._weight_shapes)
            least, room = 4, min(max(gradients // 4 + traces // 2, 2**17), 2**23)
        longest = min(max(room // self.kept_bytes, least), 50, steps)
        lengths = range(longest, longest // 2, -1)
        return next((k for k in lengths if steps % k == 0), longest)

    @cached_property
    def _trace_bytes(self) -> int:
        return _bytes(jax.eval_shape(self.init_traces))

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
        given = (constants, old, self._no_gradient(), inputs, weights, block)
        span = self._there_and_back(*given, rule_state, masked)
        gradients = self._of_parameters(parameters, states, span.total)
        return Solved(gradients, span.losses, span.aux, states | span.states, [])

    def _there_and_back(
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
    ) -> _Span:
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
            mask = Mask.of([weights], dead) if masked else None
            now = Block.of(completed(step, constants, steps, end), mask)
            found = derivatives(step, constants, now, [weights])
            view = self._view(constants, now, found, [weights], rule_state)
            every, first = backward_credit(*view[:3], credit, len(weights), mask)
            local = self._local_gradients(constants, now, found, view, every)
            gradients = weight_gradients(step, constants, now, found.results, local)
            total = add(add(total, gradients), self._constant_gradients([weights]))
            dead = dead if mask is None else mask.dead[0]
            driven: list[Driven] = []
            if drives:
                driven, products = traces_of.drive(constants, now, view, products)
            return (first, products, total, dead), (found.targets[0], found.aux, driven)

        units = traces_of.unit_products() if drives else []
        start = (traces_of.no_credit(), units, total, jnp.asarray(True))
        given = (inputs | kept, weights)
        (credit, products, total, dead), (losses, aux, driven) = over_blocks(
            back, start, given, block, reverse=True
        )
        return _Span(losses, aux, driven, last, credit, products, total, dead)

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

        def one_block(carry: tuple, number: Any, at: tuple) -> tuple[tuple, tuple]:
            states, traces, total = carry
            inputs, weights = at
            carry, found = self._solve(
                constants, states, traces, total, inputs, [weights], rule_state, masked
            )
            return carry, (found.targets[0], found.aux)

        def one_span(carry: tuple, number: Any, at: tuple) -> tuple[tuple, tuple]:
            states, traces, total = carry
            given = (constants, states, total, *at, block, rule_state, masked)
            span = self._there_and_back(*given, drives=True)
            traces, total = self.traces.take_in(
                constants,
                traces,
                span.driven,
                span.products,
                span.total,
                span.credit,
                span.dead if masked else None,
            )
            return (span.states, traces, total), (span.losses, span.aux)

        start = (states.pick(self.step.written), traces, self._no_gradient())
        length = self.span_length(length_of(inputs), block)
        body = one_block if length == block else one_span
        carry, (losses, aux) = over_blocks(body, start, (inputs, weights), length)
        last, traces, total = carry
        gradients = self._of_parameters(parameters, states, total)
        return Solved(gradients, losses, aux, states | last, traces)

    def span_length(self, steps: int, block: int) -> int:
        """Steps between two visits of the traces, a whole number of blocks."""
        if self.traces.factorised or not self.traces.has_block_traces:
            return block
        kept = self.kept_bytes + self.traces.driven_bytes
        most = max(self._trace_bytes // kept // block, 1)
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
                done = jax.vmap(lambda values: step.complete(constants, values))(steps)
                traces, _ = self.traces.advance_silently(
                    constants, done, traces, self._no_gradient(), self.traces.no_signal
                )
            aux = jax.vmap(
                lambda values: step.outputs(constants, values).pick(step.aux)
            )(steps)
            return (last, traces), aux

        start = (states.pick(step.written), traces)
        (last, traces), aux = over_blocks(one, start, inputs, block)
        return Solved(Values(), jnp.zeros(0), aux, states | last, traces)

    def windows(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
        weights: jax.Array,
        length: int,
        deep: bool = False,
        predictor: Predictor | None = None,
        fresh: bool = False,
        unit: Any = 1.0,
        rule_state: Any = None,
        masked: bool = True,
    ) -> Solved:
        """Reverse mode inside windows of a length; traces or a predictor across them.

        ``fresh``: nothing came before the sequence and nothing follows it. ``unit``:
        the weight here of a loss that counts 1 for the predictor, whose weights are
        ``rule_state``. ``masked``: some of the weights may be zero.
        """
        step = self.step
        constants = step.constants(parameters, states)
        count = -(-length_of(inputs) // length)
        zero = Values((key, jnp.zeros_like(x)) for key, x in parameters.items())
        learned = [jnp.zeros_like(x) for x in rule_state] if predictor else []

        def one(carry: tuple, number: Any, at: tuple) -> tuple[tuple, tuple]:
            states, traces, total, through, learned, error = carry
            inputs, weights = at
            credit_after = None
            if predictor:
                follows = jnp.where(fresh & (number == count - 1), 0.0, unit)

                def credit_after(end: list[Components]) -> list[Components]:
                    scale = lambda x: follows.astype(x.dtype) * x
                    return jax.tree.map(scale, _predicted(predictor, rule_state, end))

            found = window_gradient(
                step, parameters, states, inputs, [weights], deep, credit_after, masked
            )
            if predictor:
                start = [
                    dict(enumerate(group.components(states))) for group in step.groups
                ]
                target = jax.tree.map(
                    lambda x: (x / unit).astype(x.dtype), found.credit
                )
                counts = jnp.where(fresh & (number == 0), 0.0, 1.0) * all_finite(start)
                start = finite(start, jnp.asarray(True))
                distance, change = predictor.error_and_change(rule_state, start, target)
                pairs = zip(learned, change, strict=True)
                learned = [a + counts.astype(b.dtype) * b for a, b in pairs]
                error = error + counts * distance
            if traces:
                dead = jnp.all(weights == 0) & (predictor is None)
                traces, through = self._across(
                    constants, states, inputs, traces, through, found.credit, dead
                )
            total = add(total, found.gradients)
            carry = (found.states, traces, total, through, learned, error)
            return carry, (found.targets[0], found.aux)

        start = (states, traces, zero, self._no_gradient(), learned, jnp.zeros(()))
        carry, (losses, aux) = over_blocks(one, start, (inputs, weights), length)
        last, traces, total, through, learned, error = carry
        if traces:
            total = add(total, self._of_parameters(parameters, states, through))
        taught = max(count - fresh, 1)
        update = [x / taught for x in learned]
        return Solved(total, losses, aux, last, traces, update, error / taught)

    # ------------------------------------------------------------ a few steps

    def run(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
        rule_state: Any = None,
    ) -> tuple[Values, Values, Trace]:
        """A few steps: targets and auxiliary values of each, next states, next traces."""
        new, targets, aux = run_window(self.step, parameters, states, inputs)
        values = Values(zip(self.step.targets, targets, strict=True)) | aux
        if traces:
            constants = self.step.constants(parameters, states)
            traces, _ = self._across(
                constants,
                states,
                inputs,
                traces,
                self._no_gradient(),
                self.traces.no_signal,
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
        start = (states.pick(self.step.written), traces, self._no_gradient())
        carry, _ = self._solve(constants, *start, inputs, cotangents, rule_state)
        _, _, total = carry
        return self._of_parameters(parameters, states, total)

    def exact_window_gradient(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
        cotangents: Sequence[jax.Array],
        predictor: Predictor | None = None,
        rule_state: Any = None,
    ) -> Values:
        """Gradient of a window for cotangents of its targets: reverse mode inside, γ_0
        · ε_0 across.

        ``predictor``: of the credit that the end of the window gets from a loss of
        weight one.
        """
        credit_after = None
        if predictor:
            credit_after = lambda end: _predicted(predictor, rule_state, end)
        found = window_gradient(
            self.step, parameters, states, inputs, cotangents, credit_after=credit_after
        )
        if not traces:
            return found.gradients
        constants = self.step.constants(parameters, states)
        dead = Mask.of(cotangents, predictor is None).dead[0]
        _, through = self._across(
            constants, states, inputs, traces, self._no_gradient(), found.credit, dead
        )
        return add(found.gradients, self._of_parameters(parameters, states, through))

    # ------------------------------------------------------------ one block

    def _view(
        self,
        constants: Values,
        block: Block,
        found: Derivatives,
        cotangents: Sequence[jax.Array],
        rule_state: Any,
    ) -> RecursionView:
        """The block's derivatives with the rule's own signals and matrices."""
        groups = self.traces.groups
        learning = self.signal(
            self.step, constants, block.safe, found, cotangents, groups, rule_state
        )
        feedback = self.signal.feedback(self.step, constants, rule_state)
        slopes = self.traces.slopes(constants, block.safe)
        reads = self.traces.memory_reads(constants, block.safe, learning, feedback)
        return self.traces.view(found, learning, slopes, reads)

    def _local_gradients(
        self,
        constants: Values,
        block: Block,
        found: Derivatives,
        view: RecursionView,
        credit: list[Components],
    ) -> list[Values]:
        """What the credit of each group adds to the one-step gradients of tap results."""
        if self.is_plain:
            credit = self.traces.folded(view, credit)
        else:
            credit = self.traces.added_credit(found, view, credit)
        local = pull(self.step, constants, block.safe, credit)
        return block.zero_if_dead(self.traces.of_traced(local))

    def _solve(
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
        last, kept = forward(step, constants, states, inputs)
        mask = Mask.of(cotangents) if masked else None
        block = Block.of(completed(step, constants, inputs | kept, last), mask)
        found = derivatives(step, constants, block, cotangents)
        total = add(total, self._constant_gradients(cotangents))
        view = self._view(constants, block, found, cotangents, rule_state)
        local: list[Values] = [Values() for _ in step.groups]
        first = traces_of.no_signal
        if traces_of.has_block_traces or not self.is_plain:
            length, last_credit = len(cotangents[0]), traces_of.no_credit()
            every, first = backward_credit(*view[:3], last_credit, length, mask)
            local = self._local_gradients(constants, block, found, view, every)
        results = found.results
        if traces_of.factorised:
            results = self._less_factorised(constants, block, found, local)
        gradients = weight_gradients(
            step, constants, block, results, local, traces_of.rest
        )
        total = add(total, gradients)
        traces, total = traces_of.advance(constants, block, view, traces, total, first)
        return (last, traces, total), found

    def _less_factorised(
        self, constants: Values, block: Block, found: Derivatives, local: list[Values]
    ) -> Values:
        """One-step gradients without those that factors replace; ``local`` is changed
        in place.

        Factors replace the local one-step gradient of their sites. Where the result
        acts on more than their group, the rest of it stays.
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

    def _across(
        self,
        constants: Values,
        states: Values,
        inputs: Values,
        traces: Trace,
        total: Values,
        credit: Sequence[Components],
        dead: jax.Array | bool = True,
    ) -> tuple[Trace, Values]:
        """Traces after a window without signals of its own; γ_0 · ε_0 is added to the
        gradient.

        ``dead``: neither the window nor what follows it has a signal.
        """
        step, dead = self.step, jnp.asarray(dead)
        last, kept = forward(step, constants, states.pick(step.written), inputs)
        steps = completed(step, constants, inputs | kept, last)
        credit = self.traces.at_start(constants, steps, credit)
        total = self.traces.add_factor_gradients(
            total, traces, credit, constants, steps, dead
        )
        return self.traces.advance_silently(
            constants, steps, traces, total, credit, dead
        )

    # ------------------------------------------------------------ gradients of parameters

    @cached_property
    def _weight_shapes(self) -> Values:
        constants = jax.eval_shape(
            self.step.constants, Values(self.step.parameters), Values(self.step.states)
        )
        return constants.pick(self.step.weights)

    def _no_gradient(self) -> Values:
        shapes = self._weight_shapes.items()
        return Values((key, jnp.zeros(x.shape, sum_type(x.dtype))) for key, x in shapes)

    def _constant_gradients(self, cotangents: Sequence[jax.Array]) -> Values:
        """Gradients of targets that no data reaches, from cotangents (t, ...)."""
        total = Values()
        for key, cotangent in zip(self.step.targets, cotangents, strict=True):
            if key in self.step.constant_targets:
                total[key] = jnp.sum(cotangent, axis=0)
        return total

    def _of_parameters(
        self, parameters: Values, states: Values, total: Values
    ) -> Values:
        """Gradients of parameters from those of the weights that they determine."""
        weights = lambda p: self.step.constants(p, states).pick(self.step.weights)
        values, pull_back = jax.vjp(weights, parameters)
        bars = Values((key, x.astype(values[key].dtype)) for key, x in total.items())
        return pull_back(bars)[0]


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _predicted(
    predictor: Predictor, weights: Sequence[jax.Array], states: list[Components]
) -> list[Components]:
    """Predicted credit; none for states that are not finite, as after the end of a
    padded sequence."""
    found = predictor(weights, finite(states, jnp.asarray(True)))
    return zero_at(found, ~all_finite(states))
