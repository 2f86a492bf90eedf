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


@pytest.mark.parametrize('kind', ['carried', 'step', 'apply'])
def test_interrupts(kind):
    """In the last lines of a call its results are put in place."""
    user = interrupts.subject('d_rtrl')
    lines = user.around(kind)[2]
    for at in range(lines - 160, lines, 9):
        assert interrupts.interrupted(user, kind, at)


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
