"""The influence G = ∂s/∂θ of all parameters on all states, carried forward in time.

    G_t = J_t G_{t-1} + ∂s_t/∂θ
    gradient = Σ_t ∂ℓ_t/∂θ + ∂ℓ_t/∂s_{t-1} · G_{t-1}

Both lines are derivatives of the whole step, of which nothing is cut: forward mode
advances G, reverse mode reads it.

    InfluenceColumns  RTRL: every parameter on every state; SnAp-n: only on the states
                      that a parameter reaches within n steps
    RankOneInfluence  UORO: s̃ ⊗ θ̃, whose mean over random signs is G
    InfluenceSolver   sequences, by either of the two

Letters: t steps, n numbers that parameters are made of, m numbers that states are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from ..arrays import all_zero, is_complex, sum_type
from ..compiled_step import CompiledStep, Key, Values
from .block import length_of
from .forward import linearised
from .interface import ExactWindows, SequencePlan
from .masking import without_nan, zero_at
from .solved import Solved
from .window import run_window

_COLUMNS = 256
"""Parameters whose influence advances together; more would need more memory at once."""

Advance = Callable[[Values, Values], Values]
"""(parameters, old states): the new states, of all states that carry a derivative."""


class InfluenceTrace(NamedTuple):
    """An influence, and the number of steps it has seen."""

    value: Any
    steps: jax.Array


# ---------------------------------------------------------------- how it is held


@dataclass(frozen=True)
class InfluenceColumns:
    """(n, m): a row of G for each number of a parameter.

    ``reach``: rows hold only the states that the parameter reaches within so many
    steps, (n, width) in the order of ``reached``; None for all states.
    """

    step: CompiledStep
    reach: int | None = None

    def init(self) -> jax.Array:
        """No influence."""
        shape = (
            (self._count, self._places) if self.reach is None else self.reached.shape
        )
        return jnp.zeros(shape, self._dtype)

    def advance(
        self,
        advance: Advance,
        parameters: Values,
        states: Values,
        trace: InfluenceTrace,
        seed: Any,
    ) -> jax.Array:
        """J G + ∂s/∂θ, one row for each parameter."""
        flat, to_states = ravel_pytree(states)
        run = lambda parameters, states: (advance(parameters, states), None)
        push, _ = linearised(self.step.has_forward_mode, run, parameters, states)

        def row(at: tuple[jax.Array, jax.Array]) -> jax.Array:
            k, held = at
            unit = jnp.zeros(self._count, jnp.finfo(self._dtype).dtype).at[k].set(1)
            if self.reach is None:
                old = held
            else:
                # One place more than there are states, for the padding of ``reached``.
                where = jnp.asarray(self.reached)[k]
                old = jnp.zeros(self._places + 1, held.dtype).at[where].set(held)[:-1]
            new = push(self._as_parameters(unit), to_states(old.astype(flat.dtype)))
            new = ravel_pytree(new)[0].astype(self._dtype)
            return new if self.reach is None else jnp.append(new, 0)[where]

        rows = (jnp.arange(self._count), trace.value)
        return jax.lax.map(row, rows, batch_size=min(_COLUMNS, self._count))

    def gradient(self, trace: InfluenceTrace, bar: Values) -> Values:
        """∂ℓ/∂s · G in the shape of the parameters."""
        flat, _ = ravel_pytree(bar)
        if self.reach is None:
            found = trace.value @ flat.astype(self._dtype)
        else:
            read = jnp.append(flat, 0)[jnp.asarray(self.reached)]
            found = jnp.sum(trace.value * read, axis=1)
        return jax.tree.map(jnp.conj, self._as_parameters(jnp.real(found)))

    # ------------------------------------------------------------ numbers

    @cached_property
    def _count(self) -> int:
        return sum(_numbers(x) for x in self.step.parameters.values())

    @cached_property
    def _places(self) -> int:
        return sum(self.step.states[key].size for key in self.step.moving)

    @cached_property
    def _dtype(self) -> Any:
        states = self.step.states
        return jnp.result_type(*(states[key].dtype for key in self.step.moving))

    def _as_parameters(self, flat: jax.Array) -> Values:
        """Parameters from real numbers; of a complex one all real parts come first."""
        found, start = Values(), 0
        for key, like in self.step.parameters.items():
            parts = 2 if is_complex(like.dtype) else 1
            end = start + parts * like.size
            each = flat[start:end].reshape(parts, *like.shape)
            value = each[0] if parts == 1 else jax.lax.complex(*each)
            found[key] = value.astype(like.dtype)
            start = end
        return found

    # ------------------------------------------------------------ the pattern of SnAp

    @cached_property
    def _within_reach(self) -> tuple[np.ndarray, np.ndarray]:
        """(n, m): whether each parameter reaches each state within ``reach`` steps; and
        whether it does within one more."""
        assert self.reach is not None
        pattern = self.step.find_pattern(self.step.moving)
        direct = np.concatenate(
            [
                np.tile(pattern[key], (2 if is_complex(x.dtype) else 1, 1))
                for key, x in self.step.parameters.items()
            ]
        )
        onward = np.concatenate([pattern[key] for key in self.step.moving])
        within, further = direct, direct
        for _ in range(self.reach):
            # float32 products run by BLAS; counts below 2^24 are exact in it.
            moved = further.astype(np.float32) @ onward.astype(np.float32) > 0
            within, further = further, direct | moved
        return within, further

    @cached_property
    def reached(self) -> np.ndarray:
        """(n, width): the states that each parameter reaches within ``reach`` steps,
        then padding."""
        within, _ = self._within_reach
        width = max(int(within.sum(axis=1).max()), 1)
        order = np.argsort(~within, axis=1, kind='stable')[:, :width]
        return np.where(np.take_along_axis(within, order, axis=1), order, self._places)

    @cached_property
    def is_complete(self) -> dict[Key, bool]:
        """For each parameter whether it never reaches more states than within ``reach``
        steps."""
        if self.reach is None:
            return dict.fromkeys(self.step.parameters, True)
        within, further = self._within_reach
        more = (further & ~within).any(axis=1)
        sizes = [_numbers(x) for x in self.step.parameters.values()]
        parts = np.split(more, np.cumsum(sizes)[:-1])
        return {
            key: not part.any()
            for key, part in zip(self.step.parameters, parts, strict=True)
        }


def _numbers(x: jax.ShapeDtypeStruct) -> int:
    """Real numbers that an array is made of."""
    return x.size * (2 if is_complex(x.dtype) else 1)


@dataclass(frozen=True)
class RankOneInfluence:
    """s̃ and θ̃: one random direction stands for the influence on all states."""

    step: CompiledStep
    seed: int = 0

    def init(self) -> tuple[list, list]:
        """No influence."""
        zeros = lambda shapes: [jnp.zeros(x.shape, x.dtype) for x in shapes]
        states = [self.step.states[key] for key in self.step.moving]
        return zeros(states), zeros(self.step.parameters.values())

    def factors(self, trace: InfluenceTrace) -> tuple[Values, Values]:
        """s̃ by state and θ̃ by parameter."""
        # Held without keys, since each step that is compiled has keys of its own.
        s, theta = trace.value
        return (
            Values(zip(self.step.moving, s, strict=True)),
            Values(zip(self.step.parameters, theta, strict=True)),
        )

    def advance(
        self,
        advance: Advance,
        parameters: Values,
        states: Values,
        trace: InfluenceTrace,
        seed: Any,
    ) -> tuple[list, list]:
        """ρ₀ J s̃ + ρ₁ ν and θ̃ / ρ₀ + νᵀ ∂s/∂θ / ρ₁, for random signs ν; the numbers ρ
        balance both factors, so that neither grows more than the other."""
        s, theta = self.factors(trace)
        run = lambda parameters, states: (advance(parameters, states), None)
        push, _ = linearised(self.step.has_forward_mode, run, parameters, states)
        pushed = push(jax.tree.map(jnp.zeros_like, parameters), s)
        key = jax.random.fold_in(jax.random.key(self.seed), seed)
        keys = jax.random.split(jax.random.fold_in(key, trace.steps), len(s))
        nu = Values()
        for own, (name, like) in zip(keys, states.items(), strict=True):
            if jnp.iscomplexobj(like):  # signs of the real and of the imaginary part
                dtype = jnp.real(like).dtype
                parts = jax.random.rademacher(own, (2, *like.shape), dtype)
                nu[name] = jax.lax.complex(*parts)
            else:
                nu[name] = jax.random.rademacher(own, like.shape, like.dtype)
        _, pull = jax.vjp(lambda p: advance(p, states), parameters)
        (pulled,) = pull(jax.tree.map(jnp.conj, nu))
        tiny = float(jnp.finfo(jnp.result_type(*s.values())).tiny) ** 0.5
        past = jnp.sqrt((_norm(theta) + tiny) / (_norm(pushed) + tiny))
        now = jnp.sqrt((_norm(pulled) + tiny) / (_norm(nu) + tiny))
        s = jax.tree.map(lambda a, b: (past * a + now * b).astype(a.dtype), pushed, nu)
        theta = jax.tree.map(
            lambda a, b: (a / past + b / now).astype(a.dtype), theta, pulled
        )
        return list(s.values()), list(theta.values())

    @property
    def is_complete(self) -> dict[Key, bool]:
        """No direction stands for one parameter alone."""
        return dict.fromkeys(self.step.parameters, False)

    def gradient(self, trace: InfluenceTrace, bar: Values) -> Values:
        """(∂ℓ/∂s · s̃) θ̃."""
        s, theta = self.factors(trace)
        factor = jnp.real(sum(jnp.sum(a * s[key]) for key, a in bar.items()))
        return jax.tree.map(lambda x: (factor * x).astype(x.dtype), theta)


def _norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.abs(x) ** 2) for x in jax.tree.leaves(tree)))


# ---------------------------------------------------------------- sequences


@dataclass(frozen=True, eq=False)
class InfluenceSolver:
    """Solves sequences of one step by carrying an influence forward. Pure, as a
    BlockSolver is."""

    step: CompiledStep
    influence: InfluenceColumns | RankOneInfluence

    traces = None
    """No traces of positions."""
    owner = (0,)
    """Its one trace shares nothing."""
    kept_bytes = 1
    """Nothing is kept of a step."""

    @property
    def trace_names(self) -> list[tuple]:
        """The one influence: of all parameters, on all states."""
        paths = [path for group in self.step.groups for path in group.name]
        return [(tuple(self.step.names.values()), 'influence', tuple(paths))]

    def is_complete(self, key: Key) -> bool:
        """Whether a parameter never reaches a state that is left out."""
        return self.influence.is_complete[key]

    def init_traces(self) -> list[InfluenceTrace]:
        """The influence at the start: none."""
        return [InfluenceTrace(self.influence.init(), jnp.zeros((), jnp.int32))]

    @cached_property
    def trace_shapes(self) -> list[InfluenceTrace]:
        """Shapes and types of the influence."""
        return jax.eval_shape(self.init_traces)

    def block_length(self, steps: int, carried: bool, devices: int = 1) -> int:
        """One: the influence advances at every step."""
        return 1

    def run(
        self,
        parameters: Values,
        states: Values,
        traces: list,
        inputs: Values,
        rule_state: Any = 0,
    ) -> tuple[Values, Values, list]:
        """A call: targets and auxiliary values of each step, next states, next
        influence."""

        def one(carry: tuple, xs: Values) -> tuple[tuple, Values]:
            states, trace = carry
            # No loss reads these steps, so NaN in them must not enter the influence.
            clean = without_nan(xs)
            return self._advance(parameters, states, trace, xs, clean, rule_state)

        (states, trace), values = jax.lax.scan(one, (states, traces[0]), inputs)
        return values, states, [trace]

    def gradient(
        self,
        parameters: Values,
        states: Values,
        traces: list,
        inputs: Values,
        cotangents: Sequence[jax.Array],
        windows: ExactWindows | None = None,
        rule_state: Any = 0,
    ) -> Values:
        """Of a call, for cotangents (t, ...) of its targets. As one window: reverse mode
        inside, and the credit of the states at its start times their influence."""
        # One step alone is read through the whole of it either way.
        if windows is None or length_of(inputs) == 1:
            solved = self._step_by_step(
                parameters, states, traces, inputs, cotangents, rule_state, masked=True
            )
            return solved.gradients
        run = lambda parameters, states: run_window(
            self.step, parameters, states, inputs
        )
        return self._gradient(run, parameters, states, traces[0], cotangents)

    def evolve(
        self,
        parameters: Values,
        states: Values,
        traces: list,
        inputs: Values,
        block: int = 1,
    ) -> Solved:
        """A sequence without a loss."""
        values, states, traces = self.run(parameters, states, traces, inputs)
        aux = values.pick(self.step.aux)
        return Solved(Values(), jnp.zeros(0), aux, states, traces)

    def solve(
        self,
        parameters: Values,
        states: Values,
        traces: list,
        inputs: Values,
        weights: jax.Array,
        plan: SequencePlan,
        unit: Any = 1.0,
        rule_state: Any = 0,
        masked: bool = True,
    ) -> Solved:
        """A sequence step by step, with weights (t,) of its losses; see
        :class:`Solver`."""
        return self._step_by_step(
            parameters, states, traces, inputs, [weights], rule_state, masked
        )

    def _step_by_step(
        self,
        parameters: Values,
        states: Values,
        traces: list,
        inputs: Values,
        cotangents: Sequence[jax.Array],
        rule_state: Any,
        masked: bool,
    ) -> Solved:
        """For cotangents (t, ...) of targets; those of a loss are its weights.
        ``masked``: some of them may be zero."""

        def one(carry: tuple, at: tuple) -> tuple[tuple, Values]:
            states, trace, total = carry
            xs, bars = at
            run = lambda parameters, states: self.step.run(parameters, states, xs)
            gradient = self._gradient(run, parameters, states, trace, bars)
            if masked:
                gradient = zero_at(gradient, all_zero(bars))
            carry, values = self._advance(parameters, states, trace, xs, xs, rule_state)
            return (*carry, jax.tree.map(jnp.add, total, gradient)), values

        zero = lambda x: jnp.zeros_like(x, sum_type(x.dtype))
        start = (states, traces[0], jax.tree.map(zero, parameters))
        (states, trace, total), values = jax.lax.scan(
            one, start, (inputs, list(cotangents))
        )
        in_type = lambda x, like: x.astype(like.dtype)
        gradients = jax.tree.map(in_type, total, parameters)
        losses = values[self.step.targets[0]] if self.step.is_loss else jnp.zeros(0)
        return Solved(gradients, losses, values.pick(self.step.aux), states, [trace])

    def _gradient(
        self,
        run: Callable[[Values, Values], tuple[Values, list[jax.Array], Values]],
        parameters: Values,
        states: Values,
        trace: InfluenceTrace,
        bars: Sequence[jax.Array],
    ) -> Values:
        """∂ℓ/∂θ + ∂ℓ/∂s · G of what ``run`` does from these states on."""

        def targets(parameters: Values, moving: Values) -> list[jax.Array]:
            return run(parameters, states | moving)[1]

        moving = states.pick(self.step.moving)
        values, pull = jax.vjp(targets, parameters, moving)
        pairs = zip(bars, values, strict=True)
        own, past = pull([jnp.asarray(bar).astype(x.dtype) for bar, x in pairs])
        return jax.tree.map(jnp.add, own, self.influence.gradient(trace, past))

    def _advance(
        self,
        parameters: Values,
        states: Values,
        trace: InfluenceTrace,
        inputs: Values,
        inputs_of_trace: Values,
        rule_state: Any,
    ) -> tuple[tuple[Values, InfluenceTrace], Values]:
        """States and influence after a step; its targets and auxiliary values.

        ``inputs_of_trace``: those at which the influence advances.
        """
        new, targets, aux = self.step.run(parameters, states, inputs)
        values = Values(zip(self.step.targets, targets, strict=True)) | aux
        moving = self.step.moving

        def advance(parameters: Values, old: Values) -> Values:
            found = self.step.run(parameters, states | old, inputs_of_trace)
            return found[0].pick(moving)

        value = self.influence.advance(
            advance, parameters, states.pick(moving), trace, rule_state
        )
        return (new, InfluenceTrace(value, trace.steps + 1)), values
