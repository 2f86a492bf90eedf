"""What the front ends of other frameworks make of a model: a pure step on lists of
arrays, each with a path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import CompilationError, three_parts
from ..program import Path
from ..program.step import path_name
from ..source_lines import failing_line


class Leaves:
    """The arrays of a tree: their paths, and the way there and back."""

    def __init__(self, tree: Any, what: str, paths: Sequence[Path]):
        self.what = what
        self.paths = list(paths)
        self.structure: Any = jax.tree.structure(tree)

    def flat(self, tree: Any) -> list[Any]:
        """The arrays of another tree of this structure."""
        leaves, structure = jax.tree.flatten(tree)
        if self.structure != structure:
            raise ValueError(
                three_parts(
                    f'{self.what} of structure {structure}',
                    f'the model was compiled with {self.structure}',
                    f'{self.what} of the structure that the learner gives back',
                )
            )
        return leaves

    def tree(self, leaves: Sequence[Any]) -> Any:
        """A tree of this structure."""
        return jax.tree.unflatten(self.structure, leaves)


class PureModel:
    """A model whose step is ``step(parameters, state, *inputs) -> (state, out)`` on
    lists in the order of the paths.

    ``written``: which states a step writes; ``hidden``: which of them carry credit;
    ``ongoing``: which of the others continue when a fresh sequence starts. With
    ``batch`` the given state and inputs are of one sample, mapped over it.

    A subclass sets the arrays and paths below, then calls this ``__init__``, and
    defines :meth:`one`.
    """

    parameters: list[Any]
    parameter_leaves: Leaves
    state: list[Any]
    state_leaves: Leaves
    state_paths: list[Path]
    keeps_state = False
    """Whether states live in the user's model too, where a learner has to read and
    write them."""
    runs = 'inputs and a state for which the step runs'
    hidden_state_fix = 'a state of real numbers that the step gives a new value'
    """What to write where a step fails, and where none of its states can carry credit.
    """

    def __init__(self, name: str, inputs: tuple, batch: int | None):
        self.name = name
        self.batch = batch
        self.inputs = inputs
        self.state = list(map(_array, self.state))
        self.parameters = list(map(_array, self.parameters))
        if batch is not None:
            self.state = [_copies(x, batch) for x in self.state]
            self.inputs = jax.tree.map(lambda x: _copies(x, batch), inputs)
        self.written = self._written()
        self.ongoing = self._ongoing()
        given = zip(self.written, self.ongoing, self.state, strict=True)
        self.hidden = [
            written and not ongoing and is_float(x) for written, ongoing, x in given
        ]
        if not any(self.hidden):
            raise CompilationError(
                three_parts(
                    f'{name}, whose step gives no hidden state a new value',
                    'eligibility traces belong to states that depend on their own '
                    'past values, and there are none',
                    self.hidden_state_fix,
                )
            )

    def one(
        self, parameters: Sequence[Any], state: Sequence[Any], *inputs: Any
    ) -> tuple[list[Any], Any]:
        """One step as the framework does it."""
        raise NotImplementedError

    def step(
        self, parameters: Sequence[Any], state: Sequence[Any], *inputs: Any
    ) -> tuple[list[Any], Any]:
        """One step of the whole batch."""
        return self._mapped(self.one)(list(parameters), list(state), *inputs)

    def _mapped(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function of parameters, states and inputs of one sample, mapped over the
        batch if there is one."""
        if self.batch is None:
            return run
        axes = lambda count: (None, 0, *(0 for _ in range(count - 2)))
        return lambda *args: jax.vmap(run, in_axes=axes(len(args)), axis_name='batch')(
            *args
        )

    @property
    def parameter_paths(self) -> list[Path]:
        """Paths of the parameters."""
        return self.parameter_leaves.paths

    def gradients(self, parameters: Sequence[Any]) -> Any:
        """Arrays in the order of the parameters in the structure that the framework's
        optimisers expect."""
        return self.parameter_leaves.tree(parameters)

    def whole(self, parameters: Sequence[Any]) -> Any:
        """Parameters as a user of the framework holds them."""
        return self.gradients(parameters)

    def flat(self, given: Any) -> list[Any]:
        """What :meth:`whole` gives, as arrays in the order of the parameters."""
        return self.parameter_leaves.flat(given)

    def whole_state(self, state: Sequence[Any]) -> Any:
        """States as a user of the framework holds them."""
        return self.state_leaves.tree(state)

    def flat_state(self, given: Any) -> list[Any]:
        """What :meth:`whole_state` gives, as arrays in the order of the states."""
        return self.state_leaves.flat(given)

    @property
    def version(self) -> Any:
        """What the step depends on beside parameters and states, for modules that can
        change it."""
        return None

    def holds_states(self, given: Any) -> bool:
        """Whether given parameters come in a model with states of its own."""
        return False

    def pull(self, given: Any = None) -> tuple[list[Any], list[Any | None]]:
        """Parameters and states in the user's model, or a given one; None for a state
        that is not kept there."""
        raise NotImplementedError

    def push(
        self, parameters: Sequence[Any], state: Sequence[Any], given: Any = None
    ) -> None:
        """Write parameters and states into the user's model, or a given one."""
        raise NotImplementedError

    def _ongoing(self) -> list[bool]:
        """Random keys continue, and whatever else a front end names."""
        return [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in self.state]

    def _written(self) -> list[bool]:
        """Which states a step gives a new value, found by running it on abstract
        values."""
        marks: list[bool] = []
        if wrong := [
            p
            for p, x in zip(self.parameter_paths, self.parameters, strict=True)
            if not is_float(x)
        ]:
            raise CompilationError(
                three_parts(
                    f'parameter {path_name(wrong[0])}, which is not of real or '
                    'complex numbers',
                    'parameters are what gradients are taken of',
                    'only trainable arrays among the parameters, the others in the '
                    'state',
                )
            )

        def run(parameters: list, state: list, *inputs: Any) -> list:
            new, _ = self.one(parameters, state, *inputs)
            marks[:] = [a is not b for a, b in zip(state, new, strict=True)]
            return new

        try:
            new = jax.eval_shape(
                self._mapped(run), self.parameters, self.state, *self.inputs
            )
        except CompilationError:
            raise
        except Exception as error:
            shapes = jax.tree.map(lambda x: tuple(jnp.shape(x)), self.inputs)
            raise CompilationError(
                three_parts(
                    f'a step of {self.name} on inputs of shapes {shapes}',
                    f'the step itself fails with {type(error).__name__}: {error}'
                    f'{failing_line(error)}',
                    self.runs,
                )
            ) from error
        for path, a, b in zip(self.state_paths, self.state, new, strict=True):
            if (jnp.shape(a), jnp.result_type(a)) != (b.shape, b.dtype):
                raise CompilationError(
                    three_parts(
                        f'a step that turns {path_name(path)} from '
                        f'{jnp.result_type(a)}{list(jnp.shape(a))} into '
                        f'{b.dtype}{list(b.shape)}',
                        'a step is repeated, so every state must keep its shape and '
                        'type',
                        'an initial state of the shape (batch axis included) and '
                        'type that the step gives it',
                    )
                )
        return marks


