"""Read-outs, and what leaky ones remember of other groups.

A read-out with a memory of its own is a group Y of one state per position,

    Y_t = κ Y_{t-1} + u_t · W,

that no other group reads. Here u is a function of the states of another group h, in
which each position of h acts on at most one element. With m_t = κ m_{t-1} + u_t the
read-out is m_t · W, so a rule that carries ∂m/∂θ beside ∂h/∂θ has all of its credit: m is
one more component of the traces of h. It is no state of the model; no derivative reads
its value.

    ∂m_t/∂m_{t-1} = κ      U = ∂u_t/∂h_t      V = ∂u_t/∂h_{t-1}
    signal of m: W λ_t, where λ_t is the signal of Y

Nothing is matched by name or layer: κ is found by folding constants, and the path from u
to Y may hold any operations whose derivative no data reaches. A read-out without memory
is a product between states and targets; it is a link as well, for rules that are given a
κ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..analysis.dependence import Relevance, of
from ..analysis.positions import find_positions
from ..compat import Atom, Var, is_differentiable, is_var, make_jaxpr, values_of
from ..compiled_step import Components, Feedback, Memory, Slopes, Values
from ..operations import differentiates, operation_of, run_equation
from .invariants import StepInvariants
from .local_step import local_jacobian
from .replay import replay
from .stages import Stages

Edge = tuple[int, int]
"""(equation, operand)"""
MOST_DECAYS = 16
"""Distinct κ of one read-out, each of which needs a trace of its own."""


@dataclass(frozen=True)
class Link:
    """A product u · W that a group reaches position by position, on the way to a
    read-out Y; or to targets without any memory, then there is no Y.

    ``elements``: the element of u that each position of the group acts on, -1 for none.
    ``states``, ``old_states``: the components that u depends on, new and old ones.
    ``decays``: (κ, which positions of Y decay by it, None for all of them), empty where
    they are no constants. ``is_complete``: these states reach Y by no path but the
    links between the two groups.
    """

    edge: Edge
    lower: int
    readout: int | None
    elements: np.ndarray = field(repr=False)
    states: tuple[int, ...] = ()
    old_states: tuple[int, ...] = ()
    decays: tuple[tuple[float, np.ndarray | None], ...] = ()
    is_complete: bool = False


@dataclass(frozen=True)
class ReadoutMemory(Memory):
    """What read-outs that decay by one κ remember of one u; ``links`` lead to them, each
    with the positions that decay so, None for all."""

    links: tuple[tuple[Link, np.ndarray | None], ...] = ()


class ReadoutLinks:
    """All links of a step, and the products whose weights random feedback replaces."""

    def __init__(self, stages: Stages):
        self.stages = stages
        self._steps = StepInvariants(stages)

    # ------------------------------------------------------------ results

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The links of the step, in program order."""
        stages, candidates = self.stages, self._candidates
        edges: dict[tuple[int, int], set[Edge]] = {}
        for c in candidates:
            if c.readout is not None:
                edges.setdefault((c.lower, c.readout), set()).add(c.edge)
        complete = {
            (lower, readout)
            for (lower, readout), mine in edges.items()
            if not self._reaches_otherwise(lower, readout, mine)
        }
        found = []
        for c in candidates:
            group = stages.analysed.groups[c.lower]
            read = of(stages.dependence.direct, self._source(c.edge)).grads
            new = [stages.dependence.new_bit[v] for v in group.hidden_outvars]
            old = [stages.dependence.bit[v] for v in group.hidden_invars]
            owners = list(enumerate(group.owners))
            decays = () if c.readout is None else self._classes(c.readout)
            found.append(
                replace(
                    c,
                    states=tuple(s for s, k in owners if read & new[k]),
                    old_states=tuple(s for s, k in owners if read & old[k]),
                    decays=decays,
                    is_complete=bool(decays) and (c.lower, c.readout) in complete,
                )
            )
        return tuple(found)

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
            for i in self._making(readout):
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
        if self.stages.analysed.groups[readout].num_state > 1:
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
        new = self.stages.analysed.groups[g].hidden_outvars
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
    def _candidates(self) -> list[Link]:
        found: list[Link] = []
        taken: set[Edge] = set()
        for readout in self._readouts:
            mine = []
            for edge in self._products_in(self._making(readout)):
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

    def _leads_to(self, first: Link, then: Link) -> bool:
        """Whether the result of one product is part of the input of another."""
        if first.lower != then.lower or first.edge == then.edge:
            return False
        i, (j, k) = first.edge[0], then.edge
        u = self.stages.equations[j].invars[k]
        return i in self.stages.needed([u], self.stages.new_states)

    def _from_groups(self, edge: Edge, readout: int | None) -> list[Link]:
        """The groups that reach an operand position by position."""
        found = []
        for g in range(len(self.stages.analysed.groups)):
            elements = None if g == readout else self._elements(edge, g)
            if elements is not None:
                found.append(Link(edge, g, readout, elements))
        return found

    def _elements(self, edge: Edge, g: int) -> np.ndarray | None:
        """The element of the operand that each position of a group acts on."""
        dependence, u = self.stages.dependence, self._source(edge)
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
        u, read = self._source(edge), self._read_between(edge, readout)

        def slope(env: Values) -> dict[int, jax.Array]:
            state = lambda x: self._state_of(edge, readout, env, x, {})
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
        todo: list[Atom] = list(self.stages.analysed.groups[readout].hidden_outvars)
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

    # ------------------------------------------------------------ paths

    def _source(self, edge: Edge) -> Var:
        """The operand u of a product."""
        i, k = edge
        return self.stages.equations[i].invars[k]

    def _making(self, g: int) -> list[int]:
        """Equations that make a group's new states from other new states."""
        own = set(self.stages.analysed.groups[g].hidden_outvars)
        return self.stages.needed(own, self.stages.new_states - own)

    def _between(self, edge: Edge, readout: int) -> list[int]:
        """Equations on the way from an operand to the read-out's new state."""
        moved = set(self.stages.equations[edge[0]].outvars)
        found = [edge[0]]
        for i in self._making(readout):
            eqn = self.stages.equations[i]
            if i != edge[0] and any(is_var(v) and v in moved for v in eqn.invars):
                moved |= set(eqn.outvars)
                found.append(i)
        return sorted(found)

    def _read_between(self, edge: Edge, readout: int) -> list[Var]:
        """What the equations from an operand to the read-out read beside each other."""
        equations = [self.stages.equations[i] for i in self._between(edge, readout)]
        made = {v for eqn in equations for v in eqn.outvars}
        read = [v for eqn in equations for v in eqn.invars if is_var(v)]
        return list(dict.fromkeys(v for v in read if v not in made))

    def _state_of(
        self,
        edge: Edge,
        readout: int | None,
        env: Mapping[Var, Any],
        x: Any,
        feedback: Feedback,
    ) -> jax.Array:
        """The read-out's new state as a function of the operand u of one product; the
        product itself without a read-out."""

        def results(i: int, env: Mapping[Var, Any]) -> list[Any]:
            operands = values_of(self.stages.equations[i].invars, env)
            operands = [feedback.get((i, k), v) for k, v in enumerate(operands)]
            if i == edge[0]:
                operands[edge[1]] = x
            return run_equation(self.stages.equations[i], operands)

        if readout is None:
            return results(edge[0], env)[0]
        # Some of what is read, the loop did not keep.
        read = self._read_between(edge, readout)
        known = self.stages.compute(
            (v for v in read if v is not self._source(edge)), env
        )
        for i in self._between(edge, readout):
            found = results(i, known)
            known.update(zip(self.stages.equations[i].outvars, found, strict=True))
        group = self.stages.analysed.groups[readout]
        return group.components([known[v] for v in group.hidden_outvars])[0]

    # ------------------------------------------------------------ memories

    def memories(self, kappa: float | None) -> list[tuple[ReadoutMemory, ...]]:
        """What read-outs remember of every group, one for each source u and decay;
        ``kappa`` in place of the read-outs' own decays, if it is given."""
        found: list[dict[tuple, ReadoutMemory]] = [{} for _ in self.stages.locals]
        for link in self.links:
            mine = found[link.lower]
            for decay, positions in link.decays if kappa is None else ((kappa, None),):
                key = (self._source(link.edge), decay)
                known = mine.get(
                    key, ReadoutMemory(decay, link.states, link.old_states)
                )
                mine[key] = replace(known, links=(*known.links, (link, positions)))
        return [tuple(mine.values()) for mine in found]

    def slopes(
        self,
        memories: Sequence[Sequence[ReadoutMemory]],
        constants: Values,
        values: Values,
    ) -> list[list[Slopes]]:
        """(U, V) of every memory, by group."""
        env = constants | values
        return [[self._slopes(m.links[0][0], env) for m in mine] for mine in memories]

    def _slopes(self, link: Link, env: Values) -> Slopes:
        """∂u/∂h of new and of old states at the positions of h."""
        stages, group = self.stages, self.stages.analysed.groups[link.lower]
        u = self._source(link.edge)
        new = group.components([env[v] for v in group.hidden_outvars])
        old = group.old_components(env)
        made = stages.differentiated - stages.new_states
        fixed = env.pick(v for v in env if v not in made)
        kept = {v: env[v] for v in stages.tap_results if v in env}

        def source(new: list[jax.Array], old: list[jax.Array]) -> jax.Array:
            known = fixed | group.old_states(old) | group.new_states(new)
            for i in stages.needed([u], known):
                eqn = stages.equations[i]
                operands = values_of(eqn.invars, known)
                known.update(replay(stages.taps.get(i), eqn, operands, kept))
            return known[u]

        value, pull = jax.vjp(source, new, old)
        # Each position acts on one element, so that one pull-back has every slope.
        by_new, by_old = pull(jnp.ones_like(value))
        return (
            {s: by_new[s] for s in link.states},
            {s: by_old[s] for s in link.old_states},
        )

    def signals(
        self,
        memories: Sequence[Sequence[ReadoutMemory]],
        constants: Values,
        values: Values,
        results: Mapping[Var, jax.Array],
        signals: Sequence[Components],
        reads: Sequence[Components],
        feedback: Feedback,
    ) -> tuple[list[Components], list[Components]]:
        """Signals and direct reads of memories, by group; and what direct reads of
        states count twice beside them, to be added to these.

        ``results``: gradients of tap results, ``signals`` and ``reads``: those of the
        states, of which what read-outs send back is taken.
        """
        env = constants | values
        found: list[Components] = [{} for _ in memories]
        direct: list[Components] = [{} for _ in memories]

        def put(into: Components, n: int, x: jax.Array) -> None:
            into[n] = into[n] + x if n in into else x

        for g, mine in enumerate(memories):
            size = self.stages.analysed.groups[g].num_state
            for n, memory in enumerate(mine, size):
                for link, positions in memory.links:
                    if link.readout is not None:
                        for bars, into in ((signals, found), (reads, direct)):
                            if 0 in bars[link.readout]:
                                bar = bars[link.readout][0]
                                if positions is not None:
                                    bar = jnp.where(positions, bar, 0)
                                put(into[g], n, self._pull(link, env, bar, feedback))
                        continue
                    (y,) = self.stages.taps[link.edge[0]].results
                    if y not in results:
                        continue
                    back = self._pull(link, env, results[y], feedback)
                    put(found[g], n, back)
                    # Targets read u itself: what it takes of old states is in R, and
                    # through V in m.
                    if link.old_states:
                        for j, slope in self._slopes(link, env)[1].items():
                            put(direct[g], j, -slope * back)
        return found, direct

    def _pull(
        self, link: Link, env: Values, bar: jax.Array, feedback: Feedback
    ) -> jax.Array:
        """What the read-out sends back to u, at the positions of the lower group."""
        result = lambda x: self._state_of(link.edge, link.readout, env, x, feedback)
        value, pull = jax.vjp(result, env[self._source(link.edge)])
        (q,) = pull(bar.astype(value.dtype))
        shape = self.stages.analysed.groups[link.lower].varshape
        if np.array_equal(link.elements, np.arange(q.size)):
            return q.reshape(shape)
        taken = q.reshape(-1)[np.maximum(link.elements, 0)]
        return jnp.where(link.elements >= 0, taken, 0).astype(q.dtype).reshape(shape)
