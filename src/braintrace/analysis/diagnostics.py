"""What the compiler noticed, as records a program can filter and a person can read."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from ..program.step import Path


class DiagnosticKind(enum.StrEnum):
    """What a record is about."""

    CREDIT = 'credit'
    CUT = 'cut'
    MISSING_RULE = 'missing_rule'
    PROBED = 'probed'
    NOT_DIFFERENTIABLE = 'not_differentiable'
    OTHER_STATE = 'other_state'
    UNUSED_STATE = 'unused_state'


CUTS = (DiagnosticKind.CUT, DiagnosticKind.OTHER_STATE)
"""Where local traces lose credit; rules without them do not."""


class DiagnosticLevel(enum.StrEnum):
    """How much a record matters: for information, an approximation, a loss of credit, a
    failure.

    Levels compare by weight, not as words. No record of a compiled graph is an error:
    what cannot be compiled raises.

    >>> DiagnosticLevel('warning') > DiagnosticLevel.NOTICE, DiagnosticLevel.ERROR > DiagnosticLevel.INFO
    (True, True)
    """

    INFO = 'info'
    NOTICE = 'notice'
    WARNING = 'warning'
    ERROR = 'error'

    @property
    def weight(self) -> int:
        """Its place among the levels."""
        return list(DiagnosticLevel).index(self)

    def __lt__(self, other: str) -> bool:
        return self.weight < DiagnosticLevel(other).weight

    def __le__(self, other: str) -> bool:
        return self.weight <= DiagnosticLevel(other).weight

    def __gt__(self, other: str) -> bool:
        return self.weight > DiagnosticLevel(other).weight

    def __ge__(self, other: str) -> bool:
        return self.weight >= DiagnosticLevel(other).weight


LEVELS = {
    'none': DiagnosticLevel.WARNING,
    'one step': DiagnosticLevel.NOTICE,
    'instantaneous': DiagnosticLevel.NOTICE,
}
"""How much it matters that a parameter gets this; all other kinds are information."""


class CompilationRecord(NamedTuple):
    """One finding of the compiler."""

    kind: DiagnosticKind
    level: DiagnosticLevel
    message: str
    primitive: str | None = None
    weight_path: Path | None = None
    hidden_paths: tuple[Path, ...] = ()
    context: Any = None
    """What else is known, by name; the names depend on the kind."""

    def dict(self) -> dict[str, Any]:
        """The record as a dictionary."""
        return self._asdict()

    def __repr__(self) -> str:
        return f'{self.level.name.lower():7} {self.kind}: {self.message}'
