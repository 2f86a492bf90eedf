"""Learners: compiled models that train forward in time."""

from .base import Learner
from .data import EligibilityTrace, MultiStepData, SingleStepData
from .rules import BPTT, D_RTRL, RULES, TBPTT, compile

__all__ = ['BPTT', 'D_RTRL', 'RULES', 'TBPTT', 'EligibilityTrace', 'Learner', 'MultiStepData', 'SingleStepData', 'compile']
