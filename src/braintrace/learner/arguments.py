"""Checks of the arguments of a learner."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ArgumentError, InputError, one_of, three_parts
from ..frontends.failures import is_nested_list
from ..program import Path
from ..program.data import MultiStepData
from ..rules import Rule, named

LOSS_OUTPUTS = ('per_step', 'masked', 'scalar', 'reduced')
"""What ``etrace_grad`` may return of the losses; the last two are the same."""


def bytes_of(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ArgumentError(
            three_parts(
                f'{name}={value!r}', 'it has no such choice', one_of(choices, value)
            )
        )


def check_combination(rule: Rule, trace: Any, trace_dtype: Any) -> None:
    """Raise where options of a learner have no meaning together with its rule."""
    wrong = [
        (
            rule.deep and not rule.is_plain,
            f"reach='deep' with {rule.name}",
            'credit from layer to layer is that of the local rule',
            "reach='local', or rule 'd_rtrl' or 'pp_prop'",
        ),
        (
            not rule.is_local and (trace != 'auto' or trace_dtype is not None),
            f'a choice of traces with {rule.name}',
            'it holds one influence of all parameters on all states',
            "trace='auto' and no trace_dtype",
        ),
    ]
    for is_wrong, *parts in wrong:
        if is_wrong:
            raise ArgumentError(three_parts(*parts))


def rules_of(given_rules: Any) -> list[tuple[Rule, Any]]:
    """Rules from their names, classes, configurations or learners, and what those of
    learners read."""
    if (
        isinstance(given_rules, str)
        or not isinstance(given_rules, Sequence)
        or not given_rules
    ):
        raise ArgumentError(
            three_parts(
                f'rules={given_rules!r}',
                'it is a list of rules to compare',
                "rules=['d_rtrl', 'pp_prop']",
            )
        )
    found = []
    for one in given_rules:
        name = one if isinstance(one, str) else getattr(one, '__name__', None)
        rule = named(name).default if name else getattr(one, 'rule', one)
        if not isinstance(rule, Rule):
            raise ArgumentError(
                three_parts(
                    f'{one!r} among rules',
                    'it is no rule',
                    "a name, as 'd_rtrl', or a learner",
                )
            )
        state = getattr(one, 'rule_state', None)
        found.append((rule, None if state is None else state.value))
    return found


def check_block(block: Any) -> None:
    if block is not None and (not isinstance(block, int) or block < 1):
        raise ArgumentError(
            three_parts(
                f'block={block!r}',
                'a block has at least one step',
                'a whole number from 1, or None',
            )
        )


def check_directions(directions: Any) -> None:
    whole = isinstance(directions, (int, np.integer))
    if not whole or isinstance(directions, bool) or directions < 0:
        raise ArgumentError(
            three_parts(
                f'directions={directions!r}',
                'it is the number of random directions that the cosine is estimated '
                'from',
                'a whole number, e.g. 8; 0 if the cosine is not needed',
            )
        )


def check_bytes(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not value >= 0:
        raise ArgumentError(
            three_parts(f'{name}={value!r}', 'it is a number of bytes', f'{name}=2**30')
        )


def check_modulator(value: Any) -> None:
    if isinstance(value, MultiStepData):
        why = 'a window has one modulator'
        fix = 'one modulator for the window, or steps one by one: learner(x, modulator=m), also in a step_fn'
        raise ArgumentError(
            three_parts('a modulator for each step of a window', why, fix)
        )
    try:
        real = not jnp.iscomplexobj(jnp.asarray(value))
    except (TypeError, ValueError):
        real = False
    if not real:
        raise ArgumentError(
            three_parts(
                f'modulator={value!r}',
                'it is a number or an array of them',
                'modulator=1.0',
            )
        )


def check_trace_dtype(dtype: Any) -> None:
    """Raise unless a type can hold traces."""
    try:
        fits = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        fits = False
    if not fits:
        raise ArgumentError(
            three_parts(
                f'trace_dtype={dtype!r}',
                'traces are real numbers',
                'jnp.bfloat16, jnp.float32 or None',
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
            raise InputError(
                three_parts(
                    f'learner(...) on an input of shape {jnp.shape(x)}',
                    f'the model was compiled for inputs of shape {jnp.shape(e)}, '
                    'batch axis included'
                    + (', and a window adds a time axis in front' if extra else ''),
                    'inputs with the axes of the compiled example; MultiStepData(x) '
                    'for a window of steps',
                )
            )


def _empty(what: str) -> ValueError:
    return ValueError(
        three_parts(
            what,
            'its batch axis or its time axis is empty, so there is nothing to learn '
            'from',
            'at least one sample in a batch and at least one step in a window',
        )
    )


def check_batch_size(batch_size: Any) -> None:
    """Raise unless it is a number of samples, or None."""
    if batch_size is None:
        return
    whole = isinstance(batch_size, (int, np.integer)) and not isinstance(
        batch_size, bool
    )
    if not whole or batch_size < 1:
        raise ArgumentError(
            three_parts(
                f'batch_size={batch_size!r}',
                'it is the number of samples in a batch',
                'a whole number of at least 1, or None for states without a batch axis',
            )
        )


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


def length_of(sequences: tuple, step_fn: Callable[..., Any] | None = None) -> int:
    """Steps of sequences that agree on them and fit the arguments of a step."""
    if step_fn is not None:
        check_call('step_fn', step_fn, sequences, 'one slice of each sequence')
    if any(map(is_nested_list, sequences)):
        raise TypeError(
            three_parts(
                'a sequence given as a nested list of numbers',
                'JAX reads a list as a container of many inputs, not as one array',
                'jnp.asarray(xs), of shape (time, batch, ...)',
            )
        )
    shapes = [jnp.shape(x) for x in jax.tree.leaves(sequences)]
    lengths = {shape[0] for shape in shapes if shape}
    if len(lengths) != 1 or 0 in lengths or () in shapes:
        raise ArgumentError(
            three_parts(
                f'sequences of shapes {shapes}',
                'time is the first axis of every sequence, and all have the same '
                'number of steps, at least one',
                'arrays of shape (time, batch, ...)',
            )
        )
    return lengths.pop()


def check_call(
    name: str, function: Callable[..., Any], given: tuple, described: str
) -> None:
    """Raise unless a function can be called with so many arguments."""
    if not callable(function):
        raise TypeError(
            three_parts(
                f'{name}={function!r}',
                f'it is called with {described}',
                f'{name}=lambda x: ...',
            )
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions of C have none
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        fix = f'a function of {len(given)} argument(s)'
        if any(isinstance(x, dict) for x in given):
            fix += "; a dictionary of arrays is one of them: lambda batch: batch['x']"
        raise TypeError(
            three_parts(
                f'{name}{signature}, to be called with {len(given)} argument(s): '
                f'{described}',
                str(error),
                fix,
            )
        ) from error


def selected(
    weights: Any, parameters: Mapping[Path, brainstate.State]
) -> dict[Any, Path] | None:
    """The paths of the parameters that were asked for, by the keys of their gradients.

    ``weights``: a list of paths or of states, one state, or a mapping of any keys to
    states, as ``learner.param_states``.
    """
    if weights is None:
        return None
    by_state = {id(state): path for path, state in parameters.items()}

    def path_of(x: Any) -> Any:
        return by_state.get(id(x), x) if isinstance(x, brainstate.State) else tuple(x)

    if isinstance(weights, brainstate.State):
        weights = [weights]
    if isinstance(weights, Mapping):
        found = {key: path_of(value) for key, value in weights.items()}
    elif isinstance(weights, Sequence):
        found = {path: path for path in map(path_of, weights)}
    else:
        found = weights
    check_paths(
        'weights',
        list(found.values()) if isinstance(found, dict) else found,
        parameters,
    )
    return found


def check_paths(name: str, given: Any, parameters: Mapping[Path, Any]) -> None:
    """Raise unless these are paths of parameters."""
    listed = isinstance(given, (Mapping, list))
    unknown = [path for path in given if path not in parameters] if listed else given
    if unknown or not listed:
        some = f'some of {", ".join(map(repr, parameters))}'
        raise ArgumentError(
            three_parts(f'{name}={unknown!r}', 'the model has no such parameters', some)
        )


def check_optimizer(optimizer: Any) -> Any:
    """Raise unless it can update weights."""
    if not hasattr(optimizer, 'update'):
        raise TypeError(
            three_parts(
                f'optimizer={optimizer!r}',
                'it has no method to update weights',
                'braintools.optim.Adam(lr=1e-3), optax.adam(1e-3) or the like',
            )
        )
    return optimizer
