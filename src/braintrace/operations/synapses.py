"""Products with a compressed sparse matrix as primitives of our own.

    to_columns      y[c] = Σ_r w[r, c] x[r]
    to_rows         y[r] = Σ_c w[r, c] x[c]
    at_synapses     g[e] = Σ_k rows[r, k] columns[c, k] at synapse e = (r, c)

Each is linear in both factors and the transposes are again among the three, so that
they have derivatives of any order. Arrays of neurons have shape (neurons, samples). On
CPUs they run by the loops of ``kernels.products``; programs that are exported for other
platforms hold gathers and sums by index. A model that runs elsewhere keeps the
operations it is written with. Large products to rows run by ``kernels.row_product``, and those
to columns as well where the matrix is known when the program is made: its synapses are
then sorted by column.

Over several devices (``split``) each has its own samples and its own synapses, as
stretches of their order, and what the synapses of one neuron add up to is summed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..own_primitives import kernel_primitive
from ..split import Split, current_split, runs_on_mesh, summed_over
from . import kernels

LARGE = 2**20
"""Bytes of arrays that leave a core's own caches."""
LEAST_SAMPLES = 8
"""Samples from which on large arrays are read as bits and turned in tiles."""


def has_kernels(*dtypes: Any) -> bool:
    """Whether products of these types run by the kernels: on one CPU, or on several
    with arrays split in a way that is known."""
    is_known = not runs_on_mesh() or current_split() is not None
    return is_known and kernels.fit(*dtypes)


def own_starts(starts: jax.Array, count: int, axes: tuple[str, ...]) -> jax.Array:
    """Starts of rows among the ``count`` synapses of this device."""
    if not axes:
        return starts
    first = jax.lax.axis_index(axes).astype(starts.dtype) * count
    return jnp.clip(starts - first, 0, count)


def samples_last(x: jax.Array) -> jax.Array:
    """The same (neurons, samples), laid out in that order in memory.

    Models have samples first, so that x is a transposed array. XLA would join that with
    the arithmetic around it, which then walks through large arrays number by number.
    """
    return _transposed(x.T) if x.nbytes > LARGE else x


def samples_first(y: jax.Array) -> jax.Array:
    """The same (neurons, samples) as an array that XLA transposes back: models have
    samples first."""
    return _transposed(y).T if y.nbytes > LARGE else y


def side_by_side(values: jax.Array) -> jax.Array:
    """(t, neurons, samples...) as (neurons, steps and samples): what a synapse reads of
    a neuron lies in one place."""
    if values.nbytes <= LARGE:
        moved = jnp.moveaxis(values, 1, 0)
        return moved.reshape(len(moved), -1)
    # Undoes the transposed copies that models with samples first hold.
    return _transposed(neurons_last(values, 1))


def neurons_last(values: jax.Array, axis: int) -> jax.Array:
    """Values with an axis of neurons as (all else, neurons), which is how models with
    samples first hold them."""
    moved = jnp.moveaxis(values, axis, -1)
    return moved.reshape(-1, moved.shape[-1])


def _transposed(x: jax.Array) -> jax.Array:
    from .kernels.transpose import transposed

    return transposed(x)


def rows_of(indices: jax.Array, starts: jax.Array) -> jax.Array:
    """The row of each synapse."""
    count = starts.shape[0] - 1
    numbers = jnp.arange(count, dtype=indices.dtype)
    return jnp.repeat(numbers, jnp.diff(starts), total_repeat_length=indices.shape[0])


@dataclass(frozen=True, eq=False)
class ByColumn:
    """Synapses of a matrix that is known in the order of their columns.

    ``rows``: the row of each synapse. ``starts``: where the synapses of each column
    start. ``order``: the place of each synapse in the order of the matrix.
    """

    rows: np.ndarray
    starts: np.ndarray
    order: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray, columns: np.ndarray, size: int) -> ByColumn:
        """Of the row and the column of each synapse of a matrix with ``size``
        columns."""
        order = np.argsort(columns, kind='stable').astype(np.int32)
        ends = np.cumsum(np.bincount(columns, minlength=size))
        starts = np.concatenate([[0], ends]).astype(np.int32)
        return cls(rows[order].astype(np.int32), starts, order)


@dataclass(frozen=True, eq=False)
class Same:
    """Arrays that are compared by identity."""

    arrays: tuple[Any, ...]

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.arrays)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return False
        pairs = zip(self.arrays, other.arrays, strict=True)
        return all(a is b for a, b in pairs)


