"""The solver: the mathematics of the design on arrays, without any compiler."""

from .influence import (
    InfluenceSolver,
    RankOneInfluence,
    SparseInfluence,
    WholeInfluence,
)
from .recursion import JacobianRecursion, ScalarLeak
from .sequence import BlockSolver, Predictor, Solved
from .signals import Modulated, RandomFeedback, Symmetric
from .traces import Factorised, PerParameter, Traces

__all__ = [
    'BlockSolver',
    'Factorised',
    'InfluenceSolver',
    'JacobianRecursion',
    'Modulated',
    'PerParameter',
    'Predictor',
    'RandomFeedback',
    'RankOneInfluence',
    'ScalarLeak',
    'Solved',
    'SparseInfluence',
    'Symmetric',
    'Traces',
    'WholeInfluence',
]
