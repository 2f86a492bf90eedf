"""What the elements of a value reach, in whichever form holds all of its pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..operations.labels import CONFLICT, Labels, join, sources_of


class ReachedPairs(NamedTuple):
    """What the elements of a value reach: labels, and sources if some reach several
    positions and no position is reached by two."""

    labels: np.ndarray
    sources: Labels = None

    @property
    def is_known(self) -> bool:
        """Whether all pairs are known: they are in neither form where an element
        reaches several positions and a position is reached by several elements."""
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
        if self.sources is None:
            flat = self.labels.reshape(-1)
            elements = np.flatnonzero(flat >= 0)
            positions = flat[elements]
        else:
            positions = np.flatnonzero(self.sources >= 0)
            elements = self.sources[positions]
        return elements.astype(np.int64) * size + positions


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


def together(every: Sequence[ReachedPairs | None], size: int) -> ReachedPairs:
    """What several uses of a value reach; without sources where they meet."""
    labels: Labels = None
    sources: Labels = None
    known = [reach for reach in every if reach is not None]
    for reach in known:
        labels = join(labels, reach.labels)
    assert labels is not None
    if (labels == CONFLICT).any() and all(reach.is_known for reach in known):
        for reach in known:
            sources = join(sources, reach.by_position(size))
        if sources is not None and (sources == CONFLICT).any():
            sources = None
    return ReachedPairs(labels, sources)
