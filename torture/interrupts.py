"""Ctrl-C at every line of a call: states, weights and traces are consistent afterwards.

An interrupt is an exception that may come between any two lines of Python, so it is
raised at the n-th line of the package that a call runs, for random n.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

import braintrace

from .progress import random_of
from .training import Training, check_same

TITLE = 'KeyboardInterrupt at random lines of a call; the next call works'
CASES = 5000
SOURCE = str(Path(braintrace.__file__).parent)
CALLS = ('carried', 'fresh', 'chunks', 'evolve', 'step', 'online', 'apply', 'fit')


class Interrupt:
    """Raises at one line of the package, counted from where it is entered."""

    def __init__(self, at: int | None):
        self.at, self.lines = at, 0

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        if event == 'line':
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(SOURCE) else None

    def __enter__(self) -> Interrupt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.settrace(None)


class Subject(Training):
    """The training with a call of each kind."""

    def __init__(self, rule: str):
        super().__init__(4, rule)
        self.xs, self.ys = self.batches(0)
        self.lines: dict[str, int] = {}
        self.folder = tempfile.TemporaryDirectory(prefix='interrupts-')

    def step_of_windows(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The loss of a window."""
        out = self.learner(braintrace.MultiStepData(x))
        return ((out - y) ** 2).mean()

    def call(self, kind: str) -> Any:
        """One call."""
        learner, data = self.learner, (self.xs, self.ys)
        if kind in ('carried', 'fresh'):
            fresh = kind == 'fresh'
            return learner.etrace_grad(*data, step_fn=self.step_fn, fresh=fresh)
        if kind == 'chunks':
            given = {'step_fn': self.step_of_windows, 'chunk_size': len(self.xs)}
            return learner.etrace_grad(*data, **given)
        if kind == 'evolve':
            return learner.etrace_evolve(self.xs)
        if kind == 'step':
            return learner(self.xs[0])
        if kind == 'online':
            given = {'step_fn': self.step_fn, 'optimizer': self.optimizer}
            return learner.etrace_online(*data, **given)
        if kind == 'apply':
            ones = {p: jax.tree.map(np.ones_like, s.value) for p, s in self.parameters}
            return learner.apply(ones, self.optimizer)
        with tempfile.TemporaryDirectory(dir=self.folder.name) as out:
            given = {'step_fn': self.step_fn, 'optimizer': self.optimizer}
            return braintrace.fit(
                learner, self.batches, **given, updates=2, out=out, show=False
            )

    @property
    def parameters(self) -> list:
        """Weights by path."""
        return list(self.learner.param_states.items())

    def begin(self) -> None:
        """Somewhere inside a sequence, with traces that are not zero."""
        self.reset()
        self.learner.etrace_evolve(self.xs[:3])

    @functools.cached_property
    def moments(self) -> list[dict]:
        """Values after each part of the two updates of a training."""
        found: list[dict] = []

        def seen(name: str) -> Any:
            method = getattr(braintrace.Learner, name)

            def call(learner: Any, *given: Any, **options: Any) -> Any:
                result = method(learner, *given, **options)
                found.append(self.values())
                return result

            return mock.patch.object(braintrace.Learner, name, call)

        self.begin()
        with seen('etrace_grad'), seen('apply'):
            self.call('fit')
        assert len(found) == 4
        return found

    @functools.cache  # noqa: B019 - lives as long as the process
    def around(self, kind: str) -> tuple[dict, dict, int]:
        """Values before and after a call without interrupt, and its lines."""
        self.begin()
        self.call(kind)  # compiled
        self.begin()
        before = self.values()
        with Interrupt(None) as counted:
            self.call(kind)
        return before, self.values(), counted.lines


@functools.cache
def subject(rule: str) -> Subject:
    """The subject of this process."""
    return Subject(rule)


def same(a: dict, b: dict, leave_out: Callable[[str], bool] = lambda name: False):
    """Whether all arrays are equal."""
    try:
        check_same(
            {n: x for n, x in a.items() if not leave_out(n)},
            {n: x for n, x in b.items() if not leave_out(n)},
        )
    except AssertionError:
        return False
    return True


def is_trace(name: str) -> bool:
    """Whether a state is a trace, by its name."""
    return name.startswith('learner.traces')


def without_random(name: str) -> bool:
    """The generator of brainstate is not the learner's: what was drawn is drawn."""
    return name == 'random'


def interrupted(user: Subject, kind: str, at: int) -> str:
    """One call, interrupted at a line; what it left."""
    before, after, lines = user.around(kind)
    moments = user.moments if kind == 'fit' else []
    user.begin()
    drawn = user.states['random'].value
    with contextlib.suppress(KeyboardInterrupt), Interrupt(at):
        user.call(kind)
    now = user.values()  # raises if an array was donated and nothing took its place
    how = ''
    if same(now, before, without_random):
        how = 'as before'
    elif same(now, after, without_random):
        how = 'as after'
    elif same(now, before, lambda n: n == 'random' or is_trace(n)):
        zero = [x for n, xs in now.items() if is_trace(n) for x in xs]
        assert not any(np.any(x) for x in zero), f'{kind}: traces of another moment'
        how = 'as before, traces from zero'
    elif kind == 'fit' and any(same(now, m, without_random) for m in moments):
        how = 'between two updates'
    assert how, f'{kind}, line {at} of {lines}: {differences(now, before, after)}'
    # The next call is that of a learner that was never interrupted.
    user.states['random'].value = drawn
    user.call(kind)
    if how == 'as before' and kind != 'fit':
        assert same(user.values(), after, without_random), f'{kind}: next call differs'
    return f'{kind}: {how}'


def case(seed: int, number: int) -> str:
    """A call of some kind, by some rule, at some line."""
    rng = random_of('interrupts', seed, number)
    kind = CALLS[number % len(CALLS)]
    # There are no exact windows for the third.
    rules = ['d_rtrl', 'pp_prop', 'uoro'][: 2 if kind == 'chunks' else 3]
    user = subject(rng.choice(rules))
    return interrupted(user, kind, rng.randint(1, user.around(kind)[2]))


def differences(now: dict, before: dict, after: dict) -> str:
    """Which states are of which moment."""
    found = []
    for name in now:
        if not same({name: before[name]}, {name: after[name]}):
            of = [
                moment
                for moment, values in (('before', before), ('after', after))
                if same({name: now[name]}, {name: values[name]})
            ]
            found.append(f'{name} {"".join(of) or "neither"}')
    return ', '.join(found)
