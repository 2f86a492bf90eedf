"""Loops of unknown length as a primitive of two directions.

The oracles are forward mode of JAX through its own ``while_loop``, and the rounds written one after the other.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.compat import evaluate, loop_p
from braintrace.program import loops, normal_form

ARGS = (jnp.linspace(1, 3, 5), jnp.linspace(-1, 1, 5))


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def shrinking(v, y, w):
    """A carry of all kinds: a counter, a state that mixes, a factor, a random key."""

    def body(c):
        k, v, factor, key = c
        key, sub = jax.random.split(key)
        noise = jax.random.normal(sub, v.shape)
        new = 0.7 * v + 0.1 * factor * jnp.tanh(y) + 0.05 * jnp.tanh(v @ w)
        return k + 1, new + 0.01 * noise, 0.5 * factor, key

    goes_on = lambda c: (jnp.abs(c[1]).sum() > 2.0) & (c[0] < 40)
    start = (0, v, jnp.ones(()), jax.random.key(3))
    return jax.lax.while_loop(goes_on, body, start)[1]


def long(v, y, w):
    """More rounds than the reverse pass keeps states of."""
    body = lambda c: (c[0] + 1, jnp.sin(c[1] * y + 0.1) + 0.1 * v @ w)
    return jax.lax.while_loop(lambda c: c[0] < 333, body, (0, v))[1]


def nested(v, y, w):
    inner = lambda v: jax.lax.while_loop(
        lambda v: jnp.abs(v).max() > 0.4, lambda v: v / 2 + 0.01 * y, v
    )
    outer = lambda c: (c[0] + 1, inner(c[1] + 0.3 * jnp.tanh(v @ w)))
    return jax.lax.while_loop(lambda c: c[0] < 3, outer, (0, v))[1]


def never(v, y, w):
    """No round at all."""
    return jax.lax.while_loop(lambda v: v.sum() > 1e6, lambda v: v * y, v @ w)


FUNCTIONS = {f.__name__: f for f in (shrinking, long, nested, never)}


def converted(function, *args):
    closed = normal_form(jax.make_jaxpr(function)(*args))
    assert 'while' not in {e.primitive.name for e in closed.jaxpr.eqns}
    return lambda *given: evaluate(closed.jaxpr, closed.consts, *given)[0]


def near(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 2e-4, 1e-5), a, b)


@pytest.mark.parametrize('name', FUNCTIONS)
def test_both_modes_and_their_transformations(name):
    args = (*ARGS, normal(0, 5, 5))
    function = FUNCTIONS[name]
    loop = converted(function, *args)
    every = (0, 1, 2)
    exact = jax.jacfwd(function, every)(*args)
    near(loop(*args), function(*args))
    near(jax.jacfwd(loop, every)(*args), exact)
    near(jax.jit(jax.jacrev(loop, every))(*args), exact)
    # vmap inside grad: samples need different numbers of rounds.
    many = jnp.stack([args[0], 0.1 * args[0], 3 * args[0]])
    total = lambda f: lambda vs, y, w: jnp.sin(jax.vmap(lambda v: f(v, y, w))(vs)).sum()
    exact = jax.jacfwd(total(function), every)(many, *args[1:])
    near(jax.grad(total(loop), every)(many, *args[1:]), exact)
    # The transpose of the transpose is the forward derivative again.
    out, pull = jax.vjp(loop, *args)
    push = jax.vmap(jax.linear_transpose(pull, out))
    tangents = (normal(1, 2, 5), normal(2, 2, 5), normal(3, 2, 5, 5))
    exact = jax.vmap(lambda *t: jax.jvp(function, args, t)[1])(*tangents)
    near(push(tangents)[0], exact)


def scaled_while_small(v, y):
    """The number of rounds depends on the values."""
    return jax.lax.while_loop(lambda v: v.sum() < 30, lambda v: v * (1 + y**2), v)


@pytest.mark.parametrize('slots', [1, 2, 64])
def test_the_rounds_written_one_after_the_other(slots, monkeypatch):
    """However many states the reverse pass keeps: the last slot may be filled in part."""
    monkeypatch.setattr(loops, '_SLOTS', slots)
    v, y = ARGS
    rounds, unrolled = 0, v
    while unrolled.sum() < 30:
        rounds, unrolled = rounds + 1, unrolled * (1 + y**2)
    assert rounds == 3
    written = lambda v, y: v * (1 + y**2) ** rounds
    loop = converted(scaled_while_small, v, y)
    near(loop(v, y), unrolled)
    near(jax.jacrev(loop, (0, 1))(v, y), jax.jacrev(written, (0, 1))(v, y))


def test_the_reverse_pass_runs_a_round_a_few_times():
    """Rounds are counted, kept, and pulled back from the nearest kept state, so that none is run from the start."""
    ran = []

    def body(c):
        jax.debug.callback(lambda k: ran.append(int(k)), c[0])
        return c[0] + 1, jnp.sin(c[1])

    function = lambda v: jax.lax.while_loop(lambda c: c[0] < 200, body, (0, v))[1]
    (eqn,) = jax.make_jaxpr(function)(1.0).jaxpr.eqns
    given = loops._Loop(**loops.read_while(eqn))
    loops._pull(given, (jnp.asarray(0), jnp.asarray(1.0)), [jnp.asarray(1.0)])
    jax.effects_barrier()
    stride = -(-200 // loops._SLOTS)
    counts = np.bincount(ran, minlength=200)
    # Twice to count and to keep, once with its derivative, and up to the next kept state again.
    assert counts.min() >= 3
    assert counts.max() <= 3 + stride - 1
    assert counts[0] > counts[stride - 1]


def equation_of(function, *args):
    (eqn,) = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return eqn


def printing(v):
    jax.debug.print('{}', v)
    return v / 2


LEFT = {
    'a scan': (lambda x: jax.lax.scan(lambda c, _: (c / 2, None), x, length=3)[0], 1.0),
    'whole numbers': (
        lambda n: jax.lax.while_loop(lambda n: n < 9, lambda n: 2 * n, n),
        1,
    ),
    'floats from whole numbers': (
        lambda n: jax.lax.while_loop(
            lambda c: c[0] < 9, lambda c: (c[0] + 1, c[1] / 2), (n, 1.0)
        ),
        1,
    ),
    'effects': (lambda x: jax.lax.while_loop(lambda v: v > 1, printing, x), 4.0),
}


@pytest.mark.parametrize('name', LEFT)
def test_what_is_not_followed(name):
    eqn = equation_of(*LEFT[name])
    assert loops.followed(eqn) is eqn


def test_a_followed_loop_has_the_programs_of_the_while():
    eqn = equation_of(scaled_while_small, *ARGS)
    found = loops.followed(eqn)
    assert found.primitive is loop_p
    assert found.params == loops.read_while(eqn)
    assert (found.invars, found.outvars) == (eqn.invars, eqn.outvars)


def test_a_loop_that_was_mapped_before(x64):
    """JAX gives it a condition for each sample, with other constants; a sample that is ready stays."""
    halve = lambda v, level, y: jax.lax.while_loop(
        lambda v: v > level, lambda v: v / 2 + 0.01 * y, v
    )
    args = [jnp.asarray(x) for x in ([5.0, 1.0, 90.0], [1.0, 2.0, 0.5], [1.0, 2, 3])]
    mapped = jax.vmap(halve)
    loop = converted(mapped, *args)
    near(loop(*args), mapped(*args))
    exact = jax.jacfwd(mapped, (0, 2))(*args)
    near(jax.jacrev(loop, (0, 2))(*args), exact)
    near(jax.jacfwd(loop, (0, 2))(*args), exact)
    assert exact[0][1, 1] == 1  # no round
    np.testing.assert_array_equal(jax.jacrev(loop, 1)(*args), 0)
