"""Relations: operations with parameters, and the way from their results to hidden
groups.

A relation is one call of an operation: ``x @ w + b`` of a marked operation is one, with
two sites. Operations without a mark have a relation for each site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from ..compat import Jaxpr, Var, is_var, structure, sub_programs
from ..program import Parameter, Path
from ..program.step import path_name
from .dependence import of
from .groups import HiddenGroup
from .sites import Site, adds, mark_of
from .step_dependence import StepDependence

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

    ``y_to_hidden_group_jaxprs[g]`` leads from y to the new states of
    ``hidden_groups[g]``. ``path_classification`` says of each connected hidden state
    how the parameters reach it: 'all_direct', or 'mixed' if another way of theirs into
    the same group is cut. What is known of the parameters is by role: 'weight', 'bias',
    or their names where one operand is made of several.
    ``trainable_processing_chains``: the primitives between a parameter and the
    operation. ``sites``: its uses of parameters.
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
        hidden = ', '.join(map(path_name, self.connected_hidden_paths))
        y = f'{self.primitive} → y{list(self.y_var.aval.shape)}'
        return f'HiddenParamOpRelation({names} → {y} → {hidden})'


def by_operation(
    dependence: StepDependence, sites: Sequence[Site]
) -> list[HiddenParamOpRelation]:
    """The relations of sites, in the order of the first site of each."""
    found: list[list[Site]] = []
    for site in sites:
        before = _result_that_it_shifts(dependence, site)
        for together in found:
            if before is not None and together[-1].y_var is before:
                together.append(site)
                break
        else:
            found.append([site])
    return [_relation(together) for together in found]


def _result_that_it_shifts(dependence: StepDependence, site: Site) -> Var | None:
    """The result to which a marked operation adds its bias, if the site is a bias: that
    of the equation before in which the same mark has a parameter."""
    mark, result = mark_of(site.equation), site.x_var
    if mark is None or not adds(site.equation):
        return None
    equations = dependence.program.equations
    while result is not None and result in dependence.producer:
        eqn = equations[dependence.producer[result]]
        if mark_of(eqn) != mark:
            return None
        data = [
            v
            for v in eqn.invars
            if is_var(v) and not _is_made_of_weights(dependence, v)
        ]
        if len(data) < len(eqn.invars):
            return result
        # Results are moved before the sum: transposed, reshaped.
        result = data[0] if len(data) == 1 else None
    return None


def _is_made_of_weights(dependence: StepDependence, v: Var) -> bool:
    return not of(dependence.total, v).reads & dependence.data


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
    parameters = _in_order_of_use(first)
    roles: list[str] = [_role(p) for p in parameters]
    if len(set(roles)) < len(roles):
        roles = [p.name for p in parameters]
    if len(parameters) == len(known[:-1]):
        roles = list(known[:-1])
    for role, parameter in zip(roles, parameters, strict=True):
        yield role, (first, parameter)
    for site in biases:
        for parameter in site.parameters:
            alone = len(site.parameters) == 1 and known
            yield known[-1] if alone else _role(parameter), (site, parameter)


def _role(parameter: Parameter) -> str:
    """The name of an array in its state; a state that is one array has none inside."""
    return str(parameter.leaf[-1]) if parameter.leaf else 'weight'


def _in_order_of_use(site: Site) -> list[Parameter]:
    """Parameters in the order in which their operand is made of them."""
    used = [v for eqn in site.weight_jaxpr.eqns for v in eqn.invars if is_var(v)]
    place = {v: n for n, v in reversed(list(enumerate(used)))}
    return sorted(site.parameters, key=lambda p: place.get(p.invar, -1))


def _leaf_index(parameter: Parameter) -> int:
    """The number of a parameter's array among those of its state."""
    if parameter.state is None:
        return 0
    keyed, _ = jax.tree_util.tree_flatten_with_path(parameter.state.value)
    keys = [
        tuple(getattr(k, 'key', getattr(k, 'idx', k)) for k in ks) for ks, _ in keyed
    ]
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
