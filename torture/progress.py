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

This page says what happens if a training is killed, a disk is full, a file is damaged, or
a learner is used from several threads. [What must hold](#what-must-hold) lists what you can
rely on. `make torture` causes these faults on purpose and checks the result.

The table has the counts of the last runs, which took a few minutes for each part.
`make torture ARGS='--part kills --seed 0 --minutes 10 --resume'` continues the run of one
part. If a case fails, it prints the command that repeats it. The daily tests include a few
cases of each part except **command**.

"""

TAIL = """
`make fuzz` tests random step programs with complex and mixed types:

- The gradient of one step must be equal to `jax.grad`.
- The gradient of D-RTRL must be equal to the dense recursion, for blocks of any length.
- Each credit class must be right: `exact` is BPTT, `instantaneous` is the sum of one-step
  gradients, and `none` is zero.

The last run, with seeds 0 to 99, had 10,000 programs and no failure.

`make mutants` puts single faults into the solver, the lowering, the operations and the
rules: a sign, an index, a comparison, a dropped term. It runs the daily tests that evaluate
the changed expression, for each fault up to a time limit of 30 to 400 seconds. The last run
was on 2026-11-18 (`scripts/mutants.py --record`, then
`--resume --seconds 40 --without influence masking kernels link`, and `--again --seconds 400`
for half of what was left). Some tests of the learner, the budgets and the texts were not
recorded and so not run. It ran 274 of 334 faults,
on the code before read-outs, signals and uses of weights were written anew: those of the
kernels, masks, influences and links were left out, because their code was being replaced.
**Not found**: the tests that were run passed. **Not reached**: no recorded
test evaluates the expression.

| folder | changes | run | found | equivalent | not found | not reached |
| --- | --- | --- | --- | --- | --- | --- |
| solver | 75 | 58 | 45 | 1 | 12 | 0 |
| lowering | 73 | 60 | 47 | 1 | 12 | 0 |
| operations | 134 | 104 | 77 | 4 | 18 | 5 |
| rules | 52 | 52 | 49 | 0 | 3 | 0 |
| all | 334 | 274 | 218 | 6 | 45 | 5 |

Of the 268 faults that were run and are not equivalent, 19 % were not found. The goal is 3 %.

## What must hold

Each case above checks one of these:

- **Kill and resume.** A training may be killed at any moment. You can then resume it from
  its folder, or start it again if nothing was written yet. The result is the same as
  without the interruption, bit for bit: weights, states, traces, optimiser, random numbers.
- **Damaged checkpoints.** A checkpoint has a checksum of its values. Loading restores the
  saved values, or raises an error that says which folder to delete. An error does not
  change the learner.
- **Full disks.** The training ends with the error of the file system. Earlier checkpoints
  are kept. You can resume the training when there is space.
- **Threads.** If several learners use the same model, their calls wait for each other.
  Learners of different models run at the same time. There is one exception:
  `brainstate.random` is one generator for all threads, so do not compile models that draw
  from it at the same time. Use a separate `brainstate.random.RandomState` for each model.
- **Processes.** A learner cannot be used after a fork: a call raises an error. Use
  `multiprocessing.get_context('spawn')`.
- **Long runs.** Steps add no memory and no compiled programs. Orbax keeps some 20 KB of
  memory for each checkpoint.
- **Interrupts.** If Ctrl-C interrupts a call, weights, states, traces and optimiser are all
  those from before the call, or all those from after it. While a program that writes over
  the old arrays runs, Ctrl-C waits until the call has written its results. Compiling is
  interrupted at once. This holds for SIGINT: a handler that raises an exception for another
  signal is not delayed.
- **Errors of callbacks.** If a callback in the model or in `step_fn` raises an error, the call
  changes nothing. Programs with callbacks or other effects do not write over the old arrays,
  so they need more memory.
- **Ctrl-C twice in a training.** The training ends at once. A checkpoint that is being
  written is completed, and a training that is resumed in the same process waits for it.
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
