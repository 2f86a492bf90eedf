"""Inputs of a step, or of several, marked as such."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import jax

from ..errors import three_parts


@dataclass(frozen=True)
class _Inputs:
    """Inputs, which are a pytree."""

    data: Any

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        """The parts that hold arrays, and what else there is."""
        return (self.data,), None

    @classmethod
    def tree_unflatten(cls, rest: None, parts: tuple[Any]) -> Self:
        """The inverse."""
        return cls(*parts)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class SingleStepData(_Inputs):
    """Inputs of one time step."""


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class MultiStepData(_Inputs):
    """Inputs of several time steps, time first."""


def first_step(inputs: Any) -> Any:
    """The inputs of one step: marks are taken off, and of several steps the first is
    kept."""

    def unmarked(x: Any) -> Any:
        if isinstance(x, MultiStepData):
            return jax.tree.map(_first, x.data)
        return x.data if isinstance(x, SingleStepData) else x

    is_marked = lambda x: isinstance(x, (SingleStepData, MultiStepData))
    return jax.tree.map(unmarked, inputs, is_leaf=is_marked)


def _first(x: Any) -> Any:
    shape = jax.numpy.shape(x)
    if not shape or not shape[0]:
        raise ValueError(
            three_parts(
                f'MultiStepData of an array of shape {shape}',
                'the first axis of its arrays is time, and a model is compiled for '
                'its first step',
                'arrays of shape (steps, ...) with at least one step, or '
                'SingleStepData for the inputs of one step',
            )
        )
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape[1:], x.dtype)
    return x[0]
