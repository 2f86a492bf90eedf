"""Sites: each use of a parameter, ``y = op(x, p(θ))``, and the way from y to hidden
groups.

An equation is a site when one operand is computed from parameters and constants only,
its result depends on data too, and elements of the result reach positions of a group. A
loop or branch with parameters inside is one operation; its cuts depend on the group,
and so it is a site for each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..compat import MARK, Equation, Jaxpr, Primitive, Var, is_var, scope, sub_programs
from ..operations import operation_of
from ..program import Parameter, Path, cut_inside, slice_back, slice_between
from ..program.step import path_name
from .cuts import Positions
from .dependence import of
from .groups import HiddenGroup
from .step_dependence import StepDependence


class Site(NamedTuple):
    """One use of a parameter: parameter → operation → hidden groups.

    ``weight_jaxpr`` computes the operand ``weight_var`` from the arrays of
    ``parameters``. ``y_to_hidden_group_jaxprs[g]`` leads from y to the new states of
    ``hidden_groups[g]``, and ``y_positions[g]`` gives the position that each element of
    y reaches there, -1 for none and -2 for several. Where there are several,
    ``y_sources[g]`` gives the element of y that reaches each position, flat, -1 for
    none and -2 for several that reach no other; else it is None.
    ``path_classification`` says of each connected hidden state how the parameters reach
    it: 'all_direct', or 'mixed' if another way of theirs into the same group is cut.
    """

    primitive: Primitive
    x_var: Var | None
    y_var: Var
    hidden_groups: tuple[HiddenGroup, ...]
    y_to_hidden_group_jaxprs: tuple[Jaxpr, ...]
    connected_hidden_paths: tuple[Path, ...]
    parameters: tuple[Parameter, ...]
    equation: Equation
    operand: int
    weight_var: Var
    weight_jaxpr: Jaxpr
    y_positions: tuple[np.ndarray, ...]
    marked: bool
    path_classification: dict[Path, str]
    y_sources: tuple[np.ndarray | None, ...] = ()

    @property
    def mark(self) -> str | None:
        """The name of the marked operation that the parameters are used through."""
        equations = (self.equation, *reversed(self.weight_jaxpr.eqns))
        return next((name for name in map(mark_of, equations) if name), None)

    def __repr__(self) -> str:
        names = ', '.join(p.name for p in self.parameters)
        hidden = ', '.join(map(path_name, self.connected_hidden_paths))
        shape = self.y_var.aval.shape
        y = f'{self.primitive.name} → y{list(shape)}'
        return f'Site({names} → {y} → {hidden})'


def mark_of(eqn: Equation) -> str | None:
    """The name of the marked operation that an equation is a part of."""
    found = re.findall(MARK + r'([^/()]+)', scope(eqn))
    return found[-1] if found else None


def find_sites(
    dependence: StepDependence,
    groups: Sequence[HiddenGroup],
    positions: Sequence[Positions],
) -> tuple[Site, ...]:
    """All sites of a program, in program order."""
    result = []
    for i, eqn in enumerate(dependence.program.equations):
        reached = {
            v: [g for g, found in enumerate(positions) if v in found.labels]
            for v in eqn.outvars
            if is_var(v)
        }
        if not any(reached.values()):
            continue
        for k in weight_operands(dependence, eqn):
            for y, into in reached.items():
                if (
                    not of(dependence.total, y).grads
                    & of(dependence.total, eqn.invars[k]).grads
                    & dependence.parameters
                ):
                    continue
                pairs = [(groups[g], positions[g]) for g in into]
                if any(sub_programs(eqn)):
                    result += [
                        _site(dependence, cut_inside(i, eqn, p[1].cuts), k, y, [p])
                        for p in pairs
                    ]
                elif pairs:
                    result.append(_site(dependence, eqn, k, y, pairs))
    return tuple(result)


def adds(eqn: Equation) -> bool:
    """Whether an equation is a sum or a difference."""
    operation = operation_of(eqn)
    if operation is None or operation.family != 'elementwise':
        return False
    return operation.linear is True and len(eqn.invars) == 2


def weight_operands(dependence: StepDependence, eqn: Equation) -> list[int]:
    """Operands computed from parameters only, of an equation that reads data too or
    makes a new hidden state."""
    operation = operation_of(eqn)
    bits = [of(dependence.total, v) for v in eqn.invars]
    if all(dependence.is_weight(b) or not b.reads for b in bits) and not any(
        v in dependence.new_bit for v in eqn.outvars
    ):
        return []
    passes = lambda k: operation is None or operation.differentiates(eqn, k)
    return [k for k, b in enumerate(bits) if dependence.is_weight(b) and passes(k)]


def _site(
    dependence: StepDependence,
    eqn: Equation,
    k: int,
    y: Var,
    into: Sequence[tuple[HiddenGroup, Positions]],
) -> Site:
    equations = dependence.program.equations
    weight = eqn.invars[k]
    grads = of(dependence.total, weight).grads
    parameters = tuple(
        p for p in dependence.program.parameters if grads & dependence.bit[p.invar]
    )
    weight_jaxpr = slice_back(
        equations, dependence.producer, [p.invar for p in parameters], weight
    )
    programs = tuple(
        slice_between(equations, [y], group.hidden_outvars, found.cuts, found.edges)
        for group, found in into
    )
    connected = [
        path
        for (group, _), program in zip(into, programs, strict=True)
        for path, out in zip(group.hidden_paths, group.hidden_outvars, strict=True)
        if out is y or any(out in e.outvars for e in program.eqns)
    ]
    own = sum(dependence.bit[p.invar] for p in parameters)
    cut = {
        path
        for group, found in into
        if any(c.bits.grads & own for c in found.found)
        for path in group.hidden_paths
    }
    data = [
        v
        for v in eqn.invars
        if is_var(v) and of(dependence.total, v).reads & dependence.data
    ]
    return Site(
        primitive=eqn.primitive,
        x_var=data[0] if data else None,
        y_var=y,
        hidden_groups=tuple(group for group, _ in into),
        y_to_hidden_group_jaxprs=programs,
        connected_hidden_paths=tuple(connected),
        parameters=parameters,
        equation=eqn,
        operand=k,
        weight_var=weight,
        weight_jaxpr=weight_jaxpr,
        y_positions=tuple(found.labels[y] for _, found in into),
        marked=any(MARK in scope(e) for e in (eqn, *weight_jaxpr.eqns)),
        path_classification={
            path: 'mixed' if path in cut else 'all_direct' for path in connected
        },
        y_sources=tuple(found.sources.get(y) for _, found in into),
    )
