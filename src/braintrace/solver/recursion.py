"""How the traces of a group continue from step to step, which component a signal
reads, and what leaky read-outs remember.

    Jacobian     ε_t = D_t ε_{t-1} + ∂h_t/∂θ
    ScalarLeak   ε_t = λ ε_{t-1} + ∂h_t/∂θ
    filter κ     ē_t = κ ē_{t-1} + ε_t, and modulators read ē in place of ε
    memory κ     m_t = κ (m_{t-1} + U_t ε_t + V_t ε_{t-1}),
                 U_t = ∂u_t/∂h_t, V_t = ∂u_t/∂h_{t-1}:
                 what a leaky read-out that is driven by u · W remembers. It reads
                 m_t / κ, of which the part U_t ε_t is in the signal of h already

The filter and the memory add components, numbered after those of the states: one larger
recursion of the same kind,

    (ε, ē)_t = ((M, 0), (M, κ)) (ε, ē)_{t-1} + (1, 1) ∂h_t/∂θ
    (ε, m)_t = ((M, 0), (κ (U M + V), κ)) (ε, m)_{t-1} + (1, κ U) ∂h_t/∂θ

so that blocks, layouts and both passes treat every rule alike. With M in place of D,

    γ_{t-1} = D_tᵀ (L_t + γ_t) + R_t   credit, backward in the block
    P_t = D_K … D_{t+1} = ∂h_K/∂h_t    what traces need of each step

Values of a group are kept apart by component, so products of small matrices are written
out and entries that are zero by structure never appear. Letters: t steps of a block, h
positions of a group; i, j, k, s components of a position; n the components that are
added; y results of taps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..compiled_step import (
    CompiledGroup,
    CompiledStep,
    Components,
    Feedback,
    Jacobian,
    Key,
    Link,
    Signals,
    Values,
)
from .block import Block
from .masking import zero_at


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


class MemoryRead(NamedTuple):
    """What read-outs send back to u: all of them, and those with a memory (None without
    any)."""

    every: jax.Array
    leaky: jax.Array | None


@dataclass(frozen=True)
class Memory:
    """A component beside those of the states: a filter, or what leaky read-outs
    remember. It decays by κ and is driven by new states (``states``) and by old ones.

    ``links``: the links to read-outs that decay by κ, each with the positions that do,
    None for all. A filter has none.
    """

    kappa: float
    states: tuple[int, ...]
    old_states: tuple[int, ...] = ()
    links: tuple[tuple[Link, Any], ...] = ()

    @property
    def first(self) -> int:
        """One of its states, whose type is that of the memory."""
        return (*self.states, *self.old_states)[0]

    def slopes(
        self, constants: Values, values: Values
    ) -> tuple[Components, Components]:
        """(U, V) of one step."""
        return self.links[0][0].slopes(constants, values)

    def read(self, block: Block, learning: Signals, feedback: Feedback) -> MemoryRead:
        """What read-outs send back to what they remember, step by step."""
        every, leaky = [], []
        for link, positions in self.links:
            given = _decaying_part(link, self.kappa, positions, learning)
            pull = lambda constants, values, given, link=link: link.pull(
                constants, values, given, feedback
            )
            every.append(block.at_each_step(pull, given))
            if link.readout is not None:
                leaky.append(every[-1])
        total = sum(leaky[1:], leaky[0]) if leaky else None
        return MemoryRead(sum(every[1:], every[0]), total)


def _decaying_part(link: Link, kappa: float, positions: Any, found: Signals) -> Signals:
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


LinkSlopes = Sequence[tuple[Components, Components]]
"""(U, V) of every memory of a group."""


@dataclass(frozen=True)
class Recursion:
    """The recursion of one group's traces.

    ``every_component``: credit may come back to every old state, even to those that no
    later local step reads (exact windows). ``kappa``: of a filter; ``memories``: those
    of read-outs, where there is no filter. ``slopes`` in the methods below are (U, V)
    of each memory.
    """

    group: CompiledGroup
    kind: JacobianRecursion | ScalarLeak
    kappa: float | None = None
    every_component: bool = False
    memories: tuple[Memory, ...] = ()

    def _read(self, i: int) -> int:
        """The component that a signal to state i reads."""
        return i if self.kappa is None else self.group.size + i

    @cached_property
    def numbered(self) -> list[tuple[int, Memory]]:
        """The components beside those of the states, with their numbers."""
        size, added = self.group.size, self.memories
        if self.kappa is not None:
            added = tuple(Memory(self.kappa, (i,)) for i in range(size))
        return list(enumerate(added, size))

    # ------------------------------------------------------------ structure

    @cached_property
    def pattern(self) -> frozenset[tuple[int, int]]:
        """(i, j) where the new component i depends on the old component j."""
        own = self.kind.pattern(self.group)
        found = set(own)
        for n, memory in self.numbered:
            found |= {(n, j) for i, j in own if i in memory.states}
            found |= {(n, j) for j in (*memory.old_states, n)}
        return frozenset(found)

    @cached_property
    def alive(self) -> tuple[int, ...]:
        """Components whose old values matter: to the next step's recursion, or to a
        target."""
        read = {j for _, j in self.pattern} | {self._read(j) for j in self.group.direct}
        every = range(self.group.size)
        states = [j for j in every if self.every_component or j in read]
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
        state = {n: memory.first for n, memory in self.numbered}
        return {j: jnp.zeros(shape, dtypes[state.get(j, j)]) for j in self.alive}

    def transition(
        self, jacobian: Jacobian, like: Components, slopes: LinkSlopes = ()
    ) -> Jacobian:
        """The recursion's own matrix for all steps of a block; ``like``: an array a
        state."""
        own = self.kind.transition(jacobian, like)
        found = dict(own)
        for n, memory in self.numbered:
            found[n, n] = jnp.full_like(like[memory.first], memory.kappa)
        if self.kappa is not None:
            return found | {(self._read(i), j): d for (i, j), d in own.items()}
        for (n, memory), (new, old) in zip(self.numbered, slopes, strict=True):
            terms = [((n, j), x) for j, x in old.items()]
            terms += [((n, j), new[i] * d) for (i, j), d in own.items() if i in new]
            for entry, x in terms:
                x = memory.kappa * x
                found[entry] = found[entry] + x if entry in found else x
        return found

    def reading(self, signals: Components) -> Components:
        """Signals to states, by the components that they read."""
        return {self._read(i): x for i, x in signals.items()}

    def reads(
        self, read: Components, slopes: LinkSlopes, memory_reads: Sequence[MemoryRead]
    ) -> Components:
        """Direct reads of old states, with those of memories.

        A leaky read-out reads old states through its new one, so that no direct read of
        a target holds it. Without signals ``memory_reads`` is empty.
        """
        found = self.reading(read)
        parts = zip(self.numbered, slopes, memory_reads, strict=False)
        for (n, _), (_, old), (every, leaky) in parts:
            found[n] = every
            if leaky is None:
                continue
            for j, slope in old.items():
                found[j] = found[j] + slope * leaky if j in found else slope * leaky
        return found

    def folded(
        self, credit: Mapping[int, jax.Array], slopes: LinkSlopes = ()
    ) -> Components:
        """Credit of components, added up by the states that drive them."""
        found: Components = {}
        memories = dict(self.numbered)
        for i, x in credit.items():
            if i not in memories:
                parts = {i: x}
            elif self.kappa is not None:
                parts = {memories[i].first: x}
            else:
                new, _ = slopes[i - self.group.size]
                parts = {s: memories[i].kappa * slope * x for s, slope in new.items()}
            for s, part in parts.items():
                found[s] = found[s] + part if s in found else part
        return found

    def unit_product(self) -> Jacobian:
        """P of no steps at all."""
        group = self.group
        dtype = jnp.finfo(jnp.result_type(*group.dtypes)).dtype
        zero, one = jnp.zeros(group.shape, dtype), jnp.ones(group.shape, dtype)
        return {(i, j): one if i == j else zero for i, j in sorted(self.closure)}

    def products(
        self, transition: Jacobian, after: Jacobian | None, length: int
    ) -> tuple[Jacobian, Jacobian]:
        """P_t = ∂h_K/∂h_t of every step of a block, and P_0; ``after``: P of what
        follows the block, None for nothing."""
        unit = self.unit_product()
        if after is not None or length > 1:
            return products_to_end(transition, unit if after is None else after, length)
        # P_1 is the unit matrix and P_0 is D. As a product it would have terms 0 · D,
        # which XLA must compute, because D may be infinite.
        to_end = {(i, j): one[None] for (i, j), one in unit.items() if i == j}
        kept = {at: d for at, d in transition.items() if at in unit}
        return to_end, {at: d[0].astype(unit[at].dtype) for at, d in kept.items()}


def products_to_end(
    transition: Jacobian, after: Jacobian, length: int
) -> tuple[Jacobian, Jacobian]:
    """P_t of every step, and P_0, by the recursion P_{t-1} = P_t D_t."""

    def one(product: Jacobian, now: Jacobian) -> tuple[Jacobian, Jacobian]:
        earlier = {}
        for i, j in product:
            terms = [
                product[i, k] * d
                for (k, m), d in now.items()
                if m == j and (i, k) in product
            ]
            earlier[i, j] = _sum(terms, product[i, j])
        return earlier, product

    first, every = jax.lax.scan(one, after, transition, length, reverse=True)
    return every, first


def _sum(terms: Sequence[jax.Array], like: jax.Array) -> jax.Array:
    """The sum in the type of another array; zero without any terms."""
    if not terms:
        return jnp.zeros_like(like)
    return sum(terms[1:], terms[0]).astype(like.dtype)


# ---------------------------------------------------------------- of every group


def recursions_of(
    step: CompiledStep,
    kind: JacobianRecursion | ScalarLeak,
    kappa: float | None,
    every_component: bool,
    to_readouts: bool,
) -> tuple[Recursion, ...]:
    """The recursion of every group, see :class:`Traces`."""
    filter_, links = (None, step.links) if to_readouts else (kappa, ())
    found = []
    for g, group in enumerate(step.groups):
        memories = _memories((link for link in links if link.lower == g), kappa)
        found.append(Recursion(group, kind, filter_, every_component, memories))
    return tuple(found)


def _memories(links: Iterable[Link], kappa: float | None) -> tuple[Memory, ...]:
    """What read-outs remember of a group, one for each source u and decay."""
    found: dict[tuple, Memory] = {}
    for link in links:
        for decay, positions in link.decays if kappa is None else ((kappa, None),):
            key = (link.source, decay)
            known = found.get(key, Memory(decay, link.states, link.old_states))
            found[key] = replace(known, links=(*known.links, (link, positions)))
    return tuple(found.values())


class RecursionView(NamedTuple):
    """The derivatives of a block in the components that traces have, with the matrices
    by which the rule carries traces from step to step.

    ``link_slopes``: ∂u/∂h of what leaky read-outs remember, by group.
    """

    signals: list[Components]
    reads: list[Components]
    transitions: list[Jacobian]
    link_slopes: Sequence[LinkSlopes]


def no_credit(recursions: Sequence[Recursion]) -> list[Components]:
    """Zero for every living component of each group."""
    return [recursion.zero_credit() for recursion in recursions]


def backward_credit(
    view: RecursionView, block: Block, last: Sequence[Components]
) -> tuple[list[Components], list[Components]]:
    """γ_t of every step and group from γ at the block's end; and γ at its start."""

    def one(
        credit: list[Components], at: tuple
    ) -> tuple[list[Components], list[Components]]:
        earlier = []
        *parts, dead = at
        for later, signal, read, jacobian in zip(credit, *parts, strict=True):
            total = dict(later)
            for i, x in signal.items():
                total[i] = x + later[i] if i in later else x
            mine = {}
            for j, like in later.items():
                terms = [
                    d * total[i]
                    for (i, k), d in jacobian.items()
                    if k == j and i in total
                ]
                terms += [read[j]] if j in read else []
                mine[j] = _sum(terms, like)
            earlier.append(mine)
        return earlier if dead is None else zero_at(earlier, dead), credit

    dead = None if block.mask is None else block.mask.dead
    at = (view.signals, view.reads, view.transitions, dead)
    first, every = jax.lax.scan(one, list(last), at, block.length, reverse=True)
    return every, first
