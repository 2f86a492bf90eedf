"""Forward mode through a sequence: the exact derivative of its loss along directions.

For a direction u in the space of the parameters, nothing cut:

    ḣ_t = J_t ḣ_{t-1} + (∂h_t/∂θ) u        ⟨g_true, u⟩ = Σ_t w_t ℓ̇_t

Only ḣ is carried, one for each direction, so memory does not depend on T. Letters: t
steps, k directions, u one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import sum_type
from ..compiled_step import CompiledStep, Values


def linearised(
    has_forward_mode: bool, function: Callable[..., tuple[Any, Any]], *primals: Any
) -> tuple[Callable[..., Any], Any]:
    """The forward derivative of a function at a point, as a linear map of tangents.

    ``function`` returns a pair: what is differentiated, and auxiliary values, which
    follow. A derivative that is written for reverse mode alone is transposed, which
    works since the pull-back is linear in its cotangent.
    """
    if has_forward_mode:
        _, push, aux = jax.linearize(function, *primals, has_aux=True)
        return push, aux
    value, pull, aux = jax.vjp(function, *primals, has_aux=True)
    transposed = jax.linear_transpose(pull, value)
    return lambda *tangents: transposed(tangents)[0], aux


def derivatives_along(
    step: CompiledStep,
    parameters: Values,
    states: Values,
    inputs: Values,
    weights: jax.Array,
    directions: Values,
) -> jax.Array:
    """(k,) derivatives of Σ_t w_t ℓ_t along k directions (k, ...) of the parameters.

    A loss of weight 0 contributes nothing, even if it is NaN.
    """
    fixed = states.pick(v for v in states if v not in step.written)
    moving = step.moving
    count = len(next(iter(directions.values())))
    dtype = sum_type(weights.dtype)

    def one(carry: tuple, at: tuple) -> tuple[tuple, None]:
        old, old_tangents, total, lost = carry
        xs, weight = at

        def run(parameters: Values, given: Values) -> tuple[tuple, Values]:
            new, targets, _ = step.run(parameters, fixed | old | given, xs)
            return (new.pick(moving), targets[0]), new.pick(step.written)

        push, new = linearised(step.has_forward_mode, run, parameters, old.pick(moving))
        new_tangents, losses = jax.vmap(push)(directions, old_tangents)
        counted = jnp.where(weight == 0, 0, losses) * weight
        # Compensated summation: the rounding errors of 100,000 steps would add up.
        term = counted.astype(dtype) - lost
        sum_ = total + term
        lost = (sum_ - total) - term
        return (new, new_tangents, sum_, lost), None

    still = Values(
        (v, jnp.zeros((count, *step.states[v].shape), step.states[v].dtype))
        for v in moving
    )
    zero = jnp.zeros(count, dtype)
    start = (states.pick(step.written), still, zero, zero)
    (_, _, total, _), _ = jax.lax.scan(one, start, (inputs, weights))
    return total
