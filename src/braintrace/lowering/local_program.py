"""The local step of one group: from its old states and the results of taps to its new
states.

Every path from one position to another is cut, so its Jacobian D is S×S at each
position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..analysis.cuts import Positions
from ..analysis.groups import HiddenGroup
from ..compat import Equation, Var, is_var
from ..operations import operation_of
from ..program import equations_between


class LocalProgram:
    """Which equations make up a group's local step, and what depends on what in it.

    ``taps``: results of taps that reach the group. ``shared``: those of which an element
    reaches several positions: the element that reaches each position. ``indices``: the
    equations of the local step, in program order. ``constants``: what it reads beside
    old states and taps. ``pattern``: (i, j) where the new component i can depend on the
    old component j.
    """

    def __init__(
        self,
        equations: Sequence[Equation],
        tap_results: Sequence[Var],
        group: HiddenGroup,
        positions: Positions,
    ):
        self.equations, self.group, self.positions = equations, group, positions
        self.taps = tuple(v for v in tap_results if v in positions.labels)
        shape, sources = group.varshape, positions.sources
        self.shared: dict[Var, np.ndarray] = {
            v: sources[v].reshape(shape) for v in self.taps if v in sources
        }
        starts = {*group.hidden_invars, *self.taps}
        cuts, edges = positions.cuts, positions.edges
        ends = group.hidden_outvars
        self.indices = equations_between(equations, starts, ends, cuts, edges)
        mine = [equations[i] for i in self.indices]
        made = starts | {v for eqn in mine for v in eqn.outvars}
        reads = [*(v for eqn in mine for v in eqn.invars), *ends]
        self.constants: tuple[Var, ...] = tuple(
            dict.fromkeys(v for v in reads if is_var(v) and v not in made)
        )
        self._sources = self._find_sources()
        owners, old = group.owners, group.hidden_invars
        every = range(len(owners))
        self.pattern = frozenset(
            (i, j) for i in every for j in every if old[owners[j]] in self._reads(i)
        )

    def _find_sources(self) -> dict[Var, frozenset[Var]]:
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
