"""Record the reference gradients, or compare with them (`tests/reference.py`).

    make reference                                  record all; print what changed
    make reference ARGS=--check                     compare all; write nothing
    make reference ARGS='--check --part 3/12'       one part of twelve
    make reference ARGS='--check --minutes 10 --resume'
    make reference ARGS="--check --only 'lstm*' --rule d_rtrl"

Results are kept in `.cache/reference` until code that they depend on changes; with
`--resume` they are not computed again, so a check goes on where it was stopped, and
what several processes checked with `--part` is recorded by one with `--resume`.

The exit code is 1 if a check finds differences, and 3 if time ended before all was run.
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import hashlib
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

# Most of the time goes into compiling programs that run once: kernels without fusion
# take half as long to compile.
os.environ['XLA_FLAGS'] = ' '.join(
    [os.environ.get('XLA_FLAGS', ''), '--xla_cpu_use_fusion_emitters=false']
)

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / 'tests'))

import reference  # noqa: E402
from reference import Change, Entry, Pair, Record  # noqa: E402

CACHE = ROOT / '.cache' / 'reference'
CLEAR = 25  # pairs after which compiled programs are dropped, to bound memory


def fingerprint() -> str:
    """A checksum of all that numbers depend on."""
    files = [*ROOT.glob('src/**/*.py'), *ROOT.glob('tests/zoo/*.py')]
    files += ROOT.glob('tests/reference*.py')
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


class Results:
    """Entries measured with the code as it is, in a file of their own for each process
    that runs a part."""

    def __init__(self, part: str, resume: bool):
        self.folder = CACHE / fingerprint()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = self.folder / f'{part.replace("/", "-of-")}.jsonl'
        self.known: dict[tuple[str, str], Entry] = {}
        self.seconds: dict[tuple[str, str], float] = {}
        for file in sorted(self.folder.glob('*.jsonl')) if resume else ():
            for line in file.read_text().splitlines():
                self._take(json.loads(line))

    def _take(self, row: dict) -> None:
        key = row['model'], row['rule']
        ways = {
            way: x if isinstance(x, str) else {n: np.array(v) for n, v in x.items()}
            for way, x in row['ways'].items()
        }
        self.known[key] = Entry(row['labels'], ways)
        self.seconds[key] = row['seconds']

    def add(self, pair: Pair, entry: Entry, seconds: float) -> None:
        listed = {
            way: x if isinstance(x, str) else {n: v.tolist() for n, v in x.items()}
            for way, x in entry.ways.items()
        }
        row = {'model': pair.model, 'rule': pair.rule, 'labels': entry.labels}
        row |= {'ways': listed, 'seconds': round(seconds, 2)}
        with self.file.open('a') as file:
            file.write(json.dumps(row) + '\n')
        self._take(row)


def matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, p.strip()) for p in patterns.split(','))


def selected(options: argparse.Namespace) -> list[Pair]:
    number, count = map(int, options.part.split('/'))
    if not 1 <= number <= count:
        sys.exit(f'--part {options.part}: the first number is from 1 to {count}')
    pairs = [
        pair
        for pair in reference.pairs()
        if matches(pair.model, options.only) and matches(pair.rule, options.rule)
    ]
    if not pairs:
        sys.exit(f'no model {options.only!r} with a rule {options.rule!r}')
    return pairs[number - 1 :: count]


def run(pairs: list[Pair], results: Results, minutes: float) -> bool:
    """Measure pairs that are not measured yet; whether all are."""
    start = shown = time.monotonic()
    left = [pair for pair in pairs if (pair.model, pair.rule) not in results.known]
    for i, pair in enumerate(left):
        before = time.monotonic()
        if before - start > 60 * minutes:
            print(f'{len(left) - i} of {len(pairs)} pairs are left: --resume goes on')
            return False
        entry = reference.measure(pair)
        results.add(pair, entry, time.monotonic() - before)
        if time.monotonic() - shown > 60:
            shown = time.monotonic()
            done, minute = i + 1, (shown - start) / 60
            print(f'  {done} of {len(left)} pairs in {minute:.0f} minutes', flush=True)
        if i % CLEAR == CLEAR - 1:
            jax.clear_caches()
    return True


# ---------------------------------------------------------------- what changed


def lines(found: list[Change]) -> Iterator[str]:
    """A diff to be read by a person: counts first, then model by model. Rules and ways
    in which the same parameters changed share a line."""
    for title, of in (
        ('by rule', lambda c: c.rule),
        ('by way', lambda c: c.way or '(labels)'),
    ):
        counts = Counter(of(c) for c in found).most_common()
        yield f'{title}: ' + ', '.join(f'{name} {count}' for name, count in counts)
    worst = lambda changes: max(c.distance for c in changes)
    by_model = _grouped(found, lambda c: c.model)
    order = sorted(by_model.items(), key=lambda item: (-worst(item[1]), item[0]))
    for model, changes in order:
        yield ''
        yield model
        by_text = _grouped(
            [c for c in changes if not np.isfinite(c.distance)],
            lambda c: (c.name, c.text),
        )
        for (name, text), same in by_text.items():
            where = _places(same)
            yield f'  {name + ": " if name else ""}{text}   [{where}]'
        numbers = [c for c in changes if np.isfinite(c.distance)]
        of_run = _grouped(numbers, lambda c: (c.rule, c.way))
        shown = {
            run: tuple((c.name, f'{c.distance:.0e}') for c in same)
            for run, same in of_run.items()
        }
        for what in dict.fromkeys(shown.values()):
            same = [c for run, x in shown.items() if x == what for c in of_run[run]]
            largest = max(same, key=lambda c: c.distance)
            parameters = ', '.join(f'{name} {size}' for name, size in what)
            yield f'  {parameters}   [{_places(same)}]'
            yield f'    largest: {largest.name} {largest.text}'


def _grouped(changes: Iterable[Change], key) -> dict:
    groups: dict = {}
    for change in changes:
        groups.setdefault(key(change), []).append(change)
    return groups


def _places(changes: list[Change]) -> str:
    ways = _grouped(changes, lambda c: c.rule)
    texts = []
    for rule, same in ways.items():
        names = dict.fromkeys(c.way for c in same if c.way)
        texts.append(f'{rule}: {", ".join(names)}' if names else rule)
    return '; '.join(texts)


# ---------------------------------------------------------------- the command


def compared(
    pairs: list[Pair], results: Results, record: Record, whole: bool
) -> list[Change]:
    found = []
    for pair in pairs:
        entry = results.known.get((pair.model, pair.rule))
        if entry is not None:
            old = record.get((pair.model, pair.rule))
            found += reference.changes(pair, entry, old)
    if whole:
        for model, rule in record.keys() - {(p.model, p.rule) for p in pairs}:
            found.append(
                Change(model, rule, '', '', float('inf'), 'is no pair any more')
            )
    return found


def write(pairs: list[Pair], results: Results, whole: bool) -> None:
    """Put new entries in place of recorded ones; the others stay."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / 'lock').open('w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = reference.load()
        keys = {(pair.model, pair.rule) for pair in pairs}
        if whole:
            record = {key: entry for key, entry in record.items() if key in keys}
        for pair in pairs:
            key = pair.model, pair.rule
            if key in results.known:
                new = results.known[key]
                record[key] = reference.merged(pair, new, record.get(key))
        reference.save(record)
    size = reference.FILE.stat().st_size / 2**20
    print(f'{reference.FILE.relative_to(ROOT)}: {len(record)} pairs, {size:.1f} MB')


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--check', action='store_true', help='compare, write nothing')
    parser.add_argument('--part', default='1/1', help='3/12: the third of twelve parts')
    parser.add_argument('--minutes', type=float, default=float('inf'))
    parser.add_argument('--resume', action='store_true', help='keep earlier results')
    parser.add_argument('--only', default='*', help='models: lstm*,conv1d')
    parser.add_argument('--rule', default='*', help='rules: d_rtrl,eprop*')
    parser.add_argument('--errors', action='store_true', help='list runs that fail')
    options = parser.parse_args()
    warnings.simplefilter('ignore')
    jax.config.update('jax_disable_most_optimizations', True)
    pairs, results = selected(options), Results(options.part, options.resume)
    runs = sum(len(pair.ways) for pair in pairs)
    print(f'{len(pairs)} pairs of a model and a rule, {runs} runs', flush=True)
    complete = run(pairs, results, options.minutes)
    whole = (options.only, options.rule, options.part) == ('*', '*', '1/1')
    record = reference.load()
    found = compared(pairs, results, record, whole and complete)
    done = [pair for pair in pairs if (pair.model, pair.rule) in results.known]
    seconds = sum(results.seconds[pair.model, pair.rule] for pair in done)
    new = [c for c in found if c.text == 'not recorded yet']
    changed = [c for c in found if c.text != 'not recorded yet']
    errors = Counter(
        (pair.rule, way, result)
        for pair in done
        for way, result in results.known[pair.model, pair.rule].ways.items()
        if isinstance(result, str)
    )
    print(f'{len(done)} pairs measured in {seconds / 60:.1f} minutes')
    print(f'{errors.total()} runs end in an error')
    for (rule, way, error), count in sorted(errors.items()) if options.errors else ():
        print(f'  {rule}, {way}: {error} {count}')
    print(f'{len(new)} not recorded yet, {len(changed)} changes')
    for line in lines(changed) if changed else ():
        print(line)
    if not options.check:
        write(done, results, whole and complete)
        return 0
    return 1 if found else 0 if complete else 3


if __name__ == '__main__':
    sys.exit(main())
