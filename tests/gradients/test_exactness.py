"""Learners against plain JAX: every rule on every kind of model, to rounding in float64.

A model exists twice: as a brainstate module, and as a plain function ``step(p, s, x, cut) -> (s, out)`` of
dictionaries by path, with the cuts written by hand. ``cut`` says which paths into new states carry no gradient:

    FULL    none: the model itself
    DEEP    from an old state to a new one of its group at another position (in BPTT with this step: ``reach='deep'``)
    LOCAL   also those inside the step: a reset gate through the candidate, a layer into the next

The oracles are written with these functions, `jax.grad` and `jax.jacfwd`; they share no code with the package.
"""

import functools
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from jax.nn import sigmoid, softplus

import braintrace
from braintrace import BPTT, D_RTRL, TBPTT, CompilationError, MultiStepData, pp_prop

nn = brainstate.nn
spike = braintools.surrogate.sigmoid
FULL, DEEP, LOCAL = range(3)
B, I, H, O, T = 2, 3, 4, 2, 6  # batch, inputs, units, outputs, steps  # noqa: E741


@pytest.fixture(autouse=True)
def _double(x64):
    """All of this file is in float64."""


# ---------------------------------------------------------------- models


@dataclass(frozen=True)
class Model:
    """A model twice over, as a module and as a plain step, and what its inputs look like."""

    both: Callable[[], tuple[nn.Module, Callable]]
    inputs: Callable = lambda draw: draw(T, B, I)

    @functools.cached_property
    def step(self):
        return self.both()[1]


MODELS: dict[str, Model] = {}


def model(**options):
    """Register the decorated function under its own name."""

    def register(function):
        MODELS[function.__name__] = Model(function, **options)
        return function

    return register


def held(cut):
    """Stops on what mixes: of old states, and of values made inside the step."""
    stop = jax.lax.stop_gradient
    return (stop if cut >= DEEP else lambda v: v), (
        stop if cut == LOCAL else lambda v: v
    )


def affine(p, x):
    return x @ p['weight'] + p['bias']


def join(*values):
    return jnp.concatenate(values, axis=-1)


class Net(nn.Module):
    """Parts, and the function that advances them."""

    def __init__(self, step, **parts):
        super().__init__()
        self.step = step
        for name, part in parts.items():
            setattr(self, name, part)

    def update(self, *inputs):
        return self.step(self, *inputs)


def weight(*shape):
    return brainstate.ParamState(jnp.zeros(shape))


plain = {'w_init': nn.init.ZeroInit()}  # every value comes from the data


def hidden(*shape):
    return brainstate.HiddenState(jnp.zeros(shape))


def with_readout(cell):
    nn.init_all_states(cell, batch_size=B)
    return Net(lambda m, x: m.out(m.cell(x)), cell=cell, out=nn.Linear(H, O, **plain))


def gru_step(p, s, x, cut, at=('cell',)):
    old, now = held(cut)
    h = s[*at, 'h']
    r, z = jnp.split(
        sigmoid(affine(p[*at, 'Wrz', 'weight'], join(x, old(h)))), 2, axis=-1
    )
    candidate = jnp.tanh(affine(p[*at, 'Wh', 'weight'], join(x, now(r) * old(h))))
    return {(*at, 'h'): (1 - z) * h + z * candidate}


def lstm_step(p, s, x, cut, at=('cell',)):
    old, _ = held(cut)
    i, g, f, o = jnp.split(
        affine(p[*at, 'W', 'weight'], join(x, old(s[*at, 'h']))), 4, axis=-1
    )
    c = sigmoid(f + 1) * s[*at, 'c'] + sigmoid(i) * jnp.tanh(g)
    return {(*at, 'c'): c, (*at, 'h'): sigmoid(o) * jnp.tanh(c)}


def mgu_step(p, s, x, cut):
    old, now = held(cut)
    h = s['cell', 'h']
    f = sigmoid(affine(p['cell', 'Wf', 'weight'], join(x, old(h))))
    candidate = jnp.tanh(affine(p['cell', 'Wh', 'weight'], join(x, now(f) * old(h))))
    return {('cell', 'h'): (1 - f) * h + f * candidate}


def vanilla_step(p, s, x, cut):
    old, _ = held(cut)
    return {
        ('cell', 'h'): jnp.tanh(
            affine(p['cell', 'W', 'weight'], join(x, old(s['cell', 'h'])))
        )
    }


def read_out(cell_step):
    def step(p, s, x, cut):
        new = cell_step(p, s, x, cut)
        return new, affine(p['out', 'weight'], new['cell', 'h'])

    return step


@model()
def gru():
    return with_readout(nn.GRUCell(I, H, **plain)), read_out(gru_step)


@model()
def lstm():
    return with_readout(nn.LSTMCell(I, H, **plain)), read_out(lstm_step)


@model()
def mgu():
    return with_readout(nn.MGUCell(I, H, **plain)), read_out(mgu_step)


@model()
def vanilla():
    return with_readout(nn.ValinaRNNCell(I, H, activation='tanh', **plain)), read_out(
        vanilla_step
    )


@model()
def adaptive_lif():
    """Threshold adaptation, spikes that reset, adapt and recur; a learned time constant."""

    def module(m, x):
        fired = spike(m.V.value - 0.1 - 0.2 * m.a.value)
        m.V.value = (
            0.9 * m.V.value + x @ m.w.value + fired @ m.r.value + m.b.value - fired
        )
        m.a.value = sigmoid(m.beta.value) * m.a.value + fired
        return spike(m.V.value - 0.1 - 0.2 * m.a.value) @ m.out.value

    def step(p, s, x, cut):
        old, _ = held(cut)
        V, a = s['V',], s['a',]
        fired = spike(V - 0.1 - 0.2 * a)
        V = 0.9 * V + x @ p['w',] + old(fired) @ p['r',] + p['b',] - fired
        a = sigmoid(p['beta',]) * a + fired
        return {('V',): V, ('a',): a}, spike(V - 0.1 - 0.2 * a) @ p['out',]

    states = {'V': hidden(B, H), 'a': hidden(B, H)}
    parts = {
        'w': weight(I, H),
        'r': weight(H, H),
        'b': weight(H),
        'beta': weight(H),
        'out': weight(H, O),
    }
    return Net(module, **parts, **states), step


@model()
def exponential_synapse():
    """The membrane reads the new current in the same step."""

    def module(m, x):
        fired = spike(m.V.value - 0.1)
        m.g.value = (
            sigmoid(m.decay.value) * m.g.value + x @ m.w.value + fired @ m.r.value
        )
        m.V.value = 0.9 * m.V.value + 0.5 * m.g.value - fired
        return spike(m.V.value - 0.1) @ m.out.value

    def step(p, s, x, cut):
        old, _ = held(cut)
        fired = spike(s['V',] - 0.1)
        g = sigmoid(p['decay',]) * s['g',] + x @ p['w',] + old(fired) @ p['r',]
        V = 0.9 * s['V',] + 0.5 * g - fired
        return {('g',): g, ('V',): V}, spike(V - 0.1) @ p['out',]

    states = {'g': hidden(B, H), 'V': hidden(B, H)}
    return Net(
        module,
        w=weight(I, H),
        r=weight(H, H),
        decay=weight(H),
        out=weight(H, O),
        **states,
    ), step


@model()
def conductances():
    """Excitation and inhibition that multiply the membrane; weights kept positive by a softplus."""

    def module(m, x):
        fired = spike(m.V.value - 0.1)
        m.ge.value = (
            0.8 * m.ge.value
            + (x**2) @ softplus(m.we.value)
            + fired @ softplus(m.r.value)
        )
        m.gi.value = 0.7 * m.gi.value + jnp.abs(x) @ softplus(m.wi.value)
        current = m.ge.value * (3.0 - m.V.value) + m.gi.value * (-1.0 - m.V.value)
        m.V.value = 0.9 * m.V.value + 0.1 * current - fired
        return spike(m.V.value - 0.1) @ m.out.value

    def step(p, s, x, cut):
        old, _ = held(cut)
        V = s['V',]
        fired = spike(V - 0.1)
        ge = (
            0.8 * s['ge',]
            + (x**2) @ softplus(p['we',])
            + old(fired) @ softplus(p['r',])
        )
        gi = 0.7 * s['gi',] + jnp.abs(x) @ softplus(p['wi',])
        V = 0.9 * V + 0.1 * (ge * (3.0 - V) + gi * (-1.0 - V)) - fired
        return {('ge',): ge, ('gi',): gi, ('V',): V}, spike(V - 0.1) @ p['out',]

    states = {'ge': hidden(B, H), 'gi': hidden(B, H), 'V': hidden(B, H)}
    return Net(
        module,
        we=weight(I, H),
        wi=weight(I, H),
        r=weight(H, H),
        out=weight(H, O),
        **states,
    ), step


