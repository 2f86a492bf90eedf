"""The programs that a learner makes of its steps, each of them once.

The functions below the cache take a learner: they bind the model's own step or a step
function, and give what solves it and the compiled programs.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import jax.numpy as jnp

from ..compiled_step import Tap
from ..errors import RecompilationWarning, three_parts
from ..frontends.brainstate import trace_step
from ..frontends.module_states import known_states
from ..program import Path
from ..rules import Rule
from ..solver import Solved
from ..source_lines import short_source
from .batch import BatchError, inputs_explained
from .binding import StepBinding
from .credit_warnings import without_gradient
from .model_states import Shapes, check_shapes
from .sequences import SequenceOptions, Solver, gradient_program

if TYPE_CHECKING:
    from .learner import Learner

TraceChoice = str | Callable[[Path], bool]
"""Which parameters are traced: 'auto', 'marked', 'credited', or a predicate on their
paths."""
_MOST_PROGRAMS = 32
"""More are dropped, the oldest first: a new step_fn for every call must not fill
memory."""
_MOST_COPIES = 4
"""From this many function objects of one code on, a step_fn was not defined once."""


def array_shapes(tree: Any) -> tuple:
    """Shapes and types of the arrays in a tree."""
    return tuple(map(shape_of, jax.tree.leaves(tree)))


def shape_of(x: Any) -> tuple:
    """Shape and type of an array; for one of JAX without its slower functions."""
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return x.shape, x.dtype
    return jnp.shape(x), jnp.result_type(x)


def shapes_of(tree: Any) -> tuple:
    """Structure of a tree, shapes and types of its arrays: what a program is
    specialised for."""
    return jax.tree.structure(tree), array_shapes(tree)


def in_trace() -> bool:
    """Whether new arrays are tracers, as inside jit."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


class ProgramCache:
    """Programs by what they depend on."""

    def __init__(self) -> None:
        self._programs: dict[tuple, Any] = {}

    def get(
        self,
        key: tuple,
        make: Callable[[], Any],
        is_reusable: bool | Callable[[Any], bool] | None = None,
    ) -> Any:
        """The program of a key, made if there is none.

        A program that is made inside a trace, as inside jit, may close over tracers,
        which are of no use afterwards; it is not stored. ``is_reusable``: whether it
        can be stored, where that is known.
        """
        if key in self._programs:
            return self._programs[key]
        program = make()
        if callable(is_reusable):
            is_reusable = is_reusable(program)
        if is_reusable is None:
            is_reusable = not in_trace()
        if is_reusable:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            self._programs[key] = program
        return program

    def values(self) -> list[Any]:
        """All programs that are kept."""
        return list(self._programs.values())

    def clear(self) -> None:
        """Remove all programs."""
        self._programs.clear()

    def __len__(self) -> int:
        return len(self._programs)


@dataclass
class Kept:
    """What a learner stores between calls beside its states. It is one object, so that
    brainstate does not find states in it.

    ``optimizers``: states of optax transformations. ``shapes``: shapes of the hidden
    states when the learner was compiled. ``has_batch_size``: whether `compile` was
    given a batch size. ``said``: texts of warnings so far. ``codes``: how many step
    functions with the same code were traced.
    """

    programs: ProgramCache = field(default_factory=ProgramCache)
    optimizers: dict[Any, brainstate.State] = field(default_factory=dict)
    shapes: Shapes = field(default_factory=dict)
    has_batch_size: bool = False
    said: set[str] = field(default_factory=set)
    codes: Counter[tuple] = field(default_factory=Counter)


# ---------------------------------------------------------------- of a learner


def state_shapes_of(learner: Learner) -> tuple:
    """The shapes of all states that a program of the learner is made for."""
    kinds = (brainstate.ParamState, brainstate.HiddenState)
    states = list(known_states(learner.model, *kinds).values())
    states += [] if learner.rule_state is None else [learner.rule_state]
    return shapes_of([state.value for state in states])


def bind_model(learner: Learner, example: tuple) -> StepBinding:
    """The step of the model alone, for inputs like the example."""
    check_shapes(learner)

    def make() -> StepBinding:
        if learner._compiled_for == (shapes_of(example), state_shapes_of(learner)):
            info, analysed = learner.graph.module_info, learner.executor.analysed
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
    parts = (shapes_of(example), learner.rule_state, state_shapes_of(learner))

    def make() -> StepBinding:
        try:
            found = StepBinding.of_step_fn(learner, step_fn, example, takes_modulators)
        except BatchError as error:
            raise error.of_sequences(sequences) from error
        if found.is_reusable:
            _warn_of_copies(learner, step_fn, parts)
        return found

    key = ('binding', step_fn, *parts)
    binding = learner._kept.programs.get(
        key, make, is_reusable=lambda found: found.is_reusable
    )
    if binding.modulator_given and not takes_modulators:
        learner.check_modulated(1.0)
    return binding


