"""Hidden groups: states of one shape coupled position by position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from ..compat import Jaxpr, Var, evaluate
from ..errors import NotSupportedError, three_parts
from ..program import Hidden, Path, slice_between
from ..program.step import path_name
from .facts import Facts
from .positions import Positions

T = TypeVar('T')


def jacrev_last_dim(fn: Callable[[jax.Array], jax.Array], hid_vals: jax.Array) -> jax.Array:
    """Jacobian along the last axis only: ``[..., i, j] = ∂fn_i/∂hid_j`` at each leading index.

    Right when ``fn`` keeps leading indices apart: one reverse pass for each state.

    >>> import jax.numpy as jnp
    >>> jacrev_last_dim(lambda h: h[..., ::-1] ** 2, jnp.array([[1.0, 2.0]])).tolist()
    [[[0.0, 4.0], [2.0, 0.0]]]
    """
    new, pull = jax.vjp(fn, hid_vals)
    rows = [pull(jnp.zeros_like(new).at[..., i].set(1))[0] for i in range(new.shape[-1])]
    return jnp.stack(rows, axis=-2)


def group_merging(groups: Iterable[Iterable[T]]) -> list[frozenset[T]]:
    """Merge sets that intersect, until none do.

    >>> [sorted(g) for g in group_merging([{1, 2}, {2, 3}, {4}])]
    [[1, 2, 3], [4]]
    """
    merged: list[set[T]] = []
    for group in map(set, groups):
        touching = [m for m in merged if m & group]
        merged = [m for m in merged if not m & group] + [group.union(*touching)]
    return [frozenset(m) for m in merged]


def _on_last_axis(state: Any) -> bool:
    """True for a state that keeps several states of its positions on its last axis."""
    return hasattr(state, 'name2index')


def _is_complex(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.complexfloating)


class HiddenGroup(NamedTuple):
    """Hidden states of one shape, coupled position by position.

    ``transition_jaxpr`` leads from old to new values along position-keeping paths; everything else
    it reads is in ``transition_jaxpr_constvars``. Complex states count as two: real and imaginary.
    """

    index: int  # type: ignore[assignment]
    hidden_paths: tuple[Path, ...]
    hidden_states: tuple[Any, ...]
    hidden_invars: tuple[Var, ...]
    hidden_outvars: tuple[Var, ...]
    transition_jaxpr: Jaxpr
    transition_jaxpr_constvars: tuple[Var, ...]

    @property
    def varshape(self) -> tuple[int, ...]:
        """Shape of the positions."""
        shape = self.hidden_invars[0].aval.shape
        return shape[:-1] if _on_last_axis(self.hidden_states[0]) else shape

    @property
    def num_state(self) -> int:
        """States per position."""
        return sum(self._widths)

    @property
    def _widths(self) -> list[int]:
        avals = [v.aval for v in self.hidden_invars]
        counts = [a.shape[-1] if _on_last_axis(s) else 1 for s, a in zip(self.hidden_states, avals, strict=True)]
        return [n * (2 if _is_complex(a) else 1) for n, a in zip(counts, avals, strict=True)]

    def check_consistent_varshape(self) -> None:
        """Raise unless all states have one shape."""
        shapes = {path_name(p): tuple(s.varshape) for p, s in zip(self.hidden_paths, self.hidden_states, strict=True)}
        if len(set(shapes.values())) > 1:
            raise NotSupportedError(
                three_parts(
                    f'a hidden group of states with shapes {shapes}',
                    'states of one group share their positions, so their shapes must be equal',
                    'states of one shape, or states that do not reach each other position by position',
                )
            )

    def transition(self, hidden_vals: Sequence[jax.Array], input_vals: Sequence[Any]) -> list[jax.Array]:
        """New hidden values from old ones; ``input_vals`` in the order of the constvars."""
        return evaluate(self.transition_jaxpr, input_vals, *hidden_vals)

    def diagonal_jacobian(self, hidden_vals: Sequence[jax.Array], input_vals: Sequence[Any]) -> jax.Array:
        """D_t: ``(*varshape, num_state, num_state)``, ``[..., i, j] = ∂new_i/∂old_j``."""

        def step(old: jax.Array) -> jax.Array:
            return self.concat_hidden(self.transition(self.split_hidden(old), input_vals))

        return jacrev_last_dim(step, self.concat_hidden(hidden_vals))

    def concat_hidden(self, vals: Sequence[Any]) -> jax.Array:
        """Stack the states, without units, along a new last axis."""
        return jnp.stack(self.components(vals), axis=-1)

    def split_hidden(self, array: jax.Array) -> list[jax.Array]:
        """The inverse of :meth:`concat_hidden`: one array for each state."""
        return self.from_components([array[..., i] for i in range(array.shape[-1])])

    @property
    def owners(self) -> list[int]:
        """The number of the hidden state that each component belongs to."""
        return [k for k, width in enumerate(self._widths) for _ in range(width)]

    def components(self, vals: Sequence[Any]) -> list[jax.Array]:
        """One array of the shape of the positions for each state of a position."""
        found = []
        for state, value in zip(self.hidden_states, vals, strict=True):
            value = jnp.asarray(getattr(value, 'mantissa', value))
            for real in [value.real, value.imag] if jnp.iscomplexobj(value) else [value]:
                found += [real[..., i] for i in range(real.shape[-1])] if _on_last_axis(state) else [real]
        return found

    def from_components(self, components: Sequence[jax.Array]) -> list[jax.Array]:
        """The inverse of :meth:`components`: one array for each state."""
        values, rest = [], list(components)
        for state, var, width in zip(self.hidden_states, self.hidden_invars, self._widths, strict=True):
            mine, rest = rest[:width], rest[width:]
            half = width // 2 if _is_complex(var.aval) else width
            parts = [jnp.stack(p, -1) if _on_last_axis(state) else p[0] for p in (mine[:half], mine[half:]) if p]
            values.append((jax.lax.complex(*parts) if len(parts) == 2 else parts[0]).astype(var.aval.dtype))
        return values

    def dict(self) -> dict[str, Any]:
        """The record as a dictionary."""
        return self._asdict()

    def __repr__(self) -> str:
        names = ', '.join(path_name(p) for p in self.hidden_paths)
        return f'HiddenGroup({self.index}: {names}; positions {self.varshape}, {self.num_state} state(s) each)'


def different_layers(a: Path, b: Path) -> bool:
    """True for paths that part at an integer key: ``layers.0`` and ``layers.1``."""
    for x, y in zip(a, b, strict=False):
        if x != y:
            return isinstance(x, int) and isinstance(y, int)
    return False


def group_hidden(facts: Facts) -> list[tuple[Hidden, ...]]:
    """Sort the hidden states of a program into groups, in the program's order.

    State a joins state b when its value, old or new, reaches the new b position by position.
    """
    hidden = facts.program.hidden
    links: list[tuple[int, int]] = []
    for b, target in enumerate(hidden):
        mates = [a for a, h in enumerate(hidden) if h.varshape == target.varshape and _may_join(h, target)]
        if mates == [b]:
            continue
        through = tuple(h for h in hidden if _may_join(h, target))
        found = facts.positions(tuple(hidden[a] for a in mates), (target,), through)
        links += [(a, b) for a in mates if a != b and _stays(hidden[a], found)]
    groups = [frozenset({i}) for i in range(len(hidden))]
    for link in links:
        merged = group_merging([*groups, set(link)])
        if all(_may_join(hidden[a], hidden[b]) for g in merged for a, b in combinations(sorted(g), 2)):
            groups = merged
    return [tuple(hidden[i] for i in sorted(g)) for g in sorted(groups, key=min)]


def _stays(state: Hidden, found: Positions) -> bool:
    """True if the state, old or new, reaches the target at its own position."""
    labels = [found.labels.get(v) for v in (state.invar, state.outvar)]
    return any(x is not None and bool((x == state.positions).any()) for x in labels)


def _may_join(a: Hidden, b: Hidden) -> bool:
    return not different_layers(a.path, b.path)


def make_group(index: int, group: tuple[Hidden, ...], facts: Facts, positions: Positions) -> HiddenGroup:
    """The record of a group, with its transition program."""
    old, new = tuple(h.invar for h in group), tuple(h.outvar for h in group)
    jaxpr = slice_between(facts.program.equations, old, new, positions.cuts, positions.edges)
    record = HiddenGroup(
        index, tuple(h.path for h in group), tuple(h.state for h in group), old, new, jaxpr, tuple(jaxpr.constvars)
    )
    record.check_consistent_varshape()
    return record
