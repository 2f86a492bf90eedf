"""Loops over the synapses of a compressed sparse matrix, for CPUs.

Letters: e synapses in the order of the matrix, r rows, c columns, k the samples (or
steps and samples) of a neuron, which lie next to each other in memory. Synapses of row
r are ``starts[r]`` to ``starts[r + 1]``, and ``indices[e]`` is the column of each. One
weight for all synapses is an array of length one.

    to_columns      y[c] = Σ_r w[r, c] x[r]
    to_rows         y[r] = Σ_c w[r, c] x[c]
    at_synapses     g[e] = Σ_k rows[r, k] columns[c, k]

The samples of a neuron are taken in whole vectors. A compiler that knows neither their
number nor whether x and y share memory would test both at every synapse, which takes
longer than the product. Neurons whose entries are all zero are skipped, so that the
cost of spikes is that of the neurons that fire. Neurons of later synapses are asked for
in advance, since they lie anywhere in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from llvmlite import ir

from . import native
from .native import (
    BIT,
    WORD,
    Buffer,
    add_up,
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
    zeros,
)

AHEAD = 8
"""Synapses between the one that is taken and the one whose neurons are asked for."""
WIDTHS = (32, 8, 1)
"""Samples that are taken together: the most that fit."""
WIDTH = 8
"""Products that are added up together."""
TOGETHER = 4
NEAR = 2**20
"""Bytes of an array below which nothing is asked for in advance: it stays in the second
cache, and asking takes longer than it saves."""


class Synapses:
    """A matrix in memory, and the instructions that products have in common."""

    def __init__(self, indices: Buffer, starts: Buffer):
        self.build, self.indices, self.starts = indices.build, indices, starts
        self.rows = self.build.sub(starts.size(0), word(1))
        self.last = self.build.sub(indices.size(0), word(1))

    def of_row(self, row: Any) -> tuple[Any, Any]:
        """Where the synapses of a row start and stop."""
        next_row = self.build.add(row, word(1))
        return self.entry(self.starts, row), self.entry(self.starts, next_row)

    def column(self, synapse: Any) -> Any:
        """The column of a synapse."""
        return self.entry(self.indices, synapse)

    def later(self, synapse: Any) -> Any:
        """A synapse that will soon be taken after another."""
        build = self.build
        later = build.add(synapse, word(AHEAD))
        is_there = build.icmp_signed('<', later, self.last)
        return build.select(is_there, later, self.last)

    def is_far(self, values: Buffer) -> Any:
        """Whether an array (neurons, length) is larger than a core's own caches."""
        build = self.build
        entries = build.mul(values.size(0), values.size(1))
        width = 4 if values.number == ir.FloatType() else 8
        return build.icmp_signed('>', entries, word(NEAR // width))

    def synapses(
        self,
        row: Any,
        is_far: Any,
        values: Buffer,
        k: Any,
        size: int,
        zero: Any = None,
    ) -> Iterator[tuple[Any, Any]]:
        """Instructions inside run for every synapse of a row; with ``zero`` they add to
        a running sum, which starts from it."""
        build = self.build
        first, stop = self.of_row(row)
        start = {} if zero is None else {0: zero}
        ends = []
        with build.if_else(is_far) as (far, near):
            with far:
                with running_all(build, first, stop, 1, start) as (e, found):
                    self.prefetch(values, e, k, size)
                    yield e, found.get(0)
                ends.append(({n: x.value for n, x in found.items()}, build.block))
            with near:
                done = first
                for count in (TOGETHER, 1):
                    with running_all(build, done, stop, count, start) as (e, found):
                        for n in range(count):
                            yield build.add(e, word(n)), found.get(0)
                    start = {n: x.value for n, x in found.items()}
                    several_ = rest_of(build, build.sub(stop, first), count)
                    done = build.add(first, several_)
                ends.append((start, build.block))
        for name, total in found.items():
            total.value = build.phi(total.value.type)
            for reached, block in ends:
                total.value.add_incoming(reached[name], block)

    def prefetch(self, values: Buffer, e: Any, k: Any, size: int) -> None:
        """Ask for entries of the column of a synapse that will soon be taken."""
        column = self.column(self.later(e))
        values.prefetch(place(self.build, column, values.size(1), k), size)

    def entry(self, indices: Buffer, at: Any) -> Any:
        """One of an array of indices."""
        found = indices.load(at, 1)
        return found if found.type == WORD else self.build.sext(found, WORD)


class Weights:
    """One weight for each synapse, or one for all."""

    def __init__(self, values: Buffer):
        self._build, self._values = values.build, values
        is_one = self._build.icmp_signed('==', values.size(0), word(1))
        self._stride = self._build.select(is_one, word(0), word(1))

    def of(self, synapse: Any, size: int) -> Any:
        """The weight of a synapse, ``size`` times."""
        at = self._build.mul(synapse, self._stride)
        return repeated(self._build, self._values.load(at, 1), size)


def _to_columns(made: Synapses, given: list[Buffer], y: Buffer) -> None:
    build, weights, x = made.build, Weights(given[0]), given[1]
    samples, is_far = x.size(1), made.is_far(y)
    for k, size in parts(build, build.mul(y.size(0), samples), WIDTHS):
        y.store(zeros(y.number, size), k, size)
    with loop(build, 0, made.rows, 1) as row:
        for k, size in parts(build, samples, WIDTHS):
            value = x.load(place(build, row, samples, k), size)
            with build.if_then(_is_live(build, value)):
                for e, _ in made.synapses(row, is_far, y, k, size):
                    at = place(build, made.column(e), samples, k)
                    old, weight = y.load(at, size), weights.of(e, size)
                    y.store(plus(build, old, weight, value), at, size)


def _to_rows(made: Synapses, given: list[Buffer], y: Buffer) -> None:
    build, weights, x = made.build, Weights(given[0]), given[1]
    samples, is_far = x.size(1), made.is_far(x)
    with loop(build, 0, made.rows, 1) as row:
        for k, size in parts(build, samples, WIDTHS):
            total: Any = None
            zero = zeros(y.number, size)
            for e, total in made.synapses(row, is_far, x, k, size, zero):
                value = x.load(place(build, made.column(e), samples, k), size)
                total.value = plus(build, total.value, weights.of(e, size), value)
            y.store(total.value, place(build, row, samples, k), size)


def _at_synapses(made: Synapses, given: list[Buffer], out: Buffer) -> None:
    build = made.build
    rows, columns = given
    length, is_far = rows.size(1), made.is_far(columns)
    with loop(build, 0, made.rows, 1) as row:
        either = build.if_else(_is_any_live(rows, row))
        with either as (live, silent):
            with live:
                for e, _ in made.synapses(row, is_far, columns, word(0), WIDTHS[0]):
                    found = _product(rows, row, columns, made.column(e), length)
                    out.store(found, e, 1)
            with silent, loop(build, *made.of_row(row), 1) as e:
                out.store(zeros(out.number, 1), e, 1)


def _is_live(build: ir.IRBuilder, value: Any) -> Any:
    """Whether any of some numbers differs from zero."""
    differs = differs_from_zero(build, value)
    if differs.type == BIT:
        return differs
    bits = build.bitcast(differs, ir.IntType(value.type.count))
    return build.icmp_unsigned('!=', bits, ir.Constant(bits.type, 0))


def _is_any_live(rows: Buffer, row: Any) -> Any:
    """Whether any entry of a row differs from zero."""
    build, length = rows.build, rows.size(1)
    found, done = ir.Constant(BIT, 0), word(0)
    for size in (WIDTH, 1):
        with running(build, done, length, size, found) as (k, total):
            value = rows.load(place(build, row, length, k), size)
            total.value = build.or_(total.value, _is_live(build, value))
        found, done = total.value, rest_of(build, length, size)
    return found


def _product(rows: Buffer, row: Any, columns: Buffer, column: Any, length: Any) -> Any:
    """Σ_k rows[r, k] columns[c, k]."""
    build = rows.build
    found, done = zeros(rows.number, WIDTH), word(0)
    for size in (WIDTH, 1):
        with running(build, done, length, size, found) as (k, total):
            a = rows.load(place(build, row, length, k), size)
            b = columns.load(place(build, column, length, k), size)
            total.value = plus(build, total.value, a, b)
        found, done = total.value, rest_of(build, length, size)
        if size > 1:
            found = add_up(build, found)
    return found


_KERNELS: dict[str, Callable[[Synapses, list[Buffer], Buffer], None]] = {
    'to_columns': _to_columns,
    'to_rows': _to_rows,
    'at_synapses': _at_synapses,
}


def call(
    name: str, shape: tuple[int, ...], indices: Any, starts: Any, *values: jax.Array
) -> jax.Array:
    """A result of a shape by one of the loops above; ``values``: weights and x, or the
    values of rows and columns."""
    emit = lambda made, given, results: _KERNELS[name](made, given, *results)
    out = jax.ShapeDtypeStruct(shape, values[0].dtype)
    return call_on_synapses(name, emit, (indices, starts), values, [out])[0]


def call_on_synapses(
    name: str,
    emit: Callable[[Synapses, list[Buffer], list[Buffer]], None],
    lists: Sequence[Any],
    values: Sequence[Any],
    results: Sequence[jax.ShapeDtypeStruct],
    in_place: Sequence[Any] = (),
) -> list[jax.Array]:
    """The results of a kernel on synapses; ``emit(synapses, operands, results)`` adds
    its instructions. ``lists``: indices, starts and any further array of indices."""
    index = jnp.result_type(*lists)
    if index not in (jnp.int32, jnp.int64):
        index = jnp.dtype(jnp.int32)

    def on_synapses(
        _: ir.IRBuilder, operands: list[Buffer], results: list[Buffer]
    ) -> None:
        emit(Synapses(*operands[:2]), operands[2:], results)

    given = [*(v.astype(index) for v in lists), *values]
    return native.call(name, on_synapses, given, results, in_place)
