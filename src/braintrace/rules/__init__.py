"""Learning rules: objects made of parts, one file a rule, one registry."""

import importlib
import pkgutil

from .config import PARTS, ETraceConfig
from .parts import FixedRandomFeedback, GradExpon, KappaFilter, SyntheticGradient
from .registry import PRESETS, Preset, named, register
from .rule import Rule
from .trace_kinds import (
    Coupled,
    Factorised,
    PerParameter,
    RandomProjection,
    TracePart,
    Window,
)

# Every file of this folder that makes a rule registers it.
for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f'{__name__}.{_file.name}')

__all__ = [
    'PARTS',
    'PRESETS',
    'Coupled',
    'ETraceConfig',
    'Factorised',
    'FixedRandomFeedback',
    'GradExpon',
    'KappaFilter',
    'PerParameter',
    'Preset',
    'RandomProjection',
    'Rule',
    'SyntheticGradient',
    'TracePart',
    'Window',
    'named',
    'register',
]
