"""The local step of one group: from its old states and the results of taps to its new
states, and its derivatives.

Every path from one position to another is cut, so its Jacobian D is S×S at each
position. Derivatives are D, the pull-back (∂h/∂y)ᵀ γ, and ∂h/∂y itself where an element
of y reaches several positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..analysis.cuts import Positions
from ..analysis.groups import Group
from ..arrays import known_value
from ..compat import Equation, Var, has_reverse_only, is_var, values_of
from ..compiled_step import Components, Jacobian, Values
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
        self.pattern = frozenset(
            (i, j) for i in every for j in every if old[owners[j]] in reads[i]
        )
        self.reached: dict[Var, tuple[int, ...]] = {
            y: tuple(i for i in every if y in reads[i]) for y in self.taps
        }

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
) -> list[jax.Array]:
    """Components of a group's new states as functions of its old ones and of tap
    results.

    ``env`` holds constants, anchors and new states, whose values are not computed
    again.
    """
    group, cuts = local.group, local.positions.cuts
    known = {v: env[v] for v in (*group.hidden_outvars, *stages.anchors) if v in env}
    env = {**env, **group.old_states(old), **taps}
    for i in local.indices:
        *stops, eqn = cut_equation_at(i, stages.equations[i], cuts)
        for stop in stops:
            env[stop.outvars[0]] = run_equation(stop, [env[stop.invars[0]]])[0]
        operands = values_of(eqn.invars, env)
        env.update(replay(stages.taps.get(i), eqn, operands, taps))
        env.update(
            (v, known_value(known[v], env[v])) for v in eqn.outvars if v in known
        )
    return group.components([env[v] for v in group.hidden_outvars])


def local_jacobian(stages: Stages, local: LocalProgram, env: Values) -> Jacobian:
    """D: one reverse pass for each component that depends on any."""
    old, taps = local.group.old_components(env), env.pick(local.taps)
    found = {}
    for i in sorted({i for i, _ in local.pattern}):
        component = lambda h, i=i: new_components(stages, local, env, h, taps)[i]
        new, pull = jax.vjp(component, old)
        (row,) = pull(jnp.ones_like(new))
        found.update({(i, j): x for j, x in enumerate(row) if (i, j) in local.pattern})
    return found


def local_pull(
    stages: Stages, local: LocalProgram, env: Values, credit: Components
) -> Values:
    """(∂h/∂y)ᵀ γ for every tap result y that reaches a component of γ."""
    old, taps = local.group.old_components(env), env.pick(local.taps)
    mine = taps.pick(y for y in taps if set(local.reached[y]) & set(credit))

    def new(mine: Values) -> Components:
        found = new_components(stages, local, env, old, taps | mine)
        return {i: found[i] for i in credit}

    values, pull = jax.vjp(new, mine)
    return pull({i: g.astype(values[i].dtype) for i, g in credit.items()})[0]


def _local_slopes(
    stages: Stages, local: LocalProgram, env: Values, y: Var
) -> Components:
    """∂h/∂y at every position, by components, for a result y that positions share.

    A position is reached by one element of y, so a tangent of ones at all elements
    gives the derivative by that one.
    """
    old, taps = local.group.old_components(env), env.pick(local.taps)
    value = taps[y]

    def new(value: jax.Array) -> Components:
        found = new_components(stages, local, env, old, taps | {y: value})
        return {i: found[i] for i in local.reached[y]}

    def along(tangent: jax.Array) -> Components:
        if not any(has_reverse_only(stages.equations[i]) for i in local.indices):
            return jax.jvp(new, (value,), (tangent,))[1]
        # Forward mode is the transpose of reverse mode.
        like, pull = jax.vjp(new, value)
        return jax.linear_transpose(lambda bars: pull(bars)[0], like)(tangent)[0]

    ones = jnp.ones_like(value)
    slopes = along(ones)
    if jnp.iscomplexobj(value):
        imaginary = along(1j * ones)
        # As a pull-back has it: ∂h/∂Re y - i ∂h/∂Im y.
        return {i: x - 1j * imaginary[i] for i, x in slopes.items()}
    return slopes


# ---------------------------------------------------------------- of all groups


def transition(stages: Stages, constants: Values, values: Values) -> list[Jacobian]:
    """D of every group."""
    env = constants | values
    return [local_jacobian(stages, local, env) for local in stages.locals]


def pull(
    stages: Stages, constants: Values, values: Values, credit: Sequence[Components]
) -> list[Values]:
    """(∂h/∂y)ᵀ γ by group."""
    env = constants | values
    pairs = zip(stages.locals, credit, strict=True)
    return [local_pull(stages, local, env, mine) for local, mine in pairs]


def shared_slopes(stages: Stages, constants: Values, values: Values) -> list[Values]:
    """∂h/∂y by group, for results that positions share."""
    env = constants | values
    return [
        Values((y, _local_slopes(stages, local, env, y)) for y in local.shared)
        for local in stages.locals
    ]
