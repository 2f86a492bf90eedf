"""The traces of a plan: which there are, how a block moves them on, and what they say about weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..compat import Var, is_var
from ..program import cut_inside
from .block import Credit, jacobians, pull_one, remaining, tap_operands
from .carriers import Carrier, Factorised, FactorTrace, carrier_for, factorised_for
from .masking import Mask, finite, without_nan, zero_at
from .plan import Components, Plan, Values
from .products import cast, is_complex, wide
from .recursion import Recursion, Scheme

Trace = list[Any]


class Site(NamedTuple):
    """One trace: the tap result it starts from, its weight operand, its group and its carrier."""

    equation: int
    operand: int
    result: Var
    group: int
    carrier: Carrier | Factorised


@dataclass(frozen=True)
class Traces:
    """All traces of a plan under one scheme."""

    plan: Plan
    scheme: Scheme
    traced: Callable[[int], bool]
    dtype: Any

    @cached_property
    def recursions(self) -> tuple[Recursion, ...]:
        """The recursion of every group."""
        return tuple(Recursion(local, self.scheme.leak, self.scheme.kappa) for local in self.plan.locals)

    @cached_property
    def taught(self) -> tuple[tuple[int, Var, int], ...]:
        """(equation, result, group) wherever a traced tap reaches a group by position."""
        return tuple(
            (i, v, g)
            for i, tap in self.plan.taps.items()
            if self.traced(i)
            for v in tap.results
            for g, local in enumerate(self.plan.locals)
            if v in local.taps and local.reached(v)
        )

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """Every trace that a sequence carries, in program order."""
        plan, decay, constant = self.plan, self.scheme.decay, self.plan.facts.constant
        sites = []
        for i, v, g in self.taught:
            tap, local = plan.taps[i], plan.locals[g]
            equation = cut_inside(i, tap.equation, local.found.cuts)
            for k in tap.weights:
                place = (plan.groups[g], equation, k, v, local.found.labels[v])
                if factors := factorised_for(*place, tap.data, decay, constant) if decay else None:
                    sites.append(Site(i, k, v, g, factors))
                elif self.recursions[g].carried(v):
                    sites.append(Site(i, k, v, g, carrier_for(*place, constant)))
        return tuple(sites)

    @cached_property
    def exact(self) -> bool:
        """Whether any trace is not factorised."""
        return any(not isinstance(s.carrier, Factorised) for s in self.sites)

    @cached_property
    def factored(self) -> frozenset[tuple[int, Var]]:
        """(group, result) of the factorised traces."""
        return frozenset((s.group, s.result) for s in self.sites if isinstance(s.carrier, Factorised))

    @cached_property
    def owner(self) -> tuple[int, ...]:
        """For every trace the first with the same ε_f: factors of what enters one sum share it. Others own theirs."""
        first: dict[Any, int] = {}
        found = []
        for n, site in enumerate(self.sites):
            key: Any = n
            if isinstance(site.carrier, Factorised) and site.carrier.enters_as_is:
                place = self.plan.locals[site.group].sum_of(site.result)
                key = (site.group, place, site.result.aval.dtype, site.carrier.positions.tobytes())
            found.append(first.setdefault(key, n))
        return tuple(found)

    def filled(self, traces: Trace) -> Trace:
        """Traces with the ε_f they share."""
        shared = lambda n: traces[n]._replace(f=traces[self.owner[n]].f)
        return [t if self.owner[n] == n else shared(n) for n, t in enumerate(traces)]

    @cached_property
    def rest(self) -> dict[Var, tuple[slice, ...] | None]:
        """The part of a factorised tap's result whose one-step gradient its factors do not replace as a whole."""
        return {v: self.plan.locals[g].escape(v) for g, v in self.factored}

    def init(self) -> Trace:
        """Traces of a fresh sequence."""
        traces: Trace = []
        for n, s in enumerate(self.sites):
            carried = self.recursions[s.group].carried(s.result)
            if isinstance(s.carrier, Factorised):
                traces.append(s.carrier.init(carried if self.owner[n] == n else ()))
            else:
                dtype = s.carrier.dtype
                if self.dtype is not None:  # a complex trace needs a complex type of at least this precision
                    is_real = not is_complex(dtype)
                    dtype = self.dtype if is_real else jnp.promote_types(self.dtype, jnp.complex64)
                traces.append({i: jnp.zeros(s.carrier.shape, dtype) for i in carried})
        return traces

    # ------------------------------------------------------------ credit

    @property
    def no_signal(self) -> list[Components]:
        """No credit for any group."""
        return [{} for _ in self.plan.groups]

    def no_credit(self, states: Values) -> list[Components]:
        """Credit zero for all that lives on after a block."""
        groups = zip(self.recursions, self.plan.groups, strict=True)
        return [r.no_credit(group.components([states[v] for v in group.hidden_invars])) for r, group in groups]

    def moving(self, found: Credit, taught: tuple[list[Components], list[Components]]) -> Credit:
        """The credit of a block as the traces' recursion sees it; ``taught``: signals and direct reads that teach."""
        signals, reads, transitions = [], [], []
        for r, true, told, read, d in zip(self.recursions, found.signals, *taught, found.jacobians, strict=True):
            signals.append(r.reading(told))
            reads.append(r.reading(read))
            transitions.append(r.transition(d, true))
        return found._replace(signals=signals, reads=reads, jacobians=transitions)

    def teaching(self, found: Credit, moving: Credit, gammas: list[Components]) -> list[Components]:
        """What the traces' rule adds to the one-step gradient of the new states, step by step."""
        if self.scheme.is_plain:
            return gammas
        added = []
        for r, true, told, gamma in zip(self.recursions, found.signals, moving.signals, gammas, strict=True):
            whole = r.folded(gamma)
            for i, x in r.folded(told).items():
                whole[i] = whole[i] + x if i in whole else x
            added.append({i: whole[i] - x if i in whole else -x for i, x in true.items()})
        return added

    def of_taught(self, local: list[Values]) -> list[Values]:
        """Temporal credit of traced parameters only; the others keep their one-step gradient."""
        results = {(g, v) for _, v, g in self.taught}
        return [Values((v, y) for v, y in bars.items() if (g, v) in results) for g, bars in enumerate(local)]

    def told(self, total: Values, site: Site, gradient: jax.Array) -> Values:
        """Gradients with what one trace says added."""
        weight = self.plan.equations[site.equation].invars[site.operand]
        return add(total, {weight: cast(gradient, wide(weight.aval.dtype))})

    # ------------------------------------------------------------ a block

    def from_factors(
        self,
        total: Values,
        traces: Trace,
        gamma: Sequence[Components],
        const: Values,
        steps: Values,
        dead: jax.Array,
    ) -> Values:
        """Add γ_0 · ε_0 of factorised traces at the start of a window of completed steps, unless it is dead."""
        operands = tap_operands(self.plan, const, jax.tree.map(lambda x: x[:1], steps))
        for site, trace in zip(self.sites, self.filled(traces), strict=True):
            if isinstance(site.carrier, Factorised):
                stacked = self._stacked(site, const, operands, 1)
                y_bar, x = site.carrier.told(trace, gamma[site.group]), trace.x
                gradient = site.carrier.gradient(self._unmoved(site, const, stacked), stacked, y_bar[None], x[None])
                total = self.told(total, site, zero_at(gradient, dead))
        return total

    def _stacked(self, site: Site, const: Values, operands: dict, length: int) -> dict[int, Any]:
        """Operands of a site's operation that are data; of a state made without any, all but the weight, repeated."""
        found = operands[site.equation]
        if found:
            return found
        every = self._unmoved(site, const, {site.operand: None})
        return {k: jnp.broadcast_to(x, (length, *jnp.shape(x))) for k, x in every.items()}

    def _unmoved(self, site: Site, const: Values, stacked: dict[int, Any]) -> dict[int, Any]:
        """Operands of a site's operation that stay the same, the weight among them."""
        invars = self.plan.equations[site.equation].invars
        return {k: const[v] if is_var(v) else v.val for k, v in enumerate(invars) if k not in stacked}

    def advance(
        self,
        const: Values,
        steps: Values,
        moving: Credit,
        traces: Trace,
        total: Values,
        gamma: Sequence[Components],
        mask: Mask | None = None,
        safe: Values | None = None,
    ) -> tuple[Trace, Values]:
        """Traces after a block, ε = P_0 ε_0 + Σ_t P_t ∂h_t/∂w; γ_0 · ε_0 is added to the gradient.

        Factorised traces give the gradient of each step of the block instead. ``safe``: values of the steps that
        derivatives read in place of their own.
        """
        operands = tap_operands(self.plan, const, steps, mask)
        steps = steps if safe is None else safe
        new, total = self._advance_factors(const, operands, steps, moving, traces, total, mask)
        if not self.exact:
            return new, total
        length = steps_in(steps)
        pairs = list(zip(self.recursions, moving.jacobians, strict=True))
        products = [remaining(recursion, d, length) for recursion, d in pairs]
        cotangents = []
        for (r, _), (product, _) in zip(pairs, products, strict=True):
            cotangents.append({s: r.folded({k: p for (i, k), p in product.items() if i == s}) for s in r.alive})
        rows = self._rows(const, steps, cotangents)
        for n, (site, trace) in enumerate(zip(self.sites, traces, strict=True)):
            if not isinstance(site.carrier, Factorised):
                g, stacked = site.group, self._stacked(site, const, operands, length)
                given = (self._unmoved(site, const, stacked), stacked, rows[g][site.result], products[g][1], gamma[g])
                new[n], gradient = site.carrier.solve(trace, *given)
                if mask is not None:  # no credit meets a trace that may be infinite
                    gradient = zero_at(gradient, mask.dead[0])
                total = self.told(total, site, gradient)
        return new, total

    def _advance_factors(
        self,
        const: Values,
        operands: dict,
        steps: Values,
        moving: Credit,
        traces: Trace,
        total: Values,
        mask: Mask | None,
    ) -> tuple:
        """Factorised traces after the block and their gradients; all sites in one loop over its steps.

        What an ε_f says about y is worked out once for all who share it.
        """
        mine = {n: s.carrier for n, s in enumerate(self.sites) if isinstance(s.carrier, Factorised)}
        new: Trace = list(traces)
        if not mine:
            return new, total
        length, recursions = steps_in(steps), self.recursions
        ones = [
            {s: {s: jnp.ones((length, *group.varshape), x.dtype)} for s, x in signals.items()}
            for group, signals in zip(self.plan.groups, moving.signals, strict=True)
        ]
        rows = self._rows(const, steps, ones)
        stacked = {n: self._stacked(self.sites[n], const, operands, length) for n in mine}
        fixed = {n: self._unmoved(self.sites[n], const, stacked[n]) for n in mine}
        drives = {}
        for n, carrier in mine.items():
            site = self.sites[n]
            own = rows[site.group].get(site.result, {}) if self.owner[n] == n else {}
            given = (fixed[n], stacked[n], own)
            drives[n] = carrier.drive(*given, length)

        def step(old: dict[int, FactorTrace], at: tuple) -> tuple[dict[int, FactorTrace], tuple[dict, dict]]:
            drives, signals, reads, jacobians = at
            carry, y_bars, xs = {}, {}, {}
            for n, trace in old.items():
                carrier, y, g, own = mine[n], self.sites[n].result, self.sites[n].group, self.owner[n] == n
                x, rows = drives[n]
                after = carrier.step(trace, x, rows, jacobians[g], recursions[g].after(y) if own else ())
                carry[n] = after._replace(f={s: after.f[s].astype(f.dtype) for s, f in trace.f.items()})
                told = [(after, signals[g]), *([(trace, reads[g])] if reads[g] else [])]
                xs[n] = [trace.x for trace, _ in told]
                if own:
                    y_bars[n] = [carrier.told(*each) for each in told]
            return carry, (y_bars, xs)

        start = {n: traces[n] for n in mine}
        last, (told, xs) = jax.lax.scan(step, start, (drives, moving.signals, moving.reads, moving.jacobians))
        for n, carrier in mine.items():
            new[n] = last[n]
            for y_bars, x in zip(told[self.owner[n]], xs[n], strict=True):
                if mask is not None:
                    y_bars, x = zero_at(y_bars, mask.silent), finite(x, mask.silent)
                gradient = carrier.gradient(fixed[n], stacked[n], y_bars, x)
                total = self.told(total, self.sites[n], gradient)
        return new, total

    def advance_silently(
        self,
        const: Values,
        steps: Values,
        traces: Trace,
        total: Values,
        gamma: Sequence[Components],
        dead: jax.Array | bool = True,
    ) -> tuple[Trace, Values]:
        """Traces after a block of completed steps without a loss.

        ``gamma``: credit that they get from a window's own reverse pass, unless the window is ``dead``.
        """
        mask = Mask.silence(steps_in(steps), dead)
        safe = without_nan(steps, mask.silent)
        old = [jax.vmap(group.components)([steps[v] for v in group.hidden_invars]) for group in self.plan.groups]
        silent = [{i: jnp.zeros_like(x) for i, x in enumerate(components)} for components in old]
        transitions = jacobians(self.plan, const, safe)
        found = Credit([], Values(), Values(), silent, self.no_signal, transitions)
        moving = self.moving(found, (silent, self.no_signal))
        return self.advance(const, steps, moving, traces, total, gamma, mask, safe)

    def _rows(
        self, const: Values, steps: Values, cotangents: list[dict[int, Components]]
    ) -> list[dict[Var, Components]]:
        """Pull-backs to every group's tap results, one for each named cotangent of its new states: axes (t, y)."""
        plan = self.plan

        def one(step: Values, cotangents: list[dict[int, Components]]) -> list[dict[Var, Components]]:
            env = const | step
            result: list[dict[Var, Components]] = []
            for local, named in zip(plan.locals, cotangents, strict=True):
                found: dict[Var, Components] = {}
                for s, bars in named.items():
                    for y, row in pull_one(local, env, bars).items():
                        found.setdefault(y, {})[s] = row
                result.append(Values(found))
            return result

        return jax.vmap(one)(steps, cotangents)


def add(total: Values, more: Mapping[Var, Any]) -> Values:
    """Two sets of gradients in one; the first says of what."""
    return Values((v, x + more[v] if v in more else x) for v, x in total.items())


def steps_in(tree: Any) -> int:
    """Steps of a block."""
    return len(jax.tree.leaves(tree)[0])