@functools.lru_cache(maxsize=8)
def _by_column(structure: Same, size: int) -> ByColumn:
    indices, starts = map(np.asarray, structure.arrays)
    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return ByColumn.of(rows, indices, size)


# ---------------------------------------------------------------- products


def _product_shape(
    weights: Any, indices: Any, starts: Any, x: Any, *, size: int, **params: Any
) -> tuple[tuple[int, ...], Any]:
    return (size, x.shape[1]), x.dtype


def _many_products(
    primitive: Callable[[], Any],
    operands: Any,
    has_axis: Any,
    **params: Any,
) -> tuple[Any, int] | None:
    """Cases with one set of weights are further samples."""
    weights, indices, starts, x = operands
    if has_axis != [False, False, False, True]:
        return None
    cases, neurons, samples = x.shape
    size, split = params['size'], params['split']
    multiply = functools.partial(primitive().bind, **params)
    if split is not None:
        # Samples come first, so that the axis of both is still split by samples.
        x = jnp.transpose(x, (1, 2, 0)).reshape(neurons, samples * cases)
        y = multiply(weights, indices, starts, x)
        return y.reshape(size, samples, cases), 2
    x = jnp.moveaxis(x, 0, 1).reshape(neurons, cases * samples)
    return multiply(weights, indices, starts, x).reshape(size, cases, samples), 1


def _columns_portable(
    weights: Any, indices: Any, starts: Any, x: Any, *, size: int, **params: Any
) -> Any:
    values = weights[:, None] * x[rows_of(indices, starts)]
    return jnp.zeros((size, x.shape[1]), x.dtype).at[indices].add(values)


def _rows_portable(
    weights: Any, indices: Any, starts: Any, x: Any, *, size: int, **params: Any
) -> Any:
    values = weights[:, None] * x[indices]
    rows = rows_of(indices, starts)
    return jnp.zeros((size, x.shape[1]), x.dtype).at[rows].add(values)


def _is_turned(x: Any) -> bool:
    """Whether products of x (neurons, samples) are gathered by ``kernels.row_product``."""
    return x.size * x.dtype.itemsize > LARGE and x.shape[1] >= LEAST_SAMPLES


def _rows_of_samples(weights: Any, indices: Any, starts: Any, x: Any) -> jax.Array:
    from .kernels.row_product import to_rows

    return to_rows(weights, indices, starts, x.T).T


def _product_kernel(
    name: str, portable: Callable[..., Any]
) -> Callable[..., jax.Array]:
    """A product by the kernel of a name, or by JAX code where there is none."""

    def one_device(
        weights: Any, indices: Any, starts: Any, x: Any, size: int
    ) -> jax.Array:
        if name == 'to_rows' and _is_turned(x):
            return _rows_of_samples(weights, indices, starts, x)
        # llvmlite is optional.
        from .kernels.products import call

        shape = (size, x.shape[1])
        given = (indices, starts, weights, samples_last(x))
        return samples_first(call(name, shape, *given))

    def run(
        weights: Any,
        indices: Any,
        starts: Any,
        x: Any,
        *,
        size: int,
        split: Split | None,
        by_column: ByColumn | None = None,
    ) -> jax.Array:
        is_known = split is not None or not runs_on_mesh()
        if not (is_known and kernels.fit(weights.dtype, x.dtype)):
            return portable(weights, indices, starts, x, size=size)
        if split is None and by_column is not None:
            # XLA sorts the weights once, before the loop over steps.
            if weights.size > 1:
                weights = weights[by_column.order]
            return _rows_of_samples(weights, by_column.rows, by_column.starts, x)
        if split is None:
            return one_device(weights, indices, starts, x, size)
        samples = split.of_samples(x.shape[1])
        synapses = split.of_neurons(indices.shape[0])

        def own(weights: Any, indices: Any, starts: Any, x: Any) -> jax.Array:
            starts = own_starts(starts, indices.shape[0], synapses)
            y = one_device(weights, indices, starts, x, size)
            return summed_over(y, synapses)

        by_synapse, by_sample = PartitionSpec(synapses), PartitionSpec(None, samples)
        own_weights = by_synapse if weights.size == indices.size else PartitionSpec()
        given = (own_weights, by_synapse, PartitionSpec(), by_sample)
        run_split = split.on_each_device(own, given, by_sample)
        return run_split(weights, indices, starts, x)

    return run


