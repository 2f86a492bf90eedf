"""What callers hand to a learner, checked, and what they asked to get back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import CompilationError, one_of, three_parts
from ..program import Path
from ..program.data import MultiStepData
from ..rules import Rule, named


def results(
    gradients: dict,
    losses: jax.Array,
    cotangents: jax.Array,
    aux: Any,
    weights: Sequence[Path] | None,
    loss_output: str,
    return_value: bool,
    has_aux: bool,
) -> Any:
    """What ``etrace_grad`` was asked to return."""
    if weights is not None:
        gradients = {p: gradients[p] for p in weights}
    losses = losses if loss_output == 'per_step' else weighted(losses, cotangents)
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
            'a step gives its loss, or with has_aux=True, which fit asks for if it has metrics, a pair (loss, aux)',
            'return loss' if not has_aux else 'return loss, outputs',
        )
    )


def never_called() -> CompilationError:
    return CompilationError(
        three_parts(
            'a step_fn that never calls the learner',
            'then no step of the model is taken and nothing can be learned',
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


def check_combination(
    rule: Rule, vjp_method: str, trace: Any, trace_dtype: Any
) -> None:
    """Raise where options of a learner have no meaning together with its rule."""
    plain = rule.is_plain
    wrong = [
        (
            vjp_method == 'multi-step' and not plain,
            f'exact windows with {rule.name}',
            "a window's exact credit enters traces as the derivative of its loss, and this rule reads them otherwise",
            "vjp_method='single-step' and no chunk_size, or rule 'd_rtrl' or 'pp_prop'",
        ),
        (
            vjp_method == 'multi-step' and rule.predictor is not None,
            f"windows of one's own with {rule.name}",
            'it has windows, at whose ends its predictor stands',
            'etrace_grad or etrace_online without chunk_size and MultiStepData',
        ),
        (
            rule.deep and not plain,
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


def rules_of(asked: Any) -> list[tuple[Rule, Any]]:
    """Rules from their names, classes, configurations or learners, and what those of
    learners read."""
    if isinstance(asked, str) or not isinstance(asked, Sequence) or not asked:
        raise ValueError(
            three_parts(
                f'rules={asked!r}',
                'it is a list of rules to compare',
                "rules=['d_rtrl', 'pp_prop']",
            )
        )
    found = []
    for one in asked:
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
        standing = getattr(one, 'standing', None)
        found.append((rule, None if standing is None else standing.value))
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


def check_bytes(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(
            three_parts(f'{name}={value!r}', 'it is a number of bytes', f'{name}=2**30')
        )


def check_modulator(value: Any) -> None:
    if isinstance(value, MultiStepData):
        why = 'a window is taught by one modulator'
        instead = 'one modulator for the window, or steps one by one: learner(x, modulator=m), also in a step_fn'
        raise ValueError(
            three_parts('a modulator for each step of a window', why, instead)
        )
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
    if (
        batch_size is not None
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
    name: str, function: Callable[..., Any], given: tuple, told: str
) -> None:
    """Raise unless a function can be called with so many arguments."""
    if not callable(function):
        raise TypeError(
            three_parts(
                f'{name}={function!r}',
                f'it is called with {told}',
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
                f'{name}{signature}, to be called with {len(given)} argument(s): {told}',
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
        'weights that follow it are lost; nothing was updated',
        'finite inputs, a smaller rate, optax.clip_by_global_norm; mask=... for steps that do not count',
    )


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
                'it has no way to update weights',
                'braintools.optim.Adam(lr=1e-3), optax.adam(1e-3) or the like',
            )
        )
    return optimizer
