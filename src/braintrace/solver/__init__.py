"""The solver: gradients of sequences on arrays, without any compiler.

It reads a :class:`CompiledStep` and knows nothing of where that comes from. In the
order in which to read:

    sequence         one block, all of its parts in order; whole sequences: one pass
                     with traces, two passes without
    block            K steps: forward, derivatives, gradients of weights; the loop over
                     blocks
    rule_part        what a part of a rule says of itself
    signals          what traces are multiplied by
    recursion        how the trace of a position continues from step to step, and
                     credit in reverse
    block_credit     the derivatives of a block, and what its credit adds
    traces           which traces a step has, and how they are stored
    visits           how a block advances the traces, and the gradient they give
    factors          traces held as an input part and a state part
    masking          steps that contribute nothing, whatever values they hold
    solved           sums of gradients by weight, those of parameters, the result
    window           reverse mode through consecutive steps
    window_solver    sequences of windows, traces or a predictor across them
    influence        RTRL, SnAp and UORO: parameters on states, nothing cut
    influence_solver sequences solved by an influence
    forward          the true derivative along a direction, for certificates
"""

from .influence import RankOneInfluence, SparseInfluence, WholeInfluence
from .influence_solver import InfluenceSolver
from .recursion import JacobianRecursion, RecursionPart, ScalarLeak
from .rule_part import RulePart, SiteFacts
from .sequence import BlockSolver
from .signals import Modulated, RandomFeedback, SignalPart, Symmetric
from .solved import Solved
from .traces import Traces
from .window_solver import Predictor

Solver = BlockSolver | InfluenceSolver
"""What solves sequences of a step by a rule."""

__all__ = [
    'BlockSolver',
    'InfluenceSolver',
    'JacobianRecursion',
    'Modulated',
    'Predictor',
    'RandomFeedback',
    'RankOneInfluence',
    'RecursionPart',
    'RulePart',
    'ScalarLeak',
    'SignalPart',
    'SiteFacts',
    'Solved',
    'Solver',
    'SparseInfluence',
    'Symmetric',
    'Traces',
    'WholeInfluence',
]
