"""Normal form: calls inlined everywhere, dead equations dropped.

``jit``, ``remat`` and every other plain call disappear; ``scan``, ``while``, ``cond``
and the custom-derivative calls stay, with bodies in normal form. Results of a scan
leave a program by way of a copy, so that there is an operand to cut, and so do values
that are several results of one body. A ``while`` with
differentiable results becomes a loop that reverse mode can follow. What cannot be
differentiated (callbacks) gets operands without a derivative. Values do not change, nor
do derivatives where JAX has any.
"""

from __future__ import annotations

from typing import Any

from ..compat import (
    Atom,
    ClosedJaxpr,
    Equation,
    Var,
    changed,
    close,
    consts_of,
    copy_equation,
    inlined,
    is_differentiable,
    is_opaque,
    is_var,
    make_jaxpr,
    new_var,
    open_jaxpr,
    replace_sub_programs,
    structure,
    sub_programs,
)
from ..own_primitives import cut_equation
from ..source_lines import from_library
from .loops import followed


def normal_form(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with calls inlined and dead equations dropped."""
    jaxpr = open_jaxpr(closed)
    consts: dict[Var, Any] = dict(zip(jaxpr.constvars, consts_of(closed), strict=True))
    names: dict[Var, Atom] = {}
    equations: list[Equation] = []
    for eqn in jaxpr.eqns:
        _emit(eqn, names, consts, equations)
    outvars = [_read(names, v) for v in jaxpr.outvars]
    equations = drop_dead(_copied(equations, outvars), outvars)
    read = [*outvars, *(v for eqn in equations for v in eqn.invars)]
    used = {v for v in read if is_var(v)}
    consts = {v: c for v, c in consts.items() if v in used}
    return close(
        make_jaxpr(list(consts), jaxpr.invars, outvars, equations, like=jaxpr),
        list(consts.values()),
    )


def _copied(equations: list[Equation], outvars: list[Atom]) -> list[Equation]:
    """The equations with a copy after each scan that makes one of the outputs; all read
    the copy."""
    wanted = {v for v in outvars if is_var(v)}
    result: list[Equation] = []
    for eqn in equations:
        copied = (
            [v for v in eqn.outvars if v in wanted] if structure(eqn) == 'scan' else []
        )
        raw = {v: new_var(v.aval) for v in copied}
        outs = [raw.get(v, v) for v in eqn.outvars]
        result.append(eqn.replace(outvars=outs) if raw else eqn)
        result += [copy_equation(r, v) for v, r in raw.items()]
    return result


def drop_dead(equations: list[Equation], outvars: list[Atom]) -> list[Equation]:
    """Equations that the outputs need, and those with effects."""
    needed = {v for v in outvars if is_var(v)}
    kept = []
    for eqn in reversed(equations):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            needed.update(v for v in eqn.invars if is_var(v))
            kept.append(eqn)
    return kept[::-1]


def _read(names: dict[Var, Atom], atom: Atom) -> Atom:
    return names.get(atom, atom) if is_var(atom) else atom


def _emit(
    eqn: Equation, names: dict[Var, Atom], consts: dict[Var, Any], out: list[Equation]
) -> None:
    """Append an equation, its operands renamed; a call becomes the equations of its
    body."""
    operands = [_read(names, v) for v in eqn.invars]
    if structure(eqn) != 'call':
        eqn = followed(eqn.replace(invars=operands))
        operands = list(eqn.invars)
        bodies = {
            sub.key: _parted(_normal_body(sub.jaxpr), structure(eqn))
            for sub in sub_programs(eqn)
        }
        eqn = replace_sub_programs(eqn, bodies) if bodies else eqn
        if is_opaque(eqn):
            for k, v in enumerate(operands):
                if is_var(v) and is_differentiable(v):
                    out.append(cut_equation(v, None))
                    operands[k] = out[-1].outvars[0]
        out.append(eqn.replace(invars=operands))
        return
    (sub,) = sub_programs(eqn)
    body = open_jaxpr(sub.jaxpr)
    local: dict[Var, Atom] = dict(zip(body.invars, operands, strict=True))
    for var, value in zip(body.constvars, consts_of(sub.jaxpr), strict=True):
        local[var] = new_var(var.aval)
        consts[local[var]] = value
    at_caller = from_library(sub.jaxpr)
    for inner in body.eqns:
        fresh = [new_var(v.aval) for v in inner.outvars]
        moved = inlined(
            inner,
            eqn,
            at_caller,
            invars=[_read(local, v) for v in inner.invars],
            outvars=fresh,
        )
        local.update(zip(inner.outvars, fresh, strict=True))
        _emit(moved, names, consts, out)
    for var, result in zip(eqn.outvars, body.outvars, strict=True):
        names[var] = _read(names, _read(local, result))


def _parted(jaxpr: Any, kind: str) -> Any:
    """A branch or the body of a loop with a copy for each result that is another result
    too, or, in a branch, one of its inputs."""
    if kind not in ('cond', 'scan'):
        return jaxpr
    body = open_jaxpr(jaxpr)
    taken = set(body.invars) if kind == 'cond' else set()
    equations, outvars = list(body.eqns), []
    for v in body.outvars:
        if is_var(v) and v in taken:
            copy = new_var(v.aval)
            equations.append(copy_equation(v, copy))
            v = copy
        elif is_var(v):
            taken.add(v)
        outvars.append(v)
    if len(equations) == len(body.eqns):
        return jaxpr
    return changed(jaxpr, outvars=outvars, equations=equations)


def _normal_body(jaxpr: Any) -> Any:
    if isinstance(jaxpr, ClosedJaxpr):
        return normal_form(jaxpr)
    closed = normal_form(close(jaxpr))
    return closed.jaxpr if not closed.consts else closed
