"""The plan of a step program: which equations run where.

constant   depends on parameters and constants only: once a call
before     depends on inputs but on no state: once a block, all steps together
core       needed for the next states: inside the time loop
the rest   losses, read-outs, derivatives: once a block, all steps together

A tap is an equation where parameters meet data, ``y = op(x, w)``. The derivative programs start at y, so that
each weight gets one product a block. The forward pass keeps new states and anchors, the values that derivatives
need; a tap's own result is kept only if it is one of them, and no product is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from ..analysis.dependence import Bits, of, union
from ..analysis.facts import Facts
from ..analysis.families import TABLE
from ..analysis.groups import HiddenGroup
from ..analysis.labels import NONE, Labels, join
from ..analysis.positions import Positions
from ..analysis.sites import weight_operands
from ..compat import Atom, Equation, Var, evaluate_equation, is_differentiable, is_var, new_var, sub_programs
from ..program import Hidden, StepProgram, cut_equation_at, equations_between
from .products import is_turnable, turned_product


class Values(dict[Var, Any]):
    """Values by variable; a pytree whose leaves keep the order in which they were put in."""

    def __or__(self, other: Mapping[Var, Any]) -> Values:
        return Values({**self, **other})

    def pick(self, variables: Iterable[Var]) -> Values:
        """Just these variables, in this order."""
        return Values((v, self[v]) for v in variables)


jax.tree_util.register_pytree_node(
    Values, lambda d: (tuple(d.values()), tuple(d)), lambda keys, leaves: Values(zip(keys, leaves, strict=True))
)


@dataclass(frozen=True)
class Tap:
    """An equation where parameters meet data."""

    equation: Equation
    weights: tuple[int, ...]

    @property
    def results(self) -> tuple[Var, ...]:
        """Results that can carry a gradient."""
        return tuple(v for v in self.equation.outvars if is_differentiable(v))

    @property
    def data(self) -> tuple[int, ...]:
        """Operands through which gradient passes on to the data."""
        return tuple(k for k, v in enumerate(self.equation.invars) if k not in self.weights and is_differentiable(v))


class Turned(NamedTuple):
    """A product whose weight is one of its operands, and the variable of that weight laid out anew."""

    operand: int
    weight: Var


def replay(equation: Equation, data: Sequence[int], operands: Sequence[Any], kept: Mapping[Var, Any]) -> Values:
    """Kept results of an equation, differentiable in themselves and, through the equation, in its data.

    The equation is not run again, except where it holds sub-programs.
    """
    places = [i for i, v in enumerate(equation.outvars) if v in kept]
    ys = [kept[equation.outvars[i]] for i in places]
    if data and any(sub_programs(equation)):
        results = evaluate_equation(equation, operands)
        ys = [valued(y, results[i] + y) for i, y in zip(places, ys, strict=True)]
    elif data:
        ys = _replayed(equation, tuple(data), tuple(places), ys, list(operands))
    return Values((equation.outvars[i], y) for i, y in zip(places, ys, strict=True))


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _replayed(equation: Equation, data: tuple, places: tuple, ys: list[Any], operands: list[Any]) -> list[Any]:
    return ys


@_replayed.defjvp
def _replayed_jvp(equation: Equation, data: tuple, places: tuple, primals: Any, tangents: Any) -> Any:
    ys, operands = primals

    def again(moving: list[Any]) -> list[Any]:
        filled = list(operands)
        for k, x in zip(data, moving, strict=True):
            filled[k] = x
        results = evaluate_equation(equation, filled)
        return [results[i] for i in places]

    _, moved = jax.jvp(again, ([operands[k] for k in data],), ([tangents[1][k] for k in data],))
    return ys, [a + b for a, b in zip(tangents[0], moved, strict=True)]


@jax.custom_jvp
def valued(known: Any, computed: Any) -> Any:
    """A value that is known already, with the derivative of its computation."""
    return known


@valued.defjvp
def _valued_jvp(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[1]


@dataclass(frozen=True)
class Plan:
    """A step program sorted for block-wise work.

    ``targets`` are the values to be differentiated, ``aux`` others that are wanted of every step. ``whole``: credit
    may come back to every old state, even to those that no later local step reads (exact windows). ``standing``:
    values of the learner's own that its rule reads at every step. ``weighted``: the one target is a loss, and its
    cotangent the weight of the step.
    """

    facts: Facts
    members: tuple[tuple[Hidden, ...], ...]
    groups: tuple[HiddenGroup, ...]
    positions: tuple[Positions, ...]
    targets: tuple[Atom, ...]
    aux: tuple[Var, ...] = ()
    whole: bool = False
    standing: tuple[Atom, ...] = ()
    weighted: bool = False

    @property
    def program(self) -> StepProgram:
        """The step program."""
        return self.facts.program

    @property
    def equations(self) -> Sequence[Equation]:
        """Its equations."""
        return self.program.equations

    def compute(self, targets: Iterable[Atom], env: Values) -> Values:
        """The environment with the targets added: runs just the equations that lead to them."""
        env = Values(env)
        for i in self.needed(targets, env):
            eqn = self.equations[i]
            if (turned := self.turned.get(i)) and turned.weight in env:
                x = env[eqn.invars[1 - turned.operand]]
                env[eqn.outvars[0]] = turned_product(eqn, turned.operand, env[turned.weight], x)
                continue
            operands = [env[v] if is_var(v) else v.val for v in eqn.invars]
            env.update(
                (v, x) for v, x in zip(eqn.outvars, evaluate_equation(eqn, operands), strict=True) if v not in env
            )
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
    def taps(self) -> dict[int, Tap]:
        """All taps by the index of their equation."""
        found = ((i, Tap(e, tuple(weight_operands(self.facts, e)))) for i, e in enumerate(self.equations))
        return {i: tap for i, tap in found if tap.weights and tap.results}

    @cached_property
    def tap_results(self) -> tuple[Var, ...]:
        """The results of all taps."""
        return tuple(v for tap in self.taps.values() for v in tap.results)

    @cached_property
    def moving(self) -> frozenset[Var]:
        """Values that a derivative with respect to tap results or old states may change."""
        constants = set(self.constants)
        credit = self.facts.parameters | self.facts.old(self.program.hidden) | sum(self.facts.new_bit.values())
        made = (v for eqn in self.equations for v in eqn.outvars)
        return frozenset(v for v in made if v not in constants and self._bits(v).grads & credit)

    @cached_property
    def locals(self) -> tuple[LocalStep, ...]:
        """The local step of every group."""
        return tuple(LocalStep(self, g, found) for g, found in zip(self.groups, self.positions, strict=True))

    @cached_property
    def ends(self) -> frozenset[Var]:
        """All new hidden states."""
        return frozenset(v for group in self.groups for v in group.hidden_outvars)

    @cached_property
    def direct_reads(self) -> frozenset[Var]:
        """Old hidden states that a target can read along a path without any new hidden state."""
        atoms = [*self.targets, *(v for i in self.needed(self.targets, self.ends) for v in self.equations[i].invars)]
        read = {v for v in atoms if is_var(v)}
        return frozenset(v for group in self.groups for v in group.hidden_invars if v in read)

    @cached_property
    def turned(self) -> dict[int, Turned]:
        """Products of the time loop whose weight is laid out for it once a call."""
        fixed = {*self.constants, *(p.invar for p in self.program.parameters)}
        found = {}
        for i in self.needed((new for _, new in self.carried), self.before) if jax.default_backend() == 'cpu' else ():
            eqn = self.equations[i]
            for k, v in enumerate(eqn.invars):
                if is_var(v) and v in fixed and is_turnable(eqn, k):
                    found[i] = Turned(k, new_var(v.aval))
        return found

    # ------------------------------------------------------------ stages

    def _bits(self, atom: Atom) -> Bits:
        return of(self.facts.total, atom)

    @cached_property
    def _states(self) -> int:
        """Bits of all states, old and new."""
        p = self.program
        old = [*(h.invar for h in p.hidden), *(o.invar for o in p.others)]
        return sum(self.facts.bit[v] for v in old) | sum(self.facts.new_bit.values())

    def _where(self, test: Callable[[int], Any]) -> tuple[Var, ...]:
        """Results of equations whose operands, taken together, pass a test of what they read."""
        reads = (union(map(self._bits, eqn.invars)).reads for eqn in self.equations)
        return tuple(v for eqn, r in zip(self.equations, reads, strict=True) if test(r) for v in eqn.outvars)

    @cached_property
    def constants(self) -> tuple[Var, ...]:
        """Values that depend on no data; new states are never among them."""
        return tuple(v for v in self._where(lambda reads: not reads & self.facts.data) if v not in self.ends)

    @cached_property
    def before(self) -> tuple[Var, ...]:
        """Values that depend on inputs and on no state, and that others read."""
        free = set(self._where(lambda reads: reads & self.facts.data and not reads & self._states))
        reads = {v for eqn in self.equations if not free.issuperset(eqn.outvars) for v in eqn.invars if is_var(v)}
        wanted = reads | set(self.derivative_variables)
        return tuple(v for eqn in self.equations for v in eqn.outvars if v in free and v in wanted)

    @cached_property
    def carried(self) -> tuple[tuple[Var, Atom], ...]:
        """(old, new) of every state that the step writes."""
        pairs = [(h.invar, h.outvar) for h in self.program.hidden]
        return tuple(pairs + [(o.invar, o.outvar) for o in self.program.others if o.outvar is not None])

    @cached_property
    def _read_by_derivatives(self) -> tuple[Var, ...]:
        """What derivative programs read: operands and results of taps, constants of local steps, targets."""
        wanted = [*self.targets, *self.standing]
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
    def _core(self) -> frozenset[Var]:
        """Values that the time loop makes."""
        return frozenset(
            v for i in self.needed((new for _, new in self.carried), ()) for v in self.equations[i].outvars
        )

    @cached_property
    def _readers(self) -> dict[Var, list[int]]:
        """Equations on the way to anything the derivative stage wants, by what they read."""
        found: dict[Var, list[int]] = {}
        for i in self.needed((*self.derivative_variables, *self.ends, *self.aux), ()):
            for v in self.equations[i].invars:
                if is_var(v):
                    found.setdefault(v, []).append(i)
        return found

    def _wanted(self, v: Var) -> bool:
        """True if the value itself is wanted: by a tap, by an operation that is not linear, or by the caller."""
        if any(v is x for x in (*self.targets, *self.aux, *self.standing)):
            return True
        return any(i in self.taps or not _is_linear(self.equations[i]) for i in self._readers.get(v, ()))

    @cached_property
    def anchors(self) -> tuple[Var, ...]:
        """Values kept in place of the tap results they are sums of: the arguments of nonlinear functions."""
        sums, found = set(self.tap_results), []
        for i, eqn in enumerate(self.equations):
            if i not in self.taps and _is_linear(eqn) and any(is_var(v) and v in sums for v in eqn.invars):
                for v in eqn.outvars:
                    if v in self._core and v not in self.ends and self._wanted(v):
                        found.append(v)
                    else:
                        sums.add(v)
        return tuple(found)

    def is_needed(self, v: Var) -> bool:
        """True if a value cannot be done without, given anchors and new states."""
        if self._wanted(v):
            return True
        known = {*self.anchors, *self.ends}
        made = (o for i in self._readers.get(v, ()) for o in self.equations[i].outvars)
        return any(o not in known and self.is_needed(o) for o in made)

    @cached_property
    def kept(self) -> tuple[Var, ...]:
        """What the time loop hands to the derivative stage for every step.

        Anchors, results of taps in the core that are wanted themselves, and values that depend on other states
        without carrying credit, so that those states themselves need not be kept.
        """
        taps = [v for v in self.tap_results if v in self._core and self._bits(v).reads & self._states]
        others = sum(self.facts.bit[o.invar] for o in self.program.others)
        credit = self.facts.parameters | self.facts.old(self.program.hidden) | sum(self.facts.new_bit.values())
        silent = lambda v: is_var(v) and self._bits(v).reads & others and not self._bits(v).grads & credit
        frontier = [v for v in (*self._read_by_derivatives, *self.aux) if silent(v)]
        for i in self.needed((*self.derivative_variables, *self.aux), ()):
            eqn = self.equations[i]
            if any(self._bits(v).grads & credit for v in eqn.outvars):
                frontier += filter(silent, eqn.invars)
        return tuple(dict.fromkeys([*self.anchors, *filter(self.is_needed, taps), *frontier]))


SUMS = ('add', 'add_any')

_LINEAR = frozenset(
    [*SUMS, 'sub', 'neg', 'convert_element_type', 'copy', 'reduce_sum']
    + ['reshape', 'broadcast_in_dim', 'squeeze', 'expand_dims', 'transpose', 'slice', 'split', 'concatenate', 'rev']
)


def _is_linear(equation: Equation) -> bool:
    """True if the derivative of an operation needs no value of its operands."""
    name, constant = equation.primitive.name, any(not is_var(v) for v in equation.invars)
    return name in _LINEAR or (name == 'mul' and constant) or (name == 'div' and not is_var(equation.invars[1]))


Components = dict[int, jax.Array]
"""Values of some states of a group's positions, by their number; each of the shape of the positions."""

