"""Errors of the package, each told in three parts."""

from __future__ import annotations


def three_parts(wrote: str, why: str, instead: str) -> str:
    """The text of an error: what was written, why it cannot work, what to write instead."""
    return f'{wrote}\n  why it cannot work: {why}\n  what to write instead: {instead}'


class CompilationError(Exception):
    """A model cannot be turned into an eligibility-trace graph."""


class NotSupportedError(Exception):
    """A well-formed request that this package does not serve."""
