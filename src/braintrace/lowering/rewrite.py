"""Products of concatenated inputs become sums of products.

``concatenate([x, h]) @ W`` is ``x @ W[:i] + h @ W[i:]``; the first part depends on no
state and leaves the time loop. Only weights that depend on parameters alone are split,
and only where the parts differ in what they read. What the analysis found is carried
over, not found again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ..analysis.analysed import Analysed
from ..analysis.cuts import Positions
from ..analysis.dependence import StepDependence, of
from ..compat import (
    Atom,
    Equation,
    Var,
    close,
    inlined,
    is_var,
    make_jaxpr,
    new_var,
    trace,
)
from ..operations import operation_of
from ..program import Cuts
from ..source_lines import from_library


@dataclass(frozen=True)
class _Split:
    """Equations that replace a product. ``products``: the numbers of the products of
    its parts; ``sums``: their results and the sums of these; ``data``: the operand that
    ``maker`` made."""

    equations: list[Equation]
    products: list[int]
    sums: list[Var]
    data: int
    maker: Equation


def split_products(analysed: Analysed) -> Analysed:
    """The same step with products of concatenated inputs written as sums."""
    dependence, program = analysed.dependence, analysed.dependence.program
    equations: list[Equation] = []
    places: list[int] = []
    splits: dict[int, _Split] = {}
    for i, eqn in enumerate(program.equations):
        places.append(len(equations))
        if split := _split(dependence, eqn):
            splits[i] = split
        equations += split.equations if split else [eqn]
    if not splits:
        return analysed
    jaxpr = program.closed.jaxpr
    rewritten = make_jaxpr(jaxpr.constvars, jaxpr.invars, jaxpr.outvars, equations)
    program = replace(program, closed=close(rewritten, program.closed.consts))
    positions = [_moved(found, splits, places) for found in analysed.positions]
    return replace(analysed, dependence=StepDependence(program), positions=positions)


def _split(dependence: StepDependence, eqn: Equation) -> _Split | None:
    operation = operation_of(eqn)
    if operation is None or operation.split is None:
        return None
    total = dependence.total
    weights = [
        k
        for k, v in enumerate(eqn.invars)
        if is_var(v) and dependence.is_weight(of(total, v))
    ]
    if len(weights) != 1:
        return None
    (k,) = weights
    joined = eqn.invars[1 - k]
    if joined not in dependence.producer:
        return None
    maker = dependence.program.equations[dependence.producer[joined]]
    parts = operation.split(eqn, k, maker)
    hidden = sum(dependence.bit[h.invar] for h in dependence.program.hidden)
    states = hidden | sum(dependence.new_bit.values())
    reads_state = {bool(of(total, v).reads & states) for v in maker.invars}
    if parts is None or len(reads_state) != 2:
        return None
    return _traced(parts, [eqn.invars[k], *maker.invars], eqn, 1 - k, maker)


def _traced(
    parts: Callable[..., list[Any]],
    operands: list[Atom],
    caller: Equation,
    data: int,
    maker: Equation,
) -> _Split:
    """The equations of a sum of parts, in place of the equation that gave it."""

    def summed(*args: Any) -> list[Any]:
        found = parts(*args)
        total = found[0]
        for part in found[1:]:
            total = jax.lax.add(total, part)
        return [*found, total]

    body = trace(summed, [v.aval for v in operands])
    *results, total = body.jaxpr.outvars
    names: dict[Var, Atom] = dict(zip(body.jaxpr.invars, operands, strict=True))
    equations: list[Equation] = []
    products: list[int] = []
    sums: list[Var] = []
    for eqn in body.jaxpr.eqns:
        (out,) = eqn.outvars
        names[out] = caller.outvars[0] if out is total else new_var(out.aval)
        if out in results:
            products.append(len(equations))
        renamed = [names[v] if is_var(v) else v for v in eqn.invars]
        if out in results or any(v in sums for v in renamed):
            sums.append(names[out])
        equations.append(
            inlined(
                eqn, caller, from_library(body), invars=renamed, outvars=[names[out]]
            )
        )
    return _Split(equations, products, sums, data, maker)


def _moved(found: Positions, splits: dict[int, _Split], places: list[int]) -> Positions:
    """What a pass found, for the equations as they are now."""
    moved = replace(
        found,
        labels=dict(found.labels),
        sources=dict(found.sources),
        edges={(places[i], k) for i, k in found.edges if i not in splits},
        cuts=Cuts(
            {
                (places[i], k): m
                for (i, k), m in found.cuts.edges.items()
                if i not in splits
            },
            {(places[i], key): body for (i, key), body in found.cuts.bodies.items()},
        ),
    )
    for i, split in splits.items():
        *_, total = split.equations
        labels = found.labels.get(total.outvars[0])
        if labels is not None:
            _carry_over(moved, found, i, split, places[i], labels)
    return moved


def _carry_over(
    moved: Positions,
    found: Positions,
    i: int,
    split: _Split,
    place: int,
    labels: np.ndarray,
) -> None:
    moved.labels.update(dict.fromkeys(split.sums, labels))
    sources = found.sources.get(split.equations[-1].outvars[0])
    if sources is not None:
        moved.sources.update(dict.fromkeys(split.sums, sources))
    for n, eqn in enumerate(split.equations):
        for k, v in enumerate(eqn.invars):
            if v in split.sums:
                moved.edges.add((place + n, k))
    axis = split.maker.params['dimension']
    ends = np.cumsum([v.aval.shape[axis] for v in split.maker.invars])[:-1]
    cut = found.cuts.edges.get((i, split.data))
    masks = [None] * len(split.products) if cut is None else np.split(cut, ends, axis)
    for n, operand, mask in zip(split.products, split.maker.invars, masks, strict=True):
        edge = (place + n, split.data)
        if mask is not None and mask.any():
            moved.cuts.add(*edge, mask)
        carries_credit = is_var(operand) and operand in found.labels
        if (i, split.data) in found.edges and carries_credit:
            moved.edges.add(edge)
