"""The traced step of a model as documented: its program, its states, and the role of
each variable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from ..compat import ClosedJaxpr, Jaxpr, Var, changed, evaluate
from ..errors import three_parts
from ..frontends import check_function, framework_of, pure_model
from ..frontends.brainstate import (
    TracedStep,
    check_arguments,
    is_module,
    is_parameter,
    trace_step,
)
from ..program import Path, StepProgram
from ..program.step import check_shapes, path_names
from .function_info import FunctionInfo, extract_function_info, extract_pure_info

if TYPE_CHECKING:
    import brainstate


class ModuleInfo(NamedTuple):
    """One traced step of a module: its program, its states, and the role of each
    variable."""

    stateful_model: brainstate.transform.StatefulFunction
    closed_jaxpr: ClosedJaxpr
    retrieved_model_states: dict[Path, brainstate.State]
    compiled_model_states: list[brainstate.State]
    state_id_to_path: dict[int, Path]
    state_tree_invars: list[Any]
    state_tree_outvars: list[Any]
    hidden_path_to_invar: dict[Path, Var]
    hidden_path_to_outvar: dict[Path, Var]
    invar_to_hidden_path: dict[Var, Path]
    outvar_to_hidden_path: dict[Var, Path]
    hidden_outvar_to_invar: dict[Var, Var]
    weight_invars: list[Var]
    weight_path_to_invars: dict[Path, Any]
    invar_to_weight_path: dict[Var, Path]
    num_var_out: int
    num_var_state: int
    out_tree: Any
    program: StepProgram

    @property
    def jaxpr(self) -> Jaxpr:
        """The step without its constants."""
        return self.closed_jaxpr.jaxpr

    def add_jaxpr_outs(self, jax_vars: Sequence[Var]) -> ModuleInfo:
        """The same record with a jaxpr that also returns the given variables."""
        outvars = [*self.jaxpr.outvars, *jax_vars]
        return self._replace(closed_jaxpr=changed(self.closed_jaxpr, outvars=outvars))

    def split_state_outvars(
        self,
    ) -> tuple[dict[Path, Any], dict[Path, Any], dict[Path, Any]]:
        """New state variables by path: parameters, hidden states, other states."""
        parts: tuple[dict, dict, dict] = ({}, {}, {})
        for state, outvars in zip(
            self.compiled_model_states, self.state_tree_outvars, strict=True
        ):
            path = self.state_id_to_path[id(state)]
            is_hidden = path in self.hidden_path_to_invar
            role = 0 if is_parameter(state) else 1 if is_hidden else 2
            parts[role][path] = outvars
        return parts

    def flat_inputs(
        self, args: Sequence[Any], old_state_vals: Sequence[Any] | None, kwargs: dict
    ) -> list[jax.Array]:
        """Arguments and values of states in the order of the inputs of the jaxpr, after
        a check."""
        if old_state_vals is None:
            old_state_vals = [state.value for state in self.compiled_model_states]
        flat = jax.tree.leaves((tuple(args), kwargs, list(old_state_vals)))
        check_shapes(self.closed_jaxpr, flat)
        return flat

    def jaxpr_call(
        self, *args: Any, old_state_vals: Sequence[Any] | None = None, **kwargs: Any
    ) -> tuple:
        """Run the step and return outputs, new hidden values, new values of the other
        states, and extra outputs.

        States are dictionaries by path. Extra outputs are a dictionary by variable. No
        state is written.
        """
        flat = self.flat_inputs(args, old_state_vals, kwargs)
        return self.arrange(evaluate(self.jaxpr, self.closed_jaxpr.consts, *flat))

    def outputs(self, results: Sequence[Any]) -> Any:
        """The model's outputs from the results of the jaxpr."""
        return jax.tree.unflatten(self.out_tree, results[: self.num_var_out])

    def arrange(self, results: Sequence[Any]) -> tuple:
        """Sort the results of the jaxpr as :meth:`jaxpr_call` returns them."""
        a, b = self.num_var_out, self.num_var_out + self.num_var_state
        new = jax.tree.unflatten(
            jax.tree.structure(self.state_tree_outvars), results[a:b]
        )
        hidden: dict[Path, Any] = {}
        others: dict[Path, Any] = {}
        for state, value in zip(self.compiled_model_states, new, strict=True):
            path = self.state_id_to_path[id(state)]
            (hidden if path in self.hidden_path_to_invar else others)[path] = value
        extra = self.jaxpr.outvars[b:]
        return (
            self.outputs(results),
            hidden,
            others,
            dict(zip(extra, results[b:], strict=True)),
        )

    @property
    def name(self) -> str:
        """The name of the module's class."""
        return self.stateful_model.name or 'model'

    def dict(self) -> dict[str, Any]:
        """The record as a dictionary."""
        return self._asdict()

    def __repr__(self) -> str:
        hidden = path_names(self.hidden_path_to_invar)
        weights = path_names(self.weight_path_to_invars)
        return (
            f'ModuleInfo({len(self.jaxpr.eqns)} equations; hidden: {hidden}; '
            f'parameters: {weights})'
        )


