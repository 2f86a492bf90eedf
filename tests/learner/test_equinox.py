"""Equinox modules, unmodified: gradients beside those of eqx.filter_grad over a loop, training in its own idiom."""

import os
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace as bt
import formulas

ALL = os.environ.get('ZOO') == 'all'
B, I, H, T = 2, 3, 4, 4  # noqa: E741
KEY = jax.random.key(0)
XS = jax.random.normal(jax.random.key(1), (T, B, I))
CELLS = {
    'gru': lambda: eqx.nn.GRUCell(I, H, key=KEY),
    'lstm': lambda: eqx.nn.LSTMCell(I, H, key=KEY),
}


def close(got, want):
    formulas.close(*(eqx.filter(tree, eqx.is_array) for tree in (got, want)))


def repeated(state):
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (B, *x.shape)), state)


@eqx.filter_jit
def bptt(model, state, xs):
    """The mean loss of a sequence for a model ``model(x, state) -> (out, state)``, differentiated by Equinox."""

    def loss(model):
        total, s = 0.0, repeated(state)
        for x in xs:
            y, s = jax.vmap(model)(x, s)
            total += jnp.mean(y**2)
        return total / len(xs)

    return eqx.filter_grad(loss)(model)


def squared(learner):
    return lambda x: jnp.mean(learner(x) ** 2)


def credits_of(learner):
    return {r.context['name']: r.context['credit'] for r in learner.report.credits}


class Reads(eqx.Module):
    """A cell whose first state is its output."""

    cell: eqx.Module

    def __call__(self, x, state):
        state = self.cell(x, state)
        return jax.tree.leaves(state)[0], state


@pytest.mark.parametrize('name', CELLS)
def test_stock_cells_give_the_gradient_of_bptt(name):
    cell = CELLS[name]()
    zeros = jnp.zeros(H) if name == 'gru' else (jnp.zeros(H), jnp.zeros(H))
    rule = 'rtrl' if ALL or name == 'gru' else 'tbptt'
    learner = bt.compile(cell, rule, XS[0, 0], vmap=True, batch_size=B)
    step = lambda x: jnp.mean(jax.tree.leaves(learner(x))[0] ** 2)
    got = learner.etrace_grad(XS, step_fn=step)
    close(got, bptt(Reads(cell), zeros, XS).cell)
    assert isinstance(got, type(cell))
    assert jax.tree.structure(learner.state) == jax.tree.structure(zeros)
    (group,) = learner.report.hidden_groups
    states = [('state',)] if name == 'gru' else [('state', '0'), ('state', '1')]
    assert set(group.hidden_paths) == set(states)
    names = ['weight_ih', 'weight_hh', 'bias', *(['bias_n'] if name == 'gru' else [])]
    assert credits_of(learner) == dict.fromkeys(names, 'local')


def test_one_sample_without_a_batch():
    cell = CELLS['gru']()
    graph = bt.compile_etrace_graph(cell, XS[0, 0], state=jnp.ones(H))
    assert graph.hidden_groups[0].varshape == (H,)
    close(graph.module_info.jaxpr_call(XS[0, 0])[0], cell(XS[0, 0], jnp.ones(H)))


class Spiking(eqx.Module):
    """Adaptive neurons whose V and adaptation live in an eqx.nn.State, and a read-out."""

    w: jax.Array
    out: eqx.nn.Linear
    neuron: eqx.nn.StateIndex
    steps: eqx.nn.StateIndex
    scale: eqx.nn.StateIndex
    activation: Callable

    def __init__(self, key):
        self.w = jax.random.normal(key, (I, H))
        self.out = eqx.nn.Linear(H, 2, key=key)
        self.activation = jax.nn.sigmoid
        self.neuron = eqx.nn.StateIndex((jnp.zeros(H), jnp.zeros(H)))
        self.steps = eqx.nn.StateIndex(jnp.zeros((), jnp.int32))
        self.scale = eqx.nn.StateIndex(jnp.full(H, 0.9))

    def __call__(self, x, state):
        v, a = state.get(self.neuron)
        a = 0.8 * a + self.activation(4 * (v - 1))
        v = state.get(self.scale) * v + x @ self.w - 0.3 * a
        steps = state.get(self.steps) + 1
        state = state.set(self.neuron, (v, a)).set(self.steps, steps)
        return self.out(v), state


