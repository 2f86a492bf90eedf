"""Feedback: by which weights errors come back from a read-out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import three_parts
from ..solver import RandomFeedback, Symmetric
from .parts import FixedRandomFeedback, GivenFeedback

FeedbackOption = str | FixedRandomFeedback | jax.Array | np.ndarray | Sequence[Any]
"""How errors come back: by name, by weights that are drawn, or by arrays."""


def feedback_signal(
    feedback: FeedbackOption, key: Any = 0
) -> Symmetric | RandomFeedback:
    """The signal for an option ``feedback=``; ``key`` starts the random weights."""
    if isinstance(feedback, str) and feedback == 'symmetric':
        return Symmetric()
    if isinstance(feedback, str) and feedback == 'random':
        feedback = FixedRandomFeedback(key)
    elif isinstance(feedback, str) and feedback == 'adaptive':
        feedback = FixedRandomFeedback(key, align=0.999)
    if isinstance(feedback, FixedRandomFeedback):
        return RandomFeedback(feedback, feedback.align)
    arrays = list(feedback) if isinstance(feedback, (list, tuple)) else [feedback]
    if not arrays or not all(map(_is_weights, arrays)):
        raise ValueError(
            three_parts(
                f'feedback={feedback!r}',
                'errors come back by weights that are drawn, or by an array for each '
                'read-out',
                "one of 'symmetric', 'random', 'adaptive', "
                'FixedRandomFeedback(key, scale, align), or a matrix in the shape of '
                "the read-out's weights",
            )
        )
    return RandomFeedback(GivenFeedback(arrays))


def _is_weights(x: Any) -> bool:
    """Whether something is an array of numbers that is known now."""
    known = isinstance(x, (np.ndarray, jax.Array))
    if not known or isinstance(x, jax.core.Tracer) or x.ndim < 2:
        return False
    return bool(jnp.issubdtype(x.dtype, jnp.number))
