"""What the measurements say: ratios, targets, the table and the picture.

``python benchmarks/report.py`` writes the tables of the README and of the docs.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

NAMES = {
    'forward': 'forward only',
    'bptt': 'BPTT',
    'd_rtrl_fresh': 'D-RTRL, fresh',
    'd_rtrl_carried': 'D-RTRL, carried',
    'pp_prop': 'pp_prop',
    'online': 'D-RTRL, every step',
}
WORDS = {
    'peer': 'times the speed of the peer',
    'bptt': 'times the speed of BPTT',
    'forward': 'times the forward pass',
    'peak_ratio': "peak memory as part of the peer's",
    'first_ratio': "compile and first call as part of the peer's",
}
BASELINES = ('forward', 'bptt')
MIB = 2**20


@dataclass(frozen=True)
class Target:
    """A bound for one number of some rows: workloads by key, narrowed by batch size if given."""

    number: str
    variants: tuple[str, ...]
    keys: str
    bound: float
    most: bool = False
    batch: int | None = None

    def applies(self, row: dict) -> bool:
        """Whether a row is held to this."""
        here = row['key'] in self.keys.split() and self.batch in (None, row['batch'])
        return here and row['variant'] in self.variants and bool(row[self.number])

    def met(self, value: float) -> bool:
        """Whether a value is within the bound."""
        return value <= self.bound if self.most else value >= self.bound


RULES = ('d_rtrl_fresh', 'd_rtrl_carried', 'pp_prop', 'online')
ALL = '1 2 3 4 5 6 7 8 9 10'
TARGETS = (
    Target('peer', ('d_rtrl_fresh',), '1', 50),
    Target('peer', ('d_rtrl_fresh',), '2', 250),
    Target('peer', ('d_rtrl_carried',), '1', 25),
    Target('peer', ('d_rtrl_carried',), '2', 60),
    Target('bptt', ('d_rtrl_fresh',), '2 3', 2),
    Target('bptt', ('d_rtrl_fresh',), '1 4 5 6', 1.5),
    Target('forward', ('d_rtrl_fresh',), '2 3', 3, most=True),
    Target('forward', ('d_rtrl_fresh',), '1 4 5 6', 3.5, most=True),
    Target('peer', ('pp_prop',), '1', 1),
    Target('peer', ('pp_prop',), '2 5', 1.5),
    Target('peer', ('pp_prop',), '3', 2),
    Target('peer', ('online',), '7', 4),
    Target('peer', ('pp_prop',), '8', 2),
    Target('peak_ratio', RULES, ALL, 1, most=True),
    Target('first_ratio', RULES, '1 2 3 4 5 6 7 8', 1, most=True),
)


def rows(measured: list[dict]) -> list[dict]:
    """One row for each workload and variant of ours; ratios are lists, one value a round."""
    found = []
    for workload in measured:
        ours, peer = workload['ours'], workload.get('peer', {})
        for variant, run in ours.items():
            theirs = peer.get(
                'd_rtrl_carried' if variant == 'd_rtrl_fresh' else variant, {}
            )
            here = 'error' not in run
            beside = here and theirs and 'error' not in theirs
            quotient = lambda a, b: [x / y for x, y in zip(a, b, strict=False)]
            found.append(
                {
                    'key': workload['key'],
                    'title': workload['title'],
                    'batch': workload['batch'],
                    'variant': variant,
                    'error': run.get('error'),
                    'peer_error': theirs.get('error'),
                    'seconds': run['seconds'],
                    'forward': quotient(run['seconds'], ours['forward']['seconds']),
                    'bptt': quotient(ours['bptt']['seconds'], run['seconds']),
                    'peer': quotient(theirs['seconds'], run['seconds'])
                    if beside
                    else [],
                    'peer_seconds': theirs['seconds'] if beside else [],
                    'scaled': bool(beside and theirs['steps'] != run['steps']),
                    'peak': run.get('peak'),
                    'peer_peak': theirs.get('peak') if beside else None,
                    'peak_ratio': quotient([run['peak']], [theirs['peak']])
                    if beside and run['peak'] and theirs['peak']
                    else [],
                    'first': run.get('first', []),
                    'peer_first': theirs.get('first', []) if beside else [],
                    'first_ratio': quotient(
                        [median(run['first'])], [median(theirs['first'])]
                    )
                    if beside
                    else [],
                    'gradients': verdict(workload['gradients'].get(variant, {})),
                }
            )
    return found


def verdict(gradients: dict[str, dict]) -> str:
    """A few words on the agreement of the gradients."""
    if not gradients:
        return ''
    agree = sum(g['agree'] for g in gradients.values())
    wrong = sum('reason' in g for g in gradients.values())
    other = len(gradients) - agree - wrong
    words = (
        [f'{agree} agree'] * bool(agree)
        + [f'{wrong} peer wrong'] * bool(wrong)
        + [f'{other} DIFFER'] * bool(other)
    )
    return ', '.join(words)


def disagreements(measured: list[dict]) -> list[str]:
    """Gradients that differ where the published package is thought right."""
    return [
        f'{w["title"]}, {NAMES[variant]}: {name} (relative difference {g["error"]:.1e})'
        for w in measured
        for variant, gradients in w['gradients'].items()
        for name, g in gradients.items()
        if not g['agree'] and 'reason' not in g
    ]


def checks(measured: list[dict], table_rows: list[dict]) -> list[dict]:
    """All targets with the value measured."""
    found = []
    for row in table_rows:
        for target in TARGETS:
            if target.applies(row):
                value = median(row[target.number])
                found.append(
                    check(
                        row['title'],
                        row['variant'],
                        target.number,
                        value,
                        target.bound,
                        target.met(value),
                    )
                )
    found.extend(
        growth(measured, '9', 'd_rtrl_carried', 'memory as T grows 16 times', 1.05)
    )
    found.extend(growth(measured, '9', 'pp_prop', 'memory as T grows 16 times', 1.05))
    found.extend(
        growth(measured, '8', 'pp_prop', 'memory as neurons and synapses double', 2.2)
    )
    return found


def check(
    title: str, variant: str, number: str, value: float, bound: float, met: bool
) -> dict:
    return {
        'title': title,
        'variant': variant,
        'number': number,
        'value': value,
        'bound': bound,
        'met': met,
    }


def growth(
    measured: list[dict], key: str, variant: str, what: str, bound: float
) -> Iterator[dict]:
    """Peak memory of the last workload of a series beside the first."""
    series = [w['ours'][variant].get('peak') for w in measured if w['key'] == key]
    if len(series) > 1 and series[0] and series[-1]:
        value = series[-1] / series[0]
        last = [w['title'] for w in measured if w['key'] == key][-1]
        yield check(last, variant, what, value, bound, value <= bound)


# ------------------------------------------------------------ text


def table(table_rows: list[dict], judged: bool) -> str:
    """The table; if judged, with ✓ and ✗ where a number has a target."""
    mark = verdicts if judged else lambda row, number: ''
    heads = [
        'workload and rule',
        'ms',
        '/ forward',
        'BPTT /',
        'peer ms',
        'peer /',
        'peak MiB : peer',
        'compile + first s : peer',
        'gradients',
    ]
    lines, title = [], None
    for row in table_rows:
        if row['title'] != title:
            title = row['title']
            lines.append([f'{row["key"]}. {title}'])
        if row['error']:
            lines.append(
                [f'   {NAMES[row["variant"]]}', f'could not run: {row["error"]}']
            )
            continue
        plain = row['variant'] in BASELINES
        star = '*' if row['scaled'] else ''
        lines.append(
            [
                f'   {NAMES[row["variant"]]}',
                f'{median(row["seconds"]) * 1e3:.1f}',
                '' if plain else spread(row['forward']) + mark(row, 'forward'),
                '' if plain else spread(row['bptt']) + mark(row, 'bptt'),
                'could not run'
                if row['peer_error']
                else milliseconds(row['peer_seconds']) + star,
                spread(row['peer']) + mark(row, 'peer'),
                pair(row['peak'], row['peer_peak'], MIB) + mark(row, 'peak_ratio'),
                pair(middle(row['first']), middle(row['peer_first']), 1)
                + mark(row, 'first_ratio'),
                row['gradients'],
            ]
        )
    widths = [
        max(len(line[i]) for line in [heads, *lines] if len(line) > 2)
        for i in range(len(heads))
    ]
    render = lambda line: '  '.join(
        [
            line[0].ljust(widths[0]),
            *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=False)),
        ]
    )
    text = [render(heads), '-' * len(render(heads)), *map(render, lines)]
    if any(row['scaled'] for row in table_rows):
        text.append(
            '* run on a shorter sequence and scaled: its cost is the same at every step'
        )
    return '\n'.join(line.rstrip() for line in text)


def markdown(table_rows: list[dict]) -> str:
    """The main numbers of the main workloads, for a page."""
    lines = [
        '| workload | rule | × forward | BPTT ÷ ours | package ÷ ours | peak MiB, ours : package |',
        '| --- | --- | --- | --- | --- | --- |',
    ]
    text = lambda values: f'{median(values):.3g}' if values else ''
    title = None
    for row in table_rows:
        if row['key'] in ('9', '10') or row['variant'] in BASELINES or row['error']:
            continue
        shown = row['title'] if row['title'] != title else ''
        title = row['title']
        ratios = ' | '.join(text(row[number]) for number in ('forward', 'bptt', 'peer'))
        lines.append(
            f'| {shown} | {NAMES[row["variant"]]} | {ratios} | {pair(row["peak"], row["peer_peak"], MIB)} |'
        )
    return '\n'.join(lines)


SHORT = ('1', '2', '7', '8')
"""Workloads of the short table; of each the first size."""


def short(table_rows: list[dict]) -> list[dict]:
    """The rows of the short table: a gated, a spiking, an online and a sparse workload,
    each with all its rules."""
    first: dict[str, str] = {}
    for row in table_rows:
        first.setdefault(row['key'], row['title'])
    return [
        row
        for row in table_rows
        if row['key'] in SHORT and row['title'] == first[row['key']]
    ]


TABLE = re.compile(
    r'(<!-- from benchmarks/results.json -->\n)(?:.*?\n)??(<!-- end -->)', re.DOTALL
)


def tables(measured: list[dict]) -> dict[Path, str]:
    """Pages with a table between the two comments, and the text of each: the short one
    is the README's, the full one that of the docs."""
    root, found = Path(__file__).parent.parent, rows(measured)
    shown = {'README.md': short(found), 'docs/performance.md': found}
    return {
        root / name: TABLE.sub(
            lambda match, part=part: f'{match[1]}{markdown(part)}\n{match[2]}',
            (root / name).read_text(),
        )
        for name, part in shown.items()
    }


