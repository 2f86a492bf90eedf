"""Kernels for CPUs.

They need llvmlite, which is optional, so a file is imported where its kernel is called:

    native            loops compiled by LLVM and called by XLA
    trace_parts       what there is of a trace, which all visits of traces share
    dense_visit       a visit of a dense trace after one step; span_visit, after many
    sparse_visit      a visit of a sparse trace; row_visit, with few samples
    products          sparse products; row_product, those of large arrays
    spike_bits        inputs as bits; transpose, transposed copies
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

TYPES = (jnp.float32, jnp.float64)
"""Types of numbers that the kernels are used for."""


@functools.cache
def _has_llvm() -> bool:
    return importlib.util.find_spec('llvmlite') is not None


def are_available() -> bool:
    """Whether kernels run here."""
    return jax.default_backend() == 'cpu' and _has_llvm()


def fit(*dtypes: Any) -> bool:
    """Whether kernels run here on arrays of these types, which must be one."""
    types = set(map(jnp.dtype, dtypes))
    return types in [{jnp.dtype(t)} for t in TYPES] and are_available()
