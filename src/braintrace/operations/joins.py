"""Rows of an array, and arrays one after the other, by a kernel on CPUs.

XLA takes the formulas of the parts into a concatenation, or pads each part to the whole,
and then chooses among them for every element. Operands of a kernel are computed before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..compat import Equation
from .weight_use import has_kernel


def joined(parts: Sequence[jax.Array]) -> jax.Array:
    """Arrays of one type along their first axis."""
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    if not has_kernel(shape, list(parts)):
        return jnp.concatenate(parts)
    plainly = lambda *parts: jnp.concatenate(parts)
    return jax.lax.platform_dependent(*parts, cpu=_by_kernel, default=plainly)


def _by_kernel(*parts: jax.Array) -> jax.Array:
    # llvmlite is optional.
    from . import native

    width = 16

    def body(build: Any, operands: list, results: list) -> None:
        (out,), start = results, native.word(0)
        for part in operands:
            length, done = part.size(build, 0), native.word(0)
            for size in (width, 1):
                with native.loop(build, done, length, size) as at:
                    value = part.load(build, at, size)
                    out.store(build, value, build.add(start, at), size)
                done = native.rest_of(build, length, size)
            start = build.add(start, length)

    dtype = jnp.dtype(parts[0].dtype)
    name = f'braintrace_join_{len(parts)}_{dtype.name}'
    native.register(name, native.number_type(dtype), (len(parts), 1), body)
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    out = jax.ShapeDtypeStruct((math.prod(shape),), dtype)
    call = jax.ffi.ffi_call(name, out, vmap_method='sequential')
    return call(*(part.reshape(-1) for part in parts)).reshape(shape)


def rows_taken(eqn: Equation) -> tuple[int, int] | None:
    """First and last row, if an equation takes rows of its operand."""
    if eqn.primitive.name != 'slice' or eqn.params['strides'] is not None:
        return None
    starts, ends = eqn.params['start_indices'], eqn.params['limit_indices']
    if any(starts[1:]) or ends[1:] != eqn.invars[0].aval.shape[1:] or not starts:
        return None
    return starts[0], ends[0]