def summary(measured: list[dict], found: list[dict], judged: bool) -> str:
    """Targets missed, and gradients that differ."""
    lines = [
        '',
        f'medians [least to most]; peer: the published package; peak: inputs aside; rounds: {rounds(measured)}',
    ]
    if judged and found:
        missed = [c for c in found if not c['met']]
        lines.append(f'targets met: {len(found) - len(missed)} of {len(found)}')
        lines += [
            f'  missed: {c["title"]}, {NAMES[c["variant"]]}: {WORDS.get(c["number"], c["number"])} '
            f'{c["value"]:.3g}, wanted {c["bound"]:g}'
            for c in missed
        ]
    reasons = {
        g['reason']
        for w in measured
        for gs in w['gradients'].values()
        for g in gs.values()
        if 'reason' in g
    }
    if reasons:
        lines.append('known of the published package: ' + '; '.join(sorted(reasons)))
    lines += [f'GRADIENTS DIFFER: {text}' for text in disagreements(measured)]
    return '\n'.join(lines)


def rounds(measured: list[dict]) -> str:
    counts = {len(w['ours']['forward']['seconds']) for w in measured}
    return ' or '.join(map(str, sorted(counts)))


def verdicts(row: dict, number: str) -> str:
    targets = [t for t in TARGETS if t.number == number and t.applies(row)]
    return ''.join(' ✓' if t.met(median(row[number])) else ' ✗' for t in targets)


