"""OTTT: a presynaptic trace ε_x = λ ε_x + x_t; the other side is that of the step
itself."""

from __future__ import annotations

from ..solver import ScalarLeak
from .numbers import as_decay
from .registry import register
from .rule import Rule
from .trace_kinds import Factorised


@register('OTTT')
def ottt(leak: float = 0.9) -> Rule:
    """A leaky trace of the inputs, times the derivative of the current step. The memory
    is linear in the number of inputs."""
    return Rule(
        'OTTT',
        Factorised((as_decay('leak', leak), 0.0)),
        ScalarLeak(0.0),
        exact_when='units whose only memory is a leak by `leak`, with inputs added '
        'linearly',
        cost=('B·I', 'T·B·I·H'),
        use='feed-forward spiking layers, with the least memory',
    )
