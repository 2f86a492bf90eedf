"""Sparse and event-driven products of brainevent: the operator is hidden in index
arrays.

Products with a compressed sparse matrix run by the kernels of ``synapses``, where these
exist for the types and the platform; otherwise as the model has them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..arrays import cast, factors_for, known_value, padded, sum_type
from ..compat import Equation, is_differentiable
from ..compiled_step import Box, Components, Jacobian, Operands, TraceLayout
from ..split import current_split, runs_on_mesh, summed_over
from .record import Const, Operation, UseRule, register
from .rules import mixing_labels
from .synapses import (
    TYPES,
    at_synapses,
    call_kernel,
    has_kernels,
    own_starts,
    to_columns,
    to_rows,
    trace_kernel,
)
from .weight_use import BaseUse, FullTrace, WholeTrace, bind


@dataclass(frozen=True)
class SparseProduct:
    """How an equation holds a product with a compressed sparse matrix.

    ``x``: the operand of the data; ``starts``: that of the starts of rows, None where
    all rows have one length; ``order``: that of the place of each synapse's weight,
    None where weights are in the order of synapses. The weights are operand 0 and the
    columns operand 1. ``events``: data above zero count as one, all others as zero.
    ``passes``: the operand that the second result is a copy of; the results after it
    copy those that follow.
    """

    x: int = 3
    starts: int | None = 2
    order: int | None = None
    events: bool = False
    passes: int | None = None

    def structure(self, operands: Sequence[Any] | Mapping[int, Any]) -> tuple[Any, Any]:
        """Columns of the synapses, and starts of the rows."""
        if self.starts is not None:
            return operands[1], operands[self.starts]
        indices = operands[1]
        rows, length = indices.shape
        starts = jnp.arange(rows + 1, dtype=indices.dtype) * length
        return jnp.reshape(indices, -1), starts

    def kept_structure(self, fixed: Operands, steps: Operands) -> tuple[Any, Any]:
        """The same from operands of a block.

        Where no data reaches the product, all operands but the weight have a time axis.
        """
        return self.structure(
            fixed if 1 in fixed else {k: x[0] for k, x in steps.items()}
        )

    def weights(self, operands: Sequence[Any]) -> Any:
        """One weight for each synapse, or one for all."""
        weights = jnp.reshape(operands[0], -1)
        if self.order is None or weights.size == 1:
            return weights
        return weights[operands[self.order]]

    def data(self, x: Any, dtype: Any) -> Any:
        """x, or ones where there are events, which count as x itself for derivatives."""
        if not self.events:
            return x
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return (x > 0).astype(dtype)
        return known_value((x > 0).astype(dtype), x.astype(dtype))


def _multiply(
    weights: Any, indices: Any, starts: Any, x: Any, params: dict[str, Any]
) -> jax.Array:
    """The product for x (neurons,) or (neurons, samples)."""
    flat = x[:, None] if x.ndim == 1 else x
    scale = None
    if weights.size == 1:
        # One weight for all: a sum of x, whose derivative needs no place for weights.
        scale, weights = weights[0], jnp.ones(1, x.dtype)
    if params['transpose']:
        y = to_columns(weights, indices, starts, flat, params['shape'][1])
    else:
        y = to_rows(weights, indices, starts, flat)
    y = y if scale is None else scale * y
    return y[:, 0] if x.ndim == 1 else y


def _run(product: SparseProduct) -> Callable[[Equation], Callable[..., list] | None]:
    """How equations of a kind run by the kernels."""

    def run(eqn: Equation) -> Callable[[Sequence[Any]], list[Any]] | None:
        weight, x = eqn.invars[0].aval, eqn.invars[product.x].aval
        types = [weight.dtype, eqn.outvars[0].aval.dtype]
        if not has_kernels(*types, *([] if product.events else [x.dtype])):
            return None

        def results(operands: Sequence[Any]) -> list[Any]:
            indices, starts = product.structure(operands)
            data = product.data(jnp.asarray(operands[product.x]), weight.dtype)
            weights = product.weights(operands)
            y = _multiply(weights, indices, starts, data, eqn.params)
            copies = [] if product.passes is None else operands[product.passes :]
            return [y, *copies]

        return results

    return run


# ---------------------------------------------------------------- weights


def _by_neuron(values: jax.Array) -> jax.Array:
    """(t, neurons, samples...) as (neurons, steps and samples).

    Over several devices samples come first, so that they can still be split.
    """
    moved = jnp.moveaxis(values, 0, -1 if runs_on_mesh() else 1)
    return moved.reshape(len(moved), -1)


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
        if self.product.x not in steps:
            return super().gradient(fixed, steps, y_bars, box)
        y_bars = padded(y_bars, box, self.result.shape)
        xs, y_bars = factors_for(self.weight.dtype, steps[self.product.x], y_bars)
        dtype = sum_type(jnp.result_type(xs, y_bars))
        if has_kernels(dtype):
            ends = [_by_neuron(v.astype(dtype)) for v in (xs, y_bars)]
            structure = self.product.kept_structure(fixed, steps)
            total = at_synapses(*structure, *self.sides(*ends))
        else:
            total = self._summed(xs, y_bars, dtype)
        return self.as_weight(cast(total, sum_type(self.weight.dtype)))

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

    def solve(
        self,
        trace: Components,
        fixed: Operands,
        steps: Operands,
        rows: Components,
        product: Jacobian,
        credit: Components,
    ) -> tuple[Components, jax.Array]:
        """P_0 ε_0 + Σ_t P_t ∂h_t/∂w and γ_0 · ε_0; see :class:`TraceLayout`.

        On CPUs by one visit of the trace, which is written in place.
        """
        read = [steps[self.use.product.x], *rows.values()]
        read += [*product.values(), *credit.values()]
        plain = super().solve
        if not has_kernels(*(x.dtype for x in (*trace.values(), *read))):
            return plain(trace, fixed, steps, rows, product, credit)
        return jax.lax.platform_dependent(
            trace,
            fixed,
            steps,
            rows,
            product,
            credit,
            cpu=self._visit,
            default=plain,
        )

    def _visit(
        self,
        trace: Components,
        fixed: Operands,
        steps: Operands,
        rows: Components,
        product: Jacobian,
        credit: Components,
    ) -> tuple[Components, jax.Array]:
        """One visit of the trace by every device, for its own samples and synapses."""
        use, states = self.use, set(trace)
        at_post = self.at_result
        given = (
            trace,
            steps[use.product.x],
            {s: v for s, v in rows.items() if s in states},
            {k: at_post(v) for k, v in product.items() if set(k) <= states},
            {s: at_post(v) for s, v in credit.items() if s in states},
            *use.product.kept_structure(fixed, steps),
        )
        split = current_split()
        if split is None:
            new, gradient = self._visit_own((), (), *given)
            return new, use.as_weight(gradient)
        count, *sizes = self.shape
        synapses = split.of_neurons(count)
        samples = split.of_samples(sizes[0]) if sizes else ()
        spec = lambda *first: P(*first, *(samples,) * bool(sizes))
        ends = [spec(None, None)] * 2 + [spec(None)] * 2
        specs = (spec(synapses), *ends, P(synapses), P())
        own = functools.partial(self._visit_own, samples, synapses)
        run = split.on_each_device(own, specs, (spec(synapses), P(synapses)))
        new, gradient = run(*given)
        return new, use.as_weight(gradient)

    def _visit_own(
        self,
        sample_axes: tuple[str, ...],
        synapse_axes: tuple[str, ...],
        trace: Components,
        x: jax.Array,
        rows: Components,
        factors: Jacobian,
        credit: Components,
        indices: jax.Array,
        starts: jax.Array,
    ) -> tuple[Components, jax.Array]:
        """The visit on one device; the gradient has the order of the synapses."""
        states = tuple(trace)
        samples = math.prod(trace[states[0]].shape[1:])
        x = _by_neuron(x)
        rows = {s: _by_neuron(v) for s, v in rows.items()}
        flat = lambda values: {k: v.reshape(-1, samples) for k, v in values.items()}
        factors, credit = flat(factors), flat(credit)
        pairs = [(s, r) for s in states for r in states]
        # Arrays that are zero by structure are replaced by any of the same kind.
        given = [
            *(rows.get(s, x) for s in states),
            *(factors.get(pair, x) for pair in pairs),
            *(credit.get(s, x) for s in states),
        ]
        old = [e.reshape(-1, samples) for e in trace.values()]
        kernel = trace_kernel(
            self.use.to_columns,
            tuple(s in rows for s in states),
            tuple(pair in factors for pair in pairs),
            tuple(s in credit for s in states),
        )
        structure = (indices, own_starts(starts, len(indices), synapse_axes))
        first = len(structure) + 1 + len(given)
        outs = [jax.ShapeDtypeStruct(e.shape, e.dtype) for e in old]
        outs.append(jax.ShapeDtypeStruct(old[0].shape[:1], old[0].dtype))
        aliases = {first + n: n for n in range(len(old))}
        found = call_kernel(kernel, outs, *structure, x, *given, *old, aliases=aliases)
        *new, gradient = found
        shape = trace[states[0]].shape
        arrays = {s: e.reshape(shape) for s, e in zip(states, new, strict=True)}
        return arrays, summed_over(gradient, sample_axes)


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
        u = _multiply(jnp.ones(1, xs.dtype), *structure, flat, self.params)
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

    def scaled(self, trace: jax.Array, factor: jax.Array) -> jax.Array:
        return self.at_result(factor) * trace

    def gradient(self, trace: jax.Array, credit: jax.Array) -> jax.Array:
        return jnp.sum(self.scaled(trace, credit)).reshape(self.use.weight.shape)


@dataclass(frozen=True, eq=False)
class OpaqueProductUse(BaseUse):
    """A product whose operator cannot be read: ``data`` is the operand that holds x."""

    data: int

    @property
    def input(self) -> int | None:
        return self.data

    def layout(self, positions: np.ndarray, shape: tuple[int, ...]) -> TraceLayout:
        return FullTrace(self, positions, shape)


def _product_use(
    eqn: Equation, operand: int, result: int, const: Const
) -> OpaqueProductUse | None:
    data = [
        k for k, v in enumerate(eqn.invars) if k != operand and is_differentiable(v)
    ]
    return (
        bind(OpaqueProductUse, eqn, operand, result, data[0])
        if len(data) == 1
        else None
    )


def _sparse_use(product: SparseProduct) -> UseRule:
    """Uses of the weights of a kind of product."""

    def use(eqn: Equation, operand: int, result: int, const: Const) -> Any:
        read = (1, product.starts, product.order)
        known = [None if k is None else const(eqn.invars[k]) for k in read]
        missing = [k for k, v in zip(read, known, strict=True) if v is None]
        if operand != 0 or any(k is not None for k in missing):
            return _product_use(eqn, operand, result, const)
        indices, starts, order = known
        assert indices is not None
        if eqn.invars[0].aval.size == 1 != indices.size:
            return bind(OneWeightUse, eqn, operand, result, product, eqn.params)
        if starts is None:
            rows, length = indices.shape
            starts = np.arange(rows + 1) * length
        structure = (indices.reshape(-1), starts, order)
        transpose = eqn.params['transpose']
        return bind(SynapseUse, eqn, operand, result, product, transpose, *structure)

    return use


def _register(product: SparseProduct, names: str) -> None:
    operation = Operation(
        'product',
        mixing_labels,
        multiplies=True,
        use=_sparse_use(product),
        run=_run(product),
    )
    register(operation, names)


_register(SparseProduct(), 'csrmv csrmm csr_matvec csr_matmat')
_register(SparseProduct(events=True, passes=4), 'binary_csrmv binary_csrmm')
_register(
    SparseProduct(x=4, order=3, events=True, passes=5),
    'binary_csrmv_indexed binary_csrmm_indexed',
)
_register(
    SparseProduct(x=2, starts=None, events=True),
    'ell_binary_matvec binary_fcnmv binary_fcnmm',
)
register(
    Operation('product', mixing_labels, multiplies=True, use=_product_use),
    'coomv coomm binary_coomv binary_coomm '
    'binary_densemv binary_densemm fcnmv fcnmm '
    'bitpack_binary_fcnmv bitpack_binary_fcnmm compact_binary_fcnmv compact_binary_fcnmm '
    'jitsmv jitsmm binary_jitsmv binary_jitsmm jitnmv jitnmm binary_jitnmv binary_jitnmm '
    'jitumv jitumm binary_jitumv binary_jitumm csrmv_dt2t csrmm_dt2t',
)
