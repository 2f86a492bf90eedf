"""Steps that contribute nothing, whatever they hold.

A masked step has cotangents of zero only, so its part of a gradient is zero. Computed,
it is 0 · x, and NaN where x is NaN or infinite. So values are replaced before they are
multiplied:

    silent   no loss of the step counts. Its states may still pass credit from later
             steps to earlier ones, so only NaN is replaced, which no later loss can
             have read
    dead     silent, and so are all later steps: no credit arrives, and every product
             with it is set to zero

An input of a product with weights that is not finite counts as 0 at silent steps.
Letters: t steps of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

FILL = 0.5
"""Where log, sqrt, 1/x, arcsin and the like all have a derivative."""


class Mask(NamedTuple):
    """Which steps (t,) of a block are silent, and which are dead."""

    silent: jax.Array
    dead: jax.Array

    @classmethod
    def of(cls, cotangents: Sequence[jax.Array], later: Any = True) -> Mask:
        """From cotangents (t, ...) of all targets; ``later``: whether all steps that
        follow are dead."""
        zero = [jnp.all(c.reshape(len(c), -1) == 0, axis=1) for c in cotangents]
        silent = jnp.all(jnp.stack(zero), axis=0)
        until_end = jax.lax.cummin(silent.astype(jnp.int32), reverse=True).astype(bool)
        return cls(silent, until_end & later)

    @classmethod
    def of_silence(cls, length: int, dead: Any) -> Mask:
        """All steps are silent, and all are dead or none."""
        return cls(jnp.ones(length, bool), jnp.broadcast_to(dead, length))


def without_nan(tree: Any, silent: jax.Array | np.ndarray) -> Any:
    """Values with NaN replaced where a step is silent; one step, or t first."""
    return _replaced(tree, silent, jnp.isnan, FILL)


def finite(tree: Any, steps: jax.Array | np.ndarray, fill: float = FILL) -> Any:
    """Values with NaN and infinity replaced at some steps; one step, or t first."""
    return _replaced(tree, steps, lambda x: ~jnp.isfinite(x), fill)


def _replaced(tree: Any, steps: Any, is_bad: Any, fill: float) -> Any:
    def replace(x: Any) -> Any:
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return jnp.where(is_bad(x) & _beside(steps, x), jnp.asarray(fill, x.dtype), x)

    return jax.tree.map(replace, tree)


def zero_at(tree: Any, steps: jax.Array) -> Any:
    """Arrays that are exactly zero at some steps; one step, or t first."""
    return jax.tree.map(
        lambda x: jnp.where(_beside(steps, x), jnp.zeros_like(x), x), tree
    )


def _beside(steps: jax.Array | np.ndarray, x: jax.Array) -> Any:
    """A flag of one step or of each, broadcast against an array with t first."""
    return steps.reshape((*steps.shape, *(1,) * (x.ndim - steps.ndim)))


def all_finite(tree: Any) -> jax.Array:
    """Whether every number is finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))
