"""What a call of a learner means while a function around it is being traced.

Inside a ``step_fn`` the learner stands for its model: the call runs the model, and the
solver differentiates the traced program as a whole. Which of these holds is a property
of the call, so it is kept in a context variable and not on the learner.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass
class Recording:
    """One function that is being traced, and what it did with the learner.

    ``runs_model``: calls run the model alone; otherwise they learn, inside exact
    windows. ``ignores_modulators``: as where nothing is learned. ``takes_modulators``:
    even if the learner's rule has none, for a comparison with one that has. ``calls``:
    how often the learner was called. ``modulator``: the one that a call was given.
    ``outputs``: what the last call gave.
    """

    learner: Any
    runs_model: bool = True
    ignores_modulators: bool = False
    takes_modulators: bool = False
    calls: int = 0
    modulator: Any = None
    outputs: Any = None


_recordings: ContextVar[tuple[Recording, ...]] = ContextVar('recordings', default=())


@contextmanager
def recording(learner: Any, **how: bool) -> Iterator[Recording]:
    """Record the calls of a learner; ``how``: flags of a :class:`Recording`."""
    found = Recording(learner, **how)
    token = _recordings.set((*_recordings.get(), found))
    try:
        yield found
    finally:
        _recordings.reset(token)


def recording_of(learner: Any) -> Recording | None:
    """The innermost recording of a learner's calls."""
    return next((r for r in reversed(_recordings.get()) if r.learner is learner), None)
