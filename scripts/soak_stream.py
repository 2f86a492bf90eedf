"""A stream for very many steps in one process: does anything grow or drift?

    JAX_PLATFORMS=cpu python scripts/soak_stream.py             # 1,000,000 steps
    JAX_PLATFORMS=cpu python scripts/soak_stream.py --steps 100000

Prints memory (resident set), the number of compiled programs and the time of a step along the way.
The weights learn all the time. Traces are compared with a run in float64: with weights that stay,
over 100,000 steps, since weights that learn would part by themselves.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace
from braintrace.learner.stream import Stream

INPUTS, UNITS, CHUNK = 2, 8, 1000


class Net(brainstate.nn.Module):
    """A GRU and a linear read-out."""

    def __init__(self):
        super().__init__()
        self.cell = brainstate.nn.GRUCell(INPUTS, UNITS)
        self.readout = brainstate.nn.Linear(UNITS, 1)

    def update(self, x):
        return self.readout(self.cell(x))


def drawn(seed: int, dtype: type) -> Net:
    """A network with the same weights in every precision."""
    net = Net()
    random = np.random.default_rng(seed)
    draw = lambda x: jnp.asarray(0.4 * random.normal(size=x.shape), dtype)
    for state in net.states(brainstate.ParamState).values():
        state.value = jax.tree.map(draw, state.value)
    return net


def data(steps: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Noise, and the sum of its last two values, which is to be learned."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(steps + 1, INPUTS))
    return x[1:], (x[1:, :1] + x[:-1, :1]) / 2


def resident() -> float:
    """MiB of memory that the process has now (Linux)."""
    status = Path('/proc/self/status').read_text()
    (line,) = [row for row in status.splitlines() if row.startswith('VmRSS')]
    return int(line.split()[1]) / 1024


def soak(steps: int) -> None:
    """Learn for so many steps, and print what may grow."""
    net = drawn(0, jnp.float32)
    learner = braintrace.compile(net, 'd_rtrl', jnp.zeros(INPUTS))
    step_fn = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    stream = learner.stream(step_fn, optax.adam(1e-3), chunk=CHUNK)
    single = learner.stream(step_fn, optax.adam(1e-3))
    print('    steps       MiB  programs  µs/step in chunks  µs/step alone      loss')
    shown = {max(1, steps * n // 10) for n in range(1, 11)} | {CHUNK, 10 * CHUNK}
    done, since, start = 0, 0, time.perf_counter()
    while done < steps:
        xs, ys = data(CHUNK, seed=done)
        loss = stream(xs.astype('float32'), ys.astype('float32')).loss
        done += CHUNK
        if done not in shown:
            continue
        loss = float(jnp.mean(loss))
        in_chunks = (time.perf_counter() - start) / (done - since) * 1e6
        alone = median_alone(single, xs, ys)
        programs = stream.program_count + single.program_count
        print(
            f'{done:9,} {resident():9.1f} {programs:9} {in_chunks:18.1f} '
            f'{alone:14.1f} {loss:9.5f}',
            flush=True,
        )
        since, start = done, time.perf_counter()


def median_alone(stream: Stream, xs: np.ndarray, ys: np.ndarray) -> float:
    """Median time of 100 steps of one call each, in microseconds."""
    times = []
    for x, y in zip(xs[:100], ys[:100], strict=True):
        x, y = x.astype('float32'), y.astype('float32')
        start = time.perf_counter()
        jax.block_until_ready(stream(x, y).loss)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def traces_after(steps: int, dtype: type) -> list[np.ndarray]:
    """Traces after so many steps with weights that stay."""
    net = drawn(0, dtype)
    learner = braintrace.compile(net, 'd_rtrl', jnp.zeros(INPUTS, dtype))
    step_fn = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    stream = learner.stream(step_fn, optax.sgd(0.0), chunk=CHUNK)
    for first in range(0, steps, CHUNK):
        xs, ys = data(CHUNK, seed=first)
        stream(jnp.asarray(xs, dtype), jnp.asarray(ys, dtype))
    paths = [path for path in learner.param_states if path[0] == 'cell']
    traces = [learner.traces_of(path) for path in paths]
    leaves = jax.tree.leaves(traces)
    assert all(x.dtype == dtype for x in leaves)
    return [np.asarray(x, np.float64) for x in leaves]


def compare_traces(steps: int) -> None:
    """Print the largest difference of float32 traces to float64 ones."""
    single = traces_after(steps, jnp.float32)
    with jax.enable_x64(True), brainstate.environ.context(precision=64):
        double = traces_after(steps, jnp.float64)
    differences = [
        np.max(np.abs(a - b)) / np.max(np.abs(b))
        for a, b in zip(single, double, strict=True)
    ]
    print(
        f'traces after {steps:,} steps: float32 differs from float64 by at most '
        f'{max(differences):.1e} of the largest entry'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description='A stream for very many steps.')
    parser.add_argument('--steps', type=int, default=1_000_000)
    parser.add_argument('--compare', type=int, default=100_000)
    options = parser.parse_args()
    soak(options.steps)
    compare_traces(options.compare)


if __name__ == '__main__':
    main()
