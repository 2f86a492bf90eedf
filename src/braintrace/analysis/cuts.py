"""What a position analysis gives: the label of every value, and where paths are cut."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..compat import Equation, Var
from ..program.slicing import Cuts
from .dependence import Bits

FAN_OUT = 'one element reaches several positions'
SUMMED_AND_SHARED = (
    'some elements share a position, others reach several: give them a product each'
)
PARTED = 'its uses reach different positions'
MOVED = 'a position reaches another position'


@dataclass(frozen=True)
class Cut:
    """One place where the local step stops gradient, for the report."""

    eqn: Equation
    operand: int
    reason: str
    bits: Bits
    elements: int


@dataclass
class Positions:
    """What a pass found: labels, the edges that carry credit, cuts and gaps.

    ``sources`` has the values of which an element reaches several positions: the
    element that reaches each position, flat, or CONFLICT where several do that reach no
    other. Their labels say CONFLICT for elements with several positions. ``found``: the
    cuts as records. ``gaps``: equations without a rule, and what they were taken for.
    """

    labels: dict[Var, np.ndarray] = field(default_factory=dict)
    sources: dict[Var, np.ndarray] = field(default_factory=dict)
    edges: set[tuple[int, int]] = field(default_factory=set)
    cuts: Cuts = field(default_factory=Cuts)
    found: list[Cut] = field(default_factory=list)
    gaps: list[tuple[Equation, str]] = field(default_factory=list)
