"""A model and a rule, compiled: the graph, the traced steps, the programs and the
devices."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import jax.numpy as jnp
from brainstate.util import FlattedDict

from ..analysis.diagnostics import CUTS
from ..analysis.graph import ETraceGraph
from ..errors import (
    ArgumentError,
    NotCompiledError,
    NotSupportedError,
    printable,
    three_parts,
)
from ..frontends.brainstate import known_states, module_states, trace_step
from ..lowering.executor import ETraceGraphExecutor
from ..program import Path
from ..program.step import path_name
from ..rules import Rule
from ..solver import BlockSolver, InfluenceSolver
from ..text import size_text
from .arguments import (
    bytes_of,
    check_block,
    check_bytes,
    check_choice,
    check_combination,
    check_modulator,
    check_trace_dtype,
)
from .batch import batch_of
from .binding import StepBinding, TraceChoice, trace_shapes
from .credit_warnings import without_gradient
from .gradients import gradients_of
from .model_states import StateShapes
from .models import MODULE, ModelInterface, interface_of
from .placement import Placement
from .programs import ProgramCache, shapes_of
from .recording import recording_of
from .spellings import member
from .state import EligibilityTrace, RuleState, StartValue

if TYPE_CHECKING:
    from ..report import CompilationReport
_locks: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""For each model the lock of its states, which all of its learners share."""


@dataclass
class Kept:
    """What is no part of the module's tree.

    ``zeros``: the arrays of traces that are known to be zero. ``owners``: for every
    trace the one that holds its state part. ``traces``: every trace made so far, since
    a function that was jitted earlier holds the traces of that time.
    ``said``: warnings that were given. ``codes``: how many step functions of one code
    were bound.
    """

    programs: ProgramCache = field(default_factory=ProgramCache)
    optimizers: dict[Any, brainstate.State] = field(default_factory=dict)
    zeros: dict[tuple, Any] = field(default_factory=dict)
    owners: dict[tuple, tuple] = field(default_factory=dict)
    traces: dict[tuple, EligibilityTrace] = field(default_factory=dict)
    shapes: StateShapes | None = None
    said: set[str] = field(default_factory=set)
    codes: Counter[tuple] = field(default_factory=Counter)

    def check_shapes(self, learner: CompiledModel) -> None:
        """Raise if the model's states are no longer those that were compiled for."""
        if self.shapes is not None:
            self.shapes.check(learner)


