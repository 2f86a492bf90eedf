"""Factorised traces: an input part and a state part, each with its own decay α.

    ε_x = α_x ε_x + x_t        ε_f = α_f D_t ε_f + (1 - α_f) ∂h_t/∂y_t
    gradient_t = (L_t · ε_f) ⊗ ε_x / (1 - α_f^t)

An element-wise parameter has x = 1 and ∂h/∂y taken through to the parameter; where ε_f
has no memory, so that only ε_x has one, x is the slope ∂y/∂w at the element. Letters: t
steps, y elements of the site's result, s components.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import box_of, picked, sum_type
from ..compiled_step import (
    Box,
    CompiledSite,
    Components,
    Jacobian,
    Operands,
    Shares,
    WeightUse,
)

LARGE = 2**20
"""Bytes of an array of y from which on it is large."""


class FactorTrace(NamedTuple):
    """ε_x, ε_f by component, and the number of steps they have seen.

    There is no ε_f where another site holds it.
    """

    x: jax.Array
    f: Components
    steps: jax.Array


@dataclass(frozen=True, eq=False)
class FactorLayout:
    """The factorised trace of one site; ``decay`` of (x, f)."""

    site: CompiledSite
    decay: tuple[float, float]

    @property
    def use(self) -> WeightUse:
        """How the site uses its weight."""
        return self.site.use

    @cached_property
    def box(self) -> Box:
        """The smallest box of y that holds all elements with a position."""
        return box_of(self.site.positions)

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(p.stop - p.start for p in self.box)

    def here(self, values: Any) -> Any:
        """Arrays of the positions in the order of the part of y that reaches them."""
        positions = self.site.positions[self.box]
        return jax.tree.map(lambda x: picked(x, positions), values)

    @property
    def is_large(self) -> bool:
        """Whether arrays of y leave a core's own caches.

        They are then brought into its order once a block: in the loop over steps each
        would be read in the order of the positions, number by number if axes are
        transposed.
        """
        return int(np.prod(self._shape)) * jnp.dtype(self._dtype).itemsize > LARGE

    @property
    def shares_state_part(self) -> bool:
        """Whether ε_f is that of y itself: for a product, or a sum with the
        parameter, whose features are one number."""
        letters = self.use.letters
        is_sum = letters is not None and letters.is_sum
        return self.use.input is not None or is_sum

    @property
    def keeps_slopes(self) -> bool:
        """Whether ε_x is that of an element-wise parameter's slopes."""
        return not self.shares_state_part and self.decay[1] == 0

    @property
    def _dtype(self) -> Any:
        """Of both parts: they are sums over steps, and half precision would lose most
        of them."""
        return sum_type(self.use.result.dtype)

    def init(self, components: Sequence[int]) -> FactorTrace:
        """The trace at the start of a sequence."""
        shape = self._shape if self.keeps_slopes else ()
        if self.use.input is not None:
            shape = self.use.operands[self.use.input].shape
        # Arrays of their own: a call may write to each.
        f = {i: jnp.zeros(self._shape, self._dtype) for i in components}
        return FactorTrace(jnp.zeros(shape, self._dtype), f, jnp.zeros((), jnp.int32))

    def drive(
        self, fixed: Operands, steps: Operands, rows: Components, length: int
    ) -> tuple[jax.Array, Components]:
        """x_t and ∂h_t/∂y_t of every step, the latter taken through to an element-wise
        parameter."""
        rows = {s: row[:, *self.box] for s, row in rows.items()}
        if self.use.input is not None:
            x = steps.get(self.use.input)
            if x is None:
                x = fixed[self.use.input]
                x = jnp.broadcast_to(x, (length, *jnp.shape(x)))
            return x.astype(self._dtype), rows
        if self.shares_state_part:
            return jnp.ones(length, self._dtype), rows
        slopes = self.use.features(fixed, steps, length)[:, *self.box]
        if self.keeps_slopes:
            return slopes.astype(self._dtype), rows
        scaled = {s: row * slopes.astype(row.dtype) for s, row in rows.items()}
        return jnp.ones(length, self._dtype), scaled

    def advance(
        self,
        old: FactorTrace,
        x: jax.Array,
        rows: Components,
        jacobian: Jacobian,
        after: Sequence[int],
    ) -> FactorTrace:
        """One step of both recursions; ``jacobian``: D :meth:`here`; ``after``: the
        components of ε_f that are wanted."""
        decay_x, decay_f = self.decay
        new: Components = {}
        for s in after:
            terms = []
            for r, f in old.f.items():
                if (s, r) in jacobian:
                    terms.append(decay_f * jacobian[s, r] * f)
            if s in rows:
                terms.append((1 - decay_f) * rows[s])
            zero = jnp.zeros(self._shape, self._dtype)
            new[s] = sum(terms[1:], terms[0]) if terms else zero
        return FactorTrace(decay_x * old.x + x, new, old.steps + 1)

    def result_gradient(self, trace: FactorTrace, signals: Components) -> jax.Array:
        """signal · ε_f at every element of y, corrected for the start of the trace at
        zero; ``signals``: those :meth:`here`."""
        count = trace.steps.astype(jnp.finfo(self._dtype).dtype)
        seen = jnp.maximum(1 - self.decay[1] ** count, jnp.finfo(count.dtype).tiny)
        scale = jnp.where(trace.steps == 0, 0.0, 1 / seen)
        terms = [x * trace.f[s] for s, x in signals.items() if s in trace.f]
        total = (
            sum(terms[1:], terms[0]) if terms else jnp.zeros(self._shape, self._dtype)
        )
        return (total * scale).astype(self._dtype)

    def gradient(
        self, fixed: Operands, steps: Operands, y_bars: jax.Array, xs: jax.Array
    ) -> jax.Array | Shares:
        """Σ_t ȳ_t ⊗ ε_x,t in the shape of w."""
        return self.use.gradient(fixed, steps, y_bars, self.box, xs)
