"""Write ``docs/versions.md``: smoke tests with the lowest and the newest versions.

The lowest versions are the lower bounds of pyproject.toml, on the oldest Python; the
newest are what pip finds, on every Python that pyproject.toml names. Environments are
kept under ``.cache/versions``. A Python that is not on this machine is only resolved.

python scripts/versions.py [--python PATH ...] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
CACHE = ROOT / '.cache' / 'versions'
PAGE = ROOT / 'docs' / 'versions.md'
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
EXTRA = 'test'
"""Holds every other extra but those of the docs, of development, of agents and of
hardware."""

MODELS = ('gru_batched', 'lif_recurrent', 'conv1d', 'sparse_recurrent')
"""Models of the zoo by which every rule is run."""

SMOKE = {
    'compilation': [
        'tests/graph/test_compiler.py',
        'tests/leaves/test_page.py::test_page[gru]',
        'tests/leaves/test_page.py::test_page[loop]',
    ],
    'gradients against an oracle': [
        'tests/gradients/test_table.py::test_row[gru-d_rtrl-fresh]',
        'tests/gradients/test_table.py::test_row[adaptive-d_rtrl-blocks of 4]',
        'tests/gradients/test_table.py::test_row[recurrent_convolution-d_rtrl-carried]',
        'tests/gradients/test_table.py::test_row[adaptive-pp_prop-fresh]',
        'tests/gradients/test_table.py::test_row[leaky-d_rtrl-online]',
        'tests/leaves/test_ops.py',
    ],
    'checkpoints and training': [
        'tests/leaves/test_training.py::test_resumed_training_is_the_uninterrupted_one',
        'tests/leaves/test_training.py::test_checkpoints_hold_traces_and_random_numbers_and_are_whole_or_refused',
    ],
    'command line and plots': [
        'tests/leaves/test_cli.py::test_training_writes_all_and_goes_on_exactly',
        'tests/leaves/test_cli.py::test_checking_and_timing',
    ],
    'Flax': [
        'tests/learner/test_flax.py::test_stock_cells_give_the_gradient_of_bptt[gru]',
        'tests/learner/test_flax.py::test_training_as_in_flax',
    ],
    'Equinox': [
        'tests/learner/test_equinox.py::test_stock_cells_give_the_gradient_of_bptt[gru]',
        'tests/learner/test_equinox.py::test_training_as_in_equinox',
    ],
    'neurons of brainpy.state': [
        'tests/gradients/test_engine.py::test_one_step_is_the_plain_gradient[brainpy_if]',
        'tests/gradients/test_engine.py::test_the_rule_is_the_dense_recursion[brainpy_if-local]',
    ],
    'recorded data': [
        'tests/leaves/test_tasks.py::test_digits_are_read_pixel_by_pixel_and_a_fifth_is_held_out',
        'tests/leaves/test_tasks.py::test_spoken_digits_are_read_from_their_file',
    ],
    'precision': ['tests/learner/test_precision.py'],
    'NIR, safetensors and TensorBoard': [
        'tests/leaves/test_nir.py',
        'tests/learner/test_saving.py::test_weights_in_a_file_of_safetensors',
        'tests/leaves/test_data_and_loggers.py::test_scalars_for_tensorboard',
    ],
}
"""Tests by what they are about; the rules are added below."""

RULES = 'every rule on a GRU, LIF, convolutional and sparse network'

HEAD = """# Versions

<!-- made by `make versions` -->

This page lists the versions of Python and of other packages with which this package was
tested. *Lowest* has the oldest versions that `pyproject.toml` allows, on the oldest Python.
*Newest* has the versions that pip installs on each Python. The last rows have the numbers
of tests: passed / run.

"""

TAIL = """
Update packages together. For example, an old Flax or Equinox cannot be imported with a much
newer JAX.

