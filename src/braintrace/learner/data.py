"""What goes into a learner and what it keeps."""

from __future__ import annotations

from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from ..program.data import MultiStepData as MultiStepData
from ..program.data import SingleStepData as SingleStepData

_VALUE: Any = brainstate.ShortTermState.value


class EligibilityTrace(brainstate.ShortTermState):
    """The state that holds one trace.

    The learner gives its arrays up to the next call, which writes the new ones into the same memory; once someone
    else has seen them, it gives up a copy.
    """

    _seen = False

    @property
    def value(self) -> Any:
        """The trace."""
        self._seen = True
        return self.peek()

    @value.setter
    def value(self, value: Any) -> None:
        self._seen = True
        _VALUE.fset(self, value)

    def keep(self, value: Any) -> None:
        """Hold a value that nobody else holds."""
        self.value = value
        self._seen = False

    def look(self) -> Any:
        """The trace as it is; a trace around does not count this as reading it."""
        return self._read_value()

    def peek(self) -> Any:
        """The trace, for a look at its shapes."""
        return _VALUE.fget(self)

    def give_up(self) -> Any:
        """The trace, in arrays that nobody will miss."""
        return jax.tree.map(jnp.copy, self.peek()) if self._seen else self.peek()


class Standing(brainstate.State):
    """A value of the learner's own that its rule reads: a modulator, or how often a gradient was asked for."""

    value: Any


class StartValue(brainstate.State):
    """The value of a model's state at the start of a fresh sequence."""
