"""Uses of weights: y = op(x, w) as the solver sees it; those of element-wise weights and
of operations of any kind.

Layouts of traces are in ``whole_traces.py`` and beside each operation. Letters: t steps,
y elements of the result, w elements of the weight, h positions of the group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..arrays import (
    cast,
    is_complex,
    padded,
    picked,
    sum_type,
    summed_by,
)
from ..compat import Equation, evaluate_equation
from ..compiled_step import (
    Box,
    Operands,
    Shares,
    TraceLayout,
    WeightUse,
)
from ..split import Split, current_split
from .labels import NONE
from .whole_traces import ElementwiseTrace, FullTrace


@dataclass(frozen=True, eq=False)
class BaseUse(ABC):
    """What all uses share. ``apply(operands)`` gives y; ``operand`` is the number of
    the weight."""

    apply: Callable[[Sequence[Any]], Any]
    operand: int
    operands: tuple[jax.ShapeDtypeStruct, ...]
    result: jax.ShapeDtypeStruct

    shared_trace: ClassVar[Callable[..., TraceLayout]] = FullTrace
    """The storage of its trace where positions share elements of y."""

    @property
    def weight(self) -> jax.ShapeDtypeStruct:
        """Shape and type of the weight."""
        return self.operands[self.operand]

    @property
    def input(self) -> int | None:
        """The operand x if y is linear in both x and w."""
        return None

    @property
    def factorises(self) -> bool:
        """Whether ∂h/∂w can be written as a product of an input and a state part."""
        return self.input is not None

    @property
    def adds(self) -> bool:
        """Whether y is a sum with w."""
        return False

    @property
    def trace_dtype(self) -> Any:
        """Type of ε: the precision of y; complex if the weight is, since components are
        real."""
        real = jnp.finfo(self.result.dtype).dtype
        complex_ = is_complex(self.weight.dtype)
        return jnp.promote_types(real, jnp.complex64) if complex_ else real

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """Shape of one operand."""
        return self.operands[operand].shape

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
    ) -> jax.Array:
        """Σ_t of y_bars[t] · ∂y_t/∂w, by reverse mode over all steps at once."""
        steps = {k: self._as_operand(k, x) for k, x in steps.items()}

        def block(w: Any) -> Any:
            one = lambda step: self.run({**fixed, **step}, w)
            return jax.vmap(one, axis_size=len(y_bars))(steps)

        y, pull = jax.vjp(block, fixed[self.operand])
        return pull(cast(padded(y_bars, box, self.result.shape), y.dtype))[0]

    def gradient_by_share(
        self,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None = None,
    ) -> jax.Array | Shares:
        """The same before the sum over devices, where samples are split over some."""
        split = current_split()
        if split is None or split.shares == 1:
            return self.gradient(fixed, steps, y_bars, box)
        return self._shares(split, fixed, steps, y_bars, box)

    def _shares(
        self,
        split: Split,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None,
    ) -> jax.Array | Shares:
        """Every device runs :meth:`gradient` on its own samples, where it works for any
        number of them."""
        axes = self.sample_axes
        samples = () if axes is None else split.of_samples(self.result.shape[axes[-1]])
        is_product = self.input is not None and self.input in steps
        if axes is None or not (is_product and samples) or split.neurons:
            return self.gradient(fixed, steps, y_bars, box)

        def spec(axis: int | None, leading: int) -> PartitionSpec:
            before = () if axis is None else (None,) * (axis + leading)
            return PartitionSpec(*before, *(() if axis is None else (samples,)))

        def own(fixed: Operands, steps: Operands, y_bars: jax.Array) -> jax.Array:
            return self.gradient(fixed, steps, y_bars)[None]

        given = (
            {k: spec(axes[k], 0) for k in fixed},
            {k: spec(axes[k], 1) for k in steps},
            spec(axes[-1], 1),
        )
        fixed = {k: jnp.asarray(x) for k, x in fixed.items()}
        y_bars = padded(y_bars, box, self.result.shape)
        run = split.on_each_device(own, given, PartitionSpec(samples))
        return Shares(run(fixed, steps, y_bars))

    @property
    def sample_axes(self) -> tuple[int | None, ...] | None:
        """The axis of samples of every operand, None for those without, and of y; None
        if there is no such axis, or w has it."""
        return None

    def gradient_of_factors(
        self, fixed: Operands, steps: Operands, y_bars: jax.Array, box: Box
    ) -> jax.Array:
        """The same for values that a loop over steps has written."""
        return self.gradient(fixed, steps, y_bars, box)

    def _as_operand(self, k: int, x: jax.Array) -> jax.Array:
        """Data in the type of an operand: traces of it may be held in another."""
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        return cast(x, self.operands[k].dtype) if inexact else x

    def slopes(self, fixed: Operands, steps: Operands, length: int) -> jax.Array:
        """∂y/∂w (t, y) of an element-wise use."""
        weight = fixed[self.operand]

        def slope(step: Operands) -> jax.Array:
            y = lambda w: self.run({**fixed, **step}, w)
            return jax.jvp(y, (weight,), (jnp.ones_like(weight),))[1]

        return jax.vmap(slope, axis_size=length)(steps)

    def spread(self, y_bar: jax.Array) -> jax.Array:
        """Sum, for each element of w, over the elements of y that share it."""
        broadcast = lambda w: jnp.broadcast_to(w, y_bar.shape)
        _, pull = jax.vjp(broadcast, jnp.zeros(self.weight.shape, y_bar.dtype))
        return pull(y_bar)[0]

    def spread_by_share(self, y_bar: jax.Array) -> jax.Array | Shares:
        """The same before the sum over devices, where samples are split over some."""
        split = current_split()
        if split is None or self.sample_axes is None or split.shares == 1:
            return self.spread(y_bar)
        if not split.of_samples(len(y_bar)):
            return self.spread(y_bar)
        count = split.shares
        bars = y_bar.reshape(count, len(y_bar) // count, *y_bar.shape[1:])
        return Shares(split.by_share(jax.vmap(self.spread)(bars)))

    @abstractmethod
    def layout(self, positions: np.ndarray, shape: tuple[int, ...]) -> TraceLayout:
        """The storage of its trace."""


@dataclass(frozen=True, eq=False)
class SharedUse:
    """A use whose result has elements that several positions read.

    Seen from the positions it has one element a position, y' = y[sources], and their
    gradients add up where they share an element.
    """

    use: WeightUse
    sources: np.ndarray

    @property
    def positions(self) -> np.ndarray:
        """The position of each element of y': its own, or none."""
        own = np.arange(self.sources.size).reshape(self.sources.shape)
        return np.where(self.sources >= 0, own, NONE).astype(np.int32)

    @property
    def operand(self) -> int:
        """The number of the operand that is the weight."""
        return self.use.operand

    @property
    def weight(self) -> jax.ShapeDtypeStruct:
        """Shape and type of the weight."""
        return self.use.weight

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        """Shape and type of y'."""
        return jax.ShapeDtypeStruct(self.sources.shape, self.use.result.dtype)

    @property
    def trace_dtype(self) -> Any:
        """Type of ε."""
        return self.use.trace_dtype

    @property
    def input(self) -> int | None:
        """The operand x if y is linear in both x and w."""
        return self.use.input

    @property
    def factorises(self) -> bool:
        """Whether ∂h/∂w can be written as a product of an input and a state part."""
        return self.use.factorises

    @property
    def adds(self) -> bool:
        """Whether y is a sum with w."""
        return self.use.adds

    @property
    def sample_axes(self) -> tuple[int | None, ...] | None:
        """Those of y, not of y'."""
        return None

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """Shape of one operand."""
        return self.use.operand_shape(operand)

    def _summed(self, bars: jax.Array) -> jax.Array:
        """Values (..., y') added up at the elements of y."""
        shape = self.use.result.shape
        found = summed_by(bars, self.sources, int(np.prod(shape)))
        return found.reshape(*found.shape[:-1], *shape)

    def gradient(
        self,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None = None,
    ) -> jax.Array:
        """Σ_t of y_bars[t] · ∂y'_t/∂w in the shape of w."""
        whole = padded(y_bars, box, self.sources.shape)
        return self.use.gradient(fixed, steps, self._summed(whole))

    def gradient_by_share(
        self,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None = None,
    ) -> jax.Array | Shares:
        """The same before the sum over devices, where samples are split over some."""
        whole = padded(y_bars, box, self.sources.shape)
        return self.use.gradient_by_share(fixed, steps, self._summed(whole))

    def gradient_of_factors(
        self, fixed: Operands, steps: Operands, y_bars: jax.Array, box: Box
    ) -> jax.Array:
        """The same for values that a loop over steps has written."""
        return self.gradient(fixed, steps, y_bars, box)

    def slopes(self, fixed: Operands, steps: Operands, length: int) -> jax.Array:
        """∂y'/∂w (t, y') of an element-wise use."""
        found = self.use.slopes(fixed, steps, length)
        return jax.vmap(lambda x: picked(x, self.sources))(found)

    def spread(self, y_bar: jax.Array) -> jax.Array:
        """Sum, for each element of w, over the elements of y' that share it."""
        return self.use.spread(self._summed(y_bar))

    def spread_by_share(self, y_bar: jax.Array) -> jax.Array | Shares:
        """The same before the sum over devices, where samples are split over some."""
        return self.use.spread_by_share(self._summed(y_bar))

    def layout(self, positions: np.ndarray, shape: tuple[int, ...]) -> TraceLayout:
        """The storage of its trace."""
        kind = self.use.shared_trace if isinstance(self.use, BaseUse) else FullTrace
        return kind(self, self.positions, self.sources.shape)


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
    """An operation of any kind: gradients by reverse mode, the full influence as a
    trace. ``data``: the operand x, if y is known to be linear in it and in w."""

    data: int | None = None

    @property
    def input(self) -> int | None:
        return self.data

    def layout(self, positions: np.ndarray, shape: tuple[int, ...]) -> TraceLayout:
        return FullTrace(self, positions, shape)


