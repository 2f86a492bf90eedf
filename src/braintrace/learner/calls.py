"""How a call runs: a step function is bound to the model, its program is made once,
values go in and come out."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from ..compiled_step import Values
from ..errors import RecompilationWarning, is_explained, three_parts
from ..frontends.brainstate import inputs_kept
from ..frontends.failures import explain_failure
from ..program import Path
from ..rules import Rule
from ..solver import BlockSolver, InfluenceSolver, Solved
from ..source_lines import short_source
from .arguments import check_call, length_of
from .batch import BatchError
from .binding import StepBinding
from .learner_state import LearnerState
from .losses import check_aux, check_finite_values, loss_weights
from .programs import in_trace, shapes_of
from .sequences import SequenceOptions, gradient_program

_MOST_COPIES = 4
"""From this many function objects of one code on, a step_fn was not defined once."""


class Calls(LearnerState):
    """What all calls of a learner share."""

    def _binding(
        self, step_fn: Callable, sequences: tuple, takes_modulators: bool = False
    ) -> StepBinding:
        """A step function traced with the model, once for all calls."""
        _ = self.graph  # refuses a learner that was not compiled
        self._kept.check_shapes(self)
        slice_of = lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x))
        example = jax.tree.map(slice_of, sequences)
        how = {'takes_modulators': takes_modulators}
        parts = (shapes_of(example), self.rule_state, self._state_shapes())

        def make() -> StepBinding:
            try:
                binding = StepBinding.of_step_fn(self, step_fn, example, **how)
            except BatchError as error:
                raise error.of_sequences(sequences) from error
            if binding.is_reusable:
                self._warn_of_copies(step_fn, parts)
            return binding

        key = ('binding', step_fn, *parts)
        binding = self._kept.programs.get(
            key, make, is_reusable=lambda b: b.is_reusable
        )
        if binding.modulator_given and not takes_modulators:
            self.check_modulated(1.0)
        return binding

    def _warn_of_copies(self, step_fn: Callable, parts: tuple) -> None:
        """Warn once of a step_fn that is defined anew for every call."""
        code = getattr(inspect.unwrap(step_fn), '__code__', None)
        if code is None:
            return
        self._kept.codes[code, parts] += 1
        if self._kept.codes[code, parts] != _MOST_COPIES:
            return
        place = short_source(f'{code.co_filename}:{code.co_firstlineno}')
        warnings.warn(
            three_parts(
                f'the step_fn of {place} was compiled {_MOST_COPIES} times',
                'every call got a new function object of the same code, and a program '
                'is compiled for each',
                'define it once, outside the loop, and use the same object in every '
                'call; pass values that change as sequences',
            ),
            RecompilationWarning,
            stacklevel=2,
        )

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
            self._check_finite(binding, solved, weights)
            rule_state = self._next_rule_state(solved)
            after = (solved.states, solved.traces, rule_state)
            self._write(binding, solver, *after, calls=len(weights), fresh=fresh)
        aux = binding.aux(solved, len(weights)) if has_aux else None
        return binding.gradients_by_path(solved.gradients), solved.losses, weights, aux

    def _at_params(
        self,
        params: Any,
        sequences: tuple,
        step_fn: Callable,
        mask: Any,
        chunk_size: int | None,
        reduction: str,
        has_aux: bool,
        fresh: bool,
    ) -> tuple[dict[Path, Any], jax.Array, jax.Array, Any]:
        """The same at parameters of the caller's, with nothing of the learner written."""
        with self._alone():
            wrong = ['fresh=False'] * (not fresh) + ['chunk_size'] * bool(chunk_size)
            if wrong:
                raise ValueError(
                    three_parts(
                        f'etrace_grad(..., params=..., {", ".join(wrong)})',
                        'a call with weights of its own leaves states and traces '
                        'alone, so it has no '
                        'past to continue from',
                        'fresh=True and no chunk_size; or learner.params = ... '
                        '(Flax: the module '
                        'itself) and no params',
                    )
                )
            values = self._interface.values_at(params)
            binding, _, solved, weights = self._solve(
                sequences, step_fn, mask, reduction, True, at=values, has_aux=has_aux
            )
            self._check_finite(binding, solved, weights)
            paths = binding.paths.items()
            states = {path: solved.states[v] for v, path in paths if v in solved.states}
            self._interface.write_at(params, states)
        aux = binding.aux(solved, len(weights)) if has_aux else None
        return binding.gradients_by_path(solved.gradients), solved.losses, weights, aux

    def _check_finite(
        self, binding: StepBinding, solved: Solved, weights: jax.Array
    ) -> None:
        if self.check_finite:
            named = binding.gradients_by_name(solved.gradients)
            check_finite_values(solved.losses, weights, named, 'step')

    def _values(self, binding: StepBinding, fresh: bool) -> tuple[Values, Values]:
        """Parameters and states as they are, or states at the start of a sequence."""
        parameters, states = binding.read()
        if fresh:
            start = {path: state.value for path, state in self._start.items()}
            states = binding.with_values(states, start)
        return parameters, states

    def _loop(
        self, kind: str, parts: tuple, run: Callable, step_fn: Callable | None = None
    ) -> Callable:
        """A compiled loop of brainstate, made once; ``step_fn``: what it calls."""

        def make() -> Callable:
            if step_fn is not None and not in_trace():
                self._warn_of_copies(step_fn, (kind, self._state_shapes()))
            return brainstate.transform.jit(run)

        return self._program(kind, parts, make)

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

    @contextlib.contextmanager
    def _failure_explained(self, sequences: tuple) -> Iterator[None]:
        """Around a loop that calls a step_fn: its errors as those of other calls."""
        try:
            with inputs_kept(self.model):
                yield
        except BatchError as error:
            raise error.of_sequences(sequences) from error
        except (TypeError, ValueError, AttributeError) as error:
            if is_explained(error):
                raise
            drop_time = lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.int32)
            slices = jax.tree.map(drop_time, sequences)
            raise explain_failure(self.model, slices, error, 'a step_fn') from error

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
