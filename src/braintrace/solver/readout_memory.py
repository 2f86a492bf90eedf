"""What leaky read-outs remember of the groups that drive them, and what they send
back.

A read-out Y that decays by κ and is driven by u · W adds components m to the traces of
the group that u depends on (``recursion.py`` has their formula). Letters: t steps of
the block, h positions of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..compiled_step import (
    Components,
    Link,
    Signals,
)
from .recursion import LinkSlopes, Memory, Recursion


class MemoryRead(NamedTuple):
    """What read-outs send back to u: all of them, and those with a memory (None without
    any)."""

    every: jax.Array
    leaky: jax.Array | None


class ReadoutMemory(NamedTuple):
    """A memory of a group by which read-outs decay, and the links that lead there.

    ``links``: each with the positions of its read-out that decay so, None for all.
    """

    lower: int
    memory: Memory
    links: tuple[tuple[Link, Any], ...]


def with_memories(
    recursion: Recursion,
    read: Components,
    slopes: LinkSlopes,
    memory_reads: Sequence[MemoryRead],
) -> Components:
    """Direct reads of old states, with those of memories.

    A leaky read-out reads old states through its new one, so that no direct read of a
    target holds it. Without signals ``memory_reads`` is empty.
    """
    found = dict(recursion.reading(read))
    parts = zip(recursion.numbered, slopes, memory_reads, strict=False)
    for (n, _), (_, old), (every, leaky) in parts:
        found[n] = every
        if leaky is None:
            continue
        for j, slope in old.items():
            found[j] = found[j] + slope * leaky if j in found else slope * leaky
    return found


def decaying_part(link: Link, kappa: float, positions: Any, found: Signals) -> Signals:
    """Derivatives of a block, of which a read-out has only the positions that decay by
    one κ.

    A read of the old Y is one of the new Y a step earlier.
    """
    if link.readout is None:
        return found
    credit: Any = found.signals[link.readout][0]
    if 0 in found.reads[link.readout]:
        credit = credit + found.reads[link.readout][0] / kappa
    if positions is not None:
        credit = jnp.where(positions, credit, 0)
    signals = list(found.signals)
    signals[link.readout] = {0: credit}
    return found._replace(signals=signals)