@dataclass(frozen=True, eq=False)
class ElementwiseUse(BaseUse):
    """A bias, gain, threshold, time constant or scalar."""

    is_sum: bool = False

    shared_trace = ElementwiseTrace

    @property
    def sample_axes(self) -> tuple[int | None, ...] | None:
        """The first axis, if the weight is the same along it."""
        first = lambda shape: shape[0] if len(shape) == len(self.result.shape) else 1
        sizes = [first(x.shape) for x in self.operands] if self.result.shape else []
        if not sizes or sizes[self.operand] != 1 or self.result.shape[0] == 1:
            return None
        return *(None if size == 1 else 0 for size in sizes), 0

    def _shares(
        self,
        split: Split,
        fixed: Operands,
        steps: Operands,
        y_bars: jax.Array,
        box: Box | None,
    ) -> jax.Array | Shares:
        """ȳ · ∂y/∂w summed over steps, then over the samples of each share."""
        is_real = not is_complex(jnp.result_type(self.weight, self.result))
        if self.sample_axes is None or not is_real:
            return self.gradient(fixed, steps, y_bars, box)
        steps = {k: self._as_operand(k, x) for k, x in steps.items()}
        dtype = sum_type(self.weight.dtype)
        slopes = self.slopes(fixed, steps, len(y_bars)).astype(dtype)
        bars = jnp.sum(padded(y_bars, box, self.result.shape) * slopes, axis=0)
        return self.spread_by_share(bars.astype(dtype))

    @property
    def factorises(self) -> bool:
        return True

    @property
    def adds(self) -> bool:
        return self.is_sum

    def layout(self, positions: np.ndarray, shape: tuple[int, ...]) -> TraceLayout:
        return ElementwiseTrace(self, positions, shape)
