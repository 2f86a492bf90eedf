"""How kernels lay values of neurons out in memory: as bits, transposed, in tiles.

Letters: t steps, k samples, n neurons. x (t and k, n) that holds only zeros and ones is
written as bits, words of 32 samples (n, t, words), which fit into the caches: synapses
read neurons in any order. Any other x is written as numbers (n, t and k), so that what a
synapse reads lies in one place.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from llvmlite import ir

from .. import is_large
from .llvm import SMALL, Buffer, Value, call

BITS = 32
"""Samples of a word."""
TOGETHER = 32
"""Neurons whose words are written together."""
MOST_PREFETCHED = 32
"""Numbers of a neuron that are asked for in advance: the processor sees by itself that
the others follow."""
SIDE = 8
"""Rows and columns that are turned in registers."""
LEAST = SIDE
"""Rows and columns from which on a kernel that transposes pays."""
TILE = 64
"""Neurons of a :class:`Tile`: several lines of the cache of each array, which are read
and written faster than one at a time."""


# ---------------------------------------------------------------- transposed copies


def transposed(x: jax.Array) -> jax.Array:
    """(a, b) as (b, a).

    XLA joins a transposed copy with the arithmetic that reads it and then walks through
    one of the arrays number by number. Here both sides are read and written in whole
    lines of the cache, in the time that the memory takes.
    """
    rows, columns = x.shape
    if min(rows, columns) < LEAST:
        return x.T
    is_tall = rows > columns
    name = f'transpose_{"tall" if is_tall else "wide"}'
    out = jax.ShapeDtypeStruct((columns, rows), x.dtype)
    emit = lambda _, operands, results: turn(operands[0], results[0], is_tall)
    return call(name, emit, [x], [out])[0]


def by_neuron(values: jax.Array) -> jax.Array:
    """(t, neurons, samples...) as (neurons, steps and samples): what a synapse reads of
    a neuron lies in one place."""
    if not is_large(values):
        moved = jnp.moveaxis(values, 1, 0)
        return moved.reshape(len(moved), -1)
    # Undoes the transposed copies that models with samples first hold.
    return transposed(neurons_last(values))


def neurons_last(values: jax.Array) -> jax.Array:
    """(t, neurons, samples...) as (steps and samples, neurons), which is how models
    with samples first hold them."""
    moved = jnp.moveaxis(values, 1, -1)
    return moved.reshape(-1, moved.shape[-1])


def turn(x: Buffer, y: Buffer, is_tall: bool) -> None:
    """y[c, r] = x[r, c]: whole squares, two at a time along the long side, then what is
    left."""
    code = x.code
    rows, columns = x.size(0), x.size(1)
    long, short = (rows, columns) if is_tall else (columns, rows)
    for i, count in code.parts(long, (2 * SIDE, SIDE)):
        for j in code.loop(0, short, SIDE):
            for n in range(0, count, SIDE):
                r, c = (i + n, j) if is_tall else (j, i + n)
                turn_square(x, r * columns + c, columns, y, c * rows + r, rows)
    whole_rows, whole_columns = rows // SIDE * SIDE, columns // SIDE * SIDE
    for start, stop, first in ((0, rows, whole_columns), (whole_rows, rows, 0)):
        for r in code.loop(start, stop):
            for c in code.loop(first, whole_columns if first == 0 else columns):
                y.store(x.load(r * columns + c), c * rows + r)


def turn_square(
    x: Buffer, start: Value, x_stride: Value, y: Buffer, to: Value, y_stride: Value
) -> None:
    """A square of two matrices: line n of y has the numbers n of the lines of x.

    ``start`` and ``to`` are where the squares begin, strides lie between their lines.
    """
    lines = [x.load(x_stride * n + start, SIDE) for n in range(SIDE)]
    # Three rounds swap the quarters of the square, then those of each quarter, ...
    width = SIDE // 2
    while width:
        groups = range(0, SIDE, 2 * width)
        for n in range(SIDE):
            if n & width:
                continue
            pair = lines[n], lines[n + width]
            for m, start_ in ((n, 0), (n + width, width)):
                places = [
                    side + g + start_ + k
                    for g in groups
                    for side in (0, SIDE)
                    for k in range(width)
                ]
                lines[m] = pair[0].shuffled(pair[1], places)
        width //= 2
    for n, line in enumerate(lines):
        y.store(line, y_stride * n + to)


class Tile:
    """Memory (neurons, width) that stays in the caches, for the values of up to
    ``TILE`` neurons, those of each beside each other. Elsewhere they are (width, all
    neurons)."""

    def __init__(self, memory: Buffer, width: Value, neurons: Value):
        self.code, self.memory = memory.code, memory
        self.width, self.neurons = width, neurons

    def parts(self) -> Iterator[tuple[Value, int]]:
        """Every part of the neurons: the first of them, and how many there are."""
        return self.code.parts(self.neurons, (TILE, 1))

    def read(self, values: Buffer, begin: Value, first: Value, count: int) -> None:
        """Copy values of ``count`` neurons, those of each from ``begin`` on."""
        for is_square, there, here in self._places(values, begin, first, count):
            if is_square:
                turn_square(values, there, self.neurons, self.memory, here, self.width)
            else:
                self.memory.store(values.load(there), here)

    def write(self, values: Buffer, first: Value, count: int) -> None:
        """Copy all of the tile back."""
        begin = self.code.word(0)
        for is_square, there, here in self._places(values, begin, first, count):
            if is_square:
                turn_square(self.memory, here, self.width, values, there, self.neurons)
            else:
                values.store(self.memory.load(here), there)

    def _places(
        self, values: Buffer, begin: Value, first: Value, count: int
    ) -> Iterator[tuple[bool, Value, Value]]:
        """Squares, then single numbers: where they are outside, and in the tile."""
        code, length = self.code, values.size(0)
        done = code.word(0)
        for side in (SIDE, 1) if count == TILE else (1,):
            for m in code.loop(done, length, side):
                for n in code.loop(0, count, side):
                    there = m * self.neurons + (first + n)
                    yield side > 1, there, n * self.width + (begin + m)
            done = length // SIDE * SIDE


# ---------------------------------------------------------------- what synapses read


def memory_for(x: jax.Array, steps: int) -> list[jax.ShapeDtypeStruct]:
    """Memory for the bits and for the numbers of x (t and k, n)."""
    length, neurons = x.shape
    words = -(-(length // steps) // BITS)
    return [
        jax.ShapeDtypeStruct((neurons, steps, words), jnp.int32),
        jax.ShapeDtypeStruct((neurons, length), x.dtype),
    ]


def readers(x: Buffer, words: Buffer, numbers: Buffer) -> Iterator[SpikeBits | Numbers]:
    """x as bits for what runs if it holds only zeros and ones, then as numbers for what
    runs otherwise, in the memory that :func:`memory_for` describes."""
    steps = words.size(1)
    samples = x.size(0) // steps
    bits = SpikeBits(x, words, steps, samples)
    for are_spikes in x.code.either(bits.write()):
        if are_spikes:
            yield bits
        else:
            turn(x, numbers, is_tall=False)
            yield Numbers(numbers, samples)


class SpikeBits:
    """x as bits: instructions that write the words and read samples from them.

    ``words``: memory for 32-bit words (n, t and words of a step). ``place(neuron)`` is
    where those of a neuron begin, ``at`` what is there, and ``plus`` total + a x, as of
    :class:`Numbers`.
    """

    def __init__(self, x: Buffer, words: Buffer, steps: Value, samples: Value):
        self.code, self.x, self.words = x.code, x, words
        self.steps, self.samples, self.neurons = steps, samples, x.size(1)
        self.of_step = (samples + (BITS - 1)) // BITS
        self.of_neuron = steps * self.of_step

    def write(self) -> Value:
        """All words; gives whether x holds only zeros and ones. Where it does not, some
        words are not written."""
        code = self.code
        others = code.variable(code.zeros(SMALL, 1))
        for n, count in code.parts(self.neurons, (TOGETHER, 1)):
            with code.when(others.value.equals(0)):
                for t in code.loop(0, self.steps):
                    for w in code.loop(0, self.of_step):
                        more = self._write_words(n, t, w, count)
                        others.value = others.value | more.as_int(SMALL)
        return others.value.equals(0)

    def _write_words(self, n: Value, t: Value, w: Value, count: int) -> Value:
        """The same word of ``count`` neurons; gives whether x holds other numbers."""
        code, none = self.code, self.code.zeros(SMALL, count)
        fired, other = code.variable(none), code.variable(none)
        left = self.samples - w * BITS
        size = (left > BITS).select(code.word(BITS), left)
        start = t * self.samples + w * BITS
        for k in code.loop(0, size):
            value = self.x.load((start + k) * self.neurons + n, count)
            fires = value.differs(0)  # as does NaN
            bit = (code.constant(1, SMALL) << k.as_int(SMALL)).repeated(count)
            fired.value = fired.value | fires.select(bit, none)
            is_other = fires & value.differs(1)
            other.value = other.value | is_other.select(bit, none)
        for m in range(count):
            at = (n + m) * self.of_neuron + (t * self.of_step + w)
            self.words.store(fired.value.one(m), at)
        return other.value.is_any()

    def place(self, neuron: Value) -> Value:
        return neuron * self.of_neuron

    def prefetch(self, begin: Value) -> None:
        self.words.prefetch(begin, 1)

    def at(self, begin: Value, t: Value, k: Value, size: int) -> Value:
        """Whether a neuron fired in each of ``size`` samples from k on, all of which
        are in one word."""
        found = self.words.load(begin + (t * self.of_step + k // BITS))
        if size < BITS:
            found = (found >> (k % BITS).as_int(SMALL)).as_int(ir.IntType(size))
        return found if size == 1 else found.as_bits()

    def plus(self, total: Value, a: Value, fired: Value) -> Value:
        """total + a x: where the neuron did not fire, a is not added, so that it may be
        infinite or NaN."""
        return fired.select(total + a, total)


class Numbers:
    """x as numbers (n, t and k)."""

    def __init__(self, values: Buffer, samples: Value):
        self.values, self.samples, self.length = values, samples, values.size(1)

    def place(self, neuron: Value) -> Value:
        return neuron * self.length

    def prefetch(self, begin: Value) -> None:
        self.values.prefetch(begin, MOST_PREFETCHED)

    def at(self, begin: Value, t: Value, k: Value, size: int) -> Value:
        return self.values.load(begin + (t * self.samples + k), size)

    def plus(self, total: Value, a: Value, x: Value) -> Value:
        return total + a * x
