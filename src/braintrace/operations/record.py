"""The record of an operation, and the registry of all records.

One record serves a family of primitives. The analysis uses it to find how elements of
operands reach elements of results (labels). The lowering and the solver use it to find
how a weight is used. Only files of this folder and ``compat.py`` decide by the name of
a primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..compat import Equation, Primitive, evaluate_equation
from ..compiled_step import Box, WeightUse
from ..errors import three_parts
from .labels import (
    CONFLICT,
    NONE,
    Const,
    LabelRule,
    Labels,
    OriginRule,
    gather_back,
    join,
)
from .weight_use import AnyUse, bind


class Kernel(NamedTuple):
    """A faster way to run a product in a loop. The weight is prepared once for each
    call."""

    prepare: Callable[[Any], Any]
    apply: Callable[[Any, Any], Any]
    """(prepared weight, x): y."""


class UseRule(Protocol):
    """Describes how an equation uses a weight. None means the general way."""

    def __call__(
        self, eqn: Equation, operand: int, result: int, const: Const
    ) -> WeightUse | None: ...


@dataclass(frozen=True)
class Operation:
    """The description of a family of primitives for the compiler.

    - ``family``: its name in reports. The compiler gives 'elementwise', 'movement',
      'reduction' and 'product' a meaning.
    - ``labels``: which elements of the operands reach which elements of the results.
    - ``origins``: the same relation, from results to operands, for operations that
      repeat elements of an operand.
    - ``constant_operands``: operands without a derivative, or a function of the
      equation that returns them; None for all operands.
    - ``linear``: True if the derivatives need no value of an operand, or a function of
      the equation.
    - ``sum``: the result is the sum of the operands.
    - ``multiplies``: the result is the product of the operands.
    - ``costly``: an element of the result takes many times as long as a sum.
    - ``use``: trace layout, weight gradient and factors of a weight among the operands.
    - ``kernel``: a faster way to run the equation with this operand as a weight, or
      None.
    - ``split``: for an equation whose data operand was computed by the equation
      ``maker``: a function of the weight and the operands of ``maker`` that returns
      parts whose sum is the result, or None.
    - ``run``: a function of the equation that returns another way to run it, with the
      same derivatives, or None.
    - ``part``: if the result is a rectangular part of the only operand, this part;
      otherwise None.
    """

    family: str
    labels: LabelRule
    constant_operands: Sequence[int] | Callable[[Equation], Sequence[int]] | None = ()
    origins: OriginRule | None = None
    linear: bool | Callable[[Equation], bool] = False
    sum: bool = False
    multiplies: bool = False
    costly: bool = False
    use: UseRule | None = None
    kernel: Callable[[Equation, int], Kernel | None] | None = None
    split: (
        Callable[[Equation, int, Equation], Callable[..., list[Any]] | None] | None
    ) = None
    run: Callable[[Equation], Callable[[Sequence[Any]], list[Any]] | None] | None = None
    part: Callable[[Equation], Box | None] | None = None

    def differentiates(self, eqn: Equation, operand: int) -> bool:
        """Whether the results have a derivative with respect to an operand."""
        constant = self.constant_operands
        if callable(constant):
            constant = constant(eqn)
        return constant is not None and operand not in constant

    def is_linear(self, eqn: Equation) -> bool:
        """Whether the derivative of the equation needs no value of its operands."""
        return self.linear(eqn) if callable(self.linear) else self.linear

    @property
    def is_product(self) -> bool:
        """Whether its weights multiply data from elsewhere, as a layer does."""
        return self.family == 'product'


def element_numbers(eqn: Equation, ends: np.ndarray) -> list[Labels]:
    """The elements of all results, numbered one after the other."""
    return [
        np.arange(end - v.aval.size, end, dtype=np.int32).reshape(v.aval.shape)
        for v, end in zip(eqn.outvars, ends, strict=True)
    ]


def forward_labels(
    eqn: Equation, ins: Sequence[Labels], reached: Sequence[Labels], ends: np.ndarray
) -> list[Labels]:
    """Labels of results, given the numbered result element that each operand element
    reaches."""
    came: Labels = None
    for labels, numbers in zip(ins, reached, strict=True):
        if labels is not None and numbers is not None:
            came = join(came, gather_back(labels, numbers, (ends[-1],)))
    if came is None:
        return [None] * len(eqn.outvars)
    came = np.where(came == CONFLICT, NONE, came).astype(np.int32)
    parts = np.split(came, ends[:-1])
    return [
        part.reshape(v.aval.shape) for v, part in zip(eqn.outvars, parts, strict=True)
    ]


REGISTRY: dict[str, Operation] = {}
"""Every operation that is known, by the name of its primitive."""


def operation_of(eqn: Equation) -> Operation | None:
    """The operation of an equation; None if its primitive is not registered."""
    return REGISTRY.get(eqn.primitive.name)


def differentiates(eqn: Equation, operand: int) -> bool:
    """Whether the results of an equation may have a derivative with respect to an
    operand: all have where its primitive is not registered."""
    operation = operation_of(eqn)
    return operation is None or operation.differentiates(eqn, operand)


def is_linear(eqn: Equation) -> bool:
    """Whether the derivative of an equation is known to need no value of its
    operands."""
    operation = operation_of(eqn)
    return operation is not None and operation.is_linear(eqn)


def run_equation(eqn: Equation, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation, by a kernel where its operation has one."""
    operation = operation_of(eqn)
    run = operation.run(eqn) if operation and operation.run else None
    return evaluate_equation(eqn, operands) if run is None else run(operands)


def use_of(eqn: Equation, operand: int, result: int, const: Const) -> WeightUse:
    """How an equation uses one of its operands as a weight."""
    operation = operation_of(eqn)
    found = (
        operation.use(eqn, operand, result, const)
        if operation and operation.use
        else None
    )
    return bind(AnyUse, eqn, operand, result) if found is None else found


def register(operation: Operation, names: str) -> None:
    """Register an operation under the names of its primitives."""
    for name in names.split():
        REGISTRY[name] = operation


FAMILIES: dict[str, Operation] = {}
"""Operations that a user can name in place of a record."""


def register_primitive(
    primitive: Primitive | str,
    operation: Operation | str | LabelRule,
    *,
    constant_operands: tuple[int, ...] = (),
) -> None:
    """Declare a primitive of your own to the compiler.

    ``operation`` is one of these:

    - an :class:`Operation`, e.g. ``operations.product('bi,io->bo')``;
    - ``'elementwise'``: element e of every operand reaches element e of the result;
    - ``'mixing'``: any element may reach any other;
    - a function that computes labels.

    ``constant_operands``: operands without a derivative, if ``operation`` is a name or
    a function.
    """
    name = primitive if isinstance(primitive, str) else primitive.name
    if isinstance(operation, str):
        if operation not in FAMILIES:
            raise ValueError(
                three_parts(
                    f'register_primitive(..., {operation!r})',
                    'no family has that name',
                    f'one of {", ".join(map(repr, FAMILIES))}, an Operation, or a '
                    'function labels(eqn, outs, const)',
                )
            )
        operation = replace(FAMILIES[operation], constant_operands=constant_operands)
    elif not isinstance(operation, Operation):
        operation = Operation('registered', operation, constant_operands)
    REGISTRY[name] = operation
