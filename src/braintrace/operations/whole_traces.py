"""Traces that are solved in one piece, all samples together: those of element-wise
weights and of operations of any kind.

Letters: t steps, y elements of the result, w elements of the weight, h positions of the
group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import cast, picked, sum_type
from ..compiled_step import Components, Jacobian, Operands
from ..split import runs_on_mesh
from . import kernels

LEAST_FOR_KERNEL = 2**11
"""Elements of a trace from which on a kernel is used."""


def has_kernel(shape: tuple[int, ...], given: Any) -> bool:
    """Whether a trace of a shape is visited by a kernel, in one pass over it: all
    arrays of a tree have one type, the trace is large enough, and the code that is
    traced now runs on one CPU device (also inside of
    :meth:`Split.on_each_device`)."""
    if math.prod(shape) < LEAST_FOR_KERNEL or runs_on_mesh():
        return False
    return kernels.fit(*(x.dtype for x in jax.tree.leaves(given)))


@dataclass(frozen=True, eq=False)
class WholeTrace(ABC):
    """A trace that is solved in one piece: all samples together.

    ``positions``: the position that each element of y reaches, -1 for none.
    """

    use: Any
    positions: np.ndarray
    group_shape: tuple[int, ...]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of each component's array."""

    @abstractmethod
    def plus(
        self, trace: jax.Array, fixed: Operands, steps: Operands, rows: jax.Array
    ) -> jax.Array:
        """A component's trace with Σ_t P_t ∂h_t/∂w added."""

    def scaled(self, trace: jax.Array, factor: jax.Array) -> jax.Array:
        """A component's trace times one factor a position; its last axes are y."""
        return self.at_result(factor) * trace

    @abstractmethod
    def gradient(self, trace: jax.Array, credit: jax.Array) -> jax.Array:
        """γ · ε of one component in the shape of w."""

    def at_result(self, values: jax.Array) -> jax.Array:
        """Values of the positions at the elements of y."""
        return picked(values, self.positions)

    def solve(
        self,
        trace: Components,
        fixed: Operands,
        steps: Operands,
        rows: Components,
        product: Jacobian,
        credit: Components,
    ) -> tuple[Components, jax.Array]:
        """P_0 ε_0 + Σ_t P_t ∂h_t/∂w and γ_0 · ε_0; see :class:`TraceLayout`."""
        old = {s: e.astype(sum_type(self.use.trace_dtype)) for s, e in trace.items()}
        new = {}
        for s in trace:
            terms = [
                self.scaled(e, product[s, r])
                for r, e in old.items()
                if (s, r) in product
            ]
            total = sum(terms[1:], terms[0]) if terms else jnp.zeros_like(old[s])
            if s in rows:
                total = self.plus(total, fixed, steps, rows[s])
            new[s] = total.astype(trace[s].dtype)
        found = [self.gradient(e, credit[s]) for s, e in old.items() if s in credit]
        zero = jnp.zeros(self.use.weight.shape, self.use.weight.dtype)
        return new, sum(found[1:], found[0]) if found else zero


@dataclass(frozen=True, eq=False)
class FullTrace(WholeTrace):
    """(h, w): the influence of every element of w on every position."""

    @cached_property
    def _places(self) -> int:
        return int(np.prod(self.group_shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._places, *self.use.weight.shape)

    def plus(
        self, trace: jax.Array, fixed: Operands, steps: Operands, rows: jax.Array
    ) -> jax.Array:
        positions = jnp.asarray(self.positions)

        def influence(place: jax.Array) -> Any:
            here = (positions == place).astype(rows.dtype)
            return cast(self.use.gradient(fixed, steps, rows * here), trace.dtype)

        return trace + jax.lax.map(influence, jnp.arange(self._places))

    def scaled(self, trace: jax.Array, factor: jax.Array) -> jax.Array:
        return factor.reshape(-1, *(1,) * (trace.ndim - 1)) * trace

    def gradient(self, trace: jax.Array, credit: jax.Array) -> jax.Array:
        return jnp.einsum('h,h...->...', credit.reshape(-1), trace)


@dataclass(frozen=True, eq=False)
class ElementwiseTrace(WholeTrace):
    """(y,): a weight meets each element of y by itself, broadcast or not."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.use.result.shape

    def plus(
        self, trace: jax.Array, fixed: Operands, steps: Operands, rows: jax.Array
    ) -> jax.Array:
        slopes = self.use.slopes(fixed, steps, len(rows))
        return trace + jnp.sum(
            cast(rows * slopes.astype(rows.dtype), trace.dtype), axis=0
        )

    def gradient(self, trace: jax.Array, credit: jax.Array) -> jax.Array:
        return self.use.spread(self.scaled(trace, credit))
