"""Numbers as readable text."""

from __future__ import annotations

from collections.abc import Iterable


def size_text(n: float) -> str:
    """A number of bytes as text.

    >>> size_text(1536)
    '1.5 KiB'
    """
    for unit in ('B', 'KiB', 'MiB'):
        if n < 1024:
            return f'{n:.0f} {unit}' if unit == 'B' else f'{n:.1f} {unit}'
        n /= 1024
    return f'{n:.1f} GiB'


def shape_text(shape: Iterable[int]) -> str:
    """A shape as text.

    >>> shape_text((2, 3)), shape_text(())
    ('2×3', 'scalar')
    """
    return '×'.join(map(str, shape)) or 'scalar'
