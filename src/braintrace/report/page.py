"""The report as a page of HTML: the model drawn, a table of parameters, memory, and
every loss with its source.

The page is one file with its style and script inside; nothing is loaded from elsewhere.
It depends on the report only, so the same model gives the same page.
"""

from __future__ import annotations

import html
import linecache
import math
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from ..graph.diagnostics import (
    LEVELS,
    RELATIONS,
    CompilationRecord,
    DiagnosticKind,
    DiagnosticLevel,
)
from ..source_lines import short_source, use_name
from ..text import shape_text, size_text
from .boxes import Box, Row
from .chart import Node
from .drawing import Drawing
from .markup import Markup, style_of, tag, together

if TYPE_CHECKING:
    from .report import CompilationReport

LOCAL = (
    'credit through their own position only',
    "carried through each position's own state; what is cut is listed",
)
ONE_STEP = (
    'the gradient of one step',
    'no credit from later steps: only the loss of the step in which it is used counts',
)
NONE = 'no gradient', 'no path leads from it to an output, or all such paths are cut'
CLASSES = {
    'exact': (
        "a gradient equal to BPTT's",
        "no temporal path is cut: with exact local traces the gradient is BPTT's",
    ),
    'local': LOCAL,
    'instantaneous': ONE_STEP,
    'none': NONE,
}
"""Credit classes: what exact local traces give the parameters of each, and what that
means."""
KINDS = {
    'equal to BPTT': (
        "a gradient equal to BPTT's",
        'up to rounding, also where traces are carried from call to call',
    ),
    'local': LOCAL,
    'approximate': (
        'an approximation',
        'the rule replaces part of the gradient; the reason says which',
    ),
    'one step': ONE_STEP,
    'none': NONE,
}
"""What a rule gives a parameter, and what that means."""
WORDS = {
    'position': 'one element of a hidden state, batch included',
    'hidden group': 'states of one shape that depend on each other position by '
    'position, such as the potential and the adaptation of the same neurons',
    'trace': 'what a rule carries forward in time for an operation: the derivative of '
    'the states with respect to its parameters',
    'cut': 'a path from one position to another over which no credit is carried from '
    'step to step; the gradient of the step itself is whole',
}
AROUND = 2
"""Lines of source shown before and after."""
MOST_ROWS = 4


def page(report: CompilationReport, memory: Any = None) -> str:
    """The whole page."""
    maker = _Page(report)
    sections = [
        maker.heading(),
        maker.model(),
        maker.parameters(),
        *([] if memory is None else [maker.memory(memory)]),
        maker.diagnostics(),
        _glossary(maker.kinds),
    ]
    head = tag(
        'head',
        tag('meta', charset='utf-8'),
        tag('meta', name='viewport', content='width=device-width, initial-scale=1'),
        tag('title', f'{report.model}: report of braintrace'),
        tag('style', _resource('page.css')),
    )
    body = tag('body', tag('main', *sections), tag('script', _resource('page.js')))
    return '<!doctype html>\n' + tag('html', head, '\n', body, lang='en') + '\n'


def framed(text: str) -> str:
    """A page as an element of a notebook, which keeps its style to itself."""
    inner = html.escape(text)
    style = 'width:100%;height:640px;border:1px solid #8884;border-radius:6px'
    start = f'<iframe title="report of braintrace" srcdoc="{inner}"'
    return f'{start} style="{style}"></iframe>'


