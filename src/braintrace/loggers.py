"""Callbacks of :func:`braintrace.fit` that write the record of every update.

Any function of a record can be a callback. If it returns True, training stops.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import three_parts
from .files import write_whole, written

Record = dict[str, float]


class JSONLines:
    """Appends each record to a file, as one line of JSON.

    Lines are complete when an update ends. When a training is resumed, the lines of
    updates after its checkpoint are removed.

    >>> import pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp()) / 'log.jsonl'
    >>> JSONLines(file)({'update': 1, 'loss': 0.5})
    >>> file.read_text()
    '{"update": 1, "loss": 0.5}\\n'
    """

    def __init__(self, file: str | Path):
        self.file = Path(file)

    def __call__(self, record: Record) -> None:
        """Write a record."""
        with written(str(self.file)):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open('a', encoding='utf-8') as file:
                file.write(f'{json.dumps(record)}\n')

    def replay(self, records: Sequence[Record]) -> None:
        """Start from the records of a training that is resumed."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.file, ''.join(f'{json.dumps(record)}\n' for record in records))


class TensorBoard:
    """Writes each number of a record as a scalar for TensorBoard, by update.

    ``folder``: a run of ``tensorboard --logdir``. ``prefix``: a text before the names,
    e.g. ``'d_rtrl/'``. Needs the extra ``tensorboard``.
    """

    def __init__(self, folder: str | Path, prefix: str = ''):
        try:
            import tensorboardX
        except ImportError as error:
            raise ImportError(
                three_parts(
                    'TensorBoard(...)',
                    'its files are written by tensorboardX, which is not installed',
                    "pip install 'braintrace-online[tensorboard]'",
                )
            ) from error
        self.folder, self.prefix = Path(folder), prefix
        self._open = tensorboardX.SummaryWriter
        self._writer: Any = None
        self._purge: int | None = None

    def __call__(self, record: Record) -> None:
        """Write a record."""
        if self._writer is None:
            self._writer = self._open(str(self.folder), purge_step=self._purge)
        update = int(record['update'])
        for name, value in record.items():
            if name != 'update':
                self._writer.add_scalar(f'{self.prefix}{name}', value, update)

    def replay(self, records: Sequence[Record]) -> None:
        """Continue a resumed training. TensorBoard drops later updates from the
        existing files."""
        self.close()
        last = int(records[-1]['update']) if records else 0
        self._purge = last + 1

    def close(self) -> None:
        """Write buffered values. :func:`braintrace.fit` calls this at the end."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._purge = None
