"""Which equations of a step run where.

    constants   depend on parameters and constants only: once a call
    projected   depend on inputs but on no state: once a block, all steps together
    core        needed for the next states: inside the time loop
    the rest    losses, read-outs, derivatives: once a block, all steps together

A tap is an equation where parameters meet data, y = op(x, w). Derivative programs start
at y, so that each weight gets one product a block. The time loop keeps new states and
anchors, the values that derivatives need; the result of a tap is kept only if it is one
of them, and no product is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax

from ..analysis.dependence import Bits, of, union
from ..analysis.facts import Facts
from ..analysis.graph import Analysed
from ..compat import Atom, Equation, Var, is_var, new_var
from ..compiled_step import Values
from ..operations import operation_of, run_equation
from ..operations.record import Kernel
from ..program import StepProgram
from .local_program import LocalProgram
from .taps import TapEquation, find_taps


@dataclass(frozen=True)
class PreparedWeight:
    """A product of the time loop that runs by a faster kernel: the variable of its
    prepared weight."""

    operand: int
    weight: Var
    kernel: Kernel


@dataclass(frozen=True)
class Stages:
    """The equations of a step, sorted by when they run.

    ``targets`` are differentiated; ``aux`` and ``extra`` are other values wanted of
    every step, ``extra`` for the solver itself.
    """

    analysed: Analysed
    targets: tuple[Atom, ...]
    aux: tuple[Var, ...] = ()
    extra: tuple[Var, ...] = ()

    @property
    def facts(self) -> Facts:
        """What each value depends on."""
        return self.analysed.facts

    @property
    def program(self) -> StepProgram:
        """The step program."""
        return self.facts.program

    @property
    def equations(self) -> Sequence[Equation]:
        """Its equations."""
        return self.program.equations

    # ------------------------------------------------------------ running a part

    def compute(self, targets: Iterable[Atom], env: Values) -> Values:
        """The environment with the targets added: runs just the equations that lead to
        them."""
        env = Values(env)
        for i in self.needed(targets, env):
            eqn, prepared = self.equations[i], self.prepared.get(i)
            if prepared and prepared.weight in env:
                x = env[eqn.invars[1 - prepared.operand]]
                env[eqn.outvars[0]] = prepared.kernel.apply(env[prepared.weight], x)
                continue
            operands = [env[v] if is_var(v) else v.val for v in eqn.invars]
            results = zip(eqn.outvars, run_equation(eqn, operands), strict=True)
            env.update((v, x) for v, x in results if v not in env)
        return env

    def needed(self, targets: Iterable[Atom], known: Iterable[Var]) -> list[int]:
        """Equations that lead to the targets from known values, in program order."""
        known, producer = set(known), self.facts.producer
        kept: set[int] = set()
        todo = [v for v in targets if is_var(v)]
        while todo:
            v = todo.pop()
            if v not in known and v in producer and producer[v] not in kept:
                kept.add(producer[v])
                todo += [a for a in self.equations[producer[v]].invars if is_var(a)]
        return sorted(kept)

    # ------------------------------------------------------------ taps

    @cached_property
    def taps(self) -> dict[int, TapEquation]:
        """All taps by the index of their equation."""
        return find_taps(self.facts)

    @cached_property
    def tap_results(self) -> tuple[Var, ...]:
        """The results of all taps."""
        return tuple(v for tap in self.taps.values() for v in tap.results)

    @cached_property
    def weights(self) -> tuple[Var, ...]:
        """Every variable that gets a gradient: weights of taps, and targets that no
        data reaches."""
        weights = [
            tap.equation.invars[k] for tap in self.taps.values() for k in tap.weights
        ]
        return tuple(dict.fromkeys([*weights, *self.constant_targets]))

    @cached_property
    def constant_targets(self) -> tuple[Var, ...]:
        """Targets that no data reaches, as a penalty on weights alone."""
        fixed = {*self.constants, *(p.invar for p in self.program.parameters)}
        return tuple(v for v in self.targets if is_var(v) and v in fixed)

    @cached_property
    def prepared(self) -> dict[int, PreparedWeight]:
        """Products of the time loop whose weight is prepared for a faster kernel once a
        call."""
        if jax.default_backend() != 'cpu':
            return {}
        fixed = {*self.constants, *(p.invar for p in self.program.parameters)}
        found = {}
        for i in self.needed((new for _, new in self.carried), self.projected):
            eqn, operation = self.equations[i], operation_of(self.equations[i])
            for k, v in enumerate(eqn.invars):
                if is_var(v) and v in fixed and operation and operation.kernel:
                    kernel = operation.kernel(eqn, k)
                    if kernel is not None:
                        found[i] = PreparedWeight(k, new_var(v.aval), kernel)
        return found

    # ------------------------------------------------------------ dependence

    def _bits(self, atom: Atom) -> Bits:
        return of(self.facts.total, atom)

    @cached_property
    def _states(self) -> int:
        """Bits of all states, old and new."""
        p = self.program
        old = [*(h.invar for h in p.hidden), *(o.invar for o in p.others)]
        return sum(self.facts.bit[v] for v in old) | sum(self.facts.new_bit.values())

    @cached_property
    def _credit(self) -> int:
        """Bits of everything that credit can reach: parameters and hidden states."""
        facts = self.facts
        new = sum(facts.new_bit.values())
        return facts.parameters | facts.old(self.program.hidden) | new

    @cached_property
    def differentiated(self) -> frozenset[Var]:
        """Values that a derivative by tap results or old states may change."""
        constants = set(self.constants)
        made = (v for eqn in self.equations for v in eqn.outvars)
        return frozenset(
            v for v in made if v not in constants and self._bits(v).grads & self._credit
        )

    @cached_property
    def new_states(self) -> frozenset[Var]:
        """All new hidden states."""
        return frozenset(
            v for group in self.analysed.groups for v in group.hidden_outvars
        )

    @cached_property
    def direct_reads(self) -> frozenset[Var]:
        """Old hidden states that a target can read along a path without any new hidden
        state."""
        equations = self.needed(self.targets, self.new_states)
        atoms = [
            *self.targets,
            *(v for i in equations for v in self.equations[i].invars),
        ]
        read = {v for v in atoms if is_var(v)}
        old = (v for group in self.analysed.groups for v in group.hidden_invars)
        return frozenset(v for v in old if v in read)

    # ------------------------------------------------------------ stages

    def _where(self, test: Callable[[int], object]) -> tuple[Var, ...]:
        """Results of equations whose operands, taken together, pass a test of what they
        read."""
        found: list[Var] = []
        for eqn in self.equations:
            if test(union(map(self._bits, eqn.invars)).reads):
                found += eqn.outvars
        return tuple(found)

    @cached_property
    def constants(self) -> tuple[Var, ...]:
        """Values that depend on no data; new states are never among them."""
        free = self._where(lambda reads: not reads & self.facts.data)
        return tuple(v for v in free if v not in self.new_states)

    @cached_property
    def projected(self) -> tuple[Var, ...]:
        """Values that depend on inputs and on no state, and that others read."""
        data, states = self.facts.data, self._states
        free = set(self._where(lambda reads: reads & data and not reads & states))
        rest = (eqn for eqn in self.equations if not free.issuperset(eqn.outvars))
        read = {v for eqn in rest for v in eqn.invars if is_var(v)}
        wanted = read | set(self.derivative_variables)
        made = (v for eqn in self.equations for v in eqn.outvars)
        return tuple(v for v in made if v in free and v in wanted)

    @cached_property
    def carried(self) -> tuple[tuple[Var, Atom], ...]:
        """(old, new) of every state that the step writes."""
        pairs = [(h.invar, h.outvar) for h in self.program.hidden]
        others = [
            (o.invar, o.outvar) for o in self.program.others if o.outvar is not None
        ]
        return tuple(pairs + others)

    @cached_property
    def _read_by_derivatives(self) -> tuple[Var, ...]:
        """What derivative programs read: operands and results of taps, constants of
        local steps."""
        wanted = [*self.targets, *self.extra]
        for tap in self.taps.values():
            wanted += [*tap.equation.invars, *tap.results]
        for local in self.locals:
            wanted += local.constants
        return tuple(dict.fromkeys(v for v in wanted if is_var(v)))

    @cached_property
    def derivative_variables(self) -> tuple[Var, ...]:
        """Those of them that the program makes."""
        return tuple(v for v in self._read_by_derivatives if v in self.facts.producer)

    @cached_property
    def locals(self) -> tuple[LocalProgram, ...]:
        """The local step of every group."""
        parts = zip(self.analysed.groups, self.analysed.positions, strict=True)
        return tuple(
            LocalProgram(self.equations, self.tap_results, group, positions)
            for group, positions in parts
        )

    # ------------------------------------------------------------ what the time loop keeps

    @cached_property
    def _core(self) -> frozenset[Var]:
        """Values that the time loop makes."""
        core = self.needed((new for _, new in self.carried), ())
        return frozenset(v for i in core for v in self.equations[i].outvars)

    @cached_property
    def _readers(self) -> dict[Var, list[int]]:
        """Equations on the way to anything that derivatives want, by what they read."""
        found: dict[Var, list[int]] = {}
        for i in self.needed(
            (*self.derivative_variables, *self.new_states, *self.aux), ()
        ):
            for v in self.equations[i].invars:
                if is_var(v):
                    found.setdefault(v, []).append(i)
        return found

    def _is_linear(self, i: int) -> bool:
        operation = operation_of(self.equations[i])
        return operation is not None and operation.is_linear(self.equations[i])

    def _wants_value(self, v: Var) -> bool:
        """Whether the value itself is wanted: by a tap, a nonlinear operation, or the
        caller."""
        if any(v is x for x in (*self.targets, *self.aux, *self.extra)):
            return True
        readers = self._readers.get(v, ())
        return any(i in self.taps or not self._is_linear(i) for i in readers)

    @cached_property
    def anchors(self) -> tuple[Var, ...]:
        """Values kept in place of the tap results they are sums of: arguments of
        nonlinear functions."""
        sums, found = set(self.tap_results), []
        for i, eqn in enumerate(self.equations):
            reads_sum = any(is_var(v) and v in sums for v in eqn.invars)
            if i in self.taps or not reads_sum or not self._is_linear(i):
                continue
            for v in eqn.outvars:
                if (
                    v in self._core
                    and v not in self.new_states
                    and self._wants_value(v)
                ):
                    found.append(v)
                else:
                    sums.add(v)
        return tuple(found)

    def is_needed(self, v: Var) -> bool:
        """Whether derivatives need a value, given anchors and new states."""
        if self._wants_value(v):
            return True
        known = {*self.anchors, *self.new_states}
        made = (o for i in self._readers.get(v, ()) for o in self.equations[i].outvars)
        return any(o not in known and self.is_needed(o) for o in made)

    @cached_property
    def kept(self) -> tuple[Var, ...]:
        """What the time loop keeps of every step for derivatives.

        Anchors, results of taps that are needed themselves, and values that depend on
        other states without carrying credit, so that those states themselves are not
        kept.
        """
        others = sum(self.facts.bit[o.invar] for o in self.program.others)

        def without_credit(v: Atom) -> bool:
            bits = self._bits(v)
            return (
                is_var(v)
                and bool(bits.reads & others)
                and not bits.grads & self._credit
            )

        border = [
            v for v in (*self._read_by_derivatives, *self.aux) if without_credit(v)
        ]
        for i in self.needed((*self.derivative_variables, *self.aux), ()):
            eqn = self.equations[i]
            if any(self._bits(v).grads & self._credit for v in eqn.outvars):
                border += filter(without_credit, eqn.invars)
        in_loop = (
            v
            for v in self.tap_results
            if v in self._core and self._bits(v).reads & self._states
        )
        return tuple(
            dict.fromkeys([*self.anchors, *filter(self.is_needed, in_loop), *border])
        )
