"""Loops of unknown length inside a step, and hidden states that a step only reads.

Steps with loops are cases of `test_table`, the loops themselves of
`unit/program/test_loops.py`. The oracle is forward mode of JAX through its own ``while_loop``.
"""

import pathlib

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import braintrace
from braintrace.graph.diagnostics import DiagnosticKind, DiagnosticLevel
from formulas import assert_equal, plain_gradient
from gradients.cases import compiled, oracle_of, reverse_spike

T, B, N, H = 6, 3, 2, 4


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


XS, YS = normal(10, T, B, N), normal(11, T, B, 2)


@jax.custom_jvp
def smooth_spike(v):
    """`reverse_spike` for both modes."""
    return (v > 0).astype(v.dtype)


smooth_spike.defjvp(lambda p, t: (smooth_spike(p[0]), t[0] / (1 + jnp.abs(p[0])) ** 2))


def near(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 2e-4, 1e-5), a, b)


# ---------------------------------------------------------------- steps with loops


def gradient(step, params, rule='d_rtrl'):
    """A learner, its loss, its gradient, and that of forward mode through JAX's own loops."""
    learner = braintrace.compile(step, rule, params, STATE, XS[0])
    loss = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    found = learner.etrace_grad(XS, YS, step_fn=loss, fresh=True)
    wanted = lambda: plain_gradient(step, params, STATE, XS, YS, derivative=jax.jacfwd)
    return learner, loss, found, wanted


PARAMS = {'w': normal(1, N, H), 'v': normal(2, H) + 0.5, 'out': normal(3, H, 2)}
STATE = {'h': normal(5, B, H)}


def test_the_report_has_the_size_of_the_state_and_not_of_the_counter(x64):
    learner, _ = compiled('weights_in_a_loop', 'd_rtrl')
    (line,) = [x for x in str(learner.report).splitlines() if ' loop ' in x]
    assert '→ 2×4' in line
    assert not learner.graph.explain(kind=DiagnosticKind.NOT_DIFFERENTIABLE)


@pytest.mark.parametrize('name', ['loop_before_the_state', 'recurrence_in_a_loop'])
def test_a_model_of_one_sample_is_mapped(name, x64):
    """Each sample has its own number of rounds."""
    o = oracle_of(name, mapped=True)
    for rule in ('bptt', 'd_rtrl') if o.case.exact else ('bptt',):
        learner, step = compiled(name, rule, mapped=True)
        given = {'step_fn': step, 'reduction': 'sum', 'fresh': True}
        assert_equal(learner.etrace_grad(o.xs, o.ys, **given), o.bptt())


def spiking(fire):
    def step(p, s, x):
        def body(c):
            k, v = c
            return k + 1, 0.9 * v - 0.1 * fire(v - 0.2) + 0.3 * (x @ p['w'])

        rounds = 2 + (x.sum() > 0).astype(jnp.int32)
        _, h = jax.lax.while_loop(lambda c: c[0] < rounds, body, (0, s['h']))
        return {'h': h}, fire(h * p['v']) @ p['out']

    return step


@pytest.mark.parametrize('rule', ['d_rtrl', 'rtrl'])
def test_spikes_with_a_reverse_rule_inside_a_loop(rule):
    learner, loss, found, _ = gradient(spiking(reverse_spike), PARAMS, rule)
    near(found, gradient(spiking(smooth_spike), PARAMS)[3]())
    certificate = learner.certificate(XS, YS, step_fn=loss)
    np.testing.assert_allclose(certificate.descent, 1, atol=1e-4)


def test_the_certificate_follows_loops(x64):
    learner, step = compiled('recurrence_in_a_loop', 'd_rtrl')
    o = oracle_of('recurrence_in_a_loop')
    given = {'step_fn': step, 'reduction': 'sum'}
    flat = lambda tree: ravel_pytree(tree)[0]
    found = flat(learner.etrace_grad(o.xs, o.ys, fresh=True, **given))
    expected = flat(o.bptt()) @ found / (found @ found)
    certificate = learner.certificate(o.xs, o.ys, directions=0, **given)
    np.testing.assert_allclose(certificate.descent, expected, rtol=1e-9)
    assert abs(expected - 1) > 1e-3


