"""What the elements of a value reach, in whichever form holds all of its pairs; and for
one operand of an equation, which of its elements reaches each position and how many
pairs there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..compat import Equation, Var, structure
from ..operations import element_numbers, operation_of
from ..operations.labels import CONFLICT, NONE, Labels, gather_back, join, sources_of

if TYPE_CHECKING:
    from .positions import BackwardPass


class ReachedPairs(NamedTuple):
    """What the elements of a value reach: labels, and sources if some reach several
    positions.

    Pairs are known if no element that reaches several positions shares one. Sources say
    CONFLICT where elements that reach one position each share it: such pairs are mixed,
    of both kinds.
    """

    labels: np.ndarray
    sources: Labels = None

    @property
    def is_known(self) -> bool:
        """Whether all pairs are known."""
        return self.sources is not None or not (self.labels == CONFLICT).any()

    def by_position(self, size: int) -> Labels:
        """The element that reaches each position, CONFLICT where several do; None if
        that is not known."""
        if not self.is_known:
            return None
        return sources_of(self.labels, size) if self.sources is None else self.sources

    def pairs(self, size: int) -> np.ndarray:
        """Every pair of an element and a position it reaches, as one number:
        element · size + position."""
        flat = self.labels.reshape(-1)
        elements = np.flatnonzero(flat >= 0)
        positions = flat[elements]
        if self.sources is not None:
            more = np.flatnonzero(self.sources >= 0)
            more = more[flat[self.sources[more]] == CONFLICT]
            elements = np.concatenate([elements, self.sources[more]])
            positions = np.concatenate([positions, more])
        return elements.astype(np.int64) * size + positions


def without_sources(every: Sequence[Labels]) -> list[ReachedPairs | None]:
    """What values reach of which each element has one position, by their labels."""
    return [None if labels is None else ReachedPairs(labels) for labels in every]


def labels_in(every: Sequence[ReachedPairs | None]) -> list[Labels]:
    """The labels in what values reach."""
    return [None if reach is None else reach.labels for reach in every]


class Use(NamedTuple):
    """One operand of an equation, and what it reaches through that equation."""

    equation: int
    operand: int
    reach: ReachedPairs


class Alone(NamedTuple):
    """A value whose elements may reach one position each. ``pairs`` and ``elements``: the
    counts that are the reason, named where a path is cut; 0 if there is another one."""

    pairs: int = 0
    elements: int = 0


def together(
    every: Sequence[ReachedPairs | None], size: int, may_mix: bool = False
) -> ReachedPairs:
    """What several uses of a value reach; without sources where they meet."""
    labels: Labels = None
    known = [reach for reach in every if reach is not None]
    for reach in known:
        labels = join(labels, reach.labels)
    assert labels is not None
    if not (labels == CONFLICT).any() or not all(reach.is_known for reach in known):
        return ReachedPairs(labels)
    pairs = np.concatenate([reach.pairs(size) for reach in known])
    return ReachedPairs(labels, sources_among(pairs, labels, size, may_mix))


def sources_among(
    pairs: np.ndarray, labels: np.ndarray, size: int, may_mix: bool
) -> Labels:
    """The element that reaches each position, from all pairs; None where two elements
    meet: any two, or if pairs may be mixed, any two of which one reaches more."""
    elements, positions = np.divmod(pairs, size)
    sources = gather_back(elements.astype(np.int32), positions, (size,))
    meet = sources[positions] == CONFLICT
    if may_mix:
        meet &= labels.reshape(-1)[elements] == CONFLICT
    return None if meet.any() else sources


# ---------------------------------------------------------------- one operand


def sources_through(
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
    if structure(eqn) not in ('none', 'custom', 'call'):
        return None
    ends = np.cumsum([v.aval.size for v in eqn.outvars])
    numbers = element_numbers(eqn, ends)
    reach = at.operands(i, eqn, numbers, int(ends[-1]))[k]
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
        reach = at.operands(i, eqn, outs, labels.size)[k]
        if reach is None:
            return 0
        length = len(np.unique(along[labels != NONE]))
        found = np.where(reach.labels == CONFLICT, length, reach.labels >= 0)
        numbers = numbers * found
    return int(np.sum(numbers))