def _slice_of(sequence: Any) -> jax.ShapeDtypeStruct:
    shape, dtype = shape_of(sequence)
    return jax.ShapeDtypeStruct(shape[1:], dtype)


def _warn_of_copies(learner: Learner, step_fn: Callable, parts: tuple) -> None:
    """Warn once of a step_fn that is defined anew for every call."""
    code = getattr(inspect.unwrap(step_fn), '__code__', None)
    if code is None:
        return
    codes = learner._kept.codes
    codes[code, parts] += 1
    if codes[code, parts] != _MOST_COPIES:
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


def solver_of(
    learner: Learner,
    binding: StepBinding,
    rule: Rule,
    loss: bool,
    in_chunk: bool = False,
    discarded: bool = False,
) -> Solver:
    """What solves sequences of a step, with the options of the learner.

    ``discarded``: the traces end with the sequence. Then those of parameters that the
    loss never depends on are left out: no other loss will read them.
    """
    trace = (
        partial(_is_credited, learner) if learner.trace == 'credited' else learner.trace
    )
    # A modulator takes the place of the loss.
    skips = discarded and loss and rule.has_trace and not rule.is_modulated
    idle = binding.without_effect_on_loss if skips else frozenset()

    def is_traced(tap: Tap) -> bool:
        if tap.parameters and idle.issuperset(p.invar for p in tap.parameters):
            return False
        if isinstance(trace, str):
            return trace == 'auto' or tap.marked
        return any(trace(p.path) for p in tap.parameters)

    def make() -> Solver:
        every = rule.has_exact_windows or in_chunk
        given = (binding.step(loss), is_traced, learner.trace_dtype, every)
        # A rule without a filter is the same in both cases.
        has_readouts = (
            rule.filter is None or bind_model(learner, learner._example).has_readouts
        )
        return rule.solver(*given, has_readouts)

    key = ('solver', binding, rule, loss, in_chunk, bool(idle))
    return learner._kept.programs.get(key, make, binding.is_reusable)


def _is_credited(learner: Learner, path: Path) -> bool:
    """Whether the rule gives a parameter a gradient by the model's own outputs."""

    def make() -> frozenset[Path]:
        binding = bind_model(learner, learner._example)
        without = without_gradient(learner.rule, learner.graph, binding)
        arrays = binding.info.program.parameters
        credited = {p.path for p in arrays if p.name not in without}
        return frozenset(p.path for p in arrays) - credited

    return path not in learner._kept.programs.get(('credited',), make, True)


def options_of(learner: Learner) -> SequenceOptions:
    """How the learner runs sequences."""
    return SequenceOptions(
        learner.block, learner.passes, learner.max_trace_bytes, learner.placement
    )


def program_of(
    learner: Learner,
    kind: str,
    parts: tuple,
    make: Callable[[], Any],
    is_reusable: bool | None = None,
) -> Any:
    """A program of some kind, made once for these parts and the shapes of all
    states."""
    key = (kind, *parts, state_shapes_of(learner))
    return learner._kept.programs.get(key, make, is_reusable)


def gradient_program_of(
    learner: Learner, binding: StepBinding, rule: Rule, fresh: bool
) -> tuple[Solver, Callable[..., Solved]]:
    """The solver of a step by a rule, and its compiled gradient of a sequence."""
    solver = solver_of(learner, binding, rule, loss=True, discarded=fresh)
    options = options_of(learner)

    def make() -> Callable[..., Solved]:
        run = gradient_program(solver, rule, fresh, options)
        return jax.jit(run, donate_argnums=2, static_argnames='masked')

    parts = (solver, fresh)
    return solver, program_of(learner, 'gradient', parts, make, binding.is_reusable)


def loop_of(
    learner: Learner,
    kind: str,
    parts: tuple,
    run: Callable,
    step_fn: Callable | None = None,
) -> Callable:
    """A compiled loop of brainstate; ``step_fn``: what it calls."""

    def make() -> Callable:
        if step_fn is not None and not in_trace():
            _warn_of_copies(learner, step_fn, (kind, state_shapes_of(learner)))
        return brainstate.transform.jit(run)

    return program_of(learner, kind, parts, make)
