"""Signals pass the cuts inside a group: credit that no trace holds stays in L.

The oracle is the dense recursion of the definition, with every derivative taken of a
step written out by hand: ε_t = D_t ε_{t-1} + ∂h_t/∂θ|local, gradient = Σ_t ∂ℓ_t/∂θ +
Σ_t L_t D_t ε_{t-1}.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import stop_gradient

import braintrace

H, INPUTS, T = 4, 3, 7


def normal(seed, *shape):
    return 0.7 * np.random.default_rng(seed).normal(size=shape).astype('float32')


PARAMS = {
    'w1': normal(0, INPUTS, H),
    'u1': normal(1, H, H),
    'w2': normal(2, H, H),
    's': normal(3, H),
    'out': normal(4, H),
}
MORE_PARAMS = {**PARAMS, 'w3': normal(5, H, H)}


class Skip:
    """Two layers in one group: the upper one reads the lower one by a product, which is
    cut, and by a skip connection, which keeps positions."""

    params = PARAMS
    states = ('a', 'b')

    def step(self, p, s, x, skip=True):
        a = jnp.tanh(0.8 * s['a'] + x @ p['w1'] + s['a'] @ p['u1'])
        b = 0.9 * s['b'] + jnp.tanh(a @ p['w2']) + (p['s'] * a if skip else 0)
        return {'a': a, 'b': b}, b @ p['out']

    def local(self, p, s, x):
        a = jnp.tanh(0.8 * s['a'] + x @ p['w1'] + stop_gradient(s['a']) @ p['u1'])
        b = 0.9 * s['b'] + jnp.tanh(stop_gradient(a) @ p['w2']) + p['s'] * a
        return {'a': a, 'b': b}

    def perturbed(self, p, s, x, delta):
        a = jnp.tanh(0.8 * s['a'] + x @ p['w1'] + s['a'] @ p['u1'])
        moved = a + delta['a']
        b = 0.9 * s['b'] + jnp.tanh(moved @ p['w2']) + p['s'] * a
        return (b + delta['b']) @ p['out']


class Through(Skip):
    """A third state reads both others, so a path may pass two cuts."""

    params = MORE_PARAMS
    states = ('a', 'b', 'c')

    def step(self, p, s, x):
        a = jnp.tanh(0.8 * s['a'] + x @ p['w1'] + s['a'] @ p['u1'])
        b = 0.9 * s['b'] + jnp.tanh(a @ p['w2']) + p['s'] * a
        c = 0.7 * s['c'] + jnp.tanh(b) @ p['w3'] + 0.5 * b + 0.3 * a
        return {'a': a, 'b': b, 'c': c}, c @ p['out']

    def local(self, p, s, x):
        new = Skip.local(self, p, s, x)
        a, b = new['a'], new['b']
        c = 0.7 * s['c'] + stop_gradient(jnp.tanh(b)) @ p['w3'] + 0.5 * b + 0.3 * a
        return {**new, 'c': c}

    def perturbed(self, p, s, x, delta):
        a = jnp.tanh(0.8 * s['a'] + x @ p['w1'] + s['a'] @ p['u1'])
        b = 0.9 * s['b'] + jnp.tanh((a + delta['a']) @ p['w2']) + p['s'] * a
        moved = jnp.tanh(b + delta['b'])
        c = 0.7 * s['c'] + moved @ p['w3'] + 0.5 * b + 0.3 * a
        return (c + delta['c']) @ p['out']


class Feedback(Skip):
    """The lower layer reads the upper one's old state, and a new state is rolled."""

    def step(self, p, s, x):
        a = jnp.tanh(0.8 * s['a'] + x @ p['w1'] + 0.5 * s['b'])
        b = 0.9 * s['b'] + p['s'] * a + jnp.roll(a, 1) * p['u1'][0]
        return {'a': a, 'b': b}, jnp.tanh(b) @ p['out'] + a @ p['w2'][0]

    def local(self, p, s, x):
        a = jnp.tanh(0.8 * s['a'] + x @ p['w1'] + 0.5 * s['b'])
        b = 0.9 * s['b'] + p['s'] * a + stop_gradient(jnp.roll(a, 1)) * p['u1'][0]
        return {'a': a, 'b': b}

    def perturbed(self, p, s, x, delta):
        a = jnp.tanh(0.8 * s['a'] + x @ p['w1'] + 0.5 * s['b'])
        moved = a + delta['a']
        b = 0.9 * s['b'] + p['s'] * a + jnp.roll(moved, 1) * p['u1'][0]
        return jnp.tanh(b + delta['b']) @ p['out'] + moved @ p['w2'][0]


