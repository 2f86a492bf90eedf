"""Traces that a learner shows: keys, shapes, and what they are the derivative of."""

import brainstate
import jax.numpy as jnp
import numpy as np
from checking import RULES, XS, B, H, I, Net, Op, X, check, each, learner_of, ready

import braintrace
from braintrace import nn


def numbers(*shape):
    """Fixed small numbers."""
    draw = np.random.default_rng(sum(shape))
    return jnp.asarray(0.5 * draw.normal(size=shape), 'float32')


class TwoStates(Op):
    """A unit with a slow state beside its fast one."""

    def init_state(self, batch_size=None, **kwargs):
        super().init_state(batch_size)
        self.slow = brainstate.HiddenState(jnp.zeros_like(self.h.value))

    def update(self, x):
        drive = self.drive(self, x)
        h, slow = self.h.value, self.slow.value
        self.h.value = jnp.tanh(0.9 * h + drive - slow)
        self.slow.value = 0.8 * slow + 0.1 * h
        return self.h.value


def matmul(s, x):
    return braintrace.matmul(x, s.W.value)


DRIVES = {
    'matmul': (matmul, (H,), {'W': numbers(I, H)}, XS),
    'bias': (
        lambda s, x: braintrace.matmul(x, s.W.value, s.b.value),
        (H,),
        {'W': numbers(I, H), 'b': numbers(H)},
        XS,
    ),
    'weight_fn': (
        lambda s, x: braintrace.matmul(x, s.W.value, weight_fn=jnp.sin),
        (H,),
        {'W': numbers(I, H)},
        XS,
    ),
    'element_wise': (
        lambda s, x: braintrace.element_wise(s.W.value) * x.sum(-1, keepdims=True),
        (H,),
        {'W': numbers(H)},
        XS,
    ),
    'grouped': (
        lambda s, x: braintrace.grouped_matmul(x, s.W.value),
        (2, H),
        {'W': numbers(2, I, H)},
        numbers(5, B, 2, I),
    ),
    'einsum': (
        lambda s, x: braintrace.einsum('bi,io->bo', x, s.W.value),
        (H,),
        {'W': numbers(I, H)},
        XS,
    ),
    'embedding': (
        lambda s, x: braintrace.embedding(x, s.W.value),
        (H,),
        {'W': numbers(6, H)},
        jnp.array([[0, 1], [2, 1], [5, 5], [3, 0], [0, 1]]),
    ),
}


def run(kind, name, rule, batch=B, **options):
    """A learner after all steps of a sequence, and the model's step as a function."""
    drive, shape, params, xs = DRIVES[name]
    net = ready(kind(drive, shape, **params), batch)
    learner = getattr(braintrace, rule)(net, **{**RULES[rule], **options})
    xs = xs if batch else xs[:, 0]
    learner.compile_graph(xs[0])
    for x in xs:
        learner(x)
    return net, learner, xs


def influence(net, weight, xs):
    """∂h/∂W after a sequence from zeros, for every hidden state of a model."""
    hidden = net.states(brainstate.HiddenState)

    def after(value):
        weight.value = value
        for state in hidden.values():
            state.value = jnp.zeros_like(state.value)
        for x in xs:
            net(x)
        return {path: state.value for path, state in hidden.items()}

    before = weight.value
    found = brainstate.transform.jacrev(after, argnums=0)(before)
    weight.value = before
    return found


@each(*((name, batch) for name in DRIVES for batch in (B, None)))
def check_trace_is_the_derivative(name, batch):
    if name == 'einsum' and batch is None:
        return
    net, learner, xs = run(Op, name, 'D_RTRL', batch)
    (trace,) = learner.get_etrace_of(net.W).values()
    wanted = influence(net, net.W, xs)['h',]
    # Each weight reaches one unit of a sample, so the sum over units is its trace.
    samples = 0 if batch is None else 1
    units = len(DRIVES[name][1])
    wanted = jnp.sum(wanted, axis=tuple(range(samples, samples + units)))
    assert np.allclose(trace['weight'][..., 0], wanted, atol=1e-5)


