"""The nodes of the NIR specification without a state. Each is a module of one time
step. Nodes with a state are in ``neurons.py``.

Inputs and outputs have the shape of the node, with any batch axes in front.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import ops
from ..errors import three_parts
from ..networks import fire

Surrogate = Callable[[jax.Array], jax.Array]
"""A step function of a potential above its threshold, with a derivative to learn by."""


class Node(brainstate.nn.Module):
    """A node of a graph, with its arrays by the names of the specification.

    ``dt``: the time step, in the unit of the time constants. ``train``: names of the
    arrays that are parameters (:class:`brainstate.ParamState`). All others are
    constants. ``settings``: the other fields of the specification.
    """

    arrays: ClassVar[Mapping[str, Any]] = {}
    """Names of the arrays, with a value for those that may be left out."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that are no arrays of parameters."""
    positive: ClassVar[tuple[str, ...]] = ('tau', 'tau_mem', 'tau_syn')
    """Names of the arrays that are time constants."""
    has_state: ClassVar[bool] = False

    def __init__(
        self,
        *,
        dt: float = 1.0,
        train: Collection[str] = (),
        surrogate: Surrogate = fire,
        dtype: Any = None,
        **given: Any,
    ):
        super().__init__()
        self.dt = as_time_step(dt)
        self.surrogate = surrogate
        self.dtype = _real_type(dtype)
        self._check_names(given)
        for name in self.settings:
            setattr(self, name, given[name])
        values = {**self.arrays, **given}
        arrays = {name: np.asarray(values[name]) for name in self.arrays}
        for name, array in arrays.items():
            self._check_array(name, array)
        shape = self._shape_of(arrays)
        for name, array in arrays.items():
            value: Any = array if shape is None else np.broadcast_to(array, shape)
            if name in train:
                value = brainstate.ParamState(jnp.asarray(value, self.dtype))
            setattr(self, name, value)

    @classmethod
    def _shape_of(cls, arrays: Mapping[str, np.ndarray]) -> tuple[int, ...] | None:
        """The shape that all arrays have, if they have one."""
        return None

    def _check_names(self, given: Mapping[str, Any]) -> None:
        wanted = {*self.arrays, *self.settings}
        needed = {n for n in self.arrays if self.arrays[n] is None} | {*self.settings}
        if not needed <= given.keys() or not given.keys() <= wanted:
            raise TypeError(
                three_parts(
                    f'nir.{type(self).__name__}({", ".join(given)})',
                    f'the node has {", ".join(sorted(needed))}, and may have '
                    f'{", ".join(sorted(wanted - needed)) or "nothing else"}',
                    'these names, as in the NIR specification',
                )
            )

    def _check_array(self, name: str, array: np.ndarray) -> None:
        if not np.can_cast(array.dtype, float, 'same_kind'):
            raise TypeError(
                three_parts(
                    f'a {type(self).__name__} node whose {name} has the type '
                    f'{array.dtype}',
                    'the fields of a node are arrays of real numbers',
                    f'{name}=np.array([...], float)',
                )
            )
        if name in self.positive and not np.all(array > 0):
            raise ValueError(
                three_parts(
                    f'a {type(self).__name__} node with {name} of {array.min()}',
                    'a time constant is positive',
                    f'{name} above zero, in the unit of dt={self.dt}',
                )
            )

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of what it gives, batch axes aside; None if its input says so."""
        return None

    def array(self, name: str) -> Any:
        """An array of the node: NumPy's if it is a constant, so that what depends on
        constants alone is computed once, in full precision."""
        found = getattr(self, name)
        if isinstance(found, brainstate.State):
            return found.value
        return found.astype(np.float64)

    def _cast(self, x: Any) -> jax.Array:
        """A coefficient in the type of the model."""
        return jnp.asarray(x, self.dtype)

    def value(self, name: str) -> jax.Array:
        """An array of the node in the type of the model."""
        return self._cast(self.array(name))

    def fields(self) -> dict[str, Any]:
        """The fields of the specification, as they are now."""
        found = {name: getattr(self, name) for name in self.settings}
        for name in self.arrays:
            value = getattr(self, name)
            is_trained = isinstance(value, brainstate.State)
            found[name] = np.array(value.value if is_trained else value)
            self._check_array(name, found[name])
        return found


class Affine(Node):
    """y = W x + b, with W (..., outputs, inputs)."""

    arrays: ClassVar = {'weight': None, 'bias': None}

    def update(self, x: Any) -> Any:
        bias = self.value('bias') if 'bias' in self.arrays else None
        weight = self.value('weight')
        if weight.ndim > 2:
            y = jnp.einsum('...i,...oi->...o', x, weight)
            return y if bias is None else y + bias
        return ops.matmul(x, weight, bias, weight_fn=jnp.transpose)


class Linear(Affine):
    """y = W x, with W (..., outputs, inputs)."""

    arrays: ClassVar = {'weight': None}


class Scale(Node):
    """y = s x, element by element."""

    arrays: ClassVar = {'scale': None}

    def update(self, x: Any) -> Any:
        return x * self.value('scale')


class _Conv(Node):
    arrays: ClassVar = {'weight': None, 'bias': None}
    settings: ClassVar = ('input_shape', 'stride', 'padding', 'dilation', 'groups')
    axes: ClassVar[int]
    layout: ClassVar[tuple[str, str, str]]
    input_shape: Any
    stride: Any
    padding: Any
    dilation: Any
    groups: Any

    def update(self, x: Any) -> Any:
        dilation = _pair(self.dilation, self.axes)
        padding = self.padding
        if isinstance(padding, bytes):
            padding = padding.decode()
        if isinstance(padding, str):
            padding = padding.upper()
        else:
            padding = [(p, p) for p in _pair(padding, self.axes)]
        return ops.conv(
            x,
            self.value('weight'),
            self.value('bias'),
            strides=_pair(self.stride, self.axes),
            padding=padding,
            rhs_dilation=dilation,
            feature_group_count=int(self.groups),
            dimension_numbers=self.layout,
        )


class Conv1d(_Conv):
    """A convolution over one axis, channels first, W (out, in, width)."""

    axes: ClassVar = 1
    layout: ClassVar = ('NCH', 'OIH', 'NCH')


class Conv2d(_Conv):
    """A convolution over two axes, channels first, W (out, in, height, width)."""

    axes: ClassVar = 2
    layout: ClassVar = ('NCHW', 'OIHW', 'NCHW')


class SumPool2d(Node):
    """Sums over windows of the last two axes. The padding is zero."""

    settings: ClassVar = ('kernel_size', 'stride', 'padding')
    kernel_size: Any
    stride: Any
    padding: Any

    def update(self, x: Any) -> Any:
        return self._sums(jnp.asarray(x))

    def _sums(self, x: jax.Array) -> jax.Array:
        ones = (1,) * (x.ndim - 2)
        window = (*ones, *_pair(self.kernel_size, 2))
        strides = (*ones, *_pair(self.stride, 2))
        around = [(0, 0) for _ in ones]
        around += [(p, p) for p in _pair(self.padding, 2)]
        zero = np.zeros((), x.dtype)[()]
        return lax.reduce_window(x, zero, lax.add, window, strides, around)


class AvgPool2d(SumPool2d):
    """Means over windows of the last two axes. Zeros of the padding are included in the
    means."""

    def update(self, x: Any) -> Any:
        return self._sums(jnp.asarray(x)) / math.prod(_pair(self.kernel_size, 2))


class Flatten(Node):
    """Joins the axes of its input from ``start_dim`` to ``end_dim``, both included.
    Batch axes are not counted."""

    settings: ClassVar = ('input_type', 'start_dim', 'end_dim')
    input_type: Any
    start_dim: Any
    end_dim: Any

    def set_input(self, shape: tuple[int, ...]) -> None:
        """The shape of its input, where the specification does not say it."""
        if self.input_type['input'] is None:
            self.input_type = {'input': np.array(shape)}

    def update(self, x: Any) -> Any:
        if self.input_type['input'] is None:
            raise ValueError(
                three_parts(
                    'a Flatten node without the shape of its input',
                    'batch axes, which it keeps, are known by that shape',
                    'input_type=... of the node, or a graph with the shapes of its '
                    'inputs',
                )
            )
        shape = tuple(int(n) for n in self.input_type['input'])
        start, end = (int(n) % len(shape) for n in (self.start_dim, self.end_dim))
        joined = (*shape[:start], -1, *shape[end + 1 :])
        batch = jnp.shape(x)[: jnp.ndim(x) - len(shape)]
        return jnp.reshape(x, (*batch, *joined))


class Threshold(Node):
    """A spike if the input is above the threshold."""

    arrays: ClassVar = {'threshold': None}

    def update(self, x: Any) -> Any:
        return spikes(self, x, 'threshold')


def spikes(node: Node, v: Any, name: str) -> Any:
    """Spikes of potentials, in derivatives by the distance in units of the
    threshold."""
    threshold = node.value(name)
    size = jnp.abs(threshold)
    return node.surrogate((v - threshold) / jnp.where(size > 0, size, 1))


def as_time_step(dt: Any) -> float:
    """A time step as a number."""
    try:
        number = float(dt)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(
            three_parts(
                f'dt={dt!r}',
                'a step model needs a time step: a positive number, in the unit of '
                'the time constants',
                'dt=1e-3, for a step of a millisecond and time constants in seconds',
            )
        )
    return number


def _real_type(dtype: Any) -> Any:
    """The type of parameters and states, by default that of JAX."""
    try:
        found = jnp.dtype(jnp.result_type(float) if dtype is None else dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(
            three_parts(
                f'dtype={dtype!r}',
                'parameters and states are real numbers',
                'jnp.float32, jnp.bfloat16 or None',
            )
        )
    return found


def _pair(value: Any, axes: int) -> tuple[int, ...]:
    """One whole number for each axis."""
    return tuple(int(n) for n in np.broadcast_to(np.asarray(value), (axes,)))
