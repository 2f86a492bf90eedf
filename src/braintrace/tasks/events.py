"""Recordings of event cameras and silicon cochleas as arrays of events, for example
from Tonic. These are structured NumPy arrays with the fields t and x, and optionally y
and p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import three_parts
from .recordings import decisions
from .trials import Trials


def events_to_steps(
    events: np.ndarray | Sequence[np.ndarray],
    steps: int,
    sensor_size: tuple[int, int, int],
    *,
    step: float | None = None,
    start: float | None = 0.0,
    binary: bool = False,
    flat: bool = True,
) -> np.ndarray:
    """Count the events of each channel in each step.

    ``events``: a structured array with fields ``t`` and ``x``, and ``y`` and ``p`` if
    the sensor has rows and polarities; or a list of such arrays, one for each sample.
    ``sensor_size``: columns, rows and polarities, as in Tonic. With one polarity, the
    polarity of events is ignored. ``step``: the length of a step in the unit of ``t``
    (microseconds for Tonic). By default, the time from ``start`` to the last event is
    divided into equal steps. ``start``: the time at which the first step begins; None
    means the first event. Events before ``start`` or after the last step are ignored.
    ``binary``: count any number of events as 1.

    Returns float32 (steps, channels), or (steps, batch, channels) for a list. A channel
    is a polarity, row and column. ``flat=False`` keeps these as three axes.

    >>> kinds = [('x', int), ('y', int), ('t', int), ('p', int)]
    >>> events = np.array([(0, 0, 5, 1), (1, 0, 12, 0), (1, 0, 13, 0)], kinds)
    >>> events_to_steps(events, 2, (2, 1, 2), step=10)
    array([[0., 0., 1., 0.],
           [0., 2., 0., 0.]], dtype=float32)
    """
    if not isinstance(steps, (int, np.integer)) or steps < 1:
        raise ValueError(
            three_parts(
                f'events_to_steps(..., steps={steps!r})',
                'time is divided into so many steps',
                'a whole number of at least 1',
            )
        )
    if not isinstance(events, np.ndarray):
        each = [
            events_to_steps(
                one,
                steps,
                sensor_size,
                step=step,
                start=start,
                binary=binary,
                flat=flat,
            )
            for one in events
        ]
        return np.stack(each, axis=1)
    x, y, p, when = _fields(events, sensor_size)
    number = _step_numbers(when, steps, step, start)
    kept = (number >= 0) & (number < steps)
    width, height, polarities = sensor_size
    counts = np.zeros((steps, polarities, height, width), np.float32)
    np.add.at(counts, (number[kept], p[kept], y[kept], x[kept]), 1)
    if binary:
        counts = np.minimum(counts, 1)
    return counts.reshape(steps, -1) if flat else counts


def _fields(
    events: np.ndarray, sensor_size: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Column, row, polarity and time of every event, inside the sensor."""
    names = events.dtype.names or ()
    if not {'t', 'x'} <= set(names):
        raise ValueError(
            three_parts(
                f'events of type {events.dtype}',
                'an event has a time and a place',
                'a structured array with fields t, x, and y and p where there are any',
            )
        )
    zero = np.zeros(len(events), int)
    whole = lambda name: events[name].astype(int) if name in names else zero
    x, y = whole('x'), whole('y')
    # Polarities are 0 and 1, False and True, or -1 and 1.
    p = (whole('p') > 0).astype(int) if sensor_size[2] > 1 else zero
    for name, found, size in zip('xy', (x, y), sensor_size, strict=False):
        if len(found) and not 0 <= found.min() <= found.max() < size:
            raise ValueError(
                three_parts(
                    f'events with {name} from {found.min()} to {found.max()}',
                    f'sensor_size={tuple(sensor_size)} has {size} of them',
                    'the sensor_size of the recording: columns, rows, polarities',
                )
            )
    return x, y, p, events['t'].astype(np.float64)


def _step_numbers(
    when: np.ndarray, steps: int, step: float | None, start: float | None
) -> np.ndarray:
    """The step in which each event is."""
    first = start
    if first is None:
        first = when.min() if len(when) else 0.0
    passed = when - first
    if step is not None:
        return np.floor(passed / step).astype(int)
    span = passed.max(initial=0.0)
    # The last event is the end of the last step, and belongs to it.
    share = passed / span if span > 0 else np.zeros_like(passed)
    number = np.floor(share * steps).astype(int)
    return np.where(passed == span, steps - 1, number)


@dataclass(frozen=True, eq=False)
class EventRecordings:
    """Classify recordings: a dataset of Tonic, or any list of (events, label).

    ``sensor_size``, ``step``, ``start`` and ``binary``: as in :func:`events_to_steps`.
    The loss counts in the second half of the steps.
    """

    recordings: Any
    sensor_size: tuple[int, int, int]
    outputs: int
    steps: int = 100
    step: float | None = None
    start: float | None = 0.0
    binary: bool = False

    kind: ClassVar[str] = 'decision'
    reference: ClassVar[str] = 'that of the recordings'

    @property
    def inputs(self) -> int:
        """Channels: polarity, row and column."""
        return int(np.prod(self.sensor_size))

    def batch(self, rng: np.random.Generator, size: int) -> Trials:
        """Draw recordings."""
        chosen = rng.integers(0, len(self.recordings), size)
        drawn = [self.recordings[int(i)] for i in chosen]
        counts = events_to_steps(
            [events for events, _ in drawn],
            self.steps,
            self.sensor_size,
            step=self.step,
            start=self.start,
            binary=self.binary,
        )
        labels = np.array([int(label) for _, label in drawn])
        return decisions(counts, labels, self.steps - self.steps // 2)
