"""Arrays that a compiled program computes once and then reads, on CPUs.

XLA fuses a value into every operation that reads it and then computes it in each of
them. For sin, cos or exp of a parameter that many operations of a step read, this takes
longer than the rest of the step. XLA cannot fuse across a foreign call, so the values
pass through one that does nothing and returns its operands in the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from ..arrays import known_value
from ..split import runs_on_mesh
from . import kernels


def computed_once(values: Sequence[jax.Array]) -> list[jax.Array]:
    """The values as arrays of their own, with the derivatives of their computation."""
    if not values or runs_on_mesh() or not kernels.are_available():
        return list(values)
    fixed = map(jax.lax.stop_gradient, values)
    known = kernels.run('unchanged', *fixed, plain=lambda *same: same)
    return [known_value(a, b) for a, b in zip(known, values, strict=True)]
