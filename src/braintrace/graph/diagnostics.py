"""The findings of the compiler, as records that can be filtered and printed."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from ..program.step import Path


class DiagnosticKind(enum.StrEnum):
    """The kind of a record."""

    CREDIT = 'credit'
    CUT = 'cut'
    MISSING_RULE = 'missing_rule'
    PROBED = 'probed'
    NOT_DIFFERENTIABLE = 'not_differentiable'
    OTHER_STATE = 'other_state'
    UNUSED_STATE = 'unused_state'
    CONSTANT_STATE = 'constant_state'

    # The same findings by the names of the published package:
    # `graph/relation_records.py`.
    RELATION_INCLUDED = 'relation_included'
    RELATION_EXCLUDED_NON_TEMPORAL = 'relation_excluded_non_temporal'
    RELATION_EXCLUDED_WEIGHT_TO_WEIGHT = 'relation_excluded_weight_to_weight'
    RELATION_PARTIAL_PATH = 'relation_partial_path'
    HIDDEN_GROUP_MERGED = 'hidden_group_merged'
    STATE_MISMATCH = 'state_mismatch'
    COND_IF_CONVERTED = 'cond_if_converted'
    SCAN_UNROLLED = 'scan_unrolled'
    SCAN_UNROLL_SKIPPED = 'scan_unroll_skipped'
    SCAN_DESCENT_APPLIED = 'scan_descent_applied'

    # Known there, and never found here: what they are about is not done here, or is not
    # a special case.
    RELATION_EXCLUDED_NO_PARAMSTATE = 'relation_excluded_no_paramstate'
    RELATION_EXCLUDED_SHAPE_MISMATCH = 'relation_excluded_shape_mismatch'
    RELATION_EXCLUDED_SLICED_WEIGHT = 'relation_excluded_sliced_weight'
    TRAINABLE_INVAR_NOT_PARAMSTATE = 'trainable_invar_not_paramstate'
    COND_CONVERSION_SKIPPED = 'cond_conversion_skipped'
    SCAN_DESCENT_SKIPPED = 'scan_descent_skipped'
    SCAN_DESCENT_NO_RELATIONS = 'scan_descent_no_relations'
    WEIGHT_IN_WHILE = 'weight_in_while'
    WEIGHT_IN_CONTROL_FLOW = 'weight_in_control_flow'
    CONTROL_FLOW_OPAQUE_FWD = 'control_flow_opaque_fwd'
    CONTROL_FLOW_RECURRENT_MIXING = 'control_flow_recurrent_mixing'
    PRIMITIVE_INSIDE_NESTED_JIT = 'primitive_inside_nested_jit'
    PRIMITIVE_INSIDE_CONTROL_FLOW = 'primitive_inside_control_flow'
    MULTI_OUTPUT_PRIMITIVE_DETECTED = 'multi_output_primitive_detected'
    PYTREE_WEIGHT_LEAF_AMBIGUOUS = 'pytree_weight_leaf_ambiguous'
    SNAP_PATTERN_CONSERVATIVE = 'snap_pattern_conservative'
    SNAP_PATTERN_DEGENERATE = 'snap_pattern_degenerate'
    TRANSITION_TAIL_BOUNDED = 'transition_tail_bounded'


CUTS = (
    DiagnosticKind.CUT,
    DiagnosticKind.OTHER_STATE,
    DiagnosticKind.RELATION_PARTIAL_PATH,
    DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT,
)
"""Where local traces lose credit; rules without them do not."""

RELATIONS = (
    DiagnosticKind.RELATION_INCLUDED,
    DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL,
    DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT,
    DiagnosticKind.RELATION_PARTIAL_PATH,
    DiagnosticKind.HIDDEN_GROUP_MERGED,
    DiagnosticKind.STATE_MISMATCH,
    DiagnosticKind.COND_IF_CONVERTED,
    DiagnosticKind.SCAN_UNROLLED,
    DiagnosticKind.SCAN_UNROLL_SKIPPED,
    DiagnosticKind.SCAN_DESCENT_APPLIED,
)
"""Records that repeat groups, sites and other records: reports do not list them."""


class DiagnosticLevel(enum.StrEnum):
    """How much a record matters: for information, an approximation, a loss of credit, a
    failure.

    Levels compare by weight, not as words. No record of a compiled graph is an error:
    what cannot be compiled raises.

    >>> DiagnosticLevel('warning') > DiagnosticLevel.NOTICE
    True
    """

    INFO = 'info'
    NOTICE = 'notice'
    WARNING = 'warning'
    ERROR = 'error'

    @property
    def weight(self) -> int:
        """Its place among the levels."""
        return list(DiagnosticLevel).index(self)

    def __lt__(self, other: str) -> bool:
        return self.weight < DiagnosticLevel(other).weight

    def __le__(self, other: str) -> bool:
        return self.weight <= DiagnosticLevel(other).weight

    def __gt__(self, other: str) -> bool:
        return self.weight > DiagnosticLevel(other).weight

    def __ge__(self, other: str) -> bool:
        return self.weight >= DiagnosticLevel(other).weight


LEVELS = {
    'none': DiagnosticLevel.WARNING,
    'one step': DiagnosticLevel.NOTICE,
    'instantaneous': DiagnosticLevel.NOTICE,
}
"""How much it matters that a parameter gets this; all other kinds are information."""


class CompilationRecord(NamedTuple):
    """One finding of the compiler."""

    kind: DiagnosticKind
    level: DiagnosticLevel
    message: str
    primitive: Any = None
    weight_path: Path | None = None
    hidden_paths: tuple[Path, ...] = ()
    context: Any = None
    """What else is known, by name; the names depend on the kind."""

    def dict(self) -> dict[str, Any]:
        """The record as a dictionary."""
        return self._asdict()

    def __repr__(self) -> str:
        return f'{self.level.name.lower():7} {self.kind}: {self.message}'
