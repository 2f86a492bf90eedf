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
from .groups import layers_apart
from .sites import uses_of_parameters

if TYPE_CHECKING:
    from .analysed import Analysed

Links = frozenset[tuple[int, int]]
"""Pairs (group, read-out) whose traces carry the memory of the read-out."""
MovedStates = dict[int, tuple[Hidden, ...]]
"""By group, the states that a parameter moves."""
NO_CREDIT = (
    'no output of its step depends on it, and no credit comes back from later ones'
)
"""Begins the reason of a parameter that gets a gradient from BPTT and none from
traces."""
NOT_HIDDEN = 'which is not a hidden state'
"""Ends the reason of a parameter whose credit stops at a state that carries none."""
APART = 'because their paths part at an integer key'
"""Why states that are coupled position by position are in different groups."""


class CreditClass(NamedTuple):
    """The class of one parameter array, and why. ``temporal``: it moves a state whose
    old value matters at a later step."""

    credit: str
    reason: str
    temporal: bool


class ParameterGradient(NamedTuple):
    """The gradient that a parameter gets, and why. ``kind`` is a credit class, or the
    gradient that a learning rule gives.

    A rule gives 'equal to BPTT', 'local', 'approximate', 'one step' or 'none'.
    """

    kind: str
    reason: str


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
        self._moved_by: dict[tuple[int, Links], MovedStates] = {}
        self._fed_by: dict[int, dict[int, str]] = {}

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

    def _moved(self, parameter: Parameter, linked: Links = frozenset()) -> MovedStates:
        """By group, the states that a parameter moves: at its own step, or later through
        states of the same group or of one that is linked to it.

        What another state of the group loses is no loss to a parameter that never moves
        that state.
        """
        bit = self.dependence.bit[parameter.invar]
        if (bit, linked) in self._moved_by:
            return self._moved_by[bit, linked]
        total, old = self.dependence.total, self.dependence.old
        moved: MovedStates = {}
        before: MovedStates | None = None
        while moved != before:
            before, moved = moved, {}
            for g, members in enumerate(self.members):
                carrying = {g, *(lower for lower, upper in linked if upper == g)}
                bits = bit | sum(old(before.get(c, ())) for c in carrying)
                if self._behind[g] & bits:
                    moved[g] = tuple(
                        h for h in members if of(total, h.outvar).grads & bits
                    )
        self._moved_by[bit, linked] = moved
        return moved

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
    def _apart(self) -> list[tuple[Hidden, Hidden]]:
        return layers_apart(self.dependence)

    def is_apart(self, g: int, other: int) -> bool:
        """Whether a group feeds another one position by position, and only the paths of
        their states keep the two from being one group."""
        return any(
            a in self.members[g] and b in self.members[other] for a, b in self._apart
        )

    def lost_between_layers(self, parameter: Parameter) -> list[tuple[Hidden, Hidden]]:
        """Pairs of states (a, b) between which credit of a parameter is lost, and only
        their paths keep the two from being in one group."""
        return [
            (a, b)
            for g, states in self._moved(parameter).items()
            for other in self._crossings(g, states)
            for a, b in self._apart
            if a in states and b in self.members[other]
        ]

    def _crossings(self, g: int, states: tuple[Hidden, ...]) -> dict[int, str]:
        """The other groups that some states of a group feed, in words."""
        old, new = self.dependence.old(states), self.dependence.new(states)
        if old in self._fed_by:
            return self._fed_by[old]
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
                feeds = f'{self._name(g)} feeds {self._name(other)}'
                apart = f' {APART}' if self.is_apart(g, other) else ''
                found[other] = f'{feeds}, another group{apart}{where}'
        self._fed_by[old] = found
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

    def _leaks(self, g: int, moved: tuple[Hidden, ...], linked: Links) -> list[str]:
        """Why credit that reached some states of a group is not all carried on."""
        name, old = self._name(g), self.dependence.old(moved)
        states = old | self.dependence.new(moved)
        found = [self._across_positions(g, c) for c in self._cuts(g, old)[:1]]
        crossings = self._crossings(g, moved).items()
        found += [text for other, text in crossings if (g, other) not in linked]
        fed = self._others_fed(states)
        found += [f'{name} feeds {other}, {NOT_HIDDEN}' for other in fed]
        return found + self._stopped(states)

    def _lost(
        self, parameter: Parameter, linked: Links, stopped: list[str]
    ) -> list[str]:
        """Why credit of a parameter is not all kept."""
        bit = self.dependence.bit[parameter.invar]
        moved = self._moved(parameter, linked)
        cuts: dict[tuple, str] = {}
        for g in moved:
            for c in self._cuts(g, bit) if self.live_groups[g] else ():
                text = f'path to {self._name(g)} cut at {described(c.eqn)}: {c.reason}'
                name, line = c.eqn.primitive.name, source_line(c.eqn)
                cuts.setdefault((g, c.reason, name, line), text)
        lost = list(cuts.values())
        for g, states in moved.items():
            lost += self._leaks(g, states, linked)
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
        bit = self.dependence.bit[parameter.invar]
        moved = self._moved(parameter, linked)
        stopped = self._stopped(bit)
        if not self._all_results & bit:
            nowhere = 'no differentiable path to a state or an output'
            return 'none', next(iter(stopped), nowhere)
        for states in moved.values():
            stopped += self._stopped(self.dependence.old(states))
        if not self.is_temporal(parameter) and not stopped:
            return 'exact', 'acts on outputs of its own step only'
        lost = self._lost(parameter, linked, stopped)
        remembered = {g for g, _ in linked}
        carried = [
            g for g in self._traced(parameter) if self._remembers[g] or g in remembered
        ]
        if lost and not self._reaches_outputs(bit, carried):
            feeding = (self._crossings(g, m).values() for g, m in moved.items())
            first = next((text for texts in feeding for text in texts), lost[0])
            return 'none', f'{NO_CREDIT}: {first}'
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
        """Pairs (g, other) of groups where states of g that a parameter moves feed the
        other."""
        moved = self._moved(parameter).items()
        return [(g, other) for g, m in moved for other in self._crossings(g, m)]

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
