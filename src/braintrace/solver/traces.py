"""The traces of a step: which there are, how a block advances them, and their
gradients.

Letters: t steps of the block, y elements of a site's result, s components of a
position.

    ε_K = P_0 ε_0 + Σ_t P_t ∂h_t/∂w        one visit, by the site's own layout
    gradient += γ_0 · ε_0

A visit takes in one block, or several whose steps have been kept.

Factorised traces have no such form and take part in every step of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import cast, is_complex, sum_type
from ..compiled_step import (
    Box,
    CompiledStep,
    Components,
    Jacobian,
    Key,
    Link,
    Operands,
    Signals,
    Site,
    Tap,
    TraceLayout,
    Values,
)
from .block import Derivatives, products_to_end, pull, transitions, unit_product
from .blocks import length_of
from .factors import FactorLayout, FactorTrace
from .masking import Block, Mask, finite, zero_at
from .recursion import JacobianRecursion, Memory, Recursion, ScalarLeak, Slopes

Trace = list[Any]
"""One entry a site: components of ε, or a :class:`FactorTrace`."""


@dataclass(frozen=True)
class PerParameter:
    """One trace for each weight and position it reaches."""

    def layout(self, site: Site, shape: tuple[int, ...]) -> TraceLayout | FactorLayout:
        """How the trace of a site is stored."""
        return site.use.layout(site.positions, shape)


@dataclass(frozen=True)
class Factorised:
    """An input part and a state part for each site, with decays (x, f); memory linear
    in units.

    A site that does not factorise keeps a trace for each weight.
    """

    decay: tuple[float, float]

    def layout(self, site: Site, shape: tuple[int, ...]) -> TraceLayout | FactorLayout:
        """How the trace of a site is stored."""
        if site.factorises:
            return FactorLayout(site, self.decay)
        return site.use.layout(site.positions, shape)


class TracedSite(NamedTuple):
    """A site whose trace is carried, the tap it belongs to, and how it is stored."""

    site: Site
    tap: Tap
    layout: TraceLayout | FactorLayout


class RecursionView(NamedTuple):
    """A block's derivatives as the traces' recursion sees them: with its components and
    matrices.

    ``slopes``: those of the memories of read-outs, by group.
    """

    signals: list[Components]
    reads: list[Components]
    transitions: list[Jacobian]
    slopes: list[Slopes]


class Driven(NamedTuple):
    """What steps add to one trace: operands of its site and P_t ∂h_t/∂y_t by component,
    both with t first."""

    data: Operands
    rows: Components


class _NoSteps(Values):
    """Values of steps, where only operands that stay the same are wanted."""

    def __missing__(self, key: Key) -> None:
        return None


class MemoryRead(NamedTuple):
    """What read-outs send back to u: all of them, and those with a memory (None without
    any)."""

    every: jax.Array
    leaky: jax.Array | None


class ReadoutMemory(NamedTuple):
    """A memory of a group by which read-outs decay, and the links that lead there.

    ``links``: each with the positions of its read-out that decay so, None for all.
    """

    lower: int
    memory: Memory
    links: tuple[tuple[Link, Any], ...]


@dataclass(frozen=True)
class Traces:
    """All traces of a step under one rule.

    ``is_traced(tap)``: whether the parameters of a tap are traced; the others keep
    their one-step gradient. ``dtype``: how traces are stored, if not in the precision
    of the results. ``to_readouts``: traces hold what leaky read-outs remember, with
    ``kappa`` in place of the read-outs' own decays if it is given; otherwise ``kappa``
    is a filter of all that signals read.
    """

    step: CompiledStep
    storage: PerParameter | Factorised
    kind: JacobianRecursion | ScalarLeak
    kappa: float | None = None
    is_traced: Callable[[Tap], bool] = lambda tap: True
    dtype: Any = None
    every_component: bool = False
    to_readouts: bool = False

    # ------------------------------------------------------------ structure

    @property
    def is_plain(self) -> bool:
        """Whether traces follow D and are read as they are."""
        unfiltered = self.kappa is None or self.to_readouts
        return isinstance(self.kind, JacobianRecursion) and unfiltered

    @cached_property
    def recursions(self) -> tuple[Recursion, ...]:
        """The recursion of every group."""
        kappa = None if self.to_readouts else self.kappa
        return tuple(
            Recursion(
                group,
                self.kind,
                kappa,
                self.every_component,
                tuple(m.memory for m in self.memories if m.lower == g),
            )
            for g, group in enumerate(self.step.groups)
        )

    @cached_property
    def memories(self) -> tuple[ReadoutMemory, ...]:
        """What read-outs remember of each group, one for each source u and decay."""
        found: dict[tuple, ReadoutMemory] = {}
        for link in self.step.links if self.to_readouts else ():
            own = link.decays if self.kappa is None else ((self.kappa, None),)
            for kappa, positions in own:
                key = (link.lower, link.source, kappa)
                memory = Memory(kappa, link.states, link.old_states)
                known = found.get(key, ReadoutMemory(link.lower, memory, ()))
                links = (*known.links, (link, positions))
                found[key] = known._replace(links=links)
        return tuple(found.values())

    @cached_property
    def traced_results(self) -> frozenset[tuple[int, Key]]:
        """(group, result) wherever a traced tap reaches a group."""
        return frozenset(
            (site.group, site.result)
            for tap in self.step.taps
            if self.is_traced(tap)
            for site in tap.sites
        )

    @property
    def groups(self) -> frozenset[int]:
        """Groups with a trace."""
        return frozenset(group for group, _ in self.traced_results)

    @cached_property
    def sites(self) -> tuple[TracedSite, ...]:
        """Every trace that a sequence carries, in program order."""
        found = []
        for tap in self.step.taps:
            for site in tap.sites if self.is_traced(tap) else ():
                layout = self.storage.layout(site, self.step.groups[site.group].shape)
                has_memory = self.recursions[site.group].carried(site.result)
                if isinstance(layout, FactorLayout) or has_memory:
                    found.append(TracedSite(site, tap, layout))
        return tuple(found)

    @cached_property
    def factorised(self) -> dict[int, FactorLayout]:
        """The factorised traces by number."""
        numbered = enumerate(traced.layout for traced in self.sites)
        return {n: layout for n, layout in numbered if isinstance(layout, FactorLayout)}

    @property
    def has_block_traces(self) -> bool:
        """Whether any trace is visited once a block."""
        return len(self.factorised) < len(self.sites)

    @cached_property
    def factorised_results(self) -> frozenset[tuple[int, Key]]:
        """(group, result) of the factorised traces."""
        sites = (self.sites[n].site for n in self.factorised)
        return frozenset((site.group, site.result) for site in sites)

    @cached_property
    def owner(self) -> tuple[int, ...]:
        """For every trace the first with the same ε_f: results that enter one sum share
        it."""
        first: dict[Any, int] = {}
        found = []
        for n, (site, _, layout) in enumerate(self.sites):
            key: Any = n
            if isinstance(layout, FactorLayout) and layout.shares_state_part:
                dtype, positions = site.use.result.dtype, site.positions.tobytes()
                key = (site.group, site.enters, dtype, positions)
            found.append(first.setdefault(key, n))
        return tuple(found)

    @cached_property
    def rest(self) -> dict[Key, Box | None]:
        """The part of a factorised site's result that acts on more than its group.

        Outside of it the factors replace the one-step gradient as a whole.
        """
        pairs = self.factorised_results
        return {
            result: self.step.other_effects(group, result) for group, result in pairs
        }

    def init(self) -> Trace:
        """Traces at the start of a sequence."""
        traces: Trace = []
        for n, (site, _, layout) in enumerate(self.sites):
            carried = self.recursions[site.group].carried(site.result)
            if isinstance(layout, FactorLayout):
                traces.append(layout.init(carried if self.owner[n] == n else ()))
            else:
                dtype = self._stored_type(site)
                traces.append({i: jnp.zeros(layout.shape, dtype) for i in carried})
        return traces

    def _stored_type(self, site: Site) -> Any:
        dtype = site.use.trace_dtype
        if self.dtype is None:
            return dtype
        # A complex trace needs a complex type of at least the precision asked for.
        return (
            jnp.promote_types(self.dtype, jnp.complex64)
            if is_complex(dtype)
            else self.dtype
        )

    # ------------------------------------------------------------ credit

    @property
    def no_signal(self) -> list[Components]:
        """No credit for any group."""
        return [{} for _ in self.step.groups]

    def no_credit(self) -> list[Components]:
        """Zero credit for every component that a later step can read."""
        return [recursion.no_credit() for recursion in self.recursions]

    def slopes(self, constants: Values, steps: Values) -> list[Slopes]:
        """∂u/∂h of the memories of every group and step."""
        found: list[list] = [[] for _ in self.step.groups]
        for m in self.memories:
            link = m.links[0][0]
            one = lambda values, link=link: link.slopes(constants, values)
            found[m.lower].append(jax.vmap(one)(steps))
        return list(found)

    def memory_reads(
        self,
        constants: Values,
        steps: Values,
        learning: Signals,
        feedback: Mapping[Any, Any],
    ) -> list[list[MemoryRead]]:
        """What read-outs send back to what they remember, by group and step."""
        found: list[list[MemoryRead]] = [[] for _ in self.step.groups]
        for m in self.memories:
            every, leaky = [], []
            for link, positions in m.links:
                given = _decaying(link, m.memory.kappa, positions, learning)
                pull = lambda values, given, link=link: link.pull(
                    constants, values, given, feedback
                )
                every.append(jax.vmap(pull)(steps, given))
                if link.readout is not None:
                    leaky.append(every[-1])
            total = sum(leaky[1:], leaky[0]) if leaky else None
            read = MemoryRead(sum(every[1:], every[0]), total)
            found[m.lower].append(read)
        return found

    def view(
        self,
        found: Derivatives,
        learning: Signals,
        slopes: list[Slopes],
        memory_reads: list[list[MemoryRead]],
    ) -> RecursionView:
        """The block as the recursion sees it; ``learning``: the signals that the rule
        uses."""
        signals, reads, matrices = [], [], []
        parts = (
            self.recursions,
            found.signals,
            learning.signals,
            learning.reads,
            found.transitions,
            slopes,
            memory_reads,
        )
        for recursion, true, signal, read, jacobian, slope, more in zip(
            *parts, strict=True
        ):
            signals.append(recursion.reading(signal))
            reads.append(_with_memories(recursion, read, slope, more))
            matrices.append(recursion.transition(jacobian, true, slope))
        return RecursionView(signals, reads, matrices, slopes)

    def at_start(
        self, constants: Values, steps: Values, credit: Sequence[Components]
    ) -> list[Components]:
        """Credit of states before a window, with that of what read-outs remember."""
        found = [dict(mine) for mine in credit]
        if not self.memories or not any(credit):
            return found
        first = jax.tree.map(lambda x: x[:1], steps)
        add_time = lambda tree: jax.tree.map(lambda x: x[None], tree)
        zeros = [{i: jnp.zeros_like(x) for i, x in mine.items()} for mine in credit]
        given = Signals(Values(), add_time(zeros), add_time(list(credit)))
        reads = self.memory_reads(constants, first, given, {})
        for recursion, mine, more in zip(self.recursions, found, reads, strict=True):
            pairs = zip(recursion.numbered, more, strict=True)
            mine.update((n, read.every[0]) for (n, _), read in pairs)
        return found

    def folded(
        self, view: RecursionView, credit: Sequence[Components]
    ) -> list[Components]:
        """Credit of all components, added up by the states that drive them."""
        parts = zip(self.recursions, credit, view.slopes, strict=True)
        return [recursion.folded(mine, slope) for recursion, mine, slope in parts]

    def added_credit(
        self, found: Derivatives, view: RecursionView, credit: list[Components]
    ) -> list[Components]:
        """What the rule adds to the one-step gradient of the new states, step by step.

        Credit plus the rule's signal, less the true signal that the one-step gradient
        holds.
        """
        added = []
        later, now = self.folded(view, credit), self.folded(view, view.signals)
        for true, total, signal in zip(found.signals, later, now, strict=True):
            for i, x in signal.items():
                total[i] = total[i] + x if i in total else x
            added.append(
                {i: total[i] - x if i in total else -x for i, x in true.items()}
            )
        return added

    def of_traced(self, local: list[Values]) -> list[Values]:
        """Temporal credit of traced parameters only."""
        return [
            Values((y, bar) for y, bar in bars.items() if (g, y) in self.traced_results)
            for g, bars in enumerate(local)
        ]

    # ------------------------------------------------------------ a block

    def advance(
        self,
        constants: Values,
        block: Block,
        view: RecursionView,
        traces: Trace,
        total: Values,
        credit: Sequence[Components],
    ) -> tuple[Trace, Values]:
        """Traces after a block, and ``total`` with their gradients added; ``credit``:
        γ_0."""
        operands = [_operands(traced, constants, block) for traced in self.sites]
        new, total = self._advance_factors(
            constants, operands, block, view, traces, total
        )
        if not self.has_block_traces:
            return new, total
        driven, products = self.drive(constants, block, view, self.unit_products())
        dead = None if block.mask is None else block.mask.dead[0]
        given = (constants, new, driven, products, total, credit, dead)
        return self.take_in(*given)

    def unit_products(self) -> list[Jacobian]:
        """P of no steps, by group."""
        return list(map(unit_product, self.recursions))

    def drive(
        self,
        constants: Values,
        block: Block,
        view: RecursionView,
        after: Sequence[Jacobian],
    ) -> tuple[list[Driven], list[Jacobian]]:
        """What the steps of a block add to each trace, and P_0 by group; ``after``: P of
        the steps that follow before the traces are visited."""
        length = length_of(block.values)
        products, cotangents = [], []
        for recursion, matrix, later, slopes in zip(
            self.recursions, view.transitions, after, view.slopes, strict=True
        ):
            to_end, whole = products_to_end(matrix, later, length)
            products.append(whole)
            named = {}
            for s in recursion.alive:
                products_of = {k: p for (i, k), p in to_end.items() if i == s}
                named[s] = recursion.folded(products_of, slopes)
            cotangents.append(named)
        rows = self._rows(constants, block.safe, cotangents)
        driven = []
        for traced in self.sites:
            if isinstance(traced.layout, FactorLayout):
                driven.append(Driven({}, {}))
                continue
            _, data = _operands(traced, constants, block)
            driven.append(Driven(data, rows[traced.site.group][traced.site.result]))
        return driven, products

    def take_in(
        self,
        constants: Values,
        traces: Trace,
        driven: Sequence[Driven],
        products: Sequence[Jacobian],
        total: Values,
        credit: Sequence[Components],
        dead: jax.Array | None,
    ) -> tuple[Trace, Values]:
        """Traces after the steps that :meth:`drive` saw, in one visit, and ``total`` with
        γ_0 · ε_0 added; ``dead``: no credit came back to the first of them."""
        new = list(traces)
        for n, (site, tap, layout) in enumerate(self.sites):
            if isinstance(layout, FactorLayout):
                continue
            fixed, _ = tap.operands(constants, _NoSteps())
            data, rows = driven[n]
            whole, mine = products[site.group], credit[site.group]
            new[n], gradient = layout.solve(traces[n], fixed, data, rows, whole, mine)
            if dead is not None:
                # A trace may be infinite, and no credit may meet it.
                gradient = zero_at(gradient, dead)
            total = self._add_gradient(total, site, gradient)
        return new, total

    @cached_property
    def driven_bytes(self) -> int:
        """Bytes that :meth:`drive` keeps of one step."""
        found = 0
        for site, _, layout in self.sites:
            if isinstance(layout, FactorLayout):
                continue
            use, width = site.use, site.use.result.dtype.itemsize
            rows = len(self.recursions[site.group].carried(site.result))
            found += rows * int(np.prod(use.result.shape)) * width
            shape = () if use.input is None else use.operand_shape(use.input)
            found += int(np.prod(shape)) * width
        return found

    def _add_gradient(self, total: Values, site: Site, gradient: jax.Array) -> Values:
        dtype = sum_type(site.use.weight.dtype)
        return add(total, {site.weight: cast(gradient, dtype)})

    def _advance_factors(
        self,
        constants: Values,
        operands: list[tuple[Operands, Operands]],
        block: Block,
        view: RecursionView,
        traces: Trace,
        total: Values,
    ) -> tuple[Trace, Values]:
        """Factorised traces after the block and their gradients; one loop over its
        steps for all."""
        layouts, owner = self.factorised, self.owner
        new: Trace = list(traces)
        if not layouts:
            return new, total
        length, groups = length_of(block.values), self.step.groups
        units = []
        for group, signals in zip(groups, view.signals, strict=True):
            one = lambda x, group=group: jnp.ones((length, *group.shape), x.dtype)
            units.append({s: {s: one(x)} for s, x in signals.items()})
        rows = self._rows(constants, block.safe, units)
        drives = {}
        for n, layout in layouts.items():
            site = self.sites[n].site
            mine = rows[site.group].get(site.result, {}) if owner[n] == n else {}
            drives[n] = layout.drive(*operands[n], mine, length)

        def one_step(old: dict[int, FactorTrace], at: tuple) -> tuple:
            drives, signals, reads, matrices = at
            carry: dict[int, FactorTrace] = {}
            y_bars: dict[int, list[jax.Array]] = {}
            xs: dict[int, list[jax.Array]] = {}
            for n, trace in old.items():
                layout, site, owns = layouts[n], self.sites[n].site, owner[n] == n
                x, mine = drives[n]
                after = self.recursions[site.group].after(site.result) if owns else ()
                moved = layout.advance(trace, x, mine, matrices[site.group], after)
                stored = {s: moved.f[s].astype(f.dtype) for s, f in trace.f.items()}
                carry[n] = moved._replace(f=stored)
                # Signals read the new trace, direct reads of old states the old one.
                reading = [(moved, signals[site.group])]
                if reads[site.group]:
                    reading.append((trace, reads[site.group]))
                xs[n] = [read.x for read, _ in reading]
                if owns:
                    y_bars[n] = [layout.result_gradient(*pair) for pair in reading]
            return carry, (y_bars, xs)

        start = {n: traces[n] for n in layouts}
        at = (drives, view.signals, view.reads, view.transitions)
        found: Any = jax.lax.scan(one_step, start, at)
        last, (all_y_bars, all_xs) = found
        for n, layout in layouts.items():
            new[n] = last[n]
            for y_bar, x in zip(all_y_bars[owner[n]], all_xs[n], strict=True):
                if block.mask is not None:
                    y_bar, x = block.zero_if_silent(y_bar), finite(x, block.mask.silent)
                gradient = layout.gradient(*operands[n], y_bar, x)
                total = self._add_gradient(total, self.sites[n].site, gradient)
        return new, total

    def advance_silently(
        self,
        constants: Values,
        steps: Values,
        traces: Trace,
        total: Values,
        credit: Sequence[Components],
        dead: jax.Array | bool = True,
    ) -> tuple[Trace, Values]:
        """Traces after a block of completed steps without a loss.

        ``credit``: from a window's own reverse pass, unless the window is ``dead``.
        """
        length = length_of(steps)
        block = Block.of(steps, Mask.of_silence(length, dead))
        silent = [
            {
                i: jnp.zeros((length, *group.shape), dtype)
                for i, dtype in enumerate(group.dtypes)
            }
            for group in self.step.groups
        ]
        matrices = transitions(self.step, constants, block.safe)
        found = Derivatives([], Values(), Values(), silent, self.no_signal, matrices)
        slopes = self.slopes(constants, block.safe)
        learning = Signals(Values(), silent, self.no_signal)
        view = self.view(found, learning, slopes, [[] for _ in self.step.groups])
        return self.advance(constants, block, view, traces, total, credit)

    def add_factor_gradients(
        self,
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
        for n, layout in self.factorised.items():
            site, trace = self.sites[n].site, traces[n]
            trace = trace._replace(f=traces[self.owner[n]].f)
            y_bar = layout.result_gradient(trace, credit[site.group])
            operands = _operands(self.sites[n], constants, first)
            gradient = layout.gradient(*operands, y_bar[None], trace.x[None])
            total = self._add_gradient(total, site, zero_at(gradient, dead))
        return total

    def _rows(
        self, constants: Values, steps: Values, cotangents: list[dict[int, Components]]
    ) -> list[dict[Key, Components]]:
        """Pull-backs to every group's tap results, one for each named cotangent: (t,
        y)."""
        found: list[dict[Key, Components]] = [{} for _ in self.step.groups]
        names = sorted({s for named in cotangents for s in named})
        for s in names:
            credit = [named.get(s, {}) for named in cotangents]
            bars = pull(self.step, constants, steps, credit)
            for g, mine in enumerate(bars):
                for y, bar in mine.items() if s in cotangents[g] else ():
                    found[g].setdefault(y, {})[s] = bar
        slopes = self.step.slopes
        if slopes is not None and any(group.shared for group in self.step.groups):
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


def _with_memories(
    recursion: Recursion,
    read: Components,
    slopes: Slopes,
    memory_reads: Sequence[MemoryRead],
) -> Components:
    """Direct reads of old states, with those of memories.

    A leaky read-out reads old states through its new one, so that no direct read of a
    target holds it. Without signals ``memory_reads`` is empty.
    """
    found = dict(recursion.reading(read))
    parts = zip(recursion.numbered, slopes, memory_reads, strict=False)
    for (n, _), (_, old), (every, leaky) in parts:
        found[n] = every
        if leaky is None:
            continue
        for j, slope in old.items():
            found[j] = found[j] + slope * leaky if j in found else slope * leaky
    return found


def _decaying(link: Link, kappa: float, positions: Any, found: Signals) -> Signals:
    """Derivatives of a block, of which a read-out has only the positions that decay by
    one κ.

    A read of the old Y is one of the new Y a step earlier.
    """
    if link.readout is None:
        return found
    credit: Any = found.signals[link.readout][0]
    if 0 in found.reads[link.readout]:
        credit = credit + found.reads[link.readout][0] / kappa
    if positions is not None:
        credit = jnp.where(positions, credit, 0)
    signals = list(found.signals)
    signals[link.readout] = {0: credit}
    return found._replace(signals=signals)


def _operands(
    traced: TracedSite, constants: Values, block: Block
) -> tuple[Operands, Operands]:
    """Operands of a site that stay the same, and those of each step.

    A state that is made without any data has none of the latter: all operands but the
    weight are repeated.
    """
    fixed, data = block.operands(traced.tap, constants)
    if data:
        return fixed, data
    weight, length = traced.site.use.operand, length_of(block.values)
    repeat = lambda x: jnp.broadcast_to(x, (length, *jnp.shape(x)))
    data = {k: repeat(x) for k, x in fixed.items() if k != weight}
    return {weight: fixed[weight]}, data


def add(total: Values, more: Mapping[Key, Any]) -> Values:
    """Two sets of gradients in one; the first says which."""
    return Values(
        (key, x + more[key] if key in more else x) for key, x in total.items()
    )
