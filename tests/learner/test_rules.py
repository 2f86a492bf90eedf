"""What single rules do beside their formula: random signs, feedback, modulators, predictors, sizes."""

import os

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import braintrace
from braintrace import (
    ETraceConfig,
    FixedRandomFeedback,
    MultiStepData,
    SyntheticGradient,
)
from formulas import Local, loss, relative_error
from gradients.cases import B, H, I, O, T, compiled, drawn, oracle_of

nn = brainstate.nn
ALL = os.environ.get('ZOO') == 'all'


@pytest.fixture(autouse=True)
def _double(x64):
    """All of this file is in float64."""
    with brainstate.environ.context(precision=64, dt=1.0):
        yield


def flat(gradient):
    return np.asarray(ravel_pytree(dict(gradient))[0])


def data(name='leaky'):
    return oracle_of(name).xs, oracle_of(name).ys


def gradient(name, rule, fresh=True, **options):
    learner, step = compiled(name, rule, **options)
    found = learner.etrace_grad(*data(name), step_fn=step, reduction='sum', fresh=fresh)
    return flat(found)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


def differ(a, b):
    assert np.linalg.norm(a - b) > 1e-3 * np.linalg.norm(b)


def sizes(learner):
    return sum(
        x.size for t in learner.traces.values() for x in jax.tree.leaves(t.value)
    )


# ---------------------------------------------------------------- feedback


def test_weights_of_feedback_are_drawn_by_a_key():
    """Passed as arrays they give the same; `test_table` has the formula."""
    weights = FixedRandomFeedback(key=3)(0, (H, O), jnp.float64)
    found = gradient('leaky', 'eprop', feedback='random', random_feedback_key=3)
    close(found, gradient('leaky', 'eprop', feedback=weights))
    close(found, gradient('leaky', 'eprop', feedback=FixedRandomFeedback(key=3)))
    louder = FixedRandomFeedback(key=3, scale=2 / H**0.5)
    twice = gradient('leaky', 'eprop', feedback=2 * weights)
    close(gradient('leaky', 'eprop', feedback=louder), twice)
    other = gradient(
        'leaky', 'rflo', leak=0.7, feedback='random', random_feedback_key=3
    )
    config = ETraceConfig(
        temporal_recursion='scalar_leak', decay=0.7, learning_signal='random_feedback'
    )
    same = gradient('leaky', 'rflo', leak=0.7, feedback='random')
    close(same, gradient('leaky', config))
    differ(same, other)


def test_adaptive_feedback_comes_closer_to_the_weights_with_every_update():
    align = FixedRandomFeedback(key=1, align=0.5)
    learner, step = compiled('leaky', 'eprop', feedback=align)
    fixed = FixedRandomFeedback(key=1)(0, (H, O), jnp.float64)
    for left in (1.0, 0.5, 0.25):
        found = learner.etrace_grad(*data(), step_fn=step, reduction='sum', fresh=True)
        weights = left * fixed + (1 - left) * oracle_of('leaky').p['out']
        close(flat(found), gradient('leaky', 'eprop', feedback=weights))


def test_feedback_of_factors():
    mixed = ETraceConfig('io_factorized', decay=0.9, learning_signal='random_feedback')
    differ(gradient('adaptive', mixed), gradient('adaptive', 'pp_prop'))


# ---------------------------------------------------------------- factors


class One(nn.Module):
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
    step = lambda x: learner(x) ** 2
    found = learner.etrace_grad(xs, step_fn=step, reduction='sum', fresh=True)['w',]
    h = e_f = e_x = wanted = 0.0
    for t, x in enumerate(np.asarray(xs)):
        h = 0.8 * h + np.tanh(0.7 * x)
        # ∂y/∂w = x is on the side that remembers
        on_x, on_f = (1, x) if decay_f else (x, 1)
        e_f = decay_f * 0.8 * e_f + (1 - decay_f) * on_f * (1 - np.tanh(0.7 * x) ** 2)
        e_x = 0.9 * e_x + on_x
        wanted += 2 * h * e_f * e_x / (1 - decay_f ** (t + 1))
    close(found, wanted)


