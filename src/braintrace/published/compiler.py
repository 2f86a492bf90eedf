"""Executors and switches of the published package's compiler."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax

from ..compat import Var
from ..errors import NotSupportedError, three_parts
from ..graph.executor import ETraceGraphExecutor
from ..learner.arguments import check_choice
from .policy import ControlFlowPolicy
from .records import full_jacobian

# ---------------------------------------------------------------- switches

CHANGES = {
    'include_recurrent_mixing': (
        False,
        'the transition of a hidden group follows ways that keep positions',
        "rule 'rtrl', or ETraceConfig(recurrence_scope='coupled')",
    ),
    'sparse_n': (
        None,
        'how far influence is followed is a part of the learning rule',
        'SnAp(model, n=...)',
    ),
}
"""Switches that would change what a graph holds: their only value here, why, and what
does the same."""

AUTOMATIC: dict[str, Any] = {
    'snap_max_jacobian_elements': 16777216,
    'control_flow': None,
    'descended_scan_eqn_ids': frozenset(),
    'descended_hidden_paths': frozenset(),
}
"""Switches that are not needed, and their defaults."""


def check_switches(name: str, switches: Mapping[str, Any]) -> None:
    """Refuse switches that would change the meaning of a graph, and warn of those that
    are ignored; defaults pass without a word."""
    for switch, value in switches.items():
        if switch in CHANGES:
            allowed, why, fix = CHANGES[switch]
            if value is not allowed:
                raise NotSupportedError(
                    three_parts(f'{name}(..., {switch}={value!r})', why, fix)
                )
        elif value != AUTOMATIC[switch]:
            text = f'{switch}={value!r} is ignored: this is automatic here'
            warnings.warn(text, stacklevel=4)


# ---------------------------------------------------------------- executors


class _OfLearners(type):
    """The executors of learners count as instances."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or (
            isinstance(instance, ETraceGraphExecutor) and instance.trained
        )


class ETraceVjpGraphExecutor(ETraceGraphExecutor, metaclass=_OfLearners):
    """An :class:`ETraceGraphExecutor` that returns Jacobians in the form of the
    published package.

    ``full_jacobian``: hidden-to-hidden Jacobians with all their zeros.
    """

    def __init__(
        self,
        model: Any,
        vjp_method: str = 'single-step',
        include_recurrent_mixing: bool = False,
        sparse_n: int | None = None,
        snap_max_jacobian_elements: int = 16777216,
        control_flow: ControlFlowPolicy | None = None,
        full_jacobian: bool = False,
    ):
        check_choice('vjp_method', vjp_method, ('single-step', 'multi-step'))
        switches = {
            'include_recurrent_mixing': include_recurrent_mixing,
            'sparse_n': sparse_n,
            'snap_max_jacobian_elements': snap_max_jacobian_elements,
            'control_flow': control_flow,
        }
        check_switches(type(self).__name__, switches)
        super().__init__(model)
        self.vjp_method = vjp_method
        self.full_jacobian = full_jacobian
        for name, value in switches.items():
            setattr(self, name, value)

    def solve_h2w_h2h_jacobian(
        self,
        *args: Any,
        etrace_stepper: Any = None,
        init_etrace: Any = None,
        **kwargs: Any,
    ) -> tuple:
        """Run one step and return outputs, new hidden values, other states,
        hidden-to-weight and hidden-to-hidden Jacobians, and None for the traces.

        Hidden-to-weight Jacobians are two dictionaries: inputs of sites by the identity
        of their variable, and ∂h/∂y by the identity of y and the name of the group.
        """
        _check_stepper(etrace_stepper, init_etrace)
        results, env, _ = self._run(args, kwargs)
        return (*results, *self._published_jacobians(env), None)

    def solve_h2w_h2h_l2h_jacobian(
        self,
        *args: Any,
        etrace_stepper: Any = None,
        init_etrace: Any = None,
        **kwargs: Any,
    ) -> tuple:
        """The same, with the loss-to-hidden residuals as the result before the last: a
        function of the cotangents of the outputs."""
        _check_stepper(etrace_stepper, init_etrace)
        _, env, _ = self._run(args, kwargs)
        found = super().solve_h2w_h2h_l2h_jacobian(*args, **kwargs)
        return (*found[:3], *self._published_jacobians(env), found[-1], None)

    def _published_jacobians(self, env: dict[Var, Any]) -> tuple:
        sites, diagonal = self._jacobians(env)
        inputs, derivatives = {}, {}
        relations = self.graph.hidden_param_op_relations
        for relation, site in zip(relations, sites, strict=True):
            if relation.x_var is not None:
                inputs[id(relation.x_var)] = site.x
            for index, jacobian in site.hidden_to_y.items():
                key = (id(relation.y_var), f'hidden_group_{index}')
                derivatives[key] = jacobian
        if not self.full_jacobian:
            return (inputs, derivatives), diagonal
        full: list[jax.Array] = []
        for group in self.graph.hidden_groups:
            old = [env[v] for v in group.hidden_invars]
            constants = [env[v] for v in group.transition_jaxpr_constvars]
            full.append(full_jacobian(group, old, constants))
        return (inputs, derivatives), full


def _check_stepper(etrace_stepper: Any, init_etrace: Any) -> None:
    if etrace_stepper is not None or init_etrace is not None:
        raise NotSupportedError(
            three_parts(
                'a solve with etrace_stepper or init_etrace',
                'executors here take one step and keep no traces',
                'a learner, whose update advances its traces',
            )
        )
