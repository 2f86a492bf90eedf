"""How the traces of a group continue from step to step, which component a signal
reads, and what leaky read-outs remember.

    Jacobian     ε_t = D_t ε_{t-1} + ∂h_t/∂θ
    ScalarLeak   ε_t = λ ε_{t-1} + ∂h_t/∂θ
    filter κ     ē_t = κ ē_{t-1} + ε_t, and modulators read ē in place of ε
    memory κ     m_t = κ (m_{t-1} + U_t ε_t + V_t ε_{t-1}),
                 U_t = ∂u_t/∂h_t, V_t = ∂u_t/∂h_{t-1}:
                 what a leaky read-out that is driven by u · W remembers. It reads
                 m_t / κ, of which the part U_t ε_t is in the signal of h already

Both add components, numbered after those of the states: one larger recursion of the
same kind,

    (ε, ē)_t = ((M, 0), (M, κ)) (ε, ē)_{t-1} + (1, 1) ∂h_t/∂θ
    (ε, m)_t = ((M, 0), (κ (U M + V), κ)) (ε, m)_{t-1} + (1, κ U) ∂h_t/∂θ

so that blocks, layouts and both passes treat every rule alike. Letters: t steps of a
block, h positions of a group; i, j, k, s components of a position; n the components
that are added; y results of taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..compiled_step import CompiledGroup, Components, Jacobian, Key, Link, Signals


@dataclass(frozen=True)
class JacobianRecursion:
    """The trace follows D, the derivative of each position's own states."""

    def pattern(self, group: CompiledGroup) -> frozenset[tuple[int, int]]:
        """(i, j) where the new component i depends on the old component j."""
        return group.pattern

    def transition(self, jacobian: Jacobian, like: Components) -> Jacobian:
        """The matrix in place of D; ``like`` has an array for each state."""
        return jacobian


@dataclass(frozen=True)
class ScalarLeak:
    """The trace decays by a number, whatever the states do; 0 keeps nothing."""

    decay: float

    def pattern(self, group: CompiledGroup) -> frozenset[tuple[int, int]]:
        """Every component depends on itself."""
        return frozenset((i, i) for i in range(group.size) if self.decay)

    def transition(self, jacobian: Jacobian, like: Components) -> Jacobian:
        """The decay at every position."""
        if not self.decay:
            return {}
        return {(i, i): jnp.full_like(x, self.decay) for i, x in like.items()}


@dataclass(frozen=True)
class Memory:
    """What a read-out remembers of a group: its decay κ, and the states that drive it.

    ``old_states`` are those that do so a step later.
    """

    kappa: float
    states: tuple[int, ...]
    old_states: tuple[int, ...] = ()

    @property
    def first(self) -> int:
        """One of them, whose type is that of the memory."""
        return (*self.states, *self.old_states)[0]


LinkSlopes = Sequence[tuple[Components, Components]]
"""(U, V) of every memory of a group."""


