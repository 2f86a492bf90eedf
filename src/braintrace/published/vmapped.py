"""Learners mapped over a batch by the user, and functions that run them over sequences.

``braintrace.compile(..., vmap=True)`` does the same and solves sequences in blocks. The
functions of this file call any learner step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from ..errors import three_parts
from ..learner import Learner, MultiStepData
from ..learner.arguments import LOSS_OUTPUTS, check_choice, length_of
from ..learner.losses import (
    in_windows,
    loss_weights,
    results,
    weighted,
    weights_like,
    window_weights,
)


class _WithLearners(type(brainstate.nn.Module)):  # type: ignore[misc]
    """Learners count as instances of some classes, though they do not inherit from
    them."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or (
            isinstance(instance, Learner) and cls.counts(instance)
        )

    def __subclasscheck__(cls, other: type) -> bool:
        return super().__subclasscheck__(other) or (
            cls.is_driver and issubclass(other, Learner)
        )


class SequenceDriverMixin(metaclass=_WithLearners):
    """``etrace_grad`` and ``etrace_evolve`` for any object that is called step by step.

    Every learner has both methods and is an instance of this class.
    """

    is_driver = True

    @staticmethod
    def counts(learner: Learner) -> bool:
        """Whether a learner is an instance."""
        return True

    def etrace_grad(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        mask: Any = None,
        chunk_size: int | None = None,
        weights: Any = None,
        reduction: str = 'mean',
        loss_output: str = 'per_step',
        has_aux: bool = False,
        return_value: bool = False,
    ) -> Any:
        """The sum of the gradients of every step; see ``Learner.etrace_grad``."""
        check_choice('loss_output', loss_output, LOSS_OUTPUTS)
        check_choice('reduction', reduction, ('mean', 'sum'))
        length = length_of(sequences, step_fn)
        states = self._parameters() if weights is None else dict(weights)
        counted: tuple
        if chunk_size in (None, 1):
            counted = (None, loss_weights(mask, length, 'steps', reduction)[0])
        else:
            sequences = in_windows(sequences, length, chunk_size)
            counted = window_weights(mask, length, chunk_size or 1, reduction)

        def one(total: Any, at: tuple) -> tuple:
            xs, *weights = at

            def loss() -> tuple:
                found = step_fn(*xs)
                value, aux = found if has_aux else (found, None)
                weight = weights_like(value, chunk_size or 1, *weights)
                return weighted(value, weight), (value, weight, aux)

            gradients, rest = brainstate.transform.grad(loss, states, has_aux=True)()
            return jax.tree.map(jnp.add, total, dict(gradients)), rest

        zero = {
            path: jax.tree.map(jnp.zeros_like, state.value)
            for path, state in states.items()
        }
        run = lambda *at: brainstate.transform.scan(one, zero, at)
        gradients, (losses, counts, aux) = run(sequences, *counted)
        paths = {path: path for path in states}
        losses, counts = losses.reshape(-1), counts.reshape(-1)
        given = (mask, paths, loss_output, return_value, has_aux)
        return results(gradients, losses, counts, aux, *given)

    def etrace_evolve(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any] | None = None,
        chunk_size: int | None = None,
        return_outputs: bool = False,
    ) -> Any:
        """Advance along a sequence without a loss; see ``Learner.etrace_evolve``."""
        call: Any = self
        if chunk_size not in (None, 1):
            sequences = in_windows(sequences, length_of(sequences, step_fn), chunk_size)
            call = lambda *xs: self(*map(MultiStepData, xs))  # type: ignore[operator]
        outputs = brainstate.transform.for_loop(step_fn or call, *sequences)
        return outputs if return_outputs else None

    def _parameters(self) -> dict:
        module: Any = self
        return dict(module.states(brainstate.ParamState))


class ETraceVmap(SequenceDriverMixin, brainstate.nn.Vmap, metaclass=_WithLearners):
    """A learner mapped over a batch. Learners of ``compile(..., vmap=True)`` are
    instances of this class."""

    is_driver = False

    @staticmethod
    def counts(learner: Learner) -> bool:
        """Whether a learner maps its model."""
        return learner.vmap

    def __init__(
        self,
        module: Any,
        in_axes: Any = 0,
        out_axes: Any = 0,
        vmap_states: Any = None,
        vmap_out_states: Any = None,
        axis_name: Any = None,
        axis_size: int | None = None,
    ):
        if not isinstance(module, Learner):
            raise TypeError(
                three_parts(
                    f'ETraceVmap({type(module).__name__})',
                    'it maps a learner',
                    "braintrace.compile(model, 'd_rtrl', x, batch_size=8, vmap=True)",
                )
            )
        super().__init__(
            module,
            in_axes=in_axes,
            out_axes=out_axes,
            vmap_states=vmap_states,
            vmap_out_states=vmap_out_states,
            axis_name=axis_name,
            axis_size=axis_size,
        )

    def _parameters(self) -> dict:
        module: Any = self.module
        return dict(module.param_states)
