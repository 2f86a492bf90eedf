"""Networks of the reference results."""

import math

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

nn = brainstate.nn


@jax.custom_jvp
def fire(v):
    """A spike where v is positive; in derivatives a triangle of height 0.3."""
    return (v > 0).astype(v.dtype)


@fire.defjvp
def _fire_jvp(primals, tangents):
    (v,), (dv,) = primals, tangents
    return fire(v), 0.3 * jnp.maximum(0.0, 1 - jnp.abs(v)) * dv


class Spiking(nn.Module):
    """LIF units, half of them with an adaptive threshold, and a leaky read-out (Bellec 2020)."""

    def __init__(self, inputs, outputs, lif=50, alif=50, threshold=0.6, tau_v=20.0, tau_a=2000.0, tau_out=20.0, seed=0):
        super().__init__()
        rng, units = np.random.default_rng(seed), lif + alif
        drawn = lambda a, b: rng.normal(size=(a, b)).astype(np.float32) / math.sqrt(a)
        self.units, self.outputs, self.threshold = units, outputs, threshold
        self.keep_v, self.keep_a, self.keep_out = (math.exp(-1 / tau) for tau in (tau_v, tau_a, tau_out))
        self.beta = jnp.asarray(np.r_[np.zeros(lif), np.ones(alif)] * 1.7 * (1 - self.keep_a) / (1 - self.keep_v))
        self.feed = brainstate.ParamState(jnp.asarray(drawn(inputs, units)))
        self.recur = brainstate.ParamState(jnp.asarray(drawn(units, units)))
        self.out = brainstate.ParamState(jnp.asarray(drawn(units, outputs)))
        self.away = 1 - jnp.eye(units)

    def init_state(self, batch_size=None, **kwargs):
        zeros = lambda n: jnp.zeros((batch_size, n))
        self.V, self.a = brainstate.HiddenState(zeros(self.units)), brainstate.HiddenState(zeros(self.units))
        self.rate, self.y = brainstate.HiddenState(zeros(self.units)), brainstate.HiddenState(zeros(self.outputs))
        self.rest = brainstate.ShortTermState(zeros(self.units))

    def spikes(self):
        free = self.rest.value == 0
        over = (self.V.value - self.threshold - self.beta * self.a.value) / self.threshold
        return jnp.where(free, fire(over), 0.0)

    def update(self, x):
        z = self.spikes()
        self.rest.value = jnp.where(jax.lax.stop_gradient(z) > 0, 5.0, jnp.maximum(self.rest.value - 1, 0))
        drive = x @ self.feed.value + z @ (self.recur.value * self.away)
        self.V.value = self.keep_v * self.V.value + drive - self.threshold * jax.lax.stop_gradient(z)
        self.a.value = self.keep_a * self.a.value + z
        now = self.spikes()
        self.rate.value = 0.99 * self.rate.value + 0.01 * now
        self.y.value = self.keep_out * self.y.value + now @ self.out.value
        return self.y.value, self.rate.value


class Slow(nn.Module):
    """Generalised integrate-and-fire units with one slow current of their own (Geng and others' GIF network)."""

    def __init__(self, inputs, outputs, units=200, tau=100.0, tau_slow=1500.0, seed=0):
        super().__init__()
        rng = np.random.default_rng(seed)
        drawn = lambda a, b, gain: jnp.asarray(gain * rng.normal(size=(a, b)).astype(np.float32) / math.sqrt(a))
        self.units, self.outputs = units, outputs
        self.keep, self.keep_slow = math.exp(-1 / tau), math.exp(-1 / tau_slow)
        self.keep_out = math.exp(-1 / tau)
        self.feed = brainstate.ParamState(drawn(inputs, units, 1.0))
        self.recur = brainstate.ParamState(drawn(units, units, 0.5))
        self.out = brainstate.ParamState(drawn(units, outputs, 1.0))

    def init_state(self, batch_size=None, **kwargs):
        zeros = lambda n: jnp.zeros((batch_size, n))
        self.V, self.slow = brainstate.HiddenState(zeros(self.units)), brainstate.HiddenState(zeros(self.units))
        self.rate, self.y = brainstate.HiddenState(zeros(self.units)), brainstate.HiddenState(zeros(self.outputs))

    def update(self, x):
        z = fire(self.V.value - 1.0)
        drive = x @ self.feed.value + z @ self.recur.value
        self.slow.value = self.keep_slow * self.slow.value - 0.1 * z
        self.V.value = self.keep * self.V.value + drive + (1 - self.keep) * self.slow.value - jax.lax.stop_gradient(z)
        now = fire(self.V.value - 1.0)
        self.rate.value = 0.99 * self.rate.value + 0.01 * now
        self.y.value = self.keep_out * self.y.value + now @ self.out.value
        return self.y.value, self.rate.value


class Recurrent(nn.Module):
    """A stock cell and a linear read-out. ``slow`` closes the update gate of a GRU: its units then remember longer."""

    def __init__(self, cell, inputs, units, outputs, slow=0.0):
        super().__init__()
        self.cell, self.readout = getattr(nn, cell)(inputs, units), nn.Linear(units, outputs)
        if slow:
            gates = self.cell.Wrz.weight
            gates.value = {**gates.value, 'bias': gates.value['bias'].at[units:].set(-slow)}

    def update(self, x):
        return self.readout(self.cell(x)), jnp.zeros(())
