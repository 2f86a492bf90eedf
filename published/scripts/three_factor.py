"""A modulator in place of the loss: standing, and given to a call."""

import jax.numpy as jnp
from common import Net, data, seeded

import braintrace

xs, ys = data()
learner = braintrace.compile(
    seeded(Net), braintrace.ThreeFactor, xs[0], batch_size=xs.shape[1], modulator=0.5
)
step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
grads, values = learner.etrace_grad(xs, ys, step_fn=step, return_value=True)
losses = [float(values.mean())]
learner.modulator = 2.0
learner(xs[0])
learner.update(xs[0], modulator=jnp.ones((xs.shape[1], 8)))
