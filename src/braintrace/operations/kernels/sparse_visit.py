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

from collections.abc import Callable
from typing import Any

import jax

from ...compiled_step import Components, Jacobian
from .native import (
    FLAGS,
    SMALL,
    Buffer,
    add_up,
    loop,
    place,
    rest_of,
    running,
    running_all,
    several,
    word,
    zeros,
)
from .products import WIDTH, WIDTHS, Synapses, call_on_synapses
from .spike_bits import Numbers, SpikeBits, memory_for, readers
from .trace_parts import Name, TraceParts, Visit, sum_of
from .transpose import TILE, Tile

Reader = Callable[[Name, Any], Any]
"""(name, t): samples of a value of the neuron ``post`` at a step."""


class SparseVisit(Visit):
    """What visits of sparse traces share."""

    samples: Any

    def __init__(self, made: TraceParts, synapses: Synapses, *buffers: list[Buffer]):
        super().__init__(made, synapses.build, *buffers)
        self.synapses = synapses

    def _synapse(
        self,
        e: Any,
        x: SpikeBits | Numbers,
        pre: Any,
        steps: Any,
        of_post: Callable[[Any, int], Reader],
    ) -> None:
        """The synapse whose trace is entry e; ``pre``: where x of its neuron begins;
        ``of_post(k, size)``: values of its ``post``."""
        build = self.build
        total, done = zeros(self.number, WIDTH), word(0)
        for size in WIDTHS:
            with running(build, done, self.samples, size, total) as (k, found):
                at = place(build, e, self.samples, k)
                more = self._part(at, x, pre, steps, k, size, of_post)
                found.value = build.fadd(found.value, self._narrowed(more), flags=FLAGS)
            total = found.value
            done = rest_of(build, self.samples, size)
        self.gradient.store(add_up(build, total), e, 1)

    def _part(
        self, at: Any, x: Any, pre: Any, steps: Any, k: Any, size: int, of_post: Any
    ) -> Any:
        """``size`` samples from k on, which are entry ``at`` of the traces; gives what
        they add to the gradient."""
        made, build = self.made, self.build
        read = of_post(k, size)
        values = {name: read(name, word(0)) for name in made.of_block}
        old = {s: trace.load(at, size) for s, trace in self.traces.items()}
        kind = several(self.number, size)
        credited = sum_of(build, made.credited(values, old), kind)
        sums: dict[Name, Any] = {('y_bar',): credited}
        for s, value in made.moved(build, values, old).items():
            sums['row', s] = value
        if made.of_steps:
            added = {name: sums[name] for name in made.of_steps}
            with running_all(build, 0, steps, 1, added) as (t, found):
                now = x.at(pre, t, k, size)
                for name, total in found.items():
                    total.value = x.plus(total.value, read(name, t), now)
            sums |= {name: total.value for name, total in found.items()}
        for s, trace in self.traces.items():
            trace.store(sums['row', s], at, size)
        return sums['y_bar',]

    def _narrowed(self, value: Any) -> Any:
        """The sum of a vector as that of ``WIDTH`` numbers."""
        if value.type != self.number:
            return add_up(self.build, value, WIDTH)
        return self.build.insert_element(zeros(self.number, WIDTH), value, SMALL(0))


class _VisitByPost(SparseVisit):
    """The instructions of a visit in the order of ``post``; ``order``: the places of
    synapses. Memory is for the bits and the numbers of x and for the tile."""

    def __init__(self, order: Buffer | None, *given: Any):
        super().__init__(*given)
        self.order = order
        build = self.build
        self.words, self.numbers, memory = self.memory
        self.steps = self.words.size(1)
        self.samples = build.udiv(self.x.size(0), self.steps)
        # Where the values of a neuron begin among those in the tile.
        self.begin: dict[Name, Any] = {}
        width: Any = word(0)
        for name, value in self.values.items():
            self.begin[name] = width
            width = build.add(width, value.size(0))
        self.tile = Tile(memory, width, self.synapses.rows)

    def emit(self) -> None:
        for x in readers(self.x, self.words, self.numbers):
            for first, count in self.tile.parts():
                for name, value in self.values.items():
                    self.tile.read(value, self.begin[name], first, count)
                self._synapses(x, first, count)

    def _synapses(self, x: SpikeBits | Numbers, first: Any, count: int) -> None:
        """Those of ``count`` neurons, whose values are in the tile."""
        build, synapses = self.build, self.synapses
        with loop(build, 0, count, 1) as n:
            line = build.mul(n, self.tile.width)

            def of_post(k: Any, size: int, line: Any = line) -> Reader:
                beside = build.add(line, k)

                def read(name: Name, t: Any) -> Any:
                    after = place(build, t, self.samples, self.begin[name])
                    return self.tile.memory.load(build.add(beside, after), size)

                return read

            with loop(build, *synapses.of_row(build.add(first, n)), 1) as entry:
                pre = x.place(synapses.column(entry))
                later = synapses.later(entry)
                x.prefetch(x.place(synapses.column(later)))
                e = entry
                if self.order is not None:
                    self._prefetch_trace(synapses.entry(self.order, later))
                    e = synapses.entry(self.order, entry)
                self._synapse(e, x, pre, self.steps, of_post)

    def _prefetch_trace(self, e: Any) -> None:
        """Ask for the traces of a later synapse, which lie anywhere in memory."""
        at = self.build.mul(e, self.samples)
        for trace in self.traces.values():
            trace.prefetch(at, WIDTHS[0])


def visit(
    trace: Components,
    x: jax.Array,
    rows: Components,
    factors: Jacobian,
    credit: Components,
    y_bar: jax.Array | None,
    steps: int,
    pre: Any,
    starts: Any,
    order: Any = None,
) -> tuple[Components, jax.Array]:
    """New traces (e, k) and the gradient (e).

    x, rows and ȳ (t and k, neurons), factors and credits (k, neurons). Synapses in the
    order of ``post``: ``pre``, the neuron each comes from, where those of every ``post``
    start, and where each is stored, if that is another order.
    """
    made, values = TraceParts.of(trace, rows, factors, credit, y_bar)
    lists = [pre, starts, *([] if order is None else [order])]

    def emit(synapses: Synapses, given: list[Buffer], results: list[Buffer]) -> None:
        order, given = (None, given) if len(lists) == 2 else (given[0], given[1:])
        _VisitByPost(order, made, synapses, given, results).emit()

    memory = [*memory_for(x, steps)]
    memory.append(jax.ShapeDtypeStruct((TILE, sum(map(len, values))), x.dtype))
    name = f'synapses_{made.name}_{len(lists)}'
    return visit_synapses(name, emit, lists, x, values, trace, memory)


def visit_synapses(
    name: str,
    emit: Callable[[Synapses, list[Buffer], list[Buffer]], None],
    lists: list[Any],
    x: jax.Array,
    values: list[jax.Array],
    trace: Components,
    memory: list[jax.ShapeDtypeStruct],
) -> tuple[Components, jax.Array]:
    """New traces and the gradient by a kernel on synapses."""
    outs = [jax.ShapeDtypeStruct(lists[0].shape, x.dtype), *memory]
    old = list(trace.values())
    found = call_on_synapses(name, emit, lists, [x, *values], outs, old)
    return dict(zip(trace, found, strict=False)), found[len(old)]