Importing braintrace does not change `jax_enable_x64`. brainstate sets it to its own default
when it is imported, and braintrace restores your value. To create brainstate parameters in
double precision, use `brainstate.environ.set(precision=64)`.
"""


# ---------------------------------------------------------------- the project


def requirements(extra: str = EXTRA) -> list[Requirement]:
    """What an installation with an extra needs, extras of extras included."""
    own = [Requirement(line) for line in PROJECT['dependencies']]
    todo, seen = [extra], {extra}
    while todo:
        for line in PROJECT['optional-dependencies'][todo.pop()]:
            requirement = Requirement(line)
            if requirement.name != PROJECT['name']:
                own.append(requirement)
                continue
            todo += sorted(requirement.extras - seen)
            seen |= requirement.extras
    return own


def lower_bound(requirement: Requirement) -> str:
    """The version behind ``>=``."""
    (bound,) = (s.version for s in requirement.specifier if s.operator == '>=')
    return bound


def pythons() -> list[str]:
    """Versions of Python that the classifiers name, the oldest first."""
    found = re.findall(r'Python :: (3\.\d+)', '\n'.join(PROJECT['classifiers']))
    return sorted(found, key=lambda v: int(v.partition('.')[2]))


# ---------------------------------------------------------------- environments


@functools.cache
def version_of(python: str) -> str:
    """``3.12`` of an interpreter; nothing if it does not run."""
    code = 'import sys; print("%d.%d" % sys.version_info[:2])'
    done = subprocess.run([python, '-c', code], capture_output=True, text=True)
    return done.stdout.strip()


def interpreter(version: str, given: list[str]) -> str | None:
    """An interpreter of this version: one that was given, on the path, or of pyenv."""
    pyenv = Path(os.environ.get('PYENV_ROOT', Path.home() / '.pyenv'))
    found = [*given, sys.executable, which(f'python{version}')]
    found += sorted(map(str, pyenv.glob(f'versions/{version}.*/bin/python')))
    return next((p for p in found if p and version_of(p) == version), None)


def pip(python: Path, *words: str) -> str:
    """Run pip of this interpreter for another one."""
    command = [sys.executable, '-m', 'pip', '--python', str(python), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


@dataclass
class Environment:
    """Where the tests are run, and what came of it."""

    kind: str  # lowest or newest
    python: str
    versions: dict[str, str] = field(default_factory=dict)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    seconds: float = 0.0
    note: str = ''

    @property
    def name(self) -> str:
        return f'{self.kind}-{self.python}'

    @property
    def executable(self) -> Path:
        return CACHE / self.name / 'bin' / 'python'

    @property
    def passed(self) -> bool:
        complete = all(good == run > 0 for good, run in self.counts.values())
        return complete and not self.note

    def install(self, interpreter: str) -> None:
        """Make the environment, or bring it up to date."""
        if not self.executable.exists():
            folder = CACHE / self.name
            command = [interpreter, '-m', 'venv', '--without-pip', str(folder)]
            subprocess.run(command, check=True)
        words = ['--quiet', '--editable', f'.[{EXTRA}]']
        if self.kind == 'lowest':
            words += [f'{r.name}=={lower_bound(r)}' for r in requirements()]
        else:
            words += ['--upgrade', '--upgrade-strategy', 'eager']
        pip(self.executable, 'install', *words)
        listed = json.loads(pip(self.executable, 'list', '--format', 'json'))
        installed = {canonical(p['name']): p['version'] for p in listed}
        self.versions = {r.name: installed[canonical(r.name)] for r in requirements()}

    def test(self) -> None:
        """Run the smoke tests."""
        start = time.monotonic()
        models = ' or '.join(f'[{name}-' for name in MODELS)
        run = self._run(['tests/gradients/test_conformance.py', '-k', models])
        run += self._run([test for tests in SMOKE.values() for test in tests])
        for title, tests in {
            RULES: ['tests/gradients/test_conformance.py'],
            **SMOKE,
        }.items():
            modules = {Path(test.partition('::')[0]).stem for test in tests}
            mine = [passed for module, passed in run if module in modules]
            self.counts[title] = (sum(mine), len(mine))
        self.seconds = time.monotonic() - start

    def _run(self, words: list[str]) -> list[tuple[str, bool]]:
        """For each test the name of its file, and whether it passed."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / 'report.xml'
            # Warnings are about packages of different age, not about this one.
            options = ['-o', 'filterwarnings=', '--disable-warnings', '--tb=short']
            command = [self.executable, '-m', 'pytest', *options, *words]
            subprocess.run(
                [*command, f'--junit-xml={report}'],
                cwd=ROOT,
                env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'ZOO': 'all'},
                stdout=sys.stderr,
            )
            if not report.exists():  # pytest itself ended early
                return []
            cases = ElementTree.parse(report).iter('testcase')
        # A test that was skipped, failed or could not run has a child that says so.
        bad = ('failure', 'error', 'skipped')
        return [
            (
                # An error of collection names its module as the test.
                (case.get('classname') or case.get('name', '')).split('.')[-1],
                all(case.find(kind) is None for kind in bad),
            )
            for case in cases
        ]

    def resolve(self) -> None:
        """What pip would install on a Python that is not on this machine."""
        wanted = [str(r) for r in requirements()]
        with tempfile.TemporaryDirectory() as folder:
            words = ['--quiet', '--dry-run', '--report', '-', '--target', folder]
            words += ['--only-binary', ':all:', '--python-version', self.python]
            try:
                report = pip(Path(sys.executable), 'install', *words, *wanted)
            except RuntimeError as error:
                self.note = f'does not resolve: {last_line(str(error))}'
                return
        packages = [p['metadata'] for p in json.loads(report)['install']]
        installed = {canonical(p['name']): p['version'] for p in packages}
        self.versions = {r.name: installed[canonical(r.name)] for r in requirements()}
        self.note = 'resolves; not run'


