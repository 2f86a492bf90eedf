"""Learning rules as data."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import three_parts


@dataclass(frozen=True)
class Rule:
    """What a learner carries from block to block, and how far exact reverse mode reaches.

    ``trace``: 'per_param' carries ε, 'io_factorized' its two factors with their own decays, 'none' nothing.
    ``window``: None for the local rule, 0 for one window over the whole sequence, k for windows of k steps.
    """

    name: str
    trace: str
    window: int | None
    exact_when: str
    decay: tuple[float, float] | None = None
    deep: bool = False


D_RTRL = Rule('D_RTRL', 'per_param', None, 'no position feeds another across time')
BPTT = Rule('BPTT', 'none', 0, 'always')


def pp_prop(decay_or_rank: float | int | tuple[float | int, float | int]) -> Rule:
    """Factorised traces: a decay in (0, 1), a rank r ≥ 1 that means (r - 1)/(r + 1), or a pair for (x, f)."""
    pair = decay_or_rank if isinstance(decay_or_rank, tuple) else (decay_or_rank, decay_or_rank)
    fits = lambda d: isinstance(d, (int, float)) and (d >= 1 if isinstance(d, int) else 0 <= d < 1)
    if len(pair) != 2 or not all(map(fits, pair)):
        raise ValueError(
            three_parts(
                f'decay_or_rank={decay_or_rank!r}',
                'a decay lies between 0 and 1, a rank is a whole number from 1',
                'decay_or_rank=0.9, decay_or_rank=19, or a pair (x side, f side)',
            )
        )
    decays = tuple((d - 1) / (d + 1) if isinstance(d, int) else d for d in pair)
    return Rule(
        'pp_prop',
        'io_factorized',
        None,
        'one step; or one decay, states without memory and inputs constant in time',
        decays,
    )


def tbptt(k: int) -> Rule:
    """Truncated BPTT: exact inside windows of k steps, nothing across them."""
    if not isinstance(k, int) or k < 1:
        raise ValueError(three_parts(f'k={k!r}', 'a window has at least one step', 'a whole number from 1'))
    return Rule(f'TBPTT({k})', 'none', k, 'no credit crosses a window')
