"""The boxes of a drawing: their text, how large it is, and where arrows meet them."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

from .chart import Edge

WIDTHS = {'input': 90, 'output': 90, 'state': 150, 'operation': 202, 'group': 176}
ROW, TITLE, PAD, PORT = 18, 22, 9, 20
CHARACTER = {'title': 8.6, 'row': 7.3}
"""Width of a character, rather too wide than too narrow."""


@dataclass(frozen=True)
class Row:
    """A line of text in a box; ``chip`` is what a parameter gets, ``full`` all that
    there is to say."""

    text: str
    chip: str | None = None
    full: str | None = None
    faint: bool = False


@dataclass
class Box:
    """A box of the drawing: its text, and once laid out its place."""

    kind: str
    title: str
    rows: Sequence[Row]
    cuts: tuple[int, ...] = ()
    layer: int = 0
    band: int = 0
    x: float = 0
    y: float = 0
    ports: list[Edge] = field(default_factory=list)

    @property
    def width(self) -> int:
        return WIDTHS[self.kind]

    @property
    def height(self) -> int:
        return max(
            2 * PAD + TITLE + ROW * len(self.rows) - 4, PORT * (len(self.ports) + 1)
        )

    def entry(self, edge: Edge) -> float:
        """Height at which an arrow enters."""
        return self.y + self.height * (self.ports.index(edge) + 1) / (
            len(self.ports) + 1
        )

    def exit(self, edge: Edge) -> float:
        """Height at which an arrow leaves: what was lies below what is."""
        return self.y + self.height * (0.72 if edge.delayed else 0.4)


def width_of(text: str) -> int:
    """Columns that a text takes; wide characters count as two."""
    return sum(2 if unicodedata.east_asian_width(c) in 'WF' else 1 for c in text)


def shortened(text: str, columns: int) -> str:
    """The end of a text that is too long, where names differ most."""
    if width_of(text) <= columns:
        return text
    while text and width_of(text) >= columns:
        text = text[1:]
    return '…' + text
