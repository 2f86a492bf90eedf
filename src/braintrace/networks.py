"""The networks of the reference results: brainstate modules without marked
operations."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._brainstate import brainstate
from .errors import one_of, three_parts
from .nn import FiringRate, LinearAttention, SelectiveSSM


@jax.custom_jvp
def fire(v: jax.Array) -> jax.Array:
    """A spike where v is positive. Its surrogate derivative is a triangle of height
    0.3."""
    return (v > 0).astype(v.dtype)


@fire.defjvp
def _fire_jvp(primals: tuple, tangents: tuple) -> tuple:
    (v,), (dv,) = primals, tangents
    return fire(v), 0.3 * jnp.maximum(0.0, 1 - jnp.abs(v)) * dv


class SpikingNetwork(brainstate.nn.Module):
    """Spiking units with all-to-all recurrence, a running mean of their spikes, and a
    leaky read-out."""

    V: brainstate.HiddenState
    a: brainstate.HiddenState

    def __init__(
        self,
        inputs: int,
        outputs: int,
        units: int,
        tau_out: float,
        gain: float,
        seed: int,
    ):
        super().__init__()
        rng = np.random.default_rng(seed)
        drawn = lambda a, b, gain=1.0: jnp.asarray(
            rng.normal(size=(a, b)) * gain / math.sqrt(a), jnp.float32
        )
        self.units, self.outputs = units, outputs
        self.keep_out = math.exp(-1 / tau_out)
        self.feed = brainstate.ParamState(drawn(inputs, units))
        self.recur = brainstate.ParamState(drawn(units, units, gain))
        self.out = brainstate.ParamState(drawn(units, outputs))
        self.rate = FiringRate(units)

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        shape = () if batch_size is None else (batch_size,)
        for name in ('V', 'a'):
            setattr(self, name, brainstate.HiddenState(jnp.zeros((*shape, self.units))))
        self.y = brainstate.HiddenState(jnp.zeros((*shape, self.outputs)))

    def spikes(self) -> jax.Array:
        """Spikes at the current potentials."""
        raise NotImplementedError

    def read_out(self) -> brainstate.typing.ArrayLike:
        """Update the running mean and the output by the current spikes."""
        now = self.spikes()
        self.rate(now)
        self.y.value = self.keep_out * self.y.value + now @ self.out.value
        return self.y.value


class ALIF(SpikingNetwork):
    """LIF units, half of them with an adaptive threshold (Bellec 2020, evidence
    accumulation).

    ``gain``: the scale of the initial recurrent weights. With 1, the gradient of BPTT
    overflows within 2,000 steps.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        units: int = 100,
        threshold: float = 0.6,
        tau_v: float = 20.0,
        tau_a: float = 2000.0,
        tau_out: float = 20.0,
        refractory: int = 5,
        gain: float = 1.0,
        seed: int = 0,
    ):
        super().__init__(inputs, outputs, units, tau_out, gain, seed)
        self.threshold, self.refractory = threshold, refractory
        self.keep_v, self.keep_a = math.exp(-1 / tau_v), math.exp(-1 / tau_a)
        adaptive = np.arange(units) >= units // 2
        self.beta = jnp.asarray(
            adaptive * 1.7 * (1 - self.keep_a) / (1 - self.keep_v), jnp.float32
        )
        self.others = 1 - jnp.eye(units)

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        super().init_state(batch_size, **kwargs)
        self.rest = brainstate.ShortTermState(jnp.zeros_like(self.V.value))

    def spikes(self) -> jax.Array:
        over = (
            self.V.value - self.threshold - self.beta * self.a.value
        ) / self.threshold
        return jnp.where(self.rest.value == 0, fire(over), 0.0)

    def update(self, x: jax.Array) -> brainstate.typing.ArrayLike:
        z = self.spikes()
        reset = jax.lax.stop_gradient(z)
        self.rest.value = jnp.where(
            reset > 0, float(self.refractory), jnp.maximum(self.rest.value - 1, 0)
        )
        drive = x @ self.feed.value + z @ (self.recur.value * self.others)
        self.V.value = self.keep_v * self.V.value + drive - self.threshold * reset
        self.a.value = self.keep_a * self.a.value + z
        return self.read_out()


