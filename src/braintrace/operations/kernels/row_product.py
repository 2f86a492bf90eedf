"""The product to rows of large arrays, for CPUs.

    y[k, r] = Σ_c w[r, c] x[k, c]

Letters as in ``products``. Models have samples k first, while synapses read and
write samples beside each other. Both are turned on the way: x is read as bits if it holds
only zeros and ones, and y is gathered in a tile.
"""

from __future__ import annotations

from typing import Any

import jax
from llvmlite import ir

from .native import Buffer, loop, number_type, register, running, several, word
from .products import Synapses, Weights, index_type
from .spike_bits import Numbers, SpikeBits, memory_for, readers
from .transpose import TILE, Tile


class _ToRows:
    """The instructions. Operands: indices, starts, weights, x; results: y, and memory
    for the bits and the numbers of x and for the tile."""

    def __init__(
        self,
        build: ir.IRBuilder,
        number: Any,
        synapses: Synapses,
        given: list[Buffer],
        results: list[Buffer],
    ):
        self.build, self.number, self.synapses = build, number, synapses
        weights, self.x = given
        self.weights = Weights(build, number, weights)
        self.y, self.words, self.numbers, memory = results
        self.samples = self.x.size(build, 0)
        self.tile = Tile(build, memory, self.samples, synapses.rows)

    def emit(self) -> None:
        """All rows."""
        build = self.build
        given = (build, self.number, self.x, self.words, self.numbers)
        for x in readers(*given):
            for first, count in self.tile.parts():
                with loop(build, word(0), word(count), 1) as n:
                    self._row(x, build.add(first, n), n)
                self.tile.write(self.y, first, count)

    def _row(self, x: SpikeBits | Numbers, row: Any, n: Any) -> None:
        """One row, to line n of the tile."""
        build, synapses = self.build, self.synapses
        for k, size in synapses.parts(self.samples):
            zero = ir.Constant(several(self.number, size), None)
            with running(build, *synapses.of_row(row), 1, zero) as (e, total):
                x.prefetch(x.place(synapses.column(synapses.later(e))))
                value = x.at(x.place(synapses.column(e)), word(0), k, size)
                total.value = x.plus(total.value, self.weights.of(e, size), value)
            at = synapses.place(n, self.samples, k)
            self.tile.memory.store(build, total.value, at, size)


def to_rows(weights: Any, indices: Any, starts: Any, x: jax.Array) -> jax.Array:
    """y (k, rows) from x (k, columns)."""
    index, dtype = index_type(indices, starts), x.dtype
    number = number_type(dtype)

    def emit(
        build: ir.IRBuilder, operands: list[Buffer], results: list[Buffer]
    ) -> None:
        synapses = Synapses(build, number, index, *operands[:2])
        _ToRows(build, number, synapses, operands[2:], results).emit()

    name = f'braintrace_to_rows_of_samples_{dtype.name}_{index.name}'
    samples, rows = x.shape[0], starts.shape[0] - 1
    outs = [jax.ShapeDtypeStruct((samples, rows), dtype), *memory_for(x, 1)]
    outs.append(jax.ShapeDtypeStruct((TILE, samples), dtype))
    register(name, number, (4, len(outs)), emit)
    run = jax.ffi.ffi_call(name, outs, vmap_method='sequential')
    return run(indices.astype(index), starts.astype(index), weights, x)[0]
