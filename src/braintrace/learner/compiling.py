"""A learner is compiled for example inputs: the graph of its model, the shapes it was
made for, where fresh sequences start, and zero traces."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import jax.numpy as jnp

from ..errors import ArgumentError, NotCompiledError, one_of, three_parts
from ..frontends.brainstate import StateChanged
from ..frontends.module_states import module_states
from ..graph.executor import ETraceGraphExecutor
from ..program.data import first_step
from ..program.step import path_name
from . import model_states
from .access import synchronised
from .binding import bind_model
from .carried import make_traces, new_rule_state
from .credit_warnings import warn_of_credit
from .model_states import StartValue
from .models import interface_of
from .programs import compile_step, shapes_of, state_shapes_of
from .spellings import positions

if TYPE_CHECKING:
    from .learner import Learner


def new_executor(learner: Learner) -> ETraceGraphExecutor:
    """What compiles the graph of a learner's model."""
    call = learner._run_model if learner.vmap else None
    return ETraceGraphExecutor(
        learner.model, call=call, trained=True, vjp_method=learner.vjp_method
    )


def compile_graph(learner: Learner, *args: Any) -> None:
    """Compile the model for example inputs of one step.

    Fresh sequences start from the current states of the model.
    """
    args = first_step(args)
    with synchronised(learner):
        for state in module_states(learner.model).values():
            state.value = jax.tree.map(_strongly_typed, state.value)
        _analyse_step(learner, args)
        learner._carried.forget()
        learner._kept.programs.clear()
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
        model = bind_model(learner, args)
        if not model.leaves_parameters_unread:
            learner.rule.check_readouts(model.step(False))
        make_traces(learner)


def _analyse_step(learner: Learner, args: tuple) -> None:
    """Compile the graph for example inputs. If no batch size was given, hidden states
    to which the step itself adds the batch axis of the inputs are given it before."""
    states = module_states(learner.model)
    with model_states.restored_on_error(states.values()):
        while True:
            try:
                return compile_step(learner, args)
            except StateChanged as error:
                state = states.get(error.path)
                may_add = not learner._kept.has_batch_size
                if not (may_add and _add_batch_axis(state, error, args)):
                    raise


def _add_batch_axis(state: Any, error: StateChanged, args: tuple) -> bool:
    """Repeat the value of a hidden state for every sample, if that is what a step makes
    of it; whether it is."""
    if not isinstance(state, brainstate.HiddenState) or len(error.shapes) != 1:
        return False
    ((shape, dtype),) = error.shapes
    old = jax.tree.leaves(state.value)[0]
    batch = shape[:1]
    # A state that begins with as many elements may have its batch axis already.
    has_none = batch and old.shape[:1] != batch
    repeats = has_none and shape[1:] == old.shape and dtype == str(old.dtype)
    if not repeats or any(jnp.shape(x)[:1] != batch for x in jax.tree.leaves(args)):
        return False
    warnings.warn(
        f'state {path_name(error.path)} had no batch axis and the inputs have one: it '
        f'now has {batch[0]} samples; write batch_size={batch[0]}',
        stacklevel=4,
    )
    state.value = jax.tree.map(lambda x: jnp.broadcast_to(x, shape), state.value)
    return True


def _strongly_typed(x: Any) -> Any:
    """An update would make weak types strong, and everything would be compiled
    again."""
    return jnp.asarray(x, x.dtype) if getattr(x, 'weak_type', False) else x


def with_options(learner: Learner, **changes: Any) -> Learner:
    """Return another learner on the same model, with some options changed.

    ``changes``: options of the learner's class, those of its rule included: ``trace``,
    ``trace_dtype``, ``block``, ``passes``, ``reach``, ``vjp_method``,
    ``max_trace_bytes``, ``check_finite``, ``name``, or ``decay_or_rank`` of
    :class:`pp_prop`. Options that are not named stay as this learner was given them.

    Both learners read and write the weights and states of the one model, and fresh
    sequences start from the same states. The traces of the new learner start from
    zero, and so do a predictor and the states of optax optimisers. This learner is not
    changed. If it is compiled, so is the new one.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> net = brainstate.nn.GRUCell(3, 4)
    >>> learner = braintrace.compile(net, 'd_rtrl', jnp.ones((2, 3)), batch_size=2)
    >>> other = learner.with_options(trace_dtype=jnp.bfloat16)
    >>> other.model is net, other.trace_dtype is jnp.bfloat16, learner.trace_dtype
    (True, True, None)
    """
    kind = type(learner)
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    # How states are made and where they are is a property of the model.
    fixed = ('vmap', 'mesh', 'shard', 'config', 'rule')
    names = [p.name for p in parameters if p.name not in fixed]
    if unknown := [name for name in changes if name not in names]:
        raise ArgumentError(
            three_parts(
                f'with_options({unknown[0]}=...) of a {kind.__name__} learner',
                'it is no option that can differ between learners of one model',
                one_of(names, unknown[0]),
            )
        )
    args, options = learner._made_with()
    shown = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    given = dict(zip(positions(kind.__name__) or shown, args, strict=False))
    other = kind(learner.model, **{**given, **options, **changes})
    if learner.rule.is_modulated and 'modulator' not in changes:
        other.set_modulator(learner.modulator)
    if learner.is_compiled:
        other._kept.has_batch_size = learner._kept.has_batch_size
        other.compile_graph(*learner._example)
        for path, start in other._start.items():
            start.value = learner._start[path].value
        warn_of_credit(other)
    return other


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
