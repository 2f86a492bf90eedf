"""Importing the package, and its first use, leave the precision that the user has set."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ON = "jax.config.update('jax_enable_x64', True)"
OFF = "jax.config.update('jax_enable_x64', False)"


SOURCE = pathlib.Path(__file__).parents[2] / 'src' / 'braintrace'
FIRST_USE = 'import braintrace\nbraintrace.compile'


def after_import(before='', environment=None, at_import=FIRST_USE):
    """``jax_enable_x64`` after the first use of the package in a new interpreter."""
    code = f'import jax\n{before}\n{at_import}\nprint(jax.config.jax_enable_x64)'
    clean = {k: v for k, v in os.environ.items() if k != 'JAX_ENABLE_X64'}
    done = subprocess.run(
        [sys.executable, '-c', code],
        env={**clean, **(environment or {})},
        capture_output=True,
        text=True,
        check=True,
    )
    return {'True': True, 'False': False}[done.stdout.strip()]


@pytest.mark.parametrize(
    ('before', 'environment', 'expected'),
    [
        ('', {}, False),
        (ON, {}, True),
        ('', {'JAX_ENABLE_X64': '1'}, True),
        (OFF, {'JAX_ENABLE_X64': '1'}, False),
    ],
    ids=['default', 'config', 'environment', 'config over environment'],
)
def test_x64_is_kept(before, environment, expected):
    assert after_import(before, environment) is expected


def test_x64_of_a_context_does_not_leak():
    local = 'with jax.enable_x64(True):\n    import braintrace\n    braintrace.compile'
    assert after_import(at_import=local) is False


def test_a_part_of_the_package_keeps_x64():
    assert after_import(ON, at_import='import braintrace.cli')


def test_float64_is_float64():
    at_import = (
        'import braintrace, jax.numpy as jnp\nbraintrace.compile\n'
        'assert jnp.ones(1).dtype == "float64"'
    )
    assert after_import(ON, at_import=at_import)


def test_every_part_may_be_the_first_that_is_imported():
    """It takes brainstate, or its folder does first, from where x64 is kept."""
    keeps = lambda file: '_brainstate import brainstate' in file.read_text()
    for file in SOURCE.rglob('*.py'):
        direct = re.search(r'^(import|from) brainstate\b', file.read_text(), re.M)
        if direct and file.name != '_brainstate.py':
            assert file.parent != SOURCE, file
            assert keeps(file.parent / '__init__.py'), file
