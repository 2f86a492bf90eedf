"""Reductions, and operations that mix the elements of whole axes."""

from __future__ import annotations

from collections.abc import Callable

from ..compat import Equation
from .labels import (
    AxisMap,
    Const,
    Labels,
    axes,
    join,
    merge,
    project,
    shape_of,
    windows,
)
from .record import Operation, register


def _reduced(eqn: Equation, k: int) -> AxisMap:
    gone = eqn.params['axes'] if 'axes' in eqn.params else eqn.params['dimensions']
    left = iter(range(len(shape_of(eqn.outvars[0]))))
    rank = len(shape_of(eqn.invars[k]))
    return [None if d in gone else next(left) for d in range(rank)]


def _reduce_generic(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    half = len(eqn.invars) // 2
    return merge(eqn, outs, lambda e, k: _reduced(e, k) if k < half else [])


register(Operation('reduction', axes(_reduced), linear=True), 'reduce_sum')
register(
    Operation('reduction', axes(_reduced)),
    'reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin',
)
register(Operation('reduction', _reduce_generic), 'reduce')


def _all_but(*gone: int, rank: int) -> AxisMap:
    blocked = {a % rank for a in gone} if rank else set()
    return [None if d in blocked else d for d in range(rank)]


def _along(name: str, default: int | None = None) -> Callable[[Equation, int], AxisMap]:
    """Every axis is kept but the one that a parameter of the equation names."""

    def axis_map(eqn: Equation, k: int) -> AxisMap:
        axis = eqn.params[name] if default is None else eqn.params.get(name, default)
        return _all_but(axis, rank=len(shape_of(eqn.invars[k])))

    return axis_map


def _transformed(eqn: Equation, k: int) -> AxisMap:
    gone = range(-len(eqn.params['fft_lengths']), 0)
    return _all_but(*gone, rank=len(shape_of(eqn.invars[k])))


def _reduce_window(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    p = eqn.params
    shape = shape_of(eqn.invars[0])
    result: list[Labels] = []
    for operand in eqn.invars:
        labels: Labels = None
        for out in (o for o in outs if o is not None):
            if shape_of(operand) != shape:
                seen = project(out, [], ())
            else:
                seen = windows(
                    out,
                    shape,
                    p['window_dimensions'],
                    p['window_strides'],
                    p['padding'],
                    p['base_dilation'],
                    p['window_dilation'],
                )
            labels = join(labels, seen)
        result.append(labels)
    return result


for _labels, _names in [
    (axes(_along('axis')), 'cumsum cumprod cummax cummin cumlogsumexp'),
    (axes(_along('dimension')), 'sort'),
    (axes(_along('axis', default=-1)), 'top_k'),
    (axes(_along('reduction_dimension')), 'approx_top_k'),
    (axes(_transformed), 'fft'),
    (
        _reduce_window,
        'reduce_window_sum reduce_window_max reduce_window_min reduce_window',
    ),
]:
    register(Operation('along', _labels), _names)
