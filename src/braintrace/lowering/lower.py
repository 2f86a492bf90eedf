"""The narrow waist: an analysed step in, a :class:`CompiledStep` out.

:class:`Stages` sorts the equations of the step; here they become the functions and
records that a solver sees. The functions themselves are in ``run.py`` (forward),
``views.py`` (signals) and ``local_step.py`` (derivatives of groups).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from ..compat import MARK, Equation, Var, has_reverse_only, is_var, scope
from ..compiled_step import (
    Box,
    CompiledGroup,
    CompiledSite,
    CompiledStep,
    Operands,
    Tap,
    Values,
)
from ..operations import SharedUse, operation_of, run_equation, use_of
from ..program import cut_inside
from ..source_lines import source_line
from . import local_step, run
from .effects import effect_box, effects_beyond
from .links import ReadoutLinks
from .local_step import LocalProgram
from .loss_terms import loss_terms
from .stages import Stages
from .taps import TapEquation
from .views import signals


def lower(stages: Stages, is_loss: bool = True) -> CompiledStep:
    """The step as pure functions on arrays; ``is_loss``: its only target is a loss."""
    program, modulator = stages.program, stages.modulator
    parameters = [p.invar for p in program.parameters]
    rest = {*parameters, *program.inputs}
    states = [v for v in program.closed.jaxpr.invars if v not in rest]
    effects = cache(lambda group: effects_beyond(stages, stages.locals[group]))
    links = cache(lambda: ReadoutLinks(stages))
    return CompiledStep(
        parameters={v: _struct(v) for v in parameters},
        names={p.invar: p.name for p in program.parameters},
        states={v: _struct(v) for v in states},
        inputs={v: _struct(v) for v in program.inputs},
        carried=stages.carried,
        hidden=tuple((h.invar, h.outvar) for h in program.hidden),
        targets=stages.targets,
        is_loss=is_loss,
        aux=stages.aux,
        groups=tuple(_group(stages, local) for local in stages.locals),
        taps=tuple(_tap(stages, i, tap) for i, tap in stages.taps.items()),
        weights=stages.weights,
        pieces=_pieces(stages),
        prepared=frozenset(p.weight for p in stages.prepared.values()),
        constant_targets=stages.constant_targets,
        kept_bytes=_kept_bytes(stages),
        constants=partial(run.constants, stages),
        project=partial(run.project, stages),
        advance=partial(run.advance, stages),
        advance_once=partial(run.advance_once, stages),
        complete=partial(run.complete, stages),
        outputs=partial(run.outputs, stages),
        find_loss_terms=lambda: loss_terms(stages) if is_loss else None,
        signals=partial(signals, stages),
        transition=partial(local_step.transition, stages),
        pull=partial(local_step.pull, stages),
        shared_slopes=partial(local_step.shared_slopes, stages),
        run=partial(run.run_whole, stages),
        run_deep=partial(run.run_deep, stages),
        run_open=partial(run.run_open, stages),
        other_effects=lambda group, result: effect_box(effects(group), result),
        has_forward_mode=not any(map(has_reverse_only, stages.equations)),
        find_readouts=lambda: links().products,
        find_links=lambda: links().links,
        modulator=None
        if modulator is None
        else lambda const, at: (const | at)[modulator],
    )


def _struct(v: Var) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


def _kept_bytes(stages: Stages) -> int:
    """Bytes that a block holds of every step."""
    projected = [v for v in stages.projected if stages.is_needed(v)]
    hidden = (h.invar for h in stages.program.hidden)
    kept = {*stages.kept, *projected, *hidden}
    return max(sum(v.aval.size * v.aval.dtype.itemsize for v in kept), 1)


def _group(stages: Stages, local: LocalProgram) -> CompiledGroup:
    group, direct = local.group, stages.direct_reads
    real = [jnp.finfo(v.aval.dtype).dtype for v in group.hidden_invars]
    return CompiledGroup(
        name=tuple(group.hidden_paths),
        shape=tuple(group.varshape),
        dtypes=tuple(real[k] for k in group.owners),
        pattern=local.pattern,
        direct=frozenset(
            j for j, k in enumerate(group.owners) if group.hidden_invars[k] in direct
        ),
        reached=local.reached,
        shared=frozenset(local.shared),
        components=lambda env: group.components([env[v] for v in group.hidden_invars]),
        states=lambda parts: Values(
            zip(group.hidden_invars, group.from_components(parts), strict=True)
        ),
    )


# ---------------------------------------------------------------- taps


def _tap(stages: Stages, i: int, tap: TapEquation) -> Tap:
    dependence = stages.dependence
    weights = [tap.equation.invars[k] for k in tap.weights]
    by_weight = {}
    for v in weights:
        grads = dependence.total[v].grads
        mine = (
            p for p in dependence.program.parameters if grads & dependence.bit[p.invar]
        )
        by_weight[v] = tuple(mine)
    made = [stages.equations[j] for j in stages.needed(weights, ())]
    operation = operation_of(tap.equation)
    cut_gradients = {}
    for g, local in enumerate(stages.locals):
        cut = cut_inside(i, tap.equation, local.positions.cuts)
        if cut is not tap.equation:
            cut_gradients[g] = partial(_gradients, stages, cut, tap.weights)
    return Tap(
        weights=tuple(weights),
        results=tap.results,
        sites=tuple(_sites(stages, i, tap)),
        operands=partial(_operands, stages, tap.equation),
        gradients=partial(_gradients, stages, tap.equation, tap.weights),
        cut_gradients=cut_gradients,
        parameters=tuple(dict.fromkeys(p for mine in by_weight.values() for p in mine)),
        by_weight=by_weight,
        operation=tap.equation.primitive.name,
        source=source_line(tap.equation),
        marked=any(MARK in scope(e) for e in (tap.equation, *made)),
        multiplies=operation is not None and operation.multiplies,
        by_sample=_is_by_sample(stages, tap),
    )


def _is_by_sample(stages: Stages, tap: TapEquation) -> bool:
    """Whether samples come first in the result and in all operands of a step."""
    if len(tap.weights) > 1 or len(tap.results) > 1:
        return False
    equation, (weight,), (result,) = tap.equation, tap.weights, tap.results
    number = equation.outvars.index(result)
    use = use_of(equation, weight, number, stages.dependence.constant)
    axes = use.sample_axes
    varies = lambda v: is_var(v) and v not in stages.fixed
    operands = [k for k, v in enumerate(equation.invars) if varies(v)]
    return axes is not None and all(axes[k] == 0 for k in (*operands, -1))


def _sites(stages: Stages, i: int, tap: TapEquation) -> list[CompiledSite]:
    found = []
    for v in tap.results:
        for g, local in enumerate(stages.locals):
            if not local.reached.get(v):
                continue
            equation = cut_inside(i, tap.equation, local.positions.cuts)
            result = equation.outvars.index(v)
            for k in tap.weights:
                use = use_of(equation, k, result, stages.dependence.constant)
                positions = local.positions.labels[v]
                if v in local.shared:
                    use = SharedUse(use, local.shared[v])
                    positions = use.positions
                has_input = use.input is None or use.input in tap.data
                found.append(
                    CompiledSite(
                        weight=equation.invars[k],
                        result=v,
                        group=g,
                        use=use,
                        positions=positions,
                        enters=local.sum_of(v),
                        factorises=use.factorises and has_input,
                    )
                )
    return found


def _pieces(stages: Stages) -> dict[Var, tuple[Var, Box]]:
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


def _overlap(a: Box, b: Box) -> bool:
    """Whether two boxes of one array have an element in common."""
    pairs = zip(a, b, strict=True)
    return all(p.start < q.stop and q.start < p.stop for p, q in pairs)
