"""A numerical probe for primitives without a rule: does element e reach only element e?

The reverse derivative is asked, not the value, since a spike does not move under a small change.
Cotangents select the elements whose index has a given bit; no gradient may appear elsewhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..compat import Equation, evaluate_equation, is_differentiable

_LIMIT = 1 << 16


def is_elementwise(eqn: Equation) -> bool:
    """True if every differentiable operand has the result's shape and reaches it element by element."""
    if len(eqn.outvars) != 1 or not is_differentiable(eqn.outvars[0]):
        return False
    shape = eqn.outvars[0].aval.shape
    moved = [k for k, v in enumerate(eqn.invars) if is_differentiable(v)]
    size = int(np.prod(shape))
    if not moved or size > _LIMIT or any(eqn.invars[k].aval.shape != shape for k in moved):
        return False
    if any(not is_differentiable(v) and v.aval.size > 1 for v in eqn.invars):
        return False
    try:
        with jax.ensure_compile_time_eval():
            return all(_probe(eqn, moved, shape, size, seed) for seed in range(2))
    except Exception:  # noqa: BLE001 - whatever a foreign primitive raises, it did not pass the probe
        return False


def _probe(eqn: Equation, moved: list[int], shape: tuple[int, ...], size: int, seed: int) -> bool:
    draw = np.random.default_rng(seed)
    values = [
        jnp.asarray(draw.uniform(0.1, 0.9, v.aval.shape), v.aval.dtype)
        if k in moved
        else jnp.ones(v.aval.shape, v.aval.dtype)
        for k, v in enumerate(eqn.invars)
    ]

    def run(*operands: jax.Array) -> jax.Array:
        filled = list(values)
        for k, operand in zip(moved, operands, strict=True):
            filled[k] = operand
        return evaluate_equation(eqn, filled)[0]

    _, pull = jax.vjp(run, *(values[k] for k in moved))
    index = np.arange(size).reshape(shape)
    touched = False
    for bit in range(max(size - 1, 1).bit_length()):
        for side in (0, 1):
            chosen = (index >> bit & 1) == side
            for grad in pull(jnp.asarray(chosen, eqn.outvars[0].aval.dtype)):
                moved_elements = np.asarray(grad) != 0
                touched |= bool(moved_elements.any())
                if (moved_elements & ~chosen).any():
                    return False
    return touched
