"""The dense influence recursion of a step program, which the engine must reproduce.

ε_t = D_t ε_{t-1} + ∂h_t/∂θ with full Jacobians by `jax.jacrev` of the whole step with its cuts put in, and the
gradient Σ_t ∂ℓ_t/∂θ + (L_t D_t + R_t) ε_{t-1}. It shares no slicing and no derivative program with the compiler, only
the cuts that the analysis chose. A number may leak in the place of D; and signals may read ē_t = κ ē_{t-1} + ε_t in the
place of ε_t.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

from braintrace.analysis.analysed import analyse
from braintrace.compat import evaluate, evaluate_equation, is_var, make_jaxpr
from braintrace.compiled_step import Values
from braintrace.graph.hidden_group import hidden_groups
from braintrace.lowering import Stages, lower
from braintrace.program import Cuts, with_cuts
from braintrace.solver import (
    BlockSolver,
    JacobianRecursion,
    ScalarLeak,
    Traces,
)

NO_CUTS = Cuts()


@contextlib.contextmanager
def precision(case):
    with jax.enable_x64(True) if case.x64 else contextlib.nullcontext():
        yield


def close_to(a, b, case, scale=1.0):
    """Equal to rounding of the case's precision."""
    wide = lambda x: np.asarray(x, complex if jnp.iscomplexobj(x) else float)
    a, b = wide(a), wide(b)
    assert a.shape == b.shape
    size = max(np.abs(a).max(initial=0), np.abs(b).max(initial=0), 1e-6) * scale
    tolerance = 1e-10 if case.x64 else 0.05 if 'float16' in case.name else 1e-4
    assert np.isfinite(a).all()
    np.testing.assert_allclose(a, b, atol=tolerance * size, rtol=tolerance)


def local_step(program, members, positions):
    """The whole step with the cuts of one group put in and everything of other groups held fixed."""
    held = {h.invar for h in program.hidden if h not in members} | {
        h.outvar for h in program.hidden if h not in members
    }
    cuts = Cuts(dict(positions.cuts.edges), dict(positions.cuts.bodies))
    for i, eqn in enumerate(program.equations):
        for k, v in enumerate(eqn.invars):
            if is_var(v) and v in held:
                cuts.add(i, k, np.ones(v.aval.shape, bool))
    jaxpr = program.closed.jaxpr
    cut = make_jaxpr(
        jaxpr.constvars, jaxpr.invars, jaxpr.outvars, with_cuts(jaxpr.eqns, cuts)
    )
    return lambda inputs: evaluate(cut, program.closed.consts, *inputs)


def total_of(outputs):
    """A loss that treats every element of the outputs differently."""
    total = 0.0
    for x in jax.tree.leaves(outputs):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            total = total + jnp.sum(
                jnp.sin(1.0 + jnp.arange(x.size).reshape(x.shape)) * (x * x.conj()).real
            )
    return total


def sequence(x, steps):
    """An input that changes from step to step; whole numbers stay."""
    x = jnp.asarray(x)
    scales = 1 + 0.3 * np.sin(np.arange(steps))
    moving = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.stack([(x * s).astype(x.dtype) if moving else x for s in scales])


