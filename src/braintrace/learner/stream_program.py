"""A function that reads and writes states, as one compiled call with little Python
around it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from ..compat import can_fail, sequential_options
from ..errors import CompilationError, three_parts
from ..frontends.module_states import StatePlaces
from .access import alone
from .carried import EligibilityTrace
from .models import MODULE, interface_of
from .placement import Placement
from .programs import array_shapes, in_trace, shapes_of
from .settings import MISSING
from .transaction import Transaction

if TYPE_CHECKING:
    from .learner import Learner

SEQUENTIAL_BYTES = 4 * 2**20
"""Programs with smaller states are compiled for one thread: passing an operation to
another thread would take longer than the operation."""


class WrittenValues:
    """The values that the programs of a stream wrote last."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._last: StreamProgram | None = None

    def note(self, program: StreamProgram) -> None:
        """Record that a program has run. Usually it is the same one as before, and
        nothing changes."""
        if program is not self._last:
            self._values = self.by_state()
            self._last = program

    def by_state(self) -> dict[int, Any]:
        """By the identity of the state."""
        return self._values | ({} if self._last is None else self._last.written())


class StreamProgram:
    """A function that reads and writes states, as one compiled call.

    ``written``: what the programs of a stream wrote last; their memory is used again.
    Without it nothing is written over, and old arrays can still be read.
    """

    places: StatePlaces
    """Where the model had its states when the program was made."""
    leaves: list[Any]
    """The arrays that it wrote last."""
    settings: tuple[str, ...] = ()
    """The settings of brainstate that were asked for while it was traced."""

    def __init__(
        self,
        function: Callable,
        example: tuple,
        in_chunks: bool,
        written: WrittenValues | None,
        placement: Placement | None,
        places: StatePlaces,
    ):
        self.places = places
        self._function = brainstate.transform.StatefulFunction(
            function, return_only_write=False
        )
        self._function.make_jaxpr(*example)
        self._states = list(self._function.get_states(*example))
        values = [state._read_value() for state in self._states]
        self._structure: Any = jax.tree.structure(values)
        self._traces = [s for s in self._states if isinstance(s, EligibilityTrace)]
        # The setters of a state take as long as the step of a small network.
        self._holders = list(map(vars, self._states))
        # What any program of the stream wrote last, and what this one did.
        self._written = written
        self._own: list[Any] = [None] * len(self._states)
        self.leaves = []
        self._shapes = list(map(array_shapes, values))
        self._all_shapes = array_shapes(values)
        # Where states are split over devices, each stays as it is.
        self._shardings: list[Any] | None = None
        if placement is not None:
            self._shardings = jax.tree.map(placement.present, values)
        self._traced = 0
        self.run = self._steps if in_chunks else self._step
        """The program before it is compiled: arrays and inputs in, new arrays out."""

        def traced(*given: Any) -> tuple:
            self._traced += 1
            return self.run(*given)

        options = sequential_options() if _is_small(self._shapes) else None
        donated = None if written is None else 0
        fails = can_fail(self._function.get_jaxpr(*example))
        self._transaction = Transaction(
            traced, donated, fails, compiler_options=options
        )
        self._is_compiled = False
        # Shapes and types of the arrays that it donates.
        self._donated = frozenset(self._all_shapes if self._transaction.donates else ())

    @property
    def count(self) -> int:
        """How many programs were compiled; JAX does not count those that it calls by
        its slower way."""
        return max(self._traced, self._transaction.run._cache_size())

    def arrays(self) -> list[Any] | None:
        """The values of all states, for a stream in arrays that are safe to donate;
        None if one has another shape than the program was made for.

        What a program of the stream wrote belongs to it, unless a user has read the
        trace since. Of everything else a copy is donated.
        """
        if self.is_latest():
            return self.leaves
        if self._written is None or not self._transaction.donates:
            return self._present()
        found, written = [], self._written.by_state()
        for n, state in enumerate(self._states):
            value = state._read_value()
            if value is not self._own[n] and array_shapes(value) != self._shapes[n]:
                return None
            is_ours = value is written.get(id(state))
            if not is_ours or getattr(state, 'was_read', False):
                value = jax.tree.map(jnp.copy, value)
                if self._shardings is not None:
                    value = jax.device_put(value, self._shardings[n])
            found.append(value)
        return jax.tree.leaves(found)

    def _present(self) -> list[Any] | None:
        values = [holder['_value'] for holder in self._holders]
        leaves, structure = jax.tree.flatten(values)
        fits = structure == self._structure and array_shapes(leaves) == self._all_shapes
        return leaves if fits else None

    def is_latest(self) -> bool:
        """Whether the states have the values that this program wrote last, and no trace
        was read since: the case of nearly every step, so it must be quick."""
        for holder, value in zip(self._holders, self._own, strict=True):
            if holder['_value'] is not value:
                return False
        return not any(trace.was_read for trace in self._traces)

    def _step(self, arrays: Sequence[Any], *inputs: Any) -> tuple:
        # JAX flattens a list of arrays sooner than the values of states.
        values = jax.tree.unflatten(self._structure, arrays)
        new, found = self._function.jaxpr_call(values, *inputs)
        if self._shardings is not None:
            new = jax.lax.with_sharding_constraint(list(new), self._shardings)
        return jax.tree.leaves(new), found

    def _steps(self, arrays: Sequence[Any], count: jax.Array, *inputs: Any) -> tuple:
        """The first ``count`` steps; results of the others are zero."""
        at = lambda n: jax.tree.map(lambda x: x[n], inputs)
        _, like = jax.eval_shape(self._step, arrays, *at(0))
        most = len(jax.tree.leaves(inputs)[0])
        empty = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), like)

        def one(n: jax.Array, carry: tuple) -> tuple:
            arrays, results = carry
            new, found = self._step(arrays, *at(n))
            put = lambda all_, x: jax.lax.dynamic_update_index_in_dim(all_, x, n, 0)
            return new, jax.tree.map(put, results, found)

        return jax.lax.fori_loop(0, count, one, (list(arrays), empty))

    def may_donate(self, x: Any) -> bool:
        """Whether an argument may be one of the donated arrays."""
        return isinstance(x, jax.Array) and (x.shape, x.dtype) in self._donated

    def apart(self, arrays: list[Any], args: tuple) -> tuple:
        """Arguments with copies of those that are donated in the same call, as in
        ``stream(net.h.value)``: a program cannot read an array that it writes over."""

        def copied(x: Any) -> Any:
            is_donated = self.may_donate(x) and any(_is_same(x, a) for a in arrays)
            return jnp.copy(x) if is_donated else x

        return jax.tree.map(copied, args)

    def __call__(self, arrays: list[Any], *args: Any) -> Any:
        """Run it, from :meth:`arrays`; what the function returns."""
        try:
            if not self._is_compiled:
                self._transaction.compile(arrays, *args)
                self._is_compiled = True
            return self._transaction(self._write, arrays, *args)
        except ValueError as error:
            # Only a call at the top may have options of the compiler.
            if in_trace():
                raise _inside_a_program() from error
            raise

    def _write(self, results: tuple) -> Any:
        """Put the new arrays in place; what the function returns."""
        leaves, found = results
        if leaves and isinstance(leaves[0], jax.core.Tracer):
            raise _inside_a_program()
        new = jax.tree.unflatten(self._structure, leaves)
        for holder, value in zip(self._holders, new, strict=True):
            holder['_value'] = value
        for trace in self._traces:
            if trace.was_read:
                trace.was_read = False
        if self._written is not None:
            self.leaves, self._own = leaves, new
            # Without donation a result may be an argument, which others may hold.
            if self._transaction.donates:
                self._written.note(self)
        return found

    def written(self) -> dict[int, Any]:
        """What it wrote last, by the identity of the state."""
        return dict(zip(map(id, self._states), self._own, strict=True))


