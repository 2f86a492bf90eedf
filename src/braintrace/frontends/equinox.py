"""Equinox modules ``model(x, state, ...) -> (out, state)`` and cells ``cell(x, state)
-> state``.

Parameters are the inexact arrays. The state is any tree of arrays, or an
``eqx.nn.State``.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..errors import CompilationError, three_parts
from .pure import Leaves, PureModel, free_name, leaf_paths, state_paths


class EquinoxModel(PureModel):
    """An Equinox module as a pure step."""

    runs = (
        'inputs and a state for which model(x, state) runs; for a module of one '
        'sample vmap=True, batch_size=B and '
        'examples of one sample'
    )

    def __init__(
        self,
        model: eqx.Module,
        inputs: tuple,
        state: Any = None,
        batch: int | None = None,
    ):
        state = _default_state(model) if state is None else state
        if state is None or not inputs:
            raise CompilationError(
                three_parts(
                    f'{type(model).__name__} with {len(inputs)} example input(s) and '
                    'no state',
                    'an Equinox module is called as model(x, state), and where its '
                    'state starts is not known',
                    'compile(model, rule, x0, state=state0); for a stateful module '
                    'the state of '
                    'eqx.nn.make_with_state(...)',
                )
            )
        trainable, self.static = eqx.partition(model, eqx.is_inexact_array)
        self.parameter_leaves = Leaves(trainable, 'a model', leaf_paths(trainable))
        self.parameters = jax.tree.leaves(trainable)
        self.state_paths = _paths(
            model, state, free_name('state', self.parameter_paths)
        )
        self.state_leaves = Leaves(state, 'a state', self.state_paths)
        self.state = jax.tree.leaves(state)
        self._statistics = _statistics(model, self.state_paths)
        super().__init__(type(model).__name__, inputs, batch)

    def one(
        self, parameters: Sequence[Any], state: Sequence[Any], *inputs: Any
    ) -> tuple[list[Any], Any]:
        """One call of the module for one sample."""
        model = self.whole(parameters)
        x, *more = inputs
        positional, named = _bound(model, more)
        result = model(x, self.state_leaves.tree(state), *positional, **named)
        if self.state_leaves.structure == jax.tree.structure(result):
            return jax.tree.leaves(result), result
        if isinstance(result, tuple) and len(result) == 2:
            out, new = result
            if self.state_leaves.structure == jax.tree.structure(new):
                return jax.tree.leaves(new), out
        raise CompilationError(
            three_parts(
                f'{self.name} that returns {jax.tree.structure(result)} for a state '
                f'of {self.state_leaves.structure}',
                'a step gives its new state, of the structure of the old one',
                'model(x, state) -> (out, state), or cell(x, state) -> state',
            )
        )

    def _ongoing(self) -> list[bool]:
        return [
            a or b for a, b in zip(super()._ongoing(), self._statistics, strict=True)
        ]

    def whole(self, parameters: Sequence[Any]) -> Any:
        """The model with these parameters."""
        return eqx.combine(self.gradients(parameters), self.static)

    def flat(self, given: Any) -> list[Any]:
        """Parameters of a model; all else must be as it was compiled."""
        trainable, static = eqx.partition(given, eqx.is_inexact_array)
        leaves = super().flat(trainable)
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(static))
        if not traced and not bool(eqx.tree_equal(static, self.static)):
            raise ValueError(
                three_parts(
                    f'a {self.name} that differs from the compiled one in more than '
                    'its parameters',
                    'the step was compiled for the other parts of the model as they '
                    'were',
                    'compile(model, ...) again with this model',
                )
            )
        return leaves


def _bound(model: Any, more: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Inputs after the first: by position after the state, then by keyword
    (``key``)."""
    parameters = inspect.signature(model.__call__).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    room = max(len(more) - len(names), len(parameters) - len(names) - 2)
    return more[:room], dict(zip(names, more[room:], strict=False))


def _default_state(model: Any) -> Any:
    """Zeros for the cells of Equinox."""
    if isinstance(model, (eqx.nn.GRUCell, eqx.nn.LSTMCell)):
        zeros = jnp.zeros(model.hidden_size, model.weight_hh.dtype)
        return zeros if isinstance(model, eqx.nn.GRUCell) else (zeros, zeros)
    return None


def _paths(model: Any, state: Any, name: str) -> list[tuple]:
    """A path for every array of a state; inside an ``eqx.nn.State`` that of its index
    in the model."""
    is_index = lambda x: isinstance(x, eqx.nn.StateIndex)
    found = zip(
        leaf_paths(model, is_index),
        jax.tree.leaves(model, is_leaf=is_index),
        strict=True,
    )
    indices = [(path, index) for path, index in found if is_index(index)]
    paths = [(name, *path) for path in state_paths(state)]
    numbers = jax.tree.unflatten(jax.tree.structure(state), range(len(paths)))
    for part in jax.tree.leaves(numbers, is_leaf=lambda x: isinstance(x, eqx.nn.State)):
        for start, index in indices if isinstance(part, eqx.nn.State) else ():
            value = part.get(index)
            for path, i in zip(state_paths(value), jax.tree.leaves(value), strict=True):
                paths[i] = (*start, *path)
    return paths


def _statistics(model: Any, paths: Sequence[tuple]) -> list[bool]:
    """Which states are the running statistics of a BatchNorm."""
    is_norm = lambda x: isinstance(x, eqx.nn.BatchNorm)
    found = zip(
        leaf_paths(model, is_norm), jax.tree.leaves(model, is_leaf=is_norm), strict=True
    )
    norms = [path for path, x in found if is_norm(x)]
    return [any(path[: len(p)] == p for p in norms) for path in paths]
