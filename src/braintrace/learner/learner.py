"""The learner: a compiled model that trains forward in time."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path as FilePath
from typing import Any, Literal, overload

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from ..compiled_step import Values
from ..errors import CompilationError, is_explained, three_parts
from ..frontends.brainstate import explain_failure, module_states
from ..program import Path
from ..program.data import MultiStepData, SingleStepData
from ..program.step import path_name
from ..rules import PRESETS, Rule
from ..solver import BlockSolver, InfluenceSolver, Solved
from .arguments import (
    LOSS_OUTPUTS,
    bytes_of,
    check_aux,
    check_call,
    check_choice,
    check_directions,
    check_finite_values,
    check_optimizer,
    check_paths,
    check_rank,
    in_windows,
    length_of,
    loss_weights,
    never_called,
    results,
    rules_of,
    selected,
    spared,
    weighted,
    weights_like,
    window_weights,
)
from .batch import batch_explained
from .binding import StepBinding
from .certificate import (
    Certificate,
    certificate_of,
    certificate_program,
    parameter_groups,
    random_directions,
)
from .check import GradientCheck, RuleComparison, compare
from .gradients import gradients_of
from .learner_state import LearnerState, restored_on_error
from .memory import MemoryPlan, plan_memory
from .model_states import state_shapes
from .online import online_step
from .optimizers import update_by
from .placement import Placement
from .programs import shapes_of
from .recording import Recording, recording, recording_of
from .sequences import SequenceOptions, evolution_program, gradient_program
from .spellings import check_subclass
from .stream import Stream
from .weights import (
    Weights,
    read_safetensors,
    read_weights,
    write_safetensors,
    write_weights,
)


class Learner(LearnerState):
    """A model with a learning rule.

    Call it in place of the model inside a ``step_fn``; :meth:`etrace_grad`
    differentiates a whole sequence.

    ``reach``: 'local'; 'readout' for credit through the memory of leaky linear
    read-outs, carried in the traces (:class:`D_RTRL`, :class:`OSTLRecurrent` and
    :class:`EProp`, which has it by default); or 'deep' for credit that passes from
    layer to layer inside a window. ``vjp_method``: 'single-step', or 'multi-step', where every call is a
    window: reverse mode through the whole of its steps, and the credit of the states at
    its start is multiplied by the traces. A :class:`MultiStepData` call is one window.
    All others (``learner(x)``, and sequences without ``chunk_size``) are windows of one
    step: a loss reaches the traces of all states that the step reads, other units'
    included. A rule with a signal or a recursion of its own (random feedback, κ, a
    modulator, a scalar leak) takes the steps of a window one by one. ``vmap``: the model describes one sample; its
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
        if cls.__module__.partition('.')[0] != __name__.partition('.')[0]:
            check_subclass(cls)

    # ------------------------------------------------------------ one step

    def update(self, *args: Any, modulator: Any = None) -> Any:
        """One step: the model's output; states and traces advance.

        Under ``brainstate.transform.grad`` the parameters' gradient is the rule's
        online gradient. Inputs wrapped in :class:`MultiStepData` are a window of steps:
        with ``vjp_method='multi-step'`` exact reverse mode inside, traces across. A
        plain call is a window of one step then. Inside a ``step_fn`` this is the call
        that is traced. ``modulator``: see :class:`ThreeFactor`.
        """
        window = any(isinstance(a, MultiStepData) for a in args)
        wrapped = (SingleStepData, MultiStepData)
        args = tuple(a.data if isinstance(a, wrapped) else a for a in args)
        args = self._placed(args, int(window))
        check_rank(args, self._example, int(window))
        with self._synchronised(), self._batch_explained(args, window):
            return self._update(args, window, modulator)

    def _batch_explained(
        self, args: tuple, window: bool
    ) -> contextlib.AbstractContextManager:
        compiled = {} if self._kept.shapes is None else self._kept.shapes.shapes
        now = lambda: state_shapes(self.hidden_states)
        return batch_explained(args, self._example, compiled, now, window)

    def _update(self, args: tuple, window: bool, modulator: Any) -> Any:
        record = recording_of(self)
        if record is not None:
            record.calls += 1
            if record.runs_model:
                self._record_modulator(record, modulator)
                run = self._run_model
                if window:
                    loop = brainstate.transform.for_loop
                    run = lambda *args: loop(self._run_model, *args)
                record.outputs = run(*args)
                return record.outputs
        _ = self.graph  # refuses a learner that was not compiled
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
        rule_state = self._next_rule_state(None)
        self._write(binding, solver, states, traces, rule_state, calls=1)
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
        in_window = window and in_chunk and not self.rule.has_own_signal
        exact = self.rule.has_exact_windows or in_window
        first = lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x))
        example = jax.tree.map(first, args) if window else args
        binding = self._model_binding(example)
        solver = self._solver(binding, self.rule, False, in_chunk)
        run = online_step(solver, self.rule, window, exact, self.placement)
        make = lambda: jax.jit(run)
        parts = (solver, window, exact)
        return binding, solver, self._program('step', parts, make, binding.is_reusable)

    def _next_rule_state(self, solved: Solved | None) -> Any:
        if self.rule_state is None:
            return None
        return self.rule.next_state(self.rule_state.value, solved)

    def _write_rule_state(self, value: Any) -> None:
        if self.rule_state is not None and value is not self.rule_state.value:
            self.rule_state.value = value

    def _write(
        self,
        binding: StepBinding,
        solver: BlockSolver | InfluenceSolver,
        states: Any,
        traces: list,
        rule_state: Any,
        calls: int,
        fresh: bool = False,
    ) -> None:
        """Put the states, the traces and the rule's own state after a call in place,
        and count the call."""
        index = self.running_index.value + calls

        def write() -> None:
            binding.write(states)
            self._write_traces(solver, traces, fresh)
            self._write_rule_state(rule_state)
            self.running_index.value = index

        try:
            write()
        except BaseException:
            # New states with old traces would be wrong from then on, and the old
            # traces may have been donated: after Ctrl-C all are written.
            write()
            raise

    # ------------------------------------------------------------ sequences

    @overload
    def etrace_grad(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        mask: Any = None,
        chunk_size: int | None = None,
        weights: Any = None,
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
        weights: Any = None,
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
        compiled and the traces are discarded afterwards. ``weights`` selects parameters:
        a list of paths or states, or a mapping to states, whose keys the gradients then
        have.

        ``chunk_size=k`` passes windows of k steps to ``step_fn``, which wraps them in
        :class:`MultiStepData` and returns the k losses of a window, or one for the
        whole of it; then ``mask`` has one weight for each window. Reverse mode is exact
        inside each window, whatever ``vjp_method`` says, and traces go across. Without
        it, or with 1, a learner with ``vjp_method='multi-step'`` takes windows of one
        step.

        With ``return_value`` the losses follow: as they are ('per_step'), times their
        mask ('masked') or reduced to one number ('scalar'). With ``has_aux`` the
        auxiliary values follow, stacked over time.
        """
        check_choice('loss_output', loss_output, LOSS_OUTPUTS)
        check_choice('reduction', reduction, ('mean', 'sum'))
        chosen = selected(weights, self.param_states)
        with self._synchronised():
            sequences = self._placed(sequences, 1)
            if chunk_size not in (None, 1):
                found = self._in_chunks(
                    sequences, step_fn, mask, chunk_size, reduction, has_aux, fresh
                )
            else:
                found = self._in_steps(
                    sequences, step_fn, mask, reduction, has_aux, fresh
                )
        return results(*found, mask, chosen, loss_output, return_value, has_aux)

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
        with self._cleared_on_error():
            binding, solver, solved, weights = self._solve(
                sequences, step_fn, mask, reduction, fresh, has_aux=has_aux
            )
            if self.check_finite:
                named = binding.gradients_by_name(solved.gradients)
                check_finite_values(solved.losses, weights, named, 'step')
            rule_state = self._next_rule_state(solved)
            after = (solved.states, solved.traces, rule_state)
            self._write(binding, solver, *after, calls=len(weights), fresh=fresh)
        aux = binding.aux(solved, len(weights)) if has_aux else None
        return binding.gradients_by_path(solved.gradients), solved.losses, weights, aux

    def _binding(
        self, step_fn: Callable, sequences: tuple, takes_modulators: bool = False
    ) -> StepBinding:
        """A step function traced with the model, once for all calls."""
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
            self.rule_state,
            self._state_shapes(),
        )
        binding = self._kept.programs.get(
            key, make, is_reusable=lambda b: b.is_reusable
        )
        if binding.modulator_given and not takes_modulators:
            self.check_modulated(1.0)
        return binding

    def _options(self) -> SequenceOptions:
        return SequenceOptions(
            self.block, self.passes, self.max_trace_bytes, self.placement
        )

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
        has_aux: bool | None = None,
    ) -> tuple[StepBinding, BlockSolver | InfluenceSolver, Solved, jax.Array]:
        """Run a sequence by this rule, or by another; nothing is written yet.

        ``at``: values of parameters and states in place of the current ones, by path.
        ``has_aux``: whether the step must give auxiliary values, if that matters.
        """
        check_call('step_fn', step_fn, sequences, 'one slice of each sequence')
        length = length_of(sequences)
        weights, unit = loss_weights(mask, length, 'steps', reduction)
        binding = self._binding(step_fn, sequences, rule is not None)
        if has_aux is not None:
            check_aux(binding.out_tree, has_aux)
        if rule is None:
            rule, rule_state = self.rule, self._rule_value()
        solver, program = self._gradient_program(binding, rule, fresh)
        parameters, states = self._values(binding, fresh)
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

    def _values(self, binding: StepBinding, fresh: bool) -> tuple[Values, Values]:
        """Parameters and states as they are, or states at the start of a sequence."""
        parameters, states = binding.read()
        if fresh:
            start = {path: state.value for path, state in self._start.items()}
            states = binding.with_values(states, start)
        return parameters, states

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
        """Gradients over windows of ``size`` steps that ``step_fn`` takes whole; it
        returns a loss for each step, or one for the window."""
        length = length_of(sequences)
        chunks = in_windows(sequences, length, size)
        per_step, per_window = window_weights(mask, length, size, reduction)
        parameters = module_states(self.model, brainstate.ParamState)

        def one(total: Any, xs: tuple) -> tuple:
            chunk, *weights = xs
            if mask is not None:
                chunk = spared(chunk, weights[0])

            def loss() -> tuple:
                with recording(self, runs_model=False) as record:
                    result = step_fn(*chunk)
                if not record.calls:
                    raise never_called()
                value, aux = result if has_aux else (result, None)
                weight = weights_like(value, size, *weights)
                return weighted(value, weight), (value, weight, aux)

            grads, (value, weight, aux) = brainstate.transform.grad(
                loss, parameters, has_aux=True
            )()
            counts = jnp.any(weight != 0)
            add = lambda total, g: total + jnp.where(counts, g, 0)
            return jax.tree.map(add, total, dict(grads)), (value, weight, aux)

        def run(chunks: tuple, *weights: Any) -> tuple:
            states = parameters.items()
            zero = {path: jax.tree.map(jnp.zeros_like, s.value) for path, s in states}
            return brainstate.transform.scan(one, zero, (chunks, *weights))

        with self._undone_on_error():
            if fresh:
                self.reset_state()
            parts = (step_fn, size, has_aux, mask is None, *self._held())
            program = self._loop('chunks', parts, run)
            with self._failure_explained(chunks):
                found = program(chunks, per_step, per_window)
            gradients, (losses, weights, aux) = found
            losses, weights = losses.reshape(-1), weights.reshape(-1)
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
        chunk_size: int | None = None,
        return_outputs: bool = False,
    ) -> Any:
        """Advance states and traces along a sequence without a loss.

        ``step_fn(*slices)`` calls the learner, by default on all of them; what it
        returns is given, stacked over time, if ``return_outputs``. ``chunk_size=k``
        hands windows of k steps to it, as :meth:`etrace_grad` does; outputs are stacked
        over windows then.
        """
        if chunk_size not in (None, 1):
            with self._synchronised():
                sequences = self._placed(sequences, 1)
                outputs = self._evolve_in_chunks(sequences, step_fn, chunk_size)
            return outputs if return_outputs else None
        with self._synchronised():
            sequences = self._placed(sequences, 1)
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
                after = (solved.states, solved.traces, self._rule_value())
                self._write(binding, solver, *after, calls=length)
        return binding.stacked(solved.aux, length) if return_outputs else None

    def _evolve_in_chunks(
        self, sequences: tuple, step_fn: Callable | None, size: Any
    ) -> Any:
        chunks = in_windows(sequences, length_of(sequences, step_fn), size)
        windowed = lambda *xs: self(*map(MultiStepData, xs))
        one = windowed if step_fn is None else step_fn
        run = lambda *chunks: brainstate.transform.for_loop(one, *chunks)
        program = self._loop('evolve chunks', (step_fn, *self._held()), run)
        with self._undone_on_error(), self._failure_explained(chunks):
            return program(*chunks)

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
        if not isinstance(update_every, int) or update_every < 1:
            raise ValueError(
                three_parts(
                    f'update_every={update_every!r}',
                    'weights change after so many steps',
                    'a whole number of at least 1',
                )
            )
        masked = mask is not None
        mask, _ = loss_weights(mask, length, 'steps')
        with self._synchronised():
            sequences = self._placed(sequences, 1)
            binding = self._binding(step_fn, sequences)
            step = self._online_step(binding, masked)
            update = update_by(optimizer, self.param_states, self._kept.optimizers)

            def one(window: tuple, weights: jax.Array) -> tuple[jax.Array, dict]:
                solved = step(window, weights)
                wanted = jnp.any(weights != 0) if masked else None
                update(binding.gradients_by_path(solved.gradients), wanted)
                finite = {}
                if self.check_finite:
                    named = binding.gradients_by_name(solved.gradients)
                    finite = {
                        name: jnp.all(jnp.isfinite(g)) for name, g in named.items()
                    }
                return solved.losses, finite

            count = length // update_every
            parts = (binding, optimizer, update_every, length, masked, *self._held())
            run = partial(_in_windows, one, count, update_every)
            loop = self._loop('online', parts, run)
            with self._undone_on_error(optimizer):
                losses, finite = loop(jax.tree.map(jnp.asarray, sequences), mask)
                self._count(length)
                if self.check_finite:
                    marks = {
                        name: jnp.where(ok, 0.0, jnp.nan) for name, ok in finite.items()
                    }
                    check_finite_values(losses, mask, marks, 'step')
        return losses

    def _online_step(
        self, binding: StepBinding, masked: bool
    ) -> Callable[[tuple, jax.Array], Solved]:
        """A function of a window and the weights of its losses that gives gradients;
        states and traces are read and written."""
        solver, program = self._gradient_program(binding, self.rule, fresh=False)
        self._read_traces(solver)

        def step(window: tuple, weights: jax.Array) -> Solved:
            traces, inputs = self._read_traces(solver), binding.inputs(window)
            given = (*binding.read(), traces, inputs, weights, 1.0, self._rule_value())
            solved = program(*given, masked=masked)
            binding.write(solved.states)
            self._write_traces(solver, solved.traces)
            self._write_rule_state(self._next_rule_state(solved))
            return solved

        return step

    def stream(
        self,
        step_fn: Callable[..., Any],
        optimizer: Any,
        *,
        chunk: int | None = None,
        decay: float | None = None,
    ) -> Stream:
        """Learn from data that arrive one step at a time.

        ``step_fn(*inputs)`` calls the learner and returns a scalar loss, or ``(loss,
        aux)``. ``optimizer``: as for :meth:`etrace_online`. ``chunk``: calls bring 1 to
        so many steps, time first. ``decay``: gradients of :meth:`Stream.gradient` are
        added up, the sum multiplied by this number at every step, for rewards that come
        later.
        """
        _ = self.graph  # refuses a learner that was not compiled
        return Stream(self, step_fn, optimizer, chunk=chunk, decay=decay)

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
        make = lambda: brainstate.transform.jit(update)
        # It closes over states alone, so a trace around it does not matter.
        program = self._program('apply', (optimizer, *parameters.values()), make, True)
        still = {
            path: s.value for path, s in parameters.items() if path not in gradients
        }
        moving = (*parameters.values(), *self.optimizer_states(optimizer).values())
        with self._synchronised(), restored_on_error(moving):
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

    def update_predictor(self, sequences: tuple, step_fn: Callable[..., Any]) -> float:
        """One update of the rule's predictor from a fresh sequence, nothing else
        changed; its error."""
        with self._synchronised():
            _, _, solved, _ = self._solve(sequences, step_fn, None, 'mean', True)
            self._write_rule_state(self._next_rule_state(solved))
        return float(solved.predictor_error)

    # ------------------------------------------------------------ weights and files

    def weights(self) -> Weights:
        """Copies of the parameters as NumPy arrays, by path.

        A parameter that is a structure of arrays, as the weight and the bias of a
        layer, is the same structure of NumPy arrays.
        """
        with self._synchronised():
            return read_weights(self.param_states)

    def set_weights(self, weights: Mapping[Any, Any]) -> None:
        """Set parameters to arrays as :meth:`weights` gives them; others stay.

        The names of reports, as ``'layers.1.weight.bias'``, are keys too.
        """
        with self._synchronised():
            write_weights(self.param_states, weights)

    def save_weights(self, file: str | FilePath) -> None:
        """Write the parameters to a file of safetensors, by the names of reports."""
        with self._synchronised():
            write_safetensors(self.param_states, file)

    def load_weights(self, file: str | FilePath) -> None:
        """Set all parameters to those that :meth:`save_weights` wrote."""
        with self._synchronised():
            read_safetensors(self.param_states, file)

    def save(self, folder: str | FilePath, optimizer: Any = None) -> None:
        """Write weights, states, traces, the rule's own state and random numbers to a
        folder, and the state of an optimiser if one is given.

        The newest two that were written to a folder are kept.
        """
        from ..checkpoint import save_learner

        with self._synchronised():
            save_learner(self, folder, optimizer)

    def load(self, folder: str | FilePath, optimizer: Any = None) -> None:
        """Continue from what :meth:`save`, a stream or :func:`fit` wrote.

        The learner must be compiled as the one that wrote it: the same model, rule and
        batch size. An error leaves everything as it was.
        """
        from ..checkpoint import load_learner

        with self._synchronised():
            load_learner(self, folder, optimizer)

    def __copy__(self) -> Learner:
        """A learner of the same model that shares all states."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled."""
        raise TypeError(
            three_parts(
                f'pickling a {type(self).__name__} learner',
                'it holds compiled programs, which belong to this process',
                'learner.save(folder), and learner.load(folder) of a learner compiled '
                'in the other process; copy.deepcopy(learner) for a second one here',
            )
        )

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
            sequences = self._placed(sequences, 1)
            program = self._loop('evaluate', (step_fn, *self._held()), run)
            with recording(self, ignores_modulators=True), self.unmoved():
                self._restore_start()
                with self._failure_explained(sequences):
                    return program(*sequences)

    @contextlib.contextmanager
    def _failure_explained(self, sequences: tuple) -> Iterator[None]:
        """Around a loop that calls a step_fn: its errors as those of other calls."""
        try:
            yield
        except (TypeError, ValueError, AttributeError) as error:
            if is_explained(error):
                raise
            drop_time = lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.int32)
            slices = jax.tree.map(drop_time, sequences)
            raise explain_failure(self.model, slices, error, 'a step_fn') from error

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
            sequences = self._placed(sequences, 1)
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

    def certificate(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        directions: int = 8,
        mask: Any = None,
        reduction: str = 'mean',
        per_parameter: bool = False,
        groups: Mapping[str, Sequence[Path]] | None = None,
        seed: int = 0,
    ) -> Certificate:
        """Whether the rule's gradient of a fresh sequence points downhill.

        ⟨g_true, g⟩/|g|², where g is the gradient of :meth:`etrace_grad` and g_true that
        of BPTT, by forward mode through the uncut steps: exact, at the cost of a few
        forward passes, and in memory that does not grow with the sequence for rules
        that carry traces. Random ``directions`` beside it estimate the cosine.

        ``per_parameter``: a row for each parameter array. ``groups``: a row for each of
        these lists of paths, by name; a path stands for all parameters below it.
        ``step_fn``, ``mask`` and ``reduction`` as in :meth:`etrace_grad`; auxiliary
        values are ignored. Nothing is changed.

        >>> import brainstate, braintrace, jax.numpy as jnp
        >>> net = brainstate.nn.GRUCell(3, 4)
        >>> learner = braintrace.compile(net, 'bptt', jnp.ones((2, 3)), batch_size=2)
        >>> step = lambda x: jnp.mean((learner(x) - 1) ** 2)
        >>> found = learner.certificate(jnp.ones((5, 2, 3)), step_fn=step)
        >>> round(found.descent, 3), found.descends
        (1.0, True)
        """
        check_choice('reduction', reduction, ('mean', 'sum'))
        check_call('step_fn', step_fn, sequences, 'one slice of each sequence')
        check_directions(directions)
        length = length_of(sequences)
        weights, unit = loss_weights(mask, length, 'steps', reduction)
        with self._synchronised(), self.unmoved():
            sequences = self._placed(sequences, 1)
            binding = self._binding(step_fn, sequences)
            own = parameter_groups(
                binding.info.program.parameters, per_parameter, groups
            )
            program = self._certificate_program(binding, length, own)
            parameters, states = self._values(binding, fresh=True)
            drawn = random_directions(parameters, directions, seed)
            inputs, rule_state = binding.inputs(sequences), self._rule_value()
            traces: list = []
            given = (parameters, states, traces, inputs, weights, unit, rule_state)
            measured = program(drawn, *given, masked=mask is not None)
        names = list(own) if per_parameter or groups else []
        return certificate_of(self.rule.name, length, names, measured)

    def _certificate_program(
        self, binding: StepBinding, steps: int, groups: dict
    ) -> Callable:
        """The compiled certificate, whose gradient is made in the way of less memory."""
        solver = self._solver(binding, self.rule, loss=True)
        options = self._options()
        if options.passes is None and self.rule.has_trace:
            traces = bytes_of(jax.eval_shape(solver.init_traces))
            fits = traces <= self.max_trace_bytes
            passes = 1 if fits and traces < steps * solver.kept_bytes else 2
            options = replace(options, passes=passes)

        def make() -> Callable:
            solve = gradient_program(solver, self.rule, True, options)
            lists = list(groups.values())
            run = certificate_program(solver.step, solve, lists)
            return jax.jit(run, static_argnames='masked')

        lists = tuple(map(tuple, groups.values()))
        parts = (solver, options, lists)
        return self._program('certificate', parts, make, binding.is_reusable)

    def step_solver(
        self, step_fn: Callable[..., Any] | None = None, sequences: tuple = ()
    ) -> tuple[StepBinding, BlockSolver | InfluenceSolver]:
        """The traced step of the model, or of a step function on slices of sequences,
        and what solves it."""
        with self._synchronised():
            if step_fn is None:
                binding = self._model_binding(self._example)
            else:
                binding = self._binding(step_fn, sequences)
            loss = step_fn is not None
            return binding, self._solver(binding, self.rule, loss)

    def is_news(self, text: str) -> bool:
        """Whether a text was not yet said about this learner; it counts as said now."""
        new = text not in self._kept.said
        self._kept.said.add(text)
        return new

    def write_report(self, file: Any, steps: int | None = None) -> None:
        """Write the report as a page; ``steps`` adds what a sequence so long needs in
        memory."""
        self.report.to_html(
            file, memory=None if steps is None else self.memory_plan(steps)
        )

    def memory_plan(
        self, steps: int, mesh: Any = None, shard: Mapping[str, Any] | None = None
    ) -> MemoryPlan:
        """Bytes that a sequence of the compiled inputs needs on each device, before any
        is allocated; ``mesh`` and ``shard``: on other devices, as for ``compile``."""
        if not isinstance(steps, (int, np.integer)) or steps < 1:
            why = 'a sequence has at least one step'
            fix = 'a whole number of at least 1'
            raise ValueError(three_parts(f'memory_plan({steps!r})', why, fix))

        def step_fn(*xs: Any) -> Any:
            leaves = jax.tree.leaves(self(*xs))
            inexact = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
            return sum(jnp.sum(jnp.abs(x) ** 2) for x in inexact)

        _ = self.graph  # refuses a learner that was not compiled
        self._kept.check_shapes(self)
        binding = StepBinding.of_step_fn(self, step_fn, self._example)
        solver = self._solver(binding, self.rule, loss=True)
        options = self._options()
        if mesh is not None:
            other = Placement.of(mesh, shard)
            assert other is not None
            options = replace(options, placement=other.with_size(self._sample_count()))
        with options.on_devices():
            given = (binding, solver, self.rule, steps, options)
            return plan_memory(*given, self._rule_value())

    def placed(self, *sequences: Any) -> tuple:
        """Sequences as JAX arrays, on the devices of the learner if it has several."""
        if self.placement is not None and self.placement.has_other_processes:
            return self._placed(sequences, 1)
        return self._placed(jax.tree.map(jnp.asarray, sequences), 1)

    @property
    def own_samples(self) -> slice:
        """The samples of a batch that this process brings; all if it is alone."""
        return slice(None) if self.placement is None else self.placement.own_samples

    def _synchronised(self) -> contextlib.AbstractContextManager:
        """Around every call, which has the model for itself; where a model keeps its
        values elsewhere, they are read before and written after."""
        return self._alone()


def _in_windows(
    one: Callable, count: int, length: int, sequences: tuple, weights: jax.Array
) -> tuple[jax.Array, dict]:
    """Run ``one`` over windows of a length; the last one may be shorter."""
    given, results = (sequences, weights), []
    if count:
        cut = lambda x: x[: count * length].reshape(count, length, *x.shape[1:])
        losses, finite = brainstate.transform.for_loop(one, *jax.tree.map(cut, given))
        results.append((losses.reshape(-1), finite))
    if len(weights) % length:
        losses, finite = one(*jax.tree.map(lambda x: x[count * length :], given))
        results.append((losses, jax.tree.map(lambda ok: ok[None], finite)))
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *results)


def _with_common_options(own: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """Parameters of a rule's learner, with the options of every learner."""
    every = inspect.signature(LearnerState.__init__).parameters.values()
    common = [p for p in every if p.kind is p.KEYWORD_ONLY]
    shown = [p for p in own if p.kind is not p.VAR_KEYWORD]
    names = {p.name for p in shown}
    return shown + [p for p in common if p.name not in names]
