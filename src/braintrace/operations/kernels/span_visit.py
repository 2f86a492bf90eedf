"""One visit of a trace after many steps, in place, for CPUs.

Letters: n samples (or places of an image), c inputs of the weight, f its outputs, s and
r components of ε, t steps. For each element of the trace, which is read and written
once:

    gradient[c, f] += Σ_s credit_s[n, f] ε_s[n, c, f]
    ε_s[n, c, f] = Σ_r factor_sr[n, f] ε_r[n, c, f] + Σ_t x[t, n, c] row_s[t, n, f]

The last sum is a product of matrices for each sample. Only inputs that are not zero
take part in it, so that spikes cost as much as there are of them. For one sample:

    1. for each input, list the steps at which it is not zero, unless most inputs of the
       first step are not
    2. for some outputs at a time, copy the rows of all steps, so that they stay in the
       first cache; then for each input, add the rows that its list names

Where there are few outputs, as the filters of a convolution, the lists take longer than
what they save, and all inputs take part.
"""

from __future__ import annotations

from typing import Any

import jax
from llvmlite import ir

from ...compiled_step import Components, Jacobian
from .dense_visit import (
    FLAGS,
    Structure,
    arranged,
    call_in_place,
    repeated,
    sum_of,
)
from .native import WORD, Buffer, loop, rest_of, running, running_all, several, word

WIDTHS = {1: 64, 2: 32}
"""Outputs that are taken together, by the number of components: their sums are kept in
registers."""
LEAST_WIDTH = 16
"""The same where there are more components, and for the remaining outputs."""
TOGETHER = 4
"""Inputs that are taken together if they are seldom zero."""
LINE = 16
"""Inputs whose values lie beside each other."""
LEAST_FOR_LISTS = 128
"""Outputs from which on inputs of zero are skipped."""


