"""Recurrent cells built from the marked `Linear`.

Constructors, parameter names and state names follow the cells of `brainstate.nn`. Each
cell maps `x` (..., num_in) to (..., num_out); ``[x, h]`` in a docstring is
concatenation on the last axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import brainstate
import jax
import jax.numpy as jnp
from brainstate.nn import init
from brainstate.typing import ArrayLike
from jax.nn import log_sigmoid, sigmoid

from braintrace import ops
from braintrace.errors import three_parts

from .linear import ZERO, Linear

Init = Callable | ArrayLike
Activation = str | Callable
Layer = Callable[[int, int], Linear]


class _Cell(brainstate.nn.RNNCell):
    """Constructor and states; a cell adds its linear layers in `_build`, and `update`.

    `w_init` and `activation`, where not given, are the usual ones of the cell.
    """

    h: brainstate.HiddenState
    state_names: ClassVar[tuple[str, ...]] = ('h',)
    usual_w_init: ClassVar[Callable] = init.Orthogonal()
    usual_activation: ClassVar[str] = 'tanh'

    def __init__(
        self,
        num_in: int,
        num_out: int,
        w_init: Init | None = None,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        activation: Activation | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)  # type: ignore[call-arg]
        self.num_in, self.num_out, self.num_state = num_in, num_out, num_out
        self.in_size, self.out_size = num_in, num_out
        self.activation = _activation(
            self.usual_activation if activation is None else activation
        )
        self._state_init = state_init
        w_init = self.usual_w_init if w_init is None else w_init
        self._build(lambda inputs, outputs: Linear(inputs, outputs, w_init, b_init))

    def _build(self, linear: Layer) -> None:
        pass

    def init_state(self, batch_size: int | None = None, **kwargs) -> None:
        for name in self.state_names:
            setattr(self, name, brainstate.HiddenState(self._initial(batch_size)))

    def reset_state(self, batch_size: int | None = None, **kwargs) -> None:
        for name in self.state_names:
            getattr(self, name).value = self._initial(batch_size)

    def _initial(self, batch_size: int | None) -> jax.Array:
        return init.param(self._state_init, self.num_state, batch_size)


class ValinaRNNCell(_Cell):
    """``h = activation(W [x, h])``."""

    usual_w_init = init.XavierNormal()
    usual_activation = 'relu'

    def __init__(
        self,
        num_in: int,
        num_out: int,
        state_init: Init = ZERO,
        w_init: Init | None = None,
        b_init: Init | None = ZERO,
        activation: Activation | None = None,
        name: str | None = None,
    ):
        super().__init__(num_in, num_out, w_init, b_init, state_init, activation, name)

    def _build(self, linear: Layer) -> None:
        self.W = linear(self.num_in + self.num_out, self.num_out)

    def update(self, x: ArrayLike) -> ops.Result:
        self.h.value = self.activation(self.W(_join(x, self.h.value)))
        return self.h.value


class GRUCell(_Cell):
    """``r, z = sigmoid(Wrz [x, h])``; ``h = (1 - z) h + z activation(Wh [x, r h])``."""

    def _build(self, linear: Layer) -> None:
        self.Wrz = linear(self.num_in + self.num_out, 2 * self.num_out)
        self.Wh = linear(self.num_in + self.num_out, self.num_out)

    def update(self, x: ArrayLike) -> ops.Result:
        h = self.h.value
        r, z = jnp.split(sigmoid(self.Wrz(_join(x, h))), 2, axis=-1)
        self.h.value = (1 - z) * h + z * self.activation(self.Wh(_join(x, r * h)))
        return self.h.value


class MGUCell(_Cell):
    """Minimal gated unit: ``f = sigmoid(Wf [x, h])``; ``h = (1 - f) h + f activation(Wh
    [x, f h])``."""

    def _build(self, linear: Layer) -> None:
        self.Wf = linear(self.num_in + self.num_out, self.num_out)
        self.Wh = linear(self.num_in + self.num_out, self.num_out)

    def update(self, x: ArrayLike) -> ops.Result:
        h = self.h.value
        f = sigmoid(self.Wf(_join(x, h)))
        self.h.value = (1 - f) * h + f * self.activation(self.Wh(_join(x, f * h)))
        return self.h.value


class LSTMCell(_Cell):
    """``i, g, f, o = W [x, h]``; ``c = sigmoid(f + 1) c + sigmoid(i) act(g)``; ``h =
    sigmoid(o) act(c)``."""

    c: brainstate.HiddenState
    state_names = ('c', 'h')
    usual_w_init = init.XavierNormal()

    def _build(self, linear: Layer) -> None:
        self.W = linear(self.num_in + self.num_out, 4 * self.num_out)

    def update(self, x: ArrayLike) -> ops.Result:
        i, g, f, o = jnp.split(self.W(_join(x, self.h.value)), 4, axis=-1)
        c = sigmoid(f + 1.0) * self.c.value + sigmoid(i) * self.activation(g)
        self.c.value = c
        self.h.value = sigmoid(o) * self.activation(c)
        return self.h.value


class URLSTMCell(_Cell):
    """LSTM with uniform gate initialisation and a refine gate (Gu et al. 2020, arXiv
    1910.09890).

    ``f, r, v, o = W [x, h]``; forget ``f = sigmoid(f + bias)`` and refine ``r =
    sigmoid(r - bias)`` combine to ``g = 2 r f + (1 - 2 r) f²``; ``c = g c + (1 - g)
    act(v)``; ``h = sigmoid(o) act(c)``.
    """

    c: brainstate.HiddenState
    state_names = ('c', 'h')
    usual_w_init = init.XavierNormal()

    def __init__(
        self,
        num_in: int,
        num_out: int,
        w_init: Init | None = None,
        state_init: Init = ZERO,
        activation: Activation | None = None,
        name: str | None = None,
    ):
        super().__init__(num_in, num_out, w_init, None, state_init, activation, name)

    def _build(self, linear: Layer) -> None:
        n = self.num_out
        self.W = linear(self.num_in + n, 4 * n)
        self.bias = brainstate.ParamState(
            jax.scipy.special.logit(brainstate.random.uniform(1 / n, 1 - 1 / n, (n,)))
        )

    def update(self, x: ArrayLike) -> ops.Result:
        f, r, v, o = jnp.split(self.W(_join(x, self.h.value)), 4, axis=-1)
        bias = ops.element_wise(self.bias.value)
        f, r = sigmoid(f + bias), sigmoid(r - bias)
        g = 2 * r * f + (1 - 2 * r) * f**2
        c = g * self.c.value + (1 - g) * self.activation(v)
        self.c.value = c
        self.h.value = sigmoid(o) * self.activation(c)
        return self.h.value


class MinimalRNNCell(_Cell):
    """``z = activation(Wx x)``; ``u = sigmoid(Wu [h, z])``; ``h = u h + (1 - u) z``
    (Chen 2017, arXiv 1711.06788)."""

    def _build(self, linear: Layer) -> None:
        self.Wx = linear(self.num_in, self.num_out)
        self.Wu = linear(2 * self.num_out, self.num_out)

    def update(self, x: ArrayLike) -> ops.Result:
        h, z = self.h.value, self.activation(self.Wx(x))
        u = sigmoid(self.Wu(_join(h, z)))
        self.h.value = u * h + (1 - u) * z
        return self.h.value


class MiniGRU(_Cell):
    """``z = sigmoid(Wz x)``; ``h = (1 - z) h + z activation(Wh x)`` (Feng et al. 2024,
    arXiv 2410.01201).

    The gate sees the input only, so every position keeps to itself; the usual
    activation is none.
    """

    usual_activation = 'identity'

    def _build(self, linear: Layer) -> None:
        self.Wz = linear(self.num_in, self.num_out)
        self.Wh = linear(self.num_in, self.num_out)

    def update(self, x: ArrayLike) -> ops.Result:
        z = sigmoid(self.Wz(x))
        self.h.value = (1 - z) * self.h.value + z * self.activation(self.Wh(x))
        return self.h.value


class MiniLSTM(_Cell):
    """``f, i = sigmoid(Wf x), sigmoid(Wi x)``; ``h = (f h + i activation(Wh x)) / (f +
    i)`` (as `MiniGRU`)."""

    usual_activation = 'identity'

    def _build(self, linear: Layer) -> None:
        self.Wf = linear(self.num_in, self.num_out)
        self.Wi = linear(self.num_in, self.num_out)
        self.Wh = linear(self.num_in, self.num_out)

    def update(self, x: ArrayLike) -> ops.Result:
        # f / (f + i) is the sigmoid of log f - log i, which stays finite when both
        # gates are shut.
        keep = sigmoid(log_sigmoid(self.Wf(x)) - log_sigmoid(self.Wi(x)))
        self.h.value = keep * self.h.value + (1 - keep) * self.activation(self.Wh(x))
        return self.h.value


class CFNCell(_Cell):
    """Chaos-free network (Laurent & von Brecht 2017, arXiv 1612.06212).

    ``f, i = sigmoid(Wf [x, h]), sigmoid(Wi [x, h])``; ``h = f activation(h) + i
    activation(Wh x)``.
    """

    def _build(self, linear: Layer) -> None:
        self.Wf = linear(self.num_in + self.num_out, self.num_out)
        self.Wi = linear(self.num_in + self.num_out, self.num_out)
        self.Wh = linear(self.num_in, self.num_out)

    def update(self, x: ArrayLike) -> ops.Result:
        h = self.h.value
        f, i = (sigmoid(gate(_join(x, h))) for gate in (self.Wf, self.Wi))
        self.h.value = f * self.activation(h) + i * self.activation(self.Wh(x))
        return self.h.value


class LRUCell(_Cell):
    """Linear recurrent unit (Orvieto et al. 2023, arXiv 2303.06349).

    ``s = λ s + g B x``; ``y = Re(C s) + D x``, with a complex diagonal ``λ =
    exp(-exp(nu_log) + i exp(theta_log))`` and ``g = exp(gamma_log)``. The complex state
    `s` of size `num_hidden` (`num_out` unless given) is held as two real ones, `re` and
    `im`. At the start
    |λ| lies between `r_min` and `r_max` and the angle of λ between 0 and `max_phase`.
    """

    re: brainstate.HiddenState
    im: brainstate.HiddenState
    state_names = ('re', 'im')

    def __init__(
        self,
        num_in: int,
        num_out: int,
        num_hidden: int | None = None,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 2 * math.pi,
        state_init: Init = ZERO,
        name: str | None = None,
    ):
        super().__init__(
            num_in, num_out, state_init=state_init, activation='identity', name=name
        )
        self.num_state = n = num_out if num_hidden is None else num_hidden
        radius, phase = brainstate.random.uniform(1e-6, 1.0, (2, n))
        squared = r_min**2 + radius * (r_max**2 - r_min**2)
        self.nu_log = brainstate.ParamState(jnp.log(-0.5 * jnp.log(squared)))
        self.theta_log = brainstate.ParamState(jnp.log(max_phase * phase))
        self.gamma_log = brainstate.ParamState(0.5 * jnp.log(1 - squared))
        self.B_re, self.B_im = (
            _normal((num_in, n), 2 * num_in),
            _normal((num_in, n), 2 * num_in),
        )
        self.C_re, self.C_im = _normal((n, num_out), n), _normal((n, num_out), n)
        self.D = _normal((num_in, num_out), num_in)

    def update(self, x: ArrayLike) -> ops.Result:
        size = ops.element_wise(
            self.nu_log.value, weight_fn=lambda v: jnp.exp(-jnp.exp(v))
        )
        angle = ops.element_wise(self.theta_log.value, weight_fn=jnp.exp)
        gamma = ops.element_wise(self.gamma_log.value, weight_fn=jnp.exp)
        cos, sin = size * jnp.cos(angle), size * jnp.sin(angle)
        re, im = self.re.value, self.im.value
        self.re.value = cos * re - sin * im + gamma * ops.matmul(x, self.B_re.value)
        self.im.value = sin * re + cos * im + gamma * ops.matmul(x, self.B_im.value)
        y = ops.matmul(self.re.value, self.C_re.value) - ops.matmul(
            self.im.value, self.C_im.value
        )
        return y + ops.matmul(x, self.D.value)


def _join(*values: Any) -> jax.Array:
    return jnp.concatenate(values, axis=-1)


def _normal(shape: tuple[int, int], precision: int) -> brainstate.ParamState:
    return brainstate.ParamState(
        brainstate.random.normal(size=shape) / math.sqrt(precision)
    )


def _activation(activation: Activation) -> Callable:
    if activation == 'identity':
        return lambda value: value
    function = (
        getattr(brainstate.nn, activation, None)
        if isinstance(activation, str)
        else activation
    )
    if not callable(function):
        raise ValueError(
            three_parts(
                f'activation={activation!r}',
                'an activation is a function, or the name of one in brainstate.nn',
                "activation='tanh', activation='relu' or a function of one array",
            )
        )
    return function