class Problem:
    """A step program whose first output is a loss, a few steps of inputs, and its compiled step.

    ``values`` are those of all that the program reads, ``sequences`` those of its inputs at all steps.
    """

    def __init__(self, program, values, sequences, weights, leak=None, kappa=None):
        self.leak, self.kappa = leak, kappa
        self.program = program
        self.analysed = analyse(program)
        self.groups = hidden_groups(self.analysed)
        self.compiled = lower(Stages(self.analysed, program.outputs[:1]))
        env = Values(zip(self.program.closed.jaxpr.invars, values, strict=True))
        self.parameters = env.pick(p.invar for p in self.program.parameters)
        self.states = env.pick(
            v for v in env if v not in self.parameters and v not in self.program.inputs
        )
        self.inputs = Values(zip(self.program.inputs, sequences, strict=True))
        self.weights = weights

    def solver(self):
        """The solver of the compiled step under the same rule."""
        kind = JacobianRecursion() if self.leak is None else ScalarLeak(self.leak)
        step = self.compiled.extend(self.kappa, False)
        return BlockSolver(step, Traces(step, kind))

    def flat(self, parameters, states, inputs):
        return [
            (parameters | states | inputs)[v] for v in self.program.closed.jaxpr.invars
        ]

    def run(self, parameters, states, inputs):
        jaxpr = self.program.closed.jaxpr
        results = evaluate(
            jaxpr, self.program.closed.consts, *self.flat(parameters, states, inputs)
        )
        return results, Values(
            (v, x) for v, x in zip(jaxpr.outvars, results, strict=True) if is_var(v)
        )

    def influence(self, compiled=lambda function, *examples: jax.jit(function)):
        """Gradients of the weighted losses by the dense recursion."""
        steps = self.gradients(compiled)
        return jax.tree.map(
            lambda *g: sum(w * x for w, x in zip(self.weights, g, strict=True)), *steps
        )

    def gradients(self, compiled):
        """Gradients of every step's loss."""
        states = self.states
        zero = lambda g, x: np.zeros((*g.varshape, g.num_state, *x.shape), x.dtype)
        traces = [
            Values((v, (zero(g, x), zero(g, x))) for v, x in self.parameters.items())
            for g in self.groups
        ]
        at = lambda t: Values((v, x[t]) for v, x in self.inputs.items())
        step, found = compiled(self.step, states, traces, at(0)), []
        for t in range(len(self.weights)):
            gradient, states, traces = step(states, traces, at(t))
            found.append(gradient)
        return found

    @staticmethod
    def old(group, states):
        """The old states of a group, side by side."""
        return group.concat_hidden([states[v] for v in group.hidden_invars])

    def step(self, states, traces, inputs):
        parameters = self.parameters

        def loss(p):
            results, new = self.run(p, states, inputs)
            return results[0], new

        gradient, new = jax.grad(loss, has_aux=True)(parameters)
        groups = self.groups
        signals = self.signals(self.flat(parameters, states, inputs), new)
        later = []
        for g, group in enumerate(groups):
            old = self.old(group, states)
            local = local_step(
                self.program, self.analysed.members[g], self.analysed.positions[g]
            )

            def advance(p, h, group=group, local=local):
                moved = states | dict(
                    zip(group.hidden_invars, group.split_hidden(h), strict=True)
                )
                results = local(self.flat(p, moved, inputs))
                outs = dict(
                    zip(
                        map(id, self.program.closed.jaxpr.outvars), results, strict=True
                    )
                )
                return group.concat_hidden([outs[id(v)] for v in group.hidden_outvars])

            inside, across = jax.jacrev(advance, (0, 1))(parameters, old)
            dot = lambda a, b, n=old.ndim: jnp.tensordot(a, b, n)
            read = self.direct_read(group, old, states, inputs, new)
            moved, gradient = (
                self.moved(traces[g], across, inside, dot),
                Values(gradient),
            )
            for v, (_, told) in moved.items():
                gradient[v] += dot(signals[g], told - inside[v]) + dot(
                    read, traces[g][v][1]
                )
            later.append(moved)
        moved = Values((h.invar, new[h.outvar]) for h in self.program.hidden)
        for other in self.program.others:
            if other.outvar is not None:
                literal = jnp.full(
                    other.invar.aval.shape,
                    getattr(other.outvar, 'val', 0),
                    other.invar.aval.dtype,
                )
                moved[other.invar] = (
                    new.get(other.outvar, literal) if is_var(other.outvar) else literal
                )
        return gradient, states | moved, later

    def interpret(self, flat, held={}, added={}, cuts=NO_CUTS):
        """Run the step equation by equation: the loss, and new states as their equations give them.

        Whoever reads a new state reads the one that is ``held`` in its place, or the state with what is ``added``.
        Gradient stops at ``cuts``.
        """
        jaxpr = self.program.closed.jaxpr
        env = dict(zip(jaxpr.constvars, self.program.closed.consts, strict=True))
        env.update(zip(jaxpr.invars, flat, strict=True))
        made = {}
        for eqn in with_cuts(jaxpr.eqns, cuts):
            results = evaluate_equation(
                eqn, [env[v] if is_var(v) else v.val for v in eqn.invars]
            )
            for v, x in zip(eqn.outvars, results, strict=True):
                made[v] = x
                env[v] = held.get(v, x + added[v] if v in added else x)
        return env[jaxpr.outvars[0]], made

    def signals(self, flat, new):
        """L of every group: ∂ℓ/∂h less what traces count, which passes on through states of its own group.

        T = ∂ℓ/∂h along all paths inside the step obeys T_i = L_i + Σ_j T_j ∂h_j/∂h_i, the sum over states j of the
        same group and their derivative in the local step, with all other new states held.
        """
        groups = self.groups
        spread = lambda parts: {
            v: x
            for group, part in zip(groups, parts, strict=True)
            for v, x in zip(group.hidden_outvars, group.split_hidden(part), strict=True)
        }
        values = [
            group.concat_hidden([new[v] for v in group.hidden_outvars])
            for group in groups
        ]
        zeros = [jnp.zeros_like(x) for x in values]
        total = jax.grad(lambda added: self.interpret(flat, added=spread(added))[0])(
            zeros
        )
        found = []
        for g, (group, value) in enumerate(zip(groups, values, strict=True)):

            def own(part, g=g, group=group):
                held = spread([*values[:g], part, *values[g + 1 :]])
                cuts = self.analysed.positions[g].cuts
                made = self.interpret(flat, held=held, cuts=cuts)[1]
                return group.concat_hidden([made[v] for v in group.hidden_outvars])

            inside = jax.jacrev(own)(value)
            found.append(total[g] - jnp.tensordot(total[g], inside, value.ndim))
        return found

    def moved(self, traces, across, inside, dot):
        """The next traces, and what signals read of them."""
        found = Values()
        for v, (trace, told) in traces.items():
            trace = (
                dot(across, trace) if self.leak is None else self.leak * trace
            ) + inside[v]
            found[v] = (
                trace,
                trace if self.kappa is None else self.kappa * told + trace,
            )
        return found

    def direct_read(self, group, old, states, inputs, new):
        """∂ℓ/∂h_{t-1} with every new hidden state held fixed."""
        held = {h.outvar: new[h.outvar] for h in self.program.hidden}

        def loss(h):
            moved = states | dict(
                zip(group.hidden_invars, group.split_hidden(h), strict=True)
            )
            return self.interpret(self.flat(self.parameters, moved, inputs), held=held)[
                0
            ]

        return jax.grad(loss)(old)
