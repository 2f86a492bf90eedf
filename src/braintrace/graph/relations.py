"""Sites: each use of a parameter, ``y = op(x, p(θ))``, and the way from y to hidden
groups; relations: the sites of one operation.

A loop or branch with parameters inside is one operation; its cuts depend on the group,
and so it is a site for each.

A relation is one call of an operation: ``x @ w + b`` of a marked operation is one, with
two sites. Operations without a mark have a relation for each site.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..analysis.analysed import Analysed, analyse
from ..analysis.cuts import Positions
from ..analysis.dependence import StepDependence, of
from ..analysis.sites import uses_of_parameters
from ..compat import (
    MARK,
    Equation,
    Jaxpr,
    Primitive,
    Var,
    is_var,
    scope,
    structure,
    sub_programs,
)
from ..frontends.pure import leaf_paths
from ..operations import operation_of
from ..program import Parameter, Path, cut_inside, slice_back, slice_between
from ..program.step import path_names
from .hidden_group import GroupsByPath, HiddenGroup, hidden_groups
from .module_info import extract


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
        hidden = path_names(self.connected_hidden_paths)
        shape = self.y_var.aval.shape
        y = f'{self.primitive.name} → y{list(shape)}'
        return f'Site({names} → {y} → {hidden})'


def mark_of(eqn: Equation) -> str | None:
    """The name of the marked operation that an equation is a part of."""
    found = re.findall(MARK + r'([^/()]+)', scope(eqn))
    return found[-1] if found else None


def adds(eqn: Equation) -> bool:
    """Whether an equation is a sum or a difference."""
    operation = operation_of(eqn)
    if operation is None or operation.family != 'elementwise':
        return False
    return operation.linear is True and len(eqn.invars) == 2


def find_sites(analysed: Analysed, groups: Sequence[HiddenGroup]) -> list[Site]:
    """All sites of a program, in program order."""
    dependence, sites = analysed.dependence, []
    for i, k, y, into in uses_of_parameters(dependence, analysed.positions):
        eqn = dependence.program.equations[i]
        reached = [(groups[g], analysed.positions[g]) for g in into]
        if any(sub_programs(eqn)):
            for group, found in reached:
                cut = cut_inside(i, eqn, found.cuts)
                sites.append(_site(dependence, cut, k, y, [(group, found)]))
        else:
            sites.append(_site(dependence, eqn, k, y, reached))
    return sites


def _site(
    dependence: StepDependence,
    eqn: Equation,
    k: int,
    y: Var,
    into: Sequence[tuple[HiddenGroup, Positions]],
) -> Site:
    equations = dependence.program.equations
    weight = eqn.invars[k]
    own = of(dependence.total, weight).grads & dependence.parameters
    parameters = tuple(
        p for p in dependence.program.parameters if own & dependence.bit[p.invar]
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


# ---------------------------------------------------------------- relations


Operation = tuple[Any, tuple[str, ...]]
"""What stands for an operation in a relation, and the roles of its operands."""


_load: Callable[[], Callable[[str, Site], Operation]] | None = None


def name_operations(load: Callable[[], Callable[[str, Site], Operation]]) -> None:
    """Use, once it is needed, the function that ``load`` gives: the marked operation of
    a site, from the name of the mark."""
    global _load
    _load = load


NONE: dict[Any, Any] = {}
"""What a record that was made without them knows of its parameters."""


class PathByRole(dict[str, Path]):
    """The path of the parameter in each role; paths count as members too."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self.values()


