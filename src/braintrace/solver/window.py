"""Windows: reverse mode through consecutive steps.

Letters: t steps of the window; targets and their cotangents are (t, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..arrays import without_gradient
from ..compiled_step import CompiledStep, Components, Values
from .masking import Mask


class SolvedWindow(NamedTuple):
    """What a window gives: gradients of parameters, credit at its start, and its
    values."""

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
    mask: Mask | None = None,
) -> tuple[Values, list[jax.Array], Values]:
    """Run steps one after the other: the last states, targets and auxiliary values of
    all.

    ``deep``: paths from one position of a group to another across time are cut. At
    silent steps of the mask, equations that only targets need send no gradient back;
    dead steps send none.
    """
    run = step.run_deep if deep else step.run
    fixed = states.pick(v for v in states if v not in step.written)

    def one(old: Values, at: tuple) -> tuple[Values, tuple]:
        xs, mask = at
        if mask is None:
            new, targets, aux = run(parameters, fixed | old, xs)
        else:

            def unless_dead(x: jax.Array) -> jax.Array:
                inexact = jnp.issubdtype(x.dtype, jnp.inexact)
                return without_gradient(mask.dead, x) if inexact else x

            here, before = jax.tree.map(unless_dead, (parameters, old))
            new, targets, aux = run(here, fixed | before, xs, mask.silent)
        return new.pick(step.written), (targets, aux)

    last, (targets, aux) = jax.lax.scan(one, states.pick(step.written), (inputs, mask))
    return states | last, targets, aux


def window_gradient(
    step: CompiledStep,
    parameters: Values,
    states: Values,
    inputs: Values,
    cotangents: Sequence[jax.Array],
    deep: bool = False,
    credit_after: Callable[[list[Components]], list[Components]] | None = None,
    masked: bool = True,
) -> SolvedWindow:
    """Reverse mode through a window for cotangents (t, ...) of its targets.

    ``credit_after(states)``: the credit that the states at its end get from what
    follows. ``masked``: the cotangents of some steps may be zero.
    """
    mask = _mask(step, cotangents, credit_after is None) if masked else None
    parts = lambda states: [group.components(states) for group in step.groups]

    def window(parameters: Values, old: list[list[jax.Array]]) -> tuple[tuple, tuple]:
        moved = Values(states)
        for group, components in zip(step.groups, old, strict=True):
            moved |= group.states(components)
        new, targets, aux = run_window(step, parameters, moved, inputs, deep, mask)
        return (targets, parts(new)), (new, targets, aux)

    (targets, end), pull, found = jax.vjp(
        window, parameters, parts(states), has_aux=True
    )
    after = jax.tree.map(jnp.zeros_like, end)
    if credit_after is not None:
        later = credit_after([dict(enumerate(components)) for components in end])
        after = [
            [mine[i].astype(x.dtype) for i, x in enumerate(components)]
            for mine, components in zip(later, end, strict=True)
        ]
    bars = [c.astype(x.dtype) for c, x in zip(cotangents, targets, strict=True)]
    gradients, credit = pull((bars, after))
    return SolvedWindow(gradients, [dict(enumerate(mine)) for mine in credit], *found)


def _mask(
    step: CompiledStep, cotangents: Sequence[jax.Array], is_last: bool
) -> Mask | None:
    """Silent: nothing but new states has a cotangent; dead: neither has any later step,
    if the window ``is_last``."""
    new = {key for _, key in step.carried}
    outputs = [
        c for key, c in zip(step.targets, cotangents, strict=True) if key not in new
    ]
    if not outputs:
        return None
    return Mask(Mask.of(outputs).silent, Mask.of(cotangents).dead & is_last)
