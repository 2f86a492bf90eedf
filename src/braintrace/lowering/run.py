"""Running a step: in the parts that a solver runs one after the other, or as a whole
from parameters and old states, for reverse or forward mode through it.

whole   nothing is cut: BPTT and RTRL
deep    an old state reaches new states of its own group only through the local step:
        paths from one position of a group to another across time are cut, all others
        are kept
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..analysis.dependence import of
from ..arrays import without_gradient
from ..compat import Atom, Var, is_differentiable, is_var, values_of
from ..compiled_step import Values
from ..operations import run_equation
from ..operations.computed_once import computed_once
from .local_step import new_components
from .stages import Run, Stages

Result = tuple[Values, list[Any], Values]
"""New states under the keys of the old ones, targets, auxiliary values."""


# ---------------------------------------------------------------- in parts


def constants(stages: Stages, parameters: Values, states: Values) -> Values:
    """Everything that no data reaches, and weights prepared for the time loop."""
    written = {old for old, _ in stages.carried}
    unwritten = states.pick(v for v in states if v not in written)
    given = _closed_over(stages) | parameters | unwritten
    # What takes long is not computed again by each operation that reads it.
    costly = stages.compute(stages.costly, given).pick(stages.costly)
    apart = computed_once(list(costly.values()))
    known = given | Values(zip(costly, apart, strict=True))
    env = stages.compute(stages.constants, known)
    for i, prepared in stages.prepared.items():
        weight = env[stages.equations[i].invars[prepared.operand]]
        env[prepared.weight] = prepared.kernel.prepare(weight)
    return env


def project(stages: Stages, constants: Values, inputs: Values) -> Values:
    """What inputs alone determine."""
    return stages.compute(stages.projected, constants | inputs).pick(stages.projected)


def advance(stages: Stages, constants: Values, values: Values) -> tuple[Values, Values]:
    """The next states, and what derivatives need of the step."""
    wanted = (*stages.next_states, *stages.kept)
    env = stages.compute(wanted, constants | values)
    states = _next_states(stages, values_of(stages.next_states, env))
    return states, env.pick(stages.kept)


def advance_once(
    stages: Stages, constants: Values, values: Values
) -> tuple[Values, Values]:
    """``project`` and ``advance`` of one step without a loop. Products of concatenated
    inputs are not split: nothing would leave the loop, and each part of the weight
    would be copied."""
    left = [*stages.projected, *stages.kept]
    wanted = (*stages.next_states, *left)
    env = stages.compute(wanted, constants | values, equations=stages.unsplit)
    states = _next_states(stages, values_of(stages.next_states, env))
    return states, env.pick(left)


def _next_states(stages: Stages, results: Sequence[Any]) -> Values:
    """New states under the keys of the old ones, from values that begin with theirs."""
    new = Values()
    for (old, _), x in zip(stages.carried, results, strict=False):
        new[old] = jnp.broadcast_to(x, old.aval.shape).astype(old.aval.dtype)
    return new


def complete(stages: Stages, constants: Values, values: Values) -> Values:
    """The values with all that derivative programs read."""
    env = stages.compute(stages.derivative_variables, constants | values)
    return env.pick(v for v in env if v not in constants)


def outputs(stages: Stages, constants: Values, values: Values) -> Values:
    """Targets and auxiliary values."""
    wanted = dict.fromkeys((*stages.targets, *stages.aux))
    return stages.compute(wanted, constants | values).pick(wanted)


# ---------------------------------------------------------------- as a whole


def _wanted(stages: Stages) -> list[Atom]:
    return [*stages.next_states, *stages.targets, *stages.aux]


def _result(stages: Stages, states: Values, results: Sequence[Any]) -> Result:
    """Sort the values of new states, targets and auxiliary values. States that the step
    does not write are kept."""
    rest = list(results[len(stages.next_states) :])
    targets, aux = rest[: len(stages.targets)], rest[len(stages.targets) :]
    new = states | _next_states(stages, results)
    return new, targets, Values(zip(stages.aux, aux, strict=True))


def _closed_over(stages: Stages) -> Values:
    closed = stages.program.closed
    return Values(zip(closed.jaxpr.constvars, closed.consts, strict=True))


def run_whole(
    stages: Stages,
    parameters: Values,
    states: Values,
    inputs: Values,
    silent: jax.Array | None = None,
) -> Result:
    """The step as it is; where ``silent``, equations that only targets need send no
    gradient back."""
    wanted = _wanted(stages)
    given = _closed_over(stages) | parameters | states | inputs
    env = stages.compute(wanted, given, _silenced(stages, silent))
    return _result(stages, states, values_of(wanted, env))


def run_deep(
    stages: Stages,
    parameters: Values,
    states: Values,
    inputs: Values,
    silent: jax.Array | None = None,
) -> Result:
    """Old states are constant to the new states of their own group, where the local step
    enters as a δ of value zero."""
    env = _closed_over(stages) | parameters | states | inputs
    groups, dependence = stages.analysed.groups, stages.dependence
    stop = jax.lax.stop_gradient
    old = [v for group in groups for v in group.hidden_invars]
    still = env | Values((v, stop(env[v])) for v in old)
    known = stages.compute(stages.derivative_variables, jax.tree.map(stop, still))
    delta, owner = Values(), dict[Var, int]()
    for g, local in enumerate(stages.locals):
        mine, taps = local.group.old_components(env), known.pick(local.taps)
        # What passes from one new state to another is found where these are read.
        moved = new_components(stages, local, known, mine, taps, direct=True)
        delta |= local.group.new_states([x - stop(x) for x in moved])
        owner |= dict.fromkeys(local.group.hidden_outvars, g)
    # Values that read an old state directly differ between groups: each group has its
    # own old states still. All others are computed once.
    direct = dependence.old(stages.program.hidden)
    run, new, common = _silenced(stages, silent), Values(), Values()
    views = []
    for group in groups:
        others = env.pick(v for v in old if v not in group.hidden_invars)
        views.append(still | others)
    order = lambda v: dependence.producer.get(v, -1)
    for v in sorted(owner, key=order):
        g = owner[v]
        views[g] = stages.compute([v], views[g] | common | new, run)
        new[v] = views[g][v] + delta[v]
        made = (u for u in views[g] if u in dependence.producer and u not in owner)
        is_common = lambda u: not of(dependence.direct, u).reads & direct
        common |= views[g].pick(filter(is_common, made))
    wanted = _wanted(stages)
    found = stages.compute(wanted, env | common | new, run)
    return _result(stages, states, values_of(wanted, found))


def _silenced(stages: Stages, silent: jax.Array | None) -> Run:
    """How to run an equation: what only targets need sends no gradient back from a
    silent step.

    That gradient would be zero times something that may be infinite.
    """
    core, producer = stages.core, stages.dependence.producer

    def enters(v: Atom) -> bool:
        if not is_var(v) or not is_differentiable(v):
            return False
        return v not in producer or producer[v] in core

    def run(i: int, operands: list[Any]) -> list[Any]:
        eqn = stages.equations[i]
        if silent is not None and i not in core:
            pairs = zip(eqn.invars, operands, strict=True)
            operands = [
                without_gradient(silent, x) if enters(v) else x for v, x in pairs
            ]
        return run_equation(eqn, operands)

    return run
