"""e-prop: the trace of D-RTRL with the memory of the read-out, multiplied by the error
at the read-out."""

from __future__ import annotations

from typing import Any, Literal

from ..errors import three_parts
from ..solver import Symmetric
from .feedback import FeedbackOption, feedback_signal
from .parts import KappaFilter, as_filter
from .registry import register
from .rule import Rule


@register('EProp')
def eprop(
    feedback: FeedbackOption = 'symmetric',
    kappa_filter_decay: float | KappaFilter | None = None,
    random_feedback_key: Any = 0,
    kappa: Literal['readout'] | float | KappaFilter | None = 'readout',
) -> Rule:
    """The trace of D_RTRL, filtered in time as the read-out filters, times the error at
    the read-out.

    ``feedback``: 'symmetric' sends the error back by the read-out's own weights,
    'random' by fixed random ones, 'adaptive' by random ones whose distance to the
    read-out's shrinks with every call; a :class:`FixedRandomFeedback`; an array in the
    shape of the read-out's weights or of their transpose, or a list of such arrays, one
    for each read-out in the order of the program. Between layers it goes back by their
    own weights.

    ``kappa``: κ of the filter ē_t = κ ē_{t-1} + (∂u_t/∂h_t) ε_t, where u is what the
    read-out's weights multiply (spikes, for instance). 'readout' takes κ from leaky
    read-outs, one for each decay there is, and filters nothing below a read-out without
    memory. A number is used for all read-outs, with memory or without; None means no
    filter. The traces of the read-out's own weights and losses that do not pass the
    read-out, as firing-rate penalties, are never filtered. ``kappa_filter_decay``: the
    same by another name, where 0.0 means no filter. In a model without a read-out a
    number filters all traces.
    ``random_feedback_key``: a whole number or a key of JAX.

    With symmetric feedback and no leaky read-out this is D_RTRL; with a leaky one and
    κ from it, D_RTRL with ``reach='readout'``.
    """
    filter_ = _filter_of(kappa, kappa_filter_decay)
    signal = feedback_signal(feedback, random_feedback_key)
    is_off = filter_ is None
    if filter_ == 'readout':
        filter_ = None
    when = 'no position feeds another across time, leaky linear read-outs excepted'
    if is_off:
        when = 'no position feeds another across time'
    is_plain = filter_ is None and signal == Symmetric()
    return Rule(
        'EProp',
        filter=filter_,
        signal=signal,
        reach='local' if is_off else 'readout',
        exact_when=when
        if is_plain
        else f'{when}, symmetric feedback and no κ of its own',
        use='leaky read-outs; biological plausibility: no weights sent back',
    )


def _filter_of(kappa: Any, decay: Any) -> Any:
    """'readout', a filter, or None for no filter."""
    if decay is None:
        return kappa if kappa == 'readout' else as_filter(kappa)
    if kappa != 'readout':
        raise ValueError(
            three_parts(
                f'EProp(kappa={kappa!r}, kappa_filter_decay={decay!r})',
                'both are the κ of one filter',
                'one of them',
            )
        )
    return as_filter(decay)
