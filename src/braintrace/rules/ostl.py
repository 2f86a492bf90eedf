"""OSTL, with the Jacobian of the unit's own states or without."""

from __future__ import annotations

from typing import Any

from ..solver import ScalarLeak
from .numbers import as_decays
from .registry import register
from .rule import Rule
from .trace_kinds import Factorised


@register('OSTLRecurrent')
def ostl_recurrent() -> Rule:
    """Online spatio-temporal learning with the Jacobian of the states of each unit: the
    trace of D_RTRL."""
    return Rule('OSTLRecurrent', use='the same as D_RTRL, under the name of its paper')


@register('OSTLFeedforward')
def ostl_feedforward(decay_or_rank: Any = 1e-6) -> Rule:
    """One trace for inputs and one for states, which decay by a fixed number. With the
    default number they contain only the last step."""
    return Rule(
        'OSTLFeedforward',
        Factorised(as_decays('decay_or_rank', decay_or_rank)),
        ScalarLeak(1.0),
        exact_when='one step; or units whose only memory is a leak by the decay, with '
        'inputs added linearly',
        cost=('B·(I + H·S)', 'T·B·I·H'),
        use='feed-forward spiking layers',
    )
