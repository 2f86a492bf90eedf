"""Errors of the package, each told in three parts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def three_parts(wrote: str, why: str, instead: str) -> str:
    """The text of an error: what was written, why it cannot work, what to write
    instead."""
    return f'{wrote}\n  {_WHY}{why}\n  what to write instead: {instead}'


_WHY = 'why it cannot work: '


def printable(text: object, keep: str = '') -> str:
    r"""A text for a terminal: characters that would control it are written as escapes, but for those to ``keep``.

    >>> printable('layer\n\x1b[31m')
    'layer\\n\\x1b[31m'
    """
    shown = lambda c: c.isprintable() or c in keep
    escape = lambda c: c.encode('unicode_escape').decode()
    return ''.join(c if shown(c) else escape(c) for c in str(text))


def one_of(choices: Iterable[str], given: object = '') -> str:
    """What to write instead of a name that is not known: one of these, the nearest
    first."""
    names = list(choices)
    near = difflib.get_close_matches(str(given).lower(), names, 1)
    named = ', '.join(repr(name) for name in dict.fromkeys([*near, *names]))
    return f'{near[0]!r}? There are: {named}' if near else f'one of {named}'


def is_explained(error: BaseException) -> bool:
    """Whether an error is told in three parts."""
    return _WHY in str(error)


class CompilationError(Exception):
    """A model cannot be turned into an eligibility-trace graph."""


class NotSupportedError(Exception):
    """A well-formed request that this package does not serve."""
