"""Trace carriers: how ε = ∂h/∂w of one tap result y and weight w is laid out between blocks.

A trace is one array for each component of the states that y can reach. D acts at the position that each element of
y reaches, and so every carrier keeps y's own order. Axes: y those of the tap's result, c those a product contracts.

    Product      (y, c)        dense layers, einsum, grouped: a weight meets one element of y a row of x
    Elementwise  (y,)          bias, gain, threshold, time constant, scalars
    Convolved    (r, c, o)     convolutions: rows of y, elements of a patch, filters
    Sparse       (w, rows)     brainevent products: one entry for each synapse and sample
    Full         (p, w)        anything else: the whole influence of w on every position p
    Factorised   x and (y,)    pp_prop: input and state traces apart, memory linear in neurons
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ..analysis.families import TABLE
from ..analysis.groups import HiddenGroup
from ..compat import Equation, Var, evaluate_equation
from .plan import SUMS, Components, Jacobian
from .products import Letters, Patches, Synapses, cast, is_complex, linear_gradient, paired, product_gradient, wide

Operands = dict[int, Any]


class Carrier(Protocol):
    """One trace: its shape, and what a block does with it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each component's trace."""
        ...

    @property
    def dtype(self) -> Any:
        """Its type."""
        ...

    def solve(
        self,
        trace: Components,
        fixed: Operands,
        steps: Operands,
        rows: Components,
        product: Jacobian,
        gamma: Components,
    ) -> tuple[Components, jax.Array]:
        """The trace after a block, P_0 ε + Σ_t P_t ∂h_t/∂w, and γ · ε of the trace before it, in the shape of w.

        ``rows[s]`` (t, y) = P_t ∂h_t/∂y, ``product`` = P_0. ``fixed`` are operands that stay the same, the weight
        among them; ``steps`` are stacked over t.
        """
        ...


@dataclass(frozen=True)
class _Site:
    group: HiddenGroup
    equation: Equation
    operand: int
    result: Var
    positions: np.ndarray

    @property
    def weight(self) -> Any:
        return self.equation.invars[self.operand].aval

    @property
    def dtype(self) -> Any:
        """The type of a trace: the precision of y; complex if the weight is, for the states' components are real."""
        real = jnp.finfo(self.result.aval.dtype).dtype
        return jnp.promote_types(real, jnp.complex64) if is_complex(self.weight.dtype) else real

    def at_result(self, values: jax.Array) -> jax.Array:
        """Values of the positions at the elements of y; zero where y reaches none."""
        return _picked(values, self.positions)

    @cached_property
    def part(self) -> tuple[slice, ...]:
        """The smallest box of y with all the elements that reach the group."""
        places = np.argwhere(self.positions >= 0)
        return tuple(slice(int(a), int(b) + 1) for a, b in zip(places.min(axis=0), places.max(axis=0), strict=True))

    @property
    def part_shape(self) -> tuple[int, ...]:
        return tuple(p.stop - p.start for p in self.part)

    def here(self, values: jax.Array) -> jax.Array:
        """Values of the positions at the part of y that reaches them."""
        return _picked(values, self.positions[self.part])

    def padded(self, part: jax.Array) -> jax.Array:
        """All of y, zero around its part; leading axes are left alone."""
        sides = [(p.start, n - p.stop) for p, n in zip(self.part, self.result.aval.shape, strict=True)]
        if part.ndim == 0:
            return part
        return jnp.pad(part, [(0, 0)] * (part.ndim - len(sides)) + sides)

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


def _picked(values: jax.Array, positions: np.ndarray) -> jax.Array:
    """Values by their flat position, without a gather where they keep their order; zero where it is negative."""
    flat = values.reshape(-1)
    if np.array_equal(positions.reshape(-1), np.arange(len(flat))):
        return flat.reshape(positions.shape)
    picked = flat[np.maximum(positions, 0)]
    return picked if (positions >= 0).all() else jnp.where(positions >= 0, picked, 0)


