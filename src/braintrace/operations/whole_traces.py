"""Which traces are visited by a kernel."""

from __future__ import annotations

import math
from typing import Any

import jax

from ..split import runs_on_mesh
from . import kernels

LEAST_FOR_KERNEL = 2**11
"""Elements of a trace from which on a kernel is used."""


def has_kernel(shape: tuple[int, ...], given: Any) -> bool:
    """Whether a trace of a shape is visited by a kernel, in one pass over it: all
    arrays of a tree have one type, the trace is large enough, and the code that is
    traced now runs on one CPU device (also inside of
    :meth:`Split.on_each_device`)."""
    if math.prod(shape) < LEAST_FOR_KERNEL or runs_on_mesh():
        return False
    return kernels.fit(*(x.dtype for x in jax.tree.leaves(given)))
