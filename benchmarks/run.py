"""Time and memory beside the published package, backpropagation through time and the forward pass.

    make bench
    make bench ARGS='--only 1,2 --rounds 7'
    make bench ARGS='--only streams'

The published package is installed into an environment of its own and called by its public interface. Both sides run
the same models, weights, data and losses, in turn, on one core of a Linux machine. The table goes to the screen,
everything measured to ``results.json``, the table to ``results.txt`` and a picture to ``results.svg``. Streams and
carried traces have a table of their own, by ``streams.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import report
from models import Workload, workloads

HERE = Path(__file__).resolve().parent
PEER = HERE.parent / '.venv-peer'
PUBLISHED = 'braintrace==0.2.6'
SHARED = ('jax', 'jaxlib', 'numpy', 'brainstate', 'braintools', 'brainevent', 'numba')
"""Packages that both sides have in the same version."""
BASELINES = ('forward', 'bptt')
AGREEMENT = 1e-3
SET_UPS = 3
"""How often compile time and peak memory are measured."""


def peer_python() -> str:
    """The interpreter of the published package's environment, which is made if it is missing or out of date."""
    wanted = ' '.join([PUBLISHED, *(f'{name}=={version(name)}' for name in SHARED)])
    ready, python = PEER / 'ready', PEER / 'bin' / 'python'
    if not ready.exists() or ready.read_text() != wanted:
        print(f'installing {PUBLISHED} into {PEER.name}', flush=True)
        subprocess.run([sys.executable, '-m', 'venv', '--clear', str(PEER)], check=True)
        subprocess.run(
            [str(python), '-m', 'pip', 'install', '--quiet', *wanted.split()],
            check=True,
        )
        ready.write_text(wanted)
    return str(python)


