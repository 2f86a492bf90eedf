"""Ctrl-C at any moment of a call, and errors of callbacks: afterwards all states are
those from before the call, or all those from after it.

Signals are real ones (SIGINT). They are sent at the n-th instruction of the package
that a call runs, or by another thread at a random moment of a loop of calls, which may
be while a compiled program runs.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import braintrace

from .progress import random_of
from .training import UPDATES, Failing, Noisy, Training, check_same

TITLE = 'SIGINT at random moments of every kind of call, and failing callbacks'
CASES = 5000
SOURCE = str(Path(braintrace.__file__).parent)
STREAMS = ('stream', 'chunk', 'predict', 'gradient', 'scaled', 'eligibility')
CALLS = (*STREAMS, 'carried', 'fresh', 'chunks', 'evolve', 'step', 'online', 'apply')
WAYS = ('instruction', 'loop', 'callback')


class Interrupt:
    """Sends SIGINT at one instruction of the package, counted from where it is
    entered."""

    def __init__(self, at: int | None):
        self.at, self.count = at, 0

    def _instruction(self, frame: Any, event: str, argument: Any) -> Any:
        if event == 'opcode':
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._instruction

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        frame.f_trace_opcodes = True
        return self._instruction

    def __enter__(self) -> Interrupt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.settrace(None)


class Subject(Training):
    """The training with a call of each kind."""

    def __init__(self, rule: str, model: type[Noisy] = Noisy):
        super().__init__(4, rule, model=model)
        self.xs, self.ys = self.batches(0)
        self.folder = tempfile.TemporaryDirectory(prefix='interrupts-')
        given = (self.step_fn, self.optimizer)
        self.stream = self.learner.stream(*given, decay=0.9)
        self.chunked = self.learner.stream(*given, chunk=len(self.xs))
        self.states |= self.stream.states
        self._start |= {n: s.value for n, s in self.stream.states.items()}

    def step_of_windows(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The loss of a window."""
        out = self.learner(braintrace.MultiStepData(x))
        return ((out - y) ** 2).mean()

    @functools.cached_property
    def gradients(self) -> dict:
        """Some gradients by path."""
        states = self.learner.param_states.items()
        return {path: jax.tree.map(np.ones_like, s.value) for path, s in states}

    def call(self, kind: str) -> Any:
        """One call."""
        learner, stream, data = self.learner, self.stream, (self.xs, self.ys)
        x, y = self.xs[0], self.ys[0]
        updated = {'step_fn': self.step_fn, 'optimizer': self.optimizer}
        if kind == 'stream':
            return stream(x, y)
        if kind == 'chunk':
            return self.chunked(*data)
        if kind == 'predict':
            return stream.predict(x)
        if kind == 'gradient':
            return stream.gradient(x, y)
        if kind == 'scaled':
            return stream.apply(self.gradients, 0.1)
        if kind == 'eligibility':
            return stream.apply(scale=0.1)
        if kind in ('carried', 'fresh'):
            fresh = kind == 'fresh'
            return learner.etrace_grad(*data, step_fn=self.step_fn, fresh=fresh)
        if kind == 'chunks':
            given = {'step_fn': self.step_of_windows, 'chunk_size': len(self.xs)}
            return learner.etrace_grad(*data, **given)
        if kind == 'evolve':
            return learner.etrace_evolve(self.xs)
        if kind == 'step':
            return learner(x)
        if kind == 'online':
            return learner.etrace_online(*data, **updated)
        assert kind == 'apply'
        return learner.apply(self.gradients, self.optimizer)

    def begin(self, kind: str) -> None:
        """Somewhere inside a sequence, with traces that are not zero. The arrays of
        the states are those that a call of the same kind wrote, which the next call
        donates; nothing else has read them."""
        self.reset()
        self.learner.etrace_evolve(self.xs[:3])
        if kind == 'eligibility':
            self.call('gradient')
        self.call(kind)

    @functools.cached_property
    def moments(self) -> list[dict]:
        """Values before a training and after each part of its updates."""
        found: list[dict] = []

        def seen(name: str) -> Any:
            method = getattr(braintrace.Learner, name)

            def call(learner: Any, *given: Any, **options: Any) -> Any:
                result = method(learner, *given, **options)
                found.append(self.values())
                return result

            return mock.patch.object(braintrace.Learner, name, call)

        self.reset()
        found.append(self.values())
        with seen('etrace_online'), seen('reset_state'):
            self.fit(None)
        assert len(found) == 1 + 2 * UPDATES
        return found

    def after_calls(self, kind: str, count: int) -> dict:
        """Values after so many calls without interrupt."""
        self.begin(kind)
        for _ in range(count):
            self.call(kind)
        return self.values()

    @functools.cache  # noqa: B019 - lives as long as the process
    def around(self, kind: str) -> tuple[dict, dict, dict, int]:
        """Values before a call, after it and after the next one, without interrupt, and
        the instructions of a call."""
        values = [self.after_calls(kind, count) for count in range(3)]
        self.begin(kind)
        with Interrupt(None) as counted:
            self.call(kind)
        return *values, counted.count


