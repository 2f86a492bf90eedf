"""The credit of one block under a rule: the signals and matrices that the rule uses, γ
back through the steps, and what it adds to the gradients of tap results.

    γ_{t-1} = D_tᵀ (L_t + γ_t) + R_t

Values of a group are kept apart by component, so products of small matrices are written
out and entries that are zero by structure never appear. Letters: t steps of the block,
h positions, s components of a position, y results of taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..compiled_step import Box, Components, Feedback, Jacobian, Key, Signals, Values
from .block import Block, Derivatives
from .masking import zero_at
from .recursion import LinkSlopes, Recursion, sum_of
from .traces import Traces


class RecursionView(NamedTuple):
    """The derivatives of a block in the components that traces have, with the matrices
    by which the rule carries traces from step to step.

    ``link_slopes``: ∂u/∂h of what leaky read-outs remember, by group.
    """

    signals: list[Components]
    reads: list[Components]
    transitions: list[Jacobian]
    link_slopes: Sequence[LinkSlopes]


def view_of(
    recursions: Sequence[Recursion],
    block: Block,
    found: Derivatives,
    learning: Signals,
    feedback: Feedback | None,
) -> RecursionView:
    """The block as the recursion sees it; ``learning``: the signals that the rule uses.

    ``feedback``: what replaces the weights of read-outs; None where no loss is read.
    """
    signals, reads, matrices, all_slopes = [], [], [], []
    true = (found.signals, found.transitions)
    for recursion, like, jacobian, signal, read in zip(
        recursions, *true, learning.signals, learning.reads, strict=True
    ):
        slopes = [block.at_each_step(m.slopes) for m in recursion.memories]
        sent_back = []
        if feedback is not None:
            sent_back = [m.read(block, learning, feedback) for m in recursion.memories]
        signals.append(recursion.reading(signal))
        reads.append(recursion.reads(read, slopes, sent_back))
        matrices.append(recursion.transition(jacobian, like, slopes))
        all_slopes.append(slopes)
    return RecursionView(signals, reads, matrices, all_slopes)


def silent_view(recursions: Sequence[Recursion], block: Block) -> RecursionView:
    """The same for a block without a loss."""
    groups, silent = block.step.groups, []
    for group in groups:
        zero = lambda dtype, group=group: jnp.zeros((block.length, *group.shape), dtype)
        silent.append({i: zero(dtype) for i, dtype in enumerate(group.dtypes)})
    matrices = block.at_each_step(block.step.transition)
    signals = Signals(Values(), silent, [{} for _ in groups])
    found = Derivatives(Values(), *signals, matrices)
    return view_of(recursions, block, found, signals, None)


def no_credit(recursions: Sequence[Recursion]) -> list[Components]:
    """Zero for every living component of each group."""
    return [recursion.zero_credit() for recursion in recursions]


def backward_credit(
    view: RecursionView, block: Block, last: Sequence[Components]
) -> tuple[list[Components], list[Components]]:
    """γ_t of every step and group from γ at the block's end; and γ at its start."""

    def one(
        credit: list[Components], at: tuple
    ) -> tuple[list[Components], list[Components]]:
        earlier = []
        *parts, dead = at
        for later, signal, read, jacobian in zip(credit, *parts, strict=True):
            total = dict(later)
            for i, x in signal.items():
                total[i] = x + later[i] if i in later else x
            mine = {}
            for j, like in later.items():
                terms = [
                    d * total[i]
                    for (i, k), d in jacobian.items()
                    if k == j and i in total
                ]
                terms += [read[j]] if j in read else []
                mine[j] = sum_of(terms, like)
            earlier.append(mine)
        return earlier if dead is None else zero_at(earlier, dead), credit

    dead = None if block.mask is None else block.mask.dead
    at = (view.signals, view.reads, view.transitions, dead)
    first, every = jax.lax.scan(one, list(last), at, block.length, reverse=True)
    return every, first


def local_gradients(
    traces: Traces,
    block: Block,
    found: Derivatives,
    view: RecursionView,
    credit: list[Components],
    is_plain: bool,
) -> list[Values]:
    """By group, what its credit adds to the one-step gradients of tap results.

    ``is_plain``: the rule's signal is the true one, which these gradients hold already.
    """
    fold = lambda values: [
        recursion.folded(mine, slopes)
        for recursion, mine, slopes in zip(
            traces.recursions, values, view.link_slopes, strict=True
        )
    ]
    added = fold(credit)
    if not is_plain:
        added = _in_place_of_true(found.signals, added, fold(view.signals))
    # Parameters without a trace get their one-step gradient only.
    traced = traces.traced_results
    of_traced = [
        Values((y, bar) for y, bar in bars.items() if (g, y) in traced)
        for g, bars in enumerate(block.pull(added))
    ]
    return block.zero_if_dead(of_traced)


def _in_place_of_true(
    true: Sequence[Components],
    credit: Sequence[Components],
    signals: Sequence[Components],
) -> list[Components]:
    """Credit plus the rule's signal, less the true signal that the one-step gradient
    holds."""
    added = []
    for own, total, signal in zip(true, credit, signals, strict=True):
        for i, x in signal.items():
            total[i] = total[i] + x if i in total else x
        added.append({i: total[i] - x if i in total else -x for i, x in own.items()})
    return added


def less_factorised(
    traces: Traces, block: Block, found: Derivatives, local: list[Values]
) -> tuple[Values, Mapping[Key, Box | None]]:
    """One-step gradients without the part that factorised traces give, and the box of
    each result outside of which nothing is left.

    ``found.results[y]`` is the whole one-step gradient of y. The traces give the part
    of it that passes through their group. Where y acts on nothing else, y is left out
    of the result; otherwise that part is subtracted in ``local``, which is changed in
    place.
    """
    boxes = traces.beyond_factors
    alone = {y for y, box in boxes.items() if box is None}
    results = found.results.pick(y for y in found.results if y not in alone)
    now = block.zero_if_silent(block.pull(found.signals))
    for n in traces.factorised:
        site = traces.sites[n].site
        g, y = site.group, site.result
        local[g].pop(y, None)
        if y in results:
            local[g][y] = -now[g][y]
    return results, boxes


def credit_at_start(
    recursions: Sequence[Recursion], block: Block, credit: Sequence[Components]
) -> list[Components]:
    """Credit of states before a window, with that of what read-outs remember."""
    found = [dict(mine) for mine in credit]
    add_time = lambda tree: jax.tree.map(lambda x: x[None], tree)
    zeros = [{i: jnp.zeros_like(x) for i, x in mine.items()} for mine in credit]
    given = Signals(Values(), add_time(zeros), add_time(list(credit)))
    for recursion, mine in zip(recursions, found, strict=True):
        if recursion.memories:
            for n, memory in recursion.numbered:
                mine[n] = memory.read(block.first, given, {}).every[0]
    return found
