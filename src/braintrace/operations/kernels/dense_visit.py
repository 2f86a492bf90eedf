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

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from llvmlite import ir

from ...compiled_step import Components, Jacobian
from .native import Buffer, loop, number_type, register, rest_of, several, word

WIDTHS = (32, 8, 1)
"""Numbers of a row that are taken together: the most that fit."""
CACHES = 2**24
"""Bytes that stay in the caches of a processor from step to step."""
FLAGS = ('reassoc', 'contract', 'nsz')
"""Sums may be reordered; infinities and NaN keep their meaning."""


class Structure(NamedTuple):
    """What there is of a trace: components, the rows, factors and credits that are not
    zero by structure, whether the inputs come before the outputs in memory, whether
    the one-step gradient x ȳ is summed, the rows that are taken together, and whether
    inputs of zero are skipped."""

    components: tuple[int, ...]
    rows: tuple[int, ...]
    factors: tuple[tuple[int, int], ...]
    credits: tuple[int, ...]
    inputs_first: bool
    has_y_bar: bool = False
    rows_together: int = 1
    skips_zeros: bool = False

    @property
    def name(self) -> str:
        """A name for the kernel."""
        join = lambda numbers: '_'.join(map(str, numbers))
        factors = join(f'{s}{r}' for s, r in self.factors)
        parts = (join(self.components), join(self.rows), factors, join(self.credits))
        flags = (self.inputs_first, self.has_y_bar, self.skips_zeros)
        facts = ''.join(str(int(flag)) for flag in flags)
        return f'braintrace_visit_{"_of_".join(parts)}_{facts}{self.rows_together}'

    def named(
        self, operands: list[Buffer]
    ) -> tuple[Buffer, dict[int, Buffer], dict[tuple, Buffer]]:
        """The operands of a kernel: x, rows by component, and factors, credits and ȳ
        by their names; the old traces are read where the new ones are written."""
        x, *rest = operands
        rows = dict(zip(self.rows, rest, strict=False))
        names: list[tuple] = [('factor', *pair) for pair in self.factors]
        names += [('credit', s) for s in self.credits]
        names += [('y_bar',)] if self.has_y_bar else []
        return x, rows, dict(zip(names, rest[len(rows) :], strict=False))


