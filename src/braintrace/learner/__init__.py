"""Learners: compiled models with a learning rule.

by_rule           compile(), and a learner class for every rule
learner           Learner: what its calls share; the calls themselves are in
training          ... those that train, and move states and traces on
measuring         ... evaluation, comparison with BPTT, certificate, memory plan
saving            ... weights and whole learners in files, copies
describing        ... the report, the graph and the traces shown
compiling         a learner is compiled for example inputs
calls             how a call runs: steps and sequences
online_training   ... with updates of the weights along a sequence
chunks            sequences in windows that a step function takes whole
stream            data that arrive one step at a time; stream_program its compiled call
binding           a traced step bound to its model; what the learner does in it
sequences         what solves a step, and in which way a rule is run along a sequence
programs          compiled programs, each made once
settings          the settings of brainstate that a step asks for
transaction       a program runs and its results are written, or nothing changes
online            a step whose reverse derivative is the online gradient
carried           traces, and what a rule keeps for itself, from call to call
model_states      the model's own states: made, placed, checked, where sequences start
models            models of every framework as a learner sees them
access            around a call: one at a time, values in place, arrays on devices
placement         how arrays are split over devices
parameter_gradients   what a rule gives each; credit_warnings warns of little
check, certificate, memory    what measuring gives
arguments, batch, losses      checks of arguments, of inputs, and weights of losses
weights, optimizers           parameters by path and in files; optimisers
spellings         names of another package
"""

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
from .carried import EligibilityTrace
from .certificate import Certificate, CertificateRow
from .check import GradientCheck, RuleComparison
from .learner import Learner
from .memory import MemoryPlan

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
