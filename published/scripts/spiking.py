"""Spiking units of brainpy.state, trained by a braintools optimiser."""

import brainpy
import brainstate
import braintools
import brainunit as u
import jax.numpy as jnp
from common import INPUTS, OUTPUTS, UNITS, bptt, data, seeded

import braintrace

brainstate.environ.set(dt=1.0 * u.ms)


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.into = braintrace.nn.Linear(INPUTS + UNITS, UNITS)
        self.neu = brainpy.state.LIF(
            UNITS, tau=20 * u.ms, V_th=1 * u.mV, V_reset=0 * u.mV, V_rest=0 * u.mV
        )
        self.out = braintrace.nn.LeakyRateReadout(UNITS, OUTPUTS, tau=10.0 * u.ms)

    def update(self, x):
        spikes = self.neu.get_spike()
        self.neu(self.into(jnp.concatenate([x, spikes], axis=-1)) * 20 * u.mA)
        return self.out(self.neu.get_spike())


xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
net = seeded(Net)
learner = braintrace.compile(net, 'd_rtrl', xs[0], batch_size=xs.shape[1])
optimizer = braintools.optim.SGD(0.1)
optimizer.register_trainable_weights(learner.param_states)
step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
losses, gradient = [], None
for _ in range(3):
    learner.reset_state(batch_size=xs.shape[1])
    brainstate.nn.init_all_states(
        learner.model if hasattr(learner, 'model') else learner.model4compile,
        batch_size=xs.shape[1],
    )
    grads, values = learner.etrace_grad(xs, ys, step_fn=step, return_value=True)
    gradient = gradient or grads
    losses.append(float(values.mean()))
    optimizer.update(grads)
