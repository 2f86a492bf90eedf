"""Losses that count at the end of a sequence only."""

import jax.numpy as jnp
from common import Net, data, seeded

import braintrace

xs, ys = data()
mask = jnp.arange(len(xs)) >= 8
learner = braintrace.compile(seeded(Net), 'd_rtrl', xs[0], batch_size=xs.shape[1])
step = lambda x, y: (jnp.mean((learner(x) - y) ** 2), {'x': x})
losses = []
for output in ('per_step', 'masked', 'scalar'):
    learner.reset_state()
    grads, values, aux = learner.etrace_grad(
        xs,
        ys,
        step_fn=step,
        mask=mask,
        loss_output=output,
        return_value=True,
        has_aux=True,
    )
    losses.append(float(jnp.sum(values)))
assert aux['x'].shape == xs.shape
