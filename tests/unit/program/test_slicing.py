"""Cuts and slices of programs against the same functions written by hand with `stop_gradient`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.compat import is_var, make_jaxpr
from braintrace.program import (
    Cuts,
    equations_between,
    slice_back,
    slice_between,
    with_cuts,
)

H, X = jnp.asarray([0.7, -0.4, 1.3]), jnp.asarray([0.2, 0.9, -1.1])
EVERY, SOME = np.ones(3, bool), np.asarray([True, False, True])


def step(h, x):
    """Two paths from h to the result, and one from x alone."""
    a = jnp.sin(h)  # 0
    b = jnp.exp(x)  # 1
    c = a * b  # 2
    d = c + h  # 3
    return d, jnp.cos(b)  # 4


CLOSED = jax.make_jaxpr(step)(H, X)
EQUATIONS = CLOSED.jaxpr.eqns
(VAR_H, VAR_X), (VAR_D, VAR_E) = CLOSED.jaxpr.invars, CLOSED.jaxpr.outvars
A, B, C = (e.outvars[0] for e in EQUATIONS[:3])
EDGES = {(0, 0), (2, 0), (3, 0), (3, 1)}
"""Operands through which credit passes from h."""


def test_the_equations_are_as_numbered():
    names = [e.primitive.name for e in EQUATIONS]
    assert names == ['sin', 'exp', 'mul', 'add', 'cos']


def run(jaxpr, consts, *args):
    return jax.core.eval_jaxpr(jaxpr, consts, *args)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def values():
    """Of every variable, one equation after the other."""
    env = {VAR_H: H, VAR_X: X}
    for eqn in EQUATIONS:
        operands = [env[v] for v in eqn.invars]
        env[eqn.outvars[0]] = eqn.primitive.bind(*operands, **eqn.params)
    return env


# ---------------------------------------------------------------- cuts


def test_masks_of_one_operand_add_up():
    cuts = Cuts()
    assert not cuts
    cuts.add(2, 0, SOME)
    assert cuts
    assert not cuts.whole(2, 0)
    assert not cuts.whole(2, 1)
    cuts.add(2, 0, ~SOME)
    assert cuts.whole(2, 0)
    assert not Cuts(bodies={(0, ('jaxpr', None)): Cuts()})
    assert Cuts(bodies={(0, ('jaxpr', None)): cuts})


CUT = {
    'all of c': ({(3, 0): EVERY}, lambda h, x: stop(jnp.sin(h) * jnp.exp(x), EVERY) + h),
    'some of c': ({(3, 0): SOME}, lambda h, x: stop(jnp.sin(h) * jnp.exp(x), SOME) + h),
    'both': ({(2, 0): SOME, (3, 1): EVERY}, lambda h, x: stop(jnp.sin(h), SOME) * jnp.exp(x) + stop(h, EVERY)),
}  # fmt: skip


def stop(x, mask):
    return jnp.where(mask, jax.lax.stop_gradient(x), x)


@pytest.mark.parametrize('name', CUT)
def test_cuts_stop_gradient_and_change_no_value(name):
    edges, by_hand = CUT[name]
    equations = with_cuts(EQUATIONS, Cuts(edges=edges))
    assert len(equations) == len(EQUATIONS) + len(edges)
    jaxpr = make_jaxpr([], CLOSED.jaxpr.invars, [VAR_D], equations)
    found = lambda h, x: run(jaxpr, (), h, x)[0]
    close(found(H, X), by_hand(H, X))
    wanted = jax.jacrev(by_hand, (0, 1))(H, X)
    for derivative in (jax.jacrev, jax.jacfwd):
        close(derivative(found, (0, 1))(H, X), wanted)


def test_a_cut_inside_a_loop():
    def function(inner):
        return lambda h: jax.lax.scan(lambda c, _: (inner(c), None), h, length=3)[0]

    jaxpr = jax.make_jaxpr(function(lambda c: jnp.sin(c) + 0.5 * c))(H).jaxpr
    (scan,) = jaxpr.eqns
    names = [e.primitive.name for e in scan.params['jaxpr'].jaxpr.eqns]
    assert names == ['sin', 'mul', 'add']
    inside = Cuts({(2, 0): SOME})
    (cut,) = with_cuts([scan], Cuts(bodies={(0, ('jaxpr', None)): inside}))
    found = make_jaxpr([], jaxpr.invars, cut.outvars, [cut])
    by_hand = function(lambda c: stop(jnp.sin(c), SOME) + 0.5 * c)
    close(run(found, (), H)[0], by_hand(H))
    close(jax.jacrev(lambda h: run(found, (), h)[0])(H), jax.jacrev(by_hand)(H))
    assert scan.params['jaxpr'].jaxpr.eqns[2].primitive.name == 'add'  # as it was


def test_a_literal_operand_has_nothing_to_cut():
    eqns = jax.make_jaxpr(lambda x: 2.0 * x)(X).jaxpr.eqns
    literal = next(k for k, v in enumerate(eqns[0].invars) if not is_var(v))
    assert len(with_cuts(eqns, Cuts({(0, literal): EVERY}))) == 1


# ---------------------------------------------------------------- slices


def test_equations_between_sources_and_targets():
    between = lambda *args: equations_between(EQUATIONS, *args)
    assert between([VAR_H], [VAR_D], Cuts(), EDGES) == [0, 2, 3]
    assert between([VAR_H], [C], Cuts(), EDGES) == [0, 2]
    assert between([A], [VAR_D], Cuts(), EDGES) == [2, 3]
    assert between([VAR_H], [VAR_E], Cuts(), EDGES) == []
    assert between([VAR_X], [VAR_D], Cuts(), EDGES) == []  # no edge carries its credit
    # Where one path is cut as a whole, the other one is left; some elements still pass.
    assert between([VAR_H], [VAR_D], Cuts({(2, 0): EVERY}), EDGES) == [3]
    assert between([VAR_H], [VAR_D], Cuts({(2, 0): SOME}), EDGES) == [0, 2, 3]
    literal = jax.make_jaxpr(lambda: 1.0)().jaxpr.outvars
    assert between([VAR_H], literal, Cuts(), EDGES) == []


@pytest.mark.parametrize('cut', [{}, {(2, 0): SOME}, {(2, 0): EVERY}, {(3, 1): EVERY}])
def test_a_slice_between_is_the_derivative_along_its_edges(cut):
    env = values()
    found = slice_between(EQUATIONS, [VAR_H], [VAR_D, VAR_E], Cuts(cut), EDGES)
    assert list(found.invars) == [VAR_H]
    assert VAR_E in found.constvars  # not on the path, so it is read
    assert not {VAR_X} & {*found.constvars}  # b is read in its place
    consts = [env[v] for v in found.constvars]
    close(run(found, consts, H), [env[VAR_D], env[VAR_E]])

    def by_hand(h):
        a = stop(jnp.sin(h), cut.get((2, 0), ~EVERY))
        return a * env[B] + stop(h, cut.get((3, 1), ~EVERY))

    slope = jax.jacrev(lambda h: run(found, consts, h)[0])(H)
    close(slope, jax.jacrev(by_hand)(H))


def test_a_slice_back_holds_what_a_target_needs():
    env, producer = values(), {e.outvars[0]: i for i, e in enumerate(EQUATIONS)}
    whole = slice_back(EQUATIONS, producer, [VAR_H, VAR_X], VAR_D)
    assert (whole.constvars, whole.eqns) == ([], list(EQUATIONS[:4]))
    close(run(whole, (), 2 * H, X)[0], step(2 * H, X)[0])
    # It ends at its sources and reads other inputs from outside.
    part = slice_back(EQUATIONS, producer, [A], VAR_D)
    assert [e.primitive.name for e in part.eqns] == ['exp', 'mul', 'add']
    assert {*part.constvars} == {VAR_X, VAR_H}
    consts = [env[v] for v in part.constvars]
    close(run(part, consts, 5.0 * env[A])[0], 5 * jnp.sin(H) * jnp.exp(X) + H)
    none = slice_back(EQUATIONS, producer, [VAR_D], VAR_D)
    assert not none.eqns
    close(run(none, (), H)[0], H)
