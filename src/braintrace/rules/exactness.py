"""What a rule's gradient is for each parameter, beside that of BPTT.

equal to BPTT  the two are equal, up to rounding
local          the trace is exact; credit through other positions or groups is missing
approximate    the rule replaces part of the gradient; the reason says which
one step       no credit from later steps
none           no gradient

A parameter's credit class says what exact local traces (D-RTRL) would give. This file
adds what the rule itself leaves out or replaces.
"""

from __future__ import annotations

from typing import NamedTuple

from ..analysis.credit import NO_CREDIT, ParameterGradient, WindowCredit
from ..solver import SiteFacts
from .rule import Rule

EQUAL, LOCAL, APPROXIMATE = 'equal to BPTT', 'local', 'approximate'
ONE_STEP, NONE = 'one step', 'none'
WITH_EXACT_TRACES = {
    'exact': EQUAL,
    'local': LOCAL,
    'instantaneous': ONE_STEP,
    'none': NONE,
}
"""What each credit class means where the traces are exact and the loss's own signal
reads them."""


class ParameterFacts(NamedTuple):
    """What is known of one parameter array.

    ``credit`` and ``reason``: its credit class. ``temporal``: it moves a state that
    matters at a later step. ``moves_states``: it moves any state. ``affects_output``:
    outputs of the same step depend on it. ``untraced``: it has uses that could have a
    trace, but were not chosen for one. ``complete``: it reaches no more states than
    within the n steps of SnAp. ``readouts``: names of leaky read-outs whose memory the
    traces carry, or could. ``advice``: what would let them carry more. ``window``: what
    a window gives it, for rules with ``deep``."""

    credit: str
    reason: str
    temporal: bool
    moves_states: bool = True
    affects_output: bool = True
    sites: tuple[SiteFacts, ...] = ()
    untraced: bool = False
    complete: bool = False
    readouts: tuple[str, ...] = ()
    advice: str = ''
    window: WindowCredit | None = None


def gradient_of(rule: Rule, facts: ParameterFacts) -> ParameterGradient:
    """What a rule gives a parameter, and why."""
    if facts.credit == 'none' and not facts.temporal:
        return ParameterGradient(NONE, facts.reason)
    if rule.cuts:
        return _by_traces(rule, facts)
    # Nothing is cut inside a step, so that the trace alone decides.
    if replaced := rule.trace.replaces(facts):
        return ParameterGradient(APPROXIMATE, replaced)
    because = rule.trace.exact_because if facts.temporal else facts.reason
    return ParameterGradient(EQUAL, because)


def _by_traces(rule: Rule, facts: ParameterFacts) -> ParameterGradient:
    kind = WITH_EXACT_TRACES[facts.credit]
    if facts.window is not None:
        kind, facts = _in_calls(facts.window, facts)
    else:
        facts = _with_readouts(rule, facts)
    # What no output of a step depends on has no signal, unless a modulator replaces it.
    if kind == NONE and not rule.is_modulated:
        return ParameterGradient(NONE, facts.reason)
    apart = (
        not rule.recursion.is_exact
        and not facts.affects_output
        and not any(site.read for site in facts.sites)
    )
    if apart and not rule.is_modulated:
        carried = 'the rule carries nothing from one state of a unit to another'
        return ParameterGradient(
            NONE,
            f'no output reads the states that it moves within a step, and {carried}',
        )
    replaced = [reason for site in facts.sites for reason in rule.replaces(site)]
    replaced = list(dict.fromkeys(replaced))
    if facts.untraced and facts.temporal:
        if not facts.sites and not rule.deep:
            return ParameterGradient(
                ONE_STEP, 'no trace of it is kept (the option trace=)'
            )
        which = 'some of its uses have' if facts.sites else 'beyond a call it has'
        replaced.append(f'{which} no trace (the option trace=)')
    if replaced:
        also = [] if facts.credit == 'exact' else [f'besides: {facts.reason}']
        return ParameterGradient(APPROXIMATE, '; '.join([*replaced, *also]))
    lacking = [s.without_factors for s in facts.sites if s.without_factors]
    if lacking:
        where = ', '.join(dict.fromkeys(lacking))
        kept = f'no factors are known for {where}, so a trace for each weight is kept'
        return ParameterGradient(kind, f'{facts.reason}; {kept}')
    own = facts.sites and (rule.decay is not None or not rule.recursion.is_exact)
    # A rule with a recursion of its own: state that it is the exact one here.
    as_exact = "; the rule's own trace is the exact one here" if own else ''
    return ParameterGradient(kind, facts.reason + as_exact)


def _in_calls(
    window: WindowCredit, facts: ParameterFacts
) -> tuple[str, ParameterFacts]:
    """What a rule with ``deep`` gives: inside a call what a window does, from call to
    call what traces do."""
    if facts.credit == 'exact':
        return EQUAL, facts
    if not window.any:
        why = f'no credit comes back to it, inside a call or later: {window.cut}'
        return NONE, facts._replace(reason=why)
    if not window.later and window.cut:
        return ONE_STEP, facts._replace(reason=window.cut)
    reason = 'inside a call no path is cut'
    if window.cut:
        reason = f'inside a call credit passes from group to group, but {window.cut}'
    lost = facts.reason.removeprefix(f'{NO_CREDIT}: ')
    if not (window.cut and lost.startswith(window.cut)):
        reason += f'; from call to call its traces alone carry credit: {lost}'
    return LOCAL if window.cut else EQUAL, facts._replace(reason=reason)


def _with_readouts(rule: Rule, facts: ParameterFacts) -> ParameterFacts:
    """The reason, with what is done, or could be done, about the memory of
    read-outs."""
    added = []
    if facts.readouts and rule.reach == 'readout':
        added.append(f'traces carry the memory of {", ".join(facts.readouts)}')
    elif facts.readouts and facts.credit != 'exact' and not rule.is_modulated:
        names = ', '.join(facts.readouts)
        keeps = "reach='readout'"
        if not rule.can_reach_readouts:
            keeps = f"rule 'd_rtrl' with {keeps}"
        added.append(f'the memory of {names} costs credit: {keeps} keeps it')
    if facts.advice and facts.credit != 'exact':
        added.append(facts.advice)
    return facts._replace(reason='; '.join([facts.reason, *added]))
