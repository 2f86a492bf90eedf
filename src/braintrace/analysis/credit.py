"""Credit classes: which paths from a parameter to the loss local traces can follow, and
why.

exact          no temporal path is cut: with exact local traces (D-RTRL) the gradient
               is that of BPTT
local          temporal credit through its own position, something else is cut
instantaneous  the one-step gradient only
none           no gradient at all

A class is a fact about the model. What a learning rule makes of it is in
``rules/exactness.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ..compat import Atom, Equation, is_var
from ..program import OtherState, Parameter
from ..program.step import path_name, path_names
from ..source_lines import described, source_line, source_text
from .cuts import Cut
from .dependence import of, union
from .sites import uses_of_parameters

if TYPE_CHECKING:
    from .analysed import Analysed

Links = frozenset[tuple[int, int]]
"""Pairs (group, read-out) whose traces carry the memory of the read-out."""
NO_CREDIT = (
    'no output of its step depends on it, and no credit comes back from later ones'
)
"""Begins the reason of a parameter that gets a gradient from BPTT and none from
traces."""
NOT_HIDDEN = 'which is not a hidden state'
"""Ends the reason of a parameter whose credit stops at a state that carries none."""


class CreditClass(NamedTuple):
    """The class of one parameter array, and why. ``temporal``: it moves a state whose
    old value matters at a later step."""

    credit: str
    reason: str
    temporal: bool


class CreditAnalysis:
    """Everything needed to judge the parameters of one program.

    ``live_groups``: whether the old value of each group influences anything.
    ``live_others``: other states that carry what parameters did from step to step, in
    what can be differentiated.
    """

    def __init__(self, analysed: Analysed):
        self.dependence, self.groups = analysed.dependence, analysed.groups
        self.members = analysed.members
        self.positions, self.opaque = analysed.positions, analysed.opaque
        p = self.dependence.program
        new = [*(h.outvar for h in p.hidden), *(o.outvar for o in p.others)]
        # Bits of everything that some result of the step depends on, and of everything
        # that the new states of each group do.
        self._all_results = self.grads([*p.outputs, *new])
        self._new = [self.grads([h.outvar for h in m]) for m in self.members]
        old = map(self.dependence.old, self.members)
        self.live_groups = [bool(self._all_results & bits) for bits in old]
        self.live_others = self._find_live_others()
        self._leaks: dict[tuple[int, Links], list[str]] = {}
        # Groups whose trace lives on: the old value reaches the new one, or an output
        # directly.
        read = union(of(self.dependence.direct, v) for v in p.outputs).grads
        self._remembers = [
            any(h.invar in found.labels for h in m)
            or bool(read & self.dependence.old(m))
            for m, found in zip(self.members, self.positions, strict=True)
        ]

    def grads(self, atoms: Sequence[Atom | None]) -> int:
        """Bits of everything that some values depend on."""
        bits = 0
        for atom in atoms:
            bits |= of(self.dependence.total, atom).grads if atom is not None else 0
        return bits

    @cached_property
    def _passed_on(self) -> list[int]:
        """Bits of the old states that each group's new states read themselves and pass
        on, in the same step, to outputs or to other states."""
        return [
            union(
                self.dependence.behind[h.outvar] for h in m if self._is_read(h.outvar)
            ).grads
            for m in self.members
        ]

    def _is_read(self, new: Atom) -> bool:
        """Whether another result of the same step depends on a new state."""
        p = self.dependence.program
        states = [*(h.outvar for h in p.hidden), *(o.outvar for o in p.others)]
        results = [*p.outputs, *(v for v in states if v is not new)]
        return bool(self.grads(results) & self.dependence.new_bit[new])

    def _find_live_others(self) -> list[OtherState]:
        dependence, program = self.dependence, self.dependence.program
        read = [
            o
            for o in program.others
            if o.outvar is not None and self._all_results & dependence.bit[o.invar]
        ]
        hidden = program.hidden
        carrying = (
            dependence.parameters | dependence.old(hidden) | dependence.new(hidden)
        )
        live: list[OtherState] = []
        while found := [
            o for o in read if o not in live and self.grads([o.outvar]) & carrying
        ]:
            live += found
            for o in found:
                carrying |= dependence.bit[o.invar]
        return [o for o in read if o in live]

    def _stopped(self, bits: int) -> list[str]:
        return [
            f'no credit passes {described(e)}' for e, into in self.opaque if into & bits
        ]

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
            for eqn in reversed(self.dependence.program.equations):
                if any(v in live for v in eqn.outvars):
                    made.append(eqn)
                    live |= {v for v in eqn.invars if is_var(v) and v not in new}
            found.append(made[::-1])
        return found

    def passage(self, g: int, other: int, within: bool = False) -> Equation | None:
        """The first equation by which a group's old states (or within a step its new
        ones) enter another's new ones."""
        members = self.members[g]
        read = {h.outvar if within else h.invar for h in members}
        bits = self.dependence.new(members) if within else self.dependence.old(members)
        if (
            not union(
                self.dependence.behind[h.outvar] for h in self.members[other]
            ).grads
            & bits
        ):
            return None
        doors = (
            e
            for e in self._making[other]
            if any(is_var(v) and v in read for v in e.invars)
        )
        return next((e for e in doors if self.grads(e.outvars) & bits), None)

    @cached_property
    def _crossings(self) -> list[dict[int, str]]:
        """The other groups that each group feeds, in words."""
        return [self._crossings_of(g) for g in range(len(self.groups))]

    def _crossings_of(self, g: int) -> dict[int, str]:
        old, new = (
            self.dependence.old(self.members[g]),
            self.dependence.new(self.members[g]),
        )
        name = path_names(self.groups[g].hidden_paths)
        found: dict[int, str] = {}
        for other, live in enumerate(self.live_groups):
            fed = (
                self._new[other] & (old | new) if live else self._passed_on[other] & old
            )
            if other != g and fed:
                passage = self.passage(g, other) or self.passage(g, other, within=True)
                where = f' ({source_text(passage)})' if passage else ''
                fed_paths = path_names(self.groups[other].hidden_paths)
                found[other] = f'{name} feeds {fed_paths}, another group{where}'
        return found

    def _leaks_of(self, g: int, linked: Links) -> list[str]:
        """Why credit that reached a group is not all carried on; the same for all
        parameters."""
        if (g, linked) not in self._leaks:
            self._leaks[g, linked] = self._find_leaks(g, linked)
        return self._leaks[g, linked]

    def _find_leaks(self, g: int, linked: Links) -> list[str]:
        old, new = (
            self.dependence.old(self.members[g]),
            self.dependence.new(self.members[g]),
        )
        name = path_names(self.groups[g].hidden_paths)
        found = [
            f'{name} feeds itself across positions, cut at {described(c.eqn)}'
            for c in self._cuts(g, old)[:1]
        ]
        crossings = self._crossings[g].items()
        found += [text for other, text in crossings if (g, other) not in linked]
        for state in self.live_others:
            if self.grads([state.outvar]) & (old | new):
                found.append(f'{name} feeds {path_name(state.path)}, {NOT_HIDDEN}')
        return found + self._stopped(old | new)

    def _is_felt(self, bit: int, carried: Sequence[int]) -> bool:
        """Whether an output of a step feels these bits in that step, or what traces
        carry of them."""
        outputs = self.dependence.program.outputs
        seen = self.grads(outputs)
        read = union(of(self.dependence.direct, atom) for atom in outputs).grads
        return bool(seen & bit) or any(
            seen & self.dependence.new(self.members[g])
            or read & self.dependence.old(self.members[g])
            for g in carried
        )

    def judge(
        self, parameter: Parameter, linked: Links = frozenset()
    ) -> tuple[str, str]:
        """Credit class of one parameter array, and the reason.

        ``linked``: pairs of groups (g, read-out) where traces carry all that g does to
        the read-out.
        """
        bit = self.dependence.bit[parameter.invar]
        stopped = self._stopped(bit)
        if not self._all_results & bit:
            return 'none', stopped[
                0
            ] if stopped else 'no differentiable path to a state or an output'
        met = [g for g in range(len(self.groups)) if self._new[g] & bit]
        reached = [g for g in met if self.live_groups[g]]
        others = [o for o in self.live_others if self.grads([o.outvar]) & bit]
        stopped += [
            leak
            for g in met
            for leak in self._stopped(self.dependence.old(self.members[g]))
        ]
        if not reached and not others and not stopped:
            return 'exact', 'acts on outputs of its own step only'
        into = lambda g: path_names(self.groups[g].hidden_paths)
        cuts: dict[tuple, str] = {}
        for g in reached:
            for c in self._cuts(g, bit):
                text = f'path to {into(g)} cut at {described(c.eqn)}: {c.reason}'
                name, line = c.eqn.primitive.name, source_line(c.eqn)
                cuts.setdefault((g, c.reason, name, line), text)
        lost = list(cuts.values())
        lost += [leak for g in met for leak in self._leaks_of(g, linked)]
        lost += [f'feeds {path_name(o.path)}, {NOT_HIDDEN}' for o in others]
        lost = list(dict.fromkeys([*lost, *stopped]))
        shown = lambda lost: (
            lost[0] + (f' (and {len(lost) - 1} more)' if len(lost) > 1 else '')
        )
        remembered = {g for g, _ in linked}
        carried = [
            g for g in self._traced(parameter) if self._remembers[g] or g in remembered
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
            f'every path into {into(carried[0])} keeps its position',
        )

    def _feeding(self, groups: Sequence[int]) -> list[str]:
        return [text for g in groups for text in self._crossings[g].values()]

    def readouts_of(self, parameter: Parameter, linked: Links) -> list[str]:
        """Names of the read-outs to which a parameter's groups are linked."""
        bit = self.dependence.bit[parameter.invar]
        pairs = sorted(pair for pair in linked if self._new[pair[0]] & bit)
        found = (path_names(self.groups[readout].hidden_paths) for _, readout in pairs)
        return list(dict.fromkeys(found))

    def has_site(self, parameter: Parameter, group: int) -> bool:
        """Whether a use of a parameter reaches a group by a path that keeps
        positions."""
        return group in self._traced(parameter)

    def _traced(self, parameter: Parameter) -> list[int]:
        """The groups that each use of a parameter reaches by paths that keep
        positions."""
        bit = self.dependence.bit[parameter.invar]
        return [g for bits, into in self._uses if bits & bit for g in into]

    @cached_property
    def _uses(self) -> list[tuple[int, list[int]]]:
        """The bits of what each use of parameters reads, and the groups it reaches."""
        equations = self.dependence.program.equations
        return [
            (self.grads([equations[i].invars[k]]), into)
            for i, k, _, into in uses_of_parameters(self.dependence, self.positions)
        ]

    def feeds(self, parameter: Parameter) -> list[tuple[int, int]]:
        """Pairs (g, other) of groups where a parameter moves g and g feeds the
        other."""
        bit = self.dependence.bit[parameter.invar]
        met = [g for g in range(len(self.groups)) if self._new[g] & bit]
        return [(g, other) for g in met for other in self._crossings[g]]

    def is_temporal(self, parameter: Parameter) -> bool:
        """Whether the parameter moves a state whose old value matters at a later
        step."""
        bit = self.dependence.bit[parameter.invar]
        through_groups = any(
            new & bit and live
            for new, live in zip(self._new, self.live_groups, strict=True)
        )
        return through_groups or any(
            self.grads([o.outvar]) & bit for o in self.live_others
        )

    @cached_property
    def classes(self) -> dict[Parameter, CreditClass]:
        """The credit class of every parameter array."""
        return {
            p: CreditClass(*self.judge(p), self.is_temporal(p))
            for p in self.dependence.program.parameters
        }
