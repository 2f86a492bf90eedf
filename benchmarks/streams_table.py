"""The table of ``streams.py``: for the screen, and on the page of streams.

``python benchmarks/streams_table.py`` writes it to the page.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Row:
    """One line of the table: a ratio in every round, and its target if it has one."""

    workload: str
    what: str
    ratios: list[float]
    target: float | None
    most: bool
    microseconds: float | None = None

    @property
    def value(self) -> float:
        return median(self.ratios)

    @property
    def met(self) -> bool:
        if self.target is None:
            return True
        return self.value <= self.target if self.most else self.value >= self.target


def table(rows: list[Row]) -> str:
    """The rows for the screen."""
    width = max(len(row.workload) for row in rows)
    lines = []
    for row in rows:
        low, high = min(row.ratios), max(row.ratios)
        sign = '≤' if row.most else '≥'
        bound = f'{sign} {row.target:g} {"✓" if row.met else "✗"}' if row.target else ''
        step = f'{row.microseconds:.0f} µs' if row.microseconds else ''
        lines.append(
            f'{row.workload.ljust(width)}  {row.what.ljust(25)}  {row.value:6.2f} '
            f'[{low:.2f}–{high:.2f}]  {bound.ljust(9)} {step}'
        )
    return '\n'.join(lines)


def markdown(rows: list[Row]) -> str:
    """The rows for the page."""
    lines = ['| workload | ratio | measured | target |', '| --- | --- | --- | --- |']
    for row in rows:
        sign = '≤' if row.most else '≥'
        bound = f'{sign} {row.target:g}' if row.target else ''
        lines.append(f'| {row.workload} | {row.what} | {row.value:.2f} | {bound} |')
    return '\n'.join(lines)


PAGE = HERE.parent / 'docs' / 'streams.md'
RESULTS = HERE / 'streams.json'
TABLE = re.compile(
    r'(<!-- from benchmarks/streams.json -->\n)(?:.*?\n)??(<!-- end -->)', re.DOTALL
)


def page() -> str:
    """The text of the page with the table of the results."""
    rows = [Row(**row) for row in json.loads(RESULTS.read_text())]
    made = lambda match: f'{match[1]}{markdown(rows)}\n{match[2]}'
    return TABLE.sub(made, PAGE.read_text())


if __name__ == '__main__':
    PAGE.write_text(page())
