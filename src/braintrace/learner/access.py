"""Around every call of a learner: one call at a time for the learners of a model,
values read from where the user keeps them, and arrays on their devices.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import brainstate

from ..errors import NotSupportedError, three_parts
from .arguments import check_numbers
from .binding import recording_of
from .model_states import place_states, restored_on_error, start_here
from .models import MODULE, interface_of
from .placement import Placement
from .programs import compile_step
from .settings import with_settings_of

if TYPE_CHECKING:
    from .learner import Learner

_locks: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""For each model the lock of its states, which all of its learners share."""


def alone(learner: Learner) -> contextlib.AbstractContextManager:
    """One call at a time for the learners of a model, whose states are the same, and in
    the process that the learner was made in."""
    if os.getpid() != learner._process:
        raise NotSupportedError(
            three_parts(
                'a learner in a process that was started by fork',
                'the threads that run its compiled programs are not there, so that '
                'a call may never return',
                "multiprocessing.get_context('spawn'), and a learner compiled in "
                'the new process',
            )
        )
    lock: Any = _locks.get(learner.model)
    if lock is None:
        lock = _locks.setdefault(learner.model, threading.RLock())
    # The lock itself: a context manager of contextlib would double the time of a small
    # step.
    return lock if learner.placement is None else _on_devices(lock, learner.placement)


@contextlib.contextmanager
def _on_devices(lock: Any, placement: Placement) -> Iterator[None]:
    with lock, placement.active():
        yield


def synchronised(learner: Learner) -> contextlib.AbstractContextManager:
    """Around every call, which has the model for itself; where its user keeps its
    values elsewhere, they are read before and written after."""
    lock, interface = alone(learner), interface_of(learner.model)
    return lock if interface is MODULE else _followed(learner, lock, interface)


@contextlib.contextmanager
def _followed(
    learner: Learner, lock: contextlib.AbstractContextManager, interface: Any
) -> Iterator[None]:
    record = recording_of(learner)
    with lock:
        if record is not None and record.runs_model:
            yield
            return
        with interface.followed(lambda: _compile_again(learner)):
            yield


def _compile_again(learner: Learner) -> None:
    """The graph of a step that has changed."""
    learner._kept.programs.clear()
    with_settings_of(learner._kept.settings, compile_step, learner, learner._example)


# ---------------------------------------------------------------- devices


def place_inputs(learner: Learner, inputs: tuple, axis: int) -> tuple:
    """Inputs on their devices, with samples at ``axis``. Without a mesh, the learner is
    split as the inputs are."""
    check_numbers(inputs)
    if learner.placement is None:
        found = Placement.of_inputs(inputs, axis)
        if found is None or not learner._example:
            return inputs
        learner.placement = found
        place_states(learner)
        # Programs so far were made for one device.
        learner._kept.programs.clear()
        start_here(learner)
        learner._carried.place(learner.placement)
    return learner.placement.put_inputs(inputs, axis)


# ---------------------------------------------------------------- errors


@contextlib.contextmanager
def undone_on_error(learner: Learner, optimizer: Any = None) -> Iterator[None]:
    """All states as they were, if the call fails."""
    has_states = hasattr(optimizer, 'param_states')
    own = brainstate.graph.states(optimizer).values() if has_states else ()
    moving = (*learner._held(), *own, *learner._kept.optimizers.values())
    with restored_on_error(moving):
        yield
