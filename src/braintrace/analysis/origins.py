"""Which element of an operand reaches each position, and how many pairs of an element
and a position there are; for one operand of an equation of a backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..compat import Equation, Var, structure
from ..operations import element_numbers, operation_of
from ..operations.labels import CONFLICT, NONE, Labels
from .bodies import enter_call
from .pairs import sources_among, without_sources

if TYPE_CHECKING:
    from .positions import BackwardPass


def sources_of(
    at: BackwardPass,
    i: int,
    k: int,
    eqn: Equation,
    outs: list[Labels],
    edge: np.ndarray,
) -> Labels:
    """The element of an operand that reaches each position, as :class:`ReachedPairs`
    has it; ``edge``: the labels of the operand."""
    if i in at.entered:
        inside = at.entered[i][k]
        return None if inside is None else inside.sources
    origins = _origins_of(at, i, k, eqn)
    if origins is None:
        return None
    pairs = []
    for v, labels, origin in zip(eqn.outvars, outs, origins, strict=True):
        reach = at.reach(v, labels)
        if reach is None:
            continue
        if not reach.is_known:
            return None
        elements, positions = np.divmod(reach.pairs(at.size), at.size)
        came = origin.reshape(-1)[elements].astype(np.int64)
        if (came == CONFLICT).any():
            return None
        pairs.append((came * at.size + positions)[came >= 0])
    return sources_among(np.concatenate(pairs), edge, at.size, at.mixes)


def _origins_of(
    at: BackwardPass, i: int, k: int, eqn: Equation
) -> list[np.ndarray] | None:
    """The element of an operand that each element of the results comes from."""
    operation = operation_of(eqn)
    if operation is not None and operation.origins is not None:
        return operation.origins(eqn, k, at.const)
    kind = structure(eqn)
    if kind not in ('none', 'custom', 'call'):
        return None
    ends = np.cumsum([v.aval.size for v in eqn.outvars])
    numbers = element_numbers(eqn, ends)
    if kind == 'none':
        (reach,) = without_sources([at.operands(i, eqn, numbers)[k]])
    else:
        reach = enter_call(at, eqn, numbers, int(ends[-1]))[k]
    origins = None if reach is None else reach.by_position(int(ends[-1]))
    if origins is None:
        return None
    parts = np.split(origins, ends[:-1])
    pairs = zip(eqn.outvars, parts, strict=True)
    return [part.reshape(v.aval.shape) for v, part in pairs]


def pair_count(
    at: BackwardPass, i: int, k: int, eqn: Equation, outs: list[Labels]
) -> int:
    """Pairs of an element of an operand and a position it reaches.

    An element that reaches two places along an axis of a result is taken to reach
    the whole axis.
    """
    if i in at.entered:
        inside = at.entered[i][k]
        known = 0 if inside is None else len(inside.pairs(at.size))
        return at.met[i, k].pairs if (i, k) in at.met else known
    count = 0
    for v, labels in zip(eqn.outvars, outs, strict=True):
        reach = at.reach(v, labels)
        if reach is not None:
            pairs = len(reach.pairs(at.size))
            reached = max(int((reach.labels != NONE).sum()), 1)
            count += pairs * _boxes(at, i, k, eqn, v, reach.labels) // reached
    return count


def _boxes(
    at: BackwardPass, i: int, k: int, eqn: Equation, v: Var, labels: np.ndarray
) -> int:
    """Pairs of an element of an operand and an element of a result that it reaches,
    taken as all that lie between."""
    axes = [np.indices(labels.shape)[axis] for axis in range(labels.ndim)]
    numbers: np.ndarray | int = 1
    for along in (np.zeros(labels.shape, int), *axes):
        numbered = np.where(labels == NONE, NONE, along).astype(np.int32)
        outs = [numbered if w is v else None for w in eqn.outvars]
        found = at.operands(i, eqn, outs)[k]
        if found is None:
            return 0
        length = len(np.unique(along[labels != NONE]))
        numbers = numbers * np.where(found == CONFLICT, length, found >= 0)
    return int(np.sum(numbers))
