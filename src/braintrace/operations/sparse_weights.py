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

from ..arrays import cast, factors_for, padded, sum_type
from ..compiled_step import Box, Components, Jacobian, Operands, TraceLayout
from ..split import current_split, runs_on_mesh, summed_over
from . import kernels
from .kernels import TYPES
from .sparse_product import SparseProduct, multiply
from .synapses import (
    ByColumn,
    at_synapses,
    has_kernels,
)
from .weight_use import BaseUse
from .whole_traces import FullTrace, WholeTrace

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

    def gradient(
        self,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None = None,
    ) -> jax.Array:
        """Σ_t of x at ``pre`` times ȳ at ``post``: no more than one entry a synapse at
        a time."""
        return self._gradient(self._at_synapses, fixed, steps, y_bars, box)

    def gradient_of_factors(
        self, fixed: Operands, steps: Operands, y_bars: jax.Array, box: Box
    ) -> jax.Array:
        # Samples that fill a line of the cache are read where they are.
        many = math.prod(self.result.shape[1:]) >= MANY_SAMPLES and not runs_on_mesh()
        product = self._at_synapses_by_step if many else self._at_synapses
        return self._gradient(product, fixed, steps, y_bars, box)

    def _gradient(
        self,
        product: Callable[..., jax.Array],
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None,
    ) -> jax.Array:
        if self.product.x not in steps:
            return super().gradient(fixed, steps, y_bars, box)
        y_bars = padded(y_bars, box, self.result.shape)
        xs, y_bars = factors_for(self.weight.dtype, steps[self.product.x], y_bars)
        dtype = sum_type(jnp.result_type(xs, y_bars))
        if has_kernels(dtype):
            structure = self.product.kept_structure(fixed, steps)
            ends = [v.astype(dtype) for v in (xs, y_bars)]
            total = product(structure, *self.sides(*ends))
        else:
            total = self._summed(xs, y_bars, dtype)
        return self.as_weight(cast(total, sum_type(self.weight.dtype)))

    @property
    def sample_axes(self) -> tuple[int | None, ...] | None:
        if len(self.result.shape) == 1:
            return None
        numbers = range(len(self.operands))
        return *(1 if k == self.product.x else None for k in numbers), 1

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

    def _summed(self, xs: jax.Array, y_bars: jax.Array, dtype: Any) -> jax.Array:
        def step(total: jax.Array, at: tuple) -> tuple:
            x, y_bar = at
            found = x[self.pre].astype(dtype) * y_bar[self.post]
            return total + found.sum(axis=tuple(range(1, found.ndim))), None

        return jax.lax.scan(step, jnp.zeros(len(self.pre), dtype), (xs, y_bars))[0]

    def layout(self, positions: np.ndarray, shape: tuple[int, ...]) -> TraceLayout:
        return SynapseTrace(self, positions, shape)


@dataclass(frozen=True, eq=False)
class SynapseTrace(WholeTrace):
    """(w, samples): one entry a synapse and sample, in the order of the matrix."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.use.indices), *self.use.result.shape[1:])

    def plus(
        self, trace: jax.Array, fixed: Operands, steps: Operands, rows: jax.Array
    ) -> jax.Array:
        use = self.use

        def step(total: jax.Array, at: tuple) -> tuple:
            row, x = at
            return total + cast(row[use.post] * x[use.pre], total.dtype), None

        return jax.lax.scan(step, trace, (rows, steps[use.product.x]))[0]

    def scaled(self, trace: jax.Array, factor: jax.Array) -> jax.Array:
        return self.at_result(factor)[self.use.post] * trace

    def gradient(self, trace: jax.Array, credit: jax.Array) -> jax.Array:
        found = jnp.sum(self.scaled(trace, credit), axis=range(1, trace.ndim))
        return self.use.as_weight(found)

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
        """P_0 ε_0 + Σ_t P_t ∂h_t/∂w and γ_0 · ε_0; see :class:`SummingLayout`.

        On CPUs by one visit of the trace, which is written in place.
        """
        given = (trace, fixed, steps, rows, product, credit, y_bars)
        read = [steps[self.use.product.x], rows, product, credit, y_bars]
        dtypes = [x.dtype for x in jax.tree.leaves([trace, *read])]
        if not has_kernels(*dtypes):
            return self._plain(*given)
        return kernels.run('synapse_visit', *given, plain=self._plain, by=self._visit)

    def _plain(
        self,
        trace: Components,
        fixed: Operands,
        steps: Operands,
        rows: Components,
        product: Jacobian,
        credit: Components,
        y_bars: jax.Array | None,
    ) -> tuple[Components, jax.Array]:
        """The same by gathers and sums."""
        new, gradient = super().solve(trace, fixed, steps, rows, product, credit)
        if y_bars is not None:
            gradient = gradient + self.use.gradient(fixed, steps, y_bars)
        return new, gradient

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
        use, at_post = self.use, self.at_result
        x = steps[use.product.x]
        factors = {k: at_post(v) for k, v in product.items()}
        credits = {s: at_post(v) for s, v in credit.items()}
        split = current_split()
        if split is None:
            matrix = (*use.product.kept_structure(fixed, steps), use.to_columns)
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

    def unit(self, fixed: Operands, steps: Operands, xs: jax.Array) -> jax.Array:
        """u (t, post, samples...) of steps x (t, pre, samples...)."""
        structure = self.product.kept_structure(fixed, steps)
        flat = _by_neuron(xs)
        u = multiply(jnp.ones(1, xs.dtype), *structure, flat, self.params)
        steps_and_samples = [len(xs), *self.result.shape[1:]]
        if runs_on_mesh():
            steps_and_samples.append(steps_and_samples.pop(0))
        u = u.reshape(len(u), *steps_and_samples)
        return jnp.moveaxis(u, -1 if runs_on_mesh() else 1, 0)

    def gradient(
        self,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None = None,
    ) -> jax.Array:
        """Σ_t of ȳ_t · u_t; x need not be events, since it may be a trace of them."""
        xs = steps.get(self.product.x)
        if xs is None or xs.dtype not in TYPES or y_bars.dtype not in TYPES:
            return super().gradient(fixed, steps, y_bars, box)
        y_bars = padded(y_bars, box, self.result.shape)
        total = jnp.sum(y_bars * self.unit(fixed, steps, xs))
        return cast(total, sum_type(self.weight.dtype)).reshape(self.weight.shape)

    def layout(self, positions: np.ndarray, shape: tuple[int, ...]) -> TraceLayout:
        if self.operands[self.product.x].dtype in TYPES:
            return OneWeightTrace(self, positions, shape)
        return FullTrace(self, positions, shape)


@dataclass(frozen=True, eq=False)
class OneWeightTrace(WholeTrace):
    """(y): each element of y has its own entry of the one weight."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.use.result.shape

    def plus(
        self, trace: jax.Array, fixed: Operands, steps: Operands, rows: jax.Array
    ) -> jax.Array:
        use = self.use
        xs = steps[use.product.x]
        u = use.unit(fixed, steps, use.product.data(xs, xs.dtype))
        return trace + cast(jnp.sum(rows * u, axis=0), trace.dtype)

    def gradient(self, trace: jax.Array, credit: jax.Array) -> jax.Array:
        return jnp.sum(self.scaled(trace, credit)).reshape(self.use.weight.shape)
