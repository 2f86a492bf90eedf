"""Steps whose losses have weight 0 contribute nothing, whatever their inputs hold.

Inputs of such steps that are not finite are replaced by 0 where sequences enter a
program (:func:`finite`), so all values of a masked step are those of finite inputs. A
model may still divide by one of these, and 0 · inf would be NaN. So what the loss of a
step gives is set to zero by ``silent``, and what credit gives by ``dead``:

    silent   the loss of the step has weight 0; credit of later steps may pass through
    dead     silent, and so are all later steps: no credit arrives

Letters: t steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

FILL = 0.5
"""Where log, sqrt, 1/x, arcsin and the like all have a derivative."""


class Mask(NamedTuple):
    """Which steps (t,) are silent, and which are dead."""

    silent: jax.Array
    dead: jax.Array

    @classmethod
    def of(cls, cotangents: Sequence[jax.Array]) -> Mask:
        """From cotangents (t, ...) of all targets; no credit comes from later steps."""
        zero = [jnp.all(c.reshape(len(c), -1) == 0, axis=1) for c in cotangents]
        silent = jnp.all(jnp.stack(zero), axis=0)
        until_end = jax.lax.cummin(silent.astype(jnp.int32), reverse=True)
        return cls(silent, until_end.astype(bool))


def finite(tree: Any, silent: jax.Array, fill: float = 0.0) -> Any:
    """Arrays with t first, NaN and infinity replaced at silent steps."""
    return _replaced(tree, lambda x: ~jnp.isfinite(x) & _beside(silent, x), fill)


def without_nan(tree: Any, silent: jax.Array | None = None) -> Any:
    """Arrays with 0 in place of NaN, at silent steps alone if these are given.

    For calls without a mask, whose values are those of the inputs as they are: NaN was
    read by no loss that counts. Infinity may have been read (-inf in a softmax), so it
    stays.
    """
    is_bad = lambda x: (
        jnp.isnan(x) if silent is None else jnp.isnan(x) & _beside(silent, x)
    )
    return _replaced(tree, is_bad, 0.0)


def _replaced(tree: Any, is_bad: Any, fill: float) -> Any:
    def replace(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return jnp.where(is_bad(x), jnp.asarray(fill, x.dtype), x)

    return jax.tree.map(replace, tree)


def zero_at(tree: Any, steps: jax.Array) -> Any:
    """Arrays that are exactly zero at some steps; one step, or t first."""
    return jax.tree.map(
        lambda x: jnp.where(_beside(steps, x), jnp.zeros_like(x), x), tree
    )


def _beside(steps: jax.Array, x: jax.Array) -> jax.Array:
    """A flag of one step or of each, broadcast against an array with t first."""
    return steps.reshape((*steps.shape, *(1,) * (x.ndim - steps.ndim)))
