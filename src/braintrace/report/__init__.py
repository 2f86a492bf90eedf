"""The report of a compilation: the record, its text, and its page with a drawing of the
model."""

from .report import CompilationReport

__all__ = ['CompilationReport']
