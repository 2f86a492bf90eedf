"""Hidden groups: states of one shape coupled position by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..compat import Var
from ..compiled_step import Values
from ..program import Hidden, Path
from .cuts import Positions
from .dependence import DependenceThrough, Relevance, StepDependence
from .positions import find_positions


@dataclass(frozen=True)
class Group:
    """Hidden states of one shape that depend on each other position by position.

    Its components are the real numbers at a position: a state with a trailing axis has
    one for each element of this axis, a complex state two for each of its numbers.
    """

    hidden: tuple[Hidden, ...]

    @cached_property
    def hidden_paths(self) -> tuple[Path, ...]:
        return tuple(h.path for h in self.hidden)

    @cached_property
    def hidden_invars(self) -> tuple[Var, ...]:
        return tuple(h.invar for h in self.hidden)

    @cached_property
    def hidden_outvars(self) -> tuple[Var, ...]:
        return tuple(h.outvar for h in self.hidden)

    @property
    def varshape(self) -> tuple[int, ...]:
        return self.hidden[0].varshape

    @cached_property
    def _avals(self) -> tuple[Any, ...]:
        return tuple(h.invar.aval for h in self.hidden)

    @cached_property
    def _trailing(self) -> tuple[bool, ...]:
        return tuple(h.has_trailing_axis for h in self.hidden)

    @cached_property
    def owners(self) -> list[int]:
        """The number of the hidden state that each component belongs to."""
        widths = map(component_count, self._avals, self._trailing)
        return [k for k, width in enumerate(widths) for _ in range(width)]

    @property
    def num_state(self) -> int:
        return len(self.owners)

    def components(self, values: Sequence[Any]) -> list[jax.Array]:
        return components_of(values, self._trailing)

    def old_components(self, values: Mapping[Var, Any]) -> list[jax.Array]:
        return self.components([values[v] for v in self.hidden_invars])

    def old_states(self, components: Sequence[jax.Array]) -> Values:
        states = states_of(components, self._avals, self._trailing)
        return Values(zip(self.hidden_invars, states, strict=True))

    def new_states(self, components: Sequence[jax.Array]) -> Values:
        states = states_of(components, self._avals, self._trailing)
        return Values(zip(self.hidden_outvars, states, strict=True))


def component_count(aval: Any, trailing: bool) -> int:
    """How many components a state has; ``trailing``: some lie along its last axis."""
    count = aval.shape[-1] if trailing else 1
    return 2 * count if jnp.issubdtype(aval.dtype, jnp.complexfloating) else count


def components_of(values: Sequence[Any], trailing: Sequence[bool]) -> list[jax.Array]:
    """One array of the shape of the positions for each component, without units."""
    components = []
    for value, along_last in zip(values, trailing, strict=True):
        value = jnp.asarray(getattr(value, 'mantissa', value))
        for real in [value.real, value.imag] if jnp.iscomplexobj(value) else [value]:
            if along_last:
                components += [real[..., i] for i in range(real.shape[-1])]
            else:
                components.append(real)
    return components


def states_of(
    components: Sequence[jax.Array], avals: Sequence[Any], trailing: Sequence[bool]
) -> list[jax.Array]:
    """The inverse of :func:`components_of`: one array for each state."""
    states, rest = [], list(components)
    for aval, along_last in zip(avals, trailing, strict=True):
        width = component_count(aval, along_last)
        mine, rest = rest[:width], rest[width:]
        join = lambda parts, last=along_last: jnp.stack(parts, -1) if last else parts[0]
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            half = width // 2
            state = jax.lax.complex(join(mine[:half]), join(mine[half:]))
        else:
            state = join(mine)
        states.append(state.astype(aval.dtype))
    return states


def positions_of_paths(
    dependence: StepDependence,
    old: tuple[Hidden, ...],
    new: tuple[Hidden, ...],
    through: tuple[Hidden, ...],
) -> Positions:
    """Labels and cuts of the paths from parameters and old states into new states.

    All have one shape; paths lead through no new states but those in ``through``.
    """
    before = dependence.old(old)
    return find_positions(
        dependence.program.closed.jaxpr,
        DependenceThrough(dependence, through),
        Relevance(dependence.parameters | before, dependence.data, before),
        starts=[(h.outvar, h.positions) for h in new],
        keep={h.invar: h.positions for h in old},
        stop=dependence.new_bit.keys() - {h.outvar for h in through},
        size=int(np.prod(new[0].varshape)),
        const=dependence.constant,
    )


def find_groups(dependence: StepDependence) -> list[Group]:
    """Sort the hidden states of a program into groups, in the program's order.

    State a joins state b when its value, old or new, reaches the new b position by
    position.
    """
    hidden = dependence.program.hidden
    links: list[tuple[int, int]] = []
    for b, target in enumerate(hidden):
        mates = [
            a
            for a, h in enumerate(hidden)
            if h.varshape == target.varshape and _may_join(h, target)
        ]
        if mates == [b]:
            continue
        through = tuple(h for h in hidden if _may_join(h, target))
        old = tuple(hidden[a] for a in mates)
        found = positions_of_paths(dependence, old, (target,), through)
        links += [(a, b) for a in mates if a != b and _stays(hidden[a], found)]
    # A link counts only if no two states of the merged group are different layers.
    group_of = [frozenset({i}) for i in range(len(hidden))]
    for link in links:
        merged = group_of[link[0]] | group_of[link[1]]
        if all(_may_join(hidden[a], hidden[b]) for a, b in combinations(merged, 2)):
            for i in merged:
                group_of[i] = merged
    return [
        Group(tuple(hidden[i] for i in sorted(group)))
        for group in sorted(set(group_of), key=min)
    ]


def _stays(state: Hidden, found: Positions) -> bool:
    """True if the state, old or new, reaches the target at its own position."""
    labels = [found.labels.get(v) for v in (state.invar, state.outvar)]
    return any(x is not None and bool((x == state.positions).any()) for x in labels)


def _may_join(a: Hidden, b: Hidden) -> bool:
    """False for paths that part at an integer key, as those of ``layers.0`` and
    ``layers.1``."""
    for x, y in zip(a.path, b.path, strict=False):
        if x != y:
            return not (isinstance(x, int) and isinstance(y, int))
    return True


def layers_apart(dependence: StepDependence) -> list[tuple[Hidden, Hidden]]:
    """Pairs of states (a, b) where a reaches the new b position by position, as in a
    group, and which are different layers only by an integer key of their paths."""
    found: list[tuple[Hidden, Hidden]] = []
    for b in dependence.program.hidden:
        read = dependence.behind[b.outvar].grads
        others = tuple(
            a
            for a in dependence.program.hidden
            if a.varshape == b.varshape
            and not _may_join(a, b)
            and read & (dependence.bit[a.invar] | dependence.new_bit[a.outvar])
        )
        if others:
            positions = positions_of_paths(dependence, others, (b,), (*others, b))
            found += [(a, b) for a in others if _stays(a, positions)]
    return found
