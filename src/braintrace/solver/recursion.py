"""How the traces of a group continue from step to step, and credit in reverse.

    Jacobian     ε_t = D_t ε_{t-1} + ∂h_t/∂θ
    ScalarLeak   ε_t = λ ε_{t-1} + ∂h_t/∂θ

A memory m_t = κ m_{t-1} + u_t of the step adds a component to the traces, numbered after
those of the states. With M for D or λ, U_t = ∂u_t/∂h_t and V_t = ∂u_t/∂h_{t-1},

    (ε, m)_t = ((M, 0), (U M + V, κ)) (ε, m)_{t-1} + (1, U) ∂h_t/∂θ

so that blocks, layouts and both passes treat every rule alike. With this matrix as D,

    γ_{t-1} = D_tᵀ (L_t + γ_t) + R_t   credit, backward in the block
    P_t = D_K … D_{t+1} = ∂h_K/∂h_t    what traces need of each step

Values of a group are kept apart by component, so products of small matrices are written
out and entries that are zero by structure never appear. Letters: t steps of a block, h
positions of a group; i, j, k, s components of a position; n those of memories; y results
of taps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..compiled_step import (
    CompiledGroup,
    Components,
    Jacobian,
    Key,
    Memory,
    Slopes,
)
from ..derivatives import Derivatives
from .block import Block
from .masking import zero_at
from .site_facts import SiteFacts, same_decay


class RecursionPart(ABC):
    """How traces continue from step to step."""

    is_exact: ClassVar[bool] = False
    """Traces follow D, the derivative of each position's own states."""

    @property
    def config(self) -> dict[str, Any]:
        """Its options of an :class:`ETraceConfig`, those by default left out."""
        return {}

    @abstractmethod
    def replaces(self, site: SiteFacts) -> str | None:
        """What it has in place of D for one use of a parameter."""

    @abstractmethod
    def pattern(self, group: CompiledGroup) -> frozenset[tuple[int, int]]:
        """(i, j) where the new component i depends on the old component j."""

    @abstractmethod
    def transition(self, jacobian: Jacobian, group: CompiledGroup) -> Jacobian:
        """The matrix in place of D."""


@dataclass(frozen=True)
class JacobianRecursion(RecursionPart):
    """The trace follows D, the derivative of each position's own states."""

    is_exact = True

    def replaces(self, site: SiteFacts) -> None:
        """Nothing."""

    def pattern(self, group: CompiledGroup) -> frozenset[tuple[int, int]]:
        """(i, j) where the new component i depends on the old component j."""
        return group.pattern

    def transition(self, jacobian: Jacobian, group: CompiledGroup) -> Jacobian:
        """The matrix in place of D."""
        return jacobian


@dataclass(frozen=True)
class ScalarLeak(RecursionPart):
    """The trace decays by a number, whatever the states do; 0 keeps nothing."""

    decay: float

    @property
    def config(self) -> dict[str, Any]:
        """Its options of an :class:`ETraceConfig`."""
        return {'temporal_recursion': 'scalar_leak', 'decay': self.decay}

    def replaces(self, site: SiteFacts) -> str | None:
        """The number, unless D is this number; factors have decays of their own."""
        if site.factorised or same_decay(site.leak, self.decay):
            return None
        return (
            f'the trace decays by {self.decay:g} in place of the Jacobian of the states'
        )

    def pattern(self, group: CompiledGroup) -> frozenset[tuple[int, int]]:
        """Every component depends on itself."""
        return frozenset((i, i) for i in range(group.size) if self.decay)

    def transition(self, jacobian: Jacobian, group: CompiledGroup) -> Jacobian:
        """The decay at every position."""
        if not self.decay:
            return {}
        types = enumerate(group.dtypes)
        return {(i, i): jnp.full(group.shape, self.decay, dtype) for i, dtype in types}


@dataclass(frozen=True)
class Recursion:
    """The recursion of one group's traces.

    ``every_component``: credit may come back to every old state, even to those that no
    later local step reads (exact windows).
    """

    group: CompiledGroup
    kind: RecursionPart
    every_component: bool = False

    def _read(self, i: int) -> int:
        """The component that a signal to state i reads."""
        filtered = self.group.filtered and i < self.group.size
        return self.group.size + i if filtered else i

    @cached_property
    def numbered(self) -> list[tuple[int, Memory]]:
        """The components beside those of the states, with their numbers."""
        return list(enumerate(self.group.memories, self.group.size))

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
        shape, dtypes = self.group.shape, list(self.group.dtypes)
        dtypes += [dtypes[(*m.states, *m.old_states)[0]] for _, m in self.numbered]
        return {j: jnp.zeros(shape, dtypes[j]) for j in self.alive}

    def transition(self, jacobian: Jacobian, slopes: Sequence[Slopes]) -> Jacobian:
        """The recursion's own matrix, from D and (U, V) of the memories."""
        own = self.kind.transition(jacobian, self.group)
        found = dict(own)
        for (n, memory), (new, old) in zip(self.numbered, slopes, strict=True):
            terms = [((n, j), x) for j, x in old.items()]
            terms += [
                ((n, j), times(new[i], d)) for (i, j), d in own.items() if i in new
            ]
            for entry, x in terms:
                found[entry] = found[entry] + x if entry in found else x
            dtype = self.group.dtypes[(*memory.states, *memory.old_states)[0]]
            found[n, n] = jnp.full(self.group.shape, memory.kappa, dtype)
        return found

    def reading(self, signals: Components) -> Components:
        """Signals to states, by the components that they read."""
        return {self._read(i): x for i, x in signals.items()}

    def folded(
        self, credit: Mapping[int, jax.Array], slopes: Sequence[Slopes]
    ) -> Components:
        """Credit of components, added up by the states that drive them."""
        found: Components = {}
        for i, x in credit.items():
            parts = {i: x}
            if i >= self.group.size:
                new, _ = slopes[i - self.group.size]
                parts = {s: times(slope, x) for s, slope in new.items()}
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


def times(slope: jax.Array | None, x: jax.Array) -> jax.Array:
    """A product with a slope, of which None is one."""
    return x if slope is None else slope * x


# ---------------------------------------------------------------- of every group


def no_credit(recursions: Sequence[Recursion]) -> list[Components]:
    """Zero for every living component of each group."""
    return [recursion.zero_credit() for recursion in recursions]


def backward_credit(
    found: Derivatives, block: Block, last: Sequence[Components]
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
    at = (found.signals, found.reads, found.transitions, dead)
    first, every = jax.lax.scan(one, list(last), at, block.length, reverse=True)
    return every, first
