"""Learning signals: what the traces are multiplied by.

Symmetric        L_t, the derivative of the loss
RandomFeedback   L_t with other weights in place of the read-outs' on the way back
Modulated        a number the caller gives, for each step, sample or neuron

Letters: t steps of the block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from ..compiled_step import CompiledStep, Components, Jacobian, Slopes, Values
from ..derivatives import Derivatives, joint_signals
from ..errors import CompilationError, three_parts
from .block import Block
from .site_facts import SiteFacts
from .traces import Traces

Signals = tuple[list[Components], list[Components]]
"""What multiplies the new traces and the old ones, by group and component."""


class SignalInputs(NamedTuple):
    """What a learning signal may read of a block, all of it with t first.

    ``cotangents``: of the targets. ``rule_state``: what the rule keeps for itself.
    """

    block: Block
    found: Derivatives
    cotangents: Sequence[jax.Array]
    traces: Traces
    rule_state: Any


class SignalPart(ABC):
    """What traces are multiplied by."""

    is_exact: ClassVar[bool] = False
    """It is the derivative of the loss."""
    is_modulator: ClassVar[bool] = False
    """It does not depend on the loss."""
    has_feedback_weights: ClassVar[bool] = False
    """Errors come back from read-outs by other weights than theirs."""

    @property
    def config(self) -> dict[str, Any]:
        """Its options of an :class:`ETraceConfig`, those by default left out."""
        return {}

    @abstractmethod
    def __call__(self, given: SignalInputs) -> Signals:
        """What takes the place of L and R of a block."""

    @abstractmethod
    def replaces(self, site: SiteFacts) -> str | None:
        """What it has in place of the derivative of the loss for one use of a
        parameter."""

    def check(self, step: CompiledStep) -> None:
        """Raise if it does not fit the read-outs of a model."""
        return

    def init_state(self) -> Any:
        """What it keeps from call to call, at first; None for nothing."""
        return None

    def next_state(self, state: Any) -> Any:
        """The state after a gradient."""
        return state


@dataclass(frozen=True)
class Symmetric(SignalPart):
    """The derivative of the loss."""

    is_exact = True

    def replaces(self, site: SiteFacts) -> None:
        """Nothing."""

    def __call__(self, given: SignalInputs) -> Signals:
        """L and R of a block."""
        return given.found.signals, given.found.reads


@dataclass(frozen=True)
class RandomFeedback(SignalPart):
    """The derivative of the loss, sent back from read-outs by other weights.

    ``weights(n, shape, dtype)`` gives those of read-out n. ``align``: what one update
    leaves of their distance to the read-out's own weights, if they follow;
    ``rule_state`` counts updates.
    """

    weights: Callable[[int, tuple[int, ...], Any], jax.Array]
    align: float | None = None

    has_feedback_weights = True

    @property
    def config(self) -> dict[str, Any]:
        """Its options of an :class:`ETraceConfig`."""
        return {'learning_signal': 'random_feedback'}

    def replaces(self, site: SiteFacts) -> str | None:
        """The weights of the read-out, if the loss passes one."""
        if not site.feedback:
            return None
        weights = (
            'fixed random weights'
            if self.align is None
            else 'random weights that approach those of the read-out'
        )
        return f'errors come back through {weights}, not through the read-out'

    def __call__(self, given: SignalInputs) -> Signals:
        """L and R of a block, with other weights back from every read-out."""
        block, found, step = given.block, given.found, given.block.step
        weights = [block.constants[key] for key in step.readouts.values()]
        back = self._back(weights, given.rule_state)
        feedback = dict(zip(step.readouts, back, strict=True))

        def one(
            constants: Values,
            values: Values,
            bars: list[jax.Array],
            inner: list[Jacobian],
            slopes: list[list[Slopes]],
        ) -> Signals:
            _, _, signals, reads = joint_signals(
                step, constants, values, bars, inner, slopes, feedback
            )
            return signals, reads

        cotangents = list(given.cotangents)
        return block.zero_if_silent(
            block.at_each_step(one, cotangents, found.inner, found.slopes)
        )

    def _back(self, weights: Sequence[Any], rule_state: Any) -> list[jax.Array]:
        """What is in place of each of the weights now."""
        found = []
        for n, weight in enumerate(weights):
            fixed = self.weights(n, weight.shape, weight.dtype)
            if self.align is not None:
                left = self.align**rule_state
                fixed = (1 - left) * weight + left * fixed
            found.append(fixed.astype(weight.dtype))
        return found

    def init_state(self) -> jax.Array | None:
        """The number of gradients, for weights that follow those of the read-out."""
        return None if self.align is None else jnp.zeros((), jnp.int32)

    def next_state(self, state: Any) -> Any:
        """One gradient more."""
        return state if self.align is None else state + 1

    def check(self, step: CompiledStep) -> None:
        """Raise unless there is a read-out and weights for each."""
        if not step.readouts:
            raise CompilationError(
                three_parts(
                    'feedback by random weights without a read-out',
                    'no product with weights lies between the states and the loss, by '
                    'which errors could be sent back',
                    'a read-out, as brainstate.nn.Linear or nn.LeakyRateReadout, '
                    'inside '
                    "the model; or feedback='symmetric'",
                )
            )
        given = Values(step.parameters), Values(step.states)
        constants = jax.eval_shape(step.constants, *given)
        for n, key in enumerate(step.readouts.values()):
            weight = constants[key]
            jax.eval_shape(lambda n=n, w=weight: self.weights(n, w.shape, w.dtype))


@dataclass(frozen=True)
class Modulated(SignalPart):
    """A modulator in place of the derivative of the loss: ``rule_state``, or the step's
    own."""

    is_modulator = True

    @property
    def config(self) -> dict[str, Any]:
        """Its options of an :class:`ETraceConfig`."""
        return {'learning_signal': 'modulatory'}

    def replaces(self, site: SiteFacts) -> str:
        """All of it."""
        return 'a modulator replaces the gradient of the loss'

    def init_state(self) -> jax.Array:
        """The modulator, 1 until another is set."""
        return jnp.ones(())

    def __call__(self, given: SignalInputs) -> Signals:
        """The modulator at all states of a block; direct reads have none."""
        step, rule_state = given.block.step, given.rule_state
        length = given.block.length
        if step.modulator is None:
            modulator = jnp.broadcast_to(rule_state, (length, *jnp.shape(rule_state)))
        else:
            modulator = given.block.at_each_step(step.modulator)
        weights = given.cotangents[0] if step.is_loss else jnp.ones(length)
        traced = {group for group, _ in given.traces.traced_results}
        signals: list[Components] = []
        for g, group in enumerate(step.groups):
            types = enumerate(group.dtypes) if g in traced else ()
            signals.append(
                {
                    i: at_positions(modulator, group.shape, weights).astype(dtype)
                    for i, dtype in types
                }
            )
        return signals, [{} for _ in step.groups]


def at_positions(
    modulator: jax.Array, shape: tuple[int, ...], weights: jax.Array
) -> jax.Array:
    """A modulator (t, ...) at all positions, times the weight of each step.

    It is one number, one for each sample, for each neuron, or for both.
    """
    own = modulator.shape[1:]
    if len(own) == 1 and len(shape) > 1:
        if own == shape[:1] == shape[-1:]:
            raise _unclear(own, shape)
        own = (*own, *(1,) * (len(shape) - 1)) if own == shape[:1] else own
    pairs = zip(own[::-1], shape[::-1], strict=False)
    if len(own) > len(shape) or any(a not in (1, b) for a, b in pairs):
        raise _unclear(own, shape)
    length = len(modulator)
    aligned = modulator.reshape(length, *(1,) * (len(shape) - len(own)), *own)
    weights = weights.reshape(-1, *(1,) * len(shape))
    # The modulator of a masked step may be NaN.
    scaled = jnp.where(weights == 0, 0, aligned) * weights
    return jnp.broadcast_to(scaled, (length, *shape))


def _unclear(got: tuple, shape: tuple) -> CompilationError:
    by_sample, by_neuron = (shape[0], *(1,) * (len(shape) - 1)), (1, *shape[1:])
    return CompilationError(
        three_parts(
            f'a modulator of shape {got} for states of shape {shape}',
            'it is neither one number, nor clearly one for each sample, for each '
            'neuron, or for '
            'both',
            f'shape () or {shape}, or with ones: {by_sample}, {by_neuron}; trace=... '
            'keeps the '
            'modulator from states whose parameters it does not choose',
        )
    )
