"""What mkdocs needs: pages marked ``execute: true`` run when they are built, docstrings are read as Markdown."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
MEASURED = '<!-- measured -->'
BLOCK = re.compile(r'```python\n(.*?)```', re.DOTALL)


def run(markdown: str, page: str) -> tuple[str, dict[str, bytes]]:
    """A page with what its Python blocks print after each; a block that makes ``figure`` shows it. And the pictures."""
    names: dict[str, Any] = {}
    pictures: dict[str, bytes] = {}

    def shown(block: re.Match) -> str:
        names.pop('figure', None)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block[1], f'{Path(page).stem}.py', 'exec'), names)
        text = printed.getvalue().replace(f'{ROOT}/', '').rstrip()
        found = [block[0], *([f'```text\n{text}\n```'] if text else [])]
        if 'figure' in names:
            name = f'{Path(page).stem}-{len(pictures)}.svg'
            drawn = io.BytesIO()
            names['figure'].savefig(drawn, format='svg')
            pictures[name] = drawn.getvalue()
            found.append(f'![what the code above draws]({name})')
        return '\n\n'.join(found)

    return BLOCK.sub(shown, markdown), pictures


def on_files(files: Any, config: Any) -> None:
    """The picture of the benchmark is a page's, too."""
    files.append(
        File.generated(
            config, 'results.svg', abs_src_path=str(ROOT / 'benchmarks' / 'results.svg')
        )
    )


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The table of the benchmark is that of the README; marked pages are run."""
    if MEASURED in markdown:
        (table,) = re.findall(
            r'results.json -->\n(.*?)\n<!-- end',
            (ROOT / 'README.md').read_text(),
            re.DOTALL,
        )
        markdown = markdown.replace(MEASURED, table)
    if not page.meta.get('execute'):
        return markdown
    print(f'running {page.file.src_uri}', file=sys.stderr, flush=True)
    markdown, pictures = run(markdown, page.file.src_uri)
    for name, content in pictures.items():
        files.append(File.generated(config, name, content=content))
    return markdown


class Docstrings(griffe.Extension):
    """Docstrings as they are written here: roles become code, examples a block."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for everything that has a docstring."""
        if obj.docstring is not None:
            text = re.sub(r':\w+:`~?([^`]*)`', r'`\1`', obj.docstring.value)
            obj.docstring.value = re.sub(
                r'(^|\n)(>>> .*?)(?=\n\n|$)',
                r'\1```pycon\n\2\n```',
                text,
                flags=re.DOTALL,
            )
