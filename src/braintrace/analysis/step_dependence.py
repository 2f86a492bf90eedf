"""What each value of a step program depends on, computed once for all later stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..compat import Atom, Var
from ..program import Hidden, StepProgram
from .constants import Constants
from .dependence import Bits, flow, of, union


class StepDependence:
    """A step program, the bit that stands for each of its sources, and what each of its
    values depends on.

    ``bit``: one bit for each parameter, old hidden state and old other state; inputs
    share one. ``new_bit``: one for each new hidden state. ``parameters``: bits of all
    parameters; ``data``: of everything else. ``producer``: the index of the equation
    that defines each variable. ``constant``: the value of an atom that depends on no
    source; None for the others.

    Three maps from variables to their sources: ``total`` by any path, ``direct`` by
    paths that end at a new hidden state when they meet one, ``behind``, of each new
    hidden state, by paths through no other new state.
    """

    def __init__(self, program: StepProgram):
        self.program = program
        sources = [
            *(x.invar for x in program.parameters),
            *(x.invar for x in program.hidden),
            *(x.invar for x in program.others),
        ]
        self.bit: dict[Var, int] = {v: 1 << i for i, v in enumerate(sources)}
        self.bit |= dict.fromkeys(program.inputs, 1 << len(sources))
        start = len(self.bit) + 1
        self.new_bit: dict[Var, int] = {
            h.outvar: 1 << (start + i) for i, h in enumerate(program.hidden)
        }
        self.parameters = sum(self.bit[x.invar] for x in program.parameters)
        every = sum(set(self.bit.values())) + sum(self.new_bit.values())
        self.data = every - self.parameters
        self.producer: dict[Var, int] = {
            v: i for i, eqn in enumerate(program.equations) for v in eqn.outvars
        }
        self.constant = Constants(program.closed)
        jaxpr = program.closed.jaxpr
        given = [Bits(self.bit[v], self.bit[v]) for v in jaxpr.invars]
        marks = {v: Bits(b, b) for v, b in self.new_bit.items()}
        self.behind: dict[Var, Bits] = {}
        self.total = flow(jaxpr, given, marks)
        self.direct = flow(jaxpr, given, marks, self.behind)

    def old(self, group: tuple[Hidden, ...]) -> int:
        """Bits of old hidden states."""
        return sum(self.bit[h.invar] for h in group)

    def new(self, group: tuple[Hidden, ...]) -> int:
        """Bits of new hidden states."""
        return sum(self.new_bit[h.outvar] for h in group)

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

    def through(self, group: tuple[Hidden, ...]) -> DependenceThrough:
        """Sources of every value by paths through no new state but those of the
        group."""
        return DependenceThrough(self, group)

    def is_weight(self, bits: Bits) -> bool:
        """Depends on parameters, and on nothing but parameters and constants."""
        return bool(bits.grads & self.parameters) and not bits.reads & self.data


class DependenceThrough(Mapping[Var, Bits]):
    """A view of the direct sources in which some new hidden states are not barriers."""

    def __init__(self, dependence: StepDependence, through: tuple[Hidden, ...]):
        self.direct = dependence.direct
        self.every = sum(dependence.new_bit.values())
        self.inner = {
            dependence.new_bit[h.outvar]: dependence.behind[h.outvar] for h in through
        }
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
