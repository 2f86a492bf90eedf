"""Members of hidden groups, relations and traced modules by the names of the published
package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax

from ..analysis.groups import HiddenGroup
from ..analysis.sites import HiddenParamOpRelation
from ..compat import Var, evaluate, structure, sub_programs
from .policy import ControlFlowPolicy

# ---------------------------------------------------------------- hidden groups


def full_jacobian(
    group: HiddenGroup, hidden_vals: Sequence[Any], input_vals: Sequence[Any]
) -> jax.Array:
    """The Jacobian of a group's transition with all its zeros: ``(*varshape, num_state,
    *varshape, num_state)``, new states first."""

    def step(old: jax.Array) -> jax.Array:
        new = group.transition(group.split_hidden(old), input_vals)
        return group.concat_hidden(new)

    return jax.jacrev(step)(group.concat_hidden(hidden_vals))


# ---------------------------------------------------------------- relations


def _by_role(site: HiddenParamOpRelation, of: Callable[[Any], Any]) -> dict[str, Any]:
    """What a function gives for each parameter array of a site, by the name of the array
    in its state."""
    # A state that is one plain array has no name inside.
    name = lambda parameter: str(parameter.leaf[-1]) if parameter.leaf else 'weight'
    return {name(parameter): of(parameter) for parameter in site.parameters}


def _leaf_index(parameter: Any) -> int:
    """The number of a parameter's array among those of its state."""
    if parameter.state is None:
        return 0
    keyed, _ = jax.tree_util.tree_flatten_with_path(parameter.state.value)
    keys = [
        tuple(getattr(k, 'key', getattr(k, 'idx', k)) for k in ks) for ks, _ in keyed
    ]
    return keys.index(parameter.leaf) if parameter.leaf in keys else 0


def _processing(site: HiddenParamOpRelation) -> dict[str, tuple[Any, ...]]:
    """Primitives between each parameter array and the operation."""
    chain = tuple(eqn.primitive for eqn in site.weight_jaxpr.eqns)
    return _by_role(site, lambda parameter: chain)


def _control_flow(site: HiddenParamOpRelation) -> str | None:
    """'scan', 'while' or 'cond' if the operation is a whole loop or branch."""
    return structure(site.equation) if any(sub_programs(site.equation)) else None


def y_to_hidden_groups(
    site: HiddenParamOpRelation,
    y_val: Any,
    const_vals: Mapping[Var, Any],
    concat_hidden_vals: bool = True,
) -> list[Any]:
    """New hidden values of every group of a site from its y; ``const_vals`` by variable.

    One array for each group, or a list of one array for each of its states.
    """
    found = []
    for group, program in zip(
        site.hidden_groups, site.y_to_hidden_group_jaxprs, strict=True
    ):
        values = evaluate(program, [const_vals[v] for v in program.constvars], y_val)
        found.append(group.concat_hidden(values) if concat_hidden_vals else values)
    return found


MEMBERS: dict[str, dict[str, Callable[[Any], Any]]] = {
    'HiddenGroup': {
        'descent': lambda group: None,
        'full_jacobian': lambda group: partial(full_jacobian, group),
        'is_diagonal_recurrence': lambda group: True,
        'snap': lambda group: None,
        'trace_state_width': lambda group: group.num_state,
    },
    'HiddenParamOpRelation': {
        'control_flow_context': _control_flow,
        'eqn_params': lambda site: dict(site.equation.params),
        'trainable_leaf_indices': lambda site: _by_role(site, _leaf_index),
        'trainable_param_states': lambda site: _by_role(site, lambda p: p.state),
        'trainable_processing_chains': _processing,
        'trainable_vars': lambda site: _by_role(site, lambda p: p.invar),
        'x': lambda site: site.x_var,
        'y': lambda site: site.y_var,
        'y_to_hidden_groups': lambda site: partial(y_to_hidden_groups, site),
    },
    'ModuleInfo': {'control_flow': lambda info: ControlFlowPolicy()},
}
"""Members of records by class and name. Transitions here follow ways that keep positions,
so every group is diagonal, and none has a pattern of SnAp or a loop of its own."""