@pytest.mark.parametrize(('leak', 'exact'), [(0.8, True), (0.7, False)])
def test_ottt_of_element_wise_weights(leak, exact):
    def step(p, h, x):
        h = 0.8 * h + jnp.sin(x) * p['w']
        return h, h

    p, xs = {'w': jnp.linspace(0.5, 1.5, H)}, jnp.asarray(drawn(T, B, H))
    learner = braintrace.compile(step, 'ottt', p, jnp.zeros((B, H)), xs[0], leak=leak)
    check = learner.gradient_check(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2))
    assert (check['w'].relative_error < 1e-9) == exact
    assert exact or check['w'].relative_error > 1e-3


def test_factors_of_one_sum_share_their_states_side():
    xs = jnp.asarray(drawn(T, B, I))
    learner = braintrace.compile(nn.GRUCell(I, H), 'pp_prop', xs[0], batch_size=B)
    learner.etrace_evolve(xs)
    held = [x for trace in learner.traces.values() for x in trace.value.f.values()]
    assert len(learner.traces) == 6
    # One for the update gate, one for the candidate.
    assert [x.shape for x in held] == [(B, H)] * 2
    for name in ('Wrz', 'Wh'):
        _, factors = learner.traces_of((name, 'weight'))
        first, *others = [factor[0] for factor in factors.values()]
        assert len(others) == 2
        assert np.abs(first).max() > 1e-3
        for other in others:
            close(other, first)


def test_a_weight_without_factors_has_its_own_trace_beside_factors():
    """A dense layer, which factorises, and an embedding, which does not, enter one sum."""

    def step(p, h, x):
        drive = x @ p['w'] + p['u'][jnp.argmax(x, axis=-1)]
        h = 0.9 * h + jnp.tanh(drive)
        return h, h

    p = {'w': jnp.asarray(drawn(I, H)), 'u': jnp.asarray(drawn(I, H, seed=8))}
    xs, found = jnp.asarray(drawn(T, B, I)), []
    for rule in ('pp_prop', 'd_rtrl'):
        learner = braintrace.compile(step, rule, p, jnp.zeros((B, H)), xs[0])
        run = lambda xs, learner=learner: learner.etrace_grad(
            xs, step_fn=lambda x: jnp.sum(learner(x) ** 2)
        )
        found.append([run(part)['u'] for part in (xs[:3], xs[3:])])
    close(*found)


# ---------------------------------------------------------------- influences on all states


def test_snap_holds_less_for_a_sparse_recurrence():
    """So many states for each parameter and sample."""
    rules = [('snap', {'n': 1}), ('snap', {'n': 2}), ('snap', {'n': H}), ('rtrl', {})]
    held = [sizes(compiled('ring', rule, **given)[0]) - 1 for rule, given in rules]
    assert held == [B * oracle_of('ring').q.size * n for n in (1, 2, H, H)]


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


def distant(p, s, symbol):
    """Symbols drive units whose potentials, and the moments when they may fire, are far from zero."""
    z = narrow(s['V'] + 59.5) * (s['rest'] == 0)
    V = -60 + 0.9 * (s['V'] + 60) + p['table'][symbol] + z @ p['recur']
    return {'V': V, 'rest': (z > 0).astype(int)}, V


def test_snap_reaches_what_no_draw_of_values_opens():
    rng = np.random.default_rng(0)
    symbols = jnp.asarray(np.random.default_rng(1).integers(0, 9, (T, B)))
    p = {'table': rng.normal(size=(9, H)), 'recur': rng.normal(size=(H, H))}
    s = {'V': jnp.full((B, H), -60.0), 'rest': jnp.zeros((B, H), int)}
    found = []
    for rule, options in [('snap', {'n': 1}), ('snap', {'n': 2}), ('bptt', {})]:
        learner = braintrace.compile(
            distant, rule, jax.tree.map(jnp.asarray, p), s, symbols[0], **options
        )
        step = lambda x, learner=learner: jnp.mean((learner(x) + 60) ** 2)
        found.append(flat(learner.etrace_grad(symbols, step_fn=step, fresh=True)))
    close(found[1], found[2])
    differ(found[0], found[2])