def key_name(key: Any) -> Any:
    """The name or number that a key of a tree stands for."""
    return getattr(key, 'key', getattr(key, 'idx', getattr(key, 'name', key)))


def leaf_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Path]:
    """Paths of the arrays in a tree."""
    return [
        tuple(map(key_name, keys))
        for keys, _ in jax.tree_util.tree_flatten_with_path(tree, is_leaf)[0]
    ]


def state_paths(tree: Any) -> list[Path]:
    """The same for what a step carries: entries of a tuple or a list are parts of one
    thing, not layers: words, not numbers."""
    if isinstance(tree, tuple | list) and not hasattr(tree, '_fields'):
        return [
            (str(i), *path) for i, part in enumerate(tree) for path in state_paths(part)
        ]
    children, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: x is not tree
    )
    if len(children) == 1 and not children[0][0]:
        return [()]
    return [
        (*map(key_name, keys), *path)
        for keys, part in children
        for path in state_paths(part)
    ]


def free_name(name: str, paths: Sequence[Path]) -> str:
    """A first key that no path has: the name, if need be with an underscore."""
    while any(path[:1] == (name,) for path in paths):
        name += '_'
    return name


def is_float(x: Any) -> bool:
    """Whether a value is of real or complex numbers."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _array(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x, jnp.result_type(x))


def _copies(x: Any, batch: int) -> jax.Array:
    """One for each sample; of a random key, one of its own."""
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        return jax.random.split(x, batch)
    return jnp.broadcast_to(x, (batch, *jnp.shape(x)))
