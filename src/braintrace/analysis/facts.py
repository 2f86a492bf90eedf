"""What holds for a whole step program, computed once and read by every later stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..compat import Atom, Var
from ..program import Hidden, StepProgram
from .constants import Constants
from .dependence import Bits, flow, of, union
from .positions import Credit, Positions, find_positions


@dataclass(frozen=True)
class Facts:
    """A step program and the bit that stands for each of its sources."""

    program: StepProgram

    @cached_property
    def bit(self) -> dict[Var, int]:
        """One bit for each parameter, old hidden state and old other state; inputs
        share one."""
        p = self.program
        sources = [
            *(x.invar for x in p.parameters),
            *(x.invar for x in p.hidden),
            *(x.invar for x in p.others),
        ]
        bits = {v: 1 << i for i, v in enumerate(sources)}
        return bits | dict.fromkeys(p.inputs, 1 << len(sources))

    @cached_property
    def new_bit(self) -> dict[Var, int]:
        """One bit for each new hidden state."""
        start = len(self.bit) + 1
        return {h.outvar: 1 << (start + i) for i, h in enumerate(self.program.hidden)}

    @cached_property
    def parameters(self) -> int:
        """Bits of all parameters."""
        return sum(self.bit[x.invar] for x in self.program.parameters)

    @cached_property
    def data(self) -> int:
        """Bits of everything that is not a parameter."""
        return (
            sum(set(self.bit.values())) + sum(self.new_bit.values()) - self.parameters
        )

    def old(self, group: tuple[Hidden, ...]) -> int:
        """Bits of old hidden states."""
        return sum(self.bit[h.invar] for h in group)

    def new(self, group: tuple[Hidden, ...]) -> int:
        """Bits of new hidden states."""
        return sum(self.new_bit[h.outvar] for h in group)

    def _flow(self, behind: dict[Var, Bits] | None) -> dict[Var, Bits]:
        jaxpr = self.program.closed.jaxpr
        marks = {v: Bits(b, b) for v, b in self.new_bit.items()}
        return flow(
            jaxpr, [Bits(self.bit[v], self.bit[v]) for v in jaxpr.invars], marks, behind
        )

    @cached_property
    def total(self) -> dict[Var, Bits]:
        """Sources of every value by any path."""
        return self._flow(None)

    def ever_behind(self, atoms: Iterable[Atom]) -> int:
        """Bits of all that these values depend on, in their own step or by states that
        earlier steps left."""
        p, total = self.program, self.total
        every: list[Any] = [*p.hidden, *p.others]
        states = [(self.bit[state.invar], state.outvar) for state in every]
        found = union(of(total, atom) for atom in atoms).grads
        while True:
            passed = [new for old, new in states if new is not None and found & old]
            more = found | union(of(total, new) for new in passed).grads
            if more == found:
                return found
            found = more

    @cached_property
    def _split(self) -> tuple[dict[Var, Bits], dict[Var, Bits]]:
        behind: dict[Var, Bits] = {}
        return self._flow(behind), behind

    @cached_property
    def direct(self) -> dict[Var, Bits]:
        """Sources of every value by paths that end at a new hidden state when they meet
        one."""
        return self._split[0]

    @cached_property
    def behind(self) -> dict[Var, Bits]:
        """Sources of each new hidden state by paths through no other new state."""
        return self._split[1]

    def through(self, group: tuple[Hidden, ...]) -> SourcesThrough:
        """Sources of every value by paths through no new state but those of the group."""
        return SourcesThrough(self, group)

    def is_weight(self, bits: Bits) -> bool:
        """Depends on parameters, and on nothing but parameters and constants."""
        return bool(bits.grads & self.parameters) and not bits.reads & self.data

    # ------------------------------------------------------------ constants

    @cached_property
    def producer(self) -> dict[Var, int]:
        """The index of the equation that defines each variable."""
        return {
            v: i for i, eqn in enumerate(self.program.equations) for v in eqn.outvars
        }

    @cached_property
    def constant(self) -> Constants:
        """The value of an atom that depends on no source; None for the others."""
        return Constants(self.program.closed)

    # ------------------------------------------------------------ positions

    def positions(
        self,
        old: tuple[Hidden, ...],
        new: tuple[Hidden, ...],
        through: tuple[Hidden, ...],
    ) -> Positions:
        """Labels and cuts of the paths from parameters and old states into new states.

        All have one shape; paths lead through no new states but those in ``through``.
        """
        jaxpr = self.program.closed.jaxpr
        before = self.old(old)
        credit = Credit(self.parameters | before, self.data, before)
        starts = [(h.outvar, h.positions) for h in new]
        keep = {h.invar: h.positions for h in old}
        stop = self.new_bit.keys() - {h.outvar for h in through}
        size = int(np.prod(new[0].varshape))
        return find_positions(
            jaxpr,
            self.through(through),
            credit,
            starts,
            keep,
            stop,
            size,
            self.constant,
        )


class SourcesThrough(Mapping[Var, Bits]):
    """A view of the direct sources in which some new hidden states are not barriers."""

    def __init__(self, facts: Facts, through: tuple[Hidden, ...]):
        self.direct = facts.direct
        self.every = sum(facts.new_bit.values())
        self.inner = {facts.new_bit[h.outvar]: facts.behind[h.outvar] for h in through}
        self.through = sum(self.inner)

    def __getitem__(self, var: Var) -> Bits:
        bits = self.direct[var]
        grads, todo = bits.grads & ~self.every, bits.grads & self.through
        done = 0
        while todo:
            bit = todo & -todo
            done |= bit
            more = self.inner[bit].grads
            grads |= more & ~self.every
            todo = (todo | more & self.through) & ~done
        return Bits(bits.reads, grads)

    def __iter__(self) -> Iterator[Var]:
        return iter(self.direct)

    def __len__(self) -> int:
        return len(self.direct)