def delayed(p, s, x):
    """Units read what they were three steps ago, from a buffer that is written at a moving place."""
    at = s['at'] % 4
    drive = x @ p['w'] + s['buffer'][(at + 1) % 4] @ p['recur']
    h = jnp.tanh(drive)
    return {'buffer': s['buffer'].at[at].set(h), 'at': s['at'] + 1}, h


def test_snap_reaches_all_places_of_a_buffer():
    p = {'w': jnp.asarray(drawn(I, H)), 'recur': jnp.asarray(drawn(H, H))}
    s = {'buffer': jnp.zeros((4, B, H)), 'at': jnp.zeros((), int)}
    xs, found = jnp.asarray(drawn(9, B, I)), []
    for rule, options in [('snap', {'n': 9}), ('bptt', {})]:
        learner = braintrace.compile(delayed, rule, p, s, xs[0], **options)
        step = lambda x, learner=learner: jnp.sum(learner(x) ** 2)
        found.append(flat(learner.etrace_grad(xs, step_fn=step, fresh=True)))
    close(*found)


@pytest.mark.parametrize('name', ['leaky', 'complex_weights'])
def test_uoro_is_right_in_the_mean(name):
    learner, step = compiled(name, 'uoro', seed=5)
    call = lambda: flat(
        learner.etrace_grad(*data(name), step_fn=step, reduction='sum', fresh=True)
    )
    draws = np.stack([call() for _ in range(1000)]).view(float)
    wanted = flat(oracle_of(name).bptt()).view(float)
    error, spread = draws.mean(0) - wanted, draws.std(0) / len(draws) ** 0.5
    assert np.all(np.abs(error) <= 5 * spread + 1e-12)
    assert spread.max() > 1e-4  # it is random
    assert np.linalg.norm(error) < 0.2 * np.linalg.norm(wanted)


def test_the_seed_of_compile_is_that_of_a_rule_that_draws():
    found = [gradient('leaky', 'uoro', seed=seed) for seed in (1, 1, 2)]
    close(found[0], found[1])
    differ(found[0], found[2])


def test_uoro_in_halves_single_steps_and_after_a_reset():
    """With the same signs at each call."""
    xs, ys = data('adaptive')
    learner, step = compiled('adaptive', 'uoro')
    one = brainstate.transform.grad(step, learner.param_states)

    def run(part, single=False):
        learner.rule_state.value = jnp.zeros((), jnp.int32)
        if single:
            return flat(one(xs[part], ys[part]))
        given = (xs[part], ys[part])
        return flat(learner.etrace_grad(*given, step_fn=step, reduction='sum'))

    expected = run(slice(0, T))
    for parts, single in (
        ([slice(0, T)], False),
        ([slice(0, 2), slice(2, T)], False),
        (range(T), True),
    ):
        learner.reset_state()
        close(sum(run(part, single) for part in parts), expected)


@pytest.mark.parametrize(
    ('rule', 'options'), [('uoro', {}), ('eprop', {'feedback': 'adaptive'})]
)
def test_a_loop_of_single_steps_is_training_online(rule, options):
    """Signs are drawn anew and feedback comes closer at each step, as they do in the compiled loop."""
    (online, step), (single, one) = (compiled('leaky', rule, **options) for _ in '12')
    losses = online.etrace_online(*data(), step_fn=step, optimizer=optax.sgd(0.1))
    optimizer, found = optax.sgd(0.1), []
    grad = brainstate.transform.grad(one, single.param_states, return_value=True)
    for x, y in zip(*data(), strict=True):
        gradients, value = grad(x, y)
        single.apply({path[0]: g for path, g in gradients.items()}, optimizer)
        found.append(value)
    close(jnp.stack(found), losses)
    assert single.rule_state.value == online.rule_state.value == T
    assert relative_error(single.params, oracle_of('leaky').p) > 1e-3


# ---------------------------------------------------------------- modulators


