"""Label arrays: for every element of a value, the one position it reaches.

NONE reaches no new hidden state of the group, a number p reaches only position p,
CONFLICT reaches more than one. A label array is None where every element is NONE.

Where an element reaches several positions, and no position is reached by two elements,
the same pairs are held the other way round, as sources: for every position, flat, the
one element that reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NONE, CONFLICT = -1, -2
_FAR = np.iinfo(np.int32).max
Labels = np.ndarray | None


def join(a: Labels, b: Labels) -> Labels:
    """Element by element: what reaches a's position in one use and b's in another."""
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
