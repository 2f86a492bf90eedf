"""A whole sequence, block by block: one pass with traces, or two passes without any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..compat import Var, is_var
from ..program import cut_inside
from .block import (
    Credit,
    complete,
    constants,
    credit,
    credit_back,
    forward,
    jacobians,
    local_pull,
    pull_one,
    remaining,
    tap_operands,
    weight_gradients,
)
from .carriers import Carrier, Factorised, FactorTrace, carrier_for, factorised_for
from .plan import Components, Plan, Values
from .window import run_window, window_gradient

Trace = list[Any]


class Site(NamedTuple):
    """One trace: the tap result it starts from, its weight operand, its group and its carrier."""

    equation: int
    operand: int
    result: Var
    group: int
    carrier: Carrier | Factorised


class Solved(NamedTuple):
    """What a sequence gives: gradients of parameters, losses and auxiliary values of every step."""

    gradients: Values
    losses: jax.Array
    aux: Values
    states: Values
    traces: Trace


class Sequencer:
    """Solves sequences of one plan. Pure: states and traces go in and come out."""

    def __init__(
        self,
        plan: Plan,
        trace_dtype: Any = None,
        decay: tuple[float, float] | None = None,
        traced: Callable[[int], bool] = lambda equation: True,
    ):
        self.plan = plan
        self.traced = traced
        self.decay = decay
        self.aux = plan.aux
        self.trace_dtype = trace_dtype

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """Every trace that a sequence carries, in program order."""
        plan = self.plan
        sites = []
        for i, tap in plan.taps.items():
            for k in tap.weights if self.traced(i) else ():
                for v in tap.results:
                    for g, local in enumerate(plan.locals):
                        if v not in local.taps or not local.reached(v):
                            continue
                        equation = cut_inside(i, tap.equation, local.found.cuts)
                        place = (plan.groups[g], equation, k, v, local.found.labels[v])
                        constant = plan.facts.constant
                        factors = factorised_for(*place, tap.data, self.decay, constant) if self.decay else None
                        if factors:
                            sites.append(Site(i, k, v, g, factors))
                        elif local.carried(v):
                            sites.append(Site(i, k, v, g, carrier_for(*place, constant)))
        return tuple(sites)

    def init_traces(self) -> Trace:
        """Traces of a fresh sequence."""
        traces: Trace = []
        for s in self.sites:
            carried = self.plan.locals[s.group].carried(s.result)
            if isinstance(s.carrier, Factorised):
                traces.append(s.carrier.init(carried))
            else:
                dtype = self.trace_dtype or s.result.aval.dtype
                traces.append({i: jnp.zeros(s.carrier.shape, dtype) for i in carried})
        return traces

    @cached_property
    def step_bytes(self) -> int:
        """What the derivatives of one step need of it: old states, and what the time loop hands on."""
        before = [v for v in self.plan.before if self.plan.is_needed(v)]
        kept = {*self.plan.kept, *before, *(h.invar for h in self.plan.program.hidden)}
        return max(sum(v.aval.size * v.aval.dtype.itemsize for v in kept), 1)

    def block_length(self, steps: int, carried: bool) -> int:
        """Steps to solve together: what a block keeps should stay near the processor.

        A block reads and writes all of the traces it carries, so that longer ones pay then, unless the traces are
        as small as a step. A length that divides the steps spares a second program for the rest.
        """
        least, room = ((16, 2**23) if self._exact else (4, 2**19)) if carried else (8, 2**20)
        longest = min(max(room // self.step_bytes, least), 64, steps)
        return next((k for k in range(longest, longest // 2, -1) if steps % k == 0), longest)

    # ------------------------------------------------------------ drivers

    def two_pass(self, parameters: Values, states: Values, inputs: Values, weights: jax.Array, block: int) -> Solved:
        """Forward keeping old states, then blocks in reverse carrying credit; no trace at all."""
        const = constants(self.plan, parameters | self._fixed(states))
        moving = self._moving(states)
        (head, head_w), (tail, tail_w) = _split((inputs, weights), block)
        steps = None
        if head_w.size:

            def ahead(states: Values, xs: Values) -> tuple[Values, Values]:
                done = forward(self.plan, const, states, xs)
                return done.states, (done.steps.pick(v for v in done.steps if v not in xs), self._hidden(done.states))

            moving, (steps, ends) = jax.lax.scan(ahead, moving, head)
        last_steps = None
        if tail_w.size:
            done = forward(self.plan, const, moving, tail)
            moving, last_steps = done.states, done.steps
        gamma = self._no_credit(moving)
        total = self._no_gradient(const)
        losses, extras = [], []
        if tail_w.size:
            gamma, total, loss, extra = self._back(const, last_steps, moving, tail_w, gamma, total)
            losses, extras = [loss], [extra]
        if head_w.size:

            def back(carry: tuple, xs: tuple) -> tuple:
                kept, end, given, w = xs
                gamma, total, loss, extra = self._back(const, kept | given, end, w, *carry)
                return (gamma, total), (loss, extra)

            (_, total), (loss, extra) = jax.lax.scan(back, (gamma, total), (steps, ends, head, head_w), reverse=True)
            losses, extras = [_flat(loss), *losses], [jax.tree.map(_flat, extra), *extras]
        return Solved(self._pull(parameters, states, total), *_joined(losses, extras), self._all(states, moving), [])

    def one_pass(
        self, parameters: Values, states: Values, traces: Trace, inputs: Values, weights: jax.Array, block: int
    ) -> Solved:
        """Blocks forward, traces carried: memory does not grow with the sequence."""
        const = constants(self.plan, parameters | self._fixed(states))
        carry = (self._moving(states), traces, self._no_gradient(const))
        (head, head_w), (tail, tail_w) = _split((inputs, weights), block)
        losses, extras = [], []
        if head_w.size:
            carry, (loss, extra) = jax.lax.scan(
                lambda carry, xs: self._ahead(const, *carry, *xs), carry, (head, head_w)
            )
            losses, extras = [_flat(loss)], [jax.tree.map(_flat, extra)]
        if tail_w.size:
            carry, (loss, extra) = self._ahead(const, *carry, tail, tail_w)
            losses, extras = [*losses, loss], [*extras, extra]
        moving, traces, total = carry
        return Solved(
            self._pull(parameters, states, total), *_joined(losses, extras), self._all(states, moving), traces
        )

    def evolve(self, parameters: Values, states: Values, traces: Trace, inputs: Values, block: int) -> Solved:
        """Advance states and traces without a loss; ``aux`` values of every step come along."""
        const = constants(self.plan, parameters | self._fixed(states))
        head, tail = _split(inputs, block)

        def one(carry: tuple, xs: Values) -> tuple:
            moving, traces = carry
            done = forward(self.plan, const, moving, xs)
            steps = complete(self.plan, const, done.steps, done.states)
            traces, _ = self._trace_only(const, steps, traces, self._no_gradient(const), self._no_signal)
            extra = jax.vmap(lambda step: self.plan.compute(self.aux, const | step).pick(self.aux))(done.steps)
            return (done.states, traces), extra

        carry, extras = (self._moving(states), traces), []
        if _steps(head):
            carry, extra = jax.lax.scan(one, carry, head)
            extras = [jax.tree.map(_flat, extra)]
        if _steps(tail):
            carry, extra = one(carry, tail)
            extras = [*extras, extra]
        moving, traces = carry
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *extras)
        return Solved(Values(), jnp.zeros(0), joined, self._all(states, moving), traces)

    @property
    def _values(self) -> tuple[Var, ...]:
        return tuple(dict.fromkeys((*self.plan.targets, *self.aux)))

    def block_gradient(
        self, parameters: Values, states: Values, traces: Trace, inputs: Values, cotangents: Sequence[jax.Array]
    ) -> Values:
        """Online gradient of a few steps for cotangents (t, ...) of their targets."""
        const = constants(self.plan, parameters | self._fixed(states))
        start = (self._moving(states), traces, self._no_gradient(const))
        (_, _, total), _ = self._solve(const, *start, inputs, cotangents)
        return self._pull(parameters, states, total)

    def windows(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
        weights: jax.Array,
        length: int,
        deep: bool = False,
    ) -> Solved:
        """Reverse mode inside windows of a length; across them the traces, if there are any."""
        plan = self.plan
        (head, head_w), (tail, tail_w) = _split((inputs, weights), length)
        const = constants(plan, parameters | self._fixed(states))
        total = Values((v, jnp.zeros_like(x)) for v, x in parameters.items())

        def one(carry: tuple, xs: tuple) -> tuple:
            states, traces, total, through = carry
            inputs, weights = xs
            found = window_gradient(plan, parameters, states, inputs, plan.targets[:1], [weights], self.aux, deep)
            gradients, gamma, new, values = found
            if traces:
                traces, through = self._across(const, states, inputs, traces, through, gamma)
            return (new, traces, _add(total, gradients), through), (values[plan.targets[0]], values.pick(self.aux))

        carry, losses, extras = (states, traces, total, self._no_gradient(const)), [], []
        if head_w.size:
            carry, (loss, extra) = jax.lax.scan(one, carry, (head, head_w))
            losses, extras = [_flat(loss)], [jax.tree.map(_flat, extra)]
        if tail_w.size:
            carry, (loss, extra) = one(carry, (tail, tail_w))
            losses, extras = [*losses, loss], [*extras, extra]
        states, traces, total, through = carry
        total = _add(total, self._pull(parameters, states, through)) if traces else total
        return Solved(total, *_joined(losses, extras), states, traces)

    def run(self, parameters: Values, states: Values, traces: Trace, inputs: Values) -> tuple[Values, Values, Trace]:
        """A few steps: targets and auxiliary values of each, next states, next traces."""
        new, found = run_window(self.plan, parameters, states, inputs, self._values)
        values = Values(zip(self._values, found, strict=True))
        if traces:
            const = constants(self.plan, parameters | self._fixed(states))
            traces, _ = self._across(const, states, inputs, traces, self._no_gradient(const), self._no_signal)
        return values, new, traces

    def exact_window_gradient(
        self, parameters: Values, states: Values, traces: Trace, inputs: Values, cotangents: Sequence[jax.Array]
    ) -> Values:
        """Gradient of a window for cotangents of its targets: reverse mode inside, γ_0 · ε_0 across."""
        found = window_gradient(self.plan, parameters, states, inputs, self.plan.targets, cotangents)
        gradients, gamma, _, _ = found
        if not traces:
            return gradients
        const = constants(self.plan, parameters | self._fixed(states))
        _, through = self._across(const, states, inputs, traces, self._no_gradient(const), gamma)
        return _add(gradients, self._pull(parameters, states, through))

    # ------------------------------------------------------------ one block

    def _back(
        self, const: Values, steps: Values, last: Values, weights: jax.Array, gamma: list, total: Values
    ) -> tuple:
        steps = complete(self.plan, const, steps, last)
        found = credit(self.plan, const, steps, [weights], self.aux)
        gammas, first = credit_back(found, gamma, len(weights))
        local = self._of_traced(local_pull(self.plan, const, steps, gammas))
        total = _add(total, weight_gradients(self.plan, const, steps, found.results, local))
        return first, _add(total, self._of_constants([weights])), found.targets[0], found.aux

    def _ahead(
        self, const: Values, states: Values, traces: Trace, total: Values, inputs: Values, weights: jax.Array
    ) -> tuple:
        carry, found = self._solve(const, states, traces, total, inputs, [weights])
        return carry, (found.targets[0], found.aux)

    def _solve(
        self,
        const: Values,
        states: Values,
        traces: Trace,
        total: Values,
        inputs: Values,
        cotangents: Sequence[jax.Array],
    ) -> tuple[tuple[Values, Trace, Values], Credit]:
        """One block forward: next states, next traces, gradients added to ``total``."""
        plan = self.plan
        done = forward(plan, const, states, inputs)
        steps = complete(plan, const, done.steps, done.states)
        found = credit(plan, const, steps, cotangents, self.aux)
        total = _add(total, self._of_constants(cotangents))
        if not traces:
            total = _add(total, weight_gradients(plan, const, steps, found.results, []))
            return (done.states, traces, total), found
        local: list[Values] = [Values() for _ in plan.groups]
        first = self._no_signal
        if self._exact:
            gammas, first = credit_back(found, self._no_credit(states), len(cotangents[0]))
            local = self._of_traced(local_pull(plan, const, steps, gammas))
        whole = found.results.pick(v for v in found.results if self._rest.get(v, True))
        if self._factored:
            now = local_pull(plan, const, steps, found.signals)
            for g, v in self._factored:
                if v in whole:
                    local[g][v] = -now[g][v]
        total = _add(total, weight_gradients(plan, const, steps, whole, local, self._rest))
        traces, total = self._advance(const, steps, found, traces, total, first)
        return (done.states, traces, total), found

    def _of_traced(self, local: list[Values]) -> list[Values]:
        """Temporal credit of traced parameters only; the others keep their one-step gradient."""
        results = {site.result for site in self.sites}
        return [Values((v, y) for v, y in bars.items() if v in results) for bars in local]

    @cached_property
    def _factored(self) -> frozenset[tuple[int, Var]]:
        return frozenset((s.group, s.result) for s in self.sites if isinstance(s.carrier, Factorised))

    @cached_property
    def _rest(self) -> dict[Var, tuple[slice, ...] | None]:
        """The part of a factorised tap's result whose one-step gradient its factors do not replace as a whole."""
        return {v: self.plan.locals[g].escape(v) for g, v in self._factored}

    @cached_property
    def _exact(self) -> bool:
        """Whether any trace is not factorised."""
        return any(not isinstance(s.carrier, Factorised) for s in self.sites)

    def _no_credit(self, states: Values) -> list[Components]:
        found = []
        for local in self.plan.locals:
            components = local.group.components([states[v] for v in local.group.hidden_invars])
            found.append({j: jnp.zeros_like(components[j]) for j in local.alive})
        return found

    def _told(self, total: Values, site: Site, gradient: jax.Array) -> Values:
        weight = self.plan.equations[site.equation].invars[site.operand]
        return _add(total, {weight: gradient.astype(weight.aval.dtype)})

    @property
    def _no_signal(self) -> list[Components]:
        return [{} for _ in self.plan.groups]

    def _across(
        self, const: Values, states: Values, inputs: Values, traces: Trace, total: Values, gamma: Sequence[Components]
    ) -> tuple[Trace, Values]:
        """Traces after a window without signals of its own; γ_0 · ε_0 at its start is added to the gradient."""
        done = forward(self.plan, const, self._moving(states), inputs)
        steps = complete(self.plan, const, done.steps, done.states)
        total = self._from_factors(total, traces, gamma, const, steps)
        return self._trace_only(const, steps, traces, total, gamma)

    def _from_factors(
        self, total: Values, traces: Trace, gamma: Sequence[Components], const: Values, steps: Values
    ) -> Values:
        """Add γ_0 · ε_0 of factorised traces at the start of a window of completed steps."""
        operands = tap_operands(self.plan, const, jax.tree.map(lambda x: x[:1], steps))
        for site, trace in zip(self.sites, traces, strict=True):
            if isinstance(site.carrier, Factorised):
                stacked = operands[site.equation]
                y_bar, x = site.carrier.told(trace, gamma[site.group]), trace.x
                gradient = site.carrier.gradient(self._unmoved(site, const, stacked), stacked, y_bar[None], x[None])
                total = self._told(total, site, gradient)
        return total

    def _unmoved(self, site: Site, const: Values, stacked: dict[int, Any]) -> dict[int, Any]:
        """Operands of a site's operation that stay the same, the weight among them."""
        invars = self.plan.equations[site.equation].invars
        return {k: const[v] if is_var(v) else v.val for k, v in enumerate(invars) if k not in stacked}

    def _advance(
        self,
        const: Values,
        steps: Values,
        found: Credit,
        traces: Trace,
        total: Values,
        gamma: Sequence[Components],
    ) -> tuple[Trace, Values]:
        """Traces after a block, ε = P_0 ε_0 + Σ_t P_t ∂h_t/∂w; γ_0 · ε_0 is added to the gradient.

        Factorised traces give the gradient of each step of the block instead.
        """
        operands = tap_operands(self.plan, const, steps)
        new, total = self._advance_factors(const, operands, steps, found, traces, total)
        if not self._exact:
            return new, total
        length = _steps(steps)
        products = [remaining(local, d, length) for local, d in zip(self.plan.locals, found.jacobians, strict=True)]
        cotangents = []
        for local, (product, _) in zip(self.plan.locals, products, strict=True):
            cotangents.append({s: {k: p for (i, k), p in product.items() if i == s} for s in local.alive})
        rows = self._rows(const, steps, cotangents)
        for n, (site, trace) in enumerate(zip(self.sites, traces, strict=True)):
            if not isinstance(site.carrier, Factorised):
                g, stacked = site.group, operands[site.equation]
                given = (self._unmoved(site, const, stacked), stacked, rows[g][site.result], products[g][1], gamma[g])
                new[n], gradient = site.carrier.solve(trace, *given)
                total = self._told(total, site, gradient)
        return new, total

    def _advance_factors(
        self, const: Values, operands: dict, steps: Values, found: Credit, traces: Trace, total: Values
    ) -> tuple:
        """Factorised traces after the block and their gradients; all sites in one loop over its steps."""
        mine = [n for n, s in enumerate(self.sites) if isinstance(s.carrier, Factorised)]
        new: Trace = list(traces)
        if not mine:
            return new, total
        length, locals_ = _steps(steps), self.plan.locals
        ones = [
            {s: {s: jnp.ones((length, *local.group.varshape), x.dtype)} for s, x in signals.items()}
            for local, signals in zip(locals_, found.signals, strict=True)
        ]
        rows = self._rows(const, steps, ones)
        fixed = {n: self._unmoved(self.sites[n], const, operands[self.sites[n].equation]) for n in mine}
        drives = {}
        for n in mine:
            site = self.sites[n]
            given = (fixed[n], operands[site.equation], rows[site.group].get(site.result, {}))
            drives[n] = site.carrier.drive(*given, length)

        def step(old: dict[int, FactorTrace], at: tuple) -> tuple:
            drives, signals, reads, jacobians = at
            carry, told = {}, {}
            for n, trace in old.items():
                _, _, y, g, carrier = self.sites[n]
                after = carrier.step(trace, *drives[n], jacobians[g], locals_[g].after(y))
                carry[n] = after._replace(f={s: after.f[s] for s in trace.f})
                told[n] = [(carrier.told(after, signals[g]), after.x)]
                if reads[g]:
                    told[n].append((carrier.told(trace, reads[g]), trace.x))
            return carry, told

        start = {n: traces[n] for n in mine}
        last, told = jax.lax.scan(step, start, (drives, found.signals, found.reads, found.jacobians))
        for n in mine:
            site = self.sites[n]
            new[n] = last[n]
            for y_bars, xs in told[n]:
                gradient = site.carrier.gradient(fixed[n], operands[site.equation], y_bars, xs)
                total = self._told(total, site, gradient)
        return new, total

    def _trace_only(
        self, const: Values, steps: Values, traces: Trace, total: Values, gamma: Sequence[Components]
    ) -> tuple[Trace, Values]:
        """Traces after a block of completed steps without a loss."""
        transitions = jacobians(self.plan, const, steps)
        old = [jax.vmap(group.components)([steps[v] for v in group.hidden_invars]) for group in self.plan.groups]
        silent = [{i: jnp.zeros_like(x) for i, x in enumerate(components)} for components in old]
        found = Credit([], Values(), Values(), silent, self._no_signal, transitions)
        return self._advance(const, steps, found, traces, total, gamma)

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

    # ------------------------------------------------------------ parameters and states

    def _fixed(self, states: Values) -> Values:
        written = {old for old, _ in self.plan.carried}
        return states.pick(v for v in states if v not in written)

    def _moving(self, states: Values) -> Values:
        return states.pick(old for old, _ in self.plan.carried)

    def _hidden(self, states: Values) -> Values:
        return states.pick(h.invar for h in self.plan.program.hidden)

    def _all(self, states: Values, moving: Values) -> Values:
        return states | moving

    @cached_property
    def _weights(self) -> tuple[Var, ...]:
        weights = [tap.equation.invars[k] for tap in self.plan.taps.values() for k in tap.weights]
        return tuple(dict.fromkeys([*weights, *self._constant_targets]))

    @cached_property
    def _constant_targets(self) -> tuple[Var, ...]:
        """Targets that no data reaches: a penalty on weights, alone."""
        constants = {*self.plan.constants, *(p.invar for p in self.plan.program.parameters)}
        return tuple(v for v in self.plan.targets if is_var(v) and v in constants)

    def _of_constants(self, cotangents: Sequence[jax.Array]) -> Values:
        """Gradients of constant targets from cotangents (t, ...)."""
        pairs = zip(self.plan.targets, cotangents, strict=True)
        return Values((v, jnp.sum(c, axis=0).astype(v.aval.dtype)) for v, c in pairs if v in self._constant_targets)

    def _no_gradient(self, const: Values) -> Values:
        return Values((v, jnp.zeros_like(const[v])) for v in self._weights)

    def _pull(self, parameters: Values, states: Values, total: Values) -> Values:
        """Gradients of parameters from those of the weights they were turned into."""
        fixed = self._fixed(states)

        def turned(parameters: Values) -> Values:
            return constants(self.plan, parameters | fixed).pick(self._weights)

        _, pull = jax.vjp(turned, parameters)
        return pull(total)[0]


def _add(total: Values, more: Values) -> Values:
    return Values((v, x + more[v] if v in more else x) for v, x in total.items())


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])


def _joined(losses: list, extras: list) -> tuple[jax.Array, Values]:
    return jnp.concatenate(losses), jax.tree.map(lambda *parts: jnp.concatenate(parts), *extras)


def _steps(tree: Any) -> int:
    return len(jax.tree.leaves(tree)[0])


def _split(tree: Any, block: int) -> tuple[Any, Any]:
    """Whole blocks, with a leading axis that counts them, and what is left over."""
    length = len(jax.tree.leaves(tree)[0])
    whole = length // block * block
    head = jax.tree.map(lambda x: x[:whole].reshape(whole // block, block, *x.shape[1:]), tree)
    return head, jax.tree.map(lambda x: x[whole:], tree)
