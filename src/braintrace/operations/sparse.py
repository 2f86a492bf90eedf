"""Sparse and event-driven products of brainevent: the operator is hidden in index
arrays."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import cast, factors_for, padded, sum_type
from ..compat import Equation, is_differentiable
from ..compiled_step import Box, Operands, TraceLayout
from .record import Const, Operation, register
from .rules import mixing_labels
from .weight_use import BaseUse, FullTrace, WholeTrace, bind


@dataclass(frozen=True, eq=False)
class SynapseUse(BaseUse):
    """One weight a synapse of a compressed sparse matrix; synapse e leads from
    ``pre[e]`` to ``post[e]``. x has axes (pre, samples...), y has (post, samples...).
    """

    pre: np.ndarray
    post: np.ndarray
    INPUT = 3

    @property
    def input(self) -> int | None:
        return self.INPUT

    def gradient(
        self,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None = None,
    ) -> jax.Array:
        """Σ_t of x at ``pre`` times ȳ at ``post``: no more than one entry a synapse at
        a time."""
        if self.INPUT not in steps:
            return super().gradient(fixed, steps, y_bars, box)
        y_bars = padded(y_bars, box, self.result.shape)
        xs, y_bars = factors_for(self.weight.dtype, steps[self.INPUT], y_bars)
        dtype = sum_type(jnp.result_type(xs, y_bars))

        def step(total: jax.Array, at: tuple) -> tuple:
            x, y_bar = at
            found = x[self.pre].astype(dtype) * y_bar[self.post]
            return total + found.sum(axis=tuple(range(1, found.ndim))), None

        total, _ = jax.lax.scan(step, jnp.zeros(len(self.pre), dtype), (xs, y_bars))
        return cast(total, sum_type(self.weight.dtype))

    def layout(self, positions: np.ndarray, shape: tuple[int, ...]) -> TraceLayout:
        return SynapseTrace(self, positions, shape)


@dataclass(frozen=True, eq=False)
class SynapseTrace(WholeTrace):
    """(w, samples): one entry a synapse and sample."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.use.post), *self.use.result.shape[1:])

    def plus(
        self, trace: jax.Array, fixed: Operands, steps: Operands, rows: jax.Array
    ) -> jax.Array:
        use = self.use

        def step(total: jax.Array, at: tuple) -> tuple:
            row, x = at
            return total + cast(row[use.post] * x[use.pre], total.dtype), None

        return jax.lax.scan(step, trace, (rows, steps[use.INPUT]))[0]

    def scaled(self, trace: jax.Array, factor: jax.Array) -> jax.Array:
        return self.at_result(factor)[self.use.post] * trace

    def gradient(self, trace: jax.Array, credit: jax.Array) -> jax.Array:
        return jnp.sum(self.scaled(trace, credit), axis=range(1, trace.ndim))


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


def _synapse_use(
    eqn: Equation, operand: int, result: int, const: Const
) -> SynapseUse | OpaqueProductUse | None:
    indices, starts = (const(v) for v in eqn.invars[1:3])
    if operand != 0 or indices is None or starts is None:
        return _product_use(eqn, operand, result, const)
    if eqn.invars[0].aval.shape != indices.shape:
        return _product_use(eqn, operand, result, const)
    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    pre, post = (rows, indices) if eqn.params['transpose'] else (indices, rows)
    return bind(SynapseUse, eqn, operand, result, pre, post)


register(
    Operation('product', mixing_labels, multiplies=True, use=_synapse_use),
    'csrmv csrmm binary_csrmv binary_csrmm',
)
register(
    Operation('product', mixing_labels, multiplies=True, use=_product_use),
    'binary_csrmv_indexed binary_csrmm_indexed coomv coomm binary_coomv binary_coomm '
    'binary_densemv binary_densemm fcnmv fcnmm binary_fcnmv binary_fcnmm '
    'bitpack_binary_fcnmv bitpack_binary_fcnmm compact_binary_fcnmv compact_binary_fcnmm '
    'jitsmv jitsmm binary_jitsmv binary_jitsmm jitnmv jitnmm binary_jitnmv binary_jitnmm '
    'jitumv jitumm binary_jitumv binary_jitumm csrmv_dt2t csrmm_dt2t',
)
