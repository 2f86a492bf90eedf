"""Sparse and event-driven products of brainevent: the operator is hidden in index
arrays.

Products with a compressed sparse matrix run by the kernels of ``synapses``, where these
exist for the types and the platform; otherwise as the model has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..compat import Equation, is_differentiable
from .labels import Const, mixing_labels
from .record import Operation, UseRule, register
from .sparse_product import SparseProduct, multiply
from .sparse_weights import OneWeightUse, SynapseUse
from .synapses import has_kernels
from .weight_use import AnyUse, bind


def _run(product: SparseProduct) -> Callable[[Equation], Callable[..., list] | None]:
    """How equations of a kind run by the kernels."""

    def run(eqn: Equation) -> Callable[[Sequence[Any]], list[Any]] | None:
        weight, x = eqn.invars[0].aval, eqn.invars[product.x].aval
        types = [weight.dtype, eqn.outvars[0].aval.dtype]
        if not has_kernels(*types, *([] if product.events else [x.dtype])):
            return None

        def results(operands: Sequence[Any]) -> list[Any]:
            indices, starts = product.structure(operands)
            data = product.data(jnp.asarray(operands[product.x]), weight.dtype)
            weights = product.weights(operands)
            y = multiply(weights, indices, starts, data, eqn.params)
            copies = [] if product.passes is None else operands[product.passes :]
            return [y, *copies]

        return results

    return run


def _product_use(
    eqn: Equation, operand: int, result: int, const: Const
) -> AnyUse | None:
    """The use of a product whose operator cannot be read."""
    numbers = [k for k, v in enumerate(eqn.invars) if is_differentiable(v)]
    data = [k for k in numbers if k != operand]
    return bind(AnyUse, eqn, operand, result, *data) if len(data) == 1 else None


def _sparse_use(product: SparseProduct) -> UseRule:
    """Uses of the weights of a kind of product."""

    def use(eqn: Equation, operand: int, result: int, const: Const) -> Any:
        read = (1, product.starts, product.order)
        known = [None if k is None else const(eqn.invars[k]) for k in read]
        missing = [k for k, v in zip(read, known, strict=True) if v is None]
        if operand != 0 or any(k is not None for k in missing):
            return _product_use(eqn, operand, result, const)
        indices, starts, order = known
        assert indices is not None
        if eqn.invars[0].aval.size == 1 != indices.size:
            return bind(OneWeightUse, eqn, operand, result, product, eqn.params)
        if starts is None:
            rows, length = indices.shape
            starts = np.arange(rows + 1) * length
        structure = (indices.reshape(-1), starts, order)
        transpose = eqn.params['transpose']
        return bind(SynapseUse, eqn, operand, result, product, transpose, *structure)

    return use


def _register(product: SparseProduct, names: str) -> None:
    operation = Operation(
        'product',
        mixing_labels,
        multiplies=True,
        use=_sparse_use(product),
        run=_run(product),
    )
    register(operation, names)


_register(SparseProduct(), 'csrmv csrmm csr_matvec csr_matmat')
_register(SparseProduct(events=True, passes=4), 'binary_csrmv binary_csrmm')
_register(
    SparseProduct(x=4, order=3, events=True, passes=5),
    'binary_csrmv_indexed binary_csrmm_indexed',
)
_register(
    SparseProduct(x=2, starts=None, events=True),
    'ell_binary_matvec binary_fcnmv binary_fcnmm',
)
register(
    Operation('product', mixing_labels, multiplies=True, use=_product_use),
    'coomv coomm binary_coomv binary_coomm '
    'binary_densemv binary_densemm fcnmv fcnmm '
    'bitpack_binary_fcnmv bitpack_binary_fcnmm compact_binary_fcnmv '
    'compact_binary_fcnmm '
    'jitsmv jitsmm binary_jitsmv binary_jitsmm jitnmv jitnmm binary_jitnmv '
    'binary_jitnmm '
    'jitumv jitumm binary_jitumv binary_jitumm csrmv_dt2t csrmm_dt2t',
)
