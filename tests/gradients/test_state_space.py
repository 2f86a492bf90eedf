"""State-space models and linear attention: the formula they state, and BPTT's gradient.

The oracle is each cell written out as a function of its parameters, differentiated by
`jax.grad` through a scan.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import networks, nn

INPUTS, UNITS, OUTPUTS, T = 3, 6, 2, 8


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def affine(p, x):
    return x @ p['weight'] + p['bias']


def ssm(p, h, x):
    """One step of `SelectiveSSM`: the new state and the output."""
    u = affine(p['in_proj', 'weight'], x)
    dt = jnp.log1p(jnp.exp(affine(p['dt_proj', 'weight'], x)))
    b, c = affine(p['B_proj', 'weight'], x), affine(p['C_proj', 'weight'], x)
    decay = jnp.exp(-jnp.einsum('...d,dn->...dn', dt, jnp.exp(p['A_log',])))
    h = decay * h + jnp.einsum('...d,...n->...dn', dt * u, b)
    read = jnp.einsum('...dn,...n->...d', h, c) + p['D',] * u
    return h, affine(p['out_proj', 'weight'], read)


def attention(p, h, x):
    """One step of `LinearAttention` with two heads: the new state and the output."""
    by_head = lambda y: jnp.stack(jnp.split(y, 2, axis=-1), axis=-2)
    q, k, v = (by_head(affine(p[name, 'weight'], x)) for name in ('Wq', 'Wk', 'Wv'))
    gate = 1 / (1 + jnp.exp(-affine(p['Wg', 'weight'], x)))
    h = jnp.einsum('...h,...hkv->...hkv', gate, h) + jnp.einsum(
        '...hk,...hv->...hkv', k, v
    )
    read = jnp.einsum('...hk,...hkv->...hv', q, h) / jnp.sqrt(q.shape[-1])
    return h, affine(p['Wo', 'weight'], read.reshape(*x.shape[:-1], -1))


SSM = {'d_state': 4, 'd_inner': 5, 'dt_min': 0.1, 'dt_max': 0.9}
HEADS = {'num_heads': 2, 'key_size': 3, 'value_size': 4}
CELLS = {
    'ssm': (nn.SelectiveSSM, SSM, ssm, (5, 4)),
    'attention': (nn.LinearAttention, HEADS, attention, (2, 3, 4)),
}
every_cell = pytest.mark.parametrize('name', CELLS)
every_batch = pytest.mark.parametrize('batch', [None, 2], ids=['unbatched', 'batched'])


def lead(batch):
    return () if batch is None else (batch,)


def shaken(module):
    """A module whose parameters are all moved off their first values."""
    for i, state in enumerate(module.states(brainstate.ParamState).values()):
        move = lambda v, i=i: v + 0.3 * normal(i, *v.shape)
        state.value = jax.tree.map(move, state.value)
    return module


def parameters(module):
    states = module.states(brainstate.ParamState)
    return {path: state.value for path, state in states.items()}


def inside(p, name):
    """The parameters of a part, by their paths in it."""
    return {path[1:]: value for path, value in p.items() if path[0] == name}


@every_cell
@every_batch
def test_formula(name, batch):
    kind, options, step, shape = CELLS[name]
    cell = shaken(kind(INPUTS, UNITS, **options))
    cell.init_state(batch)
    assert (cell.in_size, cell.out_size) == ((INPUTS,), (UNITS,))
    assert cell.h.value.shape == (*lead(batch), *shape)
    h = jnp.zeros(cell.h.value.shape)
    for x in normal(0, 3, *lead(batch), INPUTS):
        h, y = step(parameters(cell), h, x)
        np.testing.assert_allclose(cell(x), y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(cell.h.value, h, rtol=1e-4, atol=1e-5)
    cell.reset_state(7)
    assert cell.h.value.shape == (7, *shape)
    assert not np.any(cell.h.value)


def bptt(name, p, shape, xs, ys):
    step = CELLS[name][2]

    def loss(p):
        def one(h, at):
            x, y = at
            h, out = step(inside(p, 'cell'), h, x)
            out = affine(p['readout', 'weight'], jnp.tanh(out))
            return h, jnp.mean((out - y) ** 2)

        return jnp.sum(jax.lax.scan(one, jnp.zeros(shape), (xs, ys))[1])

    return jax.grad(loss)(p)


def flat(tree):
    leaves = [np.ravel(x) for path in sorted(tree) for x in jax.tree.leaves(tree[path])]
    return np.concatenate(leaves)


WAYS = {
    'two passes': {'fresh': True},
    'carried': {'fresh': False},
    'blocks of 3': {'fresh': False, 'block': 3},
    'step by step': {'fresh': False, 'block': 1},
}


@every_cell
@every_batch
@pytest.mark.parametrize('way', WAYS)
def test_d_rtrl_is_bptt(name, batch, way):
    _, options, _, shape = CELLS[name]
    net = shaken(networks.network(name, INPUTS, OUTPUTS, units=UNITS, **options))
    xs, ys = normal(1, T, *lead(batch), INPUTS), normal(2, T, *lead(batch), OUTPUTS)
    given = dict(WAYS[way])
    fresh = given.pop('fresh')
    learner = braintrace.compile(net, 'd_rtrl', xs[0], batch_size=batch, **given)
    assert {r.context['credit'] for r in learner.report.credits} == {'exact'}
    found = learner.etrace_grad(
        xs,
        ys,
        step_fn=lambda x, y: jnp.mean((learner(x) - y) ** 2),
        fresh=fresh,
        reduction='sum',
    )
    wanted = bptt(name, parameters(net), (*lead(batch), *shape), xs, ys)
    assert found.keys() == wanted.keys()
    for path in wanted:
        a, b = flat({path: found[path]}), flat({path: wanted[path]})
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b), path


@every_cell
def test_a_second_window_goes_on_where_the_first_ended(name):
    """Traces carry credit over the border, so the sum is that of one window."""
    _, options, _, shape = CELLS[name]
    net = shaken(networks.network(name, INPUTS, OUTPUTS, units=UNITS, **options))
    xs, ys = normal(1, T, 2, INPUTS), normal(2, T, 2, OUTPUTS)
    learner = braintrace.compile(net, 'd_rtrl', xs[0], batch_size=2)
    step_fn = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    first, second = (
        flat(
            learner.etrace_grad(
                xs[part], ys[part], step_fn=step_fn, fresh=False, reduction='sum'
            )
        )
        for part in (slice(0, 3), slice(3, T))
    )
    wanted = flat(bptt(name, parameters(net), (2, *shape), xs, ys))
    assert np.linalg.norm(first + second - wanted) <= 1e-5 * np.linalg.norm(wanted)


@every_cell
def test_weights_are_marked(name):
    kind, options, _, _ = CELLS[name]
    cell = kind(INPUTS, UNITS, **options)
    cell.init_state()
    found = braintrace.find_hidden_param_op_relations_from_module(cell, jnp.ones(3))
    assert found
    assert all(site.marked for relation in found for site in relation.sites)


def test_at_the_start():
    """Step sizes and decays lie where the options say, for an input of zero."""
    cell = nn.SelectiveSSM(INPUTS, 40, d_state=4, dt_min=0.01, dt_max=0.2)
    bias = np.asarray(cell.dt_proj.weight.value['bias'])
    step = np.log1p(np.exp(bias))
    assert np.all((step > 0.0099) & (step < 0.201))
    assert step.max() > 4 * step.min()
    np.testing.assert_allclose(np.exp(cell.A_log.value[7]), [1, 2, 3, 4], rtol=1e-5)
    cell = nn.LinearAttention(INPUTS, 8, num_heads=3, g_min=0.5, g_max=0.9)
    bias = np.asarray(cell.Wg.weight.value['bias'])
    np.testing.assert_allclose(1 / (1 + np.exp(-bias)), [0.5, 0.7, 0.9], rtol=1e-5)
    assert cell.state_size == (3, 2, 2)


@pytest.mark.parametrize(
    ('kind', 'options'),
    [
        (nn.SelectiveSSM, {'dt_min': 0.0}),
        (nn.SelectiveSSM, {'dt_min': 0.2, 'dt_max': 0.1}),
        (nn.SelectiveSSM, {'d_state': 0}),
        (nn.SelectiveSSM, {'d_inner': 2.5}),
        (nn.LinearAttention, {'num_heads': 0}),
        (nn.LinearAttention, {'g_max': 1.0}),
        (nn.LinearAttention, {'key_size': -1}),
        (nn.LinearAttention, {'feature_map': 'no_such_function'}),
    ],
)
def test_refusals(kind, options):
    with pytest.raises(ValueError, match='Fix: '):
        kind(3, 4, **options)


@every_cell
def test_a_network_learns(name):
    """A leaky sum of the input. Without memory 0.81 of its power is left at best."""
    rng = np.random.default_rng(0)
    net = networks.network(name, 1, 1, units=16)
    learner = braintrace.compile(net, 'd_rtrl', jnp.zeros((16, 1)), batch_size=16)
    optimizer, losses = optax.adam(0.01), []
    step_fn = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    for _ in range(60):
        xs = jnp.asarray(rng.normal(size=(20, 16, 1)), jnp.float32)
        leak = lambda y, x: (0.9 * y + 0.3 * x,) * 2
        ys = jax.lax.scan(leak, jnp.zeros((16, 1)), xs)[1]
        found, loss = learner.etrace_grad(
            xs, ys, step_fn=step_fn, fresh=True, return_value=True
        )
        learner.apply(found, optimizer)
        losses.append(float(jnp.mean(loss) / jnp.mean(ys**2)))
    assert np.mean(losses[-5:]) < 0.5
