"""How traces of a group go on from step to step, and what reads them.

    jacobian   ε_t = D_t ε_{t-1} + ∂h_t/∂θ
    leak λ     ε_t = λ ε_{t-1} + ∂h_t/∂θ
    filter κ   ē_t = κ ē_{t-1} + ε_t, and signals read ē in place of ε

A filter makes a second set of components, numbered after the first: one larger recursion of the same kind,

    (ε, ē)_t = ((M, 0), (M, κ)) (ε, ē)_{t-1} + (1, 1) ∂h_t/∂θ

so that blocks, carriers and both passes treat every rule alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..compat import Var
from .plan import Components, Jacobian, LocalStep


class Scheme(NamedTuple):
    """What a learning rule does with traces.

    ``decay``: of the factors (x, f) of a factorised trace; None for one trace a parameter. ``leak``: a number in
    place of D. ``kappa``: the filter. ``signal``: 'symmetric', 'random_feedback' or 'modulatory'. ``feedback``: a
    function of a weight's place and shape that gives the fixed weights for its way back; ``align``: what one update
    leaves of their distance to the weights themselves, if they follow.
    """

    decay: tuple[float, float] | None = None
    leak: float | None = None
    kappa: float | None = None
    signal: str = 'symmetric'
    feedback: Any = None
    align: float | None = None

    @property
    def is_plain(self) -> bool:
        """True if the traces are those of the local step, read by the true signal."""
        return self.leak is None and self.kappa is None and self.signal == 'symmetric'


@dataclass(frozen=True)
class Recursion:
    """The recursion of one group's traces."""

    local: LocalStep
    leak: float | None = None
    kappa: float | None = None

    @property
    def size(self) -> int:
        """States of a position."""
        return len(self.local.group.owners)

    def _read(self, i: int) -> int:
        """The component that a signal to state i reads."""
        return i if self.kappa is None else self.size + i

    # ------------------------------------------------------------ structure

    @cached_property
    def pattern(self) -> frozenset[tuple[int, int]]:
        """(i, j) where the new component i depends on the old component j."""
        own = self.local.pattern
        if self.leak is not None:
            own = frozenset((i, i) for i in range(self.size) if self.leak)
        if self.kappa is None:
            return own
        return own | {(self.size + i, j) for i, j in own} | {(self.size + i,) * 2 for i in range(self.size)}

    @cached_property
    def alive(self) -> tuple[int, ...]:
        """Components whose old values matter: read by the next step's recursion, or directly by a target."""
        plan, group = self.local.plan, self.local.group
        read = {j for _, j in self.pattern}
        direct = {self._read(j) for j, k in enumerate(group.owners) if group.hidden_invars[k] in plan.direct_reads}
        every = range(self.size if self.kappa is None else 2 * self.size)
        return tuple(j for j in every if plan.whole or j in read or j in direct)

    @cached_property
    def closure(self) -> frozenset[tuple[int, int]]:
        """(i, k) of living components where k now can matter for i at any later time, now included."""
        found = {(i, i) for i in self.alive}
        while more := {(i, j) for i, k in found for m, j in self.pattern if k == m and j in self.alive} - found:
            found |= more
        return frozenset(found)

    def _reached(self, y: Var) -> tuple[int, ...]:
        own = self.local.reached(y)
        return own if self.kappa is None else (*own, *(self.size + i for i in own))

    def carried(self, y: Var) -> tuple[int, ...]:
        """Living components that a tap's result can reach at any later time: those its trace is made of."""
        reached = self._reached(y)
        return tuple(s for s in self.alive if any((s, k) in self.closure for k in reached))

    def after(self, y: Var) -> tuple[int, ...]:
        """Components that a tap's result or its past can reach in one step."""
        past, reached = self.carried(y), self._reached(y)
        every = sorted({*reached, *(i for i, _ in self.pattern)})
        return tuple(s for s in every if s in reached or any((s, r) in self.pattern for r in past))

    # ------------------------------------------------------------ values

    def no_credit(self, old: Sequence[jax.Array]) -> Components:
        """Zero for every living component; ``old``: the components of the states."""
        return {j: jnp.zeros_like(old[j % self.size]) for j in self.alive}

    def transition(self, jacobian: Jacobian, signals: Components) -> Jacobian:
        """The recursion's own Jacobian, of all steps of a block; ``signals`` has an array like each state."""
        own = jacobian
        if self.leak is not None:
            own = {(i, i): jnp.full_like(x, self.leak) for i, x in signals.items() if self.leak}
        if self.kappa is None:
            return own
        kept = {(self.size + i,) * 2: jnp.full_like(x, self.kappa) for i, x in signals.items()}
        return own | {(self.size + i, j): d for (i, j), d in own.items()} | kept

    def reading(self, signals: Components) -> Components:
        """Signals to states, by the components that they read."""
        return {self._read(i): x for i, x in signals.items()}

    def folded(self, gamma: Mapping[int, jax.Array]) -> Components:
        """What components say about the states that drive them."""
        found: Components = {}
        for i, x in gamma.items():
            i %= self.size
            found[i] = found[i] + x if i in found else x
        return found
