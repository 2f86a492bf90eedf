"""The tables of ``sparse.py``: for the screen, and on the page of large networks.

``python benchmarks/sparse_table.py`` writes them to the page.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

from report import NAMES

TARGETS = {'20000': 4.0, '131072': 8.0}
"""Times the speed of the published package that are wanted, by neurons."""
MOST_FORWARD, MOST_MIB = 1.0, 2048
TITLES = ('s', 'forward passes', 'published, s', 'times its speed', 'MiB')
HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / 'docs' / 'scale.md'
RESULTS = HERE / 'sparse.json'
TABLES = re.compile(
    r'(<!-- from benchmarks/sparse.json -->\n)(?:.*?\n)??(<!-- end -->)', re.DOTALL
)


def table(workload: dict[str, Any], judged: bool = False) -> str:
    """Rows of a workload; ``judged``: ✓ and ✗ where there is a target."""
    ours = {r['variant']: r for r in workload['rows'] if r['side'] == 'ours'}
    peer = {r['variant']: r for r in workload['rows'] if r['side'] == 'peer'}
    lines = [f'| {workload["title"]} | {" | ".join(TITLES)} |']
    lines.append(f'| --- |{" ---: |" * len(TITLES)}')
    forward = median(ours['forward']['seconds'])
    for variant, row in ours.items():
        if 'error' in row:
            lines.append(f'| {NAMES[variant]} | could not run |{" |" * 4}')
            continue
        is_rule = variant not in ('forward', 'bptt')
        mark = lambda met, shown=judged and is_rule: f' {"✗✓"[met]}' * shown
        seconds, mib = median(row['seconds']), row['peak'] / 2**20
        passes = seconds / forward
        cells = [NAMES[variant], f'{seconds:.3g}', f'{passes:.2f}', '', '']
        if variant == 'pp_prop':
            cells[2] += mark(passes <= MOST_FORWARD)
        # It has one form of D-RTRL.
        known = 'd_rtrl_carried' if variant == 'd_rtrl_fresh' else variant
        if is_rule and peer.get(known, {}).get('seconds'):
            theirs = median(peer[known]['seconds'])
            speed = theirs / seconds
            wanted = TARGETS.get(workload['key'], 0.0)
            cells[3:] = [f'{theirs:.3g}', f'{speed:.1f}{mark(speed >= wanted)}']
        cells.append(f'{mib:,.0f}{mark(mib <= MOST_MIB)}')
        lines.append(f'| {" | ".join(cells)} |')
    return '\n'.join(lines)


def page() -> str:
    """The text of the page with the tables of the results."""
    made = '\n\n'.join(map(table, json.loads(RESULTS.read_text())))
    return TABLES.sub(lambda m: f'{m[1]}{made}\n{m[2]}', PAGE.read_text())


def write(workloads: list[dict[str, Any]]) -> None:
    """Replace the results of workloads, and the tables on the page."""
    old = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    by_title = {w['title']: w for w in (*old, *workloads)}
    RESULTS.write_text(json.dumps(list(by_title.values()), indent=1) + '\n')
    PAGE.write_text(page())


if __name__ == '__main__':
    PAGE.write_text(page())
