"""Which elements of new states each element of a parameter or an old state can move
within one step, whatever the values are: the pattern of SnAp.

A backward pass over the step like that of ``positions.py``, but nothing is cut: an
element may reach any set of elements of new states. Sets are numbered, and the label of
an element is the number of its set. So the rules of the families serve here too: they
move labels, and where they find a conflict, the union of the sets gets a number.

A factor that is zero whatever the inputs are ends a path: masks of weights, and weights
that stand between zeros in an array, keep a recurrence sparse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..compat import (
    Atom,
    ClosedJaxpr,
    Equation,
    Var,
    evaluate_equation,
    is_differentiable,
    is_var,
    open_jaxpr,
    read_branches,
    read_scan,
    structure,
    sub_programs,
)
from ..operations import (
    ELEMENTWISE,
    MIXING,
    element_numbers,
    operation_of,
    run_equation,
)
from ..operations.labels import CONFLICT, NONE, Labels, join, join_over
from ..source_lines import from_library
from .dependence import Constants
from .probe import confirmed, is_elementwise

Moves = Callable[[list[Labels]], list[Labels]]
"""Labels of the operands of an equation from those of its results."""


def reached_elements(
    closed: ClosedJaxpr, results: Sequence[Atom], sources: Iterable[Var]
) -> dict[Var, np.ndarray]:
    """For each source (its elements, elements of all results): whether the one can move
    the other."""
    ends = np.cumsum([atom.aval.size for atom in results])
    sets = _Sets(int(ends[-1]))
    labels: list[Labels] = [
        np.arange(end - atom.aval.size, end, dtype=np.int32).reshape(atom.aval.shape)
        for atom, end in zip(results, ends, strict=True)
    ]
    # A step may be compiled while a program of the caller's is being traced.
    with jax.ensure_compile_time_eval():
        whole = _PatternPass(sets, closed, Constants(closed))
        reached = whole.run(results, labels)
    # One more row, which the label NONE selects.
    rows = np.zeros((len(sets.members) + 1, sets.size), bool)
    for number, members in enumerate(sets.members):
        bits = np.frombuffer(members.to_bytes(sets.size // 8 + 1, 'little'), np.uint8)
        rows[number] = np.unpackbits(bits, bitorder='little')[: sets.size]
    found = {}
    for v in sources:
        at = reached.get(v)
        found[v] = rows[np.full(v.aval.size, NONE) if at is None else at.reshape(-1)]
    return found


class _Sets:
    """Sets of elements, each held as the bits of a number; the first ``size`` of them
    have one element each."""

    def __init__(self, size: int):
        self.size = size
        self.members = [1 << e for e in range(size)]
        self.labels = {members: e for e, members in enumerate(self.members)}

    def union(self, a: Labels, b: Labels) -> Labels:
        """Element by element, the union of two sets."""
        if a is None or b is None:
            return b if a is None else a
        return self._resolved(join(a, b), np.stack([a, b]))

    def union_over_rounds(self, labels: Labels) -> Labels:
        """The union along the first axis, which disappears."""
        if labels is None:
            return None
        return self._resolved(join_over(labels, [0]), labels)

    def through(self, moves: Moves, outs: list[Labels]) -> list[Labels]:
        """The sets that operands reach, from those that results reach.

        An element with a conflict reaches several: labels of one set alone say whether
        that is among them.
        """
        ins = moves(outs)
        parted = [x is not None and bool((x == CONFLICT).any()) for x in ins]
        if not any(parted):
            return ins
        flat = [out.reshape(-1) for out in outs if out is not None]
        present = np.unique(np.concatenate(flat))
        of_one = [
            moves([out if out is None else np.where(out == n, n, NONE) for out in outs])
            for n in present[present != NONE]
        ]
        for k, labels in enumerate(ins):
            if labels is not None and parted[k]:
                # A rule may give None for an operand that reaches nothing.
                nothing = np.full(labels.shape, NONE, np.int32)
                rows = [found[k] for found in of_one]
                every = np.stack([nothing if row is None else row for row in rows])
                ins[k] = self._resolved(labels, every)
        return ins

    def _resolved(self, labels: Labels, every: np.ndarray) -> Labels:
        """The labels, and in place of a conflict that of the union of all sets which
        ``every`` has there along its first axis."""
        assert labels is not None
        where = labels == CONFLICT
        if not where.any():
            return labels
        columns, inverse = np.unique(every[:, where], axis=1, return_inverse=True)
        numbers = []
        for column in columns.T:
            members = 0
            for number in column[column != NONE]:
                members |= self.members[number]
            if members not in self.labels:
                self.labels[members] = len(self.members)
                self.members.append(members)
            numbers.append(self.labels[members])
        labels = np.array(labels, np.int32)
        labels[where] = np.array(numbers)[inverse.reshape(-1)]
        return labels


class _PatternPass:
    """A backward pass over a program, or a body inside it.

    ``nonzero``: of some inputs, which elements may differ from zero. ``opaque``: a body
    with a derivative of its own, which may follow whatever is read; elsewhere paths end
    at whole numbers and at operands without a derivative.
    """

    def __init__(
        self,
        sets: _Sets,
        program: Any,
        const: Constants,
        nonzero: Mapping[Var, np.ndarray] = {},
        opaque: bool = False,
    ):
        self.sets, self.jaxpr = sets, open_jaxpr(program)
        self.const, self.opaque = const, opaque
        self.nonzero = dict(nonzero)
        for eqn in self.jaxpr.eqns:
            mask = self.mask_of_result(eqn)
            if mask is not None and not mask.all():
                self.nonzero[eqn.outvars[0]] = mask

    def run(
        self, results: Sequence[Atom], labels: Sequence[Labels]
    ) -> dict[Var, np.ndarray]:
        """The sets that values reach; ``labels``: those of the results."""
        reached: dict[Var, Any] = {}
        self.note(reached, results, labels)
        for eqn in reversed(self.jaxpr.eqns):
            outs = [
                reached.get(v) if self.opaque or is_differentiable(v) else None
                for v in eqn.outvars
            ]
            if all(out is None for out in outs):
                continue
            kind = structure(eqn)
            if kind in ('custom', 'call'):
                ins = self.call(eqn, outs)
            elif kind == 'cond':
                ins = self.branches(eqn, outs)
            elif kind == 'scan':
                ins = self.loop(eqn, outs)
            else:
                ins = self.equation(eqn, outs)
            self.note(reached, eqn.invars, ins)
        return reached

    def note(
        self,
        reached: dict[Var, Any],
        atoms: Sequence[Atom],
        labels: Sequence[Labels],
    ) -> None:
        for v, x in zip(atoms, labels, strict=True):
            if x is not None and is_var(v) and (self.opaque or is_differentiable(v)):
                reached[v] = self.sets.union(reached.get(v), x)

    def mixed(self, eqn: Equation, outs: list[Labels]) -> list[Labels]:
        """Sets of operands each of which reaches all that any result does."""
        moves = lambda outs: MIXING.labels(eqn, outs, self.const)
        return self.sets.through(moves, outs)

    # ------------------------------------------------------------ one equation

    def equation(self, eqn: Equation, outs: list[Labels]) -> list[Labels]:
        operation = operation_of(eqn)
        if operation is None:
            operation = ELEMENTWISE if is_elementwise(eqn) else MIXING
        moves: Moves = lambda outs: operation.labels(eqn, outs, self.const)
        if self.opaque:
            return self.sets.through(moves, outs)
        masks = [self.mask(v) for v in eqn.invars]
        # Labels describe a product by its axes. They know neither zeros, nor index
        # arrays, nor the borders of a convolution, nor which axes a solver keeps apart.
        has_zeros = any(mask is not None for mask in masks)
        beyond_axes = operation.multiplies and (has_zeros or operation.origins is None)
        if beyond_axes or operation.family == 'mixing':
            moves = self.moves_by_derivative(eqn, masks) or moves
        ins = self.sets.through(moves, outs)
        return [
            x if operation.differentiates(eqn, k) else None for k, x in enumerate(ins)
        ]

    def moves_by_derivative(
        self, eqn: Equation, masks: Sequence[np.ndarray | None]
    ) -> Moves | None:
        """How labels pass an equation by its derivative at random positive numbers, at
        which nothing cancels: what is not zero is reached. None if it reads whole
        numbers that are no constants, or has no derivative."""
        draw = lambda shape: np.random.default_rng(0).uniform(0.5, 1.5, shape)
        values: list[Any] = []
        for v, mask in zip(eqn.invars, masks, strict=True):
            value: Any = self.const(v)
            if value is None and is_differentiable(v):
                value = draw(v.aval.shape) * (1 if mask is None else mask)
            if value is None:
                return None
            values.append(jnp.asarray(value, v.aval.dtype))
        factors = [k for k, v in enumerate(eqn.invars) if is_differentiable(v)]
        results = [i for i, v in enumerate(eqn.outvars) if is_differentiable(v)]

        def run(changed: list[Any]) -> list[Any]:
            at = dict(zip(factors, changed, strict=True))
            found = run_equation(eqn, [at.get(k, x) for k, x in enumerate(values)])
            return [found[i] for i in results]

        def moves(outs: list[Labels]) -> list[Labels]:
            bars, present = [], set()
            for i in results:
                like, out = eqn.outvars[i].aval, outs[i]
                reaches = np.zeros(like.shape) if out is None else out != NONE
                bars.append(jnp.asarray(draw(like.shape) * reaches, like.dtype))
                present |= set() if out is None else {*np.unique(out)} - {NONE}
            (found,) = pull(bars)
            label = present.pop() if len(present) == 1 else CONFLICT
            ins: list[Labels] = [None] * len(eqn.invars)
            for k, x in zip(factors, found, strict=True):
                ins[k] = np.where(np.asarray(x) != 0, label, NONE).astype(np.int32)
            return ins

        try:
            # Compiled, since it is called once for each set.
            pull = jax.jit(jax.vjp(run, [values[k] for k in factors])[1])
        except Exception:
            # A derivative that fails here fails in training too, and says so there.
            return None
        return moves

    # ------------------------------------------------------------ bodies

    def body(
        self, program: Any, operands: Sequence[Atom], opaque: bool = False
    ) -> _PatternPass:
        """A pass over a body whose first inputs are the given operands."""
        inputs = dict(zip(open_jaxpr(program).invars, operands, strict=False))
        masks = {v: self.mask(atom) for v, atom in inputs.items()}
        return _PatternPass(
            self.sets,
            program,
            Constants(program, inputs, self.const),
            {v: mask for v, mask in masks.items() if mask is not None},
            opaque or self.opaque,
        )

    def inputs(self, labels: Sequence[Labels]) -> list[Labels]:
        """The sets that the inputs reach, from those of the outputs."""
        reached = self.run(self.jaxpr.outvars, labels)
        return [reached.get(v) for v in self.jaxpr.invars]

    def call(self, eqn: Equation, outs: list[Labels]) -> list[Labels]:
        """Through the body; an operand by which the call's own derivative reaches more
        than the body does reaches all."""
        (sub,) = sub_programs(eqn)
        inner = self.body(sub.jaxpr, eqn.invars, opaque=True)
        ins = inner.inputs(outs)
        if self.opaque or from_library(sub.jaxpr):
            return ins
        # What the body reaches of the call's own results, whose elements are numbered.
        ends = np.cumsum([v.aval.size for v in eqn.outvars])
        numbers = element_numbers(eqn, ends)
        inner.sets = _Sets(int(ends[-1]))
        own = [
            x if x is None else np.where(x < ends[-1], x, CONFLICT).astype(np.int32)
            for x in inner.inputs(numbers)
        ]
        mixed = self.mixed(eqn, outs)
        agreed = confirmed(eqn, numbers, own)
        return [
            ins[k] if agreed[k] is own[k] else mixed[k] for k in range(len(eqn.invars))
        ]

    def branches(self, eqn: Equation, outs: list[Labels]) -> list[Labels]:
        """What an operand reaches in any branch that may be chosen."""
        which, operands = self.const(eqn.invars[0]), eqn.invars[1:]
        branches = read_branches(eqn)
        if which is not None:
            branches = [branches[np.clip(which, 0, len(branches) - 1)]]
        ins: list[Labels] = [None] * len(operands)
        for branch in branches:
            found = self.body(branch, operands).inputs(outs)
            ins = [self.sets.union(a, b) for a, b in zip(ins, found, strict=True)]
        chooser = self.mixed(eqn, outs)[0] if self.opaque else None
        return [chooser, *ins]

    def loop(self, eqn: Equation, outs: list[Labels]) -> list[Labels]:
        """Sets of the carry grow to a fixpoint; a stacked result reaches in each round
        what it reaches in any."""
        scan = read_scan(eqn)
        first, a = scan.num_ignored, scan.num_consts
        b = a + scan.num_carry
        inner = self.body(scan.body, eqn.invars[first : first + a])
        carry: list[Any] = outs[: scan.num_carry]
        stacked = [self.sets.union_over_rounds(x) for x in outs[scan.num_carry :]]
        while True:
            ins = inner.inputs([*carry, *stacked])
            pairs = zip(carry, ins[a:b], strict=True)
            grown: list[Any] = [self.sets.union(c, x) for c, x in pairs]
            if all(np.array_equal(g, c) for g, c in zip(grown, carry, strict=True)):
                break
            carry = grown
        if scan.length is None:
            ins[a:b] = carry  # it may end before the first round
        for k in range(b, len(ins)):
            if (x := ins[k]) is not None:
                ins[k] = np.broadcast_to(x, eqn.invars[first + k].aval.shape)
        # A derivative that is not known might follow the condition.
        condition = self.mixed(eqn, outs) if self.opaque else [None] * first
        return [*condition[:first], *ins]

    # ------------------------------------------------------------ elements always zero

    def mask(self, atom: Atom) -> np.ndarray | None:
        """Which elements of a value may differ from zero; None if all may."""
        if not is_differentiable(atom):
            return None
        value = self.const(atom)
        if value is None:
            return self.nonzero.get(atom)
        return None if value.all() else value != 0

    def mask_of_result(self, eqn: Equation) -> np.ndarray | None:
        """Which elements of the result may differ from zero, where zeros among the
        operands show it: in products, sums, movement, and functions that are zero at
        zero."""
        operation, masks = operation_of(eqn), [self.mask(v) for v in eqn.invars]
        if operation is None or all(mask is None for mask in masks):
            return None
        v, *others = eqn.outvars
        if others or not is_differentiable(v) or self.const.knows(v):
            return None
        pairs = [(x, self.const(x)) for x in eqn.invars]
        varying = [k for k, (_, value) in enumerate(pairs) if value is None]
        if not all(is_differentiable(eqn.invars[k]) for k in varying):
            return None
        is_sum = operation.family == 'reduction' and operation.is_linear(eqn)
        if is_sum or operation.multiplies or operation.family == 'movement':
            # At random numbers nothing cancels; of both signs, since the maximum of a
            # number and zero may be zero.
            draw, found = np.random.default_rng(0).normal, np.zeros(v.aval.shape, bool)
            for sign in (1, -1):
                values = [
                    sign * draw(size=x.aval.shape) * (1 if mask is None else mask)
                    if is_differentiable(x)
                    else value
                    for (x, value), mask in zip(pairs, masks, strict=True)
                ]
                found |= _evaluated(eqn, values) != 0
            return found
        if operation.family != 'elementwise':
            return None
        found = np.zeros(v.aval.shape, bool)
        for k, labels in enumerate(
            operation.labels(eqn, [np.zeros(v.aval.shape, np.int32)], self.const)
        ):
            if k in varying and labels is not None:
                mask = masks[k]
                found |= (labels != NONE) & (True if mask is None else mask)
        if found.all():
            return None
        # Where all that varies is zero, the result is that at zero.
        at_zero = [np.zeros(x.aval.shape) if y is None else y for x, y in pairs]
        return found | (_evaluated(eqn, at_zero) != 0)


def _evaluated(eqn: Equation, values: Sequence[Any]) -> np.ndarray:
    pairs = zip(eqn.invars, values, strict=True)
    typed = [jnp.asarray(x, v.aval.dtype) for v, x in pairs]
    return np.asarray(evaluate_equation(eqn, typed)[0])
