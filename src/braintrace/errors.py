"""Errors of the package, each with three parts: what was written, why it fails, the
fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def three_parts(written: str, why: str, fix: str) -> str:
    """The text of an error: what was written, why it does not work, how to fix it.

    >>> print(three_parts('batch_size=0', 'a batch has samples', 'batch_size=1'))
    batch_size=0
      Why: a batch has samples
      Fix: batch_size=1
    """
    return f'{written}\n  {_WHY}{why}\n  {_FIX}{fix}'


_WHY = 'Why: '
_FIX = 'Fix: '


def printable(text: object, keep: str = '') -> str:
    r"""A text for a terminal: characters that would control it are written as escapes,
    but for those to ``keep``.

    >>> printable('layer\n\x1b[31m')
    'layer\\n\\x1b[31m'
    """
    shown = lambda c: c.isprintable() or c in keep
    escape = lambda c: c.encode('unicode_escape').decode()
    return ''.join(c if shown(c) else escape(c) for c in str(text))


def one_of(choices: Iterable[str], given: object = '') -> str:
    """The fix for an unknown name: one of these, the nearest first."""
    names = list(choices)
    near = difflib.get_close_matches(str(given).lower(), names, 1)
    named = ', '.join(repr(name) for name in dict.fromkeys([*near, *names]))
    return f'{near[0]!r}? There are: {named}' if near else f'one of {named}'


def is_explained(error: BaseException) -> bool:
    """Whether the text of an error has the three parts."""
    text = str(error)
    return f'\n  {_WHY}' in text and f'\n  {_FIX}' in text


class UnknownName(KeyError):
    """A name that a mapping does not have; its text is shown as it is written."""

    __str__ = Exception.__str__


class ArgumentError(ValueError, TypeError, AssertionError):
    """An argument with a wrong value or type.

    It can be caught as each of its base types, because JAX and other packages raise
    different types for the same mistake.
    """


class UnknownParameter(UnknownName, ValueError):
    """A parameter that a model does not have."""


class NotCompiledError(ValueError, RuntimeError):
    """A learner is used before it is compiled."""


class CompilationError(Exception):
    """A model cannot be turned into an eligibility-trace graph."""


class InputError(CompilationError, ValueError, TypeError):
    """Inputs or a step function that do not match the step of a model.

    It can be caught as each of its base types, like :class:`ArgumentError`.
    """


class NotSupportedError(Exception):
    """A valid request that this package does not support."""


class UnsupportedStep(CompilationError, NotSupportedError):
    """A step that runs, but that this package does not train: one that writes a
    parameter."""


class RecompilationWarning(UserWarning):
    """A program is compiled again and again, although one compilation would be
    enough."""


class CreditWarning(UserWarning):
    """Some parameters of a compiled model get no gradient, or lose most of it."""
