"""Single programs that the analysis of positions once failed on."""

import jax
import jax.numpy as jnp

import braintrace


@jax.custom_jvp
def clamped(v):
    return jnp.clip(v, -0.5, 0.5)


clamped.defjvp(lambda primals, tangents: (clamped(*primals), 0.5 * tangents[0]))


def test_a_function_of_more_elements_than_a_group_has_positions():
    """Joined values are read twice, once by way of a function that has a derivative of its own and calls another."""

    def step(p, s, x):
        joined = jnp.concatenate([jnp.broadcast_to(x, (2,)), s['h0']], -1)
        parts = jnp.concatenate([joined @ p['w2'], joined @ p['w3']], -1)
        h0 = 0.8 * s['h0'] + jnp.tanh(parts)
        h1 = 0.8 * s['h1'] + clamped(jnp.tanh(joined)) @ p['w4']
        return {'h0': h0, 'h1': h1}, h0 @ p['w5']

    shapes = {'w2': (5, 1), 'w3': (5, 2), 'w4': (5, 3), 'w5': (3, 2)}
    p = {name: jnp.ones(shape) for name, shape in shapes.items()}
    s = {'h0': jnp.zeros(3), 'h1': jnp.zeros(3)}
    options = {'vmap': True, 'batch_size': 3}
    learner = braintrace.compile(step, 'd_rtrl', p, s, jnp.zeros(()), **options)
    assert len(learner.graph.hidden_groups) == 2
