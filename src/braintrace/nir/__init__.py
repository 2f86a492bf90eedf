"""Models from and to files of the Neuromorphic Intermediate Representation (NIR).

:func:`read` turns a graph into a model of one time step. :func:`write` writes a model
to a file. Both need the package ``nir`` (``pip install 'braintrace-online[nir]'``).
"""

from .._brainstate import brainstate as brainstate
from .files import NODES, from_graph, read, to_graph, write
from .model import Model
from .neurons import IF, LI, LIF, CubaLI, CubaLIF, Delay, I
from .nodes import (
    Affine,
    AvgPool2d,
    Conv1d,
    Conv2d,
    Flatten,
    Linear,
    Node,
    Scale,
    SumPool2d,
    Threshold,
)

__all__ = [
    'IF',
    'LI',
    'LIF',
    'NODES',
    'Affine',
    'AvgPool2d',
    'Conv1d',
    'Conv2d',
    'CubaLI',
    'CubaLIF',
    'Delay',
    'Flatten',
    'I',
    'Linear',
    'Model',
    'Node',
    'Scale',
    'SumPool2d',
    'Threshold',
    'from_graph',
    'read',
    'to_graph',
    'write',
]
