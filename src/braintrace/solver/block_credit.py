"""The credit of one block under a rule: the signals and matrices that the rule uses, and
what γ adds to the gradients of tap results.

Letters: t steps of the block, h positions, s components of a position, y results of
taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from ..compiled_step import Box, Components, Key, Slopes, Values
from ..derivatives import Derivatives, joint_signals, local_matrices
from .block import Block, split_loss
from .recursion import Recursion
from .traces import Traces


def derivatives_of(
    recursions: Sequence[Recursion],
    block: Block,
    cotangents: Sequence[jax.Array] | None,
) -> Derivatives:
    """Derivatives inside each step of a block, D as the rule has it.

    ``cotangents[i][t]`` is the cotangent of target i at step t; None where no loss is
    read.
    """
    step, constants = block.step, block.constants
    none: list[Components] = [{} for _ in step.groups]

    def one(values: Values, bars: list[jax.Array] | None) -> Derivatives:
        slopes: list[list[Slopes]] = [[] for _ in step.groups]
        if step.memory_slopes is not None:
            slopes = step.memory_slopes(constants, values)
        matrices, inner = [], []
        for g, recursion in enumerate(recursions):
            jacobian, between = local_matrices(step, g, constants, values)
            matrices.append(recursion.transition(jacobian, slopes[g]))
            inner.append(between)
        moved = (matrices, inner, slopes)
        if bars is None:
            return Derivatives(None, Values(), Values(), none, none, *moved)
        targets, results, signals, reads = joint_signals(
            step, constants, values, bars, inner, slopes
        )
        losses = targets[0] if targets else None
        aux = step.outputs(constants, values).pick(step.aux)
        return Derivatives(losses, aux, results, signals, reads, *moved)

    bars = None if cotangents is None else list(cotangents)
    found = jax.vmap(one, axis_size=block.length)(block.values, bars)
    # A step without a loss contributes exactly nothing, whatever it holds.
    results, signals, reads = block.zero_if_silent(found[2:5])
    found = found._replace(results=results, signals=signals, reads=reads)
    if bars is not None and (terms := split_loss(step)):
        of_step = lambda values: terms.of_step(constants, values)
        found = found._replace(losses=jax.vmap(of_step)(block.values))
    return found


def as_read(
    recursions: Sequence[Recursion],
    found: Derivatives,
    signals: Sequence[Components],
    reads: Sequence[Components],
) -> Derivatives:
    """The derivatives with the signals that a rule uses, by the components that they
    read."""
    by_component = lambda every: [
        recursion.reading(mine)
        for recursion, mine in zip(recursions, every, strict=True)
    ]
    return found._replace(signals=by_component(signals), reads=by_component(reads))


def local_gradients(
    traces: Traces,
    block: Block,
    found: Derivatives,
    used: Derivatives,
    credit: list[Components],
    is_plain: bool,
) -> list[Values]:
    """By group, what its credit adds to the one-step gradients of tap results.

    ``is_plain``: the true signal reads the traces. The one-step gradients hold this
    signal already, so only γ is added. ``used``: the derivatives with the rule's own.
    """
    fold = lambda values: [
        recursion.folded(mine, slopes)
        for recursion, mine, slopes in zip(
            traces.recursions, values, used.slopes, strict=True
        )
    ]
    added = fold(credit)
    if not is_plain:
        added = _in_place_of_true(fold(found.signals), added, fold(used.signals))
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
        for i, x in own.items():
            total[i] = total[i] - x if i in total else -x
        added.append(total)
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
        if y in results and y in now[g]:
            local[g][y] = -now[g][y]
    return results, boxes


def credit_at_start(
    recursions: Sequence[Recursion], block: Block, credit: Sequence[Components]
) -> list[Components]:
    """Credit of states before a window, with that of what read-outs remember: the
    credit of a read-out's old state is a direct read of its memory."""
    step = block.step
    found = [dict(mine) for mine in credit]
    if step.memory_signals is None:
        return found
    first = jax.tree.map(lambda x: x[0], block.values)
    none: list[Components] = [{} for _ in step.groups]
    _, reads = step.memory_signals(block.constants, first, {}, none, found, {})
    for mine, read in zip(found, reads, strict=True):
        mine.update(read)
    for recursion, mine in zip(recursions, found, strict=True):
        for n, zero in recursion.zero_credit().items():
            mine.setdefault(n, zero)
    return found
