"""A graph of NIR nodes as a model of one time step.

Nodes run in an order in which every edge leads forward. An edge that closes a cycle has
a delay of one step: it passes on the value of the previous step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from ..errors import three_parts
from .nodes import Flatten, Node

Edge = tuple[str, str]


@dataclass
class Wiring:
    """Which node feeds which, and all that a file has beside the nodes.

    Nodes of a graph inside a graph have names as ``outer/inner``. ``graphs``: the edges
    of every graph by its name, as they were given; ``''`` is the outermost. ``kinds``:
    'Input' or 'Output', which pass on what they get, or the kind of a node.
    ``shapes``: of inputs and outputs. ``metadata``: by the names of nodes and graphs.
    """

    graphs: dict[str, list[Edge]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def own(self, graph: str, kind: str) -> list[str]:
        """The inputs or outputs of one graph, in the order of their names."""
        inside = [n for n, k in self.kinds.items() if k == kind]
        return sorted(n for n in inside if n.rpartition('/')[0] == graph)

    def edges(self) -> list[Edge]:
        """All edges, between nodes and the inputs and outputs of graphs inside."""
        found = []
        for graph, edges in self.graphs.items():
            for a, b in edges:
                full = [f'{graph}/{n}' if graph else n for n in (a, b)]
                source = self._port(full[0], 'Output')
                target = self._port(full[1], 'Input')
                found.append((source, target))
        return sorted(set(found))

    def _port(self, name: str, kind: str) -> str:
        """A node itself; of a graph its one input or output."""
        if name not in self.graphs:
            return name
        ports = self.own(name, kind)
        if len(ports) != 1:
            raise ValueError(
                three_parts(
                    f'a graph {name!r} inside a graph, with {len(ports)} nodes {kind}',
                    'an edge to it or from it names the graph alone',
                    f'a graph inside with one {kind}',
                )
            )
        return ports[0]


class Model(brainstate.nn.Module):
    """One time step of a graph. :func:`braintrace.nir.read` returns it.

    Call it with one array for each Input node, in the order of their names. It returns
    the array of the Output node, or a dictionary of arrays by name if there are
    several. ``parts``: the nodes by name. ``dt``: the time step.
    """

    def __init__(self, wiring: Wiring, parts: Mapping[str, Node], dt: float):
        super().__init__()
        self.wiring = wiring
        self.parts = dict(parts)
        self.dt = dt
        first = next(iter(self.parts.values()), None)
        self.dtype = jnp.result_type(float) if first is None else first.dtype
        edges = wiring.edges()
        self.inputs = wiring.own('', 'Input')
        self.outputs = wiring.own('', 'Output')
        self._check_ends(edges)
        self.order, self.closing = ordered(self.inputs, list(wiring.kinds), edges)
        self.feeds = {
            name: [a for a, b in edges if b == name and (a, b) not in self.closing]
            for name in wiring.kinds
        }
        self.feeds_back = {
            name: [a for a, b in self.closing if b == name] for name in wiring.kinds
        }
        sources = dict.fromkeys(a for a, _ in self.closing)
        # Outputs of the step before that no state gives are kept.
        self.is_kept = [a for a in sources if not self._follows_states(a, ())]
        self.kept: dict[str, brainstate.HiddenState] = {}
        self._kept_shapes = self._infer_shapes()
        needed = self._needed()
        self.order = [name for name in self.order if name in needed]

    def _needed(self) -> set[str]:
        """Nodes that have a state, and those that a state or an output depends on
        inside the step. The rest was run for the step before."""
        stateful = [n for n, part in self.parts.items() if part.has_state]
        found: set[str] = set()
        waiting = [*self.outputs, *self.is_kept, *stateful]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self.feeds[name]
        return found

    def _check_ends(self, edges: Sequence[Edge]) -> None:
        fed = {b for _, b in edges}
        unfed = sorted(set(self.wiring.kinds) - fed - set(self.inputs))
        if unfed or not self.inputs or not self.outputs:
            raise ValueError(
                three_parts(
                    f'a graph with inputs {self.inputs} and outputs {self.outputs}, '
                    f'and without an edge to {unfed}',
                    'every node but an Input takes the sum of what edges bring',
                    'a graph whose nodes lead from an Input to an Output',
                )
            )

    def _infer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what nodes give, from those of the inputs, where they follow. A
        Flatten that does not know its input learns it here."""
        shapes = {name: self.wiring.shapes[name] for name in self.inputs}
        for name in self.order:
            part = self.parts.get(name)
            given = [shapes[a] for a in self.feeds[name] if a in shapes]
            if name in shapes:
                continue
            if part is not None and part.shape is not None:
                shapes[name] = part.shape
            elif given:
                if isinstance(part, Flatten):
                    part.set_input(given[0])
                # The package gives inputs of grouped convolutions too few channels.
                with contextlib.suppress(ValueError, TypeError):
                    shapes[name] = _shape_after(part, given[0])
        if unknown := [name for name in self.is_kept if name not in shapes]:
            raise ValueError(
                three_parts(
                    f'an edge that closes a cycle from {unknown[0]!r}',
                    'its shape does not follow from the shapes of the inputs',
                    'Input nodes with the shapes of their arrays',
                )
            )
        return shapes

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        batch = () if batch_size is None else (batch_size,)
        for name in self.is_kept:
            shape = (*batch, *self._kept_shapes[name])
            self.kept[name] = brainstate.HiddenState(jnp.zeros(shape, self.dtype))

    def update(self, *inputs: Any) -> Any:
        """The outputs of one step."""
        if len(inputs) != len(self.inputs):
            raise TypeError(
                three_parts(
                    f'a step with {len(inputs)} inputs',
                    f'the graph has {len(self.inputs)}: {", ".join(self.inputs)}',
                    'one array for each, in this order',
                )
            )
        before = {a: self._before(a) for a, _ in self.closing}
        values = dict(zip(self.inputs, inputs, strict=True))
        for name in self.order:
            if name in values:
                continue
            given = [values[a] for a in self.feeds[name]]
            given += [before[a] for a in self.feeds_back[name]]
            values[name] = self._run(name, reduce(add, given))
        for name, state in self.kept.items():
            state.value = values[name]
        found = {name: values[name] for name in self.outputs}
        return found if len(found) > 1 else found[self.outputs[0]]

    def _run(self, name: str, x: Any) -> Any:
        """A node; inputs and outputs of graphs pass on what they get."""
        return self.parts[name](x) if name in self.parts else x

    def _follows_states(self, name: str, seen: tuple[str, ...]) -> bool:
        """Whether the states alone say what a node gave at the step before."""
        if name in self.parts and self.parts[name].has_state:
            return True
        if name in self.inputs or name in seen:
            return False
        sources = [*self.feeds[name], *self.feeds_back[name]]
        return all(self._follows_states(a, (*seen, name)) for a in sources)

    def _before(self, name: str) -> Any:
        """What a node gave at the step before; zero potentials before the first."""
        if name in self.kept:
            return self.kept[name].value
        part = self.parts.get(name)
        if part is not None and part.has_state:
            return part.output()  # type: ignore[attr-defined]
        sources = [*self.feeds[name], *self.feeds_back[name]]
        return self._run(name, reduce(add, [self._before(a) for a in sources]))


