"""The solver: the mathematics of the design on arrays, without any compiler."""

from .influence import RankOneInfluence, SparseInfluence, WholeInfluence
from .influence_solver import InfluenceSolver
from .one_block import Solved
from .recursion import JacobianRecursion, ScalarLeak
from .sequence import BlockSolver
from .signals import Modulated, RandomFeedback, Symmetric
from .traces import Factorised, PerParameter, Traces
from .window_solver import Predictor

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