class _Whole(_Site, ABC):
    """A trace that is small enough to be solved in one piece."""

    @abstractmethod
    def plus(self, trace: jax.Array, fixed: Operands, steps: Operands, rows: jax.Array) -> jax.Array:
        """A component's trace with Σ_t P_t ∂h_t/∂w added."""

    @abstractmethod
    def scaled(self, trace: jax.Array, factor: jax.Array) -> jax.Array:
        """A component's trace times one factor for each position."""

    @abstractmethod
    def gradient(self, trace: jax.Array, gamma: jax.Array) -> jax.Array:
        """γ · ε of one component."""

    def solve(
        self,
        trace: Components,
        fixed: Operands,
        steps: Operands,
        rows: Components,
        product: Jacobian,
        gamma: Components,
    ) -> tuple[Components, jax.Array]:
        old = {s: e.astype(wide(self.dtype)) for s, e in trace.items()}
        new = {}
        for s in trace:
            terms = [self.scaled(e, product[s, r]) for r, e in old.items() if (s, r) in product]
            total = sum(terms[1:], terms[0]) if terms else jnp.zeros_like(old[s])
            total = self.plus(total, fixed, steps, rows[s]) if s in rows else total
            new[s] = total.astype(trace[s].dtype)
        told = [self.gradient(e, gamma[s]) for s, e in old.items() if s in gamma]
        return new, sum(told[1:], told[0]) if told else jnp.zeros(self.weight.shape, self.weight.dtype)


