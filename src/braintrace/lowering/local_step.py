"""The local step of one group: from its old states and the results of taps to its new
states. Every path from one position to another is cut, so its Jacobian D is S×S at
each position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..analysis.cuts import Positions
from ..analysis.groups import Group
from ..arrays import jacobian_rows, known_value
from ..compat import Equation, Var, is_var, values_of
from ..compiled_step import Jacobian, Values
from ..operations import operation_of, run_equation
from ..program import cut_equation_at, equations_between
from .replay import replay

if TYPE_CHECKING:
    from .stages import Stages


class LocalProgram:
    """Which equations make up a group's local step, and what depends on what in it.

    ``taps``: results of taps that reach the group. ``shared``: those of which an
    element reaches several positions: the element that reaches each position.
    ``indices``: the equations of the local step, in program order. ``constants``: what
    it reads beside old states and taps. ``read``: all that it reads. ``enters``: the
    last sum that each tap's result enters unchanged, and through which alone it reaches
    the group. ``pattern``: (i, j) where the new component i can depend on the old
    component j. ``reached``: components of the new states that each tap's result can
    reach.
    """

    def __init__(
        self,
        equations: Sequence[Equation],
        tap_results: Sequence[Var],
        group: Group,
        positions: Positions,
    ):
        self.equations, self.group, self.positions = equations, group, positions
        self.taps = tuple(v for v in tap_results if v in positions.labels)
        old, ends = group.hidden_invars, group.hidden_outvars
        starts = {*old, *self.taps}
        cuts, edges = positions.cuts, positions.edges
        self.indices = equations_between(equations, starts, ends, cuts, edges)
        mine = [equations[i] for i in self.indices]
        made = starts | {v for eqn in mine for v in eqn.outvars}
        read = [*(v for eqn in mine for v in eqn.invars), *ends]
        self.constants: tuple[Var, ...] = tuple(
            dict.fromkeys(v for v in read if is_var(v) and v not in made)
        )
        self.read = (*old, *self.taps, *self.constants)
        self.enters = {y: self._sum_of(y) for y in self.taps}
        sources = self._find_sources()
        shape, owners, shared = group.varshape, group.owners, positions.sources
        self.shared: dict[Var, np.ndarray] = {
            v: shared[v].reshape(shape) for v in self.taps if v in shared
        }
        reads = [sources.get(ends[k], frozenset()) for k in owners]
        every = range(len(owners))
        pairs = [(i, j) for i in every for j in every]
        self.pattern = frozenset((i, j) for i, j in pairs if old[owners[j]] in reads[i])
        self.inner = frozenset(
            (i, j)
            for i, j in pairs
            if owners[i] != owners[j] and ends[owners[j]] in reads[i]
        )
        self.reached: dict[Var, tuple[int, ...]] = {
            y: tuple(i for i in every if y in reads[i]) for y in self.taps
        }

    def _find_sources(self) -> dict[Var, frozenset[Var]]:
        """Which old states, taps and new states each value can depend on."""
        found = {v: frozenset([v]) for v in (*self.group.hidden_invars, *self.taps)}
        cuts, kept = self.positions.cuts, set(self.indices)
        for i, k in sorted(self.positions.edges):
            eqn = self.equations[i]
            operand = eqn.invars[k]
            if i in kept and operand in found and not cuts.whole(i, k):
                for v in eqn.outvars:
                    own = {v} if v in self.group.hidden_outvars else frozenset()
                    found[v] = found.get(v, frozenset()) | found[operand] | own
        return found

    def _sum_of(self, y: Var) -> Var:
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


def new_components(
    stages: Stages,
    local: LocalProgram,
    env: Mapping[Var, Any],
    old: Sequence[jax.Array],
    taps: Mapping[Var, Any],
    delta: Sequence[jax.Array] | None = None,
    direct: bool = False,
) -> list[jax.Array]:
    """Components of a group's new states as functions of its old ones, of tap results,
    and of what ``delta`` adds to each new state before other states of the group read
    it.

    ``direct``: they read it as a constant, so that no derivative passes from one new
    state to another. ``env`` holds constants, anchors and new states, whose values are
    not computed again.
    """
    group, cuts = local.group, local.positions.cuts
    known = {v: env[v] for v in (*group.hidden_outvars, *stages.anchors) if v in env}
    shift = {} if delta is None else group.new_states(delta)
    env = {**env, **group.old_states(old), **taps}
    new: dict[Var, Any] = {}
    for i in local.indices:
        *stops, eqn = cut_equation_at(i, stages.equations[i], cuts)
        for stop in stops:
            env[stop.outvars[0]] = run_equation(stop, [env[stop.invars[0]]])[0]
        operands = values_of(eqn.invars, env)
        env.update(replay(stages.taps.get(i), eqn, operands, taps))
        for v in eqn.outvars:
            if v in known:
                env[v] = known_value(known[v], env[v])
            if v in shift:
                env[v] = env[v] + shift[v]
            if direct and v in group.hidden_outvars:
                new[v], env[v] = env[v], jax.lax.stop_gradient(env[v])
    return group.components([new.get(v, env[v]) for v in group.hidden_outvars])


def local_jacobian(stages: Stages, local: LocalProgram, env: Values) -> Jacobian:
    """D of a group."""
    old, taps = local.group.old_components(env), env.pick(local.taps)
    new = lambda old: new_components(stages, local, env, old, taps)
    return jacobian_rows(new, old, local.pattern)
