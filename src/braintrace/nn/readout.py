"""Read-outs with a memory of their own."""

from __future__ import annotations

from collections.abc import Callable

import brainstate
import brainunit as u
import jax
from brainstate.nn import init
from brainstate.typing import ArrayLike, Size

from .. import ops
from ..errors import three_parts


class LeakyRateReadout(brainstate.nn.Module):
    """A leaky integrator, ``r = exp(-dt / tau) * r + x @ weight``, with `dt` from `brainstate.environ`."""

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        tau: ArrayLike = 5.0 * u.ms,
        w_init: Callable | ArrayLike = init.KaimingNormal(),
        name: str | None = None,
        *,
        r_init: Callable | ArrayLike = init.ZeroInit(),
    ):
        super().__init__(name=name)
        self.in_size, self.out_size = in_size, out_size
        self.tau = init.param(tau, self.out_size)
        self.weight = brainstate.ParamState(init.param(w_init, (self.in_size[-1], self.out_size[-1]), allow_none=False))
        self._r_init = r_init

    def init_state(self, batch_size: int | None = None, **kwargs) -> None:
        self.r = brainstate.HiddenState(init.param(self._r_init, self.out_size, batch_size))

    def reset_state(self, batch_size: int | None = None, **kwargs) -> None:
        self.r.value = init.param(self._r_init, self.out_size, batch_size)

    def update(self, x: ArrayLike) -> jax.Array:
        dt = brainstate.environ.get_dt()
        if not u.have_same_dim(dt, self.tau):
            raise ValueError(
                three_parts(
                    f'LeakyRateReadout with tau={self.tau} and dt={dt}',
                    'the decay exp(-dt / tau) needs both in units of time, or both without a unit',
                    'for instance tau=5 * u.ms with brainstate.environ.set(dt=0.1 * u.ms)',
                )
            )
        self.r.value = u.math.exp(-dt / self.tau) * self.r.value + ops.matmul(x, self.weight.value)
        return self.r.value
