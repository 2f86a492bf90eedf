"""Trace carriers: how ε = ∂h/∂w of one tap result y and weight w is laid out between blocks.

Axes: y those of the tap's result, s states of a position, c the axes a product contracts. D acts on s at
the position that each element of y reaches, and so every carrier keeps y's own order:

    Product      (y, s, c)       dense layers, einsum, grouped: a weight meets one element of y a row of x
    Elementwise  (y, s)          bias, gain, threshold, time constant, scalars
    Full         (p, s, w)       anything else: the whole influence of w on every position p
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ..analysis.families import TABLE
from ..analysis.groups import HiddenGroup
from ..compat import Equation, Var, evaluate_equation


Operands = dict[int, Any]


class Carrier(Protocol):
    """One trace: its shape, how a block adds to it, what it gives to the gradient."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the trace."""
        ...

    def instantaneous(self, fixed: Operands, steps: Operands, rows: jax.Array) -> jax.Array:
        """Σ_t P_t ∂h_t/∂w from ``rows`` (t, y, s) = P_t ∂h_t/∂y.

        ``fixed`` are operands that stay the same, the weight among them; ``steps`` are stacked over t.
        """
        ...

    def advance(self, trace: jax.Array, product: jax.Array) -> jax.Array:
        """P_0 ε: the trace after the block's transitions ``product`` (positions, s, r)."""
        ...

    def gradient(self, trace: jax.Array, gamma: jax.Array) -> jax.Array:
        """γ · ε, in the shape of w."""
        ...


@dataclass(frozen=True)
class _Site:
    group: HiddenGroup
    equation: Equation
    operand: int
    result: Var
    positions: np.ndarray

    @property
    def states(self) -> int:
        return self.group.num_state

    @property
    def weight(self) -> Any:
        return self.equation.invars[self.operand].aval

    def at_result(self, values: jax.Array, axes: int) -> jax.Array:
        """Values of the positions, with ``axes`` trailing axes, at the elements of y; zero where y reaches none."""
        tail = values.shape[values.ndim - axes :]
        flat = values.reshape(-1, *tail)
        if np.array_equal(self.positions.reshape(-1), np.arange(len(flat))):
            return flat.reshape(*self.positions.shape, *tail)
        picked = flat[np.maximum(self.positions, 0)]
        reached = (self.positions >= 0).reshape(*self.positions.shape, *(1,) * axes)
        return jnp.where(reached, picked, jnp.zeros_like(picked))

    def run(self, operands: Operands, weight: Any) -> Any:
        """y of one step."""
        values = [weight if k == self.operand else operands[k] for k in range(len(self.equation.invars))]
        results = evaluate_equation(self.equation, values)
        return results[self.equation.outvars.index(self.result)]


