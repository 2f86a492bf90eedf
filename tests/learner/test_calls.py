"""What goes into the calls of a learner and what comes out: masks, values, refusals, updates; compiled once."""

import dataclasses
import functools

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import braintrace
from braintrace import BPTT, D_RTRL, TBPTT, CompilationError, MultiStepData, pp_prop
from formulas import Local, Oracle, assert_equal, loss, total_of
from gradients.cases import CASES, B, H, I, T, oracle_of

nn = brainstate.nn
TIED = dataclasses.replace(CASES['tied'], rest=0.2, seen=None)


@pytest.fixture(autouse=True)
def _double(x64):
    """All of this file is in float64."""
    with brainstate.environ.context(precision=64):
        yield


class Tied(nn.Module):
    """The case `tied` as a module."""

    def __init__(self):
        super().__init__()
        self.w, self.r = (brainstate.ParamState(oracle().p[name]) for name in 'wr')

    def init_state(self, batch_size=None):
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*lead, H)))

    def update(self, x):
        drive = x @ self.w.value + self.h.value @ self.r.value
        self.h.value = 0.8 * self.h.value + 0.2 * jnp.tanh(drive)
        return self.h.value @ self.r.value


@functools.cache
@jax.enable_x64(True)
def oracle():
    o = oracle_of('tied')
    return Oracle(TIED, o.p, {'h': jnp.zeros((B, H))}, o.xs, o.ys)


XS, YS = oracle().xs, oracle().ys


def from_zero(xs, ys):
    """The formula for other inputs, by path."""
    start = {'h': jnp.zeros((xs.shape[1], H))}
    return by_path(Oracle(TIED, oracle().p, start, xs, ys).by(Local()))


def by_path(tree):
    return {(name,): value for name, value in tree.items()}


def wanted():
    return by_path(oracle().by(Local()))


def step_of(learner):
    return lambda x, y: loss(learner(x), y, [learner.model.h.value], 0.2)


def small(kind=D_RTRL, **options):
    learner = braintrace.compile(Tied(), kind, XS[0], batch_size=B, **options)
    return learner, step_of(learner)


def counted():
    """A learner whose step function counts its traces."""
    learner, step_fn = small()
    traced = []

    def counting(x, y):
        traced.append(1)
        return step_fn(x, y)

    return learner, counting, traced


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


def scaled(tree, by):
    return jax.tree.map(lambda x: x * by, tree)


def window_step_of(learner):
    def windows(x, y):
        return loss(learner(MultiStepData(x)), y, [learner.model.h.value], 0.2)

    return windows


# ---------------------------------------------------------------- continuing


@pytest.mark.parametrize('kind', [D_RTRL, pp_prop])
def test_two_halves_leave_the_states_and_traces_of_the_whole(kind):
    learners = []
    for parts in ([slice(0, T)], [slice(0, 3), slice(3, T)]):
        learner, step_fn = small(kind)
        for part in parts:
            learner.etrace_grad(XS[part], YS[part], step_fn=step_fn)
        learners.append(learner)
    assert list(learners[0].traces) == list(learners[1].traces)
    assert_equal(*map(everything, learners))


def test_traces_are_the_dense_ones():
    o = oracle()
    learner, _ = small()
    learner.etrace_evolve(XS)
    s, trace = o.s, Local().start(o)
    for x, y in zip(XS, YS, strict=True):
        _, s, trace = o.advance(Local(), o.p, s, trace, x, y)
    columns = jax.vmap(o.to_p)(trace[0])['w'].reshape(B, H, I, H)
    units = np.arange(H)
    dense = columns[:, units, :, units].transpose(1, 2, 0)
    (mine,) = learner.traces_of(('w',)).values()
    assert_equal(mine, {0: dense})
    (again,) = learner.traces_of(learner.param_states['w',]).values()
    assert_equal(again, mine)


def test_a_fresh_sequence_leaves_no_old_trace():
    learner, step_fn, _ = shared()
    for fresh in (False, True):
        learner.etrace_grad(XS, YS, step_fn=step_fn, fresh=fresh)
        held = [x.any() for x in jax.tree.leaves(everything(learner)[1])]
        assert any(held) != fresh