class CompiledModel(brainstate.nn.Module):
    """A model, a rule, and what was compiled of both."""

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
        if not isinstance(rule, Rule):
            raise ArgumentError(
                three_parts(
                    f'{type(self).__name__}(model, {rule!r})',
                    'the class of all learners needs a rule',
                    'the class of a rule, as braintrace.D_RTRL(model)',
                )
            )
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
            check_choice('trace', trace, ('auto', 'marked', 'credited'))
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
        self._example: tuple = ()
        self.rule_state = self._new_rule_state()
        self._compiled_for: tuple = ()
        self._start: dict[Path, StartValue] = {}
        self._kept = Kept()
        self._process = os.getpid()

    if not TYPE_CHECKING:  # type checkers are to find names that are misspelt

        def __getattr__(self, name: str) -> Any:
            return member(self, name)

    def _new_executor(self) -> ETraceGraphExecutor:
        call = self._run_model if self.vmap else None
        return ETraceGraphExecutor(self.model, call, trained=True)

    def _alone(self) -> contextlib.AbstractContextManager:
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
        lock: Any = _locks.get(self.model)
        if lock is None:
            lock = _locks.setdefault(self.model, threading.RLock())
        # A small step takes no longer than a context manager of contextlib.
        return lock if self.placement is None else self._alone_on_devices(lock)

    @contextlib.contextmanager
    def _alone_on_devices(self, lock: Any) -> Iterator[None]:
        with lock, self._on_devices():
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

    def _synchronised(self) -> contextlib.AbstractContextManager:
        """Around every call, which has the model for itself; where its user keeps its
        values elsewhere, they are read before and written after."""
        return self._alone() if self._interface is MODULE else self._followed()

    @contextlib.contextmanager
    def _followed(self) -> Iterator[None]:
        """The same where it is not a call that others must wait for, unless the values
        are kept elsewhere."""
        if self._interface is MODULE:
            yield
            return
        record = recording_of(self)
        runs_model = record is not None and record.runs_model
        with self._alone():
            if runs_model:
                yield
                return
            with self._interface.followed(self._compile_again):
                yield

    def _compile_again(self) -> None:
        """The graph of a step that has changed."""
        self._kept.programs.clear()
        self.executor.compile_graph(*self._example)

    @property
    def _interface(self) -> ModelInterface:
        """The model as its user holds it."""
        return interface_of(self.model)

    @property
    def params(self) -> Any:
        """The parameters of a model that is no brainstate module, as its framework
        holds them: a State of Params, an Equinox model, the params of a function."""
        with self._followed():
            return self._interface.params

    @params.setter
    def params(self, value: Any) -> None:
        with self._followed():
            self._interface.params = value

    @property
    def state(self) -> Any:
        """What such a model carries from step to step, in the structure in which it was
        given."""
        with self._followed():
            return self._interface.state

    @state.setter
    def state(self, value: Any) -> None:
        with self._followed():
            self._interface.state = value

    # ------------------------------------------------------------ steps and programs

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
        kinds = (brainstate.ParamState, brainstate.HiddenState)
        states = list(known_states(self.model, *kinds).values())
        states += [] if self.rule_state is None else [self.rule_state]
        return shapes_of([state.value for state in states])

    def _solver(
        self, binding: StepBinding, rule: Rule, loss: bool, in_chunk: bool = False
    ) -> BlockSolver | InfluenceSolver:
        """What solves sequences of a step, with the options of this learner."""
        key = ('solver', binding, rule, loss, in_chunk)

        def make() -> BlockSolver | InfluenceSolver:
            every = rule.has_exact_windows or in_chunk
            traced = self._is_credited if self.trace == 'credited' else self.trace
            return binding.solver(rule, loss, traced, self.trace_dtype, every)

        return self._kept.programs.get(key, make, binding.is_reusable)

    def _is_credited(self, path: Path) -> bool:
        """Whether the rule gives a parameter a gradient by the model's own outputs."""

        def make() -> frozenset[Path]:
            binding = self._model_binding(self._example)
            without = without_gradient(self.rule, self.graph, binding)
            arrays = binding.info.program.parameters
            credited = {p.path for p in arrays if p.name not in without}
            return frozenset(p.path for p in arrays) - credited

        return path not in self._kept.programs.get(('credited',), make, True)

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
            raise NotCompiledError(
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

    # ------------------------------------------------------------ the rule's own state

    def _groups(self) -> list[tuple[int, tuple[int, ...], Any]] | None:
        if not self._example:
            return None
        dtype = lambda group: jnp.finfo(group.hidden_invars[0].aval.dtype).dtype
        return [(g.num_state, g.varshape, dtype(g)) for g in self.graph.hidden_groups]

    def _new_rule_state(self) -> RuleState | None:
        """The rule's own state as it is at first; a predictor's once the model is
        compiled."""
        value = self.rule.init_state(self._groups())
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


def _arrays(states: Mapping[Path, brainstate.State]) -> list[tuple[Path, Any]]:
    """Every array of some states, with the path of its state."""
    return [(p, x) for p, s in states.items() for x in jax.tree.leaves(s.value)]


def _count(n: int, noun: str) -> str:
    return f'{n} {noun}' + 's' * (n != 1)


def _some(texts: list[str], most: int = 4) -> list[str]:
    """The first few texts, and how many more there are."""
    more = [f'and {len(texts) - most} more'] if len(texts) > most else []
    return texts[:most] + more