def test_stateful_modules():
    model, state = eqx.nn.make_with_state(Spiking)(KEY)
    learner = bt.compile(
        model, 'd_rtrl', XS[0, 0], state=state, vmap=True, batch_size=B
    )
    (group,) = learner.report.hidden_groups
    assert set(group.hidden_paths) == {('neuron', '0'), ('neuron', '1')}
    assert learner.report.dynamic_states == (('steps',),)
    assert credits_of(learner) == dict.fromkeys(
        ['w', 'out.weight', 'out.bias'], 'exact'
    )
    want = bptt(model, state, XS)
    close(learner.etrace_grad(XS, step_fn=squared(learner)), want)
    assert learner.state.get(model.steps).tolist() == [T] * B
    learner.reset_state(batch_size=5)
    assert learner(jnp.ones((5, I))).shape == (5, 2)
    assert learner.state.get(model.neuron)[0].shape == (5, H)


def test_training_as_in_equinox():
    model, state = eqx.nn.make_with_state(Spiking)(KEY)
    learner = bt.compile(
        model, 'd_rtrl', XS[0, 0], state=state, vmap=True, batch_size=B
    )
    optimizer = optax.sgd(0.05)
    memory = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    step, start = squared(learner), model

    def train(model, memory, xs, **options):
        grads, loss = learner.etrace_grad(
            xs, step_fn=step, fresh=True, return_value=True, **options
        )
        updates, memory = optimizer.update(
            grads, memory, eqx.filter(model, eqx.is_inexact_array)
        )
        return eqx.apply_updates(model, updates), memory, loss.mean()

    losses = []
    for _ in range(10):
        model, memory, loss = train(model, memory, XS)
        learner.params = model
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    close(learner.params, model)
    close(
        jax.vmap(learner.params)(XS[0], repeated(state))[0],
        jax.vmap(model)(XS[0], repeated(state))[0],
    )

    compiled = eqx.filter_jit(
        lambda model, memory, xs: train(model, memory, xs, params=model)
    )
    again, memory = start, optimizer.init(eqx.filter(start, eqx.is_inexact_array))
    for want in losses:
        again, memory, loss = compiled(again, memory, XS)
        np.testing.assert_allclose(loss, want, rtol=1e-3)
    close(learner.params, model)  # a call with weights of its own changes nothing

    with pytest.raises(bt.CompilationError, match='inside jit'):
        jax.jit(lambda x: learner(x))(XS[0])
    online = learner.etrace_online(XS, step_fn=step, optimizer=optax.sgd(0.1))
    assert online.shape == (T,)
    assert float(jnp.abs(learner.params.out.bias - model.out.bias).max()) > 0
    other = eqx.tree_at(lambda m: m.activation, model, jnp.tanh)
    with pytest.raises(ValueError, match='more than its parameters'):
        learner.params = other


class Dropping(eqx.Module):
    cell: eqx.nn.GRUCell
    drop: eqx.nn.Dropout

    def __call__(self, x, h, *, key):
        h = self.cell(x, h)
        return self.drop(h, key=key), h


def test_keys_are_inputs():
    model = Dropping(CELLS['gru'](), eqx.nn.Dropout(0.5))
    learner = bt.compile(
        model, 'd_rtrl', XS[0, 0], KEY, state=jnp.zeros(H), vmap=True, batch_size=B
    )
    keys = jax.random.split(KEY, (T, B))
    outs = learner.etrace_evolve(XS, keys, return_outputs=True)
    h, want = jnp.zeros((B, H)), []
    for x, k in zip(XS, keys, strict=True):
        y, h = jax.jit(jax.vmap(lambda x, h, k: model(x, h, key=k)))(x, h, k)
        want.append(y)
    close(outs, jnp.stack(want))
    assert float((outs == 0).mean()) > 0.1


