"""Every learning rule as a formula: dense matrices in plain JAX, nothing of the package.

A model is a function ``step(p, s, x, cut) -> (new states, output)`` of trees, whose cuts are written by hand. ``cut``
says which paths into new states carry no gradient:

    FULL    none: the model itself
    DEEP    from an old state to a new one of another position in the same group
    SIGNAL  from an old state to a new one of another position, in any group
    LOCAL   also those inside the step: a reset gate through the candidate, a layer into the next
    LINKED  LOCAL without the way from units into a leaky read-out

A rule advances a trace step by step, `Formula.step(oracle, q, h, trace, x, y)`, with parameters q and states h as flat
vectors. `Oracle` runs rules along a sequence, and differentiates the whole sequence for comparison.
"""

import functools
import operator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree


class Cut:
    """What a step reads: where gradients stop, and how products are taken."""

    def __init__(self, level, back=None):
        self.level, self.back = level, back

    def old(self, v):
        """A value of old states that reaches other positions."""
        return jax.lax.stop_gradient(v) if self.level >= 1 else v

    def old_across(self, v):
        """A value of old states that reaches positions of another group."""
        return jax.lax.stop_gradient(v) if self.level >= 2 else v

    def now(self, v):
        """A value of new states that reaches other positions."""
        return jax.lax.stop_gradient(v) if self.level >= 3 else v

    def dense(self, x, w):
        return x @ w

    def own(self, w, v):
        """A weight of each unit by a value of each unit."""
        return w * v

    def into(self, z):
        """A value of new states that drives a leaky read-out."""
        return self.now(z)

    def old_into(self, z):
        """A value of old states that drives a leaky read-out."""
        return self.old_across(z)

    def read(self, z, w, number=0):
        """z @ w of a read-out; with feedback weights in the derivative by z."""
        z = self.into(z)
        return z @ w if self.back is None else _read(z, w, self.back[number])


@jax.custom_vjp
def _read(z, w, back):
    return z @ w


_read.defvjp(
    lambda z, w, back: (z @ w, (z, back)),
    lambda kept, bar: (
        bar @ kept[1].T,
        jnp.einsum('bh,bo->ho', kept[0], bar),
        jnp.zeros_like(kept[1]),
    ),
)

FULL, DEEP, SIGNAL, LOCAL = map(Cut, range(4))


class Linked(Cut):
    """A cut that keeps the way from units into leaky read-outs."""

    def into(self, z):
        return z

    def old_into(self, z):
        return z


LINKED_SIGNAL, LINKED = Linked(2), Linked(3)


class Uses(Cut):
    """A local step that lists its uses (x, w, y) of weights, with something added to every y.

    ``by_x``: in a product of each unit w · v, v is taken for x; else y is w, and v is a part of ∂h/∂y.
    """

    def __init__(self, by_x, added=None):
        super().__init__(3)
        self.by_x, self.added, self.list = by_x, added, []

    def dense(self, x, w):
        return self._use(x, w, x @ w)

    def own(self, w, v):
        if self.by_x:
            return self._use(v, w, w * v)
        return self._use(jnp.ones(()), w, jnp.broadcast_to(w, v.shape)) * v

    def _use(self, x, w, y):
        self.list.append((x, w, y))
        return y if self.added is None else y + self.added[len(self.list) - 1]


# ---------------------------------------------------------------- rules


