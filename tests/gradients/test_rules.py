"""Every learning rule against its formula, written densely in plain JAX.

A model exists as a module and as plain functions of flat vectors: the whole step, the step with cuts by hand, and
the read-out. Influences are dense matrices by `jax.jacrev`; nothing is shared with the package.
"""

import inspect
import os
from dataclasses import replace

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from jax.nn import sigmoid

import braintrace
from braintrace import (
    ETraceConfig,
    FixedRandomFeedback,
    GradExpon,
    KappaFilter,
    MultiStepData,
    SyntheticGradient,
)
from braintrace.rules import PRESETS, named

nn = brainstate.nn
spike = braintools.surrogate.sigmoid
ALL = os.environ.get('ZOO') == 'all'
B, I, H, O, T = 2, 3, 4, 2, 6  # batch, inputs, units, outputs, steps  # noqa: E741
stop = jax.lax.stop_gradient


@pytest.fixture(autouse=True)
def _double(x64):
    """All of this file is in float64."""


# ---------------------------------------------------------------- models


class Leaky(nn.Module):
    """Leaky units; ``mixing`` wires them to each other."""

    def __init__(self, leak=0.8, mixing=True):
        super().__init__()
        self.leak, self.mixing = leak, mixing
        self.feed, self.recur = nn.Linear(I, H), nn.Linear(H, H, b_init=None)
        self.out = nn.Linear(H, O)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, H)))

    def update(self, x):
        h = self.h.value
        drive = self.feed(x) + self.recur(h) if self.mixing else self.feed(x)
        self.h.value = self.leak * h + (drive if not self.mixing else jnp.tanh(drive))
        return self.out(self.h.value)


def leaky(p, h, x, cut, leak=0.8, mixing=True):
    h = h['h']
    held = stop(h) if cut else h
    drive = x @ p['feed', 'weight']['weight'] + p['feed', 'weight']['bias']
    if mixing:
        drive = jnp.tanh(drive + held @ p['recur', 'weight']['weight'])
    return {'h': leak * h + drive}


class Adaptive(nn.Module):
    """Spiking units with a threshold of their own; read out by what they would spike."""

    def __init__(self):
        super().__init__()
        self.feed, self.recur, self.out = (
            nn.Linear(I, H),
            nn.Linear(H, H, b_init=None),
            nn.Linear(H, O),
        )

    def init_state(self, batch_size=None, **kwargs):
        self.V = brainstate.HiddenState(jnp.zeros((batch_size, H)))
        self.a = brainstate.HiddenState(jnp.zeros((batch_size, H)))

    def update(self, x):
        V, a = self.V.value, self.a.value
        fired = spike(V - 0.5 - 0.2 * a)
        self.V.value = 0.9 * V + self.feed(x) + self.recur(fired) - 0.5 * fired
        self.a.value = 0.97 * a + fired
        return self.out(spike(self.V.value - 0.5 - 0.2 * self.a.value))


def adaptive(p, h, x, cut):
    V, a = h['V'], h['a']
    fired = spike(V - 0.5 - 0.2 * a)
    sent = stop(fired) if cut else fired
    drive = (
        x @ p['feed', 'weight']['weight']
        + p['feed', 'weight']['bias']
        + sent @ p['recur', 'weight']['weight']
    )
    return {'V': 0.9 * V + drive - 0.5 * fired, 'a': 0.97 * a + fired}


