"""What goes into a learner and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import brainstate


class EligibilityTrace(brainstate.ShortTermState):
    """The state that holds one trace."""


class StartValue(brainstate.State):
    """The value of a model's state at the start of a fresh sequence."""


@dataclass(frozen=True)
class SingleStepData:
    """Inputs of one time step."""

    data: Any


@dataclass(frozen=True)
class MultiStepData:
    """Inputs of several time steps, time first."""

    data: Any
