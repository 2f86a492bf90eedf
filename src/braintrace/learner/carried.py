"""What a learner carries from call to call: its traces, by name, and what its rule
keeps for itself."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp

from ..arrays import bytes_of
from ..errors import CompilationError, NotSupportedError, three_parts
from ..frontends.module_states import known_states
from ..program import Path
from ..solver import Solved, Solver
from ..text import size_text
from .arguments import check_modulator
from .binding import bind_model
from .optimizers import made_beside
from .placement import Placement, trace_axes
from .programs import array_shapes
from .sequences import solver_of

if TYPE_CHECKING:
    from .learner import Learner


_VALUE: Any = brainstate.ShortTermState.value


class EligibilityTrace(brainstate.ShortTermState):
    """The state that holds one trace.

    Its arrays are donated to the next call, which writes the new values into the same
    memory. If other code has read the arrays, a copy is donated.
    """

    was_read = False
    """Whether anything else may hold its arrays."""

    @property
    def value(self) -> Any:
        """The trace."""
        self.was_read = True
        return self.peek()

    @value.setter
    def value(self, value: Any) -> None:
        self.was_read = True
        _VALUE.fset(self, value)

    def keep(self, value: Any) -> None:
        """Hold a value that nothing else refers to."""
        self.value = value
        self.was_read = False

    def peek(self, tracked: bool = True) -> Any:
        """The trace, without counting as a reader of its arrays; unless ``tracked``, a
        transformation around does not count it as read either."""
        return _VALUE.fget(self) if tracked else self._read_value()

    def take_for_donation(self) -> Any:
        """The trace in arrays that are safe to donate."""
        return jax.tree.map(jnp.copy, self.peek()) if self.was_read else self.peek()


class TraceTable(NamedTuple):
    """What the traces of a step are, by name.

    A name has parameters, operation and hidden states, and the number of traces before
    it for which these are the same. ``shapes``: shapes and types of the arrays of each
    trace. ``owners``: the trace that holds its state part. ``size``: bytes of all.
    """

    keys: list[tuple]
    shapes: dict[tuple, tuple]
    owners: dict[tuple, tuple]
    size: int


_tables: weakref.WeakKeyDictionary[Any, TraceTable] = weakref.WeakKeyDictionary()


def trace_table(solver: Solver) -> TraceTable:
    """The traces of a solver, found once."""
    if solver not in _tables:
        keys: list[tuple] = []
        for key in solver.trace_names:
            keys.append((*key, sum(k[:3] == key for k in keys)))
        traces = solver.trace_shapes
        shapes = dict(zip(keys, map(array_shapes, traces), strict=True))
        owners = {key: keys[n] for key, n in zip(keys, solver.owner, strict=True)}
        _tables[solver] = TraceTable(keys, shapes, owners, bytes_of(traces))
    return _tables[solver]


def check_trace_bytes(needed: int, most: int, rule: str) -> None:
    """Raise if the traces of a step need more memory than the learner may use."""
    if needed > most:
        raise NotSupportedError(
            three_parts(
                f'{rule} traces of {size_text(needed)}',
                f'that is more than max_trace_bytes={size_text(most)}; nothing was '
                'allocated',
                'etrace_grad(..., fresh=True), which needs no trace; rule '
                "'pp_prop', whose traces are linear in neurons; "
                'trace_dtype=jnp.bfloat16; a smaller batch; or a larger '
                'max_trace_bytes',
            )
        )


class CarriedTraces:
    """The traces of a learner by name.

    ``current``: those of the step that ran last. The learner has this dictionary among
    its states, so it is changed in place.
    """

    def __init__(self, current: dict[tuple, EligibilityTrace]):
        self.current = current
        # Every trace made so far: a function that was jitted earlier holds the traces
        # of that time.
        self._made = dict(current)
        # For every trace the one that holds its state part.
        self._owners: dict[tuple, tuple] = {}
        # The axes of samples.
        self._axes: dict[tuple, Any] = {}
        # The arrays of traces that are known to be zero.
        self._zeros: dict[tuple, Any] = {}

    def copied(self, current: dict[tuple, EligibilityTrace]) -> CarriedTraces:
        """The same for a copy of the learner, whose traces are ``current``."""
        found = CarriedTraces(current)
        found._owners, found._axes = self._owners, self._axes
        return found

    # ------------------------------------------------------------ making traces

    def fit(self, solver: Solver) -> bool:
        """Whether there are traces of a step, in its shapes."""
        # Traces of other names are not read here: inside jit they would be its inputs,
        # and no longer known to be zero.
        wanted = trace_table(solver).shapes
        if wanted.keys() != self.current.keys():
            return False
        return all(array_shapes(t.peek()) == wanted[k] for k, t in self.current.items())

    def check_zero(self) -> None:
        """Raise if a trace that another step is to replace has a value."""
        if any(map(_may_differ_from_zero, self.current.values())):
            raise CompilationError(
                three_parts(
                    'a step_fn whose traces differ from those carried so far',
                    'traces of one step program cannot be continued by another',
                    'learner.reset_state() before the new step_fn, or fresh=True',
                )
            )

    def make(
        self,
        solver: Solver,
        beside: Mapping[Path, brainstate.State],
        placement: Placement | None,
    ) -> None:
        """Zero traces of a step, in states that live as long as those ``beside``."""
        table, init = trace_table(solver), solver.init_traces
        axes = trace_axes(solver)
        if axes is not None:
            self._axes.update(zip(table.keys, axes, strict=True))
        if placement is not None:
            shardings = placement.shardings(solver.trace_shapes, axes)
            init = jax.jit(init, out_shardings=shardings)

        def make() -> None:
            for key, zeros in zip(table.keys, init(), strict=True):
                if key in self._made:
                    self._made[key].keep(zeros)
                else:
                    self._made[key] = EligibilityTrace(zeros)

        made_beside(beside, make)
        self.current.clear()
        self.current.update((key, self._made[key]) for key in table.keys)
        self._owners = table.owners
        self._mark_cleared()

    def forget(self) -> None:
        """Drop all traces. Functions that were jitted before keep the dropped ones."""
        self.current.clear()
        self._made.clear()

    def place(self, placement: Placement) -> None:
        """Put all traces on their devices."""
        for key, trace in self._made.items():
            trace.keep(placement.put(trace.peek(), self._axes.get(key)))
        self._mark_cleared()

    # ------------------------------------------------------------ values

    def read(self, solver: Solver, donate: bool) -> list[Any]:
        """The traces of a step; ``donate``: safe to be written to."""
        found = [self.current[key] for key in trace_table(solver).keys]
        return [trace.take_for_donation() if donate else trace.value for trace in found]

    def write(self, solver: Solver, values: list[Any]) -> None:
        """Put the traces after a call in place."""
        for key, value in zip(trace_table(solver).keys, values, strict=True):
            self.current[key].keep(value)

    def clear(self) -> None:
        """Set all traces to zero."""
        for key, trace in self._made.items():
            if trace.peek() is not self._zeros.get(key):
                trace.keep(jax.tree.map(jnp.zeros_like, trace.peek()))
        self._mark_cleared()

    def _mark_cleared(self) -> None:
        """Traces that are cleared need not be cleared again."""
        self._zeros = {}
        for key, trace in self._made.items():
            value = trace.peek()
            if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)):
                self._zeros[key] = value

    @contextlib.contextmanager
    def unmoved(self) -> Iterator[None]:
        """Afterwards ``current`` holds the same traces as before. Their values are
        restored by the caller."""
        before, owners, zeros = dict(self.current), self._owners, self._zeros
        _mark_read(before)
        try:
            yield
        finally:
            self.current.clear()
            self.current.update(before)
            self._owners, self._zeros = owners, zeros
            _mark_read(before)

    def of_parameter(self, path: Path) -> dict[tuple, Any]:
        """The values of all traces of one parameter, by their names."""
        start = '.'.join(map(str, path))
        mine = lambda names: any(n == start or n.startswith(start + '.') for n in names)
        found = {key: t.value for key, t in self.current.items() if mine(key[0])}
        for key, owner in self._owners.items():
            if key in found and owner != key:
                found[key] = found[key]._replace(f=self.current[owner].value.f)
        return found


# ---------------------------------------------------------------- of a learner


def make_traces(learner: Learner) -> None:
    """Zero traces for the model's step as it is now, before any program needs them."""
    # Traces that are too large are refused again, with the reason, when one is needed.
    with contextlib.suppress(NotSupportedError):
        binding = bind_model(learner, learner._example)
        prepare_traces(learner, solver_of(learner, binding, learner.rule, loss=False))


