"""The signal L: ∂ℓ/∂h with the new states of a group taken as joint, independent
outputs.

Every new state gets a perturbation δ. Whoever reads it sees h + δ, except the equations
that define the states of its own group: those read h itself, because D and the traces
already count that path (LSTM: h from the new c). Where such a path is cut it is counted
nowhere else, so at the cut these equations read the perturbed value too (two layers
with a skip connection: the upper layer's product with the lower one's new state). A cut
may lie inside a branch or a loop: then the paths through it are those of the whole
equation less those of the equation with its cuts in place.

So a value may exist in several views: two for each group it leads to, of which the one
that is read at cuts has all new states perturbed, and one for the loss. Views that agree
share one evaluation. For the signal, old states vary in the view of the loss only: that
derivative is the direct read R.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..analysis.analysed import Analysed
from ..analysis.dependence import of
from ..arrays import known_value
from ..compat import Atom, Equation, Var, is_var
from ..compiled_step import Feedback, Signals, Values
from ..operations import run_equation
from ..program import cut_inside
from .replay import replay
from .stages import Run, Stages

LOSS = -1


def at_cuts(view: int) -> int:
    """The view of group g that is read at its cuts, of that view g, and of the loss the
    loss."""
    return -2 - view


def group_of(view: int) -> int:
    """The group that a view is evaluated for; LOSS for none."""
    return max(view, at_cuts(view))


@dataclass(frozen=True)
class CutsBetween:
    """Cuts on the way from new states of a group to new states of the same group.

    ``edges``: (equation, operand) with the mask of the elements that are cut.
    ``inside``: equations with cuts in a branch or a loop, as they are with these cuts.
    """

    edges: Mapping[tuple[int, int], np.ndarray]
    inside: Mapping[int, Equation]

    def reads_perturbed(self, i: int, k: int) -> bool:
        """Whether operand k of equation i is read with all new states perturbed."""
        return (i, k) in self.edges or i in self.inside


NO_CUTS = CutsBetween({}, {})
Cutting = Mapping[int, CutsBetween]
"""Cuts by group."""


def evaluate_views(
    analysed: Analysed,
    outputs: Sequence[Atom],
    env: Mapping[Var, Any],
    varying: Callable[[int], Mapping[Var, Any]],
    delta: Mapping[Var, Any],
    run: Run,
    known: Mapping[Var, Any] = {},
) -> list[Any]:
    """Outputs in the view of the loss.

    ``env``: values that are given; ``varying(g)``: what the views of a group read in
    place of these, and ``varying(LOSS)`` that of the loss. ``known``: values that are
    not computed again. ``delta``: the perturbation of every new state.
    """
    equations = analysed.dependence.program.equations
    owner = {v: g for g, m in enumerate(analysed.groups) for v in m.hidden_outvars}
    cutting = _cuts_between_new_states(analysed)
    views = _needed_views(equations, outputs, owner, env, cutting)
    raw: dict[tuple[Var, int], Any] = {}
    perturbed: dict[Var, Any] = {}
    instead = {g: varying(g) for g in range(LOSS, len(analysed.groups))}

    def read(atom: Atom, view: int) -> Any:
        if not is_var(atom):
            return atom.val
        if atom in env:
            return instead[group_of(view)].get(atom, env[atom])
        if atom in owner and owner[atom] != view:
            return perturbed[atom]
        return raw[atom, view]

    def operand(i: int, k: int, atom: Atom, view: int) -> Any:
        mask = cutting.get(view, NO_CUTS).edges.get((i, k))
        if mask is None:
            return read(atom, view)
        if mask.all():
            return read(atom, at_cuts(view))
        return jnp.where(mask, read(atom, at_cuts(view)), read(atom, view))

    for i, eqn in enumerate(equations):
        shared: dict[tuple[int, ...], list[Any]] = {}
        held: list[Any] = []  # keys are identities, so what they name must stay alive
        for view in sorted(set().union(*(views[v] for v in eqn.outvars))):
            operands = [operand(i, k, v, view) for k, v in enumerate(eqn.invars)]
            cut, there = cutting.get(view, NO_CUTS).inside.get(i), at_cuts(view)
            moved = [] if cut is None else [read(v, there) for v in eqn.invars]
            held += [*operands, *moved]
            key = tuple(map(id, [*operands, *moved]))
            if key not in shared:
                results = run(i, operands)
                if cut is not None:
                    results = _with_cut_paths(eqn, cut, results, operands, moved)
                shared[key] = [
                    known_value(known[v], x) if v in known else x
                    for v, x in zip(eqn.outvars, results, strict=True)
                ]
            for v, value in zip(eqn.outvars, shared[key], strict=True):
                raw[v, view] = value
        for v in eqn.outvars:
            if v in owner and views[v]:
                perturbed[v] = raw[v, owner[v]] + delta[v]
    return [read(v, LOSS) for v in outputs]


def _needed_views(
    equations: Sequence[Equation],
    outputs: Sequence[Atom],
    owner: Mapping[Var, int],
    env: Mapping[Var, Any],
    cutting: Cutting,
) -> dict[Var, set[int]]:
    """Which views of each variable the outputs need."""
    views: dict[Var, set[int]] = defaultdict(set)

    def want(atom: Atom, needed: set[int]) -> None:
        if is_var(atom) and atom not in env:
            views[atom] |= {owner[atom]} if atom in owner else needed

    for atom in outputs:
        want(atom, {LOSS})
    for i, eqn in reversed(list(enumerate(equations))):
        needed: set[int] = set().union(*(views[v] for v in eqn.outvars))
        for k, atom in enumerate(eqn.invars) if needed else ():
            cut = {g for g in needed & set(cutting) if cutting[g].reads_perturbed(i, k)}
            want(atom, needed | {at_cuts(g) for g in cut})
    return views


def _with_cut_paths(
    equation: Equation,
    cut: Equation,
    values: Sequence[Any],
    operands: list[Any],
    perturbed: list[Any],
) -> list[Any]:
    """Results whose derivative by perturbations includes the paths through cuts inside
    the equation: (J - J_cut) (perturbed - operands)."""
    parts = [run_equation(e, x) for x in (perturbed, operands) for e in (equation, cut)]
    found = []
    for value, a, a_cut, b, b_cut in zip(values, *parts, strict=True):
        moved = jnp.issubdtype(jnp.result_type(value), jnp.inexact)
        found.append(
            known_value(value, value + (a - a_cut) - (b - b_cut)) if moved else value
        )
    return found


def _cuts_between_new_states(analysed: Analysed) -> Cutting:
    """Cuts between new states of one group, for every group."""
    dependence, found = analysed.dependence, {}
    equations = dependence.program.equations
    reads = lambda i, k, new: of(dependence.total, equations[i].invars[k]).grads & new
    parts = zip(analysed.members, analysed.positions, strict=True)
    for g, (members, positions) in enumerate(parts):
        new, cuts = dependence.new(members), positions.cuts
        edges = {
            (i, k): mask for (i, k), mask in cuts.edges.items() if reads(i, k, new)
        }
        within = {i for (i, _), body in cuts.bodies.items() if body}
        inside = {
            i: cut_inside(i, equations[i], cuts)
            for i in sorted(within)
            if any(reads(i, k, new) for k in range(len(equations[i].invars)))
        }
        found[g] = CutsBetween(edges, inside)
    return found


def joint_outputs(
    analysed: Analysed,
    inputs: Sequence[Any],
    deltas: Sequence[jax.Array],
) -> list[jax.Array]:
    """Outputs of a step whose groups are perturbed by ``deltas[g]``, each ``(*varshape,
    num_state)``.

    The derivative of a loss of the outputs by ``deltas[g]`` at zero is the signal of
    group g.
    """
    program, groups = analysed.dependence.program, analysed.groups
    closed = program.closed
    names = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
    env = dict(zip(names, [*closed.consts, *inputs], strict=True))
    run = lambda i, operands: run_equation(closed.jaxpr.eqns[i], operands)
    delta = Values()
    for group, each in zip(groups, deltas, strict=True):
        components = [each[..., i] for i in range(each.shape[-1])]
        delta |= group.new_states(components)
    return evaluate_views(analysed, program.outputs, env, lambda g: {}, delta, run)


def _joint_targets(
    stages: Stages,
    env: Values,
    feedback: Feedback,
    taps: Values,
    deltas: Sequence[Sequence[jax.Array]],
    old: Sequence[Sequence[jax.Array]],
) -> list[jax.Array]:
    """The targets of one step as functions of tap results, perturbations and old
    states."""
    fixed = {v: x for v, x in env.items() if v not in stages.differentiated}
    direct, delta = Values(), Values()
    for n, group in enumerate(stages.analysed.groups):
        direct |= group.old_states(old[n])
        delta |= group.new_states(deltas[n])

    def run(i: int, operands: list[Any]) -> list[Any]:
        eqn = stages.equations[i]
        operands = [feedback.get((i, k), x) for k, x in enumerate(operands)]
        found = replay(stages.taps.get(i), eqn, operands, taps)
        return [found.get(v, env.get(v)) for v in eqn.outvars]

    kept_values = (*stages.new_states, *stages.anchors)
    known = {v: env[v] for v in kept_values if v in env}
    varying = lambda g: direct if g == LOSS else {}
    return evaluate_views(
        stages.analysed, stages.targets, fixed, varying, delta, run, known
    )


def signals(
    stages: Stages,
    constants: Values,
    values: Values,
    cotangents: Sequence[jax.Array],
    feedback: Feedback = {},
) -> tuple[list[jax.Array], Signals]:
    """Targets of a step; one-step gradients of tap results, signals and direct
    reads."""
    groups, env = stages.analysed.groups, constants | values
    taps = env.pick(stages.tap_results)
    old = [group.old_components(env) for group in groups]
    deltas = jax.tree.map(jnp.zeros_like, old)
    joint = partial(_joint_targets, stages, env, feedback)
    targets, pull = jax.vjp(joint, taps, deltas, old)
    bars = [c.astype(x.dtype) for c, x in zip(cotangents, targets, strict=True)]
    results, found, reads = pull(bars)
    direct = []
    for group, mine in zip(groups, reads, strict=True):
        read = [group.hidden_invars[k] in stages.direct_reads for k in group.owners]
        direct.append({j: x for j, x in enumerate(mine) if read[j]})
    return targets, Signals(
        results,
        [dict(enumerate(mine)) for mine in found],
        direct,
    )
