"""Weights of compressed sparse matrices: gradients and traces with one entry a synapse,
or one a neuron where all synapses share a weight."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..arrays import cast, factors_for, padded, picked, sum_type
from ..compiled_step import (
    Box,
    Components,
    Jacobian,
    Letters,
    Operands,
    Shares,
    TraceLayout,
)
from ..split import Split, current_split, runs_on_mesh, summed_over
from .kernels import TYPES
from .sparse_product import SparseProduct, multiply
from .synapses import (
    ByColumn,
    at_synapses,
    has_kernels,
    neurons_last,
    samples_last,
    side_by_side,
)
from .trace_layout import Trace
from .weight_use import LETTERS, BaseUse

MANY_SAMPLES = 16
"""From so many samples on, those of a neuron fill a line of the cache."""
FEW_SAMPLES = 8
"""With fewer, traces are visited in the order of the matrix."""


def _by_neuron(values: jax.Array) -> jax.Array:
    """(t, neurons, samples...) as (neurons, steps and samples).

    Over several devices samples come first, so that they can still be split.
    """
    if runs_on_mesh():
        moved = jnp.moveaxis(values, 0, -1)
        return moved.reshape(len(moved), -1)
    return side_by_side(values)


@dataclass(frozen=True, eq=False)
class SynapseUse(BaseUse):
    """One weight a synapse of a compressed sparse matrix. x has axes (pre, samples...),
    y has (post, samples...).

    ``indices``, ``starts``: the columns of synapses and the starts of rows;
    ``order``: the place of each synapse's weight. All of them are constant.
    """

    product: SparseProduct
    to_columns: bool
    indices: np.ndarray
    starts: np.ndarray
    order: np.ndarray | None

    @property
    def input(self) -> int | None:
        return self.product.x

    @cached_property
    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        rows = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        return (rows, self.indices) if self.to_columns else (self.indices, rows)

    @property
    def pre(self) -> np.ndarray:
        """The neuron each synapse comes from."""
        return self._ends[0]

    @property
    def post(self) -> np.ndarray:
        """The neuron each synapse leads to."""
        return self._ends[1]

    def sides(self, pre: Any, post: Any) -> tuple[Any, Any]:
        """Values of rows and of columns."""
        return (pre, post) if self.to_columns else (post, pre)

    @cached_property
    def _by_post(self) -> dict[int, tuple]:
        return {}

    def by_post(self, parts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Synapses in the order of ``post``, for each of several equal parts of them.

        ``pre`` of each synapse; starts of every ``post``, one row for each part; the
        place of each synapse in its part, None if the matrix has this order.
        """
        if parts not in self._by_post:
            self._by_post[parts] = self._sorted_by_post(parts)
        return self._by_post[parts]

    def _sorted_by_post(
        self, parts: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        size = len(self.indices) // parts
        if not self.to_columns:
            first = np.arange(parts)[:, None] * size
            starts = np.clip(self.starts - first, 0, size)
            return self.indices, starts.astype(np.int32), None
        pre, post = (np.split(end, parts) for end in self._ends)
        size = self.result.shape[0]
        pairs = zip(pre, post, strict=True)
        found = [ByColumn.of(own_pre, own_post, size) for own_pre, own_post in pairs]
        joined = lambda name: np.concatenate([getattr(part, name) for part in found])
        starts = np.stack([part.starts for part in found])
        return joined('rows'), starts, joined('order')

    def as_weight(self, values: jax.Array) -> jax.Array:
        """Values of the synapses in the order and shape of the weight."""
        if self.order is not None:
            values = jnp.zeros_like(values).at[self.order].set(values)
        return values.reshape(self.weight.shape)

    @cached_property
    def letters(self) -> Letters:  # type: ignore[override]
        samples = LETTERS[: len(self.result.shape) - 1].replace('e', 'E')
        numbers = range(len(self.operands))
        own = tuple(f'.{samples}' if k == self.product.x else '' for k in numbers)
        ends = f'e{samples}'
        return Letters(ends, ends, ends, 'e', own, f'.{samples}')

    def features(self, fixed: Operands, steps: Operands, length: int) -> jax.Array:
        return self.stacked(self.product.x, fixed, steps, length)[:, self.pre]

    def rows(self, y: jax.Array) -> jax.Array:
        return y[self.post]

    def summed(
        self,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None = None,
        xs: jax.Array | None = None,
    ) -> jax.Array:
        """Σ_t of x at ``pre`` times ȳ at ``post`` by a kernel: no more than one entry a
        synapse at a time."""
        data = self.stacked(self.product.x, fixed, steps, len(y_bars))
        y_bars = padded(y_bars, box, self.result.shape)
        data, bars = factors_for(self.weight.dtype, data if xs is None else xs, y_bars)
        dtype = sum_type(jnp.result_type(data, bars))
        if not has_kernels(dtype):
            return super().summed(fixed, steps, y_bars, None, xs)
        # Samples that fill a line of the cache are read where a loop has written them.
        many = math.prod(self.result.shape[1:]) >= MANY_SAMPLES and not runs_on_mesh()
        by_step = xs is not None and many
        product = self._at_synapses_by_step if by_step else self._at_synapses
        structure = self.product.structure(fixed)
        ends = self.sides(data.astype(dtype), bars.astype(dtype))
        total = product(structure, *ends)
        return self.as_weight(cast(total, sum_type(self.weight.dtype)))

    def _by_share(
        self,
        split: Split,
        sample: str,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None,
        xs: jax.Array | None,
    ) -> jax.Array | Shares:
        """Every device runs the kernel on its own samples."""
        if self.product.x not in steps or split.neurons:
            return self.summed(fixed, steps, y_bars, box, xs)
        samples = split.of_samples(self.result.shape[1])
        given = [
            P(*((None, None, samples) if k == self.product.x else ())) for k in steps
        ]
        in_steps = dict(zip(steps, given, strict=True))
        of_y = P(None, None, samples)

        def own(fixed: Operands, steps: Operands, *ends: jax.Array) -> jax.Array:
            y_bars, *more = ends
            return self.summed(fixed, steps, y_bars, None, *more)[None]

        fixed = {k: jnp.asarray(x) for k, x in fixed.items()}
        ends = [padded(y_bars, box, self.result.shape), *([] if xs is None else [xs])]
        specs = (dict.fromkeys(fixed, P()), in_steps, *[of_y] * len(ends))
        return Shares(split.on_each_device(own, specs, P(samples))(fixed, steps, *ends))

    def _at_synapses(
        self, structure: tuple[Any, Any], rows: jax.Array, columns: jax.Array
    ) -> jax.Array:
        """Σ_t of values (t, neurons, samples...) at both ends of each synapse."""
        return at_synapses(*structure, _by_neuron(rows), _by_neuron(columns))

    def _at_synapses_by_step(
        self, structure: tuple[Any, Any], rows: jax.Array, columns: jax.Array
    ) -> jax.Array:
        def step(total: jax.Array, ends: tuple) -> tuple:
            flat = [v.reshape(len(v), -1) for v in ends]
            return total + at_synapses(*structure, *flat), None

        start = jnp.zeros(len(self.pre), rows.dtype)
        return jax.lax.scan(step, start, (rows, columns))[0]

    def layout(self, positions: np.ndarray, shape: tuple[int, ...]) -> TraceLayout:
        return SynapseTrace(self, positions)


@dataclass(frozen=True, eq=False)
class SynapseTrace(Trace):
    """(w, samples): one entry a synapse and sample, in the order of the matrix.

    Kernels visit it: gathers by XLA take an array of synapses times samples for each
    factor.
    """

    use: SynapseUse

    def sums_steps(self, dtype: Any, length: int) -> bool:
        """Where kernels visit the trace in the order of ``post``."""
        del length
        return not self._is_visited_by_row and has_kernels(
            dtype, self.use.result.dtype, self.use.weight.dtype
        )

    def solve(
        self,
        trace: Components,
        fixed: Operands,
        steps: Operands,
        rows: Components,
        product: Jacobian,
        credit: Components,
        y_bars: jax.Array | None = None,
    ) -> tuple[Components, jax.Array]:
        """P_0 ε_0 + Σ_t P_t ∂h_t/∂w and γ_0 · ε_0; see :class:`TraceLayout`.

        On CPUs by one visit of the trace, which is written in place.
        """
        given = (trace, fixed, steps, rows, product, credit, y_bars)
        x = self.use.operands[self.use.product.x]
        read = [trace, rows, product, credit, y_bars]
        dtypes = [x.dtype, *(v.dtype for v in jax.tree.leaves(read))]
        if not has_kernels(*dtypes):
            return super().solve(*given)
        return jax.lax.platform_dependent(
            *given, cpu=self._visit, default=super().solve
        )

    def _visit(
        self,
        trace: Components,
        fixed: Operands,
        steps: Operands,
        rows: Components,
        product: Jacobian,
        credit: Components,
        y_bars: jax.Array | None,
    ) -> tuple[Components, jax.Array]:
        """One visit of the trace by every device, for its own samples and synapses."""
        use, at_post = self.use, lambda x: picked(x, self.positions)
        length = next(len(v) for v in (*rows.values(), *steps.values()))
        given = (
            trace,
            use.stacked(use.product.x, fixed, steps, length),
            rows,
            y_bars,
            {k: at_post(v) for k, v in product.items()},
            {s: at_post(v) for s, v in credit.items()},
        )
        split = current_split()
        if self._is_visited_by_row:
            structure = use.product.structure(fixed)
            new, gradient = self._visit_by_row(*given, *structure)
            return new, use.as_weight(gradient)
        if split is None:
            new, gradient = self._visit_own((), *given, *use.by_post(1))
            return new, use.as_weight(gradient)
        count, *sizes = self.shape
        synapses = split.of_neurons(count)
        samples = split.of_samples(sizes[0]) if sizes else ()
        spec = lambda *first: P(*first, *(samples,) * bool(sizes))
        ends = [spec(None, None)] * 3 + [spec(None)] * 2
        specs = (spec(synapses), *ends, *[P(synapses)] * 3)
        own = functools.partial(self._visit_own, samples)
        run = split.on_each_device(own, specs, (spec(synapses), P(synapses)))
        devices = math.prod(split.mesh.shape[axis] for axis in synapses)
        new, gradient = run(*given, *use.by_post(devices))
        return new, use.as_weight(gradient)

    @property
    def _is_visited_by_row(self) -> bool:
        return not runs_on_mesh() and math.prod(self.shape[1:]) < FEW_SAMPLES

    def _visit_by_row(
        self,
        trace: Components,
        x: jax.Array,
        rows: Components,
        y_bars: jax.Array | None,
        factors: Jacobian,
        credit: Components,
        indices: jax.Array,
        starts: jax.Array,
    ) -> tuple[Components, jax.Array]:
        """The visit for few samples; gradients of steps are summed elsewhere."""
        # llvmlite is optional.
        from .kernels.row_visit import visit_by_row

        shape = next(iter(trace.values())).shape
        samples = math.prod(shape[1:])
        beside = lambda v: samples_last(v.reshape(-1, samples))
        new, gradient = visit_by_row(
            {s: e.reshape(-1, samples) for s, e in trace.items()},
            side_by_side(x),
            {s: side_by_side(v) for s, v in rows.items()},
            {k: beside(v) for k, v in factors.items()},
            {s: beside(v) for s, v in credit.items()},
            self.use.to_columns,
            indices,
            starts,
        )
        return {s: e.reshape(shape) for s, e in new.items()}, gradient

    def _visit_own(
        self,
        sample_axes: tuple[str, ...],
        trace: Components,
        x: jax.Array,
        rows: Components,
        y_bars: jax.Array | None,
        factors: Jacobian,
        credit: Components,
        pre: jax.Array | np.ndarray,
        starts: jax.Array | np.ndarray,
        order: jax.Array | np.ndarray | None,
    ) -> tuple[Components, jax.Array]:
        """The visit on one device; the gradient has the order of the synapses."""
        # llvmlite is optional.
        from .kernels.sparse_visit import visit

        shape = next(iter(trace.values())).shape
        new, gradient = visit(
            {s: e.reshape(len(e), -1) for s, e in trace.items()},
            neurons_last(x, 1),
            {s: neurons_last(v, 1) for s, v in rows.items()},
            {k: neurons_last(v, 0) for k, v in factors.items()},
            {s: neurons_last(v, 0) for s, v in credit.items()},
            None if y_bars is None else neurons_last(y_bars, 1),
            len(x),
            pre,
            starts[0],
            order,
        )
        arrays = {s: e.reshape(shape) for s, e in new.items()}
        return arrays, summed_over(gradient, sample_axes)


@dataclass(frozen=True, eq=False)
class OneWeightUse(BaseUse):
    """One weight for all synapses: y = w · u, where u is the product with ones."""

    product: SparseProduct
    params: Any

    @property
    def input(self) -> int | None:
        return self.product.x

    @cached_property
    def letters(self) -> Letters | None:  # type: ignore[override]
        if self.operands[self.product.x].dtype not in TYPES:
            return None
        y = LETTERS[: len(self.result.shape)]
        return Letters(y, y, y, '')

    def features(self, fixed: Operands, steps: Operands, length: int) -> jax.Array:
        xs = self.stacked(self.product.x, fixed, steps, length)
        return self.unit(fixed, steps, self.product.data(xs, xs.dtype))

    def unit(self, fixed: Operands, steps: Operands, xs: jax.Array) -> jax.Array:
        """u (t, post, samples...) of steps x (t, pre, samples...)."""
        structure = self.product.structure(fixed)
        flat = _by_neuron(xs)
        u = multiply(jnp.ones(1, xs.dtype), *structure, flat, self.params)
        steps_and_samples = [len(xs), *self.result.shape[1:]]
        if runs_on_mesh():
            steps_and_samples.append(steps_and_samples.pop(0))
        u = u.reshape(len(u), *steps_and_samples)
        return jnp.moveaxis(u, -1 if runs_on_mesh() else 1, 0)

    def summed(
        self,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None = None,
        xs: jax.Array | None = None,
    ) -> jax.Array:
        """Σ_t of ȳ_t · u_t; x need not be events, since it may be a trace of them."""
        data = xs
        if data is None:
            data = self.stacked(self.product.x, fixed, steps, len(y_bars))
        if data.dtype not in TYPES or y_bars.dtype not in TYPES:
            return super().summed(fixed, steps, y_bars, box, xs)
        y_bars = padded(y_bars, box, self.result.shape)
        total = jnp.sum(y_bars * self.unit(fixed, steps, data))
        return cast(total, sum_type(self.weight.dtype)).reshape(self.weight.shape)
