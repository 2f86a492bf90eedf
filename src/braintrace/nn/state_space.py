"""State-space models and linear attention: cells whose units do not feed each other.

The values that a state reads are computed from the input of the same step. Therefore,
under D-RTRL, the gradient of every parameter is equal to BPTT. Each cell maps `x` (...,
inputs) to (..., outputs).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import brainstate
import jax
import jax.numpy as jnp
from brainstate.nn import init
from brainstate.typing import ArrayLike
from jax.nn import sigmoid, softplus

from braintrace import ops
from braintrace.errors import three_parts

from .linear import ZERO, Linear
from .recurrent import Init, Layer, Size, _Cell


class SelectiveSSM(_Cell):
    """Selective state-space layer: Δ, B and C are computed from the input (after Gu &
    Dao 2023, arXiv 2312.00752, without their convolution and gate).

    ``u = in_proj(x)``; ``Δ = softplus(dt_proj(x))``; ``B, C = B_proj(x), C_proj(x)``;
    ``h = exp(Δ A) h + Δ u B`` for every channel and each of its states, with ``A =
    -exp(A_log)``; ``y = out_proj(Σ h C + D u)``. The state `h` has shape (`d_inner`,
    `d_state`). `d_inner` is the number of channels, by default the number of outputs.
    For an input of zero, the initial Δ lies between `dt_min` and `dt_max`.
    """

    usual_w_init = init.LecunNormal()

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        d_state: int = 16,
        d_inner: int | None = None,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        w_init: Init | None = None,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        name: str | None = None,
    ):
        if not 0 < dt_min <= dt_max:
            raise ValueError(
                three_parts(
                    f'SelectiveSSM(dt_min={dt_min}, dt_max={dt_max})',
                    'step sizes are positive, and drawn between the two',
                    '0 < dt_min <= dt_max, such as 0.001 and 0.1',
                )
            )
        _check_sizes('SelectiveSSM', d_state=d_state, d_inner=d_inner)
        self.d_state, self.d_inner = d_state, d_inner
        self.dt_min, self.dt_max = dt_min, dt_max
        super().__init__(in_size, out_size, w_init, b_init, state_init, None, name)

    def _build(self, linear: Layer) -> None:
        if self.d_inner is None:
            self.d_inner = self.num_out
        n, states = self.d_inner, self.d_state
        self.in_proj = linear(self.num_in, n)
        self.dt_proj = Linear(self.num_in, n, self.usual_w_init, self._dt_bias)
        self.B_proj = linear(self.num_in, states)
        self.C_proj = linear(self.num_in, states)
        self.out_proj = linear(n, self.num_out)
        rates = jnp.arange(1.0, states + 1)
        self.A_log = brainstate.ParamState(jnp.log(jnp.tile(rates, (n, 1))))
        self.D = brainstate.ParamState(jnp.ones(n))

    def _dt_bias(self, shape: tuple[int, ...]) -> jax.Array:
        """Numbers whose softplus lies between the two step sizes, evenly in their
        logarithms."""
        low, high = math.log(self.dt_min), math.log(self.dt_max)
        step = jnp.exp(brainstate.random.uniform(low, high, shape))
        return jnp.log(jnp.expm1(step))

    @property
    def state_size(self) -> tuple[int, ...]:
        return (self.d_inner or self.num_out, self.d_state)

    def update(self, x: ArrayLike) -> ops.Result:
        u, dt = self.in_proj(x), softplus(self.dt_proj(x))
        b, c = self.B_proj(x), self.C_proj(x)
        a = ops.element_wise(self.A_log.value, weight_fn=lambda v: -jnp.exp(v))
        decay = jnp.exp(dt[..., :, None] * a)
        drive = (dt * u)[..., :, None] * b[..., None, :]
        self.h.value = decay * self.h.value + drive
        read = jnp.sum(self.h.value * c[..., None, :], axis=-1)
        return self.out_proj(read + ops.element_wise(self.D.value) * u)


class LinearAttention(_Cell):
    """Linear attention with a decay for each head, computed from the input (after
    Katharopoulos et al. 2020, arXiv 2006.16236, and Yang et al. 2024, arXiv
    2312.06635).

    For each head, ``q, k, v`` are ``Wq, Wk, Wv`` of x; ``g = sigmoid(Wg(x))`` is one
    number; ``h = g h + k vᵀ``; ``y = Wo(hᵀ q / sqrt(key_size))``. The state `h` has
    shape (`num_heads`, `key_size`, `value_size`). Sizes are those of one head. By
    default, the outputs are split among the heads. `feature_map` is applied to q and k
    element by element. For an input of zero, the initial decays of the heads lie
    between `g_min` and `g_max`.
    """

    usual_w_init = init.LecunNormal()

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        num_heads: int = 4,
        key_size: int | None = None,
        value_size: int | None = None,
        feature_map: Callable | str = 'identity',
        g_min: float = 0.9,
        g_max: float = 0.99,
        w_init: Init | None = None,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        name: str | None = None,
    ):
        if not 0 < g_min <= g_max < 1:
            raise ValueError(
                three_parts(
                    f'LinearAttention(g_min={g_min}, g_max={g_max})',
                    'decays are made by a sigmoid, so they lie between 0 and 1',
                    '0 < g_min <= g_max < 1, such as 0.9 and 0.99',
                )
            )
        sizes = {'key_size': key_size, 'value_size': value_size}
        _check_sizes('LinearAttention', num_heads=num_heads, **sizes)
        self.num_heads = num_heads
        self.key_size, self.value_size = key_size, value_size
        self.g_min, self.g_max = g_min, g_max
        super().__init__(
            in_size, out_size, w_init, b_init, state_init, feature_map, name
        )

    def _build(self, linear: Layer) -> None:
        heads = self.num_heads
        usual = max(1, self.num_out // heads)
        self.key_size = keys = self.key_size or usual
        self.value_size = values = self.value_size or usual
        self.Wq = linear(self.num_in, heads * keys)
        self.Wk = linear(self.num_in, heads * keys)
        self.Wv = linear(self.num_in, heads * values)
        decays = jnp.linspace(self.g_min, self.g_max, heads)
        gate_bias = jax.scipy.special.logit(decays)
        self.Wg = Linear(self.num_in, heads, self.usual_w_init, gate_bias)
        self.Wo = linear(heads * values, self.num_out)

    @property
    def state_size(self) -> tuple[int, ...]:
        return (self.num_heads, self.key_size or 1, self.value_size or 1)

    def update(self, x: ArrayLike) -> ops.Result:
        heads, keys, values = self.state_size
        lead = jnp.shape(x)[:-1]
        q = self.activation(self.Wq(x)).reshape(*lead, heads, keys)
        k = self.activation(self.Wk(x)).reshape(*lead, heads, keys)
        v = self.Wv(x).reshape(*lead, heads, values)
        g = sigmoid(self.Wg(x))
        written = k[..., :, None] * v[..., None, :]
        self.h.value = g[..., None, None] * self.h.value + written
        read = jnp.einsum('...k,...kv->...v', q / math.sqrt(keys), self.h.value)
        return self.Wo(read.reshape(*lead, heads * values))


def _check_sizes(cell: str, **sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(
                three_parts(
                    f'{cell}({name}={size!r})',
                    'a size is a whole number of at least 1',
                    f'{name}=4, for example',
                )
            )
