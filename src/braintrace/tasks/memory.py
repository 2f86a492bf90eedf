"""Tasks that need memory: cues, symbols or numbers come first, and the answer later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .trials import Trials


def poisson(rng: np.random.Generator, rates: np.ndarray) -> np.ndarray:
    """Spikes, 0 or 1, by their probabilities (float32, which halves the time)."""
    return (rng.random(rates.shape, dtype=np.float32) < rates).astype(np.float32)


@dataclass(frozen=True)
class EvidenceAccumulation:
    """Decide after a delay whether the left or the right side had more cues.

    Forty Poisson inputs in four groups: left, right, recall, noise. Steps are
    milliseconds.
    """

    cues: int = 7
    cue: int = 100
    every: int = 150
    delay: int = 1050
    recall: int = 150
    group: int = 10
    rate: float = 0.04
    noise: float = 0.01
    rarer: float = 0.3

    outputs: ClassVar[int] = 2
    kind: ClassVar[str] = 'decision'
    step_unit: ClassVar[str] = 'ms'
    reference: ClassVar[str] = (
        'error below 7 % within 200–500 iterations (e-prop, Bellec 2020); 91.1 % '
        'mlGeNN, 93.8 % NEST'
    )

    @property
    def inputs(self) -> int:
        """Channels."""
        return 4 * self.group

    @property
    def channel_groups(self) -> dict[str, slice]:
        """Which channels belong together, by name."""
        names = ('left', 'right', 'recall', 'noise')
        size = self.group
        return {n: slice(i * size, (i + 1) * size) for i, n in enumerate(names)}

    @property
    def steps(self) -> int:
        """Steps of a trial."""
        return self.cues * self.every + self.delay + self.recall

    def batch(self, rng: np.random.Generator, size: int) -> Trials:
        """Draw trials. The target is 0 if there are more cues on the left."""
        likely = rng.integers(0, 2, size)
        sides = np.where(rng.random((self.cues, size)) < self.rarer, 1 - likely, likely)
        rates = np.zeros((self.steps, size, 4, self.group), np.float32)
        for i in range(self.cues):
            rates[
                i * self.every : i * self.every + self.cue, np.arange(size), sides[i]
            ] = self.rate
        rates[-self.recall :, :, 2] = self.rate
        rates[:, :, 3] = self.noise
        spikes = poisson(rng, rates)
        more = (sides.sum(0) * 2 > self.cues).astype(np.int32)
        weights = np.zeros(self.steps, np.float32)
        weights[-self.recall :] = 1
        return Trials(
            spikes.reshape(self.steps, size, -1),
            np.broadcast_to(more, (self.steps, size)),
            weights,
        )


@dataclass(frozen=True)
class DelayedMatchToSample:
    """Decide whether two directions, separated by a delay, are the same.

    The inputs are Poisson spikes, tuned to directions.
    """

    channels: int = 100
    directions: int = 8
    fixation: int = 10
    shown: int = 500
    delay: int = 1000
    rate: float = 0.04
    background: float = 0.001

    outputs: ClassVar[int] = 2
    kind: ClassVar[str] = 'decision'
    reference: ClassVar[str] = (
        'accuracy 0.95 and more (200 GIF units, τ 100, τ_I2 1500, Adam 1e-3, batch 128)'
    )

    @property
    def inputs(self) -> int:
        """Channels."""
        return self.channels

    @property
    def steps(self) -> int:
        """Steps of a trial."""
        return self.fixation + 2 * self.shown + self.delay

    def batch(self, rng: np.random.Generator, size: int) -> Trials:
        """Draw trials. Half of them match. The loss counts while the test is shown."""
        match = rng.integers(0, 2, size)
        first = rng.integers(0, self.directions, size)
        second = np.where(
            match,
            first,
            (first + rng.integers(1, self.directions, size)) % self.directions,
        )
        preferred = np.arange(self.channels) / self.channels * 2 * np.pi
        bump = lambda d: np.exp(
            4 * (np.cos(preferred - 2 * np.pi * d[:, None] / self.directions) - 1)
        )
        rates = np.full((self.steps, size, self.channels), self.background, np.float32)
        start = self.fixation + self.shown
        rates[self.fixation : start] += self.rate * bump(first)
        rates[start + self.delay :] += self.rate * bump(second)
        weights = np.zeros(self.steps, np.float32)
        weights[start + self.delay :] = 1
        return Trials(
            poisson(rng, rates),
            np.broadcast_to(match.astype(np.int32), (self.steps, size)),
            weights,
        )


@dataclass(frozen=True)
class Copying:
    """Repeat symbols after a lag."""

    length: int = 10
    symbols: int = 8
    lag: int = 20

    kind: ClassVar[str] = 'classes'
    reference: ClassVar[str] = (
        'cross-entropy after 200 updates: BPTT 2.010, published D_RTRL 2.043, chance '
        '2.079 '
        '(GRU 64, batch 32, Adam 2e-3)'
    )

    @property
    def inputs(self) -> int:
        """Symbols, a blank and a start signal."""
        return self.symbols + 2

    @property
    def outputs(self) -> int:
        """Symbols."""
        return self.symbols

    @property
    def steps(self) -> int:
        """Steps of a trial."""
        return 2 * self.length + self.lag

    def batch(self, rng: np.random.Generator, size: int) -> Trials:
        """Draw trials."""
        said = rng.integers(0, self.symbols, (self.length, size))
        shown = np.full((self.steps, size), self.symbols)
        shown[: self.length] = said
        shown[self.length + self.lag - 1] = self.symbols + 1
        targets = np.zeros((self.steps, size), np.int32)
        targets[-self.length :] = said
        weights = np.zeros(self.steps, np.float32)
        weights[-self.length :] = 1
        return Trials(np.eye(self.inputs, dtype=np.float32)[shown], targets, weights)


@dataclass(frozen=True)
class Adding:
    """Add two marked numbers of a long sequence, at its end."""

    steps: int = 100

    inputs: ClassVar[int] = 2
    outputs: ClassVar[int] = 1
    kind: ClassVar[str] = 'values'
    reference: ClassVar[str] = 'mean squared error 0.167 without any memory'

    def batch(self, rng: np.random.Generator, size: int) -> Trials:
        """Draw trials."""
        numbers = rng.random((self.steps, size))
        marks = np.zeros((self.steps, size))
        half = self.steps // 2
        marks[rng.integers(0, half, size), np.arange(size)] = 1
        marks[rng.integers(half, self.steps, size), np.arange(size)] = 1
        targets = np.zeros((self.steps, size, 1), np.float32)
        targets[-1, :, 0] = (numbers * marks).sum(0)
        weights = np.zeros(self.steps, np.float32)
        weights[-1] = 1
        return Trials(
            np.stack([numbers, marks], -1).astype(np.float32), targets, weights
        )


@dataclass(frozen=True)
class PatternGeneration:
    """Generate a sum of sines from Poisson inputs that are the same in every trial."""

    steps: int = 1000
    channels: int = 20
    rate: float = 0.05
    seed: int = 0

    outputs: ClassVar[int] = 1
    kind: ClassVar[str] = 'values'
    reference: ClassVar[str] = (
        'the task of Bellec 2020, figure 2; learned when the output follows the pattern'
    )

    @property
    def inputs(self) -> int:
        """Channels."""
        return self.channels

    def batch(self, rng: np.random.Generator, size: int) -> Trials:
        """The one trial, ``size`` times."""
        fixed = np.random.default_rng(self.seed)
        t = np.arange(self.steps) / 1000
        sizes, phases = fixed.uniform(0.5, 2, 4), fixed.uniform(0, 2 * np.pi, 4)
        waves = zip((1, 2, 3, 5), sizes, phases, strict=True)
        parts = [size * np.sin(2 * np.pi * f * t + phase) for f, size, phase in waves]
        pattern = np.sum(parts, axis=0)
        spikes = (fixed.random((self.steps, 1, self.channels)) < self.rate).astype(
            np.float32
        )
        targets = (pattern / np.abs(pattern).max()).astype(np.float32)[:, None, None]
        shape = (self.steps, size)
        return Trials(
            np.broadcast_to(spikes, (*shape, self.channels)),
            np.broadcast_to(targets, (*shape, 1)),
            np.ones(self.steps, np.float32),
        )
