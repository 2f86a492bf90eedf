"""Read-outs with a memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    """A leaky integrator, ``r = exp(-dt / tau) * r + x @ weight``, with `dt` from
    `brainstate.environ`."""

    def __init__(
        self,
        in_size: int | Sequence[int],
        out_size: int | Sequence[int],
        tau: ArrayLike = 5.0 * u.ms,  # type: ignore[attr-defined]
        w_init: Callable | ArrayLike = KAIMING,
        name: str | None = None,
        *,
        r_init: Callable | ArrayLike = ZERO,
    ):
        super().__init__(name=name)  # type: ignore[call-arg]
        self.in_size, self.out_size = in_size, out_size
        self.tau = init.param(tau, self.out_size)
        shape = self.in_size[-1], self.out_size[-1]  # type: ignore[index, call-overload]
        self.weight = brainstate.ParamState(init.param(w_init, shape, allow_none=False))
        self._r_init = r_init

    def init_state(self, batch_size: int | None = None, **kwargs) -> None:
        self.r = brainstate.HiddenState(
            init.param(self._r_init, self.out_size, batch_size)
        )

    def reset_state(self, batch_size: int | None = None, **kwargs) -> None:
        self.r.value = init.param(self._r_init, self.out_size, batch_size)

    def update(self, x: ArrayLike) -> ops.Result:
        dt = brainstate.environ.get_dt()
        if not u.have_same_dim(dt, self.tau):
            raise ValueError(
                three_parts(
                    f'LeakyRateReadout with tau={self.tau} and dt={dt}',
                    'the decay exp(-dt / tau) needs both in units of time, or both without a unit',
                    'for instance tau=5 * u.ms with brainstate.environ.set(dt=0.1 * u.ms)',
                )
            )
        self.r.value = jnp.exp(
            -u.maybe_decimal(dt / self.tau)
        ) * self.r.value + ops.matmul(x, self.weight.value)
        return self.r.value


class FiringRate(brainstate.nn.Module):
    """A running mean of spikes, ``r = decay * r + (1 - decay) * spikes``, to hold
    firing rates near a target.

    Add :meth:`penalty` to the loss of a step: every parameter then gets its part,
    traced like the rest.
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

    def penalty(self, target: float) -> ArrayLike:
        """Half the mean squared distance to a target rate, in spikes a step, of each
        unit's mean over the batch."""
        if not isinstance(target, jax.core.Tracer) and not target > 0:
            raise ValueError(
                three_parts(
                    f'penalty({target})', 'a target rate is positive', 'penalty(0.02)'
                )
            )
        rates = self.r.value.reshape(-1, *self.out_size).mean(0)  # type: ignore[union-attr]
        return 0.5 * jnp.mean((rates - target) ** 2) / target
