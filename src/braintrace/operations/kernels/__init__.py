"""Kernels: operations that run by code of their own on some platforms.

:func:`run` is the one place that chooses. A platform's kernels are one file (or folder)
here with functions of the names and arguments below; it may have some of them only. All
other operations, types and platforms run as plain JAX. To add a platform, write its
file and add a line to ``BACKENDS``.

Letters: t steps, n samples, c inputs, f outputs, e synapses; traces, rows and credits are
given by component, factors by pair of components.

    dense_visit(trace, x, rows, factors, credit, inputs_first, y_bar)
        the traces (n, c, f), or (n, f, c), after one step, and the gradient
    span_visit(trace, x, rows, factors, credit)
        the same for traces (n, c, f) after many steps: x (t, n, c), rows (t, n, f)
    synapse_visit(trace, x, rows, factors, credit, y_bar, matrix, by_post)
        the same for traces (e, n): x, rows and ȳ (t, neurons, n), all else (neurons, n)
    to_rows, to_columns(indices, starts, weights, x, size, by_column)
        products with a compressed sparse matrix: x (neurons, n)
    at_synapses(indices, starts, rows, columns)
        the gradient of its weights: rows and columns (neurons, n)
    by_neuron(values)
        values (t, neurons, n) as (neurons, t and n)
    unchanged(*values)
        the values, as arrays that XLA does not compute again where they are read
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

BACKENDS = {'cpu': 'llvmlite'}
"""Platforms that have kernels: the file here of that name, and the optional package that
it needs."""
LARGE = 2**20
"""Bytes of arrays that leave a core's own caches."""
LEAST_SAMPLES = 8
"""Samples from which on products of large arrays are gathered."""
TYPES = (jnp.float32, jnp.float64)
"""Types of numbers that the kernels are used for."""


@functools.cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def are_available() -> bool:
    """Whether kernels run here."""
    platform = jax.default_backend()
    return platform in BACKENDS and _is_installed(BACKENDS[platform])


def fit(*dtypes: Any) -> bool:
    """Whether kernels run here on arrays of these types, which must be one."""
    types = set(map(jnp.dtype, dtypes))
    return types in [{jnp.dtype(t)} for t in TYPES] and are_available()


def is_large(x: Any) -> bool:
    """Whether an array leaves a core's own caches."""
    return x.size * x.dtype.itemsize > LARGE


def is_gathered(x: Any) -> bool:
    """Whether products of x (neurons, samples) are gathered neuron by neuron, also
    where the matrix has another order, if it is known."""
    return is_large(x) and x.shape[1] >= LEAST_SAMPLES


def run(
    name: str,
    *given: Any,
    plain: Callable[..., Any],
    by: Callable[..., Any] | None = None,
) -> Any:
    """``plain(*given)``; in programs for a platform with a kernel of a name, what that
    kernel gives: ``kernel(*given)``, or ``by(kernel, *given)``."""
    platform = jax.default_backend()
    if not are_available():
        return plain(*given)
    # Imported here, since the packages are optional.
    kernel = getattr(importlib.import_module(f'.{platform}', __name__), name, None)
    if kernel is None:
        return plain(*given)
    own = kernel if by is None else functools.partial(by, kernel)
    return jax.lax.platform_dependent(*given, default=plain, **{platform: own})
