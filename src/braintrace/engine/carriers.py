"""Trace carriers: how ε = ∂h/∂w of one tap result y and weight w is laid out between blocks.

Axes: y those of the tap's result, s states of a position, c the axes a product contracts. D acts on s at
the position that each element of y reaches, and so every carrier keeps y's own order:

    Product      (y, s, c)       dense layers, einsum, grouped: a weight meets one element of y a row of x
    Elementwise  (y, s)          bias, gain, threshold, time constant, scalars
    Sparse       (w, rows, s)    brainevent products: one entry for each synapse and sample
    Full         (p, s, w)       anything else: the whole influence of w on every position p
    Factorised   x and (y, s)    pp_prop: input and state traces apart, memory linear in neurons
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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

    def slopes(self, fixed: Operands, steps: Operands, length: int) -> jax.Array:
        """∂y/∂w of every element of y and step."""
        weight = fixed[self.operand]

        def slope(step: Operands) -> jax.Array:
            return jax.jvp(lambda w: self.run({**fixed, **step}, w), (weight,), (jnp.ones_like(weight),))[1]

        return jax.vmap(slope, axis_size=length)(steps)

    def spread(self, y_bar: jax.Array) -> jax.Array:
        """Sum what elements of y say about the element of w they share."""
        broadcast = lambda w: jnp.broadcast_to(w, self.result.aval.shape)
        _, pull = jax.vjp(broadcast, jnp.zeros(self.weight.shape, y_bar.dtype))
        return pull(y_bar)[0]


@dataclass(frozen=True)
class Elementwise(_Site):
    """A weight that meets one element of y each, broadcast or not."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.result.aval.shape, self.states)

    def instantaneous(self, fixed: Operands, steps: Operands, rows: jax.Array) -> jax.Array:
        slopes = self.slopes(fixed, steps, len(rows)).astype(rows.dtype)
        return jnp.einsum('t...s,t...->...s', rows, slopes)

    def advance(self, trace: jax.Array, product: jax.Array) -> jax.Array:
        return jnp.einsum('...sr,...r->...s', self.at_result(product, 2), trace)

    def gradient(self, trace: jax.Array, gamma: jax.Array) -> jax.Array:
        return self.spread(jnp.einsum('...s,...s->...', self.at_result(gamma, 1), trace))


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
        x, _, _, contracted = self._letters
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
class Sparse(_Site):
    """A weight for each synapse of a compressed sparse matrix; synapse e leads from ``pre[e]`` to ``post[e]``."""

    pre: np.ndarray
    post: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.post), *self.result.aval.shape[1:], self.states)

    def instantaneous(self, fixed: Operands, steps: Operands, rows: jax.Array) -> jax.Array:
        x = steps[_SPARSE_INPUT].astype(rows.dtype)
        return jnp.einsum('te...s,te...->e...s', rows[:, self.post], x[:, self.pre])

    def advance(self, trace: jax.Array, product: jax.Array) -> jax.Array:
        return jnp.einsum('...sr,...r->...s', self.at_result(product, 2)[self.post], trace)

    def gradient(self, trace: jax.Array, gamma: jax.Array) -> jax.Array:
        return jnp.einsum('e...s,e...s->e', self.at_result(gamma, 1)[self.post], trace)


_SPARSE_INPUT = 3