class _Visit:
    """The instructions of a visit.

    Operands: x, rows, factors, credits, ȳ, old traces; results: new traces, which lie
    where the old ones do, and the gradient.
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
        *traces, self.gradient = results
        self.traces = dict(zip(made.components, traces, strict=True))
        self.samples, self.rows, self.width = (
            traces[0].size(build, axis) for axis in range(3)
        )

    def emit(self) -> None:
        """All samples; the gradient of the first is stored, those of others added."""
        self._sample(word(0), True)
        with loop(self.build, word(1), self.samples, 1) as n:
            self._sample(n, False)

    def _sample(self, n: Any, first: bool) -> None:
        done = word(0)
        for count in sorted({self.made.rows_together, 1}, reverse=True):
            with loop(self.build, done, self.rows, count) as i:
                self._some_rows(n, i, count, first)
            done = rest_of(self.build, self.rows, count)

    def _some_rows(self, n: Any, i: Any, count: int, first: bool) -> None:
        done = word(0)
        for size in WIDTHS:
            with loop(self.build, done, self.width, size) as j:
                self._part(n, i, j, count, size, first)
            done = rest_of(self.build, self.width, size)

    def _part(self, n: Any, i: Any, j: Any, count: int, size: int, first: bool) -> None:
        """``size`` numbers of ``count`` rows, from element (n, i, j) on."""
        made, build = self.made, self.build
        new: dict[tuple[int, int], Any] = {}
        shared: dict[tuple, Any] = {}
        for k in range(count):
            row = build.add(i, word(k))
            if k == 0 or not made.inputs_first:
                for name, vector in self.vectors.items():
                    shared[name] = self._along_outputs(vector, n, row, j, size)
            at = self._place(n, row, j)
            # Without it the processor waits for traces that are not in its caches.
            ahead = build.add(at, build.mul(word(count), self.width))
            for trace in self.traces.values():
                trace.prefetch(build, ahead, size)
            old = {s: e.load(build, at, size) for s, e in self.traces.items()}
            x = self._along_inputs(self.x, n, row, j, size)
            self._add_gradient(shared, old, x, row, j, size, first)
            for s in made.components:
                pairs = [
                    (shared['factor', q, r], old[r]) for q, r in made.factors if q == s
                ]
                new[k, s] = sum_of(build, pairs, several(self.number, size))
        new = self._with_step(n, i, j, new, count, size)
        for (k, s), value in new.items():
            at = self._place(n, build.add(i, word(k)), j)
            self.traces[s].store(build, value, at, size)

    def _with_step(
        self, n: Any, i: Any, j: Any, new: dict, count: int, size: int
    ) -> dict:
        """New traces with what the step adds."""
        made, build, found = self.made, self.build, dict(new)
        rows: dict[int, Any] = {}
        for k in range(count):
            row = build.add(i, word(k))
            if k == 0 or not made.inputs_first:
                for s, drive in self.drives.items():
                    rows[s] = self._along_outputs(drive, n, row, j, size)
            x = self._along_inputs(self.x, n, row, j, size)
            for s, value in rows.items():
                term = build.fmul(value, x, flags=FLAGS)
                found[k, s] = build.fadd(new[k, s], term, flags=FLAGS)
        return found

    def _add_gradient(
        self, shared: dict, old: dict, x: Any, row: Any, j: Any, size: int, first: bool
    ) -> None:
        build = self.build
        pairs = [(shared['credit', s], old[s]) for s in self.made.credits]
        if self.made.has_y_bar:
            pairs.append((shared['y_bar',], x))
        if not pairs and not first:
            return
        at = build.add(build.mul(row, self.width), j)
        total = sum_of(build, pairs, several(self.number, size))
        if not first:
            total = build.fadd(self.gradient.load(build, at, size), total, flags=FLAGS)
        self.gradient.store(build, total, at, size)

    # ------------------------------------------------------------ memory

    def _place(self, n: Any, i: Any, j: Any) -> Any:
        """The number of element (n, i, j) of a trace."""
        build = self.build
        row = build.add(build.mul(n, self.rows), i)
        return build.add(build.mul(row, self.width), j)

    def _along_outputs(self, buffer: Buffer, n: Any, i: Any, j: Any, size: int) -> Any:
        """Values (n, f) beside the elements from (n, i, j) on."""
        return self._beside(buffer, n, i, j, size, self.made.inputs_first)

    def _along_inputs(self, buffer: Buffer, n: Any, i: Any, j: Any, size: int) -> Any:
        """Values (n, c) beside the elements from (n, i, j) on."""
        return self._beside(buffer, n, i, j, size, not self.made.inputs_first)

    def _beside(
        self, buffer: Buffer, n: Any, i: Any, j: Any, size: int, is_last: bool
    ) -> Any:
        build = self.build
        if is_last:
            at = build.add(build.mul(n, self.width), j)
            return buffer.load(build, at, size)
        value = buffer.load(build, build.add(build.mul(n, self.rows), i), 1)
        return repeated(build, value, self.number, size)


def sum_of(build: ir.IRBuilder, pairs: list[tuple], kind: Any) -> Any:
    """Σ a b of numbers of a type."""
    total = None
    for a, b in pairs:
        term = build.fmul(a, b, flags=FLAGS)
        total = term if total is None else build.fadd(total, term, flags=FLAGS)
    return ir.Constant(kind, None) if total is None else total


def repeated(build: ir.IRBuilder, value: Any, number: Any, size: int) -> Any:
    """One number, ``size`` times."""
    if size == 1:
        return value
    empty = ir.Constant(several(number, size), ir.Undefined)
    first = build.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
    places = ir.Constant(ir.VectorType(ir.IntType(32), size), None)
    return build.shuffle_vector(first, empty, places)


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
    made, given = arranged(trace, x, rows, factors, credit, inputs_first, y_bar)
    old = list(trace.values())
    is_small = sum(e.size * e.dtype.itemsize for e in old) <= CACHES
    made = made._replace(rows_together=3 if is_small else 1)
    shapes = [*(e.shape for e in old), old[0].shape[1:]]
    *new, total = call_in_place(_Visit, made, made.name, given, shapes)
    return dict(zip(trace, new, strict=True)), total


def arranged(
    trace: Components,
    x: jax.Array,
    rows: Components,
    factors: Jacobian,
    credit: Components,
    inputs_first: bool,
    y_bar: jax.Array | None = None,
) -> tuple[Structure, list[jax.Array]]:
    """What there is of a trace, and the operands of its kernel in order, the old traces
    last."""
    rows = {s: rows[s] for s in trace if s in rows}
    factors = {(s, r): factors[s, r] for s in trace for r in trace if (s, r) in factors}
    names = (tuple(trace), tuple(rows), tuple(factors), tuple(credit))
    vectors = [*rows.values(), *factors.values(), *credit.values()]
    vectors += [] if y_bar is None else [y_bar]
    made = Structure(*names, inputs_first, y_bar is not None)
    return made, [x, *vectors, *trace.values()]


def call_in_place(
    kernel: Any,
    made: Structure,
    name: str,
    given: list[jax.Array],
    shapes: list[tuple[int, ...]],
) -> list[jax.Array]:
    """The results of a kernel, of these shapes; the first lie where the old traces,
    the last operands, do."""
    dtype = jnp.dtype(given[0].dtype)
    number = number_type(dtype)
    name = f'{name}_{dtype.name}'
    emit = lambda *parts: kernel(made, number, *parts).emit()
    register(name, number, (len(given), len(shapes)), emit)
    count = len(made.components)
    first = len(given) - count
    call = jax.ffi.ffi_call(
        name,
        [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes],
        input_output_aliases={first + n: n for n in range(count)},
        vmap_method='sequential',
    )
    return list(call(*given))