@dataclass(frozen=True)
class Recursion:
    """The recursion of one group's traces.

    ``every_component``: credit may come back to every old state, even to those that no
    later local step reads (exact windows). ``memories``: those of read-outs; ``slopes``
    in the methods below are (U, V) of each of them.
    """

    group: CompiledGroup
    kind: JacobianRecursion | ScalarLeak
    kappa: float | None = None
    every_component: bool = False
    memories: tuple[Memory, ...] = ()

    def _read(self, i: int) -> int:
        """The component that a signal to state i reads."""
        return i if self.kappa is None else self.group.size + i

    @property
    def numbered(self) -> list[tuple[int, Memory]]:
        """The memories with the numbers of their components."""
        first = self.group.size if self.kappa is None else 2 * self.group.size
        return list(enumerate(self.memories, first))

    # ------------------------------------------------------------ structure

    @cached_property
    def pattern(self) -> frozenset[tuple[int, int]]:
        """(i, j) where the new component i depends on the old component j."""
        own = self.kind.pattern(self.group)
        if self.kappa is None:
            driven = {(n, j) for n, m in self.numbered for i, j in own if i in m.states}
            driven |= {(n, j) for n, m in self.numbered for j in m.old_states}
            return own | driven | {(n, n) for n, _ in self.numbered}
        filtered = {(self.group.size + i, j) for i, j in own}
        return (
            own
            | filtered
            | {
                (self.group.size + i, self.group.size + i)
                for i in range(self.group.size)
            }
        )

    @cached_property
    def alive(self) -> tuple[int, ...]:
        """Components whose old values matter: to the next step's recursion, or to a
        target."""
        read = {j for _, j in self.pattern}
        direct = {self._read(j) for j in self.group.direct}
        every = range(self.group.size if self.kappa is None else 2 * self.group.size)
        states = [j for j in every if self.every_component or j in read or j in direct]
        return (*states, *(n for n, _ in self.numbered))

    @cached_property
    def closure(self) -> frozenset[tuple[int, int]]:
        """(i, k) of living components where k can matter for i now or at any later
        time."""
        found = {(i, i) for i in self.alive}
        while True:
            steps = {(k, j) for k, j in self.pattern if j in self.alive}
            more = {(i, j) for i, k in found for m, j in steps if k == m} - found
            if not more:
                return frozenset(found)
            found |= more

    def _reached(self, y: Key) -> tuple[int, ...]:
        own = self.group.reached.get(y, ())
        if self.kappa is not None:
            return (*own, *(self.group.size + i for i in own))
        return (*own, *(n for n, m in self.numbered if set(m.states) & set(own)))

    def carried(self, y: Key) -> tuple[int, ...]:
        """Living components that a tap's result can reach at any later time: its
        trace."""
        reached = self._reached(y)
        return tuple(
            s for s in self.alive if any((s, k) in self.closure for k in reached)
        )

    def after(self, y: Key) -> tuple[int, ...]:
        """Components that a tap's result or its past can reach in one step."""
        past, reached = self.carried(y), self._reached(y)
        every = sorted({*reached, *(i for i, _ in self.pattern)})
        is_next = lambda s: any((s, r) in self.pattern for r in past)
        return tuple(s for s in every if s in reached or is_next(s))

    # ------------------------------------------------------------ values

    def zero_credit(self) -> Components:
        """Zero for every living component."""
        shape, dtypes = self.group.shape, self.group.dtypes
        driver = {n: m.first for n, m in self.numbered}
        return {
            j: jnp.zeros(shape, dtypes[driver.get(j, j % self.group.size)])
            for j in self.alive
        }

    def transition(
        self, jacobian: Jacobian, like: Components, slopes: LinkSlopes = ()
    ) -> Jacobian:
        """The recursion's own matrix for all steps of a block; ``like``: an array a
        state."""
        own = self.kind.transition(jacobian, like)
        if self.kappa is None:
            found = dict(own)
            for (n, memory), slope in zip(self.numbered, slopes, strict=True):
                found[n, n] = jnp.full_like(like[memory.first], memory.kappa)
                new, old = slope
                terms = [((n, j), x) for j, x in old.items()]
                terms += [((n, j), new[i] * d) for (i, j), d in own.items() if i in new]
                for entry, x in terms:
                    x = memory.kappa * x
                    found[entry] = found[entry] + x if entry in found else x
            return found
        filtered = {(self.group.size + i, j): d for (i, j), d in own.items()}
        kept = {
            (self.group.size + i,) * 2: jnp.full_like(x, self.kappa)
            for i, x in like.items()
        }
        return own | filtered | kept

    def reading(self, signals: Components) -> Components:
        """Signals to states, by the components that they read."""
        return {self._read(i): x for i, x in signals.items()}

    def folded(
        self, credit: Mapping[int, jax.Array], slopes: LinkSlopes = ()
    ) -> Components:
        """Credit of components, added up by the states that drive them."""
        found: Components = {}
        memories = dict(zip((n for n, _ in self.numbered), slopes, strict=True))
        for i, x in credit.items():
            if i in memories:
                memory = dict(self.numbered)[i]
                new, _ = memories[i]
                parts = {s: memory.kappa * slope * x for s, slope in new.items()}
            else:
                parts = {i % self.group.size: x}
            for s, part in parts.items():
                found[s] = found[s] + part if s in found else part
        return found


# ---------------------------------------------------------------- leaky read-outs


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
