"""Rows of a learned table."""

from __future__ import annotations

from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from braintrace import ops


class Embedding(brainstate.nn.Embedding):
    """Maps integer indices to rows of `weight`, through `ops.embedding`.

    The row of `padding_idx` gets no gradient. With `max_norm` or `scale_grad_by_freq`,
    the lookup of brainstate, which has its own gradient, is used with the same mark.
    """

    def update(self, indices: Any) -> ops.Result:
        if self.max_norm is not None or self.scale_grad_by_freq:
            with ops.mark('embedding'):
                return super().update(indices)
        weight = self.weight.value
        rows = ops.embedding(
            indices, jax.lax.stop_gradient(weight) if self.freeze else weight
        )
        if self.padding_idx is None:
            return rows
        padding = jnp.expand_dims(
            jnp.asarray(indices) == self.padding_idx,
            range(-len(self.embedding_size), 0),
        )
        return jax.tree.map(
            lambda row: jnp.where(padding, jax.lax.stop_gradient(row), row), rows
        )
