"""A whole sequence, block by block: one pass with traces, or two passes without any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ..compat import Var, is_var
from .block import Credit, complete, constants, credit, credit_back, forward, local_pull, weight_gradients
from .masking import Mask, finite, without_nan, zero_at
from .plan import Components, Plan, Values
from .products import wide
from .recursion import Scheme
from .teaching import Taught, teaching_signals
from .traces import Trace, Traces, add, steps_in
from .window import run_window, window_gradient


class Solved(NamedTuple):
    """What a sequence gives: gradients of parameters, losses and auxiliary values of every step."""

    gradients: Values
    losses: jax.Array
    aux: Values
    states: Values
    traces: Trace
    learned: Sequence[jax.Array] = ()
    """What a predictor's weights should change by."""
    error: Any = 0.0
    """Its error."""


class Predictor(Protocol):
    """Guesses the credit that states get from what follows, by group and component."""

    def __call__(self, weights: Sequence[jax.Array], states: list[Components]) -> list[Components]:
        """The guess."""
        ...

    def lesson(
        self, weights: Sequence[jax.Array], states: list[Components], right: list[Components]
    ) -> tuple[jax.Array, list[jax.Array]]:
        """How far the guess is from what is right, and what that should change the weights by."""
        ...


class Sequencer:
    """Solves sequences of one plan. Pure: states and traces go in and come out."""

    def __init__(
        self,
        plan: Plan,
        scheme: Scheme = Scheme(),  # noqa: B008 - immutable
        trace_dtype: Any = None,
        traced: Callable[[int], bool] = lambda equation: True,
    ):
        self.plan = plan
        self.aux = plan.aux
        self.scheme = scheme
        self.traces = Traces(plan, scheme, traced, trace_dtype)

    @property
    def labels(self) -> list[tuple]:
        """What every trace is of: parameters, operation, hidden states."""
        plan, facts = self.plan, self.plan.facts
        found = []
        for site in self.traces.sites:
            equation = plan.equations[site.equation]
            grads = facts.total[equation.invars[site.operand]].grads
            names = tuple(p.name for p in facts.program.parameters if grads & facts.bit[p.invar])
            found.append((names, equation.primitive.name, tuple(plan.groups[site.group].hidden_paths)))
        return found

    @property
    def owner(self) -> tuple[int, ...]:
        """For every trace the one that holds the states' side of it, where factors share that."""
        return self.traces.owner

    def init_traces(self) -> Trace:
        """Traces of a fresh sequence."""
        return self.traces.init()

    @cached_property
    def step_bytes(self) -> int:
        """What the derivatives of one step need of it: old states, and what the time loop hands on."""
        before = [v for v in self.plan.before if self.plan.is_needed(v)]
        kept = {*self.plan.kept, *before, *(h.invar for h in self.plan.program.hidden)}
        return max(sum(v.aval.size * v.aval.dtype.itemsize for v in kept), 1)

    def block_length(self, steps: int, carried: bool) -> int:
        """Steps to solve together: what a block keeps should stay near the processor.

        A block reads and writes the gradients and all of the traces it carries, so that it may keep a quarter of what
        the former and half of what the latter take. A length that divides the steps spares a program for the rest.
        """
        least, room = (8, 2**20)
        if carried:
            count = lambda arrays: sum(x.size * x.dtype.itemsize for x in arrays)
            traces = count(jax.tree.leaves(jax.eval_shape(self.init_traces)))
            gradients = count(v.aval for v in self._weights)
            least, room = (4, min(max(gradients // 4 + traces // 2, 2**17), 2**23))
        longest = min(max(room // self.step_bytes, least), 50, steps)
        return next((k for k in range(longest, longest // 2, -1) if steps % k == 0), longest)

    # ------------------------------------------------------------ drivers

    def two_pass(
        self,
        parameters: Values,
        states: Values,
        inputs: Values,
        weights: jax.Array,
        block: int,
        masked: bool = True,
    ) -> Solved:
        """Forward keeping old states, then blocks in reverse carrying credit; no trace at all.

        ``masked``: some of the weights may be zero.
        """
        const = constants(self.plan, parameters | self._fixed(states))
        moving = self._moving(states)
        (head, head_w), (tail, tail_w) = _split((inputs, weights), block)
        if head_w.size:

            def ahead(states: Values, xs: Values) -> tuple[Values, tuple[Values, Values]]:
                done = forward(self.plan, const, states, xs)
                return done.states, (done.steps.pick(v for v in done.steps if v not in xs), self._hidden(done.states))

            moving, (steps, ends) = jax.lax.scan(ahead, moving, head)
        if tail_w.size:
            done = forward(self.plan, const, moving, tail)
            moving, last_steps = done.states, done.steps
        gamma = self.traces.no_credit(moving)
        total = self._no_gradient(const)
        dead = jnp.asarray(True) if masked else None  # of all that follows
        losses, extras = [], []
        if tail_w.size:
            gamma, total, dead, loss, extra = self._back(const, last_steps, moving, tail_w, gamma, total, dead)
            losses, extras = [loss], [extra]
        if head_w.size:

            def back(carry: tuple, xs: tuple) -> tuple[tuple, tuple[jax.Array, Values]]:
                kept, end, given, w = xs
                gamma, total, dead, loss, extra = self._back(const, kept | given, end, w, *carry)
                return (gamma, total, dead), (loss, extra)

            carry, backward = (gamma, total, dead), (steps, ends, head, head_w)
            (_, total, _), (loss, extra) = jax.lax.scan(back, carry, backward, reverse=True)
            losses, extras = [_flat(loss), *losses], [jax.tree.map(_flat, extra), *extras]
        return Solved(self._pull(parameters, states, total), *_joined(losses, extras), self._all(states, moving), [])

    def one_pass(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
        weights: jax.Array,
        block: int,
        masked: bool = True,
    ) -> Solved:
        """Blocks forward, traces carried: memory does not grow with the sequence.

        ``masked``: some of the weights may be zero.
        """
        const = constants(self.plan, parameters | self._fixed(states))
        carry = (self._moving(states), traces, self._no_gradient(const))
        (head, head_w), (tail, tail_w) = _split((inputs, weights), block)
        losses, extras = [], []
        if head_w.size:
            carry, (loss, extra) = jax.lax.scan(
                lambda carry, xs: self._ahead(const, *carry, *xs, masked), carry, (head, head_w)
            )
            losses, extras = [_flat(loss)], [jax.tree.map(_flat, extra)]
        if tail_w.size:
            carry, (loss, extra) = self._ahead(const, *carry, tail, tail_w, masked)
            losses, extras = [*losses, loss], [*extras, extra]
        moving, traces, total = carry
        return Solved(
            self._pull(parameters, states, total), *_joined(losses, extras), self._all(states, moving), traces
        )

    def evolve(self, parameters: Values, states: Values, traces: Trace, inputs: Values, block: int) -> Solved:
        """Advance states and traces without a loss; ``aux`` values of every step come along."""
        const = constants(self.plan, parameters | self._fixed(states))
        head, tail = _split(inputs, block)

        def one(carry: tuple, xs: Values) -> tuple[tuple, Values]:
            moving, traces = carry
            done = forward(self.plan, const, moving, xs)
            if traces:
                steps = complete(self.plan, const, done.steps, done.states)
                traces, _ = self.traces.advance_silently(
                    const, steps, traces, self._no_gradient(const), self.traces.no_signal
                )
            extra = jax.vmap(lambda step: self.plan.compute(self.aux, const | step).pick(self.aux))(done.steps)
            return (done.states, traces), extra

        carry, extras = (self._moving(states), traces), []
        if steps_in(head):
            carry, extra = jax.lax.scan(one, carry, head)
            extras = [jax.tree.map(_flat, extra)]
        if steps_in(tail):
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
        predictor: Predictor | None = None,
        whole: bool = False,
        unit: Any = 1.0,
        masked: bool = True,
    ) -> Solved:
        """Reverse mode inside windows of a length; across them the traces, if there are any, or a predictor.

        ``whole``: nothing came before the sequence and nothing follows it. ``unit``: what a loss that the predictor
        knows of counts here. ``masked``: some of the weights may be zero.
        """
        plan = self.plan
        (head, head_w), (tail, tail_w) = _split((inputs, weights), length)
        const = constants(plan, parameters | self._fixed(states))
        total = Values((v, jnp.zeros_like(x)) for v, x in parameters.items())
        count = len(head_w) + bool(tail_w.size)
        numbers = jnp.arange(count)
        learned = [*(jnp.zeros_like(const[v]) for v in plan.standing), jnp.zeros(())] if predictor else [jnp.zeros(())]

        def one(carry: tuple, xs: tuple) -> tuple[tuple, tuple[jax.Array, Values]]:
            states, traces, total, through, learned = carry
            inputs, weights, n = xs
            later = None
            if predictor:
                follows = jnp.where(whole & (n == count - 1), 0.0, unit)
                wisdom = [const[v] for v in plan.standing]
                scaled = lambda x: follows.astype(x.dtype) * x
                later = lambda end: jax.tree.map(scaled, _guess(predictor, wisdom, end))
            found = window_gradient(
                plan, parameters, states, inputs, plan.targets[:1], [weights], self.aux, deep, later, masked
            )
            gradients, gamma, new, values = found
            if predictor:
                preceded = jnp.where(whole & (n == 0), 0.0, 1.0)
                start = [dict(enumerate(g.components([states[v] for v in g.hidden_invars]))) for g in plan.groups]
                right = jax.tree.map(lambda x: (x / unit).astype(x.dtype), gamma)
                preceded = preceded * _are_finite(start)
                start = finite(start, jnp.asarray(True))
                error, taught = predictor.lesson(wisdom, start, right)
                learned = [a + preceded.astype(b.dtype) * b for a, b in zip(learned, [*taught, error], strict=True)]
            if traces:
                dead = jnp.all(weights == 0) & (predictor is None)
                traces, through = self._across(const, states, inputs, traces, through, gamma, dead)
            carry = (new, traces, add(total, gradients), through, learned)
            return carry, (values[plan.targets[0]], values.pick(self.aux))

        carry, losses, extras = (states, traces, total, self._no_gradient(const), learned), [], []
        if head_w.size:
            carry, (loss, extra) = jax.lax.scan(one, carry, (head, head_w, numbers[: len(head_w)]))
            losses, extras = [_flat(loss)], [jax.tree.map(_flat, extra)]
        if tail_w.size:
            carry, (loss, extra) = one(carry, (tail, tail_w, numbers[-1]))
            losses, extras = [*losses, loss], [*extras, extra]
        states, traces, total, through, learned = carry
        total = add(total, self._pull(parameters, states, through)) if traces else total
        *learned, error = [x / max(count - whole, 1) for x in learned]
        return Solved(total, *_joined(losses, extras), states, traces, learned, error)

    def run(self, parameters: Values, states: Values, traces: Trace, inputs: Values) -> tuple[Values, Values, Trace]:
        """A few steps: targets and auxiliary values of each, next states, next traces."""
        new, found = run_window(self.plan, parameters, states, inputs, self._values)
        values = Values(zip(self._values, found, strict=True))
        if traces:
            const = constants(self.plan, parameters | self._fixed(states))
            traces, _ = self._across(const, states, inputs, traces, self._no_gradient(const), self.traces.no_signal)
        return values, new, traces

    def exact_window_gradient(
        self,
        parameters: Values,
        states: Values,
        traces: Trace,
        inputs: Values,
        cotangents: Sequence[jax.Array],
        predictor: Predictor | None = None,
    ) -> Values:
        """Gradient of a window for cotangents of its targets: reverse mode inside, γ_0 · ε_0 across.

        ``predictor``: of the credit that a step's loss of weight one would get from what follows the window.
        """
        const = constants(self.plan, parameters | self._fixed(states))
        wisdom = [const[v] for v in self.plan.standing]
        later = (lambda end: _guess(predictor, wisdom, end)) if predictor else None
        found = window_gradient(self.plan, parameters, states, inputs, self.plan.targets, cotangents, later=later)
        gradients, gamma, _, _ = found
        if not traces:
            return gradients
        dead = Mask.of(cotangents, predictor is None).dead[0]
        _, through = self._across(const, states, inputs, traces, self._no_gradient(const), gamma, dead)
        return add(gradients, self._pull(parameters, states, through))

    # ------------------------------------------------------------ one block

    def _taught(self, const: Values, steps: Values, found: Credit, cotangents: Sequence[jax.Array]) -> Taught:
        groups = {g for _, _, g in self.traces.taught}
        return teaching_signals(self.plan, self.scheme, const, steps, found, cotangents, groups)

    def _back(
        self,
        const: Values,
        steps: Values,
        last: Values,
        weights: jax.Array,
        gamma: list,
        total: Values,
        dead: jax.Array | None,
    ) -> tuple:
        """One block backward; ``dead``: whether all steps that follow are, None where no weight is zero."""
        plan, traces = self.plan, self.traces
        steps = complete(plan, const, steps, last)
        mask = None if dead is None else Mask.of([weights], dead)
        safe = steps if mask is None else without_nan(steps, mask.silent)
        found = credit(plan, const, steps, [weights], self.aux, None if mask is None else safe)
        moving = traces.moving(found, self._taught(const, safe, found, [weights]))
        gammas, first = credit_back(moving, gamma, len(weights), mask)
        local = traces.of_taught(local_pull(plan, const, safe, traces.teaching(found, moving, gammas)))
        if mask is not None:
            local = zero_at(local, mask.dead)
            dead = mask.dead[0]
        total = add(total, weight_gradients(plan, const, steps, found.results, local, mask=mask))
        return first, add(total, self._of_constants([weights])), dead, found.targets[0], found.aux

    def _ahead(
        self,
        const: Values,
        states: Values,
        traces: Trace,
        total: Values,
        inputs: Values,
        weights: jax.Array,
        masked: bool,
    ) -> tuple[tuple[Values, Trace, Values], tuple[jax.Array, Values]]:
        carry, found = self._solve(const, states, traces, total, inputs, [weights], masked)
        return carry, (found.targets[0], found.aux)

    def _solve(
        self,
        const: Values,
        states: Values,
        traces: Trace,
        total: Values,
        inputs: Values,
        cotangents: Sequence[jax.Array],
        masked: bool = True,
    ) -> tuple[tuple[Values, Trace, Values], Credit]:
        """One block forward: next states, next traces, gradients added to ``total``.

        ``masked``: the cotangents of some steps may be zero.
        """
        plan = self.plan
        done = forward(plan, const, states, inputs)
        steps = complete(plan, const, done.steps, done.states)
        mask = Mask.of(cotangents) if masked else None
        safe = steps if mask is None else without_nan(steps, mask.silent)
        found = credit(plan, const, steps, cotangents, self.aux, None if mask is None else safe)
        total = add(total, self._of_constants(cotangents))
        book = self.traces
        moving = book.moving(found, self._taught(const, safe, found, cotangents))
        local: list[Values] = [Values() for _ in plan.groups]
        first = book.no_signal
        if book.exact or not self.scheme.is_plain:
            gammas, first = credit_back(moving, book.no_credit(states), len(cotangents[0]), mask)
            local = book.of_taught(local_pull(plan, const, safe, book.teaching(found, moving, gammas)))
            local = local if mask is None else zero_at(local, mask.dead)
        whole = found.results.pick(v for v in found.results if book.rest.get(v, True))
        if book.factored:
            now = local_pull(plan, const, safe, found.signals)
            now = now if mask is None else zero_at(now, mask.silent)
            for g, v in book.factored:
                if v in whole:
                    local[g][v] = -now[g][v]
                else:
                    local[g].pop(v, None)
        total = add(total, weight_gradients(plan, const, steps, whole, local, book.rest, mask))
        traces, total = book.advance(const, steps, moving, traces, total, first, mask, safe)
        return (done.states, traces, total), found

    def _across(
        self,
        const: Values,
        states: Values,
        inputs: Values,
        traces: Trace,
        total: Values,
        gamma: Sequence[Components],
        dead: jax.Array | bool = True,
    ) -> tuple[Trace, Values]:
        """Traces after a window without signals of its own; γ_0 · ε_0 at its start is added to the gradient.

        ``dead``: neither the window nor what follows has any.
        """
        done = forward(self.plan, const, self._moving(states), inputs)
        steps = complete(self.plan, const, done.steps, done.states)
        dead = jnp.asarray(dead)
        total = self.traces.from_factors(total, traces, gamma, const, steps, dead)
        return self.traces.advance_silently(const, steps, traces, total, gamma, dead)

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
        constant = ((v, c) for v, c in pairs if v in self._constant_targets)
        return Values((v, jnp.sum(c, axis=0).astype(wide(v.aval.dtype))) for v, c in constant)

    def _no_gradient(self, const: Values) -> Values:
        return Values((v, jnp.zeros_like(const[v], wide(v.aval.dtype))) for v in self._weights)

    def _pull(self, parameters: Values, states: Values, total: Values) -> Values:
        """Gradients of parameters from those of the weights they were turned into."""
        fixed = self._fixed(states)

        def turned(parameters: Values) -> Values:
            return constants(self.plan, parameters | fixed).pick(self._weights)

        _, pull = jax.vjp(turned, parameters)
        return pull(Values((v, x.astype(v.aval.dtype)) for v, x in total.items()))[0]


def _guess(predictor: Predictor, weights: Sequence[jax.Array], states: list[Components]) -> list[Components]:
    """What a predictor says; nothing of states that are not finite, as after the end of a padded sequence."""
    found = predictor(weights, finite(states, jnp.asarray(True)))
    return zero_at(found, ~_are_finite(states))


def _are_finite(states: list[Components]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(states)]))


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])


def _joined(losses: list, extras: list) -> tuple[jax.Array, Values]:
    return jnp.concatenate(losses), jax.tree.map(lambda *parts: jnp.concatenate(parts), *extras)


def _split(tree: Any, block: int) -> tuple[Any, Any]:
    """Whole blocks, with a leading axis that counts them, and what is left over."""
    length = len(jax.tree.leaves(tree)[0])
    whole = length // block * block
    head = jax.tree.map(lambda x: x[:whole].reshape(whole // block, block, *x.shape[1:]), tree)
    return head, jax.tree.map(lambda x: x[whole:], tree)
