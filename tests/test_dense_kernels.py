"""Single steps by a kernel give the numbers of the plain path."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace.operations import dense_kernels, weight_use

INPUTS, UNITS, T = 3, 5, 6


class Adaptive(brainstate.nn.Module):
    """Two states a unit; the recurrent weight is stored with its outputs first."""

    def __init__(self, samples):
        super().__init__()
        self.samples = samples
        draw = lambda *shape: 0.5 * brainstate.random.normal(size=shape)
        self.feed = brainstate.ParamState(draw(INPUTS, UNITS))
        self.recur = brainstate.ParamState(draw(UNITS, UNITS))
        self.readout = brainstate.nn.Linear(UNITS, 2)

    def init_state(self, batch_size=None, **kwargs):
        shape = (UNITS,) if self.samples is None else (self.samples, UNITS)
        self.V = brainstate.HiddenState(jnp.zeros(shape))
        self.a = brainstate.HiddenState(jnp.zeros(shape))

    def update(self, x):
        V, a = self.V.value, self.a.value
        rate = jnp.tanh(V - 0.3 * a)
        drive = jnp.einsum('...i,oi->...o', rate, self.recur.value)
        self.V.value = 0.9 * V + x @ self.feed.value + drive - 0.2 * rate
        self.a.value = 0.8 * a + rate
        return self.readout(jnp.tanh(self.V.value - 0.3 * self.a.value))


class Gated(brainstate.nn.Module):
    """One state a unit; only a part of the fused gates has a trace."""

    def __init__(self, samples):
        super().__init__()
        self.cell = brainstate.nn.GRUCell(INPUTS, UNITS)
        self.readout = brainstate.nn.Linear(UNITS, 2)

    def update(self, x):
        return self.readout(self.cell(x))


def trained(model, samples):
    """Losses, weights and traces after some steps with an update at each."""
    brainstate.random.seed(0)
    net = model(samples)
    random = np.random.default_rng(1)
    shape = (T,) if samples is None else (T, samples)
    xs = jnp.asarray(random.normal(size=(*shape, INPUTS)), 'float32')
    ys = jnp.asarray(random.normal(size=(*shape, 2)), 'float32')
    options = {} if samples is None else {'batch_size': samples}
    learner = braintrace.compile(net, 'd_rtrl', xs[0], **options)
    step_fn = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    options = {'step_fn': step_fn, 'optimizer': optax.sgd(0.1)}
    losses = learner.etrace_online(xs, ys, **options)
    weights = {path: state.value for path, state in learner.param_states.items()}
    traces = {path: learner.get_etrace_of(path) for path in weights}
    return jax.tree.map(np.asarray, (losses, weights, traces))


@pytest.mark.parametrize(('model', 'samples'), [(Adaptive, 3), (Gated, None)])
def test_a_kernel_gives_the_numbers_of_the_plain_path(model, samples, monkeypatch):
    calls = []
    visit = dense_kernels.visit
    counted = lambda *given: calls.append(given[-1]) or visit(*given)
    monkeypatch.setattr(dense_kernels, 'visit', counted)
    plain = trained(model, samples)
    assert not calls
    monkeypatch.setattr(weight_use, 'LEAST_FOR_KERNEL', 1)
    by_kernel = trained(model, samples)
    assert set(calls) == ({True, False} if model is Adaptive else {True})
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(by_kernel), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    assert any(np.abs(x).max() > 0.1 for x in jax.tree.leaves(by_kernel[2]))


class Convolution(brainstate.nn.Module):
    """One state a place, behind a convolution with a stride."""

    def __init__(self, samples):
        super().__init__()
        self.samples = samples
        self.conv = brainstate.nn.Conv2d((6, 5, 2), 3, (3, 2), stride=(2, 1))

    def init_state(self, batch_size=None, **kwargs):
        self.V = brainstate.HiddenState(jnp.zeros((self.samples, *self.conv.out_size)))

    def update(self, x):
        V = self.V.value
        self.V.value = 0.9 * V + self.conv(x) - 0.3 * jnp.tanh(V)
        return self.V.value


def test_traces_of_filters_by_a_kernel(monkeypatch):
    random = np.random.default_rng(1)
    xs = jnp.asarray(random.normal(size=(14, 2, 6, 5, 2)), 'float32')

    def carried():
        brainstate.random.seed(0)
        learner = braintrace.compile(Convolution(2), 'd_rtrl', xs[0], batch_size=2)
        step_fn = lambda x: jnp.mean(learner(x) ** 2)
        found = [
            learner.etrace_grad(part, step_fn=step_fn) for part in (xs[:7], xs[7:])
        ]
        traces = [learner.get_etrace_of(path) for path in learner.param_states]
        return jax.tree.leaves(jax.tree.map(np.asarray, (found, traces)))

    plain = carried()
    monkeypatch.setattr(weight_use, 'LEAST_FOR_KERNEL', 1)
    by_kernel = carried()
    for a, b in zip(plain, by_kernel, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(a).max())
