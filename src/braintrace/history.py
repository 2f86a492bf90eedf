"""The records of a training: in memory, in ``metrics.jsonl``, and early stopping."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .errors import UnknownName, one_of, printable, three_parts
from .files import write_whole, written

Record = dict[str, float]
"""What one update gave: its number, its loss, the metrics, seconds so far."""


@dataclass(repr=False)
class History:
    """The records of a training, and why it ended: 'finished', 'stopped early' or
    'interrupted'.

    ``updates``: the number of updates, those before a resumption included. There are
    fewer records if lines of ``metrics.jsonl`` were lost.
    """

    records: list[Record] = field(default_factory=list)
    ended: str = 'finished'
    updates: int = 0

    def __repr__(self) -> str:
        """How many updates, and the first and the last value of every metric."""
        records = [r for r in self.records if r]
        names = dict.fromkeys(key for r in records for key in r)
        lines = [f'History of {self.updates or len(records)} updates, {self.ended}']
        width = max(map(len, names), default=0)
        for name in names:
            if name == 'update':
                continue
            values = [r[name] for r in records if name in r]
            lines.append(f'  {name:{width}}  {values[0]:.4g} → {values[-1]:.4g}')
        return '\n'.join(lines)

    def __getitem__(self, name: str) -> np.ndarray:
        """One metric at every update; NaN where it was not measured."""
        known = dict.fromkeys(key for record in self.records for key in record)
        if known and name not in known:
            why = 'no update measured it'
            raise UnknownName(
                three_parts(f'history[{name!r}]', why, one_of(known, name))
            )
        return np.array([record.get(name, np.nan) for record in self.records])


class EarlyStop:
    """Stop if a metric has not improved for ``patience`` measurements, or if it is good
    enough."""

    def __init__(
        self,
        metric: str = 'loss',
        patience: int | None = None,
        target: float | None = None,
        larger: bool = False,
    ):
        self.metric, self.patience, self.target = metric, patience, target
        self._sign = -1.0 if larger else 1.0
        self._best, self._since = np.inf, 0

    def __call__(self, record: Record) -> bool:
        """Whether to stop after this record."""
        if self.metric not in record:
            if not self.metric.startswith('valid_') or any(
                name.startswith('valid_') for name in record
            ):
                names = [name for name in record if name not in ('update', 'seconds')]
                known = one_of(
                    dict.fromkeys([*names, *(f'valid_{name}' for name in names)]),
                    self.metric,
                )
                raise ValueError(
                    three_parts(
                        f'EarlyStop({self.metric!r})', 'it is not measured', known
                    )
                )
            return False
        value = self._sign * record[self.metric]
        self._since = 0 if value < self._best else self._since + 1
        self._best = min(value, self._best)
        enough = self.target is not None and value <= self._sign * self.target
        return enough or (self.patience is not None and self._since >= self.patience)

    def replay(self, records: Sequence[Record]) -> None:
        """Start from the measurements of a training that is resumed."""
        self._best, self._since = np.inf, 0
        for record in records:
            if self.metric in record:
                self(record)


def read_records(file: Path, most: int) -> list[Record]:
    """Records of updates up to that of the checkpoint; lines that hold no record are
    left out, with a notice."""
    found: dict[int, Record] = {}
    unread = []
    # Bytes that are not text affect their own line only.
    text = file.read_text('utf-8', errors='replace') if file.exists() else ''
    for number, line in enumerate(text.split('\n'), 1):
        record = _record_of(line)
        if record is not None:
            found[int(record['update'])] = record
        elif line.strip():
            unread.append(number)
    if unread:
        lines = ', '.join(map(str, unread[:5])) + (', ...' if len(unread) > 5 else '')
        notice(
            f'{file}: {len(unread)} line(s) hold no record of an update and are left '
            f'out: {lines}'
        )
    kept = [found[update] for update in sorted(found) if update <= most]
    if len(kept) < most:
        notice(
            f'{file}: records of {most - len(kept)} of the {most} updates done are '
            'missing'
        )
    return kept


def _record_of(line: str) -> Record | None:
    """The record that a line holds; none if it was cut off in writing or is something
    else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    # A whole number of hundreds of digits is no float.
    is_number = lambda x: (
        isinstance(x, float)
        or (isinstance(x, int) and not isinstance(x, bool) and abs(x) < 2**1000)
    )
    if not isinstance(record, dict) or not all(map(is_number, record.values())):
        return None
    update = record.get('update')
    is_known = isinstance(update, int) and update >= 1 and 'seconds' in record
    return record if is_known else None


@contextmanager
def metrics_log(
    out: str | Path | None, records: list[Record]
) -> Iterator[Callable[[Record], None]]:
    """Records go to a file, line by line, after those of earlier updates."""
    if out is None:
        yield lambda record: None
        return
    path = Path(out) / 'metrics.jsonl'
    # Replaced whole: a crash here must not lose the records of earlier updates.
    write_whole(path, ''.join(f'{json.dumps(record)}\n' for record in records))
    # Unbuffered: text that a full disk did not take must not be written again on close.
    with path.open('ab', buffering=0) as file:

        def log(record: Record) -> None:
            line = f'{json.dumps(record)}\n'.encode()
            with written(str(path)):
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        yield log


def notice(text: str) -> None:
    """Print a notice, whether or not progress is shown."""
    print(f'notice: {printable(text)}', file=sys.stderr, flush=True)
