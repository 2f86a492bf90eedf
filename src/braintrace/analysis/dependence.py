"""What every value of a step depends on: forward sets of sources, as bits; the values
that depend on nothing; and where credit ends because an operation has no reverse
derivative.

``reads`` counts all that must be known to run the equation, ``grads`` only
differentiable paths. Sub-programs are entered; loops iterate to a fixpoint. A
custom-derivative call differentiates whatever its body reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from ..compat import (
    Atom,
    Equation,
    Jaxpr,
    Var,
    consts_of,
    evaluate_equation,
    is_differentiable,
    is_opaque,
    is_var,
    open_jaxpr,
    read_branches,
    read_scan,
    structure,
    sub_programs,
)
from ..errors import CompilationError, three_parts
from ..operations import differentiates
from ..own_primitives import is_whole_cut
from ..program import Hidden, StepProgram
from ..source_lines import source_text


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
    marks: Mapping[Var, Bits] = {},
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
        operands = [of(env, v) for v in eqn.invars]
        reads = union(operands).reads
        for var, bits in zip(eqn.outvars, _results(eqn, operands), strict=True):
            found = Bits(reads, bits.grads if is_differentiable(var) else 0)
            if var in marks:
                if behind is not None:
                    behind[var], found = found, Bits()
                found = found | marks[var]
            env[var] = found
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
    read = (b for k, b in enumerate(operands) if differentiates(eqn, k))
    return [union(read)] * len(eqn.outvars)


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


# ---------------------------------------------------------------- constants


class Constants:
    """Values inside a program that depend on none of its inputs: index arrays, masks,
    starts of slices.

    They are folded on demand. ``given``: inputs of a body that stand for atoms of the
    program ``around`` it.
    """

    def __init__(
        self,
        jaxpr: Any,
        given: Mapping[Var, Atom] = {},
        around: Constants | None = None,
    ):
        body: Jaxpr = open_jaxpr(jaxpr)
        # A step that closes over an array of a jit around it has that tracer as a
        # constant: fixed during the step, but its value is not known here.
        self.values: dict[Var, Any] = {
            v: value
            for v, value in zip(body.constvars, consts_of(jaxpr), strict=False)
            if not isinstance(value, jax.core.Tracer)
        }
        self.around = around
        self.given = {
            v: atom
            for v, atom in given.items()
            if around is not None and around.knows(atom)
        }
        self.producer: dict[Var, Equation] = {}
        for eqn in body.eqns:
            if not eqn.effects and all(self.knows(v) for v in eqn.invars):
                self.producer.update(dict.fromkeys(eqn.outvars, eqn))

    def knows(self, atom: Atom) -> bool:
        """True for an atom whose value is constant."""
        return (
            not is_var(atom)
            or atom in self.values
            or atom in self.given
            or atom in self.producer
        )

    def __call__(self, atom: Atom) -> np.ndarray | None:
        """The value of a constant atom; None for the others."""
        if not is_var(atom):
            return np.asarray(atom.val)
        if not self.knows(atom):
            return None
        if atom not in self.values:
            if atom in self.given and self.around is not None:
                self.values[atom] = self.around(self.given[atom])
            else:
                eqn = self.producer[atom]
                operands = [self(v) for v in eqn.invars]
                with jax.ensure_compile_time_eval():
                    self.values.update(
                        zip(eqn.outvars, evaluate_equation(eqn, operands), strict=True)
                    )
        return np.asarray(self.values[atom])


# ---------------------------------------------------------------- of a step


class StepDependence:
    """A step program, the bit that stands for each of its sources, and what each of its
    values depends on.

    ``bit``: one bit for each parameter, old hidden state and old other state; inputs
    share one. ``new_bit``: one for each new hidden state. ``parameters``: bits of all
    parameters; ``data``: of everything else. ``producer``: the index of the equation
    that defines each variable. ``constant``: the value of an atom that depends on no
    source; None for the others.

    Three maps from variables to their sources: ``total`` by any path, ``direct`` by
    paths that end at a new hidden state when they meet one, ``behind``, of each new
    hidden state, by paths through no other new state.
    """

    def __init__(self, program: StepProgram):
        self.program = program
        sources = [
            *(x.invar for x in program.parameters),
            *(x.invar for x in program.hidden),
            *(x.invar for x in program.others),
        ]
        self.bit: dict[Var, int] = {v: 1 << i for i, v in enumerate(sources)}
        self.bit |= dict.fromkeys(program.inputs, 1 << len(sources))
        start = len(self.bit) + 1
        self.new_bit: dict[Var, int] = {
            h.outvar: 1 << (start + i) for i, h in enumerate(program.hidden)
        }
        self.parameters = sum(self.bit[x.invar] for x in program.parameters)
        every = sum(set(self.bit.values())) + sum(self.new_bit.values())
        self.data = every - self.parameters
        self.producer: dict[Var, int] = {
            v: i for i, eqn in enumerate(program.equations) for v in eqn.outvars
        }
        self.constant = Constants(program.closed)
        jaxpr = program.closed.jaxpr
        given = [Bits(self.bit[v], self.bit[v]) for v in jaxpr.invars]
        marks = {v: Bits(b, b) for v, b in self.new_bit.items()}
        self.behind: dict[Var, Bits] = {}
        self.total = flow(jaxpr, given, marks)
        self.direct = flow(jaxpr, given, marks, self.behind)

    def old(self, group: tuple[Hidden, ...]) -> int:
        """Bits of old hidden states."""
        return sum(self.bit[h.invar] for h in group)

    def new(self, group: tuple[Hidden, ...]) -> int:
        """Bits of new hidden states."""
        return sum(self.new_bit[h.outvar] for h in group)

    def ever_behind(
        self, atoms: Iterable[Atom], without: Mapping[Var, int] = {}
    ) -> int:
        """Bits of all that these values depend on, in their own step or by states that
        earlier steps left. ``without``: of new hidden states, bits of sources whose
        direct paths to them do not count."""
        p, direct = self.program, self.direct
        states = []
        for h in p.hidden:
            new = self.new_bit[h.outvar]
            sources = of(self.behind, h.outvar).grads & ~without.get(h.outvar, 0)
            states.append((self.bit[h.invar] | new, sources | new))
        states += [
            (self.bit[o.invar], of(direct, o.outvar).grads)
            for o in p.others
            if o.outvar is not None
        ]
        found, more = 0, union(of(direct, atom) for atom in atoms).grads
        while more != found:
            found = more
            for bits, sources in states:
                more |= sources if found & bits else 0
        return found

    def is_weight(self, bits: Bits) -> bool:
        """Depends on parameters, and on nothing but parameters and constants."""
        return bool(bits.grads & self.parameters) and not bits.reads & self.data


class DependenceThrough(Mapping[Var, Bits]):
    """Sources of every value by paths that lead through some new hidden states and no
    others: a view of the direct sources."""

    def __init__(self, dependence: StepDependence, through: tuple[Hidden, ...]):
        self.direct = dependence.direct
        self.every = sum(dependence.new_bit.values())
        self.inner = {
            dependence.new_bit[h.outvar]: dependence.behind[h.outvar] for h in through
        }
        self.through = sum(self.inner)

    def __getitem__(self, var: Var) -> Bits:
        bits = self.direct[var]
        grads, todo = bits.grads & ~self.every, bits.grads & self.through
        done = 0
        while todo:
            bit = todo & -todo
            done |= bit
            more = self.inner[bit].grads
            grads |= more & ~self.every
            todo = (todo | more & self.through) & ~done
        return Bits(bits.reads, grads)

    def __iter__(self) -> Iterator[Var]:
        return iter(self.direct)

    def __len__(self) -> int:
        return len(self.direct)


# ---------------------------------------------------------------- no reverse derivative


def opaque_equations(dependence: StepDependence) -> list[tuple[Equation, int]]:
    """What has no reverse derivative, and the bits whose credit ends there."""
    equations = dependence.program.equations
    source = {e.outvars[0]: e.invars[0] for e in equations if is_whole_cut(e)}
    found = []
    for eqn in equations:
        read = [source.get(v, v) for v in eqn.invars if is_var(v)]
        bits = union(of(dependence.total, v) for v in read).grads
        found += [(e, bits) for e in _opaque_in(eqn) if bits]
    return found


def check_loops(dependence: StepDependence, opaque: list[tuple[Equation, int]]) -> None:
    """Raise if credit is lost in a loop of unknown length.

    Such loops are followed, except where they print or call Python code.
    """
    hidden = dependence.program.hidden
    wanted = dependence.parameters | dependence.old(hidden) | dependence.new(hidden)
    for eqn, bits in opaque:
        if structure(eqn) == 'while' and bits & wanted:
            raise CompilationError(
                three_parts(
                    f'a while loop with side effects at {source_text(eqn)}',
                    'parameters or hidden states act on its results, and reverse mode '
                    'runs its rounds again, so it would print or call back again too',
                    'the loop without jax.debug or callbacks in it; a loop of fixed '
                    'length (jax.lax.scan, fori_loop with static bounds); or '
                    'jax.lax.stop_gradient on what it reads, if no gradient is needed',
                )
            )


def _opaque_in(eqn: Equation) -> Iterator[Equation]:
    """What has no reverse derivative in an equation: itself, or equations of its body
    where no rule of its own does."""
    if is_opaque(eqn):
        yield eqn
    elif structure(eqn) != 'custom':
        for sub in sub_programs(eqn):
            for inner in open_jaxpr(sub.jaxpr).eqns:
                yield from _opaque_in(inner)


@dataclass(frozen=True)
class Relevance:
    """Which values matter to one group: those with a gradient from these sources, met
    with data. ``old``: the sources among them that are old states."""

    sources: int
    data: int
    old: int = -1

    def __call__(self, bits: Bits) -> bool:
        return bool(bits.grads & self.sources) and bool(bits.reads & self.data)

    def reaches(self, bits: Bits) -> bool:
        """Whether old states of the group reach a value."""
        return bool(bits.grads & self.old)
