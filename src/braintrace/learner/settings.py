"""The settings of brainstate that a step asks for while it is traced.

``brainstate.environ.get('dt')`` is read once, when a step is traced, and its value
becomes part of the program. A record of what was asked for says whether the program
still holds.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import brainstate
import jax
import numpy as np

from ..frontends.failures import unset_setting

MISSING = object()
"""The value of a setting that is not set: the step then had a default, or failed."""


class Settings:
    """The settings that were asked for, by name, with the values that they had."""

    def __init__(self) -> None:
        self._values: dict[str, tuple] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """What was asked for."""
        return tuple(self._values)

    def __getitem__(self, name: str) -> Any:
        structure, leaves = self._values.get(name, _parts(MISSING))
        return jax.tree.unflatten(structure, leaves)

    def changed(self) -> list[str]:
        """The settings that have another value now.

        They are read as a step reads them, so a record around this one has them too.
        """
        now = lambda name: _parts(brainstate.environ.get(name, MISSING))
        known = self._values.items()
        return [name for name, was in known if not _equal(was, now(name))]

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what is asked for inside, by this thread.

        brainstate has no function for it. Its `EnvironmentState`, of which every thread
        has its own attributes, has the values of contexts in a dictionary, and
        every request looks there first; for the time of a trace it is one that records.
        """
        state = brainstate.environ._ENV_STATE
        outer = state.contexts
        state.contexts = _Recording(self._values, outer)
        try:
            yield
        finally:
            state.contexts = outer


class _Recording(defaultdict[Hashable, list]):
    """Values of contexts by setting, and a record of the settings that are looked up
    here. A context that is opened inside the step is no setting of its caller's."""

    def __init__(self, record: dict[str, tuple], outer: defaultdict[Hashable, list]):
        super().__init__(list, outer)
        self._record = record
        self._outer = outer
        self._before = brainstate.environ.all()

    def __contains__(self, name: Any) -> bool:
        _ = name in self._outer  # which may be a record as well
        self._record.setdefault(name, _parts(self._before.get(name, MISSING)))
        return super().__contains__(name)


def _parts(value: Any) -> tuple:
    """The structure and the leaves of a setting: a quantity has its unit in the
    structure, and a list or dictionary may change."""
    leaves, structure = jax.tree.flatten(value)
    return structure, leaves


def _equal(a: tuple, b: tuple) -> bool:
    return a[0] == b[0] and all(map(_same, a[1], b[1]))


def _same(a: Any, b: Any) -> bool:
    """Whether two leaves are the same constant for a program. A Python number is not an
    array of the same value, which has another type in JAX; 0.0 is not -0.0."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        if not isinstance(a, (float, complex, np.generic, np.ndarray, jax.Array)):
            return bool(a == b)
        weak = [getattr(x, 'weak_type', False) for x in (a, b)]
        a, b = np.asarray(a), np.asarray(b)
        kinds = [(x.shape, x.dtype, w) for x, w in zip((a, b), weak, strict=True)]
        return kinds[0] == kinds[1] and a.tobytes() == b.tobytes()
    except Exception:  # tracers, keys, and whatever cannot be compared
        return False


def with_settings_of(settings: Settings, function: Callable, *args: Any) -> Any:
    """Call a function that traces a step. A setting that is not set, and without which
    it fails, is as it is in ``settings``: those at which a learner was compiled, in
    a context that has ended or in another thread, whose settings are its own."""
    try:
        return function(*args)
    except Exception as error:
        name = unset_setting(error)
        if name is None or (value := settings[name]) is MISSING:
            raise
        with brainstate.environ.context(**{name: value}):
            return with_settings_of(settings, function, *args)
