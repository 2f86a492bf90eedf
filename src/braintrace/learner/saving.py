"""The methods of a :class:`Learner` that save, load and copy it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import brainstate

from ..errors import ArgumentError, three_parts
from .access import synchronised
from .compiling import new_executor
from .models import interface_of
from .programs import Kept, compile_step
from .settings import with_settings_of
from .weights import (
    Weights,
    read_safetensors,
    read_weights,
    write_safetensors,
    write_weights,
)

if TYPE_CHECKING:
    from .learner import Learner


def weights(learner: Learner) -> Weights:
    """Return copies of the parameters as NumPy arrays, by path.

    A parameter that is a structure of arrays, such as the weight and the bias of a
    layer, is returned as the same structure of NumPy arrays.
    """
    with synchronised(learner):
        return read_weights(learner.param_states)


def set_weights(learner: Learner, weights: Mapping[Any, Any]) -> None:
    """Set parameters to arrays as :meth:`weights` returns them. Other parameters do not
    change.

    Keys may also be the names of reports, such as ``'layers.1.weight.bias'``.
    """
    with synchronised(learner):
        write_weights(learner.param_states, weights)


def save_weights(learner: Learner, file: str | FilePath) -> None:
    """Write the parameters to a safetensors file, with the names of reports."""
    with synchronised(learner):
        write_safetensors(learner.param_states, file)


def load_weights(learner: Learner, file: str | FilePath) -> None:
    """Set all parameters to those of a file that :meth:`save_weights` wrote."""
    with synchronised(learner):
        read_safetensors(learner.param_states, file)


def save(learner: Learner, folder: str | FilePath, optimizer: Any = None) -> None:
    """Write weights, states, traces, the rule state and random numbers to a folder. If
    an optimiser is passed, its state is written as well.

    A folder keeps the two newest saves.
    """
    from ..checkpoint import save_learner

    if FilePath(folder).suffix == '.safetensors':
        raise ArgumentError(
            three_parts(
                f'save({str(folder)!r})',
                'it writes a folder with everything that training needs, and not a '
                'file of weights',
                'learner.save_weights(...) for the weights; or the name of a folder',
            )
        )
    with synchronised(learner):
        save_learner(learner, folder, optimizer)


def load(learner: Learner, folder: str | FilePath, optimizer: Any = None) -> None:
    """Load from a folder that :meth:`save`, a stream or :func:`fit` wrote, and continue
    from there.

    The learner must have the same model, rule and batch size as the one that was saved.
    If there is an error, nothing changes.
    """
    from ..checkpoint import load_learner

    with synchronised(learner):
        load_learner(learner, folder, optimizer)


def copied(learner: Learner) -> Any:
    """A learner of the same model that shares all states."""
    copied = object.__new__(type(learner))
    copied.__dict__.update(learner.__dict__)
    return copied


def refuse_pickling(learner: Learner, protocol: Any) -> Any:
    """Raise an error: a learner cannot be pickled."""
    raise TypeError(
        three_parts(
            f'pickling a {type(learner).__name__} learner',
            'it holds compiled programs, which belong to this process',
            'learner.save(folder), and learner.load(folder) of a learner compiled '
            'in the other process; copy.deepcopy(learner) for a second one here',
        )
    )


def deeply_copied(learner: Learner, memo: Any = None) -> Any:
    """An independent learner on a copy of the model, with copies of weights, states,
    traces and states of optimisers."""
    interface_of(learner.model).check_copied()
    # This copies the states of the tree and shares all else.
    copied = brainstate.nn.Module.__deepcopy__(learner, memo)
    # Programs, and the graph, hold the states of the model that they were made of.
    copied.executor = new_executor(copied)
    optimizers: dict[Any, brainstate.State] = {}
    for key, state in learner._kept.optimizers.items():
        optimizers[key] = brainstate.ShortTermState(copy.deepcopy(state.value))
    kept = learner._kept
    copied._kept = Kept(
        optimizers=optimizers,
        shapes=kept.shapes,
        has_batch_size=kept.has_batch_size,
    )
    if copied._example:
        with_settings_of(kept.settings, compile_step, copied, copied._example)
    copied._carried = learner._carried.copied(copied.traces)
    return copied
