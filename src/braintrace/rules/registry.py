"""All rules by name. A file in this folder registers its rule, and `compile`, the
command and the tests know it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import one_of, three_parts
from .rule import Rule


@dataclass(frozen=True, eq=False)
class Preset:
    """A named rule: ``make(**options)`` gives it, with the docstring that its learner
    has.

    ``title`` is the name of its learner class, ``name`` the key in lower case.
    ``check``: options for tests on short sequences. ``vjp_method``: of its learners,
    unless another is given.
    """

    title: str
    name: str
    make: Callable[..., Rule]
    aliases: tuple[str, ...] = ()
    check: dict[str, Any] | None = None
    vjp_method: str = 'single-step'

    @cached_property
    def options(self) -> list[inspect.Parameter]:
        """The options of the rule, with their defaults."""
        return list(inspect.signature(self.make).parameters.values())

    @cached_property
    def default(self) -> Rule:
        """The rule with the options it has by default."""
        return self.make()


PRESETS: dict[str, Preset] = {}
"""Every rule by each of its names, in lower case."""


def register(
    title: str,
    *aliases: str,
    check: dict[str, Any] | None = None,
    vjp_method: str = 'single-step',
) -> Callable[[Callable[..., Rule]], Callable[..., Rule]]:
    """Register a function that makes a rule; ``aliases`` are other names of it.

    ``check``: options that the conformance tests give it. ``vjp_method``: of its
    learners.
    """

    def add(make: Callable[..., Rule]) -> Callable[..., Rule]:
        name = title.lower()
        others = tuple(a.lower() for a in aliases)
        preset = Preset(title, name, make, others, check, vjp_method)
        PRESETS.update(dict.fromkeys((name, *preset.aliases), preset))
        return make

    return add


def named(name: str) -> Preset:
    """A rule from any way to write its name."""
    letters = lambda text: text.lower().replace('-', '').replace('_', '')
    for key, preset in PRESETS.items():
        if letters(key) == letters(name):
            return preset
    raise ValueError(
        three_parts(f'rule={name!r}', 'there is no such rule', one_of(PRESETS, name))
    )
