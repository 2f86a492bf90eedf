"""HTML and SVG from nested calls: whatever is not markup already is escaped."""

from __future__ import annotations

import html
import unicodedata
from typing import Any

VOID = ('meta', 'br')


class Markup(str):
    """Text that is HTML and stays as it is."""

    __slots__ = ()


def escaped(value: Any) -> Markup:
    """A value as HTML: markup as it is, all else as text; control characters show as a
    box."""
    if isinstance(value, Markup):
        return value
    hidden = lambda c: c not in '\n\t' and unicodedata.category(c).startswith('C')
    return Markup(
        html.escape(
            ''.join('\N{REPLACEMENT CHARACTER}' if hidden(c) else c for c in str(value))
        )
    )


def together(*children: Any) -> Markup:
    """Markup of several parts, one after the other."""
    return Markup(''.join(map(escaped, children)))


def tag(
    name: str, /, *children: Any, class_: str | None = None, **attributes: Any
) -> Markup:
    """An element; an attribute that is None is left out.

    >>> tag('p', 'a < b', tag('br'), id='x')
    '<p id="x">a &lt; b<br></p>'
    """
    given = {**({} if class_ is None else {'class': class_}), **attributes}
    words = ''.join(
        f' {key}="{escaped(value)}"'
        for key, value in given.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f'<{name}{words}>')
    return Markup(f'<{name}{words}>{together(*children)}</{name}>')


def style_of(words: str) -> str:
    """The name of a style from words.

    >>> style_of('one step')
    'one-step'
    """
    return words.replace(' ', '-')
