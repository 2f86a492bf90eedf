"""The nodes of the NIR specification with a state: neurons and delays.

The differential equations are solved exactly, with an input that is constant during a
step: with α = exp(-dt/τ), a leak takes v to α v + (1 - α) (v_leak + R I).

A neuron stores its potential before the reset, so that its spikes are a function of its
state. The next step starts from the potential after the reset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import brainstate
import jax.numpy as jnp
import numpy as np

from ..errors import three_parts
from ..text import size_text
from .nodes import Node, spikes


class _Neuron(Node):
    """A node with a potential ``v``, zero at first."""

    has_state: ClassVar = True
    v: brainstate.HiddenState

    @classmethod
    def _shape_of(cls, arrays: Mapping[str, np.ndarray]) -> tuple[int, ...]:
        shapes = {name: array.shape for name, array in arrays.items()}
        try:
            return np.broadcast_shapes(*shapes.values())
        except ValueError as error:
            raise ValueError(
                three_parts(
                    f'a {cls.__name__} node with fields of shapes '
                    f'{", ".join(f"{name} {shape}" for name, shape in shapes.items())}',
                    'its neurons have one number of each',
                    'arrays of one shape',
                )
            ) from error

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its potentials, batch axes aside."""
        return self.array(next(iter(self.arrays))).shape

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        batch = () if batch_size is None else (batch_size,)
        self.v = brainstate.HiddenState(jnp.zeros((*batch, *self.shape), self.dtype))

    def output(self) -> Any:
        """The output at the current state."""
        return self.v.value

    def _start(self) -> Any:
        """The potential that a step starts from."""
        return self.v.value


class _Spiking(_Neuron):
    """A neuron that spikes above a threshold and is reset to a potential."""

    def output(self) -> Any:
        return spikes(self, self.v.value, 'v_threshold')

    def _start(self) -> Any:
        v: Any = self.v.value
        return jnp.where(v > self.value('v_threshold'), self.value('v_reset'), v)


class I(_Neuron):  # noqa: E742 - the name in the specification
    """dv/dt = R I."""

    arrays: ClassVar = {'r': None}

    def update(self, x: Any) -> Any:
        self.v.value = self._start() + self._cast(self.dt * self.array('r')) * x
        return self.output()


class IF(_Spiking, I):
    """dv/dt = R I, with spikes and a reset."""

    arrays: ClassVar = {'r': None, 'v_threshold': None, 'v_reset': 0.0}


class LI(_Neuron):
    """τ dv/dt = v_leak - v + R I."""

    arrays: ClassVar = {'tau': None, 'r': None, 'v_leak': None}

    def update(self, x: Any) -> Any:
        keep, gain = _leak(self.dt, self.array('tau'))
        drive = self.value('v_leak') + self.value('r') * x
        self.v.value = self._cast(keep) * self._start() + self._cast(gain) * drive
        return self.output()


class LIF(_Spiking, LI):
    """τ dv/dt = v_leak - v + R I, with spikes and a reset."""

    arrays: ClassVar = {**LI.arrays, 'v_threshold': None, 'v_reset': 0.0}


class CubaLI(_Neuron):
    """τ_syn dI/dt = -I + w_in S and τ_mem dv/dt = v_leak - v + R I.

    Both equations are solved together: the current changes during a step, and the
    potential follows it.
    """

    arrays: ClassVar = {
        'tau_syn': None,
        'tau_mem': None,
        'r': None,
        'v_leak': None,
        'w_in': 1.0,
    }
    i: brainstate.HiddenState

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        super().init_state(batch_size, **kwargs)
        self.i = brainstate.HiddenState(jnp.zeros_like(self.v.value))

    def update(self, x: Any) -> Any:
        tau_syn, tau_mem = self.array('tau_syn'), self.array('tau_mem')
        keep_i, gain_i = _leak(self.dt, tau_syn)
        keep, gain = _leak(self.dt, tau_mem)
        carried = self._cast(_carried(self.dt / tau_mem, self.dt / tau_syn))
        target = self.value('w_in') * x
        r, old = self.value('r'), self.i.value
        # The current of the old value and of the constant target, each by its effect
        # on the potential: I(s) = target + (old - target) exp(-s/τ_syn).
        drive = self._cast(gain) * (self.value('v_leak') + r * target)
        drive = drive + carried * r * (old - target)
        self.v.value = self._cast(keep) * self._start() + drive
        self.i.value = self._cast(keep_i) * old + self._cast(gain_i) * target
        return self.output()


