"""e-prop: the trace of D-RTRL with the memory of the read-out, multiplied by the error
at the read-out."""

from __future__ import annotations

from typing import Any, Literal

from ..errors import three_parts
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
    """The trace of D_RTRL, filtered in time like the read-out, times the error at the
    read-out.

    ``feedback``: the weights that send the error back from the read-out. Between
    layers, the error passes back through the weights of the layers.

    - 'symmetric': the weights of the read-out.
    - 'random': fixed random weights.
    - 'adaptive': random weights that move towards those of the read-out at every call.
    - a :class:`FixedRandomFeedback`.
    - an array with the shape of the read-out weights or of their transpose, or a list
      with one array for each read-out, in the order of the program.

    ``kappa``: κ of the filter ē_t = κ ē_{t-1} + (∂u_t/∂h_t) ε_t, where u is the value
    that the read-out weights multiply, for example spikes.

    - 'readout': κ is the decay of each leaky read-out. Below a read-out without memory
      there is no filter.
    - a number: κ for all read-outs, with or without memory. In a model without a
      read-out, it filters all traces.
    - None: no filter.

    The traces of the read-out weights are never filtered. Losses that do not depend on
    the read-out, such as firing-rate penalties, use traces without the filter.

    ``kappa_filter_decay``: another name for ``kappa``; 0.0 means no filter.
    ``random_feedback_key``: an integer or a JAX key.

    With symmetric feedback and no leaky read-out, this rule is D_RTRL. With a leaky
    read-out and its κ, it is D_RTRL with ``reach='readout'``.
    """
    filter_ = _filter_of(kappa, kappa_filter_decay)
    signal = feedback_signal(feedback, random_feedback_key)
    is_off = filter_ is None
    if filter_ == 'readout':
        filter_ = None
    when = 'no position feeds another across time, leaky linear read-outs excepted'
    if is_off:
        when = 'no position feeds another across time'
    is_plain = filter_ is None and signal.is_exact
    return Rule(
        'EProp',
        filter=filter_,
        signal=signal,
        reach='local' if is_off else 'readout',
        exact_when=when
        if is_plain
        else f'{when}, symmetric feedback and no κ of its own',
        use='leaky read-outs; models of learning in the brain, with random feedback',
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
