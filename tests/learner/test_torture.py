"""A few cases of every part of the reliability suite; `make torture` runs more."""

import contextlib
import importlib
import io
from pathlib import Path

import pytest
from torture import interrupts, kills, soak
from torture.__main__ import PARTS, quiet
from torture.training import training

# The threads in which orbax writes end with the error of a full disk, too.
pytestmark = [
    pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning'),
    pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning'),
]

CASES = {
    'snapshots': (8, 21, 45),
    'damage': range(18, 36),
    'records': range(9),
    'disks': (1, 2),
    'random_models': (1,),
    'threads': (1,),
    'processes': (1,),
    'export': (6, 7, 8),
}
"""Numbers of cases by part."""
MODULES = {name: importlib.import_module(f'torture.{name}') for name in CASES}


@pytest.mark.parametrize('name', CASES)
def test_part(name):
    part = MODULES[name]
    for number in CASES[name]:
        with quiet(), contextlib.redirect_stdout(io.StringIO()):
            assert part.case(0, number)


def test_every_part_has_a_test():
    assert set(PARTS) == {*CASES, 'kills', 'command', 'interrupts', 'soak'}


@pytest.mark.parametrize('kind', interrupts.CALLS)
def test_interrupts(kind):
    """In the last instructions of a call its results are put in place."""
    user = interrupts.subject('d_rtrl')
    count = user.around(kind)[3]
    for at in range(max(1, count - 600), count, 97):
        assert interrupts.interrupted(user, kind, at)


@pytest.mark.parametrize('kind', interrupts.STREAMS)
def test_interrupts_while_a_program_runs(kind):
    user = interrupts.subject('d_rtrl')
    for n in range(3):
        assert interrupts.interrupted_loop(user, kind, 0.003 * n)


@pytest.mark.parametrize('kind', ['stream', 'predict', 'carried', 'evolve', 'chunks'])
def test_a_callback_that_fails_changes_nothing(kind):
    user = interrupts.subject('d_rtrl', interrupts.Failing)
    assert interrupts.failed(user, kind)


def test_soak(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, 'OUT', tmp_path)
    found = soak.Soak(0)
    for _ in range(5):
        found.chunk(200)
    assert 0 < found.worst < soak.MOST_ERROR


def test_a_killed_process_is_resumed_exactly(tmp_path):
    out = tmp_path / 'run'
    assert kills.killed(out, 0.1)
    with quiet():
        assert training().resume_or_start(Path(out), 3) in ('resumed', 'started')
