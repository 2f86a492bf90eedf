"""A learner of one sample mapped over a batch, compiled with a batched example."""

import brainstate
import jax.numpy as jnp
from common import Net, bptt, data, descend, seeded

import braintrace

xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
net = seeded(Net)
learner = braintrace.compile(net, 'd_rtrl', xs[0], batch_size=xs.shape[1], vmap=True)
assert isinstance(learner.module.graph, braintrace.ETraceGraph)
assert isinstance(learner, braintrace.ETraceVmap)


def step(x, y):
    return jnp.mean((learner(x) - y) ** 2)


losses = []
gradient = None
for _ in range(3):
    grads, value = learner.etrace_grad(
        xs, ys, step_fn=step, return_value=True, loss_output='scalar'
    )
    gradient = gradient or grads
    losses.append(float(value))
    descend(net.states(brainstate.ParamState), grads)
