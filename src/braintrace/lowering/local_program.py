"""The local step of one group: from its old states and the results of taps to its new
states.

Every path from one position to another is cut, so its Jacobian D is S×S at each
position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..analysis.cuts import Positions
from ..analysis.groups import HiddenGroup
from ..compat import Equation, Var, is_var
from ..operations import operation_of
from ..program import equations_between


@dataclass(frozen=True)
class LocalProgram:
    """Which equations make up a group's local step, and what depends on what in it."""

    equations: Sequence[Equation]
    tap_results: Sequence[Var]
    group: HiddenGroup
    positions: Positions

    @cached_property
    def taps(self) -> tuple[Var, ...]:
        """Results of taps that reach the group."""
        return tuple(v for v in self.tap_results if v in self.positions.labels)

    @cached_property
    def shared(self) -> dict[Var, np.ndarray]:
        """Results of taps of which an element reaches several positions: the element
        that reaches each position."""
        shape, sources = self.group.varshape, self.positions.sources
        return {v: sources[v].reshape(shape) for v in self.taps if v in sources}

    @cached_property
    def indices(self) -> list[int]:
        """The equations of the local step, in program order."""
        sources = {*self.group.hidden_invars, *self.taps}
        cuts, edges = self.positions.cuts, self.positions.edges
        return equations_between(
            self.equations, sources, self.group.hidden_outvars, cuts, edges
        )

    @cached_property
    def constants(self) -> tuple[Var, ...]:
        """What it reads beside old states and taps."""
        equations = [self.equations[i] for i in self.indices]
        made = {*self.group.hidden_invars, *self.taps}
        made.update(v for eqn in equations for v in eqn.outvars)
        reads = [v for eqn in equations for v in eqn.invars] + list(
            self.group.hidden_outvars
        )
        return tuple(dict.fromkeys(v for v in reads if is_var(v) and v not in made))

    @cached_property
    def _sources(self) -> dict[Var, frozenset[Var]]:
        """Which old states and taps each value can depend on."""
        found = {v: frozenset([v]) for v in (*self.group.hidden_invars, *self.taps)}
        cuts, kept = self.positions.cuts, set(self.indices)
        for i, k in sorted(self.positions.edges):
            eqn = self.equations[i]
            operand = eqn.invars[k]
            if i in kept and operand in found and not cuts.whole(i, k):
                for v in eqn.outvars:
                    found[v] = found.get(v, frozenset()) | found[operand]
        return found

    def _reads(self, component: int) -> frozenset[Var]:
        state = self.group.hidden_outvars[self.group.owners[component]]
        return self._sources.get(state, frozenset())

    @cached_property
    def pattern(self) -> frozenset[tuple[int, int]]:
        """(i, j) where the new component i can depend on the old component j."""
        owners, old = self.group.owners, self.group.hidden_invars
        every = range(len(owners))
        return frozenset(
            (i, j) for i in every for j in every if old[owners[j]] in self._reads(i)
        )

    def reached(self, y: Var) -> tuple[int, ...]:
        """Components of the new states that a tap's result can reach."""
        return tuple(i for i in range(len(self.group.owners)) if y in self._reads(i))

    def sum_of(self, y: Var) -> Var:
        """The last sum that a value enters unchanged, and through which alone it
        reaches the group."""
        while y not in self.group.hidden_outvars:
            uses = [
                (i, k)
                for i in self.indices
                for k, v in enumerate(self.equations[i].invars)
                if v is y
            ]
            if len(uses) != 1 or uses[0] in self.positions.cuts.edges:
                break
            equation = self.equations[uses[0][0]]
            operation = operation_of(equation)
            if operation is None or not operation.sum:
                break
            (total,) = equation.outvars
            if (total.aval.shape, total.aval.dtype) != (y.aval.shape, y.aval.dtype):
                break
            y = total
        return y
