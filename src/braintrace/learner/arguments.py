"""Checks of the arguments of a learner, and the form of its results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from ..errors import CompilationError, one_of, three_parts
from ..frontends.brainstate import is_nested_list
from ..program import Path
from ..program.data import MultiStepData
from ..rules import Rule, named

LOSS_OUTPUTS = ('per_step', 'masked', 'scalar', 'reduced')
"""What ``etrace_grad`` may return of the losses; the last two are the same."""


def results(
    gradients: dict,
    losses: jax.Array,
    cotangents: jax.Array,
    aux: Any,
    mask: Any,
    weights: Mapping[Any, Path] | None,
    loss_output: str,
    return_value: bool,
    has_aux: bool,
) -> Any:
    """What ``etrace_grad`` was asked to return; ``weights``: paths by the keys that
    their gradients are given by."""
    if weights is not None:
        gradients = {key: gradients[path] for key, path in weights.items()}
    if loss_output == 'masked' and mask is not None:
        mask = jnp.asarray(mask, losses.dtype)
        losses = jnp.where(mask == 0, 0.0, losses) * mask
    elif loss_output in ('scalar', 'reduced'):
        losses = weighted(losses, cotangents)
    results = (
        gradients,
        *([losses] if return_value else []),
        *([aux] if has_aux else []),
    )
    return results if len(results) > 1 else gradients


def loss_weights(
    mask: Any, length: int, what: str, reduction: str = 'sum'
) -> tuple[Any, Any]:
    """What each loss counts, 1 or its mask, divided by max(Σ mask, 1) for a mean; and
    what a mask of 1 counts."""
    dtype = jnp.result_type(float)
    try:
        real = mask is None or not jnp.iscomplexobj(jnp.asarray(mask))
    except (TypeError, ValueError):
        real = False
    if not real:
        raise ValueError(
            three_parts(
                f'mask={mask!r}',
                'it weights the losses',
                f'{length} numbers, or None where all count alike',
            )
        )
    mask = np.ones(length, dtype) if mask is None else jnp.asarray(mask, dtype)
    if mask.shape != (length,):
        raise ValueError(
            three_parts(
                f'a mask of shape {mask.shape}',
                f'a mask weights the losses, and there are {length} {what}',
                f'an array of shape ({length},)',
            )
        )
    if reduction == 'sum':
        return mask, np.ones((), dtype)
    total = (
        np.asarray(length, dtype)
        if isinstance(mask, np.ndarray)
        else jnp.maximum(mask.sum(), 1.0)
    )
    return mask / total, 1 / total


def in_windows(sequences: tuple, length: int, size: Any) -> tuple:
    """Sequences cut into windows of ``size`` steps."""
    if not isinstance(size, int) or size < 1 or length % size:
        raise ValueError(
            three_parts(
                f'{length} steps with chunk_size={size}',
                'step_fn is called with whole windows of that many steps',
                'a sequence whose length is a multiple of chunk_size',
            )
        )
    cut = lambda x: jnp.asarray(x).reshape(-1, size, *jnp.shape(x)[1:])
    return jax.tree.map(cut, sequences)


def window_weights(
    mask: Any, length: int, size: int, reduction: str
) -> tuple[Any, Any]:
    """What the losses of windows count, if they are of steps and if they are of whole
    windows; None where a mask fits the other."""
    windows = length // size
    by_window = mask is not None and jnp.shape(mask) == (windows,)
    per_step = per_window = None
    if not by_window:
        per_step, _ = loss_weights(mask, length, 'steps', reduction)
        per_step = per_step.reshape(windows, size)
    if mask is None or by_window:
        per_window, _ = loss_weights(mask, windows, 'windows', reduction)
    return per_step, per_window


def spared(window: tuple, weights: Any) -> tuple:
    """A window without NaN in the slices of steps that do not count: in the derivative
    of a user's loss 0 · NaN would be NaN."""
    if weights is None:
        return window

    def finite(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        silent = (weights == 0).reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(silent & jnp.isnan(x), jnp.zeros_like(x), x)

    return jax.tree.map(finite, window)


def weights_like(loss: Any, size: int, per_step: Any, per_window: Any) -> Any:
    """The weights of a window's loss: of its steps, or of the window."""
    if jnp.shape(loss) not in ((), (size,)):
        raise CompilationError(
            three_parts(
                f'a step_fn whose loss has shape {jnp.shape(loss)}, with chunk_size={size}',
                'a window has one loss for each of its steps, or one for all of them',
                f'a loss of shape ({size},), or a scalar',
            )
        )
    found = per_window if jnp.ndim(loss) == 0 else per_step
    if found is None:
        per = 'window' if jnp.ndim(loss) == 0 else 'step'
        raise ValueError(
            three_parts(
                f'a mask of another length than the losses, of which there is one a {per}',
                'a mask weights the losses',
                f'a mask with one number for each {per}',
            )
        )
    return found


def check_aux(structure: Any, has_aux: bool) -> None:
    """Raise unless a step_fn returned a loss alone, or with ``has_aux`` a pair."""
    outputs = jax.tree.unflatten(structure, range(structure.num_leaves))
    if (
        isinstance(outputs, tuple) and len(outputs) == 2
        if has_aux
        else structure.num_leaves == 1
    ):
        return
    raise CompilationError(
        three_parts(
            f'a step_fn that returns {structure} with has_aux={has_aux}',
            'a step gives its loss, or with has_aux=True, which fit sets if it has metrics, a pair (loss, aux)',
            'return loss' if not has_aux else 'return loss, outputs',
        )
    )


def never_called() -> CompilationError:
    return CompilationError(
        three_parts(
            'a step_fn that never calls the learner',
            'then no step of the model is run, and there is no gradient',
            'call learner(x) (not the model) inside step_fn',
        )
    )


def bytes_of(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def weighted(losses: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(weights == 0, 0.0, losses) * weights)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(
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
            raise ValueError(three_parts(*parts))


def rules_of(given_rules: Any) -> list[tuple[Rule, Any]]:
    """Rules from their names, classes, configurations or learners, and what those of
    learners read."""
    if (
        isinstance(given_rules, str)
        or not isinstance(given_rules, Sequence)
        or not given_rules
    ):
        raise ValueError(
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
            raise ValueError(
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
        raise ValueError(
            three_parts(
                f'block={block!r}',
                'a block has at least one step',
                'a whole number from 1, or None',
            )
        )


def check_directions(directions: Any) -> None:
    whole = isinstance(directions, (int, np.integer))
    if not whole or isinstance(directions, bool) or directions < 0:
        raise ValueError(
            three_parts(
                f'directions={directions!r}',
                'it is the number of random directions that the cosine is estimated from',
                'a whole number, e.g. 8; 0 if the cosine is not needed',
            )
        )


def check_bytes(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(
            three_parts(f'{name}={value!r}', 'it is a number of bytes', f'{name}=2**30')
        )


def check_modulator(value: Any) -> None:
    if isinstance(value, MultiStepData):
        why = 'a window has one modulator'
        fix = 'one modulator for the window, or steps one by one: learner(x, modulator=m), also in a step_fn'
        raise ValueError(three_parts('a modulator for each step of a window', why, fix))
    try:
        real = not jnp.iscomplexobj(jnp.asarray(value))
    except (TypeError, ValueError):
        real = False
    if not real:
        raise ValueError(
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
        raise ValueError(
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
            raise CompilationError(
                three_parts(
                    f'learner(...) on an input of shape {jnp.shape(x)}',
                    f'the model was compiled for inputs of shape {jnp.shape(e)}, batch axis included'
                    + (', and a window adds a time axis in front' if extra else ''),
                    'inputs with the axes of the compiled example; MultiStepData(x) for a window of steps',
                )
            )


def _empty(what: str) -> ValueError:
    return ValueError(
        three_parts(
            what,
            'its batch axis or its time axis is empty, so there is nothing to learn from',
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
        raise ValueError(
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
        raise ValueError(
            three_parts(
                f'batch_size={batch_size} with example inputs of shapes {shapes}',
                'no input has an axis of that size, so all samples would silently share one input',
                f'example inputs with their batch axis, e.g. ({batch_size}, ...); or vmap=True for one sample',
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
        raise ValueError(
            three_parts(
                f'sequences of shapes {shapes}',
                'time is the first axis of every sequence, and all have the same number of steps, at least one',
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
        raise TypeError(
            three_parts(
                f'{name}{signature}, to be called with {len(given)} argument(s): {described}',
                str(error),
                f'a function of {len(given)} argument(s)',
            )
        ) from error


def check_finite_values(
    losses: jax.Array, weights: jax.Array, gradients: dict[str, Any], what: str
) -> None:
    """Raise on a loss of a step (or window) that counts, or on a gradient, that is not
    finite."""
    if isinstance(losses, jax.core.Tracer):
        raise ValueError(
            three_parts(
                'check_finite=True inside jit',
                'values are not known while a program is traced, so nothing could be raised',
                'the call outside jit (it is compiled anyway), or check_finite=False',
            )
        )
    bad = ~jnp.isfinite(losses) & (weights != 0)
    if bool(jnp.any(bad)):
        raise FloatingPointError(
            _not_finite(f'the loss of {what} {int(jnp.argmax(bad))}')
        )
    for name, gradient in gradients.items():
        if not all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(gradient)):
            raise FloatingPointError(_not_finite(f'the gradient of {name}'))


def _not_finite(what: str) -> str:
    return three_parts(
        f'{what} is not finite',
        'an update by it would make the weights non-finite; nothing was updated',
        'finite inputs, a smaller rate, optax.clip_by_global_norm; mask=... for steps that do not count',
    )


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
        raise ValueError(
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
