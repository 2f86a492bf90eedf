"""Recorded data: the digits of scikit-learn, and loaders for files of SHD and N-MNIST
on disk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..errors import three_parts
from .trials import Trials


def decisions(inputs: np.ndarray, labels: np.ndarray, last: int) -> Trials:
    """Trials whose answer counts in the last steps."""
    steps = len(inputs)
    weights = np.zeros(steps, np.float32)
    weights[-last:] = 1
    return Trials(
        inputs.astype(np.float32),
        np.broadcast_to(labels.astype(np.int32), (steps, len(labels))),
        weights,
    )


@dataclass(frozen=True)
class Digits:
    """Classify handwritten digits of 8 × 8 pixels, read pixel by pixel or row by row.

    ``test`` selects a fifth of the data that is not used for training.
    """

    by: str = 'pixel'
    test: bool = False

    outputs: ClassVar[int] = 10
    kind: ClassVar[str] = 'decision'
    reference: ClassVar[str] = (
        'a linear classifier of the whole picture: accuracy 0.96 on the held-out fifth'
    )

    def __post_init__(self) -> None:
        if self.by not in ('pixel', 'row'):
            raise ValueError(
                three_parts(
                    f'by={self.by!r}',
                    'pictures are read in one of two ways',
                    "'pixel' or 'row'",
                )
            )

    @property
    def inputs(self) -> int:
        """Channels."""
        return 1 if self.by == 'pixel' else 8

    @property
    def steps(self) -> int:
        """Steps of a trial."""
        return 64 if self.by == 'pixel' else 8

    def batch(self, rng: np.random.Generator, size: int) -> Trials:
        """Draw pictures; the answer counts at the last step."""
        pictures, labels = _digits()
        held_out = np.arange(len(labels)) % 5 == 0
        chosen = rng.choice(np.flatnonzero(held_out == self.test), size)
        inputs = pictures[chosen].reshape(size, self.steps, self.inputs).swapaxes(0, 1)
        return decisions(inputs, labels[chosen], 1)


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            three_parts(
                'the digits task',
                'the pictures ship with scikit-learn',
                "pip install 'braintrace-online[data]'",
            )
        ) from error
    found = load_digits()
    return found.images.reshape(-1, 64) / 16, found.target


@dataclass(frozen=True)
class SHD:
    """Classify spoken digits as spikes of 700 channels, from an HDF5 file on disk.

    Spiking Heidelberg Digits (Cramer 2020).
    """

    file: str | Path
    steps: int = 100
    seconds: float = 1.4
    group: int = 1

    channels: ClassVar[int] = 700
    outputs: ClassVar[int] = 20
    kind: ClassVar[str] = 'decision'
    reference: ClassVar[str] = (
        'accuracy 0.71 recurrent LIF by BPTT (Cramer 2020); 0.8 and more with '
        'adaptation'
    )

    @property
    def inputs(self) -> int:
        """Channels, ``group`` neighbours taken together."""
        return -(-self.channels // self.group)

    def batch(self, rng: np.random.Generator, size: int) -> Trials:
        """Draw recordings; the answer counts in the second half."""
        times, units, labels = _read_shd(str(self.file))
        chosen = rng.integers(0, len(labels), size)
        counts = np.zeros((self.steps, size, self.inputs), np.float32)
        for k, i in enumerate(chosen):
            when = np.asarray(times[i], float) / self.seconds * self.steps
            kept = when < self.steps
            channels = np.asarray(units[i])[kept] // self.group
            at: Any = (when[kept].astype(int), k, channels)
            np.add.at(counts, at, 1)
        return decisions(counts, labels[chosen], self.steps // 2)


@cache
def _read_shd(file: str) -> tuple[Any, Any, np.ndarray]:
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            three_parts(
                'the SHD task',
                'its files are HDF5',
                "pip install 'braintrace-online[data]'",
            )
        ) from error
    try:
        with h5py.File(file) as found:
            return (
                found['spikes']['times'][:],
                found['spikes']['units'][:],
                np.asarray(found['labels']),
            )
    except (OSError, KeyError) as error:
        raise ValueError(
            three_parts(
                f'file={file!r}',
                f'it is no file of SHD: {error}',
                'shd_train.h5 or shd_test.h5, unpacked',
            )
        ) from error


@dataclass(frozen=True)
class NMNIST:
    """Classify digits seen by a moving event camera, from a folder on disk.

    N-MNIST (Orchard 2015), 34 × 34 pixels and 2 polarities. The folder holds one part,
    'Train' or 'Test'.
    """

    folder: str | Path
    steps: int = 100
    milliseconds: float = 300.0

    side: ClassVar[int] = 34
    outputs: ClassVar[int] = 10
    kind: ClassVar[str] = 'decision'
    reference: ClassVar[str] = (
        'accuracy 0.97 and more by fully connected spiking networks'
    )

    @property
    def inputs(self) -> int:
        """Channels: polarity, row and column."""
        return 2 * self.side**2

    def batch(self, rng: np.random.Generator, size: int) -> Trials:
        """Draw recordings; the answer counts in the second half."""
        files = _nmnist_files(str(self.folder))
        chosen = rng.integers(0, len(files), size)
        counts = np.zeros((self.steps, size, 2, self.side, self.side), np.float32)
        for k, i in enumerate(chosen):
            x, y, polarity, when = events(files[i].read_bytes())
            step = (when / 1000 / self.milliseconds * self.steps).astype(int)
            kept = (step < self.steps) & (x < self.side) & (y < self.side)
            counts[step[kept], k, polarity[kept], y[kept], x[kept]] = 1
        labels = np.array([int(files[i].parent.name) for i in chosen])
        return decisions(counts.reshape(self.steps, size, -1), labels, self.steps // 2)


def events(content: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Column, row, polarity and microseconds of every event of 40 bits."""
    if len(content) % 5:
        raise ValueError(
            three_parts(
                f'a recording of {len(content)} bytes',
                'every event takes five',
                'a .bin file of N-MNIST',
            )
        )
    x, y, *rest = np.frombuffer(content, np.uint8).reshape(-1, 5).T.astype(int)
    return x, y, rest[0] >> 7, (rest[0] & 127) << 16 | rest[1] << 8 | rest[2]


@cache
def _nmnist_files(folder: str) -> tuple[Path, ...]:
    found = tuple(sorted(Path(folder).glob('[0-9]/*.bin')))
    if not found:
        raise ValueError(
            three_parts(
                f'folder={folder!r}',
                'it has no 0/*.bin to 9/*.bin',
                "N-MNIST's Train or Test, unpacked",
            )
        )
    return found
