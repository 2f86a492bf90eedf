"""Dense products: ``dot_general``, and any product of two operands that an einsum
describes."""

from __future__ import annotations

import math
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..arrays import (
    cast,
    factors_for,
    sum_type,
)
from ..compat import Equation
from ..compiled_step import Box, Letters, Operands, Shares, TraceLayout
from ..split import Split, current_split, runs_on_mesh, spec_of, summed_over
from .dense_traces import DenseTrace, axes_of_mesh
from .labels import AxisMap, Const, axes, origins_along
from .record import Kernel, Operation, register
from .weight_use import BaseUse, bind


def dot_general_subscripts(eqn: Equation) -> str:
    """A ``dot_general`` as an einsum."""
    (left, right), (batch_left, batch_right) = eqn.params['dimension_numbers']
    ranks = [v.aval.ndim for v in eqn.invars]
    letters = iter(string.ascii_letters.replace('t', ''))
    first = [next(letters) for _ in range(ranks[0])]
    second = [''] * ranks[1]
    for a, b in zip((*batch_left, *left), (*batch_right, *right), strict=True):
        second[b] = first[a]
    second = [c or next(letters) for c in second]
    shared = [first[a] for a in batch_left]
    taken = {*shared, *(first[a] for a in left)}
    free = [c for c in (*first, *second) if c not in taken]
    return f'{"".join(first)},{"".join(second)}->{"".join([*shared, *free])}'


@dataclass(frozen=True, eq=False)
class DenseUse(BaseUse):
    """A weight contracted with x, as an einsum says."""

    subscripts: str

    @property
    def input(self) -> int | None:
        return 1 - self.operand

    @cached_property
    def letters(self) -> Letters:  # type: ignore[override]
        left, y = self.subscripts.split('->')
        pair = left.split(',')
        x, weight = pair[1 - self.operand], pair[self.operand]
        trace = ''.join(c for c in y if c not in weight) + weight
        return Letters(x, y, trace, weight, tuple(pair), y)

    def layout(self, positions: np.ndarray, shape: tuple[int, ...]) -> TraceLayout:
        return DenseTrace(self, positions)

    def summed(
        self,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None = None,
        xs: jax.Array | None = None,
    ) -> jax.Array:
        """Σ_t x_t ⊗ ȳ_t: one matrix product with all steps and samples as rows."""
        if xs is None:
            xs = self.features(fixed, steps, len(y_bars))
        return self._product_of(xs, y_bars, box, by_share=False)

    def _by_share(
        self,
        split: Split,
        sample: str,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None,
        xs: jax.Array | None,
    ) -> jax.Array | Shares:
        """One product for each device, of its own samples and neurons."""
        if self._in_all:
            return self.summed(fixed, steps, y_bars, box, xs)
        if xs is None:
            xs = self.features(fixed, steps, len(y_bars))
        return Shares(self._product_of(xs, y_bars, box, by_share=True))

    @property
    def _in_all(self) -> bool:
        """Whether an axis is one of x, w and y."""
        x, y, _, weight = self.letters[:4]
        return bool(set(x) & set(y) & set(weight))

    def _product_of(
        self, xs: jax.Array, y_bars: jax.Array, box: Box | None, by_share: bool
    ) -> jax.Array:
        """The product; ``by_share``: (n, *w), without the sum over devices."""
        x, y, _, weight = self.letters[:4]
        boxes = {} if box is None else dict(zip(y, box, strict=True))
        xs = xs[:, *(boxes.get(c, slice(None)) for c in x)]
        xs, y_bars = factors_for(self.weight.dtype, xs, y_bars)
        dtype = sum_type(jnp.result_type(xs, y_bars))
        split = current_split()
        # Rows of steps and samples in one axis could not be split over devices.
        if self._in_all or (runs_on_mesh() and split is None):
            product = f't{x},t{y}->{weight}'
            gradient = jnp.einsum(product, xs, y_bars, preferred_element_type=dtype)
        elif split is None:
            gradient = self._as_one_product(xs, y_bars, dtype)
        else:
            gradient = self._product_on_each(split, xs, y_bars, dtype, by_share)
        gradient = cast(gradient, sum_type(self.weight.dtype))
        shape = (*gradient.shape[:by_share], *self.weight.shape)
        if gradient.shape == shape:
            return gradient
        part = tuple(boxes.get(c, slice(None)) for c in weight)
        return jnp.zeros(shape, gradient.dtype).at[..., *part].set(gradient)

    def _product_on_each(
        self,
        split: Split,
        xs: jax.Array,
        y_bars: jax.Array,
        dtype: Any,
        by_share: bool,
    ) -> jax.Array:
        """The product of the samples of each device, and the sum of them; or all of
        them, one after the other."""
        x, y, _, weight = self.letters[:4]
        sizes = dict(zip(x, xs.shape[1:], strict=True))
        sizes |= dict(zip(y, y_bars.shape[1:], strict=True))
        over = axes_of_mesh(split, self.letters.sample, weight, sizes)
        samples = over.get(self.letters.sample, ())

        def own(xs: jax.Array, y_bars: jax.Array) -> jax.Array:
            mine = self._as_one_product(xs, y_bars, dtype)
            return mine[None] if by_share else summed_over(mine, samples)

        given = (spec_of(f't{x}', over), spec_of(f't{y}', over))
        found = spec_of(weight, over)
        if by_share:
            found = PartitionSpec(samples, *found)
        return split.on_each_device(own, given, found)(xs, y_bars)

    def _as_one_product(
        self, xs: jax.Array, y_bars: jax.Array, dtype: Any
    ) -> jax.Array:
        # The contracted axes come first: products whose left side runs along its rows
        # are faster on CPUs than transposed ones (80 instead of 60 GFLOP/s). The barrier
        # keeps XLA from undoing that.
        x, y, _, weight = self.letters[:4]
        contracted = ''.join(c for c in x if c not in y)
        rows = 't' + ''.join(c for c in x if c in y)
        free = ''.join(c for c in y if c not in rows)
        left = jnp.einsum(f't{x}->{contracted}{rows}', xs)
        right = jnp.einsum(f't{y}->{rows}{free}', y_bars)
        free_shape = right.shape[len(rows) :]
        inner = math.prod(left.shape[len(contracted) :])
        flat = jax.lax.optimization_barrier(left.reshape(-1, inner))
        right = right.reshape(inner, -1)
        product = jnp.matmul(flat, right, preferred_element_type=dtype)
        shape = (*left.shape[: len(contracted)], *free_shape)
        return jnp.einsum(f'{contracted}{free}->{weight}', product.reshape(shape))


