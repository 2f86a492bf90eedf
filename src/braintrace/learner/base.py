"""The learner: a compiled model that trains forward in time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from ..analysis.graph import ETraceGraph
from ..analysis.report import CompilationReport
from ..engine.executor import ETraceGraphExecutor
from ..engine.plan import Values
from ..engine.sequence import Sequencer, Solved
from ..errors import CompilationError, NotSupportedError, three_parts
from ..program import Path
from ..program.step import path_name
from ..rules import BPTT as BPTT_RULE
from ..rules import PRESETS, Rule, named
from .arguments import (
    bytes_of,
    check_aux,
    check_block,
    check_choice,
    check_combination,
    check_finite_values,
    check_rank,
    check_trace_dtype,
    length_of,
    never_called,
    read_mask,
    results,
)
from .check import GradientCheck, MemoryPlan, RuleComparison, compare, size_text
from .data import EligibilityTrace, MultiStepData, SingleStepData, Standing, StartValue
from .online import apply_by, online_step
from .traced import Traced, shapes_of

_MOST_PROGRAMS = 16


@dataclass
class _Made:
    """What is no part of the module's tree: programs, states of optax transformations, the zeros traces start from."""

    programs: dict[tuple, tuple]
    optimizers: dict[Any, brainstate.State]
    zeros: dict[tuple, Any]


