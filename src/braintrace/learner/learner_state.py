"""A model compiled for a rule, and the states and traces that are kept from call to
call."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import jax.numpy as jnp
from brainstate.util import FlattedDict

from ..analysis.diagnostics import CUTS
from ..analysis.graph import ETraceGraph
from ..compat import is_var
from ..errors import CompilationError, NotSupportedError, printable, three_parts
from ..frontends.brainstate import module_states, trace_step
from ..lowering.executor import ETraceGraphExecutor
from ..program import Path
from ..program.data import first_step
from ..program.step import path_name
from ..rules import Rule
from ..solver import BlockSolver, InfluenceSolver
from ..text import size_text
from .arguments import (
    bytes_of,
    check_batch_size,
    check_block,
    check_bytes,
    check_choice,
    check_combination,
    check_modulator,
    check_trace_dtype,
)
from .batch import batch_of
from .binding import StepBinding, TraceChoice, trace_keys, trace_shapes
from .gradients import gradients_of
from .model_states import StateShapes, make_states
from .optimizers import made_beside
from .placement import Placement
from .programs import ProgramCache, array_shapes, shapes_of
from .spellings import member
from .state import EligibilityTrace, RuleState, StartValue

if TYPE_CHECKING:
    from ..report import CompilationReport
_locks: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""For each model the lock of its states, which all of its learners share."""


@dataclass
class _Kept:
    """What is no part of the module's tree.

    ``zeros``: the arrays of traces that are known to be zero. ``owners``: for every
    trace the one that holds its state part. ``traces``: every trace made so far, since
    a function that was jitted earlier holds the traces of that time.
    ``said``: warnings that were given.
    """

    programs: ProgramCache = field(default_factory=ProgramCache)
    optimizers: dict[Any, brainstate.State] = field(default_factory=dict)
    zeros: dict[tuple, Any] = field(default_factory=dict)
    owners: dict[tuple, tuple] = field(default_factory=dict)
    traces: dict[tuple, EligibilityTrace] = field(default_factory=dict)
    shapes: StateShapes | None = None
    said: set[str] = field(default_factory=set)

    def check_shapes(self, learner: LearnerState) -> None:
        """Raise if the model's states are no longer those that were compiled for."""
        if self.shapes is not None:
            self.shapes.check(learner)


