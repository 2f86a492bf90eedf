"""What the compiler noticed, as records a program can filter and a person can read."""

from __future__ import annotations

import enum
import sys
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TextIO

from ..program.step import Path, path_name


class DiagnosticKind(enum.StrEnum):
    """What a record is about."""

    CREDIT = 'credit'
    CUT = 'cut'
    MISSING_RULE = 'missing_rule'
    PROBED = 'probed'
    NOT_DIFFERENTIABLE = 'not_differentiable'
    OTHER_STATE = 'other_state'
    UNUSED_STATE = 'unused_state'


class DiagnosticLevel(enum.IntEnum):
    """How much a record matters: for information, an approximation, a loss of credit."""

    INFO = 10
    NOTICE = 20
    WARNING = 30


class CompilationRecord(NamedTuple):
    """One finding of the compiler."""

    kind: DiagnosticKind
    level: DiagnosticLevel
    message: str
    primitive: str | None = None
    weight_path: Path | None = None
    hidden_paths: tuple[Path, ...] = ()
    context: dict[str, Any] | None = None

    def dict(self) -> dict[str, Any]:
        """The record as a dictionary."""
        return self._asdict()

    def __repr__(self) -> str:
        return f'{self.level.name.lower():7} {self.kind}: {self.message}'


@dataclass(frozen=True, repr=False)
class CompilationReport:
    """All that a compilation found, to be read by a person.

    ``etrace_weights`` maps parameters with a site to their credit class, ``excluded_weights``
    those without one to the reason.
    """

    hidden_groups: tuple[Any, ...]
    etrace_weights: dict[Path, str]
    excluded_weights: dict[Path, str]
    dynamic_states: tuple[Path, ...]
    diagnostics: tuple[CompilationRecord, ...]
    counts: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        kinds = Counter(str(r.kind) for r in self.diagnostics if r.kind is not DiagnosticKind.CREDIT)
        classes = Counter(r.context['credit'] for r in self.credits)
        object.__setattr__(self, 'counts', {**classes, **kinds})

    @property
    def credits(self) -> tuple[CompilationRecord, ...]:
        """The credit record of every array of every parameter."""
        return tuple(r for r in self.diagnostics if r.kind is DiagnosticKind.CREDIT)

    def to_str(self, level: DiagnosticLevel | str = DiagnosticLevel.NOTICE) -> str:
        """The report as text, with diagnostics of at least the given level."""
        level = DiagnosticLevel[level.upper()] if isinstance(level, str) else level
        lines = ['Hidden groups']
        for group in self.hidden_groups:
            names = ', '.join(path_name(p) for p in group.hidden_paths)
            lines.append(
                f'  {group.index}: {names}   positions {group.varshape}, states per position {group.num_state}'
            )
        lines += ['', 'Parameters']
        rows = [(r.context['name'], r.context['credit'], r.context['reason']) for r in self.credits]
        width = max((len(name) for name, _, _ in rows), default=0)
        lines += [f'  {name:{width}}  {credit:13}  {reason}' for name, credit, reason in rows]
        if self.dynamic_states:
            lines += ['', 'Other states', *(f'  {path_name(p)}' for p in self.dynamic_states)]
        shown = [r for r in self.diagnostics if r.kind is not DiagnosticKind.CREDIT and r.level >= level]
        if shown:
            lines += ['', 'Diagnostics', *(f'  {r!r}' for r in shown)]
        return '\n'.join(lines)

    def show(self, level: DiagnosticLevel | str = DiagnosticLevel.NOTICE, file: TextIO | None = None) -> None:
        """Print the report."""
        print(self.to_str(level), file=file or sys.stdout)

    def dict(self) -> dict[str, Any]:
        """The record as a dictionary."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __repr__(self) -> str:
        counts = ', '.join(f'{n} {name}' for name, n in self.counts.items())
        return f'CompilationReport({len(self.hidden_groups)} hidden group(s); {counts})'

    def __str__(self) -> str:
        return self.to_str()