@dataclass(frozen=True)
class Elementwise(_Whole):
    """A weight that meets one element of y each, broadcast or not."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.result.aval.shape

    def plus(self, trace: jax.Array, fixed: Operands, steps: Operands, rows: jax.Array) -> jax.Array:
        told = rows * self.slopes(fixed, steps, len(rows)).astype(rows.dtype)
        return trace + jnp.sum(cast(told, trace.dtype), axis=0)

    def scaled(self, trace: jax.Array, factor: jax.Array) -> jax.Array:
        return self.at_result(factor) * trace

    def gradient(self, trace: jax.Array, gamma: jax.Array) -> jax.Array:
        return self.spread(self.scaled(trace, gamma))


@dataclass(frozen=True)
class Product(_Site):
    """A weight contracted with x by ``dot_general``, in any layout; of y only the part that reaches the group.

    Samples, the first axis of x and y, are solved one after the other: each one's trace is read and written once a
    block, while it is in the cache.
    """

    @cached_property
    def _letters(self) -> Letters:
        return Letters.of(self.equation, self.operand)

    @property
    def shape(self) -> tuple[int, ...]:
        x, _, _, contracted, _ = self._letters
        sizes = dict(zip(x, self.equation.invars[1 - self.operand].aval.shape, strict=True))
        return (*self.part_shape, *(sizes[c] for c in contracted))

    def solve(
        self,
        trace: Components,
        fixed: Operands,
        steps: Operands,
        rows: Components,
        product: Jacobian,
        gamma: Components,
    ) -> tuple[Components, jax.Array]:
        x, _, y, _, batch = self._letters
        boxes = dict(zip(y, self.part, strict=True))
        xs = steps[1 - self.operand][:, *(boxes.get(c, slice(None)) for c in x)]
        xs, *parts = paired(self.weight.dtype, xs, *(row[:, *self.part] for row in rows.values()))
        given = (
            dict(zip(rows, parts, strict=True)),
            {at: self.here(p) for at, p in product.items()},
            {s: self.here(g) for s, g in gamma.items()},
        )
        if len(y) < 2 or y[0] not in x or y[0] in batch:
            new, total = self._one(x, y, trace, xs, *given)
        else:
            sample = y[0]
            xs = jnp.moveaxis(xs, 1 + x.index(sample), 0)
            rows, product, gamma = given
            rows = {s: jnp.moveaxis(row, 1, 0) for s, row in rows.items()}
            x, y = x.replace(sample, ''), y[1:]

            def one(total: jax.Array, at: tuple) -> tuple:
                new, told = self._one(x, y, *at)
                return total + told, new

            start = jnp.zeros(self.shape[1:], wide(self.dtype))
            total, new = jax.lax.scan(one, start, (trace, xs, rows, product, gamma))
        return new, self._as_weight(total, y)

    def _one(
        self, x: str, y: str, trace: Components, xs: jax.Array, rows: Components, product: Jacobian, gamma: Components
    ) -> tuple[Components, jax.Array]:
        """Traces after a block and γ · ε before it, of one sample or of all."""
        contracted = self._letters.contracted
        dtype = wide(self.dtype)
        old = {s: e.astype(dtype) for s, e in trace.items()}
        over = lambda factor: factor.reshape(*factor.shape, *(1,) * len(contracted))
        new = {}
        for s in trace:
            terms = [over(product[s, r]) * e for r, e in old.items() if (s, r) in product]
            if s in rows:
                left = jax.lax.optimization_barrier(jnp.moveaxis(rows[s], 0, -1))
                axes = f'{y}t,t{x}->{y}{contracted}'
                terms.append(jnp.einsum(axes, left, xs, preferred_element_type=dtype))
            new[s] = sum(terms[1:], terms[0]).astype(trace[s].dtype)
        told = [over(gamma[s]) * e for s, e in old.items() if s in gamma]
        shape = next(iter(old.values())).shape
        return new, sum(told[1:], told[0]).astype(dtype) if told else jnp.zeros(shape, dtype)

    def _as_weight(self, told: jax.Array, y: str) -> jax.Array:
        """What a part of y says about each weight, summed over what the weight does not know."""
        _, weight, every, contracted, _ = self._letters
        part = {c: p for c, p in zip(every, self.part, strict=True) if c in weight}
        gradient = jnp.einsum(f'{y}{contracted}->{weight}', told)
        box = tuple(part.get(c, slice(None)) for c in weight)
        return jnp.zeros(self.weight.shape, gradient.dtype).at[box].set(gradient)


@dataclass(frozen=True)
class Sparse(_Whole):
    """A weight for each synapse of a compressed sparse matrix."""

    synapses: Synapses

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.synapses.post), *self.result.aval.shape[1:])

    def plus(self, trace: jax.Array, fixed: Operands, steps: Operands, rows: jax.Array) -> jax.Array:
        pre, post = self.synapses

        def step(total: jax.Array, at: tuple) -> tuple:
            row, x = at
            return total + cast(row[post] * x[pre], total.dtype), None

        return jax.lax.scan(step, trace, (rows, steps[Synapses.INPUT]))[0]

    def scaled(self, trace: jax.Array, factor: jax.Array) -> jax.Array:
        return self.at_result(factor)[self.synapses.post] * trace

    def gradient(self, trace: jax.Array, gamma: jax.Array) -> jax.Array:
        return jnp.sum(self.scaled(trace, gamma), axis=range(1, trace.ndim))


@dataclass(frozen=True)
class Convolved(_Whole):
    """A filter shared by all places: one entry for each element of y and of its patch."""

    patches: Patches

    @property
    def shape(self) -> tuple[int, ...]:
        filters = self.result.aval.shape[self.equation.params['dimension_numbers'].out_spec[1]]
        return (self.result.aval.size // filters, self.patches.size, filters)

    def plus(self, trace: jax.Array, fixed: Operands, steps: Operands, rows: jax.Array) -> jax.Array:
        def step(total: jax.Array, at: tuple) -> tuple:
            x, row = at
            told = self.patches.of_input(x)[:, :, None] * self.patches.of_result(row)[:, None]
            return total + cast(told, total.dtype), None

        return jax.lax.scan(step, trace, (steps[0], rows))[0]

    def scaled(self, trace: jax.Array, factor: jax.Array) -> jax.Array:
        return self.patches.of_result(self.at_result(factor))[:, None] * trace

    def gradient(self, trace: jax.Array, gamma: jax.Array) -> jax.Array:
        return self.patches.as_weight(jnp.sum(self.scaled(trace, gamma), axis=0))


@dataclass(frozen=True)
class Full(_Whole):
    """Any operation: the influence of every element of w on every position."""

    @property
    def _places(self) -> int:
        return int(np.prod(self.group.varshape))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._places, *self.weight.shape)

    def plus(self, trace: jax.Array, fixed: Operands, steps: Operands, rows: jax.Array) -> jax.Array:
        def block(w: Any) -> Any:
            return jax.vmap(lambda step: self.run({**fixed, **step}, w), axis_size=len(rows))(steps)

        y, pull = jax.vjp(block, fixed[self.operand])

        def influence(place: jax.Array) -> Any:
            here = (jnp.asarray(self.positions) == place).astype(y.dtype)
            return pull(rows.astype(y.dtype) * here)[0]

        return trace + jax.lax.map(influence, jnp.arange(self._places)).astype(trace.dtype)

    def scaled(self, trace: jax.Array, factor: jax.Array) -> jax.Array:
        return factor.reshape(-1, *(1,) * (trace.ndim - 1)) * trace

    def gradient(self, trace: jax.Array, gamma: jax.Array) -> jax.Array:
        return jnp.einsum('p,p...->...', gamma.reshape(-1), trace)


class FactorTrace(NamedTuple):
    """ε_x, ε_f by component, and the number of steps they have seen; no ε_f where it is another trace's."""

    x: jax.Array
    f: Components
    steps: jax.Array


