"""Label rules that several families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..compat import Equation
from .labels import NONE, Labels, join, project
from .record import Const, LabelRule

AxisMap = Sequence[int | None]
"""For every axis of an operand, the result axis that runs along it; None if none does.
"""


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of an operand or a result."""
    return tuple(getattr(atom.aval, 'shape', ()))


def only(outs: list[Labels]) -> np.ndarray:
    """The labels of a single result: a rule is called only if some result has any."""
    (out,) = outs
    assert out is not None
    return out


def nothing(shape: Sequence[int]) -> np.ndarray:
    """Labels of an array that reaches nothing."""
    return np.full(shape, NONE, np.int32)


def all_or_nothing(eqn: Equation, outs: list[Labels]) -> list[np.ndarray]:
    """Labels of every result, written out where there are none."""
    pairs = zip(eqn.outvars, outs, strict=True)
    return [nothing(shape_of(v)) if out is None else out for v, out in pairs]


def merge(
    eqn: Equation, outs: list[Labels], axis_map: Callable[[Equation, int], AxisMap]
) -> list[Labels]:
    """Project the labels of every result onto every operand."""
    result: list[Labels] = []
    for k, operand in enumerate(eqn.invars):
        labels: Labels = None
        for out in (o for o in outs if o is not None):
            labels = join(labels, project(out, axis_map(eqn, k), shape_of(operand)))
        result.append(labels)
    return result


def axes(axis_map: Callable[[Equation, int], AxisMap]) -> LabelRule:
    """The rule of an operation that is described by its axes."""
    return lambda eqn, outs, const: merge(eqn, outs, axis_map)


def mixing_labels(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    """Any element of any operand may reach any element of any result."""
    return merge(eqn, outs, lambda e, k: [None] * len(shape_of(e.invars[k])))


def _aligned(eqn: Equation, k: int) -> AxisMap:
    # Recent JAX broadcasts axes of size one inside element-wise primitives.
    shape, out = shape_of(eqn.invars[k]), shape_of(eqn.outvars[0])
    return [d if n == out[d] else None for d, n in enumerate(shape)]


elementwise_labels = axes(_aligned)
"""Element e of every operand reaches element e of the result."""


def windows(
    out: np.ndarray,
    shape: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base: Sequence[int],
    dilation: Sequence[int],
) -> np.ndarray:
    """Labels of an array seen through sliding windows, joined over the windows that see
    an element."""
    labels: Labels = None
    for offset in np.ndindex(*sizes):
        seen, taken = [], []
        axes_ = zip(
            shape, out.shape, offset, strides, padding, base, dilation, strict=True
        )
        for n, m, k, stride, (low, _), b, d in axes_:
            at = np.arange(m) * stride + k * d - low
            ok = (at >= 0) & (at % b == 0) & (at // b < n)
            seen.append(at[ok] // b)
            taken.append(np.flatnonzero(ok))
        part = nothing(shape)
        part[np.ix_(*seen)] = out[np.ix_(*taken)]
        labels = join(labels, part)
    return nothing(shape) if labels is None else labels
