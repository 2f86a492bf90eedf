"""Small faults, put into the engine one at a time: does a test fail for each?

    python scripts/mutants.py --record               which test reaches which change
    python scripts/mutants.py                        run all changes, for hours
    python scripts/mutants.py --part 1/10 --resume   a tenth, without what has run
    python scripts/mutants.py --again                what survived so far
    python scripts/mutants.py --only solver/block    those of files whose path has this
    python scripts/mutants.py --key 1a2b3c4d         those whose key has this
    python scripts/mutants.py --tests tests/graph    by these tests alone
    python scripts/mutants.py --list                 print the changes, run nothing
    python scripts/mutants.py --survivors            print what survived so far
    python scripts/mutants.py --check                do the tests pass without a change?

A mutant is one change of an expression: a sign, an index, a comparison, a dropped term,
swapped operands, a removed call or keyword. The list is the same every time: of all
changes that are possible, each file gives its share, chosen by checksums of their texts.
A copy of ``src`` has the change, never the checkout.

A process imports JAX once and forks for each mutant before JAX starts any thread of its
own; the child imports the package from the copy and runs pytest.

``--record`` runs the daily tests of ``RECORDED`` once on a copy in which each expression
that a mutant changes notes that it was evaluated. A mutant then runs only the tests that
evaluate its expression, those that promise most per second first, for at most
``--seconds`` by the clock of the record.
Results are lines of JSON in ``out/mutants.jsonl``, the record is in
``out/mutants_record.jsonl``. ``EQUIVALENT`` has the mutants that no test can find, with
the reason.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import copy
import dataclasses
import difflib
import importlib
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / 'src'
RESULTS = ROOT / 'out' / 'mutants.jsonl'
RECORD = ROOT / 'out' / 'mutants_record.jsonl'
FOLDERS = ('derivatives.py', 'solver', 'lowering', 'operations', 'rules')
COUNT = 300
RECORDED = (
    'unit',
    'graph',
    'gradients',
    'kernels',
    'learner',
    'devices',
    'texts/test_errors.py',
)
"""Places in ``tests`` whose daily tests are recorded and run."""
ON_DEVICES = 'tests/devices/test_devices.py'
"""Its tests run on eight devices, in a process of their own, not through the test that
starts such a process."""


ANY_FACTOR = 'only which derivatives are not zero is read: any factor will do'
AT_THE_LIMIT = 'both ways give the same numbers, and at the limit none is the faster'
HINT = 'a hint for the processor or the compiler, which changes no number'
EQUIVALENT: dict[str, str] = {
    'operations/dense_traces.py:SharedTrace._leading:02a80c90': (
        'NumPy takes any negative number in reshape as the size that is left'
    ),
    'operations/elementwise.py:_select_labels:ca70c9ca': (
        'NumPy compares True and False with 1 and 0 as it does 1 and 0'
    ),
    'operations/labels.py:gather_back:f9c0faf0': (
        'np.where of int32 arrays and Python numbers is int32 since NumPy 2'
    ),
    'lowering/run.py:_changing:1d71c1ce': ANY_FACTOR,
    'solver/sequence.py:BlockSolver.evolve:cbcdab17': (
        'a sequence without a loss has no losses that anything reads'
    ),
    'operations/sparse_weights.py:SynapseTrace._is_visited_by_row:b43a10f3': (
        AT_THE_LIMIT
    ),
    'operations/synapses.py:_is_turned:2f0c9593': AT_THE_LIMIT,
    'operations/kernels/dense_visit.py:visit:afcf36b2': AT_THE_LIMIT,
    'operations/kernels/transpose.py:transposed:6e9ce254': AT_THE_LIMIT,
    'operations/kernels/native.py:Buffer.prefetch:6396f50c': HINT,
    'operations/kernels/row_visit.py:_VisitByRow._ask_for_column:9ed7c7d9': HINT,
}
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
        place = SOURCE / 'braintrace' / folder
        for path in [place] if place.is_file() else sorted(place.rglob('*.py')):
            file = str(path.relative_to(SOURCE / 'braintrace'))
            changes = Changes(file, path.read_text())
            changes.visit(ast.parse(path.read_text()))
            # The same text in the same function is one change; its first place counts.
            once = {m.key: m for m in reversed(changes.found)}
            found[file] = list(once.values())
    return found


def chosen(count: int = COUNT) -> list[Mutant]:
    """The mutants: of every file a share by its size, chosen by checksum.

    That Python can read every possible change takes a quarter of a minute to find out,
    so the list is kept until a source changes.
    """
    files = [*SOURCE.rglob('*.py'), Path(__file__)]
    now = zlib.crc32(b''.join(path.read_bytes() for path in sorted(files)))
    kept = RESULTS.parent / f'mutants_{now:08x}_{count}.json'
    if kept.exists():
        return [Mutant(*fields) for fields in json.loads(kept.read_text())]
    every = all_changes()
    total = sum(map(len, every.values()))
    found: list[Mutant] = []
    for mutants in every.values():
        share = -(-count * len(mutants) // total)  # rounded up: at least one
        checksum = lambda m: zlib.crc32(m.key.encode()[::-1])
        found += sorted(mutants, key=checksum)[:share]
    # So that any part of the list has mutants of all files.
    found.sort(key=lambda m: zlib.crc32(m.key.encode()))
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps([dataclasses.astuple(m) for m in found]))
    return found


# ---------------------------------------------------------------- which tests

NOTE = 'note_that_a_mutant_is_reached'
"""A function that the record adds to Python's own."""


