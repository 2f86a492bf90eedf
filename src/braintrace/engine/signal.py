"""The signal L_t: ∂ℓ_t/∂h_t with the new states of a group taken as joint, independent outputs.

Every new state gets a perturbation δ. Who reads it sees h + δ, except the slices that define the
states of its own group: those read h raw, because D_t and the traces already count that path
(LSTM: h from the new c). So a value may exist in several views, one for each group it leads to and
one for the loss; views that agree share one evaluation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax

from ..analysis.groups import HiddenGroup
from ..compat import Atom, Var, evaluate_equation, is_var
from ..program import StepProgram

LOSS = -1


def joint_outputs(
    program: StepProgram, groups: Sequence[HiddenGroup], inputs: Sequence[Any], deltas: Sequence[Sequence[Any]]
) -> list[jax.Array]:
    """Outputs of the step with perturbed hidden states.

    ``deltas[g]`` holds one array for each state of group g. The derivative of a loss of the outputs
    with respect to ``deltas[g]`` at zero is the signal of group g.
    """
    owner = {v: g for g, group in enumerate(groups) for v in group.hidden_outvars}
    delta = {v: d for group, ds in zip(groups, deltas, strict=True) for v, d in zip(group.hidden_outvars, ds, strict=True)}
    views = _needed_views(program, owner)
    jaxpr, consts = program.closed.jaxpr, program.closed.consts
    base = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    raw: dict[tuple[Var, int], Any] = {}
    shown: dict[Var, Any] = {}

    def read(atom: Atom, view: int) -> Any:
        if not is_var(atom):
            return atom.val
        if atom in base:
            return base[atom]
        return shown[atom] if atom in owner and owner[atom] != view else raw[atom, view]

    for eqn in jaxpr.eqns:
        shared: dict[tuple[int, ...], list[Any]] = {}
        for view in sorted(set().union(*(views[v] for v in eqn.outvars))):
            operands = [read(v, view) for v in eqn.invars]
            key = tuple(map(id, operands))
            if key not in shared:
                shared[key] = evaluate_equation(eqn, operands)
            raw.update({(v, view): value for v, value in zip(eqn.outvars, shared[key], strict=True)})
        for v in eqn.outvars:
            if v in owner and views[v]:
                shown[v] = raw[v, owner[v]] + delta[v]
    return [read(v, LOSS) for v in program.outputs]


def _needed_views(program: StepProgram, owner: dict[Var, int]) -> dict[Var, set[int]]:
    """Which views of each variable the outputs need."""
    views: dict[Var, set[int]] = defaultdict(set)

    def want(atom: Atom, needed: set[int]) -> None:
        if is_var(atom):
            views[atom] |= {owner[atom]} if atom in owner else needed

    for atom in program.outputs:
        want(atom, {LOSS})
    for eqn in reversed(program.equations):
        needed: set[int] = set().union(*(views[v] for v in eqn.outvars))
        for atom in eqn.invars if needed else ():
            want(atom, needed)
    return views
