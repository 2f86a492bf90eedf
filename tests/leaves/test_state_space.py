"""State-space models and linear attention: their options, first values, and that a network of them learns.

Their formula and gradient are cases of `tests/gradients/test_table.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import networks, nn

CELLS = {
    'ssm': (nn.SelectiveSSM, {'d_state': 4, 'd_inner': 5}, (5, 4)),
    'attention': (
        nn.LinearAttention,
        {'num_heads': 2, 'key_size': 3, 'value_size': 4},
        (2, 3, 4),
    ),
}
every_cell = pytest.mark.parametrize('name', CELLS)


@every_cell
def test_sizes(name):
    kind, options, shape = CELLS[name]
    cell = kind(3, 6, **options)
    for batch in (None, 2):
        lead = () if batch is None else (batch,)
        cell.init_state(batch)
        assert (cell.in_size, cell.out_size) == ((3,), (6,))
        assert cell.h.value.shape == (*lead, *shape)
        assert cell(jnp.ones((*lead, 3))).shape == (*lead, 6)
        assert np.any(cell.h.value)
    cell.reset_state(7)
    assert cell.h.value.shape == (7, *shape)
    assert not np.any(cell.h.value)


@every_cell
def test_samples_are_independent(name):
    kind, options, _ = CELLS[name]
    cell = kind(3, 6, **options)
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 3)), 'float32')
    cell.init_state(2)
    both = jnp.stack([cell(x) for x in xs])
    cell.init_state()
    alone = jnp.stack([cell(x[1]) for x in xs])
    np.testing.assert_allclose(both[:, 1], alone, rtol=1e-4, atol=1e-6)


@every_cell
def test_weights_are_marked(name):
    kind, options, _ = CELLS[name]
    cell = kind(3, 6, **options)
    cell.init_state()
    found = braintrace.find_hidden_param_op_relations_from_module(cell, jnp.ones(3))
    assert found
    assert all(site.marked for relation in found for site in relation.sites)


def test_at_the_start():
    """Step sizes and decays lie where the options say, for an input of zero."""
    cell = nn.SelectiveSSM(3, 40, d_state=4, dt_min=0.01, dt_max=0.2)
    bias = np.asarray(cell.dt_proj.weight.value['bias'])
    step = np.log1p(np.exp(bias))
    assert np.all((step > 0.0099) & (step < 0.201))
    assert step.max() > 4 * step.min()
    np.testing.assert_allclose(np.exp(cell.A_log.value[7]), [1, 2, 3, 4], rtol=1e-5)
    cell = nn.LinearAttention(3, 8, num_heads=3, g_min=0.5, g_max=0.9)
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
