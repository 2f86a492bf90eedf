"""A model compiled for a rule: its programs, and the states and traces that live from call to call."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import brainstate
import jax
import jax.numpy as jnp

from ..analysis.diagnostics import CUTS
from ..analysis.graph import ETraceGraph
from ..analysis.report import CompilationReport
from ..compat import Var
from ..engine.executor import ETraceGraphExecutor
from ..engine.plan import Values
from ..engine.sequence import Solved
from ..errors import CompilationError, NotSupportedError, three_parts
from ..frontends.brainstate import module_states
from ..program import Path
from ..program.data import first_step
from ..program.step import path_name
from ..rules import Rule
from .arguments import (
    bytes_of,
    check_batch_size,
    check_block,
    check_bytes,
    check_choice,
    check_combination,
    check_modulator,
    check_trace_dtype,
    length_of,
    never_called,
)
from .check import size_text
from .data import EligibilityTrace, Standing, StartValue
from .gradients import gradients_of
from .online import made_beside, online_step
from .traced import Traced, in_trace, shapes_of

_MOST_PROGRAMS = 16

_LAST_SHAPED: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""For each model the learner that last gave its states their shapes."""


@dataclass
class _Made:
    """What is no part of the module's tree: programs, states of optax transformations, the zeros traces start from,
    whose trace holds the states' side of another, what rules that are compared read, and every trace there ever was.
    """

    programs: dict[tuple, tuple] = field(default_factory=dict)
    optimizers: dict[Any, brainstate.State] = field(default_factory=dict)
    zeros: dict[tuple, Any] = field(default_factory=dict)
    owners: dict[tuple, tuple] = field(default_factory=dict)
    compared: dict[Rule, Standing | None] = field(default_factory=dict)
    traces: dict[tuple, EligibilityTrace] = field(default_factory=dict)
    shapes: dict[Path, tuple[int, ...]] = field(default_factory=dict)
    """Of the hidden states that the learner was compiled for."""

    def keep(self, key: tuple, *program: Any) -> None:
        """Keep a program; the oldest goes where there are too many."""
        if len(self.programs) >= _MOST_PROGRAMS:
            self.programs.pop(next(iter(self.programs)))
        self.programs[key] = program


class _OtherShape(Exception):
    """A modulator of a step has another shape than the standing one."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__(shape)
        self.shape = shape


def _may_differ_from_zero(trace: EligibilityTrace) -> bool:
    """False for a trace that is known to be zero; inside a trace its value may be unknown."""
    leaves = jax.tree.leaves(trace.look())
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return True
    with jax.ensure_compile_time_eval():
        return any(bool(jnp.any(x != 0)) for x in leaves)


def make_states(model: brainstate.nn.Module, batch_size: int | None, vmap: bool = False) -> None:
    """Initialise a model's states; objects that it already has as states are used again.

    A function that was jitted earlier holds these objects and would not see others.
    """
    before = dict(module_states(model))
    if vmap:
        brainstate.nn.vmap_init_all_states(model, axis_size=batch_size)
    else:
        brainstate.nn.init_all_states(model, **({} if batch_size is None else {'batch_size': batch_size}))
    replaced: dict[int, brainstate.State] = {}
    for path, state in module_states(model).items():
        old = before.get(path)
        if old is None or old is state or type(old) is not type(state):
            continue
        # One that was made inside a trace ended with it.
        if old.stack_level == state.stack_level:
            old.value = state.value
            replaced[id(state)] = old
    if replaced:
        for node in cast(Any, model).nodes().values():
            for name, value in list(vars(node).items()):
                if (same := _with_states(value, replaced)) is not value:
                    setattr(node, name, same)


def _with_states(value: Any, replaced: Mapping[int, brainstate.State]) -> Any:
    """A module's attribute with some states in the place of others; itself if it holds none of those."""
    if isinstance(value, brainstate.State):
        return replaced.get(id(value), value)
    if type(value) not in (dict, list, tuple):
        return value
    items = list(value.values()) if isinstance(value, dict) else list(value)
    new = [_with_states(item, replaced) for item in items]
    if all(a is b for a, b in zip(items, new, strict=True)):
        return value
    return dict(zip(value, new, strict=True)) if isinstance(value, dict) else type(value)(new)


