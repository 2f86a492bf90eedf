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
import jax.numpy as jnp

from ...compiled_step import Components, Jacobian
from .dense_visit import DenseVisit
from .native import (
    SMALL,
    WORD,
    call,
    differs_from_zero,
    loop,
    parts,
    place,
    plus,
    repeated,
    rest_of,
    running,
    running_all,
    word,
)
from .trace_parts import TraceParts

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


class _SpanVisit(DenseVisit):
    """The instructions of a visit. ``skips_zeros``: whether inputs of zero are skipped;
    memory is for the lists of steps and for copied rows."""

    def __init__(self, skips_zeros: bool, *given: Any):
        super().__init__(*given)
        self.skips_zeros = skips_zeros
        self.inputs, self.outputs = self.rows, self.width
        self.counts, self.times, self.lines, self.copied = self.memory
        self.steps = self.x.size(0)

    def _sample(self, n: Any, first: bool) -> None:
        self._list_inputs(n)
        widths = (_width(self.made), LEAST_WIDTH, 1)
        for f, size in parts(self.build, self.outputs, widths):
            self._copy_rows(n, f, size)
            self._visit_inputs(n, f, size, first)

    # ------------------------------------------------------------ 1. lists

    def _list_inputs(self, n: Any) -> None:
        """For every input the steps at which it is not zero."""
        build = self.build
        for c, size in parts(build, self.inputs, (LINE, 1)):
            begin = self._place_of(c)
            with loop(build, 0, self.steps, 1) as t:
                at = place(build, t, self.samples, n, self.inputs, c)
                self.lines.store(self.x.load(at, size), self._after(begin, t), size)
        if not self.skips_zeros:
            return
        first_listed = build.select(
            self._is_dense_at_first(), rest_of(build, self.inputs, TOGETHER), word(0)
        )
        # The inputs before it count as if they were never zero.
        with loop(build, 0, first_listed, 1) as c:
            self.counts.store(build.trunc(self.steps, SMALL), c, 1)
        with loop(build, first_listed, self.inputs, 1) as c:
            self._list_one_input(c)

    def _is_dense_at_first(self) -> Any:
        """Whether most inputs differ from zero at the first step. Then they do so at
        most steps as a rule, and lists would take longer than they save."""
        build = self.build
        with running(build, 0, self.inputs, 1, word(0)) as (c, count):
            differs = differs_from_zero(build, self.lines.load(self._place_of(c), 1))
            count.value = build.add(count.value, build.zext(differs, WORD))
        twice = build.mul(count.value, word(2))
        return build.icmp_signed('>', twice, self.inputs)

    def _list_one_input(self, c: Any) -> None:
        build = self.build
        begin = self._place_of(c)
        with running(build, 0, self.steps, 1, word(0)) as (t, count):
            value = self.lines.load(self._after(begin, t), 1)
            # The next one is written over it if this one is zero.
            at = place(build, c, self.steps, count.value)
            self.times.store(build.trunc(t, SMALL), at, 1)
            is_listed = differs_from_zero(build, value)
            count.value = build.add(count.value, build.zext(is_listed, WORD))
        self.counts.store(build.trunc(count.value, SMALL), c, 1)

    def _place_of(self, c: Any) -> Any:
        """Where the values of an input begin: inputs of one line of the cache lie
        beside each other, then come their steps."""
        build = self.build
        line = build.mul(build.udiv(c, word(LINE)), self.steps)
        return place(build, line, LINE, build.urem(c, word(LINE)))

    def _after(self, begin: Any, t: Any) -> Any:
        return place(self.build, t, LINE, begin)

    # ------------------------------------------------------------ 2. sums

    def _copy_rows(self, n: Any, f: Any, size: int) -> None:
        """Rows of all steps and components, ``size`` outputs from f on: (t, s, f)."""
        build, rows = self.build, self.made.rows
        with loop(build, 0, self.steps, 1) as t:
            at = place(build, t, self.samples, n, self.outputs, f)
            for m, s in enumerate(rows):
                to = place(build, t, len(rows) * size, m * size)
                self.copied.store(self.values['row', s].load(at, size), to, size)

    def _visit_inputs(self, n: Any, f: Any, size: int, first: bool) -> None:
        build = self.build
        at = place(build, n, self.outputs, f)
        names = self.made.of_block
        beside = {name: self.values[name].load(at, size) for name in names}
        given = (f, size, beside, first)
        if not self.skips_zeros:
            for c, count in parts(build, self.inputs, (TOGETHER, 1)):
                self._some_inputs(n, c, count, *given)
            return
        with loop(build, 0, self.inputs, TOGETHER) as c:
            branches = build.if_else(self._are_dense(c))
            with branches as (dense, sparse):
                with dense:
                    self._some_inputs(n, c, TOGETHER, *given)
                with sparse, loop(build, c, build.add(c, word(TOGETHER)), 1) as one:
                    self._some_inputs(n, one, 1, *given)
        with loop(build, rest_of(build, self.inputs, TOGETHER), self.inputs, 1) as c:
            self._some_inputs(n, c, 1, *given)

    def _are_dense(self, c: Any) -> Any:
        """Whether some inputs from c on differ from zero at most steps."""
        build = self.build
        total = word(0)
        for k in range(TOGETHER):
            count = self.counts.load(build.add(c, word(k)), 1)
            total = build.add(total, build.zext(count, WORD))
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
            row = build.add(c, word(k))
            places.append(place(build, n, self.inputs, row, self.outputs, f))
            old = self._old(places[k], count, size)
            self._add_gradient(made.credited(beside, old), row, f, size, first)
            for s, value in made.moved(build, beside, old).items():
                new[k, s] = value
        if made.rows:
            driven = {(k, s): x for (k, s), x in new.items() if s in made.rows}
            new |= self._driven(c, count, driven, size)
        for (k, s), value in new.items():
            self.traces[s].store(value, places[k], size)

    def _driven(self, c: Any, count: int, new: dict, size: int) -> dict:
        """New traces with what the steps of the inputs add."""
        build, rows = self.build, self.made.rows
        begins = [self._place_of(build.add(c, word(k))) for k in range(count)]
        total = self.steps
        by_list = count == 1 and self.skips_zeros
        if by_list:
            total = build.zext(self.counts.load(c, 1), WORD)
        with running_all(build, 0, total, 1, new) as (entry, sums):
            # Several inputs take part in every step.
            t = entry
            if by_list:
                listed = self.times.load(place(build, c, self.steps, entry), 1)
                t = build.zext(listed, WORD)
            found = {}
            for m, s in enumerate(rows):
                at = place(build, t, len(rows) * size, m * size)
                found[s] = self.copied.load(at, size)
            for k, begin in enumerate(begins):
                x = self.lines.load(self._after(begin, t), 1)
                x = repeated(build, x, size)
                for s in rows:
                    sums[k, s].value = plus(build, sums[k, s].value, found[s], x)
        return {key: total.value for key, total in sums.items()}


def _width(made: TraceParts) -> int:
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
    made, values = TraceParts.of(trace, rows, factors, credit)
    old = list(trace.values())
    steps, _, inputs = x.shape
    skips_zeros = old[0].shape[-1] >= LEAST_FOR_LISTS
    shape, dtype = jax.ShapeDtypeStruct, x.dtype
    outs = [
        shape(old[0].shape[1:], dtype),
        shape((inputs,), jnp.int32),
        shape((inputs, steps), jnp.int32),
        shape((-(-inputs // LINE), steps, LINE), dtype),
        shape((steps, len(made.rows), _width(made)), dtype),
    ]
    found = call(
        f'visit_{made.name}_span{int(skips_zeros)}',
        lambda *given: _SpanVisit(skips_zeros, made, *given).emit(),
        [x, *values],
        outs,
        old,
    )
    return dict(zip(trace, found, strict=False)), found[len(old)]
