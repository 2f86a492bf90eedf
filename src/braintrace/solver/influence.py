"""The influence of all parameters on all states, carried forward in time.

    WholeInfluence    RTRL    every parameter on every state
    SparseInfluence   SnAp-n  only on states that a parameter reaches within n steps
    RankOneInfluence  UORO    s̃ ⊗ θ̃, whose mean over random signs is G

    G_t = J_t G_{t-1} + ∂s_t/∂θ

The gradient of a step is ∂ℓ_t/∂θ + ∂ℓ_t/∂s_{t-1} · G_{t-1}, both by reverse mode of the
whole step: nothing is cut. Letters: n numbers that parameters are made of, m numbers
that states are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from ..arrays import is_complex
from ..compiled_step import CompiledStep, Key, Values

_COLUMNS = 256
"""Parameters whose influence advances together; more would need more memory at once."""


class StepPoint(NamedTuple):
    """A step where its derivative is taken; ``advance(parameters, states)`` gives the
    next states. ``has_forward_mode``: whether it can be differentiated forward."""

    advance: Callable[[Values, Values], Values]
    parameters: Values
    states: Values
    has_forward_mode: bool

    def pushed(self, *tangents: Values) -> tuple[Values, Values]:
        """The next states and their forward derivative; the reverse one transposed
        where that is all there is."""
        primals = (self.parameters, self.states)
        if self.has_forward_mode:
            return jax.jvp(self.advance, primals, tangents)
        new, pull = jax.vjp(self.advance, *primals)
        (moved,) = jax.linear_transpose(pull, new)(tangents)
        return new, moved


class InfluenceTrace(NamedTuple):
    """An influence, and the number of steps it has seen."""

    value: Any
    steps: jax.Array


@dataclass(frozen=True)
class Influence(ABC):
    """How the influence of parameters on states is held."""

    step: CompiledStep

    @abstractmethod
    def init(self) -> Any:
        """The influence at the start: none."""

    @abstractmethod
    def advance(self, point: StepPoint, trace: InfluenceTrace, seed: Any) -> Any:
        """The influence after a step; ``seed`` differs from call to call."""

    @abstractmethod
    def gradient(self, trace: InfluenceTrace, bar: Values) -> Values:
        """∂ℓ/∂s · G in the shape of the parameters."""

    # ------------------------------------------------------------ numbers

    @cached_property
    def moving(self) -> tuple[Key, ...]:
        """States that carry a derivative."""
        states = self.step.states
        return tuple(
            key
            for key in self.step.written
            if jnp.issubdtype(states[key].dtype, jnp.inexact)
        )

    @cached_property
    def count(self) -> int:
        """Real numbers that the parameters are made of."""
        return sum(self._numbers(x) for x in self.step.parameters.values())

    @staticmethod
    def _numbers(x: jax.ShapeDtypeStruct) -> int:
        return x.size * (2 if is_complex(x.dtype) else 1)

    @cached_property
    def places(self) -> int:
        """Numbers that the states are made of."""
        return sum(self.step.states[key].size for key in self.moving)

    @cached_property
    def dtype(self) -> Any:
        """Type of the influence."""
        return jnp.result_type(*(self.step.states[key].dtype for key in self.moving))

    def as_parameters(self, flat: jax.Array) -> Values:
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


@dataclass(frozen=True)
class WholeInfluence(Influence):
    """(n, m): every parameter, every state."""

    def init(self) -> jax.Array:
        return jnp.zeros((self.count, self.places), self.dtype)

    def advance(self, point: StepPoint, trace: InfluenceTrace, seed: Any) -> jax.Array:
        moved = _moved_columns(self, point)
        return _by_parameter(moved, self.count, trace.value)

    def gradient(self, trace: InfluenceTrace, bar: Values) -> Values:
        flat, _ = ravel_pytree(bar)
        return _gradient_of(self, trace.value @ flat.astype(self.dtype))


@dataclass(frozen=True)
class SparseInfluence(Influence):
    """(n, width): for every parameter the states that it reaches within ``reach``
    steps."""

    reach: int

    def init(self) -> jax.Array:
        return jnp.zeros(self.reached.shape, self.dtype)

    def advance(self, point: StepPoint, trace: InfluenceTrace, seed: Any) -> jax.Array:
        moved = _moved_columns(self, point)
        reached = jnp.asarray(self.reached)

        def one(k: jax.Array, held: jax.Array) -> jax.Array:
            # One place more than there are states, for the padding of ``reached``.
            column = jnp.zeros(self.places + 1, held.dtype).at[reached[k]].set(held)
            return jnp.append(moved(k, column[:-1]), 0)[reached[k]]

        return _by_parameter(one, self.count, trace.value)

    def gradient(self, trace: InfluenceTrace, bar: Values) -> Values:
        flat, _ = ravel_pytree(bar)
        read = jnp.append(flat, 0)[jnp.asarray(self.reached)]
        return _gradient_of(self, jnp.sum(trace.value * read, axis=1))

    @cached_property
    def _paths(self) -> tuple[np.ndarray, np.ndarray]:
        """(n, m) and (m, m): whether each parameter, and each state, moves each state
        in one step."""
        pattern = self.step.find_pattern(self.moving)
        direct = [
            np.tile(pattern[key], (2 if is_complex(x.dtype) else 1, 1))
            for key, x in self.step.parameters.items()
        ]
        onward = [pattern[key] for key in self.moving]
        return np.concatenate(direct), np.concatenate(onward)

    @cached_property
    def _within_reach(self) -> np.ndarray:
        """(n, m): whether each parameter reaches each state within ``reach`` steps."""
        direct, onward = self._paths
        found = direct
        for _ in range(self.reach - 1):
            found = direct | _one_step_on(found, onward)
        return found

    @cached_property
    def reached(self) -> np.ndarray:
        """(n, width): the states that each parameter reaches within ``reach`` steps,
        then padding."""
        found = self._within_reach
        width = max(int(found.sum(axis=1).max()), 1)
        order = np.argsort(~found, axis=1, kind='stable')[:, :width]
        return np.where(np.take_along_axis(found, order, axis=1), order, self.places)

    @cached_property
    def is_complete(self) -> dict[Key, bool]:
        """For each parameter whether it never reaches more states than within ``reach``
        steps."""
        further = _one_step_on(self._within_reach, self._paths[1]) & ~self._within_reach
        found, start = {}, 0
        for key, like in self.step.parameters.items():
            end = start + self._numbers(like)
            found[key] = not further[start:end].any()
            start = end
        return found


def _one_step_on(places: np.ndarray, onward: np.ndarray) -> np.ndarray:
    """The states that are moved one step after these."""
    return places.astype(np.int64) @ onward.astype(np.int64) > 0


def _moved_columns(
    influence: Influence, point: StepPoint
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function of the number of a parameter and its influence (m,) on the old states:
    that on the new states."""
    flat, to_states = ravel_pytree(point.states)

    def moved(k: jax.Array, column: jax.Array) -> jax.Array:
        unit = jnp.zeros(influence.count, jnp.finfo(influence.dtype).dtype)
        parameter = influence.as_parameters(unit.at[k].set(1))
        _, new = point.pushed(parameter, to_states(column.astype(flat.dtype)))
        return ravel_pytree(new)[0].astype(influence.dtype)

    return moved


