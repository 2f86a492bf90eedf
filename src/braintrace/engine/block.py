"""The block solver: K consecutive steps, forward and then all derivatives at once.

Values of a group are kept apart by component, a state of every position: products of small matrices are written
out, and entries that are zero by structure never appear. Axes: t steps of the block, then those of the positions.

    γ_{t-1} = D_tᵀ (L_t + γ_t) + R_t                     credit, backward inside the block
    gradient = Σ_t ∂ℓ_t/∂θ + Σ_t (∂h_t/∂θ|local)ᵀ γ_t    one product for each weight
    P_t = D_K … D_{t+1}                                  what step t still means at the block's end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..analysis.families import TABLE
from ..compat import Var, evaluate_equation, is_var
from ..program import cut_inside
from .masking import Mask, finite, zero_at
from .plan import Components, Jacobian, LocalStep, Plan, Values
from .products import linear_gradient, turned, wide
from .recursion import Recursion
from .signal import joint_targets


class Forward(NamedTuple):
    """What a block's forward pass leaves: the next states, and what each step needs later."""

    states: Values
    steps: Values


class Credit(NamedTuple):
    """Signals L, direct reads R and transitions D of a block, group by group; every array is stacked over its steps.

    ``results`` holds the one-step gradients of tap results.
    """

    targets: list[jax.Array]
    aux: Values
    results: Values
    signals: list[Components]
    reads: list[Components]
    jacobians: list[Jacobian]


