"""The learner: a compiled model that trains forward in time."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from ..engine.plan import Values
from ..engine.sequence import Sequencer, Solved
from ..errors import three_parts
from ..frontends.brainstate import module_states
from ..program import Path
from ..program.step import path_name
from ..rules import BPTT as BPTT_RULE
from ..rules import Rule
from .arguments import (
    bytes_of,
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
from .check import GradientCheck, MemoryPlan, RuleComparison, compare
from .compiled import Compiled
from .data import MultiStepData, SingleStepData
from .gradients import gradients_of
from .online import apply_by
from .traced import Traced


class Learner(Compiled):
    """A model with a learning rule.

    Call it in place of the model inside a ``step_fn``; :meth:`etrace_grad` differentiates a whole sequence.

    ``reach``: 'local', or 'deep' for credit that passes from layer to layer inside a window.
    ``vjp_method``: 'single-step', or 'multi-step', where every call is a window: reverse mode through the whole of
    its steps, and what they send back to the states at its start goes on by the traces. A :class:`MultiStepData` call
    is one window. All others (``learner(x)``, and sequences without ``chunk_size``) are windows of one step, as with
    ``chunk_size=1``: a loss reaches the traces of all states that the step reads, other units' included.
    ``vmap``: the model describes one sample; its states have a batch axis in front and it is mapped over them.
    ``block``: steps solved together; chosen automatically and never visible in a result. ``passes``: 1 carries
    traces, 2 keeps the states of a fresh sequence and carries none; by default whichever fits.
    ``trace``: 'auto', 'marked' (parameters used through marked operations) or a predicate on paths; the others
    keep their one-step gradient. ``trace_dtype``: storage type of the traces; more than ``max_trace_bytes`` is
    refused. ``check_finite``: raise on a loss or gradient that is not finite.
    """

    __signature__: inspect.Signature

    def __init_subclass__(cls, **given: Any) -> None:
        """Shows a rule's own options, and those of every learner in the place of its ``**options``."""
        super().__init_subclass__(**given)
        _, *own = inspect.signature(cls.__init__).parameters.values()
        common = [p for p in inspect.signature(Compiled.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
        named = {p.name: p for p in (*own, *common) if p.kind is not p.VAR_KEYWORD}
        cls.__signature__ = inspect.Signature(list(named.values()))

    # ------------------------------------------------------------ one step

    def update(self, *args: Any, modulator: Any = None) -> Any:
        """One step: the model's output; states and traces advance. ``modulator``: see :class:`ThreeFactor`.

        Under ``brainstate.transform.grad`` the parameters' gradient is the rule's online gradient. Inputs wrapped
        in :class:`MultiStepData` are a window of steps: with ``vjp_method='multi-step'`` exact reverse mode inside,
        traces across. A plain call is a window of one step then. Inside a ``step_fn`` this is the call that the engine
        traces.
        """
        window = any(isinstance(a, MultiStepData) for a in args)
        args = tuple(a.data if isinstance(a, (SingleStepData, MultiStepData)) else a for a in args)
        self._updates += 1
        given = modulator is not None and not self._deaf
        check_rank(args, self._example, int(window))
        if self._tracing:
            if given:
                self._set_modulator(modulator)
            return brainstate.transform.for_loop(self._call, *args) if window else self._call(*args)
        if window and self.rule.predictor is not None:
            check_combination(self.rule, 'multi-step', self.trace, self.trace_dtype)
        with self._modulated() if given else contextlib.nullcontext():
            if given:
                self._set_modulator(modulator)
            traced, step = self._step_program(args, window)
            parameters, states = traced.read()
        traces = self._read_traces(traced, fresh=False)
        outputs, states, traces = step(parameters, states, traces, traced.inputs(args))
        traced.write(states)
        self._write_traces(traced, traces, fresh=False)
        self._count()
        return traced.outputs(outputs)

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
        weights the losses; 'mean' divides by max(Σ mask, 1). A loss of mask 0 contributes nothing, even if it or the
        inputs of its step are NaN. ``fresh=True``: the sequence is whole, so states start from where they were
        compiled and no trace is wanted after. ``weights`` selects parameters by path.
        ``chunk_size=k`` hands windows of k steps to ``step_fn``, which wraps them in :class:`MultiStepData`: exact
        reverse mode inside each, whatever ``vjp_method`` says, and traces across. Without it, a learner with
        ``vjp_method='multi-step'`` takes windows of one step.
        With ``return_value`` the losses follow, with ``has_aux`` the auxiliary values, stacked over time.
        """
        check_choice('loss_output', loss_output, ('per_step', 'reduced'))
        check_choice('reduction', reduction, ('mean', 'sum'))
        if weights is not None:
            weights = [tuple(p) for p in weights] if isinstance(weights, Sequence) else weights
            check_paths('weights', weights, self.param_states)
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
    ) -> tuple[dict[Path, Any], jax.Array, jax.Array, Any]:
        """Gradients over windows of ``size`` steps that ``step_fn`` takes whole; one loss for each window."""
        length = length_of(sequences)
        if not isinstance(size, int) or size < 1 or length % size:
            raise ValueError(
                three_parts(
                    f'{length} steps with chunk_size={size}',
                    'step_fn is handed whole windows of that many steps',
                    'a sequence whose length is a multiple of chunk_size',
                )
            )
        count = length // size
        cotangents, _ = loss_weights(mask, count, 'windows', reduction)
        key = ('chunks', step_fn, size, has_aux, self._state_shapes(), *self._held())
        parameters = module_states(self.model, brainstate.ParamState)

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

        chunks = jax.tree.map(lambda x: jnp.asarray(x).reshape(count, size, *jnp.shape(x)[1:]), sequences)
        with self._undone_on_error():
            self._in_chunk = True
            try:
                if fresh:
                    self.reset_state()
                gradients, (losses, aux) = self._loop(key, run)(chunks, cotangents)
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
        return (*module_states(self.model).values(), *self.traces.values(), *own)

    def teach_predictor(self, sequences: tuple, step_fn: Callable[..., Any]) -> float:
        """One update of the rule's predictor from a fresh sequence, nothing else changed; its error before."""
        _, solved, _ = self._solve(sequences, step_fn, None, 'mean', True, self.rule)
        self._learned(solved)
        return float(solved.error)

    def _learned(self, solved: Solved) -> None:
        """What a gradient leaves for the rule itself: one more has been asked for, and a predictor knows better."""
        if self.standing is not None and self.rule.predictor is not None:
            self.standing.value = [w + c for w, c in zip(self.standing.value, solved.learned, strict=True)]
        else:
            self._count()

    def _count(self) -> None:
        if self.standing is not None and self.rule.predictor is None and self.rule.signal != 'modulatory':
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
        check_call('step_fn', step_fn, sequences, 'one slice of each sequence')
        length = length_of(sequences)
        cotangents, unit = loss_weights(mask, length, 'steps', reduction)
        traced, solve = self._program(step_fn, sequences, fresh, rule)
        parameters, states = traced.read()
        states = self._restarted(traced, states) if fresh else states
        traces = self._read_traces(traced, fresh, given=True)
        if self.check_finite:  # what the call gives may be refused
            traces = jax.tree.map(jnp.copy, traces)
        with self._cleared_on_error():
            given = (parameters, states, traces, traced.inputs(sequences), cotangents, unit, mask is not None)
            return traced, solve(*given), cotangents

    def etrace_evolve(
        self, *sequences: Any, step_fn: Callable[..., Any] | None = None, return_outputs: bool = False
    ) -> Any:
        """Advance states and traces along a sequence without a loss.

        ``step_fn(*slices)`` calls the learner, by default on all of them; what it returns is given, stacked over
        time, if ``return_outputs``.
        """
        length = length_of(sequences, step_fn)
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
        check_optimizer(optimizer)
        check_call('step_fn', step_fn, sequences, 'one slice of each sequence')
        length = length_of(sequences)
        if not isinstance(update_every, int) or update_every < 1 or length % update_every:
            raise ValueError(
                three_parts(
                    f'{length} steps with update_every={update_every}',
                    'weights change after each whole group of steps',
                    'a sequence whose length is a multiple of update_every',
                )
            )
        masked = mask is not None
        mask, _ = loss_weights(mask, length, 'steps')
        first = jax.tree.map(lambda x: jnp.asarray(x)[:update_every], sequences)
        traced, solve = self._program(step_fn, first, False, self.rule)
        self._read_traces(traced, fresh=False)
        apply = apply_by(optimizer, self.param_states, self._made.optimizers)

        def one(window: tuple, weights: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            parameters, states = traced.read()
            traces = self._read_traces(traced, fresh=False)
            solved = solve(parameters, states, traces, traced.inputs(window), weights, masked=masked)
            traced.write(solved.states)
            self._write_traces(traced, solved.traces, fresh=False)
            self._learned(solved)
            apply(traced.gradients_by_path(solved.gradients), jnp.any(weights != 0))
            named = {p.name: solved.gradients[p.invar] for p in traced.info.program.parameters}
            finite = {name: jnp.all(jnp.isfinite(g)) for name, g in named.items()} if self.check_finite else {}
            return solved.losses, finite

        key = ('online', traced, optimizer, update_every, masked, *self._held())
        loop = self._loop(key, lambda xs, w: brainstate.transform.for_loop(one, xs, w))
        windows = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, update_every, *jnp.shape(x)[1:]), sequences)
        with self._undone_on_error(optimizer):
            losses, finite = loop(windows, mask.reshape(-1, update_every))
            if self.check_finite:
                marks = {name: jnp.where(ok, 0.0, jnp.nan) for name, ok in finite.items()}
                check_finite_values(losses.reshape(-1), mask, marks, 'step')
        return losses.reshape(-1)

    def apply(self, gradients: dict[Path, Any], optimizer: Any) -> None:
        """Change the parameters by an optimiser of braintools or optax, whose state lives on from call to call.

        Parameters without a gradient stay as they are.
        """
        check_paths('gradients', gradients, self.param_states)
        move = apply_by(check_optimizer(optimizer), self.param_states, self._made.optimizers)
        key = ('apply', optimizer, *self.param_states.values())
        # It closes over states alone, so a trace around it does not matter.
        if key not in self._made.programs:
            self._made.keep(key, None, brainstate.transform.jit(lambda g: move(g, jnp.asarray(True))))
        still = {path: state.value for path, state in self.param_states.items() if path not in gradients}
        self._made.programs[key][1]({**jax.tree.map(jnp.zeros_like, still), **gradients})
        for path, value in still.items():
            self.param_states[path].value = value

    def optimizer_states(self, optimizer: Any) -> dict[str, brainstate.State]:
        """The states of an optimiser as this learner uses it, by name."""
        apply_by(check_optimizer(optimizer), self.param_states, self._made.optimizers)
        if optimizer in self._made.optimizers:
            return {'state': self._made.optimizers[optimizer]}
        own = {id(state) for state in self.param_states.values()}
        return {path_name(p): s for p, s in brainstate.graph.states(optimizer).items() if id(s) not in own}

    def evaluate(self, *sequences: Any, step_fn: Callable[..., Any] | None = None) -> Any:
        """What ``step_fn``, by default the learner, gives at every step of a fresh sequence, stacked over time.

        Forward only: nothing is learned, and states, traces and random numbers stay as they are.
        """
        length_of(sequences, step_fn)
        key = ('evaluate', step_fn, self._state_shapes(), *self._held())
        run = self._loop(key, lambda *xs: brainstate.transform.for_loop(step_fn or self, *xs))
        self._tracing = self._deaf = True
        try:
            with self.unmoved():
                for path, state in module_states(self.model).items():
                    if path in self._start:
                        state.value = self._start[path].value
                return run(*sequences)
        finally:
            self._tracing = self._deaf = False

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
        """Compare gradients of a fresh sequence with BPTT's: this rule's, or those of ``rules``; nothing is changed.

        ``rules``: names or classes of rules, with the options they have by default, :class:`ETraceConfig`, or learners
        for their rule with its options, as ``braintrace.SnAp(model, n=2)``, its modulator or its predictor.
        """
        check_choice('reduction', reduction, ('mean', 'sum'))
        asked = [(self.rule, None)] if rules is None else rules_of(rules)
        _, exact = self._by_name(sequences, step_fn, BPTT_RULE, None, mask, reduction)
        credits = self.graph.report.credits
        classes = {r.context['name']: r.context['credit'] for r in credits}
        checks = []
        for rule, read in asked:
            traced, mine = self._by_name(sequences, step_fn, rule, read, mask, reduction)
            gives = gradients_of(rule, traced, credits)
            rows = [
                compare(name, classes.get(name, 'none'), gives[name].kind, gradient, exact[name])
                for name, gradient in mine.items()
            ]
            checks.append(GradientCheck(rule.name, tuple(rows)))
        return checks[0] if rules is None else RuleComparison(tuple(checks))

    def _by_name(
        self, sequences: tuple, step_fn: Callable, rule: Rule, read: Any, mask: Any, reduction: str
    ) -> tuple[Traced, dict[str, jax.Array]]:
        """Gradients of a fresh sequence by parameter, under any rule; ``read``: what that reads, if not as at first."""
        before = self.rule, self.standing
        self._deaf = self.rule.signal == 'modulatory' != rule.signal
        if rule is not self.rule:
            first = self._stand(rule)
            self.rule, self.standing = rule, self._made.compared.setdefault(rule, first)
            if self.standing is not None and first is not None:
                self.standing.value = first.value if read is None else read
        try:
            traced, solved, _ = self._solve(sequences, step_fn, mask, reduction, True, rule)
        finally:
            self.rule, self.standing = before
            self._deaf = False
        return traced, {p.name: solved.gradients[p.invar] for p in traced.info.program.parameters}

    def write_report(self, file: Any, steps: int | None = None) -> None:
        """Write the report as a page; ``steps`` adds what a sequence so long needs in memory."""
        self.report.to_html(file, memory=None if steps is None else self.memory_plan(steps))

    def memory_plan(self, steps: int) -> MemoryPlan:
        """Bytes that a sequence of the compiled inputs needs, one way and another, before any is allocated."""
        if not isinstance(steps, (int, np.integer)) or steps < 1:
            why = 'a sequence has at least one step'
            raise ValueError(three_parts(f'memory_plan({steps!r})', why, 'a whole number of at least 1'))

        def step_fn(*xs: Any) -> Any:
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
            found: Any = jax.jit(run).lower(*args).compile().memory_analysis()
            return int(found.temp_size_in_bytes + found.output_size_in_bytes)

        window = lambda length: temporary(
            lambda *a: Sequencer(traced.plan).windows(*a, length=length), parameters, states, [], inputs, weights
        )
        if self.rule.trace == 'none':
            return MemoryPlan(steps, {}, window(self.rule.window or steps), None, window(steps))
        if self.rule.multi_step:
            steps_alone = lambda *a: traced.sequencer.windows(*a, length=1)
            needed = temporary(steps_alone, parameters, states, traces, inputs, weights)
            carried = dict(zip(traced.trace_keys, map(bytes_of, traces), strict=True))
            return MemoryPlan(steps, carried, needed, None, window(steps))
        fitting = self.rule.is_local and self.rule.trace == 'per_param'
        two = lambda *a: traced.sequencer.two_pass(*a, block=block(False))
        return MemoryPlan(
            steps,
            dict(zip(traced.trace_keys, map(bytes_of, traces), strict=True)),
            temporary(lambda *a: engine.one_pass(*a, block=block(True)), parameters, states, traces, inputs, weights),
            temporary(two, parameters, states, inputs, weights) if fitting else None,
            window(steps),
        )
