"""The interface of a task."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

import numpy as np


class Trials(NamedTuple):
    """A batch: inputs (time, batch, channels), targets (time, batch, ...) and weights
    (time,) of the losses."""

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


class Task(Protocol):
    """A source of trials.

    ``kind``: 'classes', one of ``outputs`` classes at every step; 'decision', one class
    for each trial; or 'values', ``outputs`` numbers at every step. ``reference``:
    published results, and how they were obtained. For figures a task may have a
    ``step_unit``, such as 'ms', and ``channel_groups``, which gives names to slices of
    its input channels.
    """

    kind: ClassVar[str]
    reference: ClassVar[str]

    @property
    def inputs(self) -> int:
        """Channels."""

    @property
    def outputs(self) -> int:
        """Classes or numbers."""

    @property
    def steps(self) -> int:
        """Steps of a trial."""

    def batch(self, rng: np.random.Generator, size: int) -> Trials:
        """Draw trials."""
