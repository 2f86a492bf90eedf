"""One block: K consecutive steps, forward in time and then all derivatives at once; and
the one loop over blocks.

    gradient = Σ_t ∂ℓ_t/∂θ + Σ_t (∂h_t/∂θ|local)ᵀ γ_t  one product for each weight

Letters: t steps of the block, b samples, h positions, s components of a position, y
results of taps.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..arrays import samples_are_split, sum_type
from ..compiled_step import (
    Box,
    CompiledStep,
    Components,
    Key,
    LossTerms,
    Operands,
    Tap,
    Values,
)
from ..derivatives import pull_back
from .masking import FILL, Mask, finite, zero_at
from .solved import plus


def forward(
    step: CompiledStep, constants: Values, states: Values, inputs: Values
) -> tuple[Values, Values]:
    """The states after a block, and what its steps leave: projections, kept values, old
    states."""
    old_keys = [old for old, _ in step.hidden]
    if length_of(inputs) == 1:
        # Preparing weights for the time loop takes longer than it saves in one
        # step.
        constants = constants.pick(k for k in constants if k not in step.prepared)
        if step.advance_once is not None:
            xs = jax.tree.map(lambda x: x[0], inputs)
            new, left = step.advance_once(constants, xs | states)
            left = left | states.pick(old_keys)
            return new, jax.tree.map(lambda x: x[None], left)
    projected = jax.vmap(step.project, (None, 0))(constants, inputs)

    def one(old: Values, xs: Values) -> tuple[Values, Values]:
        new, kept = step.advance(constants, xs | old)
        return new, kept | old.pick(old_keys)

    last, kept = jax.lax.scan(one, states, inputs | projected)
    return last, projected | kept


def with_new_states(step: CompiledStep, steps: Values, last: Values) -> Values:
    """Steps with their new hidden states: the old ones of the next step; ``last``:
    those after all."""
    new = Values()
    for old_key, new_key in step.hidden:
        new[new_key] = jnp.concatenate([steps[old_key][1:], last[old_key][None]])
    return steps | new


class Block(NamedTuple):
    """The completed steps of a block, with t first, and their mask, if there is one."""

    step: CompiledStep
    constants: Values
    values: Values
    mask: Mask | None

    @classmethod
    def of(
        cls,
        step: CompiledStep,
        constants: Values,
        steps: Values,
        last: Values,
        mask: Mask | None = None,
    ) -> Block:
        """Steps with everything that derivative programs read.

        ``steps``: inputs and what :func:`forward` left; ``last``: the states after them.
        """
        steps = with_new_states(step, steps, last)
        values = jax.vmap(step.complete, (None, 0))(constants, steps)
        return cls(step, constants, values, mask)

    @property
    def length(self) -> int:
        """The number of steps."""
        return length_of(self.values)

    @property
    def first(self) -> Block:
        """The first step alone, as it is."""
        start = jax.tree.map(lambda x: x[:1], self.values)
        return self._replace(values=start, mask=None)

    def at_each_step(self, function: Callable[..., Any], *given: Any) -> Any:
        """``function(constants, values, *given)`` of every step; ``given`` has t
        first."""
        axes = (None, *(0,) * (1 + len(given)))
        return jax.vmap(function, axes)(self.constants, self.values, *given)

    def pull(self, credit: Sequence[Components]) -> list[Values]:
        """(∂h_t/∂y)ᵀ γ_t of every group, step and tap result y that reaches a component
        of γ."""
        return self.at_each_step(partial(pull_back, self.step), list(credit))

    def operands(self, tap: Tap) -> tuple[Operands, Operands]:
        """Operands of a tap that stay the same, and those of each step, finite at
        silent ones."""
        fixed, data = tap.operands(self.constants, self.values)
        if self.mask is not None:
            data = finite(data, self.mask.silent, FILL)
        return fixed, data

    def zero_if_dead(self, tree: Any) -> Any:
        """Arrays with t first, zero at dead steps."""
        return tree if self.mask is None else zero_at(tree, self.mask.dead)

    def zero_if_silent(self, tree: Any) -> Any:
        """Arrays with t first, zero at silent steps."""
        return tree if self.mask is None else zero_at(tree, self.mask.silent)


def split_loss(step: CompiledStep) -> LossTerms | None:
    """The loss by sample, if samples are split over devices."""
    return step.loss_terms if samples_are_split() else None


def losses_of_steps(
    step: CompiledStep, constants: Values, losses: jax.Array
) -> jax.Array:
    """The losses of all steps of a sequence. Where samples are split over devices,
    blocks leave the terms of single samples, which are summed here at once."""
    terms = split_loss(step)
    if terms is None:
        return losses
    return jax.vmap(lambda mine: terms.total(constants, mine))(losses)


# ---------------------------------------------------------------- gradients of weights


def weight_gradients(
    block: Block,
    results: Values,
    local: Sequence[Values],
    boxes: Mapping[Key, Box | None] = {},
    left_out: Container[Key] = (),
) -> Values:
    """Gradient of every weight: one pull-back of each tap over all steps of the block.

    ``results`` holds the one-step gradients of tap results that count, ``local[g]``
    what the credit of group g adds; their sum is zero outside of its box in ``boxes``.
    ``left_out``: results whose gradients are summed elsewhere.
    """
    total = Values()
    for tap in block.step.taps:
        counted = (y for y in tap.results if y in results and y not in left_out)
        y_bars = Values((y, results[y]) for y in counted)
        if not y_bars:
            continue
        fixed, data = block.operands(tap)
        cut = []
        for g, bars in enumerate(local):
            mine = Values((y, bars[y]) for y in tap.results if y in bars)
            if g not in tap.cut_gradients:
                y_bars.update((y, y_bars[y] + bar) for y, bar in mine.items())
            elif mine:
                cut.append((tap.cut_gradients[g], mine))
        reaches_states = any(y in bars for bars in local for y in tap.results)
        if block.mask is None and not reaches_states:
            data = _without_silence(data, y_bars, tap.by_sample)
        for gradients, bars in [(tap.gradients, y_bars), *cut]:
            for key, grad in gradients(fixed, data, bars, boxes).items():
                grad = jax.tree.map(lambda x: x.astype(sum_type(x.dtype)), grad)
                total[key] = plus(total[key], grad) if key in total else grad
    return total


def _without_silence(
    data: Operands, y_bars: Mapping[Key, jax.Array], by_sample: bool
) -> Operands:
    """Operands with ones at steps that no gradient reaches: 0 · NaN would be NaN.

    ``by_sample``: at samples of a step, so that no device needs to know of others.
    """
    leading = 1 + by_sample
    is_zero = lambda y: jnp.all(y == 0, axis=tuple(range(leading, y.ndim)))
    silent = jnp.stack([is_zero(y) for y in y_bars.values()]).all(axis=0)

    def spare(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        here = silent.reshape(*silent.shape, *(1,) * (x.ndim - leading))
        return jnp.where(here, jnp.ones_like(x), x)

    return {k: spare(x) for k, x in data.items()}


# ---------------------------------------------------------------- the loop over blocks


Body = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(carry, number of the block, its steps): the carry, and results with time first."""


