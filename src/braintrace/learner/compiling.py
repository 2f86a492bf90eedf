"""A learner is compiled for example inputs: the graph of its model, the shapes it was
made for, where fresh sequences start, and zero traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..errors import NotCompiledError, three_parts
from ..frontends.module_states import module_states
from ..lowering.executor import ETraceGraphExecutor
from . import model_states
from .carried import make_traces
from .models import interface_of
from .placement import on_mesh
from .programs import bind_model, shapes_of, state_shapes_of
from .rule_state import new_rule_state
from .state import StartValue

if TYPE_CHECKING:
    from .learner import Learner


def new_executor(learner: Learner) -> ETraceGraphExecutor:
    """What compiles the graph of a learner's model."""
    call = learner._run_model if learner.vmap else None
    return ETraceGraphExecutor(
        learner.model, call=call, trained=True, vjp_method=learner.vjp_method
    )


def compile_learner(learner: Learner, args: tuple) -> None:
    """Compile for the inputs of one step. The model's current states are where a fresh
    sequence starts."""
    for state in module_states(learner.model).values():
        state.value = jax.tree.map(_strongly_typed, state.value)
    model_states.compile_for(learner, args)
    learner._kept.programs.clear()
    learner._carried.forget()
    learner._example = args
    learner._compiled_for = (shapes_of(args), state_shapes_of(learner))
    model_states.place_states(learner)
    learner._kept.shapes = model_states.compiled_shapes(learner)
    learner._start = {
        path: StartValue(state.value)
        for path, state in module_states(learner.model).items()
        if not interface_of(learner.model).carries_on(path, state)
    }
    if learner.rule.predictor is not None:
        learner.rule_state = new_rule_state(learner)
    with on_mesh(learner.placement):
        model = bind_model(learner, args)
        if not model.leaves_parameters_unread:
            learner.rule.check_readouts(model.step(False))
        make_traces(learner)


def _strongly_typed(x: Any) -> Any:
    """An update would make weak types strong, and everything would be compiled
    again."""
    return jnp.asarray(x, x.dtype) if getattr(x, 'weak_type', False) else x


def not_compiled(rule: str) -> NotCompiledError:
    """The error of a learner that is used before compiling."""
    return NotCompiledError(
        three_parts(
            f'a {rule} learner used before compiling',
            'its graph and traces are made from one step on example inputs',
            'learner.compile_graph(x) on an example of the inputs, after '
            'brainstate.nn.init_all_states(model, batch_size=...); or '
            f"braintrace.compile(model, '{rule}', x, batch_size=...), "
            'which does both',
        )
    )