@pytest.mark.parametrize('kind', [D_RTRL, pp_prop, BPTT])
def test_evolving_is_stepping(kind):
    (one, _), (other, _) = small(kind, block=4), small(kind)
    outs = one.etrace_evolve(XS[:2], return_outputs=True)
    calls, scales = lambda x, scale: {'out': scale * one(x)}, np.arange(2.0, T)
    more = one.etrace_evolve(XS[2:], scales, step_fn=calls, return_outputs=True)
    step = brainstate.transform.jit(other)
    assert_equal(
        jnp.concatenate([outs, more['out'] / scales[:, None, None]]),
        jnp.stack([step(x) for x in XS]),
    )
    assert_equal(everything(one), everything(other))


def test_multi_step_is_kept_by_training_checks_and_plans():
    learner, step_fn = small(vjp_method='multi-step')
    weights = lambda: {path: s.value for path, s in learner.param_states.items()}
    before, exact = weights(), by_path(oracle().bptt())
    by_windows = by_path(oracle().windows(Local(), 1))
    check = learner.gradient_check(XS, YS, step_fn=step_fn, reduction='sum')
    found = sum((row.relative_error * row.norm) ** 2 for row in check.rows)
    distance = ravel_pytree(by_windows)[0] - ravel_pytree(exact)[0]
    np.testing.assert_allclose(found, jnp.sum(distance**2), rtol=1e-6)
    assert learner.memory_plan(T).two_pass is None
    given = {'step_fn': step_fn, 'optimizer': optax.sgd(1.0), 'update_every': T}
    learner.etrace_online(XS, YS, **given)
    assert_equal(jax.tree.map(lambda a, b: a - b, before, weights()), by_windows)


def test_two_calls_in_a_step_function_are_two_steps():
    (learner, step_fn), once = small(block=2), TIED.step
    xs, ys = XS.reshape(3, 2, B, I), YS[1::2]

    def both(x, y):
        learner(x[0])
        return step_fn(x[1], y)

    def twice(p, s, x, cut):
        return once(p, once(p, s, x[0], cut)[0], x[1], cut)

    case = dataclasses.replace(TIED, step=twice)
    o = Oracle(case, oracle().p, oracle().s, xs, ys)
    found = learner.etrace_grad(xs, ys, step_fn=both, reduction='sum')
    assert_equal(found, by_path(o.by(Local())))


# ---------------------------------------------------------------- what goes in and what comes out

MASK = np.array([1.0, 0.0, 2.0, 0.0, 0.5, 1.0])


def masked(mask):
    return by_path(oracle().along(Local(), mask)[0])


def test_mask_reduction_and_values():
    total, values = masked(MASK), oracle().losses()
    learner, step_fn, _ = shared()
    run = functools.partial(
        learner.etrace_grad, XS, YS, step_fn=step_fn, mask=MASK, return_value=True
    )
    assert_equal(run(reduction='sum', fresh=True), (total, values))
    mean = scaled(total, 1 / 4.5)
    reduced = run(loss_output='reduced', fresh=True)
    assert_equal(reduced, (mean, (MASK * values).sum() / 4.5))
    learner.reset_state()
    assert_equal(run()[0], mean)


def test_a_mean_over_less_than_one_step_is_a_sum():
    mask = np.array([0, 0, 0.25, 0, 0, 0.5])
    learner, step_fn, _ = shared()
    found = learner.etrace_grad(XS, YS, step_fn=step_fn, mask=mask, fresh=True)
    assert_equal(found, masked(mask))


def test_means_of_chunks():
    learner, _ = small()
    given = {'step_fn': window_step_of(learner), 'chunk_size': 3, 'return_value': True}
    total, values = learner.etrace_grad(XS, YS, reduction='sum', **given)
    assert values.shape == (2,)
    mean, _ = learner.etrace_grad(XS, YS, fresh=True, **given)
    assert_equal(mean, scaled(total, 1 / 2))


def test_aux_and_choice_of_weights():
    learner, _ = small()

    def step_fn(x, y):
        out = learner(x)
        aux = {'out': out, 'h': learner.model.h.value, 'x': x, 'one': 1}
        return jnp.mean((out - y) ** 2), aux

    run = functools.partial(
        learner.etrace_grad, XS, YS, step_fn=step_fn, has_aux=True, fresh=True
    )
    gradient, value, aux = run(
        weights=[('r',)], return_value=True, loss_output='reduced'
    )
    model, outs, states = Tied(), [], []
    model.init_state(B)
    for x in XS:
        outs.append(model(x))
        states.append(model.h.value)
    outs = jnp.stack(outs)
    ones = {'x': XS, 'one': np.ones(T)}
    assert_equal(aux, {'out': outs, 'h': jnp.stack(states), **ones})
    assert_equal(value, jnp.mean((outs - YS) ** 2))
    assert list(gradient) == [('r',)]
    assert_equal(gradient['r',], run()[0]['r',])


