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

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ..compat import Atom, Equation, Var, is_var
from ..program import Hidden, OtherState, Parameter
from ..program.step import path_name, path_names
from ..source_lines import described, source_line, source_text
from .cuts import Cut
from .dependence import DependenceThrough, of, union
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


class WindowCredit(NamedTuple):
    """What a window of ``reach='deep'`` gives a parameter: whether any credit, whether
    some from later steps, and where some is cut, '' if nowhere."""

    any: bool
    later: bool
    cut: str


class CreditAnalysis:
    """Judges the parameters of one program.

    ``live_groups``: whether the old value of each group influences anything.
    ``live_others``: other states that carry what parameters did from step to step, in
    what can be differentiated.
    """

    def __init__(self, analysed: Analysed):
        self.dependence, self.groups = analysed.dependence, analysed.groups
        self.members, self.positions = analysed.members, analysed.positions
        self.opaque = analysed.opaque
        # Of each group: bits of its old states, of its new states, and of everything
        # that the new states depend on.
        self._old = [self.dependence.old(m) for m in self.members]
        self._new = [self.dependence.new(m) for m in self.members]
        self._behind = [self.grads(h.outvar for h in m) for m in self.members]
        outputs = self.dependence.program.outputs
        # Bits of everything that some result of the step depends on.
        self._all_results = self.grads([*outputs, *self._new_states])
        # Bits of what outputs read, and of what they read through no new state.
        self._seen = self.grads(outputs)
        self._read = union(of(self.dependence.direct, v) for v in outputs).grads
        self.live_groups = [bool(self._all_results & old) for old in self._old]
        self.live_others = self._find_live_others()
        # Groups whose trace lives on: the old value reaches the new one, or an output
        # directly.
        self._remembers = [
            any(h.invar in found.labels for h in m) or bool(self._read & old)
            for m, found, old in zip(
                self.members, self.positions, self._old, strict=True
            )
        ]
        self._leaks: dict[tuple[int, Links], list[str]] = {}

    def grads(self, atoms: Iterable[Atom | None]) -> int:
        """Bits of everything that some values depend on."""
        total = self.dependence.total
        return union(of(total, atom) for atom in atoms if atom is not None).grads

    @property
    def _new_states(self) -> list[Atom | None]:
        p = self.dependence.program
        return [*(h.outvar for h in p.hidden), *(o.outvar for o in p.others)]

    def _name(self, g: int) -> str:
        return path_names(self.groups[g].hidden_paths)

    def _moved(self, parameter: Parameter) -> list[int]:
        """The groups that a parameter moves."""
        bit = self.dependence.bit[parameter.invar]
        return [g for g, behind in enumerate(self._behind) if behind & bit]

    # ------------------------------------------------------------ other states

    def _find_live_others(self) -> list[OtherState]:
        dependence, program = self.dependence, self.dependence.program
        read = [
            o
            for o in program.others
            if o.outvar is not None and self._all_results & dependence.bit[o.invar]
        ]
        carrying = dependence.parameters | sum(self._old) | sum(self._new)
        live: list[OtherState] = []
        while found := [
            o for o in read if o not in live and self.grads([o.outvar]) & carrying
        ]:
            live += found
            for o in found:
                carrying |= dependence.bit[o.invar]
        return [o for o in read if o in live]

    def _others_fed(self, bits: int) -> list[str]:
        """Names of the other states that carry on something with these bits."""
        fed = (o for o in self.live_others if self.grads([o.outvar]) & bits)
        return [path_name(o.path) for o in fed]

    # ------------------------------------------------------------ from group to group

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
        others = [v for v in self._new_states if v is not new]
        seen = self._seen | self.grads(others)
        return bool(seen & self.dependence.new_bit[new])

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
        read = {h.outvar if within else h.invar for h in self.members[g]}
        bits = self._new[g] if within else self._old[g]
        made_of = (self.dependence.behind[h.outvar] for h in self.members[other])
        if not union(made_of).grads & bits:
            return None
        entering = (
            e
            for e in self._making[other]
            if any(is_var(v) and v in read for v in e.invars)
        )
        return next((e for e in entering if self.grads(e.outvars) & bits), None)

    @cached_property
    def _crossings(self) -> list[dict[int, str]]:
        """The other groups that each group feeds, in words."""
        return [self._crossings_of(g) for g in range(len(self.groups))]

    def _crossings_of(self, g: int) -> dict[int, str]:
        old, new = self._old[g], self._new[g]
        found: dict[int, str] = {}
        for other, live in enumerate(self.live_groups):
            fed = (
                self._behind[other] & (old | new)
                if live
                else self._passed_on[other] & old
            )
            if other != g and fed:
                passage = self.passage(g, other) or self.passage(g, other, within=True)
                where = f' ({source_text(passage)})' if passage else ''
                found[other] = (
                    f'{self._name(g)} feeds {self._name(other)}, another group{where}'
                )
        return found

    # ------------------------------------------------------------ where credit ends

    def _stopped(self, bits: int) -> list[str]:
        return [
            f'no credit passes {described(e)}' for e, into in self.opaque if into & bits
        ]

    def _cuts(self, g: int, bits: int) -> list[Cut]:
        return [c for c in self.positions[g].found if c.bits.grads & bits]

    def _across_positions(self, g: int, cut: Cut) -> str:
        is_one = len(self.groups[g].hidden_paths) == 1
        back = 'feeds itself' if is_one else 'feed themselves'
        return f'{self._name(g)} {back} across positions, cut at {described(cut.eqn)}'

    def _leaks_of(self, g: int, linked: Links) -> list[str]:
        """Why credit that reached a group is not all carried on; the same for all
        parameters."""
        if (g, linked) not in self._leaks:
            self._leaks[g, linked] = self._find_leaks(g, linked)
        return self._leaks[g, linked]

    def _find_leaks(self, g: int, linked: Links) -> list[str]:
        name, states = self._name(g), self._old[g] | self._new[g]
        cuts = self._cuts(g, self._old[g])
        found = [self._across_positions(g, c) for c in cuts[:1]]
        crossings = self._crossings[g].items()
        found += [text for other, text in crossings if (g, other) not in linked]
        fed = self._others_fed(states)
        found += [f'{name} feeds {other}, {NOT_HIDDEN}' for other in fed]
        return found + self._stopped(states)

    def _lost(
        self, bit: int, moved: Sequence[int], linked: Links, stopped: list[str]
    ) -> list[str]:
        """Why credit of a parameter that moves some groups is not all kept."""
        cuts: dict[tuple, str] = {}
        for g in moved:
            for c in self._cuts(g, bit) if self.live_groups[g] else ():
                text = f'path to {self._name(g)} cut at {described(c.eqn)}: {c.reason}'
                name, line = c.eqn.primitive.name, source_line(c.eqn)
                cuts.setdefault((g, c.reason, name, line), text)
        lost = list(cuts.values())
        lost += [leak for g in moved for leak in self._leaks_of(g, linked)]
        lost += [f'feeds {other}, {NOT_HIDDEN}' for other in self._others_fed(bit)]
        return list(dict.fromkeys([*lost, *stopped]))

    # ------------------------------------------------------------ inside a window

    def in_window(self, parameter: Parameter) -> WindowCredit:
        """The credit of a parameter where every path is followed, except those from old
        states of a group to other positions of the same group."""
        bit = self.dependence.bit[parameter.invar]
        seen, program = self._seen_in_windows, self.dependence.program
        states: list[Hidden | OtherState] = [*program.hidden, *program.others]
        later = any(
            seen & self.dependence.bit[state.invar] and self.grads([state.outvar]) & bit
            for state in states
        )
        cuts = (text for behind, text in self._cuts_in_windows if behind & bit)
        return WindowCredit(bool(seen & bit), later, next(cuts, ''))

    @cached_property
    def _cuts_in_windows(self) -> list[tuple[int, str]]:
        """Bits of everything whose credit is cut at a group, and where."""
        dependence, found = self.dependence, []
        matters = dependence.ever_behind(dependence.program.outputs)
        for g, members in enumerate(self.members):
            for c in self.positions[g].found if matters & self._new[g] else ():
                # By way of a new state credit is followed. Only old states of the
                # program's own equations are told apart from those behind new ones.
                entering = dependence.direct.get(c.eqn.invars[c.operand], c.bits).grads
                into = [h for h in members if entering & dependence.bit[h.invar]]
                behind = dependence.ever_behind(h.outvar for h in into)
                found += [(behind, self._across_positions(g, c))] if into else []
        return found

    @cached_property
    def _seen_in_windows(self) -> int:
        """Bits of everything that gets credit from outputs."""
        unkept: dict[Var, int] = {}
        for members, found in zip(self.members, self.positions, strict=True):
            cut = [h for h in members if h.invar not in found.labels]
            unkept |= {h.outvar: self.dependence.old(tuple(cut)) for h in members}
        return self.dependence.ever_behind(self.dependence.program.outputs, unkept)

    # ------------------------------------------------------------ one parameter

    def judge(
        self, parameter: Parameter, linked: Links = frozenset()
    ) -> tuple[str, str]:
        """Credit class of one parameter array, and the reason.

        ``linked``: pairs of groups (g, read-out) where traces carry all that g does to
        the read-out.
        """
        bit, moved = self.dependence.bit[parameter.invar], self._moved(parameter)
        stopped = self._stopped(bit)
        if not self._all_results & bit:
            nowhere = 'no differentiable path to a state or an output'
            return 'none', next(iter(stopped), nowhere)
        stopped += [text for g in moved for text in self._stopped(self._old[g])]
        if not self.is_temporal(parameter) and not stopped:
            return 'exact', 'acts on outputs of its own step only'
        lost = self._lost(bit, moved, linked, stopped)
        remembered = {g for g, _ in linked}
        carried = [
            g for g in self._traced(parameter) if self._remembers[g] or g in remembered
        ]
        if lost and not self._reaches_outputs(bit, carried):
            feeding = (text for g in moved for text in self._crossings[g].values())
            return 'none', f'{NO_CREDIT}: {next(feeding, lost[0])}'
        more = f' (and {len(lost) - 1} more)' if len(lost) > 1 else ''
        if not carried:
            nothing_kept = 'no state keeps its value position by position'
            return 'instantaneous', lost[0] + more if lost else nothing_kept
        if lost:
            return 'local', lost[0] + more
        return 'exact', f'every path into {self._name(carried[0])} keeps its position'

    def _reaches_outputs(self, bit: int, carried: Sequence[int]) -> bool:
        """Whether an output of a step depends on a parameter in that step, or on the
        groups in which traces carry it."""
        return bool(self._seen & bit) or any(
            self._seen & self._new[g] or self._read & self._old[g] for g in carried
        )

    @cached_property
    def classes(self) -> dict[Parameter, CreditClass]:
        """The credit class of every parameter array."""
        return {
            p: CreditClass(*self.judge(p), self.is_temporal(p))
            for p in self.dependence.program.parameters
        }

    def is_temporal(self, parameter: Parameter) -> bool:
        """Whether the parameter moves a state whose old value matters at a later
        step."""
        live = any(self.live_groups[g] for g in self._moved(parameter))
        return live or bool(self._others_fed(self.dependence.bit[parameter.invar]))

    def readouts_of(self, parameter: Parameter, linked: Links) -> list[str]:
        """Names of the read-outs to which a parameter's groups are linked."""
        moved = self._moved(parameter)
        found = (self._name(readout) for g, readout in sorted(linked) if g in moved)
        return list(dict.fromkeys(found))

    def memories_between(self, parameter: Parameter, linked: Links) -> list[int]:
        """The groups that all paths from a parameter and its traces to the outputs of
        the same step enter last, other than those of its traces; none if some path
        enters no such group.

        What these groups remember of the parameter is in none of its traces."""
        traced = set(self._traced(parameter))
        through = tuple(h for g in traced for h in self.members[g])
        sources = self.dependence.bit[parameter.invar] | self.dependence.old(through)
        within = DependenceThrough(self.dependence, through)
        outputs = self.dependence.program.outputs
        if not traced or union(of(within, v) for v in outputs).grads & sources:
            return []
        sources |= self.dependence.new(through)
        between = [
            g
            for g, new in enumerate(self._new)
            if g not in traced and self._read & new and self._behind[g] & sources
        ]
        carried = [y for g, y in linked if g in traced]
        is_lost = all(self._remembers[g] and g not in carried for g in between)
        return between if is_lost else []

    def feeds(self, parameter: Parameter) -> list[tuple[int, int]]:
        """Pairs (g, other) of groups where a parameter moves g and g feeds the
        other."""
        moved = self._moved(parameter)
        return [(g, other) for g in moved for other in self._crossings[g]]

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
