"""The report of a compilation: as text, and as a page."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TextIO

from ..analysis.credit import ParameterGradient
from ..errors import one_of, printable, three_parts
from ..files import write_whole
from ..graph.diagnostics import (
    RELATIONS,
    CompilationRecord,
    DiagnosticKind,
    DiagnosticLevel,
)
from ..graph.hidden_group import HiddenGroup
from ..graph.relations import Site
from ..program import Path, StepProgram
from ..program.step import path_name
from ..source_lines import short_source
from ..text import shape_text, size_text
from .chart import Chart, ChartMaker, Node
from .page import framed, page


def source_of(node: Node) -> str:
    """Where an operation was written, shortened: the layer of a library, and the user's
    own line that calls it."""
    own = short_source(node.source or '')
    library = node.library and short_source(node.library)
    return f'{library}, called at {own}' if library else own


def _level_of(given: DiagnosticLevel | str | int) -> DiagnosticLevel:
    """A level of diagnostics, from its name or its number."""
    levels = list(DiagnosticLevel)
    if isinstance(given, int):
        return levels[given]
    names = [level.value for level in levels]
    if given.lower() not in names:
        why = 'a report shows diagnostics of at least some level'
        raise ValueError(
            three_parts(f'a report of level {given!r}', why, one_of(names, given))
        )
    return DiagnosticLevel(given.lower())


class Counts(dict[str, int]):
    """How often each kind was found.

    The sizes of the report's parts, 'warnings' and 'errors' can be read by name too;
    they are not among the keys, whose values sum to the number of diagnostics.
    """

    def __init__(self, kinds: Mapping[str, int], sizes: Mapping[str, int]):
        super().__init__(kinds)
        self.sizes = sizes

    def __missing__(self, name: str) -> int:
        return self.sizes[name]


@dataclass(frozen=True, repr=False)
class CompilationReport:
    """The findings of a compilation, as text and as an HTML page.

    ``etrace_weights`` maps parameters with a site to their credit class, or in the
    report of a learner to the gradient that its rule gives them. ``excluded_weights``
    maps the other parameters to the reason. The report of a learner also has its
    ``rule``, the shapes and types of its ``traces`` by name, and the gradient that the
    rule ``gives`` each parameter array.
    """

    hidden_groups: Sequence[HiddenGroup]
    etrace_weights: dict[Path, str]
    excluded_weights: dict[Path, str]
    dynamic_states: tuple[Path, ...]
    diagnostics: tuple[CompilationRecord, ...]
    model: str
    program: StepProgram
    sites: tuple[Site, ...]
    rule: Any = None
    traces: dict[tuple, Any] | None = None
    gives: dict[str, ParameterGradient] | None = None
    counts: Counts = field(init=False)

    def __post_init__(self) -> None:
        kinds = Counter(
            str(r.kind) for r in self.diagnostics if r.kind is not DiagnosticKind.CREDIT
        )
        found = Counter(given.kind for given in self.gradients.values())
        levels = Counter(r.level for r in self.diagnostics if r.kind not in RELATIONS)
        sizes = {
            'hidden_groups': len(self.hidden_groups),
            'etrace_weights': len(self.etrace_weights),
            'excluded_weights': len(self.excluded_weights),
            'warnings': levels[DiagnosticLevel.WARNING],
            'errors': levels[DiagnosticLevel.ERROR],
        }
        object.__setattr__(self, 'counts', Counts({**found, **kinds}, sizes))

    @property
    def credits(self) -> tuple[CompilationRecord, ...]:
        """The credit record of every array of every parameter."""
        return tuple(r for r in self.diagnostics if r.kind is DiagnosticKind.CREDIT)

    @property
    def gradients(self) -> dict[str, ParameterGradient]:
        """The gradient that every parameter array gets, by name. Without a learner, its
        credit class."""
        classes = {
            r.context['name']: ParameterGradient(
                r.context['credit'], r.context['reason']
            )
            for r in self.credits
        }
        gives = self.gives or {}
        return {name: gives.get(name, given) for name, given in classes.items()}

    @cached_property
    def chart(self) -> Chart:
        """The model as boxes and arrows."""
        return ChartMaker(
            self.program, self.hidden_groups, self.sites, self.diagnostics
        ).make()

    def to_str(
        self, level: DiagnosticLevel | str | int = DiagnosticLevel.NOTICE
    ) -> str:
        """The report as text, with diagnostics of at least the given level (its name,
        or its number from 0)."""
        level = _level_of(level)
        lines, by = [], 'exact local traces would give (credit class)'
        if (rule := self.rule) is not None:
            by = f'{rule.name} gives'
            lines += ['Rule', f'  {rule.name}, equal to BPTT when: {rule.exact_when}']
            lines += ['']
        lines += ['Hidden groups']
        for group in self.hidden_groups:
            names = ', '.join(path_name(p) for p in group.hidden_paths)
            lines.append(f'  {group.index}: {names}   {self.size_of_group(group)}')
        lines += ['', f'Parameters, and what {by}']
        rows = [
            tuple(map(printable, (name, *given)))
            for name, given in self.gradients.items()
        ]
        width = max((len(name) for name, _, _ in rows), default=0)
        lines += [
            f'  {name:{width}}  {kind:13}  {reason}' for name, kind, reason in rows
        ]
        lines += self._operation_lines()
        if self.dynamic_states:
            lines += [
                '',
                'Other states',
                *(f'  {path_name(p)}' for p in self.dynamic_states),
            ]
        shown = [
            r
            for r in self.diagnostics
            if r.kind not in (DiagnosticKind.CREDIT, *RELATIONS) and r.level >= level
        ]
        if shown:
            lines += ['', 'Diagnostics', *(f'  {r!r}' for r in shown)]
        # Names come from the user's model: none of them may control the terminal.
        return '\n'.join(map(printable, lines))

    # ------------------------------------------------------------ words for sizes

    def size_of_group(self, group: HiddenGroup) -> str:
        """Positions and states of a hidden group."""
        states = f'{group.num_state} state{"s" * (group.num_state != 1)} each'
        return f'positions {shape_text(group.varshape)}, {states}'

    def size_of_operation(self, node: Node) -> str:
        """Shapes of the parameters of an operation, and of its result."""
        shapes = {p.name: p.invar.aval.shape for p in self.program.parameters}
        own = ', '.join(shape_text(shapes[name]) for name in node.parameters)
        return f'{own} → {shape_text(node.shape or ())}'

    def trace_of_operation(self, node: Node) -> tuple[str, str]:
        """The trace of an operation: its size in words, and all that there is to
        say."""
        if not node.groups:
            credit = {r.context['name']: r.context['credit'] for r in self.credits}
            exact = all(credit[name] == 'exact' for name in node.parameters)
            full = 'it reaches no hidden state position by position'
            return 'no trace needed' if exact else 'no trace', full
        if self.traces is None:
            return 'can carry a trace', ''
        paths = {tuple(self.hidden_groups[g].hidden_paths) for g in node.groups}
        own = [
            shapes
            for (names, operation, hidden, *_), shapes in self.traces.items()
            if {*names} <= {*node.parameters}
            and operation in node.names
            and hidden in paths
        ]
        if own:
            arrays = [array for shapes in own for array in shapes]
            size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in arrays)
            full = ' + '.join(f'{shape_text(shape)} {dtype}' for shape, dtype in arrays)
            return f'trace {size_text(size)}', f'trace of {full}'
        shared = any({*names} & {*node.parameters} for names, *_ in self.traces)
        return 'trace of the whole net' if shared else 'no trace', ''

    def _operation_lines(self) -> list[str]:
        """Every use of parameters, with its sizes, its trace and its source."""
        rows = [
            (
                ', '.join(node.parameters),
                node.title,
                self.size_of_operation(node),
                self.trace_of_operation(node)[0],
                source_of(node),
            )
            for node in self.chart.nodes
            if node.kind == 'operation'
        ]
        if not rows:
            return []
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        padded = lambda row: [
            text.ljust(width) for text, width in zip(row, widths, strict=False)
        ]
        lines = ['  '.join(['', *padded(row), row[-1]]).rstrip() for row in rows]
        return ['', 'Operations, with their sizes', *lines]

    def show(
        self,
        level: DiagnosticLevel | str | int = DiagnosticLevel.NOTICE,
        file: TextIO | None = None,
    ) -> None:
        """Print the report."""
        print(self.to_str(level), file=file or sys.stdout)

    def to_html(self, file: Any = None, *, memory: Any = None) -> str:
        """The report as one self-contained HTML page. It is written to a file if a path
        or an open text file is given.

        ``memory``: a plan of :meth:`Learner.memory_plan`, which is drawn as bars.
        """
        text = page(self, memory)
        if hasattr(file, 'write'):
            file.write(text)
        elif file is not None:
            write_whole(file, text)
        return text

    def _repr_html_(self) -> str:
        return framed(self.to_html())

    def dict(self) -> dict[str, Any]:
        """The record as a dictionary."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __repr__(self) -> str:
        counts = ', '.join(
            f'{n} {name}' for name, n in self.counts.items() if name not in RELATIONS
        )
        rule = '' if self.rule is None else f'{self.rule.name}; '
        groups = f'{len(self.hidden_groups)} hidden group(s)'
        return f'CompilationReport({rule}{groups}; {counts})'

    def __str__(self) -> str:
        return self.to_str()