Jacobian = dict[tuple[int, int], jax.Array]
"""``[i, j] = ∂new_i/∂old_j`` at every position; entries that are zero by structure are missing."""


@dataclass(frozen=True)
class LocalStep:
    """One group's new states from its old ones and from the results of taps, cuts in place."""

    plan: Plan
    group: HiddenGroup
    found: Positions

    @cached_property
    def taps(self) -> tuple[Var, ...]:
        """Results of taps that reach the group."""
        return tuple(v for v in self.plan.tap_results if v in self.found.labels)

    @cached_property
    def _indices(self) -> list[int]:
        sources = {*self.group.hidden_invars, *self.taps}
        found = self.found
        return equations_between(self.plan.equations, sources, self.group.hidden_outvars, found.cuts, found.edges)

    @cached_property
    def constants(self) -> tuple[Var, ...]:
        """Everything else it reads."""
        equations = [self.plan.equations[i] for i in self._indices]
        made = {*self.group.hidden_invars, *self.taps, *(v for e in equations for v in e.outvars)}
        reads = [v for e in equations for v in e.invars] + list(self.group.hidden_outvars)
        return tuple(v for v in dict.fromkeys(v for v in reads if is_var(v)) if v not in made)

    def __call__(self, env: dict[Var, Any], old: Sequence[jax.Array], ys: Sequence[Any]) -> list[jax.Array]:
        """Components of the new states; ``env`` holds constants, anchors and new states, ``ys`` the taps' results."""
        new = {v: env[v] for v in (*self.group.hidden_outvars, *self.plan.anchors) if v in env}
        kept = dict(zip(self.taps, ys, strict=True))
        env = {**env, **dict(zip(self.group.hidden_invars, self.group.from_components(old), strict=True)), **kept}
        for i in self._indices:
            *stops, eqn = cut_equation_at(i, self.plan.equations[i], self.found.cuts)
            for stop in stops:
                env[stop.outvars[0]] = evaluate_equation(stop, [env[stop.invars[0]]])[0]
            operands = [env[v] if is_var(v) else v.val for v in eqn.invars]
            if tap := self.plan.taps.get(i):
                env.update(replay(eqn, tap.data, operands, {v: kept[v] for v in tap.results if v in kept}))
            else:
                env.update(zip(eqn.outvars, evaluate_equation(eqn, operands), strict=True))
            env.update((v, valued(new[v], env[v])) for v in eqn.outvars if v in new)
        return self.group.components([env[v] for v in self.group.hidden_outvars])

    # ------------------------------------------------------------ structure

    @cached_property
    def _sources(self) -> dict[Var, frozenset[Var]]:
        """Which old states and taps each value can depend on."""
        found = {v: frozenset([v]) for v in (*self.group.hidden_invars, *self.taps)}
        cuts, kept = self.found.cuts, set(self._indices)
        for i, k in sorted(self.found.edges):
            eqn = self.plan.equations[i]
            if i in kept and eqn.invars[k] in found and not cuts.whole(i, k):
                found.update((v, found.get(v, frozenset()) | found[eqn.invars[k]]) for v in eqn.outvars)
        return found

    def _reads(self, new: int) -> frozenset[Var]:
        return self._sources.get(self.group.hidden_outvars[self.group.owners[new]], frozenset())

    @cached_property
    def pattern(self) -> frozenset[tuple[int, int]]:
        """(i, j) where the new component i can depend on the old component j."""
        owners, old = self.group.owners, self.group.hidden_invars
        every = range(len(owners))
        return frozenset((i, j) for i in every for j in every if old[owners[j]] in self._reads(i))

    def reached(self, y: Var) -> tuple[int, ...]:
        """Components of the new states that a tap's result can reach."""
        return tuple(i for i in range(len(self.group.owners)) if y in self._reads(i))

    def sum_of(self, y: Var) -> Var:
        """The last sum that a value enters as it is, and through which alone it reaches the group."""
        while y not in self.group.hidden_outvars:
            read = [(i, k) for i in self._indices for k, v in enumerate(self.plan.equations[i].invars) if v is y]
            equation = self.plan.equations[read[0][0]] if len(read) == 1 else None
            if equation is None or equation.primitive.name not in SUMS or read[0] in self.found.cuts.edges:
                break
            (total,) = equation.outvars
            if (total.aval.shape, total.aval.dtype) != (y.aval.shape, y.aval.dtype):
                break
            y = total
        return y

    @cached_property
    def _escaping(self) -> dict[Var, Labels]:
        """Elements, labelled 0, that act within a step on more than this group along its uncut paths."""
        plan, cuts, own = self.plan, self.found.cuts, set(self.group.hidden_outvars)
        inside = set(plan.needed(own, ()))
        every = lambda v: np.zeros(v.aval.shape, np.int32)
        found: dict[Var, Labels] = {v: every(v) for v in (*plan.targets, *plan.ends) if is_var(v) and v not in own}
        for i in reversed(plan.needed((*plan.targets, *plan.ends), ())):
            eqn = plan.equations[i]
            outs = [found.get(v) for v in eqn.outvars]
            family = TABLE.get(eqn.primitive.name)
            silent = all(x is None for x in outs)
            pulled = family.rule(eqn, outs, plan.facts.constant) if family and not silent else None
            closed = any(e == i for e, _ in cuts.bodies) or (family is None and not silent)
            for k, v in enumerate(eqn.invars) if any(map(is_differentiable, eqn.outvars)) else ():
                if not is_var(v) or not is_differentiable(v) or (v in own and i not in inside):
                    continue
                if closed or (i, k) not in self.found.edges:
                    labels: Labels = every(v)
                else:
                    labels = pulled[k] if pulled else None
                if (i, k) in cuts.edges:
                    labels = join(labels, np.where(cuts.edges[i, k], 0, NONE).astype(np.int32))
                found[v] = join(found.get(v), labels)
        return found

    def escape(self, y: Var) -> tuple[slice, ...] | None:
        """The smallest box of a tap's result that acts within a step on more than this group; None if nothing does."""
        labels = self._escaping.get(y)
        if labels is None or not np.any(labels != NONE):
            return None
        places = np.argwhere(labels != NONE)
        return tuple(slice(int(a), int(b) + 1) for a, b in zip(places.min(axis=0), places.max(axis=0), strict=True))
