"""Errors of the package, each told in three parts."""

from __future__ import annotations


def three_parts(wrote: str, why: str, instead: str) -> str:
    """The text of an error: what was written, why it cannot work, what to write instead."""
    return f'{wrote}\n  {_WHY}{why}\n  what to write instead: {instead}'


_WHY = 'why it cannot work: '


def is_explained(error: BaseException) -> bool:
    """Whether an error is told in three parts."""
    return _WHY in str(error)


class CompilationError(Exception):
    """A model cannot be turned into an eligibility-trace graph."""


class NotSupportedError(Exception):
    """A well-formed request that this package does not serve."""
