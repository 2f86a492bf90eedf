"""What a sequence gives: its gradients are summed over steps by weight, and in the end
become those of parameters.

Letters: t steps, n devices, w elements of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from ..arrays import sum_type, zero_gradient
from ..compiled_step import CompiledStep, Key, Shares, Values

if TYPE_CHECKING:
    from .traces import Trace


class Solved(NamedTuple):
    """What a sequence gives: gradients of parameters, losses and auxiliary values of
    every step.

    ``predictor_update``, ``predictor_error``: the change of a predictor's weights, its
    error.
    """

    gradients: Values
    losses: jax.Array
    aux: Values
    states: Values
    traces: Trace
    predictor_update: Sequence[jax.Array] = ()
    predictor_error: Any = 0.0


@dataclass(frozen=True, eq=False)
class WeightSums:
    """Sums of gradients by weight of a step. A weight is what the step computes of its
    parameters, once a call."""

    step: CompiledStep

    @cached_property
    def shapes(self) -> Values:
        """Shapes and types of the weights."""
        constants = jax.eval_shape(
            self.step.constants, Values(self.step.parameters), Values(self.step.states)
        )
        return constants.pick(self.step.weights)

    def zero(self) -> Values:
        """No gradient yet."""
        shapes = self.shapes.items()
        zero = lambda x: zero_gradient(x.shape, sum_type(x.dtype))
        return Values((key, zero(x)) for key, x in shapes)

    def of_constants(self, cotangents: Sequence[jax.Array]) -> Values:
        """Gradients of targets that no data reaches, from cotangents (t, ...)."""
        total = Values()
        for key, cotangent in zip(self.step.targets, cotangents, strict=True):
            if key in self.step.constant_targets:
                dtype = sum_type(self.shapes[key].dtype)
                total[key] = jnp.sum(cotangent, axis=0).astype(dtype)
        return total

    def of_parameters(
        self, parameters: Values, states: Values, total: Values
    ) -> Values:
        """Gradients of parameters from those of the weights that they determine."""
        total = Values((key, _over_devices(x)) for key, x in total.items())
        pieces = self.step.pieces
        whole = [key for key in self.step.weights if key not in pieces]
        weights = lambda p: self.step.constants(p, states).pick(whole)
        values, pull_back = jax.vjp(weights, parameters)
        bars = Values((key, total[key].astype(values[key].dtype)) for key in whole)
        found = pull_back(bars)[0]
        # Written into their places: reverse mode would pad each piece to the whole and
        # add up the sums, which takes as long as an update by a small network.
        for key, (parameter, box) in pieces.items():
            gradient = found[parameter]
            piece = gradient[box] + total[key].astype(gradient.dtype)
            found[parameter] = gradient.at[box].set(piece)
        return found


def add(total: Values, more: Mapping[Key, Any]) -> Values:
    """The sum of gradients for the keys of ``total``. Gradients of other weights in
    ``more`` are not used."""
    return Values(
        (key, plus(x, more[key]) if key in more else x) for key, x in total.items()
    )


def plus(x: jax.Array | Shares, y: jax.Array | Shares) -> jax.Array | Shares:
    """The sum of two gradients. A plain one, which is summed over devices already, is
    added to the term of the first device only."""
    if isinstance(x, Shares):
        more = y.terms if isinstance(y, Shares) else _of_first_device(y, len(x.terms))
        return Shares(x.terms + more)
    return plus(y, x) if isinstance(y, Shares) else x + y


def _of_first_device(x: jax.Array, count: int) -> jax.Array:
    is_first = jnp.arange(count).reshape(-1, *(1,) * x.ndim) == 0
    return jnp.where(is_first, x, jnp.zeros_like(x))


def _over_devices(x: jax.Array | Shares) -> jax.Array:
    return jnp.sum(x.terms, axis=0) if isinstance(x, Shares) else x
