"""Learners against plain JAX: every rule on every kind of model, to rounding in float64.

A model exists twice: as a brainstate module, and as a plain function ``step(p, s, x, cut) -> (s, out)`` of
dictionaries by path, with the cuts written by hand. ``cut`` says which paths into new states carry no gradient:

    FULL    none: the model itself
    DEEP    from an old state to a new one of another position (in BPTT with this step: ``reach='deep'``)
    LOCAL   also those inside the step: a reset gate through the candidate, a layer into the next

The oracles are written with these functions, `jax.grad` and `jax.jacrev`; they share no code with the package.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import brainstate
import braintools
import braintrace
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from braintrace import BPTT, D_RTRL, TBPTT, CompilationError, MultiStepData, pp_prop
from jax.flatten_util import ravel_pytree
from jax.nn import sigmoid, softplus

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
    """A model twice over, and what its inputs look like."""

    build: Callable[[], nn.Module]
    step: Callable
    inputs: Callable = lambda draw: draw(T, B, I)
    one_group: bool = True


MODELS: dict[str, Model] = {}


def model(**options):
    """Register the decorated function, which gives the module and the plain step, under its own name."""

    def register(function):
        MODELS[function.__name__] = Model(lambda: function()[0], function()[1], **options)
        return function

    return register


def held(cut):
    """Stops on what mixes: of old states, and of values made inside the step."""
    stop = jax.lax.stop_gradient
    return (stop if cut >= DEEP else lambda v: v), (stop if cut == LOCAL else lambda v: v)


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


def hidden(*shape):
    return brainstate.HiddenState(jnp.zeros(shape))


def with_readout(cell):
    nn.init_all_states(cell, batch_size=B)
    return Net(lambda m, x: m.out(m.cell(x)), cell=cell, out=nn.Linear(H, O))


def gru_step(p, s, x, cut, at=('cell',)):
    old, now = held(cut)
    h = s[*at, 'h']
    r, z = jnp.split(sigmoid(affine(p[*at, 'Wrz', 'weight'], join(x, old(h)))), 2, axis=-1)
    candidate = jnp.tanh(affine(p[*at, 'Wh', 'weight'], join(x, now(r) * old(h))))
    return {(*at, 'h'): (1 - z) * h + z * candidate}


def lstm_step(p, s, x, cut, at=('cell',)):
    old, _ = held(cut)
    i, g, f, o = jnp.split(affine(p[*at, 'W', 'weight'], join(x, old(s[*at, 'h']))), 4, axis=-1)
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
    return {('cell', 'h'): jnp.tanh(affine(p['cell', 'W', 'weight'], join(x, old(s['cell', 'h']))))}


def read_out(cell_step):
    def step(p, s, x, cut):
        new = cell_step(p, s, x, cut)
        return new, affine(p['out', 'weight'], new['cell', 'h'])

    return step


@model()
def gru():
    return with_readout(nn.GRUCell(I, H)), read_out(gru_step)


@model()
def lstm():
    return with_readout(nn.LSTMCell(I, H)), read_out(lstm_step)


@model()
def mgu():
    return with_readout(nn.MGUCell(I, H)), read_out(mgu_step)


@model()
def vanilla():
    return with_readout(nn.ValinaRNNCell(I, H, activation='tanh')), read_out(vanilla_step)


@model()
def adaptive_lif():
    """Threshold adaptation, spikes that reset, adapt and recur; a learned time constant."""

    def module(m, x):
        fired = spike(m.V.value - 0.1 - 0.2 * m.a.value)
        m.V.value = 0.9 * m.V.value + x @ m.w.value + fired @ m.r.value + m.b.value - fired
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
    parts = {'w': weight(I, H), 'r': weight(H, H), 'b': weight(H), 'beta': weight(H), 'out': weight(H, O)}
    return Net(module, **parts, **states), step


@model()
def exponential_synapse():
    """The membrane reads the new current in the same step."""

    def module(m, x):
        fired = spike(m.V.value - 0.1)
        m.g.value = sigmoid(m.decay.value) * m.g.value + x @ m.w.value + fired @ m.r.value
        m.V.value = 0.9 * m.V.value + 0.5 * m.g.value - fired
        return spike(m.V.value - 0.1) @ m.out.value

    def step(p, s, x, cut):
        old, _ = held(cut)
        fired = spike(s['V',] - 0.1)
        g = sigmoid(p['decay',]) * s['g',] + x @ p['w',] + old(fired) @ p['r',]
        V = 0.9 * s['V',] + 0.5 * g - fired
        return {('g',): g, ('V',): V}, spike(V - 0.1) @ p['out',]

    states = {'g': hidden(B, H), 'V': hidden(B, H)}
    return Net(module, w=weight(I, H), r=weight(H, H), decay=weight(H), out=weight(H, O), **states), step


@model()
def conductances():
    """Excitation and inhibition that multiply the membrane; weights kept positive by a softplus."""

    def module(m, x):
        fired = spike(m.V.value - 0.1)
        m.ge.value = 0.8 * m.ge.value + (x**2) @ softplus(m.we.value) + fired @ softplus(m.r.value)
        m.gi.value = 0.7 * m.gi.value + jnp.abs(x) @ softplus(m.wi.value)
        current = m.ge.value * (3.0 - m.V.value) + m.gi.value * (-1.0 - m.V.value)
        m.V.value = 0.9 * m.V.value + 0.1 * current - fired
        return spike(m.V.value - 0.1) @ m.out.value

    def step(p, s, x, cut):
        old, _ = held(cut)
        V = s['V',]
        fired = spike(V - 0.1)
        ge = 0.8 * s['ge',] + (x**2) @ softplus(p['we',]) + old(fired) @ softplus(p['r',])
        gi = 0.7 * s['gi',] + jnp.abs(x) @ softplus(p['wi',])
        V = 0.9 * V + 0.1 * (ge * (3.0 - V) + gi * (-1.0 - V)) - fired
        return {('ge',): ge, ('gi',): gi, ('V',): V}, spike(V - 0.1) @ p['out',]

    states = {'ge': hidden(B, H), 'gi': hidden(B, H), 'V': hidden(B, H)}
    return Net(module, we=weight(I, H), wi=weight(I, H), r=weight(H, H), out=weight(H, O), **states), step


@model(one_group=False)
def stack():
    """An LSTM under a GRU of the same size, in a list."""

    def module(m, x):
        return m.out(m.layers[1](m.layers[0](x)))

    def step(p, s, x, cut):
        _, now = held(cut)
        lower = lstm_step(p, s, x, cut, ('layers', 0))
        upper = gru_step(p, s, now(lower['layers', 0, 'h']), cut, ('layers', 1))
        return lower | upper, affine(p['out', 'weight'], upper['layers', 1, 'h'])

    layers = [nn.LSTMCell(I, H), nn.GRUCell(H, H)]
    for layer in layers:
        layer.init_state(B)
    return Net(module, layers=layers, out=nn.Linear(H, O)), step


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
            y = jax.lax.conv_general_dilated(x, p['weight'], (1,), 'SAME', dimension_numbers=numbers)
            return y + p['bias'] if 'bias' in p else y

        fired = spike(s['V',] - 0.1)
        new = 0.9 * s['V',] + conv(p['conv', 'weight'], x) + conv(p['recurrent', 'weight'], old(fired)) - fired
        return {('V',): new}, spike(new - 0.1)

    parts = {'conv': nn.Conv1d((5, 2), 3, 3, b_init=nn.init.ZeroInit()), 'recurrent': nn.Conv1d((5, 3), 3, 3)}
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

    return Net(module, table=nn.Embedding(7, H), r=weight(H, H), out=weight(H, O), h=hidden(B, H)), step


@model()
def tied():
    """One matrix for the recurrence and the read-out."""

    def module(m, x):
        m.h.value = 0.8 * m.h.value + 0.2 * jnp.tanh(x @ m.w.value + m.h.value @ m.r.value)
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

    return Net(module, w=weight(I, H), r=weight(H, H), out=weight(H, O), V=hidden(B, H)), step


@model()
def feedforward_lif():
    def module(m, x):
        m.V.value = 0.9 * m.V.value + x @ m.w.value + m.b.value - spike(m.V.value - 0.1)
        return spike(m.V.value - 0.1) @ m.out.value

    def step(p, s, x, cut):
        V = 0.9 * s['V',] + x @ p['w',] + p['b',] - spike(s['V',] - 0.1)
        return {('V',): V}, spike(V - 0.1) @ p['out',]

    return Net(module, w=weight(I, H), b=weight(H), out=weight(H, O), V=hidden(B, H)), step


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

    return Net(module, log_a=weight(H), b=weight(I, H), c=weight(H, O), d=weight(I, O), h=hidden(B, H)), step


def minigru_step(p, s, x, at):
    z = sigmoid(affine(p[*at, 'Wz', 'weight'], x))
    return (1 - z) * s[*at, 'h'] + z * affine(p[*at, 'Wh', 'weight'], x)


@model()
def minigru():
    def step(p, s, x, cut):
        h = minigru_step(p, s, x, ('cell',))
        return {('cell', 'h'): h}, affine(p['out', 'weight'], h)

    return with_readout(braintrace.nn.MiniGRU(I, H)), step


def in_list(*cells):
    def module(m, x):
        for layer in m.layers:
            x = layer(x)
        return m.out(x)

    for cell in cells:
        cell.init_state(B)
    return Net(module, layers=list(cells), out=nn.Linear(H, O))


@model(one_group=False)
def minigru_stack():
    def step(p, s, x, cut):
        _, now = held(cut)
        lower = minigru_step(p, s, x, ('layers', 0))
        upper = minigru_step(p, s, now(lower), ('layers', 1))
        return {('layers', 0, 'h'): lower, ('layers', 1, 'h'): upper}, affine(p['out', 'weight'], upper)

    return in_list(braintrace.nn.MiniGRU(I, H), braintrace.nn.MiniGRU(H, H)), step


@model(one_group=False)
def lru_stack():
    def layer(p, s, x, at):
        q = {name: p[*at, name] for name in ('nu_log', 'theta_log', 'gamma_log', 'B_re', 'B_im', 'C_re', 'C_im', 'D')}
        decay = jnp.exp(-jnp.exp(q['nu_log']) + 1j * jnp.exp(q['theta_log']))
        state = decay * (s[*at, 're'] + 1j * s[*at, 'im']) + jnp.exp(q['gamma_log']) * (x @ (q['B_re'] + 1j * q['B_im']))
        y = (state @ (q['C_re'] + 1j * q['C_im'])).real + x @ q['D']
        return {(*at, 're'): state.real, (*at, 'im'): state.imag}, y

    def step(p, s, x, cut):
        _, now = held(cut)
        lower, x = layer(p, s, x, ('layers', 0))
        upper, x = layer(p, s, now(x), ('layers', 1))
        return lower | upper, affine(p['out', 'weight'], x)

    return in_list(braintrace.nn.LRUCell(I, H), braintrace.nn.LRUCell(H, H)), step


class Spiking(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.w, self.n = weight(n_in, n_out), n_out

    def init_state(self, batch_size=None):
        self.V = hidden(batch_size, self.n)

    def update(self, x):
        self.V.value = 0.9 * self.V.value + x @ self.w.value - spike(self.V.value - 0.1)
        return spike(self.V.value - 0.1)


@model(one_group=False)
def lif_stack():
    def step(p, s, x, cut):
        _, now = held(cut)
        new = {}
        for k in range(2):
            V = s['layers', k, 'V']
            new['layers', k, 'V'] = V = 0.9 * V + now(x) @ p['layers', k, 'w'] - spike(V - 0.1)
            x = spike(V - 0.1)
        return new, affine(p['out', 'weight'], x)

    return in_list(Spiking(I, H), Spiking(H, H)), step


# ---------------------------------------------------------------- loss, data, learners


def loss(p, s, out, y):
    """An error of the output, and a little of every state and every weight."""
    size = lambda tree: sum(jnp.mean(x**2) for x in jax.tree.leaves(tree))
    return jnp.mean((out - y) ** 2) + 0.2 * size(s) + 0.05 * size(p)


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
    net, draws = MODELS[name].build(), lambda *shape: 0.5 * draw(shape)
    p, s = (
        {path: jax.tree.map(lambda v: draws(*v.shape), state.value) for path, state in net.states(kind).items()}
        for kind in (brainstate.ParamState, brainstate.HiddenState)
    )
    xs = MODELS[name].inputs(draws)
    _, out = MODELS[name].step(p, s, xs[0], FULL)
    return Data(p, s, xs, draws(T, *out.shape))


def learner_of(name, kind, **options):
    """A fresh module with the data's parameters and states, and its learner."""
    data, net = data_of(name), MODELS[name].build()
    for path, state in net.states().items():
        state.value = jax.tree.map(jnp.asarray, {**data.p, **data.s}[path])
    learner = kind(net, **options)
    learner.compile_graph(jnp.asarray(data.xs[0]))
    return learner


