"""Learners: compiled models that train forward in time."""

from .base import Learner
from .check import CheckRow, GradientCheck, MemoryPlan, RuleComparison
from .data import EligibilityTrace, MultiStepData, SingleStepData
from .rules import (
    BPTT,
    D_RTRL,
    DNI,
    ES_D_RTRL,
    OTTT,
    RFLO,
    RTRL,
    RULES,
    TBPTT,
    UORO,
    EProp,
    OSTLFeedforward,
    OSTLRecurrent,
    SnAp,
    ThreeFactor,
    compile,
    pp_prop,
    train_synthetic_gradient,
)

__all__ = [
    'BPTT', 'DNI', 'D_RTRL', 'ES_D_RTRL', 'OTTT', 'RFLO', 'RTRL', 'RULES', 'TBPTT', 'UORO', 'CheckRow', 'EProp',
    'EligibilityTrace', 'GradientCheck', 'Learner', 'MemoryPlan', 'MultiStepData', 'OSTLFeedforward', 'OSTLRecurrent',
    'RuleComparison', 'SingleStepData', 'SnAp', 'ThreeFactor', 'compile', 'pp_prop', 'train_synthetic_gradient',
]  # fmt: skip
