"""Read-outs with a memory of their own, and firing rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
from brainstate.nn import init
from brainstate.typing import ArrayLike

from braintrace import ops
from braintrace.errors import three_parts

from .linear import KAIMING, ZERO


class LeakyRateReadout(brainstate.nn.Module):
    """A leaky integrator, ``r = exp(-dt / tau) * r + x @ W``, with `dt` from
    `brainstate.environ`."""

    def __init__(
        self,
        in_size: int | Sequence[int],
        out_size: int | Sequence[int],
        tau: ArrayLike = 5.0 * u.ms,  # type: ignore[attr-defined]
        w_init: Callable | ArrayLike = KAIMING,
        r_init: Callable | ArrayLike = ZERO,
        name: str | None = None,
    ):
        super().__init__(name=name)  # type: ignore[call-arg]
        self.in_size, self.out_size = in_size, out_size
        self.tau = init.param(tau, self.out_size)
        sizes: Any = (self.in_size, self.out_size)
        shape = sizes[0][-1], sizes[1][-1]
        self.W = brainstate.ParamState(init.param(w_init, shape, allow_none=False))
        self.r_init = r_init

    def init_state(self, batch_size: int | None = None, **kwargs) -> None:
        self.r = brainstate.HiddenState(
            init.param(self.r_init, self.out_size, batch_size)
        )

    def reset_state(self, batch_size: int | None = None, **kwargs) -> None:
        self.r.value = init.param(self.r_init, self.out_size, batch_size)

    @property
    def decay(self) -> jax.Array:
        """The factor by which r decays in a step, from the `dt` of the environment."""
        dt = brainstate.environ.get_dt()
        if not u.have_same_dim(dt, self.tau):
            raise ValueError(
                three_parts(
                    f'LeakyRateReadout with tau={self.tau} and dt={dt}',
                    'the decay exp(-dt / tau) needs both in units of time, or both '
                    'without a unit',
                    'for instance tau=5 * u.ms with brainstate.environ.set(dt=0.1 * '
                    'u.ms)',
                )
            )
        return jnp.exp(-u.maybe_decimal(dt / self.tau))

    def update(self, x: ArrayLike) -> ops.Result:
        self.r.value = self.decay * self.r.value + ops.matmul(x, self.W.value)
        return self.r.value


class FiringRate(brainstate.nn.Module):
    """A running mean of spikes, ``r = decay * r + (1 - decay) * spikes``, to keep
    firing rates near a target.

    Add :meth:`penalty` to the loss of a step. Every parameter then gets its part of the
    gradient.
    """

    def __init__(
        self, size: int | Sequence[int], decay: float = 0.99, name: str | None = None
    ):
        super().__init__(name=name)  # type: ignore[call-arg]
        if not 0 < decay < 1:
            raise ValueError(
                three_parts(
                    f'FiringRate(decay={decay})',
                    'a running mean keeps a part of itself',
                    '0 < decay < 1',
                )
            )
        self.in_size = self.out_size = size
        self.decay = decay

    def init_state(self, batch_size: int | None = None, **kwargs) -> None:
        self.r = brainstate.HiddenState(init.param(ZERO, self.out_size, batch_size))

    def update(self, spikes: ArrayLike) -> ArrayLike:
        self.r.value = self.decay * self.r.value + (1 - self.decay) * spikes
        return self.r.value

    def penalty(self, target: float) -> jax.Array:
        """Half the mean squared distance between the rates and a target, in spikes for
        each step. The rate of a unit is its mean over the batch."""
        if not isinstance(target, jax.core.Tracer) and not target > 0:
            raise ValueError(
                three_parts(
                    f'penalty({target})', 'a target rate is positive', 'penalty(0.02)'
                )
            )
        rates: Any = self.r.value
        rates = rates.reshape(-1, *self.out_size).mean(0)
        return 0.5 * jnp.mean((rates - target) ** 2) / target


class WindowRate(brainstate.nn.Module):
    """The number of spikes of each unit in a window of steps, divided by the length of
    the window.

    Call the module at every step, and then add :meth:`penalty` to the loss of the step.
    The penalty is zero except at the last step of a window, where it keeps the rates of
    the whole window near a target. Counting starts again with the next window and after
    a reset.
    """

    def __init__(self, size: int | Sequence[int], window: int, name: str | None = None):
        super().__init__(name=name)  # type: ignore[call-arg]
        if not isinstance(window, int) or window < 1:
            raise ValueError(
                three_parts(
                    f'WindowRate(window={window!r})',
                    'a window has at least one step',
                    'the number of steps of a sequence, as WindowRate(100, '
                    'window=1000)',
                )
            )
        self.in_size = self.out_size = size
        self.window = window

    def init_state(self, batch_size: int | None = None, **kwargs) -> None:
        self.r = brainstate.HiddenState(init.param(ZERO, self.out_size, batch_size))
        self.count = brainstate.ShortTermState(jnp.zeros((), jnp.int32))

    def reset_state(self, batch_size: int | None = None, **kwargs) -> None:
        self.r.value = init.param(ZERO, self.out_size, batch_size)
        self.count.value = jnp.zeros((), jnp.int32)

    def update(self, spikes: ArrayLike) -> ArrayLike:
        kept = jnp.where(self.count.value == 0, 0.0, jnp.asarray(self.r.value))
        self.r.value = kept + spikes / self.window
        self.count.value = (self.count.value + 1) % self.window
        return self.r.value

    def penalty(self, target: float) -> jax.Array:
        """Half the squared distance between the rates and a target, in spikes for each
        step, at the end of a window: the sum over units and the mean over samples."""
        squares = jnp.square(jnp.asarray(self.r.value) - target)
        samples = squares.reshape(-1, *self.out_size).shape[0]  # type: ignore[misc]
        is_end = self.count.value == 0
        return jnp.where(is_end, 0.5 * jnp.sum(squares) / samples, 0.0)
