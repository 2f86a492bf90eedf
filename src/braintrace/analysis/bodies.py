"""What the operands of branches, loops and calls reach, by passes over their bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..compat import Equation, Var, is_var, read_branches, read_scan, sub_programs
from ..operations import MIXING
from ..operations.labels import (
    CONFLICT,
    NONE,
    Labels,
    gather_back,
    join,
    join_over,
    labels_of,
)
from ..source_lines import from_library
from .cuts import PARTED
from .dependence import carry_fixpoint
from .pairs import Alone, ReachedPairs, labels_in, together, without_sources
from .probe import confirmed

if TYPE_CHECKING:
    from .positions import BackwardPass


def enter_call(
    at: BackwardPass, eqn: Equation, outs: list[Labels], size: int
) -> list[ReachedPairs | None]:
    """A call with its own derivative cannot be cut inside: conflicts come out to the
    operands."""
    (sub,) = sub_programs(eqn)
    bits = at.bits(eqn.invars)
    inner = at.body(sub.jaxpr, eqn.invars, bits, opaque=True, size=size)
    inner.run(list(zip(inner.jaxpr.outvars, without_sources(outs), strict=True)))
    found = inner.inputs()
    if at.opaque or from_library(sub.jaxpr):
        return found
    single = [r.labels if r and r.sources is None else None for r in found]
    for k, labels in enumerate(confirmed(eqn, outs, single)):
        if labels is not None:
            found[k] = ReachedPairs(labels)
        elif (reach := found[k]) is not None:
            found[k] = _confirmed_sources(eqn, outs, k, reach)
    return found


def _confirmed_sources(
    eqn: Equation, outs: list[Labels], k: int, reach: ReachedPairs
) -> ReachedPairs:
    """What an operand of a call reaches, if the call's own derivative agrees.

    Seen from the results: each has the number of the element it comes from.
    """
    assert reach.sources is not None
    origin = np.append(reach.sources, NONE)
    came = [None if x is None else origin[np.maximum(x, NONE)] for x in outs]
    own = np.arange(reach.labels.size, dtype=np.int32)
    labels: list[Labels] = [None] * len(eqn.invars)
    labels[k] = own.reshape(reach.labels.shape)
    agrees = confirmed(eqn, came, labels)[k] is labels[k]
    return reach if agrees else ReachedPairs(np.full_like(reach.labels, CONFLICT))


Entered = tuple[
    dict[tuple, 'BackwardPass'], list[ReachedPairs | None], dict[int, Alone]
]
"""The passes over the bodies of an equation, what its operands reach, and operands that
the bodies cannot share."""


def enter_branches(
    at: BackwardPass,
    eqn: Equation,
    outs: Sequence[ReachedPairs | None],
    alone: Mapping[int, Alone],
) -> Entered:
    """What reaches a position in one branch and another in a second reaches both."""
    operands, entered = eqn.invars[1:], {}
    every: list[list[ReachedPairs]] = [[] for _ in operands]
    for b, branch in enumerate(read_branches(eqn)):
        inner = at.body(branch, operands, at.bits(operands))
        invars = inner.jaxpr.invars
        given = {invars[k - 1]: why for k, why in alone.items()}
        inner.run(list(zip(inner.jaxpr.outvars, outs, strict=True)), alone=given)
        entered['branches', b] = inner
        for reaches, reach in zip(every, inner.inputs(), strict=True):
            reaches += [] if reach is None else [reach]
    result = [together(reaches, at.size) if reaches else None for reaches in every]
    more: dict[int, Alone] = {}
    for k, (v, reaches, found) in enumerate(
        zip(operands, every, result, strict=True), start=1
    ):
        if found is None or not is_var(v) or not (found.labels == CONFLICT).any():
            continue
        if found.sources is None or not at.may_share(v, reaches, found):
            pairs = np.concatenate([reach.pairs(at.size) for reach in reaches])
            more[k] = Alone(len(np.unique(pairs)), found.labels.size)
    chooser: Labels = None
    if at.opaque:
        for out in (o.labels for o in outs if o is not None):
            chooser = join(chooser, join_over(out.reshape(-1), [0]))
    first = None if chooser is None else ReachedPairs(chooser)
    return entered, [first, *result], more


def enter_loop(
    at: BackwardPass,
    eqn: Equation,
    outs: Sequence[ReachedPairs | None],
    alone: Mapping[int, Alone],
) -> Entered:
    """Labels of the carry grow to a fixpoint; in the body a carry keeps the positions
    it ends at."""
    scan = read_scan(eqn)
    first = scan.num_ignored
    operands = eqn.invars[first:]
    if at.opaque and scan.key != ('jaxpr', None):
        # A derivative that is not known might follow the condition of a loop.
        mixed = MIXING.labels(eqn, labels_in(outs), at.const)
        return {}, without_sources(mixed), {}
    a, b = scan.num_consts, scan.num_consts + scan.num_carry
    bits = at.bits(operands)
    carry_bits, _ = carry_fixpoint(scan.body, bits[:a], bits[a:b], bits[b:])
    carry = list(outs[: scan.num_carry])
    results = list(zip(eqn.outvars, outs, strict=True))[scan.num_carry :]
    stacked = [reach and _over_rounds(at, v, reach) for v, reach in results]
    inside = [*bits[:a], *carry_bits, *bits[b:]]
    while True:
        inner = at.body(scan.body, operands[:a], inside)
        invars = inner.jaxpr.invars
        ends = {v: c for v, c in zip(invars[a:b], carry, strict=True) if c is not None}
        # A carry is held by the position it ends at, whatever is outside.
        given = {
            invars[k - first]: why
            for k, why in alone.items()
            if k >= first and invars[k - first] not in ends
        }
        inner.run(
            list(zip(inner.jaxpr.outvars, [*carry, *stacked], strict=True)),
            {} if at.opaque else ends,
            alone=given,
        )
        found = inner.inputs()
        grown = [_grown(at, c, e) for c, e in zip(carry, found[a:b], strict=True)]
        if all(_same(c, g) for c, g in zip(carry, grown, strict=True)):
            break
        carry = grown
    more: dict[int, Alone] = {}
    for k in range(b, len(invars)):
        if (reach := found[k]) is None:
            continue
        shape = operands[k].aval.shape
        found[k] = ReachedPairs(np.broadcast_to(reach.labels, shape), reach.sources)
        if reach.sources is not None and shape[0] > 1:
            pairs = shape[0] * len(reach.pairs(at.size))
            more[first + k] = Alone(pairs, int(np.prod(shape)))
    return {scan.key: inner}, [*[None] * first, *found], more


def _grown(
    at: BackwardPass, carry: ReachedPairs | None, entering: ReachedPairs | None
) -> ReachedPairs | None:
    """What a carry reaches after one more round."""
    if carry is None or entering is None:
        return carry or entering
    if at.opaque:
        return together([carry, entering], at.size)
    if carry.sources is None:
        free = (carry.labels == NONE) & (entering.labels != CONFLICT)
        return ReachedPairs(
            np.where(free, entering.labels, carry.labels).astype(np.int32)
        )
    held, more = carry.sources, entering.by_position(at.size)
    assert more is not None
    sources = np.where((held < 0) & (more >= 0), more, held).astype(np.int32)
    return ReachedPairs(labels_of(sources, carry.labels.shape), sources)


def _same(a: ReachedPairs | None, b: ReachedPairs | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.sources is None or b.sources is None:
        return a.sources is b.sources and np.array_equal(a.labels, b.labels)
    return np.array_equal(a.sources, b.sources)


def _over_rounds(at: BackwardPass, v: Var, reach: ReachedPairs) -> ReachedPairs:
    """What a stacked result of a loop reaches from its body, in any round.

    Elements that reach other positions each round are cut where they are read,
    unless no position is reached by two.
    """
    labels = reach.labels
    if labels.ndim == 0:
        return reach
    joined = join_over(labels, [0])
    parted = joined == CONFLICT
    if not parted.any():
        return ReachedPairs(joined)
    pairs = reach.pairs(at.size)
    inside = (pairs // at.size) % max(joined.size, 1)
    sources = gather_back(inside.astype(np.int32), pairs % at.size, (at.size,))
    if reach.is_known and not (sources == CONFLICT).any():
        return ReachedPairs(joined, sources)
    if at.opaque:
        return ReachedPairs(joined)
    mask = np.broadcast_to(parted, labels.shape)
    for j, k in at.reading[v]:
        at.cut(j, k, mask, PARTED)
    return ReachedPairs(np.where(parted, NONE, joined).astype(np.int32))
