"""Visits of traces, in place: each trace is read once and written once.

Letters: s and r components of ε, t steps, n samples, c inputs and f outputs of a dense
weight, e synapses, each from a neuron ``pre`` to a neuron ``post``. At every element of a
trace, with x of the input that it reads and all else of the output that it leads to,

    gradient += Σ_s credit_s ε_s + Σ_t ȳ[t] x[t]
    ε_s = Σ_r factor_sr ε_r + Σ_t row_s[t] x[t]

XLA would read and write the traces several times: once for each component and once for
the gradient. :class:`Visit` has the arithmetic, and each kind of visit its own loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp

from ....compiled_step import Components, Jacobian
from . import layouts
from .layouts import Numbers, SpikeBits, Tile
from .llvm import SMALL, WORD, Buffer, Code, Value, call
from .products import SAMPLES, WIDTH, Synapses, as_indices

Name = tuple[Any, ...]
"""A value of the outputs: ('row', s) and ('y_bar',) are given at every step, ('factor',
s, r) and ('credit', s) once."""

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
LEAST_FOR_LISTS = 128
"""Outputs from which on inputs of zero are skipped. With fewer, as the filters of a
convolution, lists take longer than what they save."""
FEW_SAMPLES = 8
"""With fewer, traces of synapses are visited in the order of the matrix."""


def _named(
    trace: Components,
    rows: Components,
    factors: Jacobian,
    credit: Components,
    y_bar: jax.Array | None,
) -> dict[Name, jax.Array]:
    """The values of outputs that are not zero by structure."""
    values: dict[Name, Any] = {('row', s): rows[s] for s in trace if s in rows}
    if y_bar is not None:
        values['y_bar',] = y_bar
    pairs = [(s, r) for s in trace for r in trace if (s, r) in factors]
    values |= {('factor', *pair): factors[pair] for pair in pairs}
    return values | {('credit', s): c for s, c in credit.items() if s in trace}


def _visited(
    kind: str,
    emit: Callable[[Visit], None],
    trace: Components,
    x: jax.Array,
    values: dict[Name, jax.Array],
    shape: tuple[int, ...],
    memory: Sequence[jax.ShapeDtypeStruct] = (),
    lists: Sequence[Any] = (),
) -> tuple[Components, jax.Array]:
    """New traces and the gradient, of a shape, by a kernel. ``lists``: arrays of
    indices."""
    components, names, count = tuple(trace), tuple(values), len(lists)

    def on_buffers(code: Code, operands: list[Buffer], results: list[Buffer]) -> None:
        given = operands[count:]
        emit(Visit(code, components, names, operands[:count], given, results))

    found = call(
        '_'.join(map(str, (kind, *components, *chain(*names)))),
        on_buffers,
        [*as_indices(lists), x, *values.values()],
        [jax.ShapeDtypeStruct(shape, x.dtype), *memory],
        list(trace.values()),
    )
    return dict(zip(trace, found, strict=False)), found[len(trace)]


class Visit:
    """The arrays of a visit, and its arithmetic.

    Operands: x, values of the outputs, old traces; results: new traces, which lie where
    the old ones do, the gradient, and memory.
    """

    def __init__(
        self,
        code: Code,
        components: tuple[int, ...],
        names: tuple[Name, ...],
        lists: list[Buffer],
        operands: list[Buffer],
        results: list[Buffer],
    ):
        self.code, self.lists = code, lists
        count = len(components)
        self.x, *values = operands[:-count]
        self.values = dict(zip(names, values, strict=True))
        self.traces = dict(zip(components, results[:count], strict=True))
        self.sizes = results[0].sizes
        self.gradient, *self.memory = results[count:]
        self.driven = [name[1] for name in names if name[0] == 'row']
        """Components that have rows."""

    def names(self, *kinds: str) -> list[Name]:
        """Names of values of some kinds."""
        return [name for name in self.values if name[0] in kinds]

    def read(self, at: Value, size: int) -> dict[int, Value]:
        """``size`` numbers of the traces."""
        return {s: trace.load(at, size) for s, trace in self.traces.items()}

    def moved(
        self, near: dict[Name, Value], old: dict[int, Value]
    ) -> tuple[dict[int, Value], Value | None]:
        """Σ_r factor_sr ε_r of every component s, and Σ_s credit_s ε_s if there is
        any."""
        new = {}
        for s, like in old.items():
            pairs = [name for name in self.names('factor') if name[1] == s]
            total = _sum((near[name], old[name[2]]) for name in pairs)
            zero = self.code.zeros(like.number, like.size)
            new[s] = zero if total is None else total
        return new, _sum((near[name], old[name[1]]) for name in self.names('credit'))

    # ------------------------------------------------------------ dense traces

    def samples(self) -> Iterator[tuple[Value, bool]]:
        """Every sample, and whether it is the first, whose gradient is stored; those of
        others are added."""
        yield self.code.word(0), True
        for n in self.code.loop(1, self.sizes[0]):
            yield n, False

    def read_row(self, at: Value, together: int, size: int) -> dict[int, Value]:
        """``size`` numbers of the traces; those ``together`` rows later are asked for,
        since the processor does not do so in time."""
        later = at + self.sizes[2] * together
        for trace in self.traces.values():
            trace.prefetch(later, size)
        return self.read(at, size)

    def add_gradient(
        self, total: Value | None, at: Value, size: int, first: bool
    ) -> None:
        """Add to ``size`` numbers of the gradient."""
        if total is None and not first:
            return
        if total is None:
            total = self.code.zeros(self.x.number, size)
        elif not first:
            total = self.gradient.load(at, size) + total
        self.gradient.store(total, at)

    # ------------------------------------------------------------ synapses

    def synapse(
        self,
        e: Value,
        samples: Value,
        x: SpikeBits | Numbers,
        pre: Value,
        steps: Value,
        read: Callable[[Name, Value, Value, int], Value],
    ) -> None:
        """The synapse whose trace is entry e. ``pre``: where x of its neuron begins;
        ``read(name, t, k, size)``: samples from k on of a value of its ``post``."""
        code, start = self.code, self.code.word(0)
        total = code.variable(code.zeros(self.x.number, WIDTH))
        for k, size in code.parts(samples, SAMPLES):
            at = e * samples + k
            block = self.names('factor', 'credit')
            near = {name: read(name, start, k, size) for name in block}
            new, credited = self.moved(near, self.read(at, size))
            if credited is None:
                credited = code.zeros(self.x.number, size)
            names = self.names('row', 'y_bar')
            sums = {
                name: code.variable(credited if name == ('y_bar',) else new[name[1]])
                for name in names
            }
            for t in code.loop(0, steps) if names else ():
                now = x.at(pre, t, k, size)
                for name, sum_ in sums.items():
                    sum_.value = x.plus(sum_.value, read(name, t, k, size), now)
            for s, trace in self.traces.items():
                trace.store(sums['row', s].value if s in self.driven else new[s], at)
            if ('y_bar',) in sums:
                credited = sums['y_bar',].value
            total.value = total.value + credited.added_up(WIDTH)
        self.gradient.store(total.value.added_up(), e)


def _sum(pairs: Iterable[tuple[Value, Value]]) -> Value | None:
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

    Traces (n, c, f), or (n, f, c) if not ``inputs_first``; x (n, c), all else (n, f).
    Rows of traces that stay in the caches are taken three at a time, and of each 32
    numbers, so that what they have in common is loaded once (two components of 16 × 256
    × 256: 142 µs, 189 with one row at a time). From memory, one row after the other is
    read faster.
    """
    old = list(trace.values())
    together = 3 if sum(e.size * e.dtype.itemsize for e in old) <= CACHES else 1
    emit = partial(_emit_dense, inputs_first, together)
    kind = f'visit_{int(inputs_first)}{together}'
    values = _named(trace, rows, factors, credit, y_bar)
    return _visited(kind, emit, trace, x, values, old[0].shape[1:])


