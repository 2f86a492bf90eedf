"""How the traces of dense products are stored and solved.

Letters: t steps, n axes of y that w does not have, w axes of the weight, h positions, c
contracted axes.
"""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import box_of, factors_for, picked, sum_type, summed_by
from ..compiled_step import Box, Components, Jacobian, Operands
from ..split import Split, current_split, runs_on_mesh, spec_of, summed_over
from . import kernels
from .whole_traces import WholeTrace, has_kernel

if TYPE_CHECKING:
    from .dense import DenseUse


def axes_of_mesh(
    split: Split, sample: str, letters: str, sizes: dict[str, int]
) -> dict[str, tuple[str, ...]]:
    """The axes of the mesh for the letter of samples, and for the last of others."""
    found = {sample: split.of_samples(sizes[sample])} if sample else {}
    if letters and letters[-1] != sample:
        found[letters[-1]] = split.of_neurons(sizes[letters[-1]])
    return found


class _Block(NamedTuple):
    """A trace before a block, and what :meth:`DenseTrace.solve` reads to advance it.

    ``product`` and ``credit`` lie beside the trace, with axes of length one where they
    do not depend on it.
    """

    trace: Components
    xs: jax.Array
    rows: Components
    product: Jacobian
    credit: Components


@dataclass(frozen=True, eq=False)
class DenseTrace:
    """(n, w): the axes n of y that w does not have, samples as a rule, and those of w
    in its own order, so that an update reads both along their rows. Of y only the part
    that reaches the group is kept.

    Samples are solved one after the other: the trace of each is read and written once a
    block, while it is in the cache. Each of several devices does so with its own.
    """

    use: DenseUse
    positions: np.ndarray

    @cached_property
    def box(self) -> Box:
        """The part of y that reaches the group."""
        return box_of(self.positions)

    @cached_property
    def _axes(self) -> str:
        axes = self.use.axes
        return ''.join(c for c in axes.y if c not in axes.weight) + axes.weight

    @property
    def shape(self) -> tuple[int, ...]:
        axes = self.use.axes
        sizes = dict(zip(axes.weight, self.use.weight.shape, strict=True))
        sizes |= dict(zip(axes.y, (p.stop - p.start for p in self.box), strict=True))
        return tuple(sizes[c] for c in self._axes)

    def _here(self, values: jax.Array) -> jax.Array:
        """Values of the positions at the part of y that reaches them, beside the
        trace."""
        here = picked(values, self.positions[self.box])
        y = self.use.axes.y
        kept = ''.join(c for c in self._axes if c in y)
        sizes = dict(zip(y, here.shape, strict=True))
        beside = [sizes.get(c, 1) for c in self._axes]
        return jnp.einsum(f'{y}->{kept}', here).reshape(beside)

    def solve(
        self,
        trace: Components,
        fixed: Operands,
        steps: Operands,
        rows: Components,
        product: Jacobian,
        credit: Components,
        y_bars: jax.Array | None = None,
    ) -> tuple[Components, jax.Array]:
        """P_0 ε_0 + Σ_t P_t ∂h_t/∂w and γ_0 · ε_0; see :class:`SummingLayout`."""
        x, _, y, _, _ = self.use.axes
        boxes = dict(zip(y, self.box, strict=True))
        xs = steps[1 - self.use.operand][:, *(boxes.get(c, slice(None)) for c in x)]
        parts = [row[:, *self.box] for row in rows.values()]
        xs, *parts = factors_for(self.use.weight.dtype, xs, *parts)
        rows = dict(zip(rows, parts, strict=True))
        product = {at: self._here(p) for at, p in product.items()}
        credit = {s: self._here(g) for s, g in credit.items()}
        block = _Block(trace, xs, rows, product, credit)
        if self._fits_kernel(len(xs)) and has_kernel(self.shape, (block, y_bars)):
            name = 'dense_visit' if len(xs) == 1 else 'span_visit'
            return kernels.run(
                name, block, y_bars, plain=self._at_once, by=self._by_kernel
            )
        new, total = self._by_sample_or_device(block)
        if y_bars is not None:
            total = total + self.use.gradient(fixed, steps, y_bars)
        return new, total

    def sums_steps(self, dtype: Any, length: int) -> bool:
        """Whether a kernel visits the trace after one step, and the trace has all of
        y."""
        if length > 1:
            return False
        whole = all(
            part == slice(0, size)
            for part, size in zip(self.box, self.use.result.shape, strict=True)
        )
        stored = jax.ShapeDtypeStruct(self.shape, dtype)
        return whole and self._fits_kernel(1) and has_kernel(self.shape, stored)

    def _by_sample_or_device(self, block: _Block) -> tuple[Components, jax.Array]:
        """The trace after a block and γ · ε before it in the shape of w: sample by
        sample, or on each device for its own part."""
        split, sample = current_split(), self.use.sample_letter
        if not sample or (runs_on_mesh() and split is None):
            return self._at_once(block)
        if split is None:
            new, total = self._by_sample(block)
        else:
            new, total = self._on_each_device(split, block)
        return new, self._as_weight(total, self._axes[1:])

    def _at_once(
        self, block: _Block, y_bars: jax.Array | None = None
    ) -> tuple[Components, jax.Array]:
        """All samples together."""
        letters = (self._axes, self.use.axes.x, self.use.axes.y)
        new, total = self._solve(*letters, block)
        if y_bars is not None:
            total = total + self._drive(*letters, block.xs, y_bars, total.dtype)
        return new, self._as_weight(total, self._axes)

    @cached_property
    def _parts(self) -> tuple[str, str, str] | None:
        """The axes of the trace as those of samples, and the contracted and the free
        ones of w; None if they are not next to each other."""
        x, weight, _, contracted, shared = self.use.axes
        inputs = ''.join(c for c in weight if c in contracted)
        free = ''.join(c for c in weight if c not in contracted)
        samples = self._axes[: len(self._axes) - len(weight)]
        in_x = ''.join(c for c in x if c not in contracted)
        together = weight in (inputs + free, free + inputs)
        fits = together and inputs and free and not shared and in_x == samples
        return (samples, inputs, free) if fits else None

    def _fits_kernel(self, length: int) -> bool:
        """Whether there is a kernel for this trace and so many steps."""
        if self._parts is None:
            return False
        inputs_first = self.use.axes.weight.startswith(self._parts[1])
        return length == 1 or inputs_first

    def _by_kernel(
        self, visit: Callable[..., Any], block: _Block, y_bars: jax.Array | None
    ) -> tuple[Components, jax.Array]:
        """One visit by a kernel: the trace, and γ · ε in the shape of w."""
        new, total = self._visit(visit, block, y_bars)
        return new, self._as_weight(total, self.use.axes.weight)

    def _visit(
        self,
        visit: Callable[..., Any],
        block: _Block,
        y_bars: jax.Array | None = None,
    ) -> tuple[Components, jax.Array]:
        """The same, with γ · ε of the part of w that the trace has. Kernels take one axis
        each for samples, inputs and outputs."""
        assert self._parts is not None
        samples, inputs, free = self._parts
        own = self.use.axes
        # One device may have a part of the samples and of the outputs only.
        stored = next(iter(block.trace.values())).shape
        sizes = dict(zip(self._axes, stored, strict=True))
        size = lambda axes: math.prod(sizes[c] for c in axes)
        flat = lambda values, axes: values.reshape(-1, size(samples), size(axes))
        first = own.weight.startswith(inputs)
        last = (inputs, free) if first else (free, inputs)
        shape = (size(samples), *map(size, last))
        old = {s: e.reshape(shape) for s, e in block.trace.items()}
        xs = flat(jnp.einsum(f't{own.x}->t{samples}{inputs}', block.xs), inputs)
        of_result = lambda row: flat(
            jnp.einsum(f't{own.y}->t{samples}{free}', row), free
        )
        rows = {s: of_result(row) for s, row in block.rows.items()}
        factors = {at: flat(p, free)[0] for at, p in block.product.items()}
        credits = {s: flat(c, free)[0] for s, c in block.credit.items()}
        if len(xs) == 1:
            rows = {s: row[0] for s, row in rows.items()}
            y_bar = None if y_bars is None else of_result(y_bars)[0]
            new, total = visit(old, xs[0], rows, factors, credits, first, y_bar)
        else:
            new, total = visit(old, xs, rows, factors, credits)
        total = total.reshape([sizes[c] for c in own.weight])
        return {s: e.reshape(stored) for s, e in new.items()}, total

    def _by_sample(self, block: _Block) -> tuple[Components, jax.Array]:
        """The trace after a block and the sum of γ · ε before it, sample by sample."""
        x, _, y, _, _ = self.use.axes
        first = next(iter(block.trace.values()))
        if len(first) == 1:
            new, total = self._solve(self._axes, x, y, block)
            return new, total[0]
        sample, rest = y[0], self._axes[1:]
        block = block._replace(
            xs=jnp.moveaxis(block.xs, 1 + x.index(sample), 0),
            rows={s: jnp.moveaxis(row, 1, 0) for s, row in block.rows.items()},
        )
        x, y = x.replace(sample, ''), y[1:]

        def one(total: jax.Array, at: _Block) -> tuple:
            new, found = self._solve(rest, x, y, at)
            return total + found, new

        start = jnp.zeros(first.shape[1:], sum_type(self.use.trace_dtype))
        found: Any = jax.lax.scan(one, start, block)
        total, new = found
        return new, total

    def _on_each_device(
        self, split: Split, block: _Block
    ) -> tuple[Components, jax.Array]:
        """The same on each device, for its own samples and neurons; by the kernel where
        there is one."""
        x, _, y, _, _ = self.use.axes
        sample, axes = y[0], self._axes
        sizes = dict(zip(axes, self.shape, strict=True))
        over = axes_of_mesh(split, sample, axes, sizes)
        samples = over.get(sample, ())
        # Values beside the trace have axes of length one where y has none.
        beside = spec_of(axes, {c: a for c, a in over.items() if c in y})
        of_trace, of_weight = spec_of(axes, over), spec_of(axes[1:], over)
        of_x, of_y = spec_of(f't{x}', over), spec_of(f't{y}', over)

        def own(*given: Any) -> tuple:
            block = _Block(*given)
            stored = next(iter(block.trace.values())).shape
            by_kernel = self._fits_kernel(len(block.xs)) and has_kernel(stored, block)
            run = self._by_sample
            if by_kernel and axes[1:] == self.use.axes.weight:
                name = 'dense_visit' if len(block.xs) == 1 else 'span_visit'
                run = functools.partial(
                    kernels.run, name, plain=self._by_sample, by=self._visit
                )
            new, total = run(block)
            return new, summed_over(total, samples)

        specs = (of_trace, of_x, of_y, beside, beside)
        return split.on_each_device(own, specs, (of_trace, of_weight))(*block)

    def _solve(
        self, axes: str, x: str, y: str, block: _Block
    ) -> tuple[Components, jax.Array]:
        """The trace after a block and γ · ε before it, of one sample or of all."""
        trace, xs, rows, product, credit = block
        dtype = sum_type(self.use.trace_dtype)
        old = {s: e.astype(dtype) for s, e in trace.items()}
        terms = [credit[s] * e for s, e in old.items() if s in credit]
        zero = jnp.zeros(next(iter(old.values())).shape, dtype)
        found = sum(terms[1:], terms[0]).astype(dtype) if terms else zero
        new = {}
        for s in trace:
            terms = [product[s, r] * e for r, e in old.items() if (s, r) in product]
            if s in rows:
                terms.append(self._drive(axes, x, y, xs, rows[s], dtype))
            total = sum(terms[1:], terms[0]) if terms else zero
            new[s] = total.astype(trace[s].dtype)
        return new, found

    def _drive(
        self, axes: str, x: str, y: str, xs: jax.Array, rows: jax.Array, dtype: Any
    ) -> jax.Array:
        """Σ_t x_t ⊗ P_t ∂h_t/∂y_t in the axes of the trace."""
        if len(xs) == 1:
            # One step: a product of numbers, which the sum with the trace takes in.
            sizes = dict(zip(x, xs.shape[1:], strict=True))
            left = jnp.einsum(f'{x}->{"".join(c for c in axes if c in x)}', xs[0])
            left = left.reshape([sizes.get(c, 1) for c in axes])
            sizes = dict(zip(y, rows.shape[1:], strict=True))
            right = jnp.einsum(f'{y}->{"".join(c for c in axes if c in y)}', rows[0])
            return (left * right.reshape([sizes.get(c, 1) for c in axes])).astype(dtype)
        # Without the barrier XLA forms the product by a slower, transposed kernel.
        left = jax.lax.optimization_barrier(jnp.moveaxis(xs, 0, -1))
        subscripts = f'{x}t,t{y}->{axes}'
        return jnp.einsum(subscripts, left, rows, preferred_element_type=dtype)

    def _as_weight(self, found: jax.Array, axes: str) -> jax.Array:
        """γ · ε of a part of y in the shape of w, summed over the axes that w does not
        have."""
        own, weight = self.use.axes, self.use.weight
        part = {c: p for c, p in zip(own.y, self.box, strict=True) if c in own.weight}
        gradient = jnp.einsum(f'{axes}->{own.weight}', found)
        if gradient.shape == weight.shape:
            return gradient
        box = tuple(part.get(c, slice(None)) for c in own.weight)
        return jnp.zeros(weight.shape, gradient.dtype).at[box].set(gradient)


