"""Convolution, masked and low-rank currents in mA into synapses and LIF units, each by a
learner that is compiled and mapped over the batch inside a jitted update."""

import brainpy.state
import brainstate
import braintools
import brainunit as u
import jax.numpy as jnp
import numpy as np
from common import BATCH, STEPS, UNITS, seeded

import braintrace

brainstate.environ.set(dt=1.0 * u.ms)
SIDE, CHANNELS = 4, 2
NO_CURRENT = braintools.init.ZeroInit(unit=u.mA)
CURRENT = braintools.init.KaimingNormal(2.0, unit=u.mA)


class Spiking(brainstate.nn.Module):
    """A current, a synapse, LIF units and a leaky read-out."""

    def __init__(self, size=UNITS):
        super().__init__()
        self.syn = brainpy.state.Expon(size, tau=10 * u.ms, g_initializer=NO_CURRENT)
        self.neu = brainpy.state.LIF(
            size,
            R=1 * u.ohm,
            tau=20 * u.ms,
            V_th=0.1 * u.mV,
            V_reset=0 * u.mV,
            V_rest=0 * u.mV,
            V_initializer=braintools.init.ZeroInit(unit=u.mV),
        )
        self.out = braintrace.nn.LeakyRateReadout(
            in_size=size, out_size=2, tau=10 * u.ms
        )

    def update(self, x):
        self.neu(self.syn(self.current(x)))
        return self.out(self.neu.get_spike())


class Convolved(Spiking):
    def __init__(self):
        super().__init__(SIDE * SIDE * CHANNELS)
        self.conv = braintrace.nn.Conv2d(
            (SIDE, SIDE, 1), CHANNELS, 3, w_init=CURRENT, b_init=NO_CURRENT
        )

    def current(self, x):
        return self.conv(x.reshape(*x.shape[:-1], SIDE, SIDE, 1)).reshape(-1)


class Masked(Spiking):
    def __init__(self):
        super().__init__()
        inputs = SIDE * SIDE + UNITS
        mask = np.random.default_rng(0).random((inputs, UNITS)) < 0.5
        self.into = braintrace.nn.Linear(
            inputs, UNITS, CURRENT, NO_CURRENT, w_mask=jnp.asarray(mask, 'float32')
        )

    def current(self, x):
        return self.into(jnp.concatenate([x, self.neu.get_spike()], axis=-1))


class LowRank(Spiking):
    def __init__(self):
        super().__init__()
        self.into = braintrace.nn.Linear(SIDE * SIDE, UNITS, CURRENT, NO_CURRENT)
        self.B = brainstate.ParamState(CURRENT((UNITS, 2)))
        self.A = brainstate.ParamState(braintools.init.KaimingNormal()((2, UNITS)))

    def current(self, x):
        spikes = self.neu.get_spike()
        again = braintrace.lora_matmul(spikes, self.B.value, self.A.value, alpha=0.5)
        return self.into(x) + again


def trained(kind):
    net = seeded(kind)
    optimizer = braintools.optim.Adam(lr=1e-3)
    optimizer.register_trainable_weights(net.states(brainstate.ParamState))

    @brainstate.transform.jit
    def update(xs, labels):
        learner = braintrace.compile(
            net,
            braintrace.pp_prop,
            xs[0],
            batch_size=xs.shape[1],
            vmap=True,
            decay_or_rank=0.95,
        )
        metric = braintools.metric.softmax_cross_entropy_with_integer_labels
        gradients, values = learner.etrace_grad(
            xs,
            step_fn=lambda x: metric(learner(x), labels).mean(),
            reduction='sum',
            return_value=True,
        )
        optimizer.update(brainstate.nn.clip_grad_norm(gradients, 1.0))
        return values.mean()

    rng = np.random.default_rng(0)
    xs = jnp.asarray(rng.random((STEPS, BATCH, SIDE * SIDE)) < 0.5, 'float32')
    return [float(update(xs, jnp.arange(BATCH) % 2)) for _ in range(2)]


losses = [loss for kind in (Convolved, Masked, LowRank) for loss in trained(kind)]
