"""Learners: compiled models with a learning rule."""

from .._brainstate import brainstate as brainstate
from ..program.data import MultiStepData, SingleStepData
from .by_rule import (
    BPTT,
    D_RTRL,
    DNI,
    ES_D_RTRL,
    OTTT,
    RFLO,
    RTRL,
    TBPTT,
    UORO,
    EProp,
    IODimVjpAlgorithm,
    OSTLFeedforward,
    OSTLRecurrent,
    ParamDimVjpAlgorithm,
    RandomProjectionVjpAlgorithm,
    SnAp,
    ThreeFactor,
    compile,
    learner_class,
    pp_prop,
    train_synthetic_gradient,
)
from .certificate import Certificate, CertificateRow
from .check import GradientCheck, RuleComparison
from .learner import Learner
from .memory import MemoryPlan
from .state import EligibilityTrace

__all__ = [
    'BPTT',
    'DNI',
    'D_RTRL',
    'ES_D_RTRL',
    'OTTT',
    'RFLO',
    'RTRL',
    'TBPTT',
    'UORO',
    'Certificate',
    'CertificateRow',
    'EProp',
    'EligibilityTrace',
    'GradientCheck',
    'IODimVjpAlgorithm',
    'Learner',
    'MemoryPlan',
    'MultiStepData',
    'OSTLFeedforward',
    'OSTLRecurrent',
    'ParamDimVjpAlgorithm',
    'RandomProjectionVjpAlgorithm',
    'RuleComparison',
    'SingleStepData',
    'SnAp',
    'ThreeFactor',
    'compile',
    'learner_class',
    'pp_prop',
    'train_synthetic_gradient',
]
