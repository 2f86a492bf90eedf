"""Traces as rows ⊗ features: how each is stored, and what the steps of a block add.

A use of a weight, y = op(x, w), states features of x, rows of y, and a letter for each
of their axes. Its trace is Σ_t rows(P_t ∂h_t/∂y_t) ⊗ features(x_t), carried on by
ε_K = P_0 ε_0 + Σ_t ...; its gradient is γ_0 · ε_0, summed over axes that w lacks.

    use                features              rows           letters       of w
    dense product      x                     y              bi,bo->bio    io
    sum with w         1                     y              ,bh->bh       h
    element-wise       ∂y/∂w                 y              bh,bh->bh     h
    embedding          one-hot indices       y              bv,bo->vbo    vo
    convolution        patches               y by filter    rgc,rgo->rgco gco
    synapses           x[pre]                y[post]        eb,eb->eb     e
    one for all        product with ones     y              ob,ob->ob
    pairs              x of each position    y[sources]     bc,bh->bhc    by index

The letter t is left for steps. Layouts of their own, each with a measured reason, have
dense products (``dense_traces.py``), convolutions and synapses, which kernels visit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import cast, factors_for, picked, sum_type, trace_type
from ..compiled_step import Components, Jacobian, Letters, Operands

if TYPE_CHECKING:
    from .weight_use import BaseUse


def beside(values: jax.Array, own: str, trace: str) -> jax.Array:
    """Values with axes ``own`` as axes of a trace, of length one where they have none."""
    sizes = dict(zip(own, values.shape, strict=True))
    ordered = ''.join(c for c in trace if c in own)
    return jnp.einsum(f'{own}->{ordered}', values).reshape(
        [sizes.get(c, 1) for c in trace]
    )


def driven(letters: Letters, xs: jax.Array, rows: jax.Array, dtype: Any) -> jax.Array:
    """Σ_t rows_t ⊗ features_t, from stacks of features and rows."""
    features, own, trace = letters.features, letters.rows, letters.trace
    if len(xs) == 1 or set(trace) == set(own):
        # No matrix product: numbers that the sum with the trace takes in.
        more = beside(xs, 't' + features, 't' + trace) * beside(
            rows, 't' + own, 't' + trace
        )
        return cast(more[0], dtype) if len(xs) == 1 else jnp.sum(cast(more, dtype), 0)
    # Without the barrier XLA forms the product by a slower, transposed kernel.
    left = jax.lax.optimization_barrier(jnp.moveaxis(xs, 0, -1))
    product = f'{features}t,t{own}->{trace}'
    return jnp.einsum(product, left, rows, preferred_element_type=dtype)


def advanced(
    trace: Components,
    product: Jacobian,
    credit: Components,
    plus: Callable[[jax.Array, int], jax.Array],
    dtype: Any,
) -> tuple[Components, jax.Array]:
    """P_0 ε_0, to which ``plus`` adds what steps add to a component; and γ_0 · ε_0 before
    any sum. ``product`` and ``credit`` lie beside the trace, ``dtype``: the type of
    sums."""
    old = {s: e.astype(dtype) for s, e in trace.items()}
    zero = jnp.zeros(next(iter(old.values())).shape, dtype)
    terms = [credit[s] * e for s, e in old.items() if s in credit]
    found = sum(terms[1:], terms[0]).astype(dtype) if terms else zero
    new = {}
    for s in trace:
        terms = [product[s, r] * e for r, e in old.items() if (s, r) in product]
        total = sum(terms[1:], terms[0]) if terms else zero
        new[s] = plus(total, s).astype(trace[s].dtype)
    return new, found


@dataclass(frozen=True, eq=False)
class Trace:
    """The trace of a use, all samples together.

    ``positions``: the position that each element of y reaches, -1 for none.
    """

    use: BaseUse
    positions: np.ndarray

    @property
    def letters(self) -> Letters:
        """Those of the use."""
        assert self.use.letters is not None
        return self.use.letters

    @cached_property
    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the features and the rows of one step."""
        operands = dict(enumerate(self.use.operands))
        stacked = {
            k: jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for k, x in operands.items()
        }
        steps = {k: x for k, x in stacked.items() if k != self.use.operand}
        features = lambda fixed, steps: self.use.features(fixed, steps, 1)
        xs = jax.eval_shape(features, operands, steps)
        return xs.shape[1:], jax.eval_shape(self.use.rows, self.use.result).shape

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of each component's array."""
        features, rows = self._shapes
        sizes = dict(zip(self.letters.features, features, strict=True))
        sizes |= dict(zip(self.letters.rows, rows, strict=True))
        return tuple(sizes[c] for c in self.letters.trace)

    def sums_steps(self, dtype: Any, length: int) -> bool:
        """Whether a visit sums one-step gradients as well."""
        return False

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
        """P_0 ε_0 + Σ_t P_t ∂h_t/∂w and γ_0 · ε_0; see :class:`TraceLayout`."""
        dtype = sum_type(trace_type(self.use))
        new, found = advanced(
            trace,
            {at: self._beside(p) for at, p in product.items()},
            {s: self._beside(c) for s, c in credit.items()},
            lambda total, s: (
                self._plus(total, fixed, steps, rows[s]) if s in rows else total
            ),
            dtype,
        )
        gradient = self._as_weight(found)
        if y_bars is not None:
            gradient = gradient + self.use.summed(fixed, steps, y_bars)
        return new, gradient

    def _beside(self, values: jax.Array) -> jax.Array:
        """Values of the positions beside the trace."""
        here = self.use.rows(picked(values, self.positions))
        return beside(here, self.letters.rows, self.letters.trace)

    def _as_weight(self, found: jax.Array) -> jax.Array:
        """γ · ε in the shape of w."""
        letters = self.letters
        return self.use.as_weight(
            jnp.einsum(f'{letters.trace}->{letters.weight}', found)
        )

    def _plus(
        self, trace: jax.Array, fixed: Operands, steps: Operands, rows: jax.Array
    ) -> jax.Array:
        """A component's trace with Σ_t P_t ∂h_t/∂w added."""
        use, length = self.use, len(rows)

        def added(steps: Operands, rows: jax.Array) -> jax.Array:
            xs = use.features(fixed, steps, len(rows))
            own = jax.vmap(use.rows)(rows)
            xs, own = factors_for(use.weight.dtype, xs, own)
            return driven(self.letters, xs, own, trace.dtype)

        # Features of all steps at once, unless they are larger than what there is
        # anyway: x, y or the trace itself.
        features, own = (int(np.prod(shape)) for shape in self._shapes)
        sizes = [x.size for x in use.operands if x is not use.weight]
        if features <= max([*sizes, use.result.size]) or (
            length * max(features, own) <= trace.size
        ):
            return trace + added(steps, rows)

        def step(total: jax.Array, at: tuple) -> tuple:
            one = jax.tree.map(lambda x: x[None], at)
            return total + added(*one), None

        return jax.lax.scan(step, trace, (steps, rows))[0]


@dataclass(frozen=True, eq=False)
class FullTrace(Trace):
    """(h, w): the influence of every element of w on every position, for an operation of
    which nothing more is known."""

    group_shape: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return (int(np.prod(self.group_shape)), *self.use.weight.shape)

    def _beside(self, values: jax.Array) -> jax.Array:
        return values.reshape(-1, *(1,) * len(self.use.weight.shape))

    def _as_weight(self, found: jax.Array) -> jax.Array:
        return jnp.sum(found, axis=0)

    def _plus(
        self, trace: jax.Array, fixed: Operands, steps: Operands, rows: jax.Array
    ) -> jax.Array:
        positions = jnp.asarray(self.positions)

        def influence(place: jax.Array) -> jax.Array:
            here = (positions == place).astype(rows.dtype)
            return cast(self.use.summed(fixed, steps, rows * here), trace.dtype)

        return trace + jax.lax.map(influence, jnp.arange(len(trace)))
