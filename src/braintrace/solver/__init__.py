"""The solver: gradients of sequences on arrays, without any compiler.

It reads a :class:`CompiledStep` and knows nothing of where that comes from. In the
order in which to read:

    interface        what every solver offers
    sequence         one block, all of its parts in order; whole sequences: one pass
                     with traces, two passes without
    block            K steps: forward, derivatives, gradients of weights; the loop over
                     blocks
    site_facts       what is known of one use of a parameter
    signals          what traces are multiplied by
    recursion        how the trace of a position continues from step to step, and
                     credit in reverse
    block_credit     the derivatives of a block, and what its credit adds
    traces           which traces a step has, and how they are stored
    visits           how a block advances the traces, and the gradient they give
    factors          traces held as an input part and a state part
    masking          steps whose losses have weight 0, and NaN in their inputs
    solved           sums of gradients by weight, those of parameters, the result
    window           reverse mode through consecutive steps
    window_solver    sequences of windows, traces or a predictor across them
    influence        RTRL, SnAp and UORO: parameters on states, nothing cut
    forward          the true derivative along a direction, for certificates
"""

from .influence import InfluenceColumns, InfluenceSolver, RankOneInfluence
from .interface import ExactWindows, Predictor, SequencePlan, Solver
from .recursion import JacobianRecursion, RecursionPart, ScalarLeak
from .sequence import BlockSolver
from .signals import Modulated, RandomFeedback, SignalPart, Symmetric
from .site_facts import SiteFacts
from .solved import Solved
from .traces import Traces

__all__ = [
    'BlockSolver',
    'ExactWindows',
    'InfluenceColumns',
    'InfluenceSolver',
    'JacobianRecursion',
    'Modulated',
    'Predictor',
    'RandomFeedback',
    'RankOneInfluence',
    'RecursionPart',
    'ScalarLeak',
    'SequencePlan',
    'SignalPart',
    'SiteFacts',
    'Solved',
    'Solver',
    'Symmetric',
    'Traces',
]