# ---------------------------------------------------------------- no credit wanted


def test_loops_without_credit_keep_working():
    """Whole numbers, and what gradients are stopped for: exact, and no diagnostic."""

    def step(p, s, x):
        h = 0.9 * s['h'] + x @ p['w']
        halve = lambda c: (c[0] + 1, c[1] / 2)
        large = lambda c: c[1] > 0.5
        count, _ = jax.lax.while_loop(large, halve, (0, jnp.abs(h).sum()))
        level = jax.lax.stop_gradient(jnp.abs(h).sum())
        _, rest = jax.lax.while_loop(large, halve, (0, level))
        return {'h': h}, (h @ p['out']) / (1 + count) + rest

    params = {k: PARAMS[k] for k in ('w', 'out')}
    learner, _, found, wanted = gradient(step, params)
    near(found, wanted())
    assert not learner.graph.explain(kind=DiagnosticKind.NOT_DIFFERENTIABLE)
    assert {r.context['credit'] for r in learner.graph.report.credits} == {'exact'}


def printing(stopped):
    def step(p, s, x):
        def body(v):
            jax.debug.print('{}', v[0, 0])
            return v / 2

        h = 0.9 * s['h'] + x @ p['w']
        given = jax.lax.stop_gradient(h) if stopped else h
        rest = jax.lax.while_loop(lambda v: jnp.abs(v).sum() > 1, body, given)  # here
        return {'h': h + rest}, h @ p['out']

    return step


def test_a_loop_that_prints_is_refused_by_its_line():
    params = {k: PARAMS[k] for k in ('w', 'out')}
    with pytest.raises(braintrace.CompilationError) as error:
        braintrace.compile(printing(False), 'd_rtrl', params, STATE, XS[0])
    lines = pathlib.Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.endswith('# here'))
    assert f'test_loops.py:{line}' in str(error.value)
    braintrace.compile(printing(True), 'd_rtrl', params, STATE, XS[0])


# ---------------------------------------------------------------- constant hidden states


class Tonic(brainstate.nn.Module):
    """A leaky unit with a drive that is a hidden state and never changes."""

    def __init__(self, kind=brainstate.HiddenState):
        super().__init__()
        self.kind = kind
        self.w = brainstate.ParamState(normal(1, N, H))
        self.gain = brainstate.ParamState(normal(2, H))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, H)))
        self.drive = self.kind(jnp.ones((batch_size, H)) * jnp.arange(H))

    def update(self, x):
        drive = self.drive.value * self.gain.value
        self.h.value = 0.9 * self.h.value + x @ self.w.value + 0.1 * drive
        return self.h.value


@pytest.mark.parametrize('rule', ['d_rtrl', 'pp_prop', 'rtrl', 'bptt'])
def test_a_hidden_state_that_is_only_read_is_a_constant(rule):
    gradients = []
    for kind in (brainstate.HiddenState, brainstate.ShortTermState):
        learner = braintrace.compile(Tonic(kind), rule, XS[0], batch_size=B)
        loss = lambda x, learner=learner: jnp.mean(learner(x) ** 2)
        gradients.append(learner.etrace_grad(XS, step_fn=loss, fresh=True))
        assert [g.hidden_paths for g in learner.graph.hidden_groups] == [[('h',)]]
        found = learner.graph.explain(kind=DiagnosticKind.CONSTANT_STATE)
        assert len(found) == (kind is brainstate.HiddenState)
    near(gradients[0], gradients[1])
    assert all(float(jnp.abs(g).max()) > 0 for g in gradients[0].values())


def test_the_notice_names_the_state():
    learner = braintrace.compile(Tonic(), 'd_rtrl', XS[0], batch_size=B)
    (record,) = learner.graph.explain(kind=DiagnosticKind.CONSTANT_STATE)
    assert record.level is DiagnosticLevel.NOTICE
    assert record.message.startswith('drive is read and never written')
    assert 'drive is read and never written' in str(learner.report)
    learner.reset_state(batch_size=B + 1)
    xs = normal(12, T, B + 1, N)
    loss = lambda x: jnp.mean(learner(x) ** 2)
    learner.etrace_grad(xs, step_fn=loss)
    np.testing.assert_array_equal(learner.model.drive.value[0], np.arange(H))
