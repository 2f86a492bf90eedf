"""Traces advanced along a first part of a sequence, learning on the rest."""

import jax.numpy as jnp
from common import Net, data, seeded

import braintrace

xs, ys = data()
learner = braintrace.compile(seeded(Net), 'd_rtrl', xs[0], batch_size=xs.shape[1])
outputs = learner.etrace_evolve(xs[:6], return_outputs=True)
step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
grads, values = learner.etrace_grad(xs[6:], ys[6:], step_fn=step, return_value=True)
losses = [float(jnp.mean(outputs**2)), float(values.mean())]
assert int(learner.running_index.value) == len(xs)
