"""Small faults, put into the engine one at a time: does a test fail for each?

    python scripts/mutants.py                        all of them, for hours
    python scripts/mutants.py --part 1/10 --resume   a tenth, without what has run
    python scripts/mutants.py --only solver/block    those of files whose path has this
    python scripts/mutants.py --tests tests/graph    by these tests alone
    python scripts/mutants.py --list                 print the changes, run nothing
    python scripts/mutants.py --survivors            print what survived so far

A mutant is one change of an expression: a sign, an index, a comparison, a dropped term,
swapped operands, a removed call or keyword. The list is the same every time: of all
changes that are possible, each file gives its share, chosen by checksums of their texts.
A copy of ``src`` has the change, never the checkout.

A process imports JAX once and forks for each mutant before JAX starts any thread of its
own; the child imports the package from the copy and runs pytest. ``TESTS`` says which
tests belong to a file, those that find most faults in the least time first.

Results are lines of JSON in ``out/mutants.jsonl``. ``EQUIVALENT`` has the mutants that
no test can find, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import difflib
import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / 'src'
RESULTS = ROOT / 'out' / 'mutants.jsonl'
FOLDERS = ('solver', 'lowering', 'graph', 'operations', 'rules')
COUNT = 300

# ---------------------------------------------------------------- which tests

NUMBERS = [
    'gradients/test_table.py',
    'gradients/test_reference.py',
    'gradients/test_random_programs.py',
]
"""Tests of numbers that go through the whole engine."""

TESTS = {
    'solver/influence': ['gradients/test_rules.py', *NUMBERS],
    'solver/window': ['gradients/test_masking.py', 'gradients/test_rules.py', *NUMBERS],
    'solver/masking': ['gradients/test_masking.py'],
    'solver': [
        'unit/solver',
        'gradients/test_engine.py',
        *NUMBERS,
        'gradients/test_masking.py',
        'gradients/test_rules.py',
        'gradients/test_exactness.py',
    ],
    'lowering/link': ['gradients/test_readouts.py', 'gradients/test_golden.py'],
    'graph': [
        'graph/test_executor.py',
        'graph/test_interface.py',
        'graph/test_compiler.py',
    ],
    'lowering': [
        'unit/lowering',
        'gradients/test_engine.py',
        *NUMBERS,
        'gradients/test_cut_signals.py',
        'gradients/test_readouts.py',
        'gradients/test_loops.py',
        'gradients/test_exactness.py',
    ],
    'operations/kernels': [
        'kernels/test_dense_kernels.py',
        'kernels/test_sparse_kernels.py',
        'gradients/test_types.py',
    ],
    'operations/synapses': ['kernels/test_sparse_kernels.py'],
    'operations/sparse': ['kernels/test_sparse_kernels.py'],
    'operations': [
        'unit/operations/test_labels.py',
        'unit/operations/test_own_primitive.py',
        *NUMBERS,
        'gradients/test_pairs.py',
        'gradients/test_types.py',
        'gradients/test_exactness.py',
        'kernels/test_dense_kernels.py',
        'devices/test_devices.py',
    ],
    'rules': [
        'unit/rules',
        'gradients/test_rules.py',
        *NUMBERS,
        'gradients/test_conformance.py',
        'graph/test_interface.py',
    ],
    '': ['gradients/test_properties.py', 'learner/test_learner.py'],
}
"""By the beginning of a file's path: the tests of every entry that fits, the longest
first, each test once. Tests that do not exist are left out."""


def tests_of(file: str) -> list[str]:
    """Test files for a source file, in the order in which they run."""
    fits = sorted((k for k in TESTS if file.startswith(k)), key=len, reverse=True)
    named = dict.fromkeys(f'tests/{test}' for key in fits for test in TESTS[key])
    return [test for test in named if (ROOT / test).exists()]


EQUIVALENT: dict[str, str] = {}
"""Mutants that change nothing that a test can see: key and reason."""

# ---------------------------------------------------------------- changes


@dataclass(frozen=True)
class Mutant:
    """One change: in ``file``, the characters from ``start`` to ``end`` become
    ``text``."""

    file: str
    function: str
    kind: str
    line: int
    start: int
    end: int
    before: str
    text: str

    @property
    def key(self) -> str:
        """A name that stays when lines move."""
        what = f'{self.file} {self.function} {self.kind} {self.before} {self.text}'
        return f'{self.file}:{self.function}:{zlib.crc32(what.encode()):08x}'

    def of(self, source: str) -> str:
        """The changed source."""
        return source[: self.start] + self.text + source[self.end :]

    def diff(self) -> str:
        """The lines that change."""
        source = (SOURCE / 'braintrace' / self.file).read_text()
        lines = [text.splitlines() for text in (source, self.of(source))]
        found = difflib.unified_diff(*lines, lineterm='', n=0)
        return '\n'.join(x for x in list(found)[2:] if not x.startswith('@@'))


ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
REMOVED = {
    'abs',
    'astype',
    'broadcast_to',
    'conj',
    'flip',
    'moveaxis',
    'reshape',
    'reversed',
    'sorted',
    'stop_gradient',
    'sum',
    'swapaxes',
    'transpose',
    'zeros_like',
}
"""Functions and methods that a mutant leaves out."""
TEXTS = {'three_parts', 'warn', 'join', 'register', 'cast', 'TypeVar'}
"""Calls whose arguments are texts or types."""
UNSEEN = {'strict', 'exact_when', 'cost', 'use'}
"""Keywords that check what must hold anyway, or are texts."""


def changes_of(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """What an expression may become, and what kind of change this is."""

    def copied(**fields: Any) -> Any:
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    match node:
        case ast.BinOp(left=left, op=op, right=right):
            if isinstance(op, ast.BitOr) and isinstance(right, ast.Constant | ast.Name):
                return  # more often types than sets
            if type(op) in ARITHMETIC:
                yield 'operator', copied(op=ARITHMETIC[type(op)]())
            if isinstance(op, ast.Sub | ast.MatMult | ast.Div):
                yield 'operands swapped', copied(left=right, right=left)
            if isinstance(op, ast.Add | ast.Sub | ast.Mult):
                yield 'term dropped', left
                if isinstance(op, ast.Add | ast.Mult):
                    yield 'term dropped', right
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield 'sign', operand
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield 'comparison', copied(ops=[COMPARISONS[type(op)]()])
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield 'and, or', copied(op=other)
            yield 'condition dropped', copied(values=values[1:])
        case ast.IfExp(test=test):
            yield 'condition', copied(test=ast.UnaryOp(ast.Not(), test))
        case ast.Constant(value=bool() as value):
            yield 'flag', ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield 'number', ast.Constant(value + 1)
        case ast.Constant(value=float() as value):
            yield 'number', ast.Constant(value + 1.0)
        case ast.Slice(lower=lower, upper=upper):
            if lower is not None:
                yield 'slice', copied(lower=None)
            if upper is not None:
                yield 'slice', copied(upper=None)
        case ast.Attribute(value=value, attr='T'):
            yield 'call removed', value
        case ast.Call(func=func, args=args):
            name = getattr(func, 'attr', getattr(func, 'id', ''))
            if name in REMOVED:
                owner = getattr(func, 'value', None)
                is_module = isinstance(owner, ast.Name) and owner.id in (
                    'jnp',
                    'np',
                    'jax',
                    'lax',
                )
                is_method = owner is not None and not is_module
                if is_method and not isinstance(owner, ast.Attribute):
                    yield 'call removed', owner
                elif args:
                    yield 'call removed', args[0]
            if name == 'where' and len(args) == 3:
                yield 'operands swapped', copied(args=[args[0], args[2], args[1]])
            if name in ('matmul', 'dot', 'dot_general', 'einsum') and len(args) > 2:
                a, b = args[-2:]
                yield 'operands swapped', copied(args=[*args[:-2], b, a])


class Changes(ast.NodeVisitor):
    """Collects every change that is possible in a file."""

    def __init__(self, file: str, source: str):
        self.file, self.source = file, source
        self.found: list[Mutant] = []
        self.scope: list[str] = []
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = source.splitlines()
        self.tree = ast.dump(ast.parse(source))

    def offset(self, line: int, column: int) -> int:
        """The character at a line and at a column, which counts bytes."""
        text = self.lines[line - 1].encode()[:column].decode()
        return self.starts[line - 1] + len(text)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.keyword) and node.arg in UNSEEN:
            return
        if isinstance(node, ast.Call):
            name = getattr(node.func, 'attr', getattr(node.func, 'id', ''))
            if name in TEXTS or name.endswith(('Error', 'Warning')):
                return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.scope.append(node.name)
            for part in node.body:  # no decorators, annotations, defaults
                self.visit(part)
            self.scope.pop()
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None and self.scope:
                self.visit(node.value)
            return
        if isinstance(node, ast.If) and 'TYPE_CHECKING' in ast.unparse(node.test):
            return
        if self.scope:  # names of types and tables of a module are not changed
            self.add(node)
        self.generic_visit(node)

    def start(self, node: Any) -> int:
        return self.offset(node.lineno, node.col_offset)

    def end(self, node: Any) -> int:
        return self.offset(node.end_lineno, node.end_col_offset)

    def add(self, node: ast.AST) -> None:
        """The changes of one expression."""
        for kind, new in changes_of(node):
            text = ast.unparse(ast.fix_missing_locations(new))
            if not isinstance(new, ast.Slice | ast.Constant | ast.Name):
                text = f'({text})'
            self.put(kind, self.start(node), self.end(node), text)
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg is not None and keyword.arg not in UNSEEN:
                    start, end = self.start(keyword), self.end(keyword)
                    rest = self.source[end:].lstrip()
                    if rest.startswith(','):
                        end = len(self.source) - len(rest) + 1
                    elif len(node.args) + len(node.keywords) > 1:
                        start = self.source.rfind(',', 0, start)  # the comma before it
                    self.put('keyword dropped', start, end, '')

    def put(self, kind: str, start: int, end: int, text: str) -> None:
        """Add a change, if Python can read it."""
        line = self.source.count('\n', 0, start) + 1
        before = self.source[start:end]
        where = (self.file, '.'.join(self.scope), kind, line)
        mutant = Mutant(*where, start, end, before, text)
        with contextlib.suppress(SyntaxError):
            if ast.dump(ast.parse(mutant.of(self.source))) != self.tree:
                self.found.append(mutant)


def all_changes() -> dict[str, list[Mutant]]:
    """Every possible change, by file."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((SOURCE / 'braintrace' / folder).rglob('*.py')):
            file = str(path.relative_to(SOURCE / 'braintrace'))
            changes = Changes(file, path.read_text())
            changes.visit(ast.parse(path.read_text()))
            # The same text in the same function is one change; its first place counts.
            once = {m.key: m for m in reversed(changes.found)}
            found[file] = list(once.values())
    return found


