"""The axes of a ``dot_general`` between data and a weight, as letters for ``einsum``."""

from __future__ import annotations

import math
import string
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


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

    ``part``: the box of y that ``y_bars`` holds. The input is laid out with its contracted axes first: products
    whose left side runs along its rows are faster on CPUs than transposed ones.
    """
    letters = Letters.of(equation, operand)
    weight = equation.invars[operand].aval
    xs, y_bars = xs.astype(weight.dtype), y_bars.astype(weight.dtype)
    boxes = {} if part is None else dict(zip(letters.y, part, strict=True))
    xs = xs[:, *(boxes.get(c, slice(None)) for c in letters.x)]
    if letters.batch:
        gradient = jnp.einsum(f't{letters.x},t{letters.y}->{letters.weight}', xs, y_bars)
    else:
        rows = 't' + ''.join(c for c in letters.x if c not in letters.contracted)
        free = ''.join(c for c in letters.y if c not in rows)
        left = jnp.einsum(f't{letters.x}->{letters.contracted}{rows}', xs)
        right = jnp.einsum(f't{letters.y}->{rows}{free}', y_bars)
        inner = math.prod(left.shape[len(letters.contracted) :])
        product = jax.lax.optimization_barrier(left.reshape(-1, inner)) @ right.reshape(inner, -1)
        shape = (*left.shape[: len(letters.contracted)], *right.shape[len(rows) :])
        gradient = jnp.einsum(f'{letters.contracted}{free}->{letters.weight}', product.reshape(shape))
    box = tuple(boxes.get(c, slice(None)) for c in letters.weight)
    return gradient if gradient.shape == weight.shape else jnp.zeros(weight.shape, weight.dtype).at[box].set(gradient)
