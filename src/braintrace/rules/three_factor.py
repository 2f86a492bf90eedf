"""Three-factor learning: the trace of D-RTRL, multiplied by a modulator of the
caller's."""

from __future__ import annotations

from ..solver import Modulated
from .parts import KappaFilter, as_filter
from .registry import register
from .rule import Rule


@register('ThreeFactor')
def three_factor(*, kappa_filter_decay: float | KappaFilter | None = None) -> Rule:
    """The trace of D_RTRL, multiplied by a modulator instead of ∂loss/∂h. The modulator
    is one number, or one number for each sample or neuron.

    The modulator is minimised, so pass the negative reward. There are three ways to set
    it:

    - a constant: ``modulator=`` of this class, or ``learner.modulator``;
    - for one step: ``learner(x, modulator=m)``, also inside ``step_fn``;
    - after the call of a step: ``learner.modulator = m``, which may use its output.

    Parameters without a trace keep the gradient of the loss. The weights of a leaky
    read-out have a trace, so they are multiplied by the modulator as well. To exclude
    them, use ``trace=lambda path: path[0] != 'out'``.
    """
    return Rule(
        'ThreeFactor',
        filter=as_filter(kappa_filter_decay),
        signal=Modulated(),
        exact_when='the modulator is ∂loss/∂h, no filter, and no position feeds '
        'another across time',
        use='a reward or a neuromodulator instead of a loss',
    )
