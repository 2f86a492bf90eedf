"""Marked operations: array functions that mark one argument as a weight.

A mark is a name scope, such as ``etrace:matmul``, around the equations of the
operation. It changes neither values nor derivatives. ``trace='marked'`` looks for it in
the name stack of the equations. Arguments are arrays or quantities with units. Axes:
``i`` inputs, ``o`` outputs, ``g`` groups, ``r`` rank; ``...`` is any number of batch
axes in front.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import brainunit as u
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from braintrace.compat import MARK
from braintrace.errors import ArgumentError, three_parts


class UnitError(u.UnitMismatchError, ValueError):
    """The units of the arguments of an operation do not match."""


Value = ArrayLike | u.Quantity
Result = Any  # jax.Array, or u.Quantity where an argument has a unit
ValueFn = Callable[[Any], Any] | None


def mark(name: str) -> AbstractContextManager[None]:
    """The scope that marks the equations inside it as the operation `name`."""
    return jax.named_scope(MARK + name)


def matmul(
    x: Value,
    weight: Value,
    bias: Value | None = None,
    *,
    weight_fn: ValueFn = None,
    bias_fn: ValueFn = None,
) -> Result:
    """``x @ weight_fn(weight) + bias_fn(bias)`` for `x` (..., i) and `weight` (i,
    o)."""
    with mark('matmul'):
        weight = _apply(weight_fn, weight)
        _check_matmul('matmul', x, weight)
        return _add_bias(
            'matmul', _multiply(jnp.matmul, x, weight), _apply(bias_fn, bias)
        )


def grouped_matmul(
    x: Value,
    weight: Value,
    bias: Value | None = None,
    *,
    weight_fn: ValueFn = None,
    bias_fn: ValueFn = None,
) -> Result:
    """One matrix product for each group: `x` (..., g, i), `weight` (g, i, o), result
    (..., g, o)."""
    with mark('grouped_matmul'):
        weight = _apply(weight_fn, weight)
        x_shape, w_shape = jnp.shape(x), jnp.shape(weight)
        if len(w_shape) != 3 or len(x_shape) < 2 or x_shape[-2:] != w_shape[:2]:
            raise _refusal(
                f'grouped_matmul(x, weight) with x of shape {x_shape} and weight of '
                f'shape {w_shape}',
                'group k of x (..., groups, inputs) meets matrix k of weight (groups, '
                'inputs, outputs)',
                'an x whose last two axes are the first two of a weight with three '
                'axes',
            )
        y = _multiply(lambda a, b: jnp.einsum('...gi,gio->...go', a, b), x, weight)
        return _add_bias('grouped_matmul', y, _apply(bias_fn, bias))


def einsum(
    equation: str, x: Value, weight: Value, *, weight_fn: ValueFn = None
) -> Result:
    """``jnp.einsum(equation, x, weight_fn(weight))``. The first operand is data, and
    the second one is the weight."""
    with mark('einsum'):
        weight = _apply(weight_fn, weight)
        try:
            return _multiply(lambda a, b: jnp.einsum(equation, a, b), x, weight)
        except (TypeError, ValueError) as error:
            raise _refusal(
                f'einsum({equation!r}, x, weight) with shapes {jnp.shape(x)} and '
                f'{jnp.shape(weight)}',
                f'the equation does not fit: {error}',
                'two operands, x first, one letter per axis, one size per letter, as '
                "in '...i,io->...o'",
            ) from error


def embedding(
    indices: ArrayLike, weight: Value, *, weight_fn: ValueFn = None
) -> Result:
    """The rows ``weight_fn(weight)[indices]`` of a table `weight` (n, ...), for integer
    `indices` of any shape."""
    indices = jnp.asarray(indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer) or jnp.ndim(weight) == 0:
        raise _refusal(
            f'embedding(indices, weight) with indices of type {indices.dtype} and '
            f'weight of shape {jnp.shape(weight)}',
            'whole numbers choose rows of a table',
            'integer indices and a weight of shape (rows, features); for one-hot or '
            'soft rows, matmul',
        )
    with mark('embedding'):
        weight = _apply(weight_fn, weight)
        rows = jnp.asarray(u.get_mantissa(weight))[indices]
        return _with_unit(rows, u.get_unit(weight))


def element_wise(weight: Value, *, weight_fn: ValueFn = None) -> Result:
    """``weight_fn(weight)``, for a weight that is used element by element, such as a
    decay, a gain or a threshold."""
    with mark('element_wise'):
        value = _apply(weight_fn, weight)
        # Returned as it is, the weight would leave no equation to carry the mark.
        return _with_unit(jnp.copy(u.get_mantissa(value)), u.get_unit(value))


def conv(
    x: Value,
    kernel: Value,
    bias: Value | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | Sequence[tuple[int, int]] = 'SAME',
    lhs_dilation: int | Sequence[int] | None = None,
    rhs_dilation: int | Sequence[int] | None = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    dimension_numbers: Any = None,
    kernel_fn: ValueFn = None,
    bias_fn: ValueFn = None,
) -> Result:
    """A convolution with any number of spatial axes. Layouts are those of
    `jax.lax.conv_general_dilated`.

    `x` may have no batch axis. A bias with one axis is added along the output channels.
    Any other bias must broadcast to the batched output.
    """
    with mark('conv'):
        kernel, bias = _apply(kernel_fn, kernel), _apply(bias_fn, bias)
        image, filters = (
            jnp.asarray(u.get_mantissa(x)),
            jnp.asarray(u.get_mantissa(kernel)),
        )
        unbatched = image.ndim == filters.ndim - 1
        if filters.ndim < 3 or not (unbatched or image.ndim == filters.ndim):
            raise _refusal(
                f'conv(x, kernel) with x of shape {image.shape} and kernel of shape '
                f'{filters.shape}',
                'x has an axis for each of the kernel (batch, channels, space), or one '
                'less without a batch',
                'a kernel with at least three axes, and an x with as many or one fewer',
            )
        layout = lax.conv_dimension_numbers(
            (1,) * filters.ndim, filters.shape, dimension_numbers
        )
        if unbatched:
            image = jnp.expand_dims(image, layout.lhs_spec[0])
        channels, taken = (
            image.shape[layout.lhs_spec[1]],
            filters.shape[layout.rhs_spec[1]] * feature_group_count,
        )
        if channels != taken:
            raise _refusal(
                f'conv(x, kernel) with {channels} channels in x and a kernel of shape '
                f'{filters.shape}',
                f'the kernel takes {taken} channels when '
                f'dimension_numbers={dimension_numbers}',
                'an x with the channels of the kernel, or the dimension_numbers of '
                'your layout',
            )
        dtype = jnp.result_type(image, filters)
        y = lax.conv_general_dilated(
            image.astype(dtype),
            filters.astype(dtype),
            window_strides=_per_axis(strides, filters.ndim - 2),
            padding=padding,
            lhs_dilation=_per_axis(lhs_dilation, filters.ndim - 2),
            rhs_dilation=_per_axis(rhs_dilation, filters.ndim - 2),
            dimension_numbers=layout,
            feature_group_count=feature_group_count,
            batch_group_count=batch_group_count,
        )
        if bias is not None and jnp.ndim(bias) == 1:
            along_channels = [
                -1 if axis == layout.out_spec[1] else 1 for axis in range(y.ndim)
            ]
            bias = _with_unit(
                jnp.reshape(u.get_mantissa(bias), along_channels), u.get_unit(bias)
            )
        y = _add_bias('conv', _with_unit(y, u.get_unit(x) * u.get_unit(kernel)), bias)
        return y.squeeze(layout.out_spec[0]) if unbatched else y


def sparse_matmul(
    x: Value,
    weight: Value,
    *,
    sparse_mat: Any,
    bias: Value | None = None,
    weight_fn: ValueFn = None,
    bias_fn: ValueFn = None,
) -> Result:
    """``x @ sparse_mat.with_data(weight_fn(weight)) + bias_fn(bias)`` for `x` (..., i)
    and a sparse matrix (i, o).

    `sparse_mat` (of brainevent or brainunit) holds the positions of the entries, and
    `weight` holds their values.
    """
    if not hasattr(sparse_mat, 'with_data'):
        raise _refusal(
            f'sparse_matmul(..., sparse_mat) of type {type(sparse_mat).__name__}',
            'a sparse matrix says where the entries are, and takes new ones by '
            'with_data',
            'a matrix of brainevent, such as brainevent.CSR.fromdense(mask)',
        )
    x_shape, size, stored = (
        jnp.shape(x),
        tuple(sparse_mat.shape),
        jnp.shape(sparse_mat.data),
    )
    if not x_shape or x_shape[-1] != size[0] or jnp.shape(weight) != stored:
        raise _refusal(
            f'sparse_matmul(x, weight) with x of shape {x_shape} and weight of shape '
            f'{jnp.shape(weight)}',
            f'the sparse matrix has shape {size} and its stored entries have shape '
            f'{stored}',
            f'x of shape (..., {size[0]}) and a weight shaped like sparse_mat.data',
        )
    with mark('sparse_matmul'):
        weight, bias = _apply(weight_fn, weight), _apply(bias_fn, bias)
        # with_data insists on the unit of the old entries: compute in that unit, then
        # name the right one.
        matrix = sparse_mat.with_data(
            _with_unit(u.get_mantissa(weight), u.get_unit(sparse_mat.data))
        )
        if len(x_shape) > 2:
            flat = jnp.reshape(u.get_mantissa(x), (-1, x_shape[-1]))
            y = jnp.reshape(u.get_mantissa(flat @ matrix), (*x_shape[:-1], size[1]))
        else:
            y = u.get_mantissa(u.get_mantissa(x) @ matrix)
        return _add_bias(
            'sparse_matmul', _with_unit(y, u.get_unit(x) * u.get_unit(weight)), bias
        )


def lora_matmul(
    x: Value,
    B: Value,
    A: Value,
    *,
    alpha: float = 1.0,
    bias: Value | None = None,
    b_fn: ValueFn = None,
    a_fn: ValueFn = None,
    bias_fn: ValueFn = None,
) -> Result:
    """``alpha * x @ (b_fn(B) @ a_fn(A)) + bias_fn(bias)`` for `x` (..., i), `B` (i, r)
    and `A` (r, o).

    The product of the factors is computed first. There is then only one product between
    the weights and the hidden state, and both factors get credit through time. In ``(x
    @ B) @ A``, the second product would mix positions, and `B` would get only its
    one-step gradient.
    """
    b_shape, a_shape = jnp.shape(B), jnp.shape(A)
    if len(b_shape) != 2 or len(a_shape) != 2 or b_shape[1] != a_shape[0]:
        raise _refusal(
            f'lora_matmul(x, B, A) with B of shape {b_shape} and A of shape {a_shape}',
            'B @ A must be a matrix from inputs to outputs',
            'B of shape (inputs, rank) and A of shape (rank, outputs)',
        )
    with mark('lora_matmul'):
        B, A, bias = _apply(b_fn, B), _apply(a_fn, A), _apply(bias_fn, bias)
        weight = alpha * _multiply(jnp.matmul, B, A)
        _check_matmul('lora_matmul', x, weight)
        return _add_bias('lora_matmul', _multiply(jnp.matmul, x, weight), bias)


def _apply(fn: ValueFn, value: Any) -> Any:
    """A transform of a weight; of a quantity it sees the number, and the unit is
    kept."""
    if fn is None or value is None:
        return value
    if not isinstance(value, u.Quantity):
        return fn(value)
    made = fn(u.get_mantissa(value))
    return _with_unit(u.get_mantissa(made), u.get_unit(made) * u.get_unit(value))


def _with_unit(mantissa: Any, unit: u.Unit) -> Any:
    return u.maybe_decimal(u.Quantity(mantissa, unit=unit))


def _multiply(product: Callable[[Any, Any], jax.Array], x: Value, weight: Value) -> Any:
    y = product(jnp.asarray(u.get_mantissa(x)), jnp.asarray(u.get_mantissa(weight)))
    return _with_unit(y, u.get_unit(x) * u.get_unit(weight))


def _add_bias(op: str, y: Any, bias: Value | None) -> Any:
    if bias is None:
        return y
    have, want = (str(u.get_unit(value)) for value in (bias, y))
    if not u.have_same_dim(y, bias):
        text = three_parts(
            f'{op}(..., bias) with a bias in unit {have} and a product in unit {want}',
            'values of different dimensions cannot be added',
            f'a bias in {want}, the unit of x times the unit of the weight',
        )
        raise UnitError(text)
    sizes = zip(reversed(jnp.shape(bias)), reversed(y.shape), strict=False)
    if jnp.ndim(bias) > y.ndim or any(size not in (1, full) for size, full in sizes):
        raise _refusal(
            f'{op}(..., bias) with a bias of shape {jnp.shape(bias)} and a product of '
            f'shape {y.shape}',
            'the bias does not broadcast to the product',
            'one bias per output, or a shape that broadcasts to the product',
        )
    return y + bias


def _check_matmul(op: str, x: Value, weight: Value) -> None:
    x_shape, w_shape = jnp.shape(x), jnp.shape(weight)
    if len(w_shape) != 2 or not x_shape or x_shape[-1] != w_shape[0]:
        raise _refusal(
            f'{op} with x of shape {x_shape} and a weight matrix of shape {w_shape}',
            'the last axis of x is summed against the first of a matrix (inputs, '
            'outputs)',
            'x of shape (..., inputs) and a weight with two axes; for more axes, '
            'grouped_matmul or einsum',
        )


def _per_axis(value: int | Sequence[int] | None, axes: int) -> tuple[int, ...]:
    """One number for each spatial axis; a single one is that of all."""
    if value is None or isinstance(value, int):
        return (1 if value is None else value,) * axes
    return tuple(value) * axes if len(value) == 1 else tuple(value)


def _refusal(written: str, why: str, fix: str) -> ArgumentError:
    return ArgumentError(three_parts(written, why, fix))