class _Page:
    """The parts of one report."""

    def __init__(self, report: CompilationReport):
        self.report, self.chart = report, report.chart
        self.credit = {r.context['name']: r for r in report.credits}
        self.gradients = report.gradients
        self.kinds = CLASSES if report.rule is None else KINDS

    def heading(self) -> Markup:
        """Model, rule, and how many parameters get which gradient."""
        counts = {
            name: sum(given.kind == name for given in self.gradients.values())
            for name in self.kinds
        }
        chips = [
            tag('li', _chip(name, f'{n} {name}')) for name, n in counts.items() if n
        ]
        counted = [f'{n} {self.kinds[name][0]}' for name, n in counts.items() if n]
        total = sum(counts.values())
        rule = self.report.rule
        gives = 'exact local traces give' if rule is None else f'{rule.name} gives'
        sentence = 'The step reads no parameter.'
        if counted:
            arrays = f'{total} parameter array{"s" * (total != 1)}'
            sentence = f'Of {arrays}, {gives} {_listed(counted)}.'
        lines = [tag('p', sentence)]
        if rule is not None:
            lines.append(
                tag(
                    'p',
                    'Rule: ',
                    tag('strong', rule.name),
                    f'. Equal to BPTT when: {rule.exact_when}.',
                )
            )
        title = tag('p', 'Report of braintrace', class_='over')
        return tag(
            'header',
            title,
            tag('h1', self.report.model),
            tag('ul', *chips, class_='chips'),
            *lines,
        )

    # ------------------------------------------------------------ the model

    def model(self) -> Markup:
        """The drawing with its legend."""
        drawing = Drawing(
            self.chart, [self._box(node, n) for n, node in enumerate(self.chart.nodes)]
        )
        groups = len(self.report.hidden_groups)
        sites = sum(n.kind == 'operation' for n in self.chart.nodes)
        caption = (
            f'{sites} operation{"s" * (sites != 1)} with parameters and {groups} '
            f'hidden group{"s" * (groups != 1)}, '
            f'from inputs on the left to outputs on the right.'
        )
        svg = drawing.svg(f'The model {self.report.model}', caption)
        keys = [
            ('now', 'inside a step'),
            ('last', 'from the last step'),
            (
                'cut',
                'cut, by number: no credit from step to step (a full line with a '
                'number: in part)',
            ),
            ('plain', 'no gradient'),
        ]
        line = lambda kind: tag(
            'svg',
            tag('path', d='M1 6H33', class_=f'way {kind}'),
            width=34,
            height=12,
            **{'aria-hidden': 'true'},
        )
        legend = tag(
            'ul', *(tag('li', line(kind), text) for kind, text in keys), class_='legend'
        )
        figure = tag(
            'figure', _scroll('The model', svg), tag('figcaption', caption, legend)
        )
        return _section('model', 'Model', figure)

    def _box(self, node: Node, n: int) -> Box:
        rows: list[Row] = []
        if node.kind == 'group':
            group = self.report.hidden_groups[node.groups[0]]
            rows += _at_most([Row(name) for name in node.names])
            sizes = self.report.size_of_group(group).split(', ')
            rows += [Row(text, faint=True) for text in sizes]
            if any(
                e.source == e.target == n and e.differentiable for e in self.chart.edges
            ):
                rows.append(Row('↻ keeps its own past', faint=True))
        elif node.kind == 'operation':
            rows += _at_most(
                [Row(name, self.gradients[name].kind) for name in node.parameters]
            )
            rows.append(Row(self.report.size_of_operation(node), faint=True))
            text, full = self.report.trace_of_operation(node)
            rows.append(Row(text, full=full or None, faint=True))
        elif node.shape is not None:
            rows.append(Row(shape_text(node.shape), faint=True))
        return Box(node.kind, node.title, rows, node.cuts)

    # ------------------------------------------------------------ the table

    def parameters(self) -> Markup:
        """A row for every parameter array."""
        names = (
            'Parameter',
            'Shape',
            'Gradient',
            'Why',
            'Groups',
            'Operation',
            'Source',
        )
        button = lambda name: tag(
            'th',
            tag('button', name, type='button'),
            scope='col',
            **{'aria-sort': 'none'},
        )
        rows = [self._row(name) for name in self.credit]
        table = tag(
            'table',
            tag(
                'caption',
                'Every parameter array, the gradient it gets and where it acts. '
                'Press a heading to sort.',
            ),
            tag('thead', tag('tr', *map(button, names))),
            tag('tbody', *rows),
            class_='sortable',
        )
        return _section('parameters', 'Parameters', _scroll('Parameters', table))

    def _row(self, name: str) -> Markup:
        shapes = {p.name: p.invar.aval.shape for p in self.report.program.parameters}
        shape, given = shapes.get(name), self.gradients[name]
        uses = self.chart.operations_of(name)
        groups = sorted({g for node in uses for g in node.groups})
        sources = dict.fromkeys(
            (node.source, node.library) for node in uses if node.source
        )
        cells = [
            (tag('code', name), None),
            (
                '–' if shape is None else shape_text(shape),
                -1 if shape is None else math.prod(shape),
            ),
            (_chip(given.kind), list(self.kinds).index(given.kind)),
            (given.reason, None),
            (', '.join(map(str, groups)) or '–', groups[0] if groups else 1e9),
            (', '.join(dict.fromkeys(node.title for node in uses)) or '–', None),
            (
                together(*(_places(*lines) for lines in sources)) or '–',
                None,
            ),
        ]
        first, *rest = cells
        return tag(
            'tr',
            tag('th', first[0], scope='row', class_='long' if len(name) > 36 else None),
            *(tag('td', cell, class_=None, **{'data-sort': key}) for cell, key in rest),
        )

    # ------------------------------------------------------------ memory

    def memory(self, plan: Any) -> Markup:
        """Bars of what a sequence needs, and of every trace."""
        tables = [
            _bars(f'Temporary memory of a sequence of {plan.steps} steps', plan.ways)
        ]
        if plan.traces:
            total = size_text(sum(plan.traces.values()))
            traces = [(self._trace_name(key), n) for key, n in plan.traces.items()]
            tables.append(
                _bars(
                    f'Traces, {total} together, whatever the length of the sequence',
                    traces,
                )
            )
        return _section('memory', 'Memory', *tables)

    def _trace_name(self, key: tuple) -> str:
        names, operation, *_ = key
        shapes = [
            shape_text(shape) for shape, _ in (self.report.traces or {}).get(key, ())
        ]
        shown = _at_most([Row(name) for name in names])
        return (
            f'{", ".join(row.text for row in shown)} in {use_name(operation)} '
            + ' + '.join(shapes)
        )

    # ------------------------------------------------------------ diagnostics

    def diagnostics(self) -> Markup:
        """What was found, by the place where it was written."""
        number = {id(record): i for i, record in enumerate(self.chart.cuts, 1)}
        places: dict[str | None, list[CompilationRecord]] = {}
        for record in self.report.diagnostics:
            shown = self._for_this_rule(record)
            if shown.kind in RELATIONS:
                continue
            if (
                shown.kind is not DiagnosticKind.CREDIT
                or shown.level >= DiagnosticLevel.NOTICE
            ):
                places.setdefault(self._source(record), []).append(shown)
        if not places:
            return _section(
                'diagnostics', 'Diagnostics', tag('p', 'There is nothing to report.')
            )
        cards = []
        for source, records in sorted(places.items(), key=lambda item: item[0] is None):
            items = [_finding(record, number.get(id(record))) for record in records]
            where = tag(
                'h3',
                'The whole model'
                if source is None
                else tag('code', short_source(source), title=source),
            )
            cards.append(
                tag(
                    'article',
                    where,
                    _excerpt(source),
                    tag('ul', *items),
                    class_='place',
                )
            )
        return _section('diagnostics', 'Diagnostics', *cards)

    def _for_this_rule(self, record: CompilationRecord) -> CompilationRecord:
        """A credit record as a record of what the parameter gets; others as they
        are."""
        if record.kind is not DiagnosticKind.CREDIT:
            return record
        name = record.context['name']
        kind, reason = self.gradients[name]
        level = LEVELS.get(kind, DiagnosticLevel.INFO)
        return record._replace(level=level, message=f'{name}: {kind} ({reason})')

    def _source(self, record: CompilationRecord) -> str | None:
        if record.kind is DiagnosticKind.CREDIT:
            uses = self.chart.operations_of(record.context['name'])
            return next((node.source for node in uses if node.source), None)
        return (record.context or {}).get('source')


