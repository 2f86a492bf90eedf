"""D-RTRL with an update at every step, written by hand for one model at a time.

What the library is measured against: the rule's formulas for this one model in plain JAX,
for one sample, without any analysis. Gradients are checked equal by ``streams.py``.
Also the least that a step with a batch can cost: one pass over the traces, in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import models
import numba
import numpy as np
import optax


def squared_error(readout: dict, activity: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((activity @ readout['weight'] + readout['bias'] - y) ** 2)


def adaptive_lif(net: Any, learn: bool) -> tuple[Any, Any, Callable]:
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


def gru(net: Any, learn: bool) -> tuple[Any, Any, Callable]:
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


def diagonal(net: Any, learn: bool) -> tuple[Any, Any, Callable]:
    """Weights, state and step of an LRU or an RTU with a linear read-out. States are
    complex and λ is linear in them, so both input matrices share one complex trace."""
    cell = net.layers[0]
    states = net.states(brainstate.ParamState).items()
    values = models.by_gate({path: state.value for path, state in states})
    weights = {name: jnp.asarray(x) for name, x in values.items()}
    own = [f'layers.0.{x}' for x in ('nu_log', 'theta_log', 'gamma_log')]
    own = [name for name in own if name in weights]
    letter = 'B' if len(own) == 3 else 'W'
    into = [f'layers.0.{letter}_{part}.weight' for part in ('re', 'im')]
    after = [name for name in weights if name not in (*own, *into)]
    some = lambda weights, names: {name: weights[name] for name in names}

    def factors(own: dict) -> tuple[jax.Array, jax.Array, jax.Array]:
        decay, angle = (jnp.exp(own[f'layers.0.{x}']) for x in ('nu_log', 'theta_log'))
        gamma = own.get('layers.0.gamma_log')
        gain = jnp.sqrt(-jnp.expm1(-2 * decay)) if gamma is None else jnp.exp(gamma)
        size = jnp.exp(-decay)
        return size * jnp.cos(angle), size * jnp.sin(angle), gain

    def turned(cos: Any, sin: Any, re: Any, im: Any) -> tuple[Any, Any]:
        return cos * re - sin * im, sin * re + cos * im

    def loss_of(after: dict, re: Any, im: Any, x: Any, y: Any) -> jax.Array:
        if letter == 'W':
            activity = cell.activation(jnp.concatenate([re, im]))
        else:
            activity = re @ after['layers.0.C_re.weight']
            activity -= im @ after['layers.0.C_im.weight']
            activity += after['layers.0.D'] * x
        readout = {key: after[f'layers.1.{key}'] for key in ('weight', 'bias')}
        return squared_error(readout, activity, y)

    def step(weights: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple:
        (re, im), mine = state[0], some(weights, own)
        (cos, sin, gain), along = jax.linearize(factors, mine)
        drive = [x @ weights[name] for name in into]
        new_re, new_im = turned(cos, sin, re, im)
        new = new_re + gain * drive[0], new_im + gain * drive[1]
        if not learn:
            return (new,), loss_of(some(weights, after), *new, x, y)
        (in_re, in_im), by_own = state[1:]
        in_re, in_im = turned(cos, sin, in_re, in_im)
        in_re = in_re + gain * x[:, None]
        moved = {}
        for name in own:
            ones = {k: jnp.full_like(v, float(k == name)) for k, v in mine.items()}
            d_cos, d_sin, d_gain = along(ones)
            old, direct = turned(cos, sin, *by_own[name]), turned(d_cos, d_sin, re, im)
            parts = zip(old, direct, drive, strict=True)
            moved[name] = tuple(a + b + d_gain * u for a, b, u in parts)
        loss, (gradient, to_re, to_im) = jax.value_and_grad(loss_of, (0, 1, 2))(
            some(weights, after), *new, x, y
        )
        gradient[into[0]] = to_re * in_re + to_im * in_im
        gradient[into[1]] = to_im * in_re - to_re * in_im
        for name, (a, b) in moved.items():
            gradient[name] = to_re * a + to_im * b
        return (new, (in_re, in_im), moved), loss, gradient

    zero, trace = jnp.zeros_like(weights[own[0]]), jnp.zeros_like(weights[into[0]])
    state: tuple = ((zero, zero),)
    if learn:
        state += ((trace, trace), dict.fromkeys(own, (zero, zero)))
    return weights, state, step


MODELS = {'adaptive LIF': adaptive_lif, 'GRU': gru, 'LRU': diagonal, 'RTU': diagonal}


def by_name(found: dict) -> dict[str, np.ndarray]:
    """Weights or gradients of these models by the names of ``models.by_gate``."""
    if 'readout' not in found:
        return {name: np.asarray(x) for name, x in found.items()}
    named = {f'readout.{key}': x for key, x in found['readout'].items()}
    if 'in' in found:
        units = found['in'].shape[-1]
        named['feed.weight'], named['recur.weight'], bias = np.split(
            found['in'], [-1 - units, -1]
        )
        named['feed.bias'] = bias[0]
    for gate in set(found) - {'in', 'readout'}:
        named[f'cell.W{gate}.weight'] = found[gate][:-1]
        named[f'cell.W{gate}.bias'] = found[gate][-1]
    return {key: np.asarray(x) for key, x in named.items()}


def training(
    step: Callable, optimizer: Any, weights: Any, state: Any
) -> tuple[Callable, Any]:
    """A step with its update, as a function of what it keeps, and the first of that."""

    def learn(kept: Any, data: tuple) -> tuple:
        state, weights, memory = kept
        state, loss, gradient = step(weights, state, *data)
        changes, memory = optimizer.update(gradient, memory, weights)
        return (state, optax.apply_updates(weights, changes), memory), loss

    return learn, (state, weights, optimizer.init(weights))


def running(step: Callable, weights: Any, state: Any) -> tuple[Callable, Any]:
    """The forward pass alone, in the same form."""

    def forward(kept: Any, data: tuple) -> tuple:
        state, weights = kept
        state, loss = step(weights, state, *data)
        return (state, weights), loss

    return forward, (state, weights)


@numba.njit(fastmath=True)
def visit_in_place(
    through_V: Any, through_a: Any, pre: Any, slope: Any, to_V: Any, to_a: Any
) -> Any:
    """One pass over the traces (b, i, h) of the adaptive LIF: each is read once, moved
    on in place, and the gradient of all samples is summed on the way."""
    samples, inputs, units = through_V.shape
    gradient = np.zeros((inputs, units), np.float32)
    for b in range(samples):
        for i in range(inputs):
            drive = pre[b, i]
            for h in range(units):
                V, a, s = through_V[b, i, h], through_a[b, i, h], slope[b, h]
                new_V = (np.float32(0.95) - s) * V + np.float32(0.2) * s * a + drive
                new_a = s * V + (np.float32(0.99) - np.float32(0.2) * s) * a
                through_V[b, i, h] = new_V
                through_a[b, i, h] = new_a
                gradient[i, h] += to_V[b, h] * new_V + to_a[b, h] * new_a
    return gradient
