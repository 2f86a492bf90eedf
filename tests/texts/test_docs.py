"""The pages of the docs: their code runs and prints what they show, all are in the
navigation, and links lead to something."""

import doctest
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import braintrace.cli
from shown_output import expected_outputs, is_near, matches

sys.path.insert(0, str(Path(__file__).parents[2] / 'scripts'))
from notebooks import INLINE, notebooks
from rule_pages import written
from run_pages import blocks_of, is_executed, run_and_keep

ROOT = Path(__file__).parents[2]
DOCS = ROOT / 'docs'
NAV = re.findall(
    r'- (?:.*: )?(\S+\.md)$', (ROOT / 'mkdocs.yml').read_text(), re.MULTILINE
)
MADE = {'results.svg'}
"""Put beside the pages when they are built."""


PAGES = sorted(DOCS.rglob('*.md'))
NAMES = [page.relative_to(DOCS).as_posix() for page in PAGES]
QUICK = ('check',)
"""Commands whose shown output is checked daily; ``ZOO=all`` checks all."""


@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_code_runs_and_prints_what_is_shown(page):
    text = page.read_text()
    expected = expected_outputs(text)
    printed = [ran.printed for ran in run_and_keep(page)]
    for shown, found in zip(expected, printed, strict=True):
        assert shown is None or matches(shown, found), found
    if is_executed(text):  # the build of the docs adds what is printed
        assert not any(expected)
    failed, _ = doctest.testfile(
        str(page), module_relative=False, optionflags=doctest.ELLIPSIS
    )
    assert failed == 0


def test_the_pages_are_built(tmp_path):
    """Without a warning, by what `make docs` runs."""
    options = ['--strict', '--quiet', '--site-dir', str(tmp_path)]
    done = subprocess.run(
        [sys.executable, '-m', 'mkdocs', 'build', *options],
        env=os.environ | {'NO_MKDOCS_2_WARNING': '1'},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(list(tmp_path.rglob('*.html'))) >= len(NAV)


def shown_commands():
    """Commands of the page of training, each with the output that is shown."""
    text = (DOCS / 'training.md').read_text()
    return re.findall(
        r'^    \$ braintrace (.*)\n((?:    .*\n|\n(?=    ))*)', text, re.M
    )


@pytest.mark.parametrize(('command', 'output'), shown_commands())
def test_commands_print_what_is_shown(command, output, tmp_path, monkeypatch, capsys):
    words = shlex.split(command)
    if words[0] not in QUICK and os.environ.get('ZOO') != 'all':
        pytest.skip('runs with ZOO=all')
    monkeypatch.chdir(tmp_path)
    code = blocks_of((DOCS / 'training.md').read_text())
    (own_model,) = [block for block in code if 'def make():' in block]
    Path('mymodels.py').write_text(own_model)
    assert braintrace.cli.main(words) == 0
    printed = capsys.readouterr().out
    shown = '\n'.join(line.removeprefix('    ') for line in output.splitlines())
    assert matches(shown, printed), printed


def test_what_counts_as_the_output_shown():
    shown = 'loss 0.25 after 20 steps\n...\nat ...: done'
    printed = 'loss 0.26 after 20 steps\nmore\nmore\nat a.py:3: done\n'
    assert matches(shown, printed)
    assert not matches(shown, printed.replace('0.26', '0.27'))
    assert not matches(shown, printed.replace('20', '21'))
    assert not matches(shown, printed + 'and more\n')
    assert not matches(shown, printed.replace(': done', ''))
    assert is_near('3.45e-01', '3.46e-01')
    assert not is_near('3.45e-01', '3.47e-01')
    page = (
        '```python\nprint(1)  # prints 1\n```\n\n```python\nf()\n```\n```text\n2\n```'
    )
    first, second = expected_outputs(page)
    assert matches(first, '1')
    assert not matches(first, '3')
    assert matches(second, '2')


def test_long_lines_of_output_are_folded():
    from docs import COLUMNS, folded

    reason = 'a reason of many words ' * 5
    table, error, short = f'  weight  local  {reason}', f'  Why: {reason}', 'a   row'
    lines = folded('\n'.join([table, error, short])).split('\n')
    assert max(map(len, lines)) <= COLUMNS
    assert lines[1].startswith(' ' * len('  weight  local  ') + 'reason')
    assert lines[3].startswith('    many')
    assert lines[4] == short
    assert ' '.join(lines).split() == f'{table} {error} {short}'.split()


def test_page_of_rules_has_the_row_of_every_rule():
    file = ROOT / 'experiments' / 'rules.py'
    spec = importlib.util.spec_from_file_location('experiments_rules', file)
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    text = (DOCS / 'rules.md').read_text()
    assert rules.with_table(text) == text, 'make rules ARGS=--table'


def test_pages_of_the_rules_say_what_the_rules_say():
    made = written()
    folders = (DOCS / 'rules', DOCS / 'pictures' / 'rules')
    assert set(made) == {file for folder in folders for file in folder.iterdir()}
    for file, text in made.items():
        assert file.read_text() == text, 'python scripts/rule_pages.py'
        if file.suffix == '.md':
            for part in (
                'from the rule',
                '## Formula',
                '## When to use it',
                '## Paper',
            ):
                assert part in text, file.name


def test_notebooks_are_those_of_the_tutorials():
    made = notebooks()
    assert set(made) == set((DOCS / 'tutorials').glob('*.ipynb'))
    for file, text in made.items():
        assert file.read_text() == text, 'python scripts/notebooks.py'
        page = file.with_suffix('.md').read_text()
        assert f']({file.name})' in page
        assert is_executed(page)
        cells = json.loads(text)['cells']
        codes = [''.join(c['source']) for c in cells if c['cell_type'] == 'code']
        for code, block in zip(codes, blocks_of(page), strict=True):
            assert code.removeprefix(INLINE).removesuffix('\nfigure') == block.strip(
                '\n'
            )


def text_of(page):
    return re.sub(r'```.*?```', '', page.read_text(), flags=re.DOTALL)


def anchors(page):
    """The anchors of a page's headings, as mkdocs makes them."""
    headings = re.findall(r'^#+ (.*)$', text_of(page), re.MULTILINE)
    return {
        re.sub(r'[-\s]+', '-', re.sub(r'[^\w\s-]', '', h).strip().lower())
        for h in headings
    }


def test_navigation_has_every_page():
    assert len(NAV) == len(set(NAV))
    assert sorted(NAV) == sorted(NAMES)


@pytest.mark.parametrize('page', PAGES, ids=NAMES)
def test_links(page):
    for target in re.findall(r'\]\(([^)\s]+)\)', text_of(page)):
        if re.match(r'https?://', target) or target in MADE:
            continue
        file, _, anchor = target.partition('#')
        found = page.parent / file if file else page
        assert found.exists(), f'{page.name}: {target}'
        assert not anchor or anchor in anchors(found), f'{page.name}: {target}'


def test_every_example_is_listed():
    listed = set(re.findall(r'`(\w+\.py)`', (DOCS / 'index.md').read_text()))
    assert {file.name for file in (ROOT / 'examples').glob('*.py')} <= listed
