"""Links: the products by which hidden states reach linear read-outs.

A read-out with a memory of its own is a group Y of one state per position,

    Y_t = κ Y_{t-1} + u_t · W,

that no other group reads. Here u is a function of the states of another group h, in
which each position of h acts on at most one element. Nothing is matched by
name or layer: κ is found by folding constants, and the path from u to Y may hold any
operations whose derivative no data reaches. A read-out without memory is a product
between states and targets; it is a link as well, for rules that are given a κ.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np

from ..analysis.dependence import Relevance, of
from ..analysis.positions import find_positions
from ..compat import (
    Atom,
    Var,
    is_differentiable,
    is_var,
    make_jaxpr,
)
from ..compiled_step import Components, Link, Values
from ..operations import differentiates, operation_of
from .invariants import StepInvariants
from .link_paths import Candidate, Edge, LinkPaths
from .local_step import local_jacobian
from .stages import Stages

MOST_DECAYS = 16
"""Distinct κ of one read-out, each of which needs a trace of its own."""


class ReadoutLinks:
    """All links of a step, and the products whose weights random feedback replaces."""

    def __init__(self, stages: Stages):
        self.stages = stages
        self.paths = LinkPaths(stages)
        self._steps = StepInvariants(stages)

    # ------------------------------------------------------------ results

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The links of the step, in program order."""
        candidates = self._candidates
        edges: dict[tuple[int, int], set[Edge]] = {}
        for c in candidates:
            if c.readout is not None:
                edges.setdefault((c.lower, c.readout), set()).add(c.edge)
        complete = {
            (lower, readout)
            for (lower, readout), mine in edges.items()
            if not self._reaches_otherwise(lower, readout, mine)
        }
        return tuple(
            self._link(c, (c.lower, c.readout) in complete) for c in candidates
        )

    @cached_property
    def products(self) -> dict[Edge, Var]:
        """The weight of every read-out's product, by (equation, operand).

        Products between states and targets, and those by which other groups drive a
        read-out that is a state.
        """
        stages, dependence, found = self.stages, self.stages.dependence, {}
        indices = set(stages.needed(stages.targets, stages.new_states))
        for readout in self._readouts:
            others = self._bits_except(readout)
            for i in self.paths.making(readout):
                data = stages.taps[i].data if i in stages.taps else ()
                inputs = [stages.equations[i].invars[k] for k in data]
                if any(of(dependence.direct, v).grads & others for v in inputs):
                    indices.add(i)
        for i in sorted(indices):
            tap = stages.taps.get(i)
            if tap and tap.data and self._is_product(i):
                found.update({(i, k): tap.equation.invars[k] for k in tap.weights})
        return found

    def why_not(self, lower: int, readout: int) -> str | None:
        """Why traces cannot hold what a group remembers of another, and what to write.

        None where they can, and where the second is no read-out but feeds others.
        """
        if self._feeds(readout):
            return None
        links = [x for x in self.links if (x.lower, x.readout) == (lower, readout)]
        if any(link.is_complete for link in links):
            return None
        if self.paths.group(readout).num_state > 1:
            return 'it has several states per position; a leaky read-out has one'
        if readout not in self._readouts:
            return 'its memory is not linear; a leaky read-out decays by a constant'
        if self._readouts[readout] is None:
            return 'its decay is a parameter; write the decay as a constant'
        if not self._classes(readout):
            return f'it has more than {MOST_DECAYS} different decays; use fewer'
        return (
            'the read-out is not a product of weights with a function of each unit '
            'in the same step; write it as y = κ y + f(h) @ W, after the new h'
        )

    # ------------------------------------------------------------ read-outs

    def _is_product(self, i: int) -> bool:
        operation = operation_of(self.stages.equations[i])
        return operation is not None and operation.is_product

    def _bits(self, g: int) -> int:
        """Bits of the states of a group, new and old."""
        dependence, members = self.stages.dependence, self.stages.analysed.members[g]
        return dependence.new(members) | dependence.old(members)

    def _bits_except(self, g: int) -> int:
        every = range(len(self.stages.analysed.groups))
        return sum(self._bits(other) for other in every if other != g)

    @cached_property
    def _readouts(self) -> dict[int, np.ndarray | None]:
        """Groups that are linear read-outs: κ at each position, None where no
        constant."""
        found = {}
        for g, group in enumerate(self.stages.analysed.groups):
            if group.num_state == 1 and self._is_fed(g) and not self._feeds(g):
                steady, decay = self._decay(g)
                if steady:
                    found[g] = decay
        return found

    def _is_fed(self, g: int) -> bool:
        """Whether states of other groups reach the group."""
        dependence, others = self.stages.dependence, self._bits_except(g)
        new = self.paths.group(g).hidden_outvars
        return any(
            dependence.behind[v].grads & others for v in new if v in dependence.behind
        )

    def _feeds(self, g: int) -> bool:
        """Whether the group reaches new states of others, or mixes across time.

        What others remember of it would have to be carried as well.
        """
        dependence, members = self.stages.dependence, self.stages.analysed.members
        old = dependence.old(members[g])
        across = any(
            dependence.behind[h.outvar].grads & self._bits(g)
            for other, mine in enumerate(members)
            for h in mine
            if other != g and h.outvar in dependence.behind
        )
        cuts = self.stages.analysed.positions[g].found
        return across or any(cut.bits.grads & old for cut in cuts)

    def _decay(self, g: int) -> tuple[bool, np.ndarray | None]:
        """Whether no data reaches D of the group, and its values where they are
        constant."""
        stages, local = self.stages, self.stages.locals[g]
        if (0, 0) not in local.pattern:
            return False, None
        jacobian = lambda env: local_jacobian(stages, local, env)
        variables, sources, run = self._steps.derivative(local.read, jacobian)
        if self._steps.reads_data(sources[0, 0]):
            return False, None
        if sources[0, 0]:
            return True, None
        with jax.ensure_compile_time_eval():
            zeros = [np.zeros(v.aval.shape, v.aval.dtype) for v in variables]
            return True, np.asarray(run(zeros)[0, 0])

    def _classes(self, g: int) -> tuple[tuple[float, np.ndarray | None], ...]:
        """Distinct κ of a read-out, with the positions that have each."""
        decay = self._readouts[g]
        if decay is None:
            return ()
        values = [float(x) for x in np.unique(decay) if x != 0]
        if not 0 < len(values) <= MOST_DECAYS:
            return ()
        if len(values) == 1 and np.all(decay):
            return ((values[0], None),)
        return tuple((x, decay == np.asarray(x, decay.dtype)) for x in values)

    # ------------------------------------------------------------ finding links

    @cached_property
    def _candidates(self) -> list[Candidate]:
        found: list[Candidate] = []
        taken: set[Edge] = set()
        for readout in self._readouts:
            mine = []
            for edge in self._products_in(self.paths.making(readout)):
                if self._is_steady(edge, readout):
                    mine += self._from_groups(edge, readout)
            last = [c for c in mine if not any(self._leads_to(c, d) for d in mine)]
            found += last
            taken |= {c.edge for c in last}
        stages, direct = self.stages, []
        for edge in self._products_in(stages.needed(stages.targets, stages.new_states)):
            if edge not in taken and edge[0] in stages.taps:
                direct += self._from_groups(edge, None)
        # The first product counts: what follows it is part of the way to the targets.
        found += [c for c in direct if not any(self._leads_to(d, c) for d in direct)]
        return found

    def _products_in(self, indices: Iterable[int]) -> list[Edge]:
        """(equation, data operand) of products with weights or constants."""
        found = []
        for i in filter(self._is_product, indices):
            operands = self.stages.equations[i].invars
            for k, v in enumerate(operands):
                rest = [x for j, x in enumerate(operands) if j != k]
                is_data = is_var(v) and is_differentiable(v)
                if is_data and not self._steps.reads_data(rest):
                    found.append((i, k))
        return found

    def _leads_to(self, first: Candidate, then: Candidate) -> bool:
        """Whether the result of one product is part of the input of another."""
        if first.lower != then.lower or first.edge == then.edge:
            return False
        i, (j, k) = first.edge[0], then.edge
        u = self.stages.equations[j].invars[k]
        return i in self.stages.needed([u], self.stages.new_states)

    def _from_groups(self, edge: Edge, readout: int | None) -> list[Candidate]:
        """The groups that reach an operand position by position."""
        found = []
        for g in range(len(self.stages.analysed.groups)):
            elements = None if g == readout else self._elements(edge, g)
            if elements is not None:
                found.append(Candidate(edge, g, readout, elements))
        return found

    def _elements(self, edge: Edge, g: int) -> np.ndarray | None:
        """The element of the operand that each position of a group acts on."""
        dependence, u = self.stages.dependence, self.paths.source(edge)
        members = self.stages.analysed.members[g]
        if not of(dependence.direct, u).grads & self._bits(g):
            return None
        labels = self._labels(u, g)
        if labels is None:
            return None
        elements = np.full(int(np.prod(members[0].varshape)), -1, np.int32)
        for h in members:
            for v in (h.outvar, h.invar):
                mine = labels.get(v)
                reached = np.zeros(0, int) if mine is None else mine.ravel()
                # States on a trailing axis share their positions.
                for position, element in zip(
                    h.positions.ravel(), reached, strict=False
                ):
                    if element >= 0 and elements[position] not in (-1, element):
                        return None
                    if element >= 0:
                        elements[position] = element
        return elements if (elements >= 0).any() else None

    def _labels(self, u: Var, g: int) -> dict[Var, np.ndarray] | None:
        """The element of u that each element of a group's states reaches.

        None where one reaches several.
        """
        stages, dependence = self.stages, self.stages.dependence
        numbers = np.arange(u.aval.size, dtype=np.int32).reshape(u.aval.shape)
        if u in stages.new_states:
            return {u: numbers}
        equations = [stages.equations[i] for i in stages.needed([u], stages.new_states)]
        made = {v for eqn in equations for v in eqn.outvars}
        read = (v for eqn in equations for v in eqn.invars if is_var(v))
        inputs = list(dict.fromkeys(v for v in read if v not in made))
        found = find_positions(
            make_jaxpr([], inputs, [u], equations),
            dependence.direct,
            Relevance(self._bits(g), dependence.data),
            [(u, numbers)],
            {},
            (),
            u.aval.size,
            dependence.constant,
        )
        return None if found.cuts else found.labels

    def _is_steady(self, edge: Edge, readout: int) -> bool:
        """Whether ∂Y/∂u depends on parameters and constants only."""
        u, read = self.paths.source(edge), self.paths.read_between(edge, readout)

        def slope(env: Values) -> dict[int, jax.Array]:
            state = lambda x: self.paths.state_of(edge, readout, env, x, {})
            value, pull = jax.vjp(state, env[u])
            return {0: pull(jnp.ones_like(value))[0]}

        _, sources, _ = self._steps.derivative(read, slope)
        return not self._steps.reads_data(sources[0])

    def _reaches_otherwise(self, lower: int, readout: int, edges: set[Edge]) -> bool:
        """Whether a group reaches a read-out by any path but its links."""
        stages, dependence = self.stages, self.stages.dependence
        bits, members = self._bits(lower), stages.analysed.members[lower]
        mine = {v for h in members for v in (h.invar, h.outvar)}
        done: set[Atom] = set()
        todo: list[Atom] = list(self.paths.group(readout).hidden_outvars)
        start = set(todo)
        while todo:
            v = todo.pop()
            if v in mine:
                return True
            stops = v in stages.new_states and v not in start
            if v in done or stops or v not in dependence.producer:
                continue
            done.add(v)
            i = dependence.producer[v]
            eqn = stages.equations[i]
            for k, x in enumerate(eqn.invars):
                carries = is_var(x) and bool(of(dependence.direct, x).grads & bits)
                if carries and (i, k) not in edges and differentiates(eqn, k):
                    todo.append(x)
        return False

    def _link(self, c: Candidate, is_complete: bool) -> Link:
        dependence, group = self.stages.dependence, self.paths.group(c.lower)
        read = of(dependence.direct, self.paths.source(c.edge)).grads
        owners = list(enumerate(group.owners))
        new = [dependence.new_bit[v] for v in group.hidden_outvars]
        old = [dependence.bit[v] for v in group.hidden_invars]
        states = tuple(s for s, k in owners if read & new[k])
        old_states = tuple(s for s, k in owners if read & old[k])
        decays = () if c.readout is None else self._classes(c.readout)

        def slopes(constants: Values, values: Values) -> tuple[Components, Components]:
            new, old = self.paths.slopes(c, constants | values)
            return {s: new[s] for s in states}, {s: old[s] for s in old_states}

        return Link(
            lower=c.lower,
            readout=c.readout,
            source=self.paths.source(c.edge),
            states=states,
            old_states=old_states,
            decays=decays,
            is_complete=is_complete and bool(decays),
            slopes=slopes,
            pull=partial(self.paths.pull, c),
        )
