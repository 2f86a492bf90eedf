"""Position analysis: run the program backward on its own index map.

Every new hidden state of a group starts with its own position numbers; the pass hands
labels back through the families' rules. Old states of the group keep only edges that
lead to their own position, and so D_t is block-diagonal by construction: along edges
that remain, the label never changes.

A trace has one row for each pair of an element and a position it reaches. So an element
may reach several positions as long as each position is reached by one element: a value
that is broadcast has as many pairs as there are positions, no more than a dense layer.
Beyond that the edge is cut, masked element by element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..compat import (
    Atom,
    Equation,
    Jaxpr,
    Var,
    is_var,
    open_jaxpr,
    read_branches,
    read_scan,
    structure,
    sub_programs,
)
from ..operations import (
    ELEMENTWISE,
    MIXING,
    Operation,
    element_numbers,
    forward_labels,
    operation_of,
)
from ..operations.labels import (
    CONFLICT,
    NONE,
    Labels,
    gather_back,
    join,
    join_over,
    labels_of,
    pairs_of,
    sources_of,
    sources_through,
)
from ..source_lines import from_library
from .constants import Constants
from .cuts import Cut, Positions, Relevance
from .dependence import Bits, carry_fixpoint, flow, of
from .probe import confirmed, is_elementwise

FAN_OUT = 'one element reaches several positions'
PARTED = 'its uses reach different positions'
MOVED = 'a position reaches another position'


class Reach(NamedTuple):
    """What the elements of a value reach: labels, and sources if some reach several
    positions and no position is reached by two."""

    labels: np.ndarray
    sources: Labels = None

    @property
    def is_known(self) -> bool:
        """Whether all pairs are known: they are in neither form where an element
        reaches several positions and a position is reached by several elements."""
        return self.sources is not None or not (self.labels == CONFLICT).any()

    def by_position(self, size: int) -> Labels:
        """The element that reaches each position, CONFLICT where several do; None if
        that is not known."""
        if not self.is_known:
            return None
        return sources_of(self.labels, size) if self.sources is None else self.sources

    def pairs(self, size: int) -> np.ndarray:
        """Numbers of the pairs."""
        return pairs_of(self.labels, self.sources, size)


class Use(NamedTuple):
    """One operand of an equation, and what it reaches through that equation."""

    equation: int
    operand: int
    reach: Reach


class Alone(NamedTuple):
    """Why the elements of a value reach one position each: if it is for their number,
    all ``pairs`` and all ``elements`` of what the value stands for."""

    pairs: int = 0
    elements: int = 0


class _Pass:
    """One backward pass over a program (or a body inside it)."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        env: Mapping[Var, Bits],
        relevance: Relevance,
        size: int,
        const: Constants,
        out: Positions,
        opaque: bool = False,
    ):
        self.jaxpr, self.env, self.relevance, self.size, self.const = (
            jaxpr,
            env,
            relevance,
            size,
            const,
        )
        self.out, self.opaque = out, opaque
        self.uses: dict[Var, list[Use]] = defaultdict(list)
        self.reading: dict[Var, list[tuple[int, int]]] = defaultdict(list)
        self.starts: dict[Var, Reach] = {}
        self.keep: Mapping[Var, Reach] = {}
        self.alone: Mapping[Var, Alone] = {}
        self.entered: dict[int, list[Reach | None]] = {}
        self.met: dict[tuple[int, int], Alone] = {}

    def run(
        self,
        starts: Sequence[tuple[Atom, Reach | None]],
        keep: Mapping[Var, Reach] = {},
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
                self.starts[atom] = self.together([before, reach]) if before else reach
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
            for k, edge in enumerate(self.operands(i, eqn, outs)):
                self.use(i, k, eqn, outs, edge)
        for v in (*self.jaxpr.invars, *self.jaxpr.constvars):
            labels = self.resolve(v)
            if labels is not None:
                self.out.labels[v] = labels

    def matters(self, atom: Atom) -> bool:
        return is_var(atom) and (self.opaque or self.relevance(of(self.env, atom)))

    def cut(self, i: int, k: int, mask: np.ndarray, reason: str) -> None:
        self.out.cuts.add(i, k, mask)
        eqn = self.jaxpr.eqns[i]
        bits = of(self.env, eqn.invars[k])
        self.out.found.append(Cut(eqn, k, reason, bits, int(mask.sum())))

    def use(
        self, i: int, k: int, eqn: Equation, outs: list[Labels], edge: Labels
    ) -> None:
        """Note what one operand reaches; elements with too many pairs are cut."""
        if edge is None or not self.matters(eqn.invars[k]):
            return
        operation = operation_of(eqn)
        if (
            not self.opaque
            and operation is not None
            and not operation.differentiates(eqn, k)
        ):
            return
        sources: Labels = None
        if (edge == CONFLICT).any():
            sources = self.sources_of(i, k, eqn, outs)
            if sources is None and not self.opaque:
                pairs = self.pair_count(i, k, eqn, outs)
                edge = self.without_conflicts(i, k, edge, pairs)
        if (edge != NONE).any():
            self.uses[eqn.invars[k]].append(Use(i, k, Reach(edge, sources)))

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
        self.cut(i, k, conflict, reason)
        return np.where(conflict, NONE, edge).astype(np.int32)

    def pair_count(self, i: int, k: int, eqn: Equation, outs: list[Labels]) -> int:
        """Pairs of an element of an operand and a position it reaches.

        An element that reaches two places along an axis of a result is taken to reach
        the whole axis.
        """
        if i in self.entered:
            inside = self.entered[i][k]
            known = 0 if inside is None else len(inside.pairs(self.size))
            return self.met[i, k].pairs if (i, k) in self.met else known
        count = 0
        for v, labels in zip(eqn.outvars, outs, strict=True):
            if labels is not None:
                pairs = len(self.reach(v, labels).pairs(self.size))
                reached = max(int((labels != NONE).sum()), 1)
                count += pairs * self.boxes(i, k, eqn, v, labels) // reached
        return count

    def boxes(self, i: int, k: int, eqn: Equation, v: Var, labels: np.ndarray) -> int:
        """Pairs of an element of an operand and an element of a result that it reaches,
        taken as all that lie between."""
        numbers: np.ndarray | int = 1
        for axis, length in enumerate(labels.shape):
            along = np.indices(labels.shape)[axis]
            outs = [
                np.where(labels == NONE, NONE, along).astype(np.int32)
                if w is v
                else None
                for w in eqn.outvars
            ]
            found = self.operands(i, eqn, outs)[k]
            if found is None:
                return 0
            per_axis = np.where(found == CONFLICT, length, (found >= 0).astype(int))
            numbers = numbers * per_axis
        return int(np.sum(numbers))

    def reach(self, v: Var, labels: np.ndarray) -> Reach:
        """What a value reaches that was resolved before."""
        return Reach(labels, self.out.sources.get(v))

    def is_alone(self, v: Var) -> bool:
        """Whether each element of a value has one position only: states reach positions
        as states."""
        if v in self.keep:
            return self.keep[v].sources is None
        return v in self.alone

    def sources_of(
        self, i: int, k: int, eqn: Equation, outs: list[Labels]
    ) -> np.ndarray | None:
        """The element of an operand that reaches each position, if no two do."""
        if self.is_alone(eqn.invars[k]):
            return None
        if i in self.entered:
            inside = self.entered[i][k]
            return None if inside is None else inside.sources
        origins = self.origins_of(i, k, eqn)
        if origins is None:
            return None
        found: Labels = None
        for v, labels, origin in zip(eqn.outvars, outs, origins, strict=True):
            if labels is not None:
                reach = self.reach(v, labels)
                if not reach.is_known:
                    return None
                more = sources_through(labels, reach.sources, origin, self.size)
                found = join(found, more)
        return None if found is None or (found == CONFLICT).any() else found

    def origins_of(self, i: int, k: int, eqn: Equation) -> list[np.ndarray] | None:
        """The element of an operand that each element of the results comes from."""
        operation = operation_of(eqn)
        if operation is not None and operation.origins is not None:
            return operation.origins(eqn, k, self.const)
        kind = structure(eqn)
        if kind not in ('none', 'custom', 'call'):
            return None
        ends = np.cumsum([v.aval.size for v in eqn.outvars])
        numbers = element_numbers(eqn, ends)
        if kind == 'none':
            labels = self.operands(i, eqn, numbers)[k]
            reach = None if labels is None else Reach(labels)
        else:
            reach = self.custom(eqn, numbers, int(ends[-1]))[k]
        origins = None if reach is None else reach.by_position(int(ends[-1]))
        if origins is None:
            return None
        parts = np.split(origins, ends[:-1])
        pairs = zip(eqn.outvars, parts, strict=True)
        return [part.reshape(v.aval.shape) for v, part in pairs]

    def resolve(self, v: Var) -> Labels:
        """The label of a variable from all its uses; uses that disagree with it are
        cut."""
        uses = self.uses.pop(v, [])
        start = self.starts.get(v)
        every = [use.reach for use in uses]
        if start is not None:
            every.append(start)
        if not every:
            return None
        labels, sources = self.together(every)
        if self.opaque:
            if sources is not None:
                self.out.sources[v] = sources
            return labels
        held = self.held(v)
        if held is not None:
            return self.resolve_held(v, held, uses)
        if (labels == CONFLICT).any():
            if sources is not None and self.may_share(v, every):
                self.out.sources[v] = sources
                for use in uses:
                    self.keep_edge(v, use)
                return labels
            pairs = len(np.unique(np.concatenate([r.pairs(self.size) for r in every])))
            uses = self.without_sources(uses, pairs)
            every = [use.reach for use in uses] + ([start] if start else [])
            if not every:
                return None
            labels, _ = self.together(every)
        wanted = self.wanted(v, labels, start)
        for use in uses:
            edge = use.reach.labels
            wrong = (edge >= 0) & (edge != wanted) & (wanted != CONFLICT)
            if wrong.any():
                reason = MOVED if v in self.keep else PARTED
                self.cut(use.equation, use.operand, wrong, reason)
            if ((edge >= 0) & ~wrong).any():
                self.keep_edge(v, use)
        return self.settle(labels, wanted, start, uses)

    def together(self, every: Sequence[Reach | None]) -> Reach:
        """What several uses of a value reach; without sources where they meet."""
        labels: Labels = None
        sources: Labels = None
        known = [reach for reach in every if reach is not None]
        for reach in known:
            labels = join(labels, reach.labels)
        assert labels is not None
        if (labels == CONFLICT).any() and all(reach.is_known for reach in known):
            for reach in known:
                sources = join(sources, reach.by_position(self.size))
            if sources is not None and (sources == CONFLICT).any():
                sources = None
        return Reach(labels, sources)

    def may_share(self, v: Var, every: Sequence[Reach]) -> bool:
        """Whether elements of a value may reach several positions.

        A value that old states reach keeps its uses by one position alone: to share it
        would cut those states' own positions as well.
        """
        if self.is_alone(v):
            return False
        is_single = any(reach.sources is None for reach in every)
        return not (is_single and self.relevance.reaches(of(self.env, v)))

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

    def without_sources(self, uses: Sequence[Use], pairs: int) -> list[Use]:
        """Uses of which elements with several positions are cut."""
        found = []
        for use in uses:
            labels = use.reach.labels
            if use.reach.sources is not None:
                labels = self.without_conflicts(
                    use.equation, use.operand, labels, pairs
                )
            if (labels != NONE).any():
                found.append(use._replace(reach=Reach(labels)))
        return found

    def wanted(self, v: Var, labels: np.ndarray, start: Reach | None) -> np.ndarray:
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
            reached = self.operands(i, eqn, element_numbers(eqn, ends))
            known = [origins.get(v) if is_var(v) else None for v in eqn.invars]
            for v, labels in zip(
                eqn.outvars, forward_labels(eqn, known, reached, ends), strict=True
            ):
                if labels is not None:
                    origins[v] = labels
        return origins

    def settle(
        self,
        labels: np.ndarray,
        wanted: np.ndarray,
        start: Reach | None,
        uses: Sequence[Use],
    ) -> Labels:
        reached = np.zeros(labels.shape, bool) if start is None else start.labels >= 0
        for use in uses:
            reached = reached | (use.reach.labels == wanted)
        fixed = np.where(reached, wanted, NONE)
        labels = np.where(wanted == CONFLICT, labels, fixed).astype(np.int32)
        return labels if (labels != NONE).any() else None

    # ------------------------------------------------------------ one equation

    def operands(self, i: int, eqn: Equation, outs: list[Labels]) -> list[Labels]:
        kind = structure(eqn)
        if kind in ('custom', 'call'):
            found = self.custom(eqn, outs, self.size)
            return [None if reach is None else reach.labels for reach in found]
        if kind in ('cond', 'scan'):
            self.entered[i] = self.bodies(i, eqn, outs)
            return [None if r is None else r.labels for r in self.entered[i]]
        operation = operation_of(eqn) or self.missing(eqn)
        return operation.labels(eqn, outs, self.const)

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
        opaque: bool,
        size: int,
    ) -> _Pass:
        """A pass over a body whose first inputs are the given operands of this program."""
        body = open_jaxpr(jaxpr)
        const = Constants(
            jaxpr, dict(zip(body.invars, operands, strict=False)), self.const
        )
        env = flow(body, inputs)
        return _Pass(body, env, self.relevance, size, const, Positions(), opaque)

    def inputs(self) -> list[Reach | None]:
        """What the inputs of the program reach."""
        found = [(v, self.out.labels.get(v)) for v in self.jaxpr.invars]
        return [
            None if labels is None else self.reach(v, labels) for v, labels in found
        ]

    def custom(
        self, eqn: Equation, outs: list[Labels], size: int
    ) -> list[Reach | None]:
        """A call with its own derivative cannot be cut inside: conflicts come out to
        the operands."""
        (sub,) = sub_programs(eqn)
        bits = self.bits(eqn.invars)
        inner = self.body(sub.jaxpr, eqn.invars, bits, opaque=True, size=size)
        starts = [None if labels is None else Reach(labels) for labels in outs]
        inner.run(list(zip(inner.jaxpr.outvars, starts, strict=True)))
        found = inner.inputs()
        if self.opaque or from_library(sub.jaxpr):
            return found
        single = [r.labels if r and r.sources is None else None for r in found]
        for k, labels in enumerate(confirmed(eqn, outs, single)):
            if labels is not None:
                found[k] = Reach(labels)
            elif (reach := found[k]) is not None:
                found[k] = self.confirmed_sources(eqn, outs, k, reach)
        return found

    def confirmed_sources(
        self, eqn: Equation, outs: list[Labels], k: int, reach: Reach
    ) -> Reach:
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
        return reach if agrees else Reach(np.full_like(reach.labels, CONFLICT))

    def bodies(self, i: int, eqn: Equation, outs: list[Labels]) -> list[Reach | None]:
        """What the operands of branches and loops reach.

        An operand that the bodies cannot share is entered again, alone.
        """
        inside = self.cond if structure(eqn) == 'cond' else self.scan
        results = [
            None if labels is None else self.reach(v, labels)
            for v, labels in zip(eqn.outvars, outs, strict=True)
        ]
        alone: dict[int, Alone] = {}
        if not self.opaque:
            operands = enumerate(eqn.invars)
            alone = {
                k: self.alone.get(v, Alone())
                for k, v in operands
                if is_var(v) and self.is_alone(v)
            }
        while True:
            entered, found, met = inside(eqn, results, alone)
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

    def cond(
        self,
        eqn: Equation,
        outs: Sequence[Reach | None],
        alone: Mapping[int, Alone],
    ) -> Entered:
        operands, entered = eqn.invars[1:], {}
        every: list[list[Reach]] = [[] for _ in operands]
        for b, branch in enumerate(read_branches(eqn)):
            bits = self.bits(operands)
            inner = self.body(branch, operands, bits, self.opaque, self.size)
            invars = inner.jaxpr.invars
            given = {invars[k - 1]: why for k, why in alone.items()}
            inner.run(list(zip(inner.jaxpr.outvars, outs, strict=True)), alone=given)
            entered['branches', b] = inner
            for reaches, reach in zip(every, inner.inputs(), strict=True):
                reaches += [] if reach is None else [reach]
        result = [self.together(reaches) if reaches else None for reaches in every]
        more: dict[int, Alone] = {}
        for k, (v, reaches, found) in enumerate(
            zip(operands, every, result, strict=True), start=1
        ):
            if found is None or not is_var(v) or not (found.labels == CONFLICT).any():
                continue
            if found.sources is None or not self.may_share(v, reaches):
                pairs = np.concatenate([reach.pairs(self.size) for reach in reaches])
                more[k] = Alone(len(np.unique(pairs)), found.labels.size)
        chooser: Labels = None
        if self.opaque:
            for out in (o.labels for o in outs if o is not None):
                chooser = join(chooser, join_over(out.reshape(-1), [0]))
        first = None if chooser is None else Reach(chooser)
        return entered, [first, *result], more

    def scan(
        self,
        eqn: Equation,
        outs: Sequence[Reach | None],
        alone: Mapping[int, Alone],
    ) -> Entered:
        """Labels of the carry grow to a fixpoint; in the body a carry keeps the
        positions it ends at."""
        scan = read_scan(eqn)
        first = scan.num_ignored
        operands = eqn.invars[first:]
        if self.opaque and scan.key != ('jaxpr', None):
            # A derivative that is not known might follow the condition of a loop.
            labels = [None if out is None else out.labels for out in outs]
            mixed = MIXING.labels(eqn, labels, self.const)
            return {}, [None if x is None else Reach(x) for x in mixed], {}
        a, b = scan.num_consts, scan.num_consts + scan.num_carry
        bits = self.bits(operands)
        carry_bits, _ = carry_fixpoint(scan.body, bits[:a], bits[a:b], bits[b:])
        carry = list(outs[: scan.num_carry])
        results = list(zip(eqn.outvars, outs, strict=True))[scan.num_carry :]
        stacked = [reach and self.over_rounds(v, reach) for v, reach in results]
        inside = [*bits[:a], *carry_bits, *bits[b:]]
        while True:
            inner = self.body(scan.body, operands[:a], inside, self.opaque, self.size)
            invars = inner.jaxpr.invars
            ends = {
                v: c for v, c in zip(invars[a:b], carry, strict=True) if c is not None
            }
            # A carry is held by the position it ends at, whatever is outside.
            given = {
                invars[k - first]: why
                for k, why in alone.items()
                if k >= first and invars[k - first] not in ends
            }
            inner.run(
                list(zip(inner.jaxpr.outvars, [*carry, *stacked], strict=True)),
                {} if self.opaque else ends,
                alone=given,
            )
            found = inner.inputs()
            grown = [self.grown(c, e) for c, e in zip(carry, found[a:b], strict=True)]
            if all(_same(c, g) for c, g in zip(carry, grown, strict=True)):
                break
            carry = grown
        more: dict[int, Alone] = {}
        for k in range(b, len(invars)):
            if (reach := found[k]) is None:
                continue
            shape = operands[k].aval.shape
            found[k] = Reach(np.broadcast_to(reach.labels, shape), reach.sources)
            if reach.sources is not None and shape[0] > 1:
                pairs = shape[0] * len(reach.pairs(self.size))
                more[first + k] = Alone(pairs, int(np.prod(shape)))
        return {scan.key: inner}, [*[None] * first, *found], more

    def grown(self, carry: Reach | None, entering: Reach | None) -> Reach | None:
        """What a carry reaches after one more round."""
        if carry is None or entering is None:
            return carry or entering
        if self.opaque:
            return self.together([carry, entering])
        if carry.sources is None:
            free = (carry.labels == NONE) & (entering.labels != CONFLICT)
            return Reach(np.where(free, entering.labels, carry.labels).astype(np.int32))
        held, more = carry.sources, entering.by_position(self.size)
        assert more is not None
        sources = np.where((held < 0) & (more >= 0), more, held).astype(np.int32)
        return Reach(labels_of(sources, carry.labels.shape), sources)

    def over_rounds(self, v: Var, reach: Reach) -> Reach:
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
            return Reach(joined)
        pairs = reach.pairs(self.size)
        inside = (pairs // self.size) % max(joined.size, 1)
        sources = gather_back(inside.astype(np.int32), pairs % self.size, (self.size,))
        if reach.is_known and not (sources == CONFLICT).any():
            return Reach(joined, sources)
        if self.opaque:
            return Reach(joined)
        mask = np.broadcast_to(parted, labels.shape)
        for j, k in self.reading[v]:
            self.cut(j, k, mask, PARTED)
        return Reach(np.where(parted, NONE, joined).astype(np.int32))


Entered = tuple[dict[tuple, _Pass], list[Reach | None], dict[int, Alone]]
"""The passes over the bodies of an equation, what its operands reach, and operands that
the bodies cannot share."""


def _same(a: Reach | None, b: Reach | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.sources is None or b.sources is None:
        return a.sources is b.sources and np.array_equal(a.labels, b.labels)
    return np.array_equal(a.sources, b.sources)


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
    states of other groups).
    """
    out = Positions()
    new = [(atom, Reach(labels)) for atom, labels in starts]
    old = {v: Reach(labels) for v, labels in keep.items()}
    alone = {atom: Alone() for atom, _ in starts if is_var(atom)}
    _Pass(jaxpr, env, relevance, size, const, out).run(new, old, stop, alone)
    return out
