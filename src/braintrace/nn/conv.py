"""Convolutions over one, two and three spatial axes."""

from __future__ import annotations

from typing import Any

import brainstate

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
    params = self.weight.value
    return ops.conv(
        x,
        params['weight'],
        params.get('bias'),
        strides=self.stride,
        padding=self.padding,
        lhs_dilation=self.lhs_dilation,
        rhs_dilation=self.rhs_dilation,
        feature_group_count=self.groups,
        dimension_numbers=self.dimension_numbers,
        kernel_fn=times(self.w_mask),
    )


class Conv1d(brainstate.nn.Conv1d):
    """A convolution over one spatial axis, through `ops.conv`."""

    update = _convolve


class Conv2d(brainstate.nn.Conv2d):
    """A convolution over two spatial axes, through `ops.conv`."""

    update = _convolve


class Conv3d(brainstate.nn.Conv3d):
    """A convolution over three spatial axes, through `ops.conv`."""

    update = _convolve
