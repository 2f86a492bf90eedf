"""How the traces of dense products are stored and solved.

Letters: t steps, n axes of y that w does not have, w axes of the weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from ..arrays import box_of, factors_for, picked, sum_type, trace_type
from ..compiled_step import Box, Components, Jacobian, Letters, Operands
from ..split import Split, current_split, runs_on_mesh, spec_of, summed_over
from . import kernels
from .trace_layout import Trace, advanced, beside, driven
from .whole_traces import has_kernel

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
class DenseTrace(Trace):
    """(n, w): the axes n of y that w does not have, samples as a rule, and those of w
    in its own order, so that an update reads both along their rows. Of y only the part
    that reaches the group is kept.

    Samples are solved one after the other: the trace of each is read and written once a
    block, while it is in the cache (ALIF carried: 8.4 times the forward pass, 12.5 all
    at once); kernels visit it in place (ALIF 183 → 118 ms). Each of several devices does
    so with its own.
    """

    use: DenseUse

    @cached_property
    def box(self) -> Box:
        """The part of y that reaches the group."""
        return box_of(self.positions)

    @cached_property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        letters, part = self.letters, (p.stop - p.start for p in self.box)
        sizes = dict(zip(letters.weight, self.use.weight.shape, strict=True))
        sizes |= dict(zip(letters.rows, part, strict=True))
        return tuple(sizes[c] for c in letters.trace)

    def _beside(self, values: jax.Array) -> jax.Array:
        here = picked(values, self.positions[self.box])
        return beside(here, self.letters.rows, self.letters.trace)

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
        """P_0 ε_0 + Σ_t P_t ∂h_t/∂w and γ_0 · ε_0; see :class:`TraceLayout`."""
        letters = self.letters
        boxes = dict(zip(letters.rows, self.box, strict=True))
        length = next(len(v) for v in (*rows.values(), *steps.values()))
        xs = self.use.features(fixed, steps, length)
        xs = xs[:, *(boxes.get(c, slice(None)) for c in letters.features)]
        parts = [row[:, *self.box] for row in rows.values()]
        xs, *parts = factors_for(self.use.weight.dtype, xs, *parts)
        rows = dict(zip(rows, parts, strict=True))
        product = {at: self._beside(p) for at, p in product.items()}
        credit = {s: self._beside(g) for s, g in credit.items()}
        block = _Block(trace, xs, rows, product, credit)
        if self._fits_kernel(len(xs)) and has_kernel(self.shape, (block, y_bars)):
            name = 'dense_visit' if len(xs) == 1 else 'span_visit'
            return kernels.run(
                name, block, y_bars, plain=self._at_once, by=self._by_kernel
            )
        split = current_split()
        if not letters.sample or (runs_on_mesh() and split is None):
            new, total = self._at_once(block)
        else:
            if split is None:
                new, total = self._by_sample(block)
            else:
                new, total = self._on_each_device(split, block)
            total = self._as_weight(total, letters.trace[1:])
        if y_bars is not None:
            total = total + self.use.summed(fixed, steps, y_bars)
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

    def _at_once(
        self, block: _Block, y_bars: jax.Array | None = None
    ) -> tuple[Components, jax.Array]:
        """The trace after a block and γ · ε before it in the shape of w: all samples
        together."""
        new, total = self._solved(self.letters, block)
        if y_bars is not None:
            total = total + driven(self.letters, block.xs, y_bars, total.dtype)
        return new, self._as_weight(total, self.letters.trace)

    def _solved(self, letters: Letters, block: _Block) -> tuple[Components, jax.Array]:
        """The trace after a block and γ · ε before it, of one sample or of all."""
        trace, xs, rows, product, credit = block
        dtype = sum_type(trace_type(self.use))
        plus = lambda total, s: (
            total + driven(letters, xs, rows[s], dtype) if s in rows else total
        )
        return advanced(trace, product, credit, plus, dtype)

    def _as_weight(self, found: jax.Array, axes: str = '') -> jax.Array:
        """γ · ε of a part of y in the shape of w, summed over the axes that w does not
        have."""
        letters, weight = self.letters, self.use.weight
        gradient = jnp.einsum(f'{axes or letters.trace}->{letters.weight}', found)
        if gradient.shape == weight.shape:
            return gradient
        boxes = dict(zip(letters.rows, self.box, strict=True))
        part = tuple(boxes.get(c, slice(None)) for c in letters.weight)
        return jnp.zeros(weight.shape, gradient.dtype).at[part].set(gradient)

    def _by_sample(self, block: _Block) -> tuple[Components, jax.Array]:
        """The trace after a block and the sum of γ · ε before it, sample by sample."""
        letters, sample = self.letters, self.letters.sample
        first = next(iter(block.trace.values()))
        if len(first) == 1:
            new, total = self._solved(letters, block)
            return new, total[0]
        axis = 1 + letters.rows.index(sample)
        block = block._replace(
            xs=jnp.moveaxis(block.xs, 1 + letters.features.index(sample), 0),
            rows={s: jnp.moveaxis(row, axis, 0) for s, row in block.rows.items()},
        )
        own = letters._replace(
            features=letters.features.replace(sample, ''),
            rows=letters.rows.replace(sample, ''),
            trace=letters.trace[1:],
        )

        def one(total: jax.Array, at: _Block) -> tuple[jax.Array, Components]:
            new, found = self._solved(own, at)
            return total + found, new

        start = jnp.zeros(first.shape[1:], sum_type(trace_type(self.use)))
        total, new = jax.lax.scan(one, start, block)
        return new, total

    def _on_each_device(
        self, split: Split, block: _Block
    ) -> tuple[Components, jax.Array]:
        """The same on each device, for its own samples and neurons; by the kernel where
        there is one."""
        x, y, axes, weight = self.letters[:4]
        sample = self.letters.sample
        sizes = dict(zip(axes, self.shape, strict=True))
        over = axes_of_mesh(split, sample, axes, sizes)
        samples = over.get(sample, ())
        # Values beside the trace have axes of length one where y has none.
        along = spec_of(axes, {c: a for c, a in over.items() if c in y})
        of_trace, of_weight = spec_of(axes, over), spec_of(axes[1:], over)
        of_x, of_y = spec_of(f't{x}', over), spec_of(f't{y}', over)

        def own(*given: Any) -> tuple:
            block = _Block(*given)
            stored = next(iter(block.trace.values())).shape
            by_kernel = self._fits_kernel(len(block.xs)) and has_kernel(stored, block)
            run = self._by_sample
            if by_kernel and axes[1:] == weight:
                name = 'dense_visit' if len(block.xs) == 1 else 'span_visit'
                run = functools.partial(
                    kernels.run, name, plain=self._by_sample, by=self._visit
                )
            new, total = run(block)
            return new, summed_over(total, samples)

        specs = (of_trace, of_x, of_y, along, along)
        return split.on_each_device(own, specs, (of_trace, of_weight))(*block)

    # ------------------------------------------------------------ kernels

    @cached_property
    def _parts(self) -> tuple[str, str, str] | None:
        """The axes of the trace as those of samples, and the contracted and the free
        ones of w; None if they are not next to each other."""
        x, y, trace, weight = self.letters[:4]
        inputs = ''.join(c for c in weight if c not in y)
        free = ''.join(c for c in weight if c in y)
        samples = trace[: len(trace) - len(weight)]
        together = weight in (inputs + free, free + inputs)
        in_x = ''.join(c for c in x if c in y)
        fits = together and inputs and free and in_x == samples
        return (samples, inputs, free) if fits else None

    def _fits_kernel(self, length: int) -> bool:
        """Whether there is a kernel for this trace and so many steps."""
        if self._parts is None:
            return False
        inputs_first = self.letters.weight.startswith(self._parts[1])
        return length == 1 or inputs_first

    def _by_kernel(
        self, visit: Callable[..., Any], block: _Block, y_bars: jax.Array | None
    ) -> tuple[Components, jax.Array]:
        """One visit by a kernel: the trace, and γ · ε in the shape of w."""
        new, total = self._visit(visit, block, y_bars)
        return new, self._as_weight(total, self.letters.weight)

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
        x, y, trace, weight = self.letters[:4]
        # One device may have a part of the samples and of the outputs only.
        stored = next(iter(block.trace.values())).shape
        sizes = dict(zip(trace, stored, strict=True))
        size = lambda axes: math.prod(sizes[c] for c in axes)
        flat = lambda values, axes: values.reshape(-1, size(samples), size(axes))
        first = weight.startswith(inputs)
        last = (inputs, free) if first else (free, inputs)
        shape = (size(samples), *map(size, last))
        old = {s: e.reshape(shape) for s, e in block.trace.items()}
        xs = flat(jnp.einsum(f't{x}->t{samples}{inputs}', block.xs), inputs)
        of_result = lambda row: flat(jnp.einsum(f't{y}->t{samples}{free}', row), free)
        rows = {s: of_result(row) for s, row in block.rows.items()}
        factors = {at: flat(p, free)[0] for at, p in block.product.items()}
        credits = {s: flat(c, free)[0] for s, c in block.credit.items()}
        if len(xs) == 1:
            rows = {s: row[0] for s, row in rows.items()}
            y_bar = None if y_bars is None else of_result(y_bars)[0]
            new, total = visit(old, xs[0], rows, factors, credits, first, y_bar)
        else:
            new, total = visit(old, xs, rows, factors, credits)
        total = total.reshape([sizes[c] for c in weight])
        return {s: e.reshape(stored) for s, e in new.items()}, total