@dataclass(frozen=True)
class Local:
    """ε = D ε + ∂h/∂θ of the local step; gradient ∂ℓ/∂θ + (L D + R) ε.

    ``leak`` replaces D by a number. With ``kappa``, the error at what the read-out sees, u, meets
    ē = κ ē + (∂u/∂h) ε. The error comes back by ``feedback`` weights, or a modulator replaces L.
    ``linked`` keeps what a leaky read-out remembers of its units; ``deep``: (L D + R) follows other groups too.
    """

    leak: float | None = None
    kappa: float = 0.0
    feedback: bool = False
    modulated: bool = False
    linked: bool = False
    deep: bool = False

    def start(self, o):
        zeros = lambda n: jnp.zeros((n, o.q.size))
        u = o.case.seen(o.s) if o.case.seen else np.zeros(0)
        return zeros(o.h.size), zeros(u.size)

    def step(self, o, q, h, trace, x, y):
        direct = o.grad(lambda q: o.value(q, h, x, y))(q)
        transition, now = o.local(q, h, x, LINKED if self.linked else LOCAL)
        old, filtered = trace
        carried = transition @ old if self.leak is None else self.leak * old
        if not o.case.seen:
            assert self == Local(linked=self.linked, deep=self.deep)
            cut = DEEP if self.deep else LINKED_SIGNAL if self.linked else SIGNAL
            signal = o.grad(lambda h: o.value(q, h, x, y, cut))(h)
            return direct + signal @ old, (carried + now, filtered)
        new, _ = o.step(q, h, x)
        true, read = jax.grad(o.loss_of_states, (1, 2))(q, new, h, y)
        seen = lambda h: o.case.seen(o.to_s(h))
        error = o.error_of_seen(q, new, h, y, self.feedback).ravel()
        onward = jax.jacrev(lambda h: seen(h).ravel())(new)
        filtered = self.kappa * filtered + onward @ (carried + now)
        through = error @ filtered
        if self.modulated:
            through = o.modulator() @ (carried + now)
        assert not (o.case.also and self.kappa)
        return direct - true @ now + through + read @ old, (carried + now, filtered)

    def across(self, o, q, trace, gamma):
        return gamma @ trace[0]


@dataclass(frozen=True)
class Factors:
    """ε_x = α ε_x + x, ε_f = β D ε_f + (1 - β) ∂h/∂y, and (L ε_f) ⊗ ε_x / (1 - β^t) for each use y of a weight.

    ``forget`` replaces D by a number.
    """

    alpha: float
    beta: float
    forget: float | None = None

    @property
    def by_x(self):
        """A side without memory takes no inputs."""
        return self.beta == 0

    def start(self, o):
        uses = o.uses(o.q, o.h, o.xs[0], self.by_x)
        return (
            [jnp.zeros_like(x) for x, _, _ in uses],
            [jnp.zeros((o.h.size, *y.shape)) for _, _, y in uses],
            0,
        )

    def step(self, o, q, h, trace, x, y):
        direct = jax.grad(lambda q: o.value(q, h, x, y))(q)
        transition, now = o.local(q, h, x)
        new, _ = o.step(q, h, x)
        signal, read = jax.grad(o.loss_of_states, (1, 2))(q, new, h, y)
        uses = o.uses(q, h, x, self.by_x)
        zeros = [jnp.zeros_like(y) for _, _, y in uses]
        new_by = lambda added: o.step(q, h, x, Uses(self.by_x, added))[0]
        slopes = jax.jacrev(new_by)(zeros)
        on = lambda f: (
            jnp.tensordot(transition, f, 1)
            if self.forget is None
            else (self.forget * f)
        )
        of_read = self.across(o, q, trace, read)
        seen, factors, t = trace
        trace = (
            [self.alpha * a + x for a, (x, _, _) in zip(seen, uses, strict=True)],
            [
                self.beta * on(f) + (1 - self.beta) * slope
                for f, slope in zip(factors, slopes, strict=True)
            ],
            t + 1,
        )
        of_signal = self.across(o, q, trace, signal)
        return direct - signal @ now + of_signal + of_read, trace

    def across(self, o, q, trace, gamma):
        """Σ over uses of ∂⟨ε_x · w(θ), γ ε_f⟩/∂θ."""
        xs, factors, t = trace
        scale = jnp.where(t > 0, 1 - self.beta ** jnp.maximum(t, 1), 1)

        def value(q):
            weights = [w for _, w, _ in o.uses(q, o.h, o.xs[0], self.by_x)]
            total = 0.0
            for x, w, f in zip(xs, weights, factors, strict=True):
                y = x @ w if w.ndim == 2 else x * w
                total += jnp.sum(y * jnp.tensordot(gamma, f, 1)) / scale
            return total

        return jax.grad(value)(q)