class QuickCall:
    """A call of a program once more, for inputs like those of the last call.

    It is made at every step of a Python loop, so it looks only at what may have changed
    since: the general way takes as long as the step of a small network.
    """

    def __init__(self, learner: Learner, program: StreamProgram, inputs: tuple):
        self._program = program
        self._lock = alone(learner)
        self._process = os.getpid()
        settings = brainstate.environ.all()
        self._settings = [(n, settings.get(n, MISSING)) for n in program.settings]
        self._inputs = [(type(x), x.shape, x.dtype) for x in inputs]
        # By input: the arrays that are donated and might be the same memory.
        self._alike: dict[int, list[int]] = {}
        for n, x in enumerate(inputs):
            leaves = enumerate(program.leaves)
            same = [k for k, y in leaves if (y.shape, y.dtype) == (x.shape, x.dtype)]
            if same and program.may_donate(x):
                self._alike[n] = same

    @classmethod
    def like(
        cls, learner: Learner, program: StreamProgram, inputs: tuple
    ) -> QuickCall | None:
        """For a brainstate module on one device, inputs that are arrays, and settings
        that do not change in place."""
        is_plain = interface_of(learner.model) is MODULE and learner.placement is None
        kinds = (np.ndarray, type(program.leaves[0]))
        are_arrays = all(type(x) in kinds for x in inputs)
        if not is_plain or not are_arrays:
            return None
        quick = cls(learner, program, inputs)
        changes = any(isinstance(x, (list, dict)) for _, x in quick._settings)
        return None if changes else quick

    def __call__(self, inputs: tuple) -> Any:
        """What the program returns; None if anything is not as it was."""
        program = self._program
        if len(inputs) != len(self._inputs) or os.getpid() != self._process:
            return None
        for x, (kind, shape, dtype) in zip(inputs, self._inputs, strict=True):
            if type(x) is not kind or x.shape != shape or x.dtype != dtype:
                return None
            if kind is not np.ndarray and x.sharding.num_devices > 1:
                return None
        settings = brainstate.environ.all()
        for name, value in self._settings:
            if settings.get(name, MISSING) is not value:
                return None
        with self._lock:
            if program.places.are_same() and program.is_latest():
                leaves = program.leaves
                for n, alike in self._alike.items():
                    memory = inputs[n].unsafe_buffer_pointer()
                    for k in alike:
                        if leaves[k].unsafe_buffer_pointer() == memory:
                            inputs = program.apart(leaves, inputs)
                            break
                return program(leaves, *inputs)
        return None