class HiddenParamOpRelation(NamedTuple):
    """One operation: parameters → y → hidden groups.

    ``y_to_hidden_group_jaxprs[g]`` computes the new states of ``hidden_groups[g]`` from
    y. ``path_classification`` says for each connected hidden state how the parameters
    reach it: 'all_direct', or 'mixed' if another path into the same group is cut.
    Mappings of parameters are by role: 'weight', 'bias', or the names of the parameters
    if one operand is computed from several. ``trainable_processing_chains``: the
    primitives between a parameter and the operation. ``sites``: its uses of parameters.
    """

    primitive: Any
    x_var: Var | None
    y_var: Var
    hidden_groups: list[HiddenGroup]
    y_to_hidden_group_jaxprs: list[Jaxpr]
    connected_hidden_paths: list[Path]
    eqn_params: dict[str, Any]
    path_classification: dict[Path, str] = NONE
    trainable_vars: dict[str, Var] = NONE
    trainable_paths: dict[str, Path] = NONE
    trainable_leaf_indices: dict[str, int] = NONE
    trainable_param_states: dict[str, Any] = NONE
    trainable_processing_chains: dict[str, tuple[Any, ...]] = NONE
    control_flow_context: str | None = None
    sites: tuple[Site, ...] = ()

    @property
    def path(self) -> Path:
        """The path of the first parameter."""
        return next(iter(self.trainable_paths.values()))

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameter arrays of all sites."""
        return tuple(p for site in self.sites for p in site.parameters)

    def dict(self) -> dict[str, Any]:
        """The record as a dictionary."""
        return self._asdict()

    def __repr__(self) -> str:
        names = ', '.join(p.name for p in self.parameters)
        hidden = path_names(self.connected_hidden_paths)
        y = f'{self.primitive} → y{list(self.y_var.aval.shape)}'
        return f'HiddenParamOpRelation({names} → {y} → {hidden})'


def by_operation(
    dependence: StepDependence, sites: Sequence[Site]
) -> list[HiddenParamOpRelation]:
    """The relations of sites, in the order of the first site of each."""
    operations: list[list[Site]] = []
    for site in sites:
        before = _result_that_it_shifts(dependence, site)
        for together in operations:
            if before is not None and together[-1].y_var is before:
                together.append(site)
                break
        else:
            operations.append([site])
    return [_relation(together) for together in operations]


def _result_that_it_shifts(dependence: StepDependence, site: Site) -> Var | None:
    """The result to which a marked operation adds its bias, if the site is a bias: that
    of the equation before in which the same mark has a parameter."""
    mark, result = mark_of(site.equation), site.x_var
    if mark is None or not adds(site.equation):
        return None
    while result is not None and result in dependence.producer:
        eqn = dependence.program.equations[dependence.producer[result]]
        if mark_of(eqn) != mark:
            return None
        data = [
            v
            for v in eqn.invars
            if is_var(v) and of(dependence.total, v).reads & dependence.data
        ]
        if len(data) < len(eqn.invars):
            return result
        # Results are moved before the sum: transposed, reshaped.
        result = data[0] if len(data) == 1 else None
    return None


def _relation(sites: Sequence[Site]) -> HiddenParamOpRelation:
    first, last = sites[0], sites[-1]
    mark, primitive = first.mark, first.primitive
    known: tuple[str, ...] = ()
    if mark is not None and _load is not None:
        primitive, known = _load()(mark, first)
    roles = dict(_roles(sites, known))
    of_each = lambda value: {role: value(*used) for role, used in roles.items()}
    has_body = any(sub_programs(first.equation))
    return HiddenParamOpRelation(
        primitive=primitive,
        x_var=first.x_var,
        y_var=last.y_var,
        hidden_groups=list(last.hidden_groups),
        y_to_hidden_group_jaxprs=list(last.y_to_hidden_group_jaxprs),
        connected_hidden_paths=list(last.connected_hidden_paths),
        eqn_params=dict(first.equation.params),
        path_classification={**last.path_classification, **first.path_classification},
        trainable_vars=of_each(lambda site, parameter: parameter.invar),
        trainable_paths=PathByRole(of_each(lambda site, parameter: parameter.path)),
        trainable_leaf_indices=of_each(lambda site, parameter: _leaf_index(parameter)),
        trainable_param_states=of_each(lambda site, parameter: parameter.state),
        trainable_processing_chains=of_each(_processing),
        control_flow_context=structure(first.equation) if has_body else None,
        sites=tuple(sites),
    )


def _roles(
    sites: Sequence[Site], known: Sequence[str]
) -> Iterator[tuple[str, tuple[Site, Parameter]]]:
    """The role of each parameter array in an operation: the ``known`` ones of a marked
    operation, the last of which is its bias; else its name."""
    first, *biases = sites
    # Parameters in the order in which their operand is made of them.
    used = [v for eqn in first.weight_jaxpr.eqns for v in eqn.invars if is_var(v)]
    place = {v: n for n, v in reversed(list(enumerate(used)))}
    parameters = sorted(first.parameters, key=lambda p: place.get(p.invar, -1))
    # A state that is one array has no names inside.
    name = lambda p: str(p.leaf[-1]) if p.leaf else 'weight'
    roles = [name(p) for p in parameters]
    if len(set(roles)) < len(roles):
        roles = [p.name for p in parameters]
    if len(parameters) == len(known[:-1]):
        roles = list(known[:-1])
    for role, parameter in zip(roles, parameters, strict=True):
        yield role, (first, parameter)
    for site in biases:
        for parameter in site.parameters:
            alone = len(site.parameters) == 1 and known
            yield known[-1] if alone else name(parameter), (site, parameter)


def _leaf_index(parameter: Parameter) -> int:
    """The number of a parameter's array among those of its state."""
    if parameter.state is None:
        return 0
    keys = leaf_paths(parameter.state.value)
    return keys.index(parameter.leaf) if parameter.leaf in keys else 0


def _processing(site: Site, parameter: Parameter) -> tuple[Any, ...]:
    """Primitives between a parameter and the operation, whose own are left out."""
    own = mark_of(site.equation)
    chain, known = [], {parameter.invar}
    for eqn in site.weight_jaxpr.eqns:
        if any(is_var(v) and v in known for v in eqn.invars):
            known.update(eqn.outvars)
            if own is None or mark_of(eqn) != own:
                chain.append(eqn.primitive)
    return tuple(chain)


# ---------------------------------------------------------------- entry points


def find_hidden_param_op_relations_from_minfo(
    minfo: Any, hid_path_to_group: GroupsByPath | None = None
) -> list[HiddenParamOpRelation]:
    """Relations of a traced module. With ``hid_path_to_group``, only relations into
    these groups."""
    analysed = analyse(minfo.program)
    sites = find_sites(analysed, hidden_groups(analysed))
    relations = by_operation(analysed.dependence, sites)
    if hid_path_to_group is None:
        return relations
    return [
        r
        for r in relations
        if any(p in hid_path_to_group for p in r.connected_hidden_paths)
    ]


def find_hidden_param_op_relations_from_module(
    model: Any, *model_args: Any, **model_kwargs: Any
) -> list[HiddenParamOpRelation]:
    """Relations of a module."""
    return find_hidden_param_op_relations_from_minfo(
        extract(model, *model_args, **model_kwargs)
    )
