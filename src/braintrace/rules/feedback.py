"""Feedback: by which weights errors come back from a read-out."""

from __future__ import annotations

from typing import Any

from ..errors import three_parts
from ..solver import RandomFeedback, Symmetric
from .parts import FixedRandomFeedback


def feedback_signal(
    feedback: str | FixedRandomFeedback, key: Any = 0
) -> Symmetric | RandomFeedback:
    """The signal for an option ``feedback=``; ``key`` starts the random weights."""
    if isinstance(feedback, str) and feedback == 'symmetric':
        return Symmetric()
    if isinstance(feedback, str) and feedback == 'random':
        feedback = FixedRandomFeedback(key)
    elif isinstance(feedback, str) and feedback == 'adaptive':
        feedback = FixedRandomFeedback(key, align=0.999)
    if not isinstance(feedback, FixedRandomFeedback):
        raise ValueError(
            three_parts(
                f'feedback={feedback!r}',
                'the weights back are drawn, one array for each read-out and of its shape',
                "one of 'symmetric', 'random', 'adaptive', or "
                'FixedRandomFeedback(key, scale, align)',
            )
        )
    return RandomFeedback(feedback, feedback.align)
