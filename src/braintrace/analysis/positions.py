"""Position analysis: run the program backward on its own index map.

Every new hidden state of a group starts with its own position numbers; the pass hands
labels back through the families' rules. Old states of the group keep only edges that
lead to their own position, and so D_t is block-diagonal by construction: along edges
that remain, the label never changes.

A trace has one row for each pair of an element and a position it reaches. So an element
may reach several positions as long as each of these is reached by no other: a value
that is broadcast has as many pairs as there are positions, no more than a dense layer.
Beyond that the edge is cut, masked element by element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..compat import (
    Atom,
    Equation,
    Jaxpr,
    Var,
    is_var,
    open_jaxpr,
    structure,
)
from ..operations import (
    ELEMENTWISE,
    MIXING,
    Operation,
    differentiates,
    element_numbers,
    forward_labels,
    operation_of,
)
from ..operations.labels import (
    CONFLICT,
    NONE,
    Labels,
    labels_of,
)
from .bodies import enter_branches, enter_call, enter_loop
from .cuts import FAN_OUT, MOVED, PARTED, SUMMED_AND_SHARED, Cut, Positions
from .dependence import Bits, Constants, Relevance, flow, of
from .pairs import (
    Alone,
    ReachedPairs,
    Use,
    labels_in,
    pair_count,
    sources_through,
    together,
    without_sources,
)
from .probe import is_elementwise


class BackwardPass:
    """One backward pass over a program (or a body inside it)."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        env: Mapping[Var, Bits],
        relevance: Relevance,
        size: int,
        const: Constants,
        opaque: bool = False,
        mixes: bool = False,
    ):
        """``opaque``: a body that cannot be cut inside. ``mixes``: pairs of both kinds
        are followed, as they are outside of bodies."""
        self.jaxpr, self.env, self.relevance = jaxpr, env, relevance
        self.size, self.const = size, const
        self.opaque, self.mixes = opaque, mixes
        self.out = Positions()
        self.uses: dict[Var, list[Use]] = defaultdict(list)
        self.reading: dict[Var, list[tuple[int, int]]] = defaultdict(list)
        self.starts: dict[Var, ReachedPairs] = {}
        self.keep: Mapping[Var, ReachedPairs] = {}
        self.alone: Mapping[Var, Alone] = {}
        self.entered: dict[int, list[ReachedPairs | None]] = {}
        self.met: dict[tuple[int, int], Alone] = {}

    def run(
        self,
        starts: Sequence[tuple[Atom, ReachedPairs | None]],
        keep: Mapping[Var, ReachedPairs] = {},
        stop: Collection[Var] = (),
        alone: Mapping[Var, Alone] = {},
    ) -> None:
        """``starts``: results and what they reach. ``keep``: values and what they are
        to reach. ``stop``: values through which no path is followed. ``alone``: values
        whose elements are to reach one position each."""
        self.keep, self.alone = keep, alone
        for atom, reach in starts:
            if is_var(atom) and reach is not None:
                before = self.starts.get(atom)
                self.starts[atom] = (
                    together([before, reach], self.size) if before else reach
                )
        for i in reversed(range(len(self.jaxpr.eqns))):
            eqn = self.jaxpr.eqns[i]
            if not any(v in self.uses or v in self.starts for v in eqn.outvars):
                continue
            outs = [None if v in stop else self.resolve(v) for v in eqn.outvars]
            if all(o is None for o in outs):
                continue
            for v, o in zip(eqn.outvars, outs, strict=True):
                if o is not None:
                    self.out.labels[v] = o
            for k, edge in enumerate(labels_in(self.operands(i, eqn, outs))):
                self.use(i, k, eqn, outs, edge)
        for v in (*self.jaxpr.invars, *self.jaxpr.constvars):
            labels = self.resolve(v)
            if labels is not None:
                self.out.labels[v] = labels

    def cut(self, i: int, k: int, mask: np.ndarray, reason: str) -> None:
        self.out.cuts.add(i, k, mask)
        eqn = self.jaxpr.eqns[i]
        bits = of(self.env, eqn.invars[k])
        self.out.found.append(Cut(eqn, k, reason, bits, int(mask.sum())))

    def use(
        self, i: int, k: int, eqn: Equation, outs: list[Labels], edge: Labels
    ) -> None:
        """Note what one operand reaches; elements with too many pairs are cut."""
        v = eqn.invars[k]
        if edge is None or not is_var(v):
            return
        matters = self.opaque or self.relevance(of(self.env, v))
        if not matters or not (self.opaque or differentiates(eqn, k)):
            return
        sources: Labels = None
        if (edge == CONFLICT).any():
            if not self.is_alone(v):
                sources = sources_through(self, i, k, eqn, outs, edge)
            if sources is None and not self.opaque:
                pairs = pair_count(self, i, k, eqn, outs)
                edge = self.without_conflicts(i, k, edge, pairs)
        if (edge != NONE).any():
            self.uses[v].append(Use(i, k, ReachedPairs(edge, sources)))

    def without_conflicts(
        self, i: int, k: int, edge: np.ndarray, pairs: int
    ) -> np.ndarray:
        """The labels of an operand whose elements with several positions are cut."""
        conflict = edge == CONFLICT
        whole = self.alone.get(self.jaxpr.eqns[i].invars[k], Alone())
        pairs = max(pairs, whole.pairs)
        limit = max(edge.size, self.size, whole.elements)
        reason = FAN_OUT
        if pairs > limit:
            reason = f'{reason} ({pairs:,} pairs, a trace holds up to {limit:,})'
        elif not self.relevance.reaches(of(self.env, self.jaxpr.eqns[i].invars[k])):
            reason = f'{reason} ({pairs:,} pairs; {SUMMED_AND_SHARED})'
        self.cut(i, k, conflict, reason)
        return np.where(conflict, NONE, edge).astype(np.int32)

    def reach(self, v: Var, labels: Labels) -> ReachedPairs | None:
        """What a value reaches that was resolved before."""
        return None if labels is None else ReachedPairs(labels, self.out.sources.get(v))

    def is_alone(self, v: Var) -> bool:
        """Whether each element of a value has one position only: states reach positions
        as states."""
        if v in self.keep:
            return self.keep[v].sources is None
        return v in self.alone

    def resolve(self, v: Var) -> Labels:
        """The label of a variable from all its uses; uses that disagree with it are
        cut."""
        uses = self.uses.pop(v, [])
        start = self.starts.get(v)
        given = [] if start is None else [start]
        every = [*(use.reach for use in uses), *given]
        if not every:
            return None
        may_mix = self.mixes and v not in self.made_by_bodies
        reach = together(every, self.size, may_mix)
        labels, sources = reach
        if self.opaque:
            if sources is not None:
                self.out.sources[v] = sources
            return labels
        held = self.held(v)
        if held is not None:
            return self.resolve_held(v, held, uses)
        if (labels == CONFLICT).any():
            # Some elements reach several positions: a trace may hold that, or uses are
            # cut until none does.
            if sources is not None and self.may_share(v, every, reach):
                self.out.sources[v] = sources
                for use in uses:
                    self.keep_edge(v, use)
                return labels
            pairs = len(np.unique(np.concatenate([r.pairs(self.size) for r in every])))
            uses = self.without_shared(uses, pairs)
            every = [*(use.reach for use in uses), *given]
            if not every:
                return None
            labels, _ = together(every, self.size)
        # One position for each element: uses that lead to another one are cut.
        wanted = self.wanted(v, labels, start)
        reached = np.zeros(labels.shape, bool) if start is None else start.labels >= 0
        for use in uses:
            edge = use.reach.labels
            wrong = (edge >= 0) & (edge != wanted) & (wanted != CONFLICT)
            if wrong.any():
                reason = MOVED if v in self.keep else PARTED
                self.cut(use.equation, use.operand, wrong, reason)
            if ((edge >= 0) & ~wrong).any():
                self.keep_edge(v, use)
            reached = reached | (edge == wanted)
        fixed = np.where(reached, wanted, NONE)
        labels = np.where(wanted == CONFLICT, labels, fixed).astype(np.int32)
        return labels if (labels != NONE).any() else None

    def may_share(
        self, v: Var, every: Sequence[ReachedPairs], found: ReachedPairs
    ) -> bool:
        """Whether elements of a value may reach several positions; ``found``: what its
        uses reach together.

        An element that old states reach keeps a use by one position alone: to share it
        would cut those states' own positions as well.
        """
        if self.is_alone(v):
            return False
        shared = found.labels == CONFLICT
        is_single = any(((reach.labels >= 0) & shared).any() for reach in every)
        return not (is_single and self.relevance.reaches(of(self.env, v)))

    @cached_property
    def made_by_bodies(self) -> frozenset[Var]:
        """Results of branches and loops."""
        made = (e for e in self.jaxpr.eqns if structure(e) in ('cond', 'scan'))
        return frozenset(v for eqn in made for v in eqn.outvars)

    def held(self, v: Var) -> Labels:
        """The element that reaches each position, of a value where that is given: a
        result that is shared, or what a loop carries."""
        start, keep = self.starts.get(v), self.keep.get(v)
        found: Labels = None
        for reach in (keep, start):
            if reach is not None and reach.sources is not None:
                more = reach.sources
                found = more if found is None else np.where(found >= 0, found, more)
        return found

    def resolve_held(self, v: Var, held: np.ndarray, uses: Sequence[Use]) -> Labels:
        """The label of a shared value; elements that reach a position which another
        element holds are cut."""
        held, shape = held.copy(), v.aval.shape
        start = self.starts.get(v)
        reached = np.zeros(0, np.int64) if start is None else start.pairs(self.size)
        for use in uses:
            pairs = use.reach.pairs(self.size)
            element, position = pairs // self.size, pairs % self.size
            first = np.unique(position, return_index=True)[1]
            free = first[held[position[first]] < 0]
            held[position[free]] = element[free]
            wrong = np.zeros(v.aval.size, bool)
            wrong[element[held[position] != element]] = True
            if wrong.any():
                reason = MOVED if v in self.keep else PARTED
                self.cut(use.equation, use.operand, wrong.reshape(shape), reason)
            kept = pairs[~wrong[element]]
            if kept.size:
                self.keep_edge(v, use)
                reached = np.union1d(reached, kept)
        if not reached.size:
            return None
        sources = np.full(self.size, NONE, np.int32)
        sources[reached % self.size] = reached // self.size
        labels = labels_of(sources, shape)
        if (labels == CONFLICT).any():
            self.out.sources[v] = sources
        return labels

    def keep_edge(self, v: Var, use: Use) -> None:
        """Note an edge that carries credit."""
        self.out.edges.add((use.equation, use.operand))
        self.reading[v].append((use.equation, use.operand))

    def without_shared(self, uses: Sequence[Use], pairs: int) -> list[Use]:
        """Uses of which elements with several positions are cut."""
        found = []
        for use in uses:
            labels = use.reach.labels
            if use.reach.sources is not None:
                labels = self.without_conflicts(
                    use.equation, use.operand, labels, pairs
                )
            if (labels != NONE).any():
                found.append(use._replace(reach=ReachedPairs(labels)))
        return found

    def wanted(
        self, v: Var, labels: np.ndarray, start: ReachedPairs | None
    ) -> np.ndarray:
        """The position each element should keep; CONFLICT where any will do."""
        wanted = np.full(labels.shape, CONFLICT, np.int32)
        parted = labels == CONFLICT
        if parted.any():
            own = self.origins.get(v)
            if own is None and labels.size == self.size:
                own = np.arange(labels.size).reshape(labels.shape)
            wanted = np.where(parted, NONE if own is None else own, wanted).astype(
                np.int32
            )
        for reach in (start, self.keep.get(v)):
            if reach is not None:
                own = reach.labels
                wanted = np.where(own >= 0, own, wanted).astype(np.int32)
        return wanted

    @cached_property
    def origins(self) -> dict[Var, np.ndarray]:
        """The position of the old state that each element came from, where it came from
        one.

        Only a preference among uses that part: rules run on index arrays and are
        inverted.
        """
        origins = {v: reach.labels for v, reach in self.keep.items()}
        for i, eqn in enumerate(self.jaxpr.eqns):
            if not any(is_var(v) and v in origins for v in eqn.invars) or structure(
                eqn
            ) not in ('none', 'custom'):
                continue
            ends = np.cumsum([v.aval.size for v in eqn.outvars])
            numbers = element_numbers(eqn, ends)
            reached = labels_in(self.operands(i, eqn, numbers, int(ends[-1])))
            known = [origins.get(v) if is_var(v) else None for v in eqn.invars]
            for v, labels in zip(
                eqn.outvars, forward_labels(eqn, known, reached, ends), strict=True
            ):
                if labels is not None:
                    origins[v] = labels
        return origins

    # ------------------------------------------------------------ one equation

    def operands(
        self, i: int, eqn: Equation, outs: list[Labels], size: int | None = None
    ) -> list[ReachedPairs | None]:
        """What each operand reaches, from the labels of the results; ``size``: how many
        positions these name, if others than those of the pass."""
        kind = structure(eqn)
        if kind in ('custom', 'call'):
            return enter_call(self, eqn, outs, self.size if size is None else size)
        if kind in ('cond', 'scan'):
            self.entered[i] = self.bodies(i, eqn, outs)
            return self.entered[i]
        operation = operation_of(eqn) or self.missing(eqn)
        return without_sources(operation.labels(eqn, outs, self.const))

    def missing(self, eqn: Equation) -> Operation:
        """For a primitive that is not registered: element-wise if a numerical probe
        says so, else mixing."""
        kind = 'elementwise' if is_elementwise(eqn) else 'mixing'
        if all(eqn is not other for other, _ in self.out.gaps):
            self.out.gaps.append((eqn, kind))
        return ELEMENTWISE if kind == 'elementwise' else MIXING

    def bits(self, atoms: Sequence[Atom]) -> list[Bits]:
        return [of(self.env, v) for v in atoms]

    def body(
        self,
        jaxpr: Any,
        operands: Sequence[Atom],
        inputs: Sequence[Bits],
        opaque: bool = False,
        size: int | None = None,
    ) -> BackwardPass:
        """A pass over a body whose first inputs are the given operands of this program.
        ``size``: how many positions there are, if others than outside."""
        body = open_jaxpr(jaxpr)
        given = dict(zip(body.invars, operands, strict=False))
        return BackwardPass(
            body,
            flow(body, inputs),
            self.relevance,
            self.size if size is None else size,
            Constants(jaxpr, given, self.const),
            opaque or self.opaque,
        )

    def inputs(self) -> list[ReachedPairs | None]:
        """What the inputs of the program reach."""
        return [self.reach(v, self.out.labels.get(v)) for v in self.jaxpr.invars]

    def bodies(
        self, i: int, eqn: Equation, outs: list[Labels]
    ) -> list[ReachedPairs | None]:
        """What the operands of branches and loops reach.

        An operand that the bodies cannot share is entered again, alone.
        """
        enter = enter_branches if structure(eqn) == 'cond' else enter_loop
        results = list(map(self.reach, eqn.outvars, outs))
        alone = {
            k: self.alone.get(v, Alone())
            for k, v in enumerate(eqn.invars)
            if not self.opaque and is_var(v) and self.is_alone(v)
        }
        while True:
            entered, found, met = enter(self, eqn, results, alone)
            self.met |= {(i, k): why for k, why in met.items()}
            if self.opaque or met.keys() <= alone.keys():
                break
            alone = {**met, **alone}
        if not self.opaque:
            for key, inner in entered.items():
                self.out.cuts.bodies[i, key] = inner.out.cuts
                self.out.found += inner.out.found
                self.out.gaps += inner.out.gaps
        return found


def find_positions(
    jaxpr: Jaxpr,
    env: Mapping[Var, Bits],
    relevance: Relevance,
    starts: Sequence[tuple[Atom, np.ndarray]],
    keep: Mapping[Var, np.ndarray],
    stop: Collection[Var],
    size: int,
    const: Constants,
) -> Positions:
    """Labels of every value that carries credit into one group, and the cuts that make
    it local.

    ``starts``: new states of the group with their positions. ``keep``: old states of
    the group with theirs. ``stop``: values through which no path is followed (new
    states of other groups). ``env``: what each value depends on. ``relevance``: which
    dependences matter. ``size``: the number of positions. ``const``: known values.
    """
    new = [(atom, ReachedPairs(labels)) for atom, labels in starts]
    old = {v: ReachedPairs(labels) for v, labels in keep.items()}
    alone = {atom: Alone() for atom, _ in starts if is_var(atom)}
    backward = BackwardPass(jaxpr, env, relevance, size, const, mixes=True)
    backward.run(new, old, stop, alone)
    return backward.out
