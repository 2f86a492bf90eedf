"""How long one step takes that learns, from a Python loop: batch 1, weights updated at every step.

    JAX_PLATFORMS=cpu python benchmarks/latency.py

Three ways in turn, each waiting for its output as a controller does: ``learner.stream``; the same
rule and optimiser written by hand for this one model, as a jitted step with donated arguments; and
the forward pass alone. Both ways of learning must give the same losses. Ratios are medians over
rounds, so that other load on the machine affects all ways.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax

import braintrace

INPUTS = {'adaptive LIF 256': 100, 'GRU 128': 64}
OPTIMIZERS = {'SGD': lambda: optax.sgd(1e-3), 'Adam': lambda: optax.adam(1e-3)}
SAME_STEPS = 30
"""Steps over which the losses of both ways are compared."""


def build(name: str) -> brainstate.nn.Module:
    brainstate.random.seed(0)
    inputs = INPUTS[name]
    if name.startswith('GRU'):
        return models.Gated(brainstate.nn, 'GRUCell', inputs, 128)
    return models.AdaptiveLIF(brainstate.nn, inputs, 256)


def squared_error(readout: dict, activity: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((activity @ readout['weight'] + readout['bias'] - y) ** 2)


# ---------------------------------------------------------------- by hand


def lif_by_hand(net: Any, learn: bool) -> tuple[Any, Any, Callable]:
    """Weights, state and step of the adaptive LIF: one matrix for inputs, recurrent
    spikes and bias, and its traces through V and a."""
    feed, recur = net.feed.weight.value, net.recur.weight.value
    joined = [feed['weight'], recur['weight'], feed['bias'][None]]
    weights = {'in': jnp.concatenate(joined), 'readout': net.readout.weight.value}
    zero = jnp.zeros(net.units)
    trace = jnp.zeros_like(weights['in'])
    state = (zero, zero, trace, trace) if learn else (zero, zero)

    def spike_of(V: jax.Array, a: jax.Array) -> jax.Array:
        return models.spike(V - 1.0 - 0.2 * a)

    def step(weights: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple:
        V, a = state[:2]
        fired, pull = jax.vjp(models.spike, V - 1.0 - 0.2 * a)
        (slope,) = pull(jnp.ones_like(fired))
        pre = jnp.concatenate([x, fired, jnp.ones(1)])
        new_V = 0.95 * V + pre @ weights['in'] - fired
        new_a = 0.99 * a + fired
        if not learn:
            loss = squared_error(weights['readout'], spike_of(new_V, new_a), y)
            return (new_V, new_a), loss
        through_V, through_a = state[2:]
        new_through_V = (
            (0.95 - slope) * through_V + 0.2 * slope * through_a + pre[:, None]
        )
        new_through_a = slope * through_V + (0.99 - 0.2 * slope) * through_a

        def loss_of(readout: Any, V: jax.Array, a: jax.Array) -> jax.Array:
            return squared_error(readout, spike_of(V, a), y)

        loss, (readout, to_V, to_a) = jax.value_and_grad(loss_of, (0, 1, 2))(
            weights['readout'], new_V, new_a
        )
        gradient = to_V * new_through_V + to_a * new_through_a
        state = new_V, new_a, new_through_V, new_through_a
        return state, loss, {'in': gradient, 'readout': readout}

    return weights, state, step


def gru_by_hand(net: Any, learn: bool) -> tuple[Any, Any, Callable]:
    """Weights, state and step of the GRU. The reset gate acts on other units only: it
    has a gradient of one step and no trace."""
    gates, candidate = net.cell.Wrz.weight.value, net.cell.Wh.weight.value
    with_bias = lambda p: jnp.concatenate([p['weight'], p['bias'][None]])
    r, z = jnp.split(with_bias(gates), 2, axis=-1)
    weights = {'r': r, 'z': z, 'h': with_bias(candidate)}
    weights['readout'] = net.readout.weight.value
    units = z.shape[-1]
    trace = jnp.zeros_like(z)
    state = (jnp.zeros(units), trace, trace) if learn else (jnp.zeros(units),)

    def step(weights: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple:
        h = state[0]
        one = jnp.ones(1)
        pre = jnp.concatenate([x, h, one])
        r = jax.nn.sigmoid(pre @ weights['r'])
        z = jax.nn.sigmoid(pre @ weights['z'])
        pre_h = jnp.concatenate([x, r * h, one])
        n = jnp.tanh(pre_h @ weights['h'])
        new = (1 - z) * h + z * n
        if not learn:
            return (new,), squared_error(weights['readout'], new, y)
        through_z, through_h = state[1:]
        to_n = z * (1 - n**2)
        new_z = (1 - z) * through_z + pre[:, None] * ((n - h) * z * (1 - z))
        new_h = (1 - z) * through_h + pre_h[:, None] * to_n
        loss, (readout, signal) = jax.value_and_grad(squared_error, (0, 1))(
            weights['readout'], new, y
        )
        back = weights['h'][-1 - units : -1] @ (signal * to_n)
        gradient = {
            'r': pre[:, None] * (back * h * r * (1 - r)),
            'z': signal * new_z,
            'h': signal * new_h,
            'readout': readout,
        }
        return (new, new_z, new_h), loss, gradient

    return weights, state, step


# ---------------------------------------------------------------- three ways


def ours(name: str, optimizer: Any) -> Callable:
    net = build(name)
    example = jnp.zeros((1, INPUTS[name]))
    learner = braintrace.compile(net, 'd_rtrl', example, batch_size=1)
    step_fn = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    stream = learner.stream(step_fn, optimizer)
    return lambda x, y: stream(x[None], y[None]).loss


def by_hand(name: str, optimizer: Any, learn: bool = True) -> Callable:
    make = gru_by_hand if name.startswith('GRU') else lif_by_hand
    weights, state, step = make(build(name), learn)
    kept = (state, weights, optimizer.init(weights)) if learn else (state, weights)

    def learning(kept: Any, x: jax.Array, y: jax.Array) -> tuple:
        state, weights, memory = kept
        state, loss, gradient = step(weights, state, x, y)
        changes, memory = optimizer.update(gradient, memory, weights)
        return (state, optax.apply_updates(weights, changes), memory), loss

    def forward(kept: Any, x: jax.Array, y: jax.Array) -> tuple:
        state, weights = kept
        state, loss = step(weights, state, x, y)
        return (state, weights), loss

    # A donated argument is an array of its own; two parts may share the first zeros.
    kept = jax.tree.map(jnp.array, kept)
    compiled = jax.jit(learning if learn else forward, donate_argnums=0)

    def call(x: jax.Array, y: jax.Array) -> jax.Array:
        nonlocal kept
        kept, loss = compiled(kept, x, y)
        return loss

    return call


def data(name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    while True:
        x = random.normal(size=INPUTS[name])
        if name.startswith('adaptive'):
            x = x > 1.0
        y = random.normal(size=models.OUTPUTS)
        yield x.astype('float32'), y.astype('float32')


def microseconds(call: Callable, steps: list) -> float:
    """Median time of a step, output included."""
    times = []
    for x, y in steps:
        start = time.perf_counter()
        jax.block_until_ready(call(x, y))
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def measure(name: str, optimizer: str, rounds: int, steps: int) -> np.ndarray:
    """Time of a step in every round: ours, by hand, forward."""
    make = OPTIMIZERS[optimizer]
    ways = [ours(name, make()), by_hand(name, make()), by_hand(name, make(), False)]
    source = data(name)
    some = [next(source) for _ in range(steps)]
    losses = [[float(way(x, y)) for x, y in some[:SAME_STEPS]] for way in ways]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3, atol=1e-4)
    found = [[microseconds(way, some) for way in ways] for _ in range(rounds)]
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description='Latency of a learning step.')
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--steps', type=int, default=200)
    options = parser.parse_args()
    print('| model | optimiser | ours ÷ by hand | ours ÷ forward | by hand ÷ forward |')
    print('| --- | --- | --- | --- | --- |')
    for name in INPUTS:
        for optimizer in OPTIMIZERS:
            times = measure(name, optimizer, options.rounds, options.steps)
            mine, hand, forward = times.T
            ratio = lambda a, b: f'{np.median(a / b):.1f}'
            print(
                f'| {name} | {optimizer} | {ratio(mine, hand)} '
                f'| {ratio(mine, forward)} | {ratio(hand, forward)} |',
                flush=True,
            )


if __name__ == '__main__':
    main()
