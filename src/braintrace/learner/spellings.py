"""Spellings of another package: members of learners and records, classes that are
refused, switches of functions.

Nothing here knows any of them. A package that has some gives them by :func:`provide`,
as `braintrace` does with those of its `published` folder.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar, cast

P = ParamSpec('P')
R = TypeVar('R')


class Spellings(Protocol):
    """What a module of spellings has."""

    MEMBERS: dict[str, Callable[[Any], Any]]
    """Members of a learner by name: functions of the learner."""
    RECORD_MEMBERS: dict[str, dict[str, Callable[[Any], Any]]]
    """Members of a record by the name of its class and their own: functions of it."""
    POSITIONS: dict[str, tuple[str, ...]]
    """Names of the arguments of a learner class that it takes by position."""

    @staticmethod
    def check_subclass(kind: type) -> None:
        """Raise if a user's learner class overrides something that is never called."""

    @staticmethod
    def check_switches(name: str, switches: Mapping[str, Any]) -> None:
        """Raise if a switch given to a function would change what it means."""


_load: Callable[[], Spellings] | None = None


def provide(load: Callable[[], Any]) -> None:
    """Use the spellings that ``load`` gives, once they are needed."""
    global _load
    _load = load


def member(learner: Any, name: str) -> Any:
    """A member of a learner by another name."""
    # Python and JAX look up many names that begin with __, and none is a member.
    found = None if _load is None or name.startswith('__') else _load()
    return _found({} if found is None else found.MEMBERS, learner, name)


def _found(members: Mapping[str, Callable[[Any], Any]], owner: Any, name: str) -> Any:
    """What ``__getattr__`` of an owner of these members gives."""
    if name in members:
        return members[name](owner)
    if hasattr(type(owner), name):
        # A property that raised an AttributeError: once more, for its own error.
        return object.__getattribute__(owner, name)
    text = f'{type(owner).__name__!r} object has no attribute {name!r}'
    # With these, Python suggests the nearest name.
    raise AttributeError(text, name=name, obj=owner)


def check_subclass(kind: type) -> None:
    """Check a learner class that a user wrote."""
    if _load is not None:
        _load().check_subclass(kind)


def extend(*records: type) -> None:
    """Give records the members of :attr:`Spellings.RECORD_MEMBERS`."""

    def member(kind: str, record: Any, name: str) -> Any:
        found = None if _load is None or name.startswith('_') else _load()
        return _found({} if found is None else found.RECORD_MEMBERS[kind], record, name)

    for record in records:
        of = functools.partialmethod(functools.partial(member, record.__name__))
        setattr(record, '__getattr__', of)  # noqa: B010 - not a method of a type


def positions(title: str) -> tuple[str, ...]:
    """Names of all arguments that a learner class takes by position elsewhere."""
    return () if _load is None else _load().POSITIONS.get(title, ())


def taking(function: Callable[P, R], *switches: str) -> Callable[P, R]:
    """A function that takes switches by name as well, or by position after its own
    arguments; they are checked, not passed on."""
    parameters = inspect.signature(function).parameters.values()
    by_position = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    own = None if takes_more else len(by_position)

    @functools.wraps(function)
    def with_switches(*args: Any, **options: Any) -> R:
        given = {name: options.pop(name) for name in switches if name in options}
        if own is not None and len(args) > own:
            given.update(zip(switches, args[own:], strict=False))
            args = args[:own] + args[own + len(switches) :]
        if given and _load is not None:
            name = function.__qualname__.removesuffix('.__init__')
            _load().check_switches(name, given)
        return function(*args, **options)

    return cast(Callable[P, R], with_switches)
