"""The page of models is what the script makes of the zoo, and models that cannot work say why."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / 'scripts'))
from any_model import PAGE, refused, row, title

from zoo import CASES, REFUSED

LINES = PAGE.read_text().splitlines()


def test_the_page_lists_every_model_once():
    shown = [
        line.split(' | ')[0].removeprefix('| ')
        for line in LINES
        if line.startswith('| ')
    ]
    assert all(shown.count(name.replace('_', ' ')) == 1 for name in [*CASES, *REFUSED])
    assert all(f'## {title(case.family)}' in LINES for case in CASES.values())


@pytest.mark.parametrize('name', list(CASES)[::25])
def test_rows_are_what_the_compiler_says(name):
    assert row(CASES[name]) in LINES


@pytest.mark.parametrize('name', REFUSED)
def test_refused(name):
    assert refused(name) in LINES
