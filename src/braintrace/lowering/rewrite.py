"""Rewritings of a step before it is lowered. What the analysis found is carried over,
not found again.

Products of concatenated inputs become sums of products: ``concatenate([x, h]) @ W`` is
``x @ W[:i] + h @ W[i:]``; the first part depends on no state and leaves the time loop.
Only weights that depend on parameters alone are split, and only where the parts differ
in what they read.

Results of both kinds of pairs are computed twice, once for each kind. Where some
elements of a tap's result share a position and others reach several, ``y = op(x, w)``
becomes ``y = where(mask, op(x, w), op(x, w))``. Each of the two has a trace of its own
layout; XLA computes the product once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..analysis.analysed import Analysed
from ..analysis.cuts import Positions
from ..analysis.dependence import StepDependence, of
from ..analysis.pairs import ReachedPairs
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
from ..operations.labels import CONFLICT, gather_back
from ..program import Cuts
from ..source_lines import from_library
from .taps import find_taps

Key = TypeVar('Key')
Found = TypeVar('Found')


def _rewritten(
    analysed: Analysed,
    equations: Sequence[Equation],
    positions: list[Positions],
    constants: Mapping[Var, Any] = {},
) -> Analysed:
    """The step with other equations, and constants that these read."""
    program = analysed.dependence.program
    jaxpr, consts = program.closed.jaxpr, program.closed.consts
    constvars = [*jaxpr.constvars, *constants]
    rewritten = make_jaxpr(constvars, jaxpr.invars, jaxpr.outvars, equations)
    closed = close(rewritten, [*consts, *constants.values()])
    dependence = StepDependence(replace(program, closed=closed))
    return replace(analysed, dependence=dependence, positions=positions)


def _moved(found: Positions, places: Sequence[Sequence[int]]) -> Positions:
    """What a pass found, where equation i is now at all of ``places[i]``."""
    cuts = found.cuts
    return replace(
        found,
        labels=dict(found.labels),
        sources=dict(found.sources),
        edges={(place, k) for i, k in found.edges for place in places[i]},
        cuts=Cuts(_at(places, cuts.edges), _at(places, cuts.bodies)),
    )


def _at(
    places: Sequence[Sequence[int]], found: Mapping[tuple[int, Key], Found]
) -> dict[tuple[int, Key], Found]:
    return {(place, k): x for (i, k), x in found.items() for place in places[i]}


# ---------------------------------------------------------------- split products


@dataclass(frozen=True)
class _Split:
    """Equations that replace a product. ``products``: the numbers of the products of
    its parts; ``sums``: their results and the sums of these; ``data``: the operand that
    ``maker``, the equation of number ``made_at``, made."""

    equations: list[Equation]
    products: list[int]
    sums: list[Var]
    data: int
    maker: Equation
    made_at: int


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
    kept = [() if i in splits else (place,) for i, place in enumerate(places)]
    positions = []
    for found in analysed.positions:
        moved = _moved(found, kept)
        for i, split in splits.items():
            _carry_over(moved, found, i, split, places[i])
        positions.append(moved)
    return _rewritten(analysed, equations, positions)


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
    made_at = dependence.producer[joined]
    maker = dependence.program.equations[made_at]
    parts = operation.split(eqn, k, maker)
    hidden = sum(dependence.bit[h.invar] for h in dependence.program.hidden)
    states = hidden | sum(dependence.new_bit.values())
    reads_state = {bool(of(total, v).reads & states) for v in maker.invars}
    if parts is None or len(reads_state) != 2:
        return None
    return _traced(parts, [eqn.invars[k], *maker.invars], eqn, 1 - k, maker, made_at)


def _traced(
    parts: Callable[..., list[Any]],
    operands: list[Atom],
    caller: Equation,
    data: int,
    maker: Equation,
    made_at: int,
) -> _Split:
    """The equations of a sum of parts, in place of the equation that gave it."""

    def summed(*args: Any) -> list[Any]:
        found = parts(*args)
        total = found[0]
        for part in found[1:]:
            total = jax.lax.add(total, part)
        return [*found, total]

    body = trace(summed, [v.aval for v in operands])
    at_caller = from_library(body)
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
        changed = {'invars': renamed, 'outvars': [names[out]]}
        equations.append(inlined(eqn, caller, at_caller, **changed))
    return _Split(equations, products, sums, data, maker, made_at)


def _carry_over(
    moved: Positions, found: Positions, i: int, split: _Split, place: int
) -> None:
    """What a pass found of a product, for the equations that replace it."""
    product = split.equations[-1].outvars[0]
    if product not in found.labels:
        return
    moved.labels.update(dict.fromkeys(split.sums, found.labels[product]))
    if product in found.sources:
        moved.sources.update(dict.fromkeys(split.sums, found.sources[product]))
    for n, eqn in enumerate(split.equations):
        for k, v in enumerate(eqn.invars):
            if v in split.sums:
                moved.edges.add((place + n, k))
    # A part reads what the maker read, so a cut on either of the two edges in between
    # is a cut of the part's own edge.
    axis = split.maker.params['dimension']
    ends = np.cumsum([v.aval.shape[axis] for v in split.maker.invars])[:-1]
    cuts, whole = found.cuts.edges, (i, split.data)
    masks = np.split(cuts[whole], ends, axis) if whole in cuts else None
    for m, n in enumerate(split.products):
        made_of, edge = (split.made_at, m), (place + n, split.data)
        if masks is not None and masks[m].any():
            moved.cuts.add(*edge, masks[m])
        if made_of in cuts:
            moved.cuts.add(*edge, cuts[made_of])
        if whole in found.edges and made_of in found.edges:
            moved.edges.add(edge)


# ---------------------------------------------------------------- mixed results


def part_mixed_results(analysed: Analysed) -> Analysed:
    """The same step, in which no result of a tap has both kinds of pairs."""
    while True:
        taps = find_taps(analysed.dependence)
        results = [(i, y) for i, tap in taps.items() for y in tap.results]
        mixed = (
            (i, y, found.labels[y] == CONFLICT)
            for i, y in results
            for found in analysed.positions
            if y in found.sources and (found.sources[y] == CONFLICT).any()
        )
        first = next(mixed, None)
        if first is None:
            return analysed
        analysed = _parted(analysed, *first)


def _parted(analysed: Analysed, i: int, y: Var, mask: np.ndarray) -> Analysed:
    """The step with one result computed twice; ``mask``: elements that reach several
    positions."""
    program = analysed.dependence.program
    product = program.equations[i]
    single, shared = new_var(y.aval), new_var(y.aval)
    again = [shared if v is y else new_var(v.aval) for v in product.outvars]
    choice = trace(jax.lax.select_n, [jax.typeof(jnp.asarray(mask)), y.aval, y.aval])
    (select,) = choice.jaxpr.eqns
    which = new_var(select.invars[0].aval)
    equations = [
        *program.equations[:i],
        product.replace(outvars=[single if v is y else v for v in product.outvars]),
        product.replace(outvars=again),
        inlined(
            select,
            product,
            from_library(choice),
            invars=[which, single, shared],
            outvars=[y],
        ),
        *program.equations[i + 1 :],
    ]
    count = len(program.equations)
    places = [(j, j + 1) if j == i else (j + 2 * (j > i),) for j in range(count)]
    positions = []
    for found, group in zip(analysed.positions, analysed.groups, strict=True):
        moved = _moved(found, places)
        if y in found.labels:
            _part(moved, found, group.varshape, i, y, {single: ~mask, shared: mask})
        positions.append(moved)
    return _rewritten(analysed, equations, positions, {which: mask})


def _part(
    moved: Positions,
    found: Positions,
    shape: Sequence[int],
    i: int,
    y: Var,
    parts: dict[Var, np.ndarray],
) -> None:
    """What a pass found of a result, for its two parts."""
    size = int(np.prod(shape))
    pairs = ReachedPairs(found.labels[y], found.sources.get(y)).pairs(size)
    elements, positions = np.divmod(pairs, size)
    for n, (part, mask) in enumerate(parts.items(), start=1):
        mine = mask.reshape(-1)[elements]
        reached, at = elements[mine], positions[mine]
        if not mine.any():
            continue
        labels = gather_back(at.astype(np.int32), reached, y.aval.shape)
        moved.labels[part] = labels
        if (labels == CONFLICT).any():
            moved.sources[part] = gather_back(reached.astype(np.int32), at, (size,))
        moved.edges.add((i + 2, n))
