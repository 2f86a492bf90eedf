"""Plain functions `step(params, state, *inputs) -> (state, out)`."""

import copy
import os
from typing import NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace as bt
from formulas import close

B, I, H = 2, 3, 4  # noqa: E741
random = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(0.5 * random.standard_normal(shape), jnp.float32)


X = array(B, I)


class Cell(NamedTuple):
    h: jax.Array
    c: jax.Array


def rnn(params, h, x):
    h = jnp.tanh(0.5 * h + x @ params['w'] + h @ params['r'] + params['b'])
    return h, h @ params['out']


def lstm(params, cell, x):
    z = jnp.concatenate([x, cell.h], -1) @ params[0] + params[1]
    i, f, g, o = jnp.split(z, 4, axis=-1)
    c = jax.nn.sigmoid(f) * cell.c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return Cell(h, c), h


def lif(params, state, x):
    v, (a, count) = state['v'], state['rest']
    spike = jax.nn.sigmoid(v - 1)
    a = params['decay'] * a + spike
    v = 0.9 * v + x @ params['in']['w'] - a
    return {'v': v, 'rest': (a, count + 1)}, {'spike': spike, 'count': count}


def stack(params, state, x):
    new = []
    for w, h in zip(params, state, strict=True):
        x = jnp.tanh(0.5 * h + x @ w)
        new.append(x)
    return new, x


def make(name):
    """A step, its parameters and its state."""
    return {
        'rnn': (
            rnn,
            {'w': array(I, H), 'r': array(H, H), 'b': array(H), 'out': array(H, 2)},
            array(B, H),
        ),
        'lstm': (
            lstm,
            (array(I + H, 4 * H), array(4 * H)),
            Cell(array(B, H), array(B, H)),
        ),
        'lif': (
            lif,
            {'in': {'w': array(I, H)}, 'decay': array(H), 'unused': array(2)},
            {'v': array(B, H), 'rest': (array(B, H), jnp.zeros((), jnp.int32))},
        ),
        'stack': (stack, [array(I, H), array(H, H)], [array(B, H), array(B, H)]),
    }[name]


DRAWN = {  # groups; credit of each parameter; sites into the groups
    'rnn': (
        [((),)],
        {'w': 'local', 'r': 'local', 'b': 'local', 'out': 'exact'},
        {('w',): {0}, ('r',): {0}, ('b',): {0}},
    ),
    'lstm': ([(('h',), ('c',))], {'0': 'local', '1': 'local'}, {(0,): {0}, (1,): {0}}),
    'lif': (
        [(('rest', '0'), ('v',))],
        {'in.w': 'exact', 'decay': 'exact', 'unused': 'none'},
        {('in', 'w'): {0}, ('decay',): {0}},
    ),
    'stack': (
        [(('0',),), (('1',),)],
        {'0': 'local', '1': 'exact'},
        {(0,): {0}, (1,): {1}},
    ),
}


@pytest.mark.parametrize('name', DRAWN)
def test_as_drawn_by_hand(name):
    groups, credit, sites = DRAWN[name]
    graph = bt.compile_etrace_graph(*make(name), X)
    assert [set(g.hidden_paths) for g in graph.hidden_groups] == [
        set(g) for g in groups
    ]
    assert [g.varshape for g in graph.hidden_groups] == [(B, H)] * len(groups)
    assert {
        r.context['name']: r.context['credit'] for r in graph.report.credits
    } == credit
    found = {}
    for site in graph.hidden_param_op_relations:
        for path in site.trainable_paths.values():
            found.setdefault(path, set()).update(g.index for g in site.hidden_groups)
    assert found == sites