class Side:
    """A worker process; called with a command, it gives the answer."""

    def __init__(self, name: str, python: str):
        threads = dict.fromkeys(
            ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'NUMBA_NUM_THREADS'), '1'
        )
        flags = {
            'JAX_PLATFORMS': 'cpu',
            'XLA_FLAGS': '--xla_cpu_multi_thread_eigen=false',
        }
        one_heap = {
            'MALLOC_ARENA_MAX': '1'
        }  # the only one that gives memory back when asked, see Run.peak
        environment = {**os.environ, **threads, **flags, **one_heap}
        if name == 'peer':
            environment.pop('PYTHONPATH', None)
        core = max(os.sched_getaffinity(0))
        self.name = name
        self._process = subprocess.Popen(
            [python, str(HERE / 'worker.py'), name, str(core)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def __call__(self, do: str, **arguments: Any) -> dict:
        try:
            self._process.stdin.write(json.dumps({'do': do, **arguments}) + '\n')
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ''
        return (
            json.loads(line)
            if line
            else {'error': f'the process ended while asked to {do}'}
        )

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def measure(
    index: int, workload: Workload, sides: dict[str, Side], rounds: int, quick: bool
) -> dict:
    """Everything about one workload."""
    started = time.perf_counter()
    print(f'[{workload.key}] {workload.title}: set up', end='', flush=True)
    for side in sides.values():
        if error := side('open', index=index, quick=quick).get('error'):
            sys.exit(
                f'\n{side.name}: {error}\nworker.py {side.name} 0, run by hand in its environment, tells why'
            )
    plan = [('ours', v) for v in (*BASELINES, *workload.variants)]
    if 'peer' in sides:
        plan += [('peer', v) for v in workload.peer]
    repeats = 1 if quick else SET_UPS
    runs: dict[str, dict[str, dict]] = {name: {} for name in sides}
    for name, variant in plan:
        print(f' {name[0]}:{variant}', end='', flush=True)
        steps = workload.steps_of(name, variant)
        found = sides[name]('setup', variant=variant, steps=steps, repeats=repeats)
        if 'error' not in found:
            found |= sides[name]('peak', variant=variant, repeats=repeats)
        runs[name][variant] = {'steps': steps, 'seconds': [], **found}
    print('; rounds', end='', flush=True)
    for i in range(rounds):
        print(f' {i + 1}', end='', flush=True)
        for name, variant in plan:
            run = runs[name][variant]
            if 'error' not in run:
                answer = sides[name]('run', variant=variant)
                if 'error' in answer:
                    run['error'] = answer['error']
                else:
                    run['seconds'].append(
                        answer['seconds'] * workload.steps / run['steps']
                    )
    gradients = agreement(workload, sides, runs) if 'peer' in sides else {}
    print(f'; {time.perf_counter() - started:.0f} s', flush=True)
    return {
        'key': workload.key,
        'title': workload.title,
        'steps': workload.steps,
        'batch': workload.batch,
        'sizes': workload.sizes,
        **runs,
        'gradients': gradients,
    }


def agreement(
    workload: Workload, sides: dict[str, Side], runs: dict
) -> dict[str, dict]:
    """Our gradients beside the published package's, by variant and parameter, over the same number of steps."""
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for variant in workload.variants:
            other = counterpart(variant)
            if (
                variant == 'online'
                or 'seconds' not in runs['peer'].get(other, {})
                or 'error' in runs['peer'][other]
            ):
                continue
            files = {
                name: str(Path(folder) / f'{name}-{variant}.npz') for name in sides
            }
            steps = runs['peer'][other]['steps']
            if runs['ours'][variant]['steps'] != steps:
                sides['ours']('setup', variant=variant, steps=steps)
            answers = [sides['ours']('gradients', variant=variant, file=files['ours'])]
            answers.append(
                sides['peer']('gradients', variant=other, file=files['peer'])
            )
            if any('error' in answer for answer in answers):
                continue
            with np.load(files['ours']) as mine, np.load(files['peer']) as theirs:
                found[variant] = {
                    name: compare(workload, variant, name, mine[name], theirs[name])
                    for name in mine
                }
    return found


def compare(
    workload: Workload, variant: str, name: str, mine: np.ndarray, theirs: np.ndarray
) -> dict:
    """Relative difference and ratio of norms of a gradient; the reason if the published package is known wrong."""
    known = dict(workload.differs)
    if variant == 'pp_prop':
        known['*.bias'] = 'biases shrink'
    size = max(float(np.linalg.norm(mine)), 1e-30)
    error = float(np.linalg.norm(mine - theirs)) / size
    row = {
        'error': error,
        'ratio': float(np.linalg.norm(theirs)) / size,
        'agree': error < AGREEMENT,
    }
    reason = next(
        (text for pattern, text in known.items() if fnmatch.fnmatch(name, pattern)),
        None,
    )
    return row if row['agree'] or reason is None else {**row, 'reason': reason}


def counterpart(variant: str) -> str:
    """What the published package runs of the same rule; it always carries its trace."""
    return 'd_rtrl_carried' if variant == 'd_rtrl_fresh' else variant


def environment() -> dict:
    """Where the numbers come from."""
    lines = (
        Path('/proc/cpuinfo').read_text().splitlines()
        if Path('/proc/cpuinfo').exists()
        else []
    )
    names = [
        line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')
    ]
    return {
        'processor': names[0] if names else platform.processor(),
        'cores': 1,
        'python': platform.python_version(),
        'versions': {name: version(name) for name in SHARED},
        'published': PUBLISHED,
    }


def earlier(file: Path) -> dict[str, dict]:
    """Workloads measured before, by title; none if anything about the environment has changed."""
    content = json.loads(file.read_text()) if file.exists() else {'environment': None}
    return (
        {w['title']: w for w in content['workloads']}
        if content['environment'] == environment()
        else {}
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        '--only',
        default='',
        help='numbers of workloads, such as 1,2, or streams; results of others are kept',
    )
    parser.add_argument('--rounds', type=int, default=5, help='calls of each variant')
    parser.add_argument(
        '--quick',
        action='store_true',
        help='tiny sizes, to see that the benchmark works',
    )
    parser.add_argument(
        '--no-peer', action='store_true', help='without the published package'
    )
    parser.add_argument(
        '--out', type=Path, default=HERE, help='folder of results.json and results.svg'
    )
    options = parser.parse_args()
    chosen = set(filter(None, options.only.split(',')))
    if not options.quick and (not chosen or 'streams' in chosen):
        subprocess.run([sys.executable, str(HERE / 'streams.py')], check=True)
        if chosen == {'streams'}:
            return 0
        chosen -= {'streams'}
    pythons = {'ours': sys.executable} | (
        {} if options.no_peer else {'peer': peer_python()}
    )
    options.out.mkdir(parents=True, exist_ok=True)
    every = workloads(options.quick)
    if chosen - {w.key for w in every}:
        parser.error(f'no workload has the number {options.only!r}')
    known = (
        earlier(options.out / 'results.json') if chosen and not options.quick else {}
    )
    for index, workload in enumerate(every):
        if chosen and workload.key not in chosen:
            continue
        sides = {name: Side(name, python) for name, python in pythons.items()}
        known[workload.title] = measure(
            index, workload, sides, options.rounds, options.quick
        )
        for side in sides.values():
            side.close()
        measured = [known[w.title] for w in every if w.title in known]
        rows = report.rows(measured)
        checks = report.checks(measured, rows)
        content = {
            'environment': environment(),
            'workloads': measured,
            'rows': rows,
            'checks': checks,
        }
        (options.out / 'results.json').write_text(json.dumps(content, indent=1) + '\n')
    judged = not options.quick
    text = f'{report.table(rows, judged)}\n{report.summary(measured, checks, judged)}'
    print(f'\n{text}')
    (options.out / 'results.txt').write_text(text + '\n')
    report.draw(measured, options.out / 'results.svg')
    print(f'written: results.json, results.txt and results.svg in {options.out.name}')
    return int(bool(report.disagreements(measured)))


if __name__ == '__main__':
    sys.exit(main())
