"""Learners: compiled models that train forward in time."""

from .base import Learner
from .check import CheckRow, GradientCheck, MemoryPlan
from .data import EligibilityTrace, MultiStepData, SingleStepData
from .rules import BPTT, D_RTRL, ES_D_RTRL, RULES, TBPTT, compile, pp_prop

__all__ = [
    'BPTT', 'D_RTRL', 'ES_D_RTRL', 'RULES', 'TBPTT', 'CheckRow', 'EligibilityTrace', 'GradientCheck', 'Learner',
    'MemoryPlan', 'MultiStepData', 'SingleStepData', 'compile', 'pp_prop',
]  # fmt: skip