@pytest.mark.parametrize('name', DRAWN)
def test_the_compiled_step_is_the_step(name):
    step, params, state = make(name)
    graph = bt.compile_etrace_graph(step, params, state, X)
    info = graph.module_info
    new, out = step(params, state, X)
    got_out, got_new, extra = info.jaxpr_call(params, state, X)
    assert jax.tree.structure((got_out, got_new)) == jax.tree.structure((out, new))
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6)
    jax.tree.map(same, (got_out, got_new), (out, new))
    assert set(extra) == set(
        info.jaxpr.outvars[info.num_var_out + info.state_tree.num_leaves :]
    )
    zeros = graph.hidden_perturb.init_perturb_data()
    jax.tree.map(same, graph.call_hidden_perturb((params, state, X), zeros), out)
    later = graph.call_hidden_perturb((params, state, X), zeros, old_state_vals=new)
    jax.tree.map(same, later, step(params, new, X)[1])
    assert repr(info).startswith('FunctionInfo(')
    with pytest.raises(ValueError, match='compiled for'):
        info.jaxpr_call(params, state, array(5, I))


def test_integers_are_other_states():
    graph = bt.compile_etrace_graph(*make('lif'), X)
    assert graph.report.dynamic_states == (('rest', '1'),)
    assert not graph.explain(kind='other_state')
    assert ('rest', '1') not in graph.hid_path_to_group


def test_group_transition_and_diagonal():
    step, params, state = make('lif')
    graph = bt.compile_etrace_graph(step, params, state, X)
    (group,) = graph.hidden_groups
    info = graph.module_info
    flat = jax.tree.leaves((params, state, [X], {}))
    env = (
        dict(zip(info.jaxpr.invars, flat, strict=True))
        | info.jaxpr_call(params, state, X)[-1]
    )
    old = [env[v] for v in group.hidden_invars]
    got = group.diagonal_jacobian(
        old, [env[v] for v in group.transition_jaxpr_constvars]
    )
    slope = jax.nn.sigmoid(state['v'] - 1) * (1 - jax.nn.sigmoid(state['v'] - 1))
    a, v = (group.hidden_paths.index(p) for p in (('rest', '0'), ('v',)))
    decay = jnp.broadcast_to(params['decay'], (B, H))
    for (i, j), want in {
        (a, a): decay,
        (a, v): slope,
        (v, a): -decay,
        (v, v): 0.9 - slope,
    }.items():
        np.testing.assert_allclose(got[..., i, j], want, rtol=1e-5, atol=1e-6)


def test_lines_are_the_users():
    graph = bt.compile_etrace_graph(*make('rnn'), X)
    (cut,) = {r.context['source'] for r in graph.explain(kind='cut')}
    assert cut.startswith(__file__)


