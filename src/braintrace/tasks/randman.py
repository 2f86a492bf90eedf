"""Spikes on random manifolds (Zenke and Vogels 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from .trials import Trials


@dataclass(frozen=True)
class Randman:
    """Classify spike patterns on smooth random manifolds, one manifold for each class.

    Every unit spikes once, at a time that depends on the class and on a random point of
    ``dimensions`` numbers. The time of a unit is a sum of sines of these numbers, whose
    amplitudes fall with the frequency as ``smoothness`` says. Classes differ in spike
    times, not in spike counts.
    """

    classes: int = 10
    units: int = 20
    steps: int = 100
    dimensions: int = 1
    smoothness: float = 2.0
    seed: int = 0

    kind: ClassVar[str] = 'decision'
    reference: ClassVar[str] = (
        'solved above 0.9 by spiking networks with a hidden layer (Zenke and Vogels '
        '2021)'
    )

    frequencies: ClassVar[int] = 10

    @property
    def inputs(self) -> int:
        """Channels."""
        return self.units

    @property
    def outputs(self) -> int:
        """Classes."""
        return self.classes

    def times(self, labels: np.ndarray, points: np.ndarray) -> np.ndarray:
        """Spike times in [0, 1] of every unit, for points (size, dimensions) of the
        given classes."""
        low, high = _range(self)
        return np.clip(
            (self.heights(labels, points) - low[labels]) / (high - low)[labels], 0, 1
        )

    def heights(self, labels: np.ndarray, points: np.ndarray) -> np.ndarray:
        """Spike times before they are brought into [0, 1]."""
        fixed = np.random.default_rng(self.seed)
        shape = (self.classes, self.units, self.dimensions, self.frequencies)
        height, phase = fixed.random(shape), fixed.random(shape)
        order = np.arange(1, self.frequencies + 1)
        angles = 2 * np.pi * (order * points[:, None, :, None] + phase[labels])
        return np.prod(
            np.sum(height[labels] * np.sin(angles) / order**self.smoothness, -1), -1
        )

    def batch(self, rng: np.random.Generator, size: int) -> Trials:
        """Draw trials. The loss counts at every step."""
        labels = rng.integers(0, self.classes, size)
        times = self.times(labels, rng.random((size, self.dimensions)))
        when = np.minimum((times * self.steps).astype(int), self.steps - 1)
        spikes = np.zeros((self.steps, size, self.units), np.float32)
        spikes[when, np.arange(size)[:, None], np.arange(self.units)] = 1
        targets = np.broadcast_to(labels.astype(np.int32), (self.steps, size))
        return Trials(spikes, targets, np.ones(self.steps, np.float32))


@cache
def _range(task: Randman) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest height of every class and unit, of many points."""
    grid = np.random.default_rng(task.seed + 1).random((2000, task.dimensions))
    known = np.stack(
        [task.heights(np.full(len(grid), c), grid) for c in range(task.classes)]
    )
    return known.min(1), known.max(1)
