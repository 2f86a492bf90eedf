"""Operations: one record a family of primitives, one registry.

    record            the record of an operation, and the registry
    labels            label arrays, and the rules that several families share
    elementwise, movement, reduction, gather, convolution, mixing    families
    dense             products; dense_traces, how their traces are stored and advanced
    weight_use        uses of weights; whole_traces, traces solved in one piece
    sparse            products of brainevent; sparse_product, how equations hold them
    sparse_weights    their gradients and traces; synapses, the products as primitives
    kernels           which operation runs by a kernel; kernels.cpu, those of CPUs
    computed_once     constants that XLA must not compute again

A primitive of your own is treated like JAX's once it is registered with such a record:

    record = braintrace.operations.product('bi,io->bo')
    braintrace.register_primitive(my_product_p, record)
"""

from . import convolution, elementwise, gather, mixing, movement, reduction, sparse
from .dense import product
from .elementwise import ELEMENTWISE
from .labels import Const, LabelRule
from .mixing import MIXING
from .record import (
    REGISTRY,
    Operation,
    differentiates,
    element_numbers,
    forward_labels,
    is_linear,
    operation_of,
    register_primitive,
    run_equation,
    use_of,
)
from .weight_use import SharedUse

__all__ = [
    'ELEMENTWISE',
    'MIXING',
    'REGISTRY',
    'Const',
    'LabelRule',
    'Operation',
    'SharedUse',
    'differentiates',
    'element_numbers',
    'forward_labels',
    'is_linear',
    'operation_of',
    'product',
    'register_primitive',
    'run_equation',
    'use_of',
]
