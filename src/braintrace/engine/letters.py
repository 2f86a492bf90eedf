"""The axes of a ``dot_general`` between data and a weight, as letters for ``einsum``."""

from __future__ import annotations

import string
from typing import Any, NamedTuple


class Letters(NamedTuple):
    """Axes of x, of w, of y, the contracted ones, and those that x, w and y share. The letter t is left free."""

    x: str
    weight: str
    y: str
    contracted: str
    batch: str

    @classmethod
    def of(cls, equation: Any, operand: int) -> Letters:
        """The axes of an equation whose weight is one of its two operands."""
        (left, right), (batch_left, batch_right) = equation.params['dimension_numbers']
        ranks = [v.aval.ndim for v in equation.invars]
        names = iter(string.ascii_letters.replace('t', ''))
        first = [next(names) for _ in range(ranks[0])]
        second = [''] * ranks[1]
        for a, b in zip((*batch_left, *left), (*batch_right, *right), strict=True):
            second[b] = first[a]
        second = [c or next(names) for c in second]
        contracted = [first[a] for a in left]
        batch = [first[a] for a in batch_left]
        free = [c for c in (*first, *second) if c not in batch and c not in contracted]
        weight, x = (first, second) if operand == 0 else (second, first)
        return cls(*map(''.join, (x, weight, [*batch, *free], contracted, batch)))
