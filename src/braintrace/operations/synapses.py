"""Products with a compressed sparse matrix as primitives of our own.

    to_columns      y[c] = Σ_r w[r, c] x[r]
    to_rows         y[r] = Σ_c w[r, c] x[c]
    at_synapses     g[e] = Σ_k rows[r, k] columns[c, k] at synapse e = (r, c)

Each is linear in both factors and the transposes are again among the three, so that
they have derivatives of any order. Arrays of neurons have shape (neurons, samples). They
run by ``kernels``; programs that are exported for other platforms hold gathers and sums
by index. A model that runs elsewhere keeps the operations it is written with. If a matrix
is known when the program is made, its synapses are sorted by column for large products
to columns.

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


def has_kernels(*dtypes: Any) -> bool:
    """Whether products of these types run by the kernels: on one CPU, or on several
    with arrays split in a way that is known."""
    return _fits(current_split(), *dtypes)


def _fits(split: Split | None, *dtypes: Any) -> bool:
    return (split is not None or not runs_on_mesh()) and kernels.fit(*dtypes)


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


def _on_each_device(
    run: Callable[..., jax.Array],
    split: Split | None,
    indices: Any,
    starts: Any,
    *values: Any,
) -> jax.Array:
    """``run(indices, starts, *values)``, on each of several devices for its own samples
    and synapses. Values are weights and x (neurons, samples), with a sum for each
    neuron, or two such arrays, with a sum for each synapse."""
    if split is None:
        return run(indices, starts, *values)
    count = indices.shape[0]
    synapses, samples = split.of_neurons(count), split.of_samples(values[1].shape[1])
    at_neurons, at_synapses = PartitionSpec(None, samples), PartitionSpec(synapses)
    is_product = values[0].ndim == 1
    first_values = at_neurons
    if is_product:
        first_values = at_synapses if values[0].size == count else PartitionSpec()

    def own(indices: Any, starts: Any, *values: Any) -> jax.Array:
        if synapses:
            # Starts of rows among the synapses of this device.
            count = indices.shape[0]
            first = jax.lax.axis_index(synapses).astype(starts.dtype) * count
            starts = jnp.clip(starts - first, 0, count)
        found = run(indices, starts, *values)
        return summed_over(found, synapses if is_product else samples)

    specs = (at_synapses, PartitionSpec(), first_values, at_neurons)
    result = at_neurons if is_product else at_synapses
    return split.on_each_device(own, specs, result)(indices, starts, *values)


def _columns_plain(indices: Any, starts: Any, weights: Any, x: Any, size: int) -> Any:
    values = weights[:, None] * x[rows_of(indices, starts)]
    return jnp.zeros((size, x.shape[1]), x.dtype).at[indices].add(values)


def _rows_plain(indices: Any, starts: Any, weights: Any, x: Any, size: int) -> Any:
    values = weights[:, None] * x[indices]
    rows = rows_of(indices, starts)
    return jnp.zeros((size, x.shape[1]), x.dtype).at[rows].add(values)


def _product(name: str, plain: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A product by the kernel of a name, or by JAX code where there is none."""

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
        if not _fits(split, weights.dtype, x.dtype):
            return plain(indices, starts, weights, x, size)
        own = functools.partial(
            kernels.run,
            name,
            plain=lambda *given: plain(*given, size),
            by=lambda kernel, *given: kernel(*given, size, by_column),
        )
        return _on_each_device(own, split, indices, starts, weights, x)

    return run


to_columns_p: Any = kernel_primitive(
    'to_columns',
    shape=_product_shape,
    run=_product('to_columns', _columns_plain),
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
    run=_product('to_rows', _rows_plain),
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
    if is_known and has_kernel and kernels.is_gathered(x):
        given['by_column'] = _by_column(Same((indices, starts)), size)
    return to_columns_p.bind(weights, indices, starts, x, **given)


def to_rows(weights: Any, indices: Any, starts: Any, x: Any) -> jax.Array:
    """y (rows, k) from x (columns, k)."""
    given = {'size': starts.shape[0] - 1, 'split': current_split()}
    return to_rows_p.bind(weights, indices, starts, x, **given)


# ---------------------------------------------------------------- gradients of weights


def _synapses_plain(indices: Any, starts: Any, rows: Any, columns: Any) -> Any:
    row = rows_of(indices, starts)

    def one(total: Any, pair: Any) -> tuple[Any, None]:
        # One sample at a time: never an array of synapses times samples.
        r, c = pair
        return total + r[row] * c[indices], None

    start = jnp.zeros(indices.shape, rows.dtype)
    return jax.lax.scan(one, start, (rows.T, columns.T))[0]


def _at_synapses(
    indices: Any, starts: Any, rows: Any, columns: Any, *, split: Split | None
) -> jax.Array:
    if not _fits(split, rows.dtype, columns.dtype):
        return _synapses_plain(indices, starts, rows, columns)
    run = functools.partial(kernels.run, 'at_synapses', plain=_synapses_plain)
    return _on_each_device(run, split, indices, starts, rows, columns)


at_synapses_p = kernel_primitive(
    'at_synapses',
    shape=lambda indices, starts, rows, columns, *, split: (indices.shape, rows.dtype),
    run=_at_synapses,
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
