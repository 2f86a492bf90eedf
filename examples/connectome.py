"""A connectome of the size of a fly's brain learns online, every synapse of it, by pp_prop.

138,000 spiking neurons with 5,000,000 synapses, numbers of partners with heavy tails, and neurons that only
excite or only inhibit. All weights are trained, so that the mean activity of a few regions follows given curves.
The weights change every few steps while the network runs, and memory does not depend on how long it runs.
Run it with

    python examples/connectome.py
    python examples/connectome.py --neurons 2000 --synapses 40000 --updates 60
    python examples/connectome.py --file edges.csv

A file of edges has one line for each connection: the neuron before, the neuron after and, if there is a third
column, the number of synapses, which is negative for inhibition. Neurons may have any whole numbers as names.
Files that end in ``.parquet`` are read by pyarrow (the extra ``parquet``).
"""

import argparse
import pathlib
import resource
import time
from typing import NamedTuple

import brainevent
import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace
from braintrace.networks import fire


class Edges(NamedTuple):
    """Synapses sorted by the neuron they come from, which excites (1) or inhibits (-1)."""

    pre: np.ndarray
    post: np.ndarray
    strength: np.ndarray
    signs: np.ndarray

    @classmethod
    def sort(cls, pre, post, strength, signs):
        order = np.lexsort((post, pre))
        return cls(pre[order], post[order], strength[order], signs)


def synthetic(neurons: int, synapses: int, seed: int = 0) -> Edges:
    """Numbers of partners are log-normal, as those of neurons in a brain are; one fifth inhibits."""
    rng = np.random.default_rng(seed)

    def drawn(sigma):
        ends = np.cumsum(rng.lognormal(0.0, sigma, neurons))
        return np.searchsorted(ends, rng.random(synapses) * ends[-1]).clip(
            0, neurons - 1
        )

    pre, post = drawn(1.0), drawn(1.0)
    signs = np.where(rng.random(neurons) < 0.2, -1, 1)
    return Edges.sort(pre, post, np.ones(synapses), signs)


def load(path: str) -> Edges:
    """The edges of a file; see the text above."""
    if pathlib.Path(path).suffix == '.parquet':
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise ImportError(
                f'{path}\nWhy: Parquet files are read by pyarrow, which is not installed.\n'
                'Fix: pip install "braintrace-online[parquet]", or a CSV file.'
            ) from error
        columns = [c.to_numpy() for c in pyarrow.parquet.read_table(path).columns[:3]]
    else:
        with open(path) as file:
            has_header = not file.readline().split(',')[0].strip().isdigit()
        # Names of neurons may be too long for a float.
        rows = np.loadtxt(
            path, np.int64, delimiter=',', skiprows=int(has_header), ndmin=2
        )
        columns = list(rows.T[:3])
    names, ends = np.unique(np.concatenate(columns[:2]), return_inverse=True)
    pre, post = np.split(ends.reshape(-1), 2)
    counts = columns[2].astype(float) if len(columns) > 2 else np.ones(len(pre))
    balance = np.bincount(pre, counts, len(names))
    return Edges.sort(pre, post, np.abs(counts), np.where(balance < 0, -1, 1))


