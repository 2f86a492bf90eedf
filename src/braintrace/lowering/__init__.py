"""From an analysed step to pure functions on arrays."""

from .lower import lower, lower_stages, stages_of
from .stages import Stages

__all__ = ['Stages', 'lower', 'lower_stages', 'stages_of']
