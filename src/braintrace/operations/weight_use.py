"""Uses of weights: y = op(x, w) as rows ⊗ features, which ``trace_layout.py`` explains;
those of element-wise weights, of values that several positions read, and of operations of
any kind.

Letters: t steps, y elements of the result, w elements of the weight, h positions of the
group.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import cast, factors_for, padded, picked, sum_type, summed_by
from ..compat import Equation, evaluate_equation
from ..compiled_step import Box, Letters, Operands, Shares, TraceLayout
from ..split import Split, current_split
from .labels import NONE
from .trace_layout import FullTrace, Trace

LETTERS = string.ascii_letters.replace('t', '')
"""Letters for axes; t counts steps."""


@dataclass(frozen=True, eq=False)
class BaseUse:
    """One use of a weight.

    ``apply(operands)`` gives y; ``operand`` is the number of the weight. An operation
    states :attr:`letters`, :meth:`features`, :meth:`rows` and :meth:`as_weight`; all else
    follows from them. Without letters gradients are those of reverse mode, and the trace
    is the full influence.
    """

    apply: Callable[[Sequence[Any]], Any]
    operand: int
    operands: tuple[jax.ShapeDtypeStruct, ...]
    result: jax.ShapeDtypeStruct

    @property
    def weight(self) -> jax.ShapeDtypeStruct:
        """Shape and type of the weight."""
        return self.operands[self.operand]

    @property
    def input(self) -> int | None:
        """The operand x if y is linear in both x and w."""
        return None

    @property
    def letters(self) -> Letters | None:
        """The axes of features, rows, trace and weight."""
        return None

    def features(self, fixed: Operands, steps: Operands, length: int) -> jax.Array:
        """(t, ...): what rows are multiplied with; x itself where nothing else is
        stated."""
        assert self.input is not None
        return self.stacked(self.input, fixed, steps, length)

    def rows(self, y: jax.Array) -> jax.Array:
        """Values of y in the axes of rows."""
        return y

    def as_weight(self, values: jax.Array) -> jax.Array:
        """Values with the letters of the weight in its shape."""
        return values.reshape(self.weight.shape)

    def layout(self, positions: np.ndarray, shape: tuple[int, ...]) -> TraceLayout:
        """The storage of its trace."""
        if self.letters is None:
            return FullTrace(self, positions, shape)
        return Trace(self, positions)

    def stacked(
        self, k: int, fixed: Operands, steps: Operands, length: int
    ) -> jax.Array:
        """An operand of every step; one that stays the same is repeated."""
        if k in steps:
            return steps[k]
        x = jnp.asarray(fixed[k])
        return jnp.broadcast_to(x, (length, *x.shape))

    def run(self, operands: Operands, weight: Any) -> Any:
        """y of one step."""
        count = range(len(self.operands))
        return self.apply([weight if k == self.operand else operands[k] for k in count])

    def gradient(
        self,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None = None,
        xs: jax.Array | None = None,
    ) -> jax.Array | Shares:
        """Σ_t of y_bars[t] · ∂y_t/∂w in the shape of w; see :class:`WeightUse`."""
        split = current_split()
        sample = self.letters.sample if self.letters else ''
        if split is None or split.shares == 1 or not sample:
            return self.summed(fixed, steps, y_bars, box, xs)
        assert self.letters is not None
        size = self.result.shape[self.letters.y.index(sample)]
        if not split.of_samples(size):
            return self.summed(fixed, steps, y_bars, box, xs)
        return self._by_share(split, sample, fixed, steps, y_bars, box, xs)

    def _by_share(
        self,
        split: Split,
        sample: str,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None,
        xs: jax.Array | None,
    ) -> jax.Array | Shares:
        """One term for each share of the samples; the partitioner leaves each where
        these samples are."""
        assert self.letters is not None
        y, *operands = (self.letters.y, *self.letters.operands)
        axes = [own.find(sample) for own in operands]

        def parted(x: Any, axis: int) -> Any:
            """Shares along an axis, if there is one: -1 is none."""
            if axis < 0:
                return x
            parts = (split.shares, x.shape[axis] // split.shares)
            return x.reshape(*x.shape[:axis], *parts, *x.shape[axis + 1 :])

        at_fixed = {k: axes[k] for k in fixed}
        # Behind the axis of steps.
        at_steps = {k: axes[k] + 1 if axes[k] >= 0 else -1 for k in steps}
        y_bars, at_y = padded(y_bars, box, self.result.shape), y.index(sample) + 1
        at_x = -1
        if xs is not None and self.input is not None:
            at_x = axes[self.input] + 1
        elif xs is not None and xs.ndim > 1:
            # Sums of features, which have the axes of y.
            xs, at_x = padded(xs, box, self.result.shape), at_y
        given = (fixed, steps, y_bars, xs)
        at = (at_fixed, at_steps, at_y, None if xs is None else at_x)
        own = lambda fixed, steps, y_bars, xs: self.summed(
            fixed, steps, y_bars, None, xs
        )
        mapped = jax.tree.map(lambda axis: None if axis < 0 else axis, at)
        terms = jax.vmap(own, mapped)(*jax.tree.map(parted, given, at))
        return Shares(split.by_share(terms))

    def summed(
        self,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None = None,
        xs: jax.Array | None = None,
    ) -> jax.Array:
        """The same over all devices: by products of features and rows for a linear use
        with letters, by reverse mode over all steps at once for others."""
        y_bars = padded(y_bars, box, self.result.shape)
        if xs is not None:
            assert self.input is not None
            steps = {**steps, self.input: xs}
        if self.input is not None and self.letters is not None:
            return self._product(fixed, steps, y_bars)
        # Data in the types of operands: sums of them may be held in others.
        is_data = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
        steps = {
            k: cast(x, self.operands[k].dtype) if is_data(x) else x
            for k, x in steps.items()
        }

        def block(w: Any) -> Any:
            one = lambda step: self.run({**fixed, **step}, w)
            return jax.vmap(one, axis_size=len(y_bars))(steps)

        y, pull = jax.vjp(block, fixed[self.operand])
        return pull(cast(y_bars, y.dtype))[0]

    def _product(
        self, fixed: Operands, steps: Operands, y_bars: jax.Array
    ) -> jax.Array:
        """Σ_t of features times rows, one step after the other: features of all steps
        may be many times as large as x."""
        letters, data = self.letters, self.input
        assert letters is not None
        assert data is not None
        xs = self.stacked(data, fixed, steps, len(y_bars))
        xs, y_bars = factors_for(self.weight.dtype, xs, y_bars)
        dtype = sum_type(jnp.result_type(xs, y_bars))

        def step(total: Any, at: tuple) -> tuple:
            x, y_bar = at
            one = self.features(fixed, {**steps, data: x[None]}, 1)[0]
            product = f'{letters.features},{letters.rows}->{letters.weight}'
            rows = self.rows(y_bar)
            more = jnp.einsum(product, one, rows, preferred_element_type=dtype)
            return total + more, None

        first = jax.tree.map(lambda x: x[0], (xs, y_bars))
        shape = jax.eval_shape(lambda at: step(0, at)[0], first).shape
        total, _ = jax.lax.scan(step, jnp.zeros(shape, dtype), (xs, y_bars))
        return cast(self.as_weight(total), sum_type(self.weight.dtype))


U = TypeVar('U', bound=BaseUse)


def bind(
    kind: Callable[..., U], eqn: Equation, operand: int, result: int, *more: Any
) -> U:
    """The use of one operand of an equation, for one of its results."""
    shapes = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
    aval = eqn.outvars[result].aval
    apply = lambda operands: evaluate_equation(eqn, operands)[result]
    return kind(
        apply, operand, shapes, jax.ShapeDtypeStruct(aval.shape, aval.dtype), *more
    )


@dataclass(frozen=True, eq=False)
class AnyUse(BaseUse):
    """An operation of any kind. ``data``: the operand x, if y is known to be linear in it
    and in w."""

    data: int | None = None

    @property
    def input(self) -> int | None:
        return self.data


@dataclass(frozen=True, eq=False)
class ElementwiseUse(BaseUse):
    """A bias, gain, threshold, time constant or scalar."""

    is_sum: bool = False

    @cached_property
    def letters(self) -> Letters:  # type: ignore[override]
        y = LETTERS[: len(self.result.shape)]

        def along(x: jax.ShapeDtypeStruct) -> str:
            # An operand may have axes of length one, or none at all.
            sizes = zip(x.shape, self.result.shape, y, strict=False)
            return ''.join(c if n == own else '.' for n, own, c in sizes)

        operands = tuple(map(along, self.operands))
        weight = operands[self.operand].replace('.', '')
        features = '' if self.is_sum else y
        return Letters(features, y, y, weight, operands, y, self.is_sum)

    def features(self, fixed: Operands, steps: Operands, length: int) -> jax.Array:
        """∂y/∂w at every element of y; one number for all where y is a sum with w."""
        if self.is_sum:
            return jnp.ones(length, self.result.dtype)
        weight = fixed[self.operand]

        def slope(step: Operands) -> jax.Array:
            y = lambda w: self.run({**fixed, **step}, w)
            return jax.jvp(y, (weight,), (jnp.ones_like(weight),))[1]

        return jax.vmap(slope, axis_size=length)(steps)

    def summed(
        self,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None = None,
        xs: jax.Array | None = None,
    ) -> jax.Array:
        if xs is None:
            return super().summed(fixed, steps, y_bars, box)
        # Numbers, or sums of features.
        time = 't' if xs.ndim == 1 else 't...'
        whole = padded(
            jnp.einsum(f't...,{time}->...', y_bars, xs), box, self.result.shape
        )
        return self.as_weight(
            jnp.einsum(f'{self.letters.rows}->{self.letters.weight}', whole)
        )


@dataclass(frozen=True, eq=False)
class SharedUse(BaseUse):
    """A use whose result has elements that several positions read.

    Seen from the positions it has one element a position, y' = y[sources], and their
    gradients add up where they share an element.
    """

    use: BaseUse
    sources: np.ndarray

    @classmethod
    def of(cls, use: BaseUse, sources: np.ndarray) -> SharedUse:
        """``sources``: the element of y that reaches each position, -1 for none."""
        result = jax.ShapeDtypeStruct(sources.shape, use.result.dtype)
        return cls(use.apply, use.operand, use.operands, result, use, sources)

    @property
    def positions(self) -> np.ndarray:
        """The position of each element of y': its own, or none."""
        own = np.arange(self.sources.size).reshape(self.sources.shape)
        return np.where(self.sources >= 0, own, NONE).astype(np.int32)

    @property
    def input(self) -> int | None:
        return self.use.input

    @cached_property
    def _at(self) -> dict[str, np.ndarray]:
        """The index along each axis of y that every position reads."""
        assert self.use.letters is not None
        shape = self.use.result.shape or (1,)
        places = np.unravel_index(np.maximum(self.sources, 0), shape)
        return dict(zip(self.use.letters.rows, places, strict=False))

    @property
    def _summed(self) -> str:
        """The letters of the weight that y does not have."""
        own = self.use.letters
        assert own is not None
        return ''.join(c for c in own.features if c in own.weight and c not in own.rows)

    @cached_property
    def _leading(self) -> int:
        """How many axes the positions begin with that features have as well, in order:
        samples as a rule. Each position reads its own."""
        own, rank = self.use.letters, self.sources.ndim
        assert own is not None
        free = [c for c in own.features if c in own.rows]
        if len(free) > rank or any(c in own.weight for c in free):
            return 0
        return len(free) if all(self._runs(c, k) for k, c in enumerate(free)) else 0

    def _runs(self, letter: str, axis: int) -> bool:
        """Whether an axis of the positions runs along an axis of y."""
        own, shape = self.use.letters, self.sources.shape
        if own is None or letter not in self._at:
            return False
        index = np.arange(shape[axis]).reshape(-1, *(1,) * (len(shape) - axis - 1))
        size = self.use.result.shape[own.rows.index(letter)]
        is_own = np.array_equal(self._at[letter], np.broadcast_to(index, shape))
        return size == shape[axis] and is_own

    @cached_property
    def letters(self) -> Letters | None:  # type: ignore[override]
        """Those of positions; None where rows of y are more than its elements."""
        own = self.use.letters
        if own is None or type(self.use).rows is not BaseUse.rows:
            return None
        # Samples keep their letter, so that operands name them as before.
        taken = {
            c for letters in (*own.operands, own.rows, own.weight) for c in letters
        }
        fresh = iter(c for c in LETTERS if c not in taken)
        samples = [k for k in range(self.sources.ndim) if self._runs(own.sample, k)]
        h = ''.join(
            own.sample if k in samples[:1] else next(fresh)
            for k in range(self.sources.ndim)
        )
        features = (
            (h[: self._leading] or h) if set(own.features) & set(own.rows) else ''
        )
        trace = h + self._summed
        return Letters(
            features + self._summed,
            h,
            trace,
            trace,
            own.operands,
            is_sum=own.is_sum,
            of_positions=own.sample if samples else '',
        )

    def features(self, fixed: Operands, steps: Operands, length: int) -> jax.Array:
        """Those that each position reads: as they are where they have the axes that
        positions begin with, otherwise a copy for each position."""
        xs = self.use.features(fixed, steps, length)
        own = self.use.letters
        assert own is not None
        free = ''.join(c for c in own.features if c in own.rows)
        xs = jnp.einsum(f't{own.features}->t{free}{self._summed}', xs)
        if not free or self._leading:
            return xs
        if free == own.rows and not self._summed:
            return jax.vmap(lambda x: picked(x, self.sources))(xs)
        return xs[:, *(self._at[c] for c in free)]

    def as_weight(self, values: jax.Array) -> jax.Array:
        """Values of positions in the shape of w, added up where they share an
        element."""
        own = self.use.letters
        assert own is not None
        first, rank = self._summed, self.sources.ndim
        last = ''.join(c for c in own.weight if c in own.rows)
        moved = jnp.moveaxis(values, range(rank), range(-rank, 0))
        sizes = dict(zip(own.rows, self.use.result.shape, strict=True))
        index = np.zeros(self.sources.shape, np.int64)
        for c in last:
            index = index * sizes[c] + self._at[c]
        index = np.where(self.sources >= 0, index, -1)
        found = summed_by(moved, index, int(np.prod([sizes[c] for c in last])))
        found = found.reshape(*moved.shape[: len(first)], *(sizes[c] for c in last))
        return self.use.as_weight(jnp.einsum(f'{first}{last}->{own.weight}', found))

    def gradient(
        self,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None = None,
        xs: jax.Array | None = None,
    ) -> jax.Array | Shares:
        return self.use.gradient(fixed, steps, *self._at_elements(y_bars, box, xs))

    def summed(
        self,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None = None,
        xs: jax.Array | None = None,
    ) -> jax.Array:
        return self.use.summed(fixed, steps, *self._at_elements(y_bars, box, xs))

    def _at_elements(
        self, y_bars: jax.Array, box: Box | None, xs: jax.Array | None
    ) -> tuple[jax.Array, None, jax.Array | None]:
        """Gradients (t, y) and what stands for x, from those of y'."""
        if xs is not None and self.input is None:
            # Numbers of each position, which elements of y do not have.
            time = 't' if xs.ndim == 1 else 't...'
            y_bars = jnp.einsum(f't...,{time}->...', y_bars, xs)[None]
            xs = jnp.ones(1, xs.dtype)
        whole, shape = padded(y_bars, box, self.sources.shape), self.use.result.shape
        found = summed_by(whole, self.sources, int(np.prod(shape)))
        return found.reshape(len(found), *shape), None, xs
