"""SnAp-n: RTRL's influence, kept on the states that a parameter reaches within n
steps."""

from __future__ import annotations

from .numbers import as_count
from .registry import register
from .rule import CoupledWithin, Rule


@register('SnAp')
def snap(n: int = 2) -> Rule:
    """The influence of each parameter on the states that it reaches within n steps.

    What is kept is that of the paper; a loss reads it through the whole of its own
    step, and not only through what will be kept.
    """
    n = as_count('n', n)
    return Rule(
        f'SnAp({n})',
        CoupledWithin(n),
        exact_when='no parameter reaches more states than it does within `n` steps',
        cost=('B·I·H·S·(states within n steps)', 'T·B·H³·I'),
        use='small or sparse nets whose units feed each other',
    )
