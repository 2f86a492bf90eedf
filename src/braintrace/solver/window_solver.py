"""Windows of a sequence: reverse mode inside, traces or a predictor across them.

Letters: t steps of the window, h positions, s components of a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import sum_type
from ..compiled_step import CompiledStep, Components, Values
from .block import Block, forward, length_of, over_blocks
from .block_credit import credit_at_start
from .interface import Predictor
from .masking import without_nan, zero_at
from .solved import Solved, WeightSums, add
from .traces import Trace, Traces
from .visits import add_factor_gradients, advance_silently
from .window import window_gradient


@dataclass(frozen=True, eq=False)
class WindowSolver:
    """Solves windows of a step, and sequences of them. Pure: states and traces go in
    and come out."""

    step: CompiledStep
    traces: Traces
    sums: WeightSums

    def solve(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
        weights: jax.Array,
        length: int,
        deep: bool = False,
        predictor: Predictor | None = None,
        fresh: bool = False,
        unit: Any = 1.0,
        rule_state: Any = None,
        masked: bool = True,
    ) -> Solved:
        """Reverse mode inside windows of a length; traces or a predictor across them.

        ``deep``: paths from one position of a group to another across time are cut.
        ``fresh``: nothing came before the sequence and nothing follows it. ``unit``: the
        weight of a loss that is not masked (1/T for a mean). The predictor is trained for losses
        of weight 1, so its credit is multiplied by ``unit``; its weights are
        ``rule_state``. ``masked``: some of the weights may be zero.
        """
        step = self.step
        constants = step.constants(parameters, states)
        count = -(-length_of(inputs) // length)
        zero = Values(
            (key, jnp.zeros_like(x, sum_type(x.dtype))) for key, x in parameters.items()
        )
        learned = [jnp.zeros_like(x) for x in rule_state] if predictor else []

        def one(carry: tuple, number: Any, at: tuple) -> tuple[tuple, tuple]:
            states, traces, total, through, learned, error = carry
            inputs, weights = at
            credit_after = None
            if predictor:
                # Nothing follows the last window of a fresh sequence.
                follows = jnp.where(fresh & (number == count - 1), 0.0, unit)

                def credit_after(end: list[Components]) -> list[Components]:
                    scale = lambda x: follows.astype(x.dtype) * x
                    return jax.tree.map(scale, predictor(rule_state, end))

            found = window_gradient(
                step, parameters, states, inputs, [weights], deep, credit_after, masked
            )
            if predictor:
                # The credit at the start of this window is what should have been
                # predicted at the end of the window before; the first has none before.
                start = [
                    dict(enumerate(group.components(states))) for group in step.groups
                ]
                target = jax.tree.map(
                    lambda x: (x / unit).astype(x.dtype), found.credit
                )
                counts = jnp.where(fresh & (number == 0), 0.0, 1.0)
                distance, change = predictor.error_and_change(rule_state, start, target)
                pairs = zip(learned, change, strict=True)
                learned = [a + counts.astype(b.dtype) * b for a, b in pairs]
                error = error + counts * distance
            if traces:
                traces, past = self.across(
                    constants, states, inputs, traces, found.credit
                )
                if masked and predictor is None:
                    past = zero_at(past, jnp.all(weights == 0))
                through = add(through, past)
            total = add(total, found.gradients)
            carry = (found.states, traces, total, through, learned, error)
            return carry, (found.targets[0], found.aux)

        start = (states, traces, zero, self.sums.zero(), learned, jnp.zeros(()))
        carry, (losses, aux) = over_blocks(one, start, (inputs, weights), length)
        last, traces, total, through, learned, error = carry
        if traces:
            total = add(total, self.sums.of_parameters(parameters, states, through))
        total = Values((k, x.astype(parameters[k].dtype)) for k, x in total.items())
        windows = max(count - fresh, 1)
        update = [x / windows for x in learned]
        return Solved(total, losses, aux, last, traces, update, error / windows)

    def gradient(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
        cotangents: Sequence[jax.Array],
        deep: bool = False,
        predictor: Predictor | None = None,
        rule_state: Any = None,
    ) -> Values:
        """Gradient of a window for cotangents of its targets: reverse mode inside, γ_0
        · ε_0 across.

        ``predictor``: of the credit that the end of the window gets from a loss of
        weight one.
        """
        credit_after = None
        if predictor:
            credit_after = lambda end: predictor(rule_state, end)
        found = window_gradient(
            self.step, parameters, states, inputs, cotangents, deep, credit_after
        )
        if not traces:
            return found.gradients
        constants = self.step.constants(parameters, states)
        _, past = self.across(constants, states, inputs, traces, found.credit)
        return add(found.gradients, self.sums.of_parameters(parameters, states, past))

    def across(
        self,
        constants: Values,
        states: Values,
        inputs: Values,
        traces: Trace,
        credit: Sequence[Components] | None = None,
    ) -> tuple[Trace, Values]:
        """The traces after a window, and γ_0 · ε_0 by weight.

        The losses of the window give their credit by reverse mode, so the traces only
        advance. ``credit``: γ_0, None for none.
        """
        step, traces_of, past = self.step, self.traces, self.sums.zero()
        last, kept = forward(step, constants, states.pick(step.written), inputs)
        block = Block.of(step, constants, *without_nan((inputs | kept, last)))
        if credit is not None:
            credit = credit_at_start(traces_of.recursions, block, credit)
            past = add_factor_gradients(traces_of, block, traces, past, credit)
        return advance_silently(traces_of, block, traces, past, credit)
