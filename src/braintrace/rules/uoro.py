"""UORO: a rank-one estimate s̃ ⊗ θ̃ of RTRL's influence, unbiased over random signs."""

from __future__ import annotations

from typing import Any

from .numbers import as_seed
from .registry import register
from .rule import Rule
from .trace_kinds import RandomProjection


@register('UORO', vjp_method='multi-step')
def uoro(*, seed: Any = 0) -> Rule:
    """A random projection instead of the whole influence: noisy, but without bias.

    The random signs depend on ``seed`` and on the number of calls of the learner, so
    every call draws new signs.
    """
    return Rule(
        'UORO',
        RandomProjection(as_seed('seed', seed)),
        exact_when='in the mean over seeds',
        cost=('I·H + B·H·S', 'T·B·I·H'),
        use='unbiased but noisy credit between units; many small updates',
    )
