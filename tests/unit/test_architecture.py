"""Imports point down the layers of the design, and knowledge of other packages stays in its file."""

import ast
import pathlib
import re

import pytest

import braintrace

ROOT = pathlib.Path(braintrace.__file__).parent
LAYERS = [
    {'errors', 'compat', 'own_primitives', 'source_lines', 'text', '_brainstate'},
    {'compiled_step', 'arrays', 'derivatives', 'split'},
    {'program'},
    {'operations'},
    {'frontends'},
    {'analysis'},
    {'lowering'},
    {'graph'},
    {'solver'},
    {'rules'},
    {'learner', 'checkpoint', 'files'},
]
ARRAYS_ONLY = {'errors', 'compiled_step', 'arrays', 'derivatives', 'solver'}
"""All that the solver may know of the package."""
MAKES_THE_REPORT = ROOT / 'graph' / 'etrace_graph.py'
"""The one file that imports from above its layer: `ETraceGraph.report`, when called."""
FILES = sorted(ROOT.rglob('*.py'))


def layer(name):
    """The layer of the first name below the package; whatever no layer names is surface."""
    return next((i for i, names in enumerate(LAYERS) if name in names), len(LAYERS))


def first_name(file):
    """The folder of a file below the package, or its own name."""
    return file.relative_to(ROOT).with_suffix('').parts[0]


def imports(file):
    """Absolute dotted names of everything a file imports, wherever in the file; what
    is imported for type checkers only is left out."""
    return names(file, without_types(ast.parse(file.read_text()).body))


def without_types(statements):
    """All nodes below statements, but for those under ``if TYPE_CHECKING``."""
    for statement in statements:
        if isinstance(statement, ast.If) and 'TYPE_CHECKING' in ast.dump(
            statement.test
        ):
            continue
        yield from ast.walk(statement)


def names(file, nodes):
    """Absolute dotted names of what the nodes of a file import."""
    package = ('braintrace', *file.relative_to(ROOT).parent.parts)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            base = '.'.join([*start, *([node.module] if node.module else [])])
            yield from (f'{base}.{alias.name}' for alias in node.names)


