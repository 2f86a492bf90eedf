"""Traces that are visited by a kernel have the numbers of the plain path."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace.operations import whole_traces
from braintrace.operations.kernels import cpu

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
    traces = {path: learner.traces_of(path) for path in weights}
    return jax.tree.map(np.asarray, (losses, weights, traces))


@pytest.mark.parametrize(('model', 'samples'), [(Adaptive, 3), (Gated, None)])
def test_a_kernel_gives_the_numbers_of_the_plain_path(model, samples, monkeypatch):
    calls = []
    visit = cpu.dense_visit
    counted = lambda *given: calls.append(given[5:]) or visit(*given)
    monkeypatch.setattr(cpu, 'dense_visit', counted)
    plain = trained(model, samples)
    assert not calls
    monkeypatch.setattr(whole_traces, 'LEAST_FOR_KERNEL', 1)
    by_kernel = trained(model, samples)
    assert {x for x, _ in calls} == ({True, False} if model is Adaptive else {True})
    # Of the gates only a part has a trace, so their one-step gradient is apart.
    summed = {y_bar is not None for _, y_bar in calls}
    assert summed == ({True} if model is Adaptive else {True, False})
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
        traces = [learner.traces_of(path) for path in learner.param_states]
        return jax.tree.leaves(jax.tree.map(np.asarray, (found, traces)))

    plain = carried()
    monkeypatch.setattr(whole_traces, 'LEAST_FOR_KERNEL', 1)
    by_kernel = carried()
    for a, b in zip(plain, by_kernel, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(a).max())


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('components', [1, 2, 3])
@pytest.mark.parametrize('density', [0.0, 0.2, 0.8])
@pytest.mark.parametrize('sizes', [(1, 1, 1, 1), (5, 3, 6, 20), (9, 2, 37, 213)])
def test_a_visit_after_many_steps(sizes, density, components, dtype):
    """The formula, written out by NumPy: numbers of inputs and outputs that the kernel
    takes one by one, sixteen or more at a time; inputs that are seldom or mostly zero,
    and some that never are. Zeros are skipped where there are many outputs."""
    steps, samples, inputs, outputs = sizes
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(size=shape).astype(dtype)
    is_zero = random.random((steps, samples, inputs)) > density
    is_zero[..., : inputs // 3] = False
    x = np.where(is_zero, 0, draw(steps, samples, inputs))
    every = range(components)
    trace = {s: draw(samples, inputs, outputs) for s in every}
    rows = {s: draw(steps, samples, outputs) for s in every if s != 1}
    pairs = [(s, r) for s in every for r in every if r <= s]
    factors = {pair: draw(samples, outputs) for pair in pairs}
    credit = {s: draw(samples, outputs) for s in every if s != 2}
    with jax.enable_x64(dtype == 'float64'):
        given = jax.tree.map(jnp.asarray, (trace, x, rows, factors, credit))
        new, gradient = jax.jit(cpu.span_visit)(*given)
        new, gradient = jax.tree.map(np.asarray, (new, gradient))
    beside = lambda value: value[:, None, :]
    wanted = sum(beside(credit[s]) * trace[s] for s in credit).sum(axis=0)
    tolerance = 3e-5 if dtype == 'float32' else 1e-12
    np.testing.assert_allclose(gradient, wanted, rtol=0, atol=tolerance)
    for s in every:
        wanted = sum(beside(factors[s, r]) * trace[r] for r in every if r <= s)
        if s in rows:
            wanted = wanted + np.einsum('tnc,tnf->ncf', x, rows[s])
        assert new[s].dtype == dtype
        np.testing.assert_allclose(new[s], wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize('outputs', [4, 150])
def test_a_visit_after_many_steps_keeps_nan(outputs):
    x = jnp.zeros((3, 1, 8)).at[1, 0, 2].set(jnp.nan)
    ones = {0: jnp.ones((3, 1, outputs))}
    trace = {0: jnp.zeros((1, 8, outputs))}
    factors = {(0, 0): jnp.ones((1, outputs))}
    new, _ = cpu.span_visit(trace, x, ones, factors, {})
    assert np.isnan(new[0][0, 2]).all()
    assert np.isfinite(np.delete(new[0][0], 2, axis=0)).all()


@pytest.mark.parametrize('model', [Adaptive, Gated])
def test_carried_traces_by_a_kernel(model, monkeypatch):
    """Two sequences, of which the second continues the traces of the first."""
    random = np.random.default_rng(1)
    xs = jnp.asarray(random.normal(size=(40, 3, INPUTS)), 'float32')
    xs = xs.at[:, :, 1].set(xs[:, :, 1] > 1)
    calls = []

    def carried():
        brainstate.random.seed(0)
        learner = braintrace.compile(model(3), 'd_rtrl', xs[0], batch_size=3)
        step_fn = lambda x: jnp.mean(learner(x) ** 2)
        parts = (xs[:20], xs[20:])
        found = [learner.etrace_grad(part, step_fn=step_fn) for part in parts]
        traces = [learner.traces_of(path) for path in learner.param_states]
        return jax.tree.leaves(jax.tree.map(np.asarray, (found, traces)))

    plain = carried()
    visit = cpu.span_visit
    counted = lambda *given: calls.append(1) or visit(*given)
    monkeypatch.setattr(cpu, 'span_visit', counted)
    monkeypatch.setattr(whole_traces, 'LEAST_FOR_KERNEL', 1)
    by_kernel = carried()
    assert calls
    for a, b in zip(plain, by_kernel, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * np.abs(a).max())
