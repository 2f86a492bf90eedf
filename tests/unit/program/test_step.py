"""The records of a step program: names, positions, shapes, outputs with variables of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.compat import is_var, new_var
from braintrace.program import Hidden, Parameter
from braintrace.program.step import (
    check_shapes,
    distinct_outputs,
    path_name,
    path_names,
)


def test_paths_as_words():
    assert path_name(('layers', 0, 'weight')) == 'layers.0.weight'
    assert path_name(()) == '<value>'
    assert path_names([('a', 'b'), ('c',)]) == 'a.b, c'
    var = new_var(jax.core.ShapedArray((2,), jnp.float32))
    assert Parameter(('cell', 'w'), ('bias', 1), var).name == 'cell.w.bias.1'


def test_states_on_a_trailing_axis_share_positions():
    shaped = lambda *shape: new_var(jax.core.ShapedArray(shape, jnp.float32))
    hidden = lambda *shape: Hidden(('h',), shaped(*shape), shaped(*shape), None, (2, 3))
    np.testing.assert_array_equal(hidden(2, 3).positions, [[0, 1, 2], [3, 4, 5]])
    found = hidden(2, 3, 4).positions
    assert found.shape == (2, 3, 4)
    for place in np.ndindex(2, 3, 4):
        assert found[place] == 3 * place[0] + place[1]


def test_values_of_other_shapes_are_refused():
    closed = jax.make_jaxpr(lambda x, y: x @ y)(jnp.ones((2, 3)), jnp.ones(3))
    check_shapes(closed, [np.ones((2, 3)), [1.0, 2.0, 3.0]])
    for wrong in ([np.ones((5, 3)), np.ones(3)], [np.ones((2, 3))]):
        with pytest.raises(ValueError, match=r'compiled for \[\(2, 3\), \(3,\)\]'):
            check_shapes(closed, wrong)


def step(h, k, x):
    """Outputs: one value twice, an input as it came, a constant, and what is no state."""
    new = jnp.sin(h) * x
    return new, new, k, 1.0, new, k


@pytest.mark.parametrize('places', [(), (0, 1, 2, 3), (1, 2), (3, 5)])
def test_every_state_gets_a_variable_that_an_equation_makes(places):
    args = [jnp.asarray(v) for v in (0.3, 0.7, 2.0)]
    closed = jax.make_jaxpr(step)(*args)
    found = distinct_outputs(closed, places)
    outvars = found.jaxpr.outvars
    made = [v for e in found.jaxpr.eqns for v in e.outvars]
    assert all(map(is_var, outvars))
    assert len({outvars[i] for i in places}) == len(places)
    assert {outvars[i] for i in places} <= {*made}
    for i, (old, new) in enumerate(zip(closed.jaxpr.outvars, outvars, strict=True)):
        if i not in places and is_var(old):
            assert new is old
    run = lambda closed: lambda *a: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *a)
    assert run(found)(*args) == run(closed)(*args)
    for h in (0, 1, 2):
        assert jax.jacrev(run(found), h)(*args) == jax.jacrev(run(closed), h)(*args)