@functools.cache
def subject(rule: str, model: type[Noisy] = Noisy) -> Subject:
    """The subject of this process."""
    return Subject(rule, model)


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


def without_random(name: str) -> bool:
    """The generator of brainstate is not the learner's: what was drawn is drawn."""
    return name == 'random'


def interrupted(user: Subject, kind: str, at: int) -> str:
    """One call, interrupted at an instruction; what it left."""
    before, after, next_one, count = user.around(kind)
    user.begin(kind)
    drawn = jnp.copy(user.states['random'].value)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with Interrupt(at):
            user.call(kind)
        raise AssertionError('the signal was lost')
    except KeyboardInterrupt:
        assert signal.getsignal(signal.SIGINT) is handler
    now = user.values()  # raises if an array was donated and nothing took its place
    where = f'{kind}, instruction {at} of {count}'
    if same(now, before, without_random):
        how, then = 'as before', after
        user.states['random'].value = drawn
    else:
        assert same(now, after), f'{where}: {differences(now, before, after)}'
        how, then = 'as after', next_one
    # The next call is that of a learner that was never interrupted.
    user.call(kind)
    assert same(user.values(), then), f'{where}: the next call differs'
    return f'signal at an instruction: {how}'


def interrupted_loop(user: Subject, kind: str, seconds: float) -> str:
    """Calls in a loop, interrupted after some time; whether the last one was done."""
    user.begin(kind)
    count = 0

    def send() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    try:
        thread.start()
        # Python ignores an exception inside the finalizer of an object: the loop ends.
        while thread.is_alive():
            user.call(kind)
            count += 1
        user.call(kind)
        count += 1
    except KeyboardInterrupt:
        pass
    thread.join()
    now = user.values()
    for more, how in enumerate(('as before', 'as after')):
        if same(now, user.after_calls(kind, count + more), without_random):
            return f'signal in a loop: {how}'
    raise AssertionError(f'{kind}, after {count} calls: some other moment')


def failed(user: Subject, kind: str) -> str:
    """One call whose callback fails; nothing has changed."""
    before, after, *_ = user.around(kind)
    user.begin(kind)
    drawn = jnp.copy(user.states['random'].value)
    user.learner.model.fails = True
    try:
        jax.block_until_ready(user.call(kind))
        raised = ''
    except Exception as error:
        raised = f'{error} {error.__cause__}'
    finally:
        user.learner.model.fails = False
    assert 'a callback failed' in raised, f'{kind}: another error, or none'
    assert same(user.values(), before, without_random), f'{kind}: changed'
    user.states['random'].value = drawn
    user.call(kind)
    assert same(user.values(), after), f'{kind}: the next call differs'
    return 'failed callback: as before'


def interrupted_fit(user: Subject, delay: float, gap: float) -> str:
    """A training that two signals end at once; resumed in the same process, it is the
    uninterrupted one."""

    def send() -> None:
        for seconds in (delay, gap):
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGINT)

    out = Path(tempfile.mkdtemp(dir=user.folder.name))
    thread = threading.Thread(target=send)
    # For signals that come before the training has its own handler, or after it.
    handler = signal.signal(signal.SIGINT, lambda number, frame: None)
    how = 'not interrupted'
    try:
        thread.start()
        if user.fit(out).ended == 'interrupted':
            how = 'interrupted once'
    except KeyboardInterrupt:
        how = 'interrupted twice'
        now = user.values()
        at = [n for n, m in enumerate(user.moments) if same(now, m, without_random)]
        assert at, 'fit: interrupted between two moments'
    finally:
        thread.join()
        signal.signal(signal.SIGINT, handler)
    return f'fit: {how}, {user.resume_or_start(out)}'


def case(seed: int, number: int) -> str:
    """A call of some kind, by some rule, at some moment."""
    rng = random_of('interrupts', seed, number)
    kinds = (*CALLS, 'fit')
    kind, way = kinds[number % len(kinds)], rng.choice(WAYS)
    # There are no exact windows for the third.
    rules = ['d_rtrl', 'pp_prop', 'uoro'][: 2 if kind == 'chunks' else 3]
    rule = rng.choice(rules)
    if kind == 'fit':
        return interrupted_fit(subject(rule), rng.uniform(0, 0.5), rng.uniform(0, 0.1))
    if way == 'callback' and kind not in ('scaled', 'eligibility', 'apply'):
        return failed(subject(rule, Failing), kind)
    user = subject(rule)
    if way == 'loop':
        user.around(kind)  # compiled
        return interrupted_loop(user, kind, rng.uniform(0, 0.03))
    return interrupted(user, kind, rng.randint(1, user.around(kind)[3]))


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
