"""Leaky read-outs under ``reach='readout'`` and e-prop: what is linked, penalties, feedback.

Gradients of the rules are proven in `test_table`.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import nn
from formulas import FULL, Cut, assert_equal, relative_error, total_of
from gradients.cases import (
    CASES,
    DECAYS,
    B,
    H,
    O,
    T,
    compiled,
    drawn,
    fired,
    oracle_of,
)

BACK = CASES['leaky_readout'].back
MASK = np.array([1.0, 0, 1, 2, 0.5, 0])


@pytest.fixture(autouse=True)
def _double(x64):
    """All of this file is in float64, with steps of length one."""
    with brainstate.environ.context(precision=64, dt=1.0):
        yield


def gradient(name, rule='d_rtrl', mask=None, **options):
    options = {'reach': 'readout'} | options if rule == 'd_rtrl' else options
    learner, step = compiled(name, rule, **options)
    o = oracle_of(name)
    given = {'step_fn': step, 'reduction': 'sum', 'mask': mask, 'fresh': True}
    return learner.report.gradients, learner.etrace_grad(o.xs, o.ys, **given)


# ---------------------------------------------------------------- what is linked


@pytest.mark.parametrize(
    'name', ['learned_decay', 'saturating', 'normalised', 'gated_by_spikes']
)
def test_read_outs_that_are_not_linked_are_named(name):
    gives, _ = gradient(name)
    assert gives['feed'].kind == 'local'
    assert 'leaves out state.y' in gives['feed'].reason


@pytest.mark.parametrize('name', [n for n, case in CASES.items() if case.linked])
def test_read_outs_that_are_linked_are_named(name):
    gives = compiled(name, 'd_rtrl', reach='readout')[0].report.gradients
    assert {given.kind for given in gives.values()} <= {'equal to BPTT', 'none'}
    assert 'the memory of' in gives['feed'].reason


def test_each_decay_has_a_trace():
    def count(name, **options):
        learner, _ = compiled(name, 'd_rtrl', **{'reach': 'readout', **options})
        return len(next(iter(learner.traces_of('feed').values())))

    assert count('leaky_readout', reach='local') == 2
    assert count('leaky_readout') == 3
    assert count('several_decays') == 4
    assert count('two_readouts') == 4


def test_a_given_decay_replaces_that_of_the_read_out():
    wanted = oracle_of('leaky_readout').bptt()
    for kappa, kind in ((0.9, 'equal to BPTT'), (0.5, 'approximate')):
        gives, found = gradient('leaky_readout', 'eprop', kappa_filter_decay=kappa)
        assert gives['feed'].kind == kind
        assert (relative_error(found['feed'], wanted['feed']) < 1e-10) == (kappa == 0.9)
        # The weights of the read-out keep their own trace.
        assert gives['out'].kind == 'equal to BPTT'
        assert_equal(found['out'], wanted['out'])


def test_eprop_is_d_rtrl_where_no_read_out_remembers():
    eprop, d_rtrl = (
        gradient('gru', rule, reach=None)[1] for rule in ('eprop', 'd_rtrl')
    )
    jax.tree.map(np.testing.assert_array_equal, eprop, d_rtrl)


@pytest.mark.parametrize('options', [{'passes': 2}, {'passes': 1, 'block': 4}])
def test_masked_steps(options):
    o = oracle_of('several_decays')
    one = lambda t: o.reverse(o.p, o.s, o.xs[: t + 1], o.ys[: t + 1])[0]
    sums = [one(t) for t in range(T)]
    zero = jax.tree.map(jnp.zeros_like, o.p)
    each = [
        jax.tree.map(lambda b, a, m=m: m * (b - a), after, before)
        for m, before, after in zip(MASK, [zero, *sums], sums, strict=False)
    ]
    _, found = gradient('several_decays', mask=MASK, **options)
    assert_equal(found, total_of(each))


# ---------------------------------------------------------------- penalties


class WithRate(brainstate.nn.Module):
    """The case `several_decays` and the rates of its units."""

    def __init__(self):
        super().__init__()
        p = oracle_of('several_decays').p
        self.feed, self.out = (brainstate.ParamState(p[k]) for k in ('feed', 'out'))
        self.rate = nn.WindowRate(H, T)

    def init_state(self, batch_size=None, **kwargs):
        zeros = lambda n: brainstate.HiddenState(jnp.zeros((batch_size, n)))
        self.V, self.a, self.y = zeros(H), zeros(H), zeros(O)

    def update(self, x):
        z = fired({'V': self.V.value, 'a': self.a.value})
        self.V.value = 0.8 * self.V.value + x @ self.feed.value - 0.3 * z
        self.a.value = 0.95 * self.a.value + z
        z = fired({'V': self.V.value, 'a': self.a.value})
        self.rate(z)
        self.y.value = DECAYS * self.y.value + (1 - DECAYS) * (z @ self.out.value)
        return self.y.value


@pytest.mark.parametrize('options', [{}, {'passes': 1, 'block': 4}])
def test_penalties_are_not_filtered(options):
    """BPTT of loss and penalty; the penalty is that of the rates of the whole window."""
    o, step = oracle_of('several_decays'), CASES['several_decays'].step

    def total(p):
        s, losses, spikes = jax.tree.map(jnp.zeros_like, o.s), 0.0, []
        for x, y in zip(o.xs, o.ys, strict=True):
            s, out = step(p, s, x, FULL)
            losses += jnp.sum((out - y) ** 2)
            spikes.append(fired(s))
        rates = jnp.mean(jnp.stack(spikes), axis=0)
        return losses + 7 * 0.5 * jnp.sum((rates - 0.1) ** 2) / B

    wanted = {(k,): v for k, v in jax.grad(total)(o.p).items()}
    learner = braintrace.compile(WithRate(), 'eprop', o.xs[0], batch_size=B, **options)
    penalty = lambda: 7 * learner.model.rate.penalty(0.1)
    step_fn = lambda x, y: jnp.sum((learner(x) - y) ** 2) + penalty()
    given = {'step_fn': step_fn, 'reduction': 'sum'}
    for fresh in (True, False):
        assert_equal(learner.etrace_grad(o.xs, o.ys, fresh=fresh, **given), wanted)
        learner.reset_state()


def test_windows_of_rates():
    rate = nn.WindowRate(2, 3)
    rate.init_state()
    seen = []
    for z in ([1, 0], [1, 1], [0, 1], [1, 1]):
        rate(jnp.asarray(z, float))
        seen.append(float(rate.penalty(0.5)))
    np.testing.assert_allclose(seen, [0, 0, (1 / 6) ** 2, 0])
    np.testing.assert_allclose(rate.r.value, [1 / 3, 1 / 3])
    with pytest.raises(ValueError, match='window=0'):
        nn.WindowRate(2, 0)


# ---------------------------------------------------------------- feedback


def test_weights_may_be_given_in_any_form_and_are_drawn_by_a_key():
    eprop = lambda **options: gradient('leaky_readout', 'eprop', **options)[1]
    for array in (BACK[0], BACK[0].T):
        assert_equal(eprop(feedback=array), eprop(feedback=BACK))
    weights = braintrace.FixedRandomFeedback(3)(0, (H, O), jnp.float64)
    given = eprop(feedback=weights)
    assert_equal(eprop(feedback='random', random_feedback_key=3), given)


@pytest.mark.parametrize('rule', ['eprop', 'rflo'])
def test_feedback_through_a_read_out_whose_decay_is_learned(rule):
    _, found = gradient('learned_decay', rule, feedback=BACK[0])
    _, symmetric = gradient('learned_decay', rule)
    assert relative_error(found['feed'], symmetric['feed']) > 0.1
    for leaf in ('out', 'decay'):
        assert_equal(found[leaf], symmetric[leaf])


def test_weights_of_a_wrong_shape_are_refused_at_compile():
    with pytest.raises(ValueError, match='shape'):
        compiled('leaky_readout', 'eprop', feedback=drawn(H, O + 1))
    with pytest.raises(ValueError, match='read-out number 1'):
        compiled('two_readouts', 'eprop', feedback=BACK[0])


@pytest.mark.parametrize('rule', ['eprop', 'rflo'])
def test_feedback_without_a_read_out_is_refused_at_compile(rule):
    with pytest.raises(braintrace.CompilationError, match='read-out'):
        compiled('states_as_outputs', rule, feedback='random')


def test_a_read_out_in_the_step_function():
    """A model may hold a read-out that only the step_fn uses."""
    o = oracle_of('states_as_outputs')

    def step(p, h, x):
        h = 0.8 * h + x @ p['w']
        return h, h

    p = {**o.p, 'out': jnp.asarray(drawn(H, O))}
    args = (o.s['h'], o.xs[0])
    learner = braintrace.compile(step, 'eprop', p, *args, feedback=BACK)
    assert learner.report.gradients
    ys = jnp.asarray(drawn(T, B, O))
    weights = learner.param_states['out',]
    loss = lambda x, y: jnp.sum((learner(x) @ weights.value - y) ** 2)
    given = {'step_fn': loss, 'reduction': 'sum', 'fresh': True}
    found = learner.etrace_grad(o.xs, ys, **given)

    def total(p):
        h, losses = o.s['h'], 0.0
        for x, y in zip(o.xs, ys, strict=True):
            h, _ = step(p, h, x)
            losses += jnp.sum((Cut(0, BACK).read(h, p['out']) - y) ** 2)
        return losses

    assert_equal(found, jax.grad(total)(p))