# --------------------------------------------------------------- parts without a report


def _bars(caption: str, rows: Sequence[tuple[str, int]]) -> Markup:
    most = max(max(n for _, n in rows), 1)
    bar = lambda n: tag(
        'div', class_='bar', style=f'width:{max(100 * n / most, 0.5):.1f}%'
    )
    lines = [
        tag(
            'tr',
            tag('th', name, scope='row'),
            tag('td', bar(n)),
            tag('td', size_text(n), class_='size'),
        )
        for name, n in rows
    ]
    return tag('table', tag('caption', caption), tag('tbody', *lines), class_='bars')


def _places(source: str, library: str | None) -> Markup:
    """The user's own line, and below it that of the layer it calls."""
    own = tag('div', short_source(source), title=source)
    if library is None:
        return own
    return together(own, tag('div', f'in {short_source(library)}', title=library))


def _finding(record: CompilationRecord, number: int | None) -> Markup:
    """One record; ``number``: that of a cut in the drawing."""
    return tag(
        'li',
        _chip(record.level.name.lower()),
        f' {record.kind.replace("_", " ")} ',
        '' if number is None else tag('span', number, class_='number'),
        tag('span', record.message, class_='message'),
        id=None if number is None else f'cut-{number}',
    )


def _excerpt(source: str | None) -> Markup:
    """The lines around a place in the user's code, if they can be read."""
    file, _, number = (source or '').rpartition(':')
    lines = linecache.getlines(file) if file else []
    if not number.isdigit() or not 0 < int(number) <= len(lines):
        return Markup('')
    middle = int(number)
    shown = range(max(middle - AROUND, 1), min(middle + AROUND, len(lines)) + 1)
    width = len(str(shown[-1]))
    row = lambda i: together(
        tag('span', f'{i:{width}}', class_='line'), ' ', lines[i - 1].rstrip(), '\n'
    )
    code = [tag('mark', row(i)) if i == middle else row(i) for i in shown]
    return tag('pre', tag('code', *code), tabindex=0)


