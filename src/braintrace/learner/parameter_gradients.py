"""What a learner's rule gives each parameter of a step: the facts that
``rules/exactness.py`` uses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ..analysis.analysed import Analysed
from ..analysis.credit import Links, ParameterGradient
from ..compiled_step import CompiledSite
from ..graph.diagnostics import CompilationRecord
from ..lowering.invariants import StepInvariants
from ..program import Parameter
from ..program.step import path_names
from ..rules import Rule
from ..rules.exactness import ParameterFacts, gradient_of
from ..solver import JacobianRecursion, SiteFacts, Solver, Traces
from ..solver.recursion import Recursion
from ..source_lines import operation_name, short_source
from .binding import StepBinding


def gradients_of(
    rule: Rule,
    binding: StepBinding,
    solver: Solver,
    credits: Iterable[CompilationRecord],
) -> dict[str, ParameterGradient]:
    """What the rule gives every parameter array, by name.

    ``credits``: the model's credit records. Parameters that only this step reads are
    judged by the step itself.
    """
    known = {r.context['name']: _known(r) for r in credits if r.context}
    found = {name: gradient_of(rule, facts) for name, facts in known.items()}
    step = _StepUnderRule(rule, StepInvariants(binding.stages_of(solver.step)), solver)
    for parameter in binding.info.program.parameters:
        facts = known.get(parameter.name)
        if facts is None:
            facts = ParameterFacts(*step.credit.classes[parameter])
        found[parameter.name] = gradient_of(rule, step.of_parameter(parameter, facts))
    return found


def gradients_by_class(rule: Rule, analysed: Analysed) -> dict[str, ParameterGradient]:
    """What a rule gives parameters of which no more than the credit class is known."""
    credit = analysed.credit
    inside = lambda p: credit.in_window(p) if rule.deep else None
    return {
        p.name: gradient_of(rule, ParameterFacts(*known, window=inside(p)))
        for p, known in credit.classes.items()
    }


def _known(record: CompilationRecord) -> ParameterFacts:
    context: Mapping[str, Any] = record.context or {}
    return ParameterFacts(context['credit'], context['reason'], context['temporal'])


def without_gradient(rule: Rule, binding: StepBinding) -> dict[str, str]:
    """The parameter arrays to which a rule gives no gradient, with the reasons.

    A step function decides what the loss depends on; here the outputs of the model
    stand for it. Parameters that the model does not read may be read by a step
    function."""
    gives = gradients_by_class(rule, binding.analysed)
    return idle(rule, binding, gives, binding.info.program.outputs, 'output')


def idle(
    rule: Rule,
    binding: StepBinding,
    gives: Mapping[str, ParameterGradient],
    read_by: Sequence[Any],
    what: str,
) -> dict[str, str]:
    """Parameters whose gradient is none, and those that no value in ``read_by`` ever
    depends on."""
    program, dependence = binding.info.program, binding.analysed.dependence
    without = {name: g.reason for name, g in gives.items() if g.kind == 'none'}
    # A rule with a modulator does not follow the loss.
    if program.outputs and not rule.is_modulated:
        behind = dependence.ever_behind(read_by)
        unused = [
            p.name for p in program.parameters if not behind & dependence.bit[p.invar]
        ]
        nothing = (
            f'no derivative of any {what} leads to it, in its own step or later '
            '(comparisons, rounding and stop_gradient have none)'
        )
        without |= {n: nothing for n in unused if n not in without and n in gives}
    return without


class _StepUnderRule:
    """A step with the rule that solves it: finds what the rule is judged by."""

    def __init__(self, rule: Rule, step: StepInvariants, solver: Solver):
        self.rule, self.step, self.solver = rule, step, solver
        self.credit, self.links = step.credit, step.stages.readouts

    def _with_readouts(
        self, parameter: Parameter, known: ParameterFacts
    ) -> ParameterFacts:
        """The credit class with what leaky read-outs remember, where traces carry
        it."""
        complete = [x for x in self.links.links if x.is_complete]
        linked = frozenset(
            (x.lower, x.readout) for x in complete if x.readout is not None
        )
        names = tuple(self.credit.readouts_of(parameter, linked))
        if self.rule.reach == 'readout' and linked:
            credit, reason = self.credit.judge(parameter, linked)
            known = known._replace(credit=credit, reason=reason)
        left_out, advice = '', ''
        if known.credit == 'local':
            left_out, advice = self._advice(parameter, linked)
        names = tuple(name for name in names if name != left_out)
        return known._replace(readouts=names, advice=advice)

    def _advice(self, parameter: Parameter, linked: Links) -> tuple[str, str]:
        """A read-out above a parameter whose memory cannot be carried, and why."""
        fed = self.credit.feeds(parameter)
        for lower, readout in fed:
            why = self.links.why_not(lower, readout)
            if why is None:
                continue
            between = [g for g, y in linked if y == readout and (lower, g) in fed]
            if between:
                reader = path_names(self.credit.groups[between[0]].hidden_paths)
                why = (
                    f'traces carry its memory for {reader} and not for layers below; '
                    "reach='deep' does, inside a window"
                )
            name = path_names(self.credit.groups[readout].hidden_paths)
            return name, f"reach='readout' leaves out {name}: {why}"
        return '', ''

    def of_parameter(
        self, parameter: Parameter, known: ParameterFacts
    ) -> ParameterFacts:
        """All that a rule is judged by for one parameter; ``known``: its class."""
        known = known._replace(
            moves_states=self.step.moves_states(parameter),
            affects_output=self.step.reaches_outputs(parameter),
            window=self.credit.in_window(parameter) if self.rule.deep else None,
        )
        traces = self.solver.traces
        if traces is None:
            complete = self.solver.is_complete(parameter.invar)
            return known._replace(complete=complete)
        known = self._with_readouts(parameter, known)
        mine = self._sites(traces, parameter)
        possible = self._sites(replace(traces, is_traced=lambda tap: True), parameter)
        sites = tuple(self._site(traces, site) for site in mine)
        return known._replace(sites=sites, untraced=len(mine) < len(possible))

    @staticmethod
    def _sites(traces: Traces, parameter: Parameter) -> list[CompiledSite]:
        """The uses of a parameter that may have a trace."""
        found = []
        for tap in traces.step.taps:
            if traces.is_traced(tap) and parameter in tap.parameters:
                found += [s for s in tap.sites if parameter in tap.by_weight[s.weight]]
        return found

    def _site(self, traces: Traces, site: CompiledSite) -> SiteFacts:
        traced = (n for n, t in enumerate(traces.sites) if t.site is site)
        n = next(traced, None)
        factors = None if n is None else traces.factorised.get(n)
        steady = factors is not None and (
            factors.shares_state_part or factors.keeps_slopes
        )
        stored = traces.dtype is not None and n is not None and factors is None
        narrow = (
            stored
            and jnp.finfo(traces.dtype).bits < jnp.finfo(site.use.result.dtype).bits
        )
        has_own_trace = not self.rule.recursion.is_exact or factors is not None
        return SiteFacts(
            factorised=factors is not None,
            leak=self._leak(traces, site) if has_own_trace else None,
            steady_path=steady and self.step.path_is_steady(site.group, site.result),
            steady_input=factors is not None
            and site.use.input is None
            and not factors.keeps_slopes,
            read=self.step.is_read(site.group, site.result),
            feedback=self.step.passes_feedback(site.group, self.links.products),
            filtered=self._is_filtered(traces, site.group),
            stored=jnp.dtype(traces.dtype).name if narrow else None,
            without_factors=self._without_factors(traces, site),
        )

    def _is_filtered(self, traces: Traces, group: int) -> bool:
        """Whether a read-out of a group remembers otherwise than the rule's κ."""
        kappa = self.rule.filter
        if kappa is None:
            return False
        # Without read-outs κ filters all signals, those of a modulator aside.
        step = traces.step
        if step.groups[group].filtered and not self.rule.is_modulated:
            return True
        for link in self.links.links:
            same = [math.isclose(own, kappa, rel_tol=1e-6) for own, _ in link.decays]
            if link.lower == group and not (same and all(same)):
                return True
        return False

    def _without_factors(self, traces: Traces, site: CompiledSite) -> str | None:
        """Operation and line of a site that a factorised rule cannot factorise."""
        if self.rule.decay is None or site.factorises:
            return None
        tap = next((t.tap for t in traces.sites if t.site is site), None)
        return (
            None
            if tap is None
            else f'{operation_name(tap.operation)} ({short_source(tap.source)})'
        )

    def _leak(self, traces: Traces, site: CompiledSite) -> float | None:
        """λ where D is λ times the identity for the site; 0 without memory."""
        group = traces.step.groups[site.group]
        if not Recursion(group, JacobianRecursion()).carried(site.result):
            return 0.0
        decay_f = (self.rule.decay or (0, 0))[1]
        if self.rule.recursion.is_exact and decay_f != 0:
            return (
                None  # a state part that decays besides D is exact without memory only
            )
        return self.step.leak(site.group, site.result)
