"""The facts about one use of a parameter by which the parts of a rule are judged.

Letters: t steps, h positions, y results of taps, x what weights are multiplied by.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class SiteFacts(NamedTuple):
    """One use of a parameter that a local rule keeps a trace of, or whose gradient its
    own signal gives.

    ``factorised``: the trace is a product of an input part and a state part. ``leak``:
    λ where D_t is λ times the identity at all positions and steps, 0 without memory;
    None elsewhere. ``steady_path``: ∂h/∂y is the same at all steps.
    ``steady_input``: so is x. ``read``: an output reads a state that y reaches within
    the step, at that step or the next. ``feedback``: the loss reaches the states
    through weights that random feedback replaces. ``stored``: the type of the stored
    trace, where it is narrower than the states. ``filtered``: a read-out of its states
    has another memory than the rule's κ. ``without_factors``: the operation and
    its line, where a factorised rule keeps a trace for each weight because the
    operation's record has no factors.
    """

    factorised: bool = False
    leak: float | None = None
    steady_path: bool = False
    steady_input: bool = False
    read: bool = True
    feedback: bool = True
    filtered: bool = True
    stored: str | None = None
    without_factors: str | None = None


def same_decay(a: float | None, b: float) -> bool:
    """Whether two decays are equal, up to rounding; None equals nothing."""
    return a is not None and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
