"""RFLO: ε_t = λ ε_{t-1} + ∂h_t/∂θ, one trace for each weight that leaks by a number."""

from __future__ import annotations

from typing import Any

from ..solver import ScalarLeak
from .feedback import FeedbackOption, feedback_signal
from .numbers import as_decay
from .registry import register
from .rule import Rule


@register('RFLO')
def rflo(
    leak: float = 0.9,
    feedback: FeedbackOption = 'symmetric',
    random_feedback_key: Any = 0,
) -> Rule:
    """Random feedback local online learning: one trace for each weight, which decays by
    a fixed number.

    ``feedback='random'`` is the rule of the paper. See :class:`EProp` for other values.
    """
    signal = feedback_signal(feedback, random_feedback_key)
    when = 'units that leak by `leak`, with no other memory and no weights between them'
    return Rule(
        'RFLO',
        recursion=ScalarLeak(as_decay('leak', leak)),
        signal=signal,
        exact_when=when if signal.is_exact else f'{when}, symmetric feedback',
        use='leaky rate units; comparisons',
    )
