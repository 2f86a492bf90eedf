"""Which equations of a step run where.

    constants   depend on parameters and constants only: once a call
    projected   depend on inputs but on no state: once a block, all steps together
    core        needed for the next states: inside the time loop
    the rest    losses, read-outs, derivatives: once a block, all steps together

A tap is an equation where parameters meet data, y = op(x, w). Derivative programs start
at y, so that each weight gets one product a block. The time loop keeps the old states
and what derivatives need (``kept``: anchors, and some results of taps), so that no
product is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..analysis.analysed import Analysed
from ..analysis.dependence import Bits, StepDependence, of, union
from ..compat import Atom, Equation, Var, is_var, new_var, values_of
from ..compiled_step import Values
from ..operations import is_linear, operation_of, run_equation
from ..operations.record import Kernel
from ..program import StepProgram
from .local_step import LocalProgram
from .rewrite import part_mixed_results, split_products
from .taps import TapEquation, find_taps

if TYPE_CHECKING:
    from .readouts import ReadoutLinks

Run = Callable[[int, list[Any]], list[Any]]
"""(i, operands): the results of equation i."""


@dataclass(frozen=True)
class PreparedWeight:
    """A product of the time loop that runs by a faster kernel: the variable of its
    prepared weight."""

    operand: int
    weight: Var
    kernel: Kernel


class Stages:
    """The equations of a step, sorted by when they run.

    ``targets`` are differentiated; ``aux`` are other values wanted of every step.
    ``modulator``: the variable of the modulator that the step computes itself. All else
    is found when it is made.
    """

    dependence: StepDependence
    """What each value depends on."""
    program: StepProgram
    equations: Sequence[Equation]
    """Those of the program."""
    unsplit: Sequence[Equation]
    """The same with products of concatenated inputs as they were, in place of the sums
    of their parts."""

    taps: dict[int, TapEquation]
    """All taps by the index of their equation."""
    tap_results: tuple[Var, ...]
    """The results of all taps."""
    locals: tuple[LocalProgram, ...]
    """The local step of every group."""
    carried: tuple[tuple[Var, Atom], ...]
    """(old, new) of every state that the step writes."""
    next_states: tuple[Atom, ...]
    """The new ones of these."""
    core: frozenset[int]
    """Equations that lead to them."""
    new_states: frozenset[Var]
    """All new hidden states."""
    direct_reads: frozenset[Var]
    """Old hidden states that a target can read along a path without any new hidden
    state."""

    constants: tuple[Var, ...]
    """Values that depend on no data; new states are never among them."""
    costly: tuple[Var, ...]
    """Those of them that take long to compute, and that others read."""
    fixed: frozenset[Var]
    """All that is known before any data: these, parameters, states that no step
    writes."""
    constant_targets: tuple[Var, ...]
    """Targets that no data reaches, as a penalty on weights alone."""
    weights: tuple[Var, ...]
    """Every variable that gets a gradient: weights of taps, and constant targets."""
    differentiated: frozenset[Var]
    """Values that a derivative by tap results or old states may change."""
    derivative_variables: tuple[Var, ...]
    """What derivative programs read and the program makes: operands and results of
    taps, constants of local steps."""
    projected: tuple[Var, ...]
    """Values that depend on inputs and on no state, and that others read."""

    anchors: tuple[Var, ...]
    """Linear combinations of tap results that a nonlinear function, a tap or the caller
    reads: the sum is kept in place of its terms."""
    kept: tuple[Var, ...]
    """What the time loop keeps of every step for derivatives.

    Anchors, results of taps that are needed themselves, and values that depend on other
    states without carrying credit, so that those states themselves are not kept.
    """
    prepared: dict[int, PreparedWeight]
    """Products of the time loop whose weight is prepared for a faster kernel once a
    call."""

    def __init__(
        self,
        analysed: Analysed,
        targets: Sequence[Atom],
        aux: Sequence[Var] = (),
        modulator: Var | None = None,
    ):
        split = split_products(analysed)
        self.analysed = part_mixed_results(split)
        self.targets, self.aux, self.modulator = tuple(targets), tuple(aux), modulator
        # What the solver reads of every step beside derivatives.
        self._for_solver = [*targets, *([] if modulator is None else [modulator])]
        self.dependence = self.analysed.dependence
        self.program = self.dependence.program
        self.equations = self.program.equations
        unchanged = set(map(id, split.dependence.program.equations))
        # The products that were split, by their results.
        products = {
            eqn.outvars[0]: eqn
            for eqn in analysed.dependence.program.equations
            if id(eqn) not in unchanged
        }
        self.unsplit = [
            next((products[v] for v in eqn.outvars if v in products), eqn)
            for eqn in self.equations
        ]
        self._find_structure()
        self._sort()
        self._choose_kept()
        self.prepared = self._prepared_weights()

    @cached_property
    def readouts(self) -> ReadoutLinks:
        """Read-outs and the products that lead to them; few rules need these."""
        from .readouts import ReadoutLinks

        return ReadoutLinks(self)

    # ------------------------------------------------------------ running a part

    def compute(
        self,
        targets: Iterable[Atom],
        env: Mapping[Var, Any],
        run: Run | None = None,
        equations: Sequence[Equation] | None = None,
    ) -> Values:
        """The environment with the targets added. Only the equations that lead to them
        are run. ``run(i, operands)`` replaces the way an equation is run; ``equations``
        replace those of the program, with the same results."""
        env, equations = Values(env), equations or self.equations
        for i in self.needed(targets, env, equations):
            eqn, prepared = equations[i], self.prepared.get(i)
            if prepared and prepared.weight in env:
                x = env[eqn.invars[1 - prepared.operand]]
                env[eqn.outvars[0]] = prepared.kernel.apply(env[prepared.weight], x)
                continue
            operands = values_of(eqn.invars, env)
            found = run_equation(eqn, operands) if run is None else run(i, operands)
            results = zip(eqn.outvars, found, strict=True)
            env.update((v, x) for v, x in results if v not in env)
        return env

    def needed(
        self,
        targets: Iterable[Atom],
        known: Iterable[Var] = (),
        equations: Sequence[Equation] | None = None,
    ) -> list[int]:
        """Equations that lead to the targets from known values, in program order."""
        known, producer = set(known), self.dependence.producer
        equations = equations or self.equations
        kept: set[int] = set()
        todo = [v for v in targets if is_var(v)]
        while todo:
            v = todo.pop()
            if v not in known and v in producer and producer[v] not in kept:
                kept.add(producer[v])
                todo += filter(is_var, equations[producer[v]].invars)
        return sorted(kept)

    # ------------------------------------------------------------ structure

    def _find_structure(self) -> None:
        """Taps, local steps and states."""
        groups, program = self.analysed.groups, self.program
        self.taps = find_taps(self.dependence)
        self.tap_results = tuple(v for tap in self.taps.values() for v in tap.results)
        self.locals = tuple(
            LocalProgram(self.equations, self.tap_results, group, positions)
            for group, positions in zip(groups, self.analysed.positions, strict=True)
        )
        pairs = [(h.invar, h.outvar) for h in program.hidden]
        others = [(o.invar, o.outvar) for o in program.others if o.outvar is not None]
        self.carried = tuple(pairs + others)
        self.next_states = tuple(new for _, new in self.carried)
        self.core = frozenset(self.needed(self.next_states))
        self.new_states = frozenset(v for g in groups for v in g.hidden_outvars)
        after = [self.equations[i] for i in self.needed(self.targets, self.new_states)]
        atoms = [*self.targets, *(v for eqn in after for v in eqn.invars)]
        read = {v for v in atoms if is_var(v)}
        old = (v for group in groups for v in group.hidden_invars)
        self.direct_reads = frozenset(v for v in old if v in read)

    # ------------------------------------------------------------ when equations run

    def _sort(self) -> None:
        """What runs once a call, and what once a block."""
        dependence, program = self.dependence, self.program
        new = sum(dependence.new_bit.values())
        # Bits of everything that credit can reach, and of all states, old and new.
        self._credit = dependence.parameters | dependence.old(program.hidden) | new
        old = [*(h.invar for h in program.hidden), *(o.invar for o in program.others)]
        self._states = sum(dependence.bit[v] for v in old) | new

        # Results of equations that read no data, and of those that read no state.
        constants: list[Var] = []
        from_inputs: set[Var] = set()
        for eqn in self.equations:
            reads = union(map(self._bits, eqn.invars)).reads
            if not reads & dependence.data:
                constants += (v for v in eqn.outvars if v not in self.new_states)
            elif not reads & self._states:
                from_inputs.update(eqn.outvars)
        self.constants = tuple(constants)
        self.costly = self._costly_constants()
        jaxpr = program.closed.jaxpr
        moving = {*program.inputs, *(old for old, _ in self.carried)}
        given = [v for v in jaxpr.invars if v not in moving]
        self.fixed = frozenset([*jaxpr.constvars, *given, *self.constants])
        self._without_data = {*constants, *(p.invar for p in program.parameters)}
        self.constant_targets = tuple(
            v for v in self.targets if is_var(v) and v in self._without_data
        )
        weights = [
            tap.equation.invars[k] for tap in self.taps.values() for k in tap.weights
        ]
        self.weights = tuple(dict.fromkeys([*weights, *self.constant_targets]))
        made = [v for eqn in self.equations for v in eqn.outvars]
        self.differentiated = frozenset(
            v
            for v in made
            if v not in self._without_data and self._bits(v).grads & self._credit
        )
        wanted = [*self._for_solver]
        for tap in self.taps.values():
            wanted += [*tap.equation.invars, *tap.results]
        for local in self.locals:
            wanted += local.constants
        self._read_by_derivatives = tuple(dict.fromkeys(filter(is_var, wanted)))
        self.derivative_variables = tuple(
            v for v in self._read_by_derivatives if v in dependence.producer
        )
        rest = (e for e in self.equations if not from_inputs.issuperset(e.outvars))
        read = {v for eqn in rest for v in eqn.invars if is_var(v)}
        read.update(self.derivative_variables)
        self.projected = tuple(v for v in made if v in from_inputs and v in read)

    def _costly_constants(self) -> tuple[Var, ...]:
        """Constants behind an operation that is costly, read by what is no constant;
        where they were only moved or repeated after it, those before."""
        constants = set(self.constants)
        costly: set[Var] = set()
        read: dict[Var, None] = {}
        for eqn in self.equations:
            operands = [v for v in eqn.invars if is_var(v)]
            if not constants.issuperset(eqn.outvars):
                read |= dict.fromkeys(v for v in operands if v in costly)
                continue
            operation = operation_of(eqn)
            is_costly = operation is not None and operation.costly
            if is_costly or costly.intersection(operands):
                costly |= set(eqn.outvars)
        found = dict.fromkeys(map(self._before_movement, read))
        return tuple(v for v in found if jnp.issubdtype(v.aval.dtype, jnp.floating))

    def _before_movement(self, v: Var) -> Var:
        while v in self.dependence.producer:
            eqn = self.equations[self.dependence.producer[v]]
            operation, operands = operation_of(eqn), list(filter(is_var, eqn.invars))
            is_moved = operation is not None and operation.family == 'movement'
            if not is_moved or len(operands) != 1:
                break
            (v,) = operands
        return v

    def _bits(self, atom: Atom) -> Bits:
        return of(self.dependence.total, atom)

    def _prepared_weights(self) -> dict[int, PreparedWeight]:
        if jax.default_backend() != 'cpu':
            return {}
        found = {}
        for i in self.needed(self.next_states, self.projected):
            eqn, operation = self.equations[i], operation_of(self.equations[i])
            if operation is None or operation.kernel is None:
                continue
            for k, v in enumerate(eqn.invars):
                is_weight = is_var(v) and v in self._without_data
                if is_weight and (kernel := operation.kernel(eqn, k)):
                    found[i] = PreparedWeight(k, new_var(v.aval), kernel)
        return found

    # ------------------------------------------------------------ what the loop keeps

    def _choose_kept(self) -> None:
        """What the time loop keeps of every step for derivatives."""
        in_loop = frozenset(v for i in self.core for v in self.equations[i].outvars)
        # Equations on the way to anything that derivatives want, by what they read.
        self._readers: dict[Var, list[int]] = {}
        ends = (*self.derivative_variables, *self.new_states, *self.aux)
        for i in self.needed(ends):
            for v in self.equations[i].invars:
                if is_var(v):
                    self._readers.setdefault(v, []).append(i)
        self.anchors = self._anchors(in_loop)
        results = (
            v
            for v in self.tap_results
            if v in in_loop and self._bits(v).reads & self._states
        )
        kept = [*self.anchors, *filter(self.is_needed, results), *self._border()]
        self.kept = tuple(dict.fromkeys(kept))

    def _anchors(self, in_loop: Collection[Var]) -> tuple[Var, ...]:
        sums, found = set(self.tap_results), []
        for i, eqn in enumerate(self.equations):
            reads_sum = any(is_var(v) and v in sums for v in eqn.invars)
            if i in self.taps or not reads_sum or not is_linear(eqn):
                continue
            for v in eqn.outvars:
                made_there = v in in_loop and v not in self.new_states
                if made_there and self._wants_value(v):
                    found.append(v)
                else:
                    sums.add(v)
        return tuple(found)

    def _border(self) -> list[Var]:
        """Values that depend on other states without carrying credit, where derivative
        programs read them."""
        others = sum(self.dependence.bit[o.invar] for o in self.program.others)

        def without_credit(v: Atom) -> bool:
            bits = self._bits(v)
            reads_others = is_var(v) and bool(bits.reads & others)
            return reads_others and not bits.grads & self._credit

        found = list(filter(without_credit, (*self._read_by_derivatives, *self.aux)))
        for i in self.needed((*self.derivative_variables, *self.aux)):
            eqn = self.equations[i]
            if any(self._bits(v).grads & self._credit for v in eqn.outvars):
                found += filter(without_credit, eqn.invars)
        return found

    def _wants_value(self, v: Var) -> bool:
        """Whether the value itself is wanted: by a tap, a nonlinear operation, or the
        caller."""
        if any(v is x for x in (*self._for_solver, *self.aux)):
            return True
        readers = self._readers.get(v, ())
        return any(i in self.taps or not is_linear(self.equations[i]) for i in readers)

    def is_needed(self, v: Var) -> bool:
        """Whether derivatives need a value, given anchors and new states."""
        if self._wants_value(v):
            return True
        known = {*self.anchors, *self.new_states}
        made = (o for i in self._readers.get(v, ()) for o in self.equations[i].outvars)
        return any(o not in known and self.is_needed(o) for o in made)
