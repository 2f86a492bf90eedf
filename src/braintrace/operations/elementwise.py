"""Element-wise operations: element e of every operand reaches element e of the
result."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compat import Equation, is_var
from ..own_primitives import is_whole_cut
from .labels import Const, Labels, elementwise_labels, elementwise_origins, nothing
from .record import FAMILIES, Operation, register
from .weight_use import ElementwiseUse, bind


def _use(eqn: Equation, operand: int, result: int, const: Const) -> ElementwiseUse:
    return bind(ElementwiseUse, eqn, operand, result)


def _sum_use(eqn: Equation, operand: int, result: int, const: Const) -> ElementwiseUse:
    return bind(ElementwiseUse, eqn, operand, result, True)


def _select_labels(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    """Element-wise; where the choice is constant, what is not chosen reaches
    nothing."""
    labels = elementwise_labels(eqn, outs, const)
    which = const(eqn.invars[0])
    if which is None:
        return labels
    result = [labels[0]]
    for case, found in enumerate(labels[1:]):
        if found is not None:
            found = np.where(which.astype(int) == case, found, nothing(found.shape))
        result.append(found)
    return result


def _barrier_labels(eqn: Equation, outs: list[Labels], const: Const) -> list[Labels]:
    return outs


def _has_literal_factor(eqn: Equation) -> bool:
    return any(not is_var(v) for v in eqn.invars)


def _has_literal_divisor(eqn: Equation) -> bool:
    return not is_var(eqn.invars[1])


def _record(**facts: Any) -> Operation:
    """A record of the family; ``facts``: what is known beside its labels."""
    facts = {'labels': elementwise_labels, 'use': _use, **facts}
    return Operation('elementwise', origins=elementwise_origins, **facts)


# A function that is not known is taken for a costly one.
ELEMENTWISE = _record(costly=True)
FAMILIES['elementwise'] = ELEMENTWISE
register(
    _record(),
    'abs and bitcast_convert_type clamp clz complex conj device_put eq ge gt imag '
    'integer_pow is_finite le lt max min name ne not or population_count real '
    'reduce_precision rem rsqrt shift_left shift_right_arithmetic '
    'shift_right_logical sqrt square xor',
)
register(
    ELEMENTWISE,
    'acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh '
    'digamma erf erf_inv erfc exp exp2 expm1 exprel igamma igamma_grad_a igammac '
    'lgamma log log1p logistic polygamma pow random_gamma_grad '
    'regularized_incomplete_beta sin sinh tan tanh zeta',
)
register(_record(linear=True), 'sub neg convert_element_type copy copy_p')
register(_record(linear=True, sum=True, use=_sum_use), 'add add_any')
register(_record(linear=_has_literal_divisor), 'div')
register(_record(linear=_has_literal_factor, multiplies=True), 'mul')
register(
    _record(constant_operands=None), 'sign floor ceil round nextafter stop_gradient'
)
register(
    _record(constant_operands=lambda eqn: (0,) if is_whole_cut(eqn) else ()), 'cut'
)
# The surrogate spike of braintools.
register(_record(constant_operands=(1,)), 'heaviside_surrogate_gradient')
register(_record(constant_operands=(0,)), 'random_gamma')
register(_record(labels=_select_labels), 'select_n')
register(Operation('elementwise', _barrier_labels, use=_use), 'optimization_barrier')
