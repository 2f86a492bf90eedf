"""What a learner's rule gives each parameter of a traced step: the facts that ``rules/gradients.py`` judges by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..analysis.credit import CreditAnalysis
from ..analysis.dependence import Bits, flow, of, union
from ..analysis.diagnostics import CompilationRecord
from ..analysis.families import TABLE
from ..analysis.report import ParameterGradient
from ..analysis.sites import find_sites
from ..compat import Var, is_var
from ..engine.block import jacobian_of, pull_one
from ..engine.carriers import Factorised
from ..engine.influence import Forward
from ..engine.plan import LocalStep, Plan, Values
from ..engine.recursion import Recursion
from ..engine.traces import Traces
from ..program import Parameter
from ..rules import Rule
from ..rules.gradients import ParameterFacts, SiteFacts, gradient_of
from .traced import Traced


def gradients_of(rule: Rule, traced: Traced, credits: Iterable[CompilationRecord]) -> dict[str, ParameterGradient]:
    """What the rule gives every parameter array, by name.

    ``credits``: the model's credit records. Parameters that only this step reads are judged by the step itself.
    """
    records = {record.context['name']: record for record in credits if record.context}
    step = StepFacts(traced, rule)
    found = {name: gradient_of(rule, _unread(record)) for name, record in records.items()}
    for parameter in traced.plan.program.parameters:
        record = records.get(parameter.name) or step.analysis.credit_record(parameter)
        found[parameter.name] = gradient_of(rule, step.of_parameter(parameter, record))
    return found


def _unread(record: CompilationRecord) -> ParameterFacts:
    """Facts of a parameter that the step never reads."""
    context: Mapping[str, Any] = record.context or {}
    return ParameterFacts(context['credit'], context['reason'], context['temporal'])


class StepFacts:
    """Facts of one traced step under one rule."""

    def __init__(self, traced: Traced, rule: Rule):
        self.engine, self.rule = traced.engine, rule
        self.plan: Plan = traced.plan

    @cached_property
    def analysis(self) -> CreditAnalysis:
        """The credit analysis of the step itself."""
        plan = self.plan
        sites = find_sites(plan.facts, plan.groups, plan.positions)
        return CreditAnalysis(plan.facts, plan.members, plan.groups, plan.positions, sites)

    def of_parameter(self, parameter: Parameter, record: CompilationRecord) -> ParameterFacts:
        """All that a rule is judged by for one parameter."""
        context: Mapping[str, Any] = record.context or {}
        known = ParameterFacts(context['credit'], context['reason'], context['temporal'])
        facts = self.plan.facts
        bit = facts.bit[parameter.invar]
        states = union(of(facts.total, new) for _, new in self.plan.carried).grads
        outputs = union(of(facts.total, out) for out in self.plan.program.outputs).grads
        remembered = any((states | outputs) & facts.bit[old] for old, _ in self.plan.carried)
        known = known._replace(moves_states=remembered and bool(states & bit), felt=bool(outputs & bit))
        if isinstance(self.engine, Forward):
            complete = self.rule.sparse_n is not None and self.engine.complete[parameter.invar]
            return known._replace(complete=complete)
        traced, possible = self._taps(self.engine.traces, bit), self._taps(self._every_trace, bit)
        sites = tuple(self._site(*tap) for tap in traced)
        return known._replace(sites=sites, untraced=len(traced) < len(possible))

    # ------------------------------------------------------------ sites of local rules

    @cached_property
    def _every_trace(self) -> Traces:
        """The traces that there would be if all parameters were chosen."""
        assert not isinstance(self.engine, Forward)
        given = self.engine.traces
        return Traces(self.plan, given.scheme, lambda _: True, given.dtype)

    def _taps(self, traces: Traces, bit: int) -> list[tuple[int, int, Var, int]]:
        """(equation, weight operand, result, group) of the taps that a parameter takes part in."""
        plan, found = self.plan, []
        for i, y, g in traces.taught:
            equation = plan.taps[i].equation
            own = [k for k in plan.taps[i].weights if of(plan.facts.total, equation.invars[k]).grads & bit]
            found += [(i, k, y, g) for k in own]
        return found

    def _site(self, equation: int, operand: int, y: Var, g: int) -> SiteFacts:
        assert not isinstance(self.engine, Forward)
        traces = self.engine.traces
        place = (equation, operand, y, g)
        carrier = next((s.carrier for s in traces.sites if s[:4] == place), None)
        factors = carrier if isinstance(carrier, Factorised) else None
        steady_path = factors is not None and self._path_is_steady(g, y) and _takes_slopes_apart(factors)
        stored = traces.dtype is not None and carrier is not None and factors is None
        narrow = stored and jnp.finfo(traces.dtype).bits < jnp.finfo(y.aval.dtype).bits
        return SiteFacts(
            factorised=factors is not None,
            leak=self._leak(g, y) if self.rule.recursion != 'jacobian' or factors else None,
            steady_path=steady_path,
            steady_input=factors is not None and factors.data is None and not factors.remembers_slopes,
            read=self._is_read(g, y),
            feedback=self._passes_feedback(g),
            stored=jnp.dtype(traces.dtype).name if narrow else None,
        )

    def _is_read(self, g: int, y: Var) -> bool:
        """Whether an output reads a state that y reaches within the step: the new one, or the old one a step later."""
        facts, group = self.plan.facts, self.plan.groups[g]
        outputs = self.plan.program.outputs
        seen = union(of(facts.total, out) for out in outputs).grads
        direct = union(of(facts.direct, out) for out in outputs).grads
        for i in self.plan.locals[g].reached(y):
            k = group.owners[i]
            new, old = facts.new_bit[group.hidden_outvars[k]], facts.bit[group.hidden_invars[k]]
            if seen & new or direct & old:
                return True
        return False

    def _leak(self, g: int, y: Var) -> float | None:
        """λ where D is λ times the identity for all states that y ever reaches; 0 without memory, None elsewhere."""
        local = self.plan.locals[g]
        if not Recursion(local).carried(y):
            return 0.0
        reached = set(local.reached(y))
        while more := {i for i, j in local.pattern if j in reached} - reached:
            reached |= more
        entries = {(i, j) for i, j in local.pattern if {i, j} <= reached}  # the trace of the others is zero
        decays = self.rule.recursion != 'jacobian' or (self.rule.decay or (0, 0))[1] == 0
        if not decays or entries != {(i, i) for i in reached}:
            return None  # a state part that decays besides D is exact without memory only
        values = [self._constant_jacobian(g).get(entry) for entry in entries]
        first = values[0] if values else None
        return first if all(value == first for value in values) else None

    @cached_property
    def _jacobians(self) -> dict[int, dict[tuple[int, int], float]]:
        return {}

    def _constant_jacobian(self, g: int) -> dict[tuple[int, int], float]:
        """Entries of D that are one number whatever the parameters, states and inputs are."""
        if g not in self._jacobians:
            local = self.plan.locals[g]
            self._jacobians[g] = _one_number(*self._traced_derivative(local, lambda env: jacobian_of(local, env)))
        return self._jacobians[g]

    def _path_is_steady(self, g: int, y: Var) -> bool:
        """Whether ∂h/∂y depends on parameters and constants only."""
        local = self.plan.locals[g]
        reached = local.reached(y)
        ones = {i: jnp.ones(local.group.varshape) for i in reached}
        # One pull-back for each state: derivatives that differ between states must all be steady.
        rows = lambda env: {i: pull_one(local, env, {i: ones[i]})[y] for i in reached}
        variables, depends, _ = self._traced_derivative(local, rows)
        data = self.plan.facts.data
        moving = {v for v in variables if of(self.plan.facts.total, v).reads & data}
        return all(not moving & sources for sources in depends.values())

    def _traced_derivative(self, local: LocalStep, derivative: Any) -> tuple[list[Var], dict, Any]:
        """The variables a derivative is a function of, those that each result depends on, and the function."""
        plan = self.plan
        read = dict.fromkeys([*local.group.hidden_invars, *local.taps, *local.constants])
        known = {v: plan.facts.constant(v) for v in read if plan.facts.constant.knows(v)}
        variables = [v for v in read if v not in known]

        def run(values: list[Any]) -> Any:
            env = Values(known) | Values(zip(variables, values, strict=True))
            return derivative(env)

        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
        closed, results = jax.make_jaxpr(run, return_shape=True)(shapes)
        bits = [Bits(1 << n, 0) for n in range(len(variables))]
        env = flow(closed.jaxpr, bits)
        outs = [of(env, v).reads for v in closed.jaxpr.outvars]
        sources = [frozenset(v for n, v in enumerate(variables) if bit >> n & 1) for bit in outs]
        depends = dict(zip(sorted(results), sources, strict=True))  # as a tree is flattened
        return variables, depends, run

    @cached_property
    def _replaced_products(self) -> list[int]:
        """Products between states and outputs whose weights random feedback replaces."""
        plan, found = self.plan, []
        for i in plan.needed(plan.program.outputs, plan.ends):
            tap, family = plan.taps.get(i), TABLE.get(plan.equations[i].primitive.name)
            if tap and tap.data and family and family.kind == 'product':
                found.append(i)
        return found

    def _passes_feedback(self, g: int) -> bool:
        """Whether the loss may reach a group through replaced weights; always, if the read-out is not in this step."""
        plan, facts = self.plan, self.plan.facts
        if not self._replaced_products:
            return True
        group = facts.old(plan.members[g]) | facts.new(plan.members[g])
        data = [plan.equations[i].invars[k] for i in self._replaced_products for k in plan.taps[i].data]
        return any(of(facts.total, v).grads & group for v in data if is_var(v))


def _takes_slopes_apart(factors: Factorised) -> bool:
    """Whether the state part is ∂h/∂y alone, without the slope of an element-wise parameter."""
    return factors.enters_as_is or factors.remembers_slopes


def _one_number(variables: list[Var], depends: dict, run: Any) -> dict[tuple[int, int], float]:
    """The values of results that depend on nothing, where all their elements agree."""
    if not any(not sources for sources in depends.values()):
        return {}
    values = jax.jit(run)([jnp.zeros(v.aval.shape, v.aval.dtype) for v in variables])
    found = {}
    for entry, sources in depends.items():
        elements = np.asarray(values[entry]).ravel()
        same = not sources and elements.size and np.all(elements == elements[0]) and np.isreal(elements[0])
        if same:
            found[entry] = float(np.real(elements[0]))
    return found