class Gated(nn.Module):
    """A stock cell with a read-out."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(I, H), nn.Linear(H, O)

    def update(self, x):
        return self.out(self.cell(x))


def gated(p, s, x, cut):
    h = s['cell.h']
    held = stop(h) if cut else h
    gates = (
        jnp.concatenate([x, held], -1) @ p['cell', 'Wrz', 'weight']['weight']
        + p['cell', 'Wrz', 'weight']['bias']
    )
    r, z = jnp.split(sigmoid(gates), 2, axis=-1)
    r = stop(r) if cut else r
    new = jnp.tanh(
        jnp.concatenate([x, r * held], -1) @ p['cell', 'Wh', 'weight']['weight']
        + p['cell', 'Wh', 'weight']['bias']
    )
    return {'cell.h': (1 - z) * h + z * new}


def seen(h):
    """What a read-out sees of the states."""
    return spike(h['V'] - 0.5 - 0.2 * h['a']) if 'V' in h else next(iter(h.values()))


MODELS = {
    'leaky': (Leaky, leaky, ('h',)),
    'adaptive': (Adaptive, adaptive, ('V', 'a')),
    'gated': (Gated, gated, ('cell.h',)),
}


class Case:
    """A model with weights, inputs and targets, as a module and densely."""

    def __init__(self, name, steps=T, seed=0, **options):
        self.kind, self.plain, states = MODELS[name]
        self.options = options
        rng = np.random.default_rng(seed)
        self.xs = jnp.asarray(rng.normal(size=(steps, B, I)))
        self.ys = jnp.asarray(rng.normal(size=(steps, B, O)))
        self.weights = {
            path: jax.tree.map(
                lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.5), state.value
            )
            for path, state in self.model().states(brainstate.ParamState).items()
        }
        self.flat, self.tree = ravel_pytree(self.weights)
        self.start, self.states = ravel_pytree({k: jnp.zeros((B, H)) for k in states})

    def model(self):
        return self.kind(**self.options)

    def learner(self, rule, **options):
        with brainstate.environ.context(precision=64):
            model = self.model()
            learner = braintrace.compile(
                model, rule, self.xs[0], batch_size=B, **options
            )
        for path, state in model.states(brainstate.ParamState).items():
            state.value = self.weights[path]
        return learner

    def gradient(self, rule, fresh=True, **options):
        learner = self.learner(rule, **options)
        found = learner.etrace_grad(
            self.xs, self.ys, step_fn=loss_of(learner), reduction='sum', fresh=fresh
        )
        return ravel_pytree({path: found[path] for path in self.weights})[0]

    # dense functions of flat vectors

    def step(self, theta, h, x, cut=False):
        return ravel_pytree(
            self.plain(self.tree(theta), self.states(h), x, cut, **self.options)
        )[0]

    def read(self, theta, h):
        p = self.tree(theta)['out', 'weight']
        return seen(self.states(h)) @ p['weight'] + p['bias']

    def loss(self, theta, h, y):
        return jnp.mean((self.read(theta, h) - y) ** 2)

    def bptt(self):
        def total(theta):
            def one(h, at):
                h = self.step(theta, h, at[0])
                return h, self.loss(theta, h, at[1])

            return jax.lax.scan(one, self.start, (self.xs, self.ys))[1].sum()

        return jax.grad(total)(self.flat)

    def along(self, now, state):
        """Σ_t of ``now(h_old, h_new, x, y, t, state) -> (gradient, state)`` along the sequence."""
        h, total = self.start, 0.0
        for t, (x, y) in enumerate(zip(self.xs, self.ys, strict=True)):
            new = self.step(self.flat, h, x)
            gradient, state = now(h, new, x, y, t, state)
            h, total = new, total + gradient
        return total

    def local(self, h, x):
        """Jacobian and instantaneous influence of the local step."""
        return jax.jacrev(self.step, argnums=(1, 0))(self.flat, h, x, True)

    def one_step(self, h, x, y):
        return jax.grad(lambda theta: self.loss(theta, self.step(theta, h, x), y))(
            self.flat
        )

    def by_filter(self, kappa, recursion=lambda d, e: d @ e):
        """What the read-out sees of the units, low-passed, replaces what it sees now."""

        def now(h, new, x, y, t, state):
            trace, filtered = state
            d, influence = self.local(h, x)
            trace = recursion(d, trace) + influence
            see = lambda h: seen(self.states(h)).ravel()
            filtered = kappa * filtered + jax.jacrev(see)(new) @ trace
            error = jax.grad(lambda u: self.loss_of_seen(u.reshape(B, H), y))(see(new))
            true = jax.grad(self.loss, argnums=1)(self.flat, new, y)
            gradient = self.one_step(h, x, y) - true @ influence + error @ filtered
            return gradient, (trace, filtered)

        zeros = [jnp.zeros((n, self.flat.size)) for n in (self.start.size, B * H)]
        return self.along(now, tuple(zeros))

    def loss_of_seen(self, u, y):
        p = self.weights['out', 'weight']
        return jnp.mean((u @ p['weight'] + p['bias'] - y) ** 2)

    def by_trace(self, recursion=lambda d, e: d @ e, signal=None):
        """One-step gradient with its local part replaced by signal · trace."""
        signal = signal or (
            lambda h, y, t: jax.grad(self.loss, argnums=1)(self.flat, h, y)
        )

        def now(h, new, x, y, t, trace):
            d, influence = self.local(h, x)
            trace = recursion(d, trace) + influence
            true = jax.grad(self.loss, argnums=1)(self.flat, new, y)
            gradient = (
                self.one_step(h, x, y) - true @ influence + signal(new, y, t) @ trace
            )
            return gradient, trace

        return self.along(now, jnp.zeros((self.start.size, self.flat.size)))

    def by_influence(self, mask=None):
        """RTRL, with influences outside of a mask dropped after every step."""

        def now(h, new, x, y, t, influence):
            d, i = jax.jacrev(self.step, argnums=(1, 0))(self.flat, h, x)
            past = jax.grad(
                lambda h: self.loss(self.flat, self.step(self.flat, h, x), y)
            )(h)
            gradient = self.one_step(h, x, y) + past @ influence
            influence = d @ influence + i
            return gradient, influence if mask is None else jnp.where(
                mask, influence, 0
            )

        return self.along(now, jnp.zeros((self.start.size, self.flat.size)))


def loss_of(learner):
    return lambda x, y: jnp.mean((learner(x) - y) ** 2)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


def differ(a, b):
    assert jnp.linalg.norm(a - b) > 1e-3 * jnp.linalg.norm(b)


# ---------------------------------------------------------------- traces that live at positions


@pytest.mark.parametrize(
    ('name', 'fresh'),
    [
        ('leaky', True),
        ('adaptive', False),
        *([('adaptive', True), ('gated', False)] if ALL else []),
    ],
)
def test_eprop_is_the_filtered_local_trace(name, fresh):
    case = Case(name)
    filtered = case.gradient('eprop', fresh, kappa_filter_decay=0.7, block=4)
    close(filtered, case.by_filter(kappa=0.7))
    differ(filtered, case.by_trace())


def test_eprop_without_a_filter_is_the_local_rule():
    case = Case('adaptive')
    close(case.gradient('eprop'), case.by_trace())


def test_kappa_and_its_published_name_are_one_option():
    case = Case('adaptive')
    filtered = case.gradient('eprop', kappa=0.7)
    close(filtered, case.by_filter(kappa=0.7))
    differ(filtered, case.by_trace())
    rule = lambda **options: braintrace.EProp(Leaky(), **options).rule
    assert rule(kappa='readout') == rule(kappa_filter_decay=None) == rule()
    assert rule(kappa=None) == rule(kappa_filter_decay=0.0)
    assert rule(kappa=None) != rule()
    with pytest.raises(ValueError, match='one of them'):
        rule(kappa=0.5, kappa_filter_decay=0.7)


def test_compiling_leaves_the_rule_as_it_was_given():
    """That a model has no leaky read-out is a fact of the model, whoever uses it."""
    case = Case('adaptive')
    own = case.learner('eprop', kappa=0.7)
    given = braintrace.EProp(case.model(), kappa=0.7)
    assert own.rule == given.rule
    sequences, step = (case.xs, case.ys), loss_of(own)
    alone = own.gradient_check(*sequences, step_fn=step)
    beside = own.gradient_check(*sequences, step_fn=step, rules=[given, 'd_rtrl'])
    assert beside.checks[0] == alone
    assert beside.checks[1].cosine != alone.cosine


def test_a_filter_with_kappa_zero_is_no_filter():
    case = Case('adaptive')
    local = braintrace.EProp(Leaky(), reach='local').rule
    for zero in (0.0, 0, np.float32(0), KappaFilter(0.0)):
        mine = braintrace.EProp(Leaky(), kappa_filter_decay=zero).rule
        assert replace(mine, exact_when='') == replace(local, exact_when='')
    three_factor = braintrace.ThreeFactor(Leaky(), kappa_filter_decay=0.0)
    assert three_factor.rule == braintrace.ThreeFactor(Leaky()).rule
    unfiltered, zero = (
        case.learner('eprop'),
        case.learner('eprop', kappa_filter_decay=0.0),
    )
    shapes = lambda learner: jax.tree.map(
        jnp.shape, {k: t.value for k, t in learner.traces.items()}
    )
    assert shapes(zero) == shapes(unfiltered)
    close(case.gradient('eprop', kappa_filter_decay=0.0), case.by_trace())
    # Windows are exact without a filter; with one their steps are taken one by one.
    multi = lambda kappa: case.learner(
        'eprop', kappa_filter_decay=kappa, vjp_method='multi-step'
    )
    assert multi(0.0).rule.multi_step
    assert not multi(0.5).rule.multi_step


def test_configurations_with_kappa_zero_are_those_without_a_filter():
    assert ETraceConfig(kappa=0.0) == ETraceConfig()
    assert ETraceConfig(trace_filter='kappa', kappa=0) == ETraceConfig()
    assert hash(ETraceConfig(trace_filter='kappa', kappa=0.0)) == hash(ETraceConfig())
    assert ETraceConfig(trace_filter='kappa', kappa=0.0).rule == ETraceConfig().rule
    factors = {'trace_factorization': 'io_factorized', 'decay': 0.9}
    assert ETraceConfig(**factors, trace_filter='kappa', kappa=0.0) == ETraceConfig(
        **factors
    )
    for wrong in (False, -0.1, 'none'):
        with pytest.raises(ValueError, match='Fix: '):
            ETraceConfig(kappa=wrong)


def feedback_signal(case, weights):
    def signal(h, y, t):
        error = jax.grad(lambda out: jnp.mean((out - y) ** 2))(case.read(case.flat, h))
        return jax.vjp(lambda h: seen(case.states(h)), h)[1](error @ weights.T)[0]

    return signal


@pytest.mark.parametrize('name', MODELS if ALL else ['leaky', 'adaptive'])
def test_random_feedback_sends_the_error_at_the_readout_back_by_other_weights(name):
    case = Case(name)
    feedback = FixedRandomFeedback(key=3)
    weights = feedback(0, (H, O), jnp.float64)
    expected = case.by_trace(signal=feedback_signal(case, weights))
    close(case.gradient('eprop', feedback='random', random_feedback_key=3), expected)
    differ(expected, case.by_trace())
    if name == 'leaky':
        close(case.gradient('eprop', fresh=False, feedback=feedback), expected)
        twice = feedback_signal(case, 2 * weights)
        louder = FixedRandomFeedback(key=3, scale=2 / H**0.5)
        close(case.gradient('eprop', feedback=louder), case.by_trace(signal=twice))


def test_adaptive_feedback_comes_closer_to_the_weights_with_every_update():
    case = Case('leaky')
    learner = case.learner('eprop', feedback=FixedRandomFeedback(key=1, align=0.5))
    fixed, own = (
        FixedRandomFeedback(key=1)(0, (H, O), jnp.float64),
        case.weights['out', 'weight']['weight'],
    )
    step = loss_of(learner)
    for left in (1.0, 0.5, 0.25):
        found = learner.etrace_grad(
            case.xs, case.ys, step_fn=step, reduction='sum', fresh=True
        )
        weights = left * fixed + (1 - left) * own
        close(
            ravel_pytree(found)[0],
            ravel_pytree(
                case.tree(case.by_trace(signal=feedback_signal(case, weights)))
            )[0],
        )


class NoReadout(brainstate.nn.Module):
    """A leaky integrator whose states are its outputs."""

    def __init__(self):
        super().__init__()
        drawn = np.random.default_rng(3).normal(size=(I, H))
        self.w = brainstate.ParamState(jnp.asarray(drawn, jnp.float64))

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, H)))

    def update(self, x):
        self.h.value = 0.8 * self.h.value + x @ self.w.value
        return self.h.value


def test_a_filter_without_a_readout_is_of_the_trace():
    """Σ_t L_t ē_t by hand."""
    rng = np.random.default_rng(4)
    xs, ys = rng.normal(size=(6, B, I)), rng.normal(size=(6, B, H))
    learner = braintrace.compile(
        NoReadout(), 'eprop', jnp.asarray(xs[0]), batch_size=B, kappa=0.7
    )
    h, trace, filtered, wanted = np.zeros((B, H)), 0, 0, 0
    for x, y in zip(xs, ys, strict=True):
        h = 0.8 * h + x @ np.asarray(learner.model.w.value)
        trace = 0.8 * trace + x
        filtered = 0.7 * filtered + trace
        wanted = wanted + filtered.T @ (h - y)
    step = lambda x, y: jnp.sum((learner(x) - y) ** 2) / 2
    given = {'step_fn': step, 'reduction': 'sum'}
    for fresh in (True, False):
        found = learner.etrace_grad(xs, ys, fresh=fresh, **given)
        close(found['w',], wanted)
        learner.reset_state()
    by_calls = 0
    for x, y in zip(xs, ys, strict=True):
        loss = lambda x=x, y=y: step(x, y)
        by_calls += brainstate.transform.grad(loss, learner.param_states)()['w',]
    close(by_calls, wanted)
    assert learner.report.gradients['w'].kind == 'approximate'


def test_rflo_with_the_feedback_of_its_paper():
    case = Case('leaky')
    found = case.gradient('rflo', leak=0.7, feedback='random', random_feedback_key=3)
    config = ETraceConfig(
        temporal_recursion='scalar_leak', decay=0.7, learning_signal='random_feedback'
    )
    differ(found, case.gradient(config))
    close(case.gradient('rflo', leak=0.7, feedback='random'), case.gradient(config))
    differ(found, case.gradient('rflo', leak=0.7))


def test_feedback_sends_the_size_of_the_error_not_its_direction_alone():
    case = Case('leaky')
    h, outputs = case.start, []
    for x in case.xs:
        h = case.step(case.flat, h, x)
        outputs.append(case.read(case.flat, h))
    once = case.gradient('eprop', feedback='random')
    case.ys = 2 * case.ys - jnp.stack(outputs)  # every error twice as large
    close(case.gradient('eprop', feedback='random'), 2 * once)
    assert jnp.linalg.norm(once) > 1e-2


@pytest.mark.parametrize(
    ('name', 'fresh'), [('adaptive', True), *([('gated', False)] if ALL else [])]
)
def test_rflo_leaks_by_a_number(name, fresh):
    case = Case(name)
    expected = case.by_trace(recursion=lambda d, e: 0.6 * e)
    close(case.gradient('rflo', fresh, leak=0.6, block=4), expected)
    differ(expected, case.by_trace())


def test_rflo_and_ottt_are_exact_for_units_that_only_leak():
    case = Case('leaky', mixing=False)
    close(case.gradient('rflo', leak=0.8), case.bptt())
    close(case.gradient('ottt', leak=0.8), case.bptt())
    differ(case.gradient('rflo', leak=0.5), case.bptt())
    differ(case.gradient('ottt', leak=0.5), case.bptt())


def test_without_recursion_only_the_step_counts():
    case = Case('adaptive')
    config = ETraceConfig(temporal_recursion='none')
    close(case.gradient(config), case.by_trace(recursion=lambda d, e: 0 * e))


# ---------------------------------------------------------------- factorised traces


def by_factors(case, decay, forget):
    """OTTT and OSTL without D on the leaky model: (signal · f) ⊗ x̄ for each product, by hand."""
    alpha_x, alpha_f = decay
    total = jax.tree.map(jnp.zeros_like, case.weights)
    h = jnp.zeros((B, H))
    x_bar, h_bar, one_bar = jnp.zeros((B, I)), jnp.zeros((B, H)), 0.0
    f = jnp.zeros((B, H))
    for t, (x, y) in enumerate(zip(case.xs, case.ys, strict=True), 1):
        p = case.weights
        drive = (
            x @ p['feed', 'weight']['weight']
            + p['feed', 'weight']['bias']
            + h @ p['recur', 'weight']['weight']
        )
        new = 0.8 * h + jnp.tanh(drive)
        x_bar, h_bar, one_bar = (
            alpha_x * x_bar + x,
            alpha_x * h_bar + h,
            alpha_x * one_bar + 1,
        )
        f = alpha_f * forget * f + (1 - alpha_f) * (1 - jnp.tanh(drive) ** 2)
        error = jax.grad(lambda out, y=y: jnp.mean((out - y) ** 2))(
            new @ p['out', 'weight']['weight'] + p['out', 'weight']['bias']
        )
        told = (error @ p['out', 'weight']['weight'].T) * f / (1 - alpha_f**t)
        add = {
            ('feed', 'weight'): {
                'weight': x_bar.T @ told,
                'bias': one_bar * told.sum(0),
            },
            ('recur', 'weight'): {'weight': h_bar.T @ told},
            ('out', 'weight'): {'weight': new.T @ error, 'bias': error.sum(0)},
        }
        total = jax.tree.map(jnp.add, total, add)
        h = new
    return ravel_pytree(total)[0]


@pytest.mark.parametrize('fresh', [True, False])
def test_ottt_and_ostl_feedforward_by_hand(fresh):
    case = Case('leaky')
    close(case.gradient('ottt', fresh, leak=0.7), by_factors(case, (0.7, 0.0), 0.0))
    close(
        case.gradient('OSTL_feedforward', fresh, decay_or_rank=(0.7, 0.4)),
        by_factors(case, (0.7, 0.4), 1.0),
    )


class OneToOne(nn.Module):
    """Leaky units, each with a weight of its own for an input of its own."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.linspace(0.5, 1.5, H))
        self.h = brainstate.HiddenState(jnp.zeros((B, H)))

    def update(self, x):
        self.h.value = 0.8 * self.h.value + jnp.sin(x) * self.w.value
        return self.h.value


