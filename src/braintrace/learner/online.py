"""Online gradients as derivatives: a step whose reverse mode in the parameters is the
learning rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..compiled_step import Values
from ..rules import Rule
from ..solver import ExactWindows, Solver
from ..solver.masking import Mask, without_nan, zero_at
from .placement import Placement, pinned, trace_axes


def online_step(
    solver: Solver,
    rule: Rule,
    window: bool,
    exact: bool,
    deep: bool = False,
    placement: Placement | None = None,
) -> Callable:
    """A step, or a window of steps, whose reverse derivative in the parameters is the
    online gradient.

    A function of parameters, states, traces, inputs and the rule's state; it gives
    values of targets and outputs, the next states and the next traces. ``exact``:
    reverse mode goes through the whole step inside the window; ``deep``: all but the
    paths from one position of a group to another across time.
    """
    step = solver.step
    windows = ExactWindows(deep, rule.predictor) if exact else None
    stack = lambda tree: tree if window else jax.tree.map(lambda x: x[None], tree)
    single = lambda tree: tree if window else jax.tree.map(lambda x: x[0], tree)

    def run(
        parameters: Values,
        states: Values,
        traces: list,
        inputs: Values,
        rule_state: Any,
    ) -> tuple[Values, Values, list]:
        values, new, traces = solver.run(
            parameters, states, traces, stack(inputs), rule_state
        )
        traces = pinned(placement, traces, trace_axes(solver))
        return single(values), pinned(placement, new), traces

    def ahead(*given: Any) -> tuple:
        return run(*given), given

    def back(given: tuple, bars: tuple) -> tuple:
        parameters, states, traces, inputs, rule_state = given
        value_bars, state_bars, _ = bars
        length = len(jax.tree.leaves(inputs)[0]) if window else 1
        cotangents = []
        new_to_old = {new: old for old, new in step.carried}
        for key in step.targets:
            bar = stack(value_bars[key])
            if key in new_to_old:
                # The new states of the last step are those that the call returns.
                bar = bar.at[-1].add(state_bars[new_to_old[key]])
            cotangents.append(jnp.broadcast_to(bar, (length, *bar.shape[1:])))
        steps, silent = stack(inputs), Mask.of(cotangents).silent
        if window or rule.predictor:
            # Credit passes through steps whose outputs count for nothing.
            steps = without_nan(steps, silent)
        gradients = solver.gradient(
            parameters, states, traces, steps, cotangents, windows, rule_state
        )
        if rule.predictor is None:
            # Nothing counts, so there is nothing, even if it was 0 · inf.
            gradients = zero_at(gradients, jnp.all(silent))
        rest = (states, traces, inputs, rule_state)
        return gradients, *map(_no_tangent, rest)

    found = jax.custom_vjp(run)
    found.defvjp(ahead, back)
    return found


def _no_tangent(tree: Any) -> Any:
    def zero(x: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return jnp.zeros_like(x)
        return np.zeros(jnp.shape(x), jax.dtypes.float0)

    return jax.tree.map(zero, tree)