class _OtherShape(Exception):
    """A modulator of a step has another shape than the standing one."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__(shape)
        self.shape = shape


class Learner(brainstate.nn.Module):
    """A model with a learning rule.

    Call it in place of the model inside a ``step_fn``; :meth:`etrace_grad` differentiates a whole sequence.

    ``reach``: 'local', or 'deep' for credit that passes from layer to layer inside a window.
    ``vjp_method``: 'single-step', or 'multi-step' for exact reverse mode inside a :class:`MultiStepData` call.
    ``vmap``: the model describes one sample; its states have a batch axis in front and it is mapped over them.
    ``block``: steps solved together; chosen automatically and never visible in a result. ``passes``: 1 carries
    traces, 2 keeps the states of a fresh sequence and carries none; by default whichever fits.
    ``trace``: 'auto', 'marked' (parameters used through marked operations) or a predicate on paths; the others
    keep their one-step gradient. ``trace_dtype``: storage type of the traces; more than ``max_trace_bytes`` is
    refused. ``check_finite``: raise on a loss or gradient that is not finite.
    """

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
        super().__init__(name=name)
        check_choice('reach', reach, ('local', 'deep'))
        self.rule = replace(rule, deep=reach == 'deep')
        check_choice('vjp_method', vjp_method, ('single-step', 'multi-step'))
        check_combination(self.rule, vjp_method, trace, trace_dtype)
        self._exact_windows = vjp_method == 'multi-step' or rule.trace == 'none'
        check_block(block)
        check_trace_dtype(trace_dtype)
        self.model = model
        self.vmap = vmap
        self.executor = ETraceGraphExecutor(model, self._call if vmap else None)
        self.block = block
        if passes not in (None, 1, 2):
            raise ValueError(three_parts(f'passes={passes!r}', 'a sequence is run in one pass or two', '1, 2 or None'))
        self.passes = passes
        if not callable(trace):
            check_choice('trace', trace, ('auto', 'marked'))
        self.trace = trace
        self.trace_dtype = trace_dtype
        self.max_trace_bytes = max_trace_bytes
        self.check_finite = check_finite
        self.traces: dict[tuple, EligibilityTrace] = {}
        self._example: tuple = ()
        self.standing = self._stand(rule)
        self._start: dict[Path, StartValue] = {}
        self._made = _Made({}, {}, {})
        self._tracing = False
        self._in_chunk = False
        self._updates = 0

    # ------------------------------------------------------------ compiling

    def compile_graph(self, *args: Any) -> None:
        """Compile the model for example inputs of one step; its current states are where a fresh sequence starts."""
        self.executor.compile_graph(*args)
        self._made.programs.clear()
        self._example = args
        self.traces = {}
        self._start = {
            path: StartValue(state.value)
            for path, state in self.model.states().items()
            if not isinstance(state, brainstate.ParamState) and not isinstance(state, brainstate.random.RandomState)
        }
        if self.rule.predictor is not None:
            self.standing = self._stand(self.rule)
        with contextlib.suppress(NotSupportedError):  # refused again, with the reason, when a trace is needed
            self._read_traces(self._step_program(args)[0], fresh=False)

    def _stand(self, rule: Rule) -> Standing | None:
        """The state that a rule reads, as it is at first; a predictor's once the model is compiled."""
        if rule.predictor is not None and self._example:
            groups = self.graph.hidden_groups
            shapes = [(g.num_state, g.varshape, g.hidden_invars[0].aval.dtype) for g in groups]
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
        """What the compiler found, for this rule and the traces it carries."""
        shapes = self._step_program(self._example)[0].trace_shapes if self.rule.trace != 'none' else {}
        return replace(self.graph.report, rule=self.rule, traces=shapes)

    def write_report(self, file: Any, steps: int | None = None) -> None:
        """Write the report as a page; ``steps`` adds what a sequence so long needs in memory."""
        report = self.report
        report.to_html(file, memory=None if steps is None else self.memory_plan(steps))

    def _repr_html_(self) -> str | None:
        return self.report._repr_html_() if self._example else None

    def show_graph(self, **options: Any) -> str | None:
        """Print groups, parameters and other states."""
        return self.executor.show_graph(**options)

    @property
    def param_states(self) -> dict[Path, brainstate.State]:
        """The model's parameters by path."""
        return dict(self.model.states(brainstate.ParamState))

    @property
    def hidden_states(self) -> dict[Path, brainstate.State]:
        """The model's hidden states by path."""
        return dict(self.model.states(brainstate.HiddenState))

    @property
    def other_states(self) -> dict[Path, brainstate.State]:
        """States that are neither parameters nor hidden."""
        roles = (brainstate.ParamState, brainstate.HiddenState)
        return {path: state for path, state in self.model.states().items() if not isinstance(state, roles)}

    # ------------------------------------------------------------ one step

    def update(self, *args: Any, modulator: Any = None) -> Any:
        """One step: the model's output; states and traces advance. ``modulator``: see :class:`ThreeFactor`.

        Under ``brainstate.transform.grad`` the parameters' gradient is the rule's online gradient. Inputs wrapped
        in :class:`MultiStepData` are a window of steps: with ``vjp_method='multi-step'`` exact reverse mode inside,
        traces across. Inside a ``step_fn`` this is the call that the engine traces.
        """
        window = any(isinstance(a, MultiStepData) for a in args)
        args = tuple(a.data if isinstance(a, (SingleStepData, MultiStepData)) else a for a in args)
        self._updates += 1
        if modulator is not None:
            self._set_modulator(modulator)
        check_rank(args, self._example, int(window))
        if self._tracing:
            return brainstate.transform.for_loop(self._call, *args) if window else self._call(*args)
        traced, step = self._step_program(args, window)
        parameters, states = traced.read()
        traces = self._read_traces(traced, fresh=False)
        outputs, states, traces = step(parameters, states, traces, traced.inputs(args))
        traced.write(states)
        self._write_traces(traced, traces, fresh=False)
        return traced.outputs(outputs)

    def _set_modulator(self, value: Any) -> None:
        if self.standing is None or self.rule.signal != 'modulatory':
            raise ValueError(
                three_parts(
                    f'a modulator for {self.rule.name}', 'its traces are taught by the loss', "rule 'three_factor'"
                )
            )
        value = jnp.asarray(value, jnp.result_type(float))
        if isinstance(value, jax.core.Tracer) and value.shape != jnp.shape(self.standing.value):
            raise _OtherShape(value.shape)
        self.standing.value = value

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
        shapes = tuple((jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(args))
        exact = window and (self._exact_windows or self._in_chunk)
        key = ('step', window, exact, self._in_chunk, jax.tree.structure(args), shapes, self._state_shapes())
        if key not in self._made.programs:
            self.graph  # noqa: B018 - refuses a learner that was not compiled
            example = jax.tree.map(lambda x: jnp.asarray(x)[0], args) if window else args
            traced = self._traced(self._call, example, False, self.rule)
            self._made.programs[key] = (traced, jax.jit(online_step(traced, window, exact)))
        return self._made.programs[key]

    # ------------------------------------------------------------ sequences

    def etrace_grad(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        mask: Any = None,
        chunk_size: int | None = None,
        weights: Sequence[Path] | None = None,
        reduction: str = 'mean',
        loss_output: str = 'per_step',
        has_aux: bool = False,
        return_value: bool = False,
        fresh: bool = False,
    ) -> Any:
        """Gradients of a whole sequence, by path.

        ``step_fn(*slices)`` calls the learner and returns a scalar loss (or ``(loss, aux)``). ``mask`` (T,)
        weights the losses; 'mean' divides by max(Σ mask, 1). ``fresh=True``: the sequence is whole, so states
        start from where they were compiled and no trace is wanted after. ``weights`` selects parameters by path.
        ``chunk_size=k`` hands windows of k steps to ``step_fn``, which wraps them in :class:`MultiStepData`: exact
        reverse mode inside each, whatever ``vjp_method`` says, and traces across.
        With ``return_value`` the losses follow, with ``has_aux`` the auxiliary values, stacked over time.
        """
        check_choice('loss_output', loss_output, ('per_step', 'reduced'))
        check_choice('reduction', reduction, ('mean', 'sum'))
        if chunk_size is not None:
            check_combination(self.rule, 'multi-step', self.trace, self.trace_dtype)
            found = self._chunks(sequences, step_fn, mask, chunk_size, reduction, has_aux, fresh)
            return results(*found, weights, loss_output, return_value, has_aux)
        traced, solved, cotangents = self._solve(sequences, step_fn, mask, reduction, fresh, self.rule)
        check_aux(traced.info.out_tree, has_aux)
        if self.check_finite:
            named = {p.name: solved.gradients[p.invar] for p in traced.info.program.parameters}
            check_finite_values(solved.losses, cotangents, named, 'step')
        traced.write(solved.states)
        self._write_traces(traced, solved.traces, fresh)
        self._learned(solved)
        gradients = traced.gradients_by_path(solved.gradients)
        aux = None
        if has_aux:
            aux = traced.stacked(solved.aux | {traced.plan.targets[0]: solved.losses}, len(cotangents))[1]
        return results(gradients, solved.losses, cotangents, aux, weights, loss_output, return_value, has_aux)

    def _chunks(
        self, sequences: tuple, step_fn: Callable, mask: Any, size: int, reduction: str, has_aux: bool, fresh: bool
    ) -> tuple:
        """Gradients over windows of ``size`` steps that ``step_fn`` takes whole; one loss for each window."""
        length = length_of(sequences)
        if size < 1 or length % size:
            raise ValueError(
                three_parts(
                    f'{length} steps with chunk_size={size}',
                    'step_fn is handed whole windows of that many steps',
                    'a sequence whose length is a multiple of chunk_size',
                )
            )
        count = length // size
        mask = jnp.ones(count) if mask is None else read_mask(mask, count, 'windows')
        cotangents = mask / jnp.maximum(jnp.sum(mask), 1.0) if reduction == 'mean' else mask
        key = ('chunks', step_fn, size, has_aux, self._state_shapes(), *self._held())
        if key not in self._made.programs:
            parameters = self.model.states(brainstate.ParamState)

            def one(total: Any, xs: tuple) -> tuple:
                chunk, weight = xs

                def loss() -> tuple:
                    before = self._updates
                    result = step_fn(*chunk)
                    if self._updates == before:
                        raise never_called()
                    value, aux = result if has_aux else (result, None)
                    return jnp.where(weight == 0, 0.0, value) * weight, (value, aux)

                grads, (value, aux) = brainstate.transform.grad(loss, parameters, has_aux=True)()
                grads = jax.tree.map(lambda t, g: t + jnp.where(weight == 0, 0, g), total, dict(grads))
                return grads, (value, aux)

            def run(chunks: tuple, cotangents: jax.Array) -> tuple:
                zero = {path: jax.tree.map(jnp.zeros_like, s.value) for path, s in parameters.items()}
                return brainstate.transform.scan(one, zero, (chunks, cotangents))

            self._made.programs[key] = (None, brainstate.transform.jit(run))
        chunks = jax.tree.map(lambda x: jnp.asarray(x).reshape(count, size, *jnp.shape(x)[1:]), sequences)
        with self._undone_on_error():
            self._in_chunk = True
            try:
                if fresh:
                    self.reset_state()
                gradients, (losses, aux) = self._made.programs[key][1](chunks, cotangents)
            finally:
                self._in_chunk = False
            if self.check_finite:
                named = {path_name(path): gradient for path, gradient in gradients.items()}
                check_finite_values(losses, cotangents, named, 'window')
        if fresh:
            self._clear_traces()
        return gradients, losses, cotangents, aux

    def _held(self) -> tuple[brainstate.State, ...]:
        """The states that a compiled loop of brainstate holds on to."""
        own = () if self.standing is None else (self.standing,)
        return (*self.model.states().values(), *self.traces.values(), *own)

    def teach_predictor(self, sequences: tuple, step_fn: Callable[..., Any]) -> float:
        """One update of the rule's predictor from a fresh sequence, nothing else changed; its error before."""
        _, solved, _ = self._solve(sequences, step_fn, None, 'mean', True, self.rule)
        self._learned(solved)
        return float(solved.error)

    def _learned(self, solved: Solved) -> None:
        """What a gradient leaves for the rule itself: one more has been asked for, and a predictor knows better."""
        if self.standing is not None and self.rule.predictor is not None:
            rate = self.rule.predictor.rate
            self.standing.value = [w - rate * g for w, g in zip(self.standing.value, solved.learned, strict=True)]
        elif self.standing is not None and self.rule.signal != 'modulatory':
            self.standing.value = self.standing.value + 1

    @contextlib.contextmanager
    def _undone_on_error(self, optimizer: Any = None) -> Iterator[None]:
        own = brainstate.graph.states(optimizer).values() if hasattr(optimizer, 'param_states') else ()
        moving = (*self._held(), *own, *self._made.optimizers.values())
        before = [(state, state.value) for state in moving]
        try:
            yield
        except BaseException:
            for state, value in before:
                state.value = value
            raise

    def _solve(
        self, sequences: tuple, step_fn: Callable, mask: Any, reduction: str, fresh: bool, rule: Rule
    ) -> tuple[Traced, Solved, jax.Array]:
        """Run a sequence; nothing is written yet."""
        length = length_of(sequences)
        mask = jnp.ones(length) if mask is None else read_mask(mask, length, 'steps')
        cotangents = mask / jnp.maximum(jnp.sum(mask), 1.0) if reduction == 'mean' else mask
        traced, solve = self._program(step_fn, sequences, fresh, rule)
        parameters, states = traced.read()
        states = self._restarted(traced, states) if fresh else states
        traces = self._read_traces(traced, fresh, given=True)
        if self.check_finite:  # what the call gives may be refused
            traces = jax.tree.map(jnp.copy, traces)
        with self._cleared_on_error():
            return traced, solve(parameters, states, traces, traced.inputs(sequences), cotangents), cotangents

    def etrace_evolve(
        self, *sequences: Any, step_fn: Callable[..., Any] | None = None, return_outputs: bool = False
    ) -> Any:
        """Advance states and traces along a sequence without a loss.

        ``step_fn(*slices)`` calls the learner, by default on all of them; what it returns is given, stacked over
        time, if ``return_outputs``.
        """
        length = length_of(sequences)
        traced, evolve = self._program(step_fn or self, sequences, False, self.rule, evolve=True)
        parameters, states = traced.read()
        traces = self._read_traces(traced, fresh=False, given=True)
        with self._cleared_on_error():
            solved = evolve(parameters, states, traces, traced.inputs(sequences))
        traced.write(solved.states)
        self._write_traces(traced, solved.traces, fresh=False)
        return traced.stacked(solved.aux, length) if return_outputs else None

    def etrace_online(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        optimizer: Any,
        update_every: int = 1,
        mask: Any = None,
    ) -> jax.Array:
        """Train along a sequence: weights change every ``update_every`` steps inside the compiled loop.

        ``optimizer``: one of braintools, or any optax transformation; it is given the sum of the steps' gradients,
        and its state lives on from call to call. A masked step neither teaches nor, if all steps since the last
        update are masked, updates; states and traces go on. Returns the loss of every step.
        """
        if not hasattr(optimizer, 'update'):
            raise TypeError(
                three_parts(
                    f'optimizer={optimizer!r}',
                    'it has no way to update weights',
                    'braintools.optim.Adam(lr=1e-3), optax.adam(1e-3) or the like',
                )
            )
        length = length_of(sequences)
        if update_every < 1 or length % update_every:
            raise ValueError(
                three_parts(
                    f'{length} steps with update_every={update_every}',
                    'weights change after each whole group of steps',
                    'a sequence whose length is a multiple of update_every',
                )
            )
        mask = jnp.ones(length) if mask is None else read_mask(mask, length, 'steps')
        first = jax.tree.map(lambda x: jnp.asarray(x)[:update_every], sequences)
        traced, solve = self._program(step_fn, first, False, self.rule)
        self._read_traces(traced, fresh=False)
        apply = apply_by(optimizer, self.param_states, self._made.optimizers)

        def one(window: tuple, weights: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            parameters, states = traced.read()
            traces = self._read_traces(traced, fresh=False)
            solved = solve(parameters, states, traces, traced.inputs(window), weights)
            traced.write(solved.states)
            self._write_traces(traced, solved.traces, fresh=False)
            self._learned(solved)
            apply(traced.gradients_by_path(solved.gradients), jnp.any(weights != 0))
            named = {p.name: solved.gradients[p.invar] for p in traced.info.program.parameters}
            finite = {name: jnp.all(jnp.isfinite(g)) for name, g in named.items()} if self.check_finite else {}
            return solved.losses, finite

        key = ('online', traced, optimizer, update_every, *self._held())
        if key not in self._made.programs:
            loop = brainstate.transform.jit(lambda xs, w: brainstate.transform.for_loop(one, xs, w))
            self._made.programs[key] = (traced, loop)
        windows = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, update_every, *jnp.shape(x)[1:]), sequences)
        with self._undone_on_error(optimizer):
            losses, finite = self._made.programs[key][1](windows, mask.reshape(-1, update_every))
            if self.check_finite:
                marks = {name: jnp.where(ok, 0.0, jnp.nan) for name, ok in finite.items()}
                check_finite_values(losses.reshape(-1), mask, marks, 'step')
        return losses.reshape(-1)

    def gradient_check(
        self, *sequences: Any, step_fn: Callable[..., Any], rules: Sequence[Any] | None = None, **options: Any
    ) -> GradientCheck | RuleComparison:
        """Compare gradients of a fresh sequence with BPTT's: this rule's, or those of ``rules``; nothing is changed.

        ``rules``: names of rules, with the options they have by default, or :class:`ETraceConfig`.
        """
        exact = self._by_name(sequences, step_fn, BPTT_RULE, options)
        checks = []
        asked = [self.rule] if rules is None else [PRESETS[named(r)] if isinstance(r, str) else r.rule for r in rules]
        for rule in asked:
            mine = self._by_name(sequences, step_fn, rule, options)
            classes = {r.context['name']: r.context['credit'] for r in self.graph.report.credits}
            rows = tuple(compare(name, classes.get(name, 'none'), mine[name], exact[name]) for name in mine)
            checks.append(GradientCheck(rule.name, rows))
        return checks[0] if rules is None else RuleComparison(tuple(checks))

    def _by_name(self, sequences: tuple, step_fn: Callable, rule: Rule, options: dict) -> dict[str, jax.Array]:
        """Gradients of a fresh sequence by parameter, under any rule."""
        chosen = {'mask': None, 'reduction': 'mean', **options}
        before = self.rule, self.standing
        if rule is not self.rule:
            self.rule, self.standing = rule, self._stand(rule)
        try:
            traced, solved, _ = self._solve(sequences, step_fn, chosen['mask'], chosen['reduction'], True, rule)
        finally:
            self.rule, self.standing = before
        return {p.name: solved.gradients[p.invar] for p in traced.info.program.parameters}

    def memory_plan(self, steps: int) -> MemoryPlan:
        """Bytes that a sequence of the compiled inputs needs, one way and another, before any is allocated."""

        def step_fn(*xs: Any) -> jax.Array:
            leaves = [x for x in jax.tree.leaves(self(*xs)) if jnp.issubdtype(x.dtype, jnp.inexact)]
            return sum(jnp.sum(jnp.abs(x) ** 2) for x in leaves)

        traced = self._trace(step_fn, self._example, self.rule)
        engine = traced.engine
        parameters, states = jax.eval_shape(lambda: traced.read())
        stack = lambda v: jax.ShapeDtypeStruct((steps, *v.aval.shape), v.aval.dtype)
        inputs = Values((v, stack(v)) for v in traced.info.program.inputs)
        weights = jax.ShapeDtypeStruct((steps,), jnp.result_type(float))
        traces = jax.eval_shape(engine.init_traces)
        block = lambda carried: self._block(traced, steps, carried)

        def temporary(run: Callable, *args: Any) -> int:
            found = jax.jit(run).lower(*args).compile().memory_analysis()
            return int(found.temp_size_in_bytes + found.output_size_in_bytes)

        window = lambda length: temporary(
            lambda *a: Sequencer(traced.plan).windows(*a, length), parameters, states, [], inputs, weights
        )
        if self.rule.trace == 'none':
            return MemoryPlan(steps, {}, window(self.rule.window or steps), None, window(steps))
        two = getattr(engine, 'two_pass', None)
        return MemoryPlan(
            steps,
            dict(zip(traced.trace_keys, map(bytes_of, traces), strict=True)),
            temporary(lambda *a: engine.one_pass(*a, block(True)), parameters, states, traces, inputs, weights),
            None if two is None else temporary(lambda *a: two(*a, block(False)), parameters, states, inputs, weights),
            window(steps),
        )

    # ------------------------------------------------------------ programs

    def _program(
        self, step_fn: Callable, sequences: tuple, fresh: bool, rule: Rule, evolve: bool = False
    ) -> tuple[Traced, Callable]:
        """The traced step and its compiled solver, or without a loss its evolution; made once for each shape."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), sequences)
        leaves, structure = jax.tree.flatten(shapes)
        sizes = tuple((x.shape, x.dtype) for x in leaves)
        key = (step_fn, structure, sizes, fresh, rule, evolve, self._state_shapes())
        if key not in self._made.programs:
            if len(self._made.programs) >= _MOST_PROGRAMS:
                self._made.programs.pop(next(iter(self._made.programs)))
            traced = self._trace(step_fn, jax.tree.map(lambda x: jnp.asarray(x)[0], sequences), rule, not evolve)
            run = self._evolution(traced) if evolve else self._solver(traced, fresh, rule)
            self._made.programs[key] = (traced, jax.jit(run, donate_argnums=2))
        return self._made.programs[key]

    def _state_shapes(self) -> tuple:
        parameters, hidden = self.param_states.values(), self.hidden_states.values()
        states = [*parameters, *hidden, *([] if self.standing is None else [self.standing])]
        return tuple((jnp.shape(x), jnp.result_type(x)) for s in states for x in jax.tree.leaves(s.value))

    def _trace(self, step_fn: Callable, example: tuple, rule: Rule, loss: bool = True) -> Traced:
        self.graph  # noqa: B018 - refuses a learner that was not compiled
        self._tracing, before = True, self._updates
        try:
            traced = self._traced(step_fn, example, loss, rule)
            if self._updates == before:
                raise never_called()
        finally:
            self._tracing = False
        return traced

    def _traced(self, function: Callable, example: tuple, loss: bool, rule: Rule) -> Traced:
        whole = self._exact_windows or self._in_chunk
        given = (function, example, loss, rule, whole)
        try:
            return self._traced_now(*given)
        except CompilationError as error:
            if not isinstance(error.__cause__, _OtherShape):
                raise
            self.standing.value = jnp.zeros(error.__cause__.shape)  # the step brings a modulator of its own
            return self._traced_now(*given)

    def _traced_now(self, function: Callable, example: tuple, loss: bool, rule: Rule, whole: bool) -> Traced:
        return Traced(function, self.model, example, loss, rule, self.trace_dtype, self.trace, whole, self.standing)

    def _solver(self, traced: Traced, fresh: bool, rule: Rule) -> Callable[..., Solved]:
        engine, window = traced.engine, rule.window

        def solve(parameters: Values, states: Values, traces: list, inputs: Values, weights: jax.Array) -> Solved:
            length = len(weights)
            if window is not None or rule.deep:
                given = (parameters, states, traces, inputs, weights, window or length, rule.deep)
                return engine.windows(*given, rule.predictor, fresh)
            if fresh and rule.is_local and rule.trace == 'per_param' and self._two_passes(traced, length):
                return engine.two_pass(parameters, states, inputs, weights, self._block(traced, length, False))
            traces = engine.init_traces() if fresh else traces
            return engine.one_pass(parameters, states, traces, inputs, weights, self._block(traced, length, True))

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
        start = {}
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
        keys, shapes = traced.trace_keys, traced.trace_shapes
        if shapes != {key: shapes_of(trace.peek()) for key, trace in self.traces.items()}:
            if any(bool(jnp.any(x != 0)) for t in self.traces.values() for x in jax.tree.leaves(t.peek())):
                raise CompilationError(
                    three_parts(
                        'a step_fn whose traces differ from those carried so far',
                        'traces of one step program cannot be continued by another',
                        'learner.reset_state() before the new step_fn, or fresh=True',
                    )
                )
            self._check_size(traced)
            self.traces = dict(zip(keys, map(EligibilityTrace, traced.engine.init_traces()), strict=True))
            self._remember_zeros()
        return [self.traces[k].give_up() if given else self.traces[k].value for k in keys]

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
        for key, trace in self.traces.items():
            if trace.peek() is not self._made.zeros.get(key):
                trace.keep(jax.tree.map(jnp.zeros_like, trace.peek()))
        self._remember_zeros()

    def _remember_zeros(self) -> None:
        """Traces that are cleared need not be cleared again."""
        known = lambda trace: not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(trace.peek()))
        self._made.zeros = {key: trace.peek() for key, trace in self.traces.items() if known(trace)}

    def get_etrace_of(self, path: Path | str | brainstate.State) -> dict[tuple, Any]:
        """The traces of one parameter, by their names.

        A name holds parameters, operation and hidden states; a trace is one array for each of these states that it
        is carried on, by number. pp_prop's traces are :class:`FactorTrace` of an input and such arrays.
        """
        path = (path,) if isinstance(path, str) else path
        if not isinstance(path, brainstate.State) and tuple(path) not in self.param_states:
            names = ', '.join(map(repr, self.param_states))
            raise ValueError(
                three_parts(f'get_etrace_of({path!r})', 'the model has no such parameter', f'one of {names}')
            )
        if isinstance(path, brainstate.State):
            path = next(p for p, s in self.param_states.items() if s is path)
        start = '.'.join(map(str, path))
        mine = lambda names: any(n == start or n.startswith(start + '.') for n in names)
        return {key: trace.value for key, trace in self.traces.items() if mine(key[0])}

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Start afresh: the model's states as they were compiled, traces zero.

        With a ``batch_size`` the states are made anew for it, and that is where fresh sequences start from then on.
        """
        if batch_size is None:
            for path, state in self.model.states().items():
                if path in self._start:
                    state.value = self._start[path].value
        else:
            if self.vmap:
                brainstate.nn.vmap_init_all_states(self.model, axis_size=batch_size)
            else:
                brainstate.nn.init_all_states(self.model, batch_size)
            old = next((jnp.shape(x)[0] for x in jax.tree.leaves([s.value for s in self._start.values()])), None)
            current = self.model.states()
            for path, start in self._start.items():
                start.value = current[path].value
            resized = lambda x: jnp.zeros((batch_size, *jnp.shape(x)[1:]), jnp.result_type(x))
            same = lambda x: jnp.ndim(x) and jnp.shape(x)[0] == old
            self._example = jax.tree.map(lambda x: resized(x) if same(x) else x, self._example)
        self._clear_traces()
