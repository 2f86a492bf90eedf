"""Gather and scatter: elements chosen by an index array. An embedding is a gather of
rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..compat import Equation
from ..compiled_step import Letters, Operands
from .labels import NONE, Const, Labels, gather_back, only, project, shape_of
from .record import Operation, register
from .weight_use import LETTERS, BaseUse, bind


@dataclass(frozen=True)
class _Window:
    """Dimension numbers shared by gather (result side) and scatter (update side)."""

    window_dims: tuple[int, ...]
    dropped: tuple[int, ...]
    index_map: tuple[int, ...]
    batching: tuple[int, ...]
    index_batching: tuple[int, ...]
    sizes: tuple[int, ...]

    def axis_map(
        self, operand: tuple[int, ...], windowed_rank: int
    ) -> list[int | None]:
        """For every operand axis, the axis of the windowed array that surely runs along
        it."""
        batch_axes = [a for a in range(windowed_rank) if a not in self.window_dims]
        windows = iter(self.window_dims)
        result: list[int | None] = []
        for d, n in enumerate(operand):
            if d in self.batching:
                result.append(batch_axes[self.index_batching[self.batching.index(d)]])
            elif d in self.dropped:
                result.append(None)
            else:
                axis = next(windows)
                result.append(axis if self.sizes[d] == n else None)
        return result

    def locations(
        self, operand: tuple[int, ...], indices: np.ndarray, mode: Any
    ) -> np.ndarray:
        """Flat operand index behind every element of the windowed array; -1 outside."""
        numbers = jax.lax.GatherDimensionNumbers(
            self.window_dims,
            self.dropped,
            self.index_map,
            self.batching,
            self.index_batching,
        )
        with jax.ensure_compile_time_eval():
            table = jnp.arange(int(np.prod(operand)), dtype=jnp.int32).reshape(operand)
            taken = jax.lax.gather(
                table,
                jnp.asarray(indices),
                numbers,
                self.sizes,
                mode=mode,
                fill_value=-1,
            )
        return np.asarray(taken)


def _window_of(eqn: Equation) -> _Window:
    d = eqn.params['dimension_numbers']
    return _Window(
        d.offset_dims,
        d.collapsed_slice_dims,
        d.start_index_map,
        d.operand_batching_dims,
        d.start_indices_batching_dims,
        tuple(eqn.params['slice_sizes']),
    )


def _gather(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    out, shape, window = only(outs), shape_of(eqn.invars[0]), _window_of(eqn)
    indices = const(eqn.invars[1])
    if indices is None:
        return [project(out, window.axis_map(shape, out.ndim), shape), None]
    return [
        gather_back(out, window.locations(shape, indices, eqn.params['mode']), shape),
        None,
    ]


def _gather_origins(
    eqn: Equation, operand: int, const: Const
) -> list[np.ndarray] | None:
    indices = const(eqn.invars[1])
    if indices is None:
        return None
    shape, mode = shape_of(eqn.invars[0]), eqn.params['mode']
    return [_window_of(eqn).locations(shape, indices, mode)]


def _scatter(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    p, out = eqn.params, only(outs)
    shape, updates = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    d = p['dimension_numbers']
    windows = iter(d.update_window_dims)
    gone = (*d.inserted_window_dims, *d.operand_batching_dims)
    sizes = tuple(1 if a in gone else updates[next(windows)] for a in range(len(shape)))
    window = _Window(
        d.update_window_dims,
        d.inserted_window_dims,
        d.scatter_dims_to_operand_dims,
        d.operand_batching_dims,
        d.scatter_indices_batching_dims,
        sizes,
    )
    indices = const(eqn.invars[1])
    if indices is None:
        back: list[int | None] = [None] * len(updates)
        for operand_axis, axis in enumerate(window.axis_map(shape, len(updates))):
            if axis is not None:
                back[axis] = operand_axis
        return [out, None, project(out, back, updates)]
    at = window.locations(shape, indices, p['mode'])
    flat = np.append(out.reshape(-1), NONE).astype(np.int32)
    kept = out.copy()
    if eqn.primitive.name == 'scatter':
        kept.reshape(-1)[at[at >= 0]] = NONE
    return [kept, None, flat[at]]


# ---------------------------------------------------------------- an embedding


@dataclass(frozen=True, eq=False)
class EmbeddingUse(BaseUse):
    """Whole rows of a table: y[..., :] = w[index[...], :]; ``mode``: which row an index
    outside of the table stands for."""

    mode: Any

    @cached_property
    def letters(self) -> Letters:  # type: ignore[override]
        v, others = LETTERS[0], LETTERS[1:]
        rank, index = len(self.result.shape), len(self.operands[1].shape) - 1
        y = others[:rank]
        weight = v + y[index:]
        return Letters(y[:index] + v, y, v + y, weight, (weight, f'{y[:index]}.'), y)

    def features(self, fixed: Operands, steps: Operands, length: int) -> jax.Array:
        """1 at the row that y is taken from, 0 elsewhere."""
        index, size = (
            self.stacked(1, fixed, steps, length)[..., 0],
            self.weight.shape[0],
        )
        if self.mode == jax.lax.GatherScatterMode.CLIP:
            index = jnp.clip(index, 0, size - 1)
        return jax.nn.one_hot(index, size, dtype=self.result.dtype)


def _gather_use(
    eqn: Equation, operand: int, result: int, const: Const
) -> EmbeddingUse | None:
    d, shape = eqn.params['dimension_numbers'], shape_of(eqn.invars[0])
    rank = len(shape_of(eqn.outvars[result]))
    rows = (
        operand == 0
        and d.collapsed_slice_dims == d.start_index_map == (0,)
        and not d.operand_batching_dims
        and tuple(eqn.params['slice_sizes'])[1:] == shape[1:]
        and tuple(d.offset_dims) == tuple(range(rank - len(shape) + 1, rank))
    )
    return (
        bind(EmbeddingUse, eqn, operand, result, eqn.params['mode']) if rows else None
    )


register(
    Operation('movement', _gather, origins=_gather_origins, use=_gather_use), 'gather'
)
register(
    Operation('movement', _scatter),
    'scatter scatter-add scatter_add scatter-mul scatter_mul scatter-sub scatter_sub '
    'scatter-min scatter_min scatter-max scatter_max',
)
