"""Streams and carried traces beside hand-written JAX, BPTT and the published package.

    make bench ARGS='--only streams'
    python benchmarks/streams.py --rows online,python --rounds 9

One core, but for the row of two cores. Everything in a row is run in turn, round by
round, and a number is the median of the ratios of the rounds, so that other load on the
machine affects both sides. Hand-written baselines are checked to have the same gradients.
The table goes to the screen, to ``streams.json`` and to ``docs/streams.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

CORES = os.sched_getaffinity(0)

if __name__ == '__main__':  # before JAX starts its threads
    os.sched_setaffinity(0, {max(CORES)})
    os.environ |= {
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': '--xla_cpu_multi_thread_eigen=false',
    }

import brainstate  # noqa: E402
import by_hand  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import models  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import run  # noqa: E402
import scale  # noqa: E402
from streams_table import PAGE, RESULTS, Row, page, table  # noqa: E402

import braintrace  # noqa: E402

STEPS = 200
OPTIMIZERS = {'SGD': lambda: optax.sgd(1e-3), 'Adam': lambda: optax.adam(1e-3)}
Ways = dict[str, Callable[[], float]]
"""By name, functions that run once and give their seconds."""


def in_turn(ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Seconds of every way in every round."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way())
    return found


def ratios(found: dict[str, list[float]], over: str, under: str) -> list[float]:
    return [a / b for a, b in zip(found[over], found[under], strict=True)]


# ---------------------------------------------------------------- models and data


@dataclass(frozen=True)
class Small:
    """A network that learns at every step."""

    kind: str
    units: int
    inputs: int
    batch: int
    optimizer: str

    @property
    def title(self) -> str:
        return (
            f'{self.kind} {self.units}, inputs {self.inputs}, batch {self.batch}, '
            f'{self.optimizer}, update every step'
        )

    def build(self) -> brainstate.nn.Module:
        brainstate.random.seed(0)
        nn, inputs, units = brainstate.nn, self.inputs, self.units
        if self.kind == 'GRU':
            return models.Gated(nn, 'GRUCell', inputs, units)
        if self.kind == 'adaptive LIF':
            return models.AdaptiveLIF(nn, inputs, units)
        own = braintrace.nn
        if self.kind == 'LRU':
            return nn.Sequential(own.LRUCell(inputs, units), nn.Linear(inputs, 10))
        return nn.Sequential(own.RTU(inputs, units), nn.Linear(2 * units, 10))

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, time and samples first."""
        random = np.random.default_rng(0)
        x = random.normal(size=(STEPS, self.batch, self.inputs))
        if self.kind == 'adaptive LIF':
            x = x > 1.0
        y = random.normal(size=(STEPS, self.batch, models.OUTPUTS))
        return x.astype('float32'), y.astype('float32')

    def learner(self) -> tuple[Any, Callable]:
        net, (xs, _) = self.build(), self.data()
        learner = braintrace.compile(net, 'd_rtrl', xs[0], batch_size=self.batch)
        return learner, lambda x, y: models.loss(learner(x), y)


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


# ---------------------------------------------------------------- ways to learn


def ours(small: Small) -> Callable[[], float]:
    """One call of ``etrace_online`` over the sequence; seconds a step."""
    learner, step_fn = small.learner()
    optimizer = OPTIMIZERS[small.optimizer]()
    xs, ys = map(jnp.asarray, small.data())
    call = lambda: learner.etrace_online(xs, ys, step_fn=step_fn, optimizer=optimizer)
    jax.block_until_ready((call(), call()))
    return lambda: seconds(call) / STEPS


def ours_from_python(small: Small) -> Callable[[], float]:
    """One call of the stream a step, waiting for each loss; median seconds."""
    learner, step_fn = small.learner()
    stream = learner.stream(step_fn, OPTIMIZERS[small.optimizer]())
    return each_step(lambda x, y: stream(x, y).loss, *small.data())


def written(small: Small, learn: bool = True) -> tuple[Callable, Any]:
    """A hand-written step of one sample, and what it keeps from step to step."""
    make = by_hand.MODELS[small.kind]
    weights, state, step = make(small.build(), learn)
    if learn:
        optimizer = OPTIMIZERS[small.optimizer]()
        found = by_hand.training(step, optimizer, weights, state)
    else:
        found = by_hand.running(step, weights, state)
    one, kept = found
    # A donated argument is an array of its own; two parts may share the first zeros.
    return one, jax.tree.map(jnp.array, kept)


def by_hand_scan(small: Small, learn: bool = True) -> Callable[[], float]:
    """The hand-written step in a scan over the sequence; seconds a step."""
    one, kept = written(small, learn)
    data = tuple(jnp.asarray(x[:, 0]) for x in small.data())
    compiled = jax.jit(lambda kept: jax.lax.scan(one, kept, data), donate_argnums=0)

    def call() -> jax.Array:
        nonlocal kept
        kept, losses = compiled(kept)
        return losses

    jax.block_until_ready((call(), call()))
    return lambda: seconds(call) / STEPS


