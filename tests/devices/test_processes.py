"""Trainings of several processes on this machine equal those of one."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TASK = ['copying', '--units', '8', '--batch', '8', '--save-every', '2']
TASK += ['--task-option', 'length=1', '--task-option', 'lag=2']
SETTINGS = """
import jax, sys
jax.config.update('jax_disable_most_optimizations', True)
from braintrace.cli import main
sys.exit(main())
"""


def started(*arguments):
    command = [sys.executable, '-c', SETTINGS, 'train', *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {'PYTHONPATH': str(ROOT / 'src'), 'JAX_PLATFORMS': 'cpu'},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port():
    with socket.socket() as found:
        found.bind(('localhost', 0))
        return found.getsockname()[1]


def together(count, *arguments):
    """All processes of one training."""
    where = ['--coordinator', f'localhost:{free_port()}', '--processes', str(count)]
    return [started(*arguments, *where, '--process', str(i)) for i in range(count)]


def finished(processes, code=0):
    """What each printed."""
    texts = [process.communicate(timeout=400)[0] for process in processes]
    for process, text in zip(processes, texts, strict=True):
        assert process.returncode == code, text[-3000:]
    return texts


def records(folder):
    lines = (folder / 'metrics.jsonl').read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [{k: v for k, v in r.items() if k != 'seconds'} for r in found]


def assert_same(mine, theirs):
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp('alone') / 'run'
    finished([started(*TASK, '--updates', '6', '--out', str(out))])
    return out


is_long = pytest.mark.skipif(
    os.environ.get('ZOO') != 'all', reason='`make zoo` runs it'
)


@pytest.mark.parametrize('count', [2, pytest.param(4, marks=is_long)])
def test_equal_to_one_process(alone, tmp_path, count):
    out = tmp_path / 'run'
    texts = finished(together(count, *TASK, '--updates', '6', '--out', str(out)))
    assert_same(records(out), records(alone))
    held_out = [json.loads((p / 'result.json').read_text()) for p in (alone, out)]
    assert held_out[0]['held_out'] == pytest.approx(held_out[1]['held_out'])
    # One of them shows progress and writes.
    assert sum('update 6/6' in text for text in texts) == 1
    assert (out / 'learning.png').exists()


@is_long
def test_a_process_that_dies_ends_the_others_and_one_goes_on(alone, tmp_path):
    out = tmp_path / 'run'
    first, second = together(2, *TASK, '--updates', '100000', '--out', str(out))
    end = time.monotonic() + 300
    while not (out / 'checkpoints' / '4').exists():
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)
    second.kill()
    second.communicate()
    (text,) = finished([first], code=1)
    assert 'a training of 2 processes' in text
    assert '--resume DIR' in text
    reached = max(
        int(p.name) for p in (out / 'checkpoints').iterdir() if p.name.isdigit()
    )
    goal = str(max(6, reached + 1))
    finished([started('--resume', str(out), '--updates', goal)])
    assert_same(records(out)[:6], records(alone))
    assert len(records(out)) == int(goal)


@pytest.mark.parametrize(
    ('arguments', 'told'),
    [
        (['--processes', '2'], 'without --coordinator, --process'),
        (
            ['--coordinator', 'localhost:1', '--processes', '2', '--process', '0'],
            'without --out',
        ),
    ],
)
def test_mistakes(arguments, told, capsys):
    from braintrace.cli import main

    assert main(['train', *TASK, *arguments]) == 2
    assert re.search(re.escape(told), capsys.readouterr().err)
