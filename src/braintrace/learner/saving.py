"""The weights of a learner as arrays and files, and checkpoints of all it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from ..errors import three_parts
from .learner_state import LearnerState
from .weights import (
    Weights,
    read_safetensors,
    read_weights,
    write_safetensors,
    write_weights,
)


class Saving(LearnerState):
    """The calls of a learner that read and write weights, files and folders."""

    def weights(self) -> Weights:
        """Copies of the parameters as NumPy arrays, by path.

        A parameter that is a structure of arrays, as the weight and the bias of a
        layer, is the same structure of NumPy arrays.
        """
        with self._synchronised():
            return read_weights(self.param_states)

    def set_weights(self, weights: Mapping[Any, Any]) -> None:
        """Set parameters to arrays as :meth:`weights` gives them; others stay.

        The names of reports, as ``'layers.1.weight.bias'``, are keys too.
        """
        with self._synchronised():
            write_weights(self.param_states, weights)

    def save_weights(self, file: str | FilePath) -> None:
        """Write the parameters to a file of safetensors, by the names of reports."""
        with self._synchronised():
            write_safetensors(self.param_states, file)

    def load_weights(self, file: str | FilePath) -> None:
        """Set all parameters to those that :meth:`save_weights` wrote."""
        with self._synchronised():
            read_safetensors(self.param_states, file)

    def save(self, folder: str | FilePath, optimizer: Any = None) -> None:
        """Write weights, states, traces, the rule's own state and random numbers to a
        folder, and the state of an optimiser if one is given.

        The newest two that were written to a folder are kept.
        """
        from ..checkpoint import save_learner

        with self._synchronised():
            save_learner(self, folder, optimizer)

    def load(self, folder: str | FilePath, optimizer: Any = None) -> None:
        """Continue from what :meth:`save`, a stream or :func:`fit` wrote.

        The learner must be compiled as the one that wrote it: the same model, rule and
        batch size. An error leaves everything as it was.
        """
        from ..checkpoint import load_learner

        with self._synchronised():
            load_learner(self, folder, optimizer)

    def __copy__(self) -> Any:
        """A learner of the same model that shares all states."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled."""
        raise TypeError(
            three_parts(
                f'pickling a {type(self).__name__} learner',
                'it holds compiled programs, which belong to this process',
                'learner.save(folder), and learner.load(folder) of a learner compiled '
                'in the other process; copy.deepcopy(learner) for a second one here',
            )
        )
