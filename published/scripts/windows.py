"""Multi-step learners: windows of MultiStepData, the losses of a window, and masks."""

import jax.numpy as jnp
from common import Net, bptt, data, descend, seeded

import braintrace

xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
learner = braintrace.compile(
    seeded(Net), 'd_rtrl', xs[0], batch_size=xs.shape[1], vjp_method='multi-step'
)
assert learner.vjp_method == 'multi-step'


def window(x, y):
    out = learner(braintrace.MultiStepData(x))
    return jnp.mean((out - y) ** 2, axis=(1, 2))


losses, gradient = [], None
for _ in range(3):
    learner.reset_state(batch_size=xs.shape[1])
    grads, values = learner.etrace_grad(
        xs, ys, step_fn=window, chunk_size=4, return_value=True
    )
    gradient = gradient or grads
    losses.append(float(values.mean()))
    descend(learner.param_states, grads)
assert values.shape == (len(xs),)
outputs = learner.etrace_evolve(xs, chunk_size=4, return_outputs=True)
assert outputs.shape[:2] == (3, 4)
