"""Flax NNX modules, unmodified: gradients beside those of nnx.grad over a loop, and training in its own idiom."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import braintrace as bt

B, I, H, T = 2, 3, 4, 4  # noqa: E741
XS = jax.random.normal(jax.random.key(1), (T, B, I))
CELLS = {
    'gru': lambda: nnx.GRUCell(I, H, rngs=nnx.Rngs(0)),
    'lstm': lambda: nnx.LSTMCell(I, H, rngs=nnx.Rngs(0)),
    'optimized lstm': lambda: nnx.OptimizedLSTMCell(I, H, rngs=nnx.Rngs(0)),
    'simple': lambda: nnx.SimpleCell(I, H, rngs=nnx.Rngs(0)),
    'residual': lambda: nnx.SimpleCell(I, H, residual=True, rngs=nnx.Rngs(0)),
}


def close(got, want, rtol=1e-4):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), got, want)


def bptt(model, xs, carry=None):
    """The mean loss of a sequence, differentiated by nnx."""

    def loss(model):
        total, c = 0.0, carry
        for x in xs:
            c, y = (c, model(x)) if carry is None else model(c, x)
            total += jnp.mean(y**2)
        return total / len(xs)

    return nnx.grad(loss)(model)


def squared(learner):
    return lambda x: jnp.mean(learner(x) ** 2)


def credits_of(learner):
    return {r.context['name']: r.context['credit'] for r in learner.report.credits}


@pytest.mark.parametrize('name', CELLS)
def test_stock_cells_give_the_gradient_of_bptt(name):
    cell = CELLS[name]()
    learner = bt.compile(cell, 'rtrl', XS[0])
    want = bptt(cell, XS, cell.initialize_carry((B, I), nnx.Rngs(0)))
    close(learner.etrace_grad(XS, step_fn=squared(learner)), want)
    later = bptt(cell, XS, learner.state)
    assert float(jnp.abs(jax.tree.leaves(later)[0]).max()) > 1e-3


@pytest.mark.parametrize('name', ['gru', 'lstm', 'optimized lstm', 'residual'])
def test_reports_name_variables_as_flax_does(name):
    cell = CELLS[name]()
    graph = bt.compile_etrace_graph(cell, XS[0])
    states = {'carry.0', 'carry.1'} if 'lstm' in name else {'carry'}
    (group,) = graph.hidden_groups
    assert {'.'.join(p) for p in group.hidden_paths} == states
    paths = {'.'.join(path) for path, _ in nnx.to_flat_state(nnx.state(cell, nnx.Param))}
    found = {r.context['name']: r.context['credit'] for r in graph.report.credits}
    assert found == dict.fromkeys(paths, 'local')
    out, new, _ = graph.module_info.jaxpr_call(XS[0])
    carry, want = cell(cell.initialize_carry((B, I), nnx.Rngs(0)), XS[0])
    close([out, jax.tree.leaves(new)], [want, jax.tree.leaves(carry)])
    zeros = graph.hidden_perturb.init_perturb_data()
    close(graph.call_hidden_perturb((XS[0],), zeros), want)


def test_d_rtrl_of_a_cell_without_memory_of_its_own_is_one_step():
    """tanh(W x + U h): h reaches itself through U only, so every step counts for itself."""
    cell = CELLS['simple']()
    learner = bt.compile(cell, 'd_rtrl', XS[0])
    assert set(credits_of(learner).values()) == {'instantaneous'}
    carry, total = jnp.zeros((B, H)), jax.tree.map(jnp.zeros_like, nnx.state(cell, nnx.Param))
    for x in XS:
        step = nnx.grad(lambda cell, x=x, carry=carry: jnp.mean(cell(carry, x)[1] ** 2))(cell)
        total = jax.tree.map(lambda a, b: a + b / T, total, step)
        carry, _ = cell(carry, x)
    close(learner.etrace_grad(XS, step_fn=squared(learner)), total)


class Membrane(nnx.Variable):
    pass


class Spiking(nnx.Module):
    """Adaptive neurons that keep V, adaptation and a count of steps in Variables of their own, and a read-out."""

    def __init__(self, rngs, drop=0.0):
        self.dense = nnx.Linear(I, H, rngs=rngs)
        self.out = nnx.Linear(H, 2, rngs=rngs)
        self.decay = nnx.Param(jnp.full(H, 0.9))
        self.V = Membrane(jnp.zeros((B, H)))
        self.a = nnx.Variable(jnp.zeros((B, H)))
        self.steps = nnx.Variable(jnp.zeros((), jnp.int32))
        self.scale = nnx.Variable(jnp.full(H, 2.0))
        self.drop = nnx.Dropout(drop, rngs=rngs)

    def __call__(self, x):
        spike = jax.nn.sigmoid(4 * (self.V[...] - 1))
        self.a[...] = 0.8 * self.a[...] + spike
        self.V[...] = self.decay[...] * self.V[...] + self.scale[...] * self.dense(x) - 0.3 * self.a[...]
        self.steps[...] += 1
        return self.out(self.drop(self.V[...]))


def test_states_in_variables():
    model = Spiking(nnx.Rngs(0))
    learner = bt.compile(model, 'd_rtrl', XS[0])
    (group,) = learner.report.hidden_groups
    assert set(group.hidden_paths) == {('V',), ('a',)}
    assert learner.report.dynamic_states == (('steps',),)
    names = ['decay', 'dense.bias', 'dense.kernel', 'out.bias', 'out.kernel']
    assert credits_of(learner) == dict.fromkeys(names, 'exact')
    want = bptt(Spiking(nnx.Rngs(0)), XS)
    for fresh in (True, False):
        close(learner.etrace_grad(XS, step_fn=squared(learner), fresh=fresh), want)
        assert int(model.steps[...]) == T * (2 - fresh)
        learner.reset_state()
        assert int(model.steps[...]) == 0
        if fresh:
            learner.etrace_evolve(XS)  # states go on from here, traces too
            want = bptt_after(XS)


def bptt_after(xs):
    """The gradient of a second pass over the sequence, credit reaching back into the first."""

    def loss(model):
        for x in xs:
            model(x)
        return sum(jnp.mean(model(x) ** 2) for x in xs) / len(xs)

    return nnx.grad(loss)(Spiking(nnx.Rngs(0)))
