"""The engine over the zoo, against oracles that differentiate the whole program densely.

One step: every parameter's gradient is the plain one. A few steps: the dense influence recursion
ε_t = D_t ε_{t-1} + ∂h_t/∂θ with full Jacobians by `jax.jacrev`, gradient Σ_t ∂ℓ_t/∂θ + (L_t D_t + R_t) ε_{t-1}.
By default a part of the zoo is run; `make zoo` runs both on all of it.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.analysis.graph import analyse
from braintrace.compat import evaluate, evaluate_equation, is_var
from braintrace.engine.plan import Plan, Values
from braintrace.engine.rewrite import split_products
from braintrace.engine.sequence import Sequencer
from braintrace.engine.signal import joint_outputs
from braintrace.frontends.brainstate import trace_step
from test_zoo import close_to, local_step, precision
from zoo import CASES

ALL = os.environ.get('ZOO') == 'all'


class Problem:
    """A model of the zoo with a loss, a few steps of inputs and the plan of its step."""

    def __init__(self, case, steps):
        model, inputs = case.build()

        def loss(*xs):
            total = 0.0
            for x in jax.tree.leaves(model(*xs)):
                if jnp.issubdtype(x.dtype, jnp.inexact):
                    total = total + jnp.sum(jnp.sin(1.0 + jnp.arange(x.size).reshape(x.shape)) * (x * x.conj()).real)
            return total

        self.info = trace_step(loss, model, inputs, {})
        self.program = split_products(self.info.program)
        self.analysed = analyse(self.program)
        parts = (
            self.analysed.facts,
            tuple(self.analysed.members),
            self.analysed.groups,
            tuple(self.analysed.positions),
        )
        self.plan = Plan(*parts, self.program.outputs[:1])
        env = Values(zip(self.program.closed.jaxpr.invars, self.info.flat_inputs(inputs, None, {}), strict=True))
        self.parameters = env.pick(p.invar for p in self.program.parameters)
        self.states = env.pick(v for v in env if v not in self.parameters and v not in self.program.inputs)
        self.inputs = Values((v, self.sequence(env[v], steps)) for v in self.program.inputs)
        self.weights = jnp.asarray([1.0, 0.5, 0.0, 2.0][:steps])

    @staticmethod
    def sequence(x, steps):
        x = jnp.asarray(x)
        scales = 1 + 0.3 * np.sin(np.arange(steps))
        moving = jnp.issubdtype(x.dtype, jnp.inexact)
        return jnp.stack([(x * s).astype(x.dtype) if moving else x for s in scales])

    def flat(self, parameters, states, inputs):
        return [(parameters | states | inputs)[v] for v in self.program.closed.jaxpr.invars]

    def run(self, parameters, states, inputs):
        jaxpr = self.program.closed.jaxpr
        results = evaluate(jaxpr, self.program.closed.consts, *self.flat(parameters, states, inputs))
        return results, {v: x for v, x in zip(jaxpr.outvars, results, strict=True) if is_var(v)}

    def influence(self):
        """Gradients of the weighted losses by the dense recursion."""
        total = jax.tree.map(jnp.zeros_like, self.parameters)
        states, traces = self.states, None
        step = jax.jit(self.step)
        for t, weight in enumerate(self.weights):
            inputs = Values((v, x[t]) for v, x in self.inputs.items())
            gradient, states, traces = step(states, traces, inputs)
            total = jax.tree.map(lambda a, g, w=weight: a + w * g, total, gradient)
        return total

    def step(self, states, traces, inputs):
        parameters = self.parameters
        gradient = jax.grad(lambda p: self.run(p, states, inputs)[0][0])(parameters)
        _, new = self.run(parameters, states, inputs)
        groups = self.analysed.groups
        zeros = [jnp.zeros_like(g.concat_hidden([states[v] for v in g.hidden_invars])) for g in groups]
        flat = self.flat(parameters, states, inputs)
        signals = jax.grad(lambda d: joint_outputs(self.program, groups, flat, d)[0])(zeros)
        later = []
        for g, group in enumerate(groups):
            old = group.concat_hidden([states[v] for v in group.hidden_invars])
            local = local_step(self.program, self.analysed.members[g], self.analysed.positions[g])

            def advance(p, h, group=group, local=local):
                moved = states | dict(zip(group.hidden_invars, group.split_hidden(h), strict=True))
                results = local(self.flat(p, moved, inputs))
                outs = dict(zip(map(id, self.program.closed.jaxpr.outvars), results, strict=True))
                return group.concat_hidden([outs[id(v)] for v in group.hidden_outvars])

            inside, across = jax.jacrev(advance, 0)(parameters, old), jax.jacrev(advance, 1)(parameters, old)
            dot = lambda a, b, n=old.ndim: jnp.tensordot(a, b, n)
            if traces is not None:
                credit = dot(signals[g], across) + self.direct_read(group, old, states, inputs, new)
                gradient = Values((v, x + dot(credit, traces[g][v])) for v, x in gradient.items())
                inside = Values((v, dot(across, traces[g][v]) + x) for v, x in inside.items())
            later.append(inside)
        moved = Values((h.invar, new[h.outvar]) for h in self.program.hidden)
        for other in self.program.others:
            if other.outvar is not None:
                literal = jnp.full(other.invar.aval.shape, getattr(other.outvar, 'val', 0), other.invar.aval.dtype)
                moved[other.invar] = new.get(other.outvar, literal) if is_var(other.outvar) else literal
        return gradient, states | moved, later

    def direct_read(self, group, old, states, inputs, new):
        """∂ℓ/∂h_{t-1} with every new hidden state held fixed."""
        jaxpr = self.program.closed.jaxpr
        fixed = {h.outvar: new[h.outvar] for h in self.program.hidden}

        def loss(h):
            moved = states | dict(zip(group.hidden_invars, group.split_hidden(h), strict=True))
            env = dict(zip(jaxpr.constvars, self.program.closed.consts, strict=True))
            env.update(zip(jaxpr.invars, self.flat(self.parameters, moved, inputs), strict=True))
            for eqn in jaxpr.eqns:
                results = evaluate_equation(eqn, [env[v] if is_var(v) else v.val for v in eqn.invars])
                env.update((v, fixed.get(v, x)) for v, x in zip(eqn.outvars, results, strict=True))
            return env[jaxpr.outvars[0]]

        return jax.grad(loss)(old)


@pytest.mark.parametrize('name', list(CASES)[:: 1 if ALL else 6])
def test_one_step_is_the_plain_gradient(name):
    case = CASES[name]
    with precision(case):
        problem = Problem(case, 1)
        engine = Sequencer(problem.plan)
        first = Values((v, x[0]) for v, x in problem.inputs.items())

        def both(parameters):
            solved = engine.two_pass(parameters, problem.states, problem.inputs, problem.weights, 1)
            plain = jax.grad(lambda p: problem.run(p, problem.states, first)[0][0])(parameters)
            return solved.gradients, plain

        mine, plain = jax.jit(both)(problem.parameters)
        for v in problem.parameters:
            close_to(mine[v], plain[v], case)


@pytest.mark.parametrize('name', [n for n in CASES if n != 'brainpy_hh_recurrent'][:: 1 if ALL else 16])
def test_local_rule_is_the_dense_recursion(name):
    case = CASES[name]
    with precision(case):
        problem = Problem(case, 4)
        engine = Sequencer(problem.plan)
        wanted = problem.influence()

        def ways(parameters):
            given = (problem.states, problem.inputs, problem.weights)
            traced = (problem.states, engine.init_traces(), problem.inputs, problem.weights)
            two = engine.two_pass(parameters, *given, 3)
            return [two.gradients, *(engine.one_pass(parameters, *traced, block).gradients for block in (1, 3))]

        for found in jax.jit(ways)(problem.parameters):
            for v in problem.parameters:
                close_to(found[v], wanted[v], case, scale=3.0)
