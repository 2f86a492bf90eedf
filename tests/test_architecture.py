"""Imports point down the layers of the design, and knowledge of other packages stays in its file."""

import ast
import pathlib
import re

import pytest

import braintrace

ROOT = pathlib.Path(braintrace.__file__).parent
LAYERS = [
    {'errors', 'compat'},
    {'compiled_step', 'arrays'},
    {'program'},
    {'operations'},
    {'frontends'},
    {'analysis'},
    {'lowering'},
    {'solver'},
    {'rules'},
    {'learner'},
]
ARRAYS_ONLY = {'errors', 'compiled_step', 'arrays', 'solver'}
"""All that the solver may know of the package."""
FILES = sorted(ROOT.rglob('*.py'))


def layer(name):
    """The layer of the first name below the package; whatever no layer names is surface."""
    return next((i for i, names in enumerate(LAYERS) if name in names), len(LAYERS))


def imports(file):
    """Absolute dotted names of everything a file imports, wherever in the file."""
    package = ('braintrace', *file.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            base = '.'.join([*start, *([node.module] if node.module else [])])
            yield from (f'{base}.{alias.name}' for alias in node.names)


@pytest.mark.parametrize('file', FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports(file):
    name = file.relative_to(ROOT).with_suffix('').parts[0]
    for target in imports(file):
        parts = target.split('.')
        if parts[0] == 'braintrace' and len(parts) > 1 and name != '__init__':
            assert layer(parts[1]) <= layer(name), f'{target} is above {name}'
        assert parts[:2] != ['jax', '_src']
        assert parts[:2] != ['jax', 'extend'] or name == 'compat', (
            f'{target} belongs in compat.py'
        )
        if parts[0] == 'brainstate':
            allowed = file == ROOT / 'frontends' / 'brainstate.py' or layer(
                name
            ) >= layer('learner')
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
        'numpy',
        'typing',
    }


def test_only_operations_decide_by_the_name_of_a_primitive():
    """The rest prints names, in reports and labels of traces; what to do is in an operation's record."""
    decides = re.compile(
        r'primitive\.name\s*(==|!=|in\b|not in\b)|primitive\.name\.(startswith|removeprefix)'
    )
    for file in FILES:
        room = file.relative_to(ROOT).parts[0]
        if room not in ('operations', 'compat.py'):
            assert not decides.search(file.read_text()), file


def test_no_private_jax_by_other_means():
    assert not [f for f in FILES if 'jax._src' in f.read_text()]
    assert len(FILES) > 20
