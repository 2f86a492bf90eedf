"""DNI: exact windows, and a learned predictor of the credit that follows each."""

from __future__ import annotations

from typing import Any

from ..errors import three_parts
from .numbers import as_count
from .parts import SyntheticGradient
from .registry import register
from .rule import Rule
from .trace_kinds import Window


@register('DNI', check={'window': 2}, vjp_method='multi-step')
def dni(synthesizer: Any = None, *, window: int = 10, predictor: Any = None) -> Rule:
    """Exact gradients inside windows of k steps; a predictor estimates the credit of
    the steps after a window.

    The predictor learns at every call with a sequence, from the credit at the start of
    each window. ``learner(x)`` alone is a window of one step: it uses the predictor but
    does not train it. The predicted credit is that of losses that are neither scaled
    nor masked.

    ``predictor``: a :class:`SyntheticGradient`. ``synthesizer`` is another name for it.
    """
    window = as_count('window', window)
    predictor = synthesizer if predictor is None else predictor
    predictor = SyntheticGradient() if predictor is None else predictor
    has_methods = hasattr(predictor, 'init') and hasattr(predictor, 'error_and_change')
    if not (callable(predictor) and has_methods):
        raise ValueError(
            three_parts(
                f'predictor={predictor!r}',
                'it has no init, error_and_change and __call__',
                'SyntheticGradient(width=64, rate=1.0)',
            )
        )
    return Rule(
        f'DNI({window})',
        Window(window, predictor),
        exact_when='the predictor is right',
        cost=('window·B·H·S', 'T·B·I·H'),
        use='an estimate of later credit at the end of each window',
    )