def prepare_traces(learner: Learner, solver: Solver) -> None:
    """Zero traces of a step, unless there are traces like them already: before a
    program that reads them is traced."""
    rule, carried = learner.rule, learner._carried
    if rule.has_trace and not carried.fit(solver):
        carried.check_zero()
        check_trace_bytes(trace_table(solver).size, learner.max_trace_bytes, rule.name)
        beside = known_states(learner.model, brainstate.HiddenState)
        carried.make(solver, beside, learner.placement)


def read_traces(learner: Learner, solver: Solver, donate: bool = False) -> list[Any]:
    """The traces of a step, made if there are none yet; ``donate``: safe to be written
    to."""
    prepare_traces(learner, solver)
    return learner._carried.read(solver, donate) if learner.rule.has_trace else []


def write_traces(learner: Learner, solver: Solver, values: list[Any]) -> None:
    """Put the traces after a call in place."""
    if learner.rule.has_trace:
        learner._carried.write(solver, values)


def _may_differ_from_zero(trace: EligibilityTrace) -> bool:
    """False for a trace that is known to be zero; inside a trace its value may be
    unknown."""
    leaves = jax.tree.leaves(trace.peek(tracked=False))
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return True
    with jax.ensure_compile_time_eval():
        return any(bool(jnp.any(x != 0)) for x in leaves)


