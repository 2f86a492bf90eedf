"""All derivatives of a step, as reverse passes through its two programs.

    local   the new states of one group from its old ones, every path from one position
            to another cut:   D = ∂h_t/∂h_{t-1}    T = ∂h_t/∂δ    (∂h_t/∂y)ᵀ γ
    joint   the targets, nothing cut, every reader of a new state sees h + δ:
            ȳ = ∂ℓ/∂y    ∂ℓ/∂δ    R = ∂ℓ/∂h_{t-1} beside all new states

∂ℓ/∂δ counts every path from a new state to the loss. Each begins with kept edges inside
its group, possibly none (LSTM: h from the new c); what these do is in D and in the traces
already. Their sum is T, unit triangular in the order in which a step makes the states,
so the signal is L = T⁻ᵀ ∂ℓ/∂δ, found by substitution. Paths that leave the kept edges, by
a cut or by another group, stay in L.

Letters: t steps of a block, h positions, i, j, k, s components of a position, n those of
memories, y results of taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .arrays import jacobian_rows
from .compiled_step import (
    CompiledStep,
    Components,
    Feedback,
    Jacobian,
    Key,
    Slopes,
    Values,
)


class Derivatives(NamedTuple):
    """Derivatives of one step, or of all steps of a block with t first.

    ``results``: one-step gradients ȳ of tap results. By group: ``signals`` L, ``reads``
    R, ``transitions`` D as the rule has it, ``inner`` T, ``slopes`` (U, V) of memories.
    ``losses``: the loss of each step (t,), or its terms (t, b).
    """

    losses: Any
    aux: Values
    results: Values
    signals: list[Components]
    reads: list[Components]
    transitions: list[Jacobian]
    inner: list[Jacobian]
    slopes: list[list[Slopes]]


def local_matrices(
    step: CompiledStep, g: int, constants: Values, values: Values
) -> tuple[Jacobian, Jacobian]:
    """D of a group, and T where a state with a signal depends on another of these."""
    group, size = step.groups[g], step.groups[g].size
    old, taps = group.components(values), _taps(step, g, values)
    heard = {(i, j) for i, j in group.inner if {i, j} <= group.signalled}

    def local(moved: list[jax.Array]) -> list[jax.Array]:
        old, delta = moved[:size], moved[size:] or None
        return step.local(g, constants, values, old, delta, taps)

    delta = [jnp.zeros_like(x) for x in old] if heard else []
    wanted = {*group.pattern, *((i, size + j) for i, j in heard)}
    found = jacobian_rows(local, [*old, *delta], wanted)
    inner = {(i, j): found[i, size + j] for i, j in heard}
    return {at: found[at] for at in group.pattern}, inner


def transitions(
    step: CompiledStep, constants: Values, values: Values
) -> list[tuple[Jacobian, Jacobian]]:
    """D and T of every group."""
    groups = range(len(step.groups))
    return [local_matrices(step, g, constants, values) for g in groups]


def joint_signals(
    step: CompiledStep,
    constants: Values,
    values: Values,
    cotangents: Sequence[jax.Array],
    inner: Sequence[Jacobian],
    slopes: Sequence[Sequence[Slopes]],
    feedback: Feedback = {},
) -> tuple[list[jax.Array], Values, list[Components], list[Components]]:
    """Targets of one step, ȳ, L and R; ``inner``: T, ``feedback``: what replaces the
    weights of read-outs on the way back."""
    results = [y for tap in step.taps for y in tap.results]
    taps = (constants | values).pick(results)
    old, delta = [], []
    for group in step.groups:
        now = group.components(values)
        old.append({j: now[j] for j in sorted(group.direct)})
        delta.append({i: jnp.zeros_like(now[i]) for i in sorted(group.signalled)})
    targets, pull = jax.vjp(
        lambda taps, delta, old: step.joint(
            constants, values, old, delta, taps, feedback
        ),
        taps,
        delta,
        old,
    )
    bars = [c.astype(x.dtype) for c, x in zip(cotangents, targets, strict=True)]
    y_bars, total, reads = pull(bars)
    if any(group.memories for group in step.groups):
        own = step.memory_signals(constants, values, y_bars, total, reads, feedback)
        total, reads = (_added(a, b) for a, b in zip((total, reads), own, strict=True))
    signals = []
    for group, mine, matrix, sides in zip(
        step.groups, total, inner, slopes, strict=True
    ):
        matrix = dict(matrix)
        # A memory depends on the new states: T_nj = Σ_s U_s T_sj, where T_jj is 1.
        for n, (new, _) in enumerate(sides, group.size):
            for j in sorted(group.signalled) if n in mine else ():
                terms = [
                    u if s == j else u * matrix[s, j]
                    for s, u in new.items()
                    if s == j or (s, j) in matrix
                ]
                if terms:
                    matrix[n, j] = sum(terms[1:], terms[0])
        signals.append(_substituted(mine, matrix))
    return targets, y_bars, signals, reads


def _added(a: Sequence[Components], b: Sequence[Components]) -> list[Components]:
    found = []
    for x, y in zip(a, b, strict=True):
        found.append({**y, **{i: v + y[i] if i in y else v for i, v in x.items()}})
    return found


def _substituted(total: Components, inner: Jacobian) -> Components:
    """L with Tᵀ L = total: L_j = total_j - Σ_i T_ij L_i over the states i that j leads
    to."""
    found: Components = {}

    def solve(j: int) -> jax.Array:
        if j not in found:
            x = total[j]
            for (i, k), t in inner.items():
                if k == j and i in total:
                    x = x - t * solve(i)
            found[j] = x.astype(total[j].dtype)
        return found[j]

    for j in total:
        solve(j)
    return found


def pull_back(
    step: CompiledStep,
    constants: Values,
    values: Values,
    credit: Sequence[Components],
) -> list[Values]:
    """(∂h/∂y)ᵀ γ by group, for every tap result y that reaches a component of γ."""
    found = []
    for g, (group, mine) in enumerate(zip(step.groups, credit, strict=True)):
        old, taps = group.components(values), _taps(step, g, values)
        reached = taps.pick(y for y in taps if set(group.reached[y]) & set(mine))

        def new(moved: Values, g=g, old=old, taps=taps, mine=mine) -> Components:
            every = step.local(g, constants, values, old, None, taps | moved)
            return {i: every[i] for i in mine}

        like, pull = jax.vjp(new, reached)
        bars = {i: x.astype(like[i].dtype) for i, x in mine.items()}
        found.append(pull(bars)[0])
    return found


def slopes_at_positions(
    step: CompiledStep, constants: Values, values: Values
) -> list[dict[Key, Components]]:
    """∂h/∂y at every position, by components, for results y that positions share.

    A position is reached by one element of y, so a tangent of ones at all elements
    gives the derivative by that one.
    """
    found: list[dict[Key, Components]] = []
    for g, group in enumerate(step.groups):
        old, taps = group.components(values), _taps(step, g, values)
        mine: dict[Key, Components] = {}
        for y in taps if group.shared else ():
            if y in group.shared:

                def new(value: jax.Array, y=y, g=g, old=old, taps=taps) -> Components:
                    moved = taps | {y: value}
                    every = step.local(g, constants, values, old, None, moved)
                    return {i: every[i] for i in step.groups[g].reached[y]}

                mine[y] = _along_ones(new, taps[y], step.has_forward_mode)
        found.append(mine)
    return found


def _along_ones(function: Any, value: jax.Array, forward: bool) -> Components:
    def along(tangent: jax.Array) -> Components:
        if forward:
            return jax.jvp(function, (value,), (tangent,))[1]
        # Forward mode is the transpose of reverse mode.
        like, pull = jax.vjp(function, value)
        return jax.linear_transpose(lambda bars: pull(bars)[0], like)(tangent)[0]

    ones = jnp.ones_like(value)
    slopes = along(ones)
    if jnp.iscomplexobj(value):
        imaginary = along(1j * ones)
        # As a pull-back has it: ∂h/∂Re y - i ∂h/∂Im y.
        return {i: x - 1j * imaginary[i] for i, x in slopes.items()}
    return slopes


def _taps(step: CompiledStep, g: int, values: Values) -> Values:
    """The results of taps that reach a group."""
    return values.pick(step.groups[g].reached)
