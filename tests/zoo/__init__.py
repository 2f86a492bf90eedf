"""A zoo of one-step models, each with its hidden groups, sites and credit drawn by hand."""

from . import cells, control, layers, spiking, structure, weights  # noqa: F401  (importing a file registers its cases)
from .base import CASES, Case

__all__ = ['CASES', 'Case']
