"""Recurrent cells that use the marked `Linear`.

Functions, parameter names and shapes are those of the published package, so its saved
weights can be loaded; `tests/published/test_published.py` compares both. Each cell maps `x` (...,
inputs) to (..., units). ``[x, h]`` in a docstring is concatenation on the last axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import brainstate
import jax
import jax.numpy as jnp
from brainstate.nn import init
from brainstate.typing import ArrayLike
from jax.nn import sigmoid

from braintrace import ops
from braintrace.errors import ArgumentError, three_parts

from .linear import ZERO, Linear

Init = Callable | ArrayLike
Size = int | Sequence[int]
Activation = str | Callable
Layer = Callable[[int, int], Linear]


class _Cell(brainstate.nn.RNNCell):
    """Constructor and states; a cell adds its linear layers in `_build`, and `update`.

    Sizes are numbers or shapes, whose last axis is that of the units. `w_init` and
    `activation`, where not given, are the usual ones of the cell.
    """

    h: brainstate.HiddenState
    state_names: ClassVar[tuple[str, ...]] = ('h',)
    usual_w_init: ClassVar[Callable] = init.Orthogonal()
    usual_activation: ClassVar[str] = 'tanh'

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init | None = None,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        activation: Activation | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)  # type: ignore[call-arg]
        self.in_size, self.out_size = in_size, out_size
        self.num_in, self.num_out = _last(self.in_size), _last(self.out_size)
        self.activation = _activation(
            self.usual_activation if activation is None else activation
        )
        self._state_init = state_init
        w_init = self.usual_w_init if w_init is None else w_init
        self._build(lambda inputs, outputs: Linear(inputs, outputs, w_init, b_init))

    def _build(self, linear: Layer) -> None:
        pass

    def _of_both(self, linear: Layer, count: int) -> list[Linear]:
        """Layers that map [x, h] to the units."""
        inputs = self.num_in + self.num_out
        return [linear(inputs, self.num_out) for _ in range(count)]

    @property
    def state_size(self) -> Any:
        """The shape of each state, without the batch."""
        return self.out_size

    def init_state(self, batch_size: int | None = None, **kwargs) -> None:
        for name in self.state_names:
            setattr(self, name, brainstate.HiddenState(self._initial(batch_size)))

    def reset_state(self, batch_size: int | None = None, **kwargs) -> None:
        for name in self.state_names:
            getattr(self, name).value = self._initial(batch_size)

    def _initial(self, batch_size: int | None) -> jax.Array:
        return init.param(self._state_init, self.state_size, batch_size)


class ValinaRNNCell(_Cell):
    """``h = activation(W [x, h])``."""

    usual_w_init = init.XavierNormal()
    usual_activation = 'relu'

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        state_init: Init = ZERO,
        w_init: Init | None = None,
        b_init: Init | None = ZERO,
        activation: Activation | None = None,
        name: str | None = None,
    ):
        super().__init__(
            in_size, out_size, w_init, b_init, state_init, activation, name
        )

    def _build(self, linear: Layer) -> None:
        self.W = linear(self.num_in + self.num_out, self.num_out)

    def update(self, x: ArrayLike) -> ops.Result:
        self.h.value = self.activation(self.W(_join(x, self.h.value)))
        return self.h.value


class GRUCell(_Cell):
    """``r = sigmoid(Wr [x, h])``; ``z = sigmoid(Wz [x, h])``; ``h = (1 - z) h + z
    activation(Wh [x, r h])``."""

    def _build(self, linear: Layer) -> None:
        self.Wz, self.Wr, self.Wh = self._of_both(linear, 3)

    def update(self, x: ArrayLike) -> ops.Result:
        h = self.h.value
        joined = _join(x, h)
        z, r = sigmoid(self.Wz(joined)), sigmoid(self.Wr(joined))
        self.h.value = (1 - z) * h + z * self.activation(self.Wh(_join(x, r * h)))
        return self.h.value


class MGUCell(_Cell):
    """Minimal gated unit: ``f = sigmoid(Wf [x, h])``; ``h = (1 - f) h + f activation(Wh
    [x, f h])``."""

    def _build(self, linear: Layer) -> None:
        self.Wf, self.Wh = self._of_both(linear, 2)

    def update(self, x: ArrayLike) -> ops.Result:
        h = self.h.value
        f = sigmoid(self.Wf(_join(x, h)))
        self.h.value = (1 - f) * h + f * self.activation(self.Wh(_join(x, f * h)))
        return self.h.value


class LSTMCell(_Cell):
    """``i, g, f, o`` are ``Wi, Wg, Wf, Wo`` of ``[x, h]``; ``c = sigmoid(f + 1) c +
    sigmoid(i) act(g)``; ``h = sigmoid(o) act(c)``."""

    c: brainstate.HiddenState
    state_names = ('c', 'h')
    usual_w_init = init.XavierNormal()

    def _build(self, linear: Layer) -> None:
        self.Wi, self.Wg, self.Wf, self.Wo = self._of_both(linear, 4)

    def update(self, x: ArrayLike) -> ops.Result:
        joined = _join(x, self.h.value)
        i, g = sigmoid(self.Wi(joined)), self.activation(self.Wg(joined))
        f, o = sigmoid(self.Wf(joined) + 1.0), sigmoid(self.Wo(joined))
        c = f * self.c.value + i * g
        self.c.value = c
        self.h.value = o * self.activation(c)
        return self.h.value


class URLSTMCell(_Cell):
    """LSTM with uniform gate initialisation and a refine gate (Gu et al. 2020, arXiv
    1910.09890).

    Forget ``f = sigmoid(Wf [x, h] + bias)`` and refine ``r = sigmoid(Wr [x, h] -
    bias)`` combine to ``g = 2 r f + (1 - 2 r) f²``; ``c = g c + (1 - g) act(Wu [x,
    h])``; ``h = sigmoid(Wo [x, h]) act(c)``.
    """

    c: brainstate.HiddenState
    state_names = ('c', 'h')
    usual_w_init = init.XavierNormal()

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init | None = None,
        state_init: Init = ZERO,
        activation: Activation | None = None,
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, w_init, None, state_init, activation, name)

    def _build(self, linear: Layer) -> None:
        n = self.num_out
        self.Wu, self.Wf, self.Wr, self.Wo = self._of_both(linear, 4)
        self.bias = brainstate.ParamState(
            jax.scipy.special.logit(brainstate.random.uniform(1 / n, 1 - 1 / n, (n,)))
        )

    def update(self, x: ArrayLike) -> ops.Result:
        joined = _join(x, self.h.value)
        bias = ops.element_wise(self.bias.value)
        f, r = sigmoid(self.Wf(joined) + bias), sigmoid(self.Wr(joined) - bias)
        g = 2 * r * f + (1 - 2 * r) * f**2
        c = g * self.c.value + (1 - g) * self.activation(self.Wu(joined))
        self.c.value = c
        self.h.value = sigmoid(self.Wo(joined)) * self.activation(c)
        return self.h.value


class MinimalRNNCell(_Cell):
    """``z = phi(x)``; ``u = sigmoid(W_u [z, h])``; ``h = u h + (1 - u) z`` (Chen 2017,
    arXiv 1711.06788).

    `phi` is a linear layer unless a function or a module is given.
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init | None = None,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        phi: Callable | None = None,
        name: str | None = None,
    ):
        self._given_phi = phi
        super().__init__(in_size, out_size, w_init, b_init, state_init, None, name)

    def _build(self, linear: Layer) -> None:
        phi = self._given_phi
        if phi is not None and not callable(phi):
            raise TypeError(
                three_parts(
                    f'MinimalRNNCell(phi={phi!r})',
                    'phi maps the input to the units',
                    'a function or a module, or None for a linear layer',
                )
            )
        self.phi = linear(self.num_in, self.num_out) if phi is None else phi
        self.W_u = linear(2 * self.num_out, self.num_out)
        del self._given_phi

    def update(self, x: ArrayLike) -> ops.Result:
        h, z = self.h.value, self.phi(x)
        u = sigmoid(self.W_u(_join(z, h)))
        self.h.value = u * h + (1 - u) * z
        return self.h.value