def chosen(count: int = COUNT) -> list[Mutant]:
    """The mutants: of every file a share by its size, chosen by checksum."""
    every = all_changes()
    total = sum(map(len, every.values()))
    found: list[Mutant] = []
    for mutants in every.values():
        share = -(-count * len(mutants) // total)  # rounded up: at least one
        checksum = lambda m: zlib.crc32(m.key.encode()[::-1])
        found += sorted(mutants, key=checksum)[:share]
    # So that any part of the list has mutants of all files.
    return sorted(found, key=lambda m: zlib.crc32(m.key.encode()))


# ---------------------------------------------------------------- running


class Plugin:
    """Settings of pytest in a child: programs of mutants stay out of the cache of the
    tests, and a random program that fails is not made smaller."""

    def pytest_configure(self) -> None:
        import jax
        from hypothesis import Phase, settings

        settings.register_profile('mutants', phases=[Phase.explicit, Phase.generate])
        settings.load_profile('mutants')
        jax.config.update('jax_compilation_cache_dir', str(RESULTS.parent / 'mutants'))


def run_tests(copied: Path, tests: list[str], log: Path) -> int:
    """In a child: pytest on a copy of the source; the number is its exit code."""
    with log.open('w') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(ROOT)
    sys.path.insert(0, str(copied))
    os.environ['PYTHONPATH'] = str(copied)
    sys.dont_write_bytecode = True
    import pytest

    # Modules that the parent imported: pytest does not rewrite their assertions.
    ignored = ['-W', 'ignore::pytest.PytestAssertRewriteWarning']
    options = ['-x', '-p', 'no:xdist', *ignored]
    return int(pytest.main([*options, *tests], plugins=[Plugin()]))


OWN_FAULT = 99
"""Exit code of a child in which something else than pytest fails."""


def in_child(copied: Path, tests: list[str], seconds: float) -> tuple[str, str]:
    """Whether tests pass, fail or take too long, and the last lines that they print."""
    log = copied.parent / 'log.txt'
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = OWN_FAULT
        try:
            code = run_tests(copied, tests, log)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end, done, status = time.monotonic() + seconds, 0, 0
    try:
        while not done and time.monotonic() < end:
            time.sleep(0.05)
            done, status = os.waitpid(child, os.WNOHANG)
    finally:
        if not done:  # too late, or the run is ended
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if not done:
        return 'timeout', ''
    code = os.waitstatus_to_exitcode(status)
    if code == OWN_FAULT:
        raise SystemExit(log.read_text())
    lines = log.read_text(errors='replace').splitlines()
    failed = [x for x in lines if x.startswith(('FAILED', 'ERROR'))]
    last = (failed or lines or [''])[-1][:200]
    return {0: 'passed', 5: 'passed'}.get(code, 'failed'), last


def verdict(
    mutant: Mutant, tests: list[str], copied: Path, seconds: float
) -> dict[str, Any]:
    """Run the tests of a mutant until one fails."""
    path = copied / 'braintrace' / mutant.file
    source = path.read_text()
    started = time.monotonic()
    path.write_text(mutant.of(source))
    for cached in path.parent.glob(f'__pycache__/{path.stem}.*'):
        cached.unlink()  # a change of the same size in the same second
    try:
        state, line = in_child(copied, tests, seconds)
    finally:
        path.write_text(source)
    return {
        'key': mutant.key,
        'state': {'passed': 'survived', 'failed': 'killed'}.get(state, state),
        'by': '' if state == 'passed' else line,
        'seconds': round(time.monotonic() - started, 1),
        'file': mutant.file,
        'line': mutant.line,
        'kind': mutant.kind,
        'diff': mutant.diff(),
    }


def times_of(tests: Iterable[str], copied: Path) -> dict[str, float]:
    """Seconds that test files take without a change; all must pass."""
    found = {}
    for test in dict.fromkeys(tests):
        started = time.monotonic()
        state, line = in_child(copied, [test], 3600)
        found[test] = time.monotonic() - started
        print(f'{found[test]:7.1f} s  {test}', flush=True)
        if state != 'passed':
            raise SystemExit(f'{test} fails without any change: {line}')
    return found


IMPORTED = (
    'jax',
    'scipy.special',
    'brainstate',
    'braintools',
    'brainevent',
    'numba',
    'optax',
    'pytest',
    'hypothesis',
)


def prepare() -> None:
    """Import what the children need, without a thread or a device of JAX."""
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')
    for name in IMPORTED:
        importlib.import_module(name)
    from jax._src import xla_bridge

    assert not xla_bridge.backends_are_initialized()


def results() -> dict[str, dict[str, Any]]:
    """What has run, by key."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {found['key']: found for found in map(json.loads, lines)}


def survivors(mutants: list[Mutant]) -> list[str]:
    """Those that no test found, or not in time, as texts."""
    done, found = results(), []
    for m in mutants:
        result = done.get(m.key, {})
        state = result.get('state', 'killed')
        if state != 'killed' and m.key not in EQUIVALENT:
            found.append(f'{state}  {m.file}:{m.line}  {m.kind}  {m.key}\n{m.diff()}')
    return found


def main() -> None:
    """Run mutants and list those that survive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--part', default='1/1', help='1/10: every tenth')
    parser.add_argument('--most', type=int, help='no more than so many')
    parser.add_argument('--only', default='', help='a part of the path of files')
    parser.add_argument('--resume', action='store_true', help='only what has not run')
    parser.add_argument('--tests', nargs='*', help='files, in place of TESTS')
    parser.add_argument('--unchecked', action='store_true', help='trust the tests')
    parser.add_argument(
        '--seconds', type=float, default=1800, help='most for a mutant, if unchecked'
    )
    parser.add_argument('--list', action='store_true', help='run nothing')
    parser.add_argument('--survivors', action='store_true', help='run nothing')
    given = parser.parse_args()
    first, parts = map(int, given.part.split('/'))
    mutants = [m for m in chosen() if given.only in m.file]
    mutants = mutants[first - 1 :: parts]
    if given.survivors:
        print('\n\n'.join(survivors(mutants)))
        return
    if given.resume:
        done = results()
        mutants = [m for m in mutants if m.key not in done]
    mutants = mutants[: given.most]
    if given.list:
        for m in mutants:
            print(f'{m.file}:{m.line}  {m.kind}  {m.key}\n{m.diff()}\n')
        print(Counter(m.kind for m in mutants), len(mutants))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the child as well
    prepare()
    RESULTS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / 'src'
        shutil.copytree(SOURCE, copied)
        compiled = [sys.executable, '-m', 'compileall', '-q', str(copied)]
        subprocess.run(compiled, check=True)
        tests = {m.file: given.tests or tests_of(m.file) for m in mutants}
        times = {}
        if not given.unchecked:
            times = times_of(itertools.chain(*tests.values()), copied)
        for n, mutant in enumerate(mutants, 1):
            seconds = given.seconds
            if times:  # more is a loop without an end
                seconds = 60 + 4 * sum(times[test] for test in tests[mutant.file])
            found = verdict(mutant, tests[mutant.file], copied, seconds)
            with RESULTS.open('a') as file:
                file.write(json.dumps(found) + '\n')
            place = f'{mutant.file}:{mutant.line}'
            print(
                f'{n}/{len(mutants)} {found["state"]:8} {found["seconds"]:6.1f} s  '
                f'{place}  {found["by"]}',
                flush=True,
            )
    done = results()
    states = Counter(done[m.key]['state'] for m in mutants)
    print(f'\n{dict(states)}\n')
    print('\n\n'.join(survivors(mutants)))


if __name__ == '__main__':
    main()
