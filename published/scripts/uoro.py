"""UORO over one window that holds the whole sequence."""

import jax.numpy as jnp
from common import Net, bptt, data, seeded

import braintrace

xs, ys = data()
exact = bptt(seeded(Net, 'ValinaRNNCell', activation='tanh'), xs, ys)
learner = braintrace.compile(
    seeded(Net, 'ValinaRNNCell', activation='tanh'),
    'uoro',
    xs[0],
    batch_size=xs.shape[1],
    projection_key=7,
)
assert learner.vjp_method == 'multi-step'


def window(x, y):
    out = learner(braintrace.MultiStepData(x))
    return jnp.mean((out - y) ** 2, axis=(1, 2))


gradient, values = learner.etrace_grad(
    xs, ys, step_fn=window, chunk_size=len(xs), return_value=True
)
losses = [float(values.mean())]
