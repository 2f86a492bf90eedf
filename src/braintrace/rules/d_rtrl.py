"""D-RTRL: ε_t = D_t ε_{t-1} + ∂h_t/∂θ, one trace for each weight."""

from __future__ import annotations

from .registry import register
from .rule import Rule


@register('D_RTRL')
def d_rtrl() -> Rule:
    """One trace for each weight, carried forward through the states of its own
    position."""
    return Rule(
        'D_RTRL', use='the default; spiking and gated units that have their own memory'
    )
