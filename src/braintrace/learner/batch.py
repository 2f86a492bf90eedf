"""Inputs of another batch than the one that a learner was compiled for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import jax
import jax.numpy as jnp

from .._brainstate import brainstate
from ..errors import CompilationError, InputError, three_parts
from ..program import Path

Shape = tuple[int, ...]
_OF_SHAPES = (TypeError, ValueError, CompilationError)
"""Errors of shapes that do not fit; modules of brainstate wrap them."""


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
