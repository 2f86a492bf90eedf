"""Random step programs against JAX itself.

For every program: one step's gradient is the plain one; D-RTRL is the dense influence recursion, whatever the
length of its blocks; and each parameter's credit class is proven by numbers: `exact` is BPTT, `instantaneous` the
sum of one-step gradients, `none` no gradient at all.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from braintrace.analysis.credit import CreditAnalysis
from braintrace.analysis.sites import find_sites
from braintrace.engine.plan import Values
from braintrace.engine.sequence import Sequencer
from braintrace.frontends.functions import ArrayState, extract_function_info
from braintrace.program import OtherState
from interpreter import traced
from oracle import Problem, total_of
from programs import draw_program

STEPS = 4


def values_of(shapes, seed):
    draw = np.random.default_rng(seed)
    return {
        name: jnp.asarray(draw.integers(0, 3, shape), jnp.int32)
        if name == 'k'
        else jnp.asarray(0.7 * draw.standard_normal(shape))
        for name, shape in shapes.items()
    }


def with_roles(program, kinds):
    """The program with some states taken as groups along their last axis, and some as not hidden."""

    def grouped(h):
        *shape, count = h.varshape
        state = ArrayState(h.path, tuple(shape), count)
        return dataclasses.replace(h, varshape=tuple(shape), num_state=count, state=state)

    kind = lambda h: kinds[h.path[0]]
    hidden = tuple(grouped(h) if kind(h) == 'group' else h for h in program.hidden if kind(h) != 'other')
    others = tuple(OtherState(h.path, (), h.invar, h.outvar) for h in program.hidden if kind(h) == 'other')
    return dataclasses.replace(program, hidden=hidden, others=others)


class Case:
    """A program with values, and everything that is compared."""

    def __init__(self, program):
        self.step, self.states = program.step, values_of(program.states, 0)
        self.parameters = values_of(program.parameters, 1)
        self.weights = jnp.asarray([1.0, 0.5, 0.0, 2.0])
        xs = [values_of(program.inputs, 2 + t) for t in range(STEPS)]
        self.xs = jax.tree.map(lambda *x: jnp.stack(x), *xs)
        info = extract_function_info(self.loss_step, self.parameters, self.states, xs[0])
        values = jax.tree.leaves((self.parameters, self.states, xs[0]))
        roles = with_roles(info.program, program.kinds)
        self.problem = Problem(roles, values, jax.tree.leaves(self.xs), self.weights)

    def loss_step(self, p, s, x):
        new, out = self.step(p, s, x)
        return new, total_of(out)

    @functools.cached_property
    def plain(self):
        """Gradient of the weighted losses by plain JAX; ``through`` scales what goes from step to step."""
        stop = jax.lax.stop_gradient
        scale = lambda a, through: through * a + stop((1 - through) * a)

        def loss(p, weights, through):
            def step(s, at):
                w, x = at
                s, out = self.loss_step(p, jax.tree.map(lambda a: scale(a, through), s), x)
                return s, w * out

            return jnp.sum(jax.lax.scan(step, self.states, (weights, self.xs))[1])

        return traced(jax.grad(loss), self.parameters, self.weights, 1.0)

    @functools.cached_property
    def recursion(self):
        """Gradients of every step's loss by the dense influence recursion."""
        return self.problem.gradients(traced)

    def engine(self, way, block):
        """The same by the engine."""
        problem = self.problem
        engine = Sequencer(problem.plan)

        def solve(weights):
            given = (problem.inputs, weights, block)
            if way == 'two_pass':
                return engine.two_pass(problem.parameters, problem.states, *given).gradients
            return engine.one_pass(problem.parameters, problem.states, engine.init_traces(), *given).gradients

        return traced(solve, self.weights)

    @functools.cached_property
    def credit(self):
        a = self.problem.analysed
        facts = a.facts
        sites = find_sites(facts, a.groups, a.positions)
        analysis = CreditAnalysis(facts, a.members, a.groups, a.positions, sites)
        return {p.path[0]: analysis.judge(p) for p in facts.program.parameters}


def check(program, ways=(('two_pass', 3), ('one_pass', 2))):
    """Everything that must hold for a program."""
    case = Case(program)
    wanted = case.recursion
    plain = case.plain(case.parameters, case.weights, 1.0)
    single = case.plain(case.parameters, case.weights, 0.0)
    first = np.asarray([1.0] + [0.0] * (STEPS - 1))
    one = case.plain(case.parameters, first, 1.0)
    names = {p.invar: p.path[0] for p in case.problem.program.parameters}
    for way, block in ways:
        engine = case.engine(way, block)
        found, start = engine(case.weights), engine(first)
        for v, name in names.items():
            close(start[v], one[name], f'{name}: one step by {way}')
            total = sum(w * g[v] for w, g in zip(case.weights, wanted, strict=True))
            close(found[v], total, f'{name}: {way} in blocks of {block}')
    for v, name in names.items():
        credit, reason = case.credit[name]
        right = {'exact': plain, 'instantaneous': single, 'none': jax.tree.map(np.zeros_like, plain)}
        if credit == 'none':
            close(plain[name], np.zeros_like(plain[name]), f'{name}: none ({reason})')
        if credit in right:
            close(found[v], right[credit][name], f'{name}: {credit} ({reason})')


def close(found, wanted, what):
    size = max(np.abs(wanted).max(initial=0), 1e-6)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7 * size, err_msg=what)
