"""Step programs from jaxprs that JAX alone has traced: which variable has which role."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.compat import new_var
from braintrace.program.bare import program_of_jaxpr

TABLE = jnp.asarray([1.0, 2.0, 3.0])
VALUES = [jnp.ones((2, 3)), jnp.arange(3.0), 0.5 * TABLE, jnp.asarray([0.3, -1.0])]


def step(w, h, k, x):
    """h is written inside a call, with constants of its own; k stays."""
    new = jax.jit(lambda h: jnp.tanh(h + x @ w) * TABLE)(h)
    return new.sum(), new, k


def traced(function=step):
    closed = jax.make_jaxpr(function)(*VALUES)
    (_, h, k, _), (_, new_h, new_k) = closed.jaxpr.invars, closed.jaxpr.outvars
    state = lambda: SimpleNamespace(varshape=(3,))
    return closed, {
        'hidden_outvar_to_invar': {new_h: h, new_k: k},
        'weight_invars': {closed.jaxpr.invars[0]: None},
        'invar_to_hidden_path': {h: ('h',), k: ('k',)},
        'outvar_to_hidden_path': {new_h: ('h',), new_k: ('k',)},
        'path_to_state': {('k',): state(), ('h',): state()},
    }


def test_roles():
    closed, given = traced()
    program = program_of_jaxpr(closed, **given)
    w, h, k, x = closed.jaxpr.invars
    assert program.inputs == (x,)
    assert [p.invar for p in program.parameters] == [w]
    # In the order of the states, not of the program
    assert [s.path for s in program.hidden] == [('k',), ('h',)]
    assert [s.invar for s in program.hidden] == [k, h]
    assert [s.state for s in program.hidden] == [*given['path_to_state'].values()]
    assert {s.varshape for s in program.hidden} == {(3,)}
    assert program.outputs == tuple(program.closed.jaxpr.outvars)
    new_k, new_h = (s.outvar for s in program.hidden)
    assert program.outputs[1:] == (new_h, new_k)
    # What the caller calls the new state is that state; an input keeps its own name.
    assert new_h is closed.jaxpr.outvars[1]
    assert new_k is not k
    assert 'jit' not in {e.primitive.name for e in program.equations}


@pytest.mark.parametrize('opened', [False, True])
def test_values_and_derivatives_are_those_of_the_jaxpr(opened):
    """Constants of an open program become its first inputs."""
    if opened:  # a constant of the whole program
        closed, given = traced(lambda w, h, k, x: step(w, h, k * TABLE, x))
    else:
        closed, given = traced()
    program = program_of_jaxpr(closed.jaxpr if opened else closed, **given)
    extra = closed.consts if opened else []
    assert len(program.inputs) == 1 + len(extra)
    of = lambda closed: lambda *a: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *a)
    found = lambda *args: of(program.closed)(*extra, *args)
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6)
    jax.tree.map(near, found(*VALUES), of(closed)(*VALUES))
    every = tuple(range(4))
    slopes = [jax.jacrev(f, every)(*VALUES) for f in (found, of(closed))]
    jax.tree.map(near, *slopes)


def test_an_output_that_is_a_new_state_too():
    closed, given = traced(lambda w, h, k, x: (lambda v: (v, v, 2 * k))(h + x @ w))
    program = program_of_jaxpr(closed, **given)
    new_k, new_h = (s.outvar for s in program.hidden)
    assert program.outputs == (new_h, new_h, new_k)


@pytest.mark.parametrize('where', ['the inputs', 'the outputs', 'path_to_state'])
def test_mappings_that_do_not_fit_are_refused(where):
    closed, given = traced()
    _, h, _, _ = closed.jaxpr.invars
    foreign = new_var(h.aval)
    if where == 'the outputs':
        given['hidden_outvar_to_invar'] = {foreign: h}
        given['outvar_to_hidden_path'] = {foreign: ('h',)}
    else:
        wrong = 'invar_to_hidden_path' if where == 'the inputs' else where
        given[wrong] = {}
    with pytest.raises(ValueError, match=f'hidden state h.* not among {where}'):
        program_of_jaxpr(closed, **given)