@each(B, None)
def check_trace_of_a_bias(batch):
    net, learner, xs = run(Op, 'bias', 'D_RTRL', batch)
    (trace,) = learner.get_etrace_of(net.W).values()
    assert list(trace) == ['bias', 'weight']
    wanted = jnp.sum(influence(net, net.b, xs)['h',], axis=-2)
    assert np.allclose(trace['bias'][..., 0], wanted, atol=1e-5)


@each('matmul', 'grouped', 'embedding', 'weight_fn')
def check_trace_of_two_states(name):
    net, learner, xs = run(TwoStates, name, 'D_RTRL')
    (trace,) = learner.get_etrace_of(net.W).values()
    (group,) = learner.graph.hidden_groups
    wanted = influence(net, net.W, xs)
    units = tuple(range(1, 1 + len(DRIVES[name][1])))
    for n, path in enumerate(group.hidden_paths):
        right = jnp.sum(wanted[path], axis=units)
        assert np.allclose(trace['weight'][..., n], right, atol=1e-5)


@check
def check_trace_of_a_convolution():
    drive = lambda s, x: braintrace.conv(x, s.W.value, s.b.value)
    net = ready(Op(drive, (H, 5), W=numbers(H, I, 3), b=numbers(H)))
    learner = braintrace.D_RTRL(net)
    xs = numbers(4, B, I, 5)
    learner.compile_graph(xs[0])
    for x in xs:
        learner(x)
    (trace,) = learner.get_etrace_of(net.W).values()
    wanted = influence(net, net.W, xs)['h',]  # (sample, filter, place, *kernel)
    assert np.allclose(trace['weight'][..., 0], wanted.sum(1), atol=1e-5)
    wanted = influence(net, net.b, xs)['h',].sum(-1)
    assert np.allclose(trace['bias'][..., 0], wanted, atol=1e-5)


@each('D_RTRL', 'EProp', 'OSTLRecurrent', 'ThreeFactor', 'ParamDimVjpAlgorithm')
def check_keys_of_traces(rule):
    net, learner = learner_of(rule)
    learner(X)
    found = learner.get_etrace_of(net.rnn.Wh.weight)
    relations = learner.graph.hidden_param_op_relations
    (relation,) = (r for r in relations if r.path == ('rnn', 'Wh', 'weight'))
    assert list(found) == [(id(relation.y_var), 0)]
    assert found[id(relation.y_var), 0]['weight'].shape == (B, I + H, H, 1)
    assert found[id(relation.y_var), 0]['bias'].shape == (B, H, 1)
    states = learner.etrace_bwg
    assert np.allclose(
        states[id(relation.y_var), 0].value['weight'],
        found[id(relation.y_var), 0]['weight'],
    )


@each('pp_prop', 'ES_D_RTRL', 'IODimVjpAlgorithm', 'OSTLFeedforward')
def check_keys_of_factors(rule):
    net, learner = learner_of(rule)
    learner(X)
    inputs, states = learner.get_etrace_of(net.rnn.Wh.weight)
    relations = learner.graph.hidden_param_op_relations
    (relation,) = (r for r in relations if r.path == ('rnn', 'Wh', 'weight'))
    assert list(inputs) == [id(relation.x_var)]
    assert list(states) == [(id(relation.y_var), 'hidden_group_0')]
    assert inputs[id(relation.x_var)].shape == (B, I + H)
    assert states[id(relation.y_var), 'hidden_group_0'].shape == (B, H, 1)
    assert id(relation.x_var) in learner.etrace_xs
    assert (id(relation.y_var), 'hidden_group_0') in learner.etrace_dfs


@each('D_RTRL', 'pp_prop')
def check_traces_of_an_lstm(rule):
    net, learner = learner_of(rule, 'LSTMCell')
    learner(X)
    found = learner.get_etrace_of(net.rnn.Wf.weight)
    if rule == 'D_RTRL':
        (trace,) = found.values()
        assert trace['weight'].shape == (B, I + H, H, 2)
        assert trace['bias'].shape == (B, H, 2)
    else:
        (factor,) = found[1].values()
        assert factor.shape == (B, H, 2)


@check
def check_factors_follow_their_recursions():
    decay = 0.7
    _, learner, xs = run(Op, 'matmul', 'pp_prop', decay_or_rank=decay)
    (inputs,), _ = (x.values() for x in learner.get_etrace_of(('W',)))
    wanted = sum(decay ** (len(xs) - 1 - t) * x for t, x in enumerate(xs))
    assert np.allclose(inputs, wanted, atol=1e-5)