class Branch(Skip):
    """The upper layer is computed in a branch, and the cut lies inside it."""

    def upper(self, p, x, read, raw):
        taken = lambda read, raw: jnp.tanh(read @ p['w2']) + p['s'] * raw
        left = lambda read, raw: 0.5 * jnp.sin(read @ p['w2'].T) - p['s'] * raw
        return jax.lax.cond(x[0] > 0, taken, left, read, raw)

    def lower(self, p, s, x, old):
        return jnp.tanh(0.8 * s['a'] + x @ p['w1'] + old @ p['u1'])

    def step(self, p, s, x):
        a = self.lower(p, s, x, s['a'])
        b = 0.9 * s['b'] + self.upper(p, x, a, a)
        return {'a': a, 'b': b}, b @ p['out']

    def local(self, p, s, x):
        a = self.lower(p, s, x, stop_gradient(s['a']))
        return {'a': a, 'b': 0.9 * s['b'] + self.upper(p, x, stop_gradient(a), a)}

    def perturbed(self, p, s, x, delta):
        a = self.lower(p, s, x, s['a'])
        b = 0.9 * s['b'] + self.upper(p, x, a + delta['a'], a)
        return (b + delta['b']) @ p['out']


class Loop(Branch):
    """The upper layer settles in three rounds of a loop, and each round is cut."""

    def upper(self, p, x, a, cut=lambda z: z):
        one = lambda z, _: (0.7 * z + 0.3 * jnp.tanh(cut(z) @ p['w2']), None)
        return p['s'] * jax.lax.scan(one, a, length=3)[0]

    def step(self, p, s, x):
        a = self.lower(p, s, x, s['a'])
        b = 0.9 * s['b'] + self.upper(p, x, a)
        return {'a': a, 'b': b}, b @ p['out']

    def local(self, p, s, x):
        a = self.lower(p, s, x, stop_gradient(s['a']))
        return {'a': a, 'b': 0.9 * s['b'] + self.upper(p, x, a, stop_gradient)}

    def perturbed(self, p, s, x, delta):
        """Paths through any cut are all paths less those through none."""
        a = self.lower(p, s, x, s['a'])
        kept = lambda a: self.upper(p, x, a, stop_gradient)
        moved = self.upper(p, x, a + delta['a']) - kept(a + delta['a'])
        b = 0.9 * s['b'] + moved + kept(a)
        return (b + delta['b']) @ p['out']


def dense_recursion(net, p, s, xs, ys):
    """The gradient by its definition, with the influence of all weights on all states."""
    flat = lambda tree: jnp.concatenate([tree[k] for k in net.states])
    zero = {k: jnp.zeros(H) for k in net.states}

    def one_step(carry, at):
        trace, s = carry
        x, y = at
        error = lambda out: (out - y) ** 2
        one = jax.grad(lambda p: error(net.step(p, s, x)[1]))(p)
        signal = flat(jax.grad(lambda d: error(net.perturbed(p, s, x, d)))(zero))
        parts = jax.jacobian(lambda s: flat(net.local(p, s, x)))(s)
        matrix = jnp.concatenate([parts[k] for k in net.states], axis=1)
        now = jax.jacobian(lambda p: flat(net.local(p, s, x)))(p)
        carried = jax.tree.map(lambda e: jnp.tensordot(matrix, e, 1), trace)
        through = jax.tree.map(lambda e: jnp.tensordot(signal, e, 1), carried)
        found = jax.tree.map(jnp.add, one, through)
        new, _ = net.step(p, s, x)
        return (jax.tree.map(jnp.add, carried, now), new), found

    trace = jax.tree.map(lambda w: jnp.zeros((H * len(net.states), *w.shape)), p)
    _, every = jax.lax.scan(one_step, (trace, s), (xs, ys))
    return jax.tree.map(lambda g: g.sum(axis=0), every)


