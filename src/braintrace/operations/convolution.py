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

from ..arrays import picked
from ..compat import Equation
from ..compiled_step import Components, Jacobian, Letters, Operands, TraceLayout
from . import kernels
from .labels import Const, Labels, only, project, shape_of, windows
from .record import Operation, register
from .trace_layout import Trace
from .weight_use import BaseUse, bind
from .whole_traces import has_kernel


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

    @cached_property
    def letters(self) -> Letters:  # type: ignore[override]
        # Places of one sample follow each other, so that r begins with samples.
        first = lambda spec: ''.join('r' if a == spec[0] else '.' for a in sorted(spec))
        x, y = first(self._numbers.lhs_spec), first(self._numbers.out_spec)
        return Letters('rgc', 'rgo', 'rgco', 'gco', (x, ''), y)

    @property
    def _numbers(self) -> Any:
        return self.params['dimension_numbers']

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """(g, c, o) of the filters."""
        filters = self.weight.shape[self._numbers.rhs_spec[0]]
        groups = self.params['feature_group_count']
        return groups, math.prod(self.weight.shape) // filters, filters // groups

    def features(self, fixed: Operands, steps: Operands, length: int) -> jax.Array:
        return jax.vmap(self.patches)(self.stacked(0, fixed, steps, length))

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

    def layout(self, positions: np.ndarray, shape: tuple[int, ...]) -> TraceLayout:
        return ConvolutionTrace(self, positions)


@dataclass(frozen=True, eq=False)
class ConvolutionTrace(Trace):
    """(r, g, c, o): a filter is shared by all places, so each keeps a trace of its own.

    A kernel visits traces of one group of features in place, once for all steps; the
    general way reads and writes them at every step if there are more steps than filters.
    """

    use: ConvolutionUse

    def solve(
        self,
        trace: Components,
        fixed: Operands,
        steps: Operands,
        rows: Components,
        product: Jacobian,
        credit: Components,
        y_bars: jax.Array | None = None,
    ) -> tuple[Components, jax.Array]:
        given = (trace, fixed, steps, rows, product, credit)
        read = (trace, steps, rows, product, credit)
        if self.use.sizes[0] > 1 or not rows or not has_kernel(self.shape, read):
            return super().solve(*given, y_bars)
        return kernels.run(
            'span_visit', *given, plain=super().solve, by=self._by_kernel
        )

    def _by_kernel(
        self,
        span_visit: Callable[..., tuple[Components, jax.Array]],
        trace: Components,
        fixed: Operands,
        steps: Operands,
        rows: Components,
        product: Jacobian,
        credit: Components,
    ) -> tuple[Components, jax.Array]:
        use = self.use
        here = lambda x: use.rows(picked(x, self.positions))[:, 0]
        new, total = span_visit(
            {s: e[:, 0] for s, e in trace.items()},
            use.features(fixed, steps, len(next(iter(rows.values()))))[:, :, 0],
            {s: jax.vmap(use.rows)(row)[:, :, 0] for s, row in rows.items()},
            {at: here(p) for at, p in product.items()},
            {s: here(c) for s, c in credit.items()},
        )
        new = {s: e[:, None] for s, e in new.items()}
        return new, use.as_weight(total[None])


def _use(
    eqn: Equation, operand: int, result: int, const: Const
) -> ConvolutionUse | None:
    if operand != 1 or eqn.params['batch_group_count'] != 1:
        return None
    return bind(ConvolutionUse, eqn, operand, result, eqn.params)


register(
    Operation('product', _labels, multiplies=True, use=_use), 'conv_general_dilated'
)
