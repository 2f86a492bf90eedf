"""Models as a learner sees them: one interface, whatever framework they are of.

The learner works on the states of a brainstate module. A brainstate module is that
itself. Models of Flax NNX and Equinox and plain functions are pure steps on lists of
arrays (``frontends/pure.py``), and an :class:`AdaptedModel` holds their arrays as
states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from ..errors import CompilationError, three_parts
from ..frontends import pure_model
from ..frontends.pure import PureModel
from ..program import Path
from ..program.step import path_name
from .transaction import uninterrupted


class ModuleInterface:
    """What a learner needs of a brainstate module beside its states; an
    :class:`AdaptedModel` has the same members for other models."""

    # The parameters and what is carried from step to step, as the framework holds them:
    # of other models only.
    __slots__ = ()
    params: Any
    state: Any

    def followed(self, recompile: Callable[[], None]) -> Any:
        """Around a call: values that are kept in the user's model are read before it
        and written after it; ``recompile`` is called if the step has changed."""
        return contextlib.nullcontext()

    def carries_on(self, path: Path, state: brainstate.State) -> bool:
        """Whether a state continues when a fresh sequence starts."""
        kinds = (brainstate.ParamState, brainstate.random.RandomState)
        return isinstance(state, kinds)

    def gradients(self, by_path: dict[Path, Any]) -> Any:
        """Gradients in the structure that the framework's optimisers take."""
        return by_path

    def by_path(self, gradients: Any) -> dict[Path, Any]:
        """What :meth:`gradients` gives, by path."""
        return gradients

    def values_at(self, params: Any) -> dict[Path, Any]:
        """The values that a call with weights of its own is to use, by path."""
        raise TypeError(
            three_parts(
                'etrace_grad(..., params=...) of a brainstate module',
                'its weights are states, which a call reads and a program may be given',
                'learner.set_weights(...), or the values of the states',
            )
        )

    def write_at(self, params: Any, states: Mapping[Path, Any]) -> None:
        """Write states that carry on into the model that a call was given."""

    def check_copied(self) -> None:
        """Raise if a learner of the model cannot be copied."""

    def check_loop_optimizer(self, optimizer: Any) -> None:
        """Raise if an optimiser cannot be used inside a compiled loop."""


MODULE = ModuleInterface()
"""The interface of every brainstate module."""


@dataclass
class _UserValues:
    """The values in the user's model as they were last read or written, and whether a
    call is under way."""

    seen: list[Any] | None = None
    inside: bool = False


