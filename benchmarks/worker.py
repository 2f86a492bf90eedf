"""One side of the benchmark: answers JSON commands on standard input with JSON on standard output.

Runs in our environment and in the one of the published package, and calls the package that it finds there by its
public interface only.

    python worker.py ours|peer CORE
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.sched_setaffinity(0, {int(sys.argv[2])})
warnings.filterwarnings('ignore')

import brainstate  # noqa: E402
import braintools  # noqa: E402
import jax  # noqa: E402
import models  # noqa: E402
import numpy as np  # noqa: E402

import braintrace  # noqa: E402

RULES = {
    'd_rtrl_fresh': 'd_rtrl',
    'd_rtrl_carried': 'd_rtrl',
    'online': 'd_rtrl',
    'pp_prop': 'pp_prop',
}


class Run:
    """One variant of a workload: model, learner and compiled function. ``first`` is the time to make and call it."""

    def __init__(
        self,
        side: str,
        workload: models.Workload,
        variant: str,
        data: tuple[jax.Array, jax.Array],
    ):
        self.side, self.data = side, data
        gc.collect()
        before, start = live_bytes(), time.perf_counter()
        plain = side == 'ours' or variant not in RULES
        self.model = workload.build(brainstate.nn if plain else braintrace.nn)
        self.learner = None
        if variant in RULES:
            options = {'decay_or_rank': 0.9} if variant == 'pp_prop' else {}
            self.learner = braintrace.compile(
                self.model,
                RULES[variant],
                data[0][0],
                batch_size=workload.batch,
                **options,
            )
        else:
            brainstate.nn.init_all_states(self.model, batch_size=workload.batch)
        self._start = [(state, state.value) for state in self._states()]
        self._function = getattr(
            self, f'_{variant}' if hasattr(self, f'_{variant}') else '_gradient'
        )(side, variant)
        self.result = jax.block_until_ready(self._function(*data))
        self.first = time.perf_counter() - start
        self()  # a second call may compile once more, for states that a call has written
        self.restart()
        gc.collect()
        self.held = (
            live_bytes() - before - sum(x.nbytes for x in jax.tree.leaves(self.result))
        )

    def _states(self) -> list[brainstate.State]:
        whole = (
            self.model if self.side == 'ours' or self.learner is None else self.learner
        )
        return list(whole.states().values())

    def restart(self) -> None:
        """Weights, states and traces as they were at first."""
        if self.learner is not None:
            self.learner.reset_state()
        for state, value in self._start:
            state.value = value
        # Traces that a reset has made anew are there before a call is timed.
        traces = getattr(self.learner, 'traces', {}) if self.side == 'ours' else {}
        made = [state.value for state in self._states()]
        made += [trace.peek() for trace in traces.values()]
        jax.block_until_ready(made)

    def __call__(self) -> float:
        """Seconds of one call from the start."""
        self.restart()
        self.result = None
        gc.collect()
        start, start_processor = time.perf_counter(), time.process_time()
        self.result = jax.block_until_ready(self._function(*self.data))
        self.processor = time.process_time() - start_processor
        return time.perf_counter() - start

    def peak(self) -> int | None:
        """Most bytes that the variant occupies, inputs aside: what it holds and what a call adds."""
        self.restart()
        self.result = None
        gc.collect()
        with contextlib.suppress(OSError):
            ctypes.CDLL('libc.so.6').malloc_trim(0)
        try:
            Path('/proc/self/clear_refs').write_text('5')
        except OSError:
            return None
        before = status('VmRSS')
        self.result = jax.block_until_ready(self._function(*self.data))
        return self.held + status('VmHWM') - before

    # ------------------------------------------------------------ variants

    @property
    def _weights(self) -> Any:
        return self.model.states(brainstate.ParamState)

    def _forward(self, *_: str) -> Callable:
        step = lambda x, y: models.loss(self.model(x), y)
        return brainstate.transform.jit(
            lambda xs, ys: brainstate.transform.for_loop(step, xs, ys).mean()
        )

    def _bptt(self, *_: str) -> Callable:
        step = lambda x, y: models.loss(self.model(x), y)

        @brainstate.transform.jit
        def run(xs: jax.Array, ys: jax.Array) -> dict:
            total = lambda: brainstate.transform.for_loop(step, xs, ys).mean()
            return brainstate.transform.grad(total, self._weights)()

        return run

    def _gradient(self, side: str, variant: str) -> Callable:
        learner = self.learner
        step = lambda x, y: models.loss(learner(x), y)
        if (
            side == 'ours'
        ):  # compiled once for each shape by itself; the published package compiles on every call
            fresh = variant == 'd_rtrl_fresh'
            return lambda xs, ys: dict(
                learner.etrace_grad(xs, ys, step_fn=step, fresh=fresh)
            )
        return brainstate.transform.jit(
            lambda xs, ys: dict(learner.etrace_grad(xs, ys, step_fn=step))
        )

    def _online(self, side: str, variant: str) -> Callable:
        learner, weights = self.learner, self._weights
        optimizer = braintools.optim.SGD(lr=1e-4)
        optimizer.register_trainable_weights(weights)
        step = lambda x, y: models.loss(learner(x), y)
        if side == 'ours':
            return lambda xs, ys: learner.etrace_online(
                xs, ys, step_fn=step, optimizer=optimizer
            )

        def one(x: jax.Array, y: jax.Array) -> jax.Array:
            gradients, value = brainstate.transform.grad(
                lambda: step(x, y), weights, return_value=True
            )()
            optimizer.update(gradients)
            return value

        return brainstate.transform.jit(
            lambda xs, ys: brainstate.transform.for_loop(one, xs, ys)
        )


class Worker:
    """The workload that is open, and its variants."""

    def __init__(self, side: str):
        self.side = side
        self.runs: dict[str, Run] = {}

    def open(self, index: int, quick: bool, source: str = 'models') -> dict:
        """Take a workload by its number in the list of a module."""
        self.workload = importlib.import_module(source).workloads(quick)[index]
        self.data = jax.block_until_ready(self.workload.data())
        small = models.tiny(self.workload)
        Run(self.side, small, 'bptt', small.data())  # what all variants need is loaded
        return {}

    def setup(self, variant: str, steps: int, repeats: int = 1) -> dict:
        """Make a variant for sequences of that length; times to make it and call it once."""
        data = tuple(x[:steps] for x in self.data)
        first = []
        for _ in range(repeats):
            self.runs.pop(variant, None)
            self.runs[variant] = Run(self.side, self.workload, variant, data)
            first.append(self.runs[variant].first)
        return {'first': first}

    def drop(self, variant: str) -> dict:
        """Forget a variant."""
        self.runs.pop(variant, None)
        return {}

    def run(self, variant: str) -> dict:
        """Time one call: seconds on the clock and of the processor."""
        run = self.runs[variant]
        return {'seconds': run(), 'processor': run.processor}

    def peak(self, variant: str, repeats: int = 1) -> dict:
        """Peak memory of a call: the least of some, since whatever disturbs it adds to it."""
        peaks = [self.runs[variant].peak() for _ in range(repeats)]
        self.runs[variant]()  # memory is taken again before anything is timed
        return {'peak': None if None in peaks else min(peaks)}

    def gradients(self, variant: str, file: str) -> dict:
        """Write the gradients of one call."""
        self.runs[variant]()
        np.savez(file, **models.by_gate(self.runs[variant].result))
        return {}


def live_bytes() -> int:
    """Bytes of all arrays."""
    return sum(x.nbytes for x in jax.live_arrays())


def status(field: str) -> int:
    """A size of this process, in bytes."""
    line = next(
        line
        for line in Path('/proc/self/status').read_text().splitlines()
        if line.startswith(field)
    )
    return int(line.split()[1]) * 1024


def main() -> None:
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # what libraries print is no answer
    worker = Worker(sys.argv[1])
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop('do'))(**command)
        except Exception as error:
            answer = {'error': f'{type(error).__name__}: {error}'.splitlines()[0][:200]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == '__main__':
    main()
