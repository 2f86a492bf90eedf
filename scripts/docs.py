"""What mkdocs needs: pages marked ``execute: true`` show what their code prints, long
lines of output are folded, and docstrings are read as Markdown, with methods that are functions of another file."""

from __future__ import annotations

import ast
import base64
import copy
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
from run_pages import BLOCK, ROOT, last_run

EVERY_RULE = '<!-- every rule -->'
TEXT = re.compile(r'(?<=^```text\n).*?(?=^```$)', re.DOTALL | re.MULTILINE)
COLUMNS = 88
"""The width of a code block on a page."""


def with_output(markdown: str, page: Path) -> tuple[str, dict[str, bytes]]:
    """A page with what its Python blocks print after each, and the pictures of blocks
    that make a ``figure``."""
    ran = iter(last_run(page))
    pictures: dict[str, bytes] = {}

    def shown(block: re.Match) -> str:
        output = next(ran)
        parts = [block[0]]
        if output.printed:
            # Where packages are installed is no matter of the reader.
            printed = re.sub(r'\S*/site-packages/', '', output.printed)
            parts.append(f'```text\n{printed}\n```')
        if output.picture is not None:
            name = f'{page.stem}-{len(pictures)}.svg'
            pictures[name] = base64.b64decode(output.picture)
            parts.append(f'![what the code above draws]({name})')
        return '\n\n'.join(parts)

    return BLOCK.sub(shown, markdown), pictures


def folded(text: str) -> str:
    """Printed lines folded at the width of a page, below the last column of a table."""
    return '\n'.join(_folded(line) for line in text.split('\n'))


def _folded(line: str) -> str:
    columns = [gap.end() for gap in re.finditer(r'^ +|  +', line)]
    indent = max((c for c in columns if c <= COLUMNS // 2), default=0)
    return textwrap.fill(
        line,
        COLUMNS,
        subsequent_indent=' ' * (indent if len(columns) > 1 else indent + 2),
        replace_whitespace=False,
        break_on_hyphens=False,
        break_long_words=False,
    )


def on_files(files: Any, config: Any) -> None:
    """The picture of the benchmark is a page's, too."""
    files.append(
        File.generated(
            config, 'results.svg', abs_src_path=str(ROOT / 'benchmarks' / 'results.svg')
        )
    )


def registered_rules() -> list[str]:
    """The functions that make rules, by their full names, read from their files."""
    found = []
    for file in sorted((ROOT / 'src' / 'braintrace' / 'rules').glob('*.py')):
        for node in ast.parse(file.read_text()).body:
            decorators = map(ast.unparse, getattr(node, 'decorator_list', ()))
            if any(text.startswith('register(') for text in decorators):
                found.append(f'braintrace.rules.{file.stem}.{node.name}')
    return found


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rules are listed from their files, and marked pages show what their code
    prints."""
    listed = '\n'.join(f'::: {name}' for name in registered_rules())
    markdown = markdown.replace(EVERY_RULE, listed)
    if page.meta.get('execute'):
        markdown, pictures = with_output(markdown, Path(page.file.abs_src_path))
        folder = Path(page.file.src_uri).parent
        for name, content in pictures.items():
            beside = (folder / name).as_posix()
            files.append(File.generated(config, beside, content=content))
    return TEXT.sub(lambda block: folded(block[0]), markdown)


class Docstrings(griffe.Extension):
    """Docstrings as they are written here: roles become code, examples a block."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for everything that has a docstring."""
        if obj.docstring is not None and '```pycon' not in obj.docstring.value:
            text = re.sub(r':\w+:`~?([^`]*)`', r'`\1`', obj.docstring.value)
            obj.docstring.value = re.sub(
                r'(^|\n)(>>> .*?)(?=\n\n|$)',
                r'\1```pycon\n\2\n```',
                text,
                flags=re.DOTALL,
            )

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Called once all is read: a method that is a function of another file, as
        ``save = saving.save``, is shown as a method."""
        learner = pkg['learner.learner.Learner']
        for name, member in list(learner.members.items()):
            value = getattr(member, 'value', None)
            if isinstance(value, griffe.ExprAttribute):
                file, function = str(value).split('.')
                method = copy.copy(pkg['learner'][file][function])
                method.parent = learner
                for one in (method, *(method.overloads or ())):
                    # The class takes the place of the first argument.
                    one.parameters = griffe.Parameters(*list(one.parameters)[1:])
                learner.members[name] = method
