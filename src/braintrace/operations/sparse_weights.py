"""Weights of compressed sparse matrices: gradients and traces with one entry a synapse,
or one a neuron where all synapses share a weight."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from . import kernels
from .kernels import TYPES
from .sparse_product import SparseProduct, multiply
from .synapses import (
    ByColumn,
    at_synapses,
    has_kernels,
)
from .trace_layout import Trace
from .weight_use import LETTERS, BaseUse

MANY_SAMPLES = 16
"""From so many samples on, those of a neuron fill a line of the cache."""


def _by_neuron(values: jax.Array) -> jax.Array:
    """(t, neurons, samples...) as (neurons, steps and samples).

    Over several devices samples come first, so that they can still be split.
    """
    joined = lambda moved: moved.reshape(len(moved), -1)
    if runs_on_mesh():
        return joined(jnp.moveaxis(values, 0, -1))
    plain = lambda values: joined(jnp.moveaxis(values, 1, 0))
    if not kernels.fit(values.dtype):
        return plain(values)
    return kernels.run('by_neuron', values, plain=plain)


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
        """Where kernels visit the trace."""
        del length
        return has_kernels(dtype, self.use.result.dtype, self.use.weight.dtype)

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
        return kernels.run('synapse_visit', *given, plain=super().solve, by=self._visit)

    def _visit(
        self,
        visit: Callable[..., tuple[Components, jax.Array]],
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
        x = use.stacked(use.product.x, fixed, steps, length)
        factors = {k: at_post(v) for k, v in product.items()}
        credits = {s: at_post(v) for s, v in credit.items()}
        split = current_split()
        if split is None:
            matrix = (*use.product.structure(fixed), use.to_columns)
            pre, (starts,), order = use.by_post(1)
            new, gradient = visit(
                trace, x, rows, factors, credits, y_bars, matrix, (pre, starts, order)
            )
            return new, use.as_weight(gradient)
        count, *sizes = self.shape
        synapses = split.of_neurons(count)
        samples = split.of_samples(sizes[0]) if sizes else ()

        def own(*given: Any) -> tuple[Components, jax.Array]:
            *arrays, (pre, (starts,), order) = given
            new, gradient = visit(*arrays, None, (pre, starts, order))
            return new, summed_over(gradient, samples)

        spec = lambda *first: P(*first, *(samples,) * bool(sizes))
        of_steps, of_block = spec(None, None), spec(None)
        ends = [of_steps, of_steps, of_block, of_block, of_steps]
        specs = (spec(synapses), *ends, P(synapses))
        run = split.on_each_device(own, specs, (spec(synapses), P(synapses)))
        devices = math.prod(split.mesh.shape[axis] for axis in synapses)
        by_post = use.by_post(devices)
        new, gradient = run(trace, x, rows, factors, credits, y_bars, by_post)
        return new, use.as_weight(gradient)


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