class LearnerState(brainstate.nn.Module):
    """A model, a rule, and what was compiled of both; :class:`Learner` trains with it."""

    def __init__(
        self,
        model: brainstate.nn.Module,
        rule: Rule,
        *,
        reach: str | None = None,
        vjp_method: str = 'single-step',
        vmap: bool = False,
        block: int | None = None,
        passes: int | None = None,
        trace: TraceChoice = 'auto',
        trace_dtype: Any = None,
        max_trace_bytes: int = 8 * 2**30,
        check_finite: bool = False,
        mesh: Any = None,
        shard: Mapping[str, Any] | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)  # type: ignore[call-arg]
        if reach is not None:
            check_choice('reach', reach, ('local', 'readout', 'deep'))
        check_choice('vjp_method', vjp_method, ('single-step', 'multi-step'))
        if reach in ('local', 'readout'):
            rule = replace(rule, reach=reach)
        # A rule that reads its traces by a signal of its own takes the steps of a window
        # one by one; the others go through the whole window in reverse.
        multi_step = (
            vjp_method == 'multi-step' and rule.has_trace and not rule.has_own_signal
        )
        self.vjp_method = vjp_method
        self.rule = replace(rule, deep=reach == 'deep', multi_step=multi_step)
        check_combination(self.rule, trace, trace_dtype)
        check_block(block)
        check_trace_dtype(trace_dtype)
        check_bytes('max_trace_bytes', max_trace_bytes)
        if passes not in (None, 1, 2):
            why = 'a sequence is run in one pass or two'
            raise ValueError(three_parts(f'passes={passes!r}', why, '1, 2 or None'))
        if not callable(trace):
            check_choice('trace', trace, ('auto', 'marked'))
        self.model = model
        self.vmap = vmap
        self.executor = self._new_executor()
        self.block = block
        self.passes = passes
        self.trace = trace
        self.trace_dtype = trace_dtype
        self.max_trace_bytes = max_trace_bytes
        self.check_finite = check_finite
        self.placement = Placement.of(mesh, shard)
        self.traces: dict[tuple, EligibilityTrace] = {}
        self.running_index = brainstate.LongTermState(jnp.zeros((), jnp.int32))
        self.rule_state = self._new_rule_state()
        self._example: tuple = ()
        self._compiled_for: tuple = ()
        self._start: dict[Path, StartValue] = {}
        self._kept = _Kept()
        self._process = os.getpid()

    def __getattr__(self, name: str) -> Any:
        return member(self, name)

    def _new_executor(self) -> ETraceGraphExecutor:
        call = self._run_model if self.vmap else None
        return ETraceGraphExecutor(self.model, call, trained=True)

    def __deepcopy__(self, memo: Any = None) -> Any:
        """A learner of its own on a copy of the model: weights, states, traces, optax
        states."""
        copied = super().__deepcopy__(
            memo
        )  # copies the states of the tree and shares all else
        # Programs, and the graph, hold the states of the model that they were made of.
        copied.executor = copied._new_executor()
        if copied._example:
            copied.executor.compile_graph(*copied._example)
        optimizers: dict[Any, brainstate.State] = {}
        for key, state in self._kept.optimizers.items():
            optimizers[key] = brainstate.ShortTermState(copy.deepcopy(state.value))
        copied._kept = _Kept(
            optimizers=optimizers,
            owners=dict(self._kept.owners),
            traces=dict(copied.traces),
            shapes=self._kept.shapes,
        )
        return copied

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Around every call: one at a time for the learners of a model, whose states
        are the same, and in the process that the learner was made in."""
        if os.getpid() != self._process:
            raise NotSupportedError(
                three_parts(
                    'a learner in a process that was started by fork',
                    'the threads that run its compiled programs are not there, so that '
                    'a call may never return',
                    "multiprocessing.get_context('spawn'), and a learner compiled in "
                    'the new process',
                )
            )
        with _locks.setdefault(self.model, threading.RLock()), self._on_devices():
            yield

    def _on_devices(self) -> contextlib.AbstractContextManager:
        """Around programs, which are traced for the mesh if there is one."""
        if self.placement is None:
            return contextlib.nullcontext()
        return self.placement.active()

    def _place_states(self) -> None:
        """Put the model's states on their devices, if there are several."""
        if self.placement is not None:
            self.placement = self.placement.with_size(self._sample_count())
            self.placement.put_states(self.model)

    def _sample_count(self) -> int | None:
        """The size of the first axis, if all inputs and hidden states share it."""
        states = [state.value for state in self.hidden_states.values()]
        sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves([states, self._example])}
        first = next(iter(sizes), ())
        return first[0] if len(sizes) == 1 and first else None

    def _placed(self, inputs: tuple, axis: int) -> tuple:
        """Inputs on their devices, with samples at ``axis``. Without a mesh, the
        learner is split as the inputs are."""
        if self.placement is None:
            found = Placement.of_inputs(inputs, axis)
            if found is None or not self._example:
                return inputs
            self.placement = found
            self._place_states()
            # Programs so far were made for one device.
            self._kept.programs.clear()
            for path, start in self._start.items():
                start.value = module_states(self.model)[path].value
            for trace in self._kept.traces.values():
                trace.keep(self.placement.put(trace.peek()))
            self._mark_cleared()
        return self.placement.put_inputs(inputs, axis)

    # ------------------------------------------------------------ compiling

    def compile_graph(self, *args: Any) -> None:
        """Compile the model for example inputs of one step.

        Its current states are where a fresh sequence starts.
        """
        # An update would make weak types strong, and everything would be compiled
        # again.
        strong = lambda x: (
            jnp.asarray(x, x.dtype) if getattr(x, 'weak_type', False) else x
        )
        for state in module_states(self.model).values():
            state.value = jax.tree.map(strong, state.value)
        args = first_step(args)
        self.executor.compile_graph(*args)
        self._kept.programs.clear()
        self._kept.traces.clear()
        self._example = args
        self._compiled_for = (shapes_of(args), self._state_shapes())
        self._place_states()
        self._kept.shapes = StateShapes(self)
        self.traces = {}
        self._start = {}
        carries_on = (brainstate.ParamState, brainstate.random.RandomState)
        for path, state in module_states(self.model).items():
            if not isinstance(state, carries_on):
                self._start[path] = StartValue(state.value)
        if self.rule.predictor is not None:
            self.rule_state = self._new_rule_state()
        with self._on_devices():
            self._check_readouts()
            self._make_traces()

    def _check_readouts(self) -> None:
        """Raise if the rule needs a read-out and the model has none that fits.

        Parameters that the model's step does not read may be a read-out in a step_fn.
        """
        program = self.graph.module_info.program
        read = {v for eqn in program.equations for v in eqn.invars if is_var(v)}
        unread = [p for p in program.parameters if p.invar not in read]
        if not unread and not program.untouched_parameters:
            step = self._model_binding(self._example).step(False)
            self.rule.check_readouts(step)

    def _run_model(self, *args: Any) -> Any:
        """The model, or the model of one sample mapped over the batch axis of its
        states."""
        if not self.vmap:
            return self.model(*args)
        states = brainstate.ShortTermState
        mapped = brainstate.nn.Vmap(
            self.model, vmap_states=states, vmap_out_states=states
        )
        return mapped(*args)

    def _model_binding(self, example: tuple) -> StepBinding:
        """The step of the model alone."""
        self._kept.check_shapes(self)

        def make() -> StepBinding:
            if self._compiled_for == (shapes_of(example), self._state_shapes()):
                info, analysed = self.graph.module_info, self.executor.analysed
                return StepBinding(
                    self.model, info, analysed, rule_state=self.rule_state
                )
            info = trace_step(self._run_model, self.model, example, {})
            return StepBinding(self.model, info, rule_state=self.rule_state)

        return self._program('model', (shapes_of(example),), make)

    def _program(
        self,
        kind: str,
        parts: tuple,
        make: Callable[[], Any],
        is_reusable: bool | None = None,
    ) -> Any:
        """A program of some kind, made once for these parts and the shapes of all
        states."""
        key = (kind, *parts, self._state_shapes())
        return self._kept.programs.get(key, make, is_reusable)

    def _state_shapes(self) -> tuple:
        states = [*self.param_states.values(), *self.hidden_states.values()]
        states += [] if self.rule_state is None else [self.rule_state]
        return shapes_of([state.value for state in states])

    # ------------------------------------------------------------ what there is

    @property
    def is_compiled(self) -> bool:
        """Whether a graph was compiled."""
        return bool(self._compiled_for)

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph of the model's step."""
        if not self.executor.is_compiled:
            rule = type(self).__name__
            raise ValueError(
                three_parts(
                    f'a {rule} learner used before compiling',
                    'its graph and traces are made from one step on example inputs',
                    'learner.compile_graph(x) on an example of the inputs, after '
                    'brainstate.nn.init_all_states(model, batch_size=...); or '
                    f"braintrace.compile(model, '{rule}', x, batch_size=...), "
                    'which does both',
                )
            )
        return self.executor.graph

    @property
    def report(self) -> CompilationReport:
        """What the compiler found, what this rule gives each parameter, and its traces."""
        _ = self.graph  # refuses a learner that was not compiled
        binding = self._model_binding(self._example)
        solver = self._solver(binding, self.rule, loss=False)
        found = self.graph.report
        gives = gradients_of(self.rule, binding, solver, found.credits)
        first = {
            r.weight_path: gives[r.context['name']].kind
            for r in reversed(found.credits)
        }
        return replace(
            found,
            rule=self.rule,
            traces=trace_shapes(solver) if self.rule.has_trace else {},
            gives=gives,
            etrace_weights={path: first[path] for path in found.etrace_weights},
            diagnostics=tuple(
                r for r in found.diagnostics if self.rule.cuts or r.kind not in CUTS
            ),
        )

    def __repr__(self) -> str:
        rule, model = type(self).__name__, type(self.model).__name__
        if not self.is_compiled:
            return f'{rule} learner of {model}, not compiled'
        states = {path: jnp.shape(x) for path, x in _arrays(self.hidden_states)}
        batch = batch_of(self._example, states)
        inputs = [str(jnp.shape(x)) for x in jax.tree.leaves(self._example)]
        arrays = [x for _, x in _arrays(self.param_states)]
        kinds = Counter(given.kind for given in self.report.gradients.values())
        gives = ', '.join(f'{n} {kind}' for kind, n in kinds.items())
        groups = [
            f'{", ".join(map(path_name, g.hidden_paths))} {g.varshape}'
            for g in self.graph.hidden_groups
        ]
        size = size_text(sum(bytes_of(trace.look()) for trace in self.traces.values()))
        lines = [
            f'{rule} learner of {model}' + (f', batch {batch}' if batch else ''),
            f'inputs      {", ".join(_some(inputs))}',
            f'parameters  {sum(map(jnp.size, arrays)):,} numbers in '
            f'{_count(len(arrays), "array")}: {gives}',
            f'groups      {"; ".join(_some(groups))}',
            f'traces      {size} in {_count(len(self.traces), "part")}',
        ]
        return '\n  '.join(map(printable, lines))

    def _repr_html_(self) -> str | None:
        return self.report._repr_html_() if self._example else None

    def show_graph(self, verbose: bool = True, return_msg: bool = False) -> str | None:
        """Print groups, parameters with what the rule gives them, and other states."""
        message = self.executor.graph_text(self.report.etrace_weights)
        if verbose:
            print(message)
        return message if return_msg else None

    @property
    def param_states(self) -> FlattedDict:
        """The model's parameters by path."""
        return FlattedDict(module_states(self.model, brainstate.ParamState))

    @property
    def hidden_states(self) -> FlattedDict:
        """The model's hidden states by path."""
        return FlattedDict(module_states(self.model, brainstate.HiddenState))

    @property
    def other_states(self) -> FlattedDict:
        """States that are neither parameters nor hidden."""
        roles = (brainstate.ParamState, brainstate.HiddenState)
        states = module_states(self.model).items()
        return FlattedDict({p: s for p, s in states if not isinstance(s, roles)})

    def _held(self) -> tuple[brainstate.State, ...]:
        """The states that a compiled loop of brainstate refers to."""
        own: list[brainstate.State] = [self.running_index]
        own += [] if self.rule_state is None else [self.rule_state]
        return (*module_states(self.model).values(), *self.traces.values(), *own)

    def _count(self, calls: int) -> None:
        """Count calls since the last reset."""
        self.running_index.value = self.running_index.value + calls

    # ------------------------------------------------------------ the rule's own state

    def _groups(self) -> list[tuple[int, tuple[int, ...], Any]] | None:
        if not self._example:
            return None
        dtype = lambda group: jnp.finfo(group.hidden_invars[0].aval.dtype).dtype
        return [(g.num_state, g.varshape, dtype(g)) for g in self.graph.hidden_groups]

    def _new_rule_state(self) -> RuleState | None:
        """The rule's own state as it is at first; a predictor's once the model is
        compiled."""
        value = self.rule.init_state(
            None if not hasattr(self, '_example') else self._groups()
        )
        return None if value is None else RuleState(value)

    def _rule_value(self) -> Any:
        return None if self.rule_state is None else self.rule_state.value

    @property
    def modulator(self) -> Any:
        """The standing modulator; None for a rule without one."""
        return self._rule_value() if self.rule.is_modulated else None

    @modulator.setter
    def modulator(self, value: Any) -> None:
        self.set_modulator(value)

    def set_modulator(self, value: Any) -> None:
        """Set the standing modulator of a rule that has one."""
        self.check_modulated(value)
        if self.rule_state is not None:
            self.rule_state.value = jnp.asarray(value, jnp.result_type(float))

    def check_modulated(self, value: Any) -> None:
        """Raise unless the rule takes modulators, and this is one."""
        if not self.rule.is_modulated:
            why = 'its traces are multiplied by the derivative of the loss'
            raise ValueError(
                three_parts(
                    f'a modulator for {self.rule.name}', why, "rule 'three_factor'"
                )
            )
        check_modulator(value)

    # ------------------------------------------------------------ traces

    def _solver(
        self, binding: StepBinding, rule: Rule, loss: bool, in_chunk: bool = False
    ) -> BlockSolver | InfluenceSolver:
        """What solves sequences of a step, with the options of this learner."""
        key = ('solver', binding, rule, loss, in_chunk)

        def make() -> BlockSolver | InfluenceSolver:
            every = rule.has_exact_windows or in_chunk
            return binding.solver(rule, loss, self.trace, self.trace_dtype, every)

        return self._kept.programs.get(key, make, binding.is_reusable)

    def _make_traces(self) -> None:
        """Zero traces for the model's step as it is now, before any program needs them."""
        # Traces that are too large are refused again, with the reason, when one is
        # needed.
        with contextlib.suppress(NotSupportedError):
            binding = self._model_binding(self._example)
            self._prepare_traces(self._solver(binding, self.rule, loss=False))

    def _prepare_traces(self, solver: BlockSolver | InfluenceSolver) -> None:
        """Zero traces of a step, unless there are traces like them already."""
        if not self.rule.has_trace or self._has_traces(solver):
            return
        if any(map(_may_differ_from_zero, self.traces.values())):
            raise CompilationError(
                three_parts(
                    'a step_fn whose traces differ from those carried so far',
                    'traces of one step program cannot be continued by another',
                    'learner.reset_state() before the new step_fn, or fresh=True',
                )
            )
        self._check_size(solver)
        keys = trace_keys(solver)
        made_beside(self.hidden_states, lambda: self._zero_traces(solver))
        self.traces = {key: self._kept.traces[key] for key in keys}
        self._kept.owners = {
            key: keys[n] for key, n in zip(keys, solver.owner, strict=True)
        }
        self._mark_cleared()

    def _has_traces(self, solver: BlockSolver | InfluenceSolver) -> bool:
        """Whether there are traces of a step, in its shapes."""
        # Traces of other names are not read here: inside jit they would be its inputs,
        # and no longer known to be zero.
        if set(trace_keys(solver)) != self.traces.keys():
            return False
        found = {key: array_shapes(trace.peek()) for key, trace in self.traces.items()}
        return found == trace_shapes(solver)

    def _zero_traces(self, solver: BlockSolver | InfluenceSolver) -> None:
        init = solver.init_traces
        if self.placement is not None:
            split = lambda x: self.placement.sharding(x.shape)
            shardings = jax.tree.map(split, jax.eval_shape(init))
            init = jax.jit(init, out_shardings=shardings)
        for key, zeros in zip(trace_keys(solver), init(), strict=True):
            if key in self._kept.traces:
                self._kept.traces[key].keep(zeros)
            else:
                self._kept.traces[key] = EligibilityTrace(zeros)

    def _check_size(self, solver: BlockSolver | InfluenceSolver) -> None:
        needed = sum(map(bytes_of, jax.eval_shape(solver.init_traces)))
        if needed > self.max_trace_bytes:
            limit = size_text(self.max_trace_bytes)
            raise NotSupportedError(
                three_parts(
                    f'{self.rule.name} traces of {size_text(needed)}',
                    f'that is more than max_trace_bytes={limit}; nothing was allocated',
                    "etrace_grad(..., fresh=True), which needs no trace; rule 'pp_prop', whose "
                    'traces are linear in neurons; trace_dtype=jnp.bfloat16; a smaller batch; or '
                    'a larger max_trace_bytes',
                )
            )

    def _read_traces(
        self, solver: BlockSolver | InfluenceSolver, donate: bool = False
    ) -> list[Any]:
        """The traces of a step, made if there are none yet; ``donate``: safe to be
        written to."""
        if not self.rule.has_trace:
            return []
        self._prepare_traces(solver)
        found = [self.traces[key] for key in trace_keys(solver)]
        return [trace.take_for_donation() if donate else trace.value for trace in found]

    def _write_traces(
        self,
        solver: BlockSolver | InfluenceSolver,
        values: list[Any],
        fresh: bool = False,
    ) -> None:
        if fresh:
            self._clear_traces()
        elif self.rule.has_trace:
            for key, value in zip(trace_keys(solver), values, strict=True):
                self.traces[key].keep(value)

    def _clear_traces(self) -> None:
        for key, trace in self._kept.traces.items():
            if trace.peek() is not self._kept.zeros.get(key):
                trace.keep(jax.tree.map(jnp.zeros_like, trace.peek()))
        self._mark_cleared()

    def _mark_cleared(self) -> None:
        """Traces that are cleared need not be cleared again."""
        self._kept.zeros = {}
        for key, trace in self._kept.traces.items():
            value = trace.peek()
            if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)):
                self._kept.zeros[key] = value

    @contextlib.contextmanager
    def _cleared_on_error(self) -> Iterator[None]:
        """Traces donated to a call that does not return start again from zero."""
        try:
            yield
        except BaseException:
            for trace in self.traces.values():
                if any(map(_is_deleted, jax.tree.leaves(trace.peek()))):
                    zero = lambda x: jnp.zeros(x.shape, x.dtype)
                    trace.keep(jax.tree.map(zero, trace.peek()))
            raise

    @contextlib.contextmanager
    def _undone_on_error(self, optimizer: Any = None) -> Iterator[None]:
        """All states as they were, if the call fails."""
        has_states = hasattr(optimizer, 'param_states')
        own = brainstate.graph.states(optimizer).values() if has_states else ()
        moving = (*self._held(), *own, *self._kept.optimizers.values())
        with restored_on_error(moving):
            yield

    @contextlib.contextmanager
    def unmoved(self) -> Iterator[None]:
        """Measure inside: afterwards states, traces and random numbers are as they were
        before.

        This covers every state that is read or written inside, of the learner or not.
        """
        traces, owners, zeros = self.traces, self._kept.owners, self._kept.zeros
        touched: Any = brainstate.StateTraceStack()
        try:
            with touched:
                _mark_read(traces)
                yield
        finally:
            touched.recovery_original_values()
            self.traces, self._kept.owners, self._kept.zeros = traces, owners, zeros
            _mark_read(traces)

    def get_etrace_of(self, path: Path | str | brainstate.State) -> dict[tuple, Any]:
        """The traces of one parameter, by their names.

        A name holds parameters, operation and hidden states; a trace is one array for
        each of these states that it is carried on, by number. pp_prop's traces are
        :class:`FactorTrace` of an input and such arrays.
        """
        path = self._path_of_parameter(path)
        start = '.'.join(map(str, path))
        mine = lambda names: any(n == start or n.startswith(start + '.') for n in names)
        found = {key: trace.value for key, trace in self.traces.items() if mine(key[0])}
        for key, owner in self._kept.owners.items():
            if key in found and owner != key:
                found[key] = found[key]._replace(f=self.traces[owner].value.f)
        return found

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

    # ------------------------------------------------------------ starting again

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Reset: the model's states as they were compiled, traces zero.

        With a ``batch_size`` new states are made for it, and that is where fresh
        sequences start from then on.
        """
        check_batch_size(batch_size)
        if batch_size is None:
            self._restore_start()
        else:
            self._resize(batch_size)
        self._clear_traces()
        self.running_index.value = jnp.zeros((), jnp.int32)

    def _restore_start(self) -> None:
        for path, state in module_states(self.model).items():
            if path in self._start:
                state.value = self._start[path].value

    def _resize(self, batch_size: int) -> None:
        make_states(self.model, batch_size, self.vmap)
        current = module_states(self.model)
        before = jax.tree.leaves([s.value for s in self._start.values()])
        for path, start in self._start.items():
            start.value = current[path].value
        after = jax.tree.leaves([s.value for s in self._start.values()])
        # The batch axis of the inputs has the size that the first axis of the states
        # had.
        sizes = [
            (jnp.shape(a)[:1], jnp.shape(b)[:1])
            for a, b in zip(before, after, strict=True)
        ]
        old = next((a for a, b in sizes if b == (batch_size,)), None)

        def resized(x: Any) -> Any:
            if not jnp.ndim(x) or jnp.shape(x)[:1] != old:
                return x
            return jnp.zeros((batch_size, *jnp.shape(x)[1:]), jnp.result_type(x))

        self._example = jax.tree.map(resized, self._example)
        if self.placement is not None:
            self._place_states()
            for path, start in self._start.items():
                start.value = current[path].value
        self._kept.shapes = StateShapes(self)
        self.traces = {}
        self._make_traces()


def _arrays(states: Mapping[Path, brainstate.State]) -> list[tuple[Path, Any]]:
    """Every array of some states, with the path of its state."""
    return [(p, x) for p, s in states.items() for x in jax.tree.leaves(s.value)]


def _count(n: int, noun: str) -> str:
    return f'{n} {noun}' + 's' * (n != 1)


def _some(texts: list[str], most: int = 4) -> list[str]:
    """The first few texts, and how many more there are."""
    more = [f'and {len(texts) - most} more'] if len(texts) > most else []
    return texts[:most] + more


@contextlib.contextmanager
def restored_on_error(states: Iterable[brainstate.State]) -> Iterator[None]:
    """Some states as they were, if what is done inside fails or is interrupted."""
    before = [(state, state.value) for state in states]
    try:
        yield
    except BaseException:
        for state, value in before:
            state.value = value
        raise


def _may_differ_from_zero(trace: EligibilityTrace) -> bool:
    """False for a trace that is known to be zero; inside a trace its value may be
    unknown."""
    leaves = jax.tree.leaves(trace.look())
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return True
    with jax.ensure_compile_time_eval():
        return any(bool(jnp.any(x != 0)) for x in leaves)


def _is_deleted(x: Any) -> bool:
    is_array = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return is_array and x.is_deleted()


def _mark_read(traces: dict[tuple, EligibilityTrace]) -> None:
    """Something else refers to these arrays too, so the next call must not write into
    them."""
    for trace in traces.values():
        _ = trace.value
