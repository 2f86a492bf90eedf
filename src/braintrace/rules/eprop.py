"""e-prop: the trace of D-RTRL, low-passed by κ, multiplied by the error at the
read-out."""

from __future__ import annotations

from typing import Any

from ..solver import Symmetric
from .feedback import feedback_signal
from .parts import FixedRandomFeedback, KappaFilter, as_filter
from .registry import register
from .rule import Rule


@register('EProp')
def eprop(
    feedback: str | FixedRandomFeedback = 'symmetric',
    kappa_filter_decay: float | KappaFilter | None = None,
    random_feedback_key: Any = 0,
) -> Rule:
    """The trace of D_RTRL, low-passed, multiplied by the error at the read-out.

    ``feedback``: 'symmetric' sends the error back by the read-out's own weights,
    'random' by fixed random ones, 'adaptive' by random ones whose distance to the
    read-out's shrinks with every call; or a :class:`FixedRandomFeedback`. Between
    layers it goes back by their own weights. ``kappa_filter_decay``: the filter's κ;
    None and 0.0 mean no filter. ``random_feedback_key``: a whole number or a key of
    JAX.
    """
    kappa = as_filter(kappa_filter_decay)
    signal = feedback_signal(feedback, random_feedback_key)
    when = 'no position feeds another across time'
    is_plain = kappa is None and signal == Symmetric()
    return Rule(
        'EProp',
        filter=kappa,
        signal=signal,
        exact_when=when if is_plain else f'{when}, symmetric feedback and no filter',
        use='biological plausibility: no weights sent back, leaky read-outs',
    )
