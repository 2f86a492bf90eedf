"""The model as boxes and arrows: what feeds what inside a step and from step to step,
and which arrows are cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..analysis.dependence import Bits, StepDependence, flow, of, union
from ..analysis.sites import weight_operands
from ..compat import Atom, Equation, Var, is_differentiable, is_var
from ..graph.diagnostics import CompilationRecord, DiagnosticKind
from ..graph.hidden_group import HiddenGroup
from ..graph.relations import Site, adds
from ..program import Parameter, Path, StepProgram
from ..program.step import path_name
from ..source_lines import library_line, source_line, use_name

MOST = 4
"""More inputs, outputs or other states than these share one box."""


@dataclass(frozen=True)
class Node:
    """One box: 'input', 'operation', 'group', 'state' (neither hidden nor a parameter)
    or 'output'.

    An operation is one use of ``parameters``, with the biases added right after it;
    ``groups`` are those it reaches position by position, and ``cuts`` the numbers of
    records of cuts inside it. A group has its own number there. ``source``: the user's
    own line; ``library``: that of the layer it calls, if it calls one.
    """

    kind: str
    title: str
    names: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    parameters: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    source: str | None = None
    cuts: tuple[int, ...] = ()
    library: str | None = None


@dataclass(frozen=True)
class Edge:
    """One arrow between boxes, by number; ``delayed``: it reads the value of the last
    step.

    ``differentiable``: a gradient can pass. ``cuts``: numbers of the records of cuts on
    it, from one; ``partly``: some credit passes all the same.
    """

    source: int
    target: int
    delayed: bool
    differentiable: bool
    cuts: tuple[int, ...] = ()
    partly: bool = False


@dataclass(frozen=True)
class Chart:
    """Boxes in program order, arrows, and the cut records that arrows refer to."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    cuts: tuple[CompilationRecord, ...]

    def operations_of(self, parameter: str) -> list[Node]:
        """The operations that use a parameter array."""
        return [node for node in self.nodes if parameter in node.parameters]


@dataclass
class _Use:
    """An operation before it has a number: its equations and what they are made of."""

    equations: list[int]
    parameters: list[Parameter]
    source: str
    library: str | None
    groups: dict[int, None] = field(default_factory=dict)


