"""The baselines: backpropagation through the whole sequence, or inside windows."""

from __future__ import annotations

from .numbers import as_count
from .registry import register
from .rule import Rule
from .trace_kinds import Window


@register('BPTT')
def bptt() -> Rule:
    """Backpropagation through the whole sequence: the baseline. A single call
    ``learner(x)`` is a window of one step."""
    return Rule(
        'BPTT',
        Window(),
        exact_when='always',
        cost=('T·B·H·S', 'T·B·I·H'),
        use='the baseline for comparisons; it is not online',
    )


@register('TBPTT', check={'k': 2})
def tbptt(k: int = 20) -> Rule:
    """Backpropagation inside windows of k steps. No credit passes from one window to
    another."""
    k = as_count('k', k)
    return Rule(
        f'TBPTT({k})',
        Window(k),
        exact_when='no credit crosses a window',
        cost=('k·B·H·S', 'T·B·I·H'),
        use='a baseline with bounded memory',
    )