def step_of(learner):
    """The step function of a learner with the loss above."""

    def step_fn(x, y):
        out = learner(x)
        p, s = ({k: v.value for k, v in states.items()} for states in (learner.param_states, learner.hidden_states))
        return loss(p, s, out, y)

    return step_fn


def etrace_grad(name, kind, *, fresh=False, reduction='sum', **options):
    """Gradient of the whole sequence from the learner."""
    learner, data = learner_of(name, kind, **options), data_of(name)
    return learner.etrace_grad(data.xs, data.ys, step_fn=step_of(learner), reduction=reduction, fresh=fresh)


def step_by_step(learner, xs, ys, step_fn=None):
    """Σ_t of the gradients under ``brainstate.transform.grad``, each step a compiled call."""
    weights = learner.model.states(brainstate.ParamState)
    step_fn = step_fn or step_of(learner)
    one = brainstate.transform.jit(lambda x, y: brainstate.transform.grad(lambda: step_fn(x, y), weights)())
    return functools.reduce(added, [dict(one(x, y)) for x, y in zip(xs, ys, strict=True)])


def added(a, b):
    return jax.tree.map(jnp.add, a, b)


def assert_equal(a, b, tolerance=1e-10):
    """Trees equal to rounding, each array on the scale of its largest element."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        scale = max(np.abs(np.asarray(y)).max(initial=0), 1e-6)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * scale)


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
    """Gradient of a whole sequence by reverse mode."""
    return jax.grad(lambda p: losses(step, p, s, xs, ys, cut, hold)[0])(p)


def recursion(step, p, s, trace, x, y, weight=1.0):
    """One step of the rule: gradient ∂ℓ/∂θ + (L D + R) ε, the next states, and ε = D ε + ∂h/∂θ, all dense.

    L D + R is the derivative of the loss in the old states when these reach new ones at their own position only;
    D and ∂h/∂θ are those of the local step.
    """
    flat_p, to_p = ravel_pytree(p)
    flat_s, to_s = ravel_pytree(s)

    def value(cut, q, h):
        new, out = step(to_p(q), to_s(h), x, cut)
        return weight * loss(to_p(q), new, out, y)

    def local(q, h):
        return ravel_pytree(step(to_p(q), to_s(h), x, LOCAL)[0])[0]

    direct = jax.grad(lambda q: value(FULL, q, flat_s))(flat_p)
    signal = jax.grad(lambda h: value(DEEP, flat_p, h))(flat_s)
    now, transition = jax.jacrev(local, (0, 1))(flat_p, flat_s)
    return to_p(direct + signal @ trace), step(p, s, x, FULL)[0], transition @ trace + now


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
    return bptt(MODELS[name].step, data.p, data.s, data.xs, data.ys, cut, hold)


# ---------------------------------------------------------------- the local rule

RECURRENT = [
    'gru', 'lstm', 'mgu', 'adaptive_lif', 'exponential_synapse', 'conductances', 'stack', 'recurrent_convolution',
    'embedded', 'tied', 'output_from_old_state',
]  # fmt: skip
POSITION_KEEPING = ['feedforward_lif', 'feedforward_alif', 'diagonal_ssm', 'minigru']


@pytest.mark.parametrize('name', [n for n in RECURRENT if MODELS[n].one_group])
def test_oracle_is_hand_cut_bptt_and_one_step_gradient(name):
    cut = jax.tree.map(jnp.subtract, bptt_oracle(name, LOCAL), bptt_oracle(name, LOCAL, True))
    assert_equal(added(bptt_oracle(name, FULL, True), cut), local_oracle(name)[0])


@pytest.mark.parametrize('block', [1, 2, 4, 6])
@pytest.mark.parametrize('fresh', [True, False], ids=['two passes', 'one pass'])
@pytest.mark.parametrize('name', RECURRENT)
def test_local_rule(name, fresh, block):
    assert_equal(etrace_grad(name, D_RTRL, fresh=fresh, block=block), local_oracle(name)[0])


@pytest.mark.parametrize('name', RECURRENT)
def test_local_rule_step_by_step(name):
    learner, data = learner_of(name, D_RTRL), data_of(name)
    gradient, states, _ = local_oracle(name)
    assert_equal(step_by_step(learner, data.xs, data.ys), gradient)
    assert_equal({k: v.value for k, v in learner.hidden_states.items()}, states)
