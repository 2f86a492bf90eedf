"""The page of versions was made from the bounds that are declared now."""

import sys
from pathlib import Path

import pytest
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parents[2] / 'scripts'))
from versions import PAGE, ROOT, RULES, SMOKE, lower_bound, pythons, requirements


@pytest.fixture(scope='module')
def columns():
    """The table of the page: for each environment what its rows say."""
    lines = PAGE.read_text().splitlines()
    rows = [[c.strip() for c in x.strip('|').split('|')] for x in lines if x[:1] == '|']
    head, _, *body = rows
    return {name: {row[0]: row[k] for row in body} for k, name in enumerate(head) if k}


def test_every_requirement_has_a_lower_bound():
    names = [r.name for r in requirements()]
    assert len(set(names)) == len(names)
    assert {'jax', 'optax', 'flax', 'equinox', 'brainevent', 'h5py', 'pytest'} <= set(
        names
    )
    assert all(lower_bound(r) for r in requirements())


def test_the_lowest_versions_are_the_bounds(columns):
    lowest = columns[f'lowest, Python {pythons()[0]}']
    for r in requirements():
        assert Version(lowest[r.name]) == Version(lower_bound(r)), r.name


def test_the_newest_versions_are_allowed_and_every_python_is_there(columns):
    for python in pythons():
        newest = columns[f'newest, Python {python}']
        assert newest['result'] in ('passed', 'resolves; not run')
        for r in requirements():
            assert newest[r.name] in r.specifier, r.name


def test_results_are_of_all_parts(columns):
    for name, column in columns.items():
        if column['result'] == 'passed':
            for title in (RULES, *SMOKE):
                passed, run = column[title].split(' / ')
                assert passed == run != '0', (name, title)


def test_what_the_smoke_tests_name_exists():
    for test in (t for tests in SMOKE.values() for t in tests):
        file, _, name = test.partition('::')
        assert (
            not name or f'def {name.partition("[")[0]}(' in (ROOT / file).read_text()
        ), test