def by_hand_from_python(small: Small, learn: bool = True) -> Callable[[], float]:
    """The hand-written step, jitted and donated, called from a Python loop."""
    one, kept = written(small, learn)
    compiled = jax.jit(lambda kept, *data: one(kept, data), donate_argnums=0)

    def call(x: np.ndarray, y: np.ndarray) -> jax.Array:
        nonlocal kept
        kept, loss = compiled(kept, x, y)
        return loss

    xs, ys = small.data()
    return each_step(call, xs[:, 0], ys[:, 0])


def each_step(call: Callable, xs: np.ndarray, ys: np.ndarray) -> Callable[[], float]:
    """Median seconds of a call a step, whose output is waited for."""

    def one() -> float:
        steps = zip(xs, ys, strict=True)
        return median(seconds(lambda x=x, y=y: call(x, y)) for x, y in steps)

    one()
    return one


def model_forward(small: Small) -> Callable[[], float]:
    """The model and its loss along the sequence, without learning; seconds a step."""
    net, (xs, ys) = small.build(), map(jnp.asarray, small.data())
    brainstate.nn.init_all_states(net, batch_size=small.batch)
    step = lambda x, y: models.loss(net(x), y)
    run_all = brainstate.transform.jit(
        lambda xs, ys: brainstate.transform.for_loop(step, xs, ys)
    )
    call = lambda: run_all(xs, ys)
    jax.block_until_ready((call(), call()))
    return lambda: seconds(call) / STEPS


def one_fused_pass(small: Small) -> Callable[[], float]:
    """One visit of all traces in place; median seconds."""
    random = np.random.default_rng(0)
    draw = lambda *shape: random.random((small.batch, *shape), np.float32)
    rows = small.inputs + small.units + 1
    arrays = [draw(rows, small.units) for _ in range(2)]
    arrays += [draw(rows), *(draw(small.units) for _ in range(3))]
    visit = lambda: by_hand.visit_in_place(*arrays)
    visit()
    return lambda: median(seconds(visit) for _ in range(20))


def check_same(small: Small) -> float:
    """Largest relative difference of gradients and, after updates, of weights, between
    the library and the hand-written step of one sample.

    Weights of LRU and RTU are not compared: their traces are those of exp(θ) here and
    of θ in the hand-written step, which differ as soon as θ has changed.
    """
    learner, step_fn = small.learner()
    stream = learner.stream(step_fn, OPTIMIZERS[small.optimizer]())
    xs, ys = small.data()
    weights, state, step = by_hand.MODELS[small.kind](small.build(), True)
    worst = 0.0
    for x, y in zip(xs[:30], ys[:30], strict=True):
        state, _, gradient = step(weights, state, x[0], y[0])
        found = models.by_gate(stream.gradient(x, y).gradient)
        worst = max(worst, distance(found, by_hand.by_name(gradient)))
    if small.kind not in ('LRU', 'RTU'):
        one, kept = written(small)
        learner, step_fn = small.learner()
        options = {'step_fn': step_fn, 'optimizer': OPTIMIZERS[small.optimizer]()}
        learner.etrace_online(xs[:30], ys[:30], **options)
        (_, weights, _), _ = jax.lax.scan(one, kept, (xs[:30, 0], ys[:30, 0]))
        now = {path: state.value for path, state in learner.param_states.items()}
        worst = max(worst, distance(models.by_gate(now), by_hand.by_name(weights)))
    if worst > run.AGREEMENT:
        sys.exit(f'{small.title}: hand-written and ours differ by {worst:.1e}')
    return worst


def distance(a: dict, b: dict) -> float:
    """The largest relative difference of any array."""
    assert a.keys() == b.keys(), (a.keys(), b.keys())
    size = lambda x: max(float(np.linalg.norm(x)), 1e-12)
    return max(float(np.linalg.norm(a[k] - b[k])) / size(b[k]) for k in a)


# ---------------------------------------------------------------- rows


LIF = Small('adaptive LIF', 256, 100, 1, 'SGD')
BATCH = Small('adaptive LIF', 256, 100, 16, 'SGD')
GRU = Small('GRU', 128, 16, 1, 'Adam')


def online(rounds: int) -> Iterator[Row]:
    """Updates at every step inside one compiled loop."""
    for small in (LIF, GRU):
        check_same(small)
        ways = {'ours': ours(small), 'hand': by_hand_scan(small)}
        ways['forward'] = by_hand_scan(small, learn=False)
        found = in_turn(ways, rounds)
        step = 1e6 * median(found['ours'])
        beside = ratios(found, 'ours', 'hand')
        yield Row(small.title, '÷ hand-written', beside, 1.5, True, step)
        passes = ratios(found, 'ours', 'forward')
        target = 10 if small is LIF else None
        yield Row(small.title, '÷ forward', passes, target, True, step)


def batch(rounds: int) -> Iterator[Row]:
    """Updates at every step of a batch, whose traces leave the cache."""
    found = in_turn({'ours': ours(BATCH), 'pass': one_fused_pass(BATCH)}, rounds)
    step = 1e6 * median(found['ours'])
    beside = ratios(found, 'ours', 'pass')
    yield Row(BATCH.title, '÷ one fused pass in place', beside, 1.2, True, step)


