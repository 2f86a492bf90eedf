"""The states of a model: made for a batch, put on devices, checked against what a
learner was compiled for, and where sequences start."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import brainstate
import jax
import jax.numpy as jnp

from ..compat import is_at_top
from ..errors import ArgumentError, CompilationError, three_parts
from ..frontends.module_states import known_states, module_states
from ..program import Path
from ..program.step import path_name
from .arguments import is_count
from .transaction import uninterrupted

if TYPE_CHECKING:
    from .learner import Learner

Shapes = dict[Path, tuple[int, ...]]
_last_shaped: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""The learner that last gave the states of each model their shapes."""


class StartValue(brainstate.State):
    """The value of a model's state at the start of a fresh sequence."""


def check_batch_size(batch_size: Any) -> None:
    """Raise unless it is a number of samples, or None."""
    if batch_size is not None and not is_count(batch_size):
        raise ArgumentError(
            three_parts(
                f'batch_size={batch_size!r}',
                'it is the number of samples in a batch',
                'a whole number of at least 1, or None for states without a batch axis',
            )
        )


def make_states(
    model: brainstate.nn.Module, batch_size: int | None, vmap: bool
) -> None:
    """Initialise a model's states; objects that it already has as states are used
    again.

    A function that was jitted earlier holds these objects and would not see others.
    """
    before = dict(module_states(model))
    if vmap or batch_size is None:
        _make_for_one_sample(model, batch_size)
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