BAD = {
    'one result': (lambda p, s, x: s + x @ p, 'returns .*, not a pair'),
    'three results': (lambda p, s, x: (s, x @ p, 0), 'returns tuple, not a pair'),
    'another structure': (lambda p, s, x: ((s, s), x @ p), 'turns a state'),
    'another shape': (
        lambda p, s, x: (jnp.concatenate([s, x @ p]), s),
        r'\(2, 4\).*\(4, 4\)',
    ),
    'another type': (
        lambda p, s, x: ((s + x @ p).astype(jnp.float16), s),
        'float32.*float16',
    ),
    'inputs that do not fit': (
        lambda p, s, x: (s + x.T @ p, s),
        'fails with TypeError',
    ),
    'too many inputs': (lambda p, s: (s, s), 'positional argument'),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_functions(name):
    step, why = BAD[name]
    pattern = rf'as a step function\n  Why: (.|\n)*{why}(.|\n)*\n  Fix: a function'
    with pytest.raises(bt.CompilationError, match=pattern):
        bt.compile_etrace_graph(step, array(I, H), array(B, H), X)


def test_nothing_to_remember_or_to_train():
    with pytest.raises(bt.CompilationError, match='no hidden state'):
        bt.compile_etrace_graph(
            lambda p, s, x: (s + 1, x @ p), array(I, H), jnp.zeros((), jnp.int32), X
        )
    with pytest.raises(bt.CompilationError, match='no parameter'):
        bt.compile(lambda p, s, x: (0.9 * s, s), 'd_rtrl', {}, array(B, H), X)


# ---------------------------------------------------------------- learners


class Same(brainstate.nn.Module):
    """The network of :func:`rnn`, as a brainstate module."""

    def __init__(self, params, h):
        super().__init__()
        self.w, self.r, self.b, self.out = (
            brainstate.ParamState(params[k]) for k in ('w', 'r', 'b', 'out')
        )
        self.start = h

    def init_state(self):
        self.h = brainstate.HiddenState(self.start)

    def update(self, x):
        self.h.value = jnp.tanh(
            0.5 * self.h.value
            + x @ self.w.value
            + self.h.value @ self.r.value
            + self.b.value
        )
        return self.h.value @ self.out.value


XS = array(4, B, I)
ALL = os.environ.get('ZOO') == 'all'


def squared(learner):
    return lambda x: jnp.mean(learner(x) ** 2)


def test_a_module_keeps_its_own_weights_and_states():
    _, params, h = make('rnn')
    learner = bt.compile(Same(params, h), 'd_rtrl', X)
    with pytest.raises(TypeError, match='params='):
        learner.etrace_grad(XS, step_fn=squared(learner), fresh=True, params=params)
    for name in ('params', 'state'):
        assert not hasattr(learner, name)
        with pytest.raises(AttributeError):
            setattr(learner, name, params)


def test_a_copy_has_weights_and_states_of_its_own():
    step, params, h = make('rnn')
    learner = bt.compile(step, 'd_rtrl', params, h, X)
    gradients = lambda learner: learner.etrace_grad(XS, step_fn=squared(learner))
    gradients(learner)
    copied = copy.deepcopy(learner)
    twice = jax.tree.map(lambda x: 2 * x, params)
    copied.params, copied.state = twice, h
    copied.reset_state()
    fresh = bt.compile(step, 'd_rtrl', twice, h, X)
    close(gradients(copied), gradients(fresh))
    close(learner.params, params)
    again = bt.compile(step, 'd_rtrl', params, h, X)
    gradients(again)
    close(gradients(learner), gradients(again))


@pytest.mark.parametrize('name', ['lstm', 'lif', 'stack'] if ALL else ['lif'])
def test_rtrl_is_bptt(name):
    step, params, state = make(name)
    learner = bt.compile(step, 'rtrl', params, state, X)

    def loss(params):
        total, s = 0.0, state
        for x in XS:
            s, out = step(params, s, x)
            total += jnp.mean(jax.tree.leaves(out)[-1] ** 2)
        return total / len(XS)

    got = learner.etrace_grad(
        XS, step_fn=lambda x: jnp.mean(jax.tree.leaves(learner(x))[-1] ** 2)
    )
    close(got, jax.jit(jax.grad(loss))(params))
    paths = {
        path for group in learner.report.hidden_groups for path in group.hidden_paths
    }
    assert all(path[0] == 'state' for path in paths)
    assert len(learner.report.hidden_groups) == len(DRAWN[name][0])


def test_training_by_hand():
    step, params, h = make('rnn')
    learner = bt.compile(step, 'd_rtrl', params, h, X)
    loss_of = squared(learner)
    losses = []
    for _ in range(10):
        grads, loss = learner.etrace_grad(
            XS, step_fn=loss_of, fresh=True, return_value=True
        )
        learner.params = jax.tree.map(lambda p, g: p - 0.5 * g, learner.params, grads)
        losses.append(float(loss.mean()))
    assert losses[-1] < 0.5 * losses[0]

    @jax.jit
    def train(params, xs):
        grads, loss = learner.etrace_grad(
            xs, step_fn=loss_of, fresh=True, params=params, return_value=True
        )
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss.mean()

    for want in losses:
        params, loss = train(params, XS)
        np.testing.assert_allclose(loss, want, rtol=1e-3)
    close(learner.params, params, rtol=1e-3)
    close(
        learner.etrace_grad(XS, step_fn=loss_of, fresh=True),
        learner.etrace_grad(XS, step_fn=loss_of, fresh=True),
    )
    assert learner.gradient_check(XS, step_fn=loss_of)['out'].cosine > 0.999

    learner.state = jnp.zeros((B, H))
    _, want = step(learner.params, jnp.zeros((B, H)), X)
    close(learner(X), want)
    with pytest.raises(ValueError, match='a state of'):
        learner.state = (h, h)
    with pytest.raises(ValueError, match='params of'):
        learner.params = h
    with pytest.raises(ValueError, match='starts differently'):
        learner.reset_state(batch_size=3)


def test_of_one_sample():
    step, params, h = make('rnn')
    learner = bt.compile(step, 'd_rtrl', params, h[0], X[0], vmap=True, batch_size=B)
    assert learner.report.hidden_groups[0].varshape == (B, H)
    new, out = step(params, jnp.stack([h[0]] * B), X)
    close(learner(X), out)
    close(learner.state, new)
    learner.reset_state(batch_size=3)
    assert learner.state.shape == (3, H)


def test_names_never_meet():
    step = lambda params, s, x: (0.5 * s + x @ params['state'],) * 2
    learner = bt.compile(step, 'd_rtrl', {'state': array(I, H)}, array(B, H), X)
    assert learner.report.hidden_groups[0].hidden_paths == [('state_',)]
    assert list(learner.param_states) == [('state',)]


def test_keys_in_the_state_go_on():
    def noisy(w, state, x):
        h, key = state
        key, now = jax.random.split(key)
        return (0.5 * h + x @ w + jax.random.normal(now, h.shape), key), h

    learner = bt.compile(
        noisy, 'd_rtrl', array(I, H), (jnp.zeros((B, H)), jax.random.key(0)), X
    )
    first, second = (
        learner.etrace_evolve(XS, return_outputs=True)
        for _ in range(2)
        if not learner.reset_state()
    )
    assert float(jnp.abs(first[1] - second[1]).max()) > 0.01


def test_bad_models_of_learners():
    step, params, h = make('rnn')
    with pytest.raises(bt.CompilationError, match='parameter n'):
        bt.compile(step, 'd_rtrl', {**params, 'n': 3}, h, X)
    with pytest.raises(TypeError, match='and state='):
        bt.compile(step, 'd_rtrl', params, h, X, state=h)
    with pytest.raises(TypeError, match='1 example'):
        bt.compile(step, 'd_rtrl', X)
    with pytest.raises(ValueError, match=r'^state='):
        bt.compile(Same(params, h), 'd_rtrl', X, state=h)
    with pytest.raises(bt.CompilationError, match='no hidden state'):
        bt.compile(
            lambda p, s, x: (s + 1, x @ p),
            'd_rtrl',
            array(I, H),
            jnp.zeros((), jnp.int32),
            X,
        )


@pytest.mark.parametrize('kind', [tuple, list])
def test_states_in_a_list_are_one_group_as_in_a_tuple(kind):
    def step(p, state, x):
        h, trace = state
        trace = 0.9 * trace + p['g'] * jnp.tanh(h)
        return kind([jnp.tanh(p['a'] * h + x @ p['w']), trace]), trace

    params = {'w': array(I, H), 'a': array(H), 'g': array(H)}
    state, xs = kind([array(B, H), array(B, H)]), array(6, B, I)
    learner = bt.compile(step, 'd_rtrl', params, state, xs[0])
    paths = [('state', '0'), ('state', '1')]
    assert [g.hidden_paths for g in learner.graph.hidden_groups] == [paths]

    def loss(p):
        outs = jax.lax.scan(lambda s, x: step(p, s, x), state, xs)[1]
        return jnp.sum(outs**2)

    got = learner.etrace_grad(
        xs, step_fn=lambda x: jnp.sum(learner(x) ** 2), reduction='sum'
    )
    wanted = jax.grad(loss)(params)
    for name in params:
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-4, atol=1e-6)
