"""A zoo of one-step models, each with its hidden groups, sites and credit drawn by hand."""

# importing a file registers its cases
from . import (
    brainpy_models,
    cells,
    control,
    layers,
    numeric,
    pairs,
    refused,
    spiking,
    structure,
    weights,
)
from .base import CASES, REFUSED, Case

__all__ = ['CASES', 'REFUSED', 'Case']
