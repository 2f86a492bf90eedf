"""Tasks that an ordinary computer can check, drawn from a NumPy generator.

Every task gives :class:`Trials`: inputs (time, batch, channels), targets of every step, and the weight of its loss.
``reference`` says what others reached, and how.
"""

from dataclasses import fields
from functools import partial
from typing import Any

from ..errors import one_of, three_parts
from .memory import Adding, Copying, DelayedMatchToSample, EvidenceAccumulation, PatternGeneration
from .randman import Randman
from .recordings import NMNIST, SHD, Digits
from .series import Series
from .trials import Task, Trials

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
    """A task by its name, with options of its own.

    >>> task('copying', lag=5).steps
    25
    """
    if name not in TASKS:
        raise ValueError(three_parts(f'a task {name!r}', 'there is none by this name', one_of(TASKS, name)))
    try:
        return TASKS[name](**options)
    except TypeError as error:
        made = getattr(TASKS[name], 'func', TASKS[name])
        known = [f.name for f in fields(made) if f.init]
        raise ValueError(three_parts(f'task {name!r} with {options}', str(error), f'options among {known}')) from error
