"""Convolutions over one, two and three spatial axes."""

from __future__ import annotations

from typing import Any

import brainstate
import brainunit as u

from braintrace import ops
from braintrace.errors import three_parts

from .linear import times


def _convolve(self: Any, x: Any) -> ops.Result:
    axes = len(self.in_size)
    if x.ndim not in (axes, axes + 1) or x.shape[-axes:] != self.in_size:
        raise ValueError(
            three_parts(
                f'{type(self).__name__} called with an input of shape {x.shape}',
                f'the layer was built for in_size={self.in_size}',
                'an input of that shape, with or without one batch axis in front',
            )
        )
    return _product(self, x, self.weight.value, self.w_mask)


def _plain_product(self: Any, x: Any, params: dict[str, Any]) -> ops.Result:
    """The product of numbers alone, of which brainstate's constructor takes the
    output's shape.

    The unit of the input is not known there, so a bias with a unit could not be added.
    """
    numbers = {name: u.get_mantissa(value) for name, value in params.items()}
    mask = None if self.w_mask is None else u.get_mantissa(self.w_mask)
    return _product(self, x, numbers, mask)


def _product(layer: Any, x: Any, params: dict[str, Any], mask: Any) -> ops.Result:
    return ops.conv(
        x,
        params['weight'],
        params.get('bias'),
        strides=layer.stride,
        padding=layer.padding,
        lhs_dilation=layer.lhs_dilation,
        rhs_dilation=layer.rhs_dilation,
        feature_group_count=layer.groups,
        dimension_numbers=layer.dimension_numbers,
        kernel_fn=times(mask),
    )


class Conv1d(brainstate.nn.Conv1d):
    """A convolution over one spatial axis, through `ops.conv`."""

    update = _convolve
    _conv_op = _plain_product


class Conv2d(brainstate.nn.Conv2d):
    """A convolution over two spatial axes, through `ops.conv`."""

    update = _convolve
    _conv_op = _plain_product


class Conv3d(brainstate.nn.Conv3d):
    """A convolution over three spatial axes, through `ops.conv`."""

    update = _convolve
    _conv_op = _plain_product
