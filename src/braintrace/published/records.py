"""Members of hidden groups, relations and traced modules by the names of the published
package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax

from ..compat import Var, evaluate
from ..graph.hidden_group import HiddenGroup
from ..graph.relations import HiddenParamOpRelation
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


def y_to_hidden_groups(
    relation: HiddenParamOpRelation,
    y_val: Any,
    const_vals: Mapping[Var, Any],
    concat_hidden_vals: bool = True,
) -> list[Any]:
    """New hidden values of every group of a relation from its y; ``const_vals`` by
    variable.

    One array for each group, or a list of one array for each of its states.
    """
    found = []
    for group, program in zip(
        relation.hidden_groups, relation.y_to_hidden_group_jaxprs, strict=True
    ):
        values = evaluate(program, [const_vals[v] for v in program.constvars], y_val)
        found.append(group.concat_hidden(values) if concat_hidden_vals else values)
    return found


EXECUTOR: dict[str, Callable[[Any], Any]] = {
    'control_flow': lambda executor: None,
    'full_jacobian': lambda executor: False,
    'include_recurrent_mixing': lambda executor: False,
    'is_multi_step_vjp': lambda executor: executor.vjp_method == 'multi-step',
    'is_single_step_vjp': lambda executor: executor.vjp_method == 'single-step',
    'snap_max_jacobian_elements': lambda executor: 16777216,
    'sparse_n': lambda executor: None,
}
"""Members of an executor; its switches have the values that they have by default."""

MEMBERS: dict[str, dict[str, Callable[[Any], Any]]] = {
    'HiddenGroup': {
        'descent': lambda group: None,
        'full_jacobian': lambda group: partial(full_jacobian, group),
        'is_diagonal_recurrence': lambda group: True,
        'snap': lambda group: None,
        'trace_state_width': lambda group: group.num_state,
    },
    'HiddenParamOpRelation': {
        'x': lambda relation: relation.x_var,
        'y': lambda relation: relation.y_var,
        'y_to_hidden_groups': lambda relation: partial(y_to_hidden_groups, relation),
    },
    'ETraceGraphExecutor': EXECUTOR,
    'ModuleInfo': {'control_flow': lambda info: ControlFlowPolicy()},
}
"""Members of records by class and name. Transitions here follow ways that keep
positions, so every group is diagonal, and none has a pattern of SnAp or a loop of its
own."""
