"""The traces of a step under a rule: which there are, how each is stored, and what
credit they get.

Letters: t steps of a block, y elements of a site's result, s components of a position.
``visits.py`` advances them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import box_of, is_complex
from ..compiled_step import (
    Box,
    CompiledSite,
    CompiledStep,
    Components,
    Jacobian,
    Key,
    Signals,
    SummingLayout,
    Tap,
    TraceLayout,
    Values,
)
from .block import Derivatives
from .factors import FactorLayout
from .recursion import (
    JacobianRecursion,
    LinkSlopes,
    Memory,
    MemoryRead,
    ReadoutMemory,
    Recursion,
    ScalarLeak,
    decaying_part,
    with_memories,
)

Trace = list[Any]
"""One entry a site: components of ε, or a :class:`FactorTrace`."""


@dataclass(frozen=True)
class PerParameter:
    """One trace for each weight and position it reaches."""

    def layout(
        self, site: CompiledSite, shape: tuple[int, ...]
    ) -> TraceLayout | FactorLayout:
        """How the trace of a site is stored."""
        return site.use.layout(site.positions, shape)


@dataclass(frozen=True)
class Factorised:
    """An input part and a state part for each site, with decays (x, f); memory linear
    in units.

    A site that does not factorise keeps a trace for each weight.
    """

    decay: tuple[float, float]

    def layout(
        self, site: CompiledSite, shape: tuple[int, ...]
    ) -> TraceLayout | FactorLayout:
        """How the trace of a site is stored."""
        if site.factorises:
            return FactorLayout(site, self.decay)
        return site.use.layout(site.positions, shape)


class TracedSite(NamedTuple):
    """A site whose trace is carried, the tap it belongs to, and how it is stored."""

    site: CompiledSite
    tap: Tap
    layout: TraceLayout | FactorLayout


class RecursionView(NamedTuple):
    """The derivatives of a block in the components that traces have, with the matrices
    by which the rule carries traces from step to step.

    ``link_slopes``: ∂u/∂h of what leaky read-outs remember, by group.
    """

    signals: list[Components]
    reads: list[Components]
    transitions: list[Jacobian]
    link_slopes: list[LinkSlopes]


@dataclass(frozen=True)
class Traces:
    """All traces of a step under one rule.

    ``is_traced(tap)``: whether the parameters of a tap are traced; the others keep
    their one-step gradient. ``dtype``: how traces are stored, if not in the precision
    of the results. ``every_component``: credit may come back to every old state, even
    to those that no later local step reads (exact windows). ``to_readouts``: traces
    hold what leaky read-outs remember, with ``kappa`` in place of the read-outs' own
    decays if it is given; otherwise ``kappa`` is a filter of all that signals read.
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

    def summed_in_visits(self, length: int) -> frozenset[Key]:
        """Results whose one-step gradients can be summed by the visit of their trace,
        after a block of so many steps. Their tap has one weight, one result and one
        site."""
        found = set()
        for site, tap, layout in self.sites:
            alone = all(
                len(part) == 1 for part in (tap.weights, tap.results, tap.sites)
            )
            if not alone or tap.cut_gradients or not isinstance(layout, SummingLayout):
                continue
            if layout.sums_steps(self._stored_type(site), length):
                found.add(site.result)
        return frozenset(found)

    @cached_property
    def rows_from(self) -> tuple[int, ...]:
        """For every trace the number of the first with the same ∂h/∂y; it uses the rows
        of that one."""
        first: dict[Any, int] = {}
        found = []
        for n, (site, _, _) in enumerate(self.sites):
            key: Any = n
            if site.result not in self.step.groups[site.group].shared:
                y, positions = site.use.result, site.positions.tobytes()
                key = (site.group, site.enters, y.shape, y.dtype, positions)
            found.append(first.setdefault(key, n))
        return tuple(found)

    def row_box(self, n: int) -> Box | None:
        """The part of y that reaches the positions of a trace; None: all of it."""
        site = self.sites[n].site
        is_shared = site.result in self.step.groups[site.group].shared
        return None if is_shared else box_of(site.positions)

    @cached_property
    def owner(self) -> tuple[int, ...]:
        """For every trace the number of the first with the same state part ε_f. Results
        that are added up share it."""
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
        """For each factorised result the part that does not act on its group alone.

        For all other elements the factors replace the whole one-step gradient.
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

    def _stored_type(self, site: CompiledSite) -> Any:
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
    def empty_credit(self) -> list[Components]:
        """Credit without any component, for every group."""
        return [{} for _ in self.step.groups]

    def link_slopes(self, constants: Values, steps: Values) -> list[LinkSlopes]:
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
                given = decaying_part(link, m.memory.kappa, positions, learning)
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
        slopes: list[LinkSlopes],
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
            reads.append(with_memories(recursion, read, slope, more))
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
        parts = zip(self.recursions, credit, view.link_slopes, strict=True)
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

    # ------------------------------------------------------------ a block

    @cached_property
    def driven_bytes(self) -> int:
        """Bytes that :func:`drive` keeps of one step."""
        found = 0
        for n, (site, _, layout) in enumerate(self.sites):
            if isinstance(layout, FactorLayout):
                continue
            use, width = site.use, site.use.result.dtype.itemsize
            if self.rows_from[n] == n:
                rows = len(self.recursions[site.group].carried(site.result))
                box = self.row_box(n)
                size = [p.stop - p.start for p in box] if box else use.result.shape
                found += rows * int(np.prod(size)) * width
            shape = () if use.input is None else use.operand_shape(use.input)
            found += int(np.prod(shape)) * width
        return found