def test_ottt_is_exact_for_element_wise_weights_of_units_that_only_leak():
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(T, B, H)))
    learner = braintrace.compile(OneToOne(), 'ottt', xs[0], leak=0.8)
    check = learner.gradient_check(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2))
    assert check['w'].relative_error < 1e-9
    other = braintrace.compile(OneToOne(), 'ottt', xs[0], leak=0.7)
    assert (
        other.gradient_check(xs, step_fn=lambda x: jnp.sum(other(x) ** 2))[
            'w'
        ].relative_error
        > 1e-3
    )


def test_ostl_recurrent_is_the_local_rule():
    case = Case('gated')
    close(case.gradient('OSTLRecurrent'), case.by_trace())


# ---------------------------------------------------------------- influences on all states


@pytest.mark.parametrize(
    ('name', 'fresh'), [('leaky', True), ('adaptive', False), ('gated', True)]
)
def test_rtrl_is_bptt(name, fresh):
    case = Case(name)
    close(case.by_influence(), case.bptt())
    close(case.gradient('rtrl', fresh), case.bptt())


@pytest.mark.parametrize('name', ['leaky', 'adaptive'])
def test_snap_keeps_what_is_reached_within_n_steps(name):
    case = Case(name)
    rng = np.random.default_rng(4)
    draws = [jnp.asarray(rng.normal(size=case.start.shape)) for _ in range(20)]
    found = [
        jax.jacrev(case.step, argnums=(1, 0))(case.flat, 2 * h, case.xs[0])
        for h in draws
    ]
    onward, direct = (
        sum(np.asarray(part != 0, int) for part in parts) > 0
        for parts in zip(*found, strict=True)
    )
    onward = onward.astype(int)
    mask = direct
    for n in (1, 2):
        expected = case.by_influence(mask)
        close(case.gradient('snap', n=n), expected)
        mask = direct | (onward @ mask > 0)
        if name == 'leaky':
            (differ if n == 1 else close)(expected, case.bptt())


