"""Operations that are linear in one weight, and their gradients over many steps at once.

dense         ``dot_general``: one matrix product with all steps and samples as rows
convolution   the same on patches of the input
sparse        brainevent's compressed rows: step by step, one entry for each synapse
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


def wide(dtype: Any) -> Any:
    """The type in which values of a type are summed: float32 for half precision, else the type itself."""
    dtype = jnp.dtype(dtype)
    return jnp.promote_types(dtype, jnp.float32) if dtype.itemsize < 4 else dtype


def is_complex(dtype: Any) -> bool:
    """True for complex types."""
    return jnp.issubdtype(dtype, jnp.complexfloating)


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """An array in another type; of complex numbers the real part, where that type is real.

    This is how the derivative with respect to a real weight follows from a complex one, and so it is applied to
    results only: the real part of a product is not the product of real parts.
    """
    return (x.real if jnp.iscomplexobj(x) and not is_complex(dtype) else x).astype(dtype)


def paired(weight: Any, xs: jax.Array, *y_bars: jax.Array) -> tuple[jax.Array, ...]:
    """Stacks of steps such that Σ_t x_t ȳ_t is what a weight of some type gets; all ``y_bars`` have one type.

    For a real weight that is the real part, Re x Re ȳ - Im x Im ȳ: a real product of twice as many steps.
    """
    is_real = not is_complex(weight)
    if is_real and jnp.iscomplexobj(xs) and any(map(jnp.iscomplexobj, y_bars)):
        xs = jnp.concatenate([xs.real, -xs.imag])
        return xs, *(jnp.concatenate([y.real, y.imag]) for y in y_bars)
    return tuple(x.real if is_real and jnp.iscomplexobj(x) else x for x in (xs, *y_bars))


class Letters(NamedTuple):
    """Axes of x, of w, of y, the contracted ones, and those that x, w and y share. The letter t is left free."""

    x: str
    weight: str
    y: str
    contracted: str
    batch: str

    @classmethod
    def of(cls, equation: Any, operand: int) -> Letters:
        """The axes of an equation whose weight is one of its two operands."""
        (left, right), (batch_left, batch_right) = equation.params['dimension_numbers']
        ranks = [v.aval.ndim for v in equation.invars]
        names = iter(string.ascii_letters.replace('t', ''))
        first = [next(names) for _ in range(ranks[0])]
        second = [''] * ranks[1]
        for a, b in zip((*batch_left, *left), (*batch_right, *right), strict=True):
            second[b] = first[a]
        second = [c or next(names) for c in second]
        contracted = [first[a] for a in left]
        batch = [first[a] for a in batch_left]
        free = [c for c in (*first, *second) if c not in batch and c not in contracted]
        weight, x = (first, second) if operand == 0 else (second, first)
        return cls(*map(''.join, (x, weight, [*batch, *free], contracted, batch)))


def product_gradient(
    equation: Any, operand: int, xs: jax.Array, y_bars: jax.Array, part: tuple[slice, ...] | None = None
) -> jax.Array:
    """Σ_t x_t ⊗ ȳ_t of a product in the shape of its weight: one matrix product with all steps as rows.

    It has the weight's type, but for sums in half precision (see `wide`). ``part``: the box of y that ``y_bars``
    holds. The input is laid out with its contracted axes first: products
    whose left side runs along its rows are faster on CPUs than transposed ones.
    """
    letters = Letters.of(equation, operand)
    weight = equation.invars[operand].aval
    dtype = wide(weight.dtype)
    xs, y_bars = paired(weight.dtype, xs, y_bars)
    product_dtype = wide(jnp.result_type(xs, y_bars))
    boxes = {} if part is None else dict(zip(letters.y, part, strict=True))
    xs = xs[:, *(boxes.get(c, slice(None)) for c in letters.x)]
    if letters.batch:
        gradient = jnp.einsum(
            f't{letters.x},t{letters.y}->{letters.weight}', xs, y_bars, preferred_element_type=product_dtype
        )
    else:
        rows = 't' + ''.join(c for c in letters.x if c not in letters.contracted)
        free = ''.join(c for c in letters.y if c not in rows)
        left = jnp.einsum(f't{letters.x}->{letters.contracted}{rows}', xs)
        right = jnp.einsum(f't{letters.y}->{rows}{free}', y_bars)
        inner = math.prod(left.shape[len(letters.contracted) :])
        left_rows = jax.lax.optimization_barrier(left.reshape(-1, inner))
        product = jnp.matmul(left_rows, right.reshape(inner, -1), preferred_element_type=product_dtype)
        shape = (*left.shape[: len(letters.contracted)], *right.shape[len(rows) :])
        gradient = jnp.einsum(f'{letters.contracted}{free}->{letters.weight}', product.reshape(shape))
    box = tuple(boxes.get(c, slice(None)) for c in letters.weight)
    gradient = cast(gradient, dtype)
    return gradient if gradient.shape == weight.shape else jnp.zeros(weight.shape, dtype).at[box].set(gradient)


def is_turnable(equation: Any, operand: int) -> bool:
    """True for products with a matrix that run faster from the left, by its columns: a few rows to a few dozens."""
    if equation.primitive.name != 'dot_general':
        return False
    (left, _), (batch, _) = equation.params['dimension_numbers']
    weight, x, y = equation.invars[operand].aval, equation.invars[1 - operand].aval, equation.outvars[0].aval
    plain = weight.ndim == 2 and len(left) == 1 and not batch and weight.dtype == x.dtype == y.dtype
    return plain and 8 <= x.size // weight.shape[_contracted(equation, operand)] <= 64


def _contracted(equation: Any, operand: int) -> int:
    return equation.params['dimension_numbers'][0][operand][0]


def turned(equation: Any, operand: int, weight: jax.Array) -> jax.Array:
    """A weight with its contracted axis last."""
    return jax.lax.optimization_barrier(jnp.moveaxis(weight, _contracted(equation, operand), -1))


def turned_product(equation: Any, operand: int, weight: jax.Array, x: jax.Array) -> jax.Array:
    """A product with a turned weight on its left: CPUs then rearrange x, which is small, and not the weight."""
    x = jnp.moveaxis(x, _contracted(equation, 1 - operand), 0)
    rows = jax.lax.optimization_barrier(x.reshape(len(x), -1))
    y = jax.lax.optimization_barrier(weight @ rows).reshape(len(weight), *x.shape[1:])
    return y if operand == 0 else jnp.moveaxis(y, 0, -1)


class Patches(NamedTuple):
    """A convolution as a product: every element of y is a patch of x times one filter.

    Axes: r rows (sample and place), c elements of a patch, o filters.
    """

    equation: Any

    @classmethod
    def of(cls, equation: Any, operand: int) -> Patches | None:
        """The convolution of an equation, if it is one with a filter for its second operand and without groups."""
        params = equation.params
        plain = equation.primitive.name == 'conv_general_dilated' and operand == 1
        return cls(equation) if plain and params['feature_group_count'] == params['batch_group_count'] == 1 else None

    @property
    def _numbers(self) -> Any:
        return self.equation.params['dimension_numbers']

    @property
    def size(self) -> int:
        """Elements of a patch."""
        shape, (out, *_) = self.equation.invars[1].aval.shape, self._numbers.rhs_spec
        return math.prod(shape) // shape[out]

    def of_input(self, x: jax.Array) -> jax.Array:
        """(r, c) of one input."""
        batch, feature, *space = self._numbers.lhs_spec
        params = self.equation.params
        window = [self.equation.invars[1].aval.shape[d] for d in self._numbers.rhs_spec[2:]]
        found = jax.lax.conv_general_dilated_patches(
            x.transpose(batch, feature, *space),
            window,
            params['window_strides'],
            params['padding'],
            params['lhs_dilation'],
            params['rhs_dilation'],
        )
        return jnp.moveaxis(found, 1, -1).reshape(-1, self.size)

    def of_result(self, y: jax.Array) -> jax.Array:
        """(r, o) of one result."""
        batch, feature, *space = self._numbers.out_spec
        return y.transpose(batch, *space, feature).reshape(-1, y.shape[feature])

    def as_weight(self, filters: jax.Array) -> jax.Array:
        """(c, o) in the layout of the weight."""
        spec, shape = self._numbers.rhs_spec, self.equation.invars[1].aval.shape
        parts = filters.reshape(*(shape[d] for d in spec[1:]), shape[spec[0]])
        return jnp.moveaxis(parts, -1, 0).transpose(np.argsort(spec))

    def gradient(self, xs: jax.Array, y_bars: jax.Array) -> jax.Array:
        """Σ_t of every step's gradient, in the shape of the weight."""

        def step(total: jax.Array, at: tuple) -> tuple:
            x, y_bar = at
            told = jnp.matmul(self.of_input(x).T, self.of_result(y_bar), preferred_element_type=total.dtype)
            return total + told, None

        weight = self.equation.invars[1].aval
        xs, y_bars = paired(weight.dtype, xs, y_bars)
        dtype = wide(jnp.result_type(xs, y_bars))
        start = jnp.zeros((self.size, weight.shape[self._numbers.rhs_spec[0]]), dtype)
        total, _ = jax.lax.scan(step, start, (xs, y_bars))
        return self.as_weight(total)