def constants(plan: Plan, inputs: Values) -> Values:
    """Everything that depends on parameters and constants only."""
    closed = plan.program.closed
    env = Values(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env = plan.compute(plan.constants, env | inputs)
    for i, (k, v) in plan.turned.items():
        equation = plan.equations[i]
        env[v] = turned(equation, k, env[equation.invars[k]])
    return env


def forward(plan: Plan, const: Values, states: Values, inputs: Values) -> Forward:
    """Run a block. Input projections first, for all steps; then the core, step by step."""
    before = jax.vmap(lambda xs: plan.compute(plan.before, const | xs).pick(plan.before))(inputs)
    steps = inputs | before
    targets = [new for _, new in plan.carried] + list(plan.kept)
    known = {*const, *steps, *states}
    reads = {v for i in plan.needed(targets, known) for v in plan.equations[i].invars if is_var(v)}
    reads |= {v for v in targets if is_var(v)}

    def step(old: Values, xs: Values) -> tuple[Values, tuple]:
        env = plan.compute(targets, const | old | xs)
        new = Values((o, env[n] if is_var(n) else jnp.full(o.aval.shape, n.val, o.aval.dtype)) for o, n in plan.carried)
        return new, (env.pick(plan.kept), old.pick(h.invar for h in plan.program.hidden))

    last, (kept, old) = jax.lax.scan(step, states, steps.pick(v for v in steps if v in reads), _length(steps))
    return Forward(last, steps | kept | old)


def complete(plan: Plan, const: Values, steps: Values, last: Values) -> Values:
    """Everything the derivative programs read, for all steps of a block at once; ``last``: the states after it."""
    new = Values()
    for h in plan.program.hidden:
        if h.outvar in plan.facts.producer:
            new[h.outvar] = jnp.concatenate([steps[h.invar][1:], last[h.invar][None]])
    steps = steps | new

    def one(step: Values) -> Values:
        env = plan.compute(plan.derivative_variables, const | step)
        return env.pick(v for v in env if v not in const)

    return jax.vmap(one)(steps)


def credit(
    plan: Plan,
    const: Values,
    steps: Values,
    cotangents: Sequence[jax.Array],
    aux: Sequence[Var],
    safe: Values | None = None,
) -> Credit:
    """Targets, signals, direct reads and local Jacobians of all steps of a block, side by side.

    ``cotangents[i][t]`` is the cotangent of target i at step t; a step whose cotangents are all zero
    contributes exactly nothing. ``safe``: values of the steps that derivatives read in place of their own.
    """

    def one(step: Values, safe: Values | None, cotangents: list[jax.Array]) -> tuple[list, Values, Values, list, list]:
        env = const | step
        targets, (ys, signals, reads) = signals_of(plan, env if safe is None else const | safe, cotangents)
        if safe is not None:  # the losses are those of the model itself
            known = plan.compute(plan.targets, env)
            targets = [known[v] if is_var(v) else jnp.asarray(v.val, v.aval.dtype) for v in plan.targets]
        return targets, plan.compute(aux, env).pick(aux), ys, signals, reads

    found = jax.vmap(one)(steps, safe, list(cotangents))
    return Credit(*found, jacobians(plan, const, steps if safe is None else safe))


def jacobians(plan: Plan, const: Values, steps: Values) -> list[Jacobian]:
    """D_t of every group and step."""

    def one(step: Values) -> list[Jacobian]:
        return [jacobian_of(local, const | step) for local in plan.locals]

    return jax.vmap(one)(steps)


def signals_of(
    plan: Plan, env: Values, cotangents: list[jax.Array], back: Mapping[int, Mapping[int, Any]] = {}
) -> tuple[list[jax.Array], tuple[Values, list[Components], list[Components]]]:
    """Targets of a step; one-step gradients of tap results, signals and direct reads.

    ``back[i]``: operands of tap i that replace its weights on the way back.
    """
    ys = [env[v] for v in plan.tap_results]
    old = [group.components([env[v] for v in group.hidden_invars]) for group in plan.groups]
    deltas = jax.tree.map(jnp.zeros_like, old)
    targets, pull = jax.vjp(lambda *moving: joint_targets(plan, env, *moving, back=back), ys, deltas, old)
    grads = pull([c.astype(t.dtype) for c, t in zip(cotangents, targets, strict=True)])
    silent = jnp.all(jnp.stack([jnp.all(c == 0) for c in cotangents]))
    ys_bar, signals, reads = jax.tree.map(lambda g: jnp.where(silent, jnp.zeros_like(g), g), grads)
    direct = [
        {j: found[j] for j, k in enumerate(group.owners) if group.hidden_invars[k] in plan.direct_reads}
        for group, found in zip(plan.groups, reads, strict=True)
    ]
    return targets, (Values(zip(plan.tap_results, ys_bar, strict=True)), [dict(enumerate(s)) for s in signals], direct)


def jacobian_of(local: LocalStep, env: Values) -> Jacobian:
    """D_t: one reverse pass for each component that depends on any."""
    old = local.group.components([env[v] for v in local.group.hidden_invars])
    ys = [env[v] for v in local.taps]
    found = {}
    for i in sorted({i for i, _ in local.pattern}):
        new, pull = jax.vjp(lambda h, i=i: local(env, h, ys)[i], old)
        (row,) = pull(jnp.ones_like(new))
        found.update({(i, j): x for j, x in enumerate(row) if (i, j) in local.pattern})
    return found


def credit_back(
    found: Credit, last: Sequence[Components], length: int, mask: Mask | None = None
) -> tuple[list[Components], list[Components]]:
    """γ of every step and group from γ at the block's end, and γ at its start; of living components only."""

    def step(gamma: list[Components], at: tuple) -> tuple[list[Components], list[Components]]:
        earlier = []
        *found, dead = at
        for later, signals, reads, jacobian in zip(gamma, *found, strict=True):
            whole = later | {i: x + later[i] if i in later else x for i, x in signals.items()}
            terms = {j: [d * whole[i] for (i, k), d in jacobian.items() if k == j and i in whole] for j in later}
            earlier.append({j: _sum([*x, *([reads[j]] if j in reads else [])], later[j]) for j, x in terms.items()})
        return earlier if dead is None else zero_at(earlier, dead), gamma

    given = (found.signals, found.reads, found.jacobians, None if mask is None else mask.dead)
    first, gammas = jax.lax.scan(step, list(last), given, length, reverse=True)
    return gammas, first


def _sum(terms: Sequence[jax.Array], like: jax.Array) -> jax.Array:
    return sum(terms[1:], terms[0]).astype(like.dtype) if terms else jnp.zeros_like(like)


def remaining(recursion: Recursion, jacobian: Jacobian, length: int) -> tuple[Jacobian, Jacobian]:
    """P_t of every step of one group, and P_0 of the whole block."""
    group = recursion.local.group
    dtypes = [x.dtype for x in jacobian.values()] or [v.aval.dtype for v in group.hidden_invars]
    real = jnp.finfo(jnp.result_type(*dtypes)).dtype
    unit = {(i, j): jnp.full(group.varshape, float(i == j), real) for i, j in sorted(recursion.closure)}

    def step(product: Jacobian, now: Jacobian) -> tuple[Jacobian, Jacobian]:
        earlier = {}
        for i, j in product:
            terms = [product[i, k] * d for (k, m), d in now.items() if m == j and (i, k) in product]
            earlier[i, j] = _sum(terms, product[i, j])
        return earlier, product

    first, products = jax.lax.scan(step, unit, jacobian, length, reverse=True)
    return products, first


def local_pull(plan: Plan, const: Values, steps: Values, gammas: Sequence[Components]) -> list[Values]:
    """(∂h_t/∂y|local)ᵀ γ_t of every group, step and tap result y that reaches a component of γ."""

    def one(step: Values, gammas: list[Components]) -> list[Values]:
        env = const | step
        return [pull_one(local, env, gamma) for local, gamma in zip(plan.locals, gammas, strict=True)]

    return jax.vmap(one)(steps, list(gammas))


def pull_one(local: LocalStep, env: Values, gamma: Components) -> Values:
    """(∂h/∂y|local)ᵀ γ of one group at one step."""
    old = local.group.components([env[v] for v in local.group.hidden_invars])
    moving = Values((y, env[y]) for y in local.taps if set(local.reached(y)) & set(gamma))

    def new(moving: Values) -> Components:
        found = local(env, old, [moving.get(y, env[y]) for y in local.taps])
        return {i: found[i] for i in gamma}

    values, pull = jax.vjp(new, moving)
    return pull({i: g.astype(values[i].dtype) for i, g in gamma.items()})[0]


def weight_gradients(
    plan: Plan,
    const: Values,
    steps: Values,
    whole: Values,
    local: Sequence[Values],
    boxes: Mapping[Var, tuple[slice, ...] | None] = {},
    mask: Mask | None = None,
) -> Values:
    """Gradient of every weight operand: one pull-back of each tap over all steps of the block.

    ``whole`` holds the one-step gradients of tap results that count, ``local[g]`` what the credit of group g adds;
    outside of its box in ``boxes`` their sum is zero. An
    operation with cuts inside is pulled back with them for its local part.
    """
    total = Values()
    operands = tap_operands(plan, const, steps, mask)
    for i, tap in plan.taps.items():
        y_bars = {v: whole[v] for v in tap.results if v in whole}
        if not y_bars:
            continue
        parts = []
        for g, bars in enumerate(local):
            cut = cut_inside(i, tap.equation, plan.positions[g].cuts)
            mine = {v: bars[v] for v in tap.results if v in bars}
            if cut is tap.equation:
                y_bars.update((v, y_bars[v] + y) for v, y in mine.items())
            elif mine:
                parts.append((cut, mine))
        reaches_states = any(v in bars for bars in local for v in tap.results)
        data = operands[i] if mask is not None or reaches_states else _spared(operands[i], y_bars)
        for equation, told in [(tap.equation, y_bars), *parts]:
            grads = _pull_tap(plan, equation, tap.weights, const, data, told, boxes)
            for k, grad in grads.items():
                v = equation.invars[k]
                grad = grad.astype(wide(grad.dtype))
                total[v] = total[v] + grad if v in total else grad
    return total


def _spared(operands: dict[int, jax.Array], y_bars: Mapping[Var, jax.Array]) -> dict[int, jax.Array]:
    """Operands with ones at steps that no gradient reaches: a masked loss may be NaN there."""
    rows = lambda x: x.reshape(len(x), -1)
    silent = jnp.stack([jnp.all(rows(y) == 0, axis=1) for y in y_bars.values()]).all(axis=0)

    def spare(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return jnp.where(silent.reshape(-1, *(1,) * (x.ndim - 1)), jnp.ones_like(x), x)

    return {k: spare(x) for k, x in operands.items()}


def _pull_tap(
    plan: Plan,
    equation: Any,
    weights: Sequence[int],
    const: Values,
    operands: dict,
    y_bars: Mapping[Var, jax.Array],
    boxes: Mapping[Var, tuple[slice, ...] | None],
) -> dict[int, Any]:
    if len(weights) == 1 and len(equation.outvars) == 1:
        (y,) = equation.outvars
        found = linear_gradient(equation, weights[0], operands, y_bars[y], plan.facts.constant, boxes.get(y))
        if found is not None:
            return {weights[0]: found}
    given = {k: const[v] if is_var(v) else v.val for k, v in enumerate(equation.invars) if k not in operands}

    def block(moving: dict[int, Any]) -> list[Any]:
        def one(step: dict[int, Any]) -> list[Any]:
            values = {**given, **step, **moving}
            results = evaluate_equation(equation, [values[k] for k in range(len(values))])
            return [y for v, y in zip(equation.outvars, results, strict=True) if v in y_bars]

        return jax.vmap(one, axis_size=_length(y_bars))(operands)

    _, pull = jax.vjp(block, {k: given[k] for k in weights})
    return pull([y_bars[v] for v in equation.outvars if v in y_bars])[0]


def tap_operands(plan: Plan, const: Values, steps: Values, mask: Mask | None = None) -> dict[int, dict[int, jax.Array]]:
    """Data operands of every tap, stacked over the steps of a completed block; finite at steps that are silent."""
    wanted = {
        i: {k: v for k, v in enumerate(tap.equation.invars) if is_var(v) and v not in const}
        for i, tap in plan.taps.items()
    }
    found = {i: {k: steps[v] for k, v in operands.items()} for i, operands in wanted.items()}
    if mask is None:
        return found

    def spared(i: int, operands: dict[int, jax.Array]) -> dict[int, jax.Array]:
        name = plan.equations[i].primitive.name
        family = TABLE.get(name)
        is_product = name == 'mul' or (family is not None and family.kind == 'product')
        return finite(operands, mask.silent, 0.0) if is_product else finite(operands, mask.silent)

    return {i: spared(i, operands) for i, operands in found.items()}


def _length(steps: Mapping[Var, jax.Array]) -> int:
    return len(next(iter(steps.values())))
