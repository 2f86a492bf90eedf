"""Results of equations that are known already, with the derivatives of their
computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax

from ..arrays import known_value
from ..compat import Equation, Var, sub_programs
from ..compiled_step import Values
from ..operations import run_equation
from .taps import TapEquation


def replay(
    tap: TapEquation | None,
    equation: Equation,
    operands: Sequence[Any],
    kept: Mapping[Var, Any],
) -> Values:
    """Results of an equation; of a tap those that were kept, differentiable in
    themselves and, through the equation, in its data.

    A tap is not run again, except where it holds sub-programs.
    """
    if tap is None:
        return Values(
            zip(equation.outvars, run_equation(equation, operands), strict=True)
        )
    data = tap.data
    places = [i for i, v in enumerate(equation.outvars) if v in kept]
    ys = [kept[equation.outvars[i]] for i in places]
    if data and any(sub_programs(equation)):
        results = run_equation(equation, operands)
        # The value is y; its derivative is that of y itself and that of the data.
        ys = [known_value(y, results[i] + y) for i, y in zip(places, ys, strict=True)]
    elif data:
        ys = _replayed(equation, data, tuple(places), ys, list(operands))
    return Values((equation.outvars[i], y) for i, y in zip(places, ys, strict=True))


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _replayed(
    equation: Equation, data: tuple, places: tuple, ys: list[Any], operands: list[Any]
) -> list[Any]:
    return ys


@_replayed.defjvp
def _replayed_jvp(
    equation: Equation, data: tuple, places: tuple, primals: Any, tangents: Any
) -> Any:
    ys, operands = primals

    def again(moving: list[Any]) -> list[Any]:
        filled = list(operands)
        for k, x in zip(data, moving, strict=True):
            filled[k] = x
        results = run_equation(equation, filled)
        return [results[i] for i in places]

    given = [operands[k] for k in data]
    _, moved = jax.jvp(again, (given,), ([tangents[1][k] for k in data],))
    return ys, [a + b for a, b in zip(tangents[0], moved, strict=True)]
