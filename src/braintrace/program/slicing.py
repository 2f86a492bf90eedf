"""Parts of a step program: cuts put in, and the equations between sources and targets.

Cuts are kept apart from the program: ``edges[i, k]`` masks operand k of equation i, and
``bodies[i, key]`` holds the cuts inside a sub-program of equation i.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..compat import (
    Atom,
    Equation,
    Jaxpr,
    Var,
    changed,
    is_var,
    make_jaxpr,
    open_jaxpr,
    replace_sub_programs,
    sub_programs,
)
from ..own_primitives import cut_equation


@dataclass
class Cuts:
    """Where gradient is stopped in one program, masked element by element."""

    edges: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    bodies: dict[tuple[int, tuple], Cuts] = field(default_factory=dict)

    def add(self, equation: int, operand: int, mask: np.ndarray) -> None:
        """Cut the masked elements of one operand."""
        key = (equation, operand)
        self.edges[key] = self.edges[key] | mask if key in self.edges else mask

    def whole(self, equation: int, operand: int) -> bool:
        """True if no element of the operand passes."""
        mask = self.edges.get((equation, operand))
        return mask is not None and bool(mask.all())

    def __bool__(self) -> bool:
        return bool(self.edges) or any(self.bodies.values())


def cut_inside(i: int, eqn: Equation, cuts: Cuts) -> Equation:
    """Equation i with the cuts inside its sub-programs in place."""
    bodies = {}
    for key, body in sub_programs(eqn):
        if inside := cuts.bodies.get((i, key)):
            equations = with_cuts(open_jaxpr(body).eqns, inside)
            bodies[key] = changed(body, equations=equations)
    return replace_sub_programs(eqn, bodies) if bodies else eqn


def cut_equation_at(i: int, eqn: Equation, cuts: Cuts) -> list[Equation]:
    """Equation i with its cuts: those of its operands before it, those inside it in
    place."""
    eqn = cut_inside(i, eqn, cuts)
    operands, stops = list(eqn.invars), []
    for k, operand in enumerate(operands):
        if (i, k) in cuts.edges and is_var(operand):
            stop = cut_equation(operand, cuts.edges[i, k])
            operands[k] = stop.outvars[0]
            stops.append(stop)
    return [*stops, eqn.replace(invars=operands)]


def with_cuts(equations: Sequence[Equation], cuts: Cuts) -> list[Equation]:
    """The equations with every cut in place."""
    return [
        each
        for i, eqn in enumerate(equations)
        for each in cut_equation_at(i, eqn, cuts)
    ]


def equations_between(
    equations: Sequence[Equation],
    sources: Collection[Var],
    targets: Sequence[Atom],
    cuts: Cuts,
    edges: Collection[tuple[int, int]],
) -> list[int]:
    """Indices of the equations that lead from sources to targets along edges that carry
    credit.

    ``edges`` holds (i, k) where gradient passes operand k of equation i.
    """
    by_equation: dict[int, list[int]] = {}
    for i, k in sorted(edges):
        by_equation.setdefault(i, []).append(k)
    live: set[Var] = set(sources)
    on_path: list[int] = []
    for i, operands in by_equation.items():
        eqn = equations[i]
        if any(eqn.invars[k] in live and not cuts.whole(i, k) for k in operands):
            on_path.append(i)
            live.update(eqn.outvars)
    needed: set[Any] = {v for v in targets if is_var(v)}
    kept: list[int] = []
    for i in reversed(on_path):
        if any(v in needed for v in equations[i].outvars):
            kept.append(i)
            needed.update(v for v in equations[i].invars if is_var(v))
    return kept[::-1]


def slice_between(
    equations: Sequence[Equation],
    sources: Sequence[Var],
    targets: Sequence[Atom],
    cuts: Cuts,
    edges: Collection[tuple[int, int]],
) -> Jaxpr:
    """The program that leads from sources to targets along edges that carry credit.

    Everything else it reads becomes one of its ``constvars``, so no work outside the
    path is repeated.
    """
    kept = equations_between(equations, sources, targets, cuts, edges)
    body = [e for i in kept for e in cut_equation_at(i, equations[i], cuts)]
    return _with_constvars(sources, targets, body)


def slice_back(
    equations: Sequence[Equation],
    producer: Mapping[Var, int],
    sources: Sequence[Var],
    target: Atom,
) -> Jaxpr:
    """Everything that leads from sources to a target; what else it reads becomes
    ``constvars``."""
    kept: set[int] = set()
    todo = [target]
    while todo:
        v = todo.pop()
        if is_var(v) and v not in sources and v in producer and producer[v] not in kept:
            kept.add(producer[v])
            todo += equations[producer[v]].invars
    return _with_constvars(sources, [target], [equations[i] for i in sorted(kept)])


def _with_constvars(
    sources: Sequence[Var], targets: Sequence[Atom], body: list[Equation]
) -> Jaxpr:
    made = {v for eqn in body for v in eqn.outvars} | set(sources)
    reads = [v for eqn in body for v in eqn.invars] + list(targets)
    constvars = [
        v for v in dict.fromkeys(v for v in reads if is_var(v)) if v not in made
    ]
    return make_jaxpr(constvars, sources, targets, body)
