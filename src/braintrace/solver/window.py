"""Windows: reverse mode through consecutive steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..compiled_step import CompiledStep, Components, Values


class Window(NamedTuple):
    """What a window gives: gradients of parameters, credit at its start, and its values."""

    gradients: Values
    credit: list[Components]
    states: Values
    targets: list[jax.Array]
    aux: Values


def run_window(
    step: CompiledStep,
    parameters: Values,
    states: Values,
    inputs: Values,
    deep: bool = False,
    silent: jax.Array | None = None,
) -> tuple[Values, list[jax.Array], Values]:
    """Run steps one after the other: the last states, targets and auxiliary values of all.

    ``deep``: paths from one position to another across time are cut. Where ``silent`` (t,), no
    gradient enters a step from what only its targets need.
    """
    run = step.run_deep if deep else step.run
    fixed = states.pick(v for v in states if v not in step.written)

    def one(old: Values, at: tuple) -> tuple[Values, tuple]:
        xs, silent = at
        new, targets, aux = run(parameters, fixed | old, xs, silent)
        return new.pick(step.written), (targets, aux)

    last, (targets, aux) = jax.lax.scan(one, states.pick(step.written), (inputs, silent))
    return states | last, targets, aux


def window_gradient(
    step: CompiledStep,
    parameters: Values,
    states: Values,
    inputs: Values,
    cotangents: Sequence[jax.Array],
    deep: bool = False,
    credit_after: Callable[[list[Components]], list[Components]] | None = None,
) -> Window:
    """Reverse mode through a window for cotangents (t, ...) of its targets.

    ``credit_after(states)``: the credit that the states at its end get from what follows.
    """
    silent = _silent(step, cotangents)
    parts = lambda states: [group.components(states) for group in step.groups]

    def window(parameters: Values, old: list[list[jax.Array]]) -> tuple[tuple, tuple]:
        moved = Values(states)
        for group, components in zip(step.groups, old, strict=True):
            moved |= group.states(components)
        new, targets, aux = run_window(step, parameters, moved, inputs, deep, silent)
        return (targets, parts(new)), (new, targets, aux)

    (targets, end), pull, found = jax.vjp(window, parameters, parts(states), has_aux=True)
    after = jax.tree.map(jnp.zeros_like, end)
    if credit_after is not None:
        later = credit_after([dict(enumerate(components)) for components in end])
        after = [
            [mine[i].astype(x.dtype) for i, x in enumerate(components)]
            for mine, components in zip(later, end, strict=True)
        ]
    bars = [c.astype(x.dtype) for c, x in zip(cotangents, targets, strict=True)]
    gradients, credit = pull((bars, after))
    return Window(gradients, [dict(enumerate(mine)) for mine in credit], *found)


def _silent(step: CompiledStep, cotangents: Sequence[jax.Array]) -> jax.Array | None:
    """Steps at which nothing but new states has a cotangent."""
    new = {key for _, key in step.hidden}
    outputs = [c for key, c in zip(step.targets, cotangents, strict=True) if key not in new]
    if not outputs:
        return None
    zero = [jnp.all(c.reshape(len(c), -1) == 0, axis=1) for c in outputs]
    return jnp.all(jnp.stack(zero), axis=0)
