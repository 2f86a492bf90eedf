"""The product to rows of large arrays, for CPUs.

    y[k, r] = Σ_c w[r, c] x[k, c]

Letters as in ``products``. Models have samples k first, while synapses read and
write samples beside each other. Both are turned on the way: x is read as bits if it holds
only zeros and ones, and y is gathered in a tile.
"""

from __future__ import annotations

from typing import Any

import jax

from .native import Buffer, loop, parts, place, running, word, zeros
from .products import WIDTHS, Synapses, Weights, call_on_synapses
from .spike_bits import Numbers, SpikeBits, memory_for, readers
from .transpose import TILE, Tile


class _ToRows:
    """The instructions. Operands: weights, x; results: y, and memory for the bits and
    the numbers of x and for the tile."""

    def __init__(self, synapses: Synapses, given: list[Buffer], results: list[Buffer]):
        self.build, self.synapses = synapses.build, synapses
        weights, self.x = given
        self.weights = Weights(weights)
        self.y, self.words, self.numbers, memory = results
        self.samples = self.x.size(0)
        self.tile = Tile(memory, self.samples, synapses.rows)

    def emit(self) -> None:
        """All rows."""
        build = self.build
        for x in readers(self.x, self.words, self.numbers):
            for first, count in self.tile.parts():
                with loop(build, 0, count, 1) as n:
                    self._row(x, build.add(first, n), n)
                self.tile.write(self.y, first, count)

    def _row(self, x: SpikeBits | Numbers, row: Any, n: Any) -> None:
        """One row, to line n of the tile."""
        build, synapses = self.build, self.synapses
        for k, size in parts(build, self.samples, WIDTHS):
            zero = zeros(self.x.number, size)
            with running(build, *synapses.of_row(row), 1, zero) as (e, total):
                x.prefetch(x.place(synapses.column(synapses.later(e))))
                value = x.at(x.place(synapses.column(e)), word(0), k, size)
                total.value = x.plus(total.value, self.weights.of(e, size), value)
            at = place(build, n, self.samples, k)
            self.tile.memory.store(total.value, at, size)


def to_rows(weights: Any, indices: Any, starts: Any, x: jax.Array) -> jax.Array:
    """y (k, rows) from x (k, columns)."""
    samples, rows = x.shape[0], starts.shape[0] - 1
    outs = [jax.ShapeDtypeStruct((samples, rows), x.dtype), *memory_for(x, 1)]
    outs.append(jax.ShapeDtypeStruct((TILE, samples), x.dtype))
    emit = lambda *given: _ToRows(*given).emit()
    name, lists = 'to_rows_of_samples', (indices, starts)
    return call_on_synapses(name, emit, lists, (weights, x), outs)[0]
