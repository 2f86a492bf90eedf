"""Online learning for recurrent and spiking networks: eligibility traces, compiled from
plain models."""

from .compat import keep_x64

# brainstate sets jax_enable_x64 to its own default when it is first imported.
with keep_x64():
    import brainstate as _brainstate

from . import networks, nn, operations, tasks
from .analysis.diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel
from .analysis.graph import (
    ETraceGraph,
    add_hidden_perturbation_from_minfo,
    add_hidden_perturbation_in_jaxpr,
    add_hidden_perturbation_in_module,
    compile_etrace_graph,
    find_hidden_groups_from_jaxpr,
    find_hidden_groups_from_minfo,
    find_hidden_groups_from_module,
    find_hidden_param_op_relations_from_minfo,
    find_hidden_param_op_relations_from_module,
)
from .analysis.groups import HiddenGroup, group_merging, jacrev_last_dim
from .analysis.perturbation import HiddenPerturbation
from .analysis.report import CompilationReport
from .analysis.sites import HiddenParamOpRelation
from .errors import CompilationError, NotSupportedError
from .frontends.brainstate import ModuleInfo, extract_module_info
from .learner import (
    BPTT,
    D_RTRL,
    DNI,
    ES_D_RTRL,
    OTTT,
    RFLO,
    RTRL,
    TBPTT,
    UORO,
    EligibilityTrace,
    EProp,
    GradientCheck,
    Learner,
    MemoryPlan,
    MultiStepData,
    OSTLFeedforward,
    OSTLRecurrent,
    RuleComparison,
    SingleStepData,
    SnAp,
    ThreeFactor,
    compile,
    pp_prop,
    train_synthetic_gradient,
)
from .lowering.executor import ETraceGraphExecutor, SiteJacobian
from .operations import register_primitive
from .ops import (
    conv,
    einsum,
    element_wise,
    embedding,
    grouped_matmul,
    lora_matmul,
    matmul,
    sparse_matmul,
)
from .rules import (
    ETraceConfig,
    FixedRandomFeedback,
    GradExpon,
    KappaFilter,
    SyntheticGradient,
)
from .training import EarlyStop, History, Supervised, fit

# Other packages know these classes by their public place, not by the file they are
# written in.
for _record in (HiddenGroup, HiddenPerturbation, ETraceGraph, ETraceGraphExecutor):
    _record.__module__ = __name__

# Names under which code written for the published package knows these classes.
ETraceAlgorithm = ETraceVjpAlgorithm = Learner
ParamDimVjpAlgorithm = D_RTRL
IODimVjpAlgorithm = pp_prop

__version__ = '0.1.0'

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
    'CompilationError',
    'CompilationRecord',
    'CompilationReport',
    'DiagnosticKind',
    'DiagnosticLevel',
    'EProp',
    'ETraceAlgorithm',
    'ETraceConfig',
    'ETraceGraph',
    'ETraceGraphExecutor',
    'ETraceVjpAlgorithm',
    'EarlyStop',
    'EligibilityTrace',
    'FixedRandomFeedback',
    'GradExpon',
    'GradientCheck',
    'HiddenGroup',
    'HiddenParamOpRelation',
    'HiddenPerturbation',
    'History',
    'IODimVjpAlgorithm',
    'KappaFilter',
    'Learner',
    'MemoryPlan',
    'ModuleInfo',
    'MultiStepData',
    'NotSupportedError',
    'OSTLFeedforward',
    'OSTLRecurrent',
    'ParamDimVjpAlgorithm',
    'RuleComparison',
    'SingleStepData',
    'SiteJacobian',
    'SnAp',
    'Supervised',
    'SyntheticGradient',
    'ThreeFactor',
    'add_hidden_perturbation_from_minfo',
    'add_hidden_perturbation_in_jaxpr',
    'add_hidden_perturbation_in_module',
    'compile',
    'compile_etrace_graph',
    'conv',
    'einsum',
    'element_wise',
    'embedding',
    'extract_module_info',
    'find_hidden_groups_from_jaxpr',
    'find_hidden_groups_from_minfo',
    'find_hidden_groups_from_module',
    'find_hidden_param_op_relations_from_minfo',
    'find_hidden_param_op_relations_from_module',
    'fit',
    'group_merging',
    'grouped_matmul',
    'jacrev_last_dim',
    'lora_matmul',
    'matmul',
    'networks',
    'nn',
    'operations',
    'pp_prop',
    'register_primitive',
    'sparse_matmul',
    'tasks',
    'train_synthetic_gradient',
]