to_columns_p: Any = kernel_primitive(
    'to_columns',
    shape=_product_shape,
    portable=_columns_portable,
    kernel=_product_kernel('to_columns', _columns_portable),
    transposes={
        0: lambda bar, weights, indices, starts, x, **params: at_synapses(
            indices, starts, x, bar
        ),
        3: lambda bar, weights, indices, starts, x, **params: to_rows(
            weights, indices, starts, bar
        ),
    },
    batched=functools.partial(_many_products, lambda: to_columns_p),
)
to_rows_p: Any = kernel_primitive(
    'to_rows',
    shape=_product_shape,
    portable=_rows_portable,
    kernel=_product_kernel('to_rows', _rows_portable),
    transposes={
        0: lambda bar, weights, indices, starts, x, **params: at_synapses(
            indices, starts, bar, x
        ),
        3: lambda bar, weights, indices, starts, x, **params: to_columns(
            weights, indices, starts, bar, x.aval.shape[0]
        ),
    },
    batched=functools.partial(_many_products, lambda: to_rows_p),
)


def to_columns(weights: Any, indices: Any, starts: Any, x: Any, size: int) -> jax.Array:
    """y (size, k) from x (rows, k); one weight for each synapse, or one for all.

    Large products with a matrix that is known are gathered column by column.
    """
    given: dict[str, Any] = {'size': size, 'split': current_split()}
    is_known = not any(isinstance(v, jax.core.Tracer) for v in (indices, starts))
    has_kernel = not runs_on_mesh() and kernels.fit(weights.dtype, x.dtype)
    if is_known and has_kernel and _is_turned(x):
        given['by_column'] = _by_column(Same((indices, starts)), size)
    return to_columns_p.bind(weights, indices, starts, x, **given)


def to_rows(weights: Any, indices: Any, starts: Any, x: Any) -> jax.Array:
    """y (rows, k) from x (columns, k)."""
    given = {'size': starts.shape[0] - 1, 'split': current_split()}
    return to_rows_p.bind(weights, indices, starts, x, **given)


# ---------------------------------------------------------------- gradients of weights


def _synapses_portable(
    indices: Any, starts: Any, rows: Any, columns: Any, *, split: Any = None
) -> Any:
    row = rows_of(indices, starts)

    def one(total: Any, pair: Any) -> tuple[Any, None]:
        # One sample at a time: never an array of synapses times samples.
        r, c = pair
        return total + r[row] * c[indices], None

    start = jnp.zeros(indices.shape, rows.dtype)
    return jax.lax.scan(one, start, (rows.T, columns.T))[0]


def _synapses_kernel(
    indices: Any, starts: Any, rows: Any, columns: Any, *, split: Split | None
) -> jax.Array:
    is_known = split is not None or not runs_on_mesh()
    if not (is_known and kernels.fit(rows.dtype, columns.dtype)):
        return _synapses_portable(indices, starts, rows, columns)

    def one_device(indices: Any, starts: Any, rows: Any, columns: Any) -> jax.Array:
        # llvmlite is optional.
        from .kernels.products import call

        return call('at_synapses', indices.shape, indices, starts, rows, columns)

    if split is None:
        return one_device(indices, starts, rows, columns)
    samples = split.of_samples(rows.shape[1])
    synapses = split.of_neurons(indices.shape[0])

    def own(indices: Any, starts: Any, rows: Any, columns: Any) -> jax.Array:
        starts = own_starts(starts, indices.shape[0], synapses)
        return summed_over(one_device(indices, starts, rows, columns), samples)

    by_synapse, by_sample = PartitionSpec(synapses), PartitionSpec(None, samples)
    given = (by_synapse, PartitionSpec(), by_sample, by_sample)
    run_split = split.on_each_device(own, given, by_synapse)
    return run_split(indices, starts, rows, columns)


at_synapses_p = kernel_primitive(
    'at_synapses',
    shape=lambda indices, starts, rows, columns, *, split: (indices.shape, rows.dtype),
    portable=_synapses_portable,
    kernel=_synapses_kernel,
    transposes={
        2: lambda bar, indices, starts, rows, columns, *, split: to_rows(
            bar, indices, starts, columns
        ),
        3: lambda bar, indices, starts, rows, columns, *, split: to_columns(
            bar, indices, starts, rows, columns.aval.shape[0]
        ),
    },
)


def at_synapses(indices: Any, starts: Any, rows: Any, columns: Any) -> jax.Array:
    """Σ_k of values at the row times values at the column of each synapse."""
    split = current_split()
    return at_synapses_p.bind(indices, starts, rows, columns, split=split)
