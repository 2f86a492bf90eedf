"""Models beside the zoo for the reference gradients: what is special about a loss, a
signal or a front end, rather than about a step.

Leaky read-outs, whose memory traces may carry; errors that come back by other weights;
modulators; penalties; masked steps with NaN; Flax, Equinox and plain functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import brainstate
import equinox
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import braintrace
from braintrace import nn
from zoo.base import SEED, Step, hidden, weight

STEPS = 6
B, I, H, O = 2, 3, 6, 4  # batch, inputs, units, outputs  # noqa: E741
DECAYS = np.array([0.9, 0.5, 0.9, 0.7])
MASK = np.array([1.0, 0.0, 2.0, 0.0, 0.0, 1.0])  # gaps inside of blocks and across


def weighted_squares(learner: Any, outputs: Any, *targets: Any) -> jax.Array:
    """A loss that treats every element of the outputs differently."""
    total = jnp.zeros(())
    for x in jax.tree.leaves(outputs):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            scales = jnp.sin(1.0 + jnp.arange(x.size)).reshape(x.shape)
            total = total + jnp.sum(scales * (x * x.conj()).real)
    return total


def squared_error(learner: Any, outputs: Any, *targets: Any) -> jax.Array:
    return jnp.sum((outputs - targets[0]) ** 2)


@dataclass
class Built:
    """A model, sequences of inputs and targets, and what is done at each step.

    ``call(learner, *inputs)`` gives the outputs, ``loss(learner, outputs, *targets)``
    the loss. The model itself takes ``taken`` of the inputs, all by default.
    ``arguments``: those of `braintrace.compile` after the rule, for models of other
    frameworks; brainstate modules have their states already.
    """

    model: Any
    inputs: tuple
    targets: tuple = ()
    loss: Callable[..., jax.Array] = weighted_squares
    call: Callable[..., Any] = lambda learner, *inputs: learner(*inputs)
    mask: np.ndarray | None = None
    taken: int | None = None
    arguments: tuple | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def learner(self, kind: Callable[..., Any], options: dict[str, Any]) -> Any:
        options = {**self.options, **options}
        if self.arguments is not None:
            return braintrace.compile(self.model, kind, *self.arguments, **options)
        learner = kind(self.model, **options)
        example = self.inputs[: self.taken]
        learner.compile_graph(*jax.tree.map(lambda x: x[0], example))
        return learner


MODELS: dict[str, tuple[str, Callable[[], Built]]] = {}
"""The family of each model, by which rules are chosen, and its builder."""


def model(family: str) -> Callable:
    def register(builder: Callable[[], Built]) -> Callable[[], Built]:
        MODELS[builder.__name__] = family, builder
        return builder

    return register


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([SEED, seed, *shape]).normal(size=shape))


def sequences() -> dict[str, Any]:
    """Inputs and targets of the models of this file."""
    given = {'inputs': (drawn(STEPS, B, I),), 'targets': (drawn(STEPS, B, O, seed=1),)}
    return {**given, 'loss': squared_error}


# ---------------------------------------------------------------- leaky read-outs


def spikes(m: Any) -> jax.Array:
    return braintrace.networks.fire(m.V.value - 0.3 - 0.2 * m.a.value)


def units(m: Any, x: jax.Array) -> jax.Array:
    """Adaptive spiking units without weights between them; their new spikes."""
    z = spikes(m)
    m.V.value = 0.8 * m.V.value + x @ m.feed.value - 0.3 * z
    m.a.value = 0.95 * m.a.value + z
    return spikes(m)


def leaky_read(m: Any, z: jax.Array) -> jax.Array:
    m.y.value = 0.9 * m.y.value + z @ m.out.value
    return m.y.value


def net(step: Callable, **parts: Any) -> Built:
    states = {'V': hidden(B, H), 'a': hidden(B, H), 'y': hidden(B, O)}
    weights = {'feed': weight(I, H), 'out': weight(H, O)}
    return Built(Step(step, **{**states, **weights, **parts}), **sequences())


@model('readout')
def readout_of_one_decay():
    return net(lambda m, x: leaky_read(m, units(m, x)))


@model('readout')
def readout_of_several_decays():
    def step(m, x):
        drive = (1 - DECAYS) * (units(m, x) @ m.out.value)
        m.y.value = DECAYS * m.y.value + drive
        return m.y.value

    return net(step)


@model('readout')
def readout_with_gains():
    """Gains, a bias, and weights in the other order."""

    def step(m, x):
        drive = jnp.einsum('bh,oh->bo', 2.0 * units(m, x), jnp.tanh(m.out.value))
        m.y.value = 0.9 * m.y.value + 0.1 * (drive + m.bias.value)
        return m.y.value

    return net(step, out=weight(O, H), bias=weight(O))


@model('readout')
def readout_layer():
    layer = nn.LeakyRateReadout(H, O, tau=-1 / np.log(DECAYS))
    layer.init_state(B)
    return net(lambda m, x: m.layer(units(m, x)), layer=layer, y=hidden(B, O))


@model('readout')
def readout_of_spikes_in_a_state():
    def step(m, x):
        m.z.value = units(m, x)
        return leaky_read(m, m.z.value)

    return net(step, z=hidden(B, H))


@model('readout')
def readout_of_old_spikes():
    def step(m, x):
        z = spikes(m)
        units(m, x)
        return leaky_read(m, z)

    return net(step)


@model('readout')
def readout_of_old_and_new():
    def step(m, x):
        before = m.V.value
        z = units(m, x)
        return leaky_read(m, jnp.tanh(before + 0.3) * z + 0.2 * m.V.value)

    return net(step)


@model('readout')
def readout_of_units_without_memory():
    def step(m, x):
        m.V.value = jnp.tanh(x @ m.feed.value)
        m.a.value = m.V.value**2
        return leaky_read(m, m.V.value * m.a.value)

    return net(step)


@model('readout')
def readout_whose_old_value_is_the_output():
    def step(m, x):
        old = m.y.value
        return old + 0.5 * leaky_read(m, units(m, x))

    return net(step)


@model('readout')
def readout_of_rows():
    """Units in two rows, reversed, and read by groups of weights."""

    def step(m, x):
        rows = units(m, x).reshape(B, 2, H // 2)[..., ::-1]
        m.y.value = 0.9 * m.y.value + jnp.einsum('brh,rho->bo', rows, m.out.value)
        return m.y.value

    return net(step, out=weight(2, H // 2, O))


@model('readout')
def two_readouts():
    def step(m, x):
        z = units(m, x)
        m.v.value = 0.5 * m.v.value + z @ m.value.value
        return leaky_read(m, z) + jnp.tanh(m.v.value)

    return net(step, value=weight(H, 1), v=hidden(B, 1))


@model('readout')
def readout_of_two_populations():
    def step(m, x):
        z = units(m, x)
        m.h.value = 0.6 * m.h.value + jnp.sin(x @ m.more.value)
        return leaky_read(m, jnp.concatenate([z, m.h.value**2], -1))

    return net(step, more=weight(I, 2), h=hidden(B, 2), out=weight(H + 2, O))


@model('readout')
def readout_with_fixed_weights():
    def step(m, x):
        m.y.value = 0.9 * m.y.value + units(m, x) @ drawn(H, O, seed=2)
        return m.y.value

    return net(step)


@model('readout')
def dense_layer_above_a_leaky_one():
    step = lambda m, x: jnp.tanh(leaky_read(m, units(m, x))) @ m.last.value
    return net(step, last=weight(O, O))


@model('readout')
def leaky_layer_below_a_readout():
    def step(m, x):
        m.layer.value = 0.7 * m.layer.value + units(m, x) @ m.out.value
        m.y.value = 0.9 * m.y.value + m.layer.value @ m.last.value
        return m.y.value

    return net(step, layer=hidden(B, O), last=weight(O, O))


@model('readout')
def stack_below_a_readout():
    def step(m, x):
        m.h.value = 0.7 * m.h.value + jnp.tanh(x @ m.first.value)
        return leaky_read(m, units(m, m.h.value))

    return net(step, first=weight(I, 5), feed=weight(5, H), h=hidden(B, 5))


@model('readout')
def recurrent_units_below_a_readout():
    """The network of the e-prop paper: adaptive units, all to all, and a leaky read-out."""

    def step(m, x):
        z = spikes(m)
        m.V.value = (
            0.8 * m.V.value + x @ m.feed.value + 0.3 * z @ m.recur.value - 0.3 * z
        )
        m.a.value = 0.95 * m.a.value + z
        return leaky_read(m, spikes(m))

    return net(step, recur=weight(H, H))


@model('readout')
def readout_whose_decay_is_learned():
    def step(m, x):
        decay = jax.nn.sigmoid(m.decay.value)
        m.y.value = decay * m.y.value + units(m, x) @ m.out.value
        return m.y.value

    return net(step, decay=weight(O))


@model('readout')
def readout_that_feeds_back():
    def step(m, x):
        return leaky_read(m, units(m, x + 0.1 * m.y.value[:, :I]))

    return net(step)


@model('readout')
def readout_without_memory():
    return net(lambda m, x: units(m, x) @ m.out.value)


@model('readout')
def readout_with_a_penalty():
    """The loss reads rates of the units beside the read-out; these are not filtered."""
    rate = nn.WindowRate(H, 3)
    rate.init_state(B)

    def step(m, x):
        z = units(m, x)
        m.rate(z)
        return leaky_read(m, z)

    def loss(learner, outputs, y):
        penalty = learner.model.rate.penalty(0.1)
        return squared_error(learner, outputs, y) + 7 * penalty

    built = net(step, rate=rate)
    built.loss = loss
    return built


# ---------------------------------------------------------------- masks, modulators


@model('masked')
def steps_with_nan():
    """NaN in the inputs and targets of steps of weight 0."""

    def step(m, x, valid):
        h, a = m.h.value, m.a.value
        gate = jax.nn.sigmoid(jnp.concatenate([x, h], -1) @ m.gate.value)
        drive = jnp.tanh(x @ m.feed.value) * m.gain.value
        rows = drive.reshape(B, 2, H // 2)
        drive += jnp.einsum('bij,ijk->bik', rows, m.heads.value).reshape(B, H)
        one = (1,)
        image = jax.lax.conv_general_dilated(
            drive[:, None], m.filter.value, one, 'SAME'
        )
        new = gate * h + (1 - gate) * image[:, 0] - 0.3 * a
        new += 0.5 * jnp.tanh(h @ m.back.value)
        m.h.value = jnp.where(valid, new, h)
        m.a.value = jnp.where(valid, 0.8 * a + jnp.log(1 + x[:, :1] ** 2) * h, a)
        return m.h.value @ m.out.value

    parts = {
        'feed': weight(I, H),
        'back': weight(H, H),
        'gate': weight(I + H, H),
        'gain': weight(H),
        'heads': weight(2, H // 2, H // 2),
        'filter': weight(1, 1, 2),
        'out': weight(H, O),
        'h': hidden(B, H),
        'a': hidden(B, H),
    }
    built = Built(Step(step, **parts), **sequences(), mask=MASK)
    gone = (MASK == 0)[:, None, None]
    (x,), (y,) = built.inputs, built.targets
    built.inputs = (jnp.where(gone, jnp.nan, x), jnp.asarray(MASK > 0))
    built.targets = (jnp.where(gone, jnp.nan, y),)
    return built


def modulated(modulator: Callable[[Any], Any]) -> Built:
    """Recurrent units under a modulator that each step is given."""
    built = recurrent_units_below_a_readout()
    built.inputs = (*built.inputs, drawn(STEPS, B, 1, seed=3))
    built.call = lambda learner, x, m: learner(x, modulator=modulator(m))
    built.taken = 1
    return built


@model('modulated')
def modulator_of_one_number():
    return modulated(jnp.sum)


@model('modulated')
def modulator_of_each_sample():
    return modulated(lambda m: m)


@model('modulated')
def modulator_from_the_output():
    """Set after the step, from its output."""

    def loss(learner, outputs, y):
        learner.modulator = jnp.mean(outputs - y)
        return squared_error(learner, outputs, y)

    built = recurrent_units_below_a_readout()
    built.loss = loss
    return built


# ---------------------------------------------------------------- other front ends


class FlaxSpiking(nnx.Module):
    """Adaptive neurons with Variables of their own, and a read-out."""

    def __init__(self, rngs: nnx.Rngs):
        kind = {'rngs': rngs, 'param_dtype': jnp.float64}
        self.dense, self.out = nnx.Linear(I, H, **kind), nnx.Linear(H, O, **kind)
        self.decay = nnx.Param(jnp.full(H, 0.9))
        self.V = nnx.Variable(jnp.zeros((B, H)))
        self.a = nnx.Variable(jnp.zeros((B, H)))

    def __call__(self, x: jax.Array) -> jax.Array:
        spike = jax.nn.sigmoid(4 * (self.V[...] - 1))
        self.a[...] = 0.8 * self.a[...] + spike
        self.V[...] = self.decay[...] * self.V[...] + self.dense(x) - 0.3 * self.a[...]
        return self.out(self.V[...])


@model('front end')
def flax_module():
    given = sequences()
    start = (given['inputs'][0][0],)
    return Built(FlaxSpiking(nnx.Rngs(0)), **given, arguments=start)


@model('front end')
def flax_gru_cell():
    cell = nnx.GRUCell(I, O, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    given = sequences()
    return Built(cell, **given, arguments=(given['inputs'][0][0],))


class EquinoxCell(equinox.Module):
    """A GRU cell and a leaky read-out; the states are an argument."""

    cell: equinox.nn.GRUCell
    out: equinox.nn.Linear

    def __call__(self, x: jax.Array, state: tuple) -> tuple:
        h, y = state
        h = self.cell(x, h)
        y = 0.9 * y + self.out(h)
        return y, (h, y)


@model('front end')
def equinox_module():
    first, second = jax.random.split(jax.random.key(0))
    cell = EquinoxCell(
        equinox.nn.GRUCell(I, H, dtype=jnp.float64, key=first),
        equinox.nn.Linear(H, O, dtype=jnp.float64, key=second),
    )
    given = sequences()
    options = {'vmap': True, 'batch_size': B, 'state': (jnp.zeros(H), jnp.zeros(O))}
    sample = (given['inputs'][0][0, 0],)
    return Built(cell, **given, arguments=sample, options=options)


@model('front end')
def plain_function():
    def step(params, state, x):
        h, (c, y) = state['h'], state['rest']
        joint = jnp.concatenate([x, h], -1) @ params['gates'][0] + params['gates'][1]
        i, f, g = jnp.split(joint, 3, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jnp.tanh(c)
        y = 0.8 * y + h @ params['out']
        return {'h': h, 'rest': (c, y)}, y

    params = {
        'gates': (0.5 * drawn(I + H, 3 * H), 0.1 * drawn(3 * H)),
        'out': 0.5 * drawn(H, O),
    }
    zeros = lambda n: jnp.zeros((B, n))
    state = {'h': zeros(H), 'rest': (zeros(H), zeros(O))}
    given = sequences()
    return Built(step, **given, arguments=(params, state, given['inputs'][0][0]))


@model('front end')
def one_sample_mapped_over_a_batch():
    cell = brainstate.nn.GRUCell(I, H)
    out = brainstate.nn.Linear(H, O)
    given = sequences()
    options = {'vmap': True, 'batch_size': B}
    sample = (given['inputs'][0][0, 0],)
    net = brainstate.nn.Sequential(cell, out)
    return Built(net, **given, arguments=sample, options=options)