def length_of(steps: Any) -> int:
    """The number of steps: the first axis of every array."""
    return len(jax.tree.leaves(steps)[0])


def over_blocks(
    body: Body, carry: Any, steps: Any, block: int, reverse: bool = False
) -> tuple[Any, Any]:
    """Run ``body`` over blocks of steps, forward or in reverse; the last block may be
    shorter.

    Results of all blocks are joined along time.
    """
    length = length_of(steps)
    count = length // block
    first = lambda x: x[: count * block].reshape(count, block, *x.shape[1:])
    # Not -1: a step may keep arrays without elements.
    joined = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    whole = (jnp.arange(count), jax.tree.map(first, steps))
    rest = jax.tree.map(lambda x: x[count * block :], steps)
    scanned: list[Any] = []
    left_over: list[Any] = []

    def over_whole(carry: Any) -> Any:
        if count:
            one = lambda carry, at: body(carry, *at)
            carry, found = jax.lax.scan(one, carry, whole, reverse=reverse)
            scanned.append(jax.tree.map(joined, found))
        return carry

    def over_rest(carry: Any) -> Any:
        if length % block:
            carry, found = body(carry, count, rest)
            left_over.append(found)
        return carry

    if reverse:
        carry = over_whole(over_rest(carry))
    else:
        carry = over_rest(over_whole(carry))
    parts = [*scanned, *left_over]
    return carry, jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
