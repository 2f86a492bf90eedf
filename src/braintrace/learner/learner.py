"""The learner: a compiled model that trains forward in time."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from ..errors import CompilationError, three_parts
from ..frontends.brainstate import module_states
from ..program import Path
from ..program.data import MultiStepData, SingleStepData
from ..program.step import path_name
from ..rules import PRESETS, Rule
from ..solver import BlockSolver, InfluenceSolver, Solved
from .arguments import (
    check_aux,
    check_call,
    check_choice,
    check_combination,
    check_finite_values,
    check_optimizer,
    check_paths,
    check_rank,
    length_of,
    loss_weights,
    never_called,
    results,
    rules_of,
)
from .binding import StepBinding
from .check import GradientCheck, RuleComparison, compare
from .gradients import gradients_of
from .learner_state import LearnerState
from .memory import MemoryPlan, plan_memory
from .online import online_step
from .optimizers import update_by
from .programs import shapes_of
from .recording import Recording, recording, recording_of
from .sequences import SequenceOptions, evolution_program, gradient_program


class Learner(LearnerState):
    """A model with a learning rule.

    Call it in place of the model inside a ``step_fn``; :meth:`etrace_grad`
    differentiates a whole sequence.

    ``reach``: 'local', or 'deep' for credit that passes from layer to layer inside a
    window. ``vjp_method``: 'single-step', or 'multi-step', where every call is a
    window: reverse mode through the whole of its steps, and the credit of the states at
    its start is multiplied by the traces. A :class:`MultiStepData` call is one window.
    All others (``learner(x)``, and sequences without ``chunk_size``) are windows of one
    step, as with ``chunk_size=1``: a loss reaches the traces of all states that the
    step reads, other units' included. ``vmap``: the model describes one sample; its
    states have a batch axis in front and it is mapped over them. ``block``: steps
    solved together; chosen automatically and never visible in a result. ``passes``: 1
    carries traces, 2 keeps the states of a fresh sequence and carries none; by default
    whichever fits. ``trace``: 'auto', 'marked' (parameters used through marked
    operations) or a predicate on paths; the others keep their one-step gradient.
    ``trace_dtype``: storage type of the traces; more than ``max_trace_bytes`` is
    refused. ``check_finite``: raise on a loss or gradient that is not finite.
    """

    __signature__: inspect.Signature

    def __init_subclass__(cls, **given: Any) -> None:
        """Shows a rule's own options, and those of every learner in place of
        ``**options``."""
        super().__init_subclass__(**given)
        _, *own = inspect.signature(cls.__init__).parameters.values()
        cls.__signature__ = inspect.Signature(_with_common_options(own))

    # ------------------------------------------------------------ one step

    def update(self, *args: Any, modulator: Any = None) -> Any:
        """One step: the model's output; states and traces advance.

        Under ``brainstate.transform.grad`` the parameters' gradient is the rule's
        online gradient. Inputs wrapped in :class:`MultiStepData` are a window of steps:
        with ``vjp_method='multi-step'`` exact reverse mode inside, traces across. A
        plain call is a window of one step then. Inside a ``step_fn`` this is the call
        that is traced. ``modulator``: see :class:`ThreeFactor`.
        """
        with self._synchronised():
            return self._update(args, modulator)

    def _update(self, args: tuple, modulator: Any) -> Any:
        window = any(isinstance(a, MultiStepData) for a in args)
        wrapped = (SingleStepData, MultiStepData)
        args = tuple(a.data if isinstance(a, wrapped) else a for a in args)
        check_rank(args, self._example, int(window))
        record = recording_of(self)
        if record is not None:
            record.calls += 1
            if record.runs_model:
                self._record_modulator(record, modulator)
                loop = brainstate.transform.for_loop
                return (
                    loop(self._run_model, *args) if window else self._run_model(*args)
                )
        if window and self.rule.predictor is not None:
            check_combination(self.rule, 'multi-step', self.trace, self.trace_dtype)
        rule_state = self._rule_value()
        if modulator is not None:
            self.check_modulated(modulator)
            rule_state = jnp.asarray(modulator, jnp.result_type(float))
        in_chunk = record is not None
        binding, solver, step = self._step_program(args, window, in_chunk)
        parameters, states = binding.read()
        traces = self._read_traces(solver)
        given = (parameters, states, traces, binding.inputs(args), rule_state)
        values, states, traces = step(*given)
        binding.write(states)
        self._write_traces(solver, traces)
        self._advance_rule_state(None)
        return binding.outputs(values)

    def _record_modulator(self, record: Recording, modulator: Any) -> None:
        if modulator is None or record.ignores_modulators:
            return
        if not record.takes_modulators:
            self.check_modulated(modulator)
        if record.modulator is not None:
            raise CompilationError(
                three_parts(
                    'two calls with a modulator in one step_fn',
                    'a step has one, which multiplies all traces of it',
                    'one call with modulator=... in a step_fn',
                )
            )
        record.modulator = jnp.asarray(modulator, jnp.result_type(float))

    def _step_program(
        self, args: tuple, window: bool, in_chunk: bool
    ) -> tuple[StepBinding, BlockSolver | InfluenceSolver, Callable]:
        """The step of the model alone, and its compiled form with the online gradient."""
        exact = self.rule.has_exact_windows or (window and in_chunk)
        first = lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x))
        example = jax.tree.map(first, args) if window else args
        binding = self._model_binding(example)
        solver = self._solver(binding, self.rule, False, in_chunk)
        make = lambda: jax.jit(online_step(solver, self.rule, window, exact))
        parts = (solver, window, exact)
        return binding, solver, self._program('step', parts, make, binding.is_reusable)

    def _advance_rule_state(self, solved: Solved | None) -> None:
        if self.standing is None:
            return
        before = self.standing.value
        after = self.rule.next_state(before, solved)
        if after is not before:
            self.standing.value = after

    # ------------------------------------------------------------ sequences

    @overload
    def etrace_grad(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        mask: Any = None,
        chunk_size: int | None = None,
        weights: Sequence[Path] | None = None,
        reduction: str = 'mean',
        loss_output: str = 'per_step',
        has_aux: Literal[False] = False,
        return_value: Literal[False] = False,
        fresh: bool = False,
    ) -> dict[Path, Any]: ...

    @overload
    def etrace_grad(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        has_aux: Literal[True],
        **options: Any,
    ) -> tuple[Any, ...]: ...

    @overload
    def etrace_grad(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        return_value: Literal[True],
        **options: Any,
    ) -> tuple[Any, ...]: ...

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

        ``step_fn(*slices)`` calls the learner and returns a scalar loss (or ``(loss,
        aux)``). ``mask`` (T,) weights the losses; 'mean' divides by max(Σ mask, 1). A
        loss of mask 0 contributes nothing, even if it or the inputs of its step are
        NaN. ``fresh=True``: the sequence is whole, so states start from where they were
        compiled and the traces are discarded afterwards. ``weights`` selects parameters
        by path. ``chunk_size=k`` hands windows of k steps to ``step_fn``, which wraps
        them in :class:`MultiStepData`: exact reverse mode inside each, whatever
        ``vjp_method`` says, and traces across. Without it, a learner with
        ``vjp_method='multi-step'`` takes windows of one step. With ``return_value`` the
        losses follow, with ``has_aux`` the auxiliary values, stacked over time.
        """
        check_choice('loss_output', loss_output, ('per_step', 'reduced'))
        check_choice('reduction', reduction, ('mean', 'sum'))
        if weights is not None:
            is_list = isinstance(weights, Sequence)
            weights = [tuple(p) for p in weights] if is_list else weights
            check_paths('weights', weights, self.param_states)
        with self._synchronised():
            if chunk_size is not None:
                check_combination(self.rule, 'multi-step', self.trace, self.trace_dtype)
                found = self._in_chunks(
                    sequences, step_fn, mask, chunk_size, reduction, has_aux, fresh
                )
            else:
                found = self._in_steps(
                    sequences, step_fn, mask, reduction, has_aux, fresh
                )
        return results(*found, weights, loss_output, return_value, has_aux)

    def _in_steps(
        self,
        sequences: tuple,
        step_fn: Callable,
        mask: Any,
        reduction: str,
        has_aux: bool,
        fresh: bool,
    ) -> tuple[dict[Path, Any], jax.Array, jax.Array, Any]:
        """Gradients by path, losses, their weights, auxiliary values; states and traces
        written."""
        binding, solver, solved, weights = self._solve(
            sequences, step_fn, mask, reduction, fresh
        )
        check_aux(binding.out_tree, has_aux)
        if self.check_finite:
            named = binding.gradients_by_name(solved.gradients)
            check_finite_values(solved.losses, weights, named, 'step')
        binding.write(solved.states)
        self._write_traces(solver, solved.traces, fresh)
        self._advance_rule_state(solved)
        aux = binding.aux(solved, len(weights)) if has_aux else None
        return binding.gradients_by_path(solved.gradients), solved.losses, weights, aux

    def _binding(
        self, step_fn: Callable, sequences: tuple, takes_modulators: bool = False
    ) -> StepBinding:
        """A step function traced with the model: once, whatever is then asked of it."""
        _ = self.graph  # refuses a learner that was not compiled
        self._kept.check_shapes(self)
        slice_of = lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x))
        example = jax.tree.map(slice_of, sequences)
        how = {'takes_modulators': takes_modulators}
        make = lambda: StepBinding.of_step_fn(self, step_fn, example, **how)
        key = (
            'binding',
            step_fn,
            shapes_of(example),
            self.standing,
            self._state_shapes(),
        )
        binding = self._kept.programs.get(
            key, make, is_reusable=lambda b: b.is_reusable
        )
        if binding.modulator_given and not takes_modulators:
            self.check_modulated(1.0)
        return binding

    def _options(self) -> SequenceOptions:
        return SequenceOptions(self.block, self.passes, self.max_trace_bytes)

    def _gradient_program(self, binding: StepBinding, rule: Rule, fresh: bool) -> tuple:
        """The solver of a step by a rule, and its compiled gradient of a sequence."""
        solver = self._solver(binding, rule, loss=True)
        options = self._options()

        def make() -> Callable[..., Solved]:
            run = gradient_program(solver, rule, fresh, options)
            return jax.jit(run, donate_argnums=2, static_argnames='masked')

        parts = (solver, fresh)
        return solver, self._program('gradient', parts, make, binding.is_reusable)

    def _solve(
        self,
        sequences: tuple,
        step_fn: Callable,
        mask: Any,
        reduction: str,
        fresh: bool,
        rule: Rule | None = None,
        rule_state: Any = None,
        at: Mapping[Path, Any] = {},
    ) -> tuple[StepBinding, BlockSolver | InfluenceSolver, Solved, jax.Array]:
        """Run a sequence by this rule, or by another; nothing is written yet.

        ``at``: values of parameters and states in place of the current ones, by path.
        """
        check_call('step_fn', step_fn, sequences, 'one slice of each sequence')
        length = length_of(sequences)
        weights, unit = loss_weights(mask, length, 'steps', reduction)
        binding = self._binding(step_fn, sequences, rule is not None)
        if rule is None:
            rule, rule_state = self.rule, self._rule_value()
        solver, program = self._gradient_program(binding, rule, fresh)
        parameters, states = binding.read()
        if fresh:
            start = {path: state.value for path, state in self._start.items()}
            states = binding.with_values(states, start)
        if at:
            parameters = binding.with_values(parameters, at)
            states = binding.with_values(states, at)
        traces = [] if fresh else self._read_traces(solver, donate=True)
        if self.check_finite:
            # What the call gives may be refused, and then the traces must still be
            # there.
            traces = jax.tree.map(jnp.copy, traces)
        inputs = binding.inputs(sequences)
        with self._cleared_on_error():
            given = (parameters, states, traces, inputs, weights, unit, rule_state)
            solved = program(*given, masked=mask is not None)
        return binding, solver, solved, weights

    def _in_chunks(
        self,
        sequences: tuple,
        step_fn: Callable,
        mask: Any,
        size: int,
        reduction: str,
        has_aux: bool,
        fresh: bool,
    ) -> tuple[dict[Path, Any], jax.Array, jax.Array, Any]:
        """Gradients over windows of ``size`` steps that ``step_fn`` takes whole; one
        loss for each."""
        length = length_of(sequences)
        if not isinstance(size, int) or size < 1 or length % size:
            raise ValueError(
                three_parts(
                    f'{length} steps with chunk_size={size}',
                    'step_fn is called with whole windows of that many steps',
                    'a sequence whose length is a multiple of chunk_size',
                )
            )
        count = length // size
        weights, _ = loss_weights(mask, count, 'windows', reduction)
        parameters = module_states(self.model, brainstate.ParamState)

        def one(total: Any, xs: tuple) -> tuple:
            chunk, weight = xs

            def loss() -> tuple:
                with recording(self, runs_model=False) as record:
                    result = step_fn(*chunk)
                if not record.calls:
                    raise never_called()
                value, aux = result if has_aux else (result, None)
                return jnp.where(weight == 0, 0.0, value) * weight, (value, aux)

            grads, (value, aux) = brainstate.transform.grad(
                loss, parameters, has_aux=True
            )()
            add = lambda total, g: total + jnp.where(weight == 0, 0, g)
            return jax.tree.map(add, total, dict(grads)), (value, aux)

        def run(chunks: tuple, weights: jax.Array) -> tuple:
            states = parameters.items()
            zero = {path: jax.tree.map(jnp.zeros_like, s.value) for path, s in states}
            return brainstate.transform.scan(one, zero, (chunks, weights))

        cut = lambda x: jnp.asarray(x).reshape(count, size, *jnp.shape(x)[1:])
        chunks = jax.tree.map(cut, sequences)
        with self._undone_on_error():
            if fresh:
                self.reset_state()
            parts = (step_fn, size, has_aux, *self._held())
            program = self._loop('chunks', parts, run)
            gradients, (losses, aux) = program(chunks, weights)
            if self.check_finite:
                named = {
                    path_name(path): gradient for path, gradient in gradients.items()
                }
                check_finite_values(losses, weights, named, 'window')
        if fresh:
            self._clear_traces()
        return gradients, losses, weights, aux

    def _loop(self, kind: str, parts: tuple, run: Callable) -> Callable:
        """A compiled loop of brainstate, made once."""
        return self._program(kind, parts, lambda: brainstate.transform.jit(run))

    def etrace_evolve(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any] | None = None,
        return_outputs: bool = False,
    ) -> Any:
        """Advance states and traces along a sequence without a loss.

        ``step_fn(*slices)`` calls the learner, by default on all of them; what it
        returns is given, stacked over time, if ``return_outputs``.
        """
        with self._synchronised():
            length = length_of(sequences, step_fn)
            binding = self._binding(step_fn or self, sequences)
            solver = self._solver(binding, self.rule, loss=False)
            options = self._options()
            make = lambda: jax.jit(evolution_program(solver, options), donate_argnums=2)
            program = self._program('evolve', (solver,), make, binding.is_reusable)
            parameters, states = binding.read()
            traces = self._read_traces(solver, donate=True)
            with self._cleared_on_error():
                solved = program(parameters, states, traces, binding.inputs(sequences))
            binding.write(solved.states)
            self._write_traces(solver, solved.traces)
        return binding.stacked(solved.aux, length) if return_outputs else None

    def etrace_online(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        optimizer: Any,
        update_every: int = 1,
        mask: Any = None,
    ) -> jax.Array:
        """Train along a sequence: weights change every ``update_every`` steps inside
        the compiled loop.

        ``optimizer``: one of braintools, or any optax transformation; it is given the
        sum of the steps' gradients, and its state is kept from call to call. A masked
        step does not contribute to the gradient, and if all steps since the last update
        are masked, there is no update; states and traces advance. Returns the loss of
        every step.
        """
        check_optimizer(optimizer)
        check_call('step_fn', step_fn, sequences, 'one slice of each sequence')
        length = length_of(sequences)
        if (
            not isinstance(update_every, int)
            or update_every < 1
            or length % update_every
        ):
            raise ValueError(
                three_parts(
                    f'{length} steps with update_every={update_every}',
                    'weights change after each whole group of steps',
                    'a sequence whose length is a multiple of update_every',
                )
            )
        masked = mask is not None
        mask, _ = loss_weights(mask, length, 'steps')
        with self._synchronised():
            binding = self._binding(step_fn, sequences)
            solver, program = self._gradient_program(binding, self.rule, fresh=False)
            self._read_traces(solver)
            update = update_by(optimizer, self.param_states, self._kept.optimizers)

            def one(window: tuple, weights: jax.Array) -> tuple[jax.Array, dict]:
                parameters, states = binding.read()
                traces, inputs = self._read_traces(solver), binding.inputs(window)
                rule_state = self._rule_value()
                given = (parameters, states, traces, inputs, weights, 1.0, rule_state)
                solved = program(*given, masked=masked)
                binding.write(solved.states)
                self._write_traces(solver, solved.traces)
                self._advance_rule_state(solved)
                wanted = jnp.any(weights != 0)
                update(binding.gradients_by_path(solved.gradients), wanted)
                finite = {}
                if self.check_finite:
                    named = binding.gradients_by_name(solved.gradients)
                    finite = {
                        name: jnp.all(jnp.isfinite(g)) for name, g in named.items()
                    }
                return solved.losses, finite

            def run(windows: tuple, weights: jax.Array) -> tuple:
                return brainstate.transform.for_loop(one, windows, weights)

            cut = lambda x: jnp.asarray(x).reshape(-1, update_every, *jnp.shape(x)[1:])
            parts = (solver, optimizer, update_every, masked, *self._held())
            loop = self._loop('online', parts, run)
            with self._undone_on_error(optimizer):
                windows = jax.tree.map(cut, sequences)
                losses, finite = loop(windows, mask.reshape(-1, update_every))
                if self.check_finite:
                    marks = {
                        name: jnp.where(ok, 0.0, jnp.nan) for name, ok in finite.items()
                    }
                    check_finite_values(losses.reshape(-1), mask, marks, 'step')
        return losses.reshape(-1)

    # ------------------------------------------------------------ updates

    def apply(self, gradients: dict[Path, Any], optimizer: Any) -> None:
        """Change the parameters by an optimiser of braintools or optax, whose state is
        kept.

        Parameters without a gradient stay as they are.
        """
        parameters = self.param_states
        check_paths('gradients', gradients, parameters)
        update = update_by(
            check_optimizer(optimizer), parameters, self._kept.optimizers
        )
        make = lambda: brainstate.transform.jit(lambda g: update(g, jnp.asarray(True)))
        # It closes over states alone, so a trace around it does not matter.
        program = self._program('apply', (optimizer, *parameters.values()), make, True)
        still = {
            path: s.value for path, s in parameters.items() if path not in gradients
        }
        with self._synchronised():
            program({**jax.tree.map(jnp.zeros_like, still), **gradients})
            for path, value in still.items():
                parameters[path].value = value

    def optimizer_states(self, optimizer: Any) -> dict[str, brainstate.State]:
        """The states of an optimiser as this learner uses it, by name."""
        update_by(check_optimizer(optimizer), self.param_states, self._kept.optimizers)
        if optimizer in self._kept.optimizers:
            return {'state': self._kept.optimizers[optimizer]}
        own = {id(state) for state in self.param_states.values()}
        states = brainstate.graph.states(optimizer).items()
        return {path_name(p): s for p, s in states if id(s) not in own}

    def teach_predictor(self, sequences: tuple, step_fn: Callable[..., Any]) -> float:
        """One update of the rule's predictor from a fresh sequence, nothing else
        changed; its error."""
        with self._synchronised():
            _, _, solved, _ = self._solve(sequences, step_fn, None, 'mean', True)
            self._advance_rule_state(solved)
        return float(solved.predictor_error)

    # ------------------------------------------------------------ measuring

    def evaluate(
        self, *sequences: Any, step_fn: Callable[..., Any] | None = None
    ) -> Any:
        """What ``step_fn``, by default the learner, gives at every step of a fresh
        sequence.

        Stacked over time. Forward only: nothing is learned, and states, traces and
        random numbers stay as they are.
        """
        length_of(sequences, step_fn)
        run = lambda *xs: brainstate.transform.for_loop(step_fn or self, *xs)
        with self._synchronised():
            program = self._loop('evaluate', (step_fn, *self._held()), run)
            with recording(self, ignores_modulators=True), self.unmoved():
                self._restore_start()
                return program(*sequences)

    @overload
    def gradient_check(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        rules: None = None,
        mask: Any = None,
        reduction: str = 'mean',
    ) -> GradientCheck: ...

    @overload
    def gradient_check(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        rules: Sequence[Any],
        mask: Any = None,
        reduction: str = 'mean',
    ) -> RuleComparison: ...

    def gradient_check(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        rules: Sequence[Any] | None = None,
        mask: Any = None,
        reduction: str = 'mean',
    ) -> GradientCheck | RuleComparison:
        """Compare gradients of a fresh sequence with BPTT's: this rule's, or those of
        ``rules``.

        Nothing is changed. ``rules``: names or classes of rules, with the options they
        have by default, :class:`ETraceConfig`, or learners for their rule with its
        options, as ``braintrace.SnAp(model, n=2)``, its modulator or its predictor.
        """
        check_choice('reduction', reduction, ('mean', 'sum'))
        own = (self.rule, self._rule_value())
        compared = [own] if rules is None else rules_of(rules)
        with self._synchronised(), self.unmoved():
            solve = lambda *rule: self._solve(
                sequences, step_fn, mask, reduction, True, *rule
            )
            binding, _, solved, _ = solve(PRESETS['bptt'].default, None)
            exact = binding.gradients_by_name(solved.gradients)
            credits = self.graph.report.credits
            classes = {r.context['name']: r.context['credit'] for r in credits}
            checks = []
            for rule, state in compared:
                state = rule.init_state(self._groups()) if state is None else state
                binding, solver, solved, _ = solve(rule, state)
                gives = gradients_of(rule, binding, solver, credits)
                mine = binding.gradients_by_name(solved.gradients)
                rows = [
                    compare(
                        n, classes.get(n, 'none'), gives[n].kind, gradient, exact[n]
                    )
                    for n, gradient in mine.items()
                ]
                checks.append(GradientCheck(rule.name, tuple(rows)))
        return checks[0] if rules is None else RuleComparison(tuple(checks))

    def write_report(self, file: Any, steps: int | None = None) -> None:
        """Write the report as a page; ``steps`` adds what a sequence so long needs in
        memory."""
        self.report.to_html(
            file, memory=None if steps is None else self.memory_plan(steps)
        )

    def memory_plan(self, steps: int) -> MemoryPlan:
        """Bytes that a sequence of the compiled inputs needs, before any is allocated."""
        if not isinstance(steps, (int, np.integer)) or steps < 1:
            why = 'a sequence has at least one step'
            instead = 'a whole number of at least 1'
            raise ValueError(three_parts(f'memory_plan({steps!r})', why, instead))

        def step_fn(*xs: Any) -> Any:
            leaves = jax.tree.leaves(self(*xs))
            inexact = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
            return sum(jnp.sum(jnp.abs(x) ** 2) for x in inexact)

        _ = self.graph  # refuses a learner that was not compiled
        self._kept.check_shapes(self)
        binding = StepBinding.of_step_fn(self, step_fn, self._example)
        solver = self._solver(binding, self.rule, loss=True)
        return plan_memory(
            binding, solver, self.rule, steps, self._options(), self._rule_value()
        )

    def _synchronised(self) -> contextlib.AbstractContextManager:
        """Around every call: reads and writes the values of a model that keeps them
        elsewhere."""
        return contextlib.nullcontext()


def _with_common_options(own: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """Parameters of a rule's learner, with the options of every learner."""
    every = inspect.signature(LearnerState.__init__).parameters.values()
    common = [p for p in every if p.kind is p.KEYWORD_ONLY]
    named = {p.name: p for p in (*own, *common) if p.kind is not p.VAR_KEYWORD}
    return list(named.values())
