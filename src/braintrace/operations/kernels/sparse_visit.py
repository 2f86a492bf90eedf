"""Visits of the traces of a compressed sparse matrix, for CPUs.

Letters: e synapses, each from a neuron ``pre`` to a neuron ``post``, k the samples, t the
steps, s and r components of ε.

    gradient[e] = Σ_s Σ_k credit_s[post, k] ε_s[e, k] + Σ_t Σ_k ȳ[post, t, k] x[pre, t, k]
    ε_s[e, k] = Σ_r factor_sr[post, k] ε_r[e, k] + Σ_t row_s[post, t, k] x[pre, t, k]

Each trace is read and written once, in place, in the order of ``post``:

    1. x is written as bits if it holds only zeros and ones, which then fit into the
       caches, otherwise with the steps and samples of a neuron beside each other
    2. for some neurons ``post`` at a time, their values are copied in the same way to a
       tile that stays in the first caches; then come their synapses

Samples are taken in whole vectors, as in ``products``. Where x is bits, rows at
zeros are not added, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from llvmlite import ir

from .dense_visit import FLAGS, sum_of
from .native import (
    Buffer,
    loop,
    number_type,
    register,
    rest_of,
    running,
    running_all,
    several,
    word,
)
from .products import WIDTH, WIDTHS, Synapses, add_up, index_type
from .spike_bits import Numbers, SpikeBits, memory_for, readers
from .transpose import TILE, Tile


class Structure(NamedTuple):
    """What there is of a trace with components numbered from 0.

    ``rows``, ``factors``, ``credits``: those that are not zero by structure.
    ``has_y_bar``: whether the gradient Σ_t x ȳ is summed as well.
    ``has_order``: whether synapses are stored in another order than that of ``post``.
    """

    components: int
    rows: tuple[int, ...]
    factors: tuple[tuple[int, int], ...]
    credits: tuple[int, ...]
    has_y_bar: bool = False
    has_order: bool = False

    @property
    def name(self) -> str:
        """A name for the kernel."""
        join = lambda numbers: '_'.join(map(str, numbers))
        factors = join(f'{s}{r}' for s, r in self.factors)
        parts = (str(self.components), join(self.rows), factors, join(self.credits))
        facts = f'{int(self.has_y_bar)}{int(self.has_order)}'
        return f'braintrace_synapses_{"_of_".join(parts)}_{facts}'

    @property
    def of_steps(self) -> list[tuple]:
        """Names of values of ``post`` at every step."""
        named: list[tuple] = [('row', s) for s in self.rows]
        return named + ([('y_bar',)] if self.has_y_bar else [])

    @property
    def of_block(self) -> list[tuple]:
        """Names of values of ``post`` that are the same for all steps."""
        named: list[tuple] = [('factor', *pair) for pair in self.factors]
        return named + [('credit', s) for s in self.credits]


class _Visit:
    """The instructions. Operands: indices, starts, places of synapses, x, values of
    ``post``, old traces; results: new traces, which lie where the old ones do, the
    gradient, and memory for the bits and the numbers of x and for the tile."""

    def __init__(
        self,
        made: Structure,
        synapses: Synapses,
        operands: list[Buffer],
        results: list[Buffer],
    ):
        self.made, self.synapses = made, synapses
        self.build, self.number = synapses.build, synapses.number
        build, rest = self.build, list(operands)
        self.order = synapses.holding(rest.pop(0)) if made.has_order else None
        self.x, *rest = rest
        *self.traces, self.gradient, self.words, self.numbers, memory = results
        self.steps = self.words.size(build, 1)
        self.samples = build.udiv(self.x.size(build, 0), self.steps)
        # Values by name, and where they begin among those of a neuron in the tile.
        names = [*made.of_steps, *made.of_block]
        self.values = dict(zip(names, rest, strict=False))
        self.begin: dict[tuple, Any] = {}
        width: Any = word(0)
        for name, value in self.values.items():
            self.begin[name] = width
            width = build.add(width, value.size(build, 0))
        self.tile = Tile(build, memory, width, synapses.rows)

    def emit(self) -> None:
        """All synapses."""
        given = (self.build, self.number, self.x, self.words, self.numbers)
        for x in readers(*given):
            for first, count in self.tile.parts():
                for name, value in self.values.items():
                    self.tile.read(value, self.begin[name], first, count)
                self._synapses(x, first, count)

    def _synapses(self, x: SpikeBits | Numbers, first: Any, count: int) -> None:
        """Those of ``count`` neurons, whose values are in the tile."""
        build = self.build
        with loop(build, word(0), word(count), 1) as n:
            beside = build.mul(n, self.tile.width)
            row = self.synapses.of_row(build.add(first, n))
            with loop(build, *row, 1) as place:
                self._synapse(x, place, beside)

    def _synapse(self, x: SpikeBits | Numbers, place: Any, beside: Any) -> None:
        """The synapse at a place in the order of ``post``; ``beside``: where the values
        of its ``post`` begin in the tile."""
        build = self.build
        synapses = self.synapses
        pre = x.place(synapses.column(place))
        later = synapses.later(place)
        x.prefetch(x.place(synapses.column(later)))
        e = place
        if self.order is not None:
            self._prefetch_trace(synapses.entry(self.order, later))
            e = synapses.entry(self.order, place)
        total: Any = ir.Constant(several(self.number, WIDTH), None)
        done = word(0)
        for size in WIDTHS:
            with running(build, done, self.samples, size, total) as (k, found):
                more = self._part(x, e, pre, beside, k, size)
                found.value = build.fadd(found.value, self._narrowed(more), flags=FLAGS)
            total = found.value
            done = rest_of(build, self.samples, size)
        self.gradient.store(build, add_up(build, total), e, 1)

    def _prefetch_trace(self, e: Any) -> None:
        """Ask for the traces of a later synapse, which lie anywhere in memory."""
        at = self.build.mul(e, self.samples)
        for trace in self.traces:
            trace.prefetch(self.build, at, WIDTHS[0])

    def _part(self, x: Any, e: Any, pre: Any, beside: Any, k: Any, size: int) -> Any:
        """``size`` samples from k on; gives what they add to the gradient."""
        made, build = self.made, self.build
        kind = several(self.number, size)
        at = self.synapses.place(e, self.samples, k)
        beside = build.add(beside, k)
        read = lambda name, after: self.tile.memory.load(
            build, build.add(beside, build.add(self.begin[name], after)), size
        )
        vectors = {name: read(name, word(0)) for name in made.of_block}
        old = [trace.load(build, at, size) for trace in self.traces]
        pairs = [(vectors['credit', s], old[s]) for s in made.credits]
        sums: dict[Any, Any] = {('y_bar',): sum_of(build, pairs, kind)}
        for s in range(made.components):
            factors = [pair for pair in made.factors if pair[0] == s]
            pairs = [(vectors['factor', *pair], old[pair[1]]) for pair in factors]
            sums['row', s] = sum_of(build, pairs, kind)
        if made.of_steps:
            added = {name: sums[name] for name in made.of_steps}
            with running_all(build, word(0), self.steps, 1, added) as (t, found):
                now, after = x.at(pre, t, k, size), build.mul(t, self.samples)
                for name, total in found.items():
                    total.value = x.plus(total.value, read(name, after), now)
            sums |= {name: total.value for name, total in found.items()}
        for s, trace in enumerate(self.traces):
            trace.store(build, sums['row', s], at, size)
        return sums['y_bar',]

    def _narrowed(self, value: Any) -> Any:
        """The sum of a vector as that of ``WIDTH`` numbers."""
        build = self.build
        if value.type == self.number:
            empty = ir.Constant(several(self.number, WIDTH), None)
            return build.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
        return add_up(build, value, WIDTH)


class ByPost(NamedTuple):
    """Synapses in the order of ``post``: the neuron each comes from, where those of
    every ``post`` start, and where each is stored, if that is another order."""

    pre: Any
    starts: Any
    order: Any = None


def visit(
    made: Structure,
    synapses: ByPost,
    steps: int,
    values: Sequence[Any],
    old: Sequence[Any],
) -> list[jax.Array]:
    """New traces (e, k) and the gradient (e); ``values``: x and rows (t and k, neurons),
    ȳ likewise, factors and credits (k, neurons)."""
    index, dtype = index_type(synapses.pre, synapses.starts), values[0].dtype
    number = number_type(dtype)

    def emit(
        build: ir.IRBuilder, operands: list[Buffer], results: list[Buffer]
    ) -> None:
        found = Synapses(build, number, index, *operands[:2])
        _Visit(made, found, operands[2:], results).emit()

    lists = [v.astype(index) for v in synapses if v is not None]
    given = [*lists, *values, *old]
    shape = jax.ShapeDtypeStruct
    outs = [shape(e.shape, dtype) for e in old]
    outs.append(shape(synapses.pre.shape, dtype))
    outs += memory_for(values[0], steps)
    outs.append(shape((TILE, sum(len(v) for v in values[1:])), dtype))
    name = f'{made.name}_{jnp.dtype(dtype).name}_{index.name}'
    register(name, number, (len(given), len(outs)), emit)
    first = len(given) - len(old)
    call = jax.ffi.ffi_call(
        name,
        outs,
        input_output_aliases={first + n: n for n in range(len(old))},
        vmap_method='sequential',
    )
    return list(call(*given))[: len(old) + 1]
