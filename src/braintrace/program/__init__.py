"""One time step of a model as a jaxpr whose variables have roles."""

from .normal import normal_form
from .slicing import (
    Cuts,
    cut_equation_at,
    cut_inside,
    equations_between,
    slice_back,
    slice_between,
    with_cuts,
)
from .step import Hidden, Leaf, OtherState, Parameter, Path, StepProgram

__all__ = [
    'Cuts',
    'Hidden',
    'Leaf',
    'OtherState',
    'Parameter',
    'Path',
    'StepProgram',
    'cut_equation_at',
    'cut_inside',
    'equations_between',
    'normal_form',
    'slice_back',
    'slice_between',
    'with_cuts',
]