def _by_parameter(one: Callable, count: int, held: jax.Array) -> jax.Array:
    """``one`` of every parameter's number and influence, some of them together."""
    numbered = (jnp.arange(count), held)
    return jax.lax.map(lambda at: one(*at), numbered, batch_size=min(_COLUMNS, count))


def _gradient_of(influence: Influence, found: jax.Array) -> Values:
    """(n,) ∂ℓ/∂s · G in the shape of the parameters."""
    return jax.tree.map(jnp.conj, influence.as_parameters(jnp.real(found)))


@dataclass(frozen=True)
class RankOneInfluence(Influence):
    """s̃ and θ̃: one random direction stands for the influence on all states."""

    seed: int = 0

    def init(self) -> tuple[list, list]:
        zeros = lambda shapes: [jnp.zeros(x.shape, x.dtype) for x in shapes]
        states = [self.step.states[key] for key in self.moving]
        return zeros(states), zeros(self.step.parameters.values())

    def _factors(self, trace: InfluenceTrace) -> tuple[Values, Values]:
        states, parameters = trace.value
        by_state = zip(self.moving, states, strict=True)
        return Values(by_state), Values(
            zip(self.step.parameters, parameters, strict=True)
        )

    def advance(
        self, point: StepPoint, trace: InfluenceTrace, seed: Any
    ) -> tuple[list, list]:
        """Both factors after a step, balanced so that neither grows more than the
        other."""
        s, theta = self._factors(trace)
        key = jax.random.fold_in(jax.random.key(self.seed), seed)
        key = jax.random.fold_in(key, trace.steps)
        still = jax.tree.map(jnp.zeros_like, point.parameters)
        new, pushed = point.pushed(still, s)
        leaves, structure = jax.tree.flatten(new)
        keys = jax.random.split(key, len(leaves))
        signs = [_signs(k, x) for k, x in zip(keys, leaves, strict=True)]
        nu = jax.tree.unflatten(structure, signs)
        by_parameters = lambda p: point.advance(p, point.states)
        _, pull = jax.vjp(by_parameters, point.parameters)
        (pulled,) = pull(jax.tree.map(jnp.conj, nu))
        tiny = float(jnp.finfo(self.dtype).tiny) ** 0.5
        past = jnp.sqrt((_norm(theta) + tiny) / (_norm(pushed) + tiny))
        now = jnp.sqrt((_norm(pulled) + tiny) / (_norm(nu) + tiny))
        s = jax.tree.map(lambda a, b: (past * a + now * b).astype(a.dtype), pushed, nu)
        theta = jax.tree.map(
            lambda a, b: (a / past + b / now).astype(a.dtype), theta, pulled
        )
        return list(s.pick(self.moving).values()), list(theta.values())

    def gradient(self, trace: InfluenceTrace, bar: Values) -> Values:
        s, theta = self._factors(trace)
        factor = jnp.real(sum(jnp.sum(a * s[key]) for key, a in bar.items()))
        return jax.tree.map(lambda x: (factor * x).astype(x.dtype), theta)


def _signs(key: jax.Array, like: jax.Array) -> jax.Array:
    """Random signs, of real and imaginary part apart."""
    if not jnp.iscomplexobj(like):
        return jax.random.rademacher(key, like.shape, like.dtype)
    parts = jax.random.rademacher(key, (2, *like.shape), jnp.real(like).dtype)
    return jax.lax.complex(*parts)


def _norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.abs(x) ** 2) for x in jax.tree.leaves(tree)))
