"""Arrays that a compiled program computes once and then reads, on CPUs.

XLA fuses a value into every operation that reads it and then computes it in each of
them. For sin, cos or exp of a parameter that many operations of a step read, this takes
longer than the rest of the step. XLA cannot fuse across a foreign call, so the values
pass through one that does nothing and returns its operands in the same memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import jax

from ..arrays import known_value
from ..split import runs_on_mesh


def computed_once(values: Sequence[jax.Array]) -> list[jax.Array]:
    """The values as arrays of their own, with the derivatives of their computation."""
    is_one_cpu = jax.default_backend() == 'cpu' and not runs_on_mesh()
    if not values or not is_one_cpu or importlib.util.find_spec('llvmlite') is None:
        return list(values)
    known = jax.lax.platform_dependent(
        *map(jax.lax.stop_gradient, values),
        cpu=_through_a_call,
        default=lambda *same: same,
    )
    return [known_value(a, b) for a, b in zip(known, values, strict=True)]


def _through_a_call(*values: jax.Array) -> tuple[jax.Array, ...]:
    # llvmlite is optional.
    from .kernels.native import call

    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
    count = len(values)
    return tuple(
        call(
            f'computed_once_{count}',
            lambda *_: None,
            values,
            structs,
            in_place=count,
            vmap_method='broadcast_all',
        )
    )
