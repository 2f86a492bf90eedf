"""The one loop over blocks: K steps at a time, and whatever is left over.

Letters: K steps of a block; arrays of steps have time first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Body = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(carry, number of the block, its steps): the carry, and results with time first."""


def length_of(steps: Any) -> int:
    """The number of steps: the first axis of every array."""
    return len(jax.tree.leaves(steps)[0])


def over_blocks(
    body: Body, carry: Any, steps: Any, block: int, reverse: bool = False
) -> tuple[Any, Any]:
    """Run ``body`` over blocks of steps, forward or in reverse; the last block may be
    shorter.

    Results of all blocks are joined along time.
    """
    length = length_of(steps)
    count = length // block
    first = lambda x: x[: count * block].reshape(count, block, *x.shape[1:])
    whole = (jnp.arange(count), jax.tree.map(first, steps))
    rest = jax.tree.map(lambda x: x[count * block :], steps)
    scanned: list[Any] = []
    left_over: list[Any] = []

    def over_whole(carry: Any) -> Any:
        if count:
            one = lambda carry, at: body(carry, *at)
            carry, found = jax.lax.scan(one, carry, whole, reverse=reverse)
            scanned.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found))
        return carry

    def over_rest(carry: Any) -> Any:
        if length % block:
            carry, found = body(carry, count, rest)
            left_over.append(found)
        return carry

    if reverse:
        carry = over_whole(over_rest(carry))
    else:
        carry = over_rest(over_whole(carry))
    parts = [*scanned, *left_over]
    return carry, jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