@dataclass(frozen=True, eq=False)
class SharedTrace(WholeTrace):
    """(h, c): each position, and the contracted axes c of the x that it reads.

    Where x has the axes that the positions begin with, samples as a rule, it is read as
    it is; otherwise each position gets its own copy of its x.
    """

    @property
    def _dense(self) -> DenseUse:
        """The use whose result the positions share."""
        return self.use.use

    @property
    def _sources(self) -> np.ndarray:
        """The element of y that reaches each position."""
        return self.use.sources

    @cached_property
    def _at(self) -> dict[str, np.ndarray]:
        """The index along each axis of y that every position reads."""
        places = np.unravel_index(
            np.maximum(self._sources, 0), self._dense.result.shape or (1,)
        )
        return dict(zip(self._dense.axes.y, places, strict=False))

    @cached_property
    def _leading(self) -> int | None:
        """How many axes of the positions x has as well, in order; None if it has axes
        that are none of these."""
        axes = self._dense.axes
        free = [c for c in axes.x if c not in axes.contracted]
        shape = self._sources.shape
        if len(free) > len(shape):
            return None
        for axis, letter in enumerate(free):
            own = np.arange(shape[axis])
            own = own.reshape(-1, *(1,) * (len(shape) - axis - 1))
            reads_own = np.array_equal(self._at[letter], np.broadcast_to(own, shape))
            size = self._sizes[letter]
            if letter in axes.shared or size != shape[axis] or not reads_own:
                return None
        return len(free)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        use = self._dense
        return dict(zip(use.axes.x, use.operand_shape(1 - use.operand), strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        contracted = (self._sizes[c] for c in self._dense.axes.contracted)
        return (*self._sources.shape, *contracted)

    def _rows_of_x(self, xs: jax.Array) -> tuple[jax.Array, str]:
        """The x of every position (t, h, c), and the letters of its axes h."""
        axes, letters = self._dense.axes, self._letters
        free = ''.join(c for c in axes.x if c not in axes.contracted)
        xs = jnp.einsum(f't{axes.x}->t{free}{axes.contracted}', xs)
        if self._leading is not None:
            return xs, letters[: self._leading]
        return xs[:, *(self._at[c] for c in free)], letters

    @property
    def _letters(self) -> str:
        """A letter for each axis of the positions, none of them used elsewhere."""
        taken = set('t' + self._dense.axes.contracted)
        free = (c for c in string.ascii_letters if c not in taken)
        return ''.join(next(free) for _ in self._sources.shape)

    def plus(
        self, trace: jax.Array, fixed: Operands, steps: Operands, rows: jax.Array
    ) -> jax.Array:
        use, h = self._dense, self._letters
        contracted = use.axes.contracted
        xs, rows = factors_for(use.weight.dtype, steps[1 - use.operand], rows)
        xs, x = self._rows_of_x(xs)
        subscripts = f't{h},t{x}{contracted}->{h}{contracted}'
        # States may be of a wider type than y, whose precision a trace has.
        wide = jnp.promote_types(trace.dtype, jnp.result_type(rows, xs))
        return trace + jnp.einsum(subscripts, rows, xs, preferred_element_type=wide)

    def scaled(self, trace: jax.Array, factor: jax.Array) -> jax.Array:
        return factor.reshape(*factor.shape, *(1,) * (trace.ndim - factor.ndim)) * trace

    def gradient(self, trace: jax.Array, credit: jax.Array) -> jax.Array:
        """γ · ε (h, c) in the shape of w, summed over positions that share an
        element."""
        found = self.scaled(trace, credit)
        axes, shape = self._dense.axes, self._dense.weight.shape
        sizes = dict(zip(axes.weight, shape, strict=True))
        free = [c for c in axes.weight if c not in axes.contracted]
        index = np.zeros(self._sources.shape, np.int64)
        for c in free:
            index = index * sizes[c] + self._at[c]
        index = np.where(self._sources >= 0, index, -1)
        count = len(axes.contracted)
        last = jnp.moveaxis(found, range(found.ndim)[-count:], range(count))
        summed = summed_by(last, index, math.prod(sizes[c] for c in free))
        summed = summed.reshape(*last.shape[:count], *(sizes[c] for c in free))
        return jnp.einsum(f'{axes.contracted}{"".join(free)}->{axes.weight}', summed)
