"""Visits of the traces of a compressed sparse matrix with few samples, for CPUs.

In the order of the matrix, in which traces lie in memory: with few samples, reading
traces in any other order takes longer than reading neurons in any order. With many
samples ``sparse_visit`` is faster.

Letters: e synapses in the order of the matrix, each from a neuron ``pre`` to a neuron
``post``, k the samples, t the steps, s and r components of ε.

    gradient[e] = Σ_s Σ_k credit_s[post, k] ε_s[e, k]
    ε_s[e, k] = Σ_r factor_sr[post, k] ε_r[e, k] + Σ_t row_s[post, t, k] x[pre, t, k]

Each trace is read and written once, in place. Samples are taken in whole vectors, as in
``products``.
"""

from __future__ import annotations

from typing import Any

import jax

from ...compiled_step import Components, Jacobian
from .native import loop, place, word
from .products import WIDTHS
from .sparse_visit import Reader, SparseVisit, visit_synapses
from .spike_bits import Numbers
from .trace_parts import TraceParts


class _VisitByRow(SparseVisit):
    """The instructions. ``pre_is_row``: synapses of a row come from one neuron, not
    lead to one."""

    def __init__(self, pre_is_row: bool, *given: Any):
        super().__init__(*given)
        self.pre_is_row = pre_is_row
        self.is_far = self.synapses.is_far(self.x)
        self.samples = next(iter(self.traces.values())).size(1)
        self.length = self.x.size(1)
        self.steps = self.build.udiv(self.length, self.samples)

    def emit(self) -> None:
        build, synapses = self.build, self.synapses
        x = Numbers(self.x, self.samples)
        with (
            loop(build, 0, synapses.rows, 1) as row,
            loop(build, *synapses.of_row(row), 1) as e,
        ):
            self._ask_for_column(e)
            column = synapses.column(e)
            pre, post = (row, column) if self.pre_is_row else (column, row)

            def of_post(k: Any, size: int) -> Reader:
                of_block = place(build, post, self.samples, k)
                of_steps = place(build, post, self.length, k)
                begin = dict.fromkeys(self.made.of_block, of_block)
                begin |= dict.fromkeys(self.made.of_steps, of_steps)
                return lambda name, t: self.values[name].load(
                    place(build, t, self.samples, begin[name]), size
                )

            self._synapse(e, x, x.place(pre), self.steps, of_post)

    def _ask_for_column(self, e: Any) -> None:
        """Ask for what a later synapse reads of its column; of several steps for the
        first, as the processor sees by itself that the others follow."""
        values = [*self.values.values()] if self.pre_is_row else [self.x]
        with self.build.if_then(self.is_far):
            for array in values:
                self.synapses.prefetch(array, e, word(0), WIDTHS[0])


def visit_by_row(
    trace: Components,
    x: jax.Array,
    rows: Components,
    factors: Jacobian,
    credit: Components,
    pre_is_row: bool,
    indices: Any,
    starts: Any,
) -> tuple[Components, jax.Array]:
    """New traces (e, k) and the gradient (e); x and rows (neurons, t and k), factors
    and credits (neurons, k)."""
    made, values = TraceParts.of(trace, rows, factors, credit)
    emit = lambda *given: _VisitByRow(pre_is_row, made, *given).emit()
    name = f'synapses_by_row_{made.name}_{int(pre_is_row)}'
    return visit_synapses(name, emit, [indices, starts], x, values, trace, [])
