"""Learning rules as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """What a learner carries from block to block, and how far exact reverse mode reaches.

    ``trace``: 'per_param' carries ε, 'none' carries nothing. ``window``: None for the local rule, 0 for
    one window over the whole sequence, k for windows of k steps.
    """

    name: str
    trace: str
    window: int | None
    exact_when: str


D_RTRL = Rule('D_RTRL', 'per_param', None, 'no position feeds another across time')
BPTT = Rule('BPTT', 'none', 0, 'always')


def tbptt(k: int) -> Rule:
    """Truncated BPTT: exact inside windows of k steps, nothing across them."""
    return Rule(f'TBPTT({k})', 'none', k, 'no credit crosses a window')
