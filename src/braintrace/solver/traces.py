"""The traces of a step under a rule: which there are, and how each is stored.

Letters: y elements of a site's result, s components of a position. ``visits.py`` advances
the traces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..arrays import box_of, is_complex, trace_type
from ..compiled_step import (
    Box,
    CompiledSite,
    CompiledStep,
    Key,
    Tap,
    TraceLayout,
)
from .factors import FactorLayout, FactorTrace
from .recursion import Recursion, RecursionPart

Trace = list[Any]
"""One entry a site: components of ε, or a :class:`FactorTrace`."""


class TracedSite(NamedTuple):
    """A site whose trace is carried, the tap it belongs to, and how it is stored.

    ``components``: those of its trace. ``shares``: the number of the first trace with
    the same ∂h/∂y, which holds what they share: the rows of a block, or the state part
    of factors.
    """

    site: CompiledSite
    tap: Tap
    layout: TraceLayout | FactorLayout
    components: tuple[int, ...]
    shares: int


@dataclass(frozen=True)
class Traces:
    """All traces of a step under one rule.

    ``decay``: (x, f) of an input part and a state part in place of one trace for each
    weight, wherever a site factorises; None for no factors.
    ``is_traced(tap)``: whether the parameters of a tap are traced; the others keep
    their one-step gradient. ``dtype``: how traces are stored, if not in the precision
    of the results. ``every_component``: credit may come back to every old state, even
    to those that no later local step reads (exact windows).
    """

    step: CompiledStep
    kind: RecursionPart
    decay: tuple[float, float] | None = None
    is_traced: Callable[[Tap], bool] = lambda tap: True
    dtype: Any = None
    every_component: bool = False

    @cached_property
    def recursions(self) -> tuple[Recursion, ...]:
        """The recursion of every group."""
        return tuple(
            Recursion(group, self.kind, self.every_component)
            for group in self.step.groups
        )

    @cached_property
    def traced_results(self) -> frozenset[tuple[int, Key]]:
        """(group, result) wherever a traced tap reaches a group."""
        return frozenset(
            (site.group, site.result)
            for tap in self.step.taps
            if self.is_traced(tap)
            for site in tap.sites
        )

    @cached_property
    def sites(self) -> tuple[TracedSite, ...]:
        """Every trace that a sequence carries, in program order."""
        found: list[TracedSite] = []
        first: dict[Any, int] = {}
        for tap in self.step.taps:
            for site in tap.sites if self.is_traced(tap) else ():
                layout = self._layout(site)
                components = self.recursions[site.group].carried(site.result)
                if not components and not isinstance(layout, FactorLayout):
                    continue
                n = len(found)
                shares = first.setdefault(self._same_path(site, layout) or n, n)
                found.append(TracedSite(site, tap, layout, components, shares))
        return tuple(found)

    def _layout(self, site: CompiledSite) -> TraceLayout | FactorLayout:
        """How the trace of a site is stored."""
        if self.decay is not None and site.factorises:
            return FactorLayout(site, self.decay)
        return site.use.layout(site.positions, self.step.groups[site.group].shape)

    def _same_path(
        self, site: CompiledSite, layout: TraceLayout | FactorLayout
    ) -> tuple | None:
        """Equal for sites with the same ∂h/∂y and the same kind of trace, as of results
        that are added up; None where nothing is shared."""
        is_factorised, alone = False, self._is_spread(site)
        if isinstance(layout, FactorLayout):
            is_factorised, alone = True, not layout.shares_state_part
        if alone:
            return None
        y, positions = site.use.result, site.positions.tobytes()
        return is_factorised, site.group, site.enters, y.shape, y.dtype, positions

    def _is_spread(self, site: CompiledSite) -> bool:
        """Whether one element of the result reaches several positions."""
        return site.result in self.step.groups[site.group].shared

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
    def beyond_factors(self) -> dict[Key, Box | None]:
        """For each factorised result the part that does not act on its group alone.

        For all other elements the factors replace the whole one-step gradient.
        """
        sites = [self.sites[n].site for n in self.factorised]
        return {s.result: self.step.other_effects(s.group, s.result) for s in sites}

    def row_box(self, n: int) -> Box | None:
        """The part of y that reaches the positions of a trace; None: all of it."""
        site = self.sites[n].site
        return None if self._is_spread(site) else box_of(site.positions)

    def init(self) -> Trace:
        """Traces at the start of a sequence."""
        traces: Trace = []
        for n, (site, _, layout, components, shares) in enumerate(self.sites):
            if isinstance(layout, FactorLayout):
                traces.append(layout.init(components if shares == n else ()))
            else:
                dtype = self.stored_type(site)
                traces.append({i: jnp.zeros(layout.shape, dtype) for i in components})
        return traces

    @cached_property
    def sample_axes(self) -> list[Any]:
        """The axis of samples of every array of :meth:`init`, -1 for none."""
        axes: list[Any] = []
        for n, (site, _, layout, components, shares) in enumerate(self.sites):
            letters = site.use.letters
            along = lambda own, letters=letters: (
                own.find(letters.sample) if letters and letters.sample else -1
            )
            if not isinstance(layout, FactorLayout):
                # The full influence has positions in one axis, samples before all.
                axis = along(letters.trace) if letters else 0
                axes.append(dict.fromkeys(components, axis))
                continue
            own = letters.y or letters.rows if letters else ''
            x = own if layout.keeps_slopes else ''
            if letters and letters.operands and site.use.input is not None:
                x = letters.operands[site.use.input]
            mine = components if shares == n else ()
            parts: tuple[Any, Any, Any] = (along(x), {s: along(own) for s in mine}, -1)
            axes.append(FactorTrace(*parts))
        return axes

    def stored_type(self, site: CompiledSite) -> Any:
        """The type in which the trace of a site is stored, unless it is factorised."""
        dtype = trace_type(site.use)
        if self.dtype is None:
            return dtype
        # A complex trace needs a complex type of at least the precision asked for.
        return (
            jnp.promote_types(self.dtype, jnp.complex64)
            if is_complex(dtype)
            else self.dtype
        )

    @cached_property
    def driven_bytes(self) -> int:
        """Bytes that :func:`visits.drive` keeps of one step."""
        found = 0
        for n, (site, _, layout, components, shares) in enumerate(self.sites):
            if isinstance(layout, FactorLayout):
                continue
            use, width = site.use, site.use.result.dtype.itemsize
            if shares == n:
                box = self.row_box(n)
                size = [p.stop - p.start for p in box] if box else use.result.shape
                found += len(components) * int(np.prod(size)) * width
            kept = 1 if use.input is None else use.operands[use.input].size
            found += kept * width
        return found