class Ring(nn.Module):
    """Units that hear their left neighbour only: each step reaches one more."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(0.5 + 0.1 * jnp.arange(H, dtype=float))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, H)))

    def update(self, x):
        self.h.value = jnp.tanh(self.w.value * jnp.roll(self.h.value, 1, axis=-1) + x)
        return self.h.value


def test_snap_holds_less_for_a_sparse_recurrence():
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(T, B, H)))
    sizes, found = [], []
    for rule, options in [
        ('snap', {'n': 1}),
        ('snap', {'n': 2}),
        ('snap', {'n': H}),
        ('rtrl', {}),
        ('bptt', {}),
    ]:
        learner = braintrace.compile(Ring(), rule, xs[0], batch_size=B, **options)
        sizes.append(
            sum(
                x.size
                for t in learner.traces.values()
                for x in jax.tree.leaves(t.value)
            )
            - 1
        )
        step = lambda x, learner=learner: jnp.mean(learner(x) ** 2)
        found.append(learner.etrace_grad(xs, step_fn=step, fresh=True)['w',])
    assert sizes[:4] == [H * B, H * 2 * B, H * H * B, H * H * B]
    close(found[2], found[4])
    close(found[3], found[4])
    errors = [jnp.linalg.norm(g - found[4]) for g in found]
    assert errors[0] > errors[1] > 1e-6


def test_uoro_is_right_in_the_mean():
    case = Case('leaky', steps=4)
    learner = case.learner('uoro', seed=5)
    step = loss_of(learner)
    call = lambda: ravel_pytree(
        learner.etrace_grad(case.xs, case.ys, step_fn=step, reduction='sum', fresh=True)
    )[0]
    draws = np.stack([np.asarray(call()) for _ in range(1000)])
    error = draws.mean(0) - np.asarray(ravel_pytree(case.tree(case.bptt()))[0])
    spread = draws.std(0) / len(draws) ** 0.5
    assert np.all(np.abs(error) <= 5 * spread + 1e-12)
    assert spread.max() > 1e-4  # it is random
    assert np.linalg.norm(error) < 0.2 * np.linalg.norm(case.bptt())


class One(brainstate.nn.Module):
    """A state that is one number, moved by one weight."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.asarray(0.7))

    def init_state(self, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros(()))

    def update(self, x):
        self.h.value = 0.8 * self.h.value + jnp.tanh(self.w.value * x)
        return self.h.value


@pytest.mark.parametrize(('rule', 'decay_f'), [('pp_prop', 0.9), ('ottt', 0.0)])
def test_factors_of_a_scalar_state(rule, decay_f):
    xs = jnp.asarray([0.5, -1.0, 2.0])
    learner = braintrace.compile(One(), rule, xs[0])
    found = learner.etrace_grad(
        xs, step_fn=lambda x: learner(x) ** 2, reduction='sum', fresh=True
    )['w',]
    h = e_f = e_x = wanted = 0.0
    for t, x in enumerate(np.asarray(xs)):
        h = 0.8 * h + np.tanh(0.7 * x)
        on_x, on_f = (
            (1, x) if decay_f else (x, 1)
        )  # ∂y/∂w = x is on the side that remembers
        e_f = decay_f * 0.8 * e_f + (1 - decay_f) * on_f * (1 - np.tanh(0.7 * x) ** 2)
        e_x = 0.9 * e_x + on_x
        wanted += 2 * h * e_f * e_x / (1 - decay_f ** (t + 1))
    close(found, wanted)


def test_factors_of_one_sum_share_their_states_side():
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(T, B, I)), jnp.float32)
    learner = braintrace.compile(
        brainstate.nn.GRUCell(I, H), 'pp_prop', xs[0], batch_size=B
    )
    learner.etrace_evolve(xs)
    held = [x for trace in learner.traces.values() for x in trace.value.f.values()]
    assert len(learner.traces) == 6
    assert [x.shape for x in held] == [
        (B, H)
    ] * 2  # one for the update gate, one for the candidate
    for name in ('Wrz', 'Wh'):
        _, factors = learner.traces_of((name, 'weight'))
        shown = [factor[0] for factor in factors.values()]
        assert len(shown) == 3
        assert np.abs(shown[0]).max() > 1e-3
        close(shown[1], shown[0])
        close(shown[2], shown[0])


class Symbols(brainstate.nn.Module):
    """Leaky units driven by the sum of a dense layer, which factorises, and of an
    embedding, which does not."""

    def __init__(self):
        super().__init__()
        draw = np.random.default_rng(0).normal
        self.w = brainstate.ParamState(jnp.asarray(draw(size=(3, 4)), 'float32'))
        self.u = brainstate.ParamState(jnp.asarray(draw(size=(3, 4)), 'float32'))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        drive = x @ self.w.value + self.u.value[jnp.argmax(x, axis=-1)]
        self.h.value = 0.9 * self.h.value + jnp.tanh(drive)
        return self.h.value


def test_a_weight_without_factors_has_its_own_trace_beside_factors():
    """Both enter one sum; the trace of the embedding was empty after a call."""
    xs = jnp.asarray(np.random.default_rng(1).normal(size=(8, 2, 3)), 'float32')

    def gradients(rule):
        learner = braintrace.compile(Symbols(), rule, xs[0], batch_size=2)
        step_fn = lambda x: jnp.sum(learner(x) ** 2)
        parts = [learner.etrace_grad(x, step_fn=step_fn) for x in (xs[:4], xs[4:])]
        return [part['u',] for part in parts]

    for found, wanted in zip(gradients('pp_prop'), gradients('d_rtrl'), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


class Turning(brainstate.nn.Module):
    """Complex states and weights, and a conjugate on the way: not holomorphic."""

    def __init__(self):
        super().__init__()
        draw = lambda *shape: (
            jnp.asarray(np.random.default_rng(len(shape)).normal(size=(2, *shape)))
            * 0.4
        )
        self.w = brainstate.ParamState(jax.lax.complex(*draw(I, H)))
        self.r = brainstate.ParamState(jax.lax.complex(*draw(H)))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, H), complex))

    def update(self, x):
        self.h.value = (
            0.5 * self.h.value
            + x @ self.w.value
            + self.r.value * jnp.roll(self.h.value.conj(), 1, -1)
        )
        return jnp.concatenate([self.h.value.real, self.h.value.imag**2], -1)


def test_influence_of_complex_parameters():
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(3, B, I)))

    def found(rule, **options):
        learner = braintrace.compile(Turning(), rule, xs[0], batch_size=B, **options)
        step = lambda x: jnp.sum(learner(x) ** 2)
        return lambda: ravel_pytree(
            dict(learner.etrace_grad(xs, step_fn=step, fresh=True))
        )[0]

    wanted = found('bptt')()
    assert np.abs(wanted.imag).min() > 1e-6
    close(found('rtrl')(), wanted)
    close(found('snap', n=H)(), wanted)
    assert np.abs(found('snap', n=1)() - wanted).max() > 1e-3
    draw = found('uoro')
    draws = np.stack([np.asarray(draw()) for _ in range(1000)]).view(float)
    error, spread = (
        draws.mean(0) - np.asarray(wanted).view(float),
        draws.std(0) / len(draws) ** 0.5,
    )
    assert np.all(np.abs(error) <= 5 * spread + 1e-12)
    assert np.linalg.norm(error) < 0.2 * np.linalg.norm(wanted)


@jax.custom_jvp
def narrow(v):
    """Fires at zero; its slope is zero but near the threshold."""
    return (v > 0) * 1.0


narrow.defjvp(
    lambda primals, tangents: (
        narrow(*primals),
        0.3 * tangents[0] * jnp.maximum(0, 1 - jnp.abs(primals[0])),
    )
)


