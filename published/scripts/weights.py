"""Weights saved by path and loaded again."""

import os
import tempfile

import brainstate
import jax.numpy as jnp
import numpy as np
from common import Net, data, seeded

import braintrace

xs, ys = data()
net = seeded(Net, 'LSTMCell')
flat = {
    '.'.join(path) + '.' + key: np.asarray(value)
    for path, state in net.states(brainstate.ParamState).items()
    for key, value in state.value.items()
}
assert sorted(flat)[2] == 'rnn.Wf.weight.bias'
with tempfile.TemporaryDirectory() as folder:
    np.savez(os.path.join(folder, 'weights.npz'), **flat)
    loaded = dict(np.load(os.path.join(folder, 'weights.npz')))
other = Net('LSTMCell')
for path, state in other.states(brainstate.ParamState).items():
    state.value = {
        key: jnp.asarray(loaded['.'.join(path) + '.' + key]) for key in state.value
    }
learner = braintrace.compile(other, 'd_rtrl', xs[0], batch_size=xs.shape[1])
losses = [float(jnp.mean((learner(x) - y) ** 2)) for x, y in zip(xs, ys, strict=True)]
