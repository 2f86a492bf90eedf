"""How far each part has come, stored after every case, and the page of the counts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from braintrace.files import write_whole

ROOT = Path(__file__).parent.parent
OUT = ROOT / 'out'
FILE = OUT / 'torture.json'
PAGE = ROOT / 'docs' / 'reliability.md'

SETTINGS = {
    # Small models: compile fast rather than well. Children must compile in the same
    # way, or rounding differs.
    'jax_disable_most_optimizations': True,
    # Not that of the tests: a process that is killed may leave part of a program in it.
    'jax_compilation_cache_dir': str(ROOT / '.cache' / 'torture'),
    'jax_persistent_cache_min_compile_time_secs': 0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
}
"""Of JAX, in this process and in its children; programs are compiled once."""

HEAD = """# Reliability

<!-- made by `make torture ARGS=--write-page` from the last runs -->

This page says what happens when a training is killed, a disk is full, a file is damaged,
or a learner is used from several threads. `make torture` causes these faults on purpose
and checks the result. The table has the counts of the last runs, of a few minutes for each
part. `ARGS='--part kills --seed 0 --minutes 10 --resume'` continues a run. A case that
fails prints the command that runs it alone. The daily tests include a few cases of each
part except the command.

"""

TAIL = """
`make fuzz` is a check of its own: random step programs with complex and mixed types. The
gradient of one step must be that of `jax.grad`, D-RTRL the dense recursion in blocks of any
length, and each credit class what it says: `exact` is BPTT, `instantaneous` the sum of
one-step gradients, `none` zero. The last run, seeds 0 to 99, had 10,000 programs and no
failure.

## What must hold

Each case above checks one of these:

- **Kill and resume.** A training may be killed at any moment. It can then be resumed from
  its folder, or started again if nothing was written yet. The result is that of an
  uninterrupted run, bit for bit: weights, states, traces, optimiser, random numbers.
- **Damaged checkpoints.** A checkpoint has a checksum of its values. Loading gives the
  values that were written, or an error that says which folder to delete. After an error,
  the states of the learner are as before.
- **Full disks.** The training ends with the error of the file system. Earlier checkpoints
  are kept, and the training can be resumed when there is space.
- **Threads.** Calls of the learners of one model wait for each other. Learners of
  different models run at the same time. There is one exception: `brainstate.random` is one
  generator for all threads, so models that draw from it must not be compiled at the same
  time. Give each model a `brainstate.random.RandomState` of its own.
- **Processes.** A learner cannot be used after a fork; a call raises an error. Use
  `multiprocessing.get_context('spawn')`.
- **Long runs.** Steps add no memory and no compiled programs. Orbax keeps some 20 KB of
  memory for each checkpoint.
- **Interrupts.** After Ctrl-C in a call, weights, states and traces are all as before the
  call or all as after it. If Ctrl-C comes while a compiled program is running on carried
  traces, the traces start again from zero, and the states are as before.
"""


def random_of(part: str, seed: int, number: int) -> random.Random:
    """The random numbers of a case."""
    return random.Random(f'{part} {seed} {number}')


def stored() -> dict[str, dict[str, Any]]:
    """Everything so far, by part and seed."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


class Progress:
    """Counts of one part and seed."""

    def __init__(self, part: str, seed: int):
        self.part, self.seed = part, seed
        self._read(stored().get(part, {}).get(str(seed), {}))

    def _read(self, found: dict[str, Any]) -> None:
        self.next: int = found.get('next', 0)
        self.counts: dict[str, int] = found.get('counts', {})
        self.failures: list[dict] = found.get('failures', [])
        self.seconds: float = found.get('seconds', 0.0)
        self.note: str = found.get('note', '')

    def clear(self) -> None:
        """Start again."""
        self._read({})

    def add(self, outcome: str, error: str, seconds: float, note: str) -> None:
        """Count a case and store it; ``note``: what the part has measured so far."""
        self.note = note
        if error:
            self.failures.append({'case': self.next, 'error': error[:2000]})
        self.counts[outcome] = self.counts.get(outcome, 0) + 1
        self.next += 1
        self.seconds += seconds
        every = stored()
        every.setdefault(self.part, {})[str(self.seed)] = {
            'next': self.next,
            'counts': self.counts,
            'failures': self.failures,
            'seconds': round(self.seconds, 1),
            'note': self.note,
        }
        FILE.parent.mkdir(exist_ok=True)
        write_whole(FILE, json.dumps(every, indent=1) + '\n')

    def text(self, cases: int) -> str:
        """One line."""
        return (
            f'{self.part}, seed {self.seed}: {self.next} of {cases} cases, '
            f'{self.seconds:.0f} s: {in_words(self.counts)}. {self.note}'
        )


def in_words(counts: dict[str, int]) -> str:
    """Outcomes, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda pair: -pair[1])
    return '; '.join(f'{number} {outcome}' for outcome, number in ordered)


def page(parts: list[tuple[str, Any]]) -> None:
    """Write the table."""
    found = stored()
    rows = [
        '| part | seeds | cases | failed | minutes | outcomes |',
        '| --- | --- | --- | --- | --- | --- |',
    ]
    for name, part in parts:
        runs = found.get(name, {})
        counts: dict[str, int] = {}
        for run in runs.values():
            for outcome, number in run['counts'].items():
                counts[outcome] = counts.get(outcome, 0) + number
        cases = sum(counts.values())
        failed = counts.pop('failed', 0)
        minutes = sum(run['seconds'] for run in runs.values()) / 60
        seeds = ', '.join(sorted(runs, key=int))
        notes = [run['note'] for run in runs.values() if run.get('note')]
        rows.append(
            f'| **{name}**: {part.TITLE} | {seeds} | {cases:,} | {failed} '
            f'| {minutes:.1f} | {". ".join([in_words(counts), *notes])} |'
        )
    PAGE.write_text(HEAD + '\n'.join(rows) + '\n' + TAIL)
    print(f'{PAGE.relative_to(ROOT)} written')
