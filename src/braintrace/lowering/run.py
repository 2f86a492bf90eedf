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

from ..compat import Atom, is_differentiable, is_var, values_of
from ..compiled_step import Values
from ..operations import run_equation
from ..operations.computed_once import computed_once
from .local_step import new_components
from .stages import Run, Stages
from .views import evaluate_views

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
    groups = stages.analysed.groups
    owner = {v: g for g, group in enumerate(groups) for v in group.hidden_invars}
    still = env | Values((v, jax.lax.stop_gradient(env[v])) for v in owner)
    known = stages.compute(
        stages.derivative_variables, jax.tree.map(jax.lax.stop_gradient, still)
    )
    delta = Values()
    for local in stages.locals:
        old, taps = local.group.old_components(env), known.pick(local.taps)
        new = new_components(stages, local, known, old, taps)
        moved = [x - jax.lax.stop_gradient(x) for x in new]
        delta |= local.group.new_states(moved)
    of_others = lambda g: env.pick(v for v in owner if owner[v] != g)
    run = _silenced(stages, silent)
    results = evaluate_views(
        stages.analysed, _wanted(stages), still, of_others, delta, run
    )
    return _result(stages, states, results)


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
                _without_gradient(silent, x) if enters(v) else x for v, x in pairs
            ]
        return run_equation(eqn, operands)

    return run


@jax.custom_vjp
def _without_gradient(silent: jax.Array, x: jax.Array) -> jax.Array:
    return x


def _back(silent: jax.Array, bar: jax.Array) -> tuple[None, jax.Array]:
    return None, jnp.where(silent, jnp.zeros_like(bar), bar)


_without_gradient.defvjp(lambda silent, x: (x, silent), _back)
