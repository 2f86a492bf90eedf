"""Products with a compressed sparse matrix.

Letters: e synapses in the order of the matrix, r rows, c columns, k the samples (or
steps and samples) of a neuron, which lie next to each other in memory. Synapses of row
r are ``starts[r]`` to ``starts[r + 1]``, and ``indices[e]`` is the column of each. One
weight for all synapses is an array of length one.

    to_columns      y[c] = Σ_r w[r, c] x[r]
    to_rows         y[r] = Σ_c w[r, c] x[c]
    at_synapses     g[e] = Σ_k rows[r, k] columns[c, k]

The samples of a neuron are taken in whole vectors. Neurons whose entries are all zero
are skipped, so that the cost of spikes is that of the neurons that fire. Neurons of
later synapses are asked for in advance, since they lie anywhere in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import is_gathered, is_large
from . import llvm
from .layouts import TILE, Tile, memory_for, readers, transposed
from .llvm import BIT, Buffer, Code, Value

AHEAD = 8
"""Synapses between the one that is taken and the one whose neurons are asked for."""
SAMPLES = (32, 8, 1)
"""Samples that are taken together: the most that fit."""
WIDTH = 8
"""Products that are added up together."""
TOGETHER = 4
NEAR = 2**20
"""Bytes of an array below which nothing is asked for in advance: it stays in the second
cache, and asking takes longer than it saves."""


class Synapses:
    """A matrix in memory, and what loops over its synapses have in common."""

    def __init__(self, indices: Buffer, starts: Buffer):
        self.code, self.indices, self.starts = indices.code, indices, starts
        self.rows = starts.size(0) - 1
        self.last = indices.size(0) - 1

    def of_row(self, row: Value) -> tuple[Value, Value]:
        """Where they start and stop."""
        return self.starts.index(row), self.starts.index(row + 1)

    def column(self, synapse: Value) -> Value:
        return self.indices.index(synapse)

    def later(self, synapse: Value) -> Value:
        """A synapse that will soon be taken after another."""
        later = synapse + AHEAD
        return (later < self.last).select(later, self.last)

    def is_far(self, values: Buffer) -> Value:
        """Whether an array (neurons, length) is larger than a core's own caches."""
        return values.size(0) * values.size(1) > NEAR // values.width

    def prefetch(self, values: Buffer, e: Value, k: Value, size: int) -> None:
        """Ask for entries of the column of a synapse that will soon be taken."""
        column = self.column(self.later(e))
        values.prefetch(column * values.size(1) + k, size)

    def synapses(
        self, row: Value, is_far: Value, values: Buffer, k: Value, size: int
    ) -> Iterator[Value]:
        """Every synapse of a row: with entries of later columns asked for in advance,
        or some at a time."""
        first, stop = self.of_row(row)
        for far in self.code.either(is_far):
            if far:
                for e in self.code.loop(first, stop):
                    self.prefetch(values, e, k, size)
                    yield e
            else:
                for e, count in self.code.parts(stop, (TOGETHER, 1), first):
                    for n in range(count):
                        yield e + n


def _weights(values: Buffer) -> Callable[[Value], Value]:
    """The weight of a synapse: there is one for each, or one for all."""
    code = values.code
    stride = values.size(0).equals(1).select(code.word(0), code.word(1))
    return lambda synapse: values.load(synapse * stride)


def _to_columns(made: Synapses, given: list[Buffer], results: list[Buffer]) -> None:
    code, weight, x, (y,) = made.code, _weights(given[0]), given[1], results
    samples, is_far = x.size(1), made.is_far(y)
    for k, size in code.parts(y.size(0) * samples, SAMPLES):
        y.store(code.zeros(y.number, size), k)
    for row in code.loop(0, made.rows):
        for k, size in code.parts(samples, SAMPLES):
            value = x.load(row * samples + k, size)
            with code.when(value.differs(0).is_any()):
                for e in made.synapses(row, is_far, y, k, size):
                    at = made.column(e) * samples + k
                    y.store(y.load(at, size) + weight(e) * value, at)


def _to_rows(made: Synapses, given: list[Buffer], results: list[Buffer]) -> None:
    code, weight, x, (y,) = made.code, _weights(given[0]), given[1], results
    samples, is_far = x.size(1), made.is_far(x)
    for row in code.loop(0, made.rows):
        for k, size in code.parts(samples, SAMPLES):
            total = code.variable(code.zeros(y.number, size))
            for e in made.synapses(row, is_far, x, k, size):
                value = x.load(made.column(e) * samples + k, size)
                total.value = total.value + weight(e) * value
            y.store(total.value, row * samples + k)


