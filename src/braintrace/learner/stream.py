"""Streams: learning from data that arrive one step at a time.

Everything that a step reads and writes goes through one compiled call, which writes the
new values into the memory of the old ones: weights, states, traces, the optimiser's
state, and the eligibility of delayed rewards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ArgumentError, three_parts
from ..frontends.module_states import StatePlaces, state_places
from ..program import Path
from .access import place_inputs, synchronised
from .arguments import check_arrays, check_call, check_optimizer, is_count, length_of
from .batch import AxesError
from .binding import bind_model, bind_step_fn, recording_of
from .carried import prepare_traces, read_traces, write_traces
from .models import interface_of
from .online_training import online_step_of
from .optimizers import update_by
from .programs import Programs
from .sequences import evolution_program, options_of, solver_of
from .settings import Settings, with_settings_of
from .stream_program import (
    QuickCall,
    StreamProgram,
    WrittenValues,
    shapes_of_inputs,
)
from .weights import check_paths

if TYPE_CHECKING:
    from .learner import Learner

Gradients = dict[Path, Any]
"""Gradients by the paths of their parameters."""


class StreamStep(NamedTuple):
    """The result of a step: its loss, and the outputs of the model (or of
    ``step_fn``)."""

    loss: jax.Array
    outputs: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StreamGradient:
    """An online gradient, the scalar that was differentiated, and the outputs.

    The gradient has the same structure as that of ``etrace_grad``. The object unpacks
    as ``outputs, gradient``.
    """

    outputs: Any
    gradient: Any
    value: jax.Array

    def __iter__(self) -> Iterator[Any]:
        return iter((self.outputs, self.gradient))


class Stream:
    """Learns step by step. Use :meth:`Learner.stream` to create one.

    ``stream(x, y)`` calls ``step_fn(x, y)``, updates the weights and returns a
    :class:`StreamStep`. The next call overwrites the arrays of weights, states and
    traces, so copy the arrays that you want to keep.
    """

    def __init__(
        self,
        learner: Learner,
        step_fn: Callable[..., Any],
        optimizer: Any = None,
        *,
        chunk: int | None = None,
        decay: float | None = None,
    ):
        if chunk is not None and not is_count(chunk):
            raise ValueError(
                three_parts(
                    f'stream(..., chunk={chunk!r})',
                    'it is the largest number of steps that one call brings',
                    'a whole number of at least 1, or None for single steps',
                )
            )
        try:
            is_decay = decay is None or bool(0 <= decay <= 1)
        except (TypeError, ValueError):
            is_decay = False
        if not is_decay:
            raise ValueError(
                three_parts(
                    f'stream(..., decay={decay!r})',
                    'the eligibility of earlier gradients is multiplied by it at '
                    'every step',
                    'a number from 0 to 1, as discount times λ; or None to keep none',
                )
            )
        if learner.check_finite:
            raise ValueError(
                three_parts(
                    'a stream of a learner with check_finite=True',
                    'its calls write over the old values, so a step that is not finite '
                    'could not be undone',
                    'etrace_online, or check_finite=False and a look at the loss',
                )
            )
        self.learner = learner
        self.step_fn = step_fn
        self.optimizer = None if optimizer is None else check_optimizer(optimizer)
        self.chunk = chunk
        self.decay = decay
        self._programs = Programs()
        self._quick_call: QuickCall | None = None
        self._latest_program: StreamProgram | None = None
        self._written = WrittenValues()
        self._with_outputs: dict[Callable, Callable] = {}
        self._scalars: dict[Callable, Callable] = {}
        if optimizer is not None:
            self._updating()  # creates the optimiser's state
        self._eligibility: brainstate.State | None = None
        if decay is not None:
            zero = lambda state: jax.tree.map(jnp.zeros_like, state.value)
            values = {path: zero(s) for path, s in learner.param_states.items()}
            self._eligibility = brainstate.ShortTermState(values)

    def __repr__(self) -> str:
        name = type(self.optimizer).__module__.partition('.')[0]
        update = 'no updates' if self.optimizer is None else f'updates by {name}'
        steps = 'one step' if self.chunk is None else f'up to {self.chunk} steps'
        kept = '' if self.decay is None else f', eligibility decays by {self.decay}'
        return (
            f'Stream of a {self.learner.rule.name} learner: {steps} a call, '
            f'{update}{kept}'
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            three_parts(
                'a copy or a pickle of a stream',
                'its step_fn calls the learner that the stream was made from, so the '
                'copy would train the same learner',
                'learner = copy.deepcopy(stream.learner), and '
                'learner.stream(step_fn, optimizer) with a step_fn that calls it; '
                'stream.save(folder) and load(folder) copy all that a stream moves',
            )
        )

    # ------------------------------------------------------------ steps

    def __call__(self, *inputs: Any) -> StreamStep:
        """Learn from one step. With ``chunk``, learn from several steps; inputs have
        time first."""
        found = None if self._quick_call is None else self._quick_call(inputs)
        if found is not None:
            return StreamStep(*found)
        given = inputs
        inputs = place_inputs(self.learner, inputs, 0 if self.chunk is None else 1)
        if self.chunk is None:
            found = self._run('learn', self._learning, inputs)
            assert self._latest_program is not None
            self._quick_call = QuickCall.like(self.learner, self._latest_program, given)
            return StreamStep(*found)
        length, most = length_of(inputs), self.chunk
        if not 1 <= length <= most:
            raise ValueError(
                three_parts(
                    f'a call of a stream with {length} steps and chunk={most}',
                    'its program holds up to that many',
                    f'inputs with time first, of 1 to {most} steps',
                )
            )
        padded = jax.tree.map(lambda x: _padded(x, most), inputs)
        found = self._run('chunk', self._learning, padded, np.int32(length))
        if length < most:
            found = jax.tree.map(lambda x: x[:length], found)
        return StreamStep(*found)

    def predict(self, *inputs: Any) -> Any:
        """Return the outputs of the model. States and traces advance, and weights do
        not change."""
        inputs = place_inputs(self.learner, inputs, 0)
        return self._run('predict', self._predicting, inputs)

    def gradient(
        self,
        *inputs: Any,
        step_fn: Callable[..., Any] | None = None,
        of: Callable[[Any], Any] | None = None,
    ) -> StreamGradient:
        """Compute the online gradient of the scalar that ``step_fn(*inputs)`` returns,
        for example a log-probability or a value. States and traces advance, and weights
        do not change.

        ``of``: a scalar function of the outputs of the model, instead of a step
        function. The inputs are then those of the model. With ``decay``, the gradient
        is added to the eligibility, which :meth:`apply` uses.
        """
        if of is not None and step_fn is not None:
            raise ValueError(
                three_parts(
                    'stream.gradient(..., step_fn=..., of=...)',
                    'both say which scalar is differentiated',
                    'one of them',
                )
            )
        inputs = place_inputs(self.learner, inputs, 0)
        if of is not None:
            step_fn = self._scalar_of(of)
        step_fn = self.step_fn if step_fn is None else step_fn
        make = lambda inputs: self._differentiating(step_fn, inputs)
        gradient, value, outputs = self._run(('gradient', step_fn), make, inputs)
        gradient = interface_of(self.learner.model).gradients(gradient)
        return StreamGradient(outputs, gradient, value)

    def _scalar_of(self, of: Callable[[Any], Any]) -> Callable[..., tuple]:
        """A step function that returns a scalar of the outputs, and the outputs."""
        if of not in self._scalars:

            def step(*inputs: Any) -> tuple:
                outputs = self.learner(*inputs)
                return of(outputs), outputs

            self._scalars[of] = step
        return self._scalars[of]

    def apply(self, gradient: Any = None, scale: Any = 1.0) -> None:
        """Update the weights by ``scale`` times a gradient. The scale may be a reward
        or a TD error.

        Without a gradient, the eligibility is used. The optimiser minimises, so use a
        negative scale to increase a value.
        """
        try:
            scale = jnp.asarray(scale)
            scale = scale.reshape(()) if scale.ndim else scale
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                three_parts(
                    f'stream.apply(scale={scale!r:.60})',
                    'it multiplies the whole gradient',
                    'one number, for example a reward',
                )
            ) from error
        if gradient is not None:
            gradient = interface_of(self.learner.model).by_path(gradient)
            if not isinstance(gradient, dict):
                self._check_gradient(gradient)

            def make(given: tuple) -> Callable[..., None]:
                self._check_gradient(given[0])
                return self._applying()

            self._run('apply', make, (gradient, scale))
        elif self._eligibility is not None:
            self._run('apply eligibility', self._applying_eligibility, (scale,))
        else:
            raise ValueError(
                three_parts(
                    'stream.apply() without a gradient',
                    'the stream keeps no eligibility',
                    'learner.stream(..., decay=0.9), or apply(gradient, scale)',
                )
            )

    def _check_gradient(self, gradient: Any) -> None:
        """Raise unless all parameters have a gradient, and nothing else has."""
        parameters = self.learner.param_states
        check_paths('gradient', gradient, parameters)
        if missing := [path for path in parameters if path not in gradient]:
            raise ArgumentError(
                three_parts(
                    f'stream.apply of a gradient without {missing[0]}',
                    'a stream updates all parameters',
                    'zeros for it, or learner.apply(gradient, optimizer)',
                )
            )

    @property
    def eligibility(self) -> Any:
        """The decayed sum of all gradients since the last reset, in the structure of a
        gradient. It exists only with ``decay``."""
        if self._eligibility is None:
            return None
        kept = jax.tree.map(jnp.copy, self._eligibility.value)
        return interface_of(self.learner.model).gradients(kept)

    def reset(self) -> None:
        """Start a new episode: reset the states to those at compilation, and traces and
        eligibility to zero."""
        self.learner.reset_state()
        if self._eligibility is not None:
            zero = jax.tree.map(jnp.zeros_like, self._eligibility.value)
            self._eligibility.value = zero

    @property
    def states(self) -> dict[str, brainstate.State]:
        """The states of the stream itself, by name. A checkpoint needs them besides the
        states of the learner and of the optimiser."""
        kept = self._eligibility
        return {} if kept is None else {'eligibility': kept}

    def save(self, folder: str | FilePath) -> None:
        """Write weights, states, traces, optimiser and eligibility to a folder."""
        from ..checkpoint import save_stream

        save_stream(self, folder)

    def load(self, folder: str | FilePath) -> None:
        """Load what :meth:`save` wrote, and continue from there."""
        from ..checkpoint import load_stream

        load_stream(self, folder)

    @property
    def program_count(self) -> int:
        """The number of programs that this stream has compiled."""
        return sum(program.count for program in self._programs.values())

    # ------------------------------------------------------------ what a step does

    def _learning(self, inputs: tuple) -> Callable[..., tuple]:
        """A step followed by an update."""
        step, update = self._online(self.step_fn, inputs), self._updating()

        def learn(*inputs: Any) -> tuple:
            gradients, loss, outputs = step(*inputs)
            update(gradients)
            return loss, outputs

        return learn

    def _updating(self) -> Callable[[Gradients], None]:
        """How to change the parameters that the model has now."""
        if self.optimizer is None:
            return _no_update
        learner = self.learner
        held = learner._kept.optimizers
        return update_by(self.optimizer, learner.param_states, held, of_stream=True)

    def _applying_eligibility(self, _: tuple) -> Callable[..., None]:
        apply, kept = self._applying(), self._eligibility
        assert kept is not None
        return lambda scale: apply(kept.value, scale)

    def _applying(self) -> Callable[..., None]:
        """An update by a number of times a gradient."""
        update = self._updating()

        def apply(gradients: Gradients, scale: jax.Array) -> None:
            scaled = lambda g: (scale * g).astype(g.dtype)
            update(jax.tree.map(scaled, gradients))

        return apply

    def _differentiating(
        self, step_fn: Callable, inputs: tuple
    ) -> Callable[..., tuple]:
        """A step whose gradient is returned, and added to the eligibility."""
        step, kept = self._online(step_fn, inputs), self._eligibility

        def differentiate(*inputs: Any) -> tuple:
            gradients, value, outputs = step(*inputs)
            if kept is not None:
                add = lambda old, new: (self.decay * old + new).astype(old.dtype)
                kept.value = jax.tree.map(add, kept.value, gradients)
            return gradients, value, outputs

        return differentiate

    def _online(self, step_fn: Callable, inputs: tuple) -> Callable[..., tuple]:
        """A step by the learner's rule: gradients by path, the loss, the outputs."""
        check_call('step_fn', step_fn, inputs, 'the inputs of one step')
        learner = self.learner
        returning = self._returning_outputs(step_fn)
        binding = bind_step_fn(learner, returning, _one(inputs))
        run = online_step_of(learner, binding, masked=False)

        def step(*inputs: Any) -> tuple:
            solved = run(_one(inputs), jnp.ones(1))
            learner._count(1)
            gradients = binding.gradients_by_path(solved.gradients)
            outputs = _first(binding.aux(solved, 1))
            return gradients, solved.losses[0], outputs

        return step

    def _returning_outputs(self, step_fn: Callable) -> Callable:
        """The step function as one that returns its loss and outputs: its auxiliary
        values if it has any, otherwise what the learner gave it."""
        if step_fn in self._with_outputs:
            return self._with_outputs[step_fn]

        @functools.wraps(step_fn, assigned=(), updated=())  # named in warnings
        def run(*inputs: Any) -> tuple:
            result = step_fn(*inputs)
            if isinstance(result, tuple):
                return result
            record = recording_of(self.learner)
            return result, None if record is None else record.outputs

        self._with_outputs[step_fn] = run
        return run

    def _predicting(self, inputs: tuple) -> Callable[..., Any]:
        """A step without a loss."""
        learner = self.learner
        binding = bind_model(learner, inputs)
        solver = solver_of(learner, binding, learner.rule, loss=False)
        evolve = evolution_program(solver, options_of(learner))
        prepare_traces(learner, solver)

        def predict(*inputs: Any) -> Any:
            given = (*binding.read(), read_traces(learner, solver))
            solved = evolve(*given, binding.inputs(_one(inputs)))
            binding.write(solved.states)
            write_traces(learner, solver, solved.traces)
            learner._count(1)
            return _first(binding.stacked(solved.aux, 1))

        return predict

    # ------------------------------------------------------------ compiled calls

    def _run(
        self,
        kind: Any,
        make: Callable[[tuple], Callable],
        inputs: tuple,
        count: np.int32 | None = None,
    ) -> Any:
        """Call the program of a kind for inputs of these shapes, made if there is none.

        ``make(inputs)`` gives a function that reads and writes states. ``count``: how
        many of the steps in the inputs count.
        """
        with synchronised(self.learner):
            key = (kind, *shapes_of_inputs(inputs))
            program = self._programs.get(key)
            places = state_places(self.learner.model)
            arrays = None
            # A model whose states were created again has a program of its own.
            if program is not None and program.places is places:
                arrays = program.arrays()
            if program is None or arrays is None:
                settings = Settings()
                given = (make, inputs, count is not None, places)
                with settings.recorded():
                    compiled = self.learner._kept.settings
                    program = with_settings_of(compiled, self._program, *given)
                program.settings = settings.names
                self._programs.put(key, settings, program)
                arrays = program.arrays() or []
            args = inputs if count is None else (count, *inputs)
            self._latest_program = program
            return program(arrays, *program.apart(arrays, args))

    def _program(
        self,
        make: Callable[[tuple], Callable],
        inputs: tuple,
        in_chunks: bool,
        places: StatePlaces,
    ) -> StreamProgram:
        """The program of a function that ``make`` gives, for inputs of these shapes."""
        check_arrays(inputs, 'an input', '(batch, ...)')
        example = _first(inputs) if in_chunks else inputs
        given = (in_chunks, self._written, self.learner.placement, places)
        try:
            return StreamProgram(make(example), example, *given)
        except AxesError as error:
            raise error.in_stream() from error


def _no_update(gradients: Gradients) -> None:
    raise ValueError(
        three_parts(
            'an update by a stream that has no optimizer',
            'only predict() and gradient() leave the weights as they are',
            'learner.stream(step_fn, optax.adam(1e-3))',
        )
    )


def _one(inputs: tuple) -> tuple:
    """Inputs of one step as a sequence of one."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], inputs)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _padded(x: Any, length: int) -> Any:
    if len(x) == length:
        return x
    # NumPy compiles nothing, whatever the length.
    of = np if type(x) is np.ndarray else jnp
    rest = of.zeros((length - len(x), *x.shape[1:]), x.dtype)
    return of.concatenate([x, rest])