class Counting(nn.Module):
    """States that carry no credit beside one that does."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(oracle().p['w'])
        self.h = brainstate.HiddenState(jnp.zeros((B, H)))
        self.count = brainstate.ShortTermState(jnp.zeros(()))
        self.low = brainstate.ShortTermState(jnp.zeros((B, H)))

    def update(self, x):
        self.h.value = 0.9 * self.h.value + x @ self.w.value
        self.count.value = self.count.value + 1
        self.low.value = 0.5 * self.low.value + self.h.value
        return self.h.value


def test_values_of_other_states_come_along():
    learner = D_RTRL(Counting(), block=4)
    learner.compile_graph(XS[0])

    def step_fn(x):
        out = learner(x)
        return jnp.sum(out**2), (learner.model.count.value, learner.model.low.value)

    _, (count, low) = learner.etrace_grad(XS, step_fn=step_fn, has_aux=True)
    h, expected = 0.0, [np.zeros((B, H))]
    for x in XS:
        h = 0.9 * h + x @ learner.model.w.value
        expected.append(0.5 * expected[-1] + h)
    assert_equal((count, low), (np.arange(1.0, T + 1), jnp.stack(expected[1:])))
    assert_equal(learner.model.low.value, low[-1])


def test_a_penalty_on_weights_alone():
    learner, _ = small()

    def step_fn(x, y):
        learner(x)
        return jnp.sum(learner.model.w.value**2)

    p = by_path(oracle().p)
    for fresh in (True, False):
        found = learner.etrace_grad(
            XS, YS, step_fn=step_fn, mask=MASK, reduction='sum', fresh=fresh
        )
        assert_equal(found, {('w',): 2 * 4.5 * p['w',], ('r',): 0 * p['r',]})


def test_sequences_may_be_trees():
    learner, step_fn = small()
    tree = {'inputs': [XS], 'target': YS}
    at = lambda tree: step_fn(tree['inputs'][0], tree['target'])
    found = learner.etrace_grad(tree, step_fn=at, fresh=True, reduction='sum')
    assert_equal(found, wanted())


RULES = {
    'two passes': (D_RTRL, {}, {'fresh': True}),
    'one pass': (D_RTRL, {'block': 2}, {}),
    'deep': (D_RTRL, {'reach': 'deep'}, {'fresh': True}),
    'pp_prop': (pp_prop, {}, {}),
    'bptt': (BPTT, {}, {'fresh': True}),
    'tbptt': (TBPTT, {'k': 4}, {}),
}


@pytest.mark.parametrize('rule', RULES)
def test_a_masked_step_whose_loss_is_not_finite(rule):
    kind, options, call = RULES[rule]
    learner, step_fn = small(kind, **options)

    def risky(x, y, z):
        value, h = step_fn(x, y), learner.model.h.value
        return (
            value
            + jnp.log(z) * jnp.sum(h**2)
            + jnp.sum((h / z) @ learner.model.r.value)
        )

    mask, logs = np.array([1.0, 1, 0, 1, 0, 1]), np.array([1.0, 2, -1, 3, 0, 2])
    run = functools.partial(
        learner.etrace_grad,
        step_fn=risky,
        mask=mask,
        return_value=True,
        loss_output='reduced',
        **call,
    )
    found = run(XS, YS, logs)
    learner.reset_state()
    assert_equal(found, run(XS, YS, np.where(mask == 0, 1, logs)))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(everything(learner)))


def test_a_masked_chunk_whose_loss_is_not_finite():
    learner, _ = small()

    def risky(x, y, z):
        out = learner(MultiStepData(x))
        return jnp.mean((out - y) ** 2) + jnp.sum(jnp.log(z)) * jnp.sum(out**2)

    mask, logs = np.array([1.0, 0, 1]), np.array([1.0, 2, -1, 3, 3, 2])
    options = {'step_fn': risky, 'mask': mask, 'chunk_size': 2, 'fresh': True}
    found = learner.etrace_grad(XS, YS, logs, **options)
    assert_equal(found, learner.etrace_grad(XS, YS, np.abs(logs), **options))


# ---------------------------------------------------------------- refusals


def test_bad_calls_are_refused():
    learner, step_fn = small()
    grad, model = learner.etrace_grad, learner.model
    wrong = [
        (CompilationError, 'never', (XS, YS), {'step_fn': lambda x, y: model(x).sum()}),
        (CompilationError, 'never', (XS, YS), {'step_fn': lambda x, y: y.sum(), 'chunk_size': 2}),
        (CompilationError, 'has_aux', (XS, YS), {'step_fn': lambda x, y: (step_fn(x, y), x)}),
        (CompilationError, 'has_aux', (XS, YS), {'has_aux': True}),
        (CompilationError, 'loss', (XS, YS), {'step_fn': lambda x, y: learner(x) - y}),
        (ValueError, 'weights', (XS, YS), {'weights': [('w',), ('v',)]}),
        (ValueError, r'\(5,\)', (XS, YS), {'mask': np.ones(5)}),
        (ValueError, r'\(6, 2\)', (XS, YS), {'mask': np.ones((6, 2))}),
        (ValueError, 'shapes', (XS, YS[:5]), {}),
        (ValueError, 'shapes', (XS[:0], YS[:0]), {}),
        (ValueError, 'shapes', (XS, 1.0), {}),
        (ValueError, 'chunk_size=4', (XS, YS), {'chunk_size': 4}),
        (ValueError, 'reduction', (XS, YS), {'reduction': 'total'}),
        (ValueError, 'loss_output', (XS, YS), {'loss_output': 'all'}),
    ]  # fmt: skip
    for kind, word, sequences, options in wrong:
        with pytest.raises(kind, match=word):
            grad(*sequences, **{'step_fn': step_fn, **options})
    for every in (0, 1.5):
        with pytest.raises(ValueError, match='update_every'):
            learner.etrace_online(
                XS, YS, step_fn=step_fn, optimizer=optax.sgd(0.1), update_every=every
            )


def test_an_error_while_tracing_changes_nothing():
    learner, step_fn, _ = shared()
    learner.etrace_grad(XS, YS, step_fn=step_fn)
    before = everything(learner)

    def broken(x, y):
        step_fn(x, y)
        raise RuntimeError('in the middle')

    windows = lambda x, y: broken(MultiStepData(x), y)
    online = functools.partial(learner.etrace_online, optimizer=optax.sgd(0.1))
    for call, function, options in (
        (learner.etrace_grad, broken, {}),
        (learner.etrace_grad, broken, {'fresh': True}),
        (learner.etrace_grad, windows, {'chunk_size': 2, 'fresh': True}),
        (online, broken, {}),
    ):
        with pytest.raises(Exception, match='in the middle'):
            call(XS, YS, step_fn=function, **options)
        assert_equal(everything(learner), before, 0.0)
    learner.etrace_grad(XS, YS, step_fn=step_fn)


def test_check_finite_names_the_place_and_writes_nothing():
    learner, step_fn = small(check_finite=True)
    before = everything(learner)
    one, third = np.ones(T), np.where(np.arange(T) == 3, -1, 1.0)

    def risky(x, y, z, q):
        root = jnp.sqrt(jnp.sum(q) * learner.model.w.value**2)
        return step_fn(x, y) + jnp.sum(jnp.log(z)) + jnp.sum(root)

    windows = lambda x, *more: risky(MultiStepData(x), *more)
    for where, logs, roots, options in (
        ('loss of step 3', third, one, {'step_fn': risky}),
        ('gradient of w', one, 0 * one, {'step_fn': risky}),
        ('loss of window 1', third, one, {'step_fn': windows, 'chunk_size': 2}),
    ):
        with pytest.raises(FloatingPointError, match=where):
            learner.etrace_grad(XS, YS, logs, roots, **options)
    assert_equal(everything(learner), before, 0.0)
    # A masked step is not checked.
    learner.etrace_grad(XS, YS, third, one, step_fn=risky, mask=third > 0)


# ---------------------------------------------------------------- compiled once, states followed


def test_nothing_is_traced_or_analysed_twice(monkeypatch):
    learner, step_fn, traced = counted()
    analysed, binding = [], braintrace.learner.binding
    analyse = binding.analyse
    record = lambda program: analysed.append(program) or analyse(program)
    monkeypatch.setattr(binding, 'analyse', record)
    for mask in (MASK, 1 - MASK):
        for reduction in ('mean', 'sum'):
            for fresh in (True, False):
                given = {'mask': mask, 'reduction': reduction, 'fresh': fresh}
                learner.etrace_grad(XS, YS, step_fn=step_fn, **given)
        learner.reset_state()
    learner.etrace_evolve(XS, YS, step_fn=step_fn)
    learner.gradient_check(XS, YS, step_fn=step_fn, rules=['d_rtrl', 'rflo'])
    assert len(traced) == len(analysed) == 1


def test_a_gradient_makes_no_documented_record(monkeypatch):
    """They are made from the engine's own when the graph is asked for, and once."""
    executor, made = braintrace.graph.executor, []
    documented = executor.module_info
    record = lambda traced: made.append(traced) or documented(traced)
    monkeypatch.setattr(executor, 'module_info', record)
    learner, step_fn = small()
    learner.etrace_grad(XS, YS, step_fn=step_fn)
    learner.etrace_evolve(XS, YS, step_fn=step_fn)
    assert not made
    assert learner.graph is learner.graph
    assert len(made) == 1


