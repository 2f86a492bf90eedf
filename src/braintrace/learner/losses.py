"""Losses of steps and windows: their weights, and what a gradient call returns of
them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ArgumentError, InputError, three_parts
from ..program import Path


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
        raise ArgumentError(
            three_parts(
                f'mask={mask!r}',
                'it weights the losses',
                f'{length} numbers, or None where all count alike',
            )
        )
    mask = np.ones(length, dtype) if mask is None else jnp.asarray(mask, dtype)
    if mask.shape != (length,):
        raise ArgumentError(
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
        raise ArgumentError(
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


def weights_like(loss: Any, size: int, per_step: Any, per_window: Any) -> Any:
    """The weights of a window's loss: of its steps, or of the window."""
    if jnp.shape(loss) not in ((), (size,)):
        raise InputError(
            three_parts(
                f'a step_fn whose loss has shape {jnp.shape(loss)}, with '
                f'chunk_size={size}',
                'a window has one loss for each of its steps, or one for all of them',
                f'a loss of shape ({size},), or a scalar',
            )
        )
    found = per_window if jnp.ndim(loss) == 0 else per_step
    if found is None:
        per = 'window' if jnp.ndim(loss) == 0 else 'step'
        raise ArgumentError(
            three_parts(
                'a mask of another length than the losses, of which there is one a '
                f'{per}',
                'a mask weights the losses',
                f'a mask with one number for each {per}',
            )
        )
    return found


def weighted(losses: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(weights == 0, 0.0, losses) * weights)


def never_called() -> InputError:
    return InputError(
        three_parts(
            'a step_fn that never calls the learner',
            'then no step of the model is run, and there is no gradient',
            'call learner(x) (not the model) inside step_fn',
        )
    )


def check_finite_values(
    losses: jax.Array, weights: jax.Array, gradients: dict[str, Any], what: str
) -> None:
    """Raise on a loss of a step (or window) that counts, or on a gradient, that is not
    finite."""
    if isinstance(losses, jax.core.Tracer):
        raise ArgumentError(
            three_parts(
                'check_finite=True inside jit',
                'values are not known while a program is traced, so nothing could be '
                'raised',
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
        'finite inputs, a smaller rate, optax.clip_by_global_norm; mask=... for '
        'steps that do not count',
    )