def _shape_after(part: Node | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what a node gives for an input."""
    if part is None:
        return shape
    x = jax.ShapeDtypeStruct(shape, jnp.result_type(float))
    return tuple(jax.eval_shape(part.update, x).shape)  # type: ignore[attr-defined]


def ordered(
    first: Sequence[str], names: Sequence[str], edges: Sequence[Edge]
) -> tuple[list[str], list[Edge]]:
    """An order of the nodes, and the edges that close a cycle, which lead back in it.

    Paths are followed from the inputs, by the names of nodes: the order in which a file
    has them does not matter.

    >>> ordered(['in'], ['in', 'a', 'b'], [('in', 'a'), ('a', 'b'), ('b', 'a')])
    (['in', 'a', 'b'], [('b', 'a')])
    """
    after: dict[str, list[str]] = {name: [] for name in names}
    for a, b in sorted(edges):
        after[a].append(b)
    finished: list[str] = []
    closing: list[Edge] = []
    begun: set[str] = set()
    for start in [*first, *sorted(names)]:
        if start in begun:
            continue
        begun.add(start)
        path = [(start, iter(after[start]))]
        while path:
            name, rest = path[-1]
            following = next(rest, None)
            if following is None:
                path.pop()
                finished.append(name)
            elif following not in begun:
                begun.add(following)
                path.append((following, iter(after[following])))
            elif following not in finished:
                closing.append((name, following))
    return finished[::-1], closing
