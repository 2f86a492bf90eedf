"""Windows: reverse mode through consecutive steps, in one of two reaches.

exact  the whole step: BPTT, the baseline every rule is compared with
deep   an old state reaches new states only through its group's local transition: paths from one position to
       another across time are cut; all paths inside a step are kept, from layer to layer too
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..compat import Atom, evaluate, evaluate_equation, is_var
from .plan import Plan, Values
from .signal import evaluate_views, owner_of


def run_window(
    plan: Plan, parameters: Values, states: Values, inputs: Values, wanted: Sequence[Atom], deep: bool = False
) -> tuple[Values, list[jax.Array]]:
    """Run steps one after the other: the last states, and the wanted values of every step."""
    moving = [old for old, _ in plan.carried]
    fixed = parameters | states.pick(v for v in states if v not in moving)
    new = [n for _, n in plan.carried]
    step = _deep_step if deep else _exact_step

    def one(old: Values, xs: Values) -> tuple[Values, list[Any]]:
        results = step(plan, fixed | old | xs, [*new, *wanted])
        states = zip(moving, results, strict=False)
        return Values((v, jnp.broadcast_to(x, v.aval.shape).astype(v.aval.dtype)) for v, x in states), results[
            len(new) :
        ]

    last, values = jax.lax.scan(one, states.pick(moving), inputs)
    return states | last, values


def _exact_step(plan: Plan, env: Values, wanted: Sequence[Atom]) -> list[Any]:
    jaxpr, consts = plan.program.closed.jaxpr, plan.program.closed.consts
    results = evaluate(jaxpr, consts, *(env[v] for v in jaxpr.invars))
    found = {v: x for v, x in zip(jaxpr.outvars, results, strict=True) if is_var(v)}
    return [found[v] if is_var(v) else v.val for v in wanted]


def _deep_step(plan: Plan, env: Values, wanted: Sequence[Atom]) -> list[Any]:
    """Old states stand still in every view but the loss's; each group's transition comes in as a δ of value zero."""
    jaxpr, consts = plan.program.closed.jaxpr, plan.program.closed.consts
    hidden = [v for group in plan.groups for v in group.hidden_invars]
    still = env | Values((v, jax.lax.stop_gradient(env[v])) for v in hidden)
    still = Values(zip(jaxpr.constvars, consts, strict=True)) | still
    known = plan.compute(plan.derivative_variables, jax.tree.map(jax.lax.stop_gradient, still))
    delta = {}
    for local in plan.locals:
        group = local.group
        new = local(known, group.concat_hidden([env[v] for v in group.hidden_invars]), [known[v] for v in local.taps])
        moved = group.split_hidden(new - jax.lax.stop_gradient(new))
        delta.update(zip(group.hidden_outvars, moved, strict=True))
    run = lambda i, operands: evaluate_equation(plan.equations[i], operands)
    return evaluate_views(plan.equations, wanted, owner_of(plan.groups), still, env.pick(hidden), delta, run)


def window_gradient(
    plan: Plan,
    parameters: Values,
    states: Values,
    inputs: Values,
    targets: Sequence[Atom],
    cotangents: Sequence[jax.Array],
    others: Sequence[Atom] = (),
    deep: bool = False,
) -> tuple[Values, list[jax.Array], Values, Values]:
    """Reverse mode through a window for cotangents (t, ...) of targets.

    Gradients of the parameters, credit γ of every group at the window's start, the last states, and the values
    of targets and others.
    """
    hidden = [v for group in plan.groups for v in group.hidden_invars]

    def window(parameters: Values, old: Values) -> tuple[list[jax.Array], tuple]:
        new, values = run_window(plan, parameters, states | old, inputs, [*targets, *others], deep)
        return values[: len(targets)], (new, values)

    values, pull, (new, every) = jax.vjp(window, parameters, states.pick(hidden), has_aux=True)
    gradients, bars = pull([c.astype(v.dtype) for c, v in zip(cotangents, values, strict=True)])
    gamma = [group.concat_hidden([bars[v] for v in group.hidden_invars]) for group in plan.groups]
    return gradients, gamma, new, Values(zip([*targets, *others], every, strict=True))