class Leaky(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.w, self.r, self.h = (
            weight(n_in, n_out),
            weight(n_out, n_out),
            hidden(B, n_out),
        )

    def update(self, x):
        self.h.value = 0.8 * self.h.value + 0.2 * jnp.tanh(
            x @ self.w.value + self.h.value @ self.r.value
        )
        return self.h.value


@model()
def stack():
    """Leaky recurrent units on top of a GRU of the same size, in a list."""

    def module(m, x):
        return m.out(m.layers[1](m.layers[0](x)))

    def step(p, s, x, cut):
        old, now = held(cut)
        new, h = gru_step(p, s, x, cut, ('layers', 0)), s['layers', 1, 'h']
        drive = (
            now(new['layers', 0, 'h']) @ p['layers', 1, 'w']
            + old(h) @ p['layers', 1, 'r']
        )
        new['layers', 1, 'h'] = h = 0.8 * h + 0.2 * jnp.tanh(drive)
        return new, affine(p['out', 'weight'], h)

    layers = [nn.GRUCell(I, H, **plain), Leaky(H, H)]
    layers[0].init_state(B)
    return Net(module, layers=layers, out=nn.Linear(H, O, **plain)), step


@model(inputs=lambda draw: draw(T, B, 5, 2))
def recurrent_convolution():
    """Spiking units on a line; kernels shared by all places, input and recurrence alike."""

    def module(m, x):
        fired = spike(m.V.value - 0.1)
        m.V.value = 0.9 * m.V.value + m.conv(x) + m.recurrent(fired) - fired
        return spike(m.V.value - 0.1)

    def step(p, s, x, cut):
        old, _ = held(cut)

        def conv(p, x):
            numbers = ('NWC', 'WIO', 'NWC')
            y = jax.lax.conv_general_dilated(
                x, p['weight'], (1,), 'SAME', dimension_numbers=numbers
            )
            return y + p['bias'] if 'bias' in p else y

        fired = spike(s['V',] - 0.1)
        new = (
            0.9 * s['V',]
            + conv(p['conv', 'weight'], x)
            + conv(p['recurrent', 'weight'], old(fired))
            - fired
        )
        return {('V',): new}, spike(new - 0.1)

    parts = {
        'conv': nn.Conv1d((5, 2), 3, 3, b_init=nn.init.ZeroInit(), **plain),
        'recurrent': nn.Conv1d((5, 3), 3, 3, **plain),
    }
    return Net(module, **parts, V=hidden(B, 5, 3)), step


@model(inputs=lambda draw: np.abs(draw(T, B) * 10).astype(int) % 7)
def embedded():
    """Integers in; a row of the table drives the units."""

    def module(m, i):
        m.h.value = 0.8 * m.h.value + jnp.tanh(m.table(i) + m.h.value @ m.r.value)
        return m.h.value @ m.out.value

    def step(p, s, i, cut):
        old, _ = held(cut)
        h = 0.8 * s['h',] + jnp.tanh(p['table', 'weight'][i] + old(s['h',]) @ p['r',])
        return {('h',): h}, h @ p['out',]

    return Net(
        module,
        table=nn.Embedding(7, H),
        r=weight(H, H),
        out=weight(H, O),
        h=hidden(B, H),
    ), step


@model()
def tied():
    """One matrix for the recurrence and the read-out."""

    def module(m, x):
        m.h.value = 0.8 * m.h.value + 0.2 * jnp.tanh(
            x @ m.w.value + m.h.value @ m.r.value
        )
        return m.h.value @ m.r.value

    def step(p, s, x, cut):
        old, _ = held(cut)
        h = 0.8 * s['h',] + 0.2 * jnp.tanh(x @ p['w',] + old(s['h',]) @ p['r',])
        return {('h',): h}, h @ p['r',]

    return Net(module, w=weight(I, H), r=weight(H, H), h=hidden(B, H)), step


@model()
def output_from_old_state():
    """The spikes of the old membrane are the output, the reset and the recurrence."""

    def module(m, x):
        fired = spike(m.V.value - 0.1)
        m.V.value = 0.9 * m.V.value + x @ m.w.value + fired @ m.r.value - fired
        return fired @ m.out.value

    def step(p, s, x, cut):
        old, _ = held(cut)
        fired = spike(s['V',] - 0.1)
        V = 0.9 * s['V',] + x @ p['w',] + old(fired) @ p['r',] - fired
        return {('V',): V}, fired @ p['out',]

    return Net(
        module, w=weight(I, H), r=weight(H, H), out=weight(H, O), V=hidden(B, H)
    ), step


@model()
def feedforward_lif():
    def module(m, x):
        m.V.value = 0.9 * m.V.value + x @ m.w.value + m.b.value - spike(m.V.value - 0.1)
        return spike(m.V.value - 0.1) @ m.out.value

    def step(p, s, x, cut):
        V = 0.9 * s['V',] + x @ p['w',] + p['b',] - spike(s['V',] - 0.1)
        return {('V',): V}, spike(V - 0.1) @ p['out',]

    return Net(
        module, w=weight(I, H), b=weight(H), out=weight(H, O), V=hidden(B, H)
    ), step


@model()
def feedforward_alif():
    def module(m, x):
        fired = spike(m.V.value - 0.1 - 0.2 * m.a.value)
        m.V.value = 0.9 * m.V.value + x @ m.w.value - fired
        m.a.value = sigmoid(m.beta.value) * m.a.value + fired
        return spike(m.V.value - 0.1 - 0.2 * m.a.value) @ m.out.value

    def step(p, s, x, cut):
        V, a = s['V',], s['a',]
        fired = spike(V - 0.1 - 0.2 * a)
        V, a = 0.9 * V + x @ p['w',] - fired, sigmoid(p['beta',]) * a + fired
        return {('V',): V, ('a',): a}, spike(V - 0.1 - 0.2 * a) @ p['out',]

    states = {'V': hidden(B, H), 'a': hidden(B, H)}
    return Net(module, w=weight(I, H), beta=weight(H), out=weight(H, O), **states), step


@model()
def diagonal_ssm():
    def module(m, x):
        m.h.value = jnp.exp(-jnp.exp(m.log_a.value)) * m.h.value + x @ m.b.value
        return m.h.value @ m.c.value + x @ m.d.value

    def step(p, s, x, cut):
        h = jnp.exp(-jnp.exp(p['log_a',])) * s['h',] + x @ p['b',]
        return {('h',): h}, h @ p['c',] + x @ p['d',]

    return Net(
        module,
        log_a=weight(H),
        b=weight(I, H),
        c=weight(H, O),
        d=weight(I, O),
        h=hidden(B, H),
    ), step


class MiniGRU(nn.Module):
    """Feng et al. 2024: the gate reads the input only, so every unit keeps to itself."""

    def __init__(self, inputs, units):
        super().__init__()
        self.Wz, self.Wh = (nn.Linear(inputs, units, **plain) for _ in range(2))
        self.units = units

    def init_state(self, batch_size=None):
        self.h = hidden(batch_size, self.units)

    def update(self, x):
        z = sigmoid(self.Wz(x))
        self.h.value = (1 - z) * self.h.value + z * self.Wh(x)
        return self.h.value


def minigru_step(p, s, x, at):
    z = sigmoid(affine(p[*at, 'Wz', 'weight'], x))
    return (1 - z) * s[*at, 'h'] + z * affine(p[*at, 'Wh', 'weight'], x)


@model()
def minigru():
    def step(p, s, x, cut):
        h = minigru_step(p, s, x, ('cell',))
        return {('cell', 'h'): h}, affine(p['out', 'weight'], h)

    return with_readout(MiniGRU(I, H)), step


def in_list(*cells, width=H):
    def module(m, x):
        for layer in m.layers:
            x = layer(x)
        return m.out(x)

    for cell in cells:
        cell.init_state(B)
    return Net(module, layers=list(cells), out=nn.Linear(width, O, **plain))


@model()
def minigru_stack():
    def step(p, s, x, cut):
        _, now = held(cut)
        lower = minigru_step(p, s, x, ('layers', 0))
        upper = minigru_step(p, s, now(lower), ('layers', 1))
        return {('layers', 0, 'h'): lower, ('layers', 1, 'h'): upper}, affine(
            p['out', 'weight'], upper
        )

    return in_list(MiniGRU(I, H), MiniGRU(H, H)), step


@model()
def lru_stack():
    def layer(p, s, x, at):
        decay = jnp.exp(-jnp.exp(p[*at, 'nu_log']) + 1j * jnp.exp(p[*at, 'theta_log']))
        into, out = (
            p[*at, name + '_re', 'weight']['weight']
            + 1j * p[*at, name + '_im', 'weight']['weight']
            for name in 'BC'
        )
        state = decay * (s[*at, 'h_re'] + 1j * s[*at, 'h_im']) + jnp.exp(
            p[*at, 'gamma_log']
        ) * (x @ into)
        return {(*at, 'h_re'): state.real, (*at, 'h_im'): state.imag}, (
            state @ out
        ).real + x * p[*at, 'D']

    def step(p, s, x, cut):
        _, now = held(cut)
        lower, x = layer(p, s, x, ('layers', 0))
        upper, x = layer(p, s, now(x), ('layers', 1))
        return lower | upper, affine(p['out', 'weight'], x)

    cells = [braintrace.nn.LRUCell(I, H) for _ in range(2)]
    return in_list(*cells, width=I), step


class Spiking(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.w, self.n = weight(n_in, n_out), n_out

    def init_state(self, batch_size=None):
        self.V = hidden(batch_size, self.n)

    def update(self, x):
        self.V.value = 0.9 * self.V.value + x @ self.w.value - spike(self.V.value - 0.1)
        return spike(self.V.value - 0.1)


@model()
def lif_stack():
    def step(p, s, x, cut):
        _, now = held(cut)
        new = {}
        for k in range(2):
            V = s['layers', k, 'V']
            new['layers', k, 'V'] = V = (
                0.9 * V + now(x) @ p['layers', k, 'w'] - spike(V - 0.1)
            )
            x = spike(V - 0.1)
        return new, affine(p['out', 'weight'], x)

    return in_list(Spiking(I, H), Spiking(H, H)), step


@model()
def populations():
    """Two groups that read each other's old states; one feeds itself too."""
    shapes = {'w': (I, H), 'ee': (H, H), 'ei': (H, O), 'ie': (O, H)}

    def new_states(p, E, I, x, old, other):  # noqa: E741
        drive = x @ p['w'] + jnp.tanh(old(E)) @ p['ee'] - other(I) @ p['ie']
        return 0.9 * E + drive, 0.8 * I + jnp.tanh(other(E)) @ p['ei']

    def update(m, x):
        p = {name: getattr(m, name).value for name in shapes}
        same = lambda v: v
        m.E.value, m.I.value = new_states(p, m.E.value, m.I.value, x, same, same)
        return m.E.value

    def step(p, s, x, cut):
        p = {name: p[name,] for name in shapes}
        E, I = new_states(p, s['E',], s['I',], x, *held(cut))  # noqa: E741
        return {('E',): E, ('I',): I}, E

    parts = {name: weight(*shape) for name, shape in shapes.items()}
    return Net(update, E=hidden(B, H), I=hidden(B, O), **parts), step


# ---------------------------------------------------------------- loss, data, learners


def loss(p, s, out, y, rest=1.0):
    """An error of the output, and a little of every state and of the first and the last weight."""
    size = lambda arrays: sum(jnp.mean(x**2) for x in arrays)
    return jnp.mean((out - y) ** 2) + rest * (
        0.2 * size(s.values()) + 0.05 * size(jax.tree.leaves(p)[:: _last(p)])
    )


def _last(p):
    return jax.tree.structure(p).num_leaves - 1


@dataclass(frozen=True)
class Data:
    """Parameters and first states by path, inputs and targets."""

    p: dict
    s: dict
    xs: np.ndarray
    ys: np.ndarray


@functools.cache
def data_of(name):
    draw = np.random.default_rng(7).standard_normal
    (net, _), draws = MODELS[name].both(), lambda *shape: 0.5 * draw(shape)
    p, s = (
        {
            path: jax.tree.map(lambda v: draws(*v.shape), state.value)
            for path, state in net.states(kind).items()
        }
        for kind in (brainstate.ParamState, brainstate.HiddenState)
    )
    xs = MODELS[name].inputs(draws)
    _, out = MODELS[name].step(p, s, xs[0], FULL)
    return Data(p, s, xs, draws(T, *out.shape))


def learner_of(name, kind, **options):
    """A fresh module with the data's parameters and states, and its learner."""
    data, (net, _) = data_of(name), MODELS[name].both()
    for path, state in net.states().items():
        state.value = jax.tree.map(jnp.asarray, {**data.p, **data.s}[path])
    learner = kind(net, **options)
    learner.compile_graph(jnp.asarray(data.xs[0]))
    return learner


def step_of(learner):
    """The step function of a learner with the loss above."""

    def step_fn(x, y):
        out = learner(x)
        p, s = (
            {k: v.value for k, v in states.items()}
            for states in (learner.param_states, learner.hidden_states)
        )
        return loss(p, s, out, y)

    return step_fn


def etrace_grad(name, kind, *, fresh=False, reduction='sum', **options):
    """Gradient of the whole sequence from the learner."""
    learner, data = learner_of(name, kind, **options), data_of(name)
    return learner.etrace_grad(
        data.xs, data.ys, step_fn=step_of(learner), reduction=reduction, fresh=fresh
    )


def step_by_step(learner, xs, ys, step_fn=None):
    """Σ_t of the gradients under ``brainstate.transform.grad``, each step a compiled call."""
    weights = learner.model.states(brainstate.ParamState)
    step_fn = step_fn or step_of(learner)
    one = brainstate.transform.jit(
        lambda x, y: brainstate.transform.grad(lambda: step_fn(x, y), weights)()
    )
    return functools.reduce(
        added, [jax.device_get(dict(one(x, y))) for x, y in zip(xs, ys, strict=True)]
    )


def added(a, b):
    return jax.tree.map(operator.add, a, b)


def assert_equal(a, b, tolerance=1e-10):
    """Trees equal to rounding, each array on the scale of its largest element."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        scale = max(np.abs(np.asarray(y)).max(initial=0), 1e-6)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * scale)


def small(kind=D_RTRL, **options):
    """A learner of the smallest model, its data and its step function."""
    learner = learner_of('tied', kind, **options)
    return learner, data_of('tied'), step_of(learner)


def counted():
    """A small learner whose step function counts its traces."""
    learner, data, step_fn = small()
    traced = []

    def counting(x, y):
        traced.append(1)
        return step_fn(x, y)

    return learner, data, counting, traced


_shared = functools.cache(counted)


def shared():
    """One learner for tests that need no other, so that it is compiled once."""
    learner, *rest = _shared()
    learner.reset_state()
    return learner, *rest


def everything(learner):
    """All states and traces."""
    values = {k: v.value for k, v in learner.model.states().items()}
    return values, {k: t.value for k, t in learner.traces.items()}


def relative_error(a, b):
    a, b = ravel_pytree(a)[0], ravel_pytree(b)[0]
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


# ---------------------------------------------------------------- oracles


def losses(step, p, s, xs, ys, cut=FULL, hold=False):
    """Sum of the losses of a sequence; ``hold`` keeps every step to itself. The last states come along."""

    def one(s, xy):
        s = jax.lax.stop_gradient(s) if hold else s
        new, out = step(p, s, xy[0], cut)
        return new, loss(p, new, out, xy[1])

    s, values = jax.lax.scan(one, s, (xs, ys))
    return jnp.sum(values), s


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def bptt(step, p, s, xs, ys, cut=FULL, hold=False):
    """Gradient of a whole sequence by reverse mode, and the last states."""
    return jax.grad(lambda p: losses(step, p, s, xs, ys, cut, hold), has_aux=True)(p)


@functools.partial(jax.jit, static_argnums=0)
def hand_cut(step, *data):
    """BPTT of the hand-cut model, its one-step gradients replaced by those of the whole model."""
    whole, past, now = (
        bptt(step, *data, *how)[0]
        for how in [(FULL, True), (LOCAL, False), (LOCAL, True)]
    )
    return jax.tree.map(lambda a, b, c: a + b - c, whole, past, now)


def recursion(step, p, s, trace, x, y, weight=1.0, rest=1.0):
    """One step of the rule: gradient ∂ℓ/∂θ + (L D + R) ε, the next states, and ε = D ε + ∂h/∂θ, all dense.

    L D + R is the derivative of the loss in the old states when these reach new ones at their own position only;
    D and ∂h/∂θ are those of the local step.
    """
    flat_p, to_p = ravel_pytree(p)
    flat_s, to_s = ravel_pytree(s)

    def value(cut, q, h):
        new, out = step(to_p(q), to_s(h), x, cut)
        return weight * loss(to_p(q), new, out, y, rest)

    def local(q, h):
        return ravel_pytree(step(to_p(q), to_s(h), x, LOCAL)[0])[0]

    direct = jax.grad(lambda q: value(FULL, q, flat_s))(flat_p)
    signal = jax.grad(lambda h: value(DEEP, flat_p, h))(flat_s)
    now, transition = jax.jacfwd(local, (0, 1))(flat_p, flat_s)
    return (
        to_p(direct + signal @ trace),
        step(p, s, x, FULL)[0],
        transition @ trace + now,
    )


compiled_recursion = jax.jit(recursion, static_argnums=0)


def no_trace(p, s):
    return jnp.zeros((ravel_pytree(s)[0].size, ravel_pytree(p)[0].size))


@functools.partial(jax.jit, static_argnums=0)
def local_rule(step, p, s, xs, ys):
    """Gradient, last states and last trace of a sequence under the local rule."""

    def one(carry, xy):
        s, trace, total = carry
        gradient, s, trace = recursion(step, p, s, trace, *xy)
        return (s, trace, added(total, gradient)), None

    start = (s, no_trace(p, s), jax.tree.map(jnp.zeros_like, p))
    (s, trace, total), _ = jax.lax.scan(one, start, (xs, ys))
    return total, s, trace


@functools.cache
def local_oracle(name):
    data = data_of(name)
    return local_rule(MODELS[name].step, data.p, data.s, data.xs, data.ys)


@functools.cache
def bptt_oracle(name, cut=FULL, hold=False):
    data = data_of(name)
    return bptt(MODELS[name].step, data.p, data.s, data.xs, data.ys, cut, hold)[0]


# ---------------------------------------------------------------- the local rule

ALL = os.environ.get('ZOO') == 'all'
RECURRENT = [
    'gru', 'lstm', 'mgu', 'adaptive_lif', 'exponential_synapse', 'conductances', 'stack', 'recurrent_convolution',
    'embedded', 'tied', 'output_from_old_state',
]  # fmt: skip
POSITION_KEEPING = ['feedforward_lif', 'feedforward_alif', 'diagonal_ssm', 'minigru']


@pytest.mark.parametrize('name', ['gru', 'lstm'])
def test_oracle_is_hand_cut_bptt_and_one_step_gradient(name):
    data = data_of(name)
    assert_equal(
        hand_cut(MODELS[name].step, data.p, data.s, data.xs, data.ys),
        local_oracle(name)[0],
    )


def ways():
    """Every model with blocks in turn, one way or, by `make zoo`, both; one of them with all."""
    for i, name in enumerate(RECURRENT):
        every = name == 'exponential_synapse'
        for fresh in (True, False) if ALL or every else [i % 2 == 0]:
            for block in (1, 2, 4, 6) if every else [1 + (i + fresh) % 2]:
                yield pytest.param(
                    name,
                    fresh,
                    block,
                    id=f'{name}-{"two passes" if fresh else "one pass"}-{block}',
                )


@pytest.mark.parametrize(('name', 'fresh', 'block'), list(ways()))
def test_local_rule(name, fresh, block):
    assert_equal(
        etrace_grad(name, D_RTRL, fresh=fresh, block=block), local_oracle(name)[0]
    )


@pytest.mark.parametrize('name', RECURRENT[:: 1 if ALL else 3])
def test_local_rule_step_by_step(name):
    learner, data = learner_of(name, D_RTRL), data_of(name)
    gradient, states, _ = local_oracle(name)
    assert_equal(step_by_step(learner, data.xs, data.ys), gradient)
    assert_equal({k: v.value for k, v in learner.hidden_states.items()}, states)


@pytest.mark.parametrize('name', POSITION_KEEPING)
def test_equals_bptt_where_positions_are_kept(name):
    assert_equal(etrace_grad(name, D_RTRL, block=2), bptt_oracle(name))


@pytest.mark.parametrize('name', ['gru', 'lstm'])
def test_differs_from_bptt_where_positions_mix(name):
    assert relative_error(local_oracle(name)[0], bptt_oracle(name)) > 1e-3


def test_vanilla_rnn_has_only_the_one_step_gradient():
    gradient = etrace_grad('vanilla', D_RTRL, block=2)
    assert_equal(gradient, bptt_oracle('vanilla', FULL, True))
    assert relative_error(gradient, bptt_oracle('vanilla')) > 1e-3


# ---------------------------------------------------------------- deep reach


@pytest.mark.parametrize('name', ['minigru_stack', 'lru_stack', 'lif_stack'])
def test_deep_equals_bptt_for_position_keeping_stacks(name):
    assert_equal(etrace_grad(name, D_RTRL, reach='deep', fresh=True), bptt_oracle(name))


@pytest.mark.parametrize('name', ['gru', 'stack', 'populations'])
def test_deep_cuts_only_mixing_across_time(name):
    gradient = etrace_grad(name, D_RTRL, reach='deep', fresh=True)
    assert_equal(gradient, bptt_oracle(name, DEEP))
    assert relative_error(gradient, bptt_oracle(name)) > 1e-3


def test_deep_steps_read_traces_through_other_groups():
    """A call is a window of one step: the credit of old states, by all paths of the step, is multiplied by traces."""
    data, step = data_of('populations'), MODELS['populations'].step
    # Its signal is that of the step with cuts DEEP, its D that of the step with cuts LOCAL.
    total, _, _ = local_rule(step, data.p, data.s, data.xs, data.ys)
    learner = learner_of('populations', D_RTRL, reach='deep')
    assert_equal(step_by_step(learner, data.xs, data.ys), total)
    learner = learner_of('populations', D_RTRL, reach='deep')
    calls = [
        learner.etrace_grad(x[None], y[None], step_fn=step_of(learner), reduction='sum')
        for x, y in zip(data.xs, data.ys, strict=True)
    ]
    assert_equal(functools.reduce(added, calls), total)


def test_deep_gives_the_reset_gate_credit_beyond_one_step():
    reset = lambda gradient: gradient['cell', 'Wrz', 'weight']['weight'][:, :H]
    one_step, local, deep = (
        bptt_oracle('gru', FULL, True),
        local_oracle('gru')[0],
        bptt_oracle('gru', DEEP),
    )
    assert_equal(reset(local), reset(one_step))
    assert relative_error(reset(deep), reset(local)) > 1e-3


# ---------------------------------------------------------------- pp_prop


class Factors:
    """Naive pp_prop of one site: ε_x = α ε_x + x, ε_f = α D ε_f + (1 - α) ∂h/∂y, (L·ε_f) ⊗ ε_x / (1 - α^t)."""

    def __init__(self, x_decay, f_decay):
        self.decay, self.x, self.f, self.steps = (x_decay, f_decay), 0.0, 0.0, 0

    def gradient(self, x, transition, slope, signal):
        """Axes: x (b, i) or a number, transition (b, h, s, r), slope and signal (b, h, s)."""
        a, b = self.decay
        self.x = a * self.x + x
        carried = np.einsum(
            'bhsr,bhr->bhs', transition, np.broadcast_to(self.f, slope.shape)
        )
        self.f = b * carried + (1 - b) * slope
        self.steps += 1
        return self.of(signal)

    def of(self, signal):
        if not self.steps:
            return 0.0
        y = np.sum(signal * self.f, axis=-1) / (1 - self.decay[1] ** self.steps)
        return (
            np.einsum('bi,bh->ih', self.x, y)
            if np.ndim(self.x)
            else self.x * y.sum(axis=0)
        )


def squares(p):
    """Gradient of the loss's share of the first and the last weight."""
    leaves, structure = jax.tree.flatten(p)
    counted = [
        0.1 * v / v.size if i % _last(p) == 0 else 0 * v for i, v in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, counted)


class FactoredLIF:
    """The adaptive LIF by hand, with the factors of its four parameters."""

    def __init__(self, data, decays):
        self.p, self.V, self.a = (
            {k[0]: v for k, v in data.p.items()},
            data.s['V',],
            data.s['a',],
        )
        self.sites = {name: Factors(*decays) for name in ('w', 'r', 'b', 'beta')}
        self.beta = logistic(self.p['beta'])

    def step(self, x, y):
        """The gradient of one step."""
        p, V, a, beta = self.p, self.V, self.a, self.beta
        slope_of = lambda v: 4 * logistic(4 * v) * (1 - logistic(4 * v))
        u = V - 0.1 - 0.2 * a
        fired, d = (u > 0).astype(float), slope_of(u)
        transition = np.stack(
            [np.stack([0.9 - d, 0.2 * d], -1), np.stack([d, beta - 0.2 * d], -1)], -2
        )
        old_a = a
        self.V, self.a = V, a = (
            0.9 * V + x @ p['w'] + fired @ p['r'] + p['b'] - fired,
            beta * a + fired,
        )
        u = V - 0.1 - 0.2 * a
        fired_now, error = (u > 0).astype(float), 2 * ((u > 0) @ p['out'] - y) / y.size
        from_output = (error @ p['out'].T) * slope_of(u)
        signal = np.stack(
            [from_output + 0.4 * V / V.size, -0.2 * from_output + 0.4 * a / a.size], -1
        )
        on_V, on_a = (
            np.stack([np.ones_like(V), np.zeros_like(V)], -1),
            np.stack([np.zeros_like(V), old_a], -1),
        )
        inputs = {
            'w': (x, on_V),
            'r': (fired, on_V),
            'b': (1.0, on_V),
            'beta': (1.0, on_a),
        }
        found = {
            k: self.sites[k].gradient(x, transition, slope, signal)
            for k, (x, slope) in inputs.items()
        }
        return self.named({**found, 'out': fired_now.T @ error})

    def named(self, found):
        """Gradients by path, that of beta taken through to its parameter."""
        found = {**found, 'beta': found['beta'] * self.beta * (1 - self.beta)}
        return {
            (k,): np.broadcast_to(found.get(k, 0.0), self.p[k].shape) for k in self.p
        }


def logistic(v):
    return 1 / (1 + np.exp(-v))


def pp_prop_adaptive_lif(data, decays):
    model = FactoredLIF(data, decays)
    steps = [model.step(x, y) for x, y in zip(data.xs, data.ys, strict=True)]
    return added(functools.reduce(added, steps), scaled(squares(data.p), len(data.xs)))


def pp_prop_gru(data, decays):
    """The columns of the reset gate reach the state by mixing only: they keep their one-step gradient."""
    rz, wh, out = (
        data.p[path]
        for path in [
            ('cell', 'Wrz', 'weight'),
            ('cell', 'Wh', 'weight'),
            ('out', 'weight'),
        ]
    )
    sites = {name: Factors(*decays) for name in ('z', 'z bias', 'h', 'h bias')}
    h, total = data.s['cell', 'h'], jax.tree.map(np.zeros_like, data.p)
    add = lambda path, **more: total[path].update(
        {k: total[path][k] + v for k, v in more.items()}
    )
    for x, y in zip(data.xs, data.ys, strict=True):
        joined = np.concatenate([x, h], -1)
        r, z = np.split(logistic(joined @ rz['weight'] + rz['bias']), 2, axis=-1)
        reset = np.concatenate([x, r * h], -1)
        candidate = np.tanh(reset @ wh['weight'] + wh['bias'])
        new = (1 - z) * h + z * candidate
        error = 2 * (new @ out['weight'] + out['bias'] - y) / y.size
        signal = error @ out['weight'].T + 0.4 * new / new.size
        to_z, to_h = (candidate - h) * z * (1 - z), z * (1 - candidate**2)
        at_r = ((signal * to_h) @ wh['weight'][I:].T) * h * r * (1 - r)
        moves = ((1 - z)[..., None, None], to_z[..., None], signal[..., None])
        half = [joined.T @ at_r, sites['z'].gradient(joined, *moves)]
        bias = [at_r.sum(axis=0), sites['z bias'].gradient(1.0, *moves)]
        add(
            ('cell', 'Wrz', 'weight'),
            weight=np.concatenate(half, -1),
            bias=np.concatenate(bias),
        )
        moves = ((1 - z)[..., None, None], to_h[..., None], signal[..., None])
        first, second = (
            sites['h'].gradient(reset, *moves),
            sites['h bias'].gradient(1.0, *moves),
        )
        add(('cell', 'Wh', 'weight'), weight=first, bias=second)
        add(('out', 'weight'), weight=new.T @ error, bias=error.sum(axis=0))
        h = new
    return jax.tree.map(lambda a, b: a + len(data.xs) * b, total, squares(data.p))


def test_pp_prop_by_formula():
    found = etrace_grad('adaptive_lif', pp_prop, decay_or_rank=(0.7, 0.4), block=4)
    assert_equal(found, pp_prop_adaptive_lif(data_of('adaptive_lif'), (0.7, 0.4)))


def test_pp_prop_step_by_step():
    learner, data = (
        learner_of('adaptive_lif', pp_prop, decay_or_rank=(0.7, 0.4)),
        data_of('adaptive_lif'),
    )
    assert_equal(
        step_by_step(learner, data.xs, data.ys), pp_prop_adaptive_lif(data, (0.7, 0.4))
    )


def test_pp_prop_with_a_rank_and_a_gate_that_mixes():
    found = etrace_grad('gru', pp_prop, decay_or_rank=4, block=2, fresh=True)
    assert_equal(found, pp_prop_gru(data_of('gru'), (3 / 5, 3 / 5)))


def test_pp_prop_is_exact_for_one_step():
    learner, data, step_fn = small(pp_prop, decay_or_rank=(0.7, 0.4))
    found = learner.etrace_grad(data.xs[:1], data.ys[:1], step_fn=step_fn)
    assert_equal(
        found, bptt(MODELS['tied'].step, data.p, data.s, data.xs[:1], data.ys[:1])[0]
    )


def test_pp_prop_is_exact_without_memory_under_constant_inputs():
    data, learner = (
        data_of('vanilla'),
        learner_of('vanilla', pp_prop, decay_or_rank=0.6, block=2),
    )
    xs = np.repeat(data.xs[:1], T, axis=0)
    found = learner.etrace_grad(xs, data.ys, step_fn=step_of(learner), reduction='sum')
    wanted = bptt(MODELS['vanilla'].step, data.p, data.s, xs, data.ys, FULL, True)[0]
    same = lambda gradient: gradient['cell', 'W', 'weight']['weight']
    assert_equal(same(found)[:I], same(wanted)[:I])  # what meets the inputs
    assert (
        relative_error(same(found)[I:], same(wanted)[I:]) > 1e-3
    )  # states are not constant


# ---------------------------------------------------------------- windows


def advanced(step, p, s, trace, xs):
    """States and dense trace after some steps."""
    for x in xs:
        _, s, trace = recursion(step, p, s, trace, x, 0.0)
    return s, trace


@functools.partial(jax.jit, static_argnums=0)
def window_credit(step, p, s, xs, ys):
    """Gradient inside a window and γ_0 by exact reverse mode; one loss for all outputs and the last states."""

    def value(p, s):
        outs = []
        for x in xs:
            s, out = step(p, s, x, FULL)
            outs.append(out)
        return loss(p, s, jnp.stack(outs), ys)

    return jax.grad(value, (0, 1))(p, s)


@functools.partial(jax.jit, static_argnums=0)
def one_window(step, p, s, trace, xs, ys):
    """Exact reverse mode inside the window and γ_0 · ε_0 across."""
    gradient, gamma = window_credit(step, p, s, xs, ys)
    across = ravel_pytree(p)[1](ravel_pytree(gamma)[0] @ trace)
    return added(gradient, across), *advanced(step, p, s, trace, xs)


def window_oracle(name, k):
    data = data_of(name)
    s, trace, total = (
        data.s,
        no_trace(data.p, data.s),
        jax.tree.map(jnp.zeros_like, data.p),
    )
    for t in range(0, T, k):
        window = (data.xs[t : t + k], data.ys[t : t + k])
        gradient, s, trace = one_window(MODELS[name].step, data.p, s, trace, *window)
        total = added(total, gradient)
    return total


def window_step_of(learner):
    step_fn = step_of(learner)
    return lambda x, y: step_fn(MultiStepData(x), y)


def windows_of(data, k):
    return [x.reshape(T // k, k, *x.shape[1:]) for x in (data.xs, data.ys)]


@pytest.mark.parametrize(('name', 'k'), [('tied', 1), ('gru', 2), ('tied', 3)])
def test_multi_step_windows(name, k):
    learner, data = learner_of(name, D_RTRL, vjp_method='multi-step'), data_of(name)
    found = step_by_step(learner, *windows_of(data, k), window_step_of(learner))
    assert_equal(found, window_oracle(name, k))


def cut_before_each_step(name):
    """Σ_t of BPTT of the loss of step t through that whole step, and through hand-cut ones before it."""
    data, step = data_of(name), MODELS[name].step

    def value(p):
        s, total = data.s, 0.0
        for x, y in zip(data.xs, data.ys, strict=True):
            new, out = step(p, s, x, FULL)
            total = total + loss(p, new, out, y)
            s, _ = step(p, s, x, LOCAL)
        return total

    return jax.jit(jax.grad(value))(data.p)


@pytest.mark.parametrize(
    'name', ['gru', *(['adaptive_lif', 'tied', 'lstm'] if ALL else [])]
)
def test_multi_step_calls_are_windows_of_one_step(name):
    data = data_of(name)
    make = lambda: learner_of(name, D_RTRL, vjp_method='multi-step')
    wanted = cut_before_each_step(name)
    assert_equal(window_oracle(name, 1), wanted)

    learner = make()
    assert_equal(step_by_step(learner, data.xs, data.ys), wanted)

    learner = make()
    options = {'step_fn': step_of(learner), 'reduction': 'sum'}
    chunks = learner.etrace_grad(data.xs, data.ys, **options, chunk_size=1)
    assert_equal(chunks, wanted)

    learner = make()
    options = {'step_fn': step_of(learner), 'reduction': 'sum'}
    assert_equal(learner.etrace_grad(data.xs, data.ys, **options, fresh=True), wanted)
    learner.reset_state()
    parts = [slice(0, 2), slice(2, T)]
    halves = [
        learner.etrace_grad(data.xs[part], data.ys[part], **options) for part in parts
    ]
    assert_equal(added(*halves), wanted)

    assert relative_error(etrace_grad(name, D_RTRL), wanted) > 1e-3


def test_multi_step_factors_are_windows_of_one_step():
    options = {'decay_or_rank': (0.7, 0.4), 'vjp_method': 'multi-step'}
    learner, data = learner_of('gru', pp_prop, **options), data_of('gru')
    plain = step_by_step(learner, data.xs, data.ys)
    learner = learner_of('gru', pp_prop, **options)
    given = {'step_fn': step_of(learner), 'reduction': 'sum', 'chunk_size': 1}
    chunks = learner.etrace_grad(data.xs, data.ys, **given)
    assert_equal(plain, chunks)
    assert_equal(etrace_grad('gru', pp_prop, **options), chunks)
    assert_equal(etrace_grad('gru', pp_prop, **options, fresh=True), chunks)
    single = etrace_grad('gru', pp_prop, decay_or_rank=(0.7, 0.4))
    assert relative_error(single, chunks) > 1e-3


def test_multi_step_is_kept_by_training_checks_and_plans():
    learner, data, step_fn = small(vjp_method='multi-step')
    weights = lambda: {
        path: state.value for path, state in learner.param_states.items()
    }
    before, wanted = weights(), cut_before_each_step('tied')
    check = learner.gradient_check(data.xs, data.ys, step_fn=step_fn, reduction='sum')
    exact = bptt(MODELS['tied'].step, data.p, data.s, data.xs, data.ys)[0]
    found = sum((row.relative_error * row.norm) ** 2 for row in check.rows)
    distance = ravel_pytree(wanted)[0] - ravel_pytree(exact)[0]
    np.testing.assert_allclose(found, jnp.sum(distance**2), rtol=1e-6)
    assert learner.memory_plan(T).two_pass is None
    given = {'step_fn': step_fn, 'optimizer': optax.sgd(1.0), 'update_every': T}
    learner.etrace_online(data.xs, data.ys, **given)
    assert_equal(jax.tree.map(lambda a, b: a - b, before, weights()), wanted)


def test_windows_across_factors():
    """Reverse mode inside, (γ_0·ε_f) ⊗ ε_x / (1 - α^t) across."""
    data, k, decays = data_of('adaptive_lif'), 2, (0.7, 0.4)
    learner = learner_of(
        'adaptive_lif', pp_prop, decay_or_rank=decays, vjp_method='multi-step'
    )
    found = step_by_step(learner, *windows_of(data, k), window_step_of(learner))
    model, total = FactoredLIF(data, decays), jax.tree.map(np.zeros_like, data.p)
    for xs, ys in zip(*windows_of(data, k), strict=True):
        states = {('V',): model.V, ('a',): model.a}
        gradient, gamma = window_credit(
            MODELS['adaptive_lif'].step, data.p, states, xs, ys
        )
        both = np.stack([gamma['V',], gamma['a',]], -1)
        across = model.named(
            {name: site.of(both) for name, site in model.sites.items()}
        )
        total = added(total, added(jax.device_get(gradient), across))
        for x, y in zip(xs, ys, strict=True):
            model.step(x, y)
    assert_equal(found, total)


def test_single_step_windows_are_the_local_rule():
    (learner, data, _), k = small(), 3
    s, trace, total = (
        data.s,
        no_trace(data.p, data.s),
        jax.tree.map(jnp.zeros_like, data.p),
    )
    for t, xy in enumerate(zip(data.xs, data.ys, strict=True)):
        rest = (
            k if (t + 1) % k == 0 else 0
        )  # the loss reads states and weights at the window's end
        gradient, s, trace = compiled_recursion(
            MODELS['tied'].step, data.p, s, trace, *xy, 1 / k, rest
        )
        total = added(total, gradient)
    assert_equal(
        step_by_step(learner, *windows_of(data, k), window_step_of(learner)), total
    )


def test_chunks_are_multi_step_windows():
    learner, data, _ = small()
    options = {
        'step_fn': window_step_of(learner),
        'chunk_size': 3,
        'return_value': True,
    }
    found, values = learner.etrace_grad(data.xs, data.ys, reduction='sum', **options)
    assert_equal(found, window_oracle('tied', 3))
    assert values.shape == (2,)
    mean, _ = learner.etrace_grad(data.xs, data.ys, fresh=True, **options)
    assert_equal(mean, scaled(found, 1 / 2))


@pytest.mark.parametrize('name', ['gru', 'stack', 'minigru'])
def test_bptt_is_reverse_mode_of_the_unrolled_loop(name):
    assert_equal(etrace_grad(name, BPTT, fresh=True), bptt_oracle(name))


def test_truncated_bptt():
    data, step = data_of('tied'), MODELS['tied'].step
    s, total = data.s, jax.tree.map(np.zeros_like, data.p)
    for t in (0, 4):  # windows of four steps; the second is cut short
        gradient, s = bptt(step, data.p, s, data.xs[t : t + 4], data.ys[t : t + 4])
        total = added(total, gradient)
    assert_equal(etrace_grad('tied', TBPTT, k=4), total)


# ---------------------------------------------------------------- continuing


@pytest.mark.parametrize('kind', [D_RTRL, pp_prop])
def test_two_halves_are_the_whole(kind):
    (whole, data, step_fn, *_), half = (
        shared() if kind is D_RTRL else small(kind),
        T // 2,
    )
    expected = whole.etrace_grad(data.xs, data.ys, step_fn=step_fn, reduction='sum')
    parts, _, step_fn = small(kind)
    found = [
        parts.etrace_grad(data.xs[at], data.ys[at], step_fn=step_fn, reduction='sum')
        for at in (slice(half), slice(half, T))
    ]
    assert_equal(added(*found), expected)
    assert list(parts.traces) == list(whole.traces)
    assert_equal(everything(parts), everything(whole))


def test_traces_are_the_dense_ones():
    learner, data = learner_of('adaptive_lif', D_RTRL), data_of('adaptive_lif')
    learner.etrace_evolve(data.xs)
    trace = local_oracle('adaptive_lif')[2]
    columns = jax.vmap(ravel_pytree(data.p)[1])(
        trace.reshape(2, B, H, -1).reshape(2 * B * H, -1)
    )
    units = np.arange(H)
    dense = np.asarray(columns['w',]).reshape(2, B, H, I, H)[
        :, :, units, :, units
    ]  # (h, s, b, i)
    (mine,) = learner.traces_of(('w',)).values()
    assert_equal(mine, dict(enumerate(dense.transpose(1, 2, 3, 0))))
    assert_equal(
        *map(list, (learner.traces_of(learner.param_states['w',]).values(), [mine]))
    )


# ---------------------------------------------------------------- what goes in and what comes out


def weighted_oracle(mask):
    """Σ_t mask_t gradient_t, and the loss of every step."""
    return by_hand(None, T, mask)[1:]


def by_hand(update, every, mask):
    """A loop in which weights change under a carried trace: weights, last gradient, and the loss of every step."""
    data, step = data_of('tied'), MODELS['tied'].step
    p, s, trace, memory, values = data.p, data.s, no_trace(data.p, data.s), None, []
    for t in range(0, T, every):
        total = jax.tree.map(jnp.zeros_like, p)
        for x, y, m in zip(
            *(v[t : t + every] for v in (data.xs, data.ys, mask)), strict=True
        ):
            new, out = step(p, s, x, FULL)
            values.append(loss(p, new, out, y))
            gradient, s, trace = compiled_recursion(step, p, s, trace, x, y, m)
            total = added(total, gradient)
        if update and mask[t : t + every].any():
            p, memory = update(p, total, memory)
    return p, total, jnp.stack(values)


def scaled(tree, by):
    return jax.tree.map(lambda x: x * by, tree)


MASK = np.array([1.0, 0.0, 2.0, 0.0, 0.5, 1.0])


def test_mask_reduction_and_values():
    total, values = weighted_oracle(MASK)
    learner, data, step_fn, _ = shared()
    options = {'step_fn': step_fn, 'mask': MASK, 'return_value': True}
    gradient, per_step = learner.etrace_grad(
        data.xs, data.ys, reduction='sum', fresh=True, **options
    )
    assert_equal((gradient, per_step), (total, values))
    gradient, reduced = learner.etrace_grad(
        data.xs, data.ys, loss_output='reduced', fresh=True, **options
    )
    assert_equal(
        (gradient, reduced), (scaled(total, 1 / 4.5), (MASK * values).sum() / 4.5)
    )
    learner.reset_state()
    assert_equal(
        learner.etrace_grad(data.xs, data.ys, **options)[0], scaled(total, 1 / 4.5)
    )


def test_a_mean_over_less_than_one_step_is_a_sum():
    mask = np.array([0, 0, 0.25, 0, 0, 0.5])
    learner, data, step_fn, _ = shared()
    gradient = learner.etrace_grad(
        data.xs, data.ys, step_fn=step_fn, mask=mask, fresh=True
    )
    assert_equal(gradient, weighted_oracle(mask)[0])


def test_aux_and_choice_of_weights():
    learner, data, _ = small()

    def step_fn(x, y):
        out = learner(x)
        return jnp.mean((out - y) ** 2), {
            'out': out,
            'h': learner.model.h.value,
            'x': x,
            'one': 1,
        }

    options = {'step_fn': step_fn, 'has_aux': True, 'fresh': True}
    gradient, value, aux = learner.etrace_grad(
        data.xs,
        data.ys,
        weights=[('r',)],
        return_value=True,
        loss_output='reduced',
        **options,
    )
    s, outs, states = data.s, [], []
    for x in data.xs:
        s, out = MODELS['tied'].step(data.p, s, x, FULL)
        outs, states = [*outs, out], [*states, s['h',]]
    assert_equal(
        aux,
        {
            'out': jnp.stack(outs),
            'h': jnp.stack(states),
            'x': data.xs,
            'one': np.ones(T),
        },
    )
    assert_equal(value, jnp.mean((jnp.stack(outs) - data.ys) ** 2))
    assert list(gradient) == [('r',)]
    everything, _ = learner.etrace_grad(data.xs, data.ys, **options)
    assert_equal(gradient['r',], everything['r',])


def test_values_of_other_states_come_along():
    def module(m, x):
        m.h.value = 0.9 * m.h.value + x @ m.w.value
        m.count.value = m.count.value + 1
        m.low.value = 0.5 * m.low.value + m.h.value
        return m.h.value

    states = {
        'count': brainstate.ShortTermState(jnp.zeros(())),
        'low': brainstate.ShortTermState(jnp.zeros((B, H))),
    }
    learner, xs = (
        D_RTRL(Net(module, w=weight(I, H), h=hidden(B, H), **states), block=4),
        data_of('tied').xs,
    )
    learner.model.w.value = jnp.asarray(data_of('tied').p['w',])
    learner.compile_graph(jnp.asarray(xs[0]))

    def step_fn(x):
        out = learner(x)
        return jnp.sum(out**2), (learner.model.count.value, learner.model.low.value)

    _, (count, low) = learner.etrace_grad(xs, step_fn=step_fn, has_aux=True)
    h, expected = 0.0, [np.zeros((B, H))]
    for x in xs:
        h = 0.9 * h + x @ learner.model.w.value
        expected.append(0.5 * expected[-1] + h)
    assert_equal((count, low), (np.arange(1.0, T + 1), jnp.stack(expected[1:])))
    assert_equal(learner.model.low.value, low[-1])


def test_a_penalty_on_weights_alone():
    learner, data, _ = small()

    def step_fn(x, y):
        learner(x)
        return jnp.sum(learner.model.w.value**2)

    for fresh in (True, False):
        gradient = learner.etrace_grad(
            data.xs, data.ys, step_fn=step_fn, mask=MASK, reduction='sum', fresh=fresh
        )
        assert_equal(
            gradient, {('w',): 2 * 4.5 * data.p['w',], ('r',): 0 * data.p['r',]}
        )


def test_sequences_may_be_trees():
    learner, data, step_fn = small()
    tree = {'inputs': [data.xs], 'target': data.ys}
    gradient = learner.etrace_grad(
        tree,
        step_fn=lambda at: step_fn(at['inputs'][0], at['target']),
        fresh=True,
        reduction='sum',
    )
    assert_equal(gradient, local_oracle('tied')[0])


RULES = {
    'two passes': (D_RTRL, {}, {'fresh': True}),
    'one pass': (D_RTRL, {'block': 2}, {}),
    'deep': (D_RTRL, {'reach': 'deep'}, {'fresh': True}),
    'pp_prop': (pp_prop, {}, {}),
    'bptt': (BPTT, {}, {'fresh': True}),
    'tbptt': (TBPTT, {'k': 4}, {}),
}


@pytest.mark.parametrize('rule', RULES)
def test_a_masked_step_poisons_nothing(rule):
    kind, options, call = RULES[rule]
    learner, data, step_fn = small(kind, **options)

    def risky(x, y, z):
        value, h = step_fn(x, y), learner.model.h.value
        return (
            value
            + jnp.log(z) * jnp.sum(h**2)
            + jnp.sum((h / z) @ learner.model.r.value)
        )

    mask, logs = np.array([1.0, 1, 0, 1, 0, 1]), np.array([1.0, 2, -1, 3, 0, 2])
    call = {
        'step_fn': risky,
        'mask': mask,
        'return_value': True,
        'loss_output': 'reduced',
        **call,
    }
    poisoned = learner.etrace_grad(data.xs, data.ys, logs, **call)
    learner.reset_state()
    assert_equal(
        poisoned,
        learner.etrace_grad(data.xs, data.ys, np.where(mask == 0, 1, logs), **call),
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(everything(learner)))


def test_a_masked_chunk_poisons_nothing():
    learner, data, _ = small()

    def risky(x, y, z):
        out = learner(MultiStepData(x))
        return jnp.mean((out - y) ** 2) + jnp.sum(jnp.log(z)) * jnp.sum(out**2)

    mask, logs = np.array([1.0, 0, 1]), np.array([1.0, 2, -1, 3, 3, 2])
    options = {'step_fn': risky, 'mask': mask, 'chunk_size': 2, 'fresh': True}
    poisoned = learner.etrace_grad(data.xs, data.ys, logs, **options)
    assert_equal(
        poisoned, learner.etrace_grad(data.xs, data.ys, np.abs(logs), **options)
    )


def test_two_calls_in_a_step_function_are_two_steps():
    (learner, data, step_fn), once = small(block=2), MODELS['tied'].step
    xs, ys = windows_of(data, 2)

    def twice(p, s, x, cut):
        return once(p, once(p, s, x[0], cut)[0], x[1], cut)

    def both(x, y):
        learner(x[0])
        return step_fn(x[1], y[1])

    found = learner.etrace_grad(xs, ys, step_fn=both, reduction='sum')
    gradient, states, _ = local_rule(twice, data.p, data.s, xs, ys[:, 1])
    assert_equal(found, gradient)
    assert_equal({k: v.value for k, v in learner.hidden_states.items()}, states)
    assert_equal(states, local_oracle('tied')[1])


# ---------------------------------------------------------------- refusals


def refused(kind, *words):
    """An error in three parts that says these words."""
    pattern = r'(?s)' + '.*'.join([*words, 'Why: ', 'Fix: '])
    return pytest.raises(kind, match=pattern)


def test_bad_calls_are_refused():
    learner, data, step_fn = small()
    xs, ys = data.xs, data.ys
    with refused(CompilationError, 'never calls the learner'):
        learner.etrace_grad(
            xs, ys, step_fn=lambda x, y: jnp.mean((learner.model(x) - y) ** 2)
        )
    with refused(CompilationError, 'never calls the learner'):
        learner.etrace_grad(xs, ys, step_fn=lambda x, y: jnp.mean(y**2), chunk_size=2)
    with refused(CompilationError, 'with has_aux=False'):
        learner.etrace_grad(xs, ys, step_fn=lambda x, y: (step_fn(x, y), x))
    with refused(CompilationError, 'with has_aux=True'):
        learner.etrace_grad(xs, ys, step_fn=step_fn, has_aux=True)
    with refused(ValueError, r"weights=\[\('v',\)\]"):
        learner.etrace_grad(xs, ys, step_fn=step_fn, weights=[('w',), ('v',)])
    with refused(ValueError, r'mask of shape \(5,\)'):
        learner.etrace_grad(xs, ys, step_fn=step_fn, mask=np.ones(5))
    with refused(ValueError, r'mask of shape \(6, 2\)'):
        learner.etrace_grad(xs, ys, step_fn=step_fn, mask=np.ones((6, 2)))
    with refused(ValueError, 'sequences of shapes'):
        learner.etrace_grad(xs, ys[:5], step_fn=step_fn)
    with refused(ValueError, 'sequences of shapes'):
        learner.etrace_grad(xs[:0], ys[:0], step_fn=step_fn)
    with refused(ValueError, 'sequences of shapes'):
        learner.etrace_grad(xs, 1.0, step_fn=step_fn)
    with refused(ValueError, '6 steps with chunk_size=4'):
        learner.etrace_grad(xs, ys, step_fn=step_fn, chunk_size=4)
    for every in (0, 1.5):
        with refused(ValueError, f'update_every={every}'):
            learner.etrace_online(
                xs, ys, step_fn=step_fn, optimizer=optax.sgd(0.1), update_every=every
            )
    with refused(CompilationError, 'whose loss is'):
        learner.etrace_grad(xs, ys, step_fn=lambda x, y: learner(x) - y)
    with refused(ValueError, "reduction='total'"):
        learner.etrace_grad(xs, ys, step_fn=step_fn, reduction='total')
    with refused(ValueError, "loss_output='all'"):
        learner.etrace_grad(xs, ys, step_fn=step_fn, loss_output='all')


def test_an_error_while_tracing_changes_nothing():
    learner, data, step_fn, _ = shared()
    learner.etrace_grad(data.xs, data.ys, step_fn=step_fn)
    before = everything(learner)

    def broken(x, y):
        step_fn(x, y)
        raise RuntimeError('in the middle')

    windows = lambda x, y: broken(MultiStepData(x), y)
    runs = {
        'grad': lambda: learner.etrace_grad(data.xs, data.ys, step_fn=broken),
        'fresh': lambda: learner.etrace_grad(
            data.xs, data.ys, step_fn=broken, fresh=True
        ),
        'chunks': lambda: learner.etrace_grad(
            data.xs, data.ys, step_fn=windows, chunk_size=2, fresh=True
        ),
        'online': lambda: learner.etrace_online(
            data.xs, data.ys, step_fn=broken, optimizer=optax.sgd(0.1)
        ),
    }
    for run in runs.values():
        with pytest.raises(Exception, match='in the middle'):
            run()
        assert_equal(everything(learner), before, 0.0)
    learner.etrace_grad(data.xs, data.ys, step_fn=step_fn)  # and it still works


def test_check_finite_names_the_place_and_writes_nothing():
    learner, data, step_fn = small(check_finite=True)
    before = everything(learner)
    one, third = np.ones(T), np.where(np.arange(T) == 3, -1, 1.0)

    def risky(x, y, z, q):
        return (
            step_fn(x, y)
            + jnp.sum(jnp.log(z))
            + jnp.sum(jnp.sqrt(jnp.sum(q) * learner.model.w.value**2))
        )

    def windows(x, *more):
        return risky(MultiStepData(x), *more)

    with pytest.raises(FloatingPointError, match='loss of step 3'):
        learner.etrace_grad(data.xs, data.ys, third, one, step_fn=risky)
    with pytest.raises(FloatingPointError, match='gradient of w'):
        learner.etrace_grad(data.xs, data.ys, one, 0 * one, step_fn=risky)
    with pytest.raises(FloatingPointError, match='loss of window 1'):
        learner.etrace_grad(data.xs, data.ys, third, one, step_fn=windows, chunk_size=2)
    assert_equal(everything(learner), before, 0.0)
    learner.etrace_grad(
        data.xs, data.ys, third, one, step_fn=risky, mask=third > 0
    )  # nobody looks at a masked step


# ---------------------------------------------------------------- compiled once, states followed


def test_nothing_is_traced_twice():
    learner, data, step_fn, traced = counted()
    for mask in (MASK, 1 - MASK):
        for reduction in ('mean', 'sum'):
            learner.etrace_grad(
                data.xs,
                data.ys,
                step_fn=step_fn,
                mask=mask,
                reduction=reduction,
                fresh=True,
            )
            learner.etrace_grad(
                data.xs, data.ys, step_fn=step_fn, mask=mask, reduction=reduction
            )
        learner.reset_state()
    assert len(traced) == 1  # whatever is then asked of it


def test_a_step_is_analysed_once_whatever_is_asked_of_it(monkeypatch):
    learner, data, step_fn, traced = counted()
    analysed = []
    analyse = braintrace.learner.binding.analyse
    monkeypatch.setattr(
        braintrace.learner.binding,
        'analyse',
        lambda program: analysed.append(program) or analyse(program),
    )
    learner.etrace_grad(data.xs, data.ys, step_fn=step_fn, fresh=True)
    learner.etrace_grad(data.xs, data.ys, step_fn=step_fn)
    learner.reset_state()
    learner.etrace_evolve(data.xs, data.ys, step_fn=step_fn)
    learner.gradient_check(data.xs, data.ys, step_fn=step_fn, rules=['d_rtrl', 'rflo'])
    assert len(traced) == len(analysed) == 1


class Restartable(nn.Module):
    """The model `tied`, whose states `init_all_states` makes anew."""

    def __init__(self):
        super().__init__()
        self.w, self.r = (
            brainstate.ParamState(jnp.asarray(data_of('tied').p[name,]))
            for name in 'wr'
        )

    def init_state(self, batch_size=None):
        self.h = hidden(*([] if batch_size is None else [batch_size]), H)

    def update(self, x):
        self.h.value = 0.8 * self.h.value + 0.2 * jnp.tanh(
            x @ self.w.value + self.h.value @ self.r.value
        )
        return self.h.value @ self.r.value


def from_zero(xs, ys):
    zero = {('h',): np.zeros((xs.shape[1], H))}
    return local_rule(MODELS['tied'].step, data_of('tied').p, zero, xs, ys)


def test_states_made_anew_are_followed():
    data, net = data_of('tied'), Restartable()
    learner = braintrace.compile(net, D_RTRL, data.xs[0], batch_size=B)
    step_fn, window, still = step_of(learner), window_step_of(learner), optax.sgd(0.0)
    runs = [
        lambda: learner.etrace_grad(data.xs, data.ys, step_fn=step_fn, reduction='sum'),
        lambda: learner.etrace_grad(data.xs, data.ys, step_fn=window, chunk_size=3),
        lambda: learner.etrace_online(
            data.xs, data.ys, step_fn=step_fn, optimizer=still
        ),
    ]
    expected, states, _ = from_zero(data.xs, data.ys)
    for run in [*runs, *runs]:
        nn.init_all_states(net, batch_size=B)
        learner.reset_state()
        found = run()
        assert_equal(net.h.value, states['h',])
        if run is runs[0]:
            assert_equal(found, expected)


@pytest.mark.parametrize('vmap', [False, True])
def test_another_batch_size(vmap):
    data, net = data_of('tied'), Restartable()
    learner = braintrace.compile(
        net, 'd_rtrl', data.xs[0, 0] if vmap else data.xs[0], batch_size=B, vmap=vmap
    )
    step_fn = step_of(learner)
    learner.reset_state(batch_size=3)
    wide = lambda x: np.concatenate([x, -x[:, :1]], axis=1)
    expected, states, _ = from_zero(wide(data.xs), wide(data.ys))
    assert_equal(
        learner.etrace_grad(
            wide(data.xs), wide(data.ys), step_fn=step_fn, reduction='sum'
        ),
        expected,
    )
    assert_equal(net.h.value, states['h',])


def test_under_jit_and_inside_a_loop():
    learner, data, step_fn = small()
    whole = lambda xs, ys: learner.etrace_grad(xs, ys, step_fn=step_fn, reduction='sum')
    assert_equal(
        brainstate.transform.jit(whole)(data.xs, data.ys), local_oracle('tied')[0]
    )
    learner.reset_state()
    total = lambda: jnp.sum(brainstate.transform.for_loop(step_fn, data.xs, data.ys))
    weights = learner.model.states(brainstate.ParamState)
    assert_equal(
        dict(brainstate.transform.grad(total, weights)()), local_oracle('tied')[0]
    )


def test_a_fresh_sequence_leaves_no_old_trace():
    learner, data, step_fn, _ = shared()
    learner.etrace_grad(data.xs, data.ys, step_fn=step_fn)
    assert any(x.any() for x in jax.tree.leaves(everything(learner)[1]))
    learner.etrace_grad(data.xs, data.ys, step_fn=step_fn, fresh=True)
    assert not any(x.any() for x in jax.tree.leaves(everything(learner)[1]))


@pytest.mark.parametrize(
    ('name', 'kind'), [('adaptive_lif', D_RTRL), ('tied', pp_prop), ('tied', BPTT)]
)
def test_evolving_is_stepping(name, kind):
    one, other, data = (
        learner_of(name, kind, block=4),
        learner_of(name, kind),
        data_of(name),
    )
    outs = one.etrace_evolve(data.xs[:2], return_outputs=True)
    calls = lambda x, scale: {'out': scale * one(x)}
    scales = np.arange(2.0, T)
    more = one.etrace_evolve(data.xs[2:], scales, step_fn=calls, return_outputs=True)
    outs = jnp.concatenate(
        [outs, more['out'] / scales.reshape(-1, *[1] * (outs.ndim - 1))]
    )
    step = brainstate.transform.jit(other)
    assert_equal(outs, jnp.stack([step(x) for x in data.xs]))
    assert_equal(everything(one), everything(other))


# ---------------------------------------------------------------- learning online


def descent(p, gradient, memory):
    return jax.tree.map(lambda w, g: w - 0.3 * g, p, gradient), memory


def adam(p, gradient, memory):
    n, mean, square = memory or (0, scaled(p, 0), scaled(p, 0))
    n += 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, square, gradient)
    move = lambda w, m, v: (
        w - 0.02 * (m / (1 - 0.9**n)) / (jnp.sqrt(v / (1 - 0.999**n)) + 1e-8)
    )
    return jax.tree.map(move, p, mean, square), (n, mean, square)


ALL, GAPS = np.ones(T), np.array([1.0, 1, 0, 0, 1, 0])
ONLINE = {
    'optax sgd': (lambda: optax.sgd(0.3), descent, 1, ALL),
    'optax adam, masked': (lambda: optax.adam(0.02), adam, 1, GAPS),
    'braintools adam, every 2, masked': (
        lambda: braintools.optim.Adam(lr=0.02),
        adam,
        2,
        GAPS,
    ),
}


@pytest.mark.parametrize('case', ONLINE)
def test_online_is_a_loop_by_hand(case):
    make, update, every, mask = ONLINE[case]
    learner, data, step_fn = small()
    found = learner.etrace_online(
        data.xs,
        data.ys,
        step_fn=step_fn,
        optimizer=make(),
        update_every=every,
        mask=mask,
    )
    p, _, values = by_hand(update, every, mask)
    assert_equal({k: v.value for k, v in learner.param_states.items()}, p, 1e-9)
    assert_equal(found, values, 1e-9)
