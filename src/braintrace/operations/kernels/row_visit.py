"""Visits of the traces of a compressed sparse matrix with few samples, for CPUs.

In the order of the matrix, in which traces lie in memory: with few samples, reading
traces in any other order takes longer than reading neurons in any order. With many
samples ``sparse_visit`` is faster.

Letters: e synapses in the order of the matrix, each from a neuron ``pre`` to a neuron
``post``, k the samples, t the steps, s and r components of ε.

    gradient[e] = Σ_s Σ_k credit_s[post, k] ε_s[e, k]
    ε_s[e, k] = Σ_r factor_sr[post, k] ε_r[e, k] + Σ_t row_s[post, t, k] x[pre, t, k]

Each trace is read and written once, in place. Samples are taken in whole vectors, as in
``products``.
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
    several,
    word,
)
from .products import WIDTH, WIDTHS, Synapses, add_up, index_type


class RowStructure(NamedTuple):
    """What there is of a trace with components numbered from 0.

    ``pre_is_row``: synapses of a row come from one neuron, not lead to one.
    ``rows``, ``factors``, ``credits``: those that are not zero by structure.
    """

    components: int
    pre_is_row: bool
    rows: tuple[int, ...]
    factors: tuple[tuple[int, int], ...]
    credits: tuple[int, ...]

    @property
    def name(self) -> str:
        """A name for the kernel."""
        join = lambda numbers: '_'.join(map(str, numbers))
        factors = join(f'{s}{r}' for s, r in self.factors)
        parts = (str(self.components), join(self.rows), factors, join(self.credits))
        return f'braintrace_synapses_by_row_{"_of_".join(parts)}_{int(self.pre_is_row)}'


class _Visit:
    """The instructions. Operands: indices, starts, x, rows, factors, credits, old
    traces; results: new traces, which lie where the old ones do, and the gradient."""

    def __init__(
        self,
        made: RowStructure,
        synapses: Synapses,
        operands: list[Buffer],
        results: list[Buffer],
    ):
        self.made, self.synapses = made, synapses
        self.build, self.number = synapses.build, synapses.number
        self.x, *rest = operands
        self.rows = dict(zip(made.rows, rest, strict=False))
        names: list[tuple] = [('factor', *pair) for pair in made.factors]
        names += [('credit', s) for s in made.credits]
        self.vectors = dict(zip(names, rest[len(made.rows) :], strict=False))
        *self.traces, self.gradient = results
        self.samples = self.traces[0].size(self.build, 1)
        self.length = self.x.size(self.build, 1)
        self.steps = self.build.udiv(self.length, self.samples)
        self.is_far = synapses.is_far(self.x)

    def emit(self) -> None:
        """All synapses."""
        build, synapses = self.build, self.synapses
        with loop(build, word(0), synapses.rows, 1) as row:
            of_row = synapses.of_row(row)
            with loop(build, *of_row, 1) as e:
                self._ask_for_column(e)
                column = synapses.column(e)
                pre, post = (row, column) if self.made.pre_is_row else (column, row)
                self._synapse(e, pre, post)

    def _ask_for_column(self, e: Any) -> None:
        """Ask for what a later synapse reads of its column; of several steps for the
        first, as the processor sees by itself that the others follow."""
        values = [self.x]
        if self.made.pre_is_row:
            values = [*self.rows.values(), *self.vectors.values()]
        with self.build.if_then(self.is_far):
            for array in values:
                self.synapses.prefetch(array, e, word(0), WIDTHS[0])

    def _synapse(self, e: Any, pre: Any, post: Any) -> None:
        build = self.build
        total: Any = ir.Constant(several(self.number, WIDTH), None)
        done = word(0)
        for size in WIDTHS:
            with running(build, done, self.samples, size, total) as (k, found):
                found.value = self._part(e, pre, post, k, size, found.value)
            total = found.value
            done = rest_of(build, self.samples, size)
        self.gradient.store(build, add_up(build, total), e, 1)

    def _part(
        self, e: Any, pre: Any, post: Any, k: Any, size: int, gradient: Any
    ) -> Any:
        """``size`` samples from k on; gives the gradient with theirs added."""
        made, build = self.made, self.build
        at = self.synapses.place(e, self.samples, k)
        beside = self.synapses.place(post, self.samples, k)
        vectors = {n: v.load(build, beside, size) for n, v in self.vectors.items()}
        old = [trace.load(build, at, size) for trace in self.traces]
        for s in made.credits:
            term = build.fmul(vectors['credit', s], old[s], flags=FLAGS)
            gradient = build.fadd(gradient, self._narrowed(term), flags=FLAGS)
        for s, trace in enumerate(self.traces):
            factors = [pair for pair in made.factors if pair[0] == s]
            pairs = [(vectors['factor', *pair], old[pair[1]]) for pair in factors]
            new = sum_of(build, pairs, several(self.number, size))
            if s in self.rows:
                with running(build, word(0), self.steps, 1, new) as (t, sum_):
                    a = self._at_step(self.rows[s], post, t, k, size)
                    b = self._at_step(self.x, pre, t, k, size)
                    sum_.value = self.synapses.plus(sum_.value, a, b)
                new = sum_.value
            trace.store(build, new, at, size)
        return gradient

    def _at_step(self, values: Buffer, neuron: Any, t: Any, k: Any, size: int) -> Any:
        place = self.synapses.place
        at = place(neuron, self.length, place(t, self.samples, k))
        return values.load(self.build, at, size)

    def _narrowed(self, value: Any) -> Any:
        """The sum of a vector as that of ``WIDTH`` numbers."""
        build = self.build
        if value.type == self.number:
            empty = ir.Constant(several(self.number, WIDTH), None)
            return build.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
        return add_up(build, value, WIDTH)


def visit_by_row(
    made: RowStructure,
    indices: Any,
    starts: Any,
    values: Sequence[Any],
    old: Sequence[Any],
) -> list[jax.Array]:
    """New traces (e, k) and the gradient (e); ``values``: x, rows, factors, credits."""
    index, dtype = index_type(indices, starts), old[0].dtype
    number = number_type(dtype)

    def emit(
        build: ir.IRBuilder, operands: list[Buffer], results: list[Buffer]
    ) -> None:
        synapses = Synapses(build, number, index, *operands[:2])
        _Visit(made, synapses, operands[2:], results).emit()

    given = [indices.astype(index), starts.astype(index), *values, *old]
    outs = [jax.ShapeDtypeStruct(e.shape, dtype) for e in old]
    outs.append(jax.ShapeDtypeStruct(indices.shape, dtype))
    name = f'{made.name}_{jnp.dtype(dtype).name}_{index.name}'
    register(name, number, (len(given), len(outs)), emit)
    first = len(given) - len(old)
    call = jax.ffi.ffi_call(
        name,
        outs,
        input_output_aliases={first + n: n for n in range(len(old))},
        vmap_method='sequential',
    )
    return list(call(*given))
