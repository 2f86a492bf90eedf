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

from .native import Buffer, loop, number_type, register, rest_of, word

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
    number, is_tall = number_type(x.dtype), rows > columns

    def emit(
        build: ir.IRBuilder, operands: list[Buffer], results: list[Buffer]
    ) -> None:
        Transpose(build, *operands, *results).emit(is_tall)

    name = f'braintrace_transpose_{"tall" if is_tall else "wide"}_{x.dtype.name}'
    register(name, number, (1, 1), emit)
    out = jax.ShapeDtypeStruct((columns, rows), x.dtype)
    return jax.ffi.ffi_call(name, out, vmap_method='sequential')(x)


class Transpose:
    """The instructions: y[c, r] = x[r, c]."""

    def __init__(self, build: ir.IRBuilder, x: Buffer, y: Buffer):
        self.build, self.x, self.y = build, x, y
        self.rows, self.columns = x.size(build, 0), x.size(build, 1)

    def emit(self, is_tall: bool) -> None:
        """Whole squares, two at a time along the long side, then what is left."""
        build = self.build
        rows, columns = (rest_of(build, n, SIDE) for n in (self.rows, self.columns))
        sides = (self.rows, self.columns) if is_tall else (self.columns, self.rows)
        long, short = sides
        done = word(0)
        for count in (2, 1):
            with (
                loop(build, done, long, count * SIDE) as i,
                loop(build, word(0), short, SIDE) as j,
            ):
                for n in range(count):
                    at = build.add(i, word(n * SIDE))
                    self._square(*((at, j) if is_tall else (j, at)))
            done = rest_of(build, long, count * SIDE)
        self._single(word(0), self.rows, columns, self.columns)
        self._single(rows, self.rows, word(0), columns)

    def _single(self, row: Any, last_row: Any, column: Any, last_column: Any) -> None:
        build = self.build
        with (
            loop(build, row, last_row, 1) as r,
            loop(build, column, last_column, 1) as c,
        ):
            value = self.x.load(build, build.add(build.mul(r, self.columns), c), 1)
            self.y.store(build, value, build.add(build.mul(c, self.rows), r), 1)

    def _square(self, row: Any, column: Any) -> None:
        build = self.build
        start = build.add(build.mul(row, self.columns), column)
        to = build.add(build.mul(column, self.rows), row)
        turn_square(build, self.x, start, self.columns, self.y, to, self.rows)


def turn_square(
    build: ir.IRBuilder,
    x: Buffer,
    start: Any,
    x_stride: Any,
    y: Buffer,
    to: Any,
    y_stride: Any,
) -> None:
    """A square of two matrices: line n of y has the numbers n of the lines of x.

    ``start`` and ``to`` are where the squares begin, strides lie between their lines.
    """
    lines = []
    for n in range(SIDE):
        at = build.add(start, build.mul(word(n), x_stride))
        lines.append(x.load(build, at, SIDE))
    # Three rounds swap the quarters of the square, then those of each quarter, ...
    width = SIDE // 2
    while width:
        for n in range(SIDE):
            if not n & width:
                pair = (lines[n], lines[n + width])
                lines[n] = _merged(build, *pair, width, 0)
                lines[n + width] = _merged(build, *pair, width, width)
        width //= 2
    for n, line in enumerate(lines):
        at = build.add(to, build.mul(word(n), y_stride))
        y.store(build, line, at, SIDE)


def _merged(build: ir.IRBuilder, a: Any, b: Any, width: int, start: int) -> Any:
    """Groups of ``width`` numbers of a and b in turn: the first or the second of each
    two of theirs."""
    places: list[int] = []
    for n in range(0, SIDE, 2 * width):
        places += range(n + start, n + start + width)
        places += range(SIDE + n + start, SIDE + n + start + width)
    small = ir.IntType(32)
    chosen = [ir.Constant(small, n) for n in places]
    mask = ir.Constant(ir.VectorType(small, SIDE), chosen)
    return build.shuffle_vector(a, b, mask)


class Tile:
    """Memory (neurons, width) that stays in the caches, for the values of up to
    ``TILE`` neurons, those of each beside each other. Elsewhere they are (width, all
    neurons)."""

    def __init__(self, build: ir.IRBuilder, memory: Buffer, width: Any, neurons: Any):
        self.build, self.memory = build, memory
        self.width, self.neurons = width, neurons

    def parts(self) -> Iterator[tuple[Any, int]]:
        """Instructions inside run for every part of the neurons: the first of them, and
        how many there are."""
        done = word(0)
        for count in (TILE, 1):
            with loop(self.build, done, self.neurons, count) as first:
                yield first, count
            done = rest_of(self.build, self.neurons, count)

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
        length, done = values.size(build, 0), word(0)

        def places(m: Any, n: Any) -> tuple[Any, Any]:
            """Number m of neuron n, there and in the tile."""
            there = build.add(build.mul(m, neurons), build.add(first, n))
            return there, build.add(build.mul(n, width), build.add(begin, m))

        if count == TILE:
            with (
                loop(build, word(0), length, SIDE) as m,
                loop(build, word(0), word(TILE), SIDE) as n,
            ):
                there, here = places(m, n)
                sides = (values, there, neurons), (self.memory, here, width)
                one, other = sides if is_read else sides[::-1]
                turn_square(build, *one, *other)
            done = rest_of(build, length, SIDE)
        with (
            loop(build, done, length, 1) as m,
            loop(build, word(0), word(count), 1) as n,
        ):
            there, here = places(m, n)
            if is_read:
                self.memory.store(build, values.load(build, there, 1), here, 1)
            else:
                values.store(build, self.memory.load(build, here, 1), there, 1)
