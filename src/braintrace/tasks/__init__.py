"""Tasks that run on an ordinary computer. Trials are drawn from a NumPy generator.

Every task returns :class:`Trials`: inputs (time, batch, channels), a target for every
step, and a weight for the loss of each step. ``reference`` names published results, and
how they were obtained.
"""

from dataclasses import fields
from functools import partial
from typing import Any

from ..errors import one_of, three_parts
from .events import EventRecordings, events_to_steps
from .memory import (
    Adding,
    Copying,
    DelayedMatchToSample,
    EvidenceAccumulation,
    PatternGeneration,
)
from .randman import Randman
from .recordings import NMNIST, SHD, Digits
from .series import Series
from .trials import Task, Trials

__all__ = [
    'NMNIST',
    'SHD',
    'TASKS',
    'Adding',
    'Copying',
    'DelayedMatchToSample',
    'Digits',
    'EventRecordings',
    'EvidenceAccumulation',
    'PatternGeneration',
    'Randman',
    'Series',
    'Task',
    'Trials',
    'events_to_steps',
    'task',
]

TASKS: dict[str, Any] = {
    'evidence': EvidenceAccumulation,
    'matching': DelayedMatchToSample,
    'copying': Copying,
    'adding': Adding,
    'pattern': PatternGeneration,
    'mackey_glass': partial(Series, 'mackey_glass'),
    'lorenz': partial(Series, 'lorenz'),
    'henon': partial(Series, 'henon'),
    'digits': Digits,
    'randman': Randman,
    'shd': SHD,
    'nmnist': NMNIST,
}
"""Tasks by name."""


def task(name: str, **options: Any) -> Task:
    """A task by its name, with its options.

    >>> task('copying', lag=5).steps
    25
    """
    if name not in TASKS:
        raise ValueError(
            three_parts(
                f'a task {name!r}', 'there is none by this name', one_of(TASKS, name)
            )
        )
    known = {
        f.name: f.default
        for f in fields(getattr(TASKS[name], 'func', TASKS[name]))
        if f.init
    }
    is_number = lambda x: isinstance(x, (int, float)) and x >= 0
    if wrong := [
        n for n, v in options.items() if is_number(known.get(n)) and not is_number(v)
    ]:
        options_text = ', '.join(f'{n}={options[n]!r}' for n in wrong)
        raise ValueError(
            three_parts(
                f'task {name!r} with {options_text}',
                'it is a count or a size',
                'a number, not a negative one',
            )
        )
    try:
        return TASKS[name](**options)
    except TypeError as error:
        wanted = f'options among {", ".join(known)}'
        raise ValueError(
            three_parts(f'task {name!r} with {options}', str(error), wanted)
        ) from error