def _glossary(kinds: dict[str, tuple[str, str]]) -> Markup:
    terms = [(_chip(name), meaning) for name, (_, meaning) in kinds.items()] + list(
        WORDS.items()
    )
    return _section(
        'glossary',
        'Glossary',
        tag('dl', *(together(tag('dt', a), tag('dd', b)) for a, b in terms)),
    )


def _section(name: str, title: str, *children: Any) -> Markup:
    return tag(
        'section', tag('h2', title, id=name), *children, **{'aria-labelledby': name}
    )


def _scroll(name: str, child: Markup) -> Markup:
    return tag(
        'div', child, class_='scroll', tabindex=0, role='region', **{'aria-label': name}
    )


def _chip(name: str, text: str | None = None) -> Markup:
    return tag('span', text or name, class_=f'chip {style_of(name)}')


def _at_most(rows: list[Row]) -> list[Row]:
    if len(rows) <= MOST_ROWS:
        return rows
    rest = rows[MOST_ROWS - 1 :]
    return [
        *rows[: MOST_ROWS - 1],
        Row(f'and {len(rest)} more', full=', '.join(row.text for row in rest)),
    ]


def _listed(parts: Sequence[str]) -> str:
    return ' and '.join(filter(None, [', '.join(parts[:-1]), parts[-1]]))


@cache
def _resource(name: str) -> Markup:
    return Markup(
        resources.files(__package__).joinpath(name).read_text(encoding='utf-8')
    )
