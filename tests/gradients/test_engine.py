"""The engine over the zoo, against oracles that differentiate the whole program densely.

One step: every parameter's gradient is the plain one. A few steps: the dense influence recursion of the local rule, of
RFLO (leak) and of e-prop (κ).
By default a part of the zoo is run; `make zoo` runs both on all of it.
"""

import os

import jax
import jax.numpy as jnp
import pytest

from braintrace.compiled_step import Values
from braintrace.frontends.brainstate import trace_step
from braintrace.graph.module_info import module_info
from oracle import Problem, close_to, precision, sequence, total_of
from zoo import CASES

ALL = os.environ.get('ZOO') == 'all'


def problem_of(case, steps, **how):
    """A model of the zoo with a loss and a few steps of inputs."""
    model, inputs = case.build()
    traced = trace_step(lambda *xs: total_of(model(*xs)), model, inputs, {})
    info = module_info(traced)
    weights = jnp.asarray([1.0, 0.5, 0.0, 2.0][:steps])
    values = info.flat_inputs(inputs, None, {})
    by_variable = dict(zip(info.program.closed.jaxpr.invars, values, strict=True))
    sequences = [sequence(by_variable[v], steps) for v in info.program.inputs]
    return Problem(info.program, values, sequences, weights, **how)


@pytest.mark.parametrize('name', list(CASES)[:: 1 if ALL else 20])
def test_one_step_is_the_plain_gradient(name):
    case = CASES[name]
    with precision(case):
        problem = problem_of(case, 1)
        engine = problem.solver()
        first = Values((v, x[0]) for v, x in problem.inputs.items())

        def both(parameters):
            solved = engine.two_pass(
                parameters, problem.states, problem.inputs, problem.weights, 1
            )
            plain = jax.grad(lambda p: problem.run(p, problem.states, first)[0][0])(
                parameters
            )
            return solved.gradients, plain

        mine, plain = jax.jit(both)(problem.parameters)
        for v in problem.parameters:
            close_to(mine[v], plain[v], case)


def schemes():
    """Models and what goes on in the place of D and of the trace; by default fewer of both."""
    names = [n for n in CASES if n != 'brainpy_hh_recurrent']
    ways = {
        'local': {},
        'leak': {'leak': 0.8},
        'kappa': {'kappa': 0.6},
        'both': {'leak': 0.8, 'kappa': 0.6},
    }
    for i, (label, how) in enumerate(ways.items()):
        chosen = names if ALL else names[7 * i :: 140 if how else 50]
        yield from (pytest.param(name, how, id=f'{name}-{label}') for name in chosen)


@pytest.mark.parametrize(('name', 'how'), list(schemes()))
def test_the_rule_is_the_dense_recursion(name, how):
    case = CASES[name]
    with precision(case):
        problem = problem_of(case, 4, **how)
        engine = problem.solver()
        wanted = problem.influence()

        def ways(parameters):
            given = (problem.states, problem.inputs, problem.weights)
            traced = (
                problem.states,
                engine.init_traces(),
                problem.inputs,
                problem.weights,
            )
            two = engine.two_pass(parameters, *given, 3)
            return [
                two.gradients,
                *(
                    engine.one_pass(parameters, *traced, block).gradients
                    for block in (1, 3)
                ),
            ]

        for found in jax.jit(ways)(problem.parameters):
            for v in problem.parameters:
                close_to(found[v], wanted[v], case, scale=3.0)
