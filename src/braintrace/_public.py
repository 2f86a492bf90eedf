"""The public names of the package, which `braintrace` loads when one is first used."""

import typing as _typing
from importlib import import_module as _import_module

from . import (
    __version__,
    __version_info__,
    metrics,
    networks,
    nir,
    nn,
    operations,
    plots,
    tasks,
)
from .batches import Batches
from .checkpoint import load, load_for_inference
from .errors import CompilationError, CreditWarning, NotSupportedError
from .graph.diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel
from .graph.etrace_graph import ETraceGraph, compile_etrace_graph
from .graph.executor import ETraceGraphExecutor, SiteJacobian
from .graph.hidden_group import (
    HiddenGroup,
    find_hidden_groups_from_jaxpr,
    find_hidden_groups_from_minfo,
    find_hidden_groups_from_module,
    group_merging,
    jacrev_last_dim,
)
from .graph.hidden_perturbation import (
    HiddenPerturbation,
    add_hidden_perturbation_from_minfo,
    add_hidden_perturbation_in_jaxpr,
    add_hidden_perturbation_in_module,
)
from .graph.module_info import ModuleInfo, extract_module_info
from .graph.relations import (
    HiddenParamOpRelation,
    find_hidden_param_op_relations_from_minfo,
    find_hidden_param_op_relations_from_module,
)
from .graph.relations import name_operations as _name_operations
from .history import EarlyStop, History
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
    Certificate,
    CertificateRow,
    EligibilityTrace,
    EProp,
    GradientCheck,
    IODimVjpAlgorithm,
    Learner,
    MemoryPlan,
    MultiStepData,
    OSTLFeedforward,
    OSTLRecurrent,
    ParamDimVjpAlgorithm,
    RandomProjectionVjpAlgorithm,
    RuleComparison,
    SingleStepData,
    SnAp,
    ThreeFactor,
    compile,
    pp_prop,
)
from .learner.by_rule import RULES as _RULES
from .learner.spellings import extend as _extend
from .learner.spellings import provide as _provide
from .learner.spellings import taking as _taking
from .loggers import JSONLines, TensorBoard
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
from .rules import ETraceConfig
from .supervised import Supervised
from .training import fit

if _typing.TYPE_CHECKING:
    from .report import CompilationReport

# Other packages refer to these classes by their public place, not by the file they are
# written in.
for _record in (HiddenGroup, HiddenPerturbation, ETraceGraph, ETraceGraphExecutor):
    _record.__module__ = __package__

# Names under which code written for the published package knows learners.
ETraceAlgorithm = ETraceVjpAlgorithm = Learner

if _typing.TYPE_CHECKING:
    from .published.compiler import ETraceVjpGraphExecutor
    from .published.parts import (
        FixedRandomFeedback,
        GradExpon,
        KappaFilter,
        SyntheticGradient,
        train_synthetic_gradient,
    )
    from .published.policy import ControlFlowPolicy
    from .published.primitives import ETPPrimitive, register_primitive
    from .published.vmapped import ETraceVmap, SequenceDriverMixin
else:

    def __getattr__(name: str) -> _typing.Any:
        """Learner classes of rules that files of ``rules`` register, and names of the
        published package, which are loaded when they are first used."""
        for kind in _RULES.values():
            if kind.__name__ == name:
                return kind
        if name.startswith('__'):
            raise AttributeError(f'module {__package__!r} has no attribute {name!r}')
        return _import_module('.published', __package__).find(name)


_provide(lambda: _import_module('.published.spellings', __package__))
_name_operations(
    lambda: _import_module('.published.primitives', __package__).operation_of_mark
)
_extend(HiddenGroup, HiddenParamOpRelation, ModuleInfo, ETraceGraphExecutor)

# Switches of the published package's compiler.
_mixing = ('include_recurrent_mixing', 'sparse_n', 'snap_max_jacobian_elements')
_switches = {
    'compile_etrace_graph': (*_mixing, 'control_flow'),
    'extract_module_info': ('control_flow',),
    'find_hidden_groups_from_module': _mixing,
    'find_hidden_groups_from_minfo': (
        *_mixing,
        'descended_scan_eqn_ids',
        'descended_hidden_paths',
    ),
    'find_hidden_param_op_relations_from_minfo': ('descended_scan_eqn_ids',),
    'add_hidden_perturbation_from_minfo': ('descended_scan_eqn_ids',),
}
for _name, _names in _switches.items():
    globals()[_name] = _taking(globals()[_name], *_names)
setattr(  # noqa: B010 - a class is called by its __init__
    ETraceGraphExecutor,
    '__init__',
    _taking(ETraceGraphExecutor.__init__, *_mixing, 'control_flow'),
)


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
    'Batches',
    'Certificate',
    'CertificateRow',
    'CompilationError',
    'CompilationRecord',
    'CompilationReport',
    'ControlFlowPolicy',
    'CreditWarning',
    'DiagnosticKind',
    'DiagnosticLevel',
    'EProp',
    'ETPPrimitive',
    'ETraceAlgorithm',
    'ETraceConfig',
    'ETraceGraph',
    'ETraceGraphExecutor',
    'ETraceVjpAlgorithm',
    'ETraceVjpGraphExecutor',
    'ETraceVmap',
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
    'JSONLines',
    'KappaFilter',
    'Learner',
    'MemoryPlan',
    'ModuleInfo',
    'MultiStepData',
    'NotSupportedError',
    'OSTLFeedforward',
    'OSTLRecurrent',
    'ParamDimVjpAlgorithm',
    'RandomProjectionVjpAlgorithm',
    'RuleComparison',
    'SequenceDriverMixin',
    'SingleStepData',
    'SiteJacobian',
    'SnAp',
    'Supervised',
    'SyntheticGradient',
    'TensorBoard',
    'ThreeFactor',
    '__version__',
    '__version_info__',
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
    'load',
    'load_for_inference',
    'lora_matmul',
    'matmul',
    'metrics',
    'networks',
    'nir',
    'nn',
    'operations',
    'plots',
    'pp_prop',
    'register_primitive',
    'sparse_matmul',
    'tasks',
    'train_synthetic_gradient',
]
