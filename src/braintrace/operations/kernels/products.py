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

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from llvmlite import ir

from .dense_visit import FLAGS, repeated
from .native import (
    WORD,
    Buffer,
    Running,
    loop,
    number_type,
    register,
    rest_of,
    running,
    several,
    word,
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

    def __init__(
        self, build: ir.IRBuilder, number: Any, index: Any, indices: Any, starts: Any
    ):
        self.build, self.number = build, number
        self.whole = ir.IntType(8 * index.itemsize)
        self.indices, self.starts = self.holding(indices), self.holding(starts)
        self.rows = build.sub(starts.size(build, 0), word(1))
        self.last = build.sub(indices.size(build, 0), word(1))

    def holding(self, indices: Buffer) -> Buffer:
        """An array of indices."""
        return indices.holding(self.whole)

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
        entries = build.mul(values.size(build, 0), values.size(build, 1))
        width = 4 if self.number == ir.FloatType() else 8
        return build.icmp_signed('>', entries, word(NEAR // width))

    def synapses(
        self, row: Any, is_far: Any, values: Buffer, k: Any, size: int
    ) -> Iterator[Any]:
        """Instructions inside run for every synapse of a row."""
        build = self.build
        first, stop = self.of_row(row)
        with build.if_else(is_far) as (far, near):
            with far, loop(build, first, stop, 1) as e:
                self.prefetch(values, e, k, size)
                yield e
            with near:
                done = first
                for count in (TOGETHER, 1):
                    with loop(build, done, stop, count) as e:
                        for n in range(count):
                            yield build.add(e, word(n))
                    several_ = rest_of(build, build.sub(stop, first), count)
                    done = build.add(first, several_)

    def sums(
        self, row: Any, is_far: Any, values: Buffer, k: Any, size: int
    ) -> Iterator[tuple[Any, Running]]:
        """The same with a sum of ``size`` numbers, which instructions inside add to."""
        build = self.build
        zero = ir.Constant(several(self.number, size), None)
        first, stop = self.of_row(row)
        found = []
        with build.if_else(is_far) as (far, near):
            with far:
                with running(build, first, stop, 1, zero) as (e, total):
                    self.prefetch(values, e, k, size)
                    yield e, total
                found.append((total.value, build.block))
            with near:
                done, value = first, zero
                for count in (TOGETHER, 1):
                    with running(build, done, stop, count, value) as (e, total):
                        for n in range(count):
                            yield build.add(e, word(n)), total
                    value = total.value
                    several_ = rest_of(build, build.sub(stop, first), count)
                    done = build.add(first, several_)
                found.append((value, build.block))
        total.value = build.phi(zero.type)
        for value, block in found:
            total.value.add_incoming(value, block)

    def prefetch(self, values: Buffer, e: Any, k: Any, size: int) -> None:
        """Ask for entries of the column of a synapse that will soon be taken."""
        at = self.place(self.column(self.later(e)), values.size(self.build, 1), k)
        values.prefetch(self.build, at, size)

    def place(self, neuron: Any, length: Any, k: Any) -> Any:
        """The number of an entry of an array (neurons, length)."""
        return self.build.add(self.build.mul(neuron, length), k)

    def parts(self, length: Any) -> Iterator[tuple[Any, int]]:
        """Instructions inside run for every part of a neuron's entries: where it
        starts, and how many there are."""
        done = word(0)
        for size in WIDTHS:
            with loop(self.build, done, length, size) as k:
                yield k, size
            done = rest_of(self.build, length, size)

    def is_live(self, value: Any) -> Any:
        """Whether any of some numbers differs from zero; NaN does."""
        build = self.build
        differs = build.fcmp_unordered('!=', value, ir.Constant(value.type, None))
        if value.type == self.number:
            return differs
        bits = build.bitcast(differs, ir.IntType(value.type.count))
        return build.icmp_unsigned('!=', bits, ir.Constant(bits.type, 0))

    def plus(self, total: Any, a: Any, b: Any) -> Any:
        """total + a b."""
        term = self.build.fmul(a, b, flags=FLAGS)
        return self.build.fadd(total, term, flags=FLAGS)

    def entry(self, indices: Buffer, at: Any) -> Any:
        """One of an array of indices."""
        found = indices.load(self.build, at, 1)
        return found if found.type == WORD else self.build.sext(found, WORD)


class Weights:
    """One weight for each synapse, or one for all."""

    def __init__(self, build: ir.IRBuilder, number: Any, values: Buffer):
        self._build, self._number, self._values = build, number, values
        is_one = build.icmp_signed('==', values.size(build, 0), word(1))
        self._stride = build.select(is_one, word(0), word(1))

    def of(self, synapse: Any, size: int) -> Any:
        """The weight of a synapse, ``size`` times."""
        at = self._build.mul(synapse, self._stride)
        value = self._values.load(self._build, at, 1)
        return repeated(self._build, value, self._number, size)


def _to_columns(build: ir.IRBuilder, made: Synapses, given: list, y: Buffer) -> None:
    weights, x = Weights(build, made.number, given[0]), given[1]
    samples, is_far = x.size(build, 1), made.is_far(y)
    for k, size in made.parts(build.mul(y.size(build, 0), samples)):
        y.store(build, ir.Constant(several(made.number, size), None), k, size)
    with loop(build, word(0), made.rows, 1) as row:
        for k, size in made.parts(samples):
            value = x.load(build, made.place(row, samples, k), size)
            with build.if_then(made.is_live(value)):
                for e in made.synapses(row, is_far, y, k, size):
                    at = made.place(made.column(e), samples, k)
                    old, weight = y.load(build, at, size), weights.of(e, size)
                    y.store(build, made.plus(old, weight, value), at, size)


def _to_rows(build: ir.IRBuilder, made: Synapses, given: list, y: Buffer) -> None:
    weights, x = Weights(build, made.number, given[0]), given[1]
    samples, is_far = x.size(build, 1), made.is_far(x)
    with loop(build, word(0), made.rows, 1) as row:
        for k, size in made.parts(samples):
            total: Any = None
            for e, total in made.sums(row, is_far, x, k, size):
                at = made.place(made.column(e), samples, k)
                value = x.load(build, at, size)
                total.value = made.plus(total.value, weights.of(e, size), value)
            y.store(build, total.value, made.place(row, samples, k), size)


def _at_synapses(build: ir.IRBuilder, made: Synapses, given: list, out: Buffer) -> None:
    rows, columns = given
    length, is_far = rows.size(build, 1), made.is_far(columns)
    zero = ir.Constant(made.number, None)
    with loop(build, word(0), made.rows, 1) as row:
        either = build.if_else(_is_any_live(made, rows, row))
        with either as (live, silent):
            with live:
                for e in made.synapses(row, is_far, columns, word(0), WIDTHS[0]):
                    found = _product(made, rows, row, columns, made.column(e), length)
                    out.store(build, found, e, 1)
            with silent, loop(build, *made.of_row(row), 1) as e:
                out.store(build, zero, e, 1)


def _is_any_live(made: Synapses, rows: Buffer, row: Any) -> Any:
    """Whether any entry of a row differs from zero."""
    build, length = made.build, rows.size(made.build, 1)
    found, done = ir.Constant(ir.IntType(1), 0), word(0)
    for size in (WIDTH, 1):
        with running(build, done, length, size, found) as (k, total):
            value = rows.load(build, made.place(row, length, k), size)
            total.value = build.or_(total.value, made.is_live(value))
        found, done = total.value, rest_of(build, length, size)
    return found


def _product(
    made: Synapses, rows: Buffer, row: Any, columns: Buffer, column: Any, length: Any
) -> Any:
    """Σ_k rows[r, k] columns[c, k]."""
    build = made.build
    found: Any = ir.Constant(several(made.number, WIDTH), None)
    done = word(0)
    for size in (WIDTH, 1):
        with running(build, done, length, size, found) as (k, total):
            a = rows.load(build, made.place(row, length, k), size)
            b = columns.load(build, made.place(column, length, k), size)
            total.value = made.plus(total.value, a, b)
        found, done = total.value, rest_of(build, length, size)
        if size > 1:
            found = add_up(build, found)
    return found


def add_up(build: ir.IRBuilder, value: Any, width: int = 1) -> Any:
    """The sum of the numbers of a vector, or ``width`` numbers that have that sum."""
    size = value.type.count
    small = ir.IntType(32)
    while size > width:
        size //= 2
        halves = []
        for start in (0, size):
            places = [ir.Constant(small, start + n) for n in range(size)]
            mask = ir.Constant(ir.VectorType(small, size), places)
            halves.append(build.shuffle_vector(value, value, mask))
        value = build.fadd(*halves, flags=FLAGS)
    return build.extract_element(value, ir.Constant(small, 0)) if width == 1 else value


_KERNELS: dict[str, Callable[..., None]] = {
    'to_columns': _to_columns,
    'to_rows': _to_rows,
    'at_synapses': _at_synapses,
}


def index_type(indices: Any, starts: Any) -> Any:
    """The type of index arrays that a kernel takes."""
    found = jnp.result_type(indices, starts)
    return found if found in (jnp.int32, jnp.int64) else jnp.dtype(jnp.int32)


def call(
    name: str, shape: tuple[int, ...], indices: Any, starts: Any, *values: jax.Array
) -> jax.Array:
    """A result of a shape by one of the loops above; ``values``: weights and x, or the
    values of rows and columns."""
    index, dtype = index_type(indices, starts), values[0].dtype
    number = number_type(dtype)

    def emit(
        build: ir.IRBuilder, operands: list[Buffer], results: list[Buffer]
    ) -> None:
        made = Synapses(build, number, index, *operands[:2])
        _KERNELS[name](build, made, operands[2:], *results)

    target = f'braintrace_{name}_{dtype.name}_{index.name}'
    register(target, number, (4, 1), emit)
    run = jax.ffi.ffi_call(
        target, jax.ShapeDtypeStruct(shape, dtype), vmap_method='sequential'
    )
    return run(indices.astype(index), starts.astype(index), *values)