class Marks(ast.NodeTransformer):
    """Adds a note to the expressions that mutants change."""

    def __init__(self, source: str, mutants: list[Mutant]):
        places = Changes('', source)
        nodes = [x for x in ast.walk(ast.parse(source)) if is_value(x)]
        spans = {(places.start(x), places.end(x)) for x in nodes}
        self.places = places
        self.keys: dict[tuple[int, int], list[str]] = {}
        for m in mutants:
            around = [(a, b) for a, b in spans if a <= m.start and m.end <= b]
            smallest = min(around, key=lambda span: span[1] - span[0])
            self.keys.setdefault(smallest, []).append(m.key)

    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        if not is_value(node):
            return node
        keys = self.keys.pop((self.places.start(node), self.places.end(node)), None)
        if keys is None:
            return node
        noted: list[ast.expr] = [ast.Constant(key) for key in keys]
        return ast.Call(ast.Name(NOTE, ast.Load()), [node, *noted], [])


def is_value(node: ast.AST) -> bool:
    """Whether a call may take the place of an expression."""
    if not isinstance(node, ast.expr) or not hasattr(node, 'lineno'):
        return False
    if isinstance(node, ast.Slice | ast.Starred | ast.JoinedStr | ast.FormattedValue):
        return False
    if isinstance(node, ast.Tuple) and any(isinstance(x, ast.Slice) for x in node.elts):
        return False
    return isinstance(getattr(node, 'ctx', ast.Load()), ast.Load)


class Record:
    """A plugin of pytest that writes what each test reaches, and how long it takes."""

    def __init__(self) -> None:
        self.reached: set[str] = set()
        self.seconds = 0.0
        self.passed = False
        setattr(builtins, NOTE, self.note)

    def note(self, value: Any, *keys: str) -> Any:
        self.reached.update(keys)
        return value

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds += report.duration
        if report.when == 'call':
            self.passed = report.outcome == 'passed'

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        found = {
            'test': nodeid,
            'seconds': round(self.seconds, 3),
            'passed': self.passed,
            'reached': sorted(self.reached),
        }
        with RECORD.open('a') as file:
            file.write(json.dumps(found) + '\n')
        self.reached, self.seconds, self.passed = set(), 0.0, False


def record(mutants: list[Mutant], files: list[str], copied: Path) -> None:
    """Run test files on a copy with notes."""
    for name in dict.fromkeys(m.file for m in mutants):
        path = copied / 'braintrace' / name
        source = path.read_text()
        marks = Marks(source, [m for m in mutants if m.file == name])
        tree = ast.fix_missing_locations(marks.visit(ast.parse(source)))
        assert not marks.keys, f'{name}: not placed: {marks.keys}'
        path.write_text(ast.unparse(tree))
    for test in files:
        started = time.monotonic()
        state, line, _ = in_child(copied, [test], 3600, note=True)
        seconds = time.monotonic() - started
        print(f'{seconds:7.1f} s  {test}  {state} {line}', flush=True)


def test_files() -> list[str]:
    """The files of ``RECORDED``."""
    found: list[Path] = []
    for place in RECORDED:
        path = ROOT / 'tests' / place
        files = sorted(path.rglob('test_*.py')) if path.is_dir() else [path]
        if not files or not all(file.exists() for file in files):
            raise SystemExit(f'RECORDED has {place!r}, but tests/{place} has no tests.')
        found += files
    return [str(path.relative_to(ROOT)) for path in found]


