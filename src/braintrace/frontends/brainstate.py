"""brainstate modules: the first-class front end.

Tracing leaves the module's states as they were, whatever happens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import brainstate
import brainunit as u
import jax

from ..errors import (
    CompilationError,
    InputError,
    UnsupportedStep,
    is_explained,
    three_parts,
)
from ..program import Hidden, OtherState, Parameter, Path, StepProgram, normal_form
from ..program.step import distinct_outputs, path_name
from .failures import explain_failure
from .module_states import look_again, module_states
from .pure import leaf_paths


class StateChanged(CompilationError):
    """A step that gives a state another shape or type; ``shapes``: what it gives."""

    def __init__(self, text: str, path: Path, shapes: list[tuple[tuple, str]]):
        super().__init__(text)
        self.path = path
        self.shapes = shapes


@dataclass(frozen=True)
class TracedStep:
    """One traced step of a module.

    ``model_states``: all states of the module by path. ``states``: those that the step
    reads or writes, ``invars`` and ``outvars`` their variables before and after it, in
    the structure of their values. ``paths``: the path of every state by the identity of
    its object.
    """

    function: brainstate.transform.StatefulFunction
    program: StepProgram
    out_tree: Any
    model_states: dict[Path, brainstate.State]
    states: list[brainstate.State]
    paths: dict[int, Path]
    invars: list[Any]
    outvars: list[Any]


def path_mapping(found: Mapping[Path, Any]) -> brainstate.util.PrettyDict:
    """A mapping that prints one entry a line."""
    return brainstate.util.PrettyDict(found)


def is_module(model: Any) -> bool:
    """True for a brainstate module."""
    return isinstance(model, brainstate.nn.Module)


def is_parameter(state: brainstate.State) -> bool:
    """True for a state that is trained."""
    return isinstance(state, brainstate.ParamState)


@contextmanager
def _states_kept(states: dict[Path, brainstate.State]) -> Iterator[None]:
    """Put the values of all states back if tracing fails."""
    before = {path: state.value for path, state in states.items()}
    try:
        yield
    except BaseException:
        for path, state in states.items():
            state.value = before[path]
        raise


@contextmanager
def inputs_kept(model: brainstate.nn.Module) -> Iterator[None]:
    """If a step fails inside, modules get back what they keep in dictionaries.

    Neurons of brainpy.state collect their currents of a step in one; those of a step
    that failed half-way would be refused in the next as defined twice.
    """
    kept = [
        (module, name, None if value is None else dict(value))
        for module in brainstate.graph.nodes(model).values()
        for name, value in vars(module).items()
        if value is None or type(value) is dict
    ]
    try:
        yield
    except BaseException:
        for module, name, value in kept:
            found = vars(module).get(name)
            if type(found) is not dict:
                continue
            if value is None:
                setattr(module, name, None)
            else:
                found.clear()
                found.update(value)
        raise


@contextmanager
def matrices_kept(model: brainstate.nn.Module) -> Iterator[None]:
    """Around a step: the matrices that modules hold keep no value of a trace.

    A sparse matrix of brainevent stores its work space at its first product. Made
    while a step is traced, that is a tracer, and the next trace would fail on it.
    """
    matrices = [
        matrix
        for module in brainstate.graph.nodes(model).values()
        for value in vars(module).values()
        for matrix in (value if isinstance(value, (list, tuple)) else (value,))
        if hasattr(matrix, 'set_buffer')
    ]
    try:
        _drop_tracers(matrices)  # of a loop that the user ran before
        yield
    finally:
        _drop_tracers(matrices)


def _drop_tracers(matrices: Sequence[Any]) -> None:
    """Empty the buffers that hold tracers; they are filled again when they are
    needed."""
    for matrix in matrices:
        for name, value in dict(matrix.buffers).items():
            if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)):
                matrix.set_buffer(name, None)


def trace_step(
    function: Callable[..., Any],
    model: brainstate.nn.Module,
    args: tuple,
    kwargs: dict,
    what: str = 'a step',
) -> TracedStep:
    """Trace a function that advances a module by one step, and sort its variables by
    role; errors call the function ``what``."""
    found = dict(module_states(model))
    # A frame of this folder between the tools that trace and the user's own code:
    # source lines begin behind it.
    called = lambda *args, **kwargs: function(*args, **kwargs)
    stateful: Any = brainstate.transform.StatefulFunction(
        called, return_only_write=False, name=type(model).__name__
    )
    with _states_kept(found), inputs_kept(model), matrices_kept(model):
        try:
            traced = stateful.get_jaxpr(*args, **kwargs)
        except NotImplementedError:
            raise
        except Exception as error:
            if isinstance(error, CompilationError) and is_explained(error):
                raise
            raise explain_failure(model, args, error, what) from error
    if created := [path for path in module_states(model) if path not in found]:
        raise _state_created(created[0])
    look_again(model)  # states may have been added since it was last seen
    states = stateful.get_states(*args, **kwargs)
    written = {id(s) for s in stateful.get_write_states(*args, **kwargs)}
    out_shapes, new_shapes = stateful.get_out_shapes(*args, **kwargs)
    return _sort(stateful, traced, found, states, written, out_shapes, new_shapes)


def _sort(
    function: Any,
    traced: Any,
    found: dict,
    states: Sequence,
    written: set[int],
    out_shapes: Any,
    new_shapes: Any,
) -> TracedStep:
    paths = {id(state): path for path, state in found.items()}
    for i, state in enumerate(states):
        paths.setdefault(id(state), ('<outside>', type(state).__name__, i))

    values = [state.value for state in states]
    for state, old, new in zip(states, values, new_shapes, strict=True):
        _check_new_value(paths[id(state)], old, new)
        if id(state) in written and is_parameter(state):
            raise _parameter_written(paths[id(state)])

    counts = [len(jax.tree.leaves(value)) for value in values]
    num_out = len(jax.tree.leaves(out_shapes))
    num_in = len(traced.jaxpr.invars) - sum(counts)
    moving = {id(s) for s in states if _is_hidden(s) and id(s) in written}
    places = zip(states, accumulate(counts, initial=num_out), strict=False)
    closed = distinct_outputs(
        normal_form(traced), [place for s, place in places if id(s) in moving]
    )

    jaxpr = closed.jaxpr
    tree = jax.tree.structure(values)
    in_trees = jax.tree.unflatten(tree, jaxpr.invars[num_in:])
    out_trees = jax.tree.unflatten(tree, jaxpr.outvars[num_out:])
    parameters: list[Parameter] = []
    hidden: list[Hidden] = []
    others: list[OtherState] = []
    for state, value, ins, outs in zip(
        states, values, in_trees, out_trees, strict=True
    ):
        path = paths[id(state)]
        keys = leaf_paths(value, lambda x: isinstance(x, u.Quantity))
        arrays = zip(keys, jax.tree.leaves(ins), jax.tree.leaves(outs), strict=True)
        if is_parameter(state):
            parameters += [Parameter(path, key, old, state) for key, old, _ in arrays]
        elif id(state) in moving:
            ((_, old, new),) = arrays
            hidden.append(Hidden(path, old, new, state, tuple(state.varshape)))
        else:
            is_written = id(state) in written
            others += [
                OtherState(path, key, old, new if is_written else None)
                for key, old, new in arrays
            ]

    constant = [s for s in states if _is_hidden(s) and id(s) not in written]
    order = {path: i for i, path in enumerate([*found, *paths.values()])}
    touched = {id(s) for s in states}
    untouched = lambda kind: tuple(
        p for p, s in found.items() if id(s) not in touched and isinstance(s, kind)
    )
    program = StepProgram(
        closed,
        inputs=tuple(jaxpr.invars[:num_in]),
        parameters=tuple(sorted(parameters, key=lambda p: order[p.path])),
        hidden=tuple(sorted(hidden, key=lambda h: order[h.path])),
        others=tuple(others),
        outputs=tuple(jaxpr.outvars[:num_out]),
        constant_hidden=tuple(paths[id(s)] for s in constant),
        untouched_hidden=untouched(brainstate.HiddenState),
        untouched_parameters=untouched(brainstate.ParamState),
    )
    return TracedStep(
        function,
        program,
        jax.tree.structure(out_shapes),
        brainstate.util.FlattedDict(found),
        list(states),
        paths,
        in_trees,
        out_trees,
    )


def _is_hidden(state: brainstate.State) -> bool:
    if not isinstance(state, brainstate.HiddenState):
        return False
    (leaf,) = jax.tree.leaves(state.value)
    return jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)


# ---------------------------------------------------------------- bad input


def check_arguments(model: Any, args: tuple, kwargs: dict) -> None:
    signature = inspect.signature(model.update)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            three_parts(
                f'{type(model).__name__} called with {len(args)} argument(s) and '
                f'keywords {sorted(kwargs)}',
                f'its step is update{signature}: {error}',
                'one example for each argument of update, as in a call of the model',
            )
        ) from error


def _check_new_value(path: Path, old: Any, new: Any) -> None:
    """Raise unless a state keeps its shape and type."""
    old_shapes = [
        (x.shape, str(x.dtype)) for x in map(jax.numpy.asarray, jax.tree.leaves(old))
    ]
    new_shapes = [(tuple(x.shape), str(x.dtype)) for x in jax.tree.leaves(new)]
    if old_shapes != new_shapes:
        fix = (
            'states initialised with the shape (batch axis included) and dtype that '
            'the step gives them'
        )
        old_axes, new_axes = (
            [shape for shape, _ in x] for x in (old_shapes, new_shapes)
        )
        pairs = zip(old_axes, new_axes, strict=False)
        if old_axes and all(new[1:] == old and new != old for old, new in pairs):
            fix = (
                'inputs of one step, as xs[0] of a sequence whose first axis is time; '
                f'or {fix}'
            )
        if old_axes == new_axes:
            fix = (
                'inputs of the type of the state, or '
                f'brainstate.environ.set(precision=64) first; or {fix}'
            )
        raise StateChanged(
            three_parts(
                f'a step that turns state {path_name(path)} from {old_shapes} into '
                f'{new_shapes}',
                'a step is repeated, so every state must keep its shape and type',
                fix,
            ),
            path,
            new_shapes,
        )


def _state_created(path: Path) -> CompilationError:
    return CompilationError(
        three_parts(
            f'a step that creates state {path_name(path)}',
            'a step is repeated: a state created in it would be new at every step '
            'and carry nothing over',
            'states created in __init__ or init_state, and only read and written in '
            'update',
        )
    )


def _parameter_written(path: Path) -> UnsupportedStep:
    return UnsupportedStep(
        three_parts(
            f'a step that writes parameter {path_name(path)}',
            'gradients are taken with respect to parameters that stay fixed within a '
            'step',
            'a ShortTermState (or HiddenState) for a value that changes in time; let '
            'the optimiser write parameters',
        )
    )
