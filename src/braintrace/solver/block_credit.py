"""The credit of one block under a rule: the signals and matrices that the rule uses, and
what γ adds to the gradients of tap results.

Letters: t steps of the block, h positions, s components of a position, y results of
taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from ..compiled_step import Box, Components, Feedback, Key, Signals, Values
from .block import Block, Derivatives
from .recursion import Recursion, RecursionView
from .traces import Traces


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


def local_gradients(
    traces: Traces,
    block: Block,
    found: Derivatives,
    view: RecursionView,
    credit: list[Components],
    is_plain: bool,
) -> list[Values]:
    """By group, what its credit adds to the one-step gradients of tap results.

    ``is_plain``: traces follow D and the true signal reads them. The one-step gradients
    hold this signal already, so only γ is added.
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
