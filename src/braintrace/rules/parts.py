"""Objects that a rule may be given: feedback, a filter, a mean of gradients, a
predictor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import three_parts
from .numbers import as_count, as_decay, as_positive, as_seed, set_fields


@dataclass(frozen=True)
class FixedRandomFeedback:
    """Random weights that send errors back from a read-out. They have the shape of the
    read-out weights.

    ``scale``: their standard deviation; by default 1/√(number of inputs of the
    read-out). ``align``: the fraction of their distance to the read-out weights that
    remains after each call of the learner. When the read-out weights change, these
    weights change by the same amount, as in the updates of Kolen and Pollack. With
    ``align=None`` they are constant.
    """

    key: int = 0
    scale: float | None = None
    align: float | None = None

    def __post_init__(self) -> None:
        set_fields(self, key=as_seed('key', self.key))
        if self.scale is not None:
            set_fields(self, scale=as_positive('scale', self.scale))
        if self.align is not None:
            set_fields(self, align=as_decay('align', self.align))

    def __call__(self, place: int, shape: Sequence[int], dtype: Any) -> jax.Array:
        """The weights of one read-out of a model."""
        scale = (
            self.scale
            if self.scale is not None
            else 1 / max(shape[0] if shape else 1, 1) ** 0.5
        )
        key = jax.random.fold_in(jax.random.key(self.key), place)
        return scale * jax.random.normal(key, tuple(shape), dtype)


class GivenFeedback:
    """Weights of the user's own that carry errors back, one array for each read-out.

    Each has the shape of the read-out's weights, or of their transpose.
    """

    def __init__(self, arrays: Sequence[Any]):
        self.arrays = tuple(np.array(x) for x in arrays)

    def _key(self) -> tuple:
        return tuple((x.shape, x.dtype.str, x.tobytes()) for x in self.arrays)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GivenFeedback) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __call__(self, place: int, shape: Sequence[int], dtype: Any) -> jax.Array:
        """The weights of one read-out of a model."""
        shapes = [x.shape for x in self.arrays]
        if place < len(shapes) and shapes[place] == tuple(shape):
            return jnp.asarray(self.arrays[place], dtype)
        if place < len(shapes) and shapes[place] == tuple(shape)[::-1]:
            return jnp.asarray(self.arrays[place].T, dtype)
        raise ValueError(
            three_parts(
                f'feedback by {len(shapes)} array(s) of shape '
                f'{", ".join(map(str, shapes))}',
                f'read-out number {place} has weights of shape {tuple(shape)}',
                f'one array for each read-out, here of shape {tuple(shape)} or '
                f'{tuple(shape)[::-1]}',
            )
        )


@dataclass(frozen=True)
class KappaFilter:
    """The low-pass filter of a trace: ē_t = κ ē_{t-1} + (∂u_t/∂h_t) ε_t."""

    kappa: float

    def __post_init__(self) -> None:
        set_fields(self, kappa=as_decay('kappa', self.kappa))


def as_filter(value: float | KappaFilter | None) -> float | None:
    """κ of a filter; None for no filter. One with κ = 0 changes nothing."""
    value = value.kappa if isinstance(value, KappaFilter) else value
    if value is None:
        return None
    return as_decay('kappa_filter_decay', value) or None


@dataclass(frozen=True)
class GradExpon:
    """A running mean of gradients: ḡ = decay · ḡ + (1 - decay) · g, corrected for its
    start at zero.

    A pure function of trees: ``mean, state = GradExpon(0.9)(gradients, state)``. Use
    ``state=None`` at the first call.
    """

    decay: float

    def __post_init__(self) -> None:
        set_fields(self, decay=as_decay('decay', self.decay))

    def __call__(self, gradients: Any, state: Any = None) -> tuple[Any, Any]:
        """The mean after these gradients, and the state for the next."""
        start = (jax.tree.map(jnp.zeros_like, gradients), jnp.zeros(()))
        mean, count = start if state is None else state
        mean = jax.tree.map(
            lambda m, g: self.decay * m + (1 - self.decay) * g, mean, gradients
        )
        count = count + 1
        corrected = jax.tree.map(
            lambda m: m / (1 - self.decay**count).astype(m.dtype), mean
        )
        return corrected, (mean, count)


@dataclass(frozen=True)
class SyntheticGradient:
    """A network with one hidden layer that predicts the credit of later steps for the
    states of a group.

    ``width``: the width of the hidden layer. ``rate``: the learning rate; 1 is the
    largest step that a bound on the curvature of the error allows, independent of the
    scale of states and credit. At first the predictor returns zeros, so learning starts
    as truncated BPTT.
    """

    width: int = 64
    rate: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        set_fields(
            self,
            width=as_count('width', self.width),
            rate=as_positive('rate', self.rate),
            seed=as_seed('seed', self.seed),
        )

    def init(
        self, shapes: Sequence[tuple[int, tuple[int, ...], Any]]
    ) -> list[jax.Array]:
        """Weights for groups of so many states of a shape and type."""
        weights: list[jax.Array] = []
        for g, (count, shape, dtype) in enumerate(shapes):
            size = count * (shape[-1] if shape else 1)
            key = jax.random.fold_in(jax.random.key(self.seed), g)
            weights.append(
                jax.random.normal(key, (size, self.width), dtype) / size**0.5
            )
            weights.append(jnp.zeros(self.width, dtype))
            weights.append(jnp.zeros((self.width, size), dtype))
            weights.append(jnp.zeros(size, dtype))
        return weights

    def __call__(
        self, weights: Sequence[jax.Array], states: list[dict[int, jax.Array]]
    ) -> list[dict[int, jax.Array]]:
        """The credit of every state."""
        found = []
        for g, parts in enumerate(states):
            _, y = _layers(weights[4 * g : 4 * g + 4], _side_by_side(parts))
            pieces = jnp.split(y, len(parts), axis=-1)
            found.append(
                {
                    i: p.reshape(parts[i].shape)
                    for i, p in zip(parts, pieces, strict=True)
                }
            )
        return found

    def error_and_change(
        self, weights: Sequence[jax.Array], states: list, right: list
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Mean squared distance to the right credit, and the change of the weights that
        reduces it.

        The gradient is divided by a bound of the error's curvature, so that with a rate
        up to 1 no change overshoots.
        """
        error: Any = 0.0
        changes: list[jax.Array] = []
        for g, (parts, credit) in enumerate(zip(states, right, strict=True)):
            own, x, wanted = (
                weights[4 * g : 4 * g + 4],
                _side_by_side(parts),
                _side_by_side(credit),
            )
            wrong = lambda w, x=x, wanted=wanted: _layers(w, x)[1] - wanted
            squares = lambda w, wrong=wrong: (
                jnp.mean(jnp.sum(wrong(w) ** 2, axis=-1)) / 2
            )
            hidden, _ = _layers(own, x)
            inner = (
                ((1 - hidden**2) ** 2)
                @ jnp.sum(own[2] ** 2, axis=1)
                * (1 + jnp.sum(x**2, axis=-1))
            )
            curvature = 1 + jnp.mean(jnp.sum(hidden**2, axis=-1) + inner)
            error = error + jnp.mean(wrong(own) ** 2)
            changes += [-self.rate * d / curvature for d in jax.grad(squares)(own)]
        return error, changes


def _layers(weights: Sequence[jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The hidden layer and the output."""
    a, b, c, d = weights
    hidden = jnp.tanh(x.astype(a.dtype) @ a + b)
    return hidden, hidden @ c + d


def _side_by_side(parts: dict[int, jax.Array]) -> jax.Array:
    return jnp.concatenate([jnp.atleast_1d(p) for p in parts.values()], axis=-1)