@check
def check_factors_of_groups():
    net, learner, _ = run(Op, 'grouped', 'pp_prop')
    inputs, states = learner.get_etrace_of(net.W)
    assert [x.shape for x in inputs.values()] == [(B, 2, I)]
    assert [x.shape for x in states.values()] == [(B, 2, H, 1)]


@each('UORO', 'RandomProjectionVjpAlgorithm')
def check_projection(rule):
    net, learner = learner_of(rule)
    learner(X)
    found = learner.get_etrace_of(net.rnn.Wh.weight)
    assert list(found) == [(0, ('rnn', 'Wh', 'weight'))]
    (factor,) = found.values()
    assert {k: x.shape for k, x in factor.items()} == {'bias': (H,), 'weight': (7, H)}
    assert learner.etrace_s[0].value.shape == (B, H, 1)
    assert (0, ('rnn', 'Wh', 'weight')) in learner.etrace_theta
    assert isinstance(learner.projection_rng, brainstate.State)
    assert learner.projection_step.value.shape == ()
    assert not hasattr(learner, 'etrace_bwg')


@check
def check_two_groups_have_traces_of_their_own():
    class Pair(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.W = brainstate.ParamState(numbers(I, H))

        def init_state(self, batch_size=None, **kwargs):
            self.a = brainstate.HiddenState(jnp.zeros((batch_size, H)))
            self.b = brainstate.HiddenState(jnp.zeros((batch_size, H)))

        def update(self, x):
            y = braintrace.matmul(x, self.W.value)
            self.a.value = 0.9 * self.a.value + y
            self.b.value = jnp.tanh(0.8 * self.b.value + y)
            return self.a.value + self.b.value

    net = ready(Pair())
    learner = braintrace.D_RTRL(net)
    learner.compile_graph(X)
    learner(X)
    learner(X)
    found = learner.get_etrace_of(net.W)
    (relation,) = learner.graph.hidden_param_op_relations
    assert set(found) == {(id(relation.y_var), 0), (id(relation.y_var), 1)}
    wanted = influence(net, net.W, [X, X])
    for group in learner.graph.hidden_groups:
        trace = found[id(relation.y_var), group.index]['weight'][..., 0]
        right = wanted[group.hidden_paths[0]].sum(1)
        assert np.allclose(trace, right, atol=1e-5)


@check
def check_one_weight_used_twice():
    drive = lambda s, x: matmul(s, x) + braintrace.matmul(2 * x, s.W.value)
    net = ready(Op(drive, W=numbers(I, H)))
    learner = braintrace.D_RTRL(net)
    learner.compile_graph(X)
    learner(X)
    learner(X)
    found = learner.get_etrace_of(net.W)
    assert len(found) == 2
    total = sum(trace['weight'][..., 0] for trace in found.values())
    wanted = influence(net, net.W, [X, X])['h',].sum(1)
    assert np.allclose(total, wanted, atol=1e-5)


@check
def check_traces_of_a_mapped_learner():
    net = Net('LSTMCell')
    learner = braintrace.compile(net, braintrace.D_RTRL, X, batch_size=B, vmap=True)
    learner(X)
    (trace,) = learner.module.get_etrace_of(('rnn', 'Wf', 'weight')).values()
    assert trace['weight'].shape == (B, I + H, H, 2)


@check
def check_traces_start_at_zero():
    net, learner = learner_of('D_RTRL')
    (trace,) = learner.get_etrace_of(net.rnn.Wh.weight).values()
    assert not any(np.any(x) for x in trace.values())


@each('nu_log', 'theta_log', 'gamma_log')
def check_traces_of_a_linear_recurrent_unit(name):
    net = ready(nn.LRUCell(I, H))
    learner = braintrace.D_RTRL(net)
    learner.compile_graph(X)
    learner(X)
    learner(X)
    paths = [
        path
        for relation in learner.graph.hidden_param_op_relations
        for path in relation.trainable_paths.values()
    ]
    assert (name,) in paths
    leaves = [x for t in learner.get_etrace_of((name,)).values() for x in t.values()]
    assert all(x.shape == (B, H, 2) for x in leaves)
