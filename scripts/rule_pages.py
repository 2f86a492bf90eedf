"""Write what the rules say about themselves into their pages, and draw their figures.

    python scripts/rule_pages.py

A page of ``docs/rules`` has a part between two comments that comes from the rule's own
file: names, options, cost, when it is exact, what it is used for. Its formula, the
advice and the paper are written by hand. Figures show the cosines of ``docs/rules.md``.
A rule without a page gets one with the parts to fill in.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from braintrace.rules import PRESETS, Preset

ROOT = Path(__file__).parent.parent
PAGES = ROOT / 'docs' / 'rules'
FIGURES = ROOT / 'docs' / 'pictures' / 'rules'
FACTS = re.compile(
    r'<!-- from the rule: scripts/rule_pages.py -->\n.*?<!-- end -->', re.DOTALL
)
SAME = {'OSTLRecurrent': 'D_RTRL'}
"""Rules whose gradients are those of another one."""
OTHER_FIGURES = {'BPTT': ('../pictures/time.svg', 'BPTT and traces in time')}
"""Figures of rules that are not compared with BPTT."""
TEAL, GREY, DARK = '#00796b', '#90a4ae', '#263238'

Cosines = dict[str, tuple[float, float, float]]


def rules() -> dict[str, Preset]:
    """Every rule once, by the name of its page."""
    return {name: p for name, p in PRESETS.items() if name == p.name}


def measured() -> dict[str, Cosines]:
    """Cosines with BPTT by rule and network: mean, least, most."""
    text = (ROOT / 'docs' / 'rules.md').read_text()
    part = text.split('## How near to BPTT')[1].split('\n## ')[0]
    head, _, *rows = re.findall(r'^\| (.*) \|$', part, re.MULTILINE)
    networks = head.split(' | ')[1:]
    found = {}
    for row in rows:
        label, *cells = row.split(' | ')
        numbers = [tuple(map(float, re.findall(r'[\d.]+', c))) for c in cells]
        found[label.partition('(')[0]] = dict(zip(networks, numbers, strict=True))
    return found


def facts(preset: Preset, has_figure: bool) -> str:
    """The part of a page that the rule itself says."""
    rule = preset.default
    summary = inspect.getdoc(preset.make).split('\n\n')[0].replace('\n', ' ')
    names = [f"`'{n}'`" for n in (preset.name, *preset.aliases)]
    options = ', '.join(f'`{p.name}={p.default!r}`' for p in preset.options)
    memory, time = rule.cost
    rows = {
        'in `compile`': f'{" or ".join(names)}; class `braintrace.{preset.title}`',
        'options': options or 'none',
        'memory': memory,
        'time': time,
        'when equal to BPTT': rule.exact_when,
        'use it for': rule.use,
    }
    figure, shown = OTHER_FIGURES.get(
        preset.title,
        (
            f'../pictures/rules/{preset.name}.svg',
            'cosine with the gradient of BPTT for five networks',
        ),
    )
    lines = [
        '<!-- from the rule: scripts/rule_pages.py -->',
        _as_markdown(summary),
        '',
        '| | |',
        '| --- | --- |',
        *(f'| {name} | {text} |' for name, text in rows.items()),
        '',
        'B samples, I inputs, H units, S states of each unit, T steps.',
    ]
    if has_figure:
        lines += ['', f'![{shown}]({figure})']
    return '\n'.join([*lines, '<!-- end -->'])


def _as_markdown(text: str) -> str:
    return re.sub(r':\w+:`~?([^`]*)`', r'`\1`', text).replace('``', '`')


def skeleton(preset: Preset) -> str:
    """A page to fill in."""
    return '\n'.join(
        [
            f'# {preset.title}',
            '',
            '<!-- from the rule: scripts/rule_pages.py -->\n<!-- end -->',
            '',
            '## Formula',
            '',
            inspect.getmodule(preset.make).__doc__.strip(),
            '',
            '## When to use it',
            '',
            f'{preset.default.use.capitalize()}.',
            '',
        ]
    )


def figure(title: str, cosines: Cosines) -> str:
    """A bar for each network with its mean, and a line from least to most, as SVG."""
    left, width, row = 165, 330, 30
    height = 44 + row * len(cosines) + 30
    place = lambda value: left + width * max(value, 0.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="672" '
        f'viewBox="0 0 560 {height}" font-family="sans-serif" font-size="14">',
        f'<rect width="560" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="14" y="26" fill="{DARK}">{title}: cosine with the gradient of '
        'BPTT</text>',
    ]
    bottom = 44 + row * len(cosines)
    for value in (0.0, 0.5, 1.0):
        x = place(value)
        parts += [
            f'<line x1="{x:.0f}" y1="40" x2="{x:.0f}" y2="{bottom}" stroke="{GREY}" '
            'stroke-dasharray="3 3"/>',
            f'<text x="{x:.0f}" y="{bottom + 18}" fill="{DARK}" '
            f'text-anchor="middle">{value:g}</text>',
        ]
    for number, (network, (mean, least, most)) in enumerate(cosines.items()):
        y = 44 + row * number
        middle = y + 10
        parts += [
            f'<text x="{left - 10}" y="{y + 15}" fill="{DARK}" '
            f'text-anchor="end">{network}</text>',
            f'<rect x="{left}" y="{y}" width="{width * mean:.0f}" height="20" '
            f'fill="{TEAL}"/>',
            f'<line x1="{place(least):.0f}" y1="{middle}" x2="{place(most):.0f}" '
            f'y2="{middle}" stroke="{DARK}" stroke-width="3"/>',
            f'<text x="{left + width + 12}" y="{y + 15}" fill="{DARK}">'
            f'{mean:.2f}</text>',
        ]
    return '\n'.join([*parts, '</svg>', ''])


def three_factor() -> str:
    """A trace that decays after a cue, and a modulator that comes later, as SVG."""
    left, step, base = 20, 9, 130
    points = []
    for t in range(56):
        size = 0.0 if t < 8 else 80 * 0.97 ** (t - 8)
        points.append(f'{left + step * t},{base - size:.1f}')
    cue, reward = left + step * 8, left + step * 40
    text = f'fill="{DARK}" text-anchor="middle"'
    return '\n'.join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" width="672" '
            'viewBox="0 0 560 190" font-family="sans-serif" font-size="14">',
            '<rect width="560" height="190" rx="8" fill="#ffffff"/>',
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{TEAL}" '
            'stroke-width="3"/>',
            f'<line x1="{cue}" y1="{base}" x2="{cue}" y2="150" stroke="{DARK}" '
            'stroke-width="4"/>',
            f'<line x1="{reward}" y1="{base}" x2="{reward}" y2="150" '
            'stroke="#c62828" stroke-width="4"/>',
            f'<text x="{cue}" y="172" {text}>cue</text>',
            f'<text x="{reward}" y="172" {text}>modulator</text>',
            f'<text x="{cue + 120}" y="50" {text}>trace ε(t)</text>',
            f'<text x="{reward + 70}" y="80" {text}>change = modulator · ε</text>',
            f'<line x1="{left}" y1="{base}" x2="524" y2="{base}" stroke="{GREY}"/>',
            f'<text x="536" y="{base + 5}" {text}>t</text>',
            '</svg>',
            '',
        ]
    )


def written() -> dict[Path, str]:
    """The text of every page and figure."""
    found, cosines = {}, measured()
    for name, preset in rules().items():
        row = cosines.get(SAME.get(preset.title, preset.title))
        if preset.title == 'ThreeFactor':
            found[FIGURES / f'{name}.svg'] = three_factor()
        elif row is not None:
            found[FIGURES / f'{name}.svg'] = figure(preset.title, row)
        has_figure = FIGURES / f'{name}.svg' in found or preset.title in OTHER_FIGURES
        page = PAGES / f'{name}.md'
        text = page.read_text() if page.exists() else skeleton(preset)
        part = facts(preset, has_figure)
        found[page] = FACTS.sub(lambda _, part=part: part, text)
    return found


if __name__ == '__main__':
    for folder in (PAGES, FIGURES):
        folder.mkdir(parents=True, exist_ok=True)
    for file, content in written().items():
        file.write_text(content)