def canonical(name: str) -> str:
    """A name as packages are compared by."""
    return re.sub(r'[-_.]+', '-', name).lower()


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((x for x in reversed(text.splitlines()) if x.strip()), '')


# ---------------------------------------------------------------- the table


def rows(found: list[Environment]) -> Iterator[list[str]]:
    """The table, row by row."""
    yield ['', *(f'{e.kind}, Python {e.python}' for e in found)]
    yield ['---'] * (len(found) + 1)
    for requirement in requirements():
        name = requirement.name
        yield [name, *(e.versions.get(name, '') for e in found)]
    for title in (RULES, *SMOKE):
        counts = (e.counts.get(title) for e in found)
        yield [title, *(f'{c[0]} / {c[1]}' if c else '' for c in counts)]
    yield ['result', *(verdict(e) for e in found)]


def verdict(environment: Environment) -> str:
    """The last row of a column."""
    return environment.note or ('passed' if environment.passed else '**failed**')


def table(found: list[Environment]) -> str:
    """The table in Markdown."""
    return '\n'.join('| ' + ' | '.join(row) + ' |' for row in rows(found)) + '\n'


def main() -> int:
    """Build, test, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--python', action='append', default=[], help='an interpreter')
    parser.add_argument('--only', action='append', default=[], help='lowest-3.11, ...')
    options = parser.parse_args()
    found = [Environment('lowest', pythons()[0])]
    found += [Environment('newest', version) for version in pythons()]
    found = [e for e in found if not options.only or e.name in options.only]
    for environment in found:
        executable = interpreter(environment.python, options.python)
        print(f'{environment.name}: {executable}', file=sys.stderr, flush=True)
        if executable is None:
            environment.resolve()
            continue
        try:
            environment.install(executable)
        except RuntimeError as error:
            environment.note = f'cannot be installed: {last_line(str(error))}'
            continue
        environment.test()
        print(f'{environment.seconds:.0f} s', file=sys.stderr)
    print(table(found))
    if not options.only:
        PAGE.write_text(HEAD + table(found) + TAIL)
    return 0 if all(e.passed or e.note.startswith('resolves') for e in found) else 1


if __name__ == '__main__':
    sys.exit(main())
