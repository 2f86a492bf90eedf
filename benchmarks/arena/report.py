"""The tables and the figure of the arena, from what run.py has measured."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import worker

DOCS = Path(__file__).parent.parent.parent / 'docs'
PAGE, FIGURE = DOCS / 'performance.md', DOCS / 'arena.svg'
BLOCK = re.compile(
    r'(<!-- from benchmarks/arena/results.json -->\n).*?(<!-- end -->)', re.DOTALL
)
TITLES = {
    '512': '512 units, batch 16, T 200',
    '256': '256 units, batch 8, T 4000',
}
CORES = {'1': 'one core', 'all': 'all cores'}
EPROP = ('NEST', 'EProp')
MIB = 2**20


def milliseconds(row: dict | None, what: str) -> str:
    """The median of the times of a row."""
    return '' if row is None or what not in row else f'{1e3 * median(row[what]):,.0f}'


def in_short(row: dict) -> str:
    """One measurement as a line."""
    if 'seconds' in row:
        return f'{1e6 * row["seconds"]:.1f} µs a step'
    times = [
        f'{x} {milliseconds(row, x)} ms' for x in ('gradient', 'forward') if x in row
    ]
    peak = [f'peak {row["peak"] / MIB:.1f} MiB'] if row.get('peak') else []
    return ', '.join(times + peak)


def table(results: dict) -> str:
    """Times and memory of all libraries on both networks."""
    cores = [
        c for c in CORES if any(f'{size}/{c}/PyTorch' in results for size in TITLES)
    ]
    columns = [(c, what) for c in cores for what in ('gradient', 'forward')]
    heads = [f'{what}, {CORES[c]}' for c, what in columns]
    lines = [
        f'| network | library | {" | ".join(heads)} | peak MiB |',
        '| --- | --- |' + ' ---: |' * (len(heads) + 1),
    ]
    for size, title in TITLES.items():
        for library in worker.LIBRARIES:
            rows = {c: results.get(f'{size}/{c}/{library}') for c in cores}
            if not any(rows.values()):
                continue
            times = [milliseconds(rows[c], what) for c, what in columns]
            known = (rows.get('1') or {}).get('peak')
            peak = f'{known / MIB:.1f}' if known else ''
            lines.append(f'| {title} | {library} | {" | ".join(times)} | {peak} |')
            title = ''
    return '\n'.join(lines)


def sine_table(results: dict) -> str:
    """Microseconds for each step of NEST's sine task."""
    lines = ['| sine task, µs a step | NEST | `EProp` |', '| --- | ---: | ---: |']
    for cores, title in CORES.items():
        row = [results.get(f'e-prop/{cores}/{library}') for library in EPROP]
        if all(row):
            times = [f'{1e6 * r["seconds"]:,.0f}' for r in row if r]
            lines.append(f'| {title} | {" | ".join(times)} |')
    return '\n'.join(lines)


def origin(results: dict) -> str:
    """Where and with which versions it was measured."""
    keys = [key for key in results if '/' in key]
    rows = {key.split('/')[-1]: results[key] for key in keys}
    named = [f'{n} {rows[n]["version"]}' for n in (*worker.TORCH, 'NEST') if n in rows]
    if 'JAX BPTT' in rows:
        named.append(rows['JAX BPTT']['version'])
    return f'{results["machine"]}. {", ".join(named)}.'


def draw(results: dict) -> None:
    """The time of a gradient on one core, for both networks."""
    import matplotlib

    matplotlib.use('svg')
    import matplotlib.pyplot as plt

    plt.rcParams.update({'svg.hashsalt': 'arena', 'font.size': 10})
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout='constrained')
    for axis, (size, title) in zip(axes, TITLES.items(), strict=True):
        names = [n for n in worker.LIBRARIES if f'{size}/1/{n}' in results][::-1]
        times = [1e3 * median(results[f'{size}/1/{n}']['gradient']) for n in names]
        others = (*worker.TORCH, 'JAX BPTT')
        colors = ['#9aa5b1' if n in others else '#0b6e4f' for n in names]
        bars = axis.barh(names, times, color=colors)
        axis.bar_label(bars, [f'{t:,.0f}' for t in times], padding=3)
        axis.set(title=title, xlabel='ms a gradient, on one core')
        axis.margins(x=0.18)
        axis.xaxis.set_major_locator(plt.MaxNLocator(4))
        axis.xaxis.set_major_formatter('{x:,.0f}')
        axis.spines[['top', 'right']].set_visible(False)
    axes[1].tick_params(labelleft=False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in ('#0b6e4f', '#9aa5b1')]
    axes[1].legend(handles, ['braintrace', 'others'], frameon=False, loc='lower right')
    figure.savefig(FIGURE, metadata={'Date': None}, facecolor='white')
    plt.close(figure)


def write(results: dict) -> None:
    """Put the tables into the page and draw the figure."""
    made = '\n\n'.join([table(results), sine_table(results), origin(results)])
    text = BLOCK.sub(
        lambda block: f'{block[1]}{made}\n{block[2]}', PAGE.read_text(encoding='utf-8')
    )
    PAGE.write_text(text, encoding='utf-8')
    draw(results)
