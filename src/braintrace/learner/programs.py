"""Compiled programs, each made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_MOST_PROGRAMS = 32
"""More are dropped, the oldest first: a new step_fn for every call must not fill
memory."""


def array_shapes(tree: Any) -> tuple:
    """Shapes and types of the arrays in a tree."""
    return tuple(map(shape_of, jax.tree.leaves(tree)))


def shape_of(x: Any) -> tuple:
    """Shape and type of an array; for one of JAX without its slower functions."""
    if isinstance(x, jax.Array):
        return x.shape, x.dtype
    return jnp.shape(x), jnp.result_type(x)


def shapes_of(tree: Any) -> tuple:
    """The same with the structure of the tree: what a program is specialised for."""
    return jax.tree.structure(tree), array_shapes(tree)


def in_trace() -> bool:
    """Whether new arrays are tracers, as inside jit."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


class ProgramCache:
    """Programs by what they depend on."""

    def __init__(self) -> None:
        self._programs: dict[tuple, Any] = {}

    def get(
        self,
        key: tuple,
        make: Callable[[], Any],
        is_reusable: bool | Callable[[Any], bool] | None = None,
    ) -> Any:
        """The program of a key, made if there is none.

        A program that may close over values of a trace around it ends with that trace,
        so it is not kept; ``is_reusable`` says if that is known not to be so.
        """
        if key in self._programs:
            return self._programs[key]
        program = make()
        if callable(is_reusable):
            is_reusable = is_reusable(program)
        if not in_trace() if is_reusable is None else is_reusable:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            self._programs[key] = program
        return program

    def values(self) -> list[Any]:
        """All programs that are kept."""
        return list(self._programs.values())

    def clear(self) -> None:
        """Remove all programs."""
        self._programs.clear()

    def __len__(self) -> int:
        return len(self._programs)
