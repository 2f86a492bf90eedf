"""One time step of a model as a jaxpr whose variables have roles."""

from .normal import normal_form
from .slicing import Cuts, cut_inside, slice_back, slice_between, with_cuts
from .step import Hidden, Leaf, OtherState, Parameter, Path, StepProgram

__all__ = [
    'Cuts', 'Hidden', 'Leaf', 'OtherState', 'Parameter', 'Path', 'StepProgram', 'cut_inside', 'normal_form', 'slice_back', 'slice_between',
    'with_cuts',
]  # fmt: skip
