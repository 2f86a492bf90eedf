"""What a learner keeps from call to call: states, traces, and where a fresh sequence
starts."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from ..compat import is_var
from ..errors import (
    CompilationError,
    NotSupportedError,
    UnknownParameter,
    three_parts,
)
from ..frontends.brainstate import known_states, module_states
from ..program import Path
from ..program.data import first_step
from ..program.step import path_name
from ..solver import BlockSolver, InfluenceSolver
from ..text import size_text
from .arguments import (
    bytes_of,
    check_batch_size,
    check_optimizer,
)
from .binding import trace_keys, trace_shapes
from .compiled_model import CompiledModel, Kept
from .model_states import StateShapes, make_states
from .optimizers import made_beside, update_by
from .placement import Placement
from .programs import array_shapes, shapes_of
from .state import EligibilityTrace, StartValue


class LearnerState(CompiledModel):
    """A compiled model with its states and traces; :class:`Learner` trains with it."""

    def __deepcopy__(self, memo: Any = None) -> Any:
        """A learner of its own on a copy of the model: weights, states, traces, optax
        states."""
        self._interface.check_copied()
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
        copied._kept = Kept(
            optimizers=optimizers,
            owners=dict(self._kept.owners),
            traces=dict(copied.traces),
            shapes=self._kept.shapes,
        )
        return copied

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
        with self._followed():
            self._compile(first_step(args))

    def _compile(self, args: tuple) -> None:
        # An update would make weak types strong, and everything would be compiled
        # again.
        strong = lambda x: (
            jnp.asarray(x, x.dtype) if getattr(x, 'weak_type', False) else x
        )
        for state in module_states(self.model).values():
            state.value = jax.tree.map(strong, state.value)
        self.executor.compile_graph(*args)
        self._kept.programs.clear()
        self._kept.traces.clear()
        self._example = args
        self._compiled_for = (shapes_of(args), self._state_shapes())
        self._place_states()
        self._kept.shapes = StateShapes(self)
        self.traces = {}
        self._start = {}
        for path, state in module_states(self.model).items():
            if not self._interface.carries_on(path, state):
                self._start[path] = StartValue(state.value)
        if self.rule.predictor is not None:
            self.rule_state = self._new_rule_state()
        with self._on_devices():
            self._fit_rule_to_readouts()
            self._make_traces()

    def _fit_rule_to_readouts(self) -> None:
        """Fit the rule to the read-outs of the model.

        Parameters that the model's step does not read may be a read-out in a step_fn.
        """
        program = self.graph.module_info.program
        read = {v for eqn in program.equations for v in eqn.invars if is_var(v)}
        unread = [p for p in program.parameters if p.invar not in read]
        if not unread and not program.untouched_parameters:
            step = self._model_binding(self._example).step(False)
            self.rule = self.rule.fitted_to(step)

    def _held(self) -> tuple[brainstate.State, ...]:
        """The states that a compiled loop of brainstate refers to."""
        own: list[brainstate.State] = [self.running_index]
        own += [] if self.rule_state is None else [self.rule_state]
        return (*known_states(self.model).values(), *self.traces.values(), *own)

    def _count(self, calls: int) -> None:
        """Count calls since the last reset."""
        self.running_index.value = self.running_index.value + calls

    def optimizer_states(self, optimizer: Any) -> dict[str, brainstate.State]:
        """The states of an optimiser as this learner uses it, by name."""
        update_by(check_optimizer(optimizer), self.param_states, self._kept.optimizers)
        if optimizer in self._kept.optimizers:
            return {'state': self._kept.optimizers[optimizer]}
        own = {id(state) for state in self.param_states.values()}
        states = brainstate.graph.states(optimizer).items()
        return {path_name(p): s for p, s in states if id(s) not in own}

    # ------------------------------------------------------------ traces

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
            shardings = jax.tree.map(split, solver.trace_shapes)
            init = jax.jit(init, out_shardings=shardings)
        for key, zeros in zip(trace_keys(solver), init(), strict=True):
            if key in self._kept.traces:
                self._kept.traces[key].keep(zeros)
            else:
                self._kept.traces[key] = EligibilityTrace(zeros)

    def _check_size(self, solver: BlockSolver | InfluenceSolver) -> None:
        needed = sum(map(bytes_of, solver.trace_shapes))
        if needed > self.max_trace_bytes:
            limit = size_text(self.max_trace_bytes)
            raise NotSupportedError(
                three_parts(
                    f'{self.rule.name} traces of {size_text(needed)}',
                    f'that is more than max_trace_bytes={limit}; nothing was allocated',
                    'etrace_grad(..., fresh=True), which needs no trace; rule '
                    "'pp_prop', whose "
                    'traces are linear in neurons; trace_dtype=jnp.bfloat16; a '
                    'smaller batch; or '
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
        with self._followed():
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
        _ = self.graph  # refuses a learner that was not compiled
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
            raise UnknownParameter(
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
        with self._followed():
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
