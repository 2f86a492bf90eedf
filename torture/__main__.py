"""Run parts of the reliability suite.

python -m torture                                   every part, ten minutes each
python -m torture --part kills --seed 3 --minutes 10 --resume
python -m torture --part kills --seed 3 --case 17   one case alone
python -m torture --write-page                      docs/reliability.md
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator

import jax

from .progress import SETTINGS, Progress, page

PARTS = (
    'snapshots',
    'kills',
    'command',
    'disks',
    'damage',
    'records',
    'random_models',
    'threads',
    'processes',
    'interrupts',
    'soak',
    'export',
)
"""The files of this folder that hold cases, in the order of the page."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what is written to stderr, by other threads and by C++ too, for the case
    that something fails."""
    sys.stderr.flush()
    screen = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        except BaseException:
            file.seek(0)
            said = file.read().decode(errors='replace')
            print(said[-2000:], flush=True)
            raise
        finally:
            sys.stderr.flush()
            os.dup2(screen, 2)
            os.close(screen)


def run_part(name: str, options: argparse.Namespace) -> bool:
    """Run cases until time is over or all are done; whether none failed."""
    part = importlib.import_module(f'torture.{name}')
    progress = Progress(name, options.seed)
    if not options.resume:
        progress.clear()
    last = part.CASES if options.cases is None else progress.next + options.cases
    start = time.monotonic()
    print(f'{name}, seed {options.seed}: {part.TITLE}', flush=True)
    shown = 0.0
    while progress.next < min(last, part.CASES):
        before = time.monotonic()
        if before - start > 60 * options.minutes:
            break
        number = progress.next
        try:
            with quiet():
                outcome, error = part.case(options.seed, number), ''
        except Exception as failure:
            traceback.print_exc()
            again = f'--part {name} --seed {options.seed} --case {number}'
            print(f"failed; alone: make torture ARGS='{again}'", flush=True)
            outcome = 'failed'
            error = f'{type(failure).__name__}: {failure}'
        note = part.note(options.seed) if hasattr(part, 'note') else ''
        progress.add(outcome, error, time.monotonic() - before, note)
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(progress.text(part.CASES), flush=True)
    print(progress.text(part.CASES), flush=True)
    return not progress.failures


def main() -> int:
    """Parse, run, show."""
    parser = argparse.ArgumentParser(
        'torture', description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument('--part', action='append', choices=PARTS)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--minutes', type=float, default=10, help='of each part')
    parser.add_argument('--cases', type=int, help='at most so many in this run')
    parser.add_argument('--case', type=int, help='this one alone; nothing is stored')
    parser.add_argument('--resume', action='store_true', help='go on where it ended')
    parser.add_argument('--write-page', action='store_true')
    options = parser.parse_args()
    for name, value in SETTINGS.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for children
    if options.write_page:
        page([(name, importlib.import_module(f'torture.{name}')) for name in PARTS])
        return 0
    if options.case is not None:
        (name,) = options.part
        part = importlib.import_module(f'torture.{name}')
        print(part.case(options.seed, options.case))
        return 0
    passed = [run_part(name, options) for name in options.part or PARTS]
    return 0 if all(passed) else 1


if __name__ == '__main__':
    sys.exit(main())
