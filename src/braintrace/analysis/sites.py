"""Where parameters are used: ``y = op(x, p(θ))``.

An equation is a site when one operand is computed from parameters and constants only,
its result depends on data too, and elements of the result reach positions of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..compat import Equation, Var
from ..operations import differentiates
from .cuts import Positions
from .dependence import StepDependence, of


def uses_of_parameters(
    dependence: StepDependence, positions: Sequence[Positions]
) -> Iterator[tuple[int, int, Var, list[int]]]:
    """Where parameters are used, in program order: equation, operand, result, and the
    groups that the result reaches."""
    for i, eqn in enumerate(dependence.program.equations):
        reached = {
            v: [g for g, found in enumerate(positions) if v in found.labels]
            for v in eqn.outvars
        }
        for k in weight_operands(dependence, eqn) if any(reached.values()) else ():
            own = of(dependence.total, eqn.invars[k]).grads & dependence.parameters
            for y, into in reached.items():
                if into and of(dependence.total, y).grads & own:
                    yield i, k, y, into


def weight_operands(dependence: StepDependence, eqn: Equation) -> list[int]:
    """Operands computed from parameters only, of an equation that reads data too or
    makes a new hidden state."""
    bits = [of(dependence.total, v) for v in eqn.invars]
    if all(dependence.is_weight(b) or not b.reads for b in bits) and not any(
        v in dependence.new_bit for v in eqn.outvars
    ):
        return []
    weights = (k for k, b in enumerate(bits) if dependence.is_weight(b))
    return [k for k in weights if differentiates(eqn, k)]
