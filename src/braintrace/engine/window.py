"""Windows: reverse mode through consecutive steps, in one of two reaches.

exact  the whole step: BPTT, the baseline every rule is compared with
deep   an old state reaches new states only through its group's local transition: paths from one position to
       another across time are cut; all paths inside a step are kept, from layer to layer too
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..compat import Atom, Var, evaluate_equation, is_differentiable, is_var
from .masking import Mask, finite, without_nan
from .plan import Components, Plan, Values, valued
from .signal import evaluate_views, owner_of


def run_window(
    plan: Plan,
    parameters: Values,
    states: Values,
    inputs: Values,
    wanted: Sequence[Atom],
    deep: bool = False,
    mask: Mask | None = None,
) -> tuple[Values, list[jax.Array]]:
    """Run steps one after the other: the last states, and the wanted values of every step.

    Where the mask is silent, no gradient enters the step from what its states do not need, and its derivatives are
    taken at values without NaN; all values are those of the step itself.
    """
    moving = [old for old, _ in plan.carried]
    fixed = parameters | states.pick(v for v in states if v not in moving)
    new = [n for _, n in plan.carried]
    step = _deep_step if deep else exact_step

    def one(old: Values, xs: tuple[Values, Mask | None]) -> tuple[Values, list[Any]]:
        inputs, mask = xs
        if mask is None:
            results = step(plan, fixed | old | inputs, [*new, *wanted], _quietened(plan, None))
        else:
            results = masked(old, inputs, mask)
        states = zip(moving, results, strict=False)
        return Values((v, jnp.broadcast_to(x, v.aval.shape).astype(v.aval.dtype)) for v, x in states), results[
            len(new) :
        ]

    def masked(old: Values, inputs: Values, mask: Mask) -> list[Any]:
        every = [*new, *wanted]
        safe = finite(without_nan(old | inputs, mask.silent), mask.dead)
        results = step(plan, fixed | safe, every, _quietened(plan, mask.silent))
        held = jax.tree.map(jax.lax.stop_gradient, (fixed | old | inputs, results))

        def as_they_are() -> list[Any]:
            return [jnp.asarray(x, r.dtype) for x, r in zip(exact_step(plan, held[0], every), held[1], strict=True)]

        raw = jax.lax.cond(mask.silent, as_they_are, lambda: held[1])
        moves = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
        return [valued(a, b) if moves(b) else a for a, b in zip(raw, results, strict=True)]

    last, values = jax.lax.scan(one, states.pick(moving), (inputs, mask))
    return states | last, values


Run = Callable[[int, list[Any]], list[Any]]


def _quietened(plan: Plan, silent: jax.Array | None) -> Run:
    """How to run an equation: what a loss alone needs takes the gradient of a silent step no further.

    Its gradient is nothing times something, and that something may be infinite.
    """
    core = set(plan.needed((new for _, new in plan.carried), ()))
    outside = {v for i, eqn in enumerate(plan.equations) if i not in core for v in eqn.outvars}

    def run(i: int, operands: list[Any]) -> list[Any]:
        eqn = plan.equations[i]
        if silent is not None and i not in core:
            border = [is_var(v) and is_differentiable(v) and v not in outside for v in eqn.invars]
            operands = [_quiet(silent, x) if b else x for b, x in zip(border, operands, strict=True)]
        return evaluate_equation(eqn, operands)

    return run


@jax.custom_vjp
def _quiet(silent: jax.Array, x: jax.Array) -> jax.Array:
    return x


_quiet.defvjp(lambda silent, x: (x, silent), lambda silent, bar: (None, jnp.where(silent, jnp.zeros_like(bar), bar)))


def exact_step(plan: Plan, env: Values, wanted: Sequence[Atom], run: Run | None = None) -> list[Any]:
    """Wanted values of one step; ``run(i, operands)`` evaluates equation i."""
    run = run or (lambda i, operands: evaluate_equation(plan.equations[i], operands))
    jaxpr, consts = plan.program.closed.jaxpr, plan.program.closed.consts
    known = {**env, **dict(zip(jaxpr.constvars, consts, strict=True))}
    read = lambda v: known[v] if is_var(v) else v.val
    for i in plan.needed(wanted, known):
        eqn = plan.equations[i]
        known.update(zip(eqn.outvars, run(i, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in wanted]


def _deep_step(plan: Plan, env: Values, wanted: Sequence[Atom], run: Run) -> list[Any]:
    """Old states stand still in every view but the loss's; each group's transition comes in as a δ of value zero."""
    jaxpr, consts = plan.program.closed.jaxpr, plan.program.closed.consts
    hidden = [v for group in plan.groups for v in group.hidden_invars]
    still = env | Values((v, jax.lax.stop_gradient(env[v])) for v in hidden)
    still = Values(zip(jaxpr.constvars, consts, strict=True)) | still
    known = plan.compute(plan.derivative_variables, jax.tree.map(jax.lax.stop_gradient, still))
    delta: dict[Var, Any] = {}
    for local in plan.locals:
        group = local.group
        new = local(known, group.components([env[v] for v in group.hidden_invars]), [known[v] for v in local.taps])
        moved = group.from_components([x - jax.lax.stop_gradient(x) for x in new])
        delta.update(zip(group.hidden_outvars, moved, strict=True))
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
    later: Callable[[list[Components]], list[Components]] | None = None,
    masked: bool = True,
) -> tuple[Values, list[Components], Values, Values]:
    """Reverse mode through a window for cotangents (t, ...) of targets.

    Gradients of the parameters, credit γ of every group at the window's start, the last states, and the values
    of targets and others. ``later``: the credit that states at the window's end get from what follows. ``masked``:
    the cotangents of some steps may be zero.
    """
    parts = lambda states: [group.components([states[v] for v in group.hidden_invars]) for group in plan.groups]
    mask = _mask(plan, targets, cotangents) if masked else None

    def window(parameters: Values, old: list[list[jax.Array]]) -> tuple[tuple, tuple]:
        moved = Values()
        for group, components in zip(plan.groups, old, strict=True):
            moved.update(zip(group.hidden_invars, group.from_components(components), strict=True))
        new, values = run_window(plan, parameters, states | moved, inputs, [*targets, *others], deep, mask)
        return (values[: len(targets)], parts(new)), (new, values)

    (values, end), pull, (new, every) = jax.vjp(window, parameters, parts(states), has_aux=True)
    after = jax.tree.map(jnp.zeros_like, end)
    if later is not None:
        told = later([dict(enumerate(x)) for x in end])
        after = [[told[g][i].astype(x.dtype) for i, x in enumerate(found)] for g, found in enumerate(end)]
    gradients, bars = pull(([c.astype(v.dtype) for c, v in zip(cotangents, values, strict=True)], after))
    return (
        gradients,
        [dict(enumerate(found)) for found in bars],
        new,
        Values(zip([*targets, *others], every, strict=True)),
    )


def _mask(plan: Plan, targets: Sequence[Atom], cotangents: Sequence[jax.Array]) -> Mask | None:
    """Steps at which nothing but new states has a cotangent; dead ones, and all after them, have none at all."""
    new = [n for _, n in plan.carried]
    outputs = [c for v, c in zip(targets, cotangents, strict=True) if not any(v is n for n in new)]
    return Mask(Mask.of(outputs).silent, Mask.of(cotangents).dead) if outputs else None
