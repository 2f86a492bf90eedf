"""Run the Python blocks of a page, once for the tests and the build of the docs.

The tests keep what a page printed and drew in ``.cache/docs``. The build uses that,
unless the page, the package or a library has changed since. A page with
``own_process: true`` on top runs in a new process, since it sets up devices. To run
pages by hand:

    python scripts/run_pages.py docs/tutorials/first-network.md
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib.metadata
import io
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CACHE = ROOT / '.cache' / 'docs'
BLOCK = re.compile(r'```python\n(.*?)```', re.DOTALL)


@dataclass(frozen=True)
class Ran:
    """What one Python block of a page printed, and the picture it made, as SVG."""

    printed: str
    picture: str | None = None


def is_executed(text: str) -> bool:
    """Whether a page shows what its blocks print: it has ``execute: true`` on top."""
    return _is_set('execute', text)


def _is_set(name: str, text: str) -> bool:
    pattern = rf'---\n(?:.*\n)*?{name}: true\n(?:.*\n)*?---\n'
    return bool(re.match(pattern, text))


def blocks_of(text: str) -> list[str]:
    """The Python blocks of a page."""
    return BLOCK.findall(text)


def run(page: Path) -> list[Ran]:
    """Run the blocks of a page, one after the other, in one namespace."""
    if _is_set('own_process', page.read_text()):
        return _run_apart(page)
    return run_here(page)


def _run_apart(page: Path) -> list[Ran]:
    """Run a page in a new process."""
    command = [sys.executable, __file__, '--json', str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f'{page.name}:\n{done.stderr}')
    return [Ran(**ran) for ran in json.loads(done.stdout.splitlines()[-1])]


def run_here(page: Path) -> list[Ran]:
    """Run the blocks of a page in this process."""
    names: dict[str, Any] = {}
    return [_run(code, page, names) for code in blocks_of(page.read_text())]


def _run(code: str, page: Path, names: dict[str, Any]) -> Ran:
    names.pop('figure', None)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f'{page.stem}.py', 'exec'), names)
    text = printed.getvalue().replace(f'{ROOT}/', '').rstrip()
    if 'figure' not in names:
        return Ran(text)
    drawn = io.BytesIO()
    names['figure'].savefig(drawn, format='svg')
    return Ran(text, base64.b64encode(drawn.getvalue()).decode())


def run_and_keep(page: Path) -> list[Ran]:
    """What :func:`run` gives, kept for the build of the docs."""
    found = run(page)
    CACHE.mkdir(parents=True, exist_ok=True)
    record = {'key': _key(page), 'blocks': [asdict(ran) for ran in found]}
    beside = _file(page).with_suffix('.new')
    beside.write_text(json.dumps(record))
    beside.replace(_file(page))
    return found


def last_run(page: Path) -> list[Ran]:
    """What the last run gave, if nothing has changed since; otherwise a new one."""
    if _file(page).exists():
        kept = json.loads(_file(page).read_text())
        if kept['key'] == _key(page):
            return [Ran(**ran) for ran in kept['blocks']]
    print(f'running {page.name}', file=sys.stderr, flush=True)
    return run_and_keep(page)


def _file(page: Path) -> Path:
    # Pages of two folders may have the same name.
    return CACHE / f'{page.parent.name}-{page.stem}.json'


def _key(page: Path) -> str:
    """Changes when the output of a page may change."""
    return hashlib.sha256(page.read_bytes() + _environment()).hexdigest()


@functools.cache
def _environment() -> bytes:
    """A digest of the package and of all that is installed."""
    installed = importlib.metadata.distributions()
    versions = sorted({f'{found.name} {found.version}' for found in installed})
    digest = hashlib.sha256(repr([sys.version, *versions]).encode())
    for file in [Path(__file__), *sorted((ROOT / 'src').rglob('*.py'))]:
        digest.update(file.read_bytes())
    return digest.digest()


def main(arguments: list[str]) -> None:
    """Run pages, and print what they print; with ``--json`` as one line."""
    pages = [Path(name).resolve() for name in arguments if name != '--json']
    for page in pages:
        start = time.perf_counter()
        if '--json' in arguments:
            print(json.dumps([asdict(ran) for ran in run_here(page)]))
            continue
        for ran in run_and_keep(page):
            print(ran.printed, '[a picture]' if ran.picture else '', sep='\n')
        print(f'{page.name}: {time.perf_counter() - start:.1f} s')


if __name__ == '__main__':
    main(sys.argv[1:])
