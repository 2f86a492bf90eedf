"""Spikes as bits, for CPUs.

Letters: t steps, k samples, n neurons. x (t and k, n) that holds only zeros and ones is
kept as words of 32 samples, (n, t, words): a neuron's spikes of several steps lie in one
line of the cache, so that synapses find those of any neuron in the caches.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .dense_kernels import repeated
from .native import Buffer, loop, rest_of, running_all, several, word

SMALL = ir.IntType(32)
BITS = 32
"""Samples of a word."""
TOGETHER = 32
"""Neurons that are taken together."""


class SpikeBits:
    """Instructions that write the words and read samples from them.

    ``words``: memory for 32-bit words (n, t and words of a step).
    """

    def __init__(
        self,
        build: ir.IRBuilder,
        number: Any,
        x: Buffer,
        words: Buffer,
        steps: Any,
        samples: Any,
    ):
        self.build, self.number, self.x = build, number, x
        self.words = words.holding(SMALL)
        self.steps, self.samples = steps, samples
        self.neurons = x.size(build, 1)
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
        done = word(0)
        for count in (TOGETHER, 1):
            with (
                loop(build, done, self.neurons, count) as n,
                build.if_then(is_good()),
                loop(build, word(0), self.steps, 1) as t,
                loop(build, word(0), self.of_step, 1) as w,
            ):
                self._write_words(n, t, w, count, wrong)
            done = rest_of(build, self.neurons, count)
        return is_good()

    def _write_words(self, n: Any, t: Any, w: Any, count: int, wrong: Any) -> None:
        """The same word of ``count`` neurons."""
        build = self.build
        kind = several(SMALL, count)
        zero = ir.Constant(several(self.number, count), None)
        one = repeated(build, ir.Constant(self.number, 1), self.number, count)
        none = ir.Constant(kind, None)
        first = build.mul(w, word(BITS))
        left = build.sub(self.samples, first)
        is_whole = build.icmp_signed('>', left, word(BITS))
        size = build.select(is_whole, word(BITS), left)
        start = build.add(build.mul(t, self.samples), first)
        names = {'bits': none, 'wrong': none}
        with running_all(build, word(0), size, 1, names) as (k, found):
            at = build.add(build.mul(build.add(start, k), self.neurons), n)
            value = self.x.load(build, at, count)
            fires = build.fcmp_unordered('!=', value, zero)  # as does NaN
            is_other = build.and_(fires, build.fcmp_unordered('!=', value, one))
            bit = build.shl(ir.Constant(SMALL, 1), build.trunc(k, SMALL))
            bit = repeated(build, bit, SMALL, count)
            for name, where in (('bits', fires), ('wrong', is_other)):
                more = build.select(where, bit, none)
                found[name].value = build.or_(found[name].value, more)
        to = build.add(build.mul(t, self.of_step), w)
        for m in range(count):
            neuron = build.add(n, word(m))
            at = build.add(build.mul(neuron, self.of_neuron), to)
            self.words.store(build, self._one(found['bits'].value, m), at, 1)
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

    def fired(self, place: Any, t: Any, k: Any, size: int) -> Any:
        """Whether the neuron of a place fired in each of ``size`` samples from k on,
        all of which are in one word."""
        build = self.build
        at = build.add(build.mul(t, self.of_step), build.udiv(k, word(BITS)))
        at = build.add(place, at)
        found = self.words.load(build, at, 1)
        if size == BITS:
            return build.bitcast(found, several(ir.IntType(1), size))
        past = build.trunc(build.urem(k, word(BITS)), SMALL)
        found = build.trunc(build.lshr(found, past), ir.IntType(size))
        return found if size == 1 else build.bitcast(found, several(ir.IntType(1), size))