def _at_synapses(made: Synapses, given: list[Buffer], results: list[Buffer]) -> None:
    code, (rows, columns), (out,) = made.code, given, results
    length, is_far = rows.size(1), made.is_far(columns)
    for row in code.loop(0, made.rows):
        begin = row * length
        is_live = code.variable(code.zeros(BIT, 1))
        for k, size in code.parts(length, (WIDTH, 1)):
            differs = rows.load(begin + k, size).differs(0)
            is_live.value = is_live.value | differs.is_any()
        for live in code.either(is_live.value):
            if not live:
                for e in code.loop(*made.of_row(row)):
                    out.store(code.zeros(out.number, 1), e)
                continue
            for e in made.synapses(row, is_far, columns, code.word(0), SAMPLES[0]):
                column = made.column(e) * length
                total = code.variable(code.zeros(out.number, WIDTH))
                for k in code.loop(0, length, WIDTH):
                    a, b = rows.load(begin + k, WIDTH), columns.load(column + k, WIDTH)
                    total.value = total.value + a * b
                total.value = total.value.added_up()
                for k in code.loop(length // WIDTH * WIDTH, length):
                    more = rows.load(begin + k) * columns.load(column + k)
                    total.value = total.value + more
                out.store(total.value, e)


def at_synapses(
    indices: Any, starts: Any, rows: jax.Array, columns: jax.Array
) -> jax.Array:
    """Σ_k of values at the row times values at the column of each synapse."""
    out = jax.ShapeDtypeStruct(indices.shape, rows.dtype)
    lists, values = (indices, starts), (rows, columns)
    return call_on_synapses('at_synapses', _at_synapses, lists, values, [out])


def to_columns(
    indices: Any, starts: Any, weights: Any, x: Any, size: int, by_column: Any
) -> jax.Array:
    """y (size, k) from x (rows, k). ``by_column``: the synapses in the order of their
    columns, if these are known; large products are then gathered."""
    if by_column is None:
        return _product('to_columns', _to_columns, indices, starts, weights, x, size)
    # XLA sorts the weights once, before the loop over steps.
    if weights.size > 1:
        weights = weights[by_column.order]
    return _rows_of_samples(by_column.rows, by_column.starts, weights, x.T).T


def to_rows(
    indices: Any, starts: Any, weights: Any, x: Any, size: int, by_column: Any
) -> jax.Array:
    """y (rows, k) from x (columns, k)."""
    if is_gathered(x):
        return _rows_of_samples(indices, starts, weights, x.T).T
    return _product('to_rows', _to_rows, indices, starts, weights, x, size)


def _product(
    name: str, emit: Any, indices: Any, starts: Any, weights: Any, x: Any, size: int
) -> jax.Array:
    """A product by one of the loops above. Models have samples first, so that x is a
    transposed array. XLA would join that with the arithmetic around it, which then
    walks through large arrays number by number."""
    x = transposed(x.T) if is_large(x) else x
    out = jax.ShapeDtypeStruct((size, x.shape[1]), x.dtype)
    y = call_on_synapses(name, emit, (indices, starts), (weights, x), [out])
    return transposed(y).T if is_large(y) else y


def call_on_synapses(
    name: str,
    emit: Callable[[Synapses, list[Buffer], list[Buffer]], None],
    lists: Sequence[Any],
    values: Sequence[Any],
    results: Sequence[jax.ShapeDtypeStruct],
) -> jax.Array:
    """The first result of a kernel on synapses; ``lists``: indices and starts."""

    def on_synapses(_: Code, operands: list[Buffer], results: list[Buffer]) -> None:
        emit(Synapses(*operands[:2]), operands[2:], results)

    return llvm.call(name, on_synapses, [*as_indices(lists), *values], results)[0]


def as_indices(lists: Sequence[Any]) -> list[Any]:
    """Arrays of indices in one type that kernels read."""
    if not lists:
        return []
    index = jnp.result_type(*lists)
    if index not in (jnp.int32, jnp.int64):
        index = jnp.dtype(jnp.int32)
    return [v.astype(index) for v in lists]


# ---------------------------------------------------------------- large arrays


def _rows_of_samples(
    indices: Any, starts: Any, weights: Any, x: jax.Array
) -> jax.Array:
    """y[k, r] = Σ_c w[r, c] x[k, c], of large arrays with samples first, as models have
    them. Both are turned on the way: x is read as bits if it holds only zeros and ones,
    and y is gathered in a tile."""
    samples, rows = x.shape[0], starts.shape[0] - 1
    outs = [jax.ShapeDtypeStruct((samples, rows), x.dtype), *memory_for(x, 1)]
    outs.append(jax.ShapeDtypeStruct((TILE, samples), x.dtype))

    def emit(made: Synapses, given: list[Buffer], results: list[Buffer]) -> None:
        code, weight = made.code, _weights(given[0])
        y, words, numbers, memory = results
        samples = given[1].size(0)
        tile = Tile(memory, samples, made.rows)
        for x in readers(given[1], words, numbers):
            for first, count in tile.parts():
                for n in code.loop(0, count):
                    for k, size in code.parts(samples, SAMPLES):
                        total = code.variable(code.zeros(y.number, size))
                        for e in code.loop(*made.of_row(first + n)):
                            x.prefetch(x.place(made.column(made.later(e))))
                            begin = x.place(made.column(e))
                            value = x.at(begin, code.word(0), k, size)
                            added = weight(e).repeated(size)
                            total.value = x.plus(total.value, added, value)
                        memory.store(total.value, n * samples + k)
                tile.write(y, first, count)

    name, lists = 'to_rows_of_samples', (indices, starts)
    return call_on_synapses(name, emit, lists, (weights, x), outs)
