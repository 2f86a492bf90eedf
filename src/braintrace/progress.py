"""Progress of a training as a line of text."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import numpy as np

from .errors import printable
from .history import Record


class Progress:
    """A line of progress: rewritten in a terminal, a new one every few seconds in a
    pipe."""

    def __init__(self, updates: int, file: Any = None, every: float = 5.0):
        self.updates = updates
        self.file = file or sys.stderr
        self.live = self.file.isatty()
        self.every = 0.2 if self.live else every
        self._shown = 0.0
        self._recent: list[Record] = []

    def __call__(self, record: Record, steps: int) -> None:
        """Show a record, if it is time to or the last one."""
        self._recent = [*self._recent[-19:], record]
        now, number = time.perf_counter(), int(record['update'])
        if now - self._shown < self.every and number != self.updates:
            return
        self._shown = now
        first = self._recent[0]
        gone = (record['seconds'] - first['seconds'], number - int(first['update']))
        names = [n for n in record if n not in ('update', 'seconds')]
        mean = lambda name: np.mean([r[name] for r in self._recent if name in r])
        parts = [
            f'update {number}/{self.updates}',
            *(f'{name} {mean(name):.4g}' for name in names),
        ]
        parts += [f'(means of {len(self._recent)})'] if len(self._recent) > 1 else []
        if gone[1]:  # the first update also compiles
            rate = gone[1] / gone[0]
            parts += [
                f'{steps * rate:,.0f} steps/s',
                f'{_clock((self.updates - number) / rate)} left',
            ]
        parts.append(f'{peak_memory() / 2**20:,.0f} MiB')
        text = printable('  '.join(parts))
        print(
            f'\r\033[K{text}' if self.live else text,
            end='' if self.live else '\n',
            file=self.file,
            flush=True,
        )

    def close(self) -> None:
        """Leave the line."""
        if self.live:
            print(file=self.file, flush=True)


def peak_memory() -> int:
    """The most bytes that this process has held so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == 'darwin' else most * 1024


def _clock(seconds: float) -> str:
    return f'{int(seconds) // 60}:{int(seconds) % 60:02}'