def _shapes(states: Mapping[Path, brainstate.State]) -> dict[Path, tuple[int, ...]]:
    """The shape of each state that is one array."""
    leaves = {path: jax.tree.leaves(state.value) for path, state in states.items()}
    return {path: jnp.shape(found[0]) for path, found in leaves.items() if len(found) == 1}


def _states_of_another(
    rule: Rule,
    path: Path,
    compiled: tuple[int, ...],
    got: tuple[int, ...],
    other: Compiled | None,
) -> CompilationError:
    """The error of a learner whose model has states of another batch."""
    batched = len(compiled) == len(got) and compiled[1:] == got[1:]
    sizes = (compiled[0], got[0]) if batched else (compiled, got)
    was, now = (f'batch {size}' if batched else f'shape {size}' for size in sizes)
    who = 'they were made anew'
    if other is not None:
        who = f'another learner of the same model ({other.rule.name}) made them anew'
    return CompilationError(
        three_parts(
            f'a call of a {rule.name} learner compiled for {was}, with states of {now}: {path_name(path)}',
            f'{who} after this learner was compiled',
            f'learner.reset_state({f"batch_size={compiled[0]}" if batched else ""}) before this call, '
            f'or a model for each learner',
        )
    )


class Compiled(brainstate.nn.Module):
    """A model, a rule, and what was compiled of both; :class:`Learner` trains with it."""

    def __init__(
        self,
        model: brainstate.nn.Module,
        rule: Rule,
        *,
        reach: str = 'local',
        vjp_method: str = 'single-step',
        vmap: bool = False,
        block: int | None = None,
        passes: int | None = None,
        trace: str | Callable[[Path], bool] = 'auto',
        trace_dtype: Any = None,
        max_trace_bytes: int = 8 * 2**30,
        check_finite: bool = False,
        name: str | None = None,
    ):
        super().__init__(name=name)  # type: ignore[call-arg]
        check_choice('reach', reach, ('local', 'deep'))
        check_choice('vjp_method', vjp_method, ('single-step', 'multi-step'))
        self.rule = replace(rule, deep=reach == 'deep', multi_step=vjp_method == 'multi-step')
        check_combination(self.rule, vjp_method, trace, trace_dtype)
        check_block(block)
        check_trace_dtype(trace_dtype)
        self.model = model
        self.vmap = vmap
        self.executor = ETraceGraphExecutor(model, self._call if vmap else None, trained=True)
        self.block = block
        if passes not in (None, 1, 2):
            raise ValueError(three_parts(f'passes={passes!r}', 'a sequence is run in one pass or two', '1, 2 or None'))
        self.passes = passes
        if not callable(trace):
            check_choice('trace', trace, ('auto', 'marked'))
        self.trace = trace
        self.trace_dtype = trace_dtype
        check_bytes('max_trace_bytes', max_trace_bytes)
        self.max_trace_bytes = max_trace_bytes
        self.check_finite = check_finite
        self.traces: dict[tuple, EligibilityTrace] = {}
        self._example: tuple = ()
        self.standing = self._stand(rule)
        self._start: dict[Path, StartValue] = {}
        self._made = _Made()
        self._tracing = False
        self._deaf = False
        self._in_chunk = False
        self._updates = 0
        self._modulators = 0

    def __deepcopy__(self, memo: Any = None) -> Any:
        """A learner of its own on a copy of the model: weights, states, traces, optax states."""
        copied = super().__deepcopy__(memo)  # copies the states of the tree and shares all else
        # Programs, and the graph, hold the states of the model that they were made of.
        copied.executor = ETraceGraphExecutor(copied.model, copied._call if copied.vmap else None)
        if copied._example:
            copied.executor.compile_graph(*copied._example)
        optimizers = {key: copy.deepcopy(state.value) for key, state in self._made.optimizers.items()}
        copied._made = _Made(
            optimizers={key: brainstate.ShortTermState(value) for key, value in optimizers.items()},
            owners=dict(self._made.owners),
            traces=dict(copied.traces),
            shapes=dict(self._made.shapes),
        )
        return copied

    # ------------------------------------------------------------ compiling

    def compile_graph(self, *args: Any) -> None:
        """Compile the model for example inputs of one step; its current states are where a fresh sequence starts."""
        strong = lambda x: jnp.asarray(x, x.dtype) if getattr(x, 'weak_type', False) else x
        for state in module_states(self.model).values():  # an update would make their types strong, and compile again
            state.value = jax.tree.map(strong, state.value)
        args = first_step(args)
        self.executor.compile_graph(*args)
        self._made.programs.clear()
        self._made.compared.clear()
        self._made.traces.clear()
        self._example = args
        self.traces = {}
        self._start = {
            path: StartValue(state.value)
            for path, state in module_states(self.model).items()
            if not isinstance(state, brainstate.ParamState) and not isinstance(state, brainstate.random.RandomState)
        }
        if self.rule.predictor is not None:
            self.standing = self._stand(self.rule)
        self._note_shapes()
        self._make_traces()

    def _make_traces(self) -> None:
        """Zero traces for the model's step as it is now, before any program asks for them."""
        with contextlib.suppress(NotSupportedError):  # refused again, with the reason, when a trace is needed
            self._prepare_traces(self._step_program(self._example)[0])

    def _stand(self, rule: Rule) -> Standing | None:
        """The state that a rule reads, as it is at first; a predictor's once the model is compiled."""
        if rule.predictor is not None and self._example:
            groups = self.graph.hidden_groups
            shapes = [(g.num_state, g.varshape, jnp.finfo(g.hidden_invars[0].aval.dtype).dtype) for g in groups]
            return Standing(rule.predictor.init(shapes))
        if rule.signal == 'modulatory':
            return Standing(jnp.ones(()))
        if rule.trace == 'random_projection' or (rule.feedback and rule.feedback.align is not None):
            return Standing(jnp.zeros((), jnp.int32))
        return None

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph of the model's step."""
        return self.executor.graph

    @property
    def report(self) -> CompilationReport:
        """What the compiler found, what this rule gives each parameter, and the traces that it carries."""
        traced = self._step_program(self._example)[0]
        found = self.graph.report
        gives = gradients_of(self.rule, traced, found.credits)
        first = {r.weight_path: gives[r.context['name']].kind for r in reversed(found.credits)}
        return replace(
            found,
            rule=self.rule,
            traces=traced.trace_shapes if self.rule.trace != 'none' else {},
            gives=gives,
            etrace_weights={path: first[path] for path in found.etrace_weights},
            diagnostics=tuple(r for r in found.diagnostics if self.rule.cuts or r.kind not in CUTS),
        )

    def _repr_html_(self) -> str | None:
        return self.report._repr_html_() if self._example else None

    def show_graph(self, **options: Any) -> str | None:
        """Print groups, parameters with what the rule gives them, and other states."""
        return self.executor.show_graph(**options, gives=self.report.etrace_weights)

    @property
    def param_states(self) -> dict[Path, brainstate.State]:
        """The model's parameters by path."""
        return dict(module_states(self.model, brainstate.ParamState))

    @property
    def hidden_states(self) -> dict[Path, brainstate.State]:
        """The model's hidden states by path."""
        return dict(module_states(self.model, brainstate.HiddenState))

    @property
    def other_states(self) -> dict[Path, brainstate.State]:
        """States that are neither parameters nor hidden."""
        roles = (brainstate.ParamState, brainstate.HiddenState)
        return {path: state for path, state in module_states(self.model).items() if not isinstance(state, roles)}

    def _set_modulator(self, value: Any) -> None:
        if self.standing is None or self.rule.signal != 'modulatory':
            raise ValueError(
                three_parts(
                    f'a modulator for {self.rule.name}', 'its traces are taught by the loss', "rule 'three_factor'"
                )
            )
        check_modulator(value)
        value = jnp.asarray(value, jnp.result_type(float))
        if self._tracing and self._modulators:
            raise CompilationError(
                three_parts(
                    'two calls with a modulator in one step_fn',
                    'a step has one, which teaches all that happens in it',
                    'one call with modulator=... in a step_fn',
                )
            )
        self._modulators += self._tracing
        if self._tracing and isinstance(value, jax.core.Tracer) and value.shape != jnp.shape(self.standing.value):
            raise _OtherShape(value.shape)
        self.standing.value = value

    @contextlib.contextmanager
    def _modulated(self) -> Iterator[None]:
        """The standing modulator stands again afterwards."""
        before = self.standing.value if self.standing is not None else None
        try:
            yield
        finally:
            if self.standing is not None:
                self.standing.value = before

    def _call(self, *args: Any) -> Any:
        """The model, or the model of one sample mapped over the batch axis of its current states."""
        if self.standing is not None:
            self.standing.value  # noqa: B018 - the step reads it
        if not self.vmap:
            return self.model(*args)
        states = brainstate.ShortTermState
        return brainstate.nn.Vmap(self.model, vmap_states=states, vmap_out_states=states)(*args)

    def _step_program(self, args: tuple, window: bool = False) -> tuple[Traced, Callable]:
        """The traced step of the model alone, and its compiled form with the online gradient."""
        self._check_shapes()
        shapes = tuple((jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(args))
        exact = self.rule.has_exact_windows or (window and self._in_chunk)
        key = ('step', window, exact, self._in_chunk, jax.tree.structure(args), shapes, self._state_shapes())

        def make() -> tuple[Traced, Callable]:
            self.graph  # noqa: B018 - refuses a learner that was not compiled
            first = lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x))
            example = jax.tree.map(first, args) if window else args
            traced = self._traced(self._call, example, False, self.rule)
            step = online_step(traced, window, exact, self.rule.predictor)
            return traced, jax.jit(step)

        return self._kept(key, make)

    def _kept(
        self,
        key: tuple,
        make: Callable[[], tuple[Traced, Callable]],
    ) -> tuple[Traced, Callable]:
        """A traced step and its program, made once unless it closes over a trace around it."""
        if key not in self._made.programs:
            traced, program = make()
            if not traced.is_reusable:
                return traced, program
            self._made.keep(key, traced, program)
        return self._made.programs[key]

    def _loop(self, key: tuple, run: Callable) -> Callable:
        """A compiled loop of brainstate, made once.

        Inside a trace it may close over values of that trace, so there it is not kept.
        """
        if key not in self._made.programs:
            loop = brainstate.transform.jit(run)
            if in_trace():
                return loop
            self._made.keep(key, None, loop)
        return self._made.programs[key][1]

    # ------------------------------------------------------------ programs

    def _program(
        self, step_fn: Callable, sequences: tuple, fresh: bool, rule: Rule, evolve: bool = False
    ) -> tuple[Traced, Callable]:
        """The traced step and its compiled solver, or without a loss its evolution; made once for each shape."""
        self._check_shapes()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), sequences)
        leaves, structure = jax.tree.flatten(shapes)
        sizes = tuple((x.shape, x.dtype) for x in leaves)
        key = (step_fn, structure, sizes, fresh, rule, evolve, self._state_shapes(), id(self.standing))

        def make() -> tuple[Traced, Callable]:
            example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes)
            traced = self._trace(step_fn, example, rule, not evolve)
            run = self._evolution(traced) if evolve else self._solver(traced, fresh, rule)
            static = () if evolve else ('masked',)
            return traced, jax.jit(run, donate_argnums=2, static_argnames=static)

        return self._kept(key, make)

    def _note_shapes(self) -> None:
        """The hidden states have the shapes that this learner is for."""
        self._made.shapes = _shapes(self.hidden_states)
        _LAST_SHAPED[self.model] = weakref.ref(self)

    def _check_shapes(self) -> None:
        """Raise if the hidden states have other shapes than this learner was compiled for."""
        found = _shapes(self.hidden_states)
        for path, shape in self._made.shapes.items():
            if found.get(path, shape) != shape:
                last = _LAST_SHAPED.get(self.model, lambda: None)()
                other = None if last is self else last
                raise _states_of_another(self.rule, path, shape, found[path], other)

    def _state_shapes(self) -> tuple:
        roles = (brainstate.ParamState, brainstate.HiddenState)
        every = module_states(self.model).values()
        states: list[brainstate.State] = [state for state in every if isinstance(state, roles)]
        states += [] if self.standing is None else [self.standing]
        return tuple((jnp.shape(x), jnp.result_type(x)) for s in states for x in jax.tree.leaves(s.value))

    def _trace(self, step_fn: Callable, example: tuple, rule: Rule, loss: bool = True) -> Traced:
        self.graph  # noqa: B018 - refuses a learner that was not compiled
        self._check_shapes()
        self._tracing, before = True, self._updates
        try:
            traced = self._traced(step_fn, example, loss, rule)
            if self._updates == before:
                raise never_called()
        finally:
            self._tracing = False
        return traced

    def _traced(self, function: Callable, example: tuple, loss: bool, rule: Rule) -> Traced:
        whole = rule.has_exact_windows or self._in_chunk
        given = (function, example, loss, rule, whole)
        try:
            return self._traced_now(*given)
        except CompilationError as error:
            if self.standing is None or not isinstance(error.__cause__, _OtherShape):
                raise
            with self._modulated():
                self.standing.value = jnp.zeros(error.__cause__.shape)  # the step brings a modulator of its own
                return self._traced_now(*given)

    def _traced_now(self, function: Callable, example: tuple, loss: bool, rule: Rule, whole: bool) -> Traced:
        self._modulators = 0
        return Traced(function, self.model, example, loss, rule, self.trace_dtype, self.trace, whole, self.standing)

    def _solver(self, traced: Traced, fresh: bool, rule: Rule) -> Callable[..., Solved]:
        engine, window = traced.engine, rule.window

        def solve(
            parameters: Values,
            states: Values,
            traces: list,
            inputs: Values,
            weights: jax.Array,
            unit: Any = 1.0,
            masked: bool = True,
        ) -> Solved:
            length = len(weights)
            if rule.multi_step and rule.trace != 'none':
                carried = engine.init_traces() if fresh else traces
                alone = (parameters, states, carried, inputs, weights)
                return traced.sequencer.windows(*alone, length=1, masked=masked)
            if window is not None or rule.deep:
                given = (parameters, states, traces, inputs, weights, window or length, rule.deep)
                return traced.sequencer.windows(*given, rule.predictor, fresh, unit, masked)
            if fresh and rule.is_local and rule.trace == 'per_param' and self._two_passes(traced, length):
                block = self._block(traced, length, False)
                return traced.sequencer.two_pass(parameters, states, inputs, weights, block, masked)
            traces = engine.init_traces() if fresh else traces
            block = self._block(traced, length, True)
            return engine.one_pass(parameters, states, traces, inputs, weights, block, masked)

        return solve

    def _evolution(self, traced: Traced) -> Callable[..., Solved]:
        def evolve(parameters: Values, states: Values, traces: list, inputs: Values) -> Solved:
            block = self._block(traced, length_of(tuple(inputs.values())), True)
            return traced.engine.evolve(parameters, states, traces, inputs, block)

        return evolve

    def _block(self, traced: Traced, steps: int, carried: bool) -> int:
        return min(self.block, steps) if self.block else traced.engine.block_length(steps, carried)

    def _two_passes(self, traced: Traced, length: int) -> bool:
        """Two passes need no trace; one pass if the caller says so or the sequence is too long to keep."""
        if self.passes is not None:
            return self.passes == 2
        return length * traced.engine.step_bytes <= self.max_trace_bytes

    # ------------------------------------------------------------ states and traces

    def _restarted(self, traced: Traced, states: Values) -> Values:
        """States as they were when the model was compiled; random keys go on."""
        start: dict[Var, Any] = {}
        pairs = zip(traced.info.compiled_model_states, traced.info.state_tree_invars, strict=True)
        for state, tree in pairs:
            path = traced.info.state_id_to_path[id(state)]
            if path in self._start:
                start.update(zip(jax.tree.leaves(tree), jax.tree.leaves(self._start[path].value), strict=True))
        return Values((v, start.get(v, x)) for v, x in states.items())

    def _read_traces(self, traced: Traced, fresh: bool, given: bool = False) -> list[jax.Array]:
        """The traces of a step, made if there are none yet; ``given``: in memory that the call may write to."""
        if fresh or self.rule.trace == 'none':
            return []
        self._prepare_traces(traced)
        found = [self.traces[k] for k in traced.trace_keys]
        return [trace.give_up() if given else trace.value for trace in found]

    def _prepare_traces(self, traced: Traced) -> None:
        """Zero traces of a step, unless there are traces like them already."""
        keys = traced.trace_keys
        if self.rule.trace != 'none' and not self._has_traces(traced):
            if any(map(_may_differ_from_zero, self.traces.values())):
                raise CompilationError(
                    three_parts(
                        'a step_fn whose traces differ from those carried so far',
                        'traces of one step program cannot be continued by another',
                        'learner.reset_state() before the new step_fn, or fresh=True',
                    )
                )
            self._check_size(traced)
            made_beside(self.hidden_states, lambda: self._renew_traces(traced))
            self.traces = {key: self._made.traces[key] for key in keys}
            self._made.owners = {key: keys[n] for key, n in zip(keys, traced.engine.owner, strict=True)}
            self._remember_zeros()

    def _has_traces(self, traced: Traced) -> bool:
        """Whether there are traces of a step, in its shapes."""
        # Traces of other names are not read here: inside jit they would be its inputs,
        # and no longer known to be zero.
        if set(traced.trace_keys) != self.traces.keys():
            return False
        found = {key: shapes_of(trace.peek()) for key, trace in self.traces.items()}
        return found == traced.trace_shapes

    def _renew_traces(self, traced: Traced) -> None:
        """Zeros in the traces of a step.

        A function that was jitted earlier holds the traces of then, so these are used again.
        """
        for key, zeros in zip(traced.trace_keys, traced.engine.init_traces(), strict=True):
            if key in self._made.traces:
                self._made.traces[key].keep(zeros)
            else:
                self._made.traces[key] = EligibilityTrace(zeros)

    @contextlib.contextmanager
    def unmoved(self) -> Iterator[None]:
        """Measure inside: afterwards states, traces and random numbers are as they were before.

        This covers every state that is read or written inside, of the learner or not.
        """
        traces, owners, zeros = self.traces, self._made.owners, self._made.zeros
        touched: Any = brainstate.StateTraceStack()
        try:
            with touched:
                _mark_seen(traces)
                yield
        finally:
            touched.recovery_original_values()
            self.traces, self._made.owners, self._made.zeros = traces, owners, zeros
            _mark_seen(traces)

    @contextlib.contextmanager
    def _cleared_on_error(self) -> Iterator[None]:
        """Traces given up to a call that does not return begin anew."""
        try:
            yield
        except BaseException:
            for trace in self.traces.values():
                lost = lambda x: isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()
                if any(map(lost, jax.tree.leaves(trace.peek()))):
                    trace.keep(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), trace.peek()))
            raise

    def _check_size(self, traced: Traced) -> None:
        needed = sum(map(bytes_of, jax.eval_shape(traced.engine.init_traces)))
        if needed > self.max_trace_bytes:
            raise NotSupportedError(
                three_parts(
                    f'{self.rule.name} traces of {size_text(needed)}',
                    f'that is more than max_trace_bytes={size_text(self.max_trace_bytes)}; nothing was allocated',
                    "etrace_grad(..., fresh=True), which needs no trace; rule 'pp_prop', whose traces are linear in "
                    'neurons; trace_dtype=jnp.bfloat16; a smaller batch; or a larger max_trace_bytes',
                )
            )

    def _write_traces(self, traced: Traced, values: list[jax.Array], fresh: bool) -> None:
        if fresh:
            self._clear_traces()
        elif self.rule.trace != 'none':
            for key, value in zip(traced.trace_keys, values, strict=True):
                self.traces[key].keep(value)

    def _clear_traces(self) -> None:
        for key, trace in self._made.traces.items():
            if trace.peek() is not self._made.zeros.get(key):
                trace.keep(jax.tree.map(jnp.zeros_like, trace.peek()))
        self._remember_zeros()

    def _remember_zeros(self) -> None:
        """Traces that are cleared need not be cleared again."""
        known = lambda trace: not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(trace.peek()))
        self._made.zeros = {key: trace.peek() for key, trace in self._made.traces.items() if known(trace)}

    def get_etrace_of(self, path: Path | str | brainstate.State) -> dict[tuple, Any]:
        """The traces of one parameter, by their names.

        A name holds parameters, operation and hidden states; a trace is one array for each of these states that it
        is carried on, by number. pp_prop's traces are :class:`FactorTrace` of an input and such arrays.
        """
        path = self._path_of_parameter(path)
        start = '.'.join(map(str, path))
        mine = lambda names: any(n == start or n.startswith(start + '.') for n in names)
        found = {key: trace.value for key, trace in self.traces.items() if mine(key[0])}
        shared = {key: owner for key, owner in self._made.owners.items() if key in found and owner != key}
        return found | {key: found[key]._replace(f=self.traces[owner].value.f) for key, owner in shared.items()}

    def _path_of_parameter(self, given: Any) -> Path:
        """The path of a parameter, from its path, its name or its state."""
        parameters = self.param_states
        if isinstance(given, brainstate.State):
            found = [path for path, state in parameters.items() if state is given]
            shown = f'a {type(given).__name__}'  # its own text would show its arrays
        else:
            path = tuple(given) if isinstance(given, (tuple, list)) else (given,)
            is_path = all(isinstance(key, (str, int)) for key in path)
            found = [path] if is_path and path in parameters else []
            shown = repr(given)
        if not found:
            raise ValueError(
                three_parts(
                    f'get_etrace_of({shown})',
                    'the model has no such parameter',
                    f'one of {", ".join(map(repr, parameters))}, or its state',
                )
            )
        return found[0]

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Start afresh: the model's states as they were compiled, traces zero.

        With a ``batch_size`` the states are made anew for it, and that is where fresh sequences start from then on.
        """
        check_batch_size(batch_size)
        if batch_size is None:
            for path, state in module_states(self.model).items():
                if path in self._start:
                    state.value = self._start[path].value
        else:
            make_states(self.model, batch_size, self.vmap)
            current = module_states(self.model)
            before = jax.tree.leaves([s.value for s in self._start.values()])
            for path, start in self._start.items():
                start.value = current[path].value
            after = jax.tree.leaves([s.value for s in self._start.values()])
            sizes = [(jnp.shape(a)[:1], jnp.shape(b)[:1]) for a, b in zip(before, after, strict=True)]
            old = next((a for a, b in sizes if b == (batch_size,)), None)
            resized = lambda x: jnp.zeros((batch_size, *jnp.shape(x)[1:]), jnp.result_type(x))
            same = lambda x: jnp.ndim(x) and jnp.shape(x)[:1] == old
            self._example = jax.tree.map(lambda x: resized(x) if same(x) else x, self._example)
            self.traces = {}
            self._note_shapes()
            self._make_traces()
        self._clear_traces()


def _mark_seen(traces: dict[tuple, EligibilityTrace]) -> None:
    """Someone else holds these arrays too, so the next call must not write into them."""
    for trace in traces.values():
        trace.value  # noqa: B018 - reading marks it
