"""Flax NNX modules: parameters are its Params; carries and the other Variables it
writes are its states.

A module is called as ``model(*inputs)``, or with a carry as ``model(carry, *inputs) ->
(carry, out)``. Parameters and Variables stay in the user's module.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..errors import CompilationError, UnsupportedStep, three_parts
from .pure import Leaves, PureModel, free_name, key_name, state_paths

_GO_ON = (nnx.RngState, nnx.BatchStat)


class FlaxModel(PureModel):
    """A Flax NNX module as a pure step."""

    keeps_state = True
    runs = (
        'inputs, carry and Variables for which the call runs: check their batch '
        'axes; jax.numpy.where or jax.lax.cond '
        'where Python code needs the value of an array'
    )
    hidden_state_fix = (
        'state=carry for a module called as model(carry, x) -> (carry, out), or '
        'self.h[...] = h on an nnx.Variable of '
        'real numbers in its __call__'
    )

    def __init__(
        self,
        model: nnx.Module,
        inputs: tuple,
        state: Any = None,
        batch: int | None = None,
        seed: int = 0,
    ):
        if batch is not None:
            raise ValueError(
                three_parts(
                    f'vmap=True with {type(model).__name__}',
                    'Flax layers take whole batches, and a Variable has one value',
                    'example inputs, carry and Variables with their batch axis, and '
                    'no vmap',
                )
            )
        self.model = model
        if state is None and hasattr(model, 'initialize_carry') and inputs:
            state = model.initialize_carry(
                jnp.shape(jax.tree.leaves(inputs)[0]), nnx.Rngs(seed)
            )
        self.graphdef, *parts = self._split(model)
        self._leaves = [
            Leaves(part, 'Variables', _variable_paths(part)) for part in parts
        ]
        name = free_name(
            'carry', [path for leaves in self._leaves for path in leaves.paths]
        )
        self.carry = (
            None
            if state is None
            else Leaves(state, 'a carry', [(name, *p) for p in state_paths(state)])
        )
        self._check_call(inputs)
        self.parameter_leaves = self._leaves[0]
        self.parameters = jax.tree.leaves(parts[0])
        carried = [] if self.carry is None else self.carry.flat(state)
        self.num_carried = len(carried)
        self.state = [*carried, *jax.tree.leaves(parts[1:])]
        kept = [self.carry, *self._leaves[1:]]
        self.state_paths = [
            path for leaves in kept if leaves is not None for path in leaves.paths
        ]
        super().__init__(type(model).__name__, inputs, None)

    def _ongoing(self) -> list[bool]:
        end = self.num_carried + len(self._leaves[1].paths)
        return [
            x or self.num_carried <= i < end for i, x in enumerate(super()._ongoing())
        ]

    def _check_call(self, inputs: tuple) -> None:
        signature = inspect.signature(self.model.__call__)
        given = len(inputs) + (self.carry is not None)
        try:
            signature.bind(*range(given))
        except TypeError as error:
            raise CompilationError(
                three_parts(
                    f'{type(self.model).__name__} with {len(inputs)} input(s) and '
                    f'{"no carry" if self.carry is None else "a carry"}',
                    f'it is called as __call__{signature}: {error}',
                    'one example for each input; state=carry if and only if the '
                    'first argument is a carry',
                )
            ) from error

    @staticmethod
    def _split(model: nnx.Module) -> tuple:
        return nnx.split(model, nnx.Param, _GO_ON, ...)

    def _merged(
        self, parameters: Sequence[Any], state: Sequence[Any]
    ) -> list[nnx.State]:
        """The parts of a module from arrays in the order of the paths."""
        middle = self.num_carried + len(self._leaves[1].paths)
        lists = [parameters, state[self.num_carried : middle], state[middle:]]
        return [leaves.tree(x) for leaves, x in zip(self._leaves, lists, strict=True)]

    def one(
        self, parameters: Sequence[Any], state: Sequence[Any], *inputs: Any
    ) -> tuple[list[Any], Any]:
        """One call of the module."""
        carry = (
            () if self.carry is None else (self.carry.tree(state[: self.num_carried]),)
        )
        model = nnx.merge(self.graphdef, *self._merged(parameters, state))
        result = model(*carry, *inputs)
        new: list[Any] = []
        if self.carry is not None:
            new, result = self._carried(self.carry.structure, result)
        _, *parts = self._split(model)
        if any(
            b.structure != jax.tree.structure(a)
            for a, b in zip(parts, self._leaves, strict=True)
        ):
            raise CompilationError(
                three_parts(
                    f'a call of {type(self.model).__name__} that makes or drops '
                    'Variables',
                    'a step is repeated: a Variable created in it would be new at '
                    'every step',
                    'Variables made in __init__, and only read and written in __call__',
                )
            )
        for path, a, b in zip(
            self.parameter_paths, parameters, jax.tree.leaves(parts[0]), strict=True
        ):
            if a is not b:
                raise UnsupportedStep(
                    three_parts(
                        f'a call that writes Param {".".join(map(str, path))}',
                        'gradients are taken with respect to parameters that stay '
                        'fixed within a step',
                        'another nnx.Variable for a value that changes in time',
                    )
                )
        return [*new, *jax.tree.leaves(parts[1:])], result

    def _carried(self, structure: Any, result: Any) -> tuple[list[Any], Any]:
        """New carry and output of a call."""
        if (
            isinstance(result, tuple)
            and len(result) == 2
            and structure == jax.tree.structure(result[0])
        ):
            return jax.tree.leaves(result[0]), result[1]
        raise CompilationError(
            three_parts(
                f'{type(self.model).__name__} with a carry of {structure} that '
                f'returns {jax.tree.structure(result)}',
                'a module with a carry is called as model(carry, *inputs) -> (carry, '
                'out)',
                'a __call__ that takes the carry first and returns (carry, out), and '
                'a carry of the form it returns',
            )
        )

    def flat(self, given: Any) -> list[Any]:
        """Parameters of a module, or of a State of Params."""
        return super().flat(
            nnx.state(given, nnx.Param) if isinstance(given, nnx.Module) else given
        )

    def whole_state(self, state: Sequence[Any]) -> Any:
        """The carry, or without one the Variables that are no Params."""
        if self.carry is not None:
            return self.carry.tree(state[: self.num_carried])
        return nnx.merge_state(*self._merged(self.parameters, state)[1:])

    def flat_state(self, given: Any) -> list[Any]:
        """The inverse; states in Variables stay as they are where there is a carry."""
        if self.carry is None:
            _, go_on, rest = nnx.split_state(given, nnx.Param, _GO_ON, ...)
            return [*self._leaves[1].flat(go_on), *self._leaves[2].flat(rest)]
        return [*self.carry.flat(given), *[None] * (len(self.state) - self.num_carried)]

    @property
    def version(self) -> Any:
        """All that is no array: train or eval, among other things."""
        return self.graphdef

    def holds_states(self, given: Any) -> bool:
        """A module holds its own, a State of Params none."""
        return isinstance(given, nnx.Module)

    def pull(self, given: Any = None) -> tuple[list[Any], list[Any | None]]:
        """Values of the user's module now; a change of mode (train, eval) changes the
        step."""
        graphdef, *parts = self._split(self.model if given is None else given)
        same = all(
            b.structure == jax.tree.structure(a)
            for a, b in zip(parts, self._leaves, strict=True)
        )
        if not same or (given is not None and graphdef != self.graphdef):
            raise CompilationError(
                three_parts(
                    f'a {type(self.model).__name__} whose Variables or mode differ '
                    'from those that were compiled',
                    'the compiled step reads and writes those',
                    'compile the module as it is now; after model.train() or '
                    'model.eval() one call outside jit will do',
                )
            )
        self.graphdef = graphdef
        return jax.tree.leaves(parts[0]), [
            *[None] * self.num_carried,
            *jax.tree.leaves(parts[1:]),
        ]

    def push(
        self, parameters: Sequence[Any], state: Sequence[Any], given: Any = None
    ) -> None:
        """Write into the user's module."""
        nnx.update(
            self.model if given is None else given, *self._merged(parameters, state)
        )


def _variable_paths(part: nnx.State) -> list[tuple]:
    """Paths of the Variables' arrays; several in one Variable are parts of one thing,
    not layers."""
    paths = []
    for keys, _ in jax.tree_util.tree_flatten_with_path(part)[0]:
        inside = next(
            (i for i, k in enumerate(keys) if isinstance(k, jax.tree_util.GetAttrKey)),
            len(keys),
        )
        paths.append(
            (
                *map(key_name, keys[:inside]),
                *(str(key_name(k)) for k in keys[inside + 1 :]),
            )
        )
    return paths
