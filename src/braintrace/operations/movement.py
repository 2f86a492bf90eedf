"""Data movement: every element of a result is one element of an operand, or none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..compat import Equation
from ..compiled_step import Box
from .labels import (
    NONE,
    AxisMap,
    Const,
    Labels,
    all_or_nothing,
    axes,
    nothing,
    only,
    origins_along,
    project,
    shape_of,
)
from .record import Operation, register


def _reshape(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    shape, order = shape_of(eqn.invars[0]), eqn.params.get('dimensions')
    if eqn.primitive.name != 'reshape' or order is None:
        order = range(len(shape))
    labels = only(outs).reshape([shape[d] for d in order]).transpose(np.argsort(order))
    return [labels] + [None] * (len(eqn.invars) - 1)


def _broadcast_axes(eqn: Equation, k: int) -> AxisMap:
    shape, out = shape_of(eqn.invars[0]), eqn.params['shape']
    runs_along = zip(eqn.params['broadcast_dimensions'], shape, strict=True)
    return [d if n == out[d] else None for d, n in runs_along]


def _broadcast(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    labels = project(only(outs), _broadcast_axes(eqn, 0), shape_of(eqn.invars[0]))
    return [labels] + [None] * (len(eqn.invars) - 1)


def _tile(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    shape = shape_of(eqn.invars[0])
    sizes = [n for pair in zip(eqn.params['reps'], shape, strict=True) for n in pair]
    copies = only(outs).reshape(sizes)
    return [project(copies, range(1, copies.ndim, 2), shape)]


def _tile_origins(eqn: Equation, operand: int, const: Const) -> list[np.ndarray]:
    shape = shape_of(eqn.invars[0])
    numbers = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    return [np.tile(numbers, eqn.params['reps'])]


def _reverse(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    return [np.flip(only(outs), eqn.params['dimensions'])]


def _slice(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    p = eqn.params
    labels = nothing(shape_of(eqn.invars[0]))
    strides = p['strides'] or (1,) * labels.ndim
    limits = zip(p['start_indices'], p['limit_indices'], strides, strict=True)
    labels[tuple(slice(*limit) for limit in limits)] = only(outs)
    return [labels]


def _part(eqn: Equation) -> Box | None:
    """The part that a slice without steps between its elements takes."""
    steps = eqn.params['strides']
    if steps is not None and any(step != 1 for step in steps):
        return None
    limits = zip(eqn.params['start_indices'], eqn.params['limit_indices'], strict=True)
    return tuple(slice(a, b) for a, b in limits)


def _split(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    return [np.concatenate(all_or_nothing(eqn, outs), eqn.params['axis'])]


def _concatenate(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    axis = eqn.params['dimension']
    ends = np.cumsum([shape_of(v)[axis] for v in eqn.invars])[:-1]
    return list(np.split(only(outs), ends, axis))


def _stack(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    return list(np.moveaxis(only(outs), eqn.params['axis'], 0))


def _unstack(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    return [np.stack(all_or_nothing(eqn, outs), eqn.params['axis'])]


def _pad(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    out, shape = only(outs), shape_of(eqn.invars[0])
    inside, taken = [], []
    sides = zip(shape, out.shape, eqn.params['padding_config'], strict=True)
    for n, total, (low, _, interior) in sides:
        at = low + np.arange(n) * (interior + 1)
        ok = (at >= 0) & (at < total)
        inside.append(np.flatnonzero(ok))
        taken.append(at[ok])
    labels = nothing(shape)
    labels[np.ix_(*inside)] = out[np.ix_(*taken)]
    rest = out.copy()
    rest[np.ix_(*taken)] = NONE
    return [labels, project(rest, [], ())]


_LINEAR_MOVES = [
    (_reshape, 'reshape squeeze expand_dims'),
    (axes(lambda e, k: np.argsort(e.params['permutation']).tolist()), 'transpose'),
    (_reverse, 'rev'),
    (_split, 'split'),
    (_concatenate, 'concatenate'),
]
for _labels, _names in _LINEAR_MOVES:
    register(Operation('movement', _labels, linear=True), _names)
register(Operation('movement', _slice, linear=True, part=_part), 'slice')
register(
    Operation(
        'movement', _broadcast, linear=True, origins=origins_along(_broadcast_axes)
    ),
    'broadcast_in_dim',
)
register(Operation('movement', _tile, origins=_tile_origins), 'tile')
for _labels, _names in [
    (_stack, 'stack'),
    (_unstack, 'unstack'),
    (_pad, 'pad'),
]:
    register(Operation('movement', _labels), _names)


# ----------------------------------------------------------- slices at a variable place


def _same_size(small: Sequence[int], large: Sequence[int]) -> AxisMap:
    return [
        d if n == m else None for d, (n, m) in enumerate(zip(small, large, strict=True))
    ]


def _starts(
    eqn: Equation, first: int, sizes: Sequence[int], limits: Sequence[int], const: Const
) -> tuple[slice, ...] | None:
    """The slices that a dynamic slice takes, where its start is constant."""
    values = [const(v) for v in eqn.invars[first:]]
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return None
    at = [
        int(np.clip(v, 0, n - s)) for v, s, n in zip(known, sizes, limits, strict=True)
    ]
    return tuple(slice(a, a + s) for a, s in zip(at, sizes, strict=True))


def _dynamic_slice(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    shape, sizes = shape_of(eqn.invars[0]), eqn.params['slice_sizes']
    indices: list[Labels] = [None] * (len(eqn.invars) - 1)
    at = _starts(eqn, 1, sizes, shape, const)
    if at is None:
        return [project(only(outs), _same_size(sizes, shape), shape), *indices]
    labels = nothing(shape)
    labels[at] = only(outs)
    return [labels, *indices]


def _dynamic_update_slice(
    eqn: Equation, outs: list[Labels], const: Const
) -> list[Labels]:
    out, shape, sizes = only(outs), shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    indices: list[Labels] = [None] * (len(eqn.invars) - 2)
    at = _starts(eqn, 2, sizes, shape, const)
    if at is None:
        return [out, project(out, _same_size(sizes, shape), sizes), *indices]
    kept = out.copy()
    kept[at] = NONE
    return [kept, out[at], *indices]


register(Operation('movement', _dynamic_slice), 'dynamic_slice')
register(Operation('movement', _dynamic_update_slice), 'dynamic_update_slice')
