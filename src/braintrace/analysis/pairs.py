"""What the elements of a value reach, in whichever form holds all of its pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..operations.labels import CONFLICT, Labels, gather_back, join, sources_of


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
    """Why the elements of a value reach one position each: if it is for their number,
    all ``pairs`` and all ``elements`` of what the value stands for."""

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
