"""Rewriting a step program before it is planned: products of concatenated inputs become sums of products.

``concatenate([x, h]) @ W`` is ``x @ W[:i] + h @ W[i:]``; the first part depends on no state and leaves the time
loop. Only weights that depend on parameters alone are cut up, and only where the parts differ in what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from ..analysis.dependence import of
from ..analysis.facts import Facts
from ..compat import Atom, Equation, Var, close, inlined, is_var, make_jaxpr, new_var, trace
from ..program import StepProgram


def split_products(program: StepProgram) -> StepProgram:
    """The same step with products of concatenated inputs written as sums."""
    facts = Facts(program)
    equations: list[Equation] = []
    for eqn in program.equations:
        equations += _split(facts, eqn) or [eqn]
    jaxpr = program.closed.jaxpr
    rewritten = make_jaxpr(jaxpr.constvars, jaxpr.invars, jaxpr.outvars, equations)
    return replace(program, closed=close(rewritten, program.closed.consts))


def _split(facts: Facts, eqn: Equation) -> list[Equation] | None:
    if eqn.primitive.name != 'dot_general':
        return None
    (left, right), _ = eqn.params['dimension_numbers']
    weights = [k for k, v in enumerate(eqn.invars) if is_var(v) and facts.is_weight(of(facts.total, v))]
    if len(weights) != 1 or len(left) != 1:
        return None
    (k,) = weights
    axis, weight_axis = (left[0], right[0]) if k == 1 else (right[0], left[0])
    joined = eqn.invars[1 - k]
    maker = facts.program.equations[facts.producer[joined]] if joined in facts.producer else None
    if maker is None or maker.primitive.name != 'concatenate' or maker.params['dimension'] != axis:
        return None
    states = sum(facts.bit[h.invar] for h in facts.program.hidden) | sum(facts.new_bit.values())
    if len({bool(of(facts.total, v).reads & states) for v in maker.invars}) != 2:
        return None

    def parts(weight: jax.Array, *xs: jax.Array) -> jax.Array:
        total: Any = None
        start = 0
        for x in xs:
            size = x.shape[axis]
            piece = jax.lax.slice_in_dim(weight, start, start + size, axis=weight_axis)
            operands = (x, piece) if k == 1 else (piece, x)
            product = jax.lax.dot_general(
                *operands,
                eqn.params['dimension_numbers'],
                precision=eqn.params['precision'],
                preferred_element_type=eqn.params['preferred_element_type'],
            )
            total, start = product if total is None else total + product, start + size
        return total

    return _inline(parts, [eqn.invars[k], *maker.invars], eqn)


def _inline(function: Callable[..., Any], operands: Sequence[Atom], caller: Equation) -> list[Equation]:
    """Equations of a function of some operands that give the results of another equation."""
    body = trace(function, [v.aval for v in operands])
    names: dict[Var, Atom] = dict(zip(body.jaxpr.invars, operands, strict=True))
    results = dict(zip(body.jaxpr.outvars, caller.outvars, strict=True))
    equations = []
    for eqn in body.jaxpr.eqns:
        names.update((v, results.get(v) or new_var(v.aval)) for v in eqn.outvars)
        renamed = [names[v] if is_var(v) else v for v in eqn.invars]
        equations.append(inlined(eqn, caller, body, invars=renamed, outvars=[names[v] for v in eqn.outvars]))
    return equations
