"""UORO: a rank-one estimate s̃ ⊗ θ̃ of RTRL's influence, unbiased over random signs."""

from __future__ import annotations

from typing import Any

from .numbers import as_seed
from .registry import register
from .rule import RandomProjection, Rule


@register('UORO', vjp_method='multi-step')
def uoro(*, seed: Any = 0) -> Rule:
    """A random projection in place of the whole influence: noisy, but without bias.

    No two calls draw the same: the signs come from ``seed`` and from how often the
    learner was called.
    """
    return Rule(
        'UORO',
        RandomProjection(as_seed('seed', seed)),
        exact_when='in the mean over seeds',
        cost=('I·H + B·H·S', 'T·B·I·H'),
        use='unbiased credit across positions at the cost of noise; many small updates',
    )
