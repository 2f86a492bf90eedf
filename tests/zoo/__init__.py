"""A zoo of one-step models, each with its hidden groups, sites and credit drawn by hand."""

# importing a file registers its cases
from . import brainpy_models, cells, control, layers, numeric, spiking, structure, weights
from .base import CASES, Case

__all__ = ['CASES', 'Case']
