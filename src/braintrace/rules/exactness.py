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

import math
from collections.abc import Iterator
from typing import NamedTuple

from ..analysis.credit import NO_CREDIT, ParameterGradient, WindowCredit
from ..solver import JacobianRecursion, RandomFeedback, ScalarLeak
from .rule import CoupledWithin, RandomProjection, Rule

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


class SiteFacts(NamedTuple):
    """One use of a parameter that a local rule keeps a trace of, or whose gradient its
    own signal gives.

    ``factorised``: the trace is a product of an input part and a state part. ``leak``:
    λ where D_t is λ times the identity at all positions and steps, 0 without memory;
    None elsewhere. ``steady_path``: ∂h/∂y is the same at all steps.
    ``steady_input``: so is x. ``read``: an output reads a state that y reaches within
    the step, at that step or the next. ``feedback``: the loss reaches the states
    through weights that random feedback replaces. ``stored``: the type of the stored
    trace, where it is narrower than the states. ``filtered``: a read-out of its states
    has another memory than the rule's κ. ``without_factors``: the operation and
    its line, where a factorised rule keeps a trace for each weight because the
    operation's record has no factors.
    """

    factorised: bool = False
    leak: float | None = None
    steady_path: bool = False
    steady_input: bool = False
    read: bool = True
    feedback: bool = True
    filtered: bool = True
    stored: str | None = None
    without_factors: str | None = None


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
    if rule.window is not None:
        return _in_windows(rule, facts)
    if not rule.is_local:
        return _by_influence(rule, facts)
    return _by_traces(rule, facts)


def _in_windows(rule: Rule, facts: ParameterFacts) -> ParameterGradient:
    if not facts.temporal:
        return ParameterGradient(EQUAL, facts.reason)
    assert rule.window is not None
    if rule.window.steps is None:
        return ParameterGradient(
            EQUAL,
            'reverse mode through all steps of a call; nothing is carried to the '
            'next call',
        )
    after = (
        'a learned predictor stands for the credit of later ones'
        if rule.predictor
        else 'later ones send no credit'
    )
    return ParameterGradient(
        APPROXIMATE, f'exact inside windows of {rule.window.steps} steps; {after}'
    )


def _by_influence(rule: Rule, facts: ParameterFacts) -> ParameterGradient:
    if isinstance(rule.trace, RandomProjection):
        if facts.moves_states:
            noisy = (
                'one random direction replaces the influence on all states: right in '
                'the mean, but noisy'
            )
            return ParameterGradient(APPROXIMATE, noisy)
        return ParameterGradient(EQUAL, facts.reason)
    if not facts.temporal:
        return ParameterGradient(EQUAL, facts.reason)
    if not isinstance(rule.trace, CoupledWithin):
        return ParameterGradient(EQUAL, 'its influence on every state is carried')
    steps = f'{rule.trace.n} step{"s" * (rule.trace.n != 1)}'
    if facts.complete:
        return ParameterGradient(
            EQUAL, f'every state it ever reaches, it reaches within {steps}'
        )
    return ParameterGradient(
        APPROXIMATE, f'states that it reaches after more than {steps} are left out'
    )


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
        rule.recursion != JacobianRecursion()
        and not facts.affects_output
        and not any(site.read for site in facts.sites)
    )
    if apart and not rule.is_modulated:
        carried = 'the rule carries nothing from one state of a unit to another'
        return ParameterGradient(
            NONE,
            f'no output reads the states that it moves within a step, and {carried}',
        )
    replaced = list(
        dict.fromkeys(
            reason for site in facts.sites for reason in replacements(rule, site)
        )
    )
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
    own = facts.sites and (
        rule.decay is not None or rule.recursion != JacobianRecursion()
    )
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


def replacements(rule: Rule, site: SiteFacts) -> Iterator[str]:
    """What a local rule has in place of the exact trace and of the loss's own signal;
    nothing where it has both."""
    if site.factorised and not _factors_are_exact(rule, site):
        yield _factors(rule)
    number = rule.recursion.decay if isinstance(rule.recursion, ScalarLeak) else None
    if not site.factorised and number is not None and not _same(site.leak, number):
        yield f'the trace decays by {number:g} in place of the Jacobian of the states'
    if rule.filter is not None and (rule.is_modulated or site.filtered):
        yield f'the trace is low-pass filtered (κ = {rule.filter:g})'
    if rule.is_modulated:
        yield 'a modulator replaces the gradient of the loss'
    if isinstance(rule.signal, RandomFeedback) and site.feedback:
        fixed = rule.signal.align is None
        weights = (
            'fixed random weights'
            if fixed
            else 'random weights that approach those of the read-out'
        )
        yield f'errors come back through {weights}, not through the read-out'
    if site.stored is not None:
        yield f'the trace is stored in {site.stored}'


def _factors(rule: Rule) -> str:
    factors = 'the trace is factorised into an input part and a state part'
    if rule.recursion == JacobianRecursion():
        return factors
    if rule.decay is not None and rule.decay[1] == 0:
        return (
            f'a trace of the input that decays by {rule.decay[0]:g} replaces the trace '
            'of the states'
        )
    return f'{factors}, with a number in place of the Jacobian of the states'


def _factors_are_exact(rule: Rule, site: SiteFacts) -> bool:
    """Whether (Σ_s (α_f m)^(t-s) (1-α_f) f_s) · (Σ_s α_x^(t-s) x_s) / (1-α_f^t) is Σ_s
    λ^(t-s) f_s x_s.

    m is what multiplies the state part from step to step: λ itself, or 1 where a number
    replaces the Jacobian.
    """
    if rule.decay is None or site.leak is None:
        return False
    decay_x, decay_f = rule.decay
    kept = site.leak if rule.recursion == JacobianRecursion() else 1.0
    # A steady f leaves the state part f itself if nothing of it decays, or if all of it
    # does.
    if site.steady_path and _same(decay_x, site.leak) and (decay_f == 0 or kept == 1):
        return True
    return (
        site.steady_input
        and _same(decay_x, decay_f)
        and _same(kept * decay_f, site.leak)
    )


def _same(a: float | None, b: float) -> bool:
    return a is not None and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