class Synapses(NamedTuple):
    """A weight for each synapse of a compressed sparse matrix; synapse e leads from ``pre[e]`` to ``post[e]``."""

    pre: np.ndarray
    post: np.ndarray

    INPUT = 3
    """The operand with the input: x (pre, samples...), y (post, samples...)."""

    @classmethod
    def of(cls, equation: Any, operand: int, constant: Callable[[Any], Any]) -> Synapses | None:
        """Where each weight of a compressed sparse row product leads from and to, if that is known."""
        if operand != 0 or equation.primitive.name.removeprefix('binary_') not in ('csrmv', 'csrmm'):
            return None
        indices, starts = (constant(v) for v in equation.invars[1:3])
        if indices is None or starts is None or equation.invars[0].aval.shape != indices.shape:
            return None
        rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        return cls(*((rows, indices) if equation.params['transpose'] else (indices, rows)))

    def gradient(self, weight: Any, xs: jax.Array, y_bars: jax.Array) -> jax.Array:
        """Σ_t of every step's gradient of weights of a type: one entry for each synapse at a time."""
        xs, y_bars = paired(weight, xs, y_bars)
        dtype = wide(jnp.result_type(xs, y_bars))

        def step(total: jax.Array, at: tuple) -> tuple:
            x, y_bar = at
            told = x[self.pre].astype(dtype) * y_bar[self.post]
            return total + told.sum(axis=tuple(range(1, told.ndim))), None

        return jax.lax.scan(step, jnp.zeros(len(self.pre), dtype), (xs, y_bars))[0]


def linear_gradient(
    equation: Any,
    operand: int,
    steps: dict[int, jax.Array],
    y_bars: jax.Array,
    constant: Callable[[Any], Any],
    part: tuple[slice, ...] | None = None,
) -> jax.Array | None:
    """Gradient of one weight over many steps, if the operation is one of those above.

    ``part``: a box outside of which ``y_bars`` is zero.
    """
    weight = equation.invars[operand].aval.dtype
    if equation.primitive.name == 'dot_general' and 1 - operand in steps:
        y_bars = y_bars if part is None else y_bars[:, *part]
        return product_gradient(equation, operand, steps[1 - operand], y_bars, part)
    if (patches := Patches.of(equation, operand)) and 0 in steps:
        return cast(patches.gradient(steps[0], y_bars), wide(weight))
    if (synapses := Synapses.of(equation, operand, constant)) and Synapses.INPUT in steps:
        return cast(synapses.gradient(weight, steps[Synapses.INPUT], y_bars), wide(weight))
    return None
