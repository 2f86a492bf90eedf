"""Compiled gradients can be exported for hardware that is not here."""

import jax
import jax.export
import jax.numpy as jnp
import pytest

import braintrace

PLATFORMS = ('cuda', 'rocm', 'tpu')
T, BATCH, INPUTS, UNITS = 5, 2, 3, 4


def step(params, h, x):
    """One step of leaky units that feed each other."""
    h = 0.9 * h + jnp.tanh(x @ params['feed'] + h @ params['recur'])
    return h, h @ params['out']


def parameters():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {
        'feed': (INPUTS, UNITS),
        'recur': (UNITS, UNITS),
        'out': (UNITS, 2),
    }
    return {
        name: 0.3 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


@pytest.mark.parametrize('rule', ['d_rtrl', 'pp_prop', 'eprop', 'snap', 'rtrl', 'bptt'])
def test_gradients_for_other_hardware(rule):
    params, state = parameters(), jnp.zeros((BATCH, UNITS))
    example = jnp.zeros((BATCH, INPUTS))
    learner = braintrace.compile(step, rule, params, state, example)
    loss = lambda x, y: jnp.mean((learner(x) - y) ** 2)

    @jax.jit
    def gradients(params, xs, ys):
        return learner.etrace_grad(xs, ys, step_fn=loss, fresh=True, params=params)

    given = params, jnp.ones((T, BATCH, INPUTS)), jnp.ones((T, BATCH, 2))
    # Exporting lowers for each platform, and fails for calls that are not known to be
    # stable there.
    exported = jax.export.export(gradients, platforms=PLATFORMS)(*given)
    assert exported.platforms == PLATFORMS
    assert [a.shape for a in exported.out_avals] == [
        params[name].shape for name in sorted(params)
    ]
