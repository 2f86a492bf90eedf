"""Checkpoints of a learner and its optimiser, kept by orbax: written whole or not at
all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .errors import three_parts
from .frontends.brainstate import module_states
from .learner import Learner
from .program.step import path_name


def states_of(learner: Learner, optimizer: Any = None) -> dict[str, brainstate.State]:
    """All that training moves, by name: model, traces, the rule's own state, optimiser,
    random numbers."""
    found = {
        f'learner.{path_name(path)}': state
        for path, state in module_states(learner).items()
    }
    if optimizer is not None:
        found |= {
            f'optimizer.{name}': state
            for name, state in learner.optimizer_states(optimizer).items()
        }
    return {**found, 'random': brainstate.random.DEFAULT}


def complete(folder: str | Path) -> list[int]:
    """Numbers of the checkpoints in a folder that were written to their end; nothing is
    created."""
    return sorted(int(p.name) for p in Path(folder).glob('*') if p.name.isdecimal())


class Checkpoints:
    """A folder of checkpoints, each by the number of its update; the newest ``keep``
    stay."""

    def __init__(self, folder: str | Path, keep: int = 2):
        try:
            import orbax.checkpoint as orbax
        except ImportError as error:
            raise ImportError(
                three_parts(
                    'checkpoints',
                    'orbax-checkpoint keeps them',
                    "pip install 'braintrace[train]'",
                )
            ) from error
        self._orbax = orbax
        self.folder = Path(folder).absolute()
        options = orbax.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False
        )
        self._manager = orbax.CheckpointManager(self.folder, options=options)

    @property
    def _name(self) -> str:
        """The folder as a user knows it."""
        return os.path.relpath(self.folder)

    def _instead_of(self, unread: int) -> str:
        """How to go on without a checkpoint that cannot be read."""
        older = [update for update in self._manager.all_steps() if update < unread]
        then = f'resumes from checkpoint {max(older)}' if older else 'starts again'
        return f'delete {os.path.join(self._name, str(unread))}; training then {then}'

    @property
    def latest(self) -> int | None:
        """The number of the newest checkpoint."""
        return self._manager.latest_step()

    def save(self, update: int, states: Mapping[str, brainstate.State]) -> None:
        """Write the values of states as the checkpoint of an update; one that is there
        already stays."""
        if update not in self._manager.all_steps():
            self._manager.save(
                update, args=self._orbax.args.StandardSave(_values(states))
            )
            self._manager.wait_until_finished()

    def restore(
        self, states: Mapping[str, brainstate.State], update: int | None = None
    ) -> int:
        """Put a checkpoint, by default the newest, into states; its number. An error
        leaves them as they were."""
        update = self.latest if update is None else update
        if update is None or update not in self._manager.all_steps():
            raise FileNotFoundError(
                three_parts(
                    f'a checkpoint{"" if update is None else f" {update}"} of {self._name}',
                    f'there are {sorted(self._manager.all_steps()) or "none"}',
                    'a folder that training wrote to with out=...',
                )
            )
        wanted = _values(states)
        try:
            found = self._manager.restore(
                update, args=self._orbax.args.StandardRestore()
            )
        except Exception as error:
            raise ValueError(
                three_parts(
                    f'checkpoint {update} of {self._name}',
                    f'it cannot be read: {type(error).__name__}: {str(error).splitlines()[0][:200]}',
                    self._instead_of(update),
                )
            ) from error
        if differences := _differences(wanted, found):
            raise ValueError(
                three_parts(
                    f'checkpoint {update} of {self._name} for this model',
                    f'it was written by another: {differences}',
                    'the model, rule, batch size and optimiser that it was written with',
                )
            )
        for name, state in states.items():
            leaves, tree = jax.tree.flatten(state.value)
            new = [_like(x, found[name][f'{i}']) for i, x in enumerate(leaves)]
            state.value = jax.tree.unflatten(tree, new)
        return update


def _values(states: Mapping[str, brainstate.State]) -> dict[str, dict[str, jax.Array]]:
    """Arrays of every state, by name and number."""
    return {
        name: {f'{i}': _plain(x) for i, x in enumerate(jax.tree.leaves(state.value))}
        for name, state in states.items()
    }


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _plain(x: Any) -> jax.Array:
    return jax.random.key_data(x) if _is_key(x) else jnp.asarray(x)


def _like(x: Any, found: Any) -> jax.Array:
    if _is_key(x):
        return jax.random.wrap_key_data(jnp.asarray(found), impl=jax.random.key_impl(x))
    return jnp.asarray(found, jnp.result_type(x))


def _differences(wanted: dict, found: Any) -> str:
    """What sets the arrays of a checkpoint apart from those of a model, in words; empty
    if nothing."""
    shapes = lambda tree: {
        f'{name} ({i})': jnp.shape(x)
        for name, part in tree.items()
        for i, x in (part or {}).items()
    }
    if not isinstance(found, dict):
        return 'it holds no states by name'
    mine, theirs = shapes(wanted), shapes(found)
    notes = [f'no {name}' for name in mine.keys() - theirs.keys()]
    notes += [f'{name} is unknown here' for name in theirs.keys() - mine.keys()]
    notes += [
        f'{n} is {theirs[n]}, not {mine[n]}'
        for n in mine.keys() & theirs.keys()
        if mine[n] != theirs[n]
    ]
    return '; '.join(sorted(notes)[:5])