class _Minimal(_Cell):
    """A cell without an activation of its own."""

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init | None = None,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, w_init, b_init, state_init, None, name)


class MiniGRU(_Minimal):
    """``z = sigmoid(W_z [x, h])``; ``h = (1 - z) h + z W_x x``.

    The candidate reads only the input (after Feng et al. 2024, arXiv 2410.01201, where
    the gate also reads only the input).
    """

    def _build(self, linear: Layer) -> None:
        self.W_x = linear(self.num_in, self.num_out)
        self.W_z = linear(self.num_in + self.num_out, self.num_out)

    def update(self, x: ArrayLike) -> ops.Result:
        h = self.h.value
        z = sigmoid(self.W_z(_join(x, h)))
        self.h.value = (1 - z) * h + z * self.W_x(x)
        return self.h.value


class MiniLSTM(_Minimal):
    """``f, i = sigmoid(W_f [x, h]), sigmoid(W_i [x, h])``; ``h = f h + i W_x x``. The
    candidate is as in `MiniGRU`."""

    def _build(self, linear: Layer) -> None:
        self.W_x = linear(self.num_in, self.num_out)
        self.W_f, self.W_i = self._of_both(linear, 2)

    def update(self, x: ArrayLike) -> ops.Result:
        h = self.h.value
        joined = _join(x, h)
        f, i = sigmoid(self.W_f(joined)), sigmoid(self.W_i(joined))
        self.h.value = f * h + i * self.W_x(x)
        return self.h.value


