"""Perturbation: every new hidden value h = f(..) becomes h = f(..) + δ, so ∂ℓ/∂δ =
∂ℓ/∂h."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..compat import ClosedJaxpr, Var, add_equation, changed, evaluate, new_var
from ..errors import three_parts
from ..program import Path, StepProgram
from ..program.bare import program_of_jaxpr
from ..program.step import path_names
from .hidden_group import HiddenGroup
from .module_info import extract


class HiddenPerturbation(NamedTuple):
    """The step program with a perturbation added to every new hidden state.

    Later equations of the step read the perturbed states. The perturbations are the
    last inputs of ``perturb_jaxpr``, in the order of ``perturb_vars``.
    """

    perturb_vars: list[Var]
    perturb_hidden_paths: list[Path]
    perturb_hidden_states: list[Any]
    perturb_jaxpr: ClosedJaxpr

    def eval_jaxpr(
        self, inputs: Sequence[Any], perturb_data: Sequence[Any]
    ) -> list[jax.Array]:
        """Run the step on flat inputs and one perturbation for each hidden state."""
        self._check(perturb_data, ValueError)
        return evaluate(
            self.perturb_jaxpr.jaxpr, self.perturb_jaxpr.consts, *inputs, *perturb_data
        )

    def init_perturb_data(self) -> list[jax.Array]:
        """Perturbations of zero."""
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in self.perturb_vars]

    def perturb_data_to_hidden_group_data(
        self, perturb_data: Sequence[Any], hidden_groups: Sequence[HiddenGroup]
    ) -> list[jax.Array]:
        """One array for each group, with its states along the last axis, without units.

        Raises an ``AssertionError`` unless there is one perturbation for each hidden
        state.
        """
        self._check(perturb_data, AssertionError)
        by_path = dict(zip(self.perturb_hidden_paths, perturb_data, strict=True))
        return [
            group.concat_hidden([by_path[p] for p in group.hidden_paths])
            for group in hidden_groups
        ]

    def _check(self, perturb_data: Sequence[Any], error: type[Exception]) -> None:
        if len(perturb_data) != len(self.perturb_vars):
            names = path_names(self.perturb_hidden_paths)
            raise error(
                three_parts(
                    f'{len(perturb_data)} perturbation(s) given',
                    f'the program has {len(self.perturb_vars)} hidden state(s): '
                    f'{names}',
                    'one array for each, as init_perturb_data() gives',
                )
            )

    def dict(self) -> dict[str, Any]:
        """The record as a dictionary."""
        return self._asdict()

    def __repr__(self) -> str:
        names = path_names(self.perturb_hidden_paths)
        return f'HiddenPerturbation({names})'


def add_perturbation(program: StepProgram) -> HiddenPerturbation:
    """Perturb every new hidden state of a step program."""
    jaxpr = program.closed.jaxpr
    deltas = {h.outvar: new_var(h.outvar.aval) for h in program.hidden}
    equations = []
    for eqn in jaxpr.eqns:
        raw = {v: new_var(v.aval) for v in eqn.outvars if v in deltas}
        equations.append(eqn.replace(outvars=[raw.get(v, v) for v in eqn.outvars]))
        equations += [add_equation(r, deltas[v], v) for v, r in raw.items()]
    invars = [*jaxpr.invars, *deltas.values()]
    return HiddenPerturbation(
        list(deltas.values()),
        [h.path for h in program.hidden],
        [h.state for h in program.hidden],
        changed(program.closed, invars=invars, equations=equations),
    )


def add_hidden_perturbation_from_minfo(minfo: Any) -> HiddenPerturbation:
    """The perturbed program of a traced module."""
    return add_perturbation(minfo.program)


def add_hidden_perturbation_in_module(
    model: Any, *model_args: Any, **model_kwargs: Any
) -> HiddenPerturbation:
    """The perturbed program of a module."""
    return add_perturbation(extract(model, *model_args, **model_kwargs).program)


def add_hidden_perturbation_in_jaxpr(
    closed_jaxpr: ClosedJaxpr,
    hidden_outvar_to_invar: Mapping[Var, Var],
    weight_invars: Iterable[Var],
    invar_to_hidden_path: Mapping[Var, Path],
    outvar_to_hidden_path: Mapping[Var, Path],
    path_to_state: Mapping[Path, Any],
) -> HiddenPerturbation:
    """The perturbed form of a jaxpr. Arguments are those of
    :func:`find_hidden_groups_from_jaxpr`."""
    return add_perturbation(
        program_of_jaxpr(
            closed_jaxpr,
            hidden_outvar_to_invar,
            weight_invars,
            invar_to_hidden_path,
            outvar_to_hidden_path,
            path_to_state,
        )
    )
