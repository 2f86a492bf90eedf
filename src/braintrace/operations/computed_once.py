"""Arrays that a compiled program computes once and then reads, on CPUs.

XLA computes a value again in every operation that reads it, if all of these can be
joined with it. For sin, cos or exp of a parameter, which a step of a stream reads in
many places, that takes longer than the rest of the step. A call that does nothing, with
its results where its operands are, keeps the arrays apart from what reads them.
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
        *map(jax.lax.stop_gradient, values), cpu=_apart, default=lambda *same: same
    )
    return [known_value(a, b) for a, b in zip(known, values, strict=True)]


def _apart(*values: jax.Array) -> tuple[jax.Array, ...]:
    # llvmlite is optional.
    from .native import number_type, register

    count = len(values)
    name = f'braintrace_computed_once_{count}'
    register(name, number_type(values[0].dtype), (count, count), lambda *_: None)
    call = jax.ffi.ffi_call(
        name,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values],
        input_output_aliases={n: n for n in range(count)},
        vmap_method='broadcast_all',
    )
    return tuple(call(*values))
