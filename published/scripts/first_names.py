"""The names of version 0.1."""

import brainstate
import jax.numpy as jnp
from common import INPUTS, OUTPUTS, UNITS, bptt, data, seeded, train

import braintrace


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        weight = {'weight': jnp.zeros((INPUTS, UNITS)), 'bias': jnp.zeros(UNITS)}
        self.w = braintrace.ETraceParam(weight, braintrace.MatMulOp())
        self.a = braintrace.ElemWiseParam(
            jnp.zeros(UNITS), lambda a: 1 / (1 + jnp.exp(-a))
        )
        self.out = braintrace.NonTempParam(
            {'weight': jnp.zeros((UNITS, OUTPUTS))}, braintrace.MatMulOp()
        )

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def update(self, x):
        self.h.value = self.a.execute() * self.h.value + jnp.tanh(self.w.execute(x))
        return self.out.execute(self.h.value)


xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
learner = braintrace.compile(seeded(Net), 'd_rtrl', xs[0], batch_size=xs.shape[1])
losses, gradient = train(learner, xs, ys)