class Connectome(brainstate.nn.Module):
    """One step of leaky integrate-and-fire neurons, and the mean activity of some regions."""

    def __init__(self, edges: Edges, inputs: int, regions: int):
        super().__init__()
        rng = np.random.default_rng(1)
        self.neurons = neurons = len(edges.signs)
        degrees = np.bincount(edges.post, edges.strength, neurons)
        signs = edges.signs[edges.pre]
        # Four times as strong, since there are four times fewer of them.
        signed = np.where(signs < 0, -4.0, 1.0) * edges.strength
        self.scale = jnp.asarray(signed / np.sqrt(degrees[edges.post]), jnp.float32)
        self.targets = jnp.asarray(edges.post, jnp.int32)
        ends = np.searchsorted(edges.pre, np.arange(neurons + 1))
        self.starts = jnp.asarray(ends, jnp.int32)
        start = rng.normal(-1.0, 0.3, len(edges.pre))
        self.synapses = brainstate.ParamState(jnp.asarray(start, jnp.float32))
        self.feed = jnp.asarray(rng.normal(0, 0.05, (inputs, neurons)), jnp.float32)
        self.drive = jnp.asarray(rng.normal(0.08, 0.05, neurons), jnp.float32)
        members = rng.permutation(neurons)[: neurons // 10 // regions * regions]
        self.members = jnp.asarray(members.reshape(regions, -1))

    def init_state(self, batch_size=None, **kwargs):
        self.V = brainstate.HiddenState(jnp.zeros(self.neurons))
        self.rate = brainstate.HiddenState(jnp.zeros(self.neurons))

    def update(self, x):
        fired = fire(self.V.value - 1.0)
        weights = jax.nn.softplus(self.synapses.value) * self.scale
        shape = (self.neurons, self.neurons)
        matrix = brainevent.CSR((weights, self.targets, self.starts), shape=shape)
        current = brainevent.BinaryArray(fired) @ matrix + x @ self.feed + self.drive
        self.V.value = 0.9 * self.V.value + current - jax.lax.stop_gradient(fired)
        self.rate.value = 0.9 * self.rate.value + 0.1 * fire(self.V.value - 1.0)
        return self.rate.value[self.members].mean(axis=-1)


def curves(steps: int, inputs: int, regions: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and the activity that each region is to have, for every step."""
    time_ = np.arange(steps)[:, None]
    xs = np.sin(2 * np.pi * time_ / 100 + np.arange(inputs))
    wanted = 0.1 + 0.04 * np.sin(2 * np.pi * time_ / 100 + 2 * np.arange(regions))
    return xs.astype(np.float32), wanted.astype(np.float32)


def main(
    neurons: int = 138_000,
    synapses: int = 5_000_000,
    updates: int = 200,
    update_every: int = 10,
    regions: int = 5,
    lr: float = 0.02,
    file: str | None = None,
) -> tuple[float, float]:
    """The error before and after."""
    edges = load(file) if file else synthetic(neurons, synapses)
    net = Connectome(edges, inputs=4, regions=regions)
    print(f'{net.neurons:,} neurons, {len(edges.pre):,} synapses')
    start, used = time.perf_counter(), time.process_time()
    learner = braintrace.compile(net, 'pp_prop', jnp.zeros(4), decay_or_rank=0.9)

    def step_fn(x, wanted):
        return jnp.mean((learner(x) - wanted) ** 2)

    optimizer = optax.adam(lr)
    steps = updates * update_every
    # Ten calls, each of which runs many updates inside of one program.
    calls = np.array_split(np.arange(steps), 10 if updates % 10 == 0 else 1)
    xs, wanted = curves(steps, 4, regions)
    errors = []
    for part in calls:
        losses = learner.etrace_online(
            xs[part],
            wanted[part],
            step_fn=step_fn,
            optimizer=optimizer,
            update_every=update_every,
        )
        errors.append(float(losses.mean()))
        if len(errors) == 1:
            print(f'first call, with compilation: {time.perf_counter() - start:.1f} s')
            start, used = time.perf_counter(), time.process_time()
        print(f'step {sum(map(len, calls[: len(errors)])):>6}: error {errors[-1]:.2e}')
    if len(calls) > 1:
        rest = steps - len(calls[0])
        each = 1000 * (time.perf_counter() - start) / rest
        own = 1000 * (time.process_time() - used) / rest
        print(
            f'{each:.1f} ms a step ({own:.1f} of the processor), an update every {update_every}'
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f'peak memory {peak:.2f} GiB')
    return errors[0], errors[-1]


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=(__doc__ or '').split('\n')[0])
    for name, kind in main.__annotations__.items():
        if name != 'return':
            parser.add_argument(
                f'--{name.replace("_", "-")}',
                type=kind if kind in (int, float) else str,
            )
    given = {k: v for k, v in vars(parser.parse_args()).items() if v is not None}
    main(**given)
