"""Learners of models that are no brainstate modules: one adapter that holds their
arrays as states."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from ..errors import CompilationError, three_parts
from ..frontends import pure_model
from ..frontends.pure import PureModel
from ..program.step import path_name
from .arguments import LOSS_OUTPUTS, check_choice, selected
from .learner import Learner
from .losses import check_aux, check_finite_values, results
from .programs import in_trace
from .recording import recording_of


class Adapter(brainstate.nn.Module):
    """A pure model whose parameters and states are brainstate's, at the paths that they
    have in the model."""

    def __init__(self, pure: PureModel):
        super().__init__()
        self.pure = pure
        kinds = [
            brainstate.HiddenState if h else brainstate.ShortTermState
            for h in pure.hidden
        ]
        self.weights = list(map(brainstate.ParamState, pure.parameters))
        self.kept = [kind(x) for kind, x in zip(kinds, pure.state, strict=True)]

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
                        f'reset_state(batch_size={batch_size}) with {path_name(path)}, which starts differently for '
                        'each sample',
                        'the start of other samples is not known',
                        'compile again with a state of that batch',
                    )
                )
            state.value = jnp.broadcast_to(value[:1], (batch_size, *value.shape[1:]))


def adapted(
    model: Any, args: tuple, state: Any, batch: int | None, seed: int | None
) -> tuple[brainstate.nn.Module, tuple]:
    """The module that holds a model of another framework, and examples of its inputs."""
    pure = pure_model(model, args, state, batch, seed)
    return type(pure.name, (Adapter,), {})(pure), pure.inputs


class ForeignLearner(Learner):
    """A learner of another framework's model: gradients have the framework's own
    structure.

    The values of a Flax module are read before every call and written back after it.
    For Equinox and plain functions the learner holds them: ``params`` and ``state``
    read and set them.
    """

    model: Adapter
    _inside = False
    _seen: list[Any] | None = None

    def __deepcopy__(self, memo: Any = None) -> Any:
        if self.model.pure.keeps_state:
            raise CompilationError(
                three_parts(
                    f'a copy of the learner of {self.model.pure.name}',
                    'it reads and writes the module that it was given, and a copy would use the same module',
                    'braintrace.compile(nnx.clone(module), ...), a learner of a copied module',
                )
            )
        return super().__deepcopy__(memo)

    # ------------------------------------------------------------ the user's model

    @property
    def params(self) -> Any:
        """The parameters as the framework holds them: a State of Params, an Equinox
        model, the params of a function."""
        with self._synchronised():
            return self.model.pure.whole([s.value for s in self.model.weights])

    @params.setter
    def params(self, value: Any) -> None:
        with self._synchronised():
            _assign(self.model.weights, self.model.pure.flat(value))

    @property
    def state(self) -> Any:
        """What the model carries from step to step, in the structure in which it was
        given."""
        with self._synchronised():
            return self.model.pure.whole_state([s.value for s in self.model.kept])

    @state.setter
    def state(self, value: Any) -> None:
        with self._synchronised():
            _assign(self.model.kept, self.model.pure.flat_state(value))

    @contextlib.contextmanager
    def _synchronised(self) -> Iterator[None]:
        with self._alone(), self._followed():
            yield

    @contextlib.contextmanager
    def _followed(self) -> Iterator[None]:
        """Read what has changed in the user's model before a call, and write what the
        call has changed."""
        record = recording_of(self)
        if self._inside or (record is not None and record.runs_model):
            yield
            return
        if not self.model.pure.keeps_state:
            try:
                yield
            except brainstate.TraceContextError as error:
                raise _inside_a_transformation() from error
            return
        if in_trace():
            raise _inside_a_transformation()
        self._pull()
        states = [*self.model.weights, *self.model.kept]
        before = [state.value for state in states]
        self._inside = True
        try:
            yield
        except BaseException:
            _assign(states, before)
            raise
        finally:
            self._inside = False
        self._push(before)

    def _pull(self) -> None:
        pure, step = self.model.pure, self.model.pure.version
        now = [x for part in pure.pull() for x in part]
        seen = self._seen or [None] * len(now)
        states = [*self.model.weights, *self.model.kept]
        _assign(states, [None if x is y else x for x, y in zip(now, seen, strict=True)])
        self._seen = now
        if pure.version != step:
            self._kept.programs.clear()
            self.executor.compile_graph(*self._example)

    def _push(self, before: list) -> None:
        states = (self.model.weights, self.model.kept)
        parameters, kept = ([s.value for s in part] for part in states)
        values = zip([*parameters, *kept], before, self._seen or before, strict=True)
        moved = [x for x, y, seen in values if seen is not None and x is not y]
        if any(isinstance(x, jax.core.Tracer) for x in moved):
            _assign([*self.model.weights, *self.model.kept], before)
            raise _inside_a_transformation()
        if moved:
            self.model.pure.push(parameters, kept)
            self._seen = [x for part in self.model.pure.pull() for x in part]

    def compile_graph(self, *args: Any) -> None:
        """Compile the model; random streams and running statistics carry on in a fresh
        sequence."""
        with self._synchronised():
            super().compile_graph(*args)
        pure = self.model.pure
        for path, ongoing in zip(pure.state_paths, pure.ongoing, strict=True):
            if ongoing:
                self._start.pop(path, None)

    def reset_state(self, batch_size: int | None = None, **options: Any) -> None:
        """Reset: states as they were compiled, or for another batch; traces zero."""
        with self._synchronised():
            super().reset_state(batch_size, **options)

    @contextlib.contextmanager
    def unmoved(self) -> Iterator[None]:
        """Measure inside: afterwards the user's model and the learner are as they were
        before."""
        with self._synchronised(), super().unmoved():
            yield

    # ------------------------------------------------------------ gradients

    def etrace_grad(self, *sequences: Any, params: Any = None, **options: Any) -> Any:  # type: ignore[override]
        """Gradients of a whole sequence, in the structure that the framework's
        optimisers take.

        As :meth:`Learner.etrace_grad`; with ``weights`` gradients are by path.
        ``params`` (a Flax or Equinox module, or the params of a function): a fresh
        sequence with these weights, nothing of the learner changed; this also works
        inside ``jax.jit`` and the like.
        """
        if params is None:
            found = super().etrace_grad(*sequences, **options)
        else:
            with self._alone():
                found = self._grad_at(params, sequences, **options)
        if options.get('weights') is not None:
            return found
        pure = self.model.pure
        first = lambda by_path: pure.gradients(
            [by_path[p] for p in pure.parameter_paths]
        )
        return (
            (first(found[0]), *found[1:]) if isinstance(found, tuple) else first(found)
        )

    def _grad_at(
        self,
        params: Any,
        sequences: tuple,
        *,
        step_fn: Callable[..., Any],
        fresh: bool = False,
        mask: Any = None,
        weights: Sequence[Any] | None = None,
        reduction: str = 'mean',
        loss_output: str = 'per_step',
        has_aux: bool = False,
        return_value: bool = False,
        **options: Any,
    ) -> Any:
        """Gradients of a fresh sequence at parameters of the caller's."""
        check_choice('loss_output', loss_output, LOSS_OUTPUTS)
        check_choice('reduction', reduction, ('mean', 'sum'))
        if not fresh or options:
            wrong = ['fresh=False', *options] if not fresh else list(options)
            raise ValueError(
                three_parts(
                    f'etrace_grad(..., params=..., {", ".join(wrong)})',
                    'a call with weights of its own leaves states and traces alone, so it has no '
                    'past to continue from',
                    'fresh=True and no chunk_size; or learner.params = ... (Flax: the module '
                    'itself) and no params',
                )
            )
        pure = self.model.pure
        holds_states = pure.holds_states(params)
        kept = pure.pull(params)[1] if holds_states else [None] * len(pure.state_paths)
        held = zip(pure.state_paths, kept, pure.ongoing, strict=True)
        ongoing = {path: x for path, x, goes_on in held if goes_on and x is not None}
        at = dict(zip(pure.parameter_paths, pure.flat(params), strict=True)) | ongoing
        binding, _, solved, counts = self._solve(
            sequences, step_fn, mask, reduction, True, at=at
        )
        check_aux(binding.out_tree, has_aux)
        if self.check_finite:
            named = binding.gradients_by_name(solved.gradients)
            check_finite_values(solved.losses, counts, named, 'step')
        if holds_states:
            paths = binding.paths.items()
            new = {path: solved.states[v] for v, path in paths if path in ongoing}
            states = [
                new.get(p, x) for p, x in zip(pure.state_paths, kept, strict=True)
            ]
            pure.push(pure.flat(params), states, params)
        aux = binding.aux(solved, len(counts)) if has_aux else None
        gradients = binding.gradients_by_path(solved.gradients)
        chosen = selected(weights, self.param_states)
        given = (mask, chosen, loss_output, return_value, has_aux)
        return results(gradients, solved.losses, counts, aux, *given)

    def etrace_online(
        self, *sequences: Any, optimizer: Any, **options: Any
    ) -> jax.Array:  # type: ignore[override]
        """Train along a sequence; the final weights are in ``params``, those of a Flax
        module in it."""
        if hasattr(optimizer, 'tx'):
            raise TypeError(
                three_parts(
                    f'optimizer={type(optimizer).__name__}(...) in etrace_online',
                    'weights change inside the compiled loop, where the module is not',
                    'the optax transformation itself, e.g. optax.adam(1e-3)',
                )
            )
        return super().etrace_online(*sequences, optimizer=optimizer, **options)

    def apply(self, gradients: Any, optimizer: Any) -> None:
        """Change the parameters by an optimiser, given gradients as :meth:`etrace_grad`
        gives them."""
        pure = self.model.pure
        flat = pure.parameter_leaves.flat(gradients)
        super().apply(dict(zip(pure.parameter_paths, flat, strict=True)), optimizer)


@functools.cache
def foreign(kind: type[Learner]) -> type[Learner]:
    """The learner of a rule for models of other frameworks."""
    return type(kind.__name__, (ForeignLearner, kind), {'__doc__': kind.__doc__})


def _assign(states: Sequence[brainstate.State], values: Sequence[Any]) -> None:
    for state, value in zip(states, values, strict=True):
        if value is not None and value is not state.value:
            state.value = value


def _inside_a_transformation() -> CompilationError:
    return CompilationError(
        three_parts(
            'a call of this learner inside jit, grad or the like',
            'it reads and writes weights, states and traces that are stored outside, which a traced program cannot do',
            'the call outside (it is compiled anyway; etrace_grad(x[None], y[None], step_fn=...) for one step), or '
            'inside etrace_grad(..., fresh=True, params=...) with the weights or the model that the program was given',
        )
    )