class Distant(nn.Module):
    """Symbols drive units whose potentials, and the moments when they may fire, are far from zero."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        self.table = brainstate.ParamState(jnp.asarray(rng.normal(size=(9, H))))
        self.recur = brainstate.ParamState(jnp.asarray(rng.normal(size=(H, H))))

    def init_state(self, batch_size=None, **kwargs):
        self.V = brainstate.HiddenState(jnp.full((batch_size, H), -60.0))
        self.rest = brainstate.ShortTermState(jnp.zeros((batch_size, H)))

    def update(self, symbol):
        z = narrow(self.V.value + 59.5)
        z = z * (self.rest.value == 0)
        self.rest.value = jnp.where(z > 0, 1.0, 0.0)
        self.V.value = (
            -60
            + 0.9 * (self.V.value + 60)
            + self.table.value[symbol]
            + z @ self.recur.value
        )
        return self.V.value


def test_snap_reaches_what_no_draw_of_values_opens():
    symbols = jnp.asarray(np.random.default_rng(1).integers(0, 9, (T, B)))
    found = {}
    for rule, options in [('snap', {'n': 1}), ('snap', {'n': 2}), ('bptt', {})]:
        learner = braintrace.compile(
            Distant(), rule, symbols[0], batch_size=B, **options
        )
        step = lambda x, learner=learner: jnp.mean((learner(x) + 60) ** 2)
        found[learner.rule.name] = ravel_pytree(
            learner.etrace_grad(symbols, step_fn=step, fresh=True)
        )[0]
    close(found['SnAp(2)'], found['BPTT'])
    differ(found['SnAp(1)'], found['BPTT'])


@pytest.mark.parametrize(
    ('rule', 'options'), [('uoro', {}), ('eprop', {'feedback': 'adaptive'})]
)
def test_a_loop_of_single_steps_is_training_online(rule, options):
    """Signs are drawn anew and feedback comes closer at each step, as they do in the compiled loop."""
    case = Case('leaky')
    online, single = case.learner(rule, **options), case.learner(rule, **options)
    losses = online.etrace_online(
        case.xs, case.ys, step_fn=loss_of(online), optimizer=optax.sgd(0.1)
    )
    weights, optimizer, found = (
        single.model.states(brainstate.ParamState),
        optax.sgd(0.1),
        [],
    )
    for x, y in zip(case.xs, case.ys, strict=True):
        loss = lambda x, y: jnp.mean((single(x) - y) ** 2)
        gradients, value = brainstate.transform.grad(loss, weights, return_value=True)(
            x, y
        )
        single.apply(dict(gradients), optimizer)
        found.append(value)
    close(jnp.stack(found), losses)
    weights_of = lambda learner: ravel_pytree(
        {path: w.value for path, w in learner.param_states.items()}
    )[0]
    differ(weights_of(single), weights_of(case.learner(rule)))
    assert single.rule_state.value == online.rule_state.value == T


def test_the_seed_of_compile_is_that_of_a_rule_that_draws():
    case = Case('leaky')
    found = [case.gradient('uoro', seed=seed) for seed in (1, 1, 2)]
    close(found[0], found[1])
    differ(found[0], found[2])


# ---------------------------------------------------------------- modulators


@pytest.mark.parametrize(
    ('name', 'shape'),
    [
        ('leaky', ()),
        ('leaky', (B, 1)),
        ('leaky', (B,)),
        ('adaptive', (H,)),
        ('gated', (B, H)),
    ],
)
def test_a_modulator_takes_the_place_of_the_signal(name, shape):
    case = Case(name)
    m = jnp.asarray(np.random.default_rng(1).normal(size=shape))
    full = jnp.broadcast_to(m[:, None] if shape == (B,) else m, (B, H))
    whole = jnp.concatenate([full.ravel()] * (case.start.size // (B * H)))
    found = case.gradient('three_factor', name != 'leaky', modulator=m, block=4)
    close(found, case.by_trace(signal=lambda h, y, t: whole))


def test_a_modulator_for_every_step_may_be_computed_there():
    case = Case('leaky')
    ms = jnp.asarray(np.random.default_rng(2).normal(size=(T, B)))
    learner = case.learner('three_factor')

    def step(x, y, m):
        return jnp.mean((learner(x, modulator=2 * m) - y) ** 2)

    found = learner.etrace_grad(
        case.xs, case.ys, ms, step_fn=step, reduction='sum', fresh=True
    )
    signal = lambda h, y, t: jnp.broadcast_to(2 * ms[t][:, None], (B, H)).ravel()
    close(
        ravel_pytree(found)[0], ravel_pytree(case.tree(case.by_trace(signal=signal)))[0]
    )


def test_a_standing_modulator_is_honoured_under_jit():
    case = Case('leaky')
    learner = case.learner('three_factor', modulator=1.0)
    step = loss_of(learner)
    run = brainstate.transform.jit(
        lambda: learner.etrace_grad(case.xs, case.ys, step_fn=step, fresh=True)
    )
    first = run()['feed', 'weight']['weight']
    learner.rule_state.value = jnp.asarray(3.0)
    close(run()['feed', 'weight']['weight'], 3 * first)
    learner.rule_state.value = jnp.ones(7)
    with pytest.raises(braintrace.CompilationError, match='modulator of shape'):
        learner.etrace_grad(case.xs, case.ys, step_fn=step)


def test_a_modulator_of_a_step_leaves_the_standing_one():
    case = Case('leaky')
    learner = case.learner('three_factor', modulator=2.0)
    step = lambda x, y, m: jnp.mean((learner(x, modulator=m) - y) ** 2)
    ms = jnp.ones((T, B, 1)).at[1].set(jnp.nan)
    mask = jnp.ones(T).at[1].set(0.0)
    for _ in range(2):
        gradients = learner.etrace_grad(
            case.xs, case.ys, ms, step_fn=step, mask=mask, fresh=True
        )
        assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(gradients))
    learner(case.xs[0], modulator=jnp.full((B, H), 100.0))
    assert learner.evaluate(
        case.xs, case.ys, ms, step_fn=lambda x, y, m: learner(x, modulator=m)
    ).shape == (T, B, O)
    compared = learner.gradient_check(
        case.xs, case.ys, ms.at[1].set(1.0), step_fn=step, rules=['threefactor', 'rtrl']
    )
    assert all(row.relative_error < 1e-9 for row in compared['RTRL'].rows)
    assert learner.rule_state.value == 2.0
    learner.reset_state()
    found = learner.etrace_grad(
        case.xs, case.ys, step_fn=loss_of(learner), reduction='sum', fresh=True
    )
    signal = lambda h, y, t: jnp.full(B * H, 2.0)
    close(
        ravel_pytree(found)[0], ravel_pytree(case.tree(case.by_trace(signal=signal)))[0]
    )


class LeakyOut(nn.Module):
    """Leaky units and a read-out that leaks, of another size."""

    def __init__(self):
        super().__init__()
        self.feed = nn.Linear(I, H)
        self.out = braintrace.nn.LeakyRateReadout(H, O, tau=5.0)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, H), jnp.float32))

    def update(self, x):
        self.h.value = 0.8 * self.h.value + jnp.tanh(self.feed(x))
        return self.out(self.h.value)


def test_a_modulator_for_the_units_and_a_loss_for_the_readout():
    brainstate.random.seed(0)
    rng = np.random.default_rng(0)
    xs, ys = (jnp.asarray(rng.normal(size=(T, B, n)), jnp.float32) for n in (I, O))
    with brainstate.environ.context(dt=1.0):
        learner = braintrace.compile(
            LeakyOut(),
            'three_factor',
            xs[0],
            batch_size=B,
            modulator=jnp.ones((1, H)),
            trace=lambda p: p[0] != 'out',
        )
        step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
        found, other = (
            learner.etrace_grad(xs, k * ys, step_fn=step, fresh=True) for k in (1, 7)
        )
        named = lambda g, first: ravel_pytree(
            {p: v for p, v in g.items() if p[0] == first}
        )[0]
        np.testing.assert_allclose(
            named(found, 'feed'), named(other, 'feed'), rtol=1e-5
        )
        differ(named(found, 'out'), named(other, 'out'))
        modulated = braintrace.compile(
            LeakyOut(), 'three_factor', xs[0], batch_size=B, modulator=jnp.ones((1, H))
        )
        with pytest.raises(braintrace.CompilationError, match=r'trace=\.\.\.'):
            modulated.etrace_grad(
                xs, ys, step_fn=lambda x, y: jnp.mean((modulated(x) - y) ** 2)
            )


def test_what_is_no_modulator():
    case = Case('leaky')
    learner = case.learner('three_factor')
    for wrong, reason in (
        ('x', 'a number'),
        (1j, 'a number'),
        (MultiStepData(case.xs), 'one modulator'),
    ):
        with pytest.raises(ValueError, match=reason):
            learner(case.xs[0], modulator=wrong)
    twice = lambda x, y: jnp.sum(
        learner(x, modulator=1.0) + learner(x, modulator=2.0) - y
    )
    with pytest.raises(braintrace.CompilationError, match='two calls with a modulator'):
        learner.etrace_grad(case.xs, case.ys, step_fn=twice)


# ---------------------------------------------------------------- learned credit


def test_dni_is_bptt_in_one_window_and_starts_as_truncated_bptt():
    case = Case('gated')
    close(case.gradient('dni', window=T), case.bptt())
    close(case.gradient('dni', window=2), case.gradient('tbptt', k=2))
    differ(case.gradient('dni', window=2), case.bptt())


def test_a_predictor_of_credit_learns():
    case = Case('leaky')
    learner = case.learner('dni', window=1, predictor=SyntheticGradient(width=32))
    step = loss_of(learner)
    sequences = (case.xs, case.ys)
    gradient = lambda: ravel_pytree(
        case.tree(
            ravel_pytree(
                learner.etrace_grad(
                    *sequences, step_fn=step, reduction='sum', fresh=True
                )
            )[0]
        )
    )[0]
    distance = lambda: float(
        jnp.linalg.norm(gradient() - ravel_pytree(case.tree(case.bptt()))[0])
    )
    before = distance()
    weights = {path: state.value for path, state in learner.param_states.items()}
    errors = braintrace.train_synthetic_gradient(
        learner, *sequences, step_fn=step, updates=400
    )
    assert errors[-1] < 0.5 * errors[0]
    assert distance() < 0.3 * before
    assert all(
        learner.param_states[path].value is value for path, value in weights.items()
    )
    with pytest.raises(ValueError, match='no predictor'):
        braintrace.train_synthetic_gradient(
            case.learner('d_rtrl'), *sequences, step_fn=step
        )
    with pytest.raises(ValueError, match='two windows'):
        braintrace.train_synthetic_gradient(
            learner, case.xs[:1], case.ys[:1], step_fn=step
        )


def test_a_predictor_does_not_overshoot():
    case = Case('adaptive')
    learner = case.learner('dni', window=2)
    step = lambda x, y: 100 * jnp.sum((learner(x) - y) ** 2)
    errors = braintrace.train_synthetic_gradient(
        learner, case.xs, case.ys, step_fn=step, updates=200
    )
    assert errors[-1] < errors[0]
    assert max(errors) < 10 * errors[0]


def test_predicted_credit_counts_as_the_losses_do():
    """Halves are the whole where the predictor stands still, whatever a mask leaves out, and signs do no harm."""
    case = Case('leaky')
    learner = case.learner('dni', window=2)
    step = loss_of(learner)
    braintrace.train_synthetic_gradient(
        learner, case.xs, case.ys, step_fn=step, updates=20
    )
    predictor_weights = learner.rule_state.value

    def run(*parts, mask):
        learner.reset_state()
        total = 0.0
        for part in parts:
            learner.rule_state.value = predictor_weights
            given = (case.xs[part], case.ys[part])
            found = learner.etrace_grad(
                *given, step_fn=step, mask=mask[part], reduction='sum'
            )
            total = total + ravel_pytree(found)[0]
        return total

    mask = jnp.array([0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    close(run(slice(0, 6), mask=mask), run(slice(0, 4), slice(4, 6), mask=mask))
    mean = learner.etrace_grad(case.xs, case.ys, step_fn=step, mask=mask * 0 - 1.0)
    assert jnp.all(jnp.isfinite(ravel_pytree((mean, learner.rule_state.value))[0]))


def test_single_steps_use_the_predictor():
    case = Case('gated')
    learner = case.learner('dni', window=1, predictor=SyntheticGradient(width=16))
    step, sequences = loss_of(learner), (case.xs, case.ys)
    braintrace.train_synthetic_gradient(learner, *sequences, step_fn=step, updates=50)
    predictor_weights = learner.rule_state.value
    learner.reset_state()
    gradient = brainstate.transform.grad(step, learner.param_states)
    found = [gradient(x, y) for x, y in zip(*sequences, strict=True)]
    assert learner.rule_state.value is predictor_weights
    learner.reset_state()
    whole = learner.etrace_grad(*sequences, step_fn=step, reduction='sum')
    single = ravel_pytree(jax.tree.map(lambda *g: sum(g), *found))[0]
    close(single, ravel_pytree(whole)[0])
    differ(single, ravel_pytree(case.tree(case.gradient('tbptt', k=1)))[0])


def test_the_error_of_a_predictor_is_that_of_the_credit_it_is_taught():
    """One that predicts nothing is wrong by the credit itself: ∂(later losses)/∂h at every start but the first."""
    case = Case('leaky')
    learner = case.learner('dni', window=2)
    (error,) = braintrace.train_synthetic_gradient(
        learner, case.xs, case.ys, step_fn=loss_of(learner), updates=1
    )
    states = [case.start]
    for x in case.xs:
        states.append(case.step(case.flat, states[-1], x))

    def window(h, t):
        total = 0.0
        for x, y in zip(case.xs[t : t + 2], case.ys[t : t + 2], strict=True):
            h = case.step(case.flat, h, x)
            total = total + case.loss(case.flat, h, y)
        return total

    credit = [jax.grad(window)(states[t], t) for t in range(2, T, 2)]
    close(error, np.mean([jnp.mean(c**2) for c in credit]))


# ---------------------------------------------------------------- what holds for every rule

RULES = {
    'd_rtrl': {},
    'pp_prop': {},
    'eprop': {'kappa_filter_decay': 0.5, 'feedback': 'random'},
    'ostl_recurrent': {},
    'ostl_feedforward': {},
    'ottt': {},
    'rflo': {},
    'snap': {},
    'rtrl': {},
    'uoro': {},
    'three_factor': {'modulator': 0.3},
    'dni': {'window': 2},
    'bptt': {},
    'tbptt': {'k': 2},
}
WINDOWS = ('dni', 'bptt', 'tbptt')


def test_the_list_is_complete():
    assert {r.replace('_', '') for r in RULES} == {
        r.replace('_', '') for r in braintrace.learner.by_rule.RULES if r != 'es_d_rtrl'
    }


@pytest.mark.parametrize('rule', RULES)
def test_one_step_is_the_plain_gradient_unless_the_signal_differs(rule):
    case = Case('gated', steps=1)
    found = case.gradient(rule, **RULES[rule])
    if rule not in ('eprop', 'three_factor'):
        close(found, case.bptt())
        return
    mine, exact = case.tree(found), case.tree(case.bptt())
    differ(
        mine['cell', 'Wh', 'weight']['weight'], exact['cell', 'Wh', 'weight']['weight']
    )
    assert jnp.linalg.norm(mine['cell', 'Wh', 'weight']['weight']) > 1e-3
    close(mine['out', 'weight']['weight'], exact['out', 'weight']['weight'])


@pytest.mark.parametrize(
    'rule', ['uoro', 'three_factor', *(['eprop', 'ottt', 'snap'] if ALL else [])]
)
def test_halves_steps_and_resets(rule):
    """Two halves are the whole, single steps too; after a reset everything begins anew."""
    case = Case('adaptive', steps=4)
    options = RULES[rule]
    whole = case.learner(rule, **options)
    step = loss_of(whole)
    expected = ravel_pytree(
        whole.etrace_grad(case.xs, case.ys, step_fn=step, reduction='sum')
    )[0]
    parts = case.learner(rule, **options)
    step = loss_of(parts)
    found = 0.0
    for part in (slice(0, 2), slice(2, 4)):
        if rule == 'uoro':
            parts.rule_state.value = jnp.zeros((), jnp.int32)
        found = (
            found
            + ravel_pytree(
                parts.etrace_grad(
                    case.xs[part], case.ys[part], step_fn=step, reduction='sum'
                )
            )[0]
        )
    close(found, expected)
    if rule == 'uoro':
        whole.rule_state.value = jnp.zeros((), jnp.int32)
    whole.reset_state()
    again = whole.etrace_grad(case.xs, case.ys, step_fn=loss_of(whole), reduction='sum')
    close(ravel_pytree(again)[0], expected)
    single, found = case.learner(rule, **options), 0.0
    weights = single.model.states(brainstate.ParamState)
    for x, y in zip(case.xs, case.ys, strict=True):
        if rule == 'uoro':
            single.rule_state.value = jnp.zeros((), jnp.int32)
        one = brainstate.transform.grad(
            lambda x, y: jnp.mean((single(x) - y) ** 2), weights
        )(x, y)
        found = found + ravel_pytree(dict(one))[0]
    close(found, expected)


@pytest.mark.parametrize('rule', ['d_rtrl', 'pp_prop'])
def test_a_trace_that_someone_looked_at_outlives_the_next_call(rule):
    case = Case('adaptive')
    learner = case.learner(rule)
    step = loss_of(learner)
    learner.etrace_grad(case.xs, case.ys, step_fn=step)
    seen = [trace.value for trace in learner.traces.values()]
    before = jax.tree.map(np.array, seen)
    learner.etrace_grad(case.xs, case.ys, step_fn=step)
    jax.tree.map(np.testing.assert_array_equal, seen, before)
    assert any(np.any(x != 0) for x in jax.tree.leaves(before))
    now = [trace.value for trace in learner.traces.values()]
    assert any(
        np.any(a != b)
        for a, b in zip(jax.tree.leaves(now), jax.tree.leaves(before), strict=True)
    )


@pytest.mark.parametrize('rule', RULES)
def test_learning_online(rule):
    """Weights move at every step, the loss of what is seen again and again falls."""
    case = Case('leaky', steps=4)
    options = RULES[rule] | ({'feedback': 'symmetric'} if rule == 'eprop' else {})
    learner = case.learner(rule, **options)
    step = loss_of(learner)
    losses = []
    for _ in range(3):
        learner.reset_state()
        losses.append(
            learner.etrace_online(
                case.xs, case.ys, step_fn=step, optimizer=optax.sgd(0.02)
            ).mean()
        )
    assert jnp.all(jnp.isfinite(jnp.stack(losses)))
    assert rule == 'three_factor' or losses[-1] < losses[0]


@pytest.mark.parametrize('rule', ['pp_prop', 'snap', 'dni'])
def test_memory_is_as_planned(rule):
    learner = Case('leaky', steps=4).learner(rule, **RULES[rule])
    plan = learner.memory_plan(4)
    held = sum(
        x.nbytes for t in learner.traces.values() for x in jax.tree.leaves(t.value)
    )
    assert sum(plan.traces.values()) == held
    assert (held > 0) == (rule not in WINDOWS)
    assert 'BPTT' in str(plan)


def test_every_rule_says_when_it_is_exact_what_it_costs_and_when_to_use_it():
    for name, rule in ((name, preset.default) for name, preset in PRESETS.items()):
        assert all([rule.name, rule.exact_when, *rule.cost, rule.use])
        found = braintrace.learner.by_rule.RULES[name](Gated()).rule
        assert replace(found, multi_step=False) == rule


def test_every_rule_shows_its_options():
    for kind in braintrace.learner.by_rule.RULES.values():
        options = inspect.signature(kind).parameters
        assert {'model', 'check_finite'} < set(options)
        assert 'options' not in options
    assert inspect.signature(braintrace.SnAp).parameters['n'].default == 2


def test_traces_grow_as_stated():
    """Powers of the number of units by which what a rule carries grows."""
    powers = {
        'd_rtrl': 2,
        'pp_prop': 1,
        'eprop': 2,
        'ostlfeedforward': 1,
        'ottt': 1,
        'rflo': 2,
        'snap': 2,
        'rtrl': 3,
    }
    powers |= {'uoro': 2, 'bptt': 0}
    for name, power in (
        powers.items() if ALL else [(name, powers[name]) for name in ('d_rtrl', 'snap')]
    ):
        sizes = []
        for units in (16, 32):
            cell = (nn.ValinaRNNCell if name == 'snap' else nn.GRUCell)(1, units)
            options = {'n': 1} if name == 'snap' else {}
            learner = braintrace.compile(
                cell, name, jnp.ones((1, 1), jnp.float32), batch_size=1, **options
            )
            sizes.append(
                sum(
                    x.size
                    for t in learner.traces.values()
                    for x in jax.tree.leaves(t.value)
                )
            )
        found = np.log2(sizes[1] / sizes[0]) if power else sum(sizes)
        assert abs(found - power) < 0.2, (name, sizes)


def test_rules_are_compared_on_the_users_own_model(tmp_path):
    case = Case('gated')
    learner = case.learner('d_rtrl')
    step = loss_of(learner)
    learner.etrace_grad(case.xs, case.ys, step_fn=step)
    before = jax.tree.map(
        lambda s: s.value,
        dict(learner.states()),
        is_leaf=lambda s: isinstance(s, brainstate.State),
    )
    rules = [
        'd_rtrl',
        'rflo',
        'rtrl',
        'bptt',
        'tbptt',
        *(['dni', 'uoro'] if ALL else []),
    ]
    found = learner.gradient_check(
        case.xs, case.ys, step_fn=step, reduction='sum', rules=[*rules, ETraceConfig()]
    )
    after = jax.tree.map(
        lambda s: s.value,
        dict(learner.states()),
        is_leaf=lambda s: isinstance(s, brainstate.State),
    )
    jax.tree.map(close, after, before)
    exact = jax.tree.leaves(case.tree(case.bptt()))
    for rule in ('RTRL', 'BPTT', 'TBPTT(20)'):
        assert all(row.relative_error < 1e-9 for row in found[rule].rows)
    mine = jax.tree.leaves(case.tree(case.gradient('rflo')))
    cosine = lambda a, b: float(
        jnp.vdot(a, b) / jnp.linalg.norm(a) / jnp.linalg.norm(b)
    )
    cosines = [cosine(a, b) for a, b in zip(mine, exact, strict=True)]
    assert found['RFLO'].cosine == pytest.approx(
        cosine(case.gradient('rflo'), case.bptt())
    )
    assert sorted(row.cosine for row in found['RFLO'].rows) == pytest.approx(
        sorted(cosines)
    )
    assert found['ETraceConfig()'].rows == found['D_RTRL'].rows
    assert 'cosine ×norm, to BPTT' in str(found)
    found.plot(tmp_path / 'rules.png')
    assert (tmp_path / 'rules.png').stat().st_size > 10_000
    for wrong in (['loud'], [], 'rflo', [3]):
        with pytest.raises(ValueError, match='Fix: '):
            learner.gradient_check(case.xs, case.ys, step_fn=step, rules=wrong)
    with pytest.raises(KeyError, match="one of 'D_RTRL', 'RFLO'"):
        found['rflo']
    chosen = [braintrace.RFLO, braintrace.RFLO(learner.model, leak=0.5)]
    again = learner.gradient_check(
        case.xs, case.ys, step_fn=step, reduction='sum', rules=chosen
    )
    assert again.checks[0].rows == found['RFLO'].rows != again.checks[1].rows


# ---------------------------------------------------------------- rules put together from parts


@pytest.mark.parametrize(
    ('rule', 'options'),
    [('three_factor', {'modulator': 2.0}), ('uoro', {}), ('dni', {'window': 2})],
)
def test_comparing_leaves_what_the_learner_reads(rule, options):
    case = Case('leaky')

    def two_calls(compared):
        learner = case.learner(rule, **options)
        step = loss_of(learner)
        if compared:
            same = type(learner)(learner.model, **options)
            learner.gradient_check(
                case.xs, case.ys, step_fn=step, rules=[rule, same, 'd_rtrl']
            )
        return [
            ravel_pytree(
                learner.etrace_grad(case.xs, case.ys, step_fn=step, fresh=True)
            )[0]
            for _ in range(2)
        ]

    jax.tree.map(np.testing.assert_array_equal, two_calls(True), two_calls(False))


def test_a_learner_is_compared_with_what_it_reads():
    case = Case('leaky')
    learner = case.learner('d_rtrl')
    norm = lambda m: (
        learner.gradient_check(
            case.xs,
            case.ys,
            step_fn=loss_of(learner),
            rules=[braintrace.ThreeFactor(learner.model, modulator=m)],
        )['ThreeFactor']['feed.weight.weight'].norm_ratio
    )
    np.testing.assert_allclose(norm(-2.0), 2 * norm(1.0), rtol=1e-6)


def test_presets_are_their_parts():
    pairs = [
        (ETraceConfig(), ('d_rtrl', {})),
        (
            ETraceConfig(trace_filter='kappa', kappa=0.5),
            ('eprop', {'kappa_filter_decay': KappaFilter(0.5)}),
        ),
        (
            ETraceConfig(learning_signal='random_feedback', trace_filter='readout'),
            ('eprop', {'feedback': 'random'}),
        ),
        (ETraceConfig('io_factorized', decay=0.9), ('pp_prop', {'decay_or_rank': 0.9})),
        (
            ETraceConfig('io_factorized', 'scalar_leak', decay=0.9),
            ('ostl_feedforward', {'decay_or_rank': 0.9}),
        ),
        (ETraceConfig('io_factorized', 'none', decay=0.9), ('ottt', {'leak': 0.9})),
        (
            ETraceConfig(temporal_recursion='scalar_leak', decay=0.6),
            ('rflo', {'leak': 0.6}),
        ),
        (ETraceConfig(recurrence_scope='coupled'), ('rtrl', {})),
        (ETraceConfig(recurrence_scope='sparse_n', sparse_n=1), ('snap', {'n': 1})),
        (ETraceConfig('random_projection', recurrence_scope='coupled'), ('uoro', {})),
        (ETraceConfig(learning_signal='modulatory'), ('three_factor', {})),
        (ETraceConfig('none', update_schedule='sequence_end'), ('bptt', {})),
        (
            ETraceConfig('none', update_schedule='window', window_size=2),
            ('tbptt', {'k': 2}),
        ),
    ]
    words = {'name': '', 'exact_when': '', 'cost': (), 'use': '', 'multi_step': False}
    for config, (name, options) in pairs:
        preset = braintrace.learner.by_rule.RULES[named(name).name](
            Gated(), **options
        ).rule
        assert replace(config.rule, **words) == replace(preset, **words)
    case = Case('adaptive')
    close(case.gradient(pairs[1][0]), case.gradient('eprop', **pairs[1][1][1]))


def test_a_new_combination_needs_no_new_engine():
    case = Case('adaptive')
    config = ETraceConfig(
        temporal_recursion='scalar_leak', decay=0.6, trace_filter='kappa', kappa=0.3
    )
    leak = lambda d, e: 0.6 * e
    close(case.gradient(config), case.by_filter(kappa=0.3, recursion=leak))
    mixed = ETraceConfig('io_factorized', decay=0.9, learning_signal='random_feedback')
    differ(case.gradient(mixed), case.gradient('pp_prop'))


def test_combinations_without_a_meaning_are_refused():
    wrong = [
        {'trace_filter': 'kappa'},
        {'kappa': 0.5},
        {'trace_factorization': 'io_factorized'},
        {
            'trace_factorization': 'io_factorized',
            'decay': 0.9,
            'trace_filter': 'kappa',
            'kappa': 0.5,
        },
        {
            'trace_factorization': 'io_factorized',
            'decay': 0.9,
            'recurrence_scope': 'coupled',
        },
        {'recurrence_scope': 'sparse_n'},
        {'recurrence_scope': 'coupled', 'temporal_recursion': 'none'},
        {'recurrence_scope': 'coupled', 'learning_signal': 'modulatory'},
        {'temporal_recursion': 'scalar_leak'},
        {'update_schedule': 'window'},
        {'update_schedule': 'window', 'window_size': 3},
        {'trace_factorization': 'none'},
        {'learning_signal': 'loud'},
        {
            'trace_factorization': 'none',
            'update_schedule': 'sequence_end',
            'recurrence_scope': 'coupled',
        },
        {
            'trace_factorization': 'none',
            'update_schedule': 'sequence_end',
            'decay': 0.5,
        },
        {'recurrence_scope': 'coupled', 'decay': 0.5},
        *(
            {'temporal_recursion': 'scalar_leak', 'decay': d}
            for d in (1.5, -0.5, np.nan, 5, 'x', (0.5, 0.9))
        ),
        *({'trace_filter': 'kappa', 'kappa': k} for k in (1.5, KappaFilter(0.5))),
        *({'recurrence_scope': 'sparse_n', 'sparse_n': n} for n in (0, -1, 1.5, True)),
        {'trace_factorization': 'none', 'update_schedule': 'window', 'window_size': 0},
        {'trace_factorization': 'io_factorized', 'decay': 1.5},
    ]
    for options in wrong:
        with pytest.raises(ValueError, match='Fix: '):
            ETraceConfig(**options)
    for kind, options in [
        (FixedRandomFeedback, {'align': 3.0}),
        (FixedRandomFeedback, {'scale': np.nan}),
        (FixedRandomFeedback, {'key': 1.5}),
        (SyntheticGradient, {'rate': np.nan}),
        (SyntheticGradient, {'width': 0}),
        (KappaFilter, {'kappa': 1.0}),
    ]:
        with pytest.raises(ValueError, match='Fix: '):
            kind(**options)
    case = Case('leaky')
    for rule in ('eprop', 'rtrl'):
        extra = {'feedback': 'random'} if rule == 'eprop' else {}
        with pytest.raises(ValueError, match='Fix: '):
            case.learner(rule, **extra, reach='deep')
    learner = case.learner('rflo')
    with pytest.raises(ValueError, match='modulator'):
        learner(case.xs[0], modulator=1.0)
    for rule, options in [
        ('rflo', {'leak': 1.5}),
        ('snap', {'n': 0}),
        ('eprop', {'feedback': 'loud'}),
        ('eprop', {'feedback': np.ones((H, O + 1))}),
        ('eprop', {'feedback': np.ones(H)}),
        ('eprop', {'kappa_filter_decay': 0.5, 'reach': 'local'}),
        ('pp_prop', {'reach': 'readout'}),
        ('three_factor', {'reach': 'readout'}),
        ('rtrl', {'reach': 'readout'}),
        ('ottt', {'leak': -1}),
        ('dni', {'predictor': 'good'}),
    ]:
        with pytest.raises(ValueError, match='Fix: '):
            case.learner(rule, **options)


def test_numbers_may_be_those_of_numpy_and_jax():
    assert (
        braintrace.EProp(Leaky(), kappa_filter_decay=np.float32(0.5)).rule.filter == 0.5
    )
    assert (
        braintrace.EProp(Leaky(), kappa_filter_decay=jnp.asarray(0.5)).rule.filter
        == 0.5
    )
    assert braintrace.SnAp(Leaky(), n=np.int64(2)).rule.trace.n == 2
    assert braintrace.pp_prop(Leaky(), decay_or_rank=np.int64(3)).rule.decay == (
        0.5,
        0.5,
    )
    assert (
        braintrace.ThreeFactor(Leaky(), kappa_filter_decay=KappaFilter(0.5)).rule.filter
        == 0.5
    )
    keys = [jax.random.key(7), jax.random.PRNGKey(7), 7]
    assert {
        braintrace.EProp(
            Leaky(), feedback='random', random_feedback_key=key
        ).rule.signal.weights.key
        for key in keys
    } == {7}


def test_a_running_mean_of_gradients():
    mean, state = GradExpon(0.5)({'w': jnp.asarray(2.0)})
    assert mean == {'w': 2.0}
    mean, state = GradExpon(0.5)({'w': jnp.asarray(5.0)}, state)
    assert mean == {'w': (0.5 * 0.5 * 2 + 0.5 * 5) / 0.75}


@pytest.mark.parametrize('rule', ['d_rtrl', 'rflo', 'pp_prop', 'bptt', 'snap'])
def test_the_report_names_the_rule(rule):
    inputs = jnp.ones((1, 2), 'float32')
    learner = braintrace.compile(
        brainstate.nn.GRUCell(2, 3), rule, inputs, batch_size=1
    )
    told = str(learner.report)
    assert f'equal to BPTT when: {learner.rule.exact_when}' in told
    assert f'what {learner.rule.name} gives' in told
