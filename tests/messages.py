"""The golden file of messages: every error and warning of the package that a daily test provokes.

Tests assert the class and a key word. The whole texts are noted here, where `pytest.raises` and `pytest.warns`
see them, and compared with `tests/texts/messages.txt`. After a text was changed on purpose, `make messages` writes
the file again; review its diff. Parts that differ from run to run are replaced (`in_general`).
"""

import contextlib
import os
import re
from pathlib import Path

import pytest

FILE = Path(__file__).parent / 'texts' / 'messages.txt'
MODE = os.environ.get('MESSAGES', '')  # '', 'check' or 'write'
NOTES = FILE.parents[2] / '.cache' / 'messages'
GENERAL = [
    (r'/[\w./-]*/(tests|src|site-packages)/', r'\1/'),  # folders of this machine
    (r'[\w./-]*pytest-of-[\w./-]+', '/tmp/...'),
    (r'(\.\./)*/?tmp/[\w./-]+', '/tmp/...'),
    (r'\.part-\w+', '.part-...'),
    (r'(\w\.py):\d+', r'\1:...'),
    (r'line \d+', 'line ...'),
    (r'0x[0-9a-f]+', '0x...'),
    (r'process \d+', 'process ...'),
    (r'\d+\.\d+ (µs|ms|s)\b', r'... \1'),
]


def in_general(text):
    for pattern, replacement in GENERAL:
        text = re.sub(pattern, replacement, text)
    return '\n'.join(line.rstrip() for line in text.splitlines())


def is_ours(kind, text):
    return 'Why: ' in text or kind.__module__.startswith('braintrace')


class Messages:
    """Texts by class, as they are provoked in one process."""

    def __init__(self):
        self.seen = set()
        self.golden = (
            set(FILE.read_text().strip().split('\n\n')) if FILE.exists() else set()
        )

    def note(self, kind, text):
        if not is_ours(kind, text):
            return
        message = f'{kind.__name__}: {in_general(text)}'.replace('\n\n', '\n').strip()
        self.seen.add(message)
        if MODE == 'check' and message not in self.golden:
            pytest.fail(
                f'not in {FILE.name}; changed on purpose? `make messages`\n{message}'
            )

    def install(self):
        raises, warns = pytest.raises, pytest.warns

        @contextlib.contextmanager
        def noting_raises(*args, **kwargs):
            with raises(*args, **kwargs) as info:
                yield info
            self.note(info.type, str(info.value))

        @contextlib.contextmanager
        def noting_warns(*args, **kwargs):
            with warns(*args, **kwargs) as record:
                yield record
            for warning in record:
                self.note(warning.category, str(warning.message))

        # With a function to call they are no context managers.
        pytest.raises = lambda *a, **k: (noting_raises if len(a) < 2 else raises)(
            *a, **k
        )
        pytest.warns = lambda *a, **k: (noting_warns if len(a) < 2 else warns)(*a, **k)

    def save(self, worker):
        """In a worker its part; elsewhere the file, from all parts."""
        NOTES.mkdir(parents=True, exist_ok=True)
        (NOTES / f'{worker}.txt').write_text('\n\n'.join(sorted(self.seen)))
        if worker != 'main':
            return
        every = set()
        for part in NOTES.glob('*.txt'):
            every |= set(part.read_text().split('\n\n')) - {''}
            part.unlink()
        FILE.write_text('\n\n'.join(sorted(every)) + '\n')
