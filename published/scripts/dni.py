"""DNI with a synthesiser trained beforehand."""

import jax.numpy as jnp
from common import Net, bptt, data, seeded

import braintrace

xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
learner = braintrace.compile(seeded(Net), 'dni', xs[0], batch_size=xs.shape[1])
synthesizer = braintrace.SyntheticGradient(learner.group_signal_shapes())
learner.attach_synthesizer(synthesizer)
braintrace.train_synthetic_gradient(
    learner, xs, chunk_size=4, epochs=3, lr=0.05, batch_size=xs.shape[1]
)
learner.reset_state(batch_size=xs.shape[1])


def window(x, y):
    out = learner(braintrace.MultiStepData(x))
    return jnp.mean((out - y) ** 2, axis=(1, 2))


gradient, values = learner.etrace_grad(
    xs, ys, step_fn=window, chunk_size=4, return_value=True
)
losses = [float(values.mean())]
