"""Derivatives of a group's local step: the Jacobian D, the pull-back (∂h/∂y)ᵀ γ, and
∂h/∂y itself where an element of y reaches several positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import known_value
from ..compat import Var, has_reverse_only, is_var
from ..compiled_step import Components, Jacobian, Values
from ..operations import run_equation
from ..program import cut_equation_at
from .local_program import LocalProgram
from .replay import replay
from .stages import Stages


def new_components(
    stages: Stages,
    local: LocalProgram,
    env: Mapping[Var, Any],
    old: Sequence[jax.Array],
    ys: Sequence[Any],
) -> list[jax.Array]:
    """Components of a group's new states as functions of its old ones and of tap
    results.

    ``env`` holds constants, anchors and new states, whose values are not computed
    again.
    """
    group, cuts = local.group, local.positions.cuts
    known = {v: env[v] for v in (*group.hidden_outvars, *stages.anchors) if v in env}
    kept = dict(zip(local.taps, ys, strict=True))
    states = dict(zip(group.hidden_invars, group.from_components(old), strict=True))
    env = {**env, **states, **kept}
    for i in local.indices:
        *stops, eqn = cut_equation_at(i, stages.equations[i], cuts)
        for stop in stops:
            env[stop.outvars[0]] = run_equation(stop, [env[stop.invars[0]]])[0]
        operands = [env[v] if is_var(v) else v.val for v in eqn.invars]
        if tap := stages.taps.get(i):
            mine = {v: kept[v] for v in tap.results if v in kept}
            env.update(replay(eqn, tap.data, operands, mine))
        else:
            env.update(zip(eqn.outvars, run_equation(eqn, operands), strict=True))
        env.update(
            (v, known_value(known[v], env[v])) for v in eqn.outvars if v in known
        )
    return group.components([env[v] for v in group.hidden_outvars])


def _old(local: LocalProgram, env: Mapping[Var, Any]) -> list[jax.Array]:
    return local.group.components([env[v] for v in local.group.hidden_invars])


def local_jacobian(stages: Stages, local: LocalProgram, env: Values) -> Jacobian:
    """D: one reverse pass for each component that depends on any."""
    old, ys = _old(local, env), [env[v] for v in local.taps]
    found = {}
    for i in sorted({i for i, _ in local.pattern}):
        component = lambda h, i=i: new_components(stages, local, env, h, ys)[i]
        new, pull = jax.vjp(component, old)
        (row,) = pull(jnp.ones_like(new))
        found.update({(i, j): x for j, x in enumerate(row) if (i, j) in local.pattern})
    return found


def local_pull(
    stages: Stages, local: LocalProgram, env: Values, credit: Components
) -> Values:
    """(∂h/∂y)ᵀ γ for every tap result y that reaches a component of γ."""
    old = _old(local, env)
    taps = Values(
        (y, env[y]) for y in local.taps if set(local.reached(y)) & set(credit)
    )

    def new(taps: Values) -> Components:
        ys = [taps.get(y, env[y]) for y in local.taps]
        found = new_components(stages, local, env, old, ys)
        return {i: found[i] for i in credit}

    values, pull = jax.vjp(new, taps)
    return pull({i: g.astype(values[i].dtype) for i, g in credit.items()})[0]


def local_slopes(stages: Stages, local: LocalProgram, env: Values) -> Values:
    """∂h/∂y at every position, by components, for results y that positions share.

    A position is reached by one element of y, so a tangent of ones at all elements
    gives the derivative by that one.
    """
    return Values((y, _slopes(stages, local, env, y)) for y in local.shared)


def _slopes(stages: Stages, local: LocalProgram, env: Values, y: Var) -> Components:
    old, value = _old(local, env), env[y]

    def new(value: jax.Array) -> Components:
        ys = [value if v is y else env[v] for v in local.taps]
        found = new_components(stages, local, env, old, ys)
        return {i: found[i] for i in local.reached(y)}

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
