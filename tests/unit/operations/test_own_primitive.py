"""A product of the user's own, registered with an operation's record, is treated like `dot_general`."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import braintrace
from braintrace.operations import REGISTRY

B, N_IN, H, T = 3, 5, 4, 6


def new_product(name):
    """x @ w as a primitive with derivatives, batching and lowering, and nothing that names it a product."""
    p = Primitive(name)
    p.def_impl(lambda x, w: x @ w)
    p.def_abstract_eval(
        lambda x, w: jax.core.ShapedArray((*x.shape[:-1], w.shape[-1]), x.dtype)
    )
    mlir.register_lowering(
        p, mlir.lower_fun(lambda x, w: x @ w, multiple_results=False)
    )
    ad.defjvp(p, lambda dx, x, w: dx @ w, lambda dw, x, w: x @ dw)

    def batched(args, dims):
        return jax.vmap(lambda x, w: x @ w, dims)(*args), 0

    batching.primitive_batchers[p] = batched
    return p


class Net(brainstate.nn.Module):
    """Adaptive units driven by inputs and by each other."""

    def __init__(self, product):
        super().__init__()
        draw = np.random.default_rng(0)
        weight = lambda *sizes: brainstate.ParamState(
            jnp.asarray(draw.normal(size=sizes) * 0.4, 'float32')
        )
        self.feed, self.back, self.read = weight(N_IN, H), weight(H, H), weight(H, 2)
        self.product = product

    def init_state(self, batch_size=None, **kwargs):
        self.v = brainstate.HiddenState(jnp.zeros((batch_size, H)))
        self.a = brainstate.HiddenState(jnp.zeros((batch_size, H)))

    def update(self, x):
        drive = self.product(x, self.feed.value) + self.product(
            jnp.tanh(self.v.value), self.back.value
        )
        self.v.value = 0.9 * self.v.value - 0.2 * self.a.value + jnp.tanh(drive)
        self.a.value = 0.95 * self.a.value + 0.1 * self.v.value
        return self.v.value @ self.read.value


@pytest.fixture
def registered():
    p = new_product('own_product')
    braintrace.register_primitive(p, braintrace.operations.product('bi,io->bo'))
    yield p
    del REGISTRY['own_product']


def learn(product, rule):
    learner = braintrace.compile(Net(product), rule, jnp.zeros((B, N_IN)), batch_size=B)
    xs = jnp.asarray(np.random.default_rng(1).normal(size=(2, T, B, N_IN)), 'float32')
    ys = jnp.asarray(np.random.default_rng(2).normal(size=(2, T, B, 2)), 'float32')
    step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    gradients = [
        learner.etrace_grad(x, y, step_fn=step) for x, y in zip(xs, ys, strict=True)
    ]
    shapes = sorted(
        x.shape
        for trace in learner.traces.values()
        for x in jax.tree.leaves(trace.value)
    )
    return gradients, shapes


def test_the_report_names_an_operation_without_factors():
    """A primitive that is not registered has no factors: its parameter keeps a trace for each weight, and says so."""
    unknown = new_product('unknown_product')
    learner = braintrace.compile(
        Net(lambda x, w: unknown.bind(x, w)),
        'pp_prop',
        jnp.zeros((B, N_IN)),
        batch_size=B,
    )
    given = learner.report.gradients['feed']
    assert 'no factors are known for unknown_product' in given.reason
    assert 'test_own_primitive.py' in given.reason
    plain = braintrace.compile(
        Net(jnp.matmul), 'pp_prop', jnp.zeros((B, N_IN)), batch_size=B
    )
    assert plain.report.gradients['feed'].kind == 'approximate'


@pytest.mark.parametrize('rule', ['d_rtrl', 'pp_prop', 'eprop', 'ottt', 'rflo'])
def test_own_product_is_treated_like_dot_general(registered, rule):
    own, own_shapes = learn(lambda x, w: registered.bind(x, w), rule)
    plain, plain_shapes = learn(jnp.matmul, rule)
    assert own_shapes == plain_shapes
    for a, b in zip(own, plain, strict=True):
        for path in b:
            np.testing.assert_allclose(a[path], b[path], rtol=1e-6, atol=1e-7)


def test_an_elementwise_primitive_has_all_that_those_of_jax_have():
    """Also how it repeats elements."""
    name = 'own_elementwise'
    try:
        braintrace.register_primitive(name, 'elementwise')
        assert REGISTRY[name] == REGISTRY['tanh']
    finally:
        REGISTRY.pop(name, None)
