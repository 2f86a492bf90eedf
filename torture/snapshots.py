"""Copies of the folder of a training, made before every file operation of Python.

Half of the cases are a crash of the process; in the others the last bytes of files that
were not synchronised are lost too, as when the power fails.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from .progress import random_of
from .training import training

TITLE = 'copies of the folder before every file operation, each resumed or started'
CASES = 2000

_EVENTS = ('open', 'os.mkdir', 'os.rename', 'os.remove', 'os.rmdir', 'os.truncate')


class Recorder:
    """Copies a folder whenever Python is about to change something in it."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.copies: list[Path] = []
        self._kept = tempfile.TemporaryDirectory(prefix='snapshots-')
        self._seen: set[str] = set()
        self._busy = threading.local()
        self._lock = threading.Lock()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple) -> None:
        if self.folder is None or event not in _EVENTS:
            return
        if getattr(self._busy, 'now', False):
            return
        name = arguments[0]
        if not isinstance(name, (str, bytes)) and event != 'open':
            return
        inside = str(name).startswith(str(self.folder))
        is_reading = event == 'open' and 'r' in str(arguments[1] or '')
        if not inside or is_reading:
            return
        self._busy.now = True
        try:
            with self._lock:
                self._copy(self.folder)
        finally:
            self._busy.now = False

    def _copy(self, folder: Path) -> None:
        target = Path(self._kept.name) / str(len(self.copies))
        try:
            shutil.copytree(folder, target)
        except (shutil.Error, FileNotFoundError):
            # A file went away meanwhile: a thread of orbax was faster.
            shutil.rmtree(target, ignore_errors=True)
            return
        digest = fingerprint(target)
        if digest in self._seen:
            shutil.rmtree(target)
            return
        self._seen.add(digest)
        self.copies.append(target)


def fingerprint(folder: Path) -> str:
    """Equal for folders of the same contents."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob('*')):
        found.update(f'{path.relative_to(folder)}\0'.encode())
        found.update(path.read_bytes() if path.is_file() else b'')
    return found.hexdigest()


@functools.cache
def recorded() -> Recorder:
    """Snapshots of a training from its start, and of one that is resumed."""
    recorder, trained = Recorder(), training()
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / 'fresh'
        recorder.folder = fresh
        fresh.mkdir()
        trained.fit(fresh)
        recorder.folder = None
        resumed = Path(folder) / 'resumed'
        trained.fit(resumed, updates=2)
        recorder.folder = resumed
        trained.fit(resumed, resume=True)
        recorder.folder = None
    return recorder


def case(seed: int, number: int) -> str:
    """One copy, resumed."""
    rng = random_of('snapshots', seed, number)
    found = recorded().copies
    index = number // 2 if number // 2 < len(found) else rng.randrange(len(found))
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / 'run'
        shutil.copytree(found[index], run)
        how = 'a crash'
        if number % 2:
            how = 'a power cut'
            for file in run.rglob('metrics.jsonl'):
                text = file.read_bytes()
                file.write_bytes(text[: rng.randint(0, len(text))])
        return f'{training().resume_or_start(run)} after {how}'