class CFNCell(_Cell):
    """Chaos-free network (Laurent & von Brecht 2017, arXiv 1612.06212).

    ``f, i = sigmoid(Wf [x, h]), sigmoid(Wi [x, h])``; ``h = f activation(h) + i
    activation(Wh x)``.
    """

    def _build(self, linear: Layer) -> None:
        self.Wf, self.Wi = self._of_both(linear, 2)
        self.Wh = linear(self.num_in, self.num_out)

    def update(self, x: ArrayLike) -> ops.Result:
        h = self.h.value
        f, i = (sigmoid(gate(_join(x, h))) for gate in (self.Wf, self.Wi))
        self.h.value = f * self.activation(h) + i * self.activation(self.Wh(x))
        return self.h.value


class LRUCell(_Cell):
    """Linear recurrent unit (Orvieto et al. 2023, arXiv 2303.06349).

    ``s = λ s + g B x``; ``y = Re(C s) + D x``, with a complex diagonal ``λ =
    exp(-exp(nu_log) + i exp(theta_log))``, ``g = exp(gamma_log)`` and one number of `D`
    for each input. Inputs and outputs have the size `d_model`. The complex state `s` of
    size `d_hidden` is stored as two real states, `h_re` and `h_im`. The initial |λ|
    lies between `r_min` and `r_max`, and the angle of λ between 0 and `max_phase`.
    """

    h_re: brainstate.HiddenState
    h_im: brainstate.HiddenState
    state_names = ('h_re', 'h_im')

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 6.28,
        state_init: Init = ZERO,
        name: str | None = None,
    ):
        self.d_model, self.d_hidden = d_model, d_hidden
        self.r_min, self.r_max, self.max_phase = r_min, r_max, max_phase
        super().__init__(d_model, d_model, state_init=state_init, name=name)

    def _build(self, linear: Layer) -> None:
        inputs, n = self.d_model, self.d_hidden
        self.nu_log, self.theta_log, squared = _eigenvalues(
            n, self.r_min, self.r_max, self.max_phase
        )
        self.gamma_log = brainstate.ParamState(0.5 * jnp.log(1 - squared))
        self.B_re, self.B_im = (
            Linear(inputs, n, _normal(2 * inputs), None) for _ in range(2)
        )
        self.C_re, self.C_im = (Linear(n, inputs, _normal(n), None) for _ in range(2))
        self.D = brainstate.ParamState(brainstate.random.normal(size=(inputs,)))

    @property
    def state_size(self) -> Any:
        return self.d_hidden

    def update(self, inputs: ArrayLike) -> ops.Result:
        size = ops.element_wise(
            self.nu_log.value, weight_fn=lambda v: jnp.exp(-jnp.exp(v))
        )
        angle = ops.element_wise(self.theta_log.value, weight_fn=jnp.exp)
        gamma = ops.element_wise(self.gamma_log.value, weight_fn=jnp.exp)
        cos, sin = size * jnp.cos(angle), size * jnp.sin(angle)
        re, im = self.h_re.value, self.h_im.value
        self.h_re.value = cos * re - sin * im + gamma * self.B_re(inputs)
        self.h_im.value = sin * re + cos * im + gamma * self.B_im(inputs)
        y = self.C_re(self.h_re.value) - self.C_im(self.h_im.value)
        return y + ops.element_wise(self.D.value) * inputs


