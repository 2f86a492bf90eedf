"""Disks that are full or read only, as small file systems in memory.

Where mounting is not permitted, a limit on the size of files takes their place.
"""

from __future__ import annotations

import atexit
import functools
import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from .progress import random_of
from .training import check_explained, check_same, training

TITLE = 'full disks and read-only folders; resumed once there is space'
CASES = 500
SIZE = 2**20


@functools.cache
def disk() -> Path | None:
    """A small file system; None if none may be mounted."""
    folder = tempfile.mkdtemp(prefix='disk-')
    command = ['mount', '-t', 'tmpfs', '-o', f'size={SIZE}', 'tmpfs', folder]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    atexit.register(subprocess.run, ['umount', '--lazy', folder], check=False)
    return Path(folder)


@contextmanager
def full(folder: Path, rng: Random) -> Iterator[str]:
    """Little space is left inside."""
    if disk() is None:
        # A file may be so long and not longer; Python ignores the signal.
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (rng.randrange(4000), before[1]))
        try:
            yield 'files cut off'
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return
    ballast = folder / 'ballast'
    # Four checkpoints, of which two are kept, need some 0.3 MB.
    free = rng.randrange(300_000)
    ballast.write_bytes(bytes(SIZE - used(folder) - free))
    try:
        yield 'full disk'
    finally:
        ballast.unlink()


@contextmanager
def read_only(folder: Path) -> Iterator[str]:
    """Nothing can be written inside."""
    command = ['mount', '-o', 'remount,ro', str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield 'read-only folder'
    finally:
        command[2] = 'remount,rw'
        subprocess.run(command, check=True, capture_output=True)


def used(folder: Path) -> int:
    """Bytes in use on a file system."""
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def case(seed: int, number: int) -> str:
    """A training on a bad disk, and its resumption on a good one."""
    rng = random_of('disks', seed, number)
    trained = training()
    with tempfile.TemporaryDirectory(dir=disk()) as folder:
        out = Path(folder) / 'run'
        begun = rng.random() < 0.5
        if begun:
            trained.fit(out, updates=2)
        where = disk() or Path(folder)
        is_locked = disk() is not None and rng.random() < 0.2
        with read_only(where) if is_locked else full(where, rng) as how:
            try:
                trained.fit(out, resume=begun)
                ended = 'enough space'
            except Exception as error:
                check_explained(error)
                ended = f'{how}: resumed exactly'
        if ended == 'enough space':
            check_same(trained.values(), trained.after_unmoved(4)[0])
            return ended
        trained.resume_or_start(out)
        return ended
