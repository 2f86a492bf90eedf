"""Visits: how the traces advance over a block, and the gradients they give.

Letters: t steps of the block, y elements of a site's result, s components of a
position, w elements of a weight.

    ε_K = P_0 ε_0 + Σ_t P_t ∂h_t/∂w        one visit, by the site's own layout
    gradient += γ_0 · ε_0

A visit follows one block, or several whose steps have been kept. Factorised traces
have no such form and take part in every step of the block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
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
    SummingLayout,
    Values,
)
from ..derivatives import Derivatives, slopes_at_positions
from .block import Block
from .block_credit import derivatives_of
from .factors import FactorLayout, FactorTrace
from .masking import zero_at
from .solved import add
from .traces import Trace, TracedSite, Traces


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
    block: Block,
    found: Derivatives,
    traces: Trace,
    total: Values,
    credit: Sequence[Components],
    y_bars: Mapping[Key, jax.Array] = {},
) -> tuple[Trace, Values]:
    """The traces after a block, and ``total`` with the gradients that they give.

    ``credit``: γ_0. ``y_bars``: gradients of results that the visits also sum.
    """
    if traces_of.factorised:
        traces, total = _advance_factors(traces_of, block, found, traces, total)
    if not traces_of.has_block_traces:
        return traces, total
    driven, products = drive(traces_of, block, found)
    dead = None if block.mask is None else block.mask.dead[0]
    given = (block.constants, traces, driven, products, total, credit, dead, y_bars)
    return visit(traces_of, *given)


def drive(
    traces_of: Traces,
    block: Block,
    found: Derivatives,
    after: Sequence[Jacobian] | None = None,
) -> tuple[list[Driven], list[Jacobian]]:
    """What the steps of a block add to each trace, and P_0 by group.

    ``after``: P of the steps between this block and the next visit of the traces, if
    there are any.
    """
    recursions = traces_of.recursions
    follows: Sequence[Jacobian | None] = after or [None] * len(recursions)
    products, cotangents = [], []
    for recursion, matrix, later, slopes in zip(
        recursions, found.transitions, follows, found.slopes, strict=True
    ):
        to_end, whole = recursion.products(matrix, later, block.length)
        products.append(whole)
        # Row s of P_t is the cotangent of h_t whose pull-back is what y_t adds to ε_s.
        named = {}
        for s in recursion.alive:
            products_of = {k: p for (i, k), p in to_end.items() if i == s}
            named[s] = recursion.folded(products_of, slopes)
        cotangents.append(named)
    rows = _rows(block, cotangents)
    driven = []
    for n, traced in enumerate(traces_of.sites):
        if isinstance(traced.layout, FactorLayout):
            driven.append(Driven({}, {}))
            continue
        _, data = _operands(traced, block)
        mine = {}
        if traced.shares == n:
            all_of_y = rows[traced.site.group][traced.site.result]
            box = traces_of.row_box(n) or ()
            mine = {s: row[:, *box] for s, row in all_of_y.items()}
        driven.append(Driven(data, mine))
    return driven, products


def visit(
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
    for n, (site, tap, layout, _, first) in enumerate(traces_of.sites):
        if isinstance(layout, FactorLayout):
            continue
        fixed, _ = tap.operands(constants, _NoSteps())
        # The first of the traces that share rows holds them.
        box, shape = traces_of.row_box(first), site.use.result.shape
        data, parts = driven[n].data, driven[first].rows
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
    block: Block,
    found: Derivatives,
    traces: Trace,
    total: Values,
) -> tuple[Trace, Values]:
    """Factorised traces after the block and their gradients; one loop over its
    steps for all."""
    layouts, sites = traces_of.factorised, traces_of.sites
    owner = {n: sites[n].shares for n in layouts}
    operands = {n: _operands(sites[n], block) for n in layouts}
    # The pull-back of a cotangent of ones is ∂h_s/∂y of every step.
    units = []
    for group in block.step.groups:
        shape = (block.length, *group.shape)
        types = enumerate(group.dtypes)
        units.append({s: {s: jnp.ones(shape, dtype)} for s, dtype in types})
    rows = _rows(block, units)
    drives, here = {}, {}
    for n, layout in layouts.items():
        site = sites[n].site
        mine = rows[site.group].get(site.result, {}) if owner[n] == n else {}
        drives[n] = layout.drive(*operands[n], mine, block.length)
        if owner[n] == n:
            g = site.group
            here[n] = (found.signals[g], found.reads[g], found.transitions[g])
            if layout.is_large:
                here[n] = jax.vmap(layout.here)(here[n])

    def one_step(old: dict[int, FactorTrace], at: tuple) -> tuple:
        drives, here = at
        carry: dict[int, FactorTrace] = {}
        y_bars: dict[int, list[jax.Array]] = {}
        xs: dict[int, list[jax.Array]] = {}
        for n, trace in old.items():
            layout, site, owns = layouts[n], sites[n].site, owner[n] == n
            x, mine = drives[n]
            after = traces_of.recursions[site.group].after(site.result) if owns else ()
            mover = layouts[owner[n]]
            now = here[owner[n]]
            signals, reads, matrices = now if mover.is_large else mover.here(now)
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
    scanned: Any = jax.lax.scan(one_step, start, (drives, here))
    last, (all_y_bars, all_xs) = scanned
    new = list(traces)
    for n, layout in layouts.items():
        new[n] = last[n]
        for y_bar, x in zip(all_y_bars[owner[n]], all_xs[n], strict=True):
            y_bar = block.zero_if_silent(y_bar)
            gradient = layout.gradient(*operands[n], y_bar, x)
            total = _add_gradient(total, sites[n].site, gradient)
    return new, total


def advance_silently(
    traces_of: Traces,
    block: Block,
    traces: Trace,
    total: Values,
    credit: Sequence[Components] | None = None,
) -> tuple[Trace, Values]:
    """Traces after a block whose losses are not read.

    ``credit``: γ_0 of the reverse pass through a window.
    """
    found = derivatives_of(traces_of.recursions, block, None)
    credit = [{} for _ in block.step.groups] if credit is None else credit
    return advance(traces_of, block, found, traces, total, credit)


def add_factor_gradients(
    traces_of: Traces,
    block: Block,
    traces: Trace,
    total: Values,
    credit: Sequence[Components],
) -> Values:
    """Add γ_0 · ε_0 of factorised traces at the start of a window."""
    for n, layout in traces_of.factorised.items():
        traced, trace = traces_of.sites[n], traces[n]
        trace = trace._replace(f=traces[traced.shares].f)
        y_bar = layout.result_gradient(trace, layout.here(credit[traced.site.group]))
        operands = _operands(traced, block.first)
        gradient = layout.gradient(*operands, y_bar[None], trace.x[None])
        total = _add_gradient(total, traced.site, gradient)
    return total


def summed_in_visits(
    traces_of: Traces, block: Block, results: Values, local: Sequence[Values]
) -> Values:
    """The gradients of results that the visits of traces also sum over steps: those of
    taps with one weight, one result and one site, in a block without a mask."""
    found = Values()
    for site, tap, layout, *_ in traces_of.sites if block.mask is None else ():
        alone = all(len(part) == 1 for part in (tap.weights, tap.results, tap.sites))
        if not alone or tap.cut_gradients or not isinstance(layout, SummingLayout):
            continue
        y, dtype = site.result, traces_of.stored_type(site)
        terms = [bars[y] for bars in local if y in bars]
        if terms and y in results and layout.sums_steps(dtype, block.length):
            found[y] = sum(terms, results[y])
    return found


def _rows(
    block: Block, cotangents: list[dict[int, Components]]
) -> list[dict[Key, Components]]:
    """For each group, tap result and component s, the pull-back (t, y) of the cotangent
    that ``cotangents`` has for s."""
    step = block.step
    found: list[dict[Key, Components]] = [{} for _ in step.groups]
    names = sorted({s for named in cotangents for s in named})
    for s in names:
        bars = block.pull([named.get(s, {}) for named in cotangents])
        for g, mine in enumerate(bars):
            for y, bar in mine.items() if s in cotangents[g] else ():
                found[g].setdefault(y, {})[s] = bar
    if any(group.shared for group in step.groups):
        slopes = partial(slopes_at_positions, step)
        for g, mine in enumerate(block.at_each_step(slopes)):
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


def _operands(traced: TracedSite, block: Block) -> tuple[Operands, Operands]:
    """Operands of a site that are the same in every step, and those of each step.

    Where no operand depends on the step, all but the weight are repeated for each.
    """
    fixed, data = block.operands(traced.tap)
    if data:
        return fixed, data
    weight = traced.site.use.operand
    repeat = lambda x: jnp.broadcast_to(x, (block.length, *jnp.shape(x)))
    data = {k: repeat(x) for k, x in fixed.items() if k != weight}
    return {weight: fixed[weight]}, data
