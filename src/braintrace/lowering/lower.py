"""The narrow waist: an analysed step in, a :class:`CompiledStep` out.

:class:`Stages` sorts the equations of the step; here they become the functions and
records that a solver sees. The functions themselves are in ``run.py`` (forward),
``joint.py`` and ``local_step.py`` (what is differentiated) and ``taps.py`` (gradients of
weights).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp

from ..analysis.pattern import reached_elements
from ..compat import Var, has_reverse_only
from ..compiled_step import CompiledGroup, CompiledStep, Components, Memory, Values
from . import run
from .effects import effect_box, effects_beyond
from .joint import joint, signalled_components
from .local_step import LocalProgram, new_components
from .loss_terms import loss_terms
from .stages import Stages
from .taps import lowered_tap, pieces_of


def lower(stages: Stages, is_loss: bool = True) -> CompiledStep:
    """The step as pure functions on arrays; ``is_loss``: its only target is a loss."""
    program, modulator = stages.program, stages.modulator
    parameters = [p.invar for p in program.parameters]
    rest = {*parameters, *program.inputs}
    states = [v for v in program.closed.jaxpr.invars if v not in rest]
    effects = cache(lambda group: effects_beyond(stages, stages.locals[group]))
    new = dict(stages.carried)
    step = CompiledStep(
        parameters={v: _struct(v) for v in parameters},
        names={p.invar: p.name for p in program.parameters},
        states={v: _struct(v) for v in states},
        inputs={v: _struct(v) for v in program.inputs},
        carried=stages.carried,
        hidden=tuple((h.invar, h.outvar) for h in program.hidden),
        targets=stages.targets,
        is_loss=is_loss,
        aux=stages.aux,
        groups=tuple(_group(stages, local) for local in stages.locals),
        weights=stages.weights,
        prepared=frozenset(p.weight for p in stages.prepared.values()),
        constant_targets=stages.constant_targets,
        kept_bytes=_kept_bytes(stages),
        taps=tuple(lowered_tap(stages, i, tap) for i, tap in stages.taps.items()),
        pieces=pieces_of(stages),
        constants=partial(run.constants, stages),
        project=partial(run.project, stages),
        advance=partial(run.advance, stages),
        advance_once=partial(run.advance_once, stages),
        complete=partial(run.complete, stages),
        outputs=partial(run.outputs, stages),
        find_loss_terms=lambda: loss_terms(stages) if is_loss else None,
        local=partial(_local, stages),
        joint=partial(joint, stages),
        extend=lambda kappa, to_readouts: _extended(stages, step, kappa, to_readouts),
        run=partial(run.run_whole, stages),
        run_deep=partial(run.run_deep, stages),
        find_pattern=lambda states: reached_elements(
            program.closed, [new[v] for v in states], [*parameters, *states]
        ),
        other_effects=lambda group, result: effect_box(effects(group), result),
        has_forward_mode=not any(map(has_reverse_only, stages.equations)),
        find_readouts=lambda: stages.readouts.products,
        modulator=None
        if modulator is None
        else lambda const, at: (const | at)[modulator],
    )
    return step


def _struct(v: Var) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


def _kept_bytes(stages: Stages) -> int:
    """Bytes that a block holds of every step."""
    projected = [v for v in stages.projected if stages.is_needed(v)]
    hidden = (h.invar for h in stages.program.hidden)
    kept = {*stages.kept, *projected, *hidden}
    return max(sum(v.aval.size * v.aval.dtype.itemsize for v in kept), 1)


def _group(stages: Stages, local: LocalProgram) -> CompiledGroup:
    group, direct = local.group, stages.direct_reads
    real = [jnp.finfo(v.aval.dtype).dtype for v in group.hidden_invars]
    return CompiledGroup(
        name=tuple(group.hidden_paths),
        shape=tuple(group.varshape),
        dtypes=tuple(real[k] for k in group.owners),
        pattern=local.pattern,
        inner=local.inner,
        signalled=signalled_components(stages, local),
        direct=frozenset(
            j for j, k in enumerate(group.owners) if group.hidden_invars[k] in direct
        ),
        reached=local.reached,
        shared=frozenset(local.shared),
        components=group.old_components,
        states=group.old_states,
    )


def _local(
    stages: Stages,
    g: int,
    constants: Values,
    values: Values,
    old: list[jax.Array],
    delta: list[jax.Array] | None,
    taps: Values,
) -> list[jax.Array]:
    env = constants | values
    return new_components(stages, stages.locals[g], env, old, taps, delta)


def _extended(
    stages: Stages, step: CompiledStep, kappa: float | None, to_readouts: bool
) -> CompiledStep:
    """The step with memories, see :class:`CompiledStep`."""
    if to_readouts:
        memories = stages.readouts.memories(kappa)
        groups = [
            replace(group, memories=mine)
            for group, mine in zip(step.groups, memories, strict=True)
        ]
        return replace(
            step,
            groups=tuple(groups),
            memory_slopes=partial(stages.readouts.slopes, memories),
            memory_signals=partial(stages.readouts.signals, memories),
        )
    if kappa is None:
        return step
    filters = [
        tuple(Memory(kappa, (i,)) for i in range(group.size)) for group in step.groups
    ]
    return replace(
        step,
        groups=tuple(
            replace(group, memories=mine, filtered=True)
            for group, mine in zip(step.groups, filters, strict=True)
        ),
        memory_slopes=lambda constants, values: [
            [({i: None}, {}) for i in range(group.size)] for group in step.groups
        ],
        memory_signals=lambda *given: (_none(step), _none(step)),
    )


def _none(step: CompiledStep) -> list[Components]:
    return [{} for _ in step.groups]
