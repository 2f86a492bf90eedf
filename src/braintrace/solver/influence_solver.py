"""A whole sequence solved by an influence that is carried from step to step.

Letters: t steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import all_zero, sum_type
from ..compiled_step import CompiledStep, Values
from .influence import Influence, InfluenceTrace, StepPoint
from .masking import without_nan, zero_at
from .solved import Solved
from .window import run_window


@dataclass(frozen=True, eq=False)
class InfluenceSolver:
    """Solves sequences of one step by carrying an influence forward. Pure, as a
    BlockSolver is."""

    step: CompiledStep
    influence: Influence

    owner = (0,)
    """Its one trace shares nothing."""
    kept_bytes = 1
    """Nothing is kept of a step."""

    @property
    def trace_names(self) -> list[tuple]:
        """The one influence: of all parameters, on all states."""
        paths = [path for group in self.step.groups for path in group.name]
        return [(tuple(self.step.names.values()), 'influence', tuple(paths))]

    def init_traces(self) -> list[InfluenceTrace]:
        """The influence at the start: none."""
        return [InfluenceTrace(self.influence.init(), jnp.zeros((), jnp.int32))]

    @cached_property
    def trace_shapes(self) -> list[InfluenceTrace]:
        """Shapes and types of the influence."""
        return jax.eval_shape(self.init_traces)

    def one_pass(
        self,
        parameters: Values,
        states: Values,
        traces: list,
        inputs: Values,
        weights: jax.Array,
        rule_state: Any = 0,
        masked: bool = True,
    ) -> Solved:
        """A sequence step by step: gradients, losses, next states, next influence.

        ``masked``: some of the weights may be zero.
        """
        (loss,) = self.step.targets
        gradients, values, states, traces = self._solve(
            parameters, states, traces, inputs, [weights], rule_state, masked
        )
        aux = values.pick(self.step.aux)
        return Solved(gradients, values[loss], aux, states, traces)

    def evolve(
        self,
        parameters: Values,
        states: Values,
        traces: list,
        inputs: Values,
    ) -> Solved:
        """Advance states and influence without a loss; auxiliary values come along."""
        values, states, traces = self.run(parameters, states, traces, inputs)
        return Solved(
            Values(), jnp.zeros(0), values.pick(self.step.aux), states, traces
        )

    def run(
        self,
        parameters: Values,
        states: Values,
        traces: list,
        inputs: Values,
        rule_state: Any = 0,
    ) -> tuple[Values, Values, list]:
        """A few steps: targets and auxiliary values of each, next states, next
        influence."""

        def one(carry: tuple, xs: Values) -> tuple[tuple, Values]:
            states, trace = carry
            states, trace, values = self._moved(
                parameters, states, trace, xs, without_nan(xs), rule_state
            )
            return (states, trace), values

        (states, trace), values = jax.lax.scan(one, (states, traces[0]), inputs)
        return values, states, [trace]

    def block_gradient(
        self,
        parameters: Values,
        states: Values,
        traces: list,
        inputs: Values,
        cotangents: Sequence[jax.Array],
        rule_state: Any = 0,
    ) -> Values:
        """Gradient of a few steps for cotangents (t, ...) of their targets."""
        given = (parameters, states, traces, inputs, cotangents, rule_state)
        return self._solve(*given)[0]

    def _solve(
        self,
        parameters: Values,
        states: Values,
        traces: list,
        inputs: Values,
        cotangents: Sequence[jax.Array],
        rule_state: Any,
        masked: bool = True,
    ) -> tuple[Values, Values, Values, list]:
        """Step by step for cotangents (t, ...) of targets: gradients, values of every
        step, next states, next influence."""

        def one(carry: tuple, at: tuple) -> tuple[tuple, Values]:
            states, trace, total = carry
            xs, bars = at
            run = lambda parameters, states: self.step.run(parameters, states, xs)
            gradient = self._gradient(run, parameters, states, trace, bars)
            if masked:
                gradient = zero_at(gradient, all_zero(bars))
            states, trace, values = self._moved(
                parameters, states, trace, xs, xs, rule_state
            )
            return (states, trace, jax.tree.map(jnp.add, total, gradient)), values

        zero = lambda x: jnp.zeros_like(x, sum_type(x.dtype))
        start = (states, traces[0], jax.tree.map(zero, parameters))
        given = (inputs, list(cotangents))
        (states, trace, total), values = jax.lax.scan(one, start, given)
        in_type = lambda x, like: x.astype(like.dtype)
        return jax.tree.map(in_type, total, parameters), values, states, [trace]

    def window_gradient(
        self,
        parameters: Values,
        states: Values,
        traces: list,
        inputs: Values,
        cotangents: Sequence[jax.Array],
        rule_state: Any = 0,
    ) -> Values:
        """Gradient of a window for cotangents (t, ...) of its targets: reverse mode
        inside, and the credit of the states at its start times their influence.

        ``rule_state`` is not read: the influence at the start of the window is known.
        """
        run = lambda parameters, states: run_window(
            self.step, parameters, states, inputs
        )
        return self._gradient(run, parameters, states, traces[0], cotangents)

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

        moving = states.pick(self.influence.moving)
        values, pull = jax.vjp(targets, parameters, moving)
        mine, past = pull(_like(bars, values))
        return jax.tree.map(jnp.add, mine, self.influence.gradient(trace, past))

    def _moved(
        self,
        parameters: Values,
        states: Values,
        trace: InfluenceTrace,
        inputs: Values,
        inputs_of_trace: Values,
        rule_state: Any,
    ) -> tuple[Values, InfluenceTrace, Values]:
        """States, influence, targets and auxiliary values after a step.

        ``inputs_of_trace``: those at which the influence advances.
        """
        keys = self.influence.moving
        new, targets, aux = self.step.run(parameters, states, inputs)

        def advance(parameters: Values, moving: Values) -> Values:
            found = self.step.run(parameters, states | moving, inputs_of_trace)
            return found[0].pick(keys)

        forward = self.step.has_forward_mode
        point = StepPoint(advance, parameters, states.pick(keys), forward)
        value = self.influence.advance(point, trace, rule_state)
        values = Values(zip(self.step.targets, targets, strict=True)) | aux
        return new, InfluenceTrace(value, trace.steps + 1), values


def _like(bars: Sequence[jax.Array], values: Sequence[jax.Array]) -> list[jax.Array]:
    """Cotangents in the types of their values."""
    pairs = zip(bars, values, strict=True)
    return [jnp.asarray(bar).astype(x.dtype) for bar, x in pairs]
