"""The pages of the docs: all in the navigation, and no link that leads nowhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / 'docs'
NAV = re.findall(r'- (\S+\.md)$', (ROOT / 'mkdocs.yml').read_text(), re.MULTILINE)
MADE = {'results.svg'}
"""Put beside the pages when they are built."""


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
    assert sorted(NAV) == sorted(page.name for page in DOCS.glob('*.md'))


@pytest.mark.parametrize('page', sorted(DOCS.glob('*.md')), ids=lambda p: p.stem)
def test_links(page):
    for target in re.findall(r'\]\(([^)\s]+)\)', text_of(page)):
        if re.match(r'https?://', target) or target in MADE:
            continue
        file, _, anchor = target.partition('#')
        found = DOCS / file if file else page
        assert found.exists(), f'{page.name}: {target}'
        assert not anchor or anchor in anchors(found), f'{page.name}: {target}'


def test_every_example_is_listed():
    listed = set(re.findall(r'`(\w+\.py)`', (DOCS / 'index.md').read_text()))
    assert {file.name for file in (ROOT / 'examples').glob('*.py')} <= listed
