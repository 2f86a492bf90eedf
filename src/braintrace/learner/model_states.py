"""The states of a model: made for a batch, and checked against what a learner was
compiled for."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import brainstate
import jax
import jax.numpy as jnp

from ..errors import CompilationError, three_parts
from ..frontends.brainstate import module_states
from ..program import Path
from ..program.step import path_name

if TYPE_CHECKING:
    from .learner import Learner

Shapes = dict[Path, tuple[int, ...]]
_last_shaped: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""The learner that last gave the states of each model their shapes."""


def make_states(
    model: brainstate.nn.Module, batch_size: int | None, vmap: bool = False
) -> None:
    """Initialise a model's states; objects that it already has as states are used
    again.

    A function that was jitted earlier holds these objects and would not see others.
    """
    before = dict(module_states(model))
    if vmap:
        brainstate.nn.vmap_init_all_states(model, axis_size=batch_size)
    elif batch_size is None:
        _make_without_batch(model)
    else:
        brainstate.nn.init_all_states(model, batch_size=batch_size)
    replaced: dict[int, brainstate.State] = {}
    for path, state in module_states(model).items():
        old = before.get(path)
        if old is None or old is state or type(old) is not type(state):
            continue
        # One that was made inside a trace ended with it.
        if old.stack_level == state.stack_level:
            old.value = state.value
            replaced[id(state)] = old
    if not replaced:
        return
    for node in cast(Any, model).nodes().values():
        for name, value in list(vars(node).items()):
            if (same := _with_states(value, replaced)) is not value:
                setattr(node, name, same)


def _make_without_batch(model: brainstate.nn.Module) -> None:
    """Initialise the states of a model for one sample; raise if it needs a batch size."""
    try:
        brainstate.nn.init_all_states(model)
    except TypeError as error:
        if 'None' not in str(error):
            raise
        raise CompilationError(
            three_parts(
                f'{type(model).__name__} without a batch size',
                f'its init_state fails with batch_size=None: {error}',
                'batch_size=... with the number of samples of the example inputs, or '
                'states without an axis of samples where batch_size is None',
            )
        ) from error


def _with_states(value: Any, replaced: Mapping[int, brainstate.State]) -> Any:
    """An attribute with some states replaced by others; itself if it holds none of
    those."""
    if isinstance(value, brainstate.State):
        return replaced.get(id(value), value)
    if type(value) not in (dict, list, tuple):
        return value
    items = list(value.values()) if isinstance(value, dict) else list(value)
    new = [_with_states(item, replaced) for item in items]
    if all(a is b for a, b in zip(items, new, strict=True)):
        return value
    if isinstance(value, dict):
        return dict(zip(value, new, strict=True))
    return type(value)(new)


def state_shapes(states: Mapping[Path, brainstate.State]) -> Shapes:
    """The shape of each state that is one array."""
    leaves = {path: jax.tree.leaves(state.value) for path, state in states.items()}
    return {
        path: jnp.shape(found[0]) for path, found in leaves.items() if len(found) == 1
    }


def compiled_shapes(learner: Learner) -> Shapes:
    """The shapes that a learner is compiled for, which is the last one of its model to be
    so."""
    _last_shaped[learner.model] = weakref.ref(learner)
    return state_shapes(learner.hidden_states)


def check_shapes(learner: Learner) -> None:
    """Raise if the hidden states have other shapes than the learner was compiled for."""
    found = state_shapes(learner.hidden_states)
    for path, shape in learner._kept.shapes.items():
        if found.get(path, shape) != shape:
            last = _last_shaped.get(learner.model, lambda: None)()
            other = None if last is learner else last
            raise _reshaped(learner.rule.name, path, shape, found[path], other)


def _reshaped(
    rule: str, path: Path, compiled: tuple[int, ...], got: tuple[int, ...], other: Any
) -> CompilationError:
    """The error of a learner whose model has states of another batch."""
    batched = len(compiled) == len(got) and compiled[1:] == got[1:]
    sizes = (compiled[0], got[0]) if batched else (compiled, got)
    was, now = (f'batch {size}' if batched else f'shape {size}' for size in sizes)
    reason = 'they were made anew'
    if other is not None:
        reason = f'another learner of the same model ({other.rule.name}) made them anew'
    size = f'batch_size={compiled[0]}' if batched else ''
    return CompilationError(
        three_parts(
            f'a call of a {rule} learner compiled for {was}, with states of {now}: '
            f'{path_name(path)}',
            f'{reason} after this learner was compiled',
            f'learner.reset_state({size}) before this call, or a model for each '
            'learner',
        )
    )
