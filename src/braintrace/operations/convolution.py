"""Convolutions: every element of y is a patch of x times one filter.

Letters: r rows (sample and place), g groups of features, c elements of a patch, o
filters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import cast, factors_for, padded, sum_type
from ..compat import Equation
from ..compiled_step import Box, Components, Jacobian, Operands, TraceLayout
from . import kernels
from .labels import Const, Labels, only, project, shape_of, windows
from .record import Operation, register
from .weight_use import BaseUse, bind
from .whole_traces import WholeTrace, has_kernel


def _labels(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    """Image: through the windows, features of a group joined. Kernel: its output
    features."""
    p, d, out = eqn.params, eqn.params['dimension_numbers'], only(outs)
    image, kernel = (shape_of(v) for v in eqn.invars)
    along = [d.out_spec[1] if a == d.rhs_spec[0] else None for a in range(len(kernel))]
    kernel_labels = project(out, along, kernel)
    if p['batch_group_count'] != 1:
        return [project(out, [None] * len(image), image), kernel_labels]
    groups = p['feature_group_count']
    out = out.transpose(d.out_spec)
    samples, _, *space = out.shape
    by_group = out.reshape(samples, groups, -1, *space)
    kept = [0, 1, *range(3, by_group.ndim)]
    out = project(by_group, kept, (samples, groups, *space))
    shape = [image[a] for a in d.lhs_spec]
    ones, none = (1, 1), ((0, 0), (0, 0))
    labels = windows(
        np.repeat(out, shape[1] // groups, axis=1),
        shape,
        (*ones, *(kernel[a] for a in d.rhs_spec[2:])),
        (*ones, *p['window_strides']),
        (*none, *p['padding']),
        (*ones, *p['lhs_dilation']),
        (*ones, *p['rhs_dilation']),
    )
    return [labels.transpose(np.argsort(d.lhs_spec)), kernel_labels]


@dataclass(frozen=True, eq=False)
class ConvolutionUse(BaseUse):
    """A filter as the second operand of a convolution; ``params`` are those of the
    equation."""

    params: dict[str, Any]

    @property
    def input(self) -> int | None:
        return 0

    @property
    def sample_axes(self) -> tuple[int | None, ...] | None:
        return self._numbers.lhs_spec[0], None, self._numbers.out_spec[0]

    @property
    def _numbers(self) -> Any:
        return self.params['dimension_numbers']

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """(g, c, o) of the filters."""
        filters = self.weight.shape[self._numbers.rhs_spec[0]]
        groups = self.params['feature_group_count']
        return groups, math.prod(self.weight.shape) // filters, filters // groups

    def patches(self, x: jax.Array) -> jax.Array:
        """(r, g, c) of one input: a shifted copy of it for each place of the filter."""
        batch, feature, *space = self._numbers.lhs_spec
        params, spec = self.params, self._numbers.out_spec
        x = x.transpose(batch, *space, feature)
        around = [
            (low, high, dilation - 1)
            for (low, high), dilation in zip(
                params['padding'], params['lhs_dilation'], strict=True
            )
        ]
        none = (0, 0, 0)
        x = jax.lax.pad(x, jnp.zeros((), x.dtype), [none, *around, none])
        window = [self.weight.shape[d] for d in self._numbers.rhs_spec[2:]]
        strides = params['window_strides']
        lengths = [self.result.shape[a] for a in spec[2:]]
        parts = []
        for place in np.ndindex(*window):
            start = np.multiply(place, params['rhs_dilation'])
            stop = start + np.multiply(np.subtract(lengths, 1), strides) + 1
            first, end = (0, *start, 0), (len(x), *stop, x.shape[-1])
            parts.append(jax.lax.slice(x, first, end, (1, *strides, 1)))
        groups, size, _ = self.sizes
        return jnp.stack(parts, axis=-1).reshape(-1, groups, size)

    def rows(self, y: jax.Array) -> jax.Array:
        """(r, g, o) of one result."""
        batch, feature, *space = self._numbers.out_spec
        groups, _, filters = self.sizes
        return y.transpose(batch, *space, feature).reshape(-1, groups, filters)

    def as_weight(self, filters: jax.Array) -> jax.Array:
        """(g, c, o) in the layout of the weight."""
        spec, shape = self._numbers.rhs_spec, self.weight.shape
        by_filter = jnp.moveaxis(filters, -1, 1)  # g o c
        return by_filter.reshape([shape[d] for d in spec]).transpose(np.argsort(spec))

    def gradient(
        self,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None = None,
    ) -> jax.Array:
        """Σ_t of patches times results, one step after the other."""
        if 0 not in steps:
            return super().gradient(fixed, steps, y_bars, box)
        y_bars = padded(y_bars, box, self.result.shape)
        xs, y_bars = factors_for(self.weight.dtype, steps[0], y_bars)
        dtype = sum_type(jnp.result_type(xs, y_bars))

        def step(total: jax.Array, at: tuple) -> tuple:
            x, y_bar = self.patches(at[0]), self.rows(at[1])
            more = jnp.einsum('rgc,rgo->gco', x, y_bar, preferred_element_type=dtype)
            return total + more, None

        total, _ = jax.lax.scan(step, jnp.zeros(self.sizes, dtype), (xs, y_bars))
        return cast(self.as_weight(total), sum_type(self.weight.dtype))

    def layout(self, positions: np.ndarray, shape: tuple[int, ...]) -> TraceLayout:
        return ConvolutionTrace(self, positions, shape)


@dataclass(frozen=True, eq=False)
class ConvolutionTrace(WholeTrace):
    """(r, g, c, o): a filter is shared by all places, so each keeps a trace of its
    own."""

    @property
    def shape(self) -> tuple[int, ...]:
        groups, size, filters = self.use.sizes
        return (
            math.prod(self.use.result.shape) // (groups * filters),
            groups,
            size,
            filters,
        )

    def solve(
        self,
        trace: Components,
        fixed: Operands,
        steps: Operands,
        rows: Components,
        product: Jacobian,
        credit: Components,
    ) -> tuple[Components, jax.Array]:
        """As :class:`WholeTrace` says; by a kernel in one pass, where there is one."""
        data = {0: steps[0]}
        given = (trace, data, rows, product, credit)
        if self.use.sizes[0] > 1 or not has_kernel(self.shape, given):
            return super().solve(trace, fixed, steps, rows, product, credit)
        plainly = lambda trace, data, *rest: super(ConvolutionTrace, self).solve(
            trace, fixed, data, *rest
        )
        return kernels.run('span_visit', *given, plain=plainly, by=self._by_kernel)

    def _by_kernel(
        self,
        span_visit: Callable[..., tuple[Components, jax.Array]],
        trace: Components,
        steps: Operands,
        rows: Components,
        product: Jacobian,
        credit: Components,
    ) -> tuple[Components, jax.Array]:
        use, here = self.use, lambda x: self.use.rows(self.at_result(x))[:, 0]
        new, total = span_visit(
            {s: e[:, 0] for s, e in trace.items()},
            jax.vmap(use.patches)(steps[0])[:, :, 0],
            {s: jax.vmap(use.rows)(row)[:, :, 0] for s, row in rows.items()},
            {at: here(p) for at, p in product.items()},
            {s: here(c) for s, c in credit.items()},
        )
        new = {s: e[:, None] for s, e in new.items()}
        return new, use.as_weight(total[None])

    def plus(
        self, trace: jax.Array, fixed: Operands, steps: Operands, rows: jax.Array
    ) -> jax.Array:
        use = self.use

        def step(total: jax.Array, at: tuple) -> tuple:
            x, row = at
            more = use.patches(x)[..., None] * use.rows(row)[:, :, None]
            return total + cast(more, total.dtype), None

        return jax.lax.scan(step, trace, (steps[0], rows))[0]

    def scaled(self, trace: jax.Array, factor: jax.Array) -> jax.Array:
        return self.use.rows(self.at_result(factor))[:, :, None] * trace

    def gradient(self, trace: jax.Array, credit: jax.Array) -> jax.Array:
        return self.use.as_weight(jnp.sum(self.scaled(trace, credit), axis=0))


def _use(
    eqn: Equation, operand: int, result: int, const: Const
) -> ConvolutionUse | None:
    if operand != 1 or eqn.params['batch_group_count'] != 1:
        return None
    return bind(ConvolutionUse, eqn, operand, result, eqn.params)


register(
    Operation('product', _labels, multiplies=True, use=_use), 'conv_general_dilated'
)
