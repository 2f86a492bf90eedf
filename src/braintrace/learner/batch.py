"""Inputs that do not fit what a learner is or was compiled for: their batch, their
axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from .._brainstate import brainstate
from ..errors import (
    ArgumentError,
    CompilationError,
    InputError,
    is_explained,
    three_parts,
)
from ..program import Path
from ..source_lines import failing_line

Shape = tuple[int, ...]
_OF_SHAPES = (TypeError, ValueError, CompilationError)
"""Errors of shapes that do not fit; modules of brainstate wrap them."""


def check_batch(inputs: tuple, batch_size: int | None) -> None:
    """Raise if an example input holds no sample, or none has an axis of the size of the
    batch."""
    shapes = [jnp.shape(x) for x in jax.tree.leaves(inputs) if jnp.ndim(x)]
    if any(shape[0] == 0 for shape in shapes):
        raise _empty(f'example inputs of shapes {shapes}')
    # One sample cannot share its input with another.
    if (
        batch_size not in (None, 1)
        and shapes
        and not any(batch_size in shape for shape in shapes)
    ):
        raise ArgumentError(
            three_parts(
                f'batch_size={batch_size} with example inputs of shapes {shapes}',
                'no input has an axis of that size, so all samples would silently '
                'share one input',
                f'example inputs with their batch axis, e.g. ({batch_size}, ...); or '
                'vmap=True for one sample',
            )
        )


def check_rank(args: tuple, example: tuple, extra: int) -> None:
    """Raise if an input has lost or gained an axis since the model was compiled."""
    got, wanted = jax.tree.leaves(args), jax.tree.leaves(example)
    if len(got) != len(wanted):
        return
    for x, e in zip(got, wanted, strict=True):
        # Time, if this is a window, and the batch: an axis that was compiled with
        # samples must have some.
        if 0 in jnp.shape(x)[: extra + 1] and 0 not in jnp.shape(e)[:1]:
            raise _empty(f'learner(...) on an input of shape {jnp.shape(x)}')
        if jnp.ndim(x) != jnp.ndim(e) + extra:
            raise AxesError(jnp.shape(x), jnp.shape(e), bool(extra))


def _empty(what: str) -> ValueError:
    return ValueError(
        three_parts(
            what,
            'its batch axis or its time axis is empty, so there is nothing to learn '
            'from',
            'at least one sample in a batch and at least one step in a window',
        )
    )


class AxesError(InputError):
    """An input with more or fewer axes than the one that a learner was compiled for."""

    def __init__(self, got: Shape, compiled: Shape, window: bool, stream: bool = False):
        self.got, self.compiled, self.window = got, compiled, window
        written, fix = 'learner(...)', 'inputs with the axes of the compiled example'
        if stream and len(got) == len(compiled) + 1:
            written = 'one step of a stream'
            fix = (
                'one step a call: stream(xs[0], ys[0]); or '
                f'learner.stream(step_fn, optimizer, chunk={got[0]}), which takes '
                'several'
            )
        elif not stream and got == compiled[1:]:
            fix = (
                'inputs with a batch axis; and sequences with a time axis before it: '
                'learner.evaluate(x[None]) for a single step, or learner(x)'
            )
        elif not stream:
            fix += '; MultiStepData(x) for a window of steps'
        super().__init__(
            three_parts(
                f'{written} on an input of shape {got}',
                f'the model was compiled for inputs of shape {compiled}, batch axis '
                'included'
                + (', and a window adds a time axis in front' if window else ''),
                fix,
            )
        )

    def in_stream(self) -> AxesError:
        """The same, for a call of a stream."""
        return AxesError(self.got, self.compiled, self.window, stream=True)


class BatchError(InputError):
    """Inputs of another batch than the one that a learner was compiled for."""

    def __init__(
        self, compiled: int, got: int, batch_first: bool = False, trained: bool = False
    ):
        self.compiled, self.got, self.batch_first = compiled, got, batch_first
        why = (
            f'its states and traces have an axis of {compiled} samples; the batch is '
            'the first axis of an input, and of a sequence the second, after time'
        )
        fix = (
            f'learner.reset_state(batch_size={got}) before this call, or inputs of '
            f'batch {compiled}'
        )
        if trained:
            fix = (
                'batches of one size in a training: drop_last=True of a loader leaves '
                f'out a last batch of {got}; or a learner compiled for batch {got}'
            )
        if batch_first:
            why += (
                f'. The first axis of the sequences has {compiled}, so they may have '
            )
            why += 'the batch first'
            fix = (
                'time first: xs.swapaxes(0, 1), and from a loader '
                'braintrace.Batches(loader, lambda x, y: (x.swapaxes(0, 1), ...)); if '
                f'time is first already, {fix}'
            )
        written = f'a learner compiled for batch {compiled}, got {got}'
        super().__init__(three_parts(written, why, fix))

    def of_sequences(self, sequences: tuple) -> BatchError:
        """The same, for slices of these sequences."""
        lengths = {jnp.shape(x)[:1] for x in jax.tree.leaves(sequences)}
        return BatchError(self.compiled, self.got, lengths == {(self.compiled,)})

    def in_training(self) -> BatchError:
        """The same, for a batch that a training takes from its data."""
        return BatchError(self.compiled, self.got, self.batch_first, trained=True)


def batch_of(example: tuple, states: Mapping[Path, Shape]) -> int | None:
    """The batch size of a learner: the first axis that all of its hidden states share
    with an example input; None if there is none."""
    sizes = {shape[:1] for shape in states.values()}
    if len(sizes) != 1:
        return None
    (size,) = sizes
    # A state of one axis may be one of units without a batch, as an input of one axis
    # may be one of channels.
    batched = all(len(shape) > 1 for shape in states.values())
    shared = any(jnp.shape(x)[:1] == size for x in jax.tree.leaves(example))
    return size[0] if size and batched and shared else None


@contextmanager
def batch_explained(
    args: tuple,
    example: tuple,
    compiled_states: Mapping[Path, Shape],
    states: Callable[[], Mapping[Path, Shape]],
    time: bool,
) -> Iterator[None]:
    """Around one call: if it fails on inputs that differ from the example in their
    batch only, the error says so.

    Inputs of another batch are not refused before: a model may broadcast them.
    ``states``: the shapes of the states as they are. ``time``: the inputs have a time
    axis in front.
    """
    compiled = batch_of(example, compiled_states)
    got = None if compiled is None else _other_batch(args, example, compiled, time)
    if compiled is None or got is None:
        with inputs_explained(args, example, time):
            yield
        return
    wrong = BatchError(compiled, got)
    try:
        yield
    except (*_OF_SHAPES, brainstate.BrainStateError) as error:
        raise wrong from error
    # States of one sample may have been broadcast to the batch of the inputs.
    if any(states().get(path) != shape for path, shape in compiled_states.items()):
        raise wrong


@contextmanager
def inputs_explained(args: tuple, example: tuple, time: bool) -> Iterator[None]:
    """Around one call: if it fails on inputs of another number, shape or type than the
    example, the error says which were expected."""
    try:
        yield
    except (*_OF_SHAPES, AttributeError, brainstate.BrainStateError) as error:
        # What the step itself raised. An error without it is about something else.
        cause = error.__cause__ if is_explained(error) else error
        got, wanted = (_shapes_text(x) for x in (args, example))
        kinds: tuple = (TypeError, ValueError)
        if not _same_structure(args, example):
            kinds = (*kinds, AttributeError)  # as a list, which has no ndim
        if not isinstance(cause, kinds) or got == wanted:
            raise
        why = f'the model was compiled for {wanted}'
        if time:
            why += ', and a window adds a time axis in front'
        if len(args) == len(example):
            text = str(cause).replace('\n', '\n    ')
            why += f'; its step fails with {type(cause).__name__}: {text}'
            why += failing_line(cause)
        fix = _fix_of_inputs(args, example, time)
        raise InputError(three_parts(f'learner(...) on {got}', why, fix)) from cause


def _fix_of_inputs(args: tuple, example: tuple, time: bool) -> str:
    """The advice for inputs that are not like the compiled example."""
    if len(args) != len(example):
        return (
            'the inputs of the model alone, as in compile; targets belong in a step_fn '
            'that calls learner(x)'
        )
    if not _same_structure(args, example):
        return (
            'one array for each input of the compiled example: jnp.asarray(x) of a '
            'list, jnp.stack(xs) of a list of steps'
        )
    shapes = [jnp.shape(x)[int(time) :] for x in jax.tree.leaves(args)]
    if shapes == [jnp.shape(x) for x in jax.tree.leaves(example)]:
        kinds = {str(jnp.result_type(x)) for x in jax.tree.leaves(example)}
        return f'inputs of the compiled type: x.astype({min(kinds)!r})'
    return 'inputs of the compiled shape: its axes in this order and of these sizes'


def _same_structure(args: tuple, example: tuple) -> bool:
    found: list[Any] = [jax.tree.structure(x) for x in (args, example)]
    return found[0] == found[1]


def _shapes_text(inputs: tuple) -> str:
    """The shapes and types of inputs."""
    if not inputs:
        return 'no input'

    def shown(x: Any) -> str:
        leaves = jax.tree.leaves(x)
        if len(leaves) != 1:
            return f'a {type(x).__name__} of {len(leaves)} arrays'
        return f'shape {jnp.shape(leaves[0])} {jnp.result_type(leaves[0])}'

    what = 'an input' if len(inputs) == 1 else 'inputs'
    return f'{what} of {" and ".join(map(shown, inputs))}'


def _other_batch(args: tuple, example: tuple, compiled: int, time: bool) -> int | None:
    """The batch size of inputs that differ from an example in nothing else."""
    given, wanted = jax.tree.leaves(args), jax.tree.leaves(example)
    if len(given) < len(wanted):
        return None
    # Targets may follow the inputs of the model.
    shapes = [jnp.shape(x)[int(time) :] for x in given]
    found = None
    for shape, expected in zip(shapes, map(jnp.shape, wanted), strict=False):
        if shape == expected:
            continue
        if shape[1:] != expected[1:] or expected[:1] != (compiled,) or not shape:
            return None
        found = shape[0]
    return found
