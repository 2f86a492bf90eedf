"""Steps that count for nothing, whatever they hold.

A masked step has cotangents of zero only. Its own part of a gradient is zero by definition; computed, it is 0 · x, and
NaN where x is NaN or infinite. So values are replaced before they are multiplied:

    silent   no loss of the step counts. Its states may still pass credit from later steps to earlier ones, so only
             NaN is replaced, which is in no state that a later loss can read
    dead     nor does that of any later step: no credit arrives, and every product with it is zero

An input that is not finite, of a product with weights, counts as 0 at silent steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_FILL = 0.5
"""Where log, sqrt, 1/x, arcsin and their like all have a derivative."""


class Mask(NamedTuple):
    """Which steps (t,) of a block are silent, and which are dead."""

    silent: jax.Array
    dead: jax.Array

    @classmethod
    def of(cls, cotangents: Sequence[jax.Array], later: Any = True) -> Mask:
        """From the cotangents (t, ...) of all targets; ``later``: whether every step that follows is dead."""
        zero = [jnp.all(c.reshape(len(c), -1) == 0, axis=1) for c in cotangents]
        silent = jnp.all(jnp.stack(zero), axis=0)
        return cls(silent, jax.lax.cummin(silent.astype(jnp.int32), reverse=True).astype(bool) & later)

    @classmethod
    def silence(cls, length: int, dead: Any) -> Mask:
        """All steps are silent, and all are dead or none."""
        return cls(jnp.ones(length, bool), jnp.broadcast_to(dead, length))


def without_nan(tree: Any, silent: jax.Array | np.ndarray) -> Any:
    """Values of steps with NaN replaced where a step is silent; one step, or stacked over steps."""

    def replace(x: Any) -> Any:
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return jnp.where(jnp.isnan(x) & _over(silent, x), jnp.asarray(_FILL, x.dtype), x)

    return jax.tree.map(replace, tree)


def finite(tree: Any, steps: jax.Array, fill: float = _FILL) -> Any:
    """The same, with infinite values replaced as well: for values that meet a cotangent of zero at these steps."""

    def replace(x: Any) -> Any:
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return jnp.where(~jnp.isfinite(x) & _over(steps, x), jnp.asarray(fill, x.dtype), x)

    return jax.tree.map(replace, tree)


def zero_at(tree: Any, steps: jax.Array) -> Any:
    """Arrays that are exactly zero at some steps; one step, or stacked over steps."""
    return jax.tree.map(lambda x: jnp.where(_over(steps, x), jnp.zeros_like(x), x), tree)


def _over(steps: jax.Array | np.ndarray, x: jax.Array) -> Any:
    """A flag of one step or of each, by the side of an array whose first axis counts the steps."""
    return steps.reshape((*steps.shape, *(1,) * (x.ndim - steps.ndim)))
