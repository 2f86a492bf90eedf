"""Numerical probes of dependence where no rule gives it.

For primitives without a rule: does element e reach only element e? The reverse
derivative is tested, not the value, since a spike does not change under a small
perturbation. Cotangents select the elements whose index has a given bit; no gradient
may appear elsewhere. For calls with a derivative of their own: does that derivative
reach further than the body of the call?
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..compat import Equation, evaluate_equation, is_differentiable
from ..operations.labels import CONFLICT, NONE, Labels

_LIMIT, _LARGE = 1 << 16, 1 << 20


def is_elementwise(eqn: Equation) -> bool:
    """True if every differentiable operand has the result's shape and reaches it
    element by element."""
    if len(eqn.outvars) != 1 or not is_differentiable(eqn.outvars[0]):
        return False
    shape = eqn.outvars[0].aval.shape
    moved = [k for k, v in enumerate(eqn.invars) if is_differentiable(v)]
    size = int(np.prod(shape))
    if (
        not moved
        or size > _LIMIT
        or any(eqn.invars[k].aval.shape != shape for k in moved)
    ):
        return False
    if any(not is_differentiable(v) and v.aval.size > 1 for v in eqn.invars):
        return False
    try:
        with jax.ensure_compile_time_eval():
            return all(_probe(eqn, moved, shape, size, seed) for seed in range(2))
    except Exception:
        return False


def _pull_back(
    eqn: Equation, moved: list[int], results: list[int], seed: int
) -> Callable[[list[Any]], list[Any]]:
    """The reverse derivative of some results by some operands, at random values."""
    draw = np.random.default_rng(seed)
    values = [
        jnp.asarray(draw.uniform(0.1, 0.9, v.aval.shape), v.aval.dtype)
        if k in moved
        else jnp.ones(v.aval.shape, v.aval.dtype)
        for k, v in enumerate(eqn.invars)
    ]

    def run(operands: list[jax.Array]) -> list[jax.Array]:
        filled = list(values)
        for k, operand in zip(moved, operands, strict=True):
            filled[k] = operand
        out = evaluate_equation(eqn, filled)
        return [out[i] for i in results]

    _, pull = jax.vjp(run, [values[k] for k in moved])
    return lambda cotangents: pull(
        [
            jnp.asarray(c, eqn.outvars[i].aval.dtype)
            for i, c in zip(results, cotangents, strict=True)
        ]
    )[0]


def _probe(
    eqn: Equation, moved: list[int], shape: tuple[int, ...], size: int, seed: int
) -> bool:
    pull = _pull_back(eqn, moved, [0], seed)
    index = np.arange(size).reshape(shape)
    touched = False
    for bit in range(max(size - 1, 1).bit_length()):
        for side in (0, 1):
            chosen = (index >> bit & 1) == side
            for grad in pull([chosen]):
                moved_elements = np.asarray(grad) != 0
                touched |= bool(moved_elements.any())
                if (moved_elements & ~chosen).any():
                    return False
    return touched


def confirmed(
    eqn: Equation, outs: list[Labels], operands: list[Labels]
) -> list[Labels]:
    """Operand labels of a call with its own derivative; all CONFLICT where that
    contradicts its body.

    With cotangents at the positions with a given bit only, every gradient must be what
    it was with all of them if its own position has the bit, and zero if not.
    """
    given = {
        i: x
        for i, x in enumerate(outs)
        if x is not None and is_differentiable(eqn.outvars[i])
    }
    moved = {
        k: x
        for k, x in enumerate(operands)
        if x is not None and is_differentiable(eqn.invars[k])
    }
    if not given or not moved or sum(v.aval.size for v in eqn.invars) > _LARGE:
        return operands
    found = list(operands)
    index = np.arange(1 + max(int(x.max()) for x in given.values()))
    chosen = np.stack(
        [
            index >> bit & 1 == side
            for bit in range(max(len(index) - 1, 1).bit_length())
            for side in (0, 1)
        ]
    )
    try:
        with jax.ensure_compile_time_eval():
            pull = _pull_back(eqn, list(moved), list(given), 0)
            draw = np.random.default_rng(0)
            cotangents = [
                np.where(x == NONE, 0, draw.uniform(0.5, 1, x.shape))
                for x in given.values()
            ]
            every = pull(cotangents)
            some = jax.vmap(pull)(
                [
                    c * chosen[:, x]
                    for c, x in zip(cotangents, given.values(), strict=True)
                ]
            )
    except Exception:
        # A derivative that fails here fails in training too, and says so there.
        return operands
    for (k, labels), full, part in zip(moved.items(), every, some, strict=True):
        wanted = np.where((labels >= 0) & chosen[:, np.maximum(labels, 0)], full, 0)
        wrong = ~np.isclose(part, wanted, rtol=1e-2, atol=1e-6) & np.isfinite(full)
        if (wrong & (labels != CONFLICT)).any():
            found[k] = np.full_like(labels, CONFLICT)
    return found