def test_states_made_anew_are_followed():
    learner, step_fn = small()
    net, window, still = learner.model, window_step_of(learner), optax.sgd(0.0)
    last = oracle().reverse(oracle().p, oracle().s, XS, YS)[2]['h']
    grad, online = learner.etrace_grad, learner.etrace_online
    runs = [
        lambda: grad(XS, YS, step_fn=step_fn, reduction='sum'),
        lambda: grad(XS, YS, step_fn=window, chunk_size=3),
        lambda: online(XS, YS, step_fn=step_fn, optimizer=still),
    ]
    for run in [*runs, *runs]:
        nn.init_all_states(net, batch_size=B)
        learner.reset_state()
        found = run()
        assert_equal(net.h.value, last)
        if run is runs[0]:
            assert_equal(found, wanted())


@pytest.mark.parametrize('vmap', [False, True])
def test_another_batch_size(vmap):
    example = XS[0, 0] if vmap else XS[0]
    learner = braintrace.compile(Tied(), 'd_rtrl', example, batch_size=B, vmap=vmap)
    learner.reset_state(batch_size=3)
    xs, ys = (jnp.concatenate([x, -x[:, :1]], axis=1) for x in (XS, YS))
    found = learner.etrace_grad(xs, ys, step_fn=step_of(learner), reduction='sum')
    assert_equal(found, from_zero(xs, ys))