def recorded() -> list[dict[str, Any]]:
    """The last record of each test that passed."""
    if not RECORD.exists():
        raise SystemExit('No record: run --record first.')
    lines = map(json.loads, RECORD.read_text().splitlines())
    found = [x for x in {x['test']: x for x in lines}.values() if x['passed']]
    for file in {x['test'].partition('::')[0] for x in found}:
        if not (ROOT / file).exists():
            raise SystemExit(f'{file} is not there any more: run --record again.')
    return found


def tests_of(mutant: Mutant, record: list[dict[str, Any]], most: float) -> list[str]:
    """Tests that reach a mutant, those that promise most per second first.

    A test promises the more the larger the part of mutants it killed among those it
    ran for, and a further case of the same function less than its first.
    """
    ran, killed = Counter[str](), Counter[str]()
    for result in results().values():
        tests = [test.partition('[')[0] for test in result.get('ran', ())]
        ran.update(tests)
        if result['state'] == 'killed':
            killed.update(tests[-1:])
    reach = [x for x in record if mutant.key in x['reached']]
    order: list[tuple[float, str, float]] = []
    cases = Counter[str]()
    for x in sorted(reach, key=lambda x: x['seconds']):
        name = x['test'].partition('[')[0]
        promise = (killed[name] + 1) / (ran[name] + 2) * 0.5 ** cases[name]
        cases[name] += 1
        order.append(((x['seconds'] + 0.1) / promise, x['test'], x['seconds']))
    spent, found = 0.0, []
    for _, test, seconds in sorted(order):
        if not found or spent + seconds <= most:
            found.append(test)
            spent += seconds
    return found


# ---------------------------------------------------------------- running


class Plugin:
    """Settings of pytest in a child: programs of mutants stay out of the cache of the
    tests, tests run in the order that is given, and a random program that fails is not
    made smaller."""

    def __init__(self, tests: list[str], ran: Path):
        self.order = {test: n for n, test in enumerate(tests)}
        self.ran = ran

    def pytest_configure(self) -> None:
        import jax
        from hypothesis import Phase, settings

        settings.register_profile('mutants', phases=[Phase.explicit, Phase.generate])
        settings.load_profile('mutants')
        jax.config.update('jax_compilation_cache_dir', str(RESULTS.parent / 'mutants'))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: self.order.get(item.nodeid, 0))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        with self.ran.open('a') as file:
            file.write(nodeid + '\n')


def run_tests(copied: Path, tests: list[str], plugins: list[Any]) -> int:
    """In a child: pytest on a copy of the source; the number is its exit code."""
    import jax

    if any(test.startswith(ON_DEVICES) for test in tests):
        jax.config.update('jax_num_cpu_devices', 8)
    os.chdir(ROOT)
    sys.path.insert(0, str(copied))
    os.environ['PYTHONPATH'] = str(copied)
    sys.dont_write_bytecode = True
    # Modules that the parent imported: pytest does not rewrite their assertions.
    ignored = ['-W', 'ignore::pytest.PytestAssertRewriteWarning']
    options = ['-p', 'no:xdist', *ignored]
    return int(pytest.main([*options, *tests], plugins=plugins))


OWN_FAULT = 99
"""Exit code of a child in which something else than pytest fails."""


def in_child(
    copied: Path,
    tests: list[str],
    seconds: float,
    *options: str,
    note: bool = False,
) -> tuple[str, str, list[str]]:
    """Whether tests pass, fail or take too long, what the first that fails prints, and
    the tests that were begun."""
    log, ran = copied.parent / 'log.txt', copied.parent / 'ran.txt'
    ran.write_text('')
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = OWN_FAULT
        try:
            with log.open('w') as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            plugins = [Plugin(tests, ran), *([Record()] if note else [])]
            # In the order of paths, as all tests are: modules of tests extend sys.path.
            code = run_tests(copied, [*options, *sorted(tests)], plugins)
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
    begun = ran.read_text().splitlines()
    if not done:
        return 'timeout', '', begun
    code = os.waitstatus_to_exitcode(status)
    lines = log.read_text(errors='replace').splitlines()
    if code == OWN_FAULT:
        raise SystemExit('\n'.join(lines))
    failed = [x for x in lines if x.startswith(('FAILED', 'ERROR'))]
    last = (failed or lines[-1:] or [''])[0][:200]
    return {0: 'passed', 5: 'passed'}.get(code, 'failed'), last, begun


