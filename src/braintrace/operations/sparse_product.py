"""Products with a compressed sparse matrix, as the equations of brainevent hold
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import known_value
from .synapses import to_columns, to_rows


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

    def weights(self, operands: Sequence[Any]) -> Any:
        """One weight for each synapse, or one for all."""
        weights = jnp.reshape(operands[0], -1)
        if self.order is None or weights.size == 1:
            return weights
        return weights[operands[self.order]]

    def data(self, x: Any, dtype: Any) -> Any:
        """x, or ones where there are events, which count as x itself for
        derivatives."""
        if not self.events:
            return x
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return (x > 0).astype(dtype)
        return known_value((x > 0).astype(dtype), x.astype(dtype))


def multiply(
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