def _emit_dense(inputs_first: bool, together: int, visit: Visit) -> None:
    code, (_, rows, width) = visit.code, visit.sizes

    def some_rows(
        n: Value, i: Value, j: Value, count: int, size: int, first: bool
    ) -> None:
        """``size`` numbers of ``count`` rows, from element (n, i, j) on."""

        def beside(buffer: Buffer, k: int, is_last: bool) -> Value:
            if is_last:
                return buffer.load(n * width + j, size)
            return buffer.load(n * rows + (i + k)).repeated(size)

        def values(k: int, before: dict, *kinds: str) -> dict[Name, Value]:
            """Values of the outputs at row k, where all rows may have the same."""
            if k > 0 and inputs_first:
                return before
            names = visit.names(*kinds)
            return {n: beside(visit.values[n], k, inputs_first) for n in names}

        new: dict[tuple[int, int], Value] = {}
        near: dict[Name, Value] = {}
        places = [(n * rows + (i + k)) * width + j for k in range(count)]
        for k, at in enumerate(places):
            near = values(k, near, 'factor', 'credit', 'y_bar')
            moved, total = visit.moved(near, visit.read_row(at, count, size))
            if ('y_bar',) in near:
                more = near['y_bar',] * beside(visit.x, k, not inputs_first)
                total = more if total is None else total + more
            visit.add_gradient(total, (i + k) * width + j, size, first)
            new |= {(k, s): e for s, e in moved.items()}
        for k in range(count):
            near = values(k, near, 'row')
            for s in visit.driven:
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

    Traces (n, c, f); x (t, n, c), rows (t, n, f); all else (n, f). The drive is a
    product of matrices for each sample. Only inputs that are not zero take part, so
    that spikes cost as much as there are of them (20 steps of 5 % spikes, two
    components of 16 × 256 × 256: 264 µs, 447 if all take part). For each sample:

        1. for each input, list the steps at which it is not zero, unless most inputs of
           the first step are not
        2. for some outputs at a time, copy the rows of all steps, so that they stay in
           the first cache; then for each input, add the rows that its list names
    """
    (steps, _, inputs), (_, *weight) = x.shape, next(iter(trace.values())).shape
    skips_zeros = weight[-1] >= LEAST_FOR_LISTS
    width = SPAN_WIDTHS.get(len(trace), LEAST_WIDTH)
    values = _named(trace, rows, factors, credit, None)
    shape, driven = jax.ShapeDtypeStruct, sum(s in rows for s in trace)
    memory = [
        shape((inputs,), jnp.int32),
        shape((inputs, steps), jnp.int32),
        shape((-(-inputs // LINE), steps, LINE), x.dtype),
        shape((steps, driven, width), x.dtype),
    ]
    emit = lambda visit: _Span(visit).emit(width, skips_zeros)
    kind = f'span_visit_{int(skips_zeros)}'
    return _visited(kind, emit, trace, x, values, tuple(weight), memory)


class _Span:
    """The instructions. Memory: how often each input is not zero, at which steps, its
    values, and copied rows."""

    def __init__(self, visit: Visit):
        self.visit, self.code = visit, visit.code
        self.samples, self.inputs, self.outputs = visit.sizes
        self.counts, self.times, self.lines, self.copied = visit.memory
        self.steps = visit.x.size(0)

    def emit(self, width: int, skips_zeros: bool) -> None:
        code, visit, driven = self.code, self.visit, self.visit.driven
        for n, first in visit.samples():
            for c, size in code.parts(self.inputs, (LINE, 1)):
                for t in code.loop(0, self.steps):
                    at = (t * self.samples + n) * self.inputs + c
                    self.lines.store(visit.x.load(at, size), self._place(c, t))
            if skips_zeros:
                self._list_inputs()
            for f, size in code.parts(self.outputs, (width, LEAST_WIDTH, 1)):
                for t in code.loop(0, self.steps):
                    at = (t * self.samples + n) * self.outputs + f
                    for m, s in enumerate(driven):
                        row = visit.values['row', s].load(at, size)
                        self.copied.store(row, t * (len(driven) * size) + m * size)
                self._visit_inputs(n, f, size, first, skips_zeros)

    def _place(self, c: Value, t: Value | int) -> Value:
        """Where a value of an input is: those of one line of the cache lie beside each
        other, then come their steps."""
        return (c // LINE * self.steps + t) * LINE + c % LINE

    def _list_inputs(self) -> None:
        """For every input the steps at which it is not zero."""
        code = self.code
        is_listed = lambda c, t: self.lines.load(self._place(c, t)).differs(0)
        live = code.variable(code.word(0))
        for c in code.loop(0, self.inputs):
            live.value = live.value + is_listed(c, 0).as_int(WORD)
        # If most inputs differ from zero at the first step, they do so at most steps as
        # a rule, and lists would take longer than they save: these count as if they
        # were never zero (20 steps of 16 × 256 × 256: 213 µs, and 245 without this).
        whole = self.inputs // TOGETHER * TOGETHER
        first_listed = (live.value * 2 > self.inputs).select(whole, code.word(0))
        for c in code.loop(0, first_listed):
            self.counts.store(self.steps.as_int(SMALL), c)
        for c in code.loop(first_listed, self.inputs):
            count = code.variable(code.word(0))
            for t in code.loop(0, self.steps):
                # The next one is written over it if this one is zero.
                self.times.store(t.as_int(SMALL), c * self.steps + count.value)
                count.value = count.value + is_listed(c, t).as_int(WORD)
            self.counts.store(count.value.as_int(SMALL), c)

    def _visit_inputs(
        self, n: Value, f: Value, size: int, first: bool, skips_zeros: bool
    ) -> None:
        """All inputs with ``size`` outputs from f on."""
        code, visit, at = self.code, self.visit, n * self.outputs + f
        names = visit.names('factor', 'credit')
        near = {name: visit.values[name].load(at, size) for name in names}

        def some(c: Value, count: int, by_list: bool) -> None:
            """``count`` inputs from c on: one at its listed steps, or at every step."""
            new: dict[tuple[int, int], Value] = {}
            places = []
            for k in range(count):
                places.append((n * self.inputs + (c + k)) * self.outputs + f)
                old = visit.read_row(places[k], count, size)
                moved, total = visit.moved(near, old)
                visit.add_gradient(total, (c + k) * self.outputs + f, size, first)
                new |= {(k, s): e for s, e in moved.items()}
            if visit.driven:
                new |= self._driven(c, count, new, size, by_list)
            for (k, s), value in new.items():
                visit.traces[s].store(value, places[k])

        for c, count in code.parts(self.inputs, (TOGETHER, 1)):
            if not skips_zeros or count == 1:
                some(c, count, skips_zeros)
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

    def _driven(
        self, c: Value, count: int, new: dict, size: int, by_list: bool
    ) -> dict[tuple[int, int], Value]:
        """New traces, by number of the input and component, with Σ_t row_s x added."""
        code, driven = self.code, self.visit.driven
        sums = {key: code.variable(e) for key, e in new.items() if key[1] in driven}
        begins = [self._place(c + k, 0) for k in range(count)]
        for entry in code.loop(0, self.counts.index(c) if by_list else self.steps):
            t = self.times.index(c * self.steps + entry) if by_list else entry
            at = [t * (len(driven) * size) + m * size for m in range(len(driven))]
            rows = [self.copied.load(place, size) for place in at]
            for k, begin in enumerate(begins):
                x = self.lines.load(t * LINE + begin).repeated(size)
                for s, row in zip(driven, rows, strict=True):
                    sums[k, s].value = sums[k, s].value + row * x
        return {key: total.value for key, total in sums.items()}


# ---------------------------------------------------------------- synapses


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
    if samples >= FEW_SAMPLES:
        matrix = None
    laid = layouts.neurons_last if matrix is None else layouts.by_neuron
    values = _named(
        trace,
        {s: laid(v) for s, v in rows.items()},
        {k: laid(v[None]) for k, v in factors.items()},
        {s: laid(v[None]) for s, v in credit.items()},
        None if y_bar is None else laid(y_bar),
    )
    old = {s: e.reshape(-1, samples) for s, e in trace.items()}
    emit: Callable[[Visit], None] = _emit_by_post
    memory: list[jax.ShapeDtypeStruct] = []
    if matrix is not None:
        *lists, pre_is_row = matrix
        emit, kind = partial(_emit_by_row, pre_is_row), f'by_row_{int(pre_is_row)}'
    else:
        lists = [array for array in by_post if array is not None]
        kind, count = f'by_post_{len(lists)}', sum(map(len, values.values()))
        tile = jax.ShapeDtypeStruct((layouts.TILE, count), x.dtype)
        memory = [*layouts.memory_for(laid(x), len(x)), tile]
    new, gradient = _visited(
        f'synapses_{kind}', emit, old, laid(x), values, lists[0].shape, memory, lists
    )
    return {s: e.reshape(shape) for s, e in new.items()}, gradient


def _emit_by_post(visit: Visit) -> None:
    """In the order of ``post``. Where x is bits, rows at zeros are not added, whatever
    they hold. Memory is for the bits and the numbers of x and for the tile.

        1. x is written as bits if it holds only zeros and ones, which then fit into the
           caches, otherwise with the steps and samples of a neuron beside each other
        2. for some neurons ``post`` at a time, their values are copied in the same way
           to a tile that stays in the first caches; then come their synapses
    """
    code, (words, numbers, memory) = visit.code, visit.memory
    synapses, order = Synapses(*visit.lists[:2]), visit.lists[2:]
    steps, samples = words.size(1), visit.sizes[1]
    # Where the values of a neuron begin among those in the tile.
    begin: dict[Name, Value] = {}
    width = code.word(0)
    for name, value in visit.values.items():
        begin[name] = width
        width = width + value.size(0)
    tile = Tile(memory, width, synapses.rows)
    for x in layouts.readers(visit.x, words, numbers):
        for first, count in tile.parts():
            for name, value in visit.values.items():
                tile.read(value, begin[name], first, count)
            for n in code.loop(0, count):
                line = n * width

                def read(
                    name: Name, t: Value, k: Value, size: int, line: Value = line
                ) -> Value:
                    return memory.load(line + k + (t * samples + begin[name]), size)

                for entry in code.loop(*synapses.of_row(first + n)):
                    later, e = synapses.later(entry), entry
                    x.prefetch(x.place(synapses.column(later)))
                    if order:
                        # Traces lie anywhere in memory.
                        for trace in visit.traces.values():
                            trace.prefetch(order[0].index(later) * samples, SAMPLES[0])
                        e = order[0].index(entry)
                    pre = x.place(synapses.column(entry))
                    visit.synapse(e, samples, x, pre, steps, read)


def _emit_by_row(pre_is_row: bool, visit: Visit) -> None:
    """In the order of the matrix, in which traces lie in memory: with few samples,
    reading traces in any other order takes longer than reading neurons in any order
    (one sample, 10⁷ synapses: 58 ms, and 107 in the order of ``post``)."""
    code, synapses = visit.code, Synapses(*visit.lists)
    samples, length = visit.sizes[1], visit.x.size(1)
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
            begin = dict.fromkeys(visit.names('factor', 'credit'), post * samples)
            begin |= dict.fromkeys(visit.names('row', 'y_bar'), post * length)

            def read(
                name: Name, t: Value, k: Value, size: int, begin: dict = begin
            ) -> Value:
                return visit.values[name].load(t * samples + (begin[name] + k), size)

            visit.synapse(e, samples, x, x.place(pre), steps, read)