@pytest.mark.parametrize('file', FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports(file):
    name = first_name(file)
    for target in imports(file):
        parts = target.split('.')
        if parts[0] == 'braintrace' and len(parts) > 1 and name != '__init__':
            if file == MAKES_THE_REPORT and parts[1] == 'report':
                continue
            assert layer(parts[1]) <= layer(name), f'{target} is above {name}'
        assert parts[:2] != ['jax', '_src']
        assert parts[:2] != ['jax', 'extend'] or name == 'compat', (
            f'{target} belongs in compat.py'
        )
        if parts[0] == 'brainstate':
            allowed = file in (
                ROOT / 'frontends' / 'brainstate.py',
                ROOT / 'frontends' / 'module_states.py',
                ROOT / '_brainstate.py',
            ) or layer(name) >= layer('learner')
            assert allowed, (
                f'{target}: only the front end, the learner and the surface know brainstate'
            )


@pytest.mark.parametrize(
    'file', sorted((ROOT / 'solver').glob('*.py')), ids=lambda f: f.name
)
def test_the_solver_knows_only_arrays(file):
    own = {
        target.split('.')[1]
        for target in imports(file)
        if target.startswith('braintrace.')
    }
    assert own <= ARRAYS_ONLY
    outside = {target.split('.')[0] for target in imports(file)} - {'braintrace'}
    assert outside <= {
        '__future__',
        'abc',
        'collections',
        'dataclasses',
        'functools',
        'jax',
        'math',
        'numpy',
        'typing',
    }


def test_the_report_is_imported_only_where_it_is_made():
    """Nothing below the surface needs the report to be imported itself."""
    below = [f for f in FILES if layer(first_name(f)) < len(LAYERS)]
    known = [f for f in below if any(map(is_report, imports(f)))]
    assert known == [MAKES_THE_REPORT]
    at_the_top = ast.parse(MAKES_THE_REPORT.read_text()).body
    assert not any(map(is_report, names(MAKES_THE_REPORT, at_the_top)))


def is_report(target):
    return target.startswith('braintrace.report')


def test_only_operations_decide_by_the_name_of_a_primitive():
    """The rest prints names, in reports and labels of traces; what to do is in an operation's record."""
    decides = re.compile(
        r'primitive\.name\s*(==|!=|in\b|not in\b)|primitive\.name\.(startswith|removeprefix)'
    )
    for file in FILES:
        room = file.relative_to(ROOT).parts[0]
        if room not in ('operations', 'compat.py'):
            assert not decides.search(file.read_text()), file


ENGINE = ['analysis', 'frontends', 'graph', 'learner', 'lowering', 'rules', 'solver']


@pytest.mark.parametrize('folder', ENGINE)
def test_the_engine_knows_no_primitive(folder):
    """Neither by an object, as ``lax.add_p``, nor by a comparison or a look-up."""
    for file in sorted((ROOT / folder).glob('*.py')):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        objects = [n.attr for n in nodes if isinstance(n, ast.Attribute)]
        objects += [n.id for n in nodes if isinstance(n, ast.Name)]
        assert not [name for name in objects if name.endswith('_p')], file
        decisions = [
            *(n for n in nodes if isinstance(n, ast.Compare | ast.Match)),
            *(n.slice for n in nodes if isinstance(n, ast.Subscript)),
        ]
        assert not [ast.unparse(n) for n in decisions if mentions_primitive(n)], file


def mentions_primitive(node):
    return any(
        isinstance(part, ast.Attribute) and part.attr == 'primitive'
        for part in ast.walk(node)
    )


@pytest.mark.parametrize(
    'file', sorted((ROOT / 'solver').glob('[a-z]*.py')), ids=lambda f: f.name
)
def test_a_solver_file_states_its_letters(file):
    """What the axes of its arrays are called."""
    assert 'Letters: ' in ' '.join(
        ast.get_docstring(ast.parse(file.read_text())).split()
    )


def test_no_two_files_of_the_layers_share_a_name():
    """A name says what a file holds, wherever it is opened."""
    layers = [f for f in FILES if layer(first_name(f)) < len(LAYERS)]
    names = [f.name for f in layers if f.name != '__init__.py']
    assert not {name for name in names if names.count(name) > 1}


def test_no_private_jax_by_other_means():
    assert not [f for f in FILES if 'jax._src' in f.read_text()]
    assert len(FILES) > 20


ONE_STEP = {
    'Certificate': 'CertificateRow',
    'Configured': 'Learner',
    'Coupled': 'TracePart',
    'EquinoxModel': 'PureModel',
    'Factorised': 'TracePart',
    'FlaxModel': 'PureModel',
    'FunctionModel': 'PureModel',
    'JacobianRecursion': 'RecursionPart',
    'Modulated': 'SignalPart',
    'PerParameter': 'TracePart',
    'RandomFeedback': 'SignalPart',
    'RandomProjection': 'TracePart',
    'ScalarLeak': 'RecursionPart',
    'Symmetric': 'SignalPart',
    'Window': 'TracePart',
}
"""Classes of these folders that derive from another of the package, and from which."""


@pytest.mark.parametrize(
    'folder',
    ['analysis', 'frontends', 'graph', 'learner', 'lowering', 'rules', 'solver'],
)
def test_there_is_no_ladder_of_bases(folder):
    """What classes share is passed to them, or is a module of functions."""
    classes = [
        node
        for file in sorted((ROOT / folder).glob('*.py'))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    own = {node.name for node in classes} | {'Learner'}
    found = {
        node.name: ast.unparse(base)
        for node in classes
        for base in node.bases
        if ast.unparse(base).rpartition('.')[2] in own
    }
    assert classes
    assert found.items() <= ONE_STEP.items()
    assert not found.keys() & {*found.values()}
