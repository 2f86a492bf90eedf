"""The marked operations with transforms of their weights."""

import brainstate
import jax.numpy as jnp
from common import INPUTS, OUTPUTS, UNITS, bptt, data, seeded, train

import braintrace


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.zeros((INPUTS, UNITS)))
        self.v = brainstate.ParamState(jnp.zeros((INPUTS, UNITS)))
        self.B = brainstate.ParamState(jnp.zeros((INPUTS, 2)))
        self.A = brainstate.ParamState(jnp.zeros((2, UNITS)))
        self.tau = brainstate.ParamState(jnp.zeros(UNITS))
        self.out = brainstate.ParamState(jnp.zeros((UNITS, OUTPUTS)))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def update(self, x):
        decay = braintrace.element_wise(
            self.tau.value, weight_fn=lambda t: 1 / (1 + jnp.exp(-t))
        )
        drive = braintrace.matmul(x, self.w.value, weight_fn=jnp.abs)
        drive += braintrace.einsum('bi,io->bo', x, self.v.value, weight_fn=jnp.tanh)
        drive += braintrace.lora_matmul(
            x, self.B.value, self.A.value, alpha=0.5, b_fn=jnp.tanh, a_fn=jnp.sin
        )
        self.h.value = decay * self.h.value + jnp.tanh(drive)
        return braintrace.matmul(self.h.value, self.out.value)


xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
learner = braintrace.compile(seeded(Net), 'd_rtrl', xs[0], batch_size=xs.shape[1])
losses, gradient = train(learner, xs, ys)