@dataclass(frozen=True)
class Influence:
    """RTRL; with ``n`` SnAp-n: what a parameter does not reach within n steps is dropped."""

    n: int | None = None

    def start(self, o):
        return jnp.zeros((o.h.size, o.q.size))

    def step(self, o, q, h, trace, x, y):
        direct, past = o.grad(lambda q, h: o.value(q, h, x, y), (0, 1))(q, h)
        onward, now = o.jacobian(lambda h, q: o.step(q, h, x)[0], (0, 1))(h, q)
        influence = onward @ trace + now
        if self.n is not None:
            influence = jnp.where(o.pattern(self.n), influence, 0)
        return direct + past @ trace, influence

    def across(self, o, q, trace, gamma):
        return gamma @ trace


# ---------------------------------------------------------------- along a sequence


def loss(out, y, states, rest):
    """An error of the output, and a little of every state."""
    error = jnp.mean((out - y) ** 2)
    return error + rest * sum(jnp.mean(v**2) for v in states) if rest else error


class Oracle:
    """A model with its parameters p, first states s, inputs and targets; q and h are p and s as vectors."""

    def __init__(self, case, p, s, xs, ys):
        self.case, self.p, self.s, self.xs, self.ys = case, p, s, xs, ys
        # Loops of unknown length have forward derivatives only.
        self.grad = jax.jacfwd if case.loops else jax.grad
        self.jacobian = jax.jacfwd if case.loops else jax.jacrev
        self.q, self.to_p = ravel_pytree(p)
        self.h, self.to_s = ravel_pytree(s)

    def step(self, q, h, x, cut=FULL):
        new, out = self.case.step(self.to_p(q), self.to_s(h), x, cut)
        return ravel_pytree(new)[0], out

    def value(self, q, h, x, y, cut=FULL):
        new, out = self.step(q, h, x, cut)
        return self.loss(out, y, self.to_s(new))

    def loss(self, out, y, new):
        return loss(out, y, jax.tree.leaves(new), self.case.rest)

    def local(self, q, h, x, cut=LOCAL):
        """D and ∂h/∂θ of the local step."""
        function = lambda h, q: self.step(q, h, x, cut)[0]
        return self.jacobian(function, (0, 1))(h, q)

    # Of models whose output is ``read(p, seen(new))``, and ``also(p, old)`` where there is one.

    def out_of(self, p, u, old):
        out = self.case.read(p, u)
        return out + self.case.also(p, self.to_s(old)) if self.case.also else out

    def loss_of_states(self, q, new, old, y):
        u = self.case.seen(self.to_s(new))
        return loss(self.out_of(self.to_p(q), u, old), y, [], 0)

    def error_of_seen(self, q, new, old, y, feedback):
        p, u = self.to_p(q), self.case.seen(self.to_s(new))
        if not feedback:
            return jax.grad(lambda u: loss(self.out_of(p, u, old), y, [], 0))(u)
        error = jax.grad(lambda out: loss(out, y, [], 0))(self.out_of(p, u, old))
        return error @ self.case.back[0].T

    def modulator(self):
        full = jnp.broadcast_to(self.case.modulator, jax.tree.leaves(self.s)[0].shape)
        return jnp.concatenate([full.ravel()] * (self.h.size // full.size))

    def uses(self, q, h, x, by_x):
        cut = Uses(by_x)
        self.step(q, h, x, cut)
        return cut.list

    @functools.cache  # noqa: B019
    def pattern(self, n):
        """Which influences n steps open, at any states."""
        drawn = np.random.default_rng(4).normal(size=(20, self.h.size))
        at = lambda h: jax.jacrev(lambda h, q: self.step(q, h, self.xs[0])[0], (0, 1))(
            2 * h, self.q
        )
        with jax.ensure_compile_time_eval():
            found = jax.vmap(at)(drawn)
        onward, direct = (np.any(np.asarray(part) != 0, axis=0) for part in found)
        mask = direct
        for _ in range(n - 1):
            mask = direct | (onward.astype(int) @ mask > 0)
        return mask

    # Gradients are trees like p.

    @functools.partial(jax.jit, static_argnums=(0, 5, 6))
    def reverse(self, p, s, xs, ys, cut=FULL, hold=False):
        """Gradients in p and in s of a whole sequence, its last states and losses; ``hold``: of each step alone."""

        def total(p, s):
            def one(s, at):
                s = jax.lax.stop_gradient(s) if hold else s
                new, out = self.case.step(p, s, at[0], cut)
                return new, self.loss(out, at[1], new)

            s, losses = jax.lax.scan(one, s, (xs, ys))
            return jnp.sum(losses), (s, losses)

        floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(s))
        which = (0, 1) if floats else 0
        found, (s, losses) = self.grad(total, which, has_aux=True)(p, s)
        return *(found if floats else (found, None)), s, losses

    @functools.cache  # noqa: B019
    def bptt(self, cut=FULL, hold=False):
        return self.reverse(self.p, self.s, self.xs, self.ys, cut, hold)[0]

    def losses(self):
        return self.reverse(self.p, self.s, self.xs, self.ys, FULL, False)[3]

    def tbptt(self, k):
        s, found = self.s, []
        for t in range(0, len(self.xs), k):
            part = slice(t, t + k)
            gradient, _, s, _ = self.reverse(
                self.p, s, self.xs[part], self.ys[part], FULL, False
            )
            found.append(gradient)
        return total_of(found)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def advance(self, formula, p, s, trace, x, y):
        """One step of a rule: gradient, next states and next trace."""
        q, h = ravel_pytree(p)[0], ravel_pytree(s)[0]
        found, trace = formula.step(self, q, h, trace, x, y)
        return self.to_p(found), self.case.step(p, s, x, FULL)[0], trace

    @functools.cache  # noqa: B019
    def by(self, formula):
        """The rule's gradient of the whole sequence."""
        return self.along(formula)[0]

    def along(self, formula, mask=None, rate=0.0, every=None):
        """Sum of the rule's gradients, and the weights after descent by ``rate`` every so many steps."""
        p, s, trace, total = self.p, self.s, formula.start(self), []
        for t, (x, y) in enumerate(zip(self.xs, self.ys, strict=True), 1):
            gradient, s, trace = self.advance(formula, p, s, trace, x, y)
            weight = 1.0 if mask is None else mask[t - 1]
            total.append(jax.tree.map(lambda g, m=weight: m * g, gradient))
            if every and t % every == 0:
                now = total_of(total[-every:])
                p = jax.tree.map(lambda w, g: w - rate * g, p, now)
        return total_of(total), p

    def windows(self, formula, k):
        """Exact reverse mode inside windows, the trace across them."""
        s, trace, found = self.s, formula.start(self), []
        for t in range(0, len(self.xs), k):
            xs, ys = self.xs[t : t + k], self.ys[t : t + k]
            gradient, gamma, _, _ = self.reverse(self.p, s, xs, ys, FULL, False)
            gamma = ravel_pytree(gamma)[0]
            across = formula.across(self, self.q, trace, gamma)
            found += [gradient, self.to_p(across)]
            for x, y in zip(xs, ys, strict=True):
                _, s, trace = self.advance(formula, self.p, s, trace, x, y)
        return total_of(found)


def total_of(trees):
    return functools.reduce(lambda a, b: jax.tree.map(operator.add, a, b), trees)


def relative_error(a, b):
    a, b = (ravel_pytree(tree)[0] for tree in (a, b))
    return float(jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-30))


def plain_gradient(step, p, s, xs, ys, weights=None, derivative=jax.grad):
    """Of Σ_t w_t mean((out_t - y_t)²), with w_t = 1/T if none are given, by JAX through all steps."""
    weights = jnp.full(len(xs), 1 / len(xs)) if weights is None else weights

    def total(p):
        def one(s, at):
            x, y, weight = at
            s, out = step(p, s, x)
            return s, weight * jnp.mean((out - y) ** 2)

        return jax.lax.scan(one, s, (xs, ys, weights))[1].sum()

    return derivative(total)(p)


def close(a, b, rtol=1e-4, atol=1e-6):
    """Trees equal to the rounding of float32."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def assert_equal(a, b, tolerance=1e-10):
    """Trees equal to rounding, each array on the scale of its largest element."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        scale = max(np.abs(np.asarray(y)).max(initial=0), 1e-6)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * scale)
