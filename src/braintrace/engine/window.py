"""Exact windows: plain reverse mode through the whole step, the baseline every rule is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..compat import Var, evaluate, is_var
from .plan import Plan, Values


def run_window(
    plan: Plan, parameters: Values, states: Values, inputs: Values, aux: Sequence[Var]
) -> tuple[Values, jax.Array, Values]:
    """Run a window step by step: next states, the loss of every step, auxiliary values."""
    jaxpr, consts = plan.program.closed.jaxpr, plan.program.closed.consts
    fixed = states.pick(v for v in states if v not in {old for old, _ in plan.carried})

    def step(old: Values, xs: Values) -> tuple[Values, tuple]:
        env = parameters | fixed | old | xs
        results = evaluate(jaxpr, consts, *(env[v] for v in jaxpr.invars))
        found = {v: x for v, x in zip(jaxpr.outvars, results, strict=True) if is_var(v)}
        read = lambda v, like: found[v] if is_var(v) else jnp.full(like.aval.shape, v.val, like.aval.dtype)
        new = Values((o, read(n, o)) for o, n in plan.carried)
        return new, (read(plan.targets[0], plan.targets[0]), Values((v, found[v]) for v in aux))

    last, (losses, extras) = jax.lax.scan(step, states.pick(old for old, _ in plan.carried), inputs)
    return states | last, losses, extras


def window_gradient(
    plan: Plan, parameters: Values, states: Values, inputs: Values, weights: jax.Array, aux: Sequence[Var]
) -> tuple[Values, Any]:
    """Gradient of the weighted losses of a window, its first states held constant."""

    def total(parameters: Values) -> tuple[jax.Array, Any]:
        new, losses, extras = run_window(plan, parameters, states, inputs, aux)
        used = jnp.where(weights == 0, jnp.zeros_like(losses), losses)
        return jnp.sum(used * weights.astype(losses.dtype)), (new, losses, extras)

    gradients, rest = jax.grad(total, has_aux=True)(parameters)
    return gradients, rest
