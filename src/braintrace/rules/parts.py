"""What a rule may be given as a whole: feedback, a filter, a mean of gradients, a predictor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .numbers import as_count, as_decay, as_positive, as_seed


@dataclass(frozen=True)
class FixedRandomFeedback:
    """Weights that carry errors back from a read-out: random, of the read-out's own shape, and kept.

    ``scale``: their standard deviation; by default one over the root of the read-out's inputs. ``align``: what each
    update leaves of their distance to the read-out's weights; None keeps them as they are.
    """

    key: int = 0
    scale: float | None = None
    align: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, 'key', as_seed('key', self.key))
        if self.scale is not None:
            object.__setattr__(self, 'scale', as_positive('scale', self.scale))
        if self.align is not None:
            object.__setattr__(self, 'align', as_decay('align', self.align))

    def __call__(self, place: int, shape: Sequence[int], dtype: Any) -> jax.Array:
        """The weights of one read-out of a model."""
        scale = self.scale if self.scale is not None else 1 / max(shape[0] if shape else 1, 1) ** 0.5
        key = jax.random.fold_in(jax.random.key(self.key), place)
        return scale * jax.random.normal(key, tuple(shape), dtype)


@dataclass(frozen=True)
class KappaFilter:
    """The low-pass filter of a trace: ē_t = κ ē_{t-1} + ε_t."""

    kappa: float

    def __post_init__(self) -> None:
        object.__setattr__(self, 'kappa', as_decay('kappa', self.kappa))


@dataclass(frozen=True)
class GradExpon:
    """A running mean of gradients: ḡ = decay · ḡ + (1 - decay) · g, without the pull of its start at zero.

    A pure function of trees: ``mean, state = GradExpon(0.9)(gradients, state)``, first with ``state=None``.
    """

    decay: float

    def __post_init__(self) -> None:
        object.__setattr__(self, 'decay', as_decay('decay', self.decay))

    def __call__(self, gradients: Any, state: Any = None) -> tuple[Any, Any]:
        """The mean after these gradients, and the state for the next."""
        start = (jax.tree.map(jnp.zeros_like, gradients), jnp.zeros(()))
        mean, count = start if state is None else state
        mean = jax.tree.map(lambda m, g: self.decay * m + (1 - self.decay) * g, mean, gradients)
        count = count + 1
        corrected = jax.tree.map(lambda m: m / (1 - self.decay**count).astype(m.dtype), mean)
        return corrected, (mean, count)


@dataclass(frozen=True)
class SyntheticGradient:
    """A predictor of the credit that a group's states get from the future: one hidden layer over its units.

    ``width``: of the hidden layer; ``rate``: of its own gradient descent, once a call of the learner. It starts by
    predicting nothing, so that learning starts as truncated BPTT.
    """

    width: int = 64
    rate: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, 'width', as_count('width', self.width))
        object.__setattr__(self, 'rate', as_positive('rate', self.rate))
        object.__setattr__(self, 'seed', as_seed('seed', self.seed))

    def init(self, shapes: Sequence[tuple[int, tuple[int, ...], Any]]) -> list[jax.Array]:
        """Weights for groups of so many states of a shape and type."""
        weights: list[jax.Array] = []
        for g, (count, shape, dtype) in enumerate(shapes):
            size = count * (shape[-1] if shape else 1)
            key = jax.random.fold_in(jax.random.key(self.seed), g)
            weights.append(jax.random.normal(key, (size, self.width), dtype) / size**0.5)
            weights.append(jnp.zeros(self.width, dtype))
            weights.append(jnp.zeros((self.width, size), dtype))
            weights.append(jnp.zeros(size, dtype))
        return weights

    def __call__(self, weights: Sequence[jax.Array], states: list[dict[int, jax.Array]]) -> list[dict[int, jax.Array]]:
        """The credit of every state."""
        found = []
        for g, parts in enumerate(states):
            a, b, c, d = weights[4 * g : 4 * g + 4]
            x = jnp.concatenate([jnp.atleast_1d(p) for p in parts.values()], axis=-1)
            y = jnp.tanh(x @ a + b) @ c + d
            pieces = jnp.split(y, len(parts), axis=-1)
            found.append({i: p.reshape(parts[i].shape) for i, p in zip(parts, pieces, strict=True)})
        return found

    def error(self, weights: Sequence[jax.Array], states: list, right: list) -> jax.Array:
        """Mean squared distance to the right credit."""
        pairs = zip(jax.tree.leaves(self(weights, states)), jax.tree.leaves(right), strict=True)
        total: Any = sum(jnp.mean((a - b) ** 2) for a, b in pairs)
        return total