class _SpanVisit:
    """The instructions of a visit.

    Operands: x, rows, factors, credits, old traces; results: new traces, which lie
    where the old ones do, the gradient, and memory for lists and copied rows.
    """

    def __init__(
        self,
        made: Structure,
        number: Any,
        build: ir.IRBuilder,
        operands: list[Buffer],
        results: list[Buffer],
    ):
        self.made, self.number, self.build = made, number, build
        self.x, self.drives, self.vectors = made.named(operands)
        *traces, self.gradient, counts, times, self.values, self.copied = results
        whole = ir.IntType(32 if isinstance(number, ir.FloatType) else 64)
        self.counts, self.times = counts.holding(whole), times.holding(whole)
        self.whole = whole
        self.traces = dict(zip(made.components, traces, strict=True))
        self.samples, self.inputs, self.outputs = (
            traces[0].size(build, axis) for axis in range(3)
        )
        self.steps = self.x.size(build, 0)

    def emit(self) -> None:
        """All samples; the gradient of the first is stored, those of others added."""
        self._sample(word(0), True)
        with loop(self.build, word(1), self.samples, 1) as n:
            self._sample(n, False)

    def _sample(self, n: Any, first: bool) -> None:
        self._list_inputs(n)
        done = word(0)
        for size in (_width(self.made), LEAST_WIDTH, 1):
            with loop(self.build, done, self.outputs, size) as f:
                self._copy_rows(n, f, size)
                self._visit_inputs(n, f, size, first)
            done = rest_of(self.build, self.outputs, size)

    # ------------------------------------------------------------ 1. lists

    def _list_inputs(self, n: Any) -> None:
        """For every input the steps at which it is not zero."""
        build = self.build
        done = word(0)
        for size in (LINE, 1):
            with loop(build, done, self.inputs, size) as c:
                place = self._place_of(c)
                with loop(build, word(0), self.steps, 1) as t:
                    row = build.add(build.mul(t, self.samples), n)
                    at = build.add(build.mul(row, self.inputs), c)
                    value = self.x.load(build, at, size)
                    self.values.store(build, value, self._after(place, t), size)
            done = rest_of(build, self.inputs, size)
        if not self.made.skips_zeros:
            return
        first_listed = build.select(
            self._is_dense_at_first(), rest_of(build, self.inputs, TOGETHER), word(0)
        )
        # The inputs before it count as if they were never zero.
        with loop(build, word(0), first_listed, 1) as c:
            self.counts.store(build, self._whole(self.steps), c, 1)
        with loop(build, first_listed, self.inputs, 1) as c:
            self._list_one_input(c)

    def _is_dense_at_first(self) -> Any:
        """Whether most inputs differ from zero at the first step. Then they do so at
        most steps as a rule, and lists would take longer than they save."""
        build = self.build
        with running(build, word(0), self.inputs, 1, word(0)) as (c, count):
            value = self.values.load(build, self._place_of(c), 1)
            differs = build.fcmp_unordered('!=', value, ir.Constant(self.number, 0))
            count.value = build.add(count.value, build.zext(differs, WORD))
        twice = build.mul(count.value, word(2))
        return build.icmp_signed('>', twice, self.inputs)

    def _list_one_input(self, c: Any) -> None:
        build = self.build
        place, start = self._place_of(c), build.mul(c, self.steps)
        with running(build, word(0), self.steps, 1, word(0)) as (t, count):
            value = self.values.load(build, self._after(place, t), 1)
            # The next one is written over it if this one is zero.
            at = build.add(start, count.value)
            self.times.store(build, self._whole(t), at, 1)
            # True for NaN as well.
            is_listed = build.fcmp_unordered('!=', value, ir.Constant(self.number, 0))
            count.value = build.add(count.value, build.zext(is_listed, WORD))
        self.counts.store(build, self._whole(count.value), c, 1)

    def _place_of(self, c: Any) -> Any:
        """Where the values of an input begin: inputs of one line of the cache lie
        beside each other, then come their steps."""
        build = self.build
        line = build.mul(build.udiv(c, word(LINE)), self.steps)
        return build.add(build.mul(line, word(LINE)), build.urem(c, word(LINE)))

    def _after(self, place: Any, t: Any) -> Any:
        return self.build.add(place, self.build.mul(t, word(LINE)))

    def _whole(self, value: Any) -> Any:
        return self.build.trunc(value, self.whole) if self.whole != WORD else value

    def _word(self, value: Any) -> Any:
        return self.build.zext(value, WORD) if self.whole != WORD else value

    # ------------------------------------------------------------ 2. sums

    def _copy_rows(self, n: Any, f: Any, size: int) -> None:
        """Rows of all steps and components, ``size`` outputs from f on: (t, s, f)."""
        build, count = self.build, len(self.made.rows)
        with loop(build, word(0), self.steps, 1) as t:
            at = build.add(build.mul(t, self.samples), n)
            at = build.add(build.mul(at, self.outputs), f)
            for k, drive in enumerate(self.drives.values()):
                to = build.add(build.mul(t, word(count * size)), word(k * size))
                self.copied.store(build, drive.load(build, at, size), to, size)

    def _visit_inputs(self, n: Any, f: Any, size: int, first: bool) -> None:
        build = self.build
        at = build.add(build.mul(n, self.outputs), f)
        beside = {name: v.load(build, at, size) for name, v in self.vectors.items()}
        given = (f, size, beside, first)
        if not self.made.skips_zeros:
            self._visit_inputs_without_lists(n, given)
            return
        with loop(build, word(0), self.inputs, TOGETHER) as c:
            branches = build.if_else(self._are_dense(c))
            with branches as (dense, sparse):
                with dense:
                    self._some_inputs(n, c, TOGETHER, *given)
                with sparse, loop(build, c, build.add(c, word(TOGETHER)), 1) as one:
                    self._some_inputs(n, one, 1, *given)
        with loop(build, rest_of(build, self.inputs, TOGETHER), self.inputs, 1) as c:
            self._some_inputs(n, c, 1, *given)

    def _visit_inputs_without_lists(self, n: Any, given: tuple) -> None:
        build = self.build
        done = word(0)
        for count in (TOGETHER, 1):
            with loop(build, done, self.inputs, count) as c:
                self._some_inputs(n, c, count, *given)
            done = rest_of(build, self.inputs, count)

    def _are_dense(self, c: Any) -> Any:
        """Whether some inputs from c on differ from zero at most steps."""
        build = self.build
        total = word(0)
        for k in range(TOGETHER):
            count = self.counts.load(build, build.add(c, word(k)), 1)
            total = build.add(total, self._word(count))
        least = build.mul(self.steps, word(TOGETHER // 2))
        return build.icmp_signed('>', total, least)

    def _some_inputs(
        self, n: Any, c: Any, count: int, f: Any, size: int, beside: dict, first: bool
    ) -> None:
        """``size`` outputs from f on of the traces of ``count`` inputs from c on: one
        input at its listed steps if there are lists, several at every step."""
        made, build = self.made, self.build
        new, places = {}, []
        for k in range(count):
            row = build.add(build.add(build.mul(n, self.inputs), c), word(k))
            places.append(build.add(build.mul(row, self.outputs), f))
            # The loop over steps is too long for the processor to prefetch the next
            # trace by itself.
            next_ = build.add(places[k], build.mul(word(count), self.outputs))
            for trace in self.traces.values():
                trace.prefetch(build, next_, size)
            old = {s: e.load(build, places[k], size) for s, e in self.traces.items()}
            self._add_gradient(beside, old, build.add(c, word(k)), f, size, first)
            for s in made.components:
                factors = [pair for pair in made.factors if pair[0] == s]
                pairs = [(beside['factor', *pair], old[pair[1]]) for pair in factors]
                new[k, s] = sum_of(build, pairs, several(self.number, size))
        if made.rows:
            driven = {(k, s): x for (k, s), x in new.items() if s in made.rows}
            new |= self._driven(c, count, driven, size)
        for (k, s), value in new.items():
            self.traces[s].store(build, value, places[k], size)

    def _driven(self, c: Any, count: int, new: dict, size: int) -> dict:
        """New traces with what the steps of the inputs add."""
        build, rows = self.build, self.made.rows
        places = [self._place_of(build.add(c, word(k))) for k in range(count)]
        listed, total = build.mul(c, self.steps), self.steps
        by_list = count == 1 and self.made.skips_zeros
        if by_list:
            total = self._word(self.counts.load(build, c, 1))
        with running_all(build, word(0), total, 1, new) as (entry, sums):
            # Several inputs take part in every step.
            t = entry
            if by_list:
                t = self._word(self.times.load(build, build.add(listed, entry), 1))
            found = {}
            for m, s in enumerate(rows):
                at = build.add(build.mul(t, word(len(rows) * size)), word(m * size))
                found[s] = self.copied.load(build, at, size)
            for k, place in enumerate(places):
                x = self.values.load(build, self._after(place, t), 1)
                x = repeated(build, x, self.number, size)
                for s in rows:
                    term = build.fmul(found[s], x, flags=FLAGS)
                    sums[k, s].value = build.fadd(sums[k, s].value, term, flags=FLAGS)
        return {key: total.value for key, total in sums.items()}

    def _add_gradient(
        self, beside: dict, old: dict, c: Any, f: Any, size: int, first: bool
    ) -> None:
        build = self.build
        pairs = [(beside['credit', s], old[s]) for s in self.made.credits]
        if not pairs and not first:
            return
        at = build.add(build.mul(c, self.outputs), f)
        total = sum_of(build, pairs, several(self.number, size))
        if not first:
            total = build.fadd(self.gradient.load(build, at, size), total, flags=FLAGS)
        self.gradient.store(build, total, at, size)


def _width(made: Structure) -> int:
    return WIDTHS.get(len(made.components), LEAST_WIDTH)


def visit_after_span(
    trace: Components,
    x: jax.Array,
    rows: Components,
    factors: Jacobian,
    credit: Components,
) -> tuple[Components, jax.Array]:
    """The traces after the steps and γ · ε before them, summed over samples.

    Traces (n, c, f); x (t, n, c), rows (t, n, f); all else (n, f).
    """
    made, given = arranged(trace, x, rows, factors, credit, inputs_first=True)
    old = list(trace.values())
    steps, _, inputs = x.shape
    made = made._replace(skips_zeros=old[0].shape[-1] >= LEAST_FOR_LISTS)
    copied = (steps, len(made.rows), _width(made))
    lines = -(-inputs // LINE)
    memory = [(inputs,), (inputs, steps), (lines, steps, LINE), copied]
    shapes = [*(e.shape for e in old), old[0].shape[1:], *memory]
    found = call_in_place(_SpanVisit, made, f'{made.name}_span', given, shapes)
    return dict(zip(trace, found, strict=False)), found[len(old)]
