"""A traced step bound to its model: which variable of the step is which state.

Inside a ``step_fn`` the learner stands for its model: the call runs the model, and the
solver differentiates the traced program as a whole. Which of these holds is a property
of the call, so it is kept in a context variable and not on the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import jax.numpy as jnp

from ..analysis.analysed import Analysed, analyse
from ..compat import Var, can_fail, is_differentiable, is_var
from ..compiled_step import CompiledStep, Values
from ..errors import CompilationError, InputError, three_parts
from ..frontends.brainstate import TracedStep, trace_step
from ..frontends.module_states import known_states, module_states
from ..lowering import Stages, lower
from ..program import Path
from ..program.step import path_name
from ..solver import Solved
from .batch import BatchError, inputs_explained
from .losses import never_called
from .model_states import check_shapes
from .programs import program_of, shape_of, shapes_of, state_shapes_of, warn_of_copies

if TYPE_CHECKING:
    from .carried import RuleState
    from .learner import Learner


@dataclass
class Recording:
    """One function that is being traced, and what it did with the learner.

    ``runs_model``: calls run the model alone; otherwise they learn, inside exact
    windows. ``ignores_modulators``: as where nothing is learned. ``takes_modulators``:
    even if the learner's rule has none, for a comparison with one that has. ``calls``:
    how often the learner was called. ``modulator``: the one that a call was given.
    ``outputs``: what the last call gave, if it ``keeps_outputs``. They must not outlive
    their trace.
    """

    learner: Any
    runs_model: bool = True
    ignores_modulators: bool = False
    takes_modulators: bool = False
    keeps_outputs: bool = False
    calls: int = 0
    modulator: Any = None
    outputs: Any = None

    def note_modulator(self, modulator: Any) -> None:
        """Keep the modulator that a call was given, which is the only one."""
        if modulator is None or self.ignores_modulators:
            return
        if not self.takes_modulators:
            self.learner.check_modulated(modulator)
        if self.modulator is not None:
            raise CompilationError(
                three_parts(
                    'two calls with a modulator in one step_fn',
                    'a step has one, which multiplies all traces of it',
                    'one call with modulator=... in a step_fn',
                )
            )
        self.modulator = jnp.asarray(modulator, jnp.result_type(float))


_recordings: ContextVar[tuple[Recording, ...]] = ContextVar('recordings', default=())


@contextmanager
def recording(learner: Any, **how: bool) -> Iterator[Recording]:
    """Record the calls of a learner; ``how``: flags of a :class:`Recording`."""
    found = Recording(learner, **how)
    token = _recordings.set((*_recordings.get(), found))
    try:
        yield found
    finally:
        _recordings.reset(token)


def recording_of(learner: Any) -> Recording | None:
    """The innermost recording of a learner's calls."""
    return next((r for r in reversed(_recordings.get()) if r.learner is learner), None)


# ---------------------------------------------------------------- a traced step