@pytest.mark.parametrize('shape', [(), (B,)])
def test_a_modulator_of_every_step_may_be_computed_there(shape):
    (xs, ys), o = data(), oracle_of('leaky')
    ms = jnp.asarray(drawn(T, *shape))
    learner, _ = compiled('leaky', 'three_factor')
    step = lambda x, y, m: loss(learner(x, modulator=2 * m)[0], y, [], 0)
    found = learner.etrace_grad(xs, ys, ms, step_fn=step, reduction='sum', fresh=True)
    h, trace, total, q = o.h, Local().start(o), 0.0, o.q
    for x, y, m in zip(xs, ys, ms, strict=True):
        (new, _), now = o.step(q, h, x), o.local(q, h, x)[1]
        signal = jax.grad(o.loss_of_states, 1)(q, new, h, y)
        total += jax.grad(o.value)(q, h, x, y) - signal @ now
        _, trace = Local().step(o, q, h, trace, x, y)
        full = jnp.broadcast_to(m[:, None] if shape else m, (B, H))
        h, total = new, total + 2 * full.ravel() @ trace[0]
    close(flat(found), total)


def test_a_standing_modulator_is_read_under_jit():
    learner, step = compiled('leaky', 'three_factor', modulator=1.0)
    run = brainstate.transform.jit(
        lambda: learner.etrace_grad(*data(), step_fn=step, fresh=True)
    )
    first = run()['w']
    learner.rule_state.value = jnp.asarray(3.0)
    close(run()['w'], 3 * first)
    learner.rule_state.value = jnp.ones(7)
    with pytest.raises(braintrace.CompilationError, match='modulator'):
        learner.etrace_grad(*data(), step_fn=step)


def test_a_modulator_of_a_step_leaves_the_standing_one():
    xs, ys = data()
    learner, plain = compiled('leaky', 'three_factor', modulator=2.0)
    model = lambda x, y, m: learner(x, modulator=m)[0]
    step = lambda x, y, m: jnp.mean((model(x, y, m) - y) ** 2)
    ms = jnp.ones((T, B, 1)).at[1].set(jnp.nan)
    mask = jnp.ones(T).at[1].set(0.0)
    for _ in range(2):
        found = learner.etrace_grad(xs, ys, ms, step_fn=step, mask=mask, fresh=True)
        assert np.isfinite(flat(found)).all()
    learner(xs[0], modulator=jnp.full((B, H), 100.0))
    assert learner.evaluate(xs, ys, ms, step_fn=model).shape == (T, B, O)
    both = learner.gradient_check(
        xs, ys, ms.at[1].set(1.0), step_fn=step, rules=['threefactor', 'rtrl']
    )
    assert all(row.relative_error < 1e-9 for row in both['RTRL'].rows)
    assert learner.rule_state.value == 2.0
    found = learner.etrace_grad(xs, ys, step_fn=plain, reduction='sum', fresh=True)
    close(flat(found), gradient('leaky', 'three_factor', modulator=2.0))


class LeakyOut(nn.Module):
    """Leaky units and a read-out that leaks, of another size."""

    def __init__(self):
        super().__init__()
        self.feed = nn.Linear(I, H)
        self.out = braintrace.nn.LeakyRateReadout(H, O, tau=5.0)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, H)))

    def update(self, x):
        self.h.value = 0.8 * self.h.value + jnp.tanh(self.feed(x))
        return self.out(self.h.value)


def test_a_modulator_for_the_units_and_a_loss_for_the_readout():
    brainstate.random.seed(0)
    xs, ys = data()

    def run(ys, **options):
        learner = braintrace.compile(
            LeakyOut(),
            'three_factor',
            xs[0],
            batch_size=B,
            modulator=jnp.ones((1, H)),
            **options,
        )
        for state in learner.param_states.values():
            fill = lambda x: jnp.asarray(drawn(*x.shape))
            state.value = jax.tree.map(fill, state.value)
        step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
        return learner.etrace_grad(xs, ys, step_fn=step, fresh=True)

    found, other = (run(k * ys, trace=lambda p: p[0] != 'out') for k in (1, 7))
    named = lambda g, first: flat({p: v for p, v in g.items() if p[0] == first})
    close(named(found, 'feed'), named(other, 'feed'))
    differ(named(found, 'out'), named(other, 'out'))
    with pytest.raises(braintrace.CompilationError, match='trace='):
        run(ys)