def _inside_a_program() -> CompilationError:
    return CompilationError(
        three_parts(
            'a stream called inside of jit, grad, vmap or a compiled loop',
            'its call is a compiled program of its own, which keeps states and traces '
            'from call to call',
            'call the stream from Python; inside of a loop of your own use learner(x) '
            'under brainstate.transform.grad, or etrace_online for whole sequences',
        )
    )


def _is_same(x: jax.Array, y: jax.Array) -> bool:
    """Whether two arrays are the same memory; device_put gives another array of it."""
    if x is y or x.shape != y.shape or x.dtype != y.dtype:
        return x is y
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return False
    pointers = lambda x: {
        shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards
    }
    return not pointers(x).isdisjoint(pointers(y))


def _is_small(shapes: list[tuple]) -> bool:
    """Whether the arrays of all states, by their shapes and types, are small."""
    arrays = [array for state in shapes for array in state]
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in arrays)
    return size < SEQUENTIAL_BYTES


def shapes_of_inputs(inputs: tuple) -> tuple:
    """What a program is specialised for; arrays need no look at their structure."""
    found = []
    for x in inputs:
        if type(x) is np.ndarray:
            found.append((x.shape, _type_in_jax(x.dtype)))
        elif isinstance(x, jax.Array):
            found.append((x.shape, x.dtype))
        else:
            return shapes_of(inputs)
    return tuple(found)


def _type_in_jax(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.itemsize <= 4 else jax.dtypes.canonicalize_dtype(dtype)