class RTU(_Cell):
    """Real-time recurrent unit: a complex diagonal recurrence driven by the input
    (Elelimy et al. 2024, arXiv 2409.01449).

    ``s = λ s + g W x`` with ``λ = exp(-exp(nu_log) + i exp(theta_log))`` and ``g =
    sqrt(1 - |λ|²)``. The real and imaginary parts of `s` are the states `h_re` and
    `h_im`. The output is ``activation([h_re, h_im])``, with two numbers for each unit.
    With ``linear=False`` the activation is inside the recurrence, ``s = activation(λ s
    + g W x)``, and the output is ``[h_re, h_im]``.

    No unit reads another, so D-RTRL gives the gradient of BPTT. The initial |λ| lies
    between `r_min` and `r_max`, and the angle of λ between 0 and `max_phase`.
    """

    h_re: brainstate.HiddenState
    h_im: brainstate.HiddenState
    state_names = ('h_re', 'h_im')
    usual_w_init = init.LecunNormal()

    def __init__(
        self,
        in_size: Size,
        units: int,
        linear: bool = True,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 6.28,
        w_init: Init | None = None,
        b_init: Init | None = None,
        state_init: Init = ZERO,
        activation: Activation | None = None,
        name: str | None = None,
    ):
        self.units, self.linear = units, linear
        self.r_min, self.r_max, self.max_phase = r_min, r_max, max_phase
        super().__init__(
            in_size, 2 * units, w_init, b_init, state_init, activation, name
        )

    def _build(self, linear: Layer) -> None:
        self.nu_log, self.theta_log, _ = _eigenvalues(
            self.units, self.r_min, self.r_max, self.max_phase
        )
        self.W_re, self.W_im = (linear(self.num_in, self.units) for _ in range(2))

    @property
    def state_size(self) -> Any:
        return self.units

    def update(self, x: ArrayLike) -> ops.Result:
        decay = jnp.exp(ops.element_wise(self.nu_log.value))
        angle = ops.element_wise(self.theta_log.value, weight_fn=jnp.exp)
        size = jnp.exp(-decay)
        # 1 - |λ|² without the rounding error of a difference, for |λ| close to 1.
        gain = jnp.sqrt(-jnp.expm1(-2 * decay))
        cos, sin = size * jnp.cos(angle), size * jnp.sin(angle)
        re, im = self.h_re.value, self.h_im.value
        new_re = cos * re - sin * im + gain * self.W_re(x)
        new_im = sin * re + cos * im + gain * self.W_im(x)
        if not self.linear:
            new_re, new_im = self.activation(new_re), self.activation(new_im)
        self.h_re.value, self.h_im.value = new_re, new_im
        both = _join(new_re, new_im)
        return self.activation(both) if self.linear else both


def _eigenvalues(
    units: int, r_min: float, r_max: float, max_phase: float
) -> tuple[brainstate.ParamState, brainstate.ParamState, jax.Array]:
    """Eigenvalues drawn evenly from a ring of the complex plane: the logarithms of
    their decay and of their angle, and |λ|²."""
    radius, phase = brainstate.random.uniform(1e-6, 1.0, (2, units))
    squared = r_min**2 + radius * (r_max**2 - r_min**2)
    nu_log = brainstate.ParamState(jnp.log(-0.5 * jnp.log(squared)))
    theta_log = brainstate.ParamState(jnp.log(max_phase * phase))
    return nu_log, theta_log, squared


def _join(*values: Any) -> jax.Array:
    return jnp.concatenate(values, axis=-1)


def _last(size: Any) -> int:
    return size[-1]


def _normal(precision: int) -> Callable:
    """An initialiser: normal numbers of variance 1 / `precision`."""
    return lambda shape: brainstate.random.normal(size=shape) / math.sqrt(precision)


def _activation(activation: Activation) -> Callable:
    if activation == 'identity':
        return lambda value: value
    function = (
        getattr(brainstate.nn, activation, None)
        if isinstance(activation, str)
        else activation
    )
    if not callable(function):
        raise ArgumentError(
            three_parts(
                f'activation={activation!r}',
                'an activation is a function, or the name of one in brainstate.nn',
                "activation='tanh', activation='relu' or a function of one array",
            )
        )
    return function
