"""Layers that use their weights through the marked operations of `braintrace.ops`.

All other public names of `brainstate.nn` are available here as well, unchanged.
Unmodified layers have traces too, but no mark for ``trace='marked'``.
"""

from __future__ import annotations

from typing import Any

from .._brainstate import brainstate
from .conv import Conv1d, Conv2d, Conv3d
from .embedding import Embedding
from .linear import (
    GroupedLinear,
    Linear,
    LoRA,
    ScaledWSLinear,
    SignedWLinear,
    SparseLinear,
)
from .readout import FiringRate, LeakyRateReadout, WindowRate
from .recurrent import (
    RTU,
    CFNCell,
    GRUCell,
    LRUCell,
    LSTMCell,
    MGUCell,
    MiniGRU,
    MiniLSTM,
    MinimalRNNCell,
    URLSTMCell,
    ValinaRNNCell,
)
from .state_space import LinearAttention, SelectiveSSM

__all__ = [
    'RTU',
    'CFNCell',
    'Conv1d',
    'Conv2d',
    'Conv3d',
    'Embedding',
    'FiringRate',
    'GRUCell',
    'GroupedLinear',
    'LRUCell',
    'LSTMCell',
    'LeakyRateReadout',
    'Linear',
    'LinearAttention',
    'LoRA',
    'MGUCell',
    'MiniGRU',
    'MiniLSTM',
    'MinimalRNNCell',
    'ScaledWSLinear',
    'SelectiveSSM',
    'SignedWLinear',
    'SparseLinear',
    'URLSTMCell',
    'ValinaRNNCell',
    'WindowRate',
]


def __getattr__(name: str) -> Any:
    if name.startswith('_'):
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    try:
        return getattr(brainstate.nn, name)
    except AttributeError:
        raise AttributeError(
            f'neither {__name__!r} nor brainstate.nn has an attribute {name!r}'
        ) from None


def __dir__() -> list[str]:
    return sorted({*__all__, *brainstate.nn.__all__})
