"""pp_prop, also ES-D-RTRL: ε_x = α ε_x + x_t and ε_f = α D_t ε_f + (1-α) ∂h_t/∂y_t."""

from __future__ import annotations

from typing import Any

from .numbers import as_decays
from .registry import register
from .rule import Rule
from .trace_kinds import Factorised


@register('pp_prop', 'ES_D_RTRL')
def pp_prop(decay_or_rank: Any = 0.9) -> Rule:
    """One trace for inputs and one for states, each with its own decay. The memory is
    linear in the number of neurons.

    ``decay_or_rank``: a decay in (0, 1), or a rank r that means (r - 1)/(r + 1), or a
    pair of these for inputs and states.
    """
    return Rule(
        'pp_prop',
        Factorised(as_decays('decay_or_rank', decay_or_rank)),
        exact_when='one step; or one decay, states without memory and inputs '
        'constant in time',
        cost=('B·(I + H·S)', 'T·B·I·H'),
        use='large or sparse networks: memory grows linearly with neurons; less '
        'suited to networks that store information in adaptation',
    )
