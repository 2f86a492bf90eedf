"""`CompilationReport(graph)`: the findings as the published package lists them."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from ..graph.diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel
from ..graph.etrace_graph import ETraceGraph
from ..program import Path
from ..report import report
from .parts import OfEitherKind

EXCLUDED = (
    DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL,
    DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT,
    DiagnosticKind.STATE_MISMATCH,
)
"""Kinds of records that say why a parameter has no trace."""


class GraphReport:
    """The findings in a graph, as lists of pairs."""

    def __init__(self, graph: ETraceGraph):
        self.graph = graph

    @property
    def hidden_groups(self) -> list[tuple[int, list[Path]]]:
        """Index and paths of every group."""
        groups = self.graph.hidden_groups
        return [(group.index, list(group.hidden_paths)) for group in groups]

    @property
    def etrace_weights(self) -> list[tuple[Path, list[int]]]:
        """The path of every parameter array with a trace, and the indices of its
        groups."""
        return [
            (parameter.path, [group.index for group in relation.hidden_groups])
            for relation in self.graph.hidden_param_op_relations
            for parameter in relation.parameters
        ]

    @property
    def excluded_weights(self) -> list[tuple[Path, str | None]]:
        """The path of every other parameter, and the kind of the record that says
        why."""
        reasons: dict[Path | None, str] = {
            record.weight_path: record.kind.value
            for record in self.diagnostics
            if record.kind in EXCLUDED
        }
        return [
            (path, reasons.get(path)) for path in self.graph.report.excluded_weights
        ]

    @property
    def dynamic_states(self) -> list[Path]:
        """Paths of states that change and are not hidden."""
        return list(self.graph.report.dynamic_states)

    @property
    def diagnostics(self) -> tuple[CompilationRecord, ...]:
        """All records."""
        return tuple(self.graph.diagnostics)

    @property
    def counts(self) -> dict[str, int]:
        """Sizes of the parts, and numbers of warnings and errors."""
        levels = [record.level for record in self.diagnostics]
        return {
            'hidden_groups': len(self.hidden_groups),
            'etrace_weights': len(self.etrace_weights),
            'excluded_weights': len(self.excluded_weights),
            'warnings': levels.count(DiagnosticLevel.WARNING),
            'errors': levels.count(DiagnosticLevel.ERROR),
        }

    def to_str(self, level: int | str = 1) -> str:
        """The findings as text: from level 2 with warnings, from 3 with all records.

        A :class:`DiagnosticLevel` or its name means what it means elsewhere here.
        """
        shown: str = level if isinstance(level, str) else _level_of(level)
        return self.graph.report.to_str(shown)

    def show(self, level: int | str = 1, *, file: TextIO | None = None) -> None:
        """Print the findings."""
        print(self.to_str(level), file=file or sys.stdout)

    def __repr__(self) -> str:
        counts = ', '.join(f'{name}={n}' for name, n in self.counts.items())
        return f'CompilationReport({counts})'


def _level_of(number: int) -> DiagnosticLevel:
    if number < 2:
        return DiagnosticLevel.ERROR
    return DiagnosticLevel.WARNING if number == 2 else DiagnosticLevel.INFO


class CompilationReport(OfEitherKind):
    """``CompilationReport(graph)``: the findings as lists of pairs. With fields by
    name: the report of graphs and learners."""

    ours, with_states = report.CompilationReport, GraphReport

    @staticmethod
    def is_ours(*args: Any, **fields: Any) -> bool:
        return len(args) + len(fields) != 1