@dataclass(frozen=True)
class ChartMaker:
    """Finds boxes and arrows of a compiled step."""

    program: StepProgram
    groups: Sequence[HiddenGroup]
    sites: Sequence[Site]
    cuts: Sequence[CompilationRecord]

    @cached_property
    def _dependence(self) -> StepDependence:
        return StepDependence(self.program)

    # ------------------------------------------------------------ boxes

    @cached_property
    def _uses(self) -> list[_Use]:
        """Operations, each with the biases that follow it directly."""
        dependence = self._dependence
        equations = {
            i: e
            for i, e in enumerate(self.program.equations)
            if weight_operands(dependence, e)
        }
        bits = {i: 1 << n for n, i in enumerate(equations)}
        marks = {v: bit for i, bit in bits.items() for v in self._results([i])}
        # Whatever is data and comes from none of them is one source.
        jaxpr, other = self.program.closed.jaxpr, 1 << len(bits)
        parameters = {p.invar for p in self.program.parameters}
        data = {v: other for v in jaxpr.invars if v not in parameters}
        _, behind = self._flow_from(data, marks)
        reached: dict[int, dict[int, None]] = {i: {} for i in equations}
        for site in self.sites:
            reached[dependence.producer[site.y_var]].update(
                dict.fromkeys(g.index for g in site.hidden_groups)
            )
        uses: dict[int, _Use] = {}
        for i, eqn in equations.items():
            places = source_line(eqn), library_line(eqn)
            use = _Use([i], self._parameters(eqn), *places, reached[i])
            reads = union(behind[v] for v in eqn.outvars).reads
            before = next((uses[j] for j in uses if bits[j] == reads), None)
            if before and adds(eqn):
                before.equations.append(i)
                before.parameters += [
                    p for p in use.parameters if p not in before.parameters
                ]
                before.groups.update(use.groups)
                use = before
            uses[i] = use
        return list({id(use): use for use in uses.values()}.values())

    def _results(self, equations: Iterable[int]) -> Iterator[Var]:
        """The results of some equations."""
        for i in equations:
            yield from self.program.equations[i].outvars

    def _parameters(self, eqn: Equation) -> list[Parameter]:
        dependence = self._dependence
        grads = union(
            of(dependence.total, eqn.invars[k])
            for k in weight_operands(dependence, eqn)
        ).grads
        return [p for p in self.program.parameters if grads & dependence.bit[p.invar]]

    @cached_property
    def _others(self) -> dict[Path, list]:
        """Other states that the step writes."""
        found: dict[Path, list] = {}
        for other in self.program.others:
            if other.outvar is not None:
                found.setdefault(other.path, []).append(other)
        return found

    @cached_property
    def _nodes(self) -> list[tuple[Node, list]]:
        """Every box with what it stands for: variables, equations or states."""
        found: list[tuple[Node, list]] = _boxes(
            'input', [[v] for v in self.program.inputs]
        )
        found += [
            (Node('state', path_name(path), shape=states[0].invar.aval.shape), states)
            for path, states in self._others.items()
        ]
        for use in self._uses:
            used = tuple(
                dict.fromkeys(
                    self.program.equations[i].primitive.name for i in use.equations
                )
            )
            title = ' + '.join(map(use_name, used))
            # The first results of a loop may be its counters.
            results = self.program.equations[use.equations[-1]].outvars
            moving = [v for v in results if is_differentiable(v)]
            shape = (moving or results)[0].aval.shape
            parameters = tuple(p.name for p in use.parameters)
            node = Node(
                'operation',
                title,
                used,
                shape,
                parameters,
                tuple(use.groups),
                use.source,
                library=use.library,
            )
            found.append((node, use.equations))
        for group in self.groups:
            names = tuple(map(path_name, group.hidden_paths))
            found.append(
                (
                    Node(
                        'group',
                        f'group {group.index}',
                        names,
                        group.varshape,
                        (),
                        (group.index,),
                    ),
                    [group],
                )
            )
        return found + _boxes(
            'output', [[v] for v in self.program.outputs if is_var(v)]
        )

    # ------------------------------------------------------------ arrows

    def _flow_from(
        self, sources: Mapping[Var, int], marks: Mapping[Var, int]
    ) -> tuple[dict[Var, Bits], dict[Var, Bits]]:
        """The bits that reach every variable from sources and marked variables, and
        those behind every marked one."""
        jaxpr = self.program.closed.jaxpr
        inputs = [Bits(sources.get(v, 0), sources.get(v, 0)) for v in jaxpr.invars]
        behind: dict[Var, Bits] = {}
        marked = {v: Bits(bit, bit) for v, bit in marks.items()}
        return flow(jaxpr, inputs, marked, behind), behind

    @cached_property
    def _flow(self) -> tuple[dict[Var, Bits], dict[Var, Bits]]:
        """The boxes that reach every variable directly, as bits: two for each, its
        value now and that of last step."""
        sources: dict[Var, int] = {}
        marks: dict[Var, int] = {}
        for n, (node, parts) in enumerate(self._nodes):
            if node.kind == 'input':
                sources.update(dict.fromkeys(parts, 1 << 2 * n))
            elif node.kind == 'state':
                sources.update((s.invar, 2 << 2 * n) for s in parts)
            elif node.kind == 'operation':
                marks.update(dict.fromkeys(self._results(parts), 1 << 2 * n))
            # After the operations, whose results may be new states.
            elif node.kind == 'group':
                sources.update(dict.fromkeys(parts[0].hidden_invars, 2 << 2 * n))
                marks.update(dict.fromkeys(parts[0].hidden_outvars, 1 << 2 * n))
        return self._flow_from(sources, marks)

    @cached_property
    def _operations(self) -> list[tuple[int, list[int]]]:
        """The number of every operation's box, with its equations."""
        return [
            (n, parts)
            for n, (node, parts) in enumerate(self._nodes)
            if node.kind == 'operation'
        ]

    @cached_property
    def _operation_of(self) -> dict[int, int]:
        """The box of every equation that uses a parameter."""
        return {i: n for n, equations in self._operations for i in equations}

    def _read_by(self, n: int) -> Bits:
        """Bits of what a box reads directly."""
        env, behind = self._flow
        node, parts = self._nodes[n]
        if node.kind == 'operation':
            return union(behind[v] for v in self._results(parts))
        if node.kind == 'group':
            bits = Bits()
            for v in parts[0].hidden_outvars:
                made = self._operation_of.get(self._dependence.producer[v])
                bits |= (
                    behind[v] if made is None else Bits(1 << 2 * made, 1 << 2 * made)
                )
            return bits
        if node.kind == 'state':
            return union(of(env, s.outvar) for s in parts)
        return union(of(env, v) for v in parts) if node.kind == 'output' else Bits()

    @cached_property
    def _edges(self) -> list[Edge]:
        found = []
        for target in range(len(self._nodes)):
            bits = self._read_by(target)
            for source in range(len(self._nodes)):
                for delayed in (False, True):
                    bit = 1 << 2 * source + delayed
                    if bits.reads & bit and (source != target or delayed):
                        found.append(
                            Edge(source, target, delayed, bool(bits.grads & bit))
                        )
        return found

    # ------------------------------------------------------------ cuts

    def _carried(self, edge: Edge) -> int:
        """Bits of what an arrow carries: the old states of a group, or all
        that its box was made from."""
        node, parts = self._nodes[edge.source]
        dependence = self._dependence
        if edge.delayed and node.kind == 'group':
            return sum(dependence.bit[v] for v in parts[0].hidden_invars)
        if node.kind == 'operation':
            made = self._results(parts)
        elif node.kind == 'group':
            made = iter(parts[0].hidden_outvars)
        else:
            return 0
        return union(dependence.total[v] for v in made).grads

    def _below(self, equation: int) -> set[int]:
        """The first boxes that the results of an equation lead to."""
        if equation in self._operation_of:
            return {self._operation_of[equation]}
        groups = [
            (n, parts[0])
            for n, (node, parts) in enumerate(self._nodes)
            if node.kind == 'group'
        ]
        ends: dict[Atom, int] = {
            v: n for n, group in groups for v in group.hidden_outvars
        }
        found: set[int] = set()
        live: set[Atom] = set()
        for i, eqn in enumerate(self.program.equations[equation:], equation):
            if i != equation and not any(v in live for v in eqn.invars if is_var(v)):
                continue
            if i in self._operation_of:
                found.add(self._operation_of[i])
                continue
            found |= {ends[v] for v in eqn.outvars if v in ends}
            live |= {v for v in eqn.outvars if v not in ends}
        return found

    def _cut_edges(self, record: CompilationRecord) -> Iterator[Edge]:
        """The arrows on which a record's cuts lie: from its own source where there are
        any, else from what it made."""
        bit, path = self._dependence.bit, record.weight_path
        arrays = [p for p in self.program.parameters if p.path == path]
        names, wanted = {p.name for p in arrays}, sum(bit[p.invar] for p in arrays)
        if path is None:
            group = next(
                g for g in self.groups if tuple(g.hidden_paths) == record.hidden_paths
            )
            names, wanted = (
                {f'group {group.index}'},
                sum(bit[v] for v in group.hidden_invars),
            )
        for equation in record.context['equations'] if record.context else ():
            below = self._below(equation)
            into = [
                e
                for e in self._edges
                if e.target in below and e.differentiable and self._carried(e) & wanted
            ]
            nodes = [self._nodes[e.source][0] for e in into]
            yield from [
                e
                for e, node in zip(into, nodes, strict=True)
                if names & {node.title, *node.parameters}
            ] or into

    def _kept(self, source: int) -> list[tuple[int, set[Var]]]:
        """Groups that a box reaches position by position, each with the values on the
        way."""
        node, parts = self._nodes[source]
        if node.kind == 'group':
            pairs = [(parts[0], parts[0].transition_jaxpr)]
        else:
            made = [
                s
                for s in self.sites
                if node.kind == 'operation'
                and self._dependence.producer[s.y_var] in parts
            ]
            pairs = [
                pair
                for s in made
                for pair in zip(
                    s.hidden_groups, s.y_to_hidden_group_jaxprs, strict=True
                )
            ]
        return [
            (group.index, {v for e in program.eqns for v in e.outvars})
            for group, program in pairs
        ]

    def _is_kept(self, edge: Edge) -> bool:
        """True for an arrow along which some elements keep their position."""
        made = {n: set(self._results(parts)) for n, parts in self._operations}
        target = self._nodes[edge.target][0]
        if target.kind == 'operation':
            return any(
                made[edge.target] & values for _, values in self._kept(edge.source)
            )
        others = {v for n, results in made.items() if n != edge.source for v in results}
        return target.kind == 'group' and any(
            group in target.groups and values and not values & others
            for group, values in self._kept(edge.source)
        )

    def make(self) -> Chart:
        """The chart."""
        cuts = [r for r in self.cuts if r.kind is DiagnosticKind.CUT]
        numbers: dict[Edge, dict[int, None]] = {}
        nodes = [node for node, _ in self._nodes]
        for number, record in enumerate(cuts, 1):
            edges = list(self._cut_edges(record))
            for edge in edges:
                numbers.setdefault(edge, {})[number] = None
            if edges:
                continue
            for n in {n for i in record.context['equations'] for n in self._below(i)}:
                nodes[n] = replace(nodes[n], cuts=(*nodes[n].cuts, number))
        numbered = (
            replace(
                e,
                cuts=tuple(numbers.get(e, ())),
                partly=e in numbers and self._is_kept(e),
            )
            for e in self._edges
        )
        return Chart(tuple(nodes), tuple(numbered), tuple(cuts))


def _boxes(kind: str, parts: list[list]) -> list[tuple[Node, list]]:
    """A box for each input or output, or one for all of many."""
    if len(parts) > MOST:
        return [
            (Node(kind, f'{len(parts)} {kind}s'), [v for part in parts for v in part])
        ]
    title = lambda i: kind if len(parts) == 1 else f'{kind} {i}'
    return [
        (Node(kind, title(i), shape=part[0].aval.shape), part)
        for i, part in enumerate(parts)
    ]
