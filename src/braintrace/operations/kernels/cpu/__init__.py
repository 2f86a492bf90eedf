"""Kernels for CPUs, compiled by LLVM.

llvm        the generator: values, loops, and calls by XLA
layouts     values of neurons as bits, transposed, in tiles
products    products with compressed sparse matrices
trace_visits  visits of traces, which advance them and sum their gradients
"""

from .layouts import by_neuron
from .llvm import unchanged
from .products import at_synapses, to_columns, to_rows
from .trace_visits import dense_visit, span_visit, synapse_visit

__all__ = [
    'at_synapses',
    'by_neuron',
    'dense_visit',
    'span_visit',
    'synapse_visit',
    'to_columns',
    'to_rows',
    'unchanged',
]
