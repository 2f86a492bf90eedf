"""RTRL: G_t = J_t G_{t-1} + ∂s_t/∂θ, the influence of every parameter on every
state."""

from __future__ import annotations

from .registry import register
from .rule import Rule
from .trace_kinds import Coupled


@register('RTRL')
def rtrl() -> Rule:
    """The influence of all parameters on all states: the gradient of BPTT, computed
    forward in time, for small models."""
    return Rule(
        'RTRL',
        Coupled(),
        exact_when='always',
        cost=('B·H²·I·S', 'T·B·H³·I'),
        use='the exact reference, for small networks',
    )