def test_what_is_no_modulator():
    xs, ys = data()
    learner, _ = compiled('leaky', 'three_factor')
    for wrong in ('x', 1j, MultiStepData(xs)):
        with pytest.raises(ValueError, match='modulator'):
            learner(xs[0], modulator=wrong)
    call = lambda x, m: learner(x, modulator=m)[0]
    twice = lambda x, y: jnp.sum(call(x, 1.0) + call(x, 2.0) - y)
    with pytest.raises(braintrace.CompilationError, match='two calls'):
        learner.etrace_grad(xs, ys, step_fn=twice)
    with pytest.raises(ValueError, match='modulator'):
        compiled('leaky', 'rflo')[0](xs[0], modulator=1.0)


# ---------------------------------------------------------------- predicted credit


def trained(name, updates, scale=1.0, **options):
    learner, step = compiled(name, 'dni', **options)
    louder = lambda x, y: scale * step(x, y)
    errors = braintrace.train_synthetic_gradient(
        learner, *data(name), step_fn=louder, updates=updates
    )
    return learner, step, errors


def test_a_predictor_of_credit_learns():
    wide = {'window': 1, 'predictor': SyntheticGradient(width=32)}
    (learner, step), wanted = (
        compiled('leaky', 'dni', **wide),
        oracle_of('leaky').bptt(),
    )

    def distance():
        given = {'step_fn': step, 'reduction': 'sum', 'fresh': True}
        return np.linalg.norm(
            flat(learner.etrace_grad(*data(), **given)) - flat(wanted)
        )

    before, weights = distance(), learner.params
    errors = braintrace.train_synthetic_gradient(
        learner, *data(), step_fn=step, updates=400
    )
    assert errors[-1] < 0.5 * errors[0]
    assert distance() < 0.3 * before
    jax.tree.map(np.testing.assert_array_equal, learner.params, weights)
    train = braintrace.train_synthetic_gradient
    with pytest.raises(ValueError, match='no predictor'):
        train(compiled('leaky', 'd_rtrl')[0], *data(), step_fn=step)
    with pytest.raises(ValueError, match='two windows'):
        train(learner, *(x[:1] for x in data()), step_fn=step)


def test_a_predictor_does_not_overshoot():
    _, _, errors = trained('adaptive', 200, scale=400.0, window=2)
    assert errors[-1] < errors[0]
    assert max(errors) < 10 * errors[0]


def test_predicted_credit_counts_as_the_losses_do():
    """Halves are the whole where the predictor stands still, whatever a mask leaves out, and signs do no harm."""
    learner, step, _ = trained('leaky', 20, window=2)
    (xs, ys), predictor_weights = data(), learner.rule_state.value

    def run(*parts, mask):
        learner.reset_state()
        total = 0.0
        for part in parts:
            learner.rule_state.value = predictor_weights
            given = {'step_fn': step, 'mask': mask[part], 'reduction': 'sum'}
            total = total + flat(learner.etrace_grad(xs[part], ys[part], **given))
        return total

    mask = jnp.zeros(T).at[-1].set(1.0)
    close(run(slice(0, 6), mask=mask), run(slice(0, 4), slice(4, 6), mask=mask))
    mean = learner.etrace_grad(xs, ys, step_fn=step, mask=mask * 0 - 1.0)
    assert np.isfinite(flat(mean)).all()
    assert np.isfinite(ravel_pytree(learner.rule_state.value)[0]).all()


def test_single_steps_use_the_predictor():
    wide = {'window': 1, 'predictor': SyntheticGradient(width=16)}
    learner, step, _ = trained('gru', 50, **wide)
    predictor_weights = learner.rule_state.value
    learner.reset_state()
    grad = brainstate.transform.grad(step, learner.param_states)
    single = sum(flat(grad(x, y)) for x, y in zip(*data('gru'), strict=True))
    assert learner.rule_state.value is predictor_weights
    learner.reset_state()
    whole = learner.etrace_grad(*data('gru'), step_fn=step, reduction='sum')
    close(single, flat(whole))
    differ(single, gradient('gru', 'tbptt', k=1))