PASSED: tuple[str, str, list[str]] = ('passed', '', [])


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
    ran: list[str] = []
    on_devices = [test for test in tests if test.startswith(ON_DEVICES)]
    try:
        for some in ([test for test in tests if test not in on_devices], on_devices):
            state, line, begun = PASSED
            if some:
                state, line, begun = in_child(copied, some, seconds, '-x')
            ran += begun
            if state != 'passed':
                break
    finally:
        path.write_text(source)
    states = {'passed': 'survived' if ran else 'unreached', 'failed': 'killed'}
    return {
        'key': mutant.key,
        'state': states.get(state, state),
        'by': '' if state == 'passed' else line,
        'ran': ran,
        'seconds': round(time.monotonic() - started, 1),
        'file': mutant.file,
        'line': mutant.line,
        'kind': mutant.kind,
        'diff': mutant.diff(),
    }


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


def check(mutants: list[Mutant], copied: Path) -> None:
    """Run every test that killed a mutant once more, without a change.

    A mutant that is found before any test began, by an error of an import, stands for
    all tests that it would have run.
    """
    done = results()
    found = [done[m.key] for m in mutants if m.key in done]
    killed = [result for result in found if result['state'] == 'killed']
    tests = sorted({result['ran'][-1] for result in killed if result['ran']})
    on_devices = [test for test in tests if test.startswith(ON_DEVICES)]
    for some in ([test for test in tests if test not in on_devices], on_devices):
        state, line, _ = in_child(copied, some, 7200, '-x') if some else PASSED
        print(f'{len(some)} of {len(tests)} tests: {state} {line}')


def is_left(mutant: Mutant, done: dict[str, dict[str, Any]]) -> bool:
    """Whether no test found a mutant that ran, or none in time."""
    state = done.get(mutant.key, {}).get('state', 'killed')
    return state != 'killed' and mutant.key not in EQUIVALENT


def survivors(mutants: list[Mutant]) -> list[str]:
    """Those that are left, as texts."""
    done = results()
    return [
        f'{done[m.key]["state"]}  {m.file}:{m.line}  {m.kind}  {m.key}\n{m.diff()}'
        for m in mutants
        if is_left(m, done)
    ]


def main() -> None:
    """Run mutants and list those that survive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--part', default='1/1', help='1/10: every tenth')
    parser.add_argument('--most', type=int, help='no more than so many')
    parser.add_argument('--only', nargs='*', help='parts of the paths of files')
    parser.add_argument('--without', nargs='*', default=(), help='the same')
    parser.add_argument('--key', nargs='*', help='parts of keys')
    parser.add_argument('--resume', action='store_true', help='only what has not run')
    parser.add_argument('--again', action='store_true', help='only what survived')
    parser.add_argument('--tests', nargs='*', help='in place of those of the record')
    parser.add_argument('--seconds', type=float, default=60, help='most for a mutant')
    parser.add_argument('--record', action='store_true', help='run no mutant')
    parser.add_argument('--check', action='store_true', help='run no mutant')
    parser.add_argument('--list', action='store_true', help='run nothing')
    parser.add_argument('--survivors', action='store_true', help='run nothing')
    given = parser.parse_args()
    first, parts = map(int, given.part.split('/'))
    mutants = chosen()
    if given.only:
        mutants = [m for m in mutants if any(part in m.file for part in given.only)]
    mutants = [m for m in mutants if not any(part in m.file for part in given.without)]
    if given.key:
        mutants = [m for m in mutants if any(part in m.key for part in given.key)]
    if not given.record:
        mutants = mutants[first - 1 :: parts]
    if given.survivors:
        print('\n\n'.join(survivors(mutants)))
        return
    done = results()
    if given.resume and not given.record:
        mutants = [m for m in mutants if m.key not in done]
    if given.again:
        mutants = [m for m in mutants if is_left(m, done)]
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
        if given.record:
            record(mutants, (given.tests or test_files())[first - 1 :: parts], copied)
            return
        if given.check:
            check(mutants, copied)
            return
        for n, mutant in enumerate(mutants, 1):
            tests = given.tests or tests_of(mutant, recorded(), given.seconds)
            # More than this is a loop without an end.
            found = verdict(mutant, tests, copied, 120 + 10 * given.seconds)
            with RESULTS.open('a') as file:
                file.write(json.dumps(found) + '\n')
            place = f'{mutant.file}:{mutant.line}'
            print(
                f'{n}/{len(mutants)} {found["state"]:8} {found["seconds"]:6.1f} s  '
                f'{len(found["ran"])}/{len(tests)}  {place}  {found["by"]}',
                flush=True,
            )
    done = results()
    states = Counter(done[m.key]['state'] for m in mutants)
    print(f'\n{dict(states)}\n')
    print('\n\n'.join(survivors(mutants)))


if __name__ == '__main__':
    main()
