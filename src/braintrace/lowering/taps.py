"""Taps: the equations where parameters meet data."""

from __future__ import annotations

from dataclasses import dataclass

from ..analysis.facts import Facts
from ..analysis.sites import weight_operands
from ..compat import Equation, Var, is_differentiable


@dataclass(frozen=True)
class TapEquation:
    """An equation where parameters meet data; ``weights`` are the numbers of its weight
    operands."""

    equation: Equation
    weights: tuple[int, ...]

    @property
    def results(self) -> tuple[Var, ...]:
        """Results that can carry a gradient."""
        return tuple(v for v in self.equation.outvars if is_differentiable(v))

    @property
    def data(self) -> tuple[int, ...]:
        """Operands through which gradient passes on to the data."""
        operands = enumerate(self.equation.invars)
        return tuple(
            k for k, v in operands if k not in self.weights and is_differentiable(v)
        )


def find_taps(facts: Facts) -> dict[int, TapEquation]:
    """All taps of a program by the index of their equation."""
    found = {}
    for i, eqn in enumerate(facts.program.equations):
        tap = TapEquation(eqn, tuple(weight_operands(facts, eqn)))
        if tap.weights and tap.results:
            found[i] = tap
    return found