def python(rounds: int) -> Iterator[Row]:
    """One call a step from Python."""
    for small in (GRU, LIF):
        ways = {'ours': ours_from_python(small), 'hand': by_hand_from_python(small)}
        found = in_turn(ways, rounds)
        step = 1e6 * median(found['ours'])
        beside = ratios(found, 'ours', 'hand')
        title = f'{small.title}, Python loop'
        target = 1.5 if small is GRU else None
        yield Row(title, '÷ hand-written, same loop', beside, target, True, step)


def exact(rounds: int) -> Iterator[Row]:
    """Units that do not read each other, for which the rule is exact."""
    for kind in ('LRU', 'RTU'):
        small = Small(kind, 128, 16, 1, 'SGD')
        check_same(small)
        ways = {'ours': ours(small), 'hand': by_hand_scan(small)}
        ways['forward'] = model_forward(small)
        found = in_turn(ways, rounds)
        step = 1e6 * median(found['ours'])
        beside = ratios(found, 'ours', 'hand')
        yield Row(small.title, '÷ hand-written', beside, None, True, step)
        passes = ratios(found, 'ours', 'forward')
        yield Row(small.title, '÷ forward', passes, 4, True, step)


def carried(rounds: int) -> Iterator[Row]:
    """Whole sequences whose traces are carried on, beside BPTT."""
    for key, target in (('1', 1.2), ('2', 0.95)):
        plan = [('ours', 'd_rtrl_carried'), ('ours', 'bptt')]
        title, found = beside_each_other(key, plan, rounds)
        speed = ratios(found, 'ours bptt', 'ours d_rtrl_carried')
        yield Row(f'D-RTRL carried, {title}', 'BPTT ÷ ours', speed, target, False)


def published(rounds: int) -> Iterator[Row]:
    """The same beside the published package."""
    cases = (('6', 'd_rtrl_carried', 1.5), ('1', 'pp_prop', 0.9))
    names = {'d_rtrl_carried': 'D-RTRL carried', 'pp_prop': 'pp_prop'}
    for key, variant, target in cases:
        plan = [('ours', variant), ('peer', variant)]
        title, found = beside_each_other(key, plan, rounds)
        speed = ratios(found, f'peer {variant}', f'ours {variant}')
        title = f'{names[variant]}, {title}'
        yield Row(title, 'published package ÷ ours', speed, target, False)


def beside_each_other(
    key: str, plan: list[tuple[str, str]], rounds: int
) -> tuple[str, dict[str, list[float]]]:
    """A workload of the main benchmark: its title, and seconds by side and variant."""
    every = models.workloads()
    index = next(n for n, w in enumerate(every) if w.key == key)
    workload = every[index]
    pythons = {'ours': sys.executable}
    if any(name == 'peer' for name, _ in plan):
        pythons['peer'] = run.peer_python()
    sides = {name: run.Side(name, python) for name, python in pythons.items()}
    ways = {}
    for name, variant in plan:
        side = sides[name]
        checked(side('open', index=index, quick=False))
        checked(side('setup', variant=variant, steps=workload.steps))
        once = lambda side=side, variant=variant: checked(side('run', variant=variant))
        ways[f'{name} {variant}'] = lambda once=once: once()['seconds']
    found = in_turn(ways, rounds)
    for side in sides.values():
        side.close()
    return workload.title, found


def checked(answer: dict) -> dict:
    if 'error' in answer:
        sys.exit(answer['error'])
    return answer


def cores(rounds: int) -> Iterator[Row]:
    """Fresh sequences on two cores beside one: samples split over two devices."""
    os.sched_setaffinity(0, CORES)
    for name in ('gru', 'adaptive'):
        given = (name, scale.WORKLOADS[name]['batch'])
        one = scale.timed(*given, 1, 1, rounds=rounds, core=max(CORES))['fresh']
        two = scale.timed(*given, 2, 1, rounds=rounds)['fresh']
        title = f'{name} fresh, two cores, one device each'
        yield Row(title, 'one core ÷ two', [one / two], 1.6, False)
    os.sched_setaffinity(0, {max(CORES)})


PARTS = (online, batch, python, exact, carried, published, cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = {part.__name__: part for part in PARTS}
    parser.add_argument('--rows', default='', help=f'some of {",".join(every)}')
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--keep', action='store_true', help='write no files')
    options = parser.parse_args()
    chosen = list(filter(None, options.rows.split(','))) or list(every)
    if set(chosen) - set(every):
        parser.error(f'rows are {", ".join(every)}')
    rows: list[Row] = []
    for name in chosen:
        start = time.perf_counter()
        rows += every[name](options.rounds)
        print(f'{name}: {time.perf_counter() - start:.0f} s', flush=True)
        if not options.rows and not options.keep:
            text = json.dumps([asdict(row) for row in rows], indent=1)
            RESULTS.write_text(text + '\n')
    print(table(rows))
    if not options.rows and not options.keep:
        PAGE.write_text(page())


if __name__ == '__main__':
    main()
