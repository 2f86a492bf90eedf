"""Three-factor learning: the trace of D-RTRL, multiplied by a modulator of the
caller's."""

from __future__ import annotations

from ..solver import Modulated
from .parts import KappaFilter, as_filter
from .registry import register
from .rule import Rule


@register('ThreeFactor')
def three_factor(*, kappa_filter_decay: float | KappaFilter | None = None) -> Rule:
    """The trace of D_RTRL multiplied by a modulator in place of ∂loss/∂h: one number,
    one for each sample or neuron.

    A constant one by ``modulator=`` here or ``learner.modulator``; another for a
    step by ``learner(x, modulator=m)``, also inside a ``step_fn``, where it may be
    computed from anything known by then, or by ``learner.modulator = m`` after the
    call, from its output too. The modulator is minimised, so pass the negative reward.
    Parameters beyond the traces keep the gradient of the loss; those of a leaky
    read-out, which is a state too, are multiplied by the modulator unless
    ``trace=lambda path: path[0] != 'out'`` leaves them out.
    """
    return Rule(
        'ThreeFactor',
        filter=as_filter(kappa_filter_decay),
        signal=Modulated(),
        exact_when='the modulator is ∂loss/∂h, no filter, and no position feeds '
        'another across time',
        use='rewards and neuromodulators in place of a loss',
    )
