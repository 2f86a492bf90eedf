"""Every file of a checkpoint is damaged: the right values or an error, nothing else."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from random import Random

from braintrace.checkpoint import Checkpoints

from .progress import random_of
from .training import Training, check_explained, check_same

TITLE = 'bit flips, truncations and losses of every file of a checkpoint'
CASES = 10_000
UNITS = 48
"""Arrays of some kilobytes: smaller ones are stored in another way, beside their
names."""


@functools.cache
def written() -> tuple[Training, tempfile.TemporaryDirectory, list[Path], dict]:
    """A training with two checkpoints, the files of the newer, and its values."""
    trained = Training(UNITS)
    folder = tempfile.TemporaryDirectory(prefix='damage-')
    trained.fit(Path(folder.name) / 'run', updates=2)
    trained.learner.etrace_evolve(trained.batches(0)[0])
    kept = Checkpoints(Path(folder.name) / 'checkpoints')
    kept.save(1, trained.states)
    trained.learner.etrace_evolve(trained.batches(1)[0])
    kept.save(2, trained.states)
    newest = Path(folder.name) / 'checkpoints' / '2'
    files = sorted(p for p in newest.rglob('*') if p.is_file())
    return trained, folder, files, trained.values()


def flip(data: bytearray, rng: Random) -> None:
    """One bit."""
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def truncate(data: bytearray, rng: Random) -> None:
    """The end is missing."""
    del data[rng.randint(0, max(len(data) - 1, 0)) :]


def blank(data: bytearray, rng: Random) -> None:
    """A block of zeros, as after a power cut."""
    start = rng.randint(0, len(data))
    end = min(start + 512, len(data))
    data[start:end] = bytes(end - start)


def extend(data: bytearray, rng: Random) -> None:
    """More bytes than were written."""
    data += rng.randbytes(rng.randint(1, 64))


KINDS = {
    'bit flip': flip,
    'truncation': truncate,
    'zeros': blank,
    'extension': extend,
    'loss': None,
}


def case(seed: int, number: int) -> str:
    """One file, damaged in one way."""
    rng = random_of('damage', seed, number)
    trained, folder, files, wanted = written()
    file = files[number % len(files)]
    # Bit flips are the most frequent, and the hardest to see.
    kind = rng.choice([*KINDS, 'bit flip', 'bit flip'])
    whole = file.read_bytes()
    data = bytearray(whole)
    change = KINDS[kind]
    if change is None:
        file.unlink()
    else:
        change(data, rng)
        file.write_bytes(data)
    kept = Path(folder.name) / 'checkpoints'
    try:
        trained.reset()
        before = trained.values()
        try:
            Checkpoints(kept).restore(trained.states, 2)
        except Exception as error:
            check_explained(error)
            check_same(trained.values(), before)
            if rng.random() < 0.05:
                older(kept, trained)
            return f'{kind}: refused'
        check_same(trained.values(), wanted)
        return f'{kind}: read exactly'
    finally:
        file.write_bytes(whole)


def older(kept: Path, trained: Training) -> None:
    """What the error says helps: without the damaged checkpoint the one before it is
    read."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / 'checkpoints'
        shutil.copytree(kept, copy)
        shutil.rmtree(copy / '2')
        assert Checkpoints(copy).restore(trained.states) == 1
