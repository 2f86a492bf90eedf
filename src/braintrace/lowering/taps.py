"""Taps: equations where parameters meet data, y = op(x, w).

Results of both kinds of pairs are computed twice, once for each kind. Where some
elements of a tap's result share a position and others reach several, ``y = op(x, w)``
becomes ``y = where(mask, op(x, w), op(x, w))``. Each of the two has a trace of its own
layout; XLA computes the product once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from ..analysis.analysed import Analysed
from ..analysis.cuts import Positions
from ..analysis.dependence import StepDependence
from ..analysis.pairs import ReachedPairs
from ..analysis.sites import weight_operands
from ..compat import (
    Equation,
    Var,
    close,
    inlined,
    is_differentiable,
    make_jaxpr,
    new_var,
    trace,
)
from ..operations.labels import CONFLICT, gather_back
from ..program import Cuts
from ..source_lines import from_library


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
    jaxpr, product = program.closed.jaxpr, program.equations[i]
    single, shared = new_var(y.aval), new_var(y.aval)
    unused = [v if v is y else new_var(v.aval) for v in product.outvars]
    choice = trace(jax.lax.select_n, [jax.typeof(jnp.asarray(mask)), y.aval, y.aval])
    (select,) = choice.jaxpr.eqns
    which = new_var(select.invars[0].aval)
    equations = [
        *program.equations[:i],
        product.replace(outvars=[single if v is y else v for v in product.outvars]),
        product.replace(outvars=[shared if v is y else v for v in unused]),
        inlined(
            select,
            product,
            from_library(choice),
            invars=[which, single, shared],
            outvars=[y],
        ),
        *program.equations[i + 1 :],
    ]
    rewritten = make_jaxpr(
        [*jaxpr.constvars, which], jaxpr.invars, jaxpr.outvars, equations
    )
    closed = close(rewritten, [*program.closed.consts, mask])
    positions = [
        _moved(found, group.varshape, i, y, {single: ~mask, shared: mask})
        for found, group in zip(analysed.positions, analysed.groups, strict=True)
    ]
    dependence = StepDependence(replace(program, closed=closed))
    return replace(analysed, dependence=dependence, positions=positions)


def _moved(
    found: Positions,
    shape: Sequence[int],
    i: int,
    y: Var,
    parts: dict[Var, np.ndarray],
) -> Positions:
    """What a pass found, for the equations as they are now."""
    places = lambda j: (j, j + 1) if j == i else (j + 2 * (j > i),)
    moved = replace(
        found,
        labels=dict(found.labels),
        sources=dict(found.sources),
        edges={(place, k) for j, k in found.edges for place in places(j)},
        cuts=Cuts(
            {
                (place, k): mask
                for (j, k), mask in found.cuts.edges.items()
                for place in places(j)
            },
            {
                (place, key): body
                for (j, key), body in found.cuts.bodies.items()
                for place in places(j)
            },
        ),
    )
    if y not in found.labels:
        return moved
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
    return moved
