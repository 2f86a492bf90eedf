"""Hidden groups as documented: their states, variables and transition programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from ..analysis.analysed import Analysed, analyse
from ..analysis.groups import component_count, components_of, states_of
from ..compat import ClosedJaxpr, Jaxpr, Var, evaluate
from ..errors import NotSupportedError, three_parts
from ..frontends.brainstate import path_mapping
from ..program import Path, StepProgram, slice_between
from ..program.bare import program_of_jaxpr
from ..program.step import path_name
from .module_info import extract

T = TypeVar('T')


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
        return shape[:-1] if self._trailing[0] else shape

    @property
    def num_state(self) -> int:
        """The number of states at each position."""
        return sum(map(component_count, self._avals, self._trailing))

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
    def _trailing(self) -> list[bool]:
        """Which states keep several states of a position on their last axis."""
        return [hasattr(state, 'name2index') for state in self.hidden_states]

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
        return jnp.stack(components_of(splitted_hid_vals, self._trailing), axis=-1)

    def split_hidden(self, concat_hid_vals: jax.Array) -> list[jax.Array]:
        """The inverse of :meth:`concat_hidden`: one array for each state."""
        components = [concat_hid_vals[..., i] for i in range(concat_hid_vals.shape[-1])]
        return states_of(components, self._avals, self._trailing)

    def dict(self) -> dict[str, Any]:
        """The record as a dictionary."""
        return self._asdict()

    def __repr__(self) -> str:
        names = ', '.join(path_name(p) for p in self.hidden_paths)
        return (
            f'HiddenGroup({self.index}: {names}; positions {self.varshape}, '
            f'{self.num_state} state(s) each)'
        )


def _position_shape(state: Any) -> tuple:
    """Shape of the positions of a state, of whatever class it is."""
    if hasattr(state, 'varshape'):
        return tuple(state.varshape)
    shapes = [jnp.shape(x) for x in jax.tree.leaves(state.value)]
    return shapes[0] if len(shapes) == 1 else tuple(shapes)


GroupsByPath = dict[Path, HiddenGroup]
Groups = tuple[list[HiddenGroup], GroupsByPath]


def hidden_groups(analysed: Analysed) -> list[HiddenGroup]:
    """The documented records of the groups, with their transition programs."""
    equations = analysed.dependence.program.equations
    groups: list[HiddenGroup] = []
    for group, found in zip(analysed.groups, analysed.positions, strict=True):
        old, new = list(group.hidden_invars), list(group.hidden_outvars)
        jaxpr = slice_between(equations, old, new, found.cuts, found.edges)
        groups.append(
            HiddenGroup(
                len(groups),
                list(group.hidden_paths),
                [h.state for h in group.hidden],
                old,
                new,
                jaxpr,
                list(jaxpr.constvars),
            )
        )
    return groups


def by_path(groups: Sequence[HiddenGroup]) -> GroupsByPath:
    """The group of each hidden state."""
    return path_mapping({path: g for g in groups for path in g.hidden_paths})


def find_hidden_groups_from_minfo(minfo: Any) -> Groups:
    """Hidden groups of a traced module, and the group of each path."""
    return _with_paths(minfo.program)


def find_hidden_groups_from_module(
    model: Any, *model_args: Any, **model_kwargs: Any
) -> Groups:
    """Hidden groups of a module, and the group of each path."""
    return find_hidden_groups_from_minfo(extract(model, *model_args, **model_kwargs))


def find_hidden_groups_from_jaxpr(
    jaxpr: Jaxpr | ClosedJaxpr,
    hidden_outvar_to_invar: Mapping[Var, Var],
    weight_invars: Iterable[Var],
    invar_to_hidden_path: Mapping[Var, Path],
    outvar_to_hidden_path: Mapping[Var, Path],
    path_to_state: Mapping[Path, Any],
) -> Groups:
    """Hidden groups of a jaxpr, and the group of each path, in the order of
    ``path_to_state``.

    The mappings are those of :class:`ModuleInfo`. ``path_to_state`` may also contain
    other states. The constants of an open jaxpr have no known values, so pass a closed
    jaxpr if indices are constants.
    """
    return _with_paths(
        program_of_jaxpr(
            jaxpr,
            hidden_outvar_to_invar,
            weight_invars,
            invar_to_hidden_path,
            outvar_to_hidden_path,
            path_to_state,
        )
    )


def _with_paths(program: StepProgram) -> Groups:
    groups = hidden_groups(analyse(program))
    return groups, by_path(groups)


# ---------------------------------------------------------------- helpers


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
