"""From an analysed step to pure functions on arrays."""

from .lower import lower
from .stages import Stages

__all__ = ['Stages', 'lower']
