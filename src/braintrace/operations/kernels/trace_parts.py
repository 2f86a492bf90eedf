"""What there is of a trace, and the arithmetic that all visits of traces share.

Letters: s and r components of ε. Beside x and the traces, a kernel reads values of the
results by name:

    ('row', s), ('y_bar',)             at every step
    ('factor', s, r), ('credit', s)    the same for all steps
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from llvmlite import ir

from ...compiled_step import Components, Jacobian
from .native import FLAGS, Buffer, plus

Name = tuple[Any, ...]


class TraceParts(NamedTuple):
    """The components of a trace, and the rows, factors and credits that are not zero by
    structure. ``has_y_bar``: whether the one-step gradient Σ x ȳ is summed as well."""

    components: tuple[int, ...]
    rows: tuple[int, ...]
    factors: tuple[tuple[int, int], ...]
    credits: tuple[int, ...]
    has_y_bar: bool = False

    @classmethod
    def of(
        cls,
        trace: Components,
        rows: Components,
        factors: Jacobian,
        credit: Components,
        y_bar: jax.Array | None = None,
    ) -> tuple[TraceParts, list[jax.Array]]:
        """The parts, and the values of results in the order of their names."""
        rows = {s: rows[s] for s in trace if s in rows}
        pairs = [(s, r) for s in trace for r in trace if (s, r) in factors]
        credit = {s: c for s, c in credit.items() if s in trace}
        keys = (tuple(trace), tuple(rows), tuple(pairs), tuple(credit))
        values = [*rows.values(), *([] if y_bar is None else [y_bar])]
        values += [*(factors[pair] for pair in pairs), *credit.values()]
        return cls(*keys, y_bar is not None), values

    @property
    def name(self) -> str:
        """A name for kernels of such traces."""
        join = lambda numbers: '_'.join(map(str, numbers))
        factors = join(f'{s}{r}' for s, r in self.factors)
        parts = (join(self.components), join(self.rows), factors, join(self.credits))
        return f'{"_of_".join(parts)}_{int(self.has_y_bar)}'

    @property
    def of_steps(self) -> list[Name]:
        """Names of values at every step."""
        rows: list[Name] = [('row', s) for s in self.rows]
        return rows + [('y_bar',)] * self.has_y_bar

    @property
    def of_block(self) -> list[Name]:
        """Names of values that are the same for all steps."""
        factors: list[Name] = [('factor', *pair) for pair in self.factors]
        return factors + [('credit', s) for s in self.credits]

    def named(self, values: Sequence[Buffer]) -> dict[Name, Buffer]:
        """Values of the results by name."""
        return dict(zip([*self.of_steps, *self.of_block], values, strict=True))

    def moved(
        self,
        build: ir.IRBuilder,
        values: Mapping[Name, Any],
        old: Mapping[int, Any],
    ) -> dict[int, Any]:
        """Σ_r factor_sr ε_r of every component s."""
        kind = next(iter(old.values())).type
        found = {}
        for s in self.components:
            pairs = [pair for pair in self.factors if pair[0] == s]
            terms = [(values['factor', *pair], old[pair[1]]) for pair in pairs]
            found[s] = sum_of(build, terms, kind)
        return found

    def credited(
        self, values: Mapping[Name, Any], old: Mapping[int, Any]
    ) -> list[tuple[Any, Any]]:
        """The factors of the terms of Σ_s credit_s ε_s."""
        return [(values['credit', s], old[s]) for s in self.credits]


class Visit(ABC):
    """The instructions of a visit: the arrays that all kinds have.

    Operands: x, values of the results, old traces; results: new traces, which lie where
    the old ones do, the gradient, and memory.
    """

    def __init__(
        self,
        made: TraceParts,
        build: ir.IRBuilder,
        operands: list[Buffer],
        results: list[Buffer],
    ):
        self.made, self.build = made, build
        count = len(made.components)
        self.x, *values = operands[:-count]
        self.number = self.x.number
        self.values = made.named(values)
        self.traces = dict(zip(made.components, results[:count], strict=True))
        self.gradient, *self.memory = results[count:]

    @abstractmethod
    def emit(self) -> None:
        """Add the instructions."""


def sum_of(build: ir.IRBuilder, pairs: Sequence[tuple[Any, Any]], kind: Any) -> Any:
    """Σ a b of numbers of a type."""
    if not pairs:
        return ir.Constant(kind, None)
    first, *others = pairs
    total = build.fmul(*first, flags=FLAGS)
    for a, b in others:
        total = plus(build, total, a, b)
    return total
