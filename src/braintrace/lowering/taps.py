"""Taps: equations where parameters meet data, y = op(x, w)."""

from __future__ import annotations

from dataclasses import dataclass

from ..analysis.dependence import StepDependence
from ..analysis.sites import weight_operands
from ..compat import Equation, Var, is_differentiable


@dataclass(frozen=True)
class TapEquation:
    """An equation where parameters meet data.

    ``weights``: the numbers of its weight operands. ``data``: the operands through
    which gradient passes on to the data. ``results``: those that can carry a gradient.
    """

    equation: Equation
    weights: tuple[int, ...]
    data: tuple[int, ...]
    results: tuple[Var, ...]


def find_taps(dependence: StepDependence) -> dict[int, TapEquation]:
    """All taps of a program by the index of their equation."""
    found = {}
    for i, eqn in enumerate(dependence.program.equations):
        weights = tuple(weight_operands(dependence, eqn))
        results = tuple(v for v in eqn.outvars if is_differentiable(v))
        if weights and results:
            operands = enumerate(eqn.invars)
            data = (k for k, v in operands if k not in weights and is_differentiable(v))
            found[i] = TapEquation(eqn, weights, tuple(data), results)
    return found
