"""A user's file that imports every public name passes a strict type checker."""

import subprocess
import sys
from pathlib import Path

import pytest

import braintrace

ROOT = Path(braintrace.__file__).parent.parent
MODULES = ('metrics', 'nir', 'nn', 'operations', 'tasks')
"""Public modules with names of their own."""
# Other packages are not followed: the names of this one are checked, in seconds.
SETTINGS = """
[mypy]
strict = true
implicit_reexport = false
follow_imports = skip
[mypy-braintrace.*]
follow_imports = silent
"""


def checked(text, folder, monkeypatch):
    """What mypy says about a file of this text."""
    (folder / 'mypy.ini').write_text(SETTINGS)
    (folder / 'user.py').write_text(text)
    monkeypatch.setenv('MYPYPATH', str(ROOT))
    run = subprocess.run(
        [sys.executable, '-m', 'mypy', '--config-file', 'mypy.ini', 'user.py'],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return run.returncode, run.stdout + run.stderr


def every_name():
    """A file that imports and uses every public name, each in both ways."""
    lines = ['import braintrace']
    lines += [f'from braintrace import {name}' for name in braintrace.__all__]
    lines += [f'print({name}, braintrace.{name})' for name in braintrace.__all__]
    for module in MODULES:
        for name in getattr(braintrace, module).__all__:
            lines += [f'from braintrace.{module} import {name} as {module}_{name}']
            lines += [f'print({module}_{name}, braintrace.{module}.{name})']
    return '\n'.join(lines) + '\n'


def test_every_public_name_is_known_to_a_type_checker(tmp_path, monkeypatch):
    pytest.importorskip('mypy')  # the environments of `make versions` have none
    text = every_name()
    code, said = checked(text, tmp_path, monkeypatch)
    assert code == 0, said
    # The same run finds names that are not public.
    wrong = 'from braintrace import three_parts\nfrom braintrace.tasks import one_of\n'
    code, said = checked(text + wrong, tmp_path, monkeypatch)
    assert code == 1
    assert 'user.py' in said
    assert 'three_parts' in said
    assert 'one_of' in said