def _mark_read(traces: dict[tuple, EligibilityTrace]) -> None:
    """The next call must not take the arrays of these traces for donation: the caller
    still refers to them."""
    for trace in traces.values():
        trace.was_read = True


# ---------------------------------------------------------------- the rule's own state


class RuleState(brainstate.State):
    """What a rule keeps for itself: a modulator, a count of gradients, a predictor's
    weights."""

    value: Any


def groups_of(learner: Learner) -> list[tuple[int, tuple[int, ...], Any]] | None:
    """States per position, shape and type of every group; None before compiling."""
    if not learner._example:
        return None
    dtype = lambda group: jnp.finfo(group.hidden_invars[0].aval.dtype).dtype
    _, analysed = learner.executor.step
    return [(g.num_state, g.varshape, dtype(g)) for g in analysed.groups]


def new_rule_state(learner: Learner) -> RuleState | None:
    """The rule's own state as it is at first; a predictor's once the model is
    compiled."""
    value = learner.rule.init_state(groups_of(learner))
    return None if value is None else RuleState(value)


def rule_value(learner: Learner) -> Any:
    """The value of the rule's own state; None for a rule without one."""
    return None if learner.rule_state is None else learner.rule_state.value


def next_rule_state(learner: Learner, solved: Solved | None) -> Any:
    """The value after a gradient; ``solved``: what a sequence gave, if it was one."""
    if learner.rule_state is None:
        return None
    return learner.rule.next_state(learner.rule_state.value, solved)


def write_rule_state(learner: Learner, value: Any) -> None:
    """Put the value after a call in place."""
    if learner.rule_state is not None and value is not learner.rule_state.value:
        learner.rule_state.value = value


def set_modulator(learner: Learner, value: Any) -> None:
    """Set the standing modulator of a rule that has one."""
    check_modulated(learner, value)
    if learner.rule_state is not None:
        learner.rule_state.value = jnp.asarray(value, jnp.result_type(float))


def set_predictor(learner: Learner, predictor: Any) -> None:
    """Use another predictor of credit at the ends of windows, with weights of its own,
    for a rule that has one."""
    window = learner.rule.window
    if window is None or learner.rule.predictor is None:
        raise ValueError(
            three_parts(
                f'a predictor for {learner.rule.name}',
                'it has no predictor',
                "rule 'dni'",
            )
        )
    learner.rule = replace(learner.rule, trace=replace(window, predictor=predictor))
    learner.rule_state = new_rule_state(learner)


def check_modulated(learner: Learner, value: Any) -> None:
    """Raise unless the rule takes modulators, and this is one."""
    if not learner.rule.is_modulated:
        why = 'its traces are multiplied by the derivative of the loss'
        raise ValueError(
            three_parts(
                f'a modulator for {learner.rule.name}', why, "rule 'three_factor'"
            )
        )
    check_modulator(value)
