"""What every value depends on: forward sets of sources, as bits.

``reads`` counts all that must be known to run the equation, ``grads`` only
differentiable paths. Sub-programs are entered; loops iterate to a fixpoint. A
custom-derivative call differentiates whatever its body reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..compat import (
    Atom,
    Equation,
    Jaxpr,
    Var,
    is_differentiable,
    is_var,
    open_jaxpr,
    read_branches,
    read_scan,
    structure,
    sub_programs,
)
from ..operations import operation_of


class Bits(NamedTuple):
    """Sources of a value: in any way, and along differentiable paths."""

    reads: int = 0
    grads: int = 0

    def __or__(self, other: Bits) -> Bits:
        return Bits(self.reads | other.reads, self.grads | other.grads)


def union(bits: Iterable[Bits]) -> Bits:
    """Everything any of them depends on."""
    total = Bits()
    for b in bits:
        total = total | b
    return total


def flow(
    jaxpr: Jaxpr,
    inputs: Sequence[Bits],
    marks: Mapping[Var, Bits] | None = None,
    behind: dict[Var, Bits] | None = None,
) -> dict[Var, Bits]:
    """Sources of every variable of a program.

    ``marks`` adds bits to the given variables. With ``behind`` they are barriers: marks
    replace what was there, which is kept in ``behind``, so that paths through those
    variables do not count.
    """
    env: dict[Var, Bits] = dict.fromkeys(jaxpr.constvars, Bits())
    env.update(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        operands = [env.get(v, Bits()) if is_var(v) else Bits() for v in eqn.invars]
        reads = union(operands).reads
        for var, bits in zip(eqn.outvars, _results(eqn, operands), strict=True):
            bits = Bits(reads, bits.grads)
            grads = bits.grads if is_differentiable(var) else 0
            if marks and var in marks:
                mark = marks[var]
                if behind is not None:
                    behind[var] = Bits(bits.reads, grads)
                    bits, grads = mark, 0
                bits, grads = bits | mark, grads | mark.grads
            env[var] = Bits(bits.reads, grads)
    return env


def of(env: Mapping[Var, Bits], atom: Atom) -> Bits:
    """Sources of an atom."""
    return env.get(atom, Bits()) if is_var(atom) else Bits()


def _outputs(body: Any, inputs: Sequence[Bits]) -> list[Bits]:
    jaxpr = open_jaxpr(body)
    env = flow(jaxpr, inputs)
    return [of(env, v) for v in jaxpr.outvars]


def _results(eqn: Equation, operands: list[Bits]) -> list[Bits]:
    kind = structure(eqn)
    if kind == 'scan':
        return _scan(eqn, operands)
    if kind == 'cond':
        branches = [_outputs(b, operands[1:]) for b in read_branches(eqn)]
        return [union(outs) for outs in zip(*branches, strict=True)]
    if kind in ('custom', 'call'):
        return _custom(eqn, operands)
    operation = operation_of(eqn)
    passes = lambda k: operation is None or operation.differentiates(eqn, k)
    grads = union(b for k, b in enumerate(operands) if passes(k)).grads
    return [Bits(union(operands).reads, grads)] * len(eqn.outvars)


def _custom(eqn: Equation, operands: list[Bits]) -> list[Bits]:
    """Results of a call whose derivative follows whatever its body reads."""
    (sub,) = sub_programs(eqn)
    tags = [Bits(1 << k, 0) for k in range(len(operands))]
    result = []
    for bits in _outputs(sub.jaxpr, tags):
        read = [b for k, b in enumerate(operands) if bits.reads >> k & 1]
        result.append(union(read))
    return result


def carry_fixpoint(
    body: Any, consts: list[Bits], carry: list[Bits], xs: list[Bits]
) -> tuple[list[Bits], list[Bits]]:
    """Sources of a loop's carry and of its stacked results, after any number of
    rounds."""
    while True:
        outs = _outputs(body, [*consts, *carry, *xs])
        new = [c | o for c, o in zip(carry, outs, strict=False)]
        if new == carry:
            return carry, outs[len(carry) :]
        carry = new


def _scan(eqn: Equation, operands: list[Bits]) -> list[Bits]:
    scan = read_scan(eqn)
    operands = operands[scan.num_ignored :]
    a, b = scan.num_consts, scan.num_consts + scan.num_carry
    carry, ys = carry_fixpoint(scan.body, operands[:a], operands[a:b], operands[b:])
    return [*carry, *ys]
