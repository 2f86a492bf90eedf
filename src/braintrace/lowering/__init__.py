"""From an analysed step to pure functions on arrays.

rewrite      products of concatenated inputs become sums of products; results of both
             kinds of pairs are computed twice, once for each kind
taps         equations where parameters meet data, and what a solver sees of them
stages       which equations run when, and what the time loop keeps
lower        the record that a solver sees
run          the step forward: in parts, and as a whole
joint        targets, with a δ at every new state: what signals are derivatives of
local_step   the local step of a group: what D and pull-backs are derivatives of
loss_terms   a loss as a sum over samples
replay       known results with the derivatives of their computation
effects      which elements of a tap's result act on more than one group
readouts     linear read-outs, the products that lead to them, what leaky ones remember
invariants   what of a step decides how near a rule is to BPTT
"""

from .lower import lower
from .stages import Stages

__all__ = ['Stages', 'lower']