def spread(values: list[float]) -> str:
    """Median, least and most."""
    text = lambda x: f'{x:.0f}' if x >= 100 else f'{x:.3g}'
    return (
        f'{text(median(values))} [{text(min(values))}–{text(max(values))}]'
        if values
        else ''
    )


def milliseconds(values: list[float]) -> str:
    return f'{median(values) * 1e3:.1f}' if values else ''


def middle(values: list[float]) -> float | None:
    return median(values) if values else None


def pair(mine: float | None, theirs: float | None, unit: float) -> str:
    text = lambda x: '' if x is None else f'{x / unit:.1f}'
    return f'{text(mine)} : {text(theirs)}' if theirs is not None else text(mine)


# ------------------------------------------------------------ picture


def draw(measured: list[dict], file: Path) -> None:
    """Time of a sequence for every workload; memory along T and time along units where they were measured."""
    import matplotlib

    matplotlib.use('svg')
    matplotlib.rcParams['svg.hashsalt'] = 'braintrace'
    import matplotlib.pyplot as plt

    single = [w for w in measured if w['key'] not in ('9', '10')]
    series = {
        'memory': [w for w in measured if w['key'] == '9'],
        'growth': [w for w in measured if w['key'] == '10'],
    }
    layout = [['time', 'time']] * bool(single) + [['memory', 'growth']] * any(
        series.values()
    )
    heights = [1.2 + 0.42 * len(single)] * bool(single) + [4] * any(series.values())
    figure, axes = plt.subplot_mosaic(
        layout,
        figsize=(9, sum(heights) + 0.8),
        height_ratios=heights,
        layout='constrained',
    )
    curves = [('ours', v) for v in NAMES] + [
        ('peer', v) for v in NAMES if v not in BASELINES
    ]
    colours = dict(zip(NAMES, ('0.65', '0.25', 'C0', 'C1', 'C2', 'C3'), strict=True))
    beside = {v: 0.08 * (k - 2) for k, v in enumerate(NAMES)}
    handles = {}
    for side, variant in curves:
        name = NAMES[variant] if side == 'ours' else f'{NAMES[variant]} (published)'
        style = {'color': colours[variant], 'marker': 'o', 'markersize': 7}
        if side == 'peer':
            style |= {'markerfacecolor': 'white', 'linestyle': '--'}
        if single:
            points = [
                (milliseconds_of(w, side, variant), i + beside[variant])
                for i, w in enumerate(single)
            ]
            points = [(x, y) for x, y in points if x]
            if points:
                dots = style | {'linestyle': ''}
                (handles[name],) = axes['time'].plot(*zip(*points, strict=True), **dots)
        for panel, along, value in (
            ('memory', 'steps', peak_of),
            ('growth', 'units', milliseconds_of),
        ):
            points = [
                (w['sizes'].get(along, w['steps']), value(w, side, variant))
                for w in series[panel]
            ]
            points = [(x, y) for x, y in points if y]
            if points:
                (line,) = axes[panel].plot(*zip(*points, strict=True), **style)
                handles.setdefault(name, line)
    if single:
        axes['time'].set(
            xscale='log', xlabel='ms a sequence', title='Time of a sequence'
        )
        axes['time'].set_yticks(
            range(len(single)), [textwrap.fill(w['title'], 36) for w in single]
        )
        axes['time'].invert_yaxis()
        axes['time'].grid(alpha=0.3)
    for panel, along, before, unit, title in (
        ('memory', 'steps', ', T', 'MiB', 'Peak memory without inputs'),
        ('growth', 'units', '', 'ms a sequence', 'Time of a sequence'),
    ):
        if series[panel]:
            sizes = [w['sizes'].get(along, w['steps']) for w in series[panel]]
            network = series[panel][0]['title'].replace(f'{before} {sizes[0]}', '')
            axis = axes[panel]
            axis.set(
                xscale='log',
                yscale='log',
                xlabel=along,
                ylabel=unit,
                title=f'{title}\n{network}',
            )
            axis.set_xticks(sizes, [f'{size:,}' for size in sizes])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    figure.legend(handles.values(), handles, loc='outside lower center', ncols=3)
    figure.savefig(file, metadata={'Date': None})


def milliseconds_of(workload: dict, side: str, variant: str) -> float | None:
    seconds = workload.get(side, {}).get(variant, {}).get('seconds')
    return median(seconds) * 1e3 if seconds else None


def peak_of(workload: dict, side: str, variant: str) -> float | None:
    peak = workload.get(side, {}).get(variant, {}).get('peak')
    return peak / MIB if peak else None


if __name__ == '__main__':
    results = json.loads((Path(__file__).parent / 'results.json').read_text())
    for page, text in tables(results['workloads']).items():
        page.write_text(text)
