"""Which elements of a tap's result act, within a step, on more than one group."""

from __future__ import annotations

import numpy as np

from ..arrays import box_of
from ..compat import Var, is_differentiable, is_var
from ..compiled_step import Box
from ..operations import operation_of
from ..operations.labels import NONE, Labels, join
from .local_step import LocalProgram
from .stages import Stages


def effects_beyond(stages: Stages, local: LocalProgram) -> dict[Var, Labels]:
    """Elements, labelled 0, that act within a step on more than this group's uncut
    paths."""
    cuts, own = local.positions.cuts, set(local.group.hidden_outvars)
    inside = set(stages.needed(own))
    every = lambda v: np.zeros(v.aval.shape, np.int32)
    ends = (*stages.targets, *stages.new_states)
    found: dict[Var, Labels] = {v: every(v) for v in ends if is_var(v) and v not in own}
    for i in reversed(stages.needed(ends)):
        eqn = stages.equations[i]
        if not any(map(is_differentiable, eqn.outvars)):
            continue
        outs = [found.get(v) for v in eqn.outvars]
        reaches = any(x is not None for x in outs)
        operation = operation_of(eqn)
        pulled = None
        if operation and reaches:
            pulled = operation.labels(eqn, outs, stages.dependence.constant)
        # Cuts inside a sub-program, and operations without a record, may hide any
        # effect.
        unknown = any(e == i for e, _ in cuts.bodies) or (operation is None and reaches)
        for k, v in enumerate(eqn.invars):
            if (
                not is_var(v)
                or not is_differentiable(v)
                or (v in own and i not in inside)
            ):
                continue
            if unknown or (i, k) not in local.positions.edges:
                labels: Labels = every(v)
            else:
                labels = pulled[k] if pulled else None
            if (i, k) in cuts.edges:
                cut = np.where(cuts.edges[i, k], 0, NONE).astype(np.int32)
                labels = join(labels, cut)
            found[v] = join(found.get(v), labels)
    return found


def effect_box(effects: dict[Var, Labels], y: Var) -> Box | None:
    """The smallest box of a tap's result that acts on more than the group; None if
    nothing does."""
    labels = effects.get(y)
    if labels is None or not np.any(labels != NONE):
        return None
    return box_of(labels)