class AdaptedModel(brainstate.nn.Module):
    """A pure model whose parameters and states are brainstate's, at the paths that they
    have in the model.

    The values of a Flax module are read before every call and written back after it.
    For Equinox and plain functions the learner holds them: ``params`` and ``state``
    read and set them.
    """

    def __init__(self, pure: PureModel):
        super().__init__()
        self.pure = pure
        self.user_values = _UserValues()
        kinds = [
            brainstate.HiddenState if h else brainstate.ShortTermState
            for h in pure.hidden
        ]
        self.weights = list(map(brainstate.ParamState, pure.parameters))
        self.kept = [kind(x) for kind, x in zip(kinds, pure.state, strict=True)]

    @classmethod
    def of(
        cls, model: Any, args: tuple, state: Any, batch: int | None, seed: int | None
    ) -> AdaptedModel:
        """The module of a model of another framework, under the model's own name."""
        pure = pure_model(model, args, state, batch, seed)
        return type(pure.name, (cls,), {})(pure)

    # ------------------------------------------------------------ a brainstate module

    def states(self, *filters: Any, **options: Any) -> Any:
        """The states by the paths of the model."""
        paths = {'weights': self.pure.parameter_paths, 'kept': self.pure.state_paths}
        found = super().states(*filters, **options)
        named = lambda part: type(part)(
            {paths[key[0]][key[1]]: state for key, state in part.items()}
        )
        return tuple(map(named, found)) if isinstance(found, tuple) else named(found)

    def update(self, *inputs: Any) -> Any:
        """One step of the model."""
        new, out = self.pure.step(
            [s.value for s in self.weights], [s.value for s in self.kept], *inputs
        )
        for state, value, written in zip(
            self.kept, new, self.pure.written, strict=True
        ):
            if written:
                state.value = value
        return out

    def init_state(self, batch_size: int) -> None:
        """States of another batch, each sample where all samples started."""
        old = jnp.shape(jax.tree.leaves(self.pure.inputs)[0])[0]
        given = zip(
            self.pure.state_paths,
            self.kept,
            self.pure.state,
            self.pure.ongoing,
            strict=True,
        )
        for (path, state, start, ongoing), written in zip(
            given, self.pure.written, strict=True
        ):
            value = state.value if ongoing else start
            if self.pure.batch is None and (
                ongoing or not written or jnp.shape(start)[:1] != (old,)
            ):
                continue
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                state.value = jax.random.split(value[0], batch_size)
                continue
            if bool(jnp.any(value != value[:1])):
                raise ValueError(
                    three_parts(
                        f'reset_state(batch_size={batch_size}) with '
                        f'{path_name(path)}, which starts differently for '
                        'each sample',
                        'the start of other samples is not known',
                        'compile again with a state of that batch',
                    )
                )
            state.value = jnp.broadcast_to(value[:1], (batch_size, *value.shape[1:]))

    # ------------------------------------------------------------ the user's model

    @property
    def params(self) -> Any:
        """The parameters as the framework holds them: a State of Params, an Equinox
        model, the params of a function."""
        return self.pure.whole([s.value for s in self.weights])

    @params.setter
    def params(self, value: Any) -> None:
        _assign(self.weights, self.pure.flat(value))

    @property
    def state(self) -> Any:
        """What the model carries from step to step, in the structure in which it was
        given."""
        return self.pure.whole_state([s.value for s in self.kept])

    @state.setter
    def state(self, value: Any) -> None:
        _assign(self.kept, self.pure.flat_state(value))

    @contextlib.contextmanager
    def followed(self, recompile: Callable[[], None]) -> Iterator[None]:
        """Read what has changed in the user's model before a call, and write what the
        call has changed."""
        if self.user_values.inside:
            yield
            return
        if not self.pure.keeps_state:
            try:
                yield
            except brainstate.TraceContextError as error:
                raise _inside_a_transformation() from error
            return
        if isinstance(jnp.zeros(()), jax.core.Tracer):  # inside jit or the like
            raise _inside_a_transformation()
        self._pull(recompile)
        before = [state.value for state in (*self.weights, *self.kept)]
        self.user_values.inside = True
        try:
            yield
        finally:
            # After an error or Ctrl-C too: a call changes all of its states or none,
            # and the arrays of the user's model may have been donated.
            with uninterrupted:
                self.user_values.inside = False
                self._push(before)

    def _pull(self, recompile: Callable[[], None]) -> None:
        pure, version = self.pure, self.pure.version
        now = [x for part in pure.pull() for x in part]
        seen = self.user_values.seen or [None] * len(now)
        states = [*self.weights, *self.kept]
        _assign(states, [None if x is y else x for x, y in zip(now, seen, strict=True)])
        self.user_values.seen = now
        if pure.version != version:
            recompile()

    def _push(self, before: list) -> None:
        parameters, kept = (
            [s.value for s in part] for part in (self.weights, self.kept)
        )
        seen = self.user_values.seen or before
        values = zip([*parameters, *kept], before, seen, strict=True)
        moved = [x for x, y, seen in values if seen is not None and x is not y]
        if any(isinstance(x, jax.core.Tracer) for x in moved):
            _assign([*self.weights, *self.kept], before)
            raise _inside_a_transformation()
        if moved:
            self.pure.push(parameters, kept)
            self.user_values.seen = [x for part in self.pure.pull() for x in part]

    def carries_on(self, path: Path, state: brainstate.State) -> bool:
        """Random streams and running statistics carry on, as well as parameters."""
        ongoing = dict(zip(self.pure.state_paths, self.pure.ongoing, strict=True))
        return MODULE.carries_on(path, state) or ongoing.get(path, False)

    def check_copied(self) -> None:
        """Raise for a module that the learner reads and writes."""
        if self.pure.keeps_state:
            raise CompilationError(
                three_parts(
                    f'a copy of the learner of {self.pure.name}',
                    'it reads and writes the module that it was given, and a copy '
                    'would use the same module',
                    'braintrace.compile(nnx.clone(module), ...), a learner of a '
                    'copied module',
                )
            )

    def check_loop_optimizer(self, optimizer: Any) -> None:
        """Raise for an optimiser that holds the module."""
        if hasattr(optimizer, 'tx'):
            raise TypeError(
                three_parts(
                    f'optimizer={type(optimizer).__name__}(...) in etrace_online',
                    'weights change inside the compiled loop, where the module is not',
                    'the optax transformation itself, e.g. optax.adam(1e-3)',
                )
            )

    # ------------------------------------------------------------ gradients

    def gradients(self, by_path: dict[Path, Any]) -> Any:
        """Gradients in the framework's own structure."""
        return self.pure.gradients([by_path[p] for p in self.pure.parameter_paths])

    def by_path(self, gradients: Any) -> dict[Path, Any]:
        """Gradients in the framework's own structure, by path."""
        flat = self.pure.parameter_leaves.flat(gradients)
        return dict(zip(self.pure.parameter_paths, flat, strict=True))

    def values_at(self, params: Any) -> dict[Path, Any]:
        """The given parameters, and the states that carry on if they come with them."""
        given = zip(self.pure.parameter_paths, self.pure.flat(params), strict=True)
        return dict(given) | self._ongoing_at(params)

    def _ongoing_at(self, params: Any) -> dict[Path, Any]:
        if not self.pure.holds_states(params):
            return {}
        held = self.pure.pull(params)[1]
        states = zip(self.pure.state_paths, held, self.pure.ongoing, strict=True)
        return {path: x for path, x, goes_on in states if goes_on and x is not None}

    def write_at(self, params: Any, states: Mapping[Path, Any]) -> None:
        """Write states that carry on into the model that a call was given."""
        if not self.pure.holds_states(params):
            return
        ongoing, held = self._ongoing_at(params), self.pure.pull(params)[1]
        new = [
            states[path] if path in ongoing and path in states else x
            for path, x in zip(self.pure.state_paths, held, strict=True)
        ]
        self.pure.push(self.pure.flat(params), new, params)


def interface_of(model: brainstate.nn.Module) -> ModuleInterface | AdaptedModel:
    """The interface of a learner's model."""
    return model if isinstance(model, AdaptedModel) else MODULE


def _assign(states: Sequence[brainstate.State], values: Sequence[Any]) -> None:
    for state, value in zip(states, values, strict=True):
        if value is not None and value is not state.value:
            state.value = value


def _inside_a_transformation() -> CompilationError:
    return CompilationError(
        three_parts(
            'a call of this learner inside jit, grad or the like',
            'it reads and writes weights, states and traces that are stored outside, '
            'which a traced program cannot do',
            'the call outside (it is compiled anyway; etrace_grad(x[None], y[None], '
            'step_fn=...) for one step), or '
            'inside etrace_grad(..., fresh=True, params=...) with the weights or the '
            'model that the program was given',
        )
    )