class Normed(eqx.Module):
    cell: eqx.nn.GRUCell
    norm: eqx.nn.BatchNorm

    def __init__(self):
        self.cell = CELLS['gru']()
        self.norm = eqx.nn.BatchNorm(H, 'batch', mode='batch')

    def __call__(self, x, state):
        h, statistics = state
        h = self.cell(x, h)
        y, statistics = self.norm(h, statistics)
        return y, (h, statistics)


def test_statistics_go_on():
    model, state = eqx.nn.make_with_state(Normed)()
    learner = bt.compile(
        model, 'd_rtrl', XS[0, 0], state=(jnp.zeros(H), state), vmap=True, batch_size=B
    )
    (group,) = learner.report.hidden_groups
    assert group.hidden_paths == [('state', '0')]
    assert all(path[0] == 'norm' for path in learner.report.dynamic_states)
    grads = learner.etrace_grad(
        XS, step_fn=lambda x: jnp.mean((learner(x) - 1) ** 2), fresh=True
    )
    assert float(jnp.abs(grads.norm.weight).max()) > 0
    before = jax.tree.leaves(learner.state[1])
    learner.reset_state()
    close(jax.tree.leaves(learner.state[1]), before)
    assert float(jnp.abs(learner.state[0]).max()) == 0


def test_states_in_a_list():
    class Line(eqx.Module):
        line: list
        w: jax.Array

        def __init__(self):
            self.line = [eqx.nn.StateIndex(jnp.zeros(H)) for _ in range(2)]
            self.w = jax.random.normal(KEY, (I, H))

        def __call__(self, x, state):
            first, second = self.line
            late = state.get(second)
            state = state.set(second, state.get(first))
            return late, state.set(first, jnp.tanh(x @ self.w))

    model, state = eqx.nn.make_with_state(Line)()
    with pytest.warns(bt.CreditWarning, match='dictionary'):
        learner = bt.compile(model, 'd_rtrl', XS[0, 0], state=state)
    assert len(learner.graph.hidden_groups) == 2

    class Carried(eqx.Module):
        w: jax.Array

        def __call__(self, x, state):
            first, second = state
            return second, [jnp.tanh(x @ self.w), first]

    model, state = Carried(model.w), [jnp.zeros(H)] * 2
    learner = bt.compile(
        model, 'd_rtrl', XS[0, 0], state=state, vmap=True, batch_size=B
    )
    assert credits_of(learner) == {'w': 'exact'}
    got = learner.etrace_grad(XS, step_fn=squared(learner), reduction='mean')
    close(got, bptt(model, state, XS))


BAD = {
    'no state': (
        lambda: (Reads(CELLS['gru']()), XS[0, 0], {}),
        r'no state(.|\n)*state=state0',
    ),
    'a state among the inputs': (
        lambda: (Reads(CELLS['gru']()), XS[0, 0], jnp.zeros(H), {}),
        r'2 example(.|\n)*state=',
    ),
    'another state': (
        lambda: (CELLS['lstm'](), XS[0, 0], {'state': [jnp.zeros(H)] * 2}),
        r'returns(.|\n)*state',
    ),
    'another type': (
        lambda: (CELLS['gru'](), XS[0, 0], {'state': jnp.zeros(H, jnp.float16)}),
        r'state from float16',
    ),
    'a batch': (
        lambda: (CELLS['gru'](), XS[0], {}),
        r'a step of GRUCell(.|\n)*vmap=True',
    ),
    'no batch size': (
        lambda: (CELLS['gru'](), XS[0, 0], {'vmap': True}),
        'without a batch size',
    ),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_modules(name):
    make, why = BAD[name]
    *args, options = make()
    with pytest.raises((bt.CompilationError, ValueError), match=why):
        bt.compile(args[0], 'd_rtrl', *args[1:], **options)