@dataclass(frozen=True)
class Factorised(_Site):
    """Input and state traces apart, each with its own decay α.

        ε_x = α_x ε_x + x_t        ε_f = α_f D_t ε_f + (1 - α_f) ∂h_t/∂y_t
        gradient_t = (L_t · ε_f) ⊗ ε_x / (1 - α_f^t)

    An element-wise parameter has x = 1 and ∂h/∂y taken through to the parameter; where ε_f has no memory, so that it
    is ε_x that remembers, x is the slope ∂y/∂w at the element.
    """

    data: int | None
    decay: tuple[float, float]
    constant: Callable[[Any], Any]

    @property
    def enters_as_is(self) -> bool:
        """True if ε_f is that of y itself: a product, or a sum with the parameter."""
        return self.data is not None or self.equation.primitive.name in SUMS

    @property
    def remembers_slopes(self) -> bool:
        """True if ε_x is that of an element-wise parameter's slopes."""
        return not self.enters_as_is and self.decay[1] == 0

    @property
    def _wide(self) -> Any:
        """The type of both traces: they are sums over steps, so that half precision would lose most of them."""
        return wide(self.result.aval.dtype)

    def init(self, components: Sequence[int]) -> FactorTrace:
        """Traces of a fresh sequence."""
        x = () if self.data is None else self.equation.invars[self.data].aval.shape
        x = self.part_shape if self.remembers_slopes else x
        dtype = self._wide
        f = {i: jnp.zeros(self.part_shape, dtype) for i in components}  # arrays of their own: a call may write to each
        return FactorTrace(jnp.zeros(x, dtype), f, jnp.zeros((), jnp.int32))

    def drive(self, fixed: Operands, steps: Operands, rows: Components, length: int) -> tuple[jax.Array, Components]:
        """x_t and ∂h_t/∂y_t of every step, the latter taken through to an element-wise parameter."""
        rows = {s: row[:, *self.part] for s, row in rows.items()}
        if self.data is not None:
            return steps[self.data].astype(self._wide), rows
        slopes = self.slopes(fixed, steps, length)[:, *self.part]
        if self.remembers_slopes:
            return slopes.astype(self._wide), rows
        return jnp.ones(length, self._wide), {s: r * slopes.astype(r.dtype) for s, r in rows.items()}

    def step(self, old: FactorTrace, x: jax.Array, rows: Components, jacobian: Jacobian, after: Any) -> FactorTrace:
        """One step of both recursions; ``after``: the components of ε_f that are wanted."""
        decay_x, decay_f = self.decay
        new: Components = {}
        for s in after:
            terms = [decay_f * self.here(jacobian[s, r]) * f for r, f in old.f.items() if (s, r) in jacobian]
            terms += [(1 - decay_f) * rows[s]] if s in rows else []
            new[s] = sum(terms[1:], terms[0]) if terms else jnp.zeros(self.part_shape, self._wide)
        return FactorTrace(decay_x * old.x + x, new, old.steps + 1)

    def told(self, trace: FactorTrace, signals: Components) -> jax.Array:
        """signal · ε_f at every element of y, corrected for the traces' start."""
        count = trace.steps.astype(jnp.finfo(self._wide).dtype)
        scale = jnp.where(
            trace.steps == 0, 0.0, 1 / jnp.maximum(1 - self.decay[1] ** count, jnp.finfo(count.dtype).tiny)
        )
        terms = [self.here(x) * trace.f[s] for s, x in signals.items() if s in trace.f]
        total = sum(terms[1:], terms[0]) if terms else jnp.zeros(self.part_shape, self._wide)
        return (total * scale).astype(self._wide)

    def gradient(self, fixed: Operands, steps: Operands, y_bars: jax.Array, xs: jax.Array) -> jax.Array:
        """Σ_t y_bar_t ⊗ ε_x,t in the shape of w."""
        if self.data is None:
            each = 't...' if self.remembers_slopes else 't'
            return self.spread(self.padded(jnp.einsum(f't...,{each}->...', y_bars, xs)))
        if self.equation.primitive.name == 'dot_general':
            return product_gradient(self.equation, self.operand, xs, y_bars, self.part)
        y_bars = self.padded(y_bars)
        found = linear_gradient(self.equation, self.operand, {**steps, self.data: xs}, y_bars, self.constant)
        if found is not None:
            return found
        moved = {**steps, self.data: cast(xs, steps[self.data].dtype)}

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
    constant: Callable[[Any], Any],
) -> Factorised | None:
    """A factorised carrier where the operation is a product of x and w or element-wise; None elsewhere."""
    family = TABLE.get(equation.primitive.name)
    if family is None or (family.kind == 'product' and len(data) != 1) or family.kind not in ('product', 'elementwise'):
        return None
    x = data[0] if family.kind == 'product' else None
    return Factorised(group, equation, operand, result, positions, x, decay, constant)


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
    if synapses := Synapses.of(equation, operand, constant):
        return Sparse(*place, synapses)
    if patches := Patches.of(equation, operand):
        return Convolved(*place, patches)
    return Full(*place)
