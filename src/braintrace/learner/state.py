"""What a learner keeps from call to call."""

from __future__ import annotations

from typing import Any

import brainstate
import jax
import jax.numpy as jnp

_VALUE: Any = brainstate.ShortTermState.value


class EligibilityTrace(brainstate.ShortTermState):
    """The state that holds one trace.

    Its arrays are donated to the next call, which writes the new ones into the same
    memory; once someone else has read them, a copy is donated.
    """

    was_read = False
    """Whether anything else may hold its arrays."""

    @property
    def value(self) -> Any:
        """The trace."""
        self.was_read = True
        return self.peek()

    @value.setter
    def value(self, value: Any) -> None:
        self.was_read = True
        _VALUE.fset(self, value)

    def keep(self, value: Any) -> None:
        """Hold a value that nothing else refers to."""
        self.value = value
        self.was_read = False

    def peek(self) -> Any:
        """The trace, without counting as a reader of its arrays."""
        return _VALUE.fget(self)

    def look(self) -> Any:
        """The trace as it is; a transformation around does not count this as reading
        it."""
        return self._read_value()

    def take_for_donation(self) -> Any:
        """The trace in arrays that are safe to donate."""
        return jax.tree.map(jnp.copy, self.peek()) if self.was_read else self.peek()


class RuleState(brainstate.State):
    """What a rule keeps for itself: a modulator, a count of gradients, a predictor's
    weights."""

    value: Any


class StartValue(brainstate.State):
    """The value of a model's state at the start of a fresh sequence."""