# ---------------------------------------------------------------- the record


def product(subscripts: str | Callable[[Equation], str]) -> Operation:
    """The record of a product of two operands, given as an einsum or a function of the
    equation.

    >>> product('bi,io->bo').family
    'product'
    """
    read = subscripts if callable(subscripts) else lambda eqn: subscripts

    def axis_map(eqn: Equation, k: int) -> AxisMap:
        operands, y = read(eqn).split('->')
        return [y.index(c) if c in y else None for c in operands.split(',')[k]]

    def use(eqn: Equation, operand: int, result: int, const: Const) -> DenseUse:
        return bind(DenseUse, eqn, operand, result, read(eqn))

    return Operation(
        'product',
        axes(axis_map),
        origins=origins_along(axis_map),
        multiplies=True,
        use=use,
    )


def _contracted_axis(eqn: Equation, operand: int) -> int:
    return eqn.params['dimension_numbers'][0][operand][0]


def _kernel(eqn: Equation, operand: int) -> Kernel | None:
    """A matrix times a few rows of x, run from the left by the matrix's columns.

    On CPUs that is faster for some 8 to 64 rows: the kernel then lays out x anew, which
    is small, and not the weight.
    """
    (left, _), (batch, _) = eqn.params['dimension_numbers']
    weight, x = eqn.invars[operand].aval, eqn.invars[1 - operand].aval
    one_type = weight.dtype == x.dtype == eqn.outvars[0].aval.dtype
    if weight.ndim != 2 or len(left) != 1 or batch or not one_type:
        return None
    axis, x_axis = _contracted_axis(eqn, operand), _contracted_axis(eqn, 1 - operand)
    if not 8 <= x.size // weight.shape[axis] <= 64:
        return None

    def prepare(weight: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(jnp.moveaxis(weight, axis, -1))

    def apply(weight: jax.Array, x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, x_axis, 0)
        rows = jax.lax.optimization_barrier(x.reshape(len(x), -1))
        y = jax.lax.optimization_barrier(weight @ rows)
        y = y.reshape(len(weight), *x.shape[1:])
        return y if operand == 0 else jnp.moveaxis(y, 0, -1)

    return Kernel(prepare, apply)


def _split(
    eqn: Equation, operand: int, maker: Equation
) -> Callable[..., list[Any]] | None:
    """``concatenate([x, h]) @ W`` as the parts ``x @ W[:i]`` and ``h @ W[i:]``."""
    (left, _), _ = eqn.params['dimension_numbers']
    if maker.primitive.name != 'concatenate' or len(left) != 1:
        return None
    axis, weight_axis = (
        _contracted_axis(eqn, 1 - operand),
        _contracted_axis(eqn, operand),
    )
    if maker.params['dimension'] != axis:
        return None

    def parts(weight: jax.Array, *inputs: jax.Array) -> list[jax.Array]:
        found, start = [], 0
        for x in inputs:
            end = start + x.shape[axis]
            piece = jax.lax.slice_in_dim(weight, start, end, axis=weight_axis)
            start = end
            pair = (x, piece) if operand == 1 else (piece, x)
            found.append(eqn.primitive.bind(*pair, **eqn.params))
        return found

    return parts


register(
    replace(product(dot_general_subscripts), kernel=_kernel, split=_split),
    'dot_general',
)
