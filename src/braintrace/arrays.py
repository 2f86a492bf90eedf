"""Array helpers of operations and solver: types of sums, sizes, and parts of a result.

Half precision, real and complex numbers may meet in one product.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .compiled_step import Box, Jacobian, Shares
from .split import current_split


def sum_type(dtype: Any) -> Any:
    """The type in which values of a type are summed: float32 for half precision."""
    dtype = jnp.dtype(dtype)
    return jnp.promote_types(dtype, jnp.float32) if dtype.itemsize < 4 else dtype


def samples_are_split() -> bool:
    """Whether the code that is traced now has its samples on several devices."""
    split = current_split()
    return split is not None and split.shares > 1


def zero_gradient(shape: tuple[int, ...], dtype: Any) -> jax.Array | Shares:
    """No gradient yet of a weight. Where samples are split over devices, each has a sum
    of its own."""
    split = current_split()
    if split is None or split.shares == 1:
        return jnp.zeros(shape, dtype)
    return Shares(split.by_share(jnp.zeros((split.shares, *shape), dtype)))


def is_complex(dtype: Any) -> bool:
    """Whether a type is complex."""
    return jnp.issubdtype(dtype, jnp.complexfloating)


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """An array in another type; of complex numbers the real part, where that type is
    real.

    The derivative by a real weight follows so from a complex one. Only results are
    cast: the real part of a product is not the product of real parts.
    """
    real_part = jnp.iscomplexobj(x) and not is_complex(dtype)
    return (x.real if real_part else x).astype(dtype)


def factors_for(
    weight: Any, xs: jax.Array, *y_bars: jax.Array
) -> tuple[jax.Array, ...]:
    """Stacks of steps such that Σ_t x_t ȳ_t is the gradient of a weight of a type.

    For a real weight that is the real part, Re x Re ȳ - Im x Im ȳ: a real product of
    twice as many steps. All ``y_bars`` have one type.
    """
    is_real = not is_complex(weight)
    if is_real and jnp.iscomplexobj(xs) and any(map(jnp.iscomplexobj, y_bars)):
        xs = jnp.concatenate([xs.real, -xs.imag])
        return xs, *(jnp.concatenate([y.real, y.imag]) for y in y_bars)
    return tuple(
        x.real if is_real and jnp.iscomplexobj(x) else x for x in (xs, *y_bars)
    )


@jax.custom_jvp
def known_value(known: Any, computed: Any) -> Any:
    """A value that is known already, with the derivative of its computation."""
    return known


@known_value.defjvp
def _known_value_jvp(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[1]


def jacobian_rows(
    function: Callable[[list[jax.Array]], list[jax.Array]],
    at: list[jax.Array],
    entries: Collection[tuple[int, int]],
) -> Jacobian:
    """∂result_i/∂argument_j for some (i, j), of a function that keeps elements apart:
    one reverse pass for each result."""
    found = {}
    for i in sorted({i for i, _ in entries}):
        value, pull = jax.vjp(lambda x, i=i: function(x)[i], at)
        (row,) = pull(jnp.ones_like(value))
        found.update({(i, j): x for j, x in enumerate(row) if (i, j) in entries})
    return found


@jax.custom_vjp
def without_gradient(where: jax.Array, x: jax.Array) -> jax.Array:
    """A value whose cotangent is zero, even if it would be 0 · inf, if ``where``."""
    return x


def _back(where: jax.Array, bar: jax.Array) -> tuple[None, jax.Array]:
    return None, jnp.where(where, jnp.zeros_like(bar), bar)


without_gradient.defvjp(lambda where, x: (x, where), _back)


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays in a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def all_zero(arrays: Iterable[jax.Array]) -> jax.Array:
    """Whether every element of all arrays is zero."""
    return jnp.all(jnp.stack([jnp.all(x == 0) for x in arrays]))


# ---------------------------------------------------------------- positions of a result


def picked(values: jax.Array, positions: np.ndarray) -> jax.Array:
    """Values by flat position, zero where that is negative; no gather if they keep
    their order, or that of transposed axes."""
    order = _order_of_axes(values.shape, positions)
    if order is not None:
        return jnp.transpose(values, order)
    flat = values.reshape(-1)
    if np.array_equal(positions.reshape(-1), np.arange(len(flat))):
        return flat.reshape(positions.shape)
    found = flat[np.maximum(positions, 0)]
    return found if (positions >= 0).all() else jnp.where(positions >= 0, found, 0)


def _order_of_axes(
    shape: tuple[int, ...], positions: np.ndarray
) -> tuple[int, ...] | None:
    """The order in which axes of an array are, if positions are its elements."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    for order in itertools.permutations(range(len(shape))):
        seen = numbers.transpose(order)
        if seen.shape == positions.shape and np.array_equal(seen, positions):
            return order
    return None


def box_of(positions: np.ndarray) -> Box:
    """The smallest box of y that holds all elements with a position."""
    places = np.argwhere(positions >= 0)
    limits = zip(places.min(axis=0), places.max(axis=0), strict=True)
    return tuple(slice(int(a), int(b) + 1) for a, b in limits)


def padded(part: jax.Array, box: Box | None, shape: tuple[int, ...]) -> jax.Array:
    """All of y, zero around a box of it; leading axes are left alone."""
    if box is None or part.ndim == 0:
        return part
    sides = [(p.start, n - p.stop) for p, n in zip(box, shape, strict=True)]
    return jnp.pad(part, [(0, 0)] * (part.ndim - len(sides)) + sides)


def summed_by(values: jax.Array, index: np.ndarray, size: int) -> jax.Array:
    """Values (..., *index.shape) added up by their index: (..., size); none below 0."""
    repeated = []
    for axis in range(index.ndim):
        if (index == np.take(index, [0], axis)).all():
            repeated.append(axis)
    first = values.ndim - index.ndim
    values = jnp.sum(values, axis=tuple(first + axis for axis in repeated))
    index = index[*(0 if a in repeated else slice(None) for a in range(index.ndim))]
    values, flat = values.reshape(*values.shape[:first], -1), index.reshape(-1)
    if np.array_equal(flat, np.arange(size)):
        return values
    # An index beyond the end is dropped.
    places = np.where(flat < 0, size, flat)
    start = jnp.zeros((*values.shape[:first], size), values.dtype)
    return start.at[..., places].add(values, mode='drop')