def bptt(net, p, s, xs, ys, **options):
    def loss(p):
        def one(s, at):
            s, out = net.step(p, s, at[0], **options)
            return s, (out - at[1]) ** 2

        return jax.lax.scan(one, s, (xs, ys))[1].sum()

    return jax.grad(loss)(p)


def setting(net):
    p = jax.tree.map(jnp.asarray, net.params)
    s = {k: jnp.zeros(H) for k in net.states}
    return p, s, jnp.asarray(normal(7, T, INPUTS)), jnp.asarray(normal(8, T))


def gradient(step, p, s, xs, ys, fresh, **options):
    learner = braintrace.compile(step, 'd_rtrl', p, s, xs[0], **options)
    step_fn = lambda x, y: (learner(x) - y) ** 2
    found = learner.etrace_grad(xs, ys, step_fn=step_fn, fresh=fresh, reduction='sum')
    return learner, found


def distance(found, wanted):
    flat = lambda tree: np.concatenate([np.ravel(tree[k]) for k in sorted(tree)])
    a, b = flat(found), flat(wanted)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


WAYS = [{'fresh': True}, {'fresh': False}, {'fresh': False, 'block': 2}]


@pytest.mark.parametrize('way', WAYS, ids=str)
@pytest.mark.parametrize(
    'net',
    [Skip(), Through(), Feedback(), Branch(), Loop()],
    ids=lambda n: type(n).__name__,
)
def test_dense_recursion(net, way):
    given = setting(net)
    learner, found = gradient(net.step, *given, **way)
    assert len(learner.graph.hidden_groups) == 1
    assert distance(found, dense_recursion(net, *given)) < 3e-6
    assert distance(found, bptt(net, *given)) > 1e-2


def test_a_skip_connection_costs_no_credit():
    """Nearer to BPTT with the skip in one group than without what L sends through W2."""
    net = Skip()
    p, s, xs, ys = setting(net)
    _, found = gradient(net.step, p, s, xs, ys, True)
    with_skip = distance(found, bptt(net, p, s, xs, ys))
    plain = lambda p, s, x: net.step(p, s, x, skip=False)
    _, found = gradient(plain, p, s, xs, ys, True)
    without = distance(found, bptt(net, p, s, xs, ys, skip=False))
    assert with_skip < without


def test_one_step_is_the_whole_gradient():
    net = Through()
    p, s, xs, ys = setting(net)
    _, found = gradient(net.step, p, s, xs[:1], ys[:1], True)
    assert distance(found, bptt(net, p, s, xs[:1], ys[:1])) < 1e-6


class Stack(brainstate.nn.Module):
    """`Skip` as a module."""

    def __init__(self):
        super().__init__()
        self.p = {k: brainstate.ParamState(jnp.asarray(v)) for k, v in PARAMS.items()}
        self.a, self.b = (
            brainstate.HiddenState(jnp.asarray(normal(seed, H))) for seed in (9, 10)
        )

    def update(self, x):
        p = {k: state.value for k, state in self.p.items()}
        new, out = Skip().step(p, {'a': self.a.value, 'b': self.b.value}, x)
        self.a.value, self.b.value = new['a'], new['b']
        return out


def test_signals_of_the_executor_pass_cuts():
    model, x = Stack(), jnp.asarray(normal(11, INPUTS))
    executor = braintrace.ETraceGraphExecutor(model)
    executor.compile_graph(x)
    (group,) = executor.graph.hidden_groups
    assert group.hidden_paths == [('a',), ('b',)]
    *_, pull = executor.solve_h2w_h2h_l2h_jacobian(x)
    (found,) = pull(jnp.float32(1))
    s = {'a': model.a.value, 'b': model.b.value}
    p = jax.tree.map(jnp.asarray, PARAMS)
    zero = {k: jnp.zeros(H) for k in s}
    wanted = jax.grad(lambda d: Skip().perturbed(p, s, x, d))(zero)
    assert np.abs(wanted['a']).max() > 0.1
    for k, name in enumerate(('a', 'b')):
        np.testing.assert_allclose(found[:, k], wanted[name], rtol=1e-5, atol=1e-6)