class GIF(SpikingNetwork):
    """Generalised integrate-and-fire units. Each unit has a slow current that its
    spikes change.

    ``after``: the change of the current at each spike. If it is negative, a spike makes
    the unit less excitable; if it is positive, more excitable. ``gain``: the scale of
    the initial recurrent weights.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        units: int = 200,
        tau: float = 100.0,
        tau_slow: float = 1500.0,
        after: float = -0.1,
        gain: float = 0.5,
        seed: int = 0,
    ):
        super().__init__(inputs, outputs, units, tau, gain, seed)
        self.after = after
        self.keep, self.keep_slow = math.exp(-1 / tau), math.exp(-1 / tau_slow)

    def spikes(self) -> jax.Array:
        return fire(self.V.value - 1.0)

    def update(self, x: jax.Array) -> brainstate.typing.ArrayLike:
        z = self.spikes()
        drive = x @ self.feed.value + z @ self.recur.value
        self.a.value = self.keep_slow * self.a.value + self.after * z
        self.V.value = (
            self.keep * self.V.value
            + drive
            + (1 - self.keep) * self.a.value
            - jax.lax.stop_gradient(z)
        )
        return self.read_out()


class Recurrent(brainstate.nn.Module):
    """A stock cell and a linear read-out. ``slow`` closes the update gate of a GRU, so
    that its states decay more slowly."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        units: int = 64,
        cell: str = 'GRUCell',
        slow: float = 0.0,
        seed: int = 0,
        **options: Any,
    ):
        super().__init__()
        brainstate.random.seed(seed)
        self.cell = getattr(brainstate.nn, cell)(inputs, units, **options)
        self.readout = brainstate.nn.Linear(units, outputs)
        if slow:
            gates = self.cell.Wrz.weight
            gates.value = {
                **gates.value,
                'bias': gates.value['bias'].at[units:].set(-slow),
            }

    def update(self, x: jax.Array) -> jax.Array:
        return self.readout(self.cell(x))


class StateSpace(brainstate.nn.Module):
    """A state-space layer or linear attention, tanh, and a linear read-out. Units do
    not feed each other, so D-RTRL gives the gradient of BPTT. ``cell`` is called with
    inputs, units and the other options."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        units: int = 64,
        cell: Any = SelectiveSSM,
        seed: int = 0,
        **options: Any,
    ):
        super().__init__()
        brainstate.random.seed(seed)
        self.cell = cell(inputs, units, **options)
        self.readout = brainstate.nn.Linear(units, outputs)

    def update(self, x: jax.Array) -> jax.Array:
        return self.readout(jnp.tanh(self.cell(x)))


NETWORKS: dict[str, Any] = {
    'alif': ALIF,
    'attention': partial(StateSpace, cell=LinearAttention),
    'gif': GIF,
    'gru': partial(Recurrent, cell='GRUCell', slow=1.0),
    'lstm': partial(Recurrent, cell='LSTMCell'),
    'rnn': partial(Recurrent, cell='ValinaRNNCell', activation='tanh'),
    'ssm': partial(StateSpace, cell=SelectiveSSM),
}
"""Networks by name: each is called with inputs, outputs and, by keyword, units and a
seed."""


def network(
    name: str, inputs: int, outputs: int, **options: Any
) -> brainstate.nn.Module:
    """A network by its name."""
    if name not in NETWORKS:
        fix = f'{one_of(NETWORKS, name)}; or file.py:factory on the command line'
        raise ValueError(
            three_parts(
                f'a network {name!r}',
                'there is none by this name',
                fix,
            )
        )
    return NETWORKS[name](inputs, outputs, **options)
