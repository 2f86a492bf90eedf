"""Visits: how the traces advance over a block, and the gradients they give.

Letters: t steps of the block, y elements of a site's result, s components of a
position, w elements of a weight.

    ε_K = P_0 ε_0 + Σ_t P_t ∂h_t/∂w        one visit, by the site's own layout
    gradient += γ_0 · ε_0

A visit takes in one block, or several whose steps have been kept. Factorised traces
have no such form and take part in every step of the block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..arrays import cast, padded, sum_type
from ..compiled_step import (
    CompiledSite,
    Components,
    Jacobian,
    Key,
    Operands,
    Shares,
    Signals,
    SummingLayout,
    Values,
)
from .block import (
    Block,
    Derivatives,
    length_of,
    products_to_end,
    pull,
    transitions,
)
from .factors import FactorLayout, FactorTrace
from .masking import Mask, finite, zero_at
from .recursion import Recursion
from .solved import add
from .traces import RecursionView, Trace, TracedSite, Traces


class Driven(NamedTuple):
    """What steps add to one trace, with t first.

    ``data``: the operands of its site. ``rows``: P_t ∂h_t/∂y_t by component, for the
    part of y that reaches the group. Traces with the same ∂h/∂y share their rows: the
    first of them holds the rows, the others have none.
    """

    data: Operands
    rows: Components


class _NoSteps(Values):
    """Takes the place of the values of steps where only operands that are the same in
    every step are read."""

    def __missing__(self, key: Key) -> None:
        return None


def advance(
    traces_of: Traces,
    constants: Values,
    block: Block,
    view: RecursionView,
    traces: Trace,
    total: Values,
    credit: Sequence[Components],
    y_bars: Mapping[Key, jax.Array] = {},
) -> tuple[Trace, Values]:
    """The traces after a block, and ``total`` with the gradients that they give.

    ``credit``: γ_0. ``y_bars``: gradients of results that the visits also sum.
    """
    sites, factorised = traces_of.sites, traces_of.factorised
    operands = {n: _operands(sites[n], constants, block) for n in factorised}
    new, total = _advance_factors(
        traces_of, constants, operands, block, view, traces, total
    )
    if not traces_of.has_block_traces:
        return new, total
    driven, products = drive(traces_of, constants, block, view)
    dead = None if block.mask is None else block.mask.dead[0]
    given = (constants, new, driven, products, total, credit, dead, y_bars)
    return take_in(traces_of, *given)


def unit_products(traces_of: Traces) -> list[Jacobian]:
    """P of no steps at all, by group."""
    return [_unit_product(recursion) for recursion in traces_of.recursions]


def _unit_product(recursion: Recursion) -> Jacobian:
    group = recursion.group
    dtype = jnp.finfo(jnp.result_type(*group.dtypes)).dtype
    zero, one = jnp.zeros(group.shape, dtype), jnp.ones(group.shape, dtype)
    entries = sorted(recursion.closure)
    return {(i, j): one if i == j else zero for i, j in entries}


def _products(
    recursion: Recursion, transition: Jacobian, after: Jacobian | None, length: int
) -> tuple[Jacobian, Jacobian]:
    """P_t of every step, and P_0; ``after``: P of what follows, None for nothing."""
    unit = _unit_product(recursion)
    if after is not None or length > 1:
        return products_to_end(transition, unit if after is None else after, length)
    # P_1 is the unit matrix and P_0 is D. As a product it would have terms 0 · D, which
    # XLA must compute, because D may be infinite.
    to_end = {(i, j): one[None] for (i, j), one in unit.items() if i == j}
    kept = {at: d for at, d in transition.items() if at in unit}
    return to_end, {at: d[0].astype(unit[at].dtype) for at, d in kept.items()}


def drive(
    traces_of: Traces,
    constants: Values,
    block: Block,
    view: RecursionView,
    after: Sequence[Jacobian] | None = None,
) -> tuple[list[Driven], list[Jacobian]]:
    """What the steps of a block add to each trace, and P_0 by group.

    ``after``: P of the steps between this block and the next visit of the traces, if
    there are any.
    """
    length = length_of(block.values)
    follows: Sequence[Jacobian | None] = after or [None] * len(traces_of.recursions)
    products, cotangents = [], []
    for recursion, matrix, later, slopes in zip(
        traces_of.recursions,
        view.transitions,
        follows,
        view.link_slopes,
        strict=True,
    ):
        to_end, whole = _products(recursion, matrix, later, length)
        products.append(whole)
        # Row s of P_t is the cotangent of h_t whose pull-back is what y_t adds to ε_s.
        named = {}
        for s in recursion.alive:
            products_of = {k: p for (i, k), p in to_end.items() if i == s}
            named[s] = recursion.folded(products_of, slopes)
        cotangents.append(named)
    rows = _rows(traces_of, constants, block.safe, cotangents)
    driven = []
    for n, traced in enumerate(traces_of.sites):
        if isinstance(traced.layout, FactorLayout):
            driven.append(Driven({}, {}))
            continue
        _, data = _operands(traced, constants, block)
        mine = {}
        if traces_of.rows_from[n] == n:
            all_of_y = rows[traced.site.group][traced.site.result]
            box = traces_of.row_box(n) or ()
            mine = {s: row[:, *box] for s, row in all_of_y.items()}
        driven.append(Driven(data, mine))
    return driven, products


def take_in(
    traces_of: Traces,
    constants: Values,
    traces: Trace,
    driven: Sequence[Driven],
    products: Sequence[Jacobian],
    total: Values,
    credit: Sequence[Components],
    dead: jax.Array | None,
    y_bars: Mapping[Key, jax.Array] = {},
) -> tuple[Trace, Values]:
    """One visit: the traces after the steps that :func:`drive` was given, and ``total``
    with γ_0 · ε_0 added.

    ``dead``: whether no credit reaches the first of these steps. ``y_bars``: gradients
    of results that the same visit sums.
    """
    new = list(traces)
    for n, (site, tap, layout) in enumerate(traces_of.sites):
        if isinstance(layout, FactorLayout):
            continue
        fixed, _ = tap.operands(constants, _NoSteps())
        source = traces_of.rows_from[n]
        box, shape = traces_of.row_box(source), site.use.result.shape
        data, parts = driven[n].data, driven[source].rows
        rows = {s: padded(row, box, shape) for s, row in parts.items()}
        whole, mine = products[site.group], credit[site.group]
        given = (traces[n], fixed, data, rows, whole, mine)
        if site.result in y_bars and isinstance(layout, SummingLayout):
            new[n], gradient = layout.solve(*given, y_bars[site.result])
        else:
            new[n], gradient = layout.solve(*given)
        if dead is not None:
            # Where a trace is infinite, credit of zero would give NaN.
            gradient = zero_at(gradient, dead)
        total = _add_gradient(total, site, gradient)
    return new, total


def _add_gradient(
    total: Values, site: CompiledSite, gradient: jax.Array | Shares
) -> Values:
    dtype = sum_type(site.use.weight.dtype)
    found = jax.tree.map(lambda x: cast(x, dtype), gradient)
    return add(total, {site.weight: found})


def _advance_factors(
    traces_of: Traces,
    constants: Values,
    operands: Mapping[int, tuple[Operands, Operands]],
    block: Block,
    view: RecursionView,
    traces: Trace,
    total: Values,
) -> tuple[Trace, Values]:
    """Factorised traces after the block and their gradients; one loop over its
    steps for all."""
    layouts, owner = traces_of.factorised, traces_of.owner
    new: Trace = list(traces)
    if not layouts:
        return new, total
    length, groups = length_of(block.values), traces_of.step.groups
    # The pull-back of a cotangent of ones is ∂h_s/∂y of every step.
    units = []
    for group, signals in zip(groups, view.signals, strict=True):
        one = lambda x, group=group: jnp.ones((length, *group.shape), x.dtype)
        units.append({s: {s: one(x)} for s, x in signals.items()})
    rows = _rows(traces_of, constants, block.safe, units)
    drives, here = {}, {}
    for n, layout in layouts.items():
        site = traces_of.sites[n].site
        mine = rows[site.group].get(site.result, {}) if owner[n] == n else {}
        drives[n] = layout.drive(*operands[n], mine, length)
        if owner[n] == n:
            g = site.group
            here[n] = (view.signals[g], view.reads[g], view.transitions[g])
            if layout.is_large:
                here[n] = jax.vmap(layout.here)(here[n])

    def one_step(old: dict[int, FactorTrace], at: tuple) -> tuple:
        drives, here = at
        carry: dict[int, FactorTrace] = {}
        y_bars: dict[int, list[jax.Array]] = {}
        xs: dict[int, list[jax.Array]] = {}
        for n, trace in old.items():
            layout, site, owns = layouts[n], traces_of.sites[n].site, owner[n] == n
            x, mine = drives[n]
            after = traces_of.recursions[site.group].after(site.result) if owns else ()
            mover = layouts[owner[n]]
            found = here[owner[n]]
            signals, reads, matrices = found if mover.is_large else mover.here(found)
            moved = layout.advance(trace, x, mine, matrices, after)
            stored = {s: moved.f[s].astype(f.dtype) for s, f in trace.f.items()}
            carry[n] = moved._replace(f=stored)
            # Signals read the new trace, direct reads of old states the old one.
            reading = [(moved, signals)]
            if reads:
                reading.append((trace, reads))
            xs[n] = [read.x for read, _ in reading]
            if owns:
                y_bars[n] = [layout.result_gradient(*pair) for pair in reading]
        return carry, (y_bars, xs)

    start = {n: traces[n] for n in layouts}
    found: Any = jax.lax.scan(one_step, start, (drives, here))
    last, (all_y_bars, all_xs) = found
    for n, layout in layouts.items():
        new[n] = last[n]
        for y_bar, x in zip(all_y_bars[owner[n]], all_xs[n], strict=True):
            if block.mask is not None:
                y_bar, x = block.zero_if_silent(y_bar), finite(x, block.mask.silent)
            gradient = layout.gradient(*operands[n], y_bar, x)
            total = _add_gradient(total, traces_of.sites[n].site, gradient)
    return new, total


def advance_silently(
    traces_of: Traces,
    constants: Values,
    steps: Values,
    traces: Trace,
    total: Values,
    credit: Sequence[Components],
    dead: jax.Array | bool = True,
) -> tuple[Trace, Values]:
    """Traces after a block of completed steps without a loss.

    ``credit``: γ_0 of the reverse pass through a window; ignored if that is ``dead``.
    """
    length = length_of(steps)
    block = Block.of(steps, Mask.of_silence(length, dead))
    silent = [
        {
            i: jnp.zeros((length, *group.shape), dtype)
            for i, dtype in enumerate(group.dtypes)
        }
        for group in traces_of.step.groups
    ]
    matrices = transitions(traces_of.step, constants, block.safe)
    found = Derivatives(Values(), Values(), silent, traces_of.empty_credit, matrices)
    slopes = traces_of.link_slopes(constants, block.safe)
    learning = Signals(Values(), silent, traces_of.empty_credit)
    view = traces_of.view(found, learning, slopes, [[] for _ in traces_of.step.groups])
    return advance(traces_of, constants, block, view, traces, total, credit)


def add_factor_gradients(
    traces_of: Traces,
    total: Values,
    traces: Trace,
    credit: Sequence[Components],
    constants: Values,
    steps: Values,
    dead: jax.Array,
) -> Values:
    """Add γ_0 · ε_0 of factorised traces at the start of a window of completed
    steps."""
    start = jax.tree.map(lambda x: x[:1], steps)
    first = Block(start, start, None)
    for n, layout in traces_of.factorised.items():
        site, trace = traces_of.sites[n].site, traces[n]
        trace = trace._replace(f=traces[traces_of.owner[n]].f)
        y_bar = layout.result_gradient(trace, layout.here(credit[site.group]))
        operands = _operands(traces_of.sites[n], constants, first)
        gradient = layout.gradient(*operands, y_bar[None], trace.x[None])
        total = _add_gradient(total, site, zero_at(gradient, dead))
    return total


def _rows(
    traces_of: Traces,
    constants: Values,
    steps: Values,
    cotangents: list[dict[int, Components]],
) -> list[dict[Key, Components]]:
    """For each group, tap result and component s, the pull-back (t, y) of the cotangent
    that ``cotangents`` has for s."""
    found: list[dict[Key, Components]] = [{} for _ in traces_of.step.groups]
    names = sorted({s for named in cotangents for s in named})
    for s in names:
        credit = [named.get(s, {}) for named in cotangents]
        bars = pull(traces_of.step, constants, steps, credit)
        for g, mine in enumerate(bars):
            for y, bar in mine.items() if s in cotangents[g] else ():
                found[g].setdefault(y, {})[s] = bar
    slopes = traces_of.step.shared_slopes
    if slopes is not None and any(group.shared for group in traces_of.step.groups):
        by_group = jax.vmap(lambda values: slopes(constants, values))(steps)
        for g, mine in enumerate(by_group):
            for y, by_component in mine.items():
                found[g][y] = _at_positions(cotangents[g], by_component)
    return found


def _at_positions(
    cotangents: Mapping[int, Components], slopes: Components
) -> Components:
    """Σ_k c_k ∂h_k/∂y at every position, for each named cotangent c."""
    found = {}
    for s, credit in cotangents.items():
        terms = [credit[k] * x for k, x in slopes.items() if k in credit]
        if terms:
            found[s] = sum(terms[1:], terms[0])
    return found


def _operands(
    traced: TracedSite, constants: Values, block: Block
) -> tuple[Operands, Operands]:
    """Operands of a site that are the same in every step, and those of each step.

    Where no operand depends on the step, all but the weight are repeated for each.
    """
    fixed, data = block.operands(traced.tap, constants)
    if data:
        return fixed, data
    weight, length = traced.site.use.operand, length_of(block.values)
    repeat = lambda x: jnp.broadcast_to(x, (length, *jnp.shape(x)))
    data = {k: repeat(x) for k, x in fixed.items() if k != weight}
    return {weight: fixed[weight]}, data
