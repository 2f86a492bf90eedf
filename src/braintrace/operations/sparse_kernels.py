"""Visits of the traces of a compressed sparse matrix, compiled by numba for CPUs.

Letters: e synapses in the order of the matrix, k the samples of a neuron, which lie next
to each other in memory. Synapses of row r are ``starts[r]`` to ``starts[r + 1]``, and
``indices[e]`` is the column of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

# Sums may be reordered for the vector unit; infinities and NaN keep their meaning.
compiled = numba.njit(fastmath={'reassoc', 'contract', 'nsz'}, nogil=True)


@compiled
def ends(pre_is_row: bool, row: Any, column: Any) -> Any:
    """The neurons that a synapse comes from and leads to."""
    if pre_is_row:
        return row, column
    return column, row


def make_trace_kernel(
    pre_is_row: bool,
    time_first: bool,
    has_rows: tuple[bool, ...],
    has_factor: tuple[bool, ...],
    has_credit: tuple[bool, ...],
) -> Callable[..., None]:
    """One visit of a trace with one entry a synapse, sample and component s.

        ε_s[e, k] = Σ_r factor_sr[post, k] ε_r[e, k] + Σ_t row_s[post, t, k] x[pre, t, k]
        gradient[e] = Σ_s Σ_k credit_s[post, k] ε_s[e, k] before that

    ``time_first``: rows and x have axes (t, neurons, k) instead, which needs no copy and
    is as fast for many samples, but not for one.
    Arguments: indices, starts, x, all rows, factors and credits, old traces; new traces
    and the gradient. Those that are not there by structure are not read.
    """
    if len(has_rows) == 1:
        has = (has_rows[0], has_factor[0], has_credit[0])
        return _visit_of_one(pre_is_row, time_first, *has)
    states = len(has_rows)
    rows_at = 3
    factors_at = rows_at + states
    credit_at = factors_at + states * states
    old_at = credit_at + states
    new_at = old_at + states
    end = new_at + states

    @compiled
    def visit(*given: Any) -> None:
        indices, starts, x = given[0], given[1], given[2]
        rows, factors = given[rows_at:factors_at], given[factors_at:credit_at]
        credits, old = given[credit_at:old_at], given[old_at:new_at]
        new, gradient = given[new_at:end], given[end]
        samples = old[0].shape[1]
        steps = x.shape[0 if time_first else 1]
        found = np.zeros((states, samples), x.dtype)
        for row in range(len(starts) - 1):
            for e in range(starts[row], starts[row + 1]):
                pre, post = ends(pre_is_row, row, indices[e])
                total = x.dtype.type(0)
                for s in range(states):
                    here = found[s]
                    here[:] = 0
                    if has_credit[s]:
                        credit, before = credits[s][post], old[s][e]
                        for k in range(samples):
                            total += credit[k] * before[k]
                    for r in range(states):
                        if has_factor[s * states + r]:
                            factor, before = factors[s * states + r][post], old[r][e]
                            for k in range(samples):
                                here[k] += factor[k] * before[k]
                    if has_rows[s]:
                        values = rows[s]
                        for t in range(steps):
                            if time_first:
                                for k in range(samples):
                                    here[k] += values[t, post, k] * x[t, pre, k]
                            else:
                                for k in range(samples):
                                    here[k] += values[post, t, k] * x[pre, t, k]
                gradient[e] = total
                # The new trace may lie where the old one does.
                for s in range(states):
                    for k in range(samples):
                        new[s][e, k] = found[s, k]

    return visit


def _visit_of_one(
    pre_is_row: bool,
    time_first: bool,
    has_rows: bool,
    has_factor: bool,
    has_credit: bool,
) -> Callable[..., None]:
    """The same for a single component, without the choice among arrays.

    One sample has a loop of its own: a test inside of the loops would keep them from the
    vector unit.
    """

    @compiled
    def of_one_sample(
        indices: Any,
        starts: Any,
        x: Any,
        rows: Any,
        factor: Any,
        credit: Any,
        old: Any,
        new: Any,
        gradient: Any,
    ) -> None:
        zero = x.dtype.type(0)
        for row in range(len(starts) - 1):
            for e in range(starts[row], starts[row + 1]):
                pre, post = ends(pre_is_row, row, indices[e])
                before = old[e, 0]
                gradient[e] = credit[post, 0] * before if has_credit else zero
                found = factor[post, 0] * before if has_factor else zero
                if has_rows:
                    for t in range(x.shape[1]):
                        found += rows[post, t, 0] * x[pre, t, 0]
                new[e, 0] = found

    @compiled
    def of_samples(
        indices: Any,
        starts: Any,
        x: Any,
        rows: Any,
        factor: Any,
        credit: Any,
        old: Any,
        new: Any,
        gradient: Any,
    ) -> None:
        zero = x.dtype.type(0)
        samples = old.shape[1]
        steps = x.shape[0 if time_first else 1]
        found = np.zeros(samples, x.dtype)
        for row in range(len(starts) - 1):
            for e in range(starts[row], starts[row + 1]):
                pre, post = ends(pre_is_row, row, indices[e])
                total = zero
                for k in range(samples):
                    before = old[e, k]
                    if has_credit:
                        total += credit[post, k] * before
                    found[k] = factor[post, k] * before if has_factor else zero
                gradient[e] = total
                if has_rows:
                    for t in range(steps):
                        if time_first:
                            for k in range(samples):
                                found[k] += rows[t, post, k] * x[t, pre, k]
                        else:
                            for k in range(samples):
                                found[k] += rows[post, t, k] * x[pre, t, k]
                for k in range(samples):
                    new[e, k] = found[k]

    @compiled
    def visit(*given: Any) -> None:
        new = given[-2]
        if new.shape[1] == 1:
            of_one_sample(*given)
        else:
            of_samples(*given)

    return visit
