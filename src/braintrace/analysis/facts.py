"""What holds for a whole step program, computed once and read by every later stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from ..compat import Literal, Var, evaluate_equation
from ..program import Hidden, StepProgram
from .dependence import Bits, flow, of
from .positions import Credit, Positions, find_positions


@dataclass(frozen=True)
class Facts:
    """A step program and the bit that stands for each of its sources."""

    program: StepProgram

    @cached_property
    def bit(self) -> dict[Var, int]:
        """One bit for each parameter, old hidden state and old other state; inputs share one."""
        p = self.program
        sources = [*(x.invar for x in p.parameters), *(x.invar for x in p.hidden), *(x.invar for x in p.others)]
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
        return sum(set(self.bit.values())) + sum(self.new_bit.values()) - self.parameters

    def old(self, group: tuple[Hidden, ...]) -> int:
        """Bits of old hidden states."""
        return sum(self.bit[h.invar] for h in group)

    def new(self, group: tuple[Hidden, ...]) -> int:
        """Bits of new hidden states."""
        return sum(self.new_bit[h.outvar] for h in group)

    def _flow(self, marks: dict[Var, Bits], barrier: bool) -> dict[Var, Bits]:
        jaxpr = self.program.closed.jaxpr
        return flow(jaxpr, [Bits(self.bit[v], self.bit[v]) for v in jaxpr.invars], marks, barrier)

    @cached_property
    def total(self) -> dict[Var, Bits]:
        """Sources of every value by any path."""
        return self._flow({v: Bits(b, b) for v, b in self.new_bit.items()}, barrier=False)

    @cached_property
    def direct(self) -> dict[Var, Bits]:
        """Sources of every value by paths that end at a new hidden state when they meet one."""
        return self._flow({v: Bits(b, b) for v, b in self.new_bit.items()}, barrier=True)

    def within(self, stop: dict[Var, int]) -> dict[Var, Bits]:
        """Sources of every value by differentiable paths through none of the given new states."""
        return self._flow({v: Bits(b, 0) for v, b in stop.items()}, barrier=True)

    def is_weight(self, bits: Bits) -> bool:
        """Depends on parameters, and on nothing but parameters and constants."""
        return bool(bits.grads & self.parameters) and not bits.reads & self.data

    # ------------------------------------------------------------ constants

    @cached_property
    def producer(self) -> dict[Var, int]:
        """The index of the equation that defines each variable."""
        return {v: i for i, eqn in enumerate(self.program.equations) for v in eqn.outvars}

    @cached_property
    def _values(self) -> dict[Var, Any]:
        closed = self.program.closed
        return dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def constant(self, atom: Any) -> np.ndarray | None:
        """The value of an atom that depends on no source; None for the others."""
        if isinstance(atom, Literal):
            return np.asarray(atom.val)
        if atom not in self._values:
            if atom not in self.producer or of(self.total, atom).reads:
                return None
            eqn = self.program.equations[self.producer[atom]]
            operands = [self.constant(v) for v in eqn.invars]
            with jax.ensure_compile_time_eval():
                self._values.update(zip(eqn.outvars, evaluate_equation(eqn, operands), strict=True))
        return np.asarray(self._values[atom])

    # ------------------------------------------------------------ positions

    def positions(self, old: tuple[Hidden, ...], new: tuple[Hidden, ...], stop: dict[Var, int]) -> Positions:
        """Labels and cuts of the paths from parameters and old states into new states.

        All have one shape; paths end at the new states in ``stop``.
        """
        jaxpr = self.program.closed.jaxpr
        credit = Credit(self.parameters | self.old(old), self.data)
        starts = [(h.outvar, h.positions) for h in new]
        keep = {h.invar: h.positions for h in old}
        size = int(np.prod(new[0].varshape))
        return find_positions(jaxpr, self.within(stop), credit, starts, keep, set(stop), size, self.constant)
