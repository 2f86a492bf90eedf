"""Credit classes: which paths from a parameter to the loss local traces can follow, and
why.

exact          no temporal path is cut: with exact local traces (D-RTRL) the gradient is that of BPTT
local          temporal credit through its own position, something else is cut
instantaneous  the one-step gradient only
none           no gradient at all

A class is a fact about the model. What a learning rule makes of it is in
``rules/gradients.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..compat import (
    Atom,
    Equation,
    is_opaque,
    is_var,
    is_whole_cut,
    library_line,
    open_jaxpr,
    source_line,
    source_text,
    structure,
    sub_programs,
)
from ..errors import CompilationError, three_parts
from ..program import Hidden, Parameter, Path
from ..program.step import path_name
from ..text import operation_name
from .dependence import of, union
from .diagnostics import LEVELS, CompilationRecord, DiagnosticKind, DiagnosticLevel
from .facts import Facts
from .groups import HiddenGroup
from .positions import Cut, Positions
from .sites import HiddenParamOpRelation

Links = frozenset[tuple[int, int]]
"""Pairs (group, read-out) whose traces carry the memory of the read-out."""
NO_CREDIT = (
    'no output of its step depends on it, and no credit comes back from later ones'
)
"""Begins the reason of a parameter that BPTT would teach and traces cannot."""


@dataclass(frozen=True)
class CreditAnalysis:
    """Everything needed to judge the parameters of one program."""

    facts: Facts
    members: Sequence[tuple[Hidden, ...]]
    groups: Sequence[HiddenGroup]
    positions: Sequence[Positions]
    sites: Sequence[HiddenParamOpRelation]

    def _grads(self, atoms: Sequence[Atom | None]) -> int:
        bits = 0
        for atom in atoms:
            bits |= of(self.facts.total, atom).grads if atom is not None else 0
        return bits

    @cached_property
    def _all_results(self) -> int:
        """Bits of everything that some result of the step depends on."""
        p = self.facts.program
        return self._grads(
            [*p.outputs, *(h.outvar for h in p.hidden), *(o.outvar for o in p.others)]
        )

    @cached_property
    def _new(self) -> list[int]:
        """Bits of everything the new states of each group depend on."""
        return [self._grads([h.outvar for h in m]) for m in self.members]

    @cached_property
    def _live_groups(self) -> list[bool]:
        """Groups whose old value influences anything."""
        return [bool(self._all_results & self.facts.old(m)) for m in self.members]

    @cached_property
    def _passed_on(self) -> list[int]:
        """Bits of the old states that each group's new states read themselves and hand
        on to outputs."""
        seen = self._grads(self.facts.program.outputs)
        return [
            union(
                self.facts.behind[h.outvar]
                for h in m
                if seen & self.facts.new_bit[h.outvar]
            ).grads
            for m in self.members
        ]

    @cached_property
    def _live_others(self) -> list:
        """Other states that carry what parameters did from step to step, in what can be
        differentiated."""
        facts, program = self.facts, self.facts.program
        read = [
            o
            for o in program.others
            if o.outvar is not None and self._all_results & facts.bit[o.invar]
        ]
        sources, live = 0, []
        for v in (
            *(p.invar for p in program.parameters),
            *(h.invar for h in program.hidden),
        ):
            sources |= facts.bit[v]
        for h in program.hidden:
            sources |= facts.new_bit[h.outvar]
        while found := [
            o for o in read if o not in live and self._grads([o.outvar]) & sources
        ]:
            live += found
            for o in found:
                sources |= facts.bit[o.invar]
        return [o for o in read if o in live]

    @cached_property
    def _remembers(self) -> list[bool]:
        """Groups whose trace lives on: the old value reaches the new one, or an output
        directly."""
        outputs = 0
        for atom in self.facts.program.outputs:
            outputs |= of(self.facts.direct, atom).grads
        return [
            any(h.invar in found.labels for h in m) or bool(outputs & self.facts.old(m))
            for m, found in zip(self.members, self.positions, strict=True)
        ]

    @cached_property
    def _opaque(self) -> list[tuple[Equation, int]]:
        return opaque_equations(self.facts)

    def _stopped(self, bits: int) -> list[str]:
        return [f'no credit passes {_at(e)}' for e, into in self._opaque if into & bits]

    def _cuts(self, g: int, bits: int) -> list[Cut]:
        return [c for c in self.positions[g].found if c.bits.grads & bits]

    @cached_property
    def _making(self) -> list[list[Equation]]:
        """The equations that make each group's new states from what is old and from the
        new states of others."""
        new = {h.outvar for m in self.members for h in m}
        found = []
        for members in self.members:
            live: set[Atom] = {h.outvar for h in members}
            made = []
            for eqn in reversed(self.facts.program.equations):
                if any(v in live for v in eqn.outvars):
                    made.append(eqn)
                    live |= {v for v in eqn.invars if is_var(v) and v not in new}
            found.append(made[::-1])
        return found

    def _passage(self, g: int, other: int, within: bool = False) -> Equation | None:
        """The first equation by which a group's old states (or within a step its new
        ones) enter another's new ones."""
        members = self.members[g]
        read = {h.outvar if within else h.invar for h in members}
        bits = self.facts.new(members) if within else self.facts.old(members)
        if (
            not union(self.facts.behind[h.outvar] for h in self.members[other]).grads
            & bits
        ):
            return None
        doors = (
            e
            for e in self._making[other]
            if any(is_var(v) and v in read for v in e.invars)
        )
        return next((e for e in doors if self._grads(e.outvars) & bits), None)

    @cached_property
    def _crossings(self) -> list[dict[int, str]]:
        """The other groups that each group feeds, in words."""
        return [self._crossings_of(g) for g in range(len(self.groups))]

    def _crossings_of(self, g: int) -> dict[int, str]:
        old, new = self.facts.old(self.members[g]), self.facts.new(self.members[g])
        name = _names(self.groups[g].hidden_paths)
        found: dict[int, str] = {}
        for other, live in enumerate(self._live_groups):
            fed = (
                self._new[other] & (old | new) if live else self._passed_on[other] & old
            )
            if other != g and fed:
                passage = self._passage(g, other) or self._passage(
                    g, other, within=True
                )
                where = f' ({source_text(passage)})' if passage else ''
                fed_paths = _names(self.groups[other].hidden_paths)
                found[other] = f'{name} feeds {fed_paths}, another group{where}'
        return found

    def _leaks_of(self, g: int, linked: Links = frozenset()) -> list[str]:
        """Why credit that reached a group is not all carried on."""
        old, new = self.facts.old(self.members[g]), self.facts.new(self.members[g])
        name = _names(self.groups[g].hidden_paths)
        found = [
            f'{name} feeds itself across positions, cut at {_at(c.eqn)}'
            for c in self._cuts(g, old)[:1]
        ]
        crossings = self._crossings[g].items()
        found += [text for other, text in crossings if (g, other) not in linked]
        for state in self._live_others:
            if self._grads([state.outvar]) & (old | new):
                found.append(
                    f'{name} feeds {path_name(state.path)}, which is not a hidden state'
                )
        return found + self._stopped(old | new)

    def _is_felt(self, bit: int, carried: Sequence[HiddenGroup]) -> bool:
        """Whether an output of a step feels these bits in that step, or what traces
        carry of them."""
        outputs = self.facts.program.outputs
        seen = self._grads(outputs)
        read = union(of(self.facts.direct, atom) for atom in outputs).grads
        new_and_old = [
            (
                self.facts.new(self.members[g.index]),
                self.facts.old(self.members[g.index]),
            )
            for g in carried
        ]
        return bool(seen & bit) or any(
            seen & new or read & old for new, old in new_and_old
        )

    def judge(
        self, parameter: Parameter, linked: Links = frozenset()
    ) -> tuple[str, str]:
        """Credit class of one parameter array, and the reason.

        ``linked``: pairs of groups (g, read-out) where traces carry all that g does to
        the read-out.
        """
        bit = self.facts.bit[parameter.invar]
        stopped = self._stopped(bit)
        if not self._all_results & bit:
            return 'none', stopped[
                0
            ] if stopped else 'no differentiable path to a state or an output'
        met = [g for g in range(len(self.groups)) if self._new[g] & bit]
        reached = [g for g in met if self._live_groups[g]]
        others = [o for o in self._live_others if self._grads([o.outvar]) & bit]
        stopped += [
            leak for g in met for leak in self._stopped(self.facts.old(self.members[g]))
        ]
        if not reached and not others and not stopped:
            return 'exact', 'acts on outputs of its own step only'
        into = lambda g: _names(self.groups[g].hidden_paths)
        cuts: dict[tuple, str] = {}
        for g in reached:
            for c in self._cuts(g, bit):
                text = f'path to {into(g)} cut at {_at(c.eqn)}: {c.reason}'
                cuts.setdefault((g, c.reason, _key(c.eqn)), text)
        lost = list(cuts.values())
        lost += [leak for g in met for leak in self._leaks_of(g, linked)]
        lost += [
            f'feeds {path_name(o.path)}, which is not a hidden state' for o in others
        ]
        lost = list(dict.fromkeys([*lost, *stopped]))
        shown = lambda lost: (
            lost[0] + (f' (and {len(lost) - 1} more)' if len(lost) > 1 else '')
        )
        sites = [s for s in self.sites if parameter in s.parameters]
        remembered = {g for g, _ in linked}
        carried = [
            g
            for s in sites
            for g in s.hidden_groups
            if self._remembers[g.index] or g.index in remembered
        ]
        if lost and not self._is_felt(bit, carried):
            return (
                'none',
                f'{NO_CREDIT}: {[*self._feeding(met), *lost][0]}',
            )
        if not carried:
            why = (
                shown(lost) if lost else 'no state keeps its value position by position'
            )
            return 'instantaneous', why
        if lost:
            return 'local', shown(lost)
        return (
            'exact',
            f'every path into {_names(carried[0].hidden_paths)} keeps its position',
        )

    def _feeding(self, groups: Sequence[int]) -> list[str]:
        return [text for g in groups for text in self._crossings[g].values()]

    def readouts_of(self, parameter: Parameter, linked: Links) -> list[str]:
        """Names of the read-outs to which a parameter's groups are linked."""
        bit = self.facts.bit[parameter.invar]
        pairs = sorted(pair for pair in linked if self._new[pair[0]] & bit)
        names = (_names(self.groups[readout].hidden_paths) for _, readout in pairs)
        return list(dict.fromkeys(names))

    def feeds(self, parameter: Parameter) -> list[tuple[int, int]]:
        """Pairs (g, other) of groups where a parameter moves g and g feeds the other."""
        bit = self.facts.bit[parameter.invar]
        met = [g for g in range(len(self.groups)) if self._new[g] & bit]
        return [(g, other) for g in met for other in self._crossings[g]]

    def is_temporal(self, parameter: Parameter) -> bool:
        """Whether the parameter moves a state whose old value matters at a later step."""
        bit = self.facts.bit[parameter.invar]
        through_groups = any(
            new & bit and live
            for new, live in zip(self._new, self._live_groups, strict=True)
        )
        return through_groups or any(
            self._grads([o.outvar]) & bit for o in self._live_others
        )

    # ------------------------------------------------------------ records

    def records(self) -> Iterator[CompilationRecord]:
        """All findings, in program order within each kind."""
        yield from self._cut_records()
        yield from self._gap_records()
        yield from self._other_records()
        for path in self.facts.program.untouched_hidden:
            yield CompilationRecord(
                DiagnosticKind.UNUSED_STATE,
                DiagnosticLevel.NOTICE,
                f'{path_name(path)} is neither read nor written by the step',
            )
        for path in self.facts.program.constant_hidden:
            yield CompilationRecord(
                DiagnosticKind.CONSTANT_STATE,
                DiagnosticLevel.NOTICE,
                f'{path_name(path)} is read and never written by the step: it is a '
                'constant, and has no trace',
                context={'state': path},
            )
        yield from self._credit_records()

    @cached_property
    def _place(self) -> dict[int, int]:
        """The number of the program's own equation that each equation is, or is inside
        of, by identity."""
        found: dict[int, int] = {}

        def enter(i: int, eqn: Equation) -> None:
            found[id(eqn)] = i
            for sub in sub_programs(eqn):
                for inner in open_jaxpr(sub.jaxpr).eqns:
                    enter(i, inner)

        for i, eqn in enumerate(self.facts.program.equations):
            enter(i, eqn)
        return found

    def _cut_records(self) -> Iterator[CompilationRecord]:
        found: dict[tuple, CompilationRecord] = {}
        for g, positions in enumerate(self.positions):
            hidden = tuple(self.groups[g].hidden_paths)
            old = self.facts.old(self.members[g])
            for cut in reversed(positions.found):
                paths: list[Path | None] = [None] if cut.bits.grads & old else []
                paths += dict.fromkeys(
                    p.path
                    for p in self.facts.program.parameters
                    if cut.bits.grads & self.facts.bit[p.invar]
                )
                equation = self._place.get(id(cut.eqn))
                for path in paths:
                    what = _names(hidden) if path is None else path_name(path)
                    message = (
                        f'{what} → {_names(hidden)} cut at {_at(cut.eqn)}: {cut.reason}'
                    )
                    key = (hidden, path, cut.reason, _key(cut.eqn))
                    if key not in found:
                        context = {
                            'source': source_line(cut.eqn),
                            'library': library_line(cut.eqn),
                            'operand': cut.operand,
                            'elements': cut.elements,
                        }
                        found[key] = CompilationRecord(
                            DiagnosticKind.CUT,
                            DiagnosticLevel.NOTICE,
                            message,
                            cut.eqn.primitive.name,
                            path,
                            hidden,
                            {**context, 'equations': []},
                        )
                    places = found[key].context['equations']
                    if equation is not None and equation not in places:
                        places.append(equation)
        yield from found.values()
        for g, group in enumerate(self.groups):
            for other, live in enumerate(self._live_groups):
                eqn = self._passage(g, other) if live and other != g else None
                if eqn is None:
                    continue
                line, target = source_line(eqn), self.groups[other].hidden_paths
                yield CompilationRecord(
                    DiagnosticKind.CUT,
                    DiagnosticLevel.NOTICE,
                    f'{_names(group.hidden_paths)} → {_names(target)} cut at {_at(eqn)}: another group',
                    eqn.primitive.name,
                    None,
                    tuple(group.hidden_paths),
                    {'source': line, 'equations': [self._place[id(eqn)]]},
                )

    def _gap_records(self) -> Iterator[CompilationRecord]:
        reported = set()
        for g, found in enumerate(self.positions):
            for eqn, kind in found.gaps:
                name, line = eqn.primitive.name, source_line(eqn)
                if (name, line) in reported:
                    continue
                reported.add((name, line))
                probed = kind == 'elementwise'
                told = (
                    'a numerical probe found it element-wise'
                    if probed
                    else 'it is taken to mix positions and its operands are cut'
                )
                yield CompilationRecord(
                    DiagnosticKind.PROBED if probed else DiagnosticKind.MISSING_RULE,
                    DiagnosticLevel.NOTICE if probed else DiagnosticLevel.WARNING,
                    f'primitive {name!r} at {source_text(eqn)} has no rule: {told}; '
                    f'say how it treats positions with braintrace.register_primitive({name!r}, ...)',
                    name,
                    None,
                    tuple(self.groups[g].hidden_paths),
                    {'source': line},
                )
        yield from self._opaque_records()

    def _opaque_records(self) -> Iterator[CompilationRecord]:
        for eqn, _ in self._opaque:
            line, name = source_line(eqn), eqn.primitive.name
            instead = 'give it one with jax.custom_vjp, or write it in JAX'
            yield CompilationRecord(
                DiagnosticKind.NOT_DIFFERENTIABLE,
                DiagnosticLevel.WARNING,
                f'{operation_name(name)} at {source_text(eqn)} has no reverse derivative: '
                f'no credit passes it; {instead}',
                eqn.primitive.name,
                context={'source': line},
            )

    def _other_records(self) -> Iterator[CompilationRecord]:
        for state in self._live_others:
            bits = self._grads([state.outvar])
            hidden = tuple(
                h.path
                for h in self.facts.program.hidden
                if bits & self.facts.new_bit[h.outvar]
            )
            yield CompilationRecord(
                DiagnosticKind.OTHER_STATE,
                DiagnosticLevel.NOTICE,
                f'{path_name(state.path)} carries differentiable information from step to step but is not a '
                'hidden state: credit through it ends with the step; a brainstate.HiddenState keeps it',
                hidden_paths=hidden,
                context={'state': state.path},
            )

    def _credit_records(self) -> Iterator[CompilationRecord]:
        for parameter in self.facts.program.parameters:
            yield self.credit_record(parameter)
        for path in self.facts.program.untouched_parameters:
            yield _credit_record(
                path, path_name(path), 'none', 'the step never reads it', (), False
            )

    def credit_record(self, parameter: Parameter) -> CompilationRecord:
        """The credit class of one parameter array, as a record."""
        credit, reason = self.judge(parameter)
        hidden, temporal = self._hidden_of(parameter), self.is_temporal(parameter)
        return _credit_record(
            parameter.path, parameter.name, credit, reason, hidden, temporal
        )

    def _hidden_of(self, parameter: Parameter) -> tuple[Path, ...]:
        paths = (
            p
            for s in self.sites
            if parameter in s.parameters
            for p in s.connected_hidden_paths
        )
        return tuple(dict.fromkeys(paths))


