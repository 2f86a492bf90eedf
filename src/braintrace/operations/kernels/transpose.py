"""Transposed copies of matrices, for CPUs.

XLA joins a transposed copy with the arithmetic that reads it and then walks through one
of the arrays number by number. Here both sides are read and written in whole lines of
the cache, so that values of neurons are laid out with samples last, and back, in the
time that the memory takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from llvmlite import ir

from .native import Buffer, call, loop, parts, place, rest_of, shuffled, word

SIDE = 8
"""Rows and columns that are turned in registers."""
LEAST = SIDE
"""Rows and columns from which on the kernel pays."""
TILE = 64
"""Neurons of a :class:`Tile`: several lines of the cache of each array, which are read
and written faster than one at a time."""


def transposed(x: jax.Array) -> jax.Array:
    """(a, b) as (b, a)."""
    rows, columns = x.shape
    if min(rows, columns) < LEAST:
        return x.T
    is_tall = rows > columns
    name = f'transpose_{"tall" if is_tall else "wide"}'
    out = jax.ShapeDtypeStruct((columns, rows), x.dtype)

    def emit(_: ir.IRBuilder, operands: list[Buffer], results: list[Buffer]) -> None:
        Transpose(*operands, *results).emit(is_tall)

    return call(name, emit, [x], [out])[0]


class Transpose:
    """The instructions: y[c, r] = x[r, c]."""

    def __init__(self, x: Buffer, y: Buffer):
        self.build, self.x, self.y = x.build, x, y
        self.rows, self.columns = x.size(0), x.size(1)

    def emit(self, is_tall: bool) -> None:
        """Whole squares, two at a time along the long side, then what is left."""
        build = self.build
        rows, columns = (rest_of(build, n, SIDE) for n in (self.rows, self.columns))
        sides = (self.rows, self.columns) if is_tall else (self.columns, self.rows)
        long, short = sides
        for i, count in parts(build, long, (2 * SIDE, SIDE)):
            with loop(build, 0, short, SIDE) as j:
                for n in range(0, count, SIDE):
                    at = build.add(i, word(n))
                    self._square(*((at, j) if is_tall else (j, at)))
        self._single(word(0), self.rows, columns, self.columns)
        self._single(rows, self.rows, word(0), columns)

    def _single(self, row: Any, last_row: Any, column: Any, last_column: Any) -> None:
        build = self.build
        with (
            loop(build, row, last_row, 1) as r,
            loop(build, column, last_column, 1) as c,
        ):
            value = self.x.load(place(build, r, self.columns, c), 1)
            self.y.store(value, place(build, c, self.rows, r), 1)

    def _square(self, row: Any, column: Any) -> None:
        start = place(self.build, row, self.columns, column)
        to = place(self.build, column, self.rows, row)
        turn_square(self.x, start, self.columns, self.y, to, self.rows)


def turn_square(
    x: Buffer, start: Any, x_stride: Any, y: Buffer, to: Any, y_stride: Any
) -> None:
    """A square of two matrices: line n of y has the numbers n of the lines of x.

    ``start`` and ``to`` are where the squares begin, strides lie between their lines.
    """
    build = x.build
    lines = [x.load(place(build, n, x_stride, start), SIDE) for n in range(SIDE)]
    # Three rounds swap the quarters of the square, then those of each quarter, ...
    width = SIDE // 2
    while width:
        for n in range(SIDE):
            if not n & width:
                pair = (lines[n], lines[n + width])
                lines[n] = shuffled(build, *pair, _in_turn(width, 0))
                lines[n + width] = shuffled(build, *pair, _in_turn(width, width))
        width //= 2
    for n, line in enumerate(lines):
        y.store(line, place(build, n, y_stride, to), SIDE)


def _in_turn(width: int, start: int) -> list[int]:
    """Places of groups of ``width`` numbers of two lines in turn: the first or the
    second of each two of theirs."""
    places: list[int] = []
    for n in range(0, SIDE, 2 * width):
        places += range(n + start, n + start + width)
        places += range(SIDE + n + start, SIDE + n + start + width)
    return places


class Tile:
    """Memory (neurons, width) that stays in the caches, for the values of up to
    ``TILE`` neurons, those of each beside each other. Elsewhere they are (width, all
    neurons)."""

    def __init__(self, memory: Buffer, width: Any, neurons: Any):
        self.build, self.memory = memory.build, memory
        self.width, self.neurons = width, neurons

    def parts(self) -> Iterator[tuple[Any, int]]:
        """Instructions inside run for every part of the neurons: the first of them, and
        how many there are."""
        return parts(self.build, self.neurons, (TILE, 1))

    def read(self, values: Buffer, begin: Any, first: Any, count: int) -> None:
        """Copy values of ``count`` neurons, those of each from ``begin`` on."""
        self._copy(values, begin, first, count, True)

    def write(self, values: Buffer, first: Any, count: int) -> None:
        """Copy all of the tile back."""
        self._copy(values, word(0), first, count, False)

    def _copy(
        self, values: Buffer, begin: Any, first: Any, count: int, is_read: bool
    ) -> None:
        build, width, neurons = self.build, self.width, self.neurons
        length, done = values.size(0), word(0)

        def sides(m: Any, n: Any) -> list[tuple[Buffer, Any, Any]]:
            """Number m of neuron n in memory, and the stride, where it is read and
            where it is written."""
            there = place(build, m, neurons, build.add(first, n))
            here = place(build, n, width, build.add(begin, m))
            both = [(values, there, neurons), (self.memory, here, width)]
            return both if is_read else both[::-1]

        if count == TILE:
            with (
                loop(build, 0, length, SIDE) as m,
                loop(build, 0, TILE, SIDE) as n,
            ):
                (x, start, x_stride), (y, to, y_stride) = sides(m, n)
                turn_square(x, start, x_stride, y, to, y_stride)
            done = rest_of(build, length, SIDE)
        with (
            loop(build, done, length, 1) as m,
            loop(build, 0, count, 1) as n,
        ):
            (x, start, _), (y, to, _) = sides(m, n)
            y.store(x.load(start, 1), to, 1)
