"""Processes that train are killed at random moments, and so are those that resume."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .progress import ROOT, SETTINGS, random_of
from .training import training

TITLE = 'SIGKILL of `fit` at random moments, and of the processes that resume it'
CASES = 500
UPDATES = 12


def environment() -> dict[str, str]:
    """Children see the same packages and compute by the same devices."""
    paths = [str(ROOT), *(path for path in sys.path if path)]
    settings = {name.upper(): str(value) for name, value in SETTINGS.items()}
    return {**os.environ, **settings, 'PYTHONPATH': os.pathsep.join(paths)}


def victim(out: Path) -> subprocess.Popen:
    """A process that is about to train."""
    command = [sys.executable, '-m', 'torture.victim', str(out), str(UPDATES)]
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    )
    said = child.stdout.readline()
    assert said == 'begins\n', f'the victim said {said!r}'
    return child


@functools.cache
def longest() -> float:
    """Seconds that a victim needs to its end; what it compiles is kept for others."""
    with tempfile.TemporaryDirectory() as folder:
        for out in (Path(folder) / 'first', Path(folder) / 'second'):
            child = victim(out)
            start = time.monotonic()
            assert child.wait() == 0
            child.stdout.close()
    return time.monotonic() - start


def killed(out: Path, seconds: float) -> bool:
    """Start a training in a folder and kill it; False if it was over before."""
    child = victim(out)
    try:
        time.sleep(seconds)
    finally:
        child.kill()
        child.wait()
        said = child.stdout.read()
        child.stdout.close()
    assert child.returncode in (0, -9), f'the victim ended with {child.returncode}'
    return 'ended' not in said


def case(seed: int, number: int) -> str:
    """One training, killed up to three times; after each kill it can be resumed."""
    rng = random_of('kills', seed, number)
    trained, kills = training(), 0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / 'run'
        for _ in range(rng.randint(1, 3)):
            # More often early: there the folder is made and the first files are written.
            if not killed(out, longest() * rng.random() ** 1.5):
                break
            kills += 1
            copy = Path(folder) / 'copy'
            if out.exists():
                shutil.copytree(out, copy)
            trained.resume_or_start(copy, UPDATES)
            shutil.rmtree(copy)
        trained.resume_or_start(out, UPDATES)
    return f'exact after {kills} kill(s)'
