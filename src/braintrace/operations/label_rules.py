"""Label rules that several families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..compat import Equation
from .labels import NONE, Labels, join, join_over, project
from .record import Const, LabelRule, OriginRule

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


def origins_along(axis_map: Callable[[Equation, int], AxisMap]) -> OriginRule:
    """The origins of an operation that is described by its axes."""

    def origins(eqn: Equation, operand: int, const: Const) -> list[np.ndarray] | None:
        shape, result_axes = shape_of(eqn.invars[operand]), axis_map(eqn, operand)
        pairs = list(zip(shape, result_axes, strict=True))
        if any(axis is None and n != 1 for n, axis in pairs):
            return None
        along = [axis for axis in result_axes if axis is not None]
        sizes = [n for n, axis in pairs if axis is not None]
        numbers = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(sizes)
        numbers = numbers.transpose(np.argsort(along))
        found = []
        for v in eqn.outvars:
            out = shape_of(v)
            aligned = [out[a] if a in along else 1 for a in range(len(out))]
            found.append(np.broadcast_to(numbers.reshape(aligned), out))
        return found

    return origins


def mixing_labels(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    """Any element of any operand may reach any element of any result."""
    label: Labels = None
    for out in (o for o in outs if o is not None):
        label = join(label, join_over(out, range(out.ndim)))
    if label is None:
        return [None] * len(eqn.invars)
    # Views of one number: an operand may have very many elements.
    return [np.broadcast_to(label, shape_of(v)) for v in eqn.invars]


def _aligned(eqn: Equation, k: int) -> AxisMap:
    # Recent JAX broadcasts axes of size one inside element-wise primitives.
    shape, out = shape_of(eqn.invars[k]), shape_of(eqn.outvars[0])
    return [d if n == out[d] else None for d, n in enumerate(shape)]


elementwise_labels = axes(_aligned)
"""Element e of every operand reaches element e of the result."""
elementwise_origins = origins_along(_aligned)
"""Element e of the result comes from element e of the operand, broadcast or not."""


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