class CubaLIF(_Spiking, CubaLI):
    """A :class:`CubaLI` with spikes and a reset of the potential."""

    arrays: ClassVar = {**CubaLI.arrays, 'v_threshold': None, 'v_reset': 0.0}


DELAY_BYTES = 2**28
"""The largest memory of past inputs, unless the user allows more."""


class Delay(Node):
    """y(t) = x(t - delay), with a number of whole steps for each element.

    The past inputs are states of the same position, so a trace carries credit through
    the delay. ``max_bytes``: the largest memory that they may need for one sample.
    """

    has_state: ClassVar = True
    arrays: ClassVar = {'delay': None}
    past: brainstate.HiddenGroupState

    def __init__(self, *, max_bytes: float = DELAY_BYTES, **given: Any):
        super().__init__(**{**given, 'train': ()})
        delay = self.array('delay')
        whole = np.rint(delay / self.dt)
        is_whole = np.isclose(whole * self.dt, delay, rtol=1e-3) & np.isfinite(delay)
        if not np.all(is_whole & (delay >= 0)):
            raise ValueError(
                three_parts(
                    f'a Delay node of {delay.ravel()[:5]} with dt={self.dt}',
                    'a step model delays by whole steps',
                    'delays that are multiples of dt, none negative; another dt',
                )
            )
        # Predicted before anything of this size is made.
        length = whole.max(initial=0) + 1
        if (needed := length * delay.size * self.dtype.itemsize) > max_bytes:
            raise ValueError(
                three_parts(
                    f'a Delay node of up to {delay.max():g} with dt={self.dt}',
                    f'its {length:,.0f} past inputs of {delay.size} elements need '
                    f'{size_text(needed)} for each sample, and at most '
                    f'{size_text(max_bytes)} are allowed',
                    f'a larger dt, or nir.read(..., max_delay_bytes={needed:.0f})',
                )
            )
        steps = whole.astype(int)
        # One for every step of the past, the current input included.
        self._chosen = np.arange(steps.max(initial=0) + 1) == steps[..., None]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its inputs and outputs, batch axes aside."""
        return self._chosen.shape[:-1]

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        batch = () if batch_size is None else (batch_size,)
        zeros = jnp.zeros((*batch, *self._chosen.shape), self.dtype)
        self.past = brainstate.HiddenGroupState(zeros)

    def output(self) -> Any:
        """The output at the current state."""
        return jnp.sum(self.past.value * self._cast(self._chosen), axis=-1)

    def update(self, x: Any) -> Any:
        old: Any = self.past.value
        newest = jnp.broadcast_to(jnp.asarray(x, old.dtype), old.shape[:-1])
        self.past.value = jnp.concatenate([newest[..., None], old[..., :-1]], axis=-1)
        return self.output()


def _leak(dt: float, tau: Any) -> tuple[Any, Any]:
    """exp(-dt/τ), and 1 - exp(-dt/τ)."""
    xp: Any = np if isinstance(tau, np.ndarray) else jnp
    return xp.exp(-dt / tau), -xp.expm1(-dt / tau)


def _carried(a: Any, b: Any) -> Any:
    """a (exp(-b) - exp(-a)) / (a - b), also where a and b are equal: how much of a
    current that decays by b a potential that decays by a takes in."""
    both = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
    xp: Any = np if both else jnp
    distance = xp.abs(a - b)
    is_small = distance < 1e-2
    safe = xp.where(is_small, 1.0, distance)
    # (1 - exp(-d)) / d, whose derivative would lose all digits near zero.
    series = 1 - distance / 2 * (
        1 - distance / 3 * (1 - distance / 4 * (1 - distance / 5))
    )
    ratio = xp.where(is_small, series, -xp.expm1(-safe) / safe)
    return a * xp.exp(-xp.minimum(a, b)) * ratio
