"""SnAp-n: RTRL's influence, kept on the states that a parameter reaches within n
steps."""

from __future__ import annotations

from .numbers import as_count
from .registry import register
from .rule import Rule
from .trace_kinds import Coupled


@register('SnAp')
def snap(n: int = 2) -> Rule:
    """The influence of each parameter on the states that it reaches within n steps.

    The stored influence is that of the paper. In the step of a loss, it is used along
    all paths to the loss, not only along the paths that the mask keeps.
    """
    n = as_count('n', n)
    return Rule(
        f'SnAp({n})',
        Coupled(n),
        exact_when='no parameter reaches more states than it does within `n` steps',
        cost=('B·I·H·S·(states within n steps)', 'T·B·H³·I'),
        use='small or sparse networks with recurrent connections',
    )
