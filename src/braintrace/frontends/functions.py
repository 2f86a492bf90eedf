"""Plain functions ``step(params, state, *inputs) -> (state, out)``; every float state
is hidden."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import CompilationError, three_parts
from ..source_lines import failing_line
from .failures import AS_ARRAYS, fix_of_value, unset_environment
from .pure import Leaves, PureModel, free_name, leaf_paths, state_paths


class FunctionModel(PureModel):
    """A plain step function with its parameters and state."""

    def __init__(
        self,
        step: Callable[..., Any],
        params: Any,
        state: Any,
        inputs: tuple,
        batch: int | None = None,
    ):
        self.function = step
        self.parameter_leaves = Leaves(params, 'params', leaf_paths(params))
        self.parameters = jax.tree.leaves(params)
        name = free_name('state', self.parameter_paths)
        self.state_paths = [(name, *path) for path in state_paths(state)]
        self.state_leaves = Leaves(state, 'a state', self.state_paths)
        self.state = jax.tree.leaves(state)
        super().__init__(getattr(step, '__name__', 'a function'), inputs, batch)

    def one(
        self, parameters: Sequence[Any], state: Sequence[Any], *inputs: Any
    ) -> tuple[list[Any], Any]:
        """One call of the function."""
        given = self.parameter_leaves.tree(parameters), self.state_leaves.tree(state)
        new, out = run_step(self.function, *given, inputs)
        return jax.tree.leaves(new), out

    def _written(self) -> list[bool]:
        super()._written()
        return [True] * len(self.state)


def run_step(
    step: Callable[..., Any], params: Any, state: Any, inputs: tuple
) -> tuple[Any, Any]:
    """New state and output of a step function, checked."""
    try:
        result = step(params, state, *inputs)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(
                f'it returns {type(result).__name__}, not a pair (state, out)'
            )
        _check_state(state, result[0])
    except Exception as error:
        kind = type(error).__name__.removeprefix('_')
        raise CompilationError(
            three_parts(
                f'{getattr(step, "__name__", step)!s} as a step function',
                f'step(params, state, *inputs) fails with {kind}: '
                f'{error}{failing_line(error)}',
                _fix_of(error, inputs),
            )
        ) from error
    return result


class _StateChanged(TypeError):
    """A state of another structure, shape or type after a step."""


def _fix_of(error: Exception, inputs: tuple) -> str:
    """The advice that fits the failure of a step function."""
    if any(map(_is_list_of_numbers, inputs)):
        return AS_ARRAYS
    if isinstance(error, _StateChanged):
        return (
            'a function whose new state has the structure, shapes and types of the old '
            'one; a first state with the batch axis, or vmap=True for a function of '
            'one sample'
        )
    known = unset_environment(error) or fix_of_value(error)
    return known or (
        'a function step(params, state, *inputs) -> (state, out) that runs on the '
        'given examples: compile(step, rule, params, state, *inputs), with '
        'vmap=True and batch_size=B for a function of one sample'
    )


def _is_list_of_numbers(x: Any) -> bool:
    leaves = jax.tree.leaves(x)
    return isinstance(x, list) and all(jnp.shape(leaf) == () for leaf in leaves)


def _check_state(old: Any, new: Any) -> None:
    shapes = [
        jax.tree.map(lambda x: (jnp.shape(x), str(jnp.result_type(x))), s)
        for s in (old, new)
    ]
    structure: Any = jax.tree.structure(old)
    if structure != jax.tree.structure(new) or shapes[0] != shapes[1]:
        raise _StateChanged(f'it turns a state of {shapes[0]} into {shapes[1]}')