class StepBinding:
    """One traced step. It is traced and analysed once, and used by all calls.

    ``rule_state``: the state of the learner's own that the step may read or write.
    ``modulator_given``: the last output is a modulator that a call was given.
    ``is_reusable``: False if the step closes over values of a trace around it, and ends
    with that trace.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        info: TracedStep,
        analysed: Analysed | None = None,
        rule_state: RuleState | None = None,
        modulator_given: bool = False,
    ):
        self.model = model
        self.info = info
        self.rule_state = rule_state
        self.analysed = analyse(info.program) if analysed is None else analysed
        paths = [info.paths[id(s)] for s in info.states]
        # The path of every state, the state, and its variables.
        self._states: list[tuple[Path, brainstate.State, Any]] = list(
            zip(paths, info.states, info.invars, strict=True)
        )
        self.paths: dict[Var, Path] = {
            v: path for path, _, tree in self._states for v in jax.tree.leaves(tree)
        }
        self._outputs: list[Any] = list(info.program.outputs)
        self.modulator: Var | None = self._written_modulator()
        if modulator_given:
            *self._outputs, self.modulator = info.program.outputs
        self.modulator_given = modulator_given
        consts = info.program.closed.consts
        self.is_reusable = not any(isinstance(x, jax.core.Tracer) for x in consts)
        self._steps: dict[bool, tuple[Stages, CompiledStep]] = {}

    @classmethod
    def of_step_fn(
        cls,
        learner: Any,
        step_fn: Callable[..., Any],
        example: tuple,
        takes_modulators: bool = False,
    ) -> StepBinding:
        """A step function traced with the model of a learner."""

        def run(*args: Any) -> Any:
            result = step_fn(*args)
            record.outputs = None
            return result if record.modulator is None else (result, record.modulator)

        how = {'takes_modulators': takes_modulators, 'keeps_outputs': True}
        with recording(learner, **how) as record:
            info = trace_step(run, learner.model, example, {}, 'a step_fn')
        if not record.calls:
            raise never_called()
        given = record.modulator is not None
        return cls(learner.model, info, None, learner.rule_state, given)

    def _written_modulator(self) -> Var | None:
        """The new value of the learner's own state, where the step writes that
        itself."""
        own = [tree for _, state, tree in self._states if state is self.rule_state]
        new = {o.invar: o.outvar for o in self.info.program.others}
        found = [new[v] for v in jax.tree.leaves(own) if new.get(v) is not None]
        return found[0] if len(found) == 1 else None

    # ------------------------------------------------------------ the step

    @property
    def out_tree(self) -> Any:
        """The structure of what the step function returns."""
        tree = self.info.out_tree
        if not self.modulator_given:
            return tree
        return jax.tree.structure(jax.tree.unflatten(tree, range(tree.num_leaves))[0])

    def step(self, loss: bool) -> CompiledStep:
        """The compiled step.

        With ``loss`` the first output is the loss to differentiate; otherwise all
        outputs and new states are differentiated.
        """
        if loss not in self._steps:
            self._steps[loss] = self._lowered(loss)
        return self._steps[loss][1]

    @cached_property
    def leaves_parameters_unread(self) -> bool:
        """Whether parameters are left that a step function may use as a read-out."""
        program = self.info.program
        read = {v for eqn in program.equations for v in eqn.invars if is_var(v)}
        unread = any(p.invar not in read for p in program.parameters)
        return unread or bool(program.untouched_parameters)

    @cached_property
    def can_fail(self) -> bool:
        """Whether the step runs code that may raise an error, as a callback."""
        return can_fail(self.info.program.closed)

    @property
    def has_readouts(self) -> bool:
        """Whether the model has a leaky read-out, or a step function may add one."""
        self.step(False)
        return self.leaves_parameters_unread or bool(
            self._steps[False][0].readouts.links
        )

    @cached_property
    def without_effect_on_loss(self) -> frozenset[Var]:
        """Parameters on which the loss never depends, in its own step or later."""
        program, dependence = self.info.program, self.analysed.dependence
        behind = dependence.ever_behind(program.outputs[:1])
        parameters = (p.invar for p in program.parameters)
        return frozenset(v for v in parameters if not behind & dependence.bit[v])

    def stages_of(self, step: CompiledStep) -> Stages:
        """The sorted equations behind one of its compiled steps."""
        return self._steps[step.is_loss][0]

    def _lowered(self, loss: bool) -> tuple[Stages, CompiledStep]:
        program = self.info.program
        targets, aux = self._outputs[:1], self._outputs[1:]
        if loss:
            check_loss(self._outputs)
        else:
            new = [h.outvar for h in program.hidden]
            new += [o.outvar for o in program.others if o.outvar is not None]
            every = (
                v for v in (*self._outputs, *new) if is_var(v) and is_differentiable(v)
            )
            targets, aux = list(dict.fromkeys(every)), self._outputs
        aux = list(dict.fromkeys(v for v in aux if is_var(v)))
        stages = Stages(self.analysed, targets, aux, self.modulator)
        return stages, lower(stages, loss)

    # ------------------------------------------------------------ states

    def _objects(self) -> list[tuple[Any, brainstate.State]]:
        """Variables of every state, with the state object that the model has now at its
        path."""
        current = known_states(self.model)
        found = []
        for path, state, tree in self._states:
            if path in self.info.model_states:
                if path not in current:
                    raise _state_gone(path)
                state = current[path]
            found.append((tree, state))
        return found

    def read(self) -> tuple[Values, Values]:
        """Current parameters and other states, by variable."""
        values = Values()
        for tree, state in self._objects():
            leaves = jax.tree.leaves(state.value)
            for v, x in zip(jax.tree.leaves(tree), leaves, strict=True):
                if jnp.shape(x) != v.aval.shape:
                    if state is not self.rule_state:
                        raise _state_reshaped(self.paths[v], v.aval.shape, jnp.shape(x))
                    # The step writes a modulator of another shape before it reads any.
                    x = jnp.zeros(v.aval.shape, v.aval.dtype)
                values[v] = x
        parameters = [p.invar for p in self.info.program.parameters]
        rest = [v for v in values if v not in set(parameters)]
        return values.pick(parameters), values.pick(rest)

    def write(self, states: Values) -> None:
        """Put new values into the model's states."""
        written = {h.invar for h in self.info.program.hidden}
        written |= {o.invar for o in self.info.program.others if o.outvar is not None}
        for tree, state in self._objects():
            variables, structure = jax.tree.flatten(tree)
            if state is not self.rule_state and any(v in written for v in variables):
                state.value = jax.tree.unflatten(
                    structure, [states[v] for v in variables]
                )

    def with_values(self, states: Values, by_path: Mapping[Path, Any]) -> Values:
        """States with other values at some paths."""
        given: dict[Var, Any] = {}
        for path, _, tree in self._states:
            if path in by_path:
                leaves = jax.tree.leaves(by_path[path])
                given.update(zip(jax.tree.leaves(tree), leaves, strict=True))
        return Values((v, given.get(v, x)) for v, x in states.items())

    # ------------------------------------------------------------ values

    def inputs(self, args: Sequence[Any]) -> Values:
        """Inputs by variable."""
        leaves = map(jnp.asarray, jax.tree.leaves(tuple(args)))
        return Values(zip(self.info.program.inputs, leaves, strict=True))

    def outputs(self, values: Values) -> Any:
        """What the step function returns, from values by variable."""
        leaves = [values[v] if is_var(v) else v.val for v in self._outputs]
        return jax.tree.unflatten(self.out_tree, leaves)

    def stacked(self, values: Values, length: int) -> Any:
        """Outputs of several steps from values by variable, time first; constants
        repeated."""

        def repeated(v: Any) -> jax.Array:
            value = jnp.asarray(v.val, v.aval.dtype)
            return jnp.broadcast_to(value, (length, *v.aval.shape))

        leaves = [values[v] if is_var(v) else repeated(v) for v in self._outputs]
        return jax.tree.unflatten(self.out_tree, leaves)

    def aux(self, solved: Solved, length: int) -> Any:
        """The auxiliary values of every step, of a step function that returns (loss,
        aux)."""
        loss = Values({self.step(True).targets[0]: solved.losses})
        return self.stacked(loss | solved.aux, length)[1]

    def gradients_by_path(self, gradients: Values) -> dict[Path, Any]:
        """Gradients in the structure of the parameters' values; zero for those never
        read."""
        read = {path: tree for path, _, tree in self._states}
        found = {}
        for path, state in module_states(self.model, brainstate.ParamState).items():
            if path in read:
                found[path] = jax.tree.map(gradients.get, read[path])
            else:
                found[path] = jax.tree.map(jnp.zeros_like, state.value)
        return found

    def gradients_by_name(self, gradients: Values) -> dict[str, jax.Array]:
        """Gradients of single arrays by the names that reports use."""
        return {p.name: gradients[p.invar] for p in self.info.program.parameters}


