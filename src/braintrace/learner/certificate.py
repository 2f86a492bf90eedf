"""A descent certificate: does a rule's gradient still point downhill?

The derivative of the loss along any direction is one pass of forward mode, exact and
flat in memory. Along the rule's own gradient g it gives ⟨g_true, g⟩. What g_true has
beside g is estimated: for a random direction u orthogonal to g, ⟨g_true, u⟩ is normal
with the variance |g_true|² - ⟨g_true, g⟩²/|g|², so k of them give it with the error of
a χ² variable of k degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import chdtri

from ..compiled_step import CompiledStep, Key, Values
from ..errors import ArgumentError, UnknownName, one_of, printable, three_parts
from ..program import Parameter
from ..program.step import path_name
from ..solver import Solved
from ..solver.forward import derivatives_along
from ..solver.masking import finite
from .arguments import is_count

_COVERED = 0.9
"""How often the interval of a cosine holds it."""


@dataclass(frozen=True)
class CertificateRow:
    """Compares the gradient g of some parameters with the true gradient.

    ``descent``: ⟨g_true, g⟩/|g|², exact up to rounding. It is 1 if g is the true
    gradient, positive if the loss falls along -g, and NaN if g is zero. ``cosine``: an
    estimate; the true cosine lies between ``cosine_low`` and ``cosine_high`` for 90 of
    100 seeds. ``norm``: |g|. ``true_norm``: |g_true|, estimated.
    """

    name: str
    descent: float
    cosine: float
    cosine_low: float
    cosine_high: float
    norm: float
    true_norm: float

    @property
    def descends(self) -> bool:
        """Whether a small step along -g lowers the loss."""
        return self.descent > 0

    @property
    def cosine_error(self) -> float:
        """Half the width of the interval of the cosine."""
        return (self.cosine_high - self.cosine_low) / 2


@dataclass(frozen=True, repr=False)
class Certificate(CertificateRow):
    """The comparison for all parameters together. ``rows`` are groups of parameters, if
    requested.

    ``name``: the rule. ``steps``: the length of the sequence. ``directions``: the
    number of random directions.
    """

    steps: int
    directions: int
    rows: tuple[CertificateRow, ...] = ()

    def __getitem__(self, name: str) -> CertificateRow:
        found = {row.name: row for row in self.rows}
        if name not in found:
            why = 'it has no row of this name'
            fix = (
                one_of(found, name) if found else 'certificate(..., per_parameter=True)'
            )
            raise UnknownName(three_parts(f'certificate[{name!r}]', why, fix))
        return found[name]

    def _verdict(self) -> str:
        if self.norm == 0:
            return 'the gradient is zero'
        if not math.isfinite(self.descent):
            return 'the derivative is not finite'
        return 'descends' if self.descends else 'does NOT descend'

    def __str__(self) -> str:
        cosine = 'not estimated (directions=0)'
        true_norm = cosine
        if self.directions:
            between = f'{self.cosine_low:.3f} to {self.cosine_high:.3f}'
            cosine = (
                f'{self.cosine:.3f}   90 % interval {between}, '
                f'{self.directions} random directions'
            )
            true_norm = f'{self.true_norm:.4g}'
        descent = '—' if math.isnan(self.descent) else f'{self.descent:.4f}'
        lines = [
            f'{self.name} over {self.steps:,} steps: {self._verdict()}',
            f'⟨g_true, g⟩/|g|²  {descent}   1 where the rule is exact',
            f'cosine            {cosine}',
            f'|g|               {self.norm:.4g}',
            f'|g_true|          {true_norm}',
        ]
        return '\n'.join([*lines, *self._table()])

    __repr__ = __str__

    def _table(self) -> Iterator[str]:
        names = [printable(row.name) for row in self.rows]
        width = max(map(len, ['parameters', *names]))
        if names:
            yield f'{"parameters":{width}}  descent  cosine  90 % interval         |g|'
        for name, row in zip(names, self.rows, strict=True):
            cosines = (row.cosine, row.cosine_low, row.cosine_high)
            cosine, low, high = (_or_dash(x, 6) for x in cosines)
            yield (
                f'{name:{width}}  {_or_dash(row.descent, 7)}  {cosine}  {low} {high}  '
                f'{row.norm:10.3e}'
            )


def _or_dash(number: float, width: int) -> str:
    """A number of a table; a dash for one that is not known."""
    return f'{"—":>{width}}' if math.isnan(number) else f'{number:{width}.3f}'


# ---------------------------------------------------------------- the program


class Measured(NamedTuple):
    """Of each group G of parameters: |g_G|, ⟨g_true, g_G⟩/|g_G|, and (G, k) the
    derivatives along random directions orthogonal to g_G."""

    norms: jax.Array
    along: jax.Array
    across: jax.Array


def certificate_program(
    step: CompiledStep,
    solve: Callable[..., Solved],
    groups: Sequence[Sequence[Key]],
) -> Callable[..., Measured]:
    """The gradient of a sequence by a rule, then forward mode along it and along random
    directions: a function of these, as :func:`random_directions` gives them, and of the
    arguments of ``solve``."""

    def measure(drawn: Values, *given: Any, masked: bool) -> Measured:
        parameters, states, _, inputs, weights, *_ = given
        if masked:
            inputs = finite(inputs, weights == 0)
        gradients = solve(*given, masked=masked).gradients
        member = {v: i for i, group in enumerate(groups) for v in group}

        def of_group(group: jax.Array) -> tuple:
            only = lambda tree: Values(
                (v, jnp.where(member[v] == group, x, 0)) for v, x in tree.items()
            )
            own = only(gradients)
            norm = _norm(own)
            # A complex parameter descends along the conjugate of its gradient.
            unit = jax.tree.map(lambda g: _divided(g.conj(), norm), own)
            others = jax.vmap(lambda u: _orthogonal(u, unit))(only(drawn))
            along = jax.tree.map(
                lambda a, b: jnp.concatenate([a[None], b]), unit, others
            )
            found = derivatives_along(step, parameters, states, inputs, weights, along)
            return norm, found[0], found[1:]

        if len(groups) == 1:
            found = jax.tree.map(lambda x: x[None], of_group(jnp.asarray(0)))
        else:
            # One group after the other: memory does not grow with their number.
            found = jax.lax.map(of_group, jnp.arange(len(groups)))
        return Measured(*found)

    return measure


def check_directions(directions: Any) -> None:
    """Raise unless it is a number of random directions."""
    if not is_count(directions, least=0):
        raise ArgumentError(
            three_parts(
                f'directions={directions!r}',
                'it is the number of random directions that the cosine is estimated '
                'from',
                'a whole number, e.g. 8; 0 if the cosine is not needed',
            )
        )


def random_directions(like: Values, count: int, seed: int) -> Values:
    """(count, ...) independent normal numbers of variance 1, in both parts of complex
    ones."""
    # By NumPy: in the program, each array would add a second to its compilation.
    rng = np.random.default_rng(seed)
    draw = lambda shape: rng.standard_normal((count, *shape), np.float32)
    found = Values()
    for v, x in like.items():
        value = draw(x.shape)
        if jnp.iscomplexobj(x):
            value = value + 1j * draw(x.shape)
        found[v] = jnp.asarray(value, x.dtype)
    return found


def _norm(tree: Any) -> jax.Array:
    """The norm of all numbers; their squares may overflow or vanish."""
    leaves = [jnp.abs(x).astype(jnp.result_type(float)) for x in jax.tree.leaves(tree)]
    largest = jnp.max(jnp.stack([jnp.max(x, initial=0) for x in leaves]))
    squares = sum(jnp.sum(_divided(x, largest) ** 2) for x in leaves)
    return largest * jnp.sqrt(squares)


def _divided(x: jax.Array, by: jax.Array) -> jax.Array:
    """x / by, zero where both are."""
    return jnp.where(by == 0, 0, x / jnp.where(by == 0, 1, by)).astype(x.dtype)


def _orthogonal(direction: Values, unit: Values) -> Values:
    """A direction without its part along a unit vector."""
    dots = [jnp.vdot(unit[v], x).real for v, x in direction.items()]
    dot = sum(dots)
    return Values(
        (v, x - (dot * unit[v]).astype(x.dtype)) for v, x in direction.items()
    )


# ---------------------------------------------------------------- what it says


def certificate_of(
    rule: str, steps: int, names: Sequence[str], found: Measured
) -> Certificate:
    """The certificate from measured numbers; ``names`` of the groups, if each is to
    have a row."""
    norms, along, across = (np.asarray(x, np.float64) for x in found)
    # Along g_G the derivative is known, so only what lies across is estimated.
    norm = float(np.linalg.norm(norms))
    unit = norms / norm if norm else norms
    whole = _numbers(norm, float(along @ unit), float(along @ along), across.sum(0))
    rows = []
    for name, *numbers in zip(
        names, norms, along, along**2, across, strict=bool(names)
    ):
        rows.append(CertificateRow(name, **_numbers(*numbers)))
    directions = across.shape[1]
    return Certificate(
        rule, **whole, steps=steps, directions=directions, rows=tuple(rows)
    )


def _numbers(
    norm: float, slope: float, known: float, across: np.ndarray
) -> dict[str, float]:
    """``slope``: ⟨g_true, g⟩/|g|. ``known``: the part of |g_true|² that was measured.
    ``across``: derivatives along random directions."""
    squares, count = float(across @ across), len(across)

    def cosine(rest: float) -> float:
        true_norm = math.sqrt(known + rest)
        if norm == 0 or true_norm == 0:
            return 1.0 if norm == true_norm else math.nan
        # Rounding must not give more than 1.
        return float(np.clip(slope / true_norm, -1, 1))

    estimates = [math.nan] * 3
    true_norm = math.nan
    if count:
        # A sum of squares is a χ² variable of so many degrees of freedom.
        tail = (1 - _COVERED) / 2
        ends = (chdtri(count, tail), chdtri(count, 1 - tail))
        found = sorted(cosine(squares / end) for end in ends)
        estimates = [cosine(squares / count), *found]
        true_norm = math.sqrt(known + squares / count)
    return {
        'descent': slope / norm if norm else math.nan,
        'cosine': estimates[0],
        'cosine_low': estimates[1],
        'cosine_high': estimates[2],
        'norm': float(norm),
        'true_norm': true_norm,
    }


# ---------------------------------------------------------------- groups of parameters


def parameter_groups(
    parameters: Sequence[Parameter],
    per_parameter: bool,
    groups: Mapping[str, Sequence[Any]] | None,
) -> dict[str, list[Key]]:
    """Variables of the parameters by the name of their group; parameters of no group
    are together in '(others)'."""
    if groups is None:
        if per_parameter:
            return {p.name: [p.invar] for p in parameters}
        return {'': [p.invar for p in parameters]}
    _check_groups(parameters, per_parameter, groups)
    found: dict[str, list[Key]] = {name: [] for name in groups}
    rest: list[Key] = []
    for p in parameters:
        mine = [name for name, starts in groups.items() if _begins(p, starts)]
        (found[mine[0]] if mine else rest).append(p.invar)
    return {**found, '(others)': rest} if rest else found


def _begins(parameter: Parameter, starts: Sequence[Any]) -> bool:
    """Whether a parameter is at, or below, one of these paths."""
    whole = parameter.path + parameter.leaf
    return any(whole[: len(_path(start))] == _path(start) for start in starts)


def _path(given: Any) -> tuple:
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _check_groups(
    parameters: Sequence[Parameter], per_parameter: bool, groups: Any
) -> None:
    """Raise unless each group holds parameters, and no parameter is in two."""
    instead = "groups={'recurrent': [('rnn', 'w')], 'readout': [('out',)]}"
    is_lists = lambda: all(isinstance(x, (list, tuple)) for x in groups.values())
    if not isinstance(groups, Mapping) or not groups or not is_lists():
        why = 'it has lists of paths by name'
        raise ValueError(three_parts(f'groups={groups!r}', why, instead))
    if per_parameter:
        why = 'parameters are taken one by one, or in groups'
        given = 'certificate(..., per_parameter=True, groups=...)'
        raise ValueError(three_parts(given, why, 'one of them'))
    for name, starts in groups.items():
        for start in starts:
            if not any(_begins(p, [start]) for p in parameters):
                names = ', '.join(p.name for p in parameters)
                given = f'{path_name(_path(start))} in group {name!r}'
                why = 'the step reads no such parameter'
                raise ValueError(three_parts(given, why, f'paths of some of {names}'))
    for p in parameters:
        mine = [name for name, starts in groups.items() if _begins(p, starts)]
        if len(mine) > 1:
            given = f'{p.name} in groups {" and ".join(map(repr, mine))}'
            why = 'their rows would count it twice'
            raise ValueError(three_parts(given, why, 'each parameter in one group'))
