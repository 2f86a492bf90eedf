"""Hidden groups: states of one shape coupled position by position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, zip_longest
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..compat import Jaxpr, Var, evaluate
from ..compiled_step import Values
from ..errors import NotSupportedError, three_parts
from ..program import Hidden, Path, slice_between
from ..program.step import path_name
from .cuts import Positions
from .dependence import DependenceThrough, Relevance, StepDependence
from .positions import find_positions

T = TypeVar('T')


def jacrev_last_dim(
    fn: Callable[[jax.Array], jax.Array], hid_vals: jax.Array
) -> jax.Array:
    """Jacobian along the last axis only: ``[..., i, j] = ∂fn_i/∂hid_j`` at each leading
    index.

    The result is correct if ``fn`` does not mix leading indices. It takes one reverse
    pass for each state. Raises an ``AssertionError`` if the numbers of new and old
    states differ.

    >>> import jax.numpy as jnp
    >>> jacrev_last_dim(lambda h: h[..., ::-1] ** 2, jnp.array([[1.0, 2.0]])).tolist()
    [[[0.0, 4.0], [2.0, 0.0]]]
    """
    new, pull = jax.vjp(fn, hid_vals)
    if new.shape[-1:] != hid_vals.shape[-1:]:
        raise AssertionError(
            three_parts(
                f'a function from states of shape {hid_vals.shape} to states of '
                f'shape {new.shape}',
                'the last axis counts the states of a position, of which there are '
                'as many before a step as after it',
                'a function that keeps the length of the last axis',
            )
        )
    rows = [
        pull(jnp.zeros_like(new).at[..., i].set(1))[0] for i in range(new.shape[-1])
    ]
    return jnp.stack(rows, axis=-2)


def group_merging(
    groups: Iterable[Iterable[T]], version: int = 1
) -> list[frozenset[T]]:
    """Merge sets that intersect, until none do.

    ``version``: 0 or 1, for compatibility. Both give the same result.

    >>> [sorted(g) for g in group_merging([{1, 2}, {2, 3}, {4}])]
    [[1, 2, 3], [4]]
    """
    if version not in (0, 1):
        raise ValueError(
            three_parts(
                f'group_merging(..., version={version!r})',
                'there is no such version',
                '0 or 1; both merge alike',
            )
        )
    merged: list[set[T]] = []
    for group in map(set, groups):
        touching = [m for m in merged if m & group]
        merged = [m for m in merged if not m & group] + [group.union(*touching)]
    return [frozenset(m) for m in merged]


def _on_last_axis(state: Any) -> bool:
    """True for a state that keeps several states of its positions on its last axis."""
    return hasattr(state, 'name2index')


def _position_shape(state: Any) -> tuple:
    """Shape of the positions of a state, of whatever class it is."""
    if hasattr(state, 'varshape'):
        return tuple(state.varshape)
    shapes = [jnp.shape(x) for x in jax.tree.leaves(state.value)]
    return shapes[0] if len(shapes) == 1 else tuple(shapes)


def _is_complex(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.complexfloating)


class HiddenGroup(NamedTuple):
    """Hidden states of one shape that depend on each other position by position.

    ``transition_jaxpr`` computes new values from old values along paths that keep
    positions. Its other inputs are in ``transition_jaxpr_constvars``. A complex state
    counts as two states: real and imaginary part.
    """

    index: int  # type: ignore[assignment]
    hidden_paths: list[Path]
    hidden_states: list[Any]
    hidden_invars: list[Var]
    hidden_outvars: list[Var]
    transition_jaxpr: Jaxpr
    transition_jaxpr_constvars: list[Var]

    @property
    def varshape(self) -> tuple[int, ...]:
        """The shape of the positions."""
        if not self.hidden_invars:
            return _position_shape(self.hidden_states[0])
        shape = self.hidden_invars[0].aval.shape
        return shape[:-1] if _on_last_axis(self.hidden_states[0]) else shape

    @property
    def num_state(self) -> int:
        """The number of states at each position."""
        return sum(self._widths)

    @property
    def _avals(self) -> list[Any]:
        """Shape and type of every state: as compiled or, in a group without variables,
        as it is now."""
        if self.hidden_invars:
            return [v.aval for v in self.hidden_invars]
        return [
            jnp.asarray(getattr(s.value, 'mantissa', s.value))
            for s in self.hidden_states
        ]

    @property
    def _widths(self) -> list[int]:
        avals = self._avals
        counts = [
            a.shape[-1] if _on_last_axis(s) else 1
            for s, a in zip(self.hidden_states, avals, strict=True)
        ]
        return [
            n * (2 if _is_complex(a) else 1) for n, a in zip(counts, avals, strict=True)
        ]

    def check_consistent_varshape(self) -> None:
        """Raise :class:`NotSupportedError` unless all states have one shape."""
        shapes = [_position_shape(state) for state in self.hidden_states]
        if len(set(shapes)) > 1:
            # A group built by hand may name fewer paths than it has states.
            names = [path_name(path) for path in self.hidden_paths]
            named = [
                f'{name}: {shape}'
                for name, shape in zip_longest(names, shapes, fillvalue='?')
            ]
            raise NotSupportedError(
                three_parts(
                    f'a hidden group of states with shapes {", ".join(named)}',
                    'states of one group share their positions, so their shapes must '
                    'be equal',
                    'states of one shape, or states that do not reach each other '
                    'position by position',
                )
            )

    def transition(
        self, hidden_vals: Sequence[jax.Array], input_vals: Sequence[Any]
    ) -> list[jax.Array]:
        """New hidden values from old ones. ``input_vals`` are in the order of the
        constvars."""
        return evaluate(self.transition_jaxpr, input_vals, *hidden_vals)

    def diagonal_jacobian(
        self, hidden_vals: Sequence[jax.Array], input_vals: Sequence[Any]
    ) -> jax.Array:
        """D_t: ``(*varshape, num_state, num_state)``.

        ``[..., i, j] = ∂new_i/∂old_j``.
        """

        def step(old: jax.Array) -> jax.Array:
            return self.concat_hidden(
                self.transition(self.split_hidden(old), input_vals)
            )

        return jacrev_last_dim(step, self.concat_hidden(hidden_vals))

    def concat_hidden(self, splitted_hid_vals: Sequence[Any]) -> jax.Array:
        """Stack the states, without units, along a new last axis."""
        return jnp.stack(self.components(splitted_hid_vals), axis=-1)

    def split_hidden(self, concat_hid_vals: jax.Array) -> list[jax.Array]:
        """The inverse of :meth:`concat_hidden`: one array for each state."""
        return self.from_components(
            [concat_hid_vals[..., i] for i in range(concat_hid_vals.shape[-1])]
        )

    @property
    def owners(self) -> list[int]:
        """The number of the hidden state that each component belongs to."""
        return [k for k, width in enumerate(self._widths) for _ in range(width)]

    def components(self, vals: Sequence[Any]) -> list[jax.Array]:
        """One array of the shape of the positions for each state of a position."""
        found = []
        for state, value in zip(self.hidden_states, vals, strict=True):
            value = jnp.asarray(getattr(value, 'mantissa', value))
            for real in (
                [value.real, value.imag] if jnp.iscomplexobj(value) else [value]
            ):
                found += (
                    [real[..., i] for i in range(real.shape[-1])]
                    if _on_last_axis(state)
                    else [real]
                )
        return found

    def old_components(self, values: Mapping[Var, Any]) -> list[jax.Array]:
        """Components of the old states among values."""
        return self.components([values[v] for v in self.hidden_invars])

    def old_states(self, components: Sequence[jax.Array]) -> Values:
        """The old states from their components."""
        states = self.from_components(components)
        return Values(zip(self.hidden_invars, states, strict=True))

    def new_states(self, components: Sequence[jax.Array]) -> Values:
        """The new states from their components."""
        states = self.from_components(components)
        return Values(zip(self.hidden_outvars, states, strict=True))

    def from_components(self, components: Sequence[jax.Array]) -> list[jax.Array]:
        """The inverse of :meth:`components`: one array for each state."""
        values, rest = [], list(components)
        for state, aval, width in zip(
            self.hidden_states, self._avals, self._widths, strict=True
        ):
            mine, rest = rest[:width], rest[width:]
            half = width // 2 if _is_complex(aval) else width
            parts = [
                jnp.stack(p, -1) if _on_last_axis(state) else p[0]
                for p in (mine[:half], mine[half:])
                if p
            ]
            values.append(
                (jax.lax.complex(*parts) if len(parts) == 2 else parts[0]).astype(
                    aval.dtype
                )
            )
        return values

    def dict(self) -> dict[str, Any]:
        """The record as a dictionary."""
        return self._asdict()

    def __repr__(self) -> str:
        names = ', '.join(path_name(p) for p in self.hidden_paths)
        return (
            f'HiddenGroup({self.index}: {names}; positions {self.varshape}, '
            f'{self.num_state} state(s) each)'
        )


def different_layers(a: Path, b: Path) -> bool:
    """True for paths that part at an integer key: ``layers.0`` and ``layers.1``."""
    for x, y in zip(a, b, strict=False):
        if x != y:
            return isinstance(x, int) and isinstance(y, int)
    return False


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


def group_hidden(dependence: StepDependence) -> list[tuple[Hidden, ...]]:
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
    groups = [frozenset({i}) for i in range(len(hidden))]
    for link in links:
        merged = group_merging([*groups, set(link)])
        if all(
            _may_join(hidden[a], hidden[b])
            for g in merged
            for a, b in combinations(sorted(g), 2)
        ):
            groups = merged
    return [tuple(hidden[i] for i in sorted(g)) for g in sorted(groups, key=min)]


def _stays(state: Hidden, found: Positions) -> bool:
    """True if the state, old or new, reaches the target at its own position."""
    labels = [found.labels.get(v) for v in (state.invar, state.outvar)]
    return any(x is not None and bool((x == state.positions).any()) for x in labels)


def _may_join(a: Hidden, b: Hidden) -> bool:
    return not different_layers(a.path, b.path)


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


def make_group(
    index: int,
    group: tuple[Hidden, ...],
    dependence: StepDependence,
    positions: Positions,
) -> HiddenGroup:
    """The record of a group, with its transition program."""
    old, new = [h.invar for h in group], [h.outvar for h in group]
    jaxpr = slice_between(
        dependence.program.equations, old, new, positions.cuts, positions.edges
    )
    record = HiddenGroup(
        index,
        [h.path for h in group],
        [h.state for h in group],
        old,
        new,
        jaxpr,
        list(jaxpr.constvars),
    )
    record.check_consistent_varshape()
    return record
