"""The learner: a compiled model that trains forward in time."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, overload

import brainstate
import jax
import jax.numpy as jnp

from ..errors import CompilationError, three_parts
from ..program import Path
from ..program.data import MultiStepData, SingleStepData
from ..solver import BlockSolver, InfluenceSolver, Solved
from .arguments import (
    LOSS_OUTPUTS,
    check_call,
    check_choice,
    check_optimizer,
    check_paths,
    check_rank,
    length_of,
    selected,
)
from .batch import batch_explained
from .binding import StepBinding
from .chunks import evolve_in_chunks, gradients_in_chunks
from .learner_state import LearnerState, restored_on_error
from .losses import check_finite_values, loss_weights, results
from .measuring import Measuring
from .model_states import state_shapes
from .online import online_step
from .optimizers import update_by
from .recording import Recording, recording_of
from .saving import Saving
from .sequences import evolution_program
from .spellings import check_subclass
from .stream import Stream


class Learner(Measuring, Saving):
    """A model with a learning rule.

    Call it in place of the model inside a ``step_fn``; :meth:`etrace_grad`
    differentiates a whole sequence.

    ``reach``: 'local'; 'readout' for credit through the memory of leaky linear
    read-outs, carried in the traces (:class:`D_RTRL`, :class:`OSTLRecurrent` and
    :class:`EProp`, which has it by default); or 'deep' for credit that passes from
    layer to layer inside a window. ``vjp_method``: 'single-step', or 'multi-step',
    where every call is a window: reverse mode through the whole of its steps, and the
    credit of the states at its start is multiplied by the traces. A
    :class:`MultiStepData` call is one window. All others (``learner(x)``, and sequences
    without ``chunk_size``) are windows of one step: a loss reaches the traces of all
    states that the step reads, other units' included. A rule with a signal or a
    recursion of its own (random feedback, κ, a modulator, a scalar leak) takes the
    steps of a window one by one. ``vmap``: the model describes one sample; its states
    have a batch axis in front and it is mapped over them. ``block``: steps solved
    together; chosen automatically and never visible in a result. ``passes``: 1 carries
    traces, 2 keeps the states of a fresh sequence and carries none; by default
    whichever fits. ``trace``: 'auto', 'marked' (parameters used through marked
    operations), 'credited' (those to which the model's outputs give credit; 'auto'
    keeps traces for the others too, since a loss may read any state) or a predicate on
    paths; the others keep their one-step gradient.
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
        params: Any = None,
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
        params: Any = None,
    ) -> Any:
        """Gradients of a whole sequence, by path; those of a model that is no brainstate
        module in the structure that its framework's optimisers take.

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

        ``params`` (a Flax or Equinox module, or the params of a function): a fresh
        sequence with these weights, nothing of the learner changed; this also works
        inside ``jax.jit`` and the like.

        With ``return_value`` the losses follow: as they are ('per_step'), times their
        mask ('masked') or reduced to one number ('scalar'). With ``has_aux`` the
        auxiliary values follow, stacked over time.
        """
        check_choice('loss_output', loss_output, LOSS_OUTPUTS)
        check_choice('reduction', reduction, ('mean', 'sum'))
        chosen = selected(weights, self.param_states)
        if params is not None:
            found = self._at_params(
                params, sequences, step_fn, mask, chunk_size, reduction, has_aux, fresh
            )
        else:
            with self._synchronised():
                sequences = self._placed(sequences, 1)
                if chunk_size not in (None, 1):
                    found = gradients_in_chunks(
                        self,
                        sequences,
                        step_fn,
                        mask,
                        chunk_size,
                        reduction,
                        has_aux,
                        fresh,
                    )
                else:
                    found = self._in_steps(
                        sequences, step_fn, mask, reduction, has_aux, fresh
                    )
        gradients, losses, counts, aux = found
        if chosen is None:
            gradients = self._interface.gradients(gradients)
        given = (mask, chosen, loss_output, return_value, has_aux)
        return results(gradients, losses, counts, aux, *given)

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
                outputs = evolve_in_chunks(self, sequences, step_fn, chunk_size)
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
        self._interface.check_loop_optimizer(optimizer)
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
        optimizer: Any = None,
        *,
        chunk: int | None = None,
        decay: float | None = None,
    ) -> Stream:
        """Learn from data that arrive one step at a time.

        ``step_fn(*inputs)`` calls the learner and returns a scalar loss, or ``(loss,
        aux)``. ``optimizer``: as for :meth:`etrace_online`; None if weights are not to
        change. ``chunk``: calls bring 1 to so many steps, time first. ``decay``:
        gradients of :meth:`Stream.gradient` are added up, the sum multiplied by this
        number at every step, for rewards that come later.
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
        gradients = self._interface.by_path(gradients)
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

    def update_predictor(self, sequences: tuple, step_fn: Callable[..., Any]) -> float:
        """One update of the rule's predictor from a fresh sequence, nothing else
        changed; its error."""
        with self._synchronised():
            _, _, solved, _ = self._solve(sequences, step_fn, None, 'mean', True)
            self._write_rule_state(self._next_rule_state(solved))
        return float(solved.predictor_error)

    def placed(self, *sequences: Any) -> tuple:
        """Sequences as JAX arrays, on the devices of the learner if it has several."""
        if self.placement is not None and self.placement.has_other_processes:
            return self._placed(sequences, 1)
        return self._placed(jax.tree.map(jnp.asarray, sequences), 1)

    @property
    def own_samples(self) -> slice:
        """The samples of a batch that this process brings; all if it is alone."""
        return slice(None) if self.placement is None else self.placement.own_samples


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