# ---------------------------------------------------------------- of a learner


def bind_model(learner: Learner, example: tuple) -> StepBinding:
    """The step of the model alone, for inputs like the example."""
    check_shapes(learner)

    def make() -> StepBinding:
        shapes = (shapes_of(example), state_shapes_of(learner))
        if learner._compiled_for == shapes and not learner._kept.settings.changed():
            info, analysed = learner.executor.step
        else:
            with inputs_explained(example, learner._example, time=False):
                info = trace_step(learner._run_model, learner.model, example, {})
            analysed = None
        return StepBinding(learner.model, info, analysed, learner.rule_state)

    return program_of(learner, 'model', (shapes_of(example),), make)


def bind_step_fn(
    learner: Learner,
    step_fn: Callable,
    sequences: tuple,
    takes_modulators: bool = False,
) -> StepBinding:
    """A step function traced with the model on slices of sequences."""
    learner.check_compiled()
    check_shapes(learner)
    example = jax.tree.map(_slice_of, sequences)
    parts = (shapes_of(example), learner.rule_state)

    def make() -> StepBinding:
        try:
            found = StepBinding.of_step_fn(learner, step_fn, example, takes_modulators)
        except BatchError as error:
            raise error.of_sequences(sequences) from error
        if found.is_reusable:
            warn_of_copies(learner, step_fn, (*parts, state_shapes_of(learner)))
        return found

    is_reusable = lambda found: found.is_reusable
    binding = program_of(learner, 'binding', (step_fn, *parts), make, is_reusable)
    if binding.modulator_given and not takes_modulators:
        learner.check_modulated(1.0)
    return binding