def test_the_error_of_a_predictor_is_that_of_the_credit_it_is_taught():
    """One that predicts nothing is wrong by the credit itself: ∂(later losses)/∂h at every start but the first."""
    _, _, (error,) = trained('leaky', 1, window=2)
    o, s, credit = oracle_of('leaky'), oracle_of('leaky').s, []
    for t in range(0, T, 2):
        _, found, s, _ = o.reverse(o.p, s, o.xs[t : t + 2], o.ys[t : t + 2])
        credit.append(jnp.mean(found['h'] ** 2))
    close(error, np.mean(credit[1:]))


# ---------------------------------------------------------------- of all rules


@pytest.mark.parametrize(
    ('rule', 'options'),
    [('uoro', {}), ('dni', {'window': 2}), ('bptt', {}), ('tbptt', {'k': 2})],
)
def test_learning_online(rule, options):
    """Rules whose weights `test_table` does not follow: the loss of what is seen again and again falls."""
    learner, step = compiled('leaky', rule, **options)
    losses = []
    for _ in range(3):
        learner.reset_state()
        given = {'step_fn': step, 'optimizer': optax.sgd(0.02)}
        losses.append(learner.etrace_online(*data(), **given).mean())
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize('rule', ['d_rtrl', 'pp_prop'])
def test_a_trace_that_was_read_outlives_the_next_call(rule):
    learner, step = compiled('adaptive', rule)
    traces = lambda: [trace.value for trace in learner.traces.values()]
    learner.etrace_grad(*data('adaptive'), step_fn=step)
    read = traces()
    before = jax.tree.map(np.array, read)
    learner.etrace_grad(*data('adaptive'), step_fn=step)
    jax.tree.map(np.testing.assert_array_equal, read, before)
    now, then = (ravel_pytree(tree)[0] for tree in (traces(), before))
    assert np.any(then != 0)
    assert np.any(now != then)


@pytest.mark.parametrize(('rule', 'held'), [('pp_prop', 1), ('snap', 1), ('dni', 0)])
def test_memory_is_as_planned(rule, held):
    learner, _ = compiled('leaky', rule, **({'window': 2} if rule == 'dni' else {}))
    plan = learner.memory_plan(4)
    values = [t.value for t in learner.traces.values()]
    found = sum(x.nbytes for x in jax.tree.leaves(values))
    assert sum(plan.traces.values()) == found
    assert (found > 0) == held
    assert 'BPTT' in str(plan)


def test_traces_grow_as_stated():
    """Powers of the number of units by which what a rule carries grows."""
    powers = {'d_rtrl': 2, 'snap': 2}
    if ALL:
        powers |= {'pp_prop': 1, 'eprop': 2, 'ostlfeedforward': 1, 'ottt': 1}
        powers |= {'rflo': 2, 'rtrl': 3, 'uoro': 2, 'bptt': 0}
    for name, power in powers.items():
        found = []
        for units in (16, 32):
            cell = (nn.ValinaRNNCell if name == 'snap' else nn.GRUCell)(1, units)
            options = {'n': 1} if name == 'snap' else {}
            learner = braintrace.compile(
                cell, name, jnp.ones((1, 1)), batch_size=1, **options
            )
            found.append(sizes(learner))
        grown = np.log2(found[1] / found[0]) if power else sum(found)
        assert abs(grown - power) < 0.2, (name, found)


# ---------------------------------------------------------------- rules compared


