"""Damaged ``metrics.jsonl`` and ``config.json`` in the folder of a training."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

from braintrace.cli import main, settings

from .progress import random_of
from .training import check_same, training

TITLE = 'damaged, foreign and newer lines in `metrics.jsonl` and `config.json`'
CASES = 3000

FOREIGN = (
    '',
    'null',
    '[]',
    '{}',
    '"text"',
    'NaN',
    '{"update": 1',
    '{"update": 1, "loss": "low", "seconds": 1}',
    '{"update": true, "seconds": 1}',
    '{"update": -3, "loss": 1, "seconds": 1}',
    '{"update": 2.5, "loss": 1, "seconds": 1}',
    '{"update": 99, "loss": 1, "seconds": 1}',
    '{"update": 99, "loss": 1, "seconds": NaN}',
    '{"update": 1, "loss": null, "seconds": 1}',
    '{"format": 7, "update": 1, "losses": [1, 2], "seconds": 1}',
    '{"loss": 1, "seconds": 1, "update": 1' + '0' * 400 + '}',
    '{"update": 2, "loss": 1, "seconds": 1' + '0' * 400 + '}',
    '[' * 5000,
    '\ufeff{"update": 1, "loss": 1, "seconds": 1}',
    '\x00\x00\x00\x00',
    'a' * 10_000,
)
"""Lines that no training of this version writes; those of update 99 are later than the
checkpoint."""


@functools.cache
def folder() -> tempfile.TemporaryDirectory:
    """The folder of a training that has done two of its updates."""
    found = tempfile.TemporaryDirectory(prefix='records-')
    training().fit(Path(found.name) / 'run', updates=2)
    return found


def damaged(data: bytes, rng: Random) -> tuple[str, bytes]:
    """The contents of a file after an accident."""
    kind = rng.choice(['empty', 'half', 'byte', 'foreign line', 'order', 'bytes'])
    lines = data.split(b'\n')
    if kind == 'empty':
        return kind, b''
    if kind == 'half':
        return kind, data[: rng.randrange(len(data))]
    if kind == 'byte':
        # Not a digit: another number is no damage that can be seen.
        at = rng.choice([i for i, c in enumerate(data) if not chr(c).isdigit()])
        return kind, data[:at] + rng.randbytes(1) + data[at + 1 :]
    if kind == 'foreign line':
        lines.insert(rng.randint(0, len(lines)), rng.choice(FOREIGN).encode())
        return kind, b'\n'.join(lines)
    if kind == 'order':
        lines = lines * 2
        rng.shuffle(lines)
        return kind, b'\n'.join(lines)
    return kind, data + rng.randbytes(rng.randint(1, 200))


def metrics(rng: Random) -> str:
    """The training goes on exactly, whatever its records are."""
    with tempfile.TemporaryDirectory() as target:
        run = Path(target) / 'run'
        shutil.copytree(Path(folder().name) / 'run', run)
        file = run / 'metrics.jsonl'
        if rng.random() < 0.05:
            file.unlink()
            kind = 'no file'
        else:
            kind, data = damaged(file.read_bytes(), rng)
            file.write_bytes(data)
        trained = training()
        history = trained.fit(run, resume=True)
        trained_values = trained.values()
        values, by_update = trained.after_unmoved(4)
        check_same(trained_values, values)
        found = {int(r['update']): r.get('loss') for r in history.records}
        assert sorted(found) == list(found), 'records out of order'
        assert {3, 4} <= found.keys() <= {1, 2, 3, 4}
        assert all(found[n] == by_update[n] for n in (3, 4))
    return f'metrics.jsonl, {kind}: resumed exactly'


VALUES = (None, True, -1, 0, 1.5, 'x', [], {}, 10**400, float('nan'), float('inf'))


def config(rng: Random) -> str:
    """The settings are those that were written, or are refused in three parts."""
    began = settings.Config('copying', units=4, batch=2, task_options={'lag': 2})
    with tempfile.TemporaryDirectory() as target:
        run = Path(target)
        settings.save(run, began)
        file = run / 'config.json'
        whole = file.read_bytes()
        if rng.random() < 0.5:
            kind, data = damaged(whole, rng)
        else:
            kind, found = 'wrong type', {'format': settings.FORMAT, **asdict(began)}
            name = rng.choice([*found, 'colour'])
            found[name] = rng.choice(VALUES)
            if rng.random() < 0.2:
                kind, found['format'] = 'newer', settings.FORMAT + rng.randint(1, 9)
            data = json.dumps(found).encode()
        file.write_bytes(data)
        copy_too = rng.random() < 0.3
        if copy_too:
            (run / 'checkpoints' / 'config.json').write_bytes(data)
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            try:
                read = settings.read(run)
            except Exception:
                # The command says it in three parts, which is its exit code 2.
                assert main(['train', '--resume', str(run)]) == 2
                return f'config.json, {kind}: refused'
        same = {name: getattr(began, name) for name in settings.CHANGEABLE}
        if not copy_too:
            assert replace(read, **same) == began, f'{read} was read'
        return f'config.json, {kind}: read'


def case(seed: int, number: int) -> str:
    """One file, damaged in one way."""
    rng = random_of('records', seed, number)
    return config(rng) if number % 3 else metrics(rng)
