"""A million steps of online learning in one process: memory, programs, rounding.

Beside each learner runs another in double precision. Both learn a stable task, so their
weights stay together, and what sets their traces apart is rounding.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace
from braintrace.checkpoint import Checkpoints, complete, states_of

from .progress import OUT

TITLE = 'a million online steps by two rules: memory, programs, traces against float64'
STEPS, CHUNKS = 10_000, 5
"""Of a call, and of a case."""
CASES = 20
RULES = ('d_rtrl', 'pp_prop')
UNITS, INPUTS = 6, 3
WARM = 10
"""Chunks after which a process has all its memory."""
MOST_GROWTH = 2 * 2**20
"""Bytes of resident memory that steps may add later. What writing a checkpoint adds is
counted apart: orbax keeps some 20 KB of each, whatever the number of steps."""
MOST_ERROR = 1e-3
"""Of traces in single precision, relative to the largest entry of each."""

_compiled = 0


def _count(event: str, seconds: float, **more: Any) -> None:
    global _compiled
    _compiled += event.endswith('backend_compile_duration')


jax.monitoring.register_event_duration_secs_listener(_count)


def step(params: dict, h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A leaky recurrent layer with a read-out."""
    drive = x @ params['in'] + h @ params['rec'] + params['bias']
    h = 0.9 * h + 0.1 * jnp.tanh(drive)
    return h, h @ params['out']


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Double precision where it is wanted."""
    with jax.enable_x64(dtype == 'float64'):
        yield


class Worker:
    """A learner that goes on from chunk to chunk."""

    def __init__(self, rule: str, dtype: str):
        self.dtype = dtype
        rng = np.random.default_rng(1)
        make = lambda *shape: jnp.asarray(0.5 * rng.normal(size=shape), dtype)
        with precision(dtype):
            params = {
                'in': make(INPUTS, UNITS),
                'rec': make(UNITS, UNITS),
                'bias': make(UNITS),
                'out': make(UNITS, 1),
            }
            example = jnp.zeros((1, INPUTS), dtype)
            state = jnp.zeros((1, UNITS), dtype)
            self.learner = braintrace.compile(step, rule, params, state, example)
            self.optimizer = optax.sgd(0.01)
            self.states = states_of(self.learner, self.optimizer)

    def loss(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The loss of a step."""
        return jnp.mean((self.learner(x) - y) ** 2)

    def run(self, xs: np.ndarray, ys: np.ndarray) -> float:
        """A chunk of steps; the mean loss."""
        with precision(self.dtype):
            data = jnp.asarray(xs, self.dtype), jnp.asarray(ys, self.dtype)
            losses = self.learner.etrace_online(
                *data, step_fn=self.loss, optimizer=self.optimizer
            )
            return float(losses.mean())

    def traces(self) -> list[np.ndarray]:
        """All traces."""
        with precision(self.dtype):
            found = [trace.value for trace in self.learner.traces.values()]
            return [np.asarray(x) for x in jax.tree.leaves(found)]


class Soak:
    """All learners of a seed, and what was measured."""

    def __init__(self, seed: int):
        self.seed, self.done, self.cases_here = seed, 0, 0
        kinds = [(rule, dtype) for rule in RULES for dtype in ('float32', 'float64')]
        self.workers = {kind: Worker(*kind) for kind in kinds}
        self.programs = self.kept = 0
        self.worst, self.growth, self.by_saving, self.loss = 0.0, 0, 0, 0.0
        self.checkpoints = {
            kind: Checkpoints(self.folder(kind), keep=1) for kind in kinds
        }

    def folder(self, kind: tuple[str, str]) -> Path:
        """Where a learner is kept between runs."""
        return OUT / f'soak-{self.seed}' / '-'.join(kind)

    def restore(self, number: int) -> None:
        """Go on after so many chunks."""
        for kind, worker in self.workers.items():
            assert number in complete(self.folder(kind)), f'{number} is not kept'
            with precision(worker.dtype):
                self.checkpoints[kind].restore(worker.states, number)
        self.done = number

    def save(self) -> None:
        """Keep all learners."""
        before = resident()
        for kind, worker in self.workers.items():
            with precision(worker.dtype):
                self.checkpoints[kind].save(self.done, worker.states)
        self.by_saving += resident() - before

    def chunk(self, steps: int) -> None:
        """The next steps of all learners, then all checks."""
        before = resident()
        rng = np.random.default_rng([self.seed, self.done])
        xs = rng.normal(size=(steps, 1, INPUTS))
        ys = 0.3 * np.tanh(xs[..., :1] + 0.5 * np.roll(xs[..., 1:2], 1, 0))
        for (_, dtype), worker in self.workers.items():
            loss = worker.run(xs, ys)
            assert np.isfinite(loss)
            self.loss = loss if dtype == 'float32' else self.loss
        self.done += 1
        self.cases_here += 1
        self.check()
        if self.cases_here > WARM:
            self.growth += resident() - before
            assert self.growth < MOST_GROWTH, f'{self.growth} bytes more are in use'

    def check(self) -> None:
        """Rounding, and programs once the first chunks have compiled them."""
        for rule in RULES:
            pair = [self.workers[rule, d].traces() for d in ('float32', 'float64')]
            for narrow, wide in zip(*pair, strict=True):
                size = max(np.abs(wide).max(initial=0), 1e-12)
                error = np.abs(narrow - wide).max(initial=0) / size
                self.worst = max(self.worst, float(error))
        assert self.worst < MOST_ERROR, f'traces differ by {self.worst:.1e}'
        caches = [len(w.learner._kept.programs) for w in self.workers.values()]
        if self.cases_here <= 3:
            self.programs, self.kept = _compiled, sum(caches)
            return
        assert _compiled == self.programs, 'a program was compiled again'
        assert sum(caches) == self.kept, 'a learner keeps more programs'


def resident() -> int:
    """Bytes of memory that this process holds now."""
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    return pages * 4096


@functools.cache
def soak(seed: int) -> Soak:
    """The learners of this process."""
    return Soak(seed)


def case(seed: int, number: int) -> str:
    """Some chunks, after which all learners are kept."""
    if number == 0:
        soak.cache_clear()
        shutil.rmtree(OUT / f'soak-{seed}', ignore_errors=True)
    found = soak(seed)
    if found.done != CHUNKS * number:
        found.restore(CHUNKS * number)
    for _ in range(CHUNKS):
        found.chunk(STEPS)
    found.save()
    return f'times {CHUNKS * STEPS:,} steps by each of 4 learners'


def note(seed: int) -> str:
    """What was measured, in words."""
    found = soak(seed)
    return (
        f'traces within {found.worst:.1e} of float64; after {WARM} chunks the steps of '
        f'a process added {found.growth / 2**20:.1f} MiB of resident memory, and its '
        f'checkpoints {found.by_saving / 2**20:.1f} MiB; no program compiled again'
    )