def _slice_of(sequence: Any) -> jax.ShapeDtypeStruct:
    shape, dtype = shape_of(sequence)
    return jax.ShapeDtypeStruct(shape[1:], dtype)


# ---------------------------------------------------------------- what is refused


def check_loss(outputs: Sequence[Any]) -> None:
    """Raise unless the first output is a real number."""
    is_scalar = bool(outputs) and outputs[0].aval.shape == ()
    if is_scalar and jnp.issubdtype(outputs[0].aval.dtype, jnp.floating):
        return
    got = outputs[0].aval.str_short() if outputs else 'nothing'
    raise InputError(
        three_parts(
            f'a step_fn whose loss is {got}',
            'gradients are taken of one real number for each step',
            'return a scalar, e.g. jnp.mean(...), or (scalar, aux) with has_aux=True',
        )
    )


def _described(outputs: Any) -> str:
    """What a step_fn returns, in words."""
    if isinstance(outputs, (tuple, list)):
        return f'a {type(outputs).__name__} of {len(outputs)}'
    return 'one array' if isinstance(outputs, int) else f'a {type(outputs).__name__}'


def check_aux(structure: Any, has_aux: bool) -> None:
    """Raise unless a step_fn returned a loss alone, or with ``has_aux`` a pair."""
    outputs = jax.tree.unflatten(structure, range(structure.num_leaves))
    if (
        isinstance(outputs, tuple) and len(outputs) == 2
        if has_aux
        else structure.num_leaves == 1
    ):
        return
    raise InputError(
        three_parts(
            f'a step_fn that returns {_described(outputs)} with has_aux={has_aux}',
            'a step gives its loss, or with has_aux=True, which fit sets if it has '
            'metrics, a pair (loss, aux)',
            'return loss, outputs'
            if has_aux
            else 'return loss alone; or etrace_grad(..., has_aux=True), '
            'fit(..., metrics=...) for a pair (loss, outputs)',
        )
    )


def _state_gone(path: Path) -> CompilationError:
    return CompilationError(
        three_parts(
            f'a call after state {path_name(path)} disappeared from the model',
            'the compiled step reads and writes it',
            'keep the model as it was compiled, or compile it again',
        )
    )


def _state_reshaped(path: Path, compiled: tuple, got: tuple) -> CompilationError:
    return CompilationError(
        three_parts(
            f'a call with state {path_name(path)} of shape {tuple(got)}',
            f'the step was compiled for shape {tuple(compiled)}',
            'learner.reset_state(batch_size=...) to change the batch, or compile again',
        )
    )
