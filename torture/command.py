"""The command ``braintrace train`` is killed at random moments, and resumed."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from braintrace.checkpoint import Checkpoints, states_of
from braintrace.cli import main, runs, settings

from .kills import environment
from .progress import random_of
from .training import _plain, check_same

TITLE = 'SIGKILL of `braintrace train` and `--resume` at random moments'
CASES = 200
UPDATES = 5
TASK = ['copying', '--units', '4', '--batch', '2', '--seed', '3', '--rule', 'd_rtrl']
OPTIONS = [
    *('--updates', str(UPDATES), '--save-every', '1'),
    *('--task-option', 'lag=2', '--task-option', 'length=2'),
]


def words(out: Path) -> list[str]:
    """The command that goes on in a folder, or starts there."""
    if (out / 'config.json').exists():
        return ['train', '--resume', str(out)]
    return ['train', *TASK, *OPTIONS, '--out', str(out)]


def killed(out: Path, rng: Random, longest: float) -> bool:
    """Run the command and kill it; False if it was over before."""
    command = [sys.executable, '-m', 'braintrace', *words(out)]
    child = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + longest * rng.uniform(0.3, 1)
    try:
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    assert child.returncode in (0, -9), f'the command ended with {child.returncode}'
    return child.returncode != 0


def finished(out: Path) -> dict:
    """Run the command to its end; all that it leaves, but for times."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words(out)) == 0
    config = settings.read(out)
    learner, _, optimizer = runs._prepare(config)
    states = states_of(learner, optimizer)
    Checkpoints(out / 'checkpoints').restore(states, UPDATES)
    lines = (out / 'metrics.jsonl').read_text().splitlines()
    records = [json.loads(line) for line in lines]
    result = json.loads((out / 'result.json').read_text())
    return {
        'arrays': {name: _arrays(state) for name, state in states.items()},
        'records': [{**record, 'seconds': 0} for record in records],
        'held_out': result['held_out'],
        'config': config,
    }


def _arrays(state) -> list:
    import jax

    return [_plain(x) for x in jax.tree.leaves(state.value)]


@functools.cache
def reference() -> tuple[dict, float]:
    """What an uninterrupted command leaves, and how long one takes here."""
    with tempfile.TemporaryDirectory() as folder:
        found = finished(Path(folder) / 'run')
        start = time.monotonic()
        command = [sys.executable, '-m', 'braintrace', *words(Path(folder) / 'timed')]
        subprocess.run(command, env=environment(), capture_output=True, check=True)
        return found, time.monotonic() - start


def case(seed: int, number: int) -> str:
    """One training, killed once or twice and then run to its end."""
    rng = random_of('command', seed, number)
    wanted, seconds = reference()
    kills = 0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / 'run'
        for _ in range(rng.randint(1, 2)):
            kills += killed(out, rng, seconds)
        found = finished(out)
    check_same(found.pop('arrays'), wanted['arrays'])
    assert found == {name: wanted[name] for name in found}
    return f'exact after {kills} kill(s)'
