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
from .carriers import Carrier, Factorised, carrier_for, factorised_for
from .plan import Plan, Values
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
                        if v in local.taps:
                            equation = cut_inside(i, tap.equation, local.found.cuts)
                            place = (plan.groups[g], equation, k, v, local.found.labels[v])
                            factors = factorised_for(*place, tap.data, self.decay) if self.decay else None
                            sites.append(Site(i, k, v, g, factors or carrier_for(*place, plan.facts.constant)))
        return tuple(sites)

    def init_traces(self) -> Trace:
        """Traces of a fresh sequence."""
        return [
            s.carrier.init()
            if isinstance(s.carrier, Factorised)
            else jnp.zeros(s.carrier.shape, self.trace_dtype or s.result.aval.dtype)
            for s in self.sites
        ]

    def two_pass_bytes(self, steps: int) -> int:
        """What two passes keep of a sequence: old states, and what the time loop hands on, of every step."""
        kept = {*self.plan.kept, *self.plan.before, *(h.invar for h in self.plan.program.hidden)}
        return steps * sum(v.aval.size * v.aval.dtype.itemsize for v in kept)

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
                return done.states, done.steps.pick(v for v in done.steps if v not in xs)

            moving, steps = jax.lax.scan(ahead, moving, head)
        last_steps = None
        if tail_w.size:
            done = forward(self.plan, const, moving, tail)
            moving, last_steps = done.states, done.steps
        gamma = [jnp.zeros_like(g.concat_hidden([moving[v] for v in g.hidden_invars])) for g in self.plan.groups]
        total = self._no_gradient(const)
        losses, extras = [], []
        if tail_w.size:
            gamma, total, loss, extra = self._back(const, last_steps, tail_w, gamma, total)
            losses, extras = [loss], [extra]
        if head_w.size:

            def back(carry: tuple, xs: tuple) -> tuple:
                kept, given, w = xs
                gamma, total, loss, extra = self._back(const, kept | given, w, *carry)
                return (gamma, total), (loss, extra)

            (_, total), (loss, extra) = jax.lax.scan(back, (gamma, total), (steps, head, head_w), reverse=True)
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
            traces = self._trace_only(const, complete(self.plan, const, done.steps), traces)
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
                steps = self._steps(const, states, inputs)
                through = self._across(through, traces, gamma, const, steps)
                traces = self._trace_only(const, steps, traces)
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
            traces = self._trace_only(const, self._steps(const, states, inputs), traces)
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
        steps = self._steps(const, states, inputs)
        through = self._across(self._no_gradient(const), traces, gamma, const, steps)
        return _add(gradients, self._pull(parameters, states, through))

    # ------------------------------------------------------------ one block

    def _back(self, const: Values, steps: Values, weights: jax.Array, gamma: list, total: Values) -> tuple:
        steps = complete(self.plan, const, steps)
        found = credit(self.plan, const, steps, [weights], self.aux)
        gammas, first = credit_back(found, gamma)
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
        steps = complete(plan, const, done.steps)
        found = credit(plan, const, steps, cotangents, self.aux)
        total = _add(total, self._of_constants(cotangents))
        if not traces:
            total = _add(total, weight_gradients(plan, const, steps, found.results, []))
            return (done.states, traces, total), found
        gammas, first = credit_back(found, [jnp.zeros_like(s[0]) for s in found.signals])
        local = self._of_traced(local_pull(plan, const, steps, gammas))
        if self.decay is not None:
            now = local_pull(plan, const, steps, found.signals)
            local = [
                Values((v, -now[g][v] if (g, v) in self._factored else y) for v, y in bars.items())
                for g, bars in enumerate(local)
            ]
        total = _add(total, weight_gradients(plan, const, steps, found.results, local))
        total = self._from_traces(total, traces, first)
        traces, total = self._advance(const, steps, found, traces, total)
        return (done.states, traces, total), found

    def _of_traced(self, local: list[Values]) -> list[Values]:
        """Temporal credit of traced parameters only; the others keep their one-step gradient."""
        results = {site.result for site in self.sites}
        return [Values((v, y) for v, y in bars.items() if v in results) for bars in local]

    @cached_property
    def _factored(self) -> frozenset[tuple[int, Var]]:
        return frozenset((s.group, s.result) for s in self.sites if isinstance(s.carrier, Factorised))

    def _from_traces(self, total: Values, traces: Trace, gamma: Sequence[jax.Array]) -> Values:
        """Add γ_0 · ε_0: what the block learned about everything before it; factorised traces apart."""
        for site, trace in zip(self.sites, traces, strict=True):
            if isinstance(site.carrier, Factorised):
                continue
            weight = self.plan.equations[site.equation].invars[site.operand]
            wide = trace.astype(site.result.aval.dtype)
            total = _add(total, {weight: site.carrier.gradient(wide, gamma[site.group]).astype(weight.aval.dtype)})
        return total

    def _steps(self, const: Values, states: Values, inputs: Values) -> Values:
        """A few steps from some states, completed."""
        return complete(self.plan, const, forward(self.plan, const, self._moving(states), inputs).steps)

    def _across(self, total: Values, traces: Trace, gamma: Sequence[jax.Array], const: Values, steps: Values) -> Values:
        """Add γ_0 · ε_0 at the start of a window of completed steps, factorised traces included."""
        total = self._from_traces(total, traces, gamma)
        operands = tap_operands(self.plan, const, jax.tree.map(lambda x: x[:1], steps))
        for site, trace in zip(self.sites, traces, strict=True):
            if isinstance(site.carrier, Factorised):
                weight = self.plan.equations[site.equation].invars[site.operand]
                stacked = operands[site.equation]
                gradient = site.carrier.gradient(trace, self._unmoved(site, const, stacked), stacked, gamma[site.group])
                total = _add(total, {weight: gradient.astype(weight.aval.dtype)})
        return total

    def _unmoved(self, site: Site, const: Values, stacked: dict[int, Any]) -> dict[int, Any]:
        """Operands of a site's operation that stay the same, the weight among them."""
        invars = self.plan.equations[site.equation].invars
        return {k: const[v] if is_var(v) else v.val for k, v in enumerate(invars) if k not in stacked}

    def _advance(self, const: Values, steps: Values, found: Credit, traces: Trace, total: Values) -> tuple:
        """Traces after the block, ε = P_0 ε_0 + Σ_t P_t ∂h_t/∂w; factorised ones give their gradient here."""
        products = [remaining(d) for d in found.jacobians]
        units = [jnp.broadcast_to(jnp.eye(d.shape[-1], dtype=d.dtype), d.shape) for d in found.jacobians]
        exact = any(not isinstance(s.carrier, Factorised) for s in self.sites)
        rows = self._rows(const, steps, [p for p, _ in products]) if exact else []
        slopes = self._rows(const, steps, units) if self._factored else []
        operands = tap_operands(self.plan, const, steps)
        new = []
        for site, trace in zip(self.sites, traces, strict=True):
            g, stacked = site.group, operands[site.equation]
            fixed = self._unmoved(site, const, stacked)
            if isinstance(site.carrier, Factorised):
                at = (slopes[g][site.result], found.jacobians[g], found.signals[g], found.reads[g])
                trace, gradient = site.carrier.block(trace, fixed, stacked, *at)
                weight = self.plan.equations[site.equation].invars[site.operand]
                total = _add(total, {weight: gradient.astype(weight.aval.dtype)})
                new.append(trace)
            else:
                inside = site.carrier.instantaneous(fixed, stacked, rows[g][site.result])
                kept = site.carrier.advance(trace.astype(inside.dtype), products[g][1])
                new.append((kept + inside).astype(trace.dtype))
        return new, total

    def _trace_only(self, const: Values, steps: Values, traces: Trace) -> Trace:
        """Traces after a block of completed steps without a loss."""
        transitions = jacobians(self.plan, const, steps)
        silent = [jnp.zeros(d.shape[:-1], d.dtype) for d in transitions]
        found = Credit([], Values(), Values(), silent, silent, transitions)
        return self._advance(const, steps, found, traces, self._no_gradient(const))[0]

    def _rows(self, const: Values, steps: Values, products: list[jax.Array]) -> list[Values]:
        """P_t ∂h_t/∂y of every group, tap result and step: axes (t, y, s)."""
        plan = self.plan

        def one(step: Values, products: list[jax.Array]) -> list[Values]:
            env = plan.compute(plan.derivative_variables, {**const, **step})
            result = []
            for local, product in zip(plan.locals, products, strict=True):
                pulls = [pull_one(local, env, product[..., s, :]) for s in range(product.shape[-1])]
                stacked = [jnp.stack(columns, axis=-1) for columns in zip(*pulls, strict=True)]
                result.append(Values(zip(local.taps, stacked, strict=True)))
            return result

        return jax.vmap(one)(steps, products)

    # ------------------------------------------------------------ parameters and states

    def _fixed(self, states: Values) -> Values:
        written = {old for old, _ in self.plan.carried}
        return states.pick(v for v in states if v not in written)

    def _moving(self, states: Values) -> Values:
        return states.pick(old for old, _ in self.plan.carried)

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
