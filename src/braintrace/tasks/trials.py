"""What every task gives."""

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

    ``kind``: 'classes', one of ``outputs`` at every step; 'decision', one for each
    trial; 'values', ``outputs`` numbers at every step. ``reference``: what others
    reached, and how. For pictures a task may have a ``step_unit``, as 'ms', and
    ``channel_groups``: names of its inputs, each with a slice of channels.
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
