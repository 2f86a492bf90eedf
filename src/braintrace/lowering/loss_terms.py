"""A loss as a function of a sum over samples, so that devices exchange it once for all
steps and not once a block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..compat import Equation, Var, is_var, values_of
from ..compiled_step import LossTerms, Values
from ..operations import is_linear, operation_of, run_equation
from .stages import Stages


def loss_terms(stages: Stages) -> LossTerms | None:
    """The terms of a loss Σ_b z_b, a mean, or another function of such a sum alone;
    None for other losses."""
    found = _last_sum(stages)
    if found is None:
        return None
    equation, after = found
    (z,) = equation.invars

    def terms(constants: Values, values: Values) -> jax.Array:
        x = stages.compute([z], constants | values)[z]
        axes = tuple(axis for axis in equation.params['axes'] if axis > 0)
        return jnp.sum(x, axis=axes, dtype=x.dtype)

    def total(constants: Values, terms: jax.Array) -> Any:
        result = equation.outvars[0]
        value = jnp.sum(terms, axis=0, dtype=terms.dtype)
        for eqn in after:
            operands = values_of(eqn.invars, constants | {result: value})
            (result,), (value,) = eqn.outvars, run_equation(eqn, operands)
        return value

    return LossTerms(terms, total)


def _last_sum(stages: Stages) -> tuple[Equation, list[Equation]] | None:
    """The sum over the first axis and all others that the only target depends on, and
    the equations after it in order."""
    if len(stages.targets) != 1:
        return None
    (v,), producer = stages.targets, stages.dependence.producer
    after: list[Equation] = []
    while is_var(v) and v in producer and not v.aval.shape:
        equation = stages.equations[producer[v]]
        varying: list[Var] = [
            x for x in equation.invars if is_var(x) and x not in stages.fixed
        ]
        if len(varying) != 1 or len(equation.outvars) != 1:
            return None
        operation = operation_of(equation)
        # No other reduction is linear.
        if operation and operation.family == 'reduction' and is_linear(equation):
            return (equation, after[::-1]) if 0 in equation.params['axes'] else None
        after.append(equation)
        (v,) = varying
    return None