def _credit_record(
    path: Path,
    name: str,
    credit: str,
    reason: str,
    hidden: tuple[Path, ...],
    temporal: bool,
) -> CompilationRecord:
    level = LEVELS.get(credit, DiagnosticLevel.INFO)
    context = {'name': name, 'credit': credit, 'reason': reason, 'temporal': temporal}
    return CompilationRecord(
        DiagnosticKind.CREDIT,
        level,
        f'{name}: {credit} ({reason})',
        None,
        path,
        hidden,
        context,
    )


def opaque_equations(facts: Facts) -> list[tuple[Equation, int]]:
    """What has no reverse derivative, and the bits whose credit ends there."""
    equations = facts.program.equations
    source = {e.outvars[0]: e.invars[0] for e in equations if is_whole_cut(e)}
    found = []
    for eqn in equations:
        read = [source.get(v, v) for v in eqn.invars if is_var(v)]
        bits = union(of(facts.total, v) for v in read).grads
        found += [(e, bits) for e in _opaque_in(eqn) if bits]
    return found


def check_loops(facts: Facts) -> None:
    """Raise if credit is lost in a loop of unknown length.

    Such loops are followed, except where they print or call Python code.
    """
    hidden = facts.program.hidden
    wanted = facts.parameters | facts.old(hidden) | facts.new(hidden)
    for eqn, bits in opaque_equations(facts):
        if structure(eqn) == 'while' and bits & wanted:
            raise CompilationError(
                three_parts(
                    f'a while loop with side effects at {source_text(eqn)}',
                    'parameters or hidden states act on its results, and reverse mode '
                    'runs its rounds again, so it would print or call back again too',
                    'the loop without jax.debug or callbacks in it; a loop of fixed '
                    'length (jax.lax.scan, fori_loop with static bounds); or '
                    'jax.lax.stop_gradient on what it reads, if no gradient is needed',
                )
            )


def _opaque_in(eqn: Equation) -> Iterator[Equation]:
    """What has no reverse derivative in an equation: itself, or equations of its body
    where no rule of its own does."""
    if is_opaque(eqn):
        yield eqn
    elif structure(eqn) != 'custom':
        for sub in sub_programs(eqn):
            for inner in open_jaxpr(sub.jaxpr).eqns:
                yield from _opaque_in(inner)


def _at(eqn: Equation) -> str:
    return f'{operation_name(eqn.primitive.name)} ({source_text(eqn)})'


def _key(eqn: Equation) -> tuple[str, str]:
    """Equations of one operation and one line of the user's are reported once."""
    return eqn.primitive.name, source_line(eqn)


def _names(paths: Sequence[Path]) -> str:
    return ', '.join(map(path_name, paths))
