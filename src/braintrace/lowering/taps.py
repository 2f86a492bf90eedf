"""Taps: equations where parameters meet data, y = op(x, w): how they are found, and
what a solver sees of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

from ..analysis.dependence import StepDependence
from ..analysis.sites import weight_operands
from ..compat import MARK, Equation, Var, is_differentiable, is_var, scope
from ..compiled_step import Box, CompiledSite, Operands, Tap, Values
from ..operations import SharedUse, operation_of, run_equation, use_of
from ..program import cut_inside
from ..source_lines import source_line

if TYPE_CHECKING:
    from .stages import Stages


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


def lowered_tap(stages: Stages, i: int, tap: TapEquation) -> Tap:
    """A tap as the solver sees it."""
    dependence, equation = stages.dependence, tap.equation
    weights = [equation.invars[k] for k in tap.weights]
    by_weight = {}
    for v in weights:
        grads = dependence.total[v].grads
        by_weight[v] = tuple(
            p for p in dependence.program.parameters if grads & dependence.bit[p.invar]
        )
    made = [stages.equations[j] for j in stages.needed(weights)]
    # The equation as paths into each group see it.
    cut = [cut_inside(i, equation, local.positions.cuts) for local in stages.locals]
    return Tap(
        weights=tuple(weights),
        results=tap.results,
        sites=tuple(_sites(stages, tap, cut)),
        operands=partial(_operands, stages, equation),
        gradients=partial(_gradients, stages, equation, tap.weights),
        cut_gradients={
            g: partial(_gradients, stages, found, tap.weights)
            for g, found in enumerate(cut)
            if found is not equation
        },
        parameters=tuple(dict.fromkeys(p for mine in by_weight.values() for p in mine)),
        by_weight=by_weight,
        operation=equation.primitive.name,
        source=source_line(equation),
        marked=any(MARK in scope(e) for e in (equation, *made)),
        by_sample=_is_by_sample(stages, tap),
    )


def _sites(
    stages: Stages, tap: TapEquation, cut: Sequence[Equation]
) -> Iterator[CompiledSite]:
    for v in tap.results:
        for g, (local, equation) in enumerate(zip(stages.locals, cut, strict=True)):
            if not local.reached.get(v):
                continue
            result = equation.outvars.index(v)
            for k in tap.weights:
                use = use_of(equation, k, result, stages.dependence.constant)
                positions = local.positions.labels[v]
                if v in local.shared:
                    use = SharedUse(use, local.shared[v])
                    positions = use.positions
                has_input = use.input is None or use.input in tap.data
                yield CompiledSite(
                    weight=equation.invars[k],
                    result=v,
                    group=g,
                    use=use,
                    positions=positions,
                    enters=local.enters[v],
                    factorises=use.factorises and has_input,
                )


def _is_by_sample(stages: Stages, tap: TapEquation) -> bool:
    """Whether samples come first in the result and in all operands of a step."""
    if len(tap.weights) > 1 or len(tap.results) > 1:
        return False
    equation, (weight,), (result,) = tap.equation, tap.weights, tap.results
    number = equation.outvars.index(result)
    use = use_of(equation, weight, number, stages.dependence.constant)
    axes = use.sample_axes
    moving = (
        k for k, v in enumerate(equation.invars) if is_var(v) and v not in stages.fixed
    )
    return axes is not None and all(axes[k] == 0 for k in (*moving, -1))


def pieces_of(stages: Stages) -> dict[Var, tuple[Var, Box]]:
    """Weights that are parts of a parameter, where no two overlap."""
    parameters = {p.invar for p in stages.program.parameters}
    found: dict[Var, tuple[Var, Box]] = {}
    for weight in stages.weights:
        if weight not in stages.dependence.producer:
            continue
        maker = stages.equations[stages.dependence.producer[weight]]
        operation = operation_of(maker)
        if operation is None or operation.part is None:
            continue
        whole, box = maker.invars[0], operation.part(maker)
        if box is None or whole not in parameters:
            continue
        others = [other for of, other in found.values() if of is whole]
        if not any(_overlap(box, other) for other in others):
            found[weight] = (whole, box)
    return found


def _overlap(a: Box, b: Box) -> bool:
    """Whether two boxes of one array have an element in common."""
    pairs = zip(a, b, strict=True)
    return all(p.start < q.stop and q.start < p.stop for p, q in pairs)


def _operands(
    stages: Stages, equation: Equation, constants: Values, values: Values
) -> tuple[Operands, Operands]:
    """Operands that stay the same, and those of every step."""
    fixed, steps = {}, {}
    for k, v in enumerate(equation.invars):
        if not is_var(v):
            fixed[k] = v.val
        elif v in stages.fixed:
            fixed[k] = constants[v]
        else:
            steps[k] = values[v]
    return fixed, steps


def _gradients(
    stages: Stages,
    equation: Equation,
    weights: Sequence[int],
    fixed: Operands,
    steps: Operands,
    y_bars: Mapping[Var, jax.Array],
    boxes: Mapping[Var, Box | None],
) -> Values:
    """Gradient of every weight operand: one pull-back over all steps of a block."""
    length = len(next(iter(y_bars.values())))
    if len(weights) == 1 and len(y_bars) == 1:
        (k,), (y,) = weights, y_bars
        result = equation.outvars.index(y)
        use = use_of(equation, k, result, stages.dependence.constant)
        box = boxes.get(y)
        y_bar = y_bars[y] if box is None else y_bars[y][:, *box]
        gradient = use.gradient_by_share(fixed, steps, y_bar, box)
        return Values({equation.invars[k]: gradient})

    def block(moving: Operands) -> list[Any]:
        def one(step: Operands) -> list[Any]:
            values = {**fixed, **step, **moving}
            results = run_equation(equation, [values[k] for k in range(len(values))])
            return [
                y for v, y in zip(equation.outvars, results, strict=True) if v in y_bars
            ]

        return jax.vmap(one, axis_size=length)(steps)

    _, pull = jax.vjp(block, {k: fixed[k] for k in weights})
    (grads,) = pull([y_bars[v] for v in equation.outvars if v in y_bars])
    total = Values()
    for k, grad in grads.items():
        v = equation.invars[k]
        total[v] = total[v] + grad if v in total else grad
    return total
