"""Rows of a table into leaky units."""

import brainstate
import jax.numpy as jnp
import numpy as np
from common import BATCH, OUTPUTS, STEPS, UNITS, bptt, data, seeded, train

import braintrace


class Leaky(brainstate.nn.Module):
    """Leaky units driven by a layer, and a read-out."""

    def __init__(self, layer, units, flat=False):
        super().__init__()
        self.layer, self.flat = layer, flat
        self.units = units
        self.out = braintrace.nn.Linear(units[-1], OUTPUTS)

    def init_state(self, batch_size=None, **kwargs):
        shape = (*self.units,) if batch_size is None else (batch_size, *self.units)
        self.h = brainstate.HiddenState(jnp.zeros(shape))

    def update(self, x):
        self.h.value = 0.8 * self.h.value + jnp.tanh(self.layer(x))
        h = self.h.value
        return self.out(h.mean(axis=-2) if self.flat else h)


make = lambda: Leaky(braintrace.nn.Embedding(5, UNITS), (UNITS,))
_, ys = data()
xs = jnp.asarray(np.random.default_rng(0).integers(0, 5, (STEPS, BATCH)))
exact = bptt(seeded(make), xs, ys)
learner = braintrace.compile(seeded(make), 'd_rtrl', xs[0], batch_size=BATCH)
losses, gradient = train(learner, xs, ys)