def module_info(traced: TracedStep) -> ModuleInfo:
    """The documented record of a traced step."""
    program, jaxpr = traced.program, traced.program.closed.jaxpr
    # In the order of the step's inputs; the program has them in that of the model.
    place = {v: i for i, v in enumerate(jaxpr.invars)}
    hidden = sorted(program.hidden, key=lambda h: place[h.invar])
    parameters = sorted(program.parameters, key=lambda p: place[p.invar])
    return ModuleInfo(
        stateful_model=traced.function,
        closed_jaxpr=program.closed,
        retrieved_model_states=traced.model_states,
        compiled_model_states=traced.states,
        state_id_to_path=traced.paths,
        state_tree_invars=traced.invars,
        state_tree_outvars=traced.outvars,
        hidden_path_to_invar={h.path: h.invar for h in hidden},
        hidden_path_to_outvar={h.path: h.outvar for h in hidden},
        invar_to_hidden_path={h.invar: h.path for h in hidden},
        outvar_to_hidden_path={h.outvar: h.path for h in hidden},
        hidden_outvar_to_invar={h.outvar: h.invar for h in hidden},
        weight_invars=[p.invar for p in parameters],
        weight_path_to_invars={
            traced.paths[id(state)]: tree
            for state, tree in zip(traced.states, traced.invars, strict=True)
            if is_parameter(state)
        },
        invar_to_weight_path={p.invar: p.path for p in parameters},
        num_var_out=len(program.outputs),
        num_var_state=len(jaxpr.outvars) - len(program.outputs),
        out_tree=traced.out_tree,
        program=program,
    )


def extract_module_info(
    model: brainstate.nn.Module, *model_args: Any, **model_kwargs: Any
) -> ModuleInfo:
    """Trace one step ``model(*model_args, **model_kwargs)`` and sort its variables by
    role."""
    if not is_module(model):
        raise TypeError(
            three_parts(
                f'a model of type {type(model).__name__}',
                'this front end reads brainstate modules only',
                'a brainstate.nn.Module, or compile_etrace_graph for other kinds of '
                'models',
            )
        )
    check_arguments(model, model_args, model_kwargs)
    return module_info(trace_step(model, model, model_args, model_kwargs))


def extract(model: Any, *args: Any, **kwargs: Any) -> ModuleInfo | FunctionInfo:
    """Trace one step of a model with the front end of its framework.

    A ``brainstate`` module is called with ``args``, and so is a module of Flax NNX or
    Equinox, with ``state`` where it takes one; any other callable is a plain function
    ``step(params, state, x) -> (state, out)``.
    """
    if is_module(model):
        return extract_module_info(model, *args, **kwargs)
    if framework_of(model) is not None:
        return extract_pure_info(pure_model(model, args, **kwargs))
    check_function(model, args, kwargs.get('state'))
    return extract_function_info(model, *args, **kwargs)
