"""Write the tutorials as notebooks, each beside its page.

    python scripts/notebooks.py

A notebook holds the text and the code of the page, without output: the page shows it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TUTORIALS = ROOT / 'docs' / 'tutorials'
BLOCK = re.compile(r'```python\n(.*?)```', re.DOTALL)
INLINE = '%matplotlib inline\n'
INSTALL = (
    'Needs `braintrace-online[train]`; the tutorial with units also needs '
    '`brainpy.state` and `braintools`.'
)


def notebook(page: str) -> str:
    """The text of the notebook of a page."""
    text = re.sub(r'\A---\n.*?\n---\n', '', page, flags=re.DOTALL)
    text = re.sub(r'\s*\[Open as a notebook\]\([^)]*\)\.', f'\n\n{INSTALL}', text)
    # Files of the docs are not beside a notebook that was downloaded.
    text = re.sub(r'!\[[^]]*\]\([^)]*\)\n', '', text)
    text = re.sub(r'\[([^]]*)\]\((?!https?:)[^)]*\)', r'\1', text)
    cells = []
    # Text and code take turns, beginning with text.
    for number, part in enumerate(BLOCK.split(text)):
        if part.strip():
            make = _code if number % 2 else _markdown
            cells.append(make(f'cell-{len(cells)}', part.strip('\n')))
    made = {
        'cells': cells,
        'metadata': {
            'kernelspec': {
                'display_name': 'Python 3',
                'language': 'python',
                'name': 'python3',
            },
            'language_info': {'name': 'python'},
        },
        'nbformat': 4,
        'nbformat_minor': 5,
    }
    return json.dumps(made, indent=1, ensure_ascii=False) + '\n'


def _markdown(name: str, text: str) -> dict:
    source = text.splitlines(keepends=True)
    return {'cell_type': 'markdown', 'id': name, 'metadata': {}, 'source': source}


def _code(name: str, text: str) -> dict:
    # A notebook shows a figure that is the last value of a cell.
    if re.search(r'^figure = ', text, re.MULTILINE):
        text = f'{INLINE}{text}\nfigure'
    return {
        'cell_type': 'code',
        'execution_count': None,
        'id': name,
        'metadata': {},
        'outputs': [],
        'source': text.splitlines(keepends=True),
    }


def notebooks() -> dict[Path, str]:
    """The notebook of every tutorial, by its file."""
    pages = sorted(TUTORIALS.glob('*.md'))
    return {page.with_suffix('.ipynb'): notebook(page.read_text()) for page in pages}


if __name__ == '__main__':
    for file, text in notebooks().items():
        file.write_text(text)
