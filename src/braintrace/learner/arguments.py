"""Checks of what a learner and its calls are given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ArgumentError, one_of, three_parts
from ..frontends.failures import is_nested_list
from ..program.data import MultiStepData
from ..rules import Rule

LOSS_OUTPUTS = ('per_step', 'masked', 'scalar', 'reduced')
"""What ``etrace_grad`` may return of the losses; the last two are the same."""


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ArgumentError(
            three_parts(
                f'{name}={value!r}', 'it has no such choice', one_of(choices, value)
            )
        )


def is_count(value: Any, least: int = 1) -> bool:
    """Whether it is a whole number of at least so much."""
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return is_whole and value >= least


def check_options(
    rule: Rule,
    block: Any,
    passes: Any,
    trace: Any,
    trace_dtype: Any,
    max_trace_bytes: Any,
) -> None:
    """Raise unless a learner of the rule can have these options."""
    _check_combination(rule, trace, trace_dtype)
    if block is not None and not is_count(block):
        raise ArgumentError(
            three_parts(
                f'block={block!r}',
                'a block has at least one step',
                'a whole number from 1, or None',
            )
        )
    _check_trace_dtype(trace_dtype)
    if not isinstance(max_trace_bytes, (int, float)) or not max_trace_bytes >= 0:
        raise ArgumentError(
            three_parts(
                f'max_trace_bytes={max_trace_bytes!r}',
                'it is a number of bytes',
                'max_trace_bytes=2**30',
            )
        )
    if passes not in (None, 1, 2):
        why = 'a sequence is run in one pass or two'
        raise ValueError(three_parts(f'passes={passes!r}', why, '1, 2 or None'))
    if not callable(trace):
        check_choice('trace', trace, ('auto', 'marked', 'credited'))


def _check_combination(rule: Rule, trace: Any, trace_dtype: Any) -> None:
    """Raise where options of a learner have no meaning together with its rule."""
    wrong = [
        (
            rule.deep and not rule.is_plain,
            f"reach='deep' with {rule.name}",
            'from call to call, its credit is that of the local rule',
            "reach='local', or rule 'd_rtrl' or 'pp_prop'",
        ),
        (
            rule.deep and rule.multi_step,
            "reach='deep' with vjp_method='multi-step'",
            'both say which paths a window follows: the former cuts those from one '
            'unit to another of its group across time, the latter cuts none',
            "one of the two: reach='deep', or vjp_method='multi-step'",
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


def _check_trace_dtype(dtype: Any) -> None:
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


def check_modulator(value: Any) -> None:
    if isinstance(value, MultiStepData):
        why = 'a window has one modulator'
        fix = (
            'one modulator for the window, or steps one by one: '
            'learner(x, modulator=m), also in a step_fn'
        )
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


def length_of(sequences: tuple, step_fn: Callable[..., Any] | None = None) -> int:
    """Steps of sequences that agree on them and fit the arguments of a step."""
    if step_fn is not None:
        check_call('step_fn', step_fn, sequences, 'one slice of each sequence')
    check_arrays(sequences, 'a sequence', '(time, batch, ...)')
    shapes = [jnp.shape(x) for x in jax.tree.leaves(sequences)]
    lengths = {shape[0] for shape in shapes if shape}
    if len(lengths) != 1 or 0 in lengths or () in shapes:
        raise _wrong_lengths(sequences, shapes)
    return lengths.pop()


def _wrong_lengths(sequences: tuple, shapes: list[tuple[int, ...]]) -> ArgumentError:
    """The error of sequences that do not have the same number of steps."""
    listed = any(isinstance(x, (list, tuple)) and len(x) > 1 for x in sequences)
    shown = ', '.join(map(str, shapes[:4])) + (', …' if len(shapes) > 4 else '')
    fix = 'arrays of shape (time, batch, ...)'
    if listed:
        fix += '; a list with an array for each step is one sequence: jnp.stack(xs)'
    elif () not in shapes and len({shape[0] for shape in shapes}) > 1:
        # Inputs come first in most step functions.
        fix += (
            '; what is the same at all steps, as the label of a sample, is repeated: '
            f'jnp.broadcast_to(y, ({shapes[0][0]}, *y.shape))'
        )
    return ArgumentError(
        three_parts(
            f'{len(shapes)} sequences of shapes {shown}',
            'time is the first axis of every sequence, and all have the same '
            'number of steps, at least one',
            fix,
        )
    )


def check_arrays(inputs: tuple, what: str, shape: str) -> None:
    """Raise if one of the inputs is a list of numbers."""
    if any(map(is_nested_list, inputs)):
        raise TypeError(
            three_parts(
                f'{what} given as a nested list of numbers',
                'JAX reads a list as a container of many inputs, not as one array',
                f'jnp.asarray(x), of shape {shape}',
            )
        )


def check_numbers(inputs: tuple) -> None:
    """Raise if one of the inputs is, or has in it, something else than numbers."""
    for x in inputs:
        if isinstance(x, jax.Array) or (
            type(x) is np.ndarray and x.dtype.kind in 'biufc'
        ):
            continue  # nearly always, and at every step of a stream
        for leaf in jax.tree.leaves(x):
            if isinstance(leaf, np.ma.MaskedArray):
                raise ArgumentError(
                    three_parts(
                        'an input that is a masked array of NumPy',
                        'JAX has no masked arrays, and the values under the mask '
                        'would be used',
                        'x.filled(0), and the mask as an input of step_fn, or mask=... '
                        'for whole steps',
                    )
                )
            if not _is_number(leaf):
                kind = getattr(leaf, 'dtype', type(leaf).__name__)
                raise ArgumentError(
                    three_parts(
                        f'an input of type {kind}: {str(leaf)[:60]!r}',
                        'inputs are arrays of numbers',
                        'codes in place of texts; np.asarray(x, float) for numbers '
                        'in an array of objects',
                    )
                )


def _is_number(leaf: Any) -> bool:
    """Whether JAX may take it as an array; packages have types of their own."""
    if isinstance(leaf, (bool, int, float, complex)):
        return True
    dtype = getattr(leaf, 'dtype', None)
    if not isinstance(dtype, np.dtype):
        return dtype is not None or hasattr(leaf, '__jax_array__')
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_))


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


def check_optimizer(optimizer: Any) -> Any:
    """Raise unless it can update weights."""
    # A class has the methods of its instances.
    if callable(optimizer) and (
        isinstance(optimizer, type) or not hasattr(optimizer, 'update')
    ):
        name = getattr(optimizer, '__name__', type(optimizer).__name__)
        raise TypeError(
            three_parts(
                f'optimizer={name}',
                'it makes optimisers, and is not one',
                f'a call of it with a learning rate: {name}(1e-3)',
            )
        )
    if not hasattr(optimizer, 'update'):
        raise TypeError(
            three_parts(
                f'optimizer={optimizer!r}',
                'it has no method to update weights',
                'braintools.optim.Adam(lr=1e-3), optax.adam(1e-3) or the like',
            )
        )
    return optimizer