def _synapses(equation: Equation, operand: int, constant: Callable[[Any], Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Where each weight of a compressed sparse row product leads from and to, if that is known."""
    if operand != 0 or equation.primitive.name.removeprefix('binary_') not in ('csrmv', 'csrmm'):
        return None
    indices, starts = (constant(v) for v in equation.invars[1:3])
    if indices is None or starts is None or equation.invars[0].aval.shape != indices.shape:
        return None
    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return (rows, indices) if equation.params['transpose'] else (indices, rows)


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


class FactorTrace(NamedTuple):
    """ε_x, ε_f and the number of steps they have seen."""

    x: jax.Array
    f: jax.Array
    steps: jax.Array


@dataclass(frozen=True)
class Factorised(_Site):
    """Input and state traces apart, each with its own decay α.

        ε_x = α_x ε_x + x_t        ε_f = α_f D_t ε_f + (1 - α_f) ∂h_t/∂y_t
        gradient_t = (L_t · ε_f) ⊗ ε_x / (1 - α_f^t)

    An element-wise parameter has x = 1 and ∂h/∂y taken through to the parameter.
    """

    data: int | None
    decay: tuple[float, float]

    def init(self) -> FactorTrace:
        """Traces of a fresh sequence."""
        x = () if self.data is None else self.equation.invars[self.data].aval.shape
        dtype = self.result.aval.dtype
        f = jnp.zeros((*self.result.aval.shape, self.states), dtype)
        return FactorTrace(jnp.zeros(x, dtype), f, jnp.zeros((), jnp.int32))

    def block(
        self,
        trace: FactorTrace,
        fixed: Operands,
        steps: Operands,
        rows: jax.Array,
        jacobians: jax.Array,
        signals: jax.Array,
        reads: jax.Array,
    ) -> tuple[FactorTrace, jax.Array]:
        """The traces after a block, and the gradient of w in it; ``rows`` (t, y, s) = ∂h_t/∂y_t."""
        decay_x, decay_f = self.decay
        if self.data is None:
            rows = rows * self.slopes(fixed, steps, len(rows))[..., None].astype(rows.dtype)
            inputs = jnp.ones(len(rows), rows.dtype)
        else:
            inputs = steps[self.data].astype(rows.dtype)

        def step(old: FactorTrace, at: tuple) -> tuple:
            x, row, jacobian = at
            kept = jnp.einsum('...sr,...r->...s', self.at_result(jacobian, 2), old.f)
            new = FactorTrace(decay_x * old.x + x, decay_f * kept + (1 - decay_f) * row, old.steps + 1)
            return new, (old, new)

        last, (before, after) = jax.lax.scan(step, trace, (inputs, rows, jacobians))
        gradient = self._product(fixed, steps, after, signals) + self._product(fixed, steps, before, reads)
        return last, gradient

    def gradient(self, trace: FactorTrace, fixed: Operands, first: Operands, gamma: jax.Array) -> jax.Array:
        """γ · ε, in the shape of w; ``first`` are the operands of the step that follows, stacked over one."""
        return self._product(fixed, first, jax.tree.map(lambda x: x[None], trace), gamma[None])

    def _product(self, fixed: Operands, steps: Operands, trace: FactorTrace, signals: jax.Array) -> jax.Array:
        """Σ_t (signal_t · ε_f) ⊗ ε_x, corrected for the traces' start."""
        correction = 1 - self.decay[1] ** trace.steps.astype(signals.dtype)
        scale = jnp.where(trace.steps == 0, 0.0, 1 / jnp.where(trace.steps == 0, 1.0, correction))
        at_y = jax.vmap(lambda s: self.at_result(s, 1))(signals)
        y_bars = jnp.einsum('t...s,t...s,t->t...', at_y.astype(trace.f.dtype), trace.f, scale.astype(trace.f.dtype))
        if self.data is None:
            total = jnp.einsum('t...,t->...', y_bars, trace.x)
            return self.spread(total)
        moved = {**steps, self.data: trace.x.astype(steps[self.data].dtype)}

        def block(w: Any) -> Any:
            return jax.vmap(lambda step: self.run({**fixed, **step}, w), axis_size=len(y_bars))(moved)

        y, pull = jax.vjp(block, fixed[self.operand])
        return pull(y_bars.astype(y.dtype))[0]


def factorised_for(
    group: HiddenGroup,
    equation: Equation,
    operand: int,
    result: Var,
    positions: np.ndarray,
    data: Sequence[int],
    decay: tuple[float, float],
) -> Factorised | None:
    """A factorised carrier where the operation is a product of x and w or element-wise; None elsewhere."""
    family = TABLE.get(equation.primitive.name)
    if family is None or (family.kind == 'product' and len(data) != 1) or family.kind not in ('product', 'elementwise'):
        return None
    x = data[0] if family.kind == 'product' else None
    return Factorised(group, equation, operand, result, positions, x, decay)


def carrier_for(
    group: HiddenGroup,
    equation: Equation,
    operand: int,
    result: Var,
    positions: np.ndarray,
    constant: Callable[[Any], Any],
) -> Carrier:
    """The leanest carrier that holds the trace of one tap into one group."""
    place = (group, equation, operand, result, positions)
    family = TABLE.get(equation.primitive.name)
    if equation.primitive.name == 'dot_general':
        return Product(*place)
    if family is not None and family.kind == 'elementwise':
        return Elementwise(*place)
    if synapses := _synapses(equation, operand, constant):
        return Sparse(*place, *synapses)
    return Full(*place)