def test_rules_are_compared_on_the_users_own_model(tmp_path):
    learner, step = compiled('gru', 'd_rtrl')
    learner.etrace_grad(*data('gru'), step_fn=step)
    values = lambda: {k: v.value for k, v in learner.states().items()}
    before = values()
    rules = [
        'd_rtrl',
        'rflo',
        'rtrl',
        'bptt',
        'tbptt',
        *(['dni', 'uoro'] if ALL else []),
    ]
    compare = lambda rules: learner.gradient_check(
        *data('gru'), step_fn=step, reduction='sum', rules=rules
    )
    found = compare([*rules, ETraceConfig()])
    jax.tree.map(close, values(), before)
    for rule in ('RTRL', 'BPTT', 'TBPTT(20)'):
        assert all(row.relative_error < 1e-9 for row in found[rule].rows)
    mine, exact = gradient('gru', 'rflo'), flat(oracle_of('gru').bptt())
    cosine = mine @ exact / np.linalg.norm(mine) / np.linalg.norm(exact)
    assert found['RFLO'].cosine == pytest.approx(cosine)
    assert found['ETraceConfig()'].rows == found['D_RTRL'].rows
    assert 'to BPTT' in str(found)
    found.plot(tmp_path / 'rules.png')
    assert (tmp_path / 'rules.png').stat().st_size > 10_000
    for wrong in (['loud'], [], 'rflo', [3]):
        with pytest.raises(ValueError, match='Fix: '):
            compare(wrong)
    with pytest.raises(KeyError, match='D_RTRL'):
        found['rflo']
    again = compare([braintrace.RFLO, braintrace.RFLO(learner.model, leak=0.5)])
    assert again.checks[0].rows == found['RFLO'].rows != again.checks[1].rows


@pytest.mark.parametrize(
    ('rule', 'options'),
    [('three_factor', {'modulator': 2.0}), ('uoro', {}), ('dni', {'window': 2})],
)
def test_comparing_leaves_what_the_learner_reads(rule, options):
    def two_calls(compared):
        learner, step = compiled('leaky', rule, **options)
        if compared:
            same = type(learner)(learner.model, **options)
            learner.gradient_check(*data(), step_fn=step, rules=[rule, same, 'd_rtrl'])
        run = lambda: learner.etrace_grad(*data(), step_fn=step, fresh=True)
        return [flat(run()) for _ in range(2)]

    np.testing.assert_array_equal(two_calls(True), two_calls(False))


def test_a_learner_is_compared_with_what_it_reads():
    learner, step = compiled('leaky', 'd_rtrl')

    def norm(m):
        rule = braintrace.ThreeFactor(learner.model, modulator=m)
        found = learner.gradient_check(*data(), step_fn=step, rules=[rule])
        return found['ThreeFactor']['w'].norm_ratio

    np.testing.assert_allclose(norm(-2.0), 2 * norm(1.0), rtol=1e-6)


def test_compiling_leaves_the_rule_as_it_was_given():
    """That a model has no leaky read-out is a fact of the model, whichever learner uses it."""
    own, step = compiled('adaptive', 'eprop', kappa=0.7)
    given = braintrace.EProp(own.model, kappa=0.7)
    assert own.rule == given.rule
    alone = own.gradient_check(*data('adaptive'), step_fn=step)
    beside = own.gradient_check(
        *data('adaptive'), step_fn=step, rules=[given, 'd_rtrl']
    )
    assert beside.checks[0] == alone
    assert beside.checks[1].cosine != alone.cosine


def test_a_filter_with_kappa_zero_has_no_trace():
    shapes = lambda **options: [
        jax.tree.map(jnp.shape, t.value)
        for t in compiled('adaptive', 'eprop', **options)[0].traces.values()
    ]
    assert shapes(kappa_filter_decay=0.0) == shapes(kappa=None)


@pytest.mark.parametrize('shape', [(H, O + 1), (H + 1, O)])
def test_feedback_of_a_wrong_shape(shape):
    with pytest.raises(ValueError, match='shape'):
        compiled('leaky', 'eprop', feedback=np.ones(shape))


@pytest.mark.parametrize('rule', ['d_rtrl', 'rflo', 'pp_prop', 'bptt', 'snap'])
def test_the_report_names_the_rule(rule):
    learner, _ = compiled('leaky', rule)
    for word in (learner.rule.exact_when, f'what {learner.rule.name} gives'):
        assert word in str(learner.report)
