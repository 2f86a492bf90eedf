"""The signal L_t: ∂ℓ_t/∂h_t with the new states of a group taken as joint, independent outputs.

Every new state gets a perturbation δ. Who reads it sees h + δ, except the slices that define the
states of its own group: those read h raw, because D_t and the traces already count that path
(LSTM: h from the new c). So a value may exist in several views, one for each group it leads to and
one for the loss; views that agree share one evaluation. Old states move in the view of the loss only:
that derivative is the direct read R_t.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..analysis.groups import HiddenGroup
from ..compat import Atom, Equation, Var, evaluate_equation, is_var
from .plan import Plan, Values, replay, valued

LOSS = -1


def evaluate_views(
    equations: Sequence[Equation],
    outputs: Sequence[Atom],
    owner: Mapping[Var, int],
    env: Mapping[Var, Any],
    loss_env: Mapping[Var, Any],
    delta: Mapping[Var, Any],
    run: Callable[[int, list[Any]], list[Any]],
    known: Mapping[Var, Any] = {},
) -> list[Any]:
    """Outputs in the view of the loss.

    ``owner``: the group of each new state; ``known``: values that need not be computed again.
    ``env``: values that are the same in every view, ``loss_env`` what the view of the loss reads instead.
    ``run(i, operands)`` evaluates equation i.
    """
    views = _needed_views(equations, outputs, owner, env)
    raw: dict[tuple[Var, int], Any] = {}
    shown: dict[Var, Any] = {}

    def read(atom: Atom, view: int) -> Any:
        if not is_var(atom):
            return atom.val
        if view == LOSS and atom in loss_env:
            return loss_env[atom]
        if atom in env:
            return env[atom]
        return shown[atom] if atom in owner and owner[atom] != view else raw[atom, view]

    for i, eqn in enumerate(equations):
        shared: dict[tuple[int, ...], list[Any]] = {}
        for view in sorted(set().union(*(views[v] for v in eqn.outvars))):
            operands = [read(v, view) for v in eqn.invars]
            key = tuple(map(id, operands))
            if key not in shared:
                results = zip(eqn.outvars, run(i, operands), strict=True)
                shared[key] = [valued(known[v], x) if v in known else x for v, x in results]
            raw.update({(v, view): value for v, value in zip(eqn.outvars, shared[key], strict=True)})
        for v in eqn.outvars:
            if v in owner and views[v]:
                shown[v] = raw[v, owner[v]] + delta[v]
    return [read(v, LOSS) for v in outputs]


def _needed_views(
    equations: Sequence[Equation], outputs: Sequence[Atom], owner: Mapping[Var, int], env: Mapping[Var, Any]
) -> dict[Var, set[int]]:
    """Which views of each variable the outputs need."""
    views: dict[Var, set[int]] = defaultdict(set)

    def want(atom: Atom, needed: set[int]) -> None:
        if is_var(atom) and atom not in env:
            views[atom] |= {owner[atom]} if atom in owner else needed

    for atom in outputs:
        want(atom, {LOSS})
    for eqn in reversed(equations):
        needed: set[int] = set().union(*(views[v] for v in eqn.outvars))
        for atom in eqn.invars if needed else ():
            want(atom, needed)
    return views


def _deltas(groups: Sequence[HiddenGroup], deltas: Sequence[Sequence[jax.Array]]) -> dict[Var, Any]:
    return {
        v: d
        for group, delta in zip(groups, deltas, strict=True)
        for v, d in zip(group.hidden_outvars, group.from_components(delta), strict=True)
    }


def owner_of(groups: Sequence[HiddenGroup]) -> dict[Var, int]:
    """The group of each new hidden state."""
    return {v: g for g, group in enumerate(groups) for v in group.hidden_outvars}


def joint_outputs(
    program: Any, groups: Sequence[HiddenGroup], inputs: Sequence[Any], deltas: Sequence[jax.Array]
) -> list[jax.Array]:
    """Outputs of a step whose groups are perturbed by ``deltas[g]``, each ``(*varshape, num_state)``.

    The derivative of a loss of the outputs with respect to ``deltas[g]`` at zero is the signal of group g.
    """
    jaxpr = program.closed.jaxpr
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.closed.consts, *inputs], strict=True))
    run = lambda i, operands: evaluate_equation(jaxpr.eqns[i], operands)
    components = [[delta[..., i] for i in range(delta.shape[-1])] for delta in deltas]
    return evaluate_views(jaxpr.eqns, program.outputs, owner_of(groups), env, {}, _deltas(groups, components), run)


def joint_targets(
    plan: Plan,
    env: Values,
    ys: Sequence[Any],
    deltas: Sequence[Sequence[jax.Array]],
    old: Sequence[Sequence[jax.Array]],
    back: Mapping[int, Mapping[int, Any]] = {},
) -> list[jax.Array]:
    """The targets of one step as functions of tap results and of components: perturbations, old states read.

    ``back[i]``: operands of tap i that replace its weights in derivatives.
    """
    kept = dict(zip(plan.tap_results, ys, strict=True))
    fixed = {v: x for v, x in env.items() if v not in plan.moving}
    loss_env = {
        v: x
        for group, h in zip(plan.groups, old, strict=True)
        for v, x in zip(group.hidden_invars, group.from_components(h), strict=True)
    }

    def run(i: int, operands: list[Any]) -> list[Any]:
        eqn = plan.equations[i]
        if tap := plan.taps.get(i):
            operands = [back.get(i, {}).get(k, x) for k, x in enumerate(operands)]
            replayed = replay(eqn, tap.data, operands, {v: kept[v] for v in tap.results})
            return [replayed.get(v, env.get(v)) for v in eqn.outvars]
        return evaluate_equation(eqn, operands)

    delta = _deltas(plan.groups, deltas)
    owner = owner_of(plan.groups)
    known = {v: env[v] for v in (*owner, *plan.anchors) if v in env}
    return evaluate_views(plan.equations, plan.targets, owner, fixed, loss_env, delta, run, known)
