"""The step as a loss sees it: targets as functions of tap results, of old states that
targets read beside all new ones, and of a δ added to every new state.

Nothing is cut. Whoever reads a new state sees h + δ, so that ∂ℓ/∂δ counts every path
from h to the loss inside the step. Paths that begin with kept edges between states of
one group are in D and in the traces as well; the solver takes these out by the local
step's own ∂h/∂δ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from ..arrays import known_value
from ..compat import Var, is_var, values_of
from ..compiled_step import Components, Feedback, Values
from ..operations import differentiates
from .local_step import LocalProgram
from .replay import replay
from .stages import Stages


def joint(
    stages: Stages,
    constants: Values,
    values: Values,
    old: Sequence[Components],
    delta: Sequence[Components],
    taps: Values,
    feedback: Feedback = {},
) -> list[jax.Array]:
    """The targets of one step; ``feedback[i, k]`` replaces operand k of equation i."""
    groups, env = stages.analysed.groups, constants | values
    fixed = Values((v, x) for v, x in env.items() if v not in stages.differentiated)
    known = {v: env[v] for v in (*stages.new_states, *stages.anchors) if v in env}
    shift, direct = Values(), Values()
    for group, moved, read in zip(groups, delta, old, strict=True):
        now = group.old_components(env)
        if moved:
            zeros = map(jnp.zeros_like, now)
            parts = [moved.get(i, zero) for i, zero in enumerate(zeros)]
            owners = dict.fromkeys(group.hidden_outvars[group.owners[i]] for i in moved)
            shift |= group.new_states(parts).pick(owners)
        if read:
            parts = [read.get(j, x) for j, x in enumerate(now)]
            owners = dict.fromkeys(group.hidden_invars[group.owners[j]] for j in read)
            direct |= group.old_states(parts).pick(owners)

    def run(indices: Iterable[int], seen: Values) -> None:
        for i in indices:
            eqn = stages.equations[i]
            operands = values_of(eqn.invars, seen)
            operands = [feedback.get((i, k), x) for k, x in enumerate(operands)]
            found = replay(stages.taps.get(i), eqn, operands, taps)
            for v in eqn.outvars:
                value = found.get(v, env.get(v))
                if v in known:
                    value = known_value(known[v], value)
                seen[v] = value + shift[v] if v in shift else value

    # Old states are constants on the way to new ones: these paths are in D.
    after = stages.needed(stages.targets, {*fixed, *stages.new_states})
    atoms = [*stages.targets, *(v for i in after for v in stages.equations[i].invars)]
    new = [v for v in atoms if is_var(v) and v in stages.new_states]
    before = stages.needed(new, fixed)
    run(before, fixed)
    # What reads an old state beside all new ones runs with it varying. Other results
    # are those from before.
    varying, again = set(direct), []
    for i in after:
        eqn = stages.equations[i]
        varies = any(is_var(v) and v in varying for v in eqn.invars)
        if varies:
            varying.update(eqn.outvars)
        if varies or i not in before:
            again.append(i)
    seen = fixed | direct
    run(again, seen)
    return [seen[v] if is_var(v) else v.val for v in stages.targets]


def signalled_components(stages: Stages, local: LocalProgram) -> frozenset[int]:
    """Components of a group's new states that reach a target by a path that leaves the
    kept edges between states of the group. The others have no signal."""
    group, cuts = local.group, local.positions.cuts
    own, kept = set(group.hidden_outvars), local.positions.edges
    cut_inside = {i for (i, _), body in cuts.bodies.items() if body}
    ends = {v for v in stages.targets if is_var(v)} | stages.new_states - own
    indices = stages.needed(stages.targets)

    def leaves(start: Var) -> bool:
        moved = {start}
        for i in indices:
            eqn = stages.equations[i]
            edges = [
                (i, k)
                for k, v in enumerate(eqn.invars)
                if is_var(v) and v in moved and differentiates(eqn, k)
            ]
            if any(e not in kept or e in cuts.edges for e in edges):
                return True
            if edges and i in cut_inside:
                return True
            if edges:
                moved.update(v for v in eqn.outvars if v not in own)
        return bool(moved & ends)

    signalled = [leaves(v) for v in group.hidden_outvars]
    return frozenset(i for i, k in enumerate(group.owners) if signalled[k])