def test_under_jit_and_inside_a_loop():
    learner, step_fn = small()
    whole = lambda xs, ys: learner.etrace_grad(xs, ys, step_fn=step_fn, reduction='sum')
    assert_equal(brainstate.transform.jit(whole)(XS, YS), wanted())
    learner.reset_state()
    total = lambda: jnp.sum(brainstate.transform.for_loop(step_fn, XS, YS))
    weights = learner.model.states(brainstate.ParamState)
    assert_equal(dict(brainstate.transform.grad(total, weights)()), wanted())


# ---------------------------------------------------------------- learning online

GAPS = np.array([1.0, 1, 0, 0, 1, 0])


def by_hand(every, mask):
    """Adam in a loop in which weights change under a carried trace; nothing moves where all is masked."""
    o, adam = oracle(), optax.adam(0.02)
    p, s, trace = o.p, o.s, Local().start(o)
    memory, total = adam.init(p), []
    for t, (x, y, m) in enumerate(zip(XS, YS, mask, strict=True), 1):
        gradient, s, trace = o.advance(Local(), p, s, trace, x, y)
        total.append(scaled(gradient, m))
        if t % every == 0 and mask[t - every : t].any():
            moves, memory = adam.update(total_of(total[-every:]), memory)
            p = optax.apply_updates(p, moves)
    return by_path(p)


@pytest.mark.parametrize(
    ('optimizer', 'every'),
    [(lambda: optax.adam(0.02), 1), (lambda: braintools.optim.Adam(lr=0.02), 2)],
)
def test_online_with_an_optimiser_and_a_mask_is_a_loop_by_hand(optimizer, every):
    learner, step_fn = small()
    given = {'optimizer': optimizer(), 'update_every': every, 'mask': GAPS}
    learner.etrace_online(XS, YS, step_fn=step_fn, **given)
    found = {k: v.value for k, v in learner.param_states.items()}
    assert_equal(found, by_hand(every, GAPS), 1e-9)
