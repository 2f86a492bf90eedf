"""What synapses read of the neurons they come from, for CPUs.

Letters: t steps, k samples, n neurons. x (t and k, n) that holds only zeros and ones is
written as bits, words of 32 samples (n, t, words), which fit into the caches: synapses
read neurons in any order. Any other x is written as numbers (n, t and k), so that what a
synapse reads lies in one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from llvmlite import ir

from .native import (
    BIT,
    FLAGS,
    SMALL,
    Buffer,
    differs_from_zero,
    loop,
    parts,
    place,
    plus,
    repeated,
    running_all,
    several,
    word,
    zeros,
)
from .transpose import Transpose

BITS = 32
"""Samples of a word."""
TOGETHER = 32
"""Neurons that are taken together."""
MOST_PREFETCHED = 32
"""Numbers of a neuron that are asked for in advance: the processor sees by itself that
the others follow."""


def memory_for(x: jax.Array, steps: int) -> list[jax.ShapeDtypeStruct]:
    """Memory for the bits and for the numbers of x (t and k, n)."""
    length, neurons = x.shape
    words = -(-(length // steps) // BITS)
    return [
        jax.ShapeDtypeStruct((neurons, steps, words), jnp.int32),
        jax.ShapeDtypeStruct((neurons, length), x.dtype),
    ]


def readers(x: Buffer, words: Buffer, numbers: Buffer) -> Iterator[SpikeBits | Numbers]:
    """Instructions inside run either with x as bits or with x as numbers, in the memory
    that :func:`memory_for` describes."""
    build, steps = x.build, words.size(1)
    samples = build.udiv(x.size(0), steps)
    bits = SpikeBits(x, words, steps, samples)
    with build.if_else(bits.write()) as (are_spikes, are_numbers):
        with are_spikes:
            yield bits
        with are_numbers:
            Transpose(x, numbers).emit(is_tall=False)
            yield Numbers(numbers, samples)


class SpikeBits:
    """x as bits: instructions that write the words and read samples from them.

    ``words``: memory for 32-bit words (n, t and words of a step).
    """

    def __init__(self, x: Buffer, words: Buffer, steps: Any, samples: Any):
        build = x.build
        self.build, self.x, self.words = build, x, words
        self.steps, self.samples = steps, samples
        self.neurons = x.size(1)
        last = build.add(samples, word(BITS - 1))
        self.of_step = build.udiv(last, word(BITS))
        self.of_neuron = build.mul(steps, self.of_step)

    def write(self) -> Any:
        """All words; gives whether x holds only zeros and ones. Where it does not, some
        words are not written."""
        build = self.build
        wrong = build.alloca(SMALL)
        build.store(ir.Constant(SMALL, 0), wrong)
        is_good = lambda: build.icmp_signed(
            '==', build.load(wrong), ir.Constant(SMALL, 0)
        )
        for n, count in parts(build, self.neurons, (TOGETHER, 1)):
            with (
                build.if_then(is_good()),
                loop(build, 0, self.steps, 1) as t,
                loop(build, 0, self.of_step, 1) as w,
            ):
                self._write_words(n, t, w, count, wrong)
        return is_good()

    def _write_words(self, n: Any, t: Any, w: Any, count: int, wrong: Any) -> None:
        """The same word of ``count`` neurons."""
        build = self.build
        one = repeated(build, ir.Constant(self.x.number, 1), count)
        none = zeros(SMALL, count)
        first = build.mul(w, word(BITS))
        left = build.sub(self.samples, first)
        is_whole = build.icmp_signed('>', left, word(BITS))
        size = build.select(is_whole, word(BITS), left)
        start = place(build, t, self.samples, first)
        names = {'bits': none, 'wrong': none}
        with running_all(build, 0, size, 1, names) as (k, found):
            at = place(build, build.add(start, k), self.neurons, n)
            value = self.x.load(at, count)
            fires = differs_from_zero(build, value)  # as does NaN
            is_other = build.and_(fires, build.fcmp_unordered('!=', value, one))
            bit = build.shl(ir.Constant(SMALL, 1), build.trunc(k, SMALL))
            bit = repeated(build, bit, count)
            for name, where in (('bits', fires), ('wrong', is_other)):
                more = build.select(where, bit, none)
                found[name].value = build.or_(found[name].value, more)
        to = place(build, t, self.of_step, w)
        for m in range(count):
            at = place(build, build.add(n, word(m)), self.of_neuron, to)
            self.words.store(self._one(found['bits'].value, m), at, 1)
        every = build.bitcast(found['wrong'].value, ir.IntType(BITS * count))
        is_any = build.icmp_unsigned('!=', every, ir.Constant(every.type, 0))
        with build.if_then(is_any):
            build.store(ir.Constant(SMALL, 1), wrong)

    def _one(self, value: Any, m: int) -> Any:
        if value.type == SMALL:
            return value
        return self.build.extract_element(value, ir.Constant(SMALL, m))

    def place(self, neuron: Any) -> Any:
        """Where the words of a neuron begin."""
        return self.build.mul(neuron, self.of_neuron)

    def prefetch(self, begin: Any) -> None:
        """Ask for the words of a neuron, which begin at a place."""
        self.words.prefetch(begin, 1)

    def at(self, begin: Any, t: Any, k: Any, size: int) -> Any:
        """Whether a neuron fired in each of ``size`` samples from k on, all of which
        are in one word."""
        build = self.build
        at = place(build, t, self.of_step, build.udiv(k, word(BITS)))
        found = self.words.load(build.add(begin, at), 1)
        if size < BITS:
            past = build.trunc(build.urem(k, word(BITS)), SMALL)
            found = build.trunc(build.lshr(found, past), ir.IntType(size))
        return found if size == 1 else build.bitcast(found, several(BIT, size))

    def plus(self, total: Any, a: Any, fired: Any) -> Any:
        """total + a x: where the neuron did not fire, a is not added, so that it may be
        infinite or NaN."""
        more = self.build.fadd(total, a, flags=FLAGS)
        return self.build.select(fired, more, total)


class Numbers:
    """x as numbers (n, t and k)."""

    def __init__(self, values: Buffer, samples: Any):
        self.build, self.values, self.samples = values.build, values, samples
        self.length = values.size(1)

    def place(self, neuron: Any) -> Any:
        """Where the numbers of a neuron begin."""
        return self.build.mul(neuron, self.length)

    def prefetch(self, begin: Any) -> None:
        """Ask for the first numbers of a neuron, which begin at a place."""
        self.values.prefetch(begin, MOST_PREFETCHED)

    def at(self, begin: Any, t: Any, k: Any, size: int) -> Any:
        """``size`` samples from k on of a neuron."""
        build = self.build
        at = build.add(begin, place(build, t, self.samples, k))
        return self.values.load(at, size)

    def plus(self, total: Any, a: Any, x: Any) -> Any:
        """total + a x."""
        return plus(self.build, total, a, x)
