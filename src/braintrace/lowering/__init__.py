"""From an analysed step to pure functions on arrays."""

from .lower import lower

__all__ = ['lower']