@dataclass(frozen=True)
class Elementwise(_Site):
    """A weight that meets one element of y each, broadcast or not."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.result.aval.shape, self.states)

    def instantaneous(self, fixed: Operands, steps: Operands, rows: jax.Array) -> jax.Array:
        weight = fixed[self.operand]

        def slope(step: Operands) -> jax.Array:
            return jax.jvp(lambda w: self.run({**fixed, **step}, w), (weight,), (jnp.ones_like(weight),))[1]

        slopes = jax.vmap(slope, axis_size=len(rows))(steps)
        return jnp.einsum('t...s,t...->...s', rows, slopes.astype(rows.dtype))

    def advance(self, trace: jax.Array, product: jax.Array) -> jax.Array:
        return jnp.einsum('...sr,...r->...s', self.at_result(product, 2), trace)

    def gradient(self, trace: jax.Array, gamma: jax.Array) -> jax.Array:
        y_bar = jnp.einsum('...s,...s->...', self.at_result(gamma, 1), trace)
        spread = lambda w: jnp.broadcast_to(w, self.result.aval.shape)
        _, pull = jax.vjp(spread, jnp.zeros(self.weight.shape, y_bar.dtype))
        return pull(y_bar)[0]


@dataclass(frozen=True)
class Product(_Site):
    """A weight contracted with x by ``dot_general``, in any layout."""

    @property
    def _letters(self) -> tuple[str, str, str, str]:
        """Axes of x, of w, of y, and the contracted ones, as letters."""
        (left, right), (batch_left, batch_right) = self.equation.params['dimension_numbers']
        shapes = [v.aval.ndim for v in self.equation.invars]
        names = iter(string.ascii_lowercase.replace('s', '').replace('r', '').replace('t', ''))
        first = [next(names) for _ in range(shapes[0])]
        second: list[str] = [''] * shapes[1]
        for a, b in zip((*batch_left, *left), (*batch_right, *right), strict=True):
            second[b] = first[a]
        second = [c or next(names) for c in second]
        contracted = [first[a] for a in left]
        batch = [first[a] for a in batch_left]
        free = [c for c in (*first, *second) if c not in batch and c not in contracted]
        weight, x = (first, second) if self.operand == 0 else (second, first)
        return ''.join(x), ''.join(weight), ''.join([*batch, *free]), ''.join(contracted)

    @property
    def shape(self) -> tuple[int, ...]:
        x, _, y, contracted = self._letters
        sizes = dict(zip(x, self.equation.invars[1 - self.operand].aval.shape, strict=True))
        return (*self.result.aval.shape, self.states, *(sizes[c] for c in contracted))

    def instantaneous(self, fixed: Operands, steps: Operands, rows: jax.Array) -> jax.Array:
        x, _, y, contracted = self._letters
        return jnp.einsum(f't{y}s,t{x}->{y}s{contracted}', rows, steps[1 - self.operand].astype(rows.dtype))

    def advance(self, trace: jax.Array, product: jax.Array) -> jax.Array:
        _, _, y, contracted = self._letters
        return jnp.einsum(f'{y}sr,{y}r{contracted}->{y}s{contracted}', self.at_result(product, 2), trace)

    def gradient(self, trace: jax.Array, gamma: jax.Array) -> jax.Array:
        _, weight, y, contracted = self._letters
        return jnp.einsum(f'{y}s,{y}s{contracted}->{weight}', self.at_result(gamma, 1), trace)


@dataclass(frozen=True)
class Full(_Site):
    """Any operation: the influence of every element of w on every position."""

    @property
    def _places(self) -> int:
        return int(np.prod(self.group.varshape))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._places, self.states, *self.weight.shape)

    def instantaneous(self, fixed: Operands, steps: Operands, rows: jax.Array) -> jax.Array:
        def block(w: Any) -> Any:
            return jax.vmap(lambda step: self.run({**fixed, **step}, w), axis_size=len(rows))(steps)

        y, pull = jax.vjp(block, fixed[self.operand])

        def influence(place: jax.Array, state: jax.Array) -> Any:
            here = (jnp.asarray(self.positions) == place).astype(y.dtype)
            return pull(rows[..., state].astype(y.dtype) * here)[0]

        over_states = jax.vmap(influence, (None, 0))
        return jax.vmap(over_states, (0, None))(jnp.arange(self._places), jnp.arange(self.states))

    def advance(self, trace: jax.Array, product: jax.Array) -> jax.Array:
        return jnp.einsum('psr,pr...->ps...', product.reshape(self._places, self.states, self.states), trace)

    def gradient(self, trace: jax.Array, gamma: jax.Array) -> jax.Array:
        return jnp.einsum('ps,ps...->...', gamma.reshape(self._places, self.states), trace)


def carrier_for(
    group: HiddenGroup, equation: Equation, operand: int, result: Var, positions: np.ndarray
) -> Carrier:
    """The leanest carrier that holds the trace of one tap into one group."""
    family = TABLE.get(equation.primitive.name)
    if equation.primitive.name == 'dot_general':
        kind: type = Product
    elif family is not None and family.kind == 'elementwise':
        kind = Elementwise
    else:
        kind = Full
    return kind(group, equation, operand, result, positions)
