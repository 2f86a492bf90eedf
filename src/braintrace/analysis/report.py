"""The report of a compilation: as text, and as a page."""

from __future__ import annotations

import pathlib
import sys
from collections import Counter
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple, TextIO

from ..errors import printable
from ..program import Path, StepProgram
from ..program.step import path_name
from .chart import Chart, ChartMaker
from .diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel
from .groups import HiddenGroup
from .page import framed, page
from .sites import HiddenParamOpRelation


class ParameterGradient(NamedTuple):
    """What a parameter gets, and why: ``kind`` is a credit class, or what a learning
    rule gives.

    A rule gives 'equal to BPTT', 'local', 'approximate', 'one step' or 'none'.
    """

    kind: str
    reason: str


@dataclass(frozen=True, repr=False)
class CompilationReport:
    """All that a compilation found, to be read by a person.

    ``etrace_weights`` maps parameters with a site to their credit class, in a learner's
    report to what its rule gives them; ``excluded_weights`` those without one to the
    reason. A learner adds its ``rule``, the shapes and types of its ``traces``, by
    their names, and what the rule ``gives`` each parameter array.
    """

    hidden_groups: tuple[HiddenGroup, ...]
    etrace_weights: dict[Path, str]
    excluded_weights: dict[Path, str]
    dynamic_states: tuple[Path, ...]
    diagnostics: tuple[CompilationRecord, ...]
    model: str
    program: StepProgram
    sites: tuple[HiddenParamOpRelation, ...]
    rule: Any = None
    traces: dict[tuple, Any] | None = None
    gives: dict[str, ParameterGradient] | None = None
    counts: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        kinds = Counter(
            str(r.kind) for r in self.diagnostics if r.kind is not DiagnosticKind.CREDIT
        )
        found = Counter(given.kind for given in self.gradients.values())
        object.__setattr__(self, 'counts', {**found, **kinds})

    @property
    def credits(self) -> tuple[CompilationRecord, ...]:
        """The credit record of every array of every parameter."""
        return tuple(r for r in self.diagnostics if r.kind is DiagnosticKind.CREDIT)

    @property
    def gradients(self) -> dict[str, ParameterGradient]:
        """What every parameter array gets, by name: from the rule of a learner; else
        its credit class."""
        classes = {
            r.context['name']: ParameterGradient(
                r.context['credit'], r.context['reason']
            )
            for r in self.credits
        }
        return {
            **classes,
            **{
                name: given
                for name, given in (self.gives or {}).items()
                if name in classes
            },
        }

    @cached_property
    def chart(self) -> Chart:
        """The model as boxes and arrows."""
        return ChartMaker(
            self.program, self.hidden_groups, self.sites, self.diagnostics
        ).make()

    def to_str(
        self, level: DiagnosticLevel | str | int = DiagnosticLevel.NOTICE
    ) -> str:
        """The report as text, with diagnostics of at least the given level: its name,
        or its number from 0."""
        level = (
            list(DiagnosticLevel)[level]
            if isinstance(level, int)
            else DiagnosticLevel(level.lower())
        )
        lines = []
        if self.rule is not None:
            lines += [
                'Rule',
                f'  {self.rule.name}, equal to BPTT when: {self.rule.exact_when}',
                '',
            ]
        lines += ['Hidden groups']
        for group in self.hidden_groups:
            names = ', '.join(path_name(p) for p in group.hidden_paths)
            lines.append(
                f'  {group.index}: {names}   positions {group.varshape}, states per position {group.num_state}'
            )
        by = (
            'exact local traces would give (credit class)'
            if self.rule is None
            else f'{self.rule.name} gives'
        )
        lines += ['', f'Parameters, and what {by}']
        rows = [
            tuple(map(printable, (name, *given)))
            for name, given in self.gradients.items()
        ]
        width = max((len(name) for name, _, _ in rows), default=0)
        lines += [
            f'  {name:{width}}  {kind:13}  {reason}' for name, kind, reason in rows
        ]
        if self.dynamic_states:
            lines += [
                '',
                'Other states',
                *(f'  {path_name(p)}' for p in self.dynamic_states),
            ]
        shown = [
            r
            for r in self.diagnostics
            if r.kind is not DiagnosticKind.CREDIT and r.level >= level
        ]
        if shown:
            lines += ['', 'Diagnostics', *(f'  {r!r}' for r in shown)]
        # Names come from the user's model: none of them may control the terminal.
        return '\n'.join(map(printable, lines))

    def show(
        self,
        level: DiagnosticLevel | str | int = DiagnosticLevel.NOTICE,
        file: TextIO | None = None,
    ) -> None:
        """Print the report."""
        print(self.to_str(level), file=file or sys.stdout)

    def to_html(self, file: Any = None, *, memory: Any = None) -> str:
        """The report as a page that stands alone; written to a file (a path, or open
        for text) if one is given.

        ``memory``: a plan of :meth:`Learner.memory_plan`, to be drawn as bars.
        """
        text = page(self, memory)
        if hasattr(file, 'write'):
            file.write(text)
        elif file is not None:
            pathlib.Path(file).write_text(text, encoding='utf-8')
        return text

    def _repr_html_(self) -> str:
        return framed(self.to_html())

    def dict(self) -> dict[str, Any]:
        """The record as a dictionary."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __repr__(self) -> str:
        counts = ', '.join(f'{n} {name}' for name, n in self.counts.items())
        rule = '' if self.rule is None else f'{self.rule.name}; '
        return f'CompilationReport({rule}{len(self.hidden_groups)} hidden group(s); {counts})'

    def __str__(self) -> str:
        return self.to_str()
