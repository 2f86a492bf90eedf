"""The arena: a recurrent spiking layer in five libraries, and NEST's e-prop task.

    python benchmarks/arena/run.py                       all, about 15 minutes
    python benchmarks/arena/run.py --cores 1 --size 512  a part, added to the others
    python benchmarks/arena/run.py --write               the tables and the figure only

Every library runs in a process of its own, one after the other. Results are kept in
results.json, from which report.py writes the tables and the figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = HERE / 'results.json'
ARENA = ROOT / '.venv-arena' / 'bin' / 'python'
PARTS = ('times', 'memory')
MALLOC = {'MALLOC_ARENA_MAX': '1', 'MALLOC_MMAP_THRESHOLD_': str(2**18)}
"""glibc returns freed memory to the system."""

sys.path.insert(0, str(HERE))

import report  # noqa: E402
import worker  # noqa: E402


def last_line(command: list[str], cores: str, **more: str) -> dict:
    """The JSON that a process prints last."""
    env = {**os.environ, 'JAX_PLATFORMS': 'cpu', **more}
    if cores == '1':
        env['OMP_NUM_THREADS'] = '1'
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f'{" ".join(command)} failed:\n{done.stderr[-2000:]}')
    return json.loads(done.stdout.splitlines()[-1])


def layer(library: str, size: str, cores: str, parts: list[str]) -> dict:
    """One library, in the environment that has it."""
    python = str(ARENA) if library in worker.TORCH else sys.executable
    found = {}
    for what in parts:
        if what == 'times' or cores == '1':
            command = [python, str(HERE / 'worker.py'), what, library, size, cores]
            found |= last_line(command, cores, **(MALLOC if what == 'memory' else {}))
    return found


def sine(library: str, cores: str) -> dict:
    """NEST's e-prop regression task, the sine wave, by NEST or by this library."""
    script = str(ROOT / 'scripts' / 'eprop_in_nest.py')
    by = (
        [str(ARENA), script, '--simulate']
        if library == 'NEST'
        else [sys.executable, script, '--ours']
    )
    return last_line([*by, 'regression', '--cores', cores], cores)


def rows(options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    """What is measured, by key."""
    for cores in options.cores:
        for size in options.size:
            for library in report.EPROP if size == 'e-prop' else worker.LIBRARIES:
                if options.library and library not in options.library:
                    continue
                if size == 'e-prop':
                    row = sine(library, cores)
                else:
                    row = layer(library, size, cores, options.part)
                yield f'{size}/{cores}/{library}', row


def machine() -> str:
    """The processor, the number of cores and the day."""
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
        name = next(x.split(':')[1].strip() for x in lines if 'model name' in x)
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f'{name}, {os.cpu_count()} cores, {datetime.now(UTC).date()}'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = [*worker.SIZES, 'e-prop']
    names = [*worker.LIBRARIES, *report.EPROP]
    parser.add_argument(
        '--cores', nargs='+', choices=report.CORES, default=[*report.CORES]
    )
    parser.add_argument(
        '--size', nargs='+', choices=sizes, default=['512', '256', 'e-prop']
    )
    parser.add_argument('--library', nargs='+', choices=names, default=[])
    parser.add_argument('--part', nargs='+', choices=PARTS, default=[*PARTS])
    parser.add_argument('--write', action='store_true', help='measure nothing')
    options = parser.parse_args()
    if not options.write:
        for key, row in rows(options):
            print(f'{key:40} {report.in_short(row)}', flush=True)
            if 'tiny' not in key:
                keep(key, row)
    if options.size != ['tiny']:
        report.write(kept())


def kept() -> dict:
    """What has been measured so far."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def keep(key: str, row: dict) -> None:
    """Add a measurement to those that are kept."""
    results = kept() | {'machine': machine()}
    results[key] = results.get(key, {}) | row
    RESULTS.write_text(json.dumps(results, indent=1) + '\n')


if __name__ == '__main__':
    main()
