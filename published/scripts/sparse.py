"""A sparse layer of brainevent."""

import brainevent
import brainstate
import jax.numpy as jnp
import numpy as np
from common import INPUTS, OUTPUTS, UNITS, bptt, data, seeded, train

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


rng = np.random.default_rng(0)
dense = rng.normal(size=(INPUTS, UNITS)) * (rng.random((INPUTS, UNITS)) < 0.6)
matrix = lambda: brainevent.CSR.fromdense(jnp.asarray(dense, 'float32'))
make = lambda: Leaky(braintrace.nn.SparseLinear(matrix()), (UNITS,))
xs, ys = data()
exact = bptt(seeded(make), xs, ys)
learner = braintrace.compile(seeded(make), 'd_rtrl', xs[0], batch_size=xs.shape[1])
losses, gradient = train(learner, xs, ys)
