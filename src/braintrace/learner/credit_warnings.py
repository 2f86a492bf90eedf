"""A warning about parameters that learn nothing, or little of what they could."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from ..analysis.credit import APART, NO_CREDIT, NOT_HIDDEN, Links, ParameterGradient
from ..arrays import bytes_of
from ..compiled_step import Values
from ..derivatives import transitions
from ..errors import CreditWarning, printable, three_parts
from ..lowering.invariants import StepInvariants
from ..program.step import path_name, path_names
from ..rules import Rule
from ..rules.exactness import ONE_STEP
from ..solver import Solver
from ..text import size_text
from .binding import StepBinding
from .parameter_gradients import (
    gradients_by_class,
    gradients_of,
    idle,
    without_gradient,
)

if TYPE_CHECKING:
    from .learner import Learner

MOST = 0.5
"""A read-out that keeps more than this of its value has most of its credit in its
memory."""
AS_ONE_GROUP = (
    'attributes or a dictionary in place of the list, so that the states form one '
    'group; or nothing, if they are layers'
)
"""What to write where states of a list are coupled position by position."""


def warn_of_credit(
    learner: Learner,
    step_fn: Callable[..., Any] | None = None,
    sequences: tuple = (),
) -> None:
    """One warning about a learner's parameters, by the model alone or by a step
    function with it; what was said once of a learner is not said again."""
    new = [
        text for text in _texts(learner, step_fn, sequences) if learner.is_news(text)
    ]
    if new:
        warnings.warn('\n'.join(new), CreditWarning, stacklevel=3)


def _texts(
    learner: Learner, step_fn: Callable[..., Any] | None, sequences: tuple
) -> Iterator[str]:
    binding, solver = learner.step_solver(step_fn, sequences)
    rule, program = learner.rule, binding.info.program
    one_step: dict[str, str] = {}
    if step_fn is None:
        without = without_gradient(rule, binding)
        one_step = _behind_other_states(gradients_by_class(rule, binding.analysed))
    else:
        gives = gradients_of(rule, binding, solver, ())
        without = idle(rule, binding, gives, program.outputs[:1], 'loss')
        unread = map(path_name, program.untouched_parameters)
        without |= dict.fromkeys(unread, 'the step never reads it')
    if without:
        without = dict(sorted(without.items()))
        traces = _trace_bytes(learner, without)
        yield _without_gradient(rule, binding, without, traces)
    if one_step:
        yield _one_step(rule.name, one_step)
    said = set(without)
    if step_fn is None and _leaves_out_layers(rule):
        yield from _between_layers(rule.name, binding, without)
    for loss in _readout_losses(rule, binding, solver):
        names = [n for n in loss.parameters if n not in without]
        if loss.kept > MOST and names:
            said |= set(names)
            yield _behind_a_readout(rule, loss, names)
    yield from _behind_memories(rule, binding, solver, sequences, said)


def _behind_other_states(gives: Mapping[str, ParameterGradient]) -> dict[str, str]:
    """Parameters whose credit from later steps is lost because a state of theirs is not
    a hidden one, with the reasons."""
    is_lost = lambda g: g.kind == ONE_STEP and NOT_HIDDEN in g.reason
    return {name: g.reason for name, g in gives.items() if is_lost(g)}


def _one_step(rule: str, reasons: dict[str, str]) -> str:
    return three_parts(
        f'{rule} gives {_listed(list(reasons))} the gradient of one step only',
        printable(_by_reason(reasons)),
        'a brainstate.HiddenState in place of the State or ShortTermState that is '
        'named, for a delay braintrace.nir.Delay; or nothing, if that is intended',
    )


def _leaves_out_layers(rule: Rule) -> bool:
    """Whether a rule leaves out credit that passes from group to group."""
    return rule.cuts and not rule.is_modulated and not rule.deep


def _between_layers(
    rule: str, binding: StepBinding, without: Collection[str]
) -> Iterator[str]:
    """Parameters whose credit is lost between states that would be one group if their
    paths did not part at an integer key; ``without``: those with no gradient at all."""
    names: list[str] = []
    pairs: dict[str, None] = {}
    for p in binding.info.program.parameters:
        lost = binding.analysed.credit.lost_between_layers(p)
        if lost and p.name not in without:
            names.append(p.name)
            pairs |= {
                f'{path_name(a.path)} → {path_name(b.path)}': None for a, b in lost
            }
    if names:
        yield three_parts(
            f'{rule} loses credit of {_listed(names)} between states of a list: '
            f'{_listed(list(pairs))}',
            'these feed each other position by position, as states of one hidden group '
            'do, but states whose paths part at an integer key are different layers '
            'and share no traces',
            AS_ONE_GROUP,
        )


class ReadoutLoss(NamedTuple):
    """A leaky read-out whose memory is left out of some parameters' credit.

    ``kept``: how much of its value it keeps from step to step, at most. ``above``: the
    layer that feeds it, if the parameters belong to layers below that one.
    """

    readout: str
    kept: float
    above: str
    parameters: tuple[str, ...]


def _readout_losses(
    rule: Rule, binding: StepBinding, solver: Solver
) -> list[ReadoutLoss]:
    """The read-outs with a memory that the traces of a rule could carry and do not."""
    carried = rule.reach == 'readout' or rule.filter is not None
    if not _leaves_out_layers(rule) or carried:
        return []
    if len(solver.step.groups) < 2:  # the read-out is a group of its own
        return []
    found: dict[tuple[str, float, str], list[str]] = {}
    stages = binding.stages_of(solver.step)
    credit = StepInvariants(stages).credit
    name_of = lambda group: '.'.join(map(str, solver.step.groups[group].name[0]))
    for link in stages.readouts.links:
        if link.readout is None or not link.is_complete or not link.decays:
            continue
        kept = max(decay for decay, _ in link.decays)
        pair = frozenset({(link.lower, link.readout)})
        for p in binding.info.program.parameters:
            if credit.readouts_of(p, pair):
                above = '' if credit.has_site(p, link.lower) else name_of(link.lower)
                names = found.setdefault((name_of(link.readout), kept, above), [])
                names.append(p.name)
    return [ReadoutLoss(*key, tuple(names)) for key, names in found.items()]


def _behind_memories(
    rule: Rule,
    binding: StepBinding,
    solver: Solver,
    sequences: tuple,
    said: set[str],
) -> Iterator[str]:
    """About parameters whose credit all passes other groups than those of their traces,
    if these groups keep most of their value from step to step."""
    if not _leaves_out_layers(rule):
        return
    credit, step = binding.analysed.credit, solver.step
    carried: Links = frozenset()
    if rule.reach == 'readout':
        carried = frozenset(
            (link.lower, link.readout)
            for link in binding.stages_of(step).readouts.links
            if link.is_complete and link.readout is not None
        )
    behind: dict[tuple[int, ...], list[str]] = {}
    for p in binding.info.program.parameters:
        if p.name not in said and (between := credit.memories_between(p, carried)):
            behind.setdefault(tuple(between), []).append(p.name)
    kept = _kept(binding, solver, sorted({g for key in behind for g in key}), sequences)
    for groups, names in behind.items():
        # Where some group forgets, credit that passes it is not lost. With a margin,
        # since gates that are half open at first are near the limit.
        least = min(kept[g] for g in groups)
        if least > MOST + 0.1:
            passed = printable(
                ', '.join(path_names(credit.groups[g].hidden_paths) for g in groups)
            )
            yield three_parts(
                f'{rule.name} gives {_listed(names)} only part of the credit that passes '
                f'{passed}, down to {_share(least)}',
                f'about {100 * least:.0f} % of the value of {passed} remains from step '
                f"to step, and reach='{rule.reach}' leaves that memory out",
                f'{_deep(rule)}, which follows it inside a call',
            )


def _kept(
    binding: StepBinding, solver: Solver, groups: Sequence[int], sequences: tuple
) -> dict[int, float]:
    """The part of their values that groups keep from step to step: the least entry on
    the diagonal of D. Where it is no constant, its mean at the first step of sequences;
    0 without any, because a program for it takes longer than compiling a model."""
    step = solver.step
    invariants = StepInvariants(binding.stages_of(step))
    constant = {g: invariants.kept(g) for g in groups}
    found = {g: 0.0 if x is None else x for g, x in constant.items()}
    unknown = [g for g in groups if constant[g] is None]
    if not unknown or not sequences:
        return found

    @jax.jit
    def diagonals(parameters: Values, states: Values, inputs: Values) -> list:
        constants = step.constants(parameters, states)
        values = step.complete(constants, states | inputs)
        every = [matrix for matrix, _ in transitions(step, constants, values)]
        mean = lambda d: jnp.mean(jnp.abs(d))
        return [[mean(every[g][i, j]) for i, j in every[g] if i == j] for g in unknown]

    first = jax.tree.map(lambda x: x[0], sequences)
    means = diagonals(*binding.read(), binding.inputs(first))
    found |= {g: float(min(x)) for g, x in zip(unknown, means, strict=True)}
    return found


def _deep(rule: Rule) -> str:
    return "reach='deep'" if rule.is_plain else "rule 'd_rtrl' with reach='deep'"


def _share(kept: float) -> str:
    """How much credit is left without what a state keeps."""
    return f'about 1/{round(1 / (1 - kept))}' if kept < 1 else 'almost none'


def _trace_bytes(learner: Learner, names: Collection[str]) -> int:
    """Bytes of the traces that belong to these parameters alone."""
    own = [trace for key, trace in learner.traces.items() if {*key[0]} <= {*names}]
    return sum(bytes_of(trace.peek(tracked=False)) for trace in own)


def _without_gradient(
    rule: Rule, binding: StepBinding, reasons: dict[str, str], traces: int
) -> str:
    why = _by_reason(reasons)
    fix = (
        'a path with derivatives from each to the loss, as a spike has with a '
        'surrogate; or nothing, if that is intended'
    )
    if any(reason.endswith(NOT_HIDDEN) for reason in reasons.values()):
        fix = (
            'a brainstate.HiddenState in place of the state that is named, for a delay '
            'braintrace.nir.Delay; or nothing, if that is intended'
        )
    left = [p for p in binding.info.program.parameters if p.name in reasons]
    left = [p for p in left if reasons[p.name].startswith(NO_CREDIT)]
    if any(APART in reason for reason in reasons.values()):
        fix = AS_ONE_GROUP
    elif any(binding.analysed.credit.in_window(p).any for p in left):
        fix = f'{_deep(rule)}, which follows paths between groups inside a call; {fix}'
    if traces:
        fix += f" (their traces take {size_text(traces)}: trace='credited' leaves "
        fix += 'them out)'
    return three_parts(
        f'{rule.name} gives {_listed(list(reasons))} no gradient', printable(why), fix
    )


def _behind_a_readout(rule: Rule, loss: ReadoutLoss, names: list[str]) -> str:
    kept, readout = loss.kept, loss.readout
    if loss.above:
        fix = (
            f"reach='deep', inside a window of steps: these belong to layers below "
            f'{printable(loss.above)}, for which no trace can carry it'
        )
    elif rule.can_reach_readouts:
        fix = (
            "reach='readout', which carries it in the traces (on the command line "
            '--rule-option reach=readout)'
        )
    else:
        fix = "rule 'd_rtrl' with reach='readout', which carries it in the traces"
    return three_parts(
        f'{rule.name} gives {_listed(names)} {_share(kept)} of the credit that passes '
        f'{readout}',
        f'the read-out {printable(readout)} keeps {100 * kept:.0f} % of its value from '
        "step to step, and reach='local' leaves that memory out",
        fix,
    )


def _by_reason(reasons: Mapping[str, str]) -> str:
    """Names with the reasons that they share."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    return '; '.join(f'{_listed(names)}: {r}' for r, names in by_reason.items())


def _listed(names: Sequence[str], most: int = 6) -> str:
    """Some names, and how many more there are."""
    shown = ', '.join(map(printable, names[:most]))
    return shown + (f' and {len(names) - most} more' if len(names) > most else '')
