"""Visits of traces, in place: each trace is read once and written once.

Letters: s and r components of ε, t steps, n samples. At every element of a trace,

    gradient += Σ_s credit_s ε_s + Σ_t ȳ[t] x[t]
    ε_s = Σ_r factor_sr ε_r + Σ_t row_s[t] x[t]

with x of the input that the element reads, and all else of the output that it leads to.
XLA would read and write the traces several times: once for each component and once for
the gradient. The kinds of visits differ in their loops only:

    dense_visit       a dense trace after one step
    span_visit        the same after many steps: a product of matrices for each sample
    synapse_visit     traces of synapses, in the order of the outputs or of the matrix
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ....compiled_step import Components, Jacobian
from .layouts import (
    TILE,
    Numbers,
    SpikeBits,
    Tile,
    by_neuron,
    memory_for,
    neurons_last,
    readers,
)
from .llvm import SMALL, WORD, Buffer, Code, Value, call
from .products import SAMPLES, WIDTH, Synapses, call_on_synapses

Name = tuple[Any, ...]
"""A value of the outputs: ('row', s) and ('y_bar',) are given at every step, ('factor',
s, r) and ('credit', s) once."""
Values = dict[Name, Value]

WIDTHS = (32, 8, 1)
"""Numbers of a row of a dense trace that are taken together: the most that fit."""
CACHES = 2**24
"""Bytes that stay in the caches of a processor from step to step."""
SPAN_WIDTHS = {1: 64, 2: 32}
"""Outputs that are taken together after many steps, by the number of components: their
sums are kept in registers."""
LEAST_WIDTH = 16
"""The same where there are more components, and for the remaining outputs."""
TOGETHER = 4
"""Inputs that are taken together if they are seldom zero."""
LINE = 16
"""Inputs whose values lie beside each other."""
FEW_SAMPLES = 8
"""With fewer, traces of synapses are visited in the order of the matrix."""
LEAST_FOR_LISTS = 128
"""Outputs from which on inputs of zero are skipped. With fewer, as the filters of a
convolution, lists take longer than what they save."""


class TraceParts(NamedTuple):
    """The components of a trace, and the rows, factors and credits that are not zero by
    structure. ``has_y_bar``: whether the one-step gradient Σ x ȳ is summed as well."""

    components: tuple[int, ...]
    rows: tuple[int, ...]
    factors: tuple[tuple[int, int], ...]
    credits: tuple[int, ...]
    has_y_bar: bool = False

    @classmethod
    def of(
        cls,
        trace: Components,
        rows: Components,
        factors: Jacobian,
        credit: Components,
        y_bar: jax.Array | None = None,
    ) -> tuple[TraceParts, list[jax.Array]]:
        """The parts, and the values of outputs in the order of their names."""
        rows = {s: rows[s] for s in trace if s in rows}
        pairs = [(s, r) for s in trace for r in trace if (s, r) in factors]
        credit = {s: c for s, c in credit.items() if s in trace}
        keys = (tuple(trace), tuple(rows), tuple(pairs), tuple(credit))
        values = [*rows.values(), *([] if y_bar is None else [y_bar])]
        values += [*(factors[pair] for pair in pairs), *credit.values()]
        return cls(*keys, y_bar is not None), values

    @property
    def name(self) -> str:
        """A name for kernels of such traces."""
        join = lambda numbers: '_'.join(map(str, numbers))
        factors = join(f'{s}{r}' for s, r in self.factors)
        parts = (join(self.components), join(self.rows), factors, join(self.credits))
        return f'{"_of_".join(parts)}_{int(self.has_y_bar)}'

    @property
    def of_steps(self) -> list[Name]:
        """Names of values at every step."""
        rows: list[Name] = [('row', s) for s in self.rows]
        return rows + [('y_bar',)] * self.has_y_bar

    @property
    def of_block(self) -> list[Name]:
        """Names of values that are given once."""
        factors: list[Name] = [('factor', *pair) for pair in self.factors]
        return factors + [('credit', s) for s in self.credits]


class Visit:
    """The arrays of a visit, and its arithmetic.

    Operands: x, values of the outputs, old traces; results: new traces, which lie where
    the old ones do, the gradient, and memory.
    """

    def __init__(
        self,
        parts: TraceParts,
        code: Code,
        operands: list[Buffer],
        results: list[Buffer],
    ):
        self.parts, self.code = parts, code
        count = len(parts.components)
        self.x, *values = operands[:-count]
        names = [*parts.of_steps, *parts.of_block]
        self.values = dict(zip(names, values, strict=True))
        self.traces = dict(zip(parts.components, results[:count], strict=True))
        self.first = results[0]
        self.gradient, *self.memory = results[count:]

    def credited(self, values: Values, old: dict[int, Value]) -> Value | None:
        """Σ_s credit_s ε_s."""
        return _sum((values['credit', s], old[s]) for s in self.parts.credits)

    def moved(self, values: Values, old: dict[int, Value]) -> dict[int, Value]:
        """Σ_r factor_sr ε_r of every component s."""
        found = {}
        for s, like in old.items():
            pairs = [pair for pair in self.parts.factors if pair[0] == s]
            total = _sum((values['factor', *pair], old[pair[1]]) for pair in pairs)
            zero = self.code.zeros(like.number, like.size)
            found[s] = zero if total is None else total
        return found

    # ------------------------------------------------------------ dense traces

    def samples(self) -> Iterator[tuple[Value, bool]]:
        """Every sample, and whether it is the first, whose gradient is stored; those of
        others are added."""
        yield self.code.word(0), True
        for n in self.code.loop(1, self.first.size(0)):
            yield n, False

    def old(self, at: Value, later: Value, size: int) -> dict[int, Value]:
        """``size`` numbers of the traces; those that come ``later`` numbers after them
        are asked for, since the processor does not do so in time."""
        for trace in self.traces.values():
            trace.prefetch(at + later, size)
        return {s: trace.load(at, size) for s, trace in self.traces.items()}

    def add_gradient(
        self, total: Value | None, at: Value, size: int, first: bool
    ) -> None:
        """Add to ``size`` numbers of the gradient."""
        if total is None:
            if not first:
                return
            total = self.code.zeros(self.x.number, size)
        elif not first:
            total = self.gradient.load(at, size) + total
        self.gradient.store(total, at)


def _sum(pairs: Any) -> Value | None:
    """Σ a b; None if there are none."""
    total = None
    for a, b in pairs:
        total = a * b if total is None else total + a * b
    return total


# ---------------------------------------------------------------- one step


def dense_visit(
    trace: Components,
    x: jax.Array,
    rows: Components,
    factors: Jacobian,
    credit: Components,
    inputs_first: bool,
    y_bar: jax.Array | None = None,
) -> tuple[Components, jax.Array]:
    """The traces after a step and γ · ε before it, summed over samples; with x ȳ added
    if ``y_bar`` is given.

    Traces (n, c, f) with inputs c and outputs f, or (n, f, c) if not ``inputs_first``;
    x (n, c), all else (n, f). Rows of traces that stay in the caches are taken three at
    a time, and of each 32 numbers, so that what they have in common is loaded once. From
    memory, one row after the other is read faster.
    """
    parts, values = TraceParts.of(trace, rows, factors, credit, y_bar)
    old = list(trace.values())
    is_small = sum(e.size * e.dtype.itemsize for e in old) <= CACHES
    together = 3 if is_small else 1
    *new, total = call(
        f'visit_{parts.name}_{int(inputs_first)}{together}',
        partial(_emit_dense, parts, inputs_first, together),
        [x, *values],
        [jax.ShapeDtypeStruct(old[0].shape[1:], x.dtype)],
        old,
    )
    return dict(zip(trace, new, strict=True)), total


def _emit_dense(
    parts: TraceParts,
    inputs_first: bool,
    together: int,
    code: Code,
    operands: list[Buffer],
    results: list[Buffer],
) -> None:
    visit = Visit(parts, code, operands, results)
    rows, width = visit.first.size(1), visit.first.size(2)
    driven = [('row', s) for s in parts.rows]
    others = [name for name in visit.values if name not in driven]

    def some_rows(n: Value, i: Value, j: Value, count: int, size: int, first: bool):
        """``size`` numbers of ``count`` rows, from element (n, i, j) on."""

        def beside(buffer: Buffer, k: int, is_last: bool) -> Value:
            if is_last:
                return buffer.load(n * width + j, size)
            return buffer.load(n * rows + (i + k)).repeated(size)

        of_outputs = lambda names, k: {
            name: beside(visit.values[name], k, inputs_first) for name in names
        }
        new, near = {}, {}
        places = [(n * rows + (i + k)) * width + j for k in range(count)]
        for k, at in enumerate(places):
            if k == 0 or not inputs_first:
                near = of_outputs(others, k)
            old = visit.old(at, width * count, size)
            total = visit.credited(near, old)
            if parts.has_y_bar:
                more = near['y_bar',] * beside(visit.x, k, not inputs_first)
                total = more if total is None else total + more
            visit.add_gradient(total, (i + k) * width + j, size, first)
            new |= {(k, s): e for s, e in visit.moved(near, old).items()}
        for k in range(count):
            if k == 0 or not inputs_first:
                near = of_outputs(driven, k)
            for s in parts.rows:
                x = beside(visit.x, k, not inputs_first)
                new[k, s] = new[k, s] + near['row', s] * x
        for (k, s), value in new.items():
            visit.traces[s].store(value, places[k])

    for n, first in visit.samples():
        for i, count in code.parts(rows, sorted({together, 1}, reverse=True)):
            for j, size in code.parts(width, WIDTHS):
                some_rows(n, i, j, count, size, first)


# ---------------------------------------------------------------- many steps


def span_visit(
    trace: Components,
    x: jax.Array,
    rows: Components,
    factors: Jacobian,
    credit: Components,
) -> tuple[Components, jax.Array]:
    """The traces after many steps and γ · ε before them, summed over samples (or places
    of an image).

    Traces (n, c, f); x (t, n, c), rows (t, n, f); all else (n, f). Only inputs that are
    not zero take part, so that spikes cost as much as there are of them. For each
    sample:

        1. for each input, list the steps at which it is not zero, unless most inputs of
           the first step are not
        2. for some outputs at a time, copy the rows of all steps, so that they stay in
           the first cache; then for each input, add the rows that its list names
    """
    parts, values = TraceParts.of(trace, rows, factors, credit)
    old = list(trace.values())
    steps, _, inputs = x.shape
    skips_zeros = old[0].shape[-1] >= LEAST_FOR_LISTS
    width = SPAN_WIDTHS.get(len(parts.components), LEAST_WIDTH)
    shape, dtype = jax.ShapeDtypeStruct, x.dtype
    outs = [
        shape(old[0].shape[1:], dtype),
        shape((inputs,), jnp.int32),
        shape((inputs, steps), jnp.int32),
        shape((-(-inputs // LINE), steps, LINE), dtype),
        shape((steps, len(parts.rows), width), dtype),
    ]
    found = call(
        f'visit_{parts.name}_span{int(skips_zeros)}',
        lambda *given: _SpanVisit(parts, *given).emit(width, skips_zeros),
        [x, *values],
        outs,
        old,
    )
    return dict(zip(trace, found, strict=False)), found[len(old)]


class _SpanVisit(Visit):
    """The instructions. Memory: how often each input is not zero, at which steps, its
    values, and copied rows."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.inputs, self.outputs = self.first.size(1), self.first.size(2)
        self.counts, self.times, self.lines, self.copied = self.memory
        self.steps, self.all_samples = self.x.size(0), self.x.size(1)

    def emit(self, width: int, skips_zeros: bool) -> None:
        code = self.code
        for n, first in self.samples():
            self._copy_inputs(n)
            if skips_zeros:
                self._list_inputs()
            for f, size in code.parts(self.outputs, (width, LEAST_WIDTH, 1)):
                self._copy_rows(n, f, size)
                self._visit_inputs(n, f, size, first, skips_zeros)

    def _value(self, c: Value, t: Value | int) -> Value:
        """Where a value of an input is: those of one line of the cache lie beside each
        other, then come their steps."""
        return (c // LINE * self.steps + t) * LINE + c % LINE

    def _copy_inputs(self, n: Value) -> None:
        for c, size in self.code.parts(self.inputs, (LINE, 1)):
            for t in self.code.loop(0, self.steps):
                at = (t * self.all_samples + n) * self.inputs + c
                self.lines.store(self.x.load(at, size), self._value(c, t))

    def _list_inputs(self) -> None:
        """For every input the steps at which it is not zero."""
        code = self.code
        is_listed = lambda c, t: self.lines.load(self._value(c, t)).compared('!=', 0)
        live = code.variable(code.word(0))
        for c in code.loop(0, self.inputs):
            live.value = live.value + is_listed(c, 0).as_int(WORD)
        # If most inputs differ from zero at the first step, they do so at most steps as
        # a rule, and lists would take longer than they save: these count as if they
        # were never zero (GRU 256, carried traces: 143.7 ms without this, 139 with it).
        whole = self.inputs // TOGETHER * TOGETHER
        is_dense = live.value * 2 > self.inputs
        first_listed = is_dense.select(whole, code.word(0))
        for c in code.loop(0, first_listed):
            self.counts.store(self.steps.as_int(SMALL), c)
        for c in code.loop(first_listed, self.inputs):
            count = code.variable(code.word(0))
            for t in code.loop(0, self.steps):
                # The next one is written over it if this one is zero.
                self.times.store(t.as_int(SMALL), c * self.steps + count.value)
                count.value = count.value + is_listed(c, t).as_int(WORD)
            self.counts.store(count.value.as_int(SMALL), c)

    def _copy_rows(self, n: Value, f: Value, size: int) -> None:
        """Rows of all steps and components, ``size`` outputs from f on: (t, s, f)."""
        rows = self.parts.rows
        for t in self.code.loop(0, self.steps):
            at = (t * self.all_samples + n) * self.outputs + f
            for m, s in enumerate(rows):
                value = self.values['row', s].load(at, size)
                self.copied.store(value, t * (len(rows) * size) + m * size)

    def _visit_inputs(
        self, n: Value, f: Value, size: int, first: bool, skips_zeros: bool
    ) -> None:
        """All inputs with ``size`` outputs from f on."""
        code, at = self.code, n * self.outputs + f
        near = {name: self.values[name].load(at, size) for name in self.parts.of_block}

        def some(c: Value, count: int, by_list: bool) -> None:
            """``count`` inputs from c on: one at its listed steps, or at every step."""
            new, places = {}, []
            for k in range(count):
                row = c + k
                places.append((n * self.inputs + row) * self.outputs + f)
                old = self.old(places[k], self.outputs * count, size)
                total = self.credited(near, old)
                self.add_gradient(total, row * self.outputs + f, size, first)
                new |= {(k, s): e for s, e in self.moved(near, old).items()}
            self._add_drive(c, count, new, size, by_list)
            for (k, s), value in new.items():
                self.traces[s].store(value, places[k])

        if not skips_zeros:
            for c, count in code.parts(self.inputs, (TOGETHER, 1)):
                some(c, count, False)
            return
        for c, count in code.parts(self.inputs, (TOGETHER, 1)):
            if count == 1:
                some(c, 1, True)
                continue
            total = code.word(0)
            for k in range(TOGETHER):
                total = total + self.counts.index(c + k)
            for are_dense in code.either(total > self.steps * (TOGETHER // 2)):
                if are_dense:
                    some(c, TOGETHER, False)
                else:
                    for one in code.loop(c, c + TOGETHER):
                        some(one, 1, True)

    def _add_drive(
        self, c: Value, count: int, new: dict, size: int, by_list: bool
    ) -> None:
        """Add Σ_t row_s x to new traces by number of the input and component."""
        code, rows = self.code, self.parts.rows
        if not rows:
            return
        sums = {key: code.variable(e) for key, e in new.items() if key[1] in rows}
        begins = [self._value(c + k, 0) for k in range(count)]
        total = self.counts.index(c) if by_list else self.steps
        for entry in code.loop(0, total):
            t = self.times.index(c * self.steps + entry) if by_list else entry
            found = {}
            for m, s in enumerate(rows):
                at = t * (len(rows) * size) + m * size
                found[s] = self.copied.load(at, size)
            for k, begin in enumerate(begins):
                x = self.lines.load(t * LINE + begin).repeated(size)
                for s in rows:
                    sums[k, s].value = sums[k, s].value + found[s] * x
        new |= {key: total.value for key, total in sums.items()}


# ---------------------------------------------------------------- synapses


class _SynapseVisit(Visit):
    """What visits of the traces of synapses share: e synapses, each from a neuron
    ``pre`` to a neuron ``post``, k samples, which are taken in whole vectors."""

    def __init__(
        self,
        parts: TraceParts,
        synapses: Synapses,
        operands: list[Buffer],
        results: list[Buffer],
    ):
        super().__init__(parts, synapses.code, operands, results)
        self.synapses = synapses
        self.count = self.first.size(1)

    def synapse(
        self,
        e: Value,
        x: SpikeBits | Numbers,
        pre: Value,
        steps: Value,
        read: Callable[[Name, Value, Value, int], Value],
    ) -> None:
        """The synapse whose trace is entry e. ``pre``: where x of its neuron begins;
        ``read(name, t, k, size)``: samples of a value of its ``post``."""
        code, parts = self.code, self.parts
        total = code.variable(code.zeros(self.x.number, WIDTH))
        for k, size in code.parts(self.count, SAMPLES):
            at = e * self.count + k
            near = {name: read(name, code.word(0), k, size) for name in parts.of_block}
            old = {s: trace.load(at, size) for s, trace in self.traces.items()}
            credited = self.credited(near, old)
            sums: dict[Name, Value] = {
                ('row', s): value for s, value in self.moved(near, old).items()
            }
            zero = code.zeros(self.x.number, size)
            sums['y_bar',] = zero if credited is None else credited
            driven = {name: code.variable(sums[name]) for name in parts.of_steps}
            if driven:
                for t in code.loop(0, steps):
                    now = x.at(pre, t, k, size)
                    for name, sum_ in driven.items():
                        sum_.value = x.plus(sum_.value, read(name, t, k, size), now)
            sums |= {name: sum_.value for name, sum_ in driven.items()}
            for s, trace in self.traces.items():
                trace.store(sums['row', s], at)
            total.value = total.value + sums['y_bar',].added_up(WIDTH)
        self.gradient.store(total.value.added_up(), e)


def synapse_visit(
    trace: Components,
    x: jax.Array,
    rows: Components,
    factors: Jacobian,
    credit: Components,
    y_bar: jax.Array | None,
    matrix: tuple[jax.Array, jax.Array, bool] | None,
    by_post: tuple[jax.Array, jax.Array, jax.Array | None],
) -> tuple[Components, jax.Array]:
    """New traces (e, samples...) and the gradient (e).

    x, rows and ȳ (t, neurons, samples...), factors and credits (neurons, samples...).
    ``matrix``: columns of the synapses, starts of the rows, and whether synapses of a
    row come from one neuron, not lead to one; None if it is not known. ``by_post``:
    synapses in the order of ``post``: ``pre``, the neuron each comes from, where those
    of every ``post`` start, and where each is stored, if that is another order.
    """
    shape = next(iter(trace.values())).shape
    samples = math.prod(shape[1:])
    old = {s: e.reshape(-1, samples) for s, e in trace.items()}
    is_by_row = matrix is not None and samples < FEW_SAMPLES
    laid = by_neuron if is_by_row else neurons_last
    parts, values = TraceParts.of(
        old,
        {s: laid(v) for s, v in rows.items()},
        {k: laid(v[None]) for k, v in factors.items()},
        {s: laid(v[None]) for s, v in credit.items()},
        None if y_bar is None else laid(y_bar),
    )
    if is_by_row:
        indices, starts, pre_is_row = matrix
        lists, memory = [indices, starts], []
        emit = partial(_emit_by_row, parts, pre_is_row)
        name = f'synapses_by_row_{parts.name}_{int(pre_is_row)}'
    else:
        pre, starts, order = by_post
        lists = [pre, starts, *([] if order is None else [order])]
        tile = jax.ShapeDtypeStruct((TILE, sum(map(len, values))), x.dtype)
        memory = [*memory_for(laid(x), len(x)), tile]
        emit = partial(_emit_by_post, parts, order is not None)
        name = f'synapses_{parts.name}_{len(lists)}'
    outs = [jax.ShapeDtypeStruct(lists[0].shape, x.dtype), *memory]
    given = [laid(x), *values]
    found = call_on_synapses(name, emit, lists, given, outs, list(old.values()))
    new = {s: e.reshape(shape) for s, e in zip(old, found, strict=False)}
    return new, found[len(old)]


def _emit_by_post(
    parts: TraceParts,
    has_order: bool,
    synapses: Synapses,
    operands: list[Buffer],
    results: list[Buffer],
) -> None:
    """In the order of ``post``. Where x is bits, rows at zeros are not added, whatever
    they hold. Memory is for the bits and the numbers of x and for the tile.

        1. x is written as bits if it holds only zeros and ones, which then fit into the
           caches, otherwise with the steps and samples of a neuron beside each other
        2. for some neurons ``post`` at a time, their values are copied in the same way
           to a tile that stays in the first caches; then come their synapses
    """
    order = operands.pop(0) if has_order else None
    visit = _SynapseVisit(parts, synapses, operands, results)
    code = synapses.code
    words, numbers, memory = visit.memory
    steps = words.size(1)
    # Where the values of a neuron begin among those in the tile.
    begin: dict[Name, Value] = {}
    width = code.word(0)
    for name, value in visit.values.items():
        begin[name] = width
        width = width + value.size(0)
    tile = Tile(memory, width, synapses.rows)
    for x in readers(visit.x, words, numbers):
        for first, count in tile.parts():
            for name, value in visit.values.items():
                tile.read(value, begin[name], first, count)
            for n in code.loop(0, count):
                line = n * width

                def read(name: Name, t: Value, k: Value, size: int, line: Value = line):
                    after = t * visit.count + begin[name]
                    return memory.load(line + k + after, size)

                for entry in code.loop(*synapses.of_row(first + n)):
                    later = synapses.later(entry)
                    x.prefetch(x.place(synapses.column(later)))
                    e = entry
                    if order is not None:
                        # Traces lie anywhere in memory.
                        at = order.index(later) * visit.count
                        for trace in visit.traces.values():
                            trace.prefetch(at, SAMPLES[0])
                        e = order.index(entry)
                    pre = x.place(synapses.column(entry))
                    visit.synapse(e, x, pre, steps, read)


def _emit_by_row(
    parts: TraceParts,
    pre_is_row: bool,
    synapses: Synapses,
    operands: list[Buffer],
    results: list[Buffer],
) -> None:
    """In the order of the matrix, in which traces lie in memory: with few samples,
    reading traces in any other order takes longer than reading neurons in any order
    (one sample, 10⁷ synapses: 58 ms, and 107 in the order of ``post``)."""
    visit = _SynapseVisit(parts, synapses, operands, results)
    code, samples, length = synapses.code, visit.count, visit.x.size(1)
    steps, is_far = length // samples, synapses.is_far(visit.x)
    x = Numbers(visit.x, samples)
    for row in code.loop(0, synapses.rows):
        for e in code.loop(*synapses.of_row(row)):
            # Ask for what a later synapse reads of its column; of several steps for the
            # first, as the processor sees by itself that the others follow.
            with code.when(is_far):
                for array in visit.values.values() if pre_is_row else [visit.x]:
                    synapses.prefetch(array, e, code.word(0), SAMPLES[0])
            column = synapses.column(e)
            pre, post = (row, column) if pre_is_row else (column, row)
            of_block = dict.fromkeys(parts.of_block, post * samples)
            begin = of_block | dict.fromkeys(parts.of_steps, post * length)

            def read(name: Name, t: Value, k: Value, size: int, begin: dict = begin):
                return visit.values[name].load(t * samples + (begin[name] + k), size)

            visit.synapse(e, x, x.place(pre), steps, read)