def _make_for_one_sample(model: brainstate.nn.Module, copies: int | None) -> None:
    """Initialise the states of a model for one sample, or for so many copies of it
    (``vmap``); raise if it needs a batch size."""
    try:
        if copies is None:
            brainstate.nn.init_all_states(model)
        else:
            brainstate.nn.vmap_init_all_states(model, axis_size=copies)
    except TypeError as error:
        if 'None' not in str(error):
            raise
        what, fix = 'without a batch size', 'batch_size=...'
        if copies is not None:
            what, fix = 'with vmap=True', 'compile without vmap, batch_size=...'
        raise CompilationError(
            three_parts(
                f'{type(model).__name__} {what}',
                f'its init_state fails with batch_size=None: {error}',
                f'{fix} with the number of samples of the example inputs, or '
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


@contextlib.contextmanager
def restored_on_error(states: Iterable[brainstate.State]) -> Iterator[None]:
    """Some states as they were, if what is done inside fails or is interrupted."""
    before = [(state, state.value) for state in states]
    try:
        yield
    except BaseException:
        with uninterrupted:
            for state, value in before:
                state.value = value
        raise


def state_shapes(states: Mapping[Path, brainstate.State]) -> Shapes:
    """The shape of each state that is one array."""
    leaves = {path: jax.tree.leaves(state.value) for path, state in states.items()}
    return {
        path: jnp.shape(found[0]) for path, found in leaves.items() if len(found) == 1
    }


def compiled_shapes(learner: Learner) -> Shapes:
    """The shapes that a learner is compiled for, which is the last one of its model to
    be so."""
    _last_shaped[learner.model] = weakref.ref(learner)
    return state_shapes(module_states(learner.model, brainstate.HiddenState))


def check_shapes(learner: Learner) -> None:
    """Raise if the hidden states have other shapes than the learner was compiled
    for."""
    found = state_shapes(known_states(learner.model, brainstate.HiddenState))
    for path, shape in learner._kept.shapes.items():
        if found.get(path, shape) != shape:
            last = _last_shaped.get(learner.model, lambda: None)()
            other = None if last is learner else last
            raise _reshaped(learner.rule.name, path, shape, found[path], other)


def place_states(learner: Learner) -> None:
    """Put the model's states on their devices, if there are several."""
    if learner.placement is not None:
        learner.placement = learner.placement.with_size(sample_count(learner))
        learner.placement.put_states(learner.model)


def sample_count(learner: Learner) -> int | None:
    """The size of the first axis, if all inputs and hidden states share it."""
    states = [state.value for state in learner.hidden_states.values()]
    sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves([states, learner._example])}
    first = next(iter(sizes), ())
    return first[0] if len(sizes) == 1 and first else None


# ---------------------------------------------------------------- where sequences start


def start_values(learner: Learner) -> dict[Path, Any]:
    """The values at the start of a fresh sequence, by path."""
    return {path: start.value for path, start in learner._start.items()}


def restore_start(learner: Learner) -> None:
    """Put the model's states back to where a fresh sequence starts."""
    start = start_values(learner)
    for path, state in module_states(learner.model).items():
        if path in start:
            state.value = jax.tree.map(_for_sample, start[path], state.value)


def _for_sample(start: Any, value: Any) -> Any:
    """The value at which a state starts. Inside a map over the states of the model
    alone, ``value`` is that of one sample, and ``start`` is still that of all."""
    is_mapped = jnp.shape(value) == jnp.shape(start)[1:] and not is_at_top()
    return _start_of_sample(start, value) if is_mapped and jnp.ndim(start) else start


@jax.custom_batching.custom_vmap
def _start_of_sample(start: Any, value: Any) -> Any:
    # Not mapped any more: `reset_all_states` has called the model's own `reset_state`
    # before, which gave all samples this value.
    return value


@_start_of_sample.def_vmap
def _(size: int, mapped: Sequence[bool], start: Any, value: Any) -> tuple[Any, bool]:
    # The map took the axis of samples off the state: put on the result, it gives each
    # sample its own start.
    if mapped[0] or len(start) != size:
        raise CompilationError(
            three_parts(
                f'reset_state inside a map over {size} samples',
                f'the learner was compiled for {len(start)}, with start values of '
                f'shape {start.shape}',
                'learner.reset_state() outside of the map; or a map over as many '
                'samples',
            )
        )
    return start, True


def start_here(learner: Learner) -> None:
    """Fresh sequences start from the states as they are."""
    states = module_states(learner.model)
    for path, start in learner._start.items():
        start.value = states[path].value


def resize(learner: Learner, batch_size: int) -> None:
    """States and example inputs of another batch; no traces."""
    with restored_on_error(module_states(learner.model).values()):
        make_states(learner.model, batch_size, learner.vmap)
        _check_axes(learner, batch_size)
    before = list(start_values(learner).values())
    start_here(learner)
    after = list(start_values(learner).values())
    # The batch axis of the inputs has the size that the first axis of the states had.
    first = lambda values: [jnp.shape(x)[:1] for x in jax.tree.leaves(values)]
    sizes = zip(first(before), first(after), strict=True)
    old = next((a for a, b in sizes if b == (batch_size,)), None)

    def resized(x: Any) -> Any:
        if not jnp.ndim(x) or jnp.shape(x)[:1] != old:
            return x
        return jnp.zeros((batch_size, *jnp.shape(x)[1:]), jnp.result_type(x))

    learner._example = jax.tree.map(resized, learner._example)
    if learner.placement is not None:
        place_states(learner)
        start_here(learner)
    learner._kept.shapes = compiled_shapes(learner)
    learner.traces.clear()


def _check_axes(learner: Learner, batch_size: int) -> None:
    """Raise if the states of another batch have more axes than a learner was compiled
    for."""
    found = state_shapes(learner.hidden_states)
    for path, shape in learner._kept.shapes.items():
        new = found.get(path, shape)
        if len(new) != len(shape):
            example = f'({batch_size}, ...)'
            raise ArgumentError(
                three_parts(
                    f'reset_state(batch_size={batch_size}) of a learner compiled '
                    'without a batch',
                    f'{path_name(path)} would get an axis of samples: {shape} was '
                    f'compiled, {new} is new, and so would the inputs',
                    f'compile(model, rule, x, batch_size={batch_size}) with an example '
                    f'x of shape {example}',
                )
            )


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
