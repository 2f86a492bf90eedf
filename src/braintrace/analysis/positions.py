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
    Numbering,
    join,
    join_over,
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


class Use(NamedTuple):
    """What one operand of an equation reaches: labels, and sources if there are any."""

    equation: int
    operand: int
    labels: np.ndarray
    sources: Labels

    def pairs(self, size: int) -> np.ndarray:
        """The element that reaches each position; CONFLICT where several do."""
        return sources_of(self.labels, size) if self.sources is None else self.sources


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
        is_body: bool = False,
    ):
        self.is_body = is_body
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
        self.starts: dict[Var, Labels] = {}
        self.keep: Mapping[Var, np.ndarray] = {}
        self.entered: dict[int, tuple[list[Labels], Numbering]] = {}

    def run(
        self,
        starts: Sequence[tuple[Atom, Labels]],
        keep: Mapping[Var, np.ndarray] = {},
        stop: Collection[Var] = (),
    ) -> None:
        self.keep = keep
        for atom, labels in starts:
            if is_var(atom) and labels is not None:
                self.starts[atom] = join(self.starts.get(atom), labels)
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
        if not self.opaque and (edge == CONFLICT).any():
            sources = self.sources_of(i, k, eqn, outs)
            if sources is None:
                pairs = self.pair_count(i, k, eqn, outs)
                edge = self.without_conflicts(i, k, edge, pairs)
        if (edge != NONE).any():
            self.uses[eqn.invars[k]].append(Use(i, k, edge, sources))

    def without_conflicts(
        self, i: int, k: int, edge: np.ndarray, pairs: int
    ) -> np.ndarray:
        """The labels of an operand whose elements with several positions are cut."""
        conflict = edge == CONFLICT
        limit = max(edge.size, self.size)
        reason = FAN_OUT
        if pairs > limit:
            reason = f'{reason} ({pairs:,} pairs, a trace holds up to {limit:,})'
        self.cut(i, k, conflict, reason)
        return np.where(conflict, NONE, edge).astype(np.int32)

    def pair_count(self, i: int, k: int, eqn: Equation, outs: list[Labels]) -> int:
        """Pairs of an element of an operand and a position it reaches."""
        operand, operation, count = eqn.invars[k].aval, operation_of(eqn), 0
        for v, labels in zip(eqn.outvars, outs, strict=True):
            if labels is not None:
                sources = self.out.sources.get(v)
                reached = labels if sources is None else sources
                count += int((reached >= 0).sum())
        if operation is not None and operation.fan_in is not None:
            return count * operation.fan_in(eqn, k)
        if self.origins_of(i, k, eqn) is not None:
            return count
        return count * operand.size

    def sources_of(
        self, i: int, k: int, eqn: Equation, outs: list[Labels]
    ) -> np.ndarray | None:
        """The element of an operand that reaches each position, if no two do.

        States reach positions as states: of them each element has one position only.
        """
        operand = eqn.invars[k]
        if self.is_body or operand in self.keep or operand in self.starts:
            return None
        if i in self.entered:
            entered, numbering = self.entered[i]
            return numbering.sources_of(entered[k])
        origins = self.origins_of(i, k, eqn)
        if origins is None:
            return None
        found: Labels = None
        for v, labels, origin in zip(eqn.outvars, outs, origins, strict=True):
            if labels is not None:
                sources = self.out.sources.get(v)
                more = sources_through(labels, sources, origin, self.size)
                found = join(found, more)
        return None if found is None or (found == CONFLICT).any() else found

    def origins_of(self, i: int, k: int, eqn: Equation) -> list[np.ndarray] | None:
        """The element of an operand that each element of the results comes from."""
        operation = operation_of(eqn)
        if operation is not None and operation.origins is not None:
            return operation.origins(eqn, k, self.const)
        if structure(eqn) not in ('none', 'custom', 'call'):
            return None
        ends = np.cumsum([v.aval.size for v in eqn.outvars])
        reached = self.operands(i, eqn, element_numbers(eqn, ends))[k]
        if reached is None or (reached == CONFLICT).any():
            return None
        parts = np.split(sources_of(reached, int(ends[-1])), ends[:-1])
        pairs = zip(eqn.outvars, parts, strict=True)
        return [part.reshape(v.aval.shape) for v, part in pairs]

    def resolve(self, v: Var) -> Labels:
        """The label of a variable from all its uses; uses that disagree with it are
        cut."""
        uses = self.uses.pop(v, [])
        start = self.starts.get(v)
        labels = start
        for use in uses:
            labels = join(labels, use.labels)
        if self.opaque or labels is None:
            return labels
        if (labels == CONFLICT).any():
            if (sources := self.shared_sources(v, uses)) is not None:
                self.out.sources[v] = sources
                for use in uses:
                    self.keep_edge(v, use)
                return labels
            uses, labels = self.without_sources(uses), start
            for use in uses:
                labels = join(labels, use.labels)
            if labels is None:
                return None
        wanted = self.wanted(v, labels, start)
        for use in uses:
            edge = use.labels
            wrong = (edge >= 0) & (edge != wanted) & (wanted != CONFLICT)
            if wrong.any():
                reason = MOVED if v in self.keep else PARTED
                self.cut(use.equation, use.operand, wrong, reason)
            if ((edge >= 0) & ~wrong).any():
                self.keep_edge(v, use)
        return self.settle(labels, wanted, start, uses)

    def keep_edge(self, v: Var, use: Use) -> None:
        """Note an edge that carries credit."""
        self.out.edges.add((use.equation, use.operand))
        self.reading[v].append((use.equation, use.operand))

    def shared_sources(self, v: Var, uses: Sequence[Use]) -> np.ndarray | None:
        """The element of a value that reaches each position by any use, if no two do.

        A value that old states reach keeps its uses by one position alone: to share it
        would cut those states' own positions as well.
        """
        if self.is_body or v in self.keep or v in self.starts:
            return None
        alone = [use for use in uses if use.sources is None]
        if alone and self.relevance.reaches(of(self.env, v)):
            return None
        found: Labels = None
        for use in uses:
            found = join(found, use.pairs(self.size))
        return None if found is None or (found == CONFLICT).any() else found

    def without_sources(self, uses: Sequence[Use]) -> list[Use]:
        """Uses of which elements with several positions are cut."""
        found = []
        for use in uses:
            if use.sources is None:
                found.append(use)
                continue
            pairs = int((use.sources >= 0).sum())
            labels = self.without_conflicts(
                use.equation, use.operand, use.labels, pairs
            )
            if (labels != NONE).any():
                found.append(use._replace(labels=labels, sources=None))
        return found

    def wanted(self, v: Var, labels: np.ndarray, start: Labels) -> np.ndarray:
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
        if start is not None:
            wanted = np.where(start >= 0, start, wanted).astype(np.int32)
        if v in self.keep:
            wanted = np.where(self.keep[v] >= 0, self.keep[v], wanted).astype(np.int32)
        return wanted

    @cached_property
    def origins(self) -> dict[Var, np.ndarray]:
        """The position of the old state that each element came from, where it came from
        one.

        Only a preference among uses that part: rules run on index arrays and are
        inverted.
        """
        origins = dict(self.keep)
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
        start: Labels,
        uses: Sequence[Use],
    ) -> Labels:
        reached = np.zeros(labels.shape, bool) if start is None else start >= 0
        for use in uses:
            reached = reached | (use.labels == wanted)
        fixed = np.where(reached, wanted, NONE)
        labels = np.where(wanted == CONFLICT, labels, fixed).astype(np.int32)
        return labels if (labels != NONE).any() else None

    # ------------------------------------------------------------ one equation

    def operands(self, i: int, eqn: Equation, outs: list[Labels]) -> list[Labels]:
        kind = structure(eqn)
        if kind in ('custom', 'call'):
            return self.custom(eqn, outs)
        if kind in ('cond', 'scan'):
            return self.bodies(i, eqn, outs)
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
        self, jaxpr: Any, operands: Sequence[Atom], inputs: Sequence[Bits], opaque: bool
    ) -> _Pass:
        """A pass over a body whose first inputs are the given operands of this program."""
        body = open_jaxpr(jaxpr)
        const = Constants(
            jaxpr, dict(zip(body.invars, operands, strict=False)), self.const
        )
        env = flow(body, inputs)
        given = (body, env, self.relevance, self.size, const, Positions(), opaque)
        return _Pass(*given, is_body=True)

    def custom(self, eqn: Equation, outs: list[Labels]) -> list[Labels]:
        """A call with its own derivative cannot be cut inside: conflicts come out to
        the operands."""
        (sub,) = sub_programs(eqn)
        inner = self.body(sub.jaxpr, eqn.invars, self.bits(eqn.invars), opaque=True)
        inner.run(list(zip(inner.jaxpr.outvars, outs, strict=True)))
        labels = [inner.out.labels.get(v) for v in inner.jaxpr.invars]
        return (
            labels
            if self.opaque or from_library(sub.jaxpr)
            else confirmed(eqn, outs, labels)
        )

    def enter(self, i: int, key: tuple, inner: _Pass) -> None:
        if not self.opaque:
            self.out.cuts.bodies[i, key] = inner.out.cuts
            self.out.found += inner.out.found
            self.out.gaps += inner.out.gaps

    def bodies(self, i: int, eqn: Equation, outs: list[Labels]) -> list[Labels]:
        """Branches and loops.

        An element of a result that reaches several positions has a number of its own
        inside, so that the bodies are cut only where such elements meet.
        """
        inside = self.cond if structure(eqn) == 'cond' else self.scan
        sources = [self.out.sources.get(v) for v in eqn.outvars]
        if self.opaque or all(s is None for s in sources):
            return inside(i, eqn, outs)
        numbering = Numbering(self.size)
        numbered = [numbering.add(o, s) for o, s in zip(outs, sources, strict=True)]
        labels = inside(i, eqn, numbered)
        self.entered[i] = labels, numbering
        return [
            x if x is None else np.where(x < self.size, x, CONFLICT).astype(np.int32)
            for x in labels
        ]

    def cond(self, i: int, eqn: Equation, outs: list[Labels]) -> list[Labels]:
        result: list[Labels] = [None] * len(eqn.invars)
        for b, branch in enumerate(read_branches(eqn)):
            inner = self.body(
                branch, eqn.invars[1:], self.bits(eqn.invars[1:]), self.opaque
            )
            inner.run(list(zip(inner.jaxpr.outvars, outs, strict=True)))
            self.enter(i, ('branches', b), inner)
            for k, v in enumerate(inner.jaxpr.invars):
                result[k + 1] = join(result[k + 1], inner.out.labels.get(v))
        if self.opaque:
            joined: Labels = None
            for out in outs:
                joined = join(
                    joined, None if out is None else join_over(out.reshape(-1), [0])
                )
            result[0] = joined
        return result

    def scan(self, i: int, eqn: Equation, outs: list[Labels]) -> list[Labels]:
        """Labels of the carry grow to a fixpoint; in the body a carry keeps the
        position it ends at."""
        scan = read_scan(eqn)
        ignored = eqn.invars[: scan.num_ignored]
        operands = eqn.invars[scan.num_ignored :]
        if self.opaque and scan.key != ('jaxpr', None):
            # A derivative that is not known might follow the condition of a loop.
            return MIXING.labels(eqn, outs, self.const)
        a, b = scan.num_consts, scan.num_consts + scan.num_carry
        bits = self.bits(operands)
        carry_bits, _ = carry_fixpoint(scan.body, bits[:a], bits[a:b], bits[b:])
        carry = list(outs[: scan.num_carry])
        results = list(zip(eqn.outvars, outs, strict=True))[scan.num_carry :]
        stacked = [self.over_rounds(v, labels) for v, labels in results]
        while True:
            inner = self.body(
                scan.body,
                operands[:a],
                [*bits[:a], *carry_bits, *bits[b:]],
                self.opaque,
            )
            invars = inner.jaxpr.invars
            ends = {
                v: c for v, c in zip(invars[a:b], carry, strict=True) if c is not None
            }
            inner.run(
                list(zip(inner.jaxpr.outvars, [*carry, *stacked], strict=True)),
                {} if self.opaque else ends,
            )
            entering = [inner.out.labels.get(v) for v in invars[a:b]]
            grown = [
                _grow(c, e, self.opaque) for c, e in zip(carry, entering, strict=True)
            ]
            if all(_same(c, g) for c, g in zip(carry, grown, strict=True)):
                break
            carry = grown
        self.enter(i, scan.key, inner)
        labels = [inner.out.labels.get(v) for v in invars]
        for k in range(b, len(invars)):
            if (found := labels[k]) is not None:
                labels[k] = np.broadcast_to(found, operands[k].aval.shape)
        return [*(None for _ in ignored), *labels]

    def over_rounds(self, v: Var, labels: Labels) -> Labels:
        """One label for all rounds of a loop; elements that reach another position each
        round are cut."""
        if labels is None or labels.ndim == 0:
            return labels
        joined = join_over(labels, [0])
        parted = joined == CONFLICT
        if self.opaque or not parted.any():
            return joined
        mask = np.broadcast_to(parted, labels.shape)
        for j, k in self.reading[v]:
            self.cut(j, k, mask, PARTED)
        return np.where(parted, NONE, joined).astype(np.int32)


def _grow(carry: Labels, entering: Labels, opaque: bool) -> Labels:
    if opaque or carry is None or entering is None:
        return join(carry, entering)
    return np.where(carry == NONE, entering, carry).astype(np.int32)


def _same(a: Labels, b: Labels) -> bool:
    return (a is None and b is None) or (
        a is not None and b is not None and np.array_equal(a, b)
    )


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
    _Pass(jaxpr, env, relevance, size, const, out).run(starts, keep, stop)
    return out
