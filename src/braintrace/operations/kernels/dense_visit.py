"""One visit of a trace after a single step, in place, for CPUs.

Letters: n samples, c inputs of the weight, f its outputs, s and r components of ε. For
each element of the trace, which is read and written once:

    gradient[c, f] += Σ_s credit_s[n, f] ε_s[n, c, f] + x[n, c] ȳ[n, f]
    ε_s[n, c, f] = Σ_r factor_sr[n, f] ε_r[n, c, f] + x[n, c] row_s[n, f]

XLA would read and write the traces several times: once for each component and once for
the gradient. Rows of traces that stay in the caches are taken three at a time, and of
each 32 numbers, so that what they have in common is loaded once. From memory, one row
after the other is read faster.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import jax

from ...compiled_step import Components, Jacobian
from .native import (
    FLAGS,
    Buffer,
    call,
    loop,
    parts,
    place,
    plus,
    repeated,
    several,
    word,
)
from .trace_parts import TraceParts, Visit, sum_of

WIDTHS = (32, 8, 1)
"""Numbers of a row that are taken together: the most that fit."""
CACHES = 2**24
"""Bytes that stay in the caches of a processor from step to step."""


class DenseVisit(Visit):
    """What visits of dense traces share."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        first = next(iter(self.traces.values()))
        self.samples, self.rows, self.width = (first.size(n) for n in range(3))

    def emit(self) -> None:
        """All samples; the gradient of the first is stored, those of others added."""
        self._sample(word(0), True)
        with loop(self.build, 1, self.samples, 1) as n:
            self._sample(n, False)

    @abstractmethod
    def _sample(self, n: Any, first: bool) -> None:
        """One sample; ``first``: whether it is the first."""

    def _old(self, at: Any, together: int, size: int) -> dict[int, Any]:
        """``size`` numbers of the traces; those that come ``together`` rows later are
        asked for, since the processor does not do so in time."""
        build = self.build
        later = build.add(at, build.mul(word(together), self.width))
        for trace in self.traces.values():
            trace.prefetch(later, size)
        return {s: trace.load(at, size) for s, trace in self.traces.items()}

    def _add_gradient(
        self, pairs: list[tuple], row: Any, j: Any, size: int, first: bool
    ) -> None:
        """Add Σ a b to ``size`` numbers of the gradient from (row, j) on."""
        if not pairs and not first:
            return
        build, at = self.build, place(self.build, row, self.width, j)
        total = sum_of(build, pairs, several(self.number, size))
        if not first:
            total = build.fadd(self.gradient.load(at, size), total, flags=FLAGS)
        self.gradient.store(total, at, size)


class _StepVisit(DenseVisit):
    """The instructions of a visit after one step; rows of traces are inputs or, if not
    ``inputs_first``, outputs. ``together``: the rows that are taken together."""

    def __init__(self, inputs_first: bool, together: int, *given: Any):
        super().__init__(*given)
        self.inputs_first, self.together = inputs_first, together

    def _sample(self, n: Any, first: bool) -> None:
        counts = sorted({self.together, 1}, reverse=True)
        for i, count in parts(self.build, self.rows, counts):
            for j, size in parts(self.build, self.width, WIDTHS):
                self._part(n, i, j, count, size, first)

    def _part(self, n: Any, i: Any, j: Any, count: int, size: int, first: bool) -> None:
        """``size`` numbers of ``count`` rows, from element (n, i, j) on."""
        made, build = self.made, self.build
        driven = [('row', s) for s in made.rows]
        others = [name for name in self.values if name not in driven]
        new, places = {}, []
        beside: dict[tuple, Any] = {}
        for k in range(count):
            row = build.add(i, word(k))
            if k == 0 or not self.inputs_first:
                beside = {
                    name: self._of_result(name, n, row, j, size) for name in others
                }
            places.append(place(build, n, self.rows, row, self.width, j))
            old = self._old(places[k], count, size)
            x = self._beside(self.x, n, row, j, size, not self.inputs_first)
            pairs = made.credited(beside, old)
            if made.has_y_bar:
                pairs.append((beside['y_bar',], x))
            self._add_gradient(pairs, row, j, size, first)
            for s, value in made.moved(build, beside, old).items():
                new[k, s] = value
        for k in range(count):
            row = build.add(i, word(k))
            if k == 0 or not self.inputs_first:
                beside = {
                    name: self._of_result(name, n, row, j, size) for name in driven
                }
            x = self._beside(self.x, n, row, j, size, not self.inputs_first)
            for s in made.rows:
                new[k, s] = plus(build, new[k, s], beside['row', s], x)
        for (k, s), value in new.items():
            self.traces[s].store(value, places[k], size)

    def _of_result(self, name: tuple, n: Any, i: Any, j: Any, size: int) -> Any:
        """Values (n, f) beside the elements from (n, i, j) on."""
        return self._beside(self.values[name], n, i, j, size, self.inputs_first)

    def _beside(
        self, buffer: Buffer, n: Any, i: Any, j: Any, size: int, is_last: bool
    ) -> Any:
        if is_last:
            return buffer.load(place(self.build, n, self.width, j), size)
        value = buffer.load(place(self.build, n, self.rows, i), 1)
        return repeated(self.build, value, size)


def visit(
    trace: Components,
    x: jax.Array,
    rows: Components,
    factors: Jacobian,
    credit: Components,
    inputs_first: bool,
    y_bar: jax.Array | None = None,
) -> tuple[Components, jax.Array]:
    """The traces after a step and γ · ε before it, summed over samples; with x ȳ added
    if ``y_bar`` is given.

    Traces (n, c, f), or (n, f, c) if not ``inputs_first``; x (n, c), all else (n, f).
    """
    made, values = TraceParts.of(trace, rows, factors, credit, y_bar)
    old = list(trace.values())
    is_small = sum(e.size * e.dtype.itemsize for e in old) <= CACHES
    together = 3 if is_small else 1
    *new, total = call(
        f'visit_{made.name}_{int(inputs_first)}{together}',
        lambda *given: _StepVisit(inputs_first, together, made, *given).emit(),
        [x, *values],
        [jax.ShapeDtypeStruct(old[0].shape[1:], x.dtype)],
        old,
    )
    return dict(zip(trace, new, strict=True)), total
