"""Label arrays: for every element of a value, the one position it reaches.

NONE reaches no new hidden state of the group, a number p reaches only position p,
CONFLICT reaches more than one. A label array is None where every element is NONE.

Where an element reaches several positions, and no position is reached by two elements,
the same pairs are held the other way round, as sources: for every position, flat, the
one element that reaches it. Below are the rules that several families share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..compat import Equation

NONE, CONFLICT = -1, -2
_FAR = np.iinfo(np.int32).max
Labels = np.ndarray | None
Const = Callable[[Any], np.ndarray | None]
"""Gives the value of an operand that is constant, and None for the others."""


class LabelRule(Protocol):
    """Computes the labels of an equation's operands from the labels of its results.

    The rule is correct if no element of an operand reaches a result element with
    another label. ``outs`` has None for a result that reaches nothing.
    """

    def __call__(
        self, eqn: Equation, outs: list[Labels], const: Const
    ) -> list[Labels]: ...


class OriginRule(Protocol):
    """Computes, for every element of each result, the one element of an operand that it
    comes from.

    NONE if it comes from no element. The rule returns None if some element comes from
    several.
    """

    def __call__(
        self, eqn: Equation, operand: int, const: Const
    ) -> list[np.ndarray] | None: ...


def join(a: Labels, b: Labels) -> Labels:
    """The label of each element that has label a by one use and b by another."""
    if a is None or b is None:
        return b if a is None else a
    return np.where(a == NONE, b, np.where((b == NONE) | (a == b), a, CONFLICT)).astype(
        np.int32
    )


def join_over(labels: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Join along axes, which disappear."""
    if not axes:
        return labels
    if any(labels.shape[a] == 0 for a in axes):
        return np.full(np.delete(labels.shape, axes), NONE, np.int32)
    high = labels.max(axis=tuple(axes))
    low = np.where(labels == NONE, _FAR, labels).min(axis=tuple(axes))
    return np.where(low == _FAR, NONE, np.where(low == high, high, CONFLICT)).astype(
        np.int32
    )


def project(
    labels: np.ndarray, axis_map: Sequence[int | None], shape: Sequence[int]
) -> np.ndarray:
    """Labels of an operand whose axis d runs along axis ``axis_map[d]`` of the result.

    Result axes that no operand axis runs along are joined; an operand axis mapped to
    None meets all of the result.
    """
    kept = [a for a in axis_map if a is not None]
    joined = join_over(labels, [a for a in range(labels.ndim) if a not in kept])
    joined = (
        joined.transpose(*np.argsort(np.argsort(kept))) if len(kept) > 1 else joined
    )
    expand = joined.reshape(
        [shape[d] if a is not None else 1 for d, a in enumerate(axis_map)]
    )
    return np.broadcast_to(expand, shape)


def gather_back(
    labels: np.ndarray, locations: np.ndarray, shape: Sequence[int]
) -> np.ndarray:
    """Labels of an operand whose element ``locations[e]`` appears as element e of the
    result."""
    size = int(np.prod(shape))
    source, target = labels.reshape(-1), locations.reshape(-1)
    valid = (source != NONE) & (target >= 0) & (target < size)
    source, target = source[valid], target[valid]
    high, low = np.full(size, NONE, np.int32), np.full(size, _FAR, np.int32)
    np.maximum.at(high, target, source)
    np.minimum.at(low, target, source)
    return (
        np.where(low == _FAR, NONE, np.where(low == high, high, CONFLICT))
        .astype(np.int32)
        .reshape(shape)
    )


def sources_of(labels: np.ndarray, size: int) -> np.ndarray:
    """The element that reaches each of ``size`` positions; CONFLICT where several
    do."""
    reaches = labels.reshape(-1) != NONE
    elements = np.where(reaches, np.arange(labels.size), NONE).astype(np.int32)
    return gather_back(elements, labels, (size,))


def labels_of(sources: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The position that each element reaches, from the element that reaches each
    position."""
    return gather_back(np.arange(sources.size, dtype=np.int32), sources, shape)


# ---------------------------------------------------------------- shared rules

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
