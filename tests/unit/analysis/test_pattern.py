"""Which elements of new states each element of a parameter and of an old state moves within a step.

The oracle is the derivative itself: an element is reached if it moves at any of many random values. Where a value
closes a path (a rectifier, a choice, a spike), the pattern is written by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.analysis.pattern import reached_elements
from braintrace.program.normal import normal_form

B, H = 2, 4
MASK = np.triu(np.ones((H, H)), 1)
PLACES = np.array([0, 2, 3])


def pattern(step, *operands):
    """(elements of an operand, elements of the result) for each operand."""
    closed = normal_form(jax.make_jaxpr(step)(*operands))
    found = reached_elements(closed, closed.jaxpr.outvars, closed.jaxpr.invars)
    return [found[v] for v in closed.jaxpr.invars]


def moved(step, *operands):
    """The same by derivatives at random values."""
    numbers = [
        k for k, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    found = [np.zeros((np.size(x), step(*operands).size), bool) for x in operands]
    for seed in range(6):
        draw = np.random.default_rng(seed).normal
        at = [
            jnp.asarray(draw(size=x.shape)) if k in numbers else x
            for k, x in enumerate(operands)
        ]
        for k, jacobian in zip(numbers, jax.jacfwd(step, numbers)(*at), strict=True):
            found[k] |= np.asarray(jacobian).reshape(-1, np.size(operands[k])).T != 0
    return found


def rounds(h, w):
    """Three rounds that reach one unit further each; what was before them is not carried."""

    def one(h, x):
        return jnp.tanh(jnp.roll(h, 1, axis=-1) * w + x), h[:, 0]

    return jax.lax.scan(one, h, jnp.zeros((3, B, H)))[0]


def overwritten(h, w):
    """A carry that each round sets anew."""
    one = lambda c, x: (jnp.tanh(x * w), None)
    return jax.lax.scan(one, h, jnp.stack([h, h]))[0]


def until_small(h, w):
    go_on = lambda c: jnp.sum(c[1]) < 3
    return jax.lax.while_loop(go_on, lambda c: (c[0] * w, c[1] + 1), (h, 0))[0]


def put_between_zeros(h, w):
    whole = jnp.zeros((H, H)).at[PLACES, PLACES[::-1]].set(w[:3])
    return h @ whole


def slice_of_zeros(h, w):
    return h @ jax.lax.dynamic_update_slice(jnp.zeros((H, H)), w[None, :2], (1, 2))


def chosen_branch(h, w):
    return jax.lax.switch(2, [lambda h: h * w, jnp.tanh, lambda h: h[:, ::-1]], h)


STEPS = {
    'dense': (lambda h, w: jnp.tanh(h @ w), (H, H)),
    'both operands': (lambda h, w: (h @ w) @ h.T, (H, H)),
    'a masked matrix': (lambda h, w: h @ (w * MASK), (H, H)),
    'a mask that chooses': (lambda h, w: h @ jnp.where(MASK == 1, w, 0), (H, H)),
    'a function of a masked matrix': (
        lambda h, w: h @ jnp.tanh(2 * w * MASK).T,
        (H, H),
    ),
    'zeros that end': (lambda h, w: h @ (w * MASK + 1), (H, H)),
    'a constant matrix': (lambda h, w: (h @ MASK) * w, (H,)),
    'weights between zeros': (put_between_zeros, (H,)),
    'weights in a part of zeros': (slice_of_zeros, (H,)),
    'zero': (lambda h, w: h * 0.0 + w, (H,)),
    'a roll': (lambda h, w: jnp.roll(h, 1, axis=-1) * w, (H,)),
    'movement': (
        lambda h, w: jnp.concatenate([h[:, ::-1], w.reshape(B, H)], 0).T[1:],
        (B * H,),
    ),
    'a mean': (lambda h, w: h - jnp.mean(h, -1, keepdims=True) * w, (H,)),
    'a normalised state': (
        lambda h, w: w * h / jnp.sqrt(jnp.sum(h**2, -1, keepdims=True) + 1),
        (H,),
    ),
    'constant indices': (lambda h, w: h[:, PLACES] * w[PLACES], (H,)),
    'a convolution': (
        lambda h, w: jax.lax.conv_general_dilated(
            h[:, None], w[None, None], (1,), 'SAME'
        )[:, 0],
        (3,),
    ),
    'no gradient': (lambda h, w: jax.lax.stop_gradient(h) * w, (H,)),
    'whole numbers': (lambda h, w: h.astype(int) + w, (H,)),
    'rounds': (overwritten, (H,)),
    'a choice': (chosen_branch, (H,)),
    'a loop': (until_small, (H,)),
}


@pytest.mark.parametrize('name', STEPS)
def test_the_pattern_is_that_of_the_derivative(name):
    step, shape = STEPS[name]
    operands = jnp.ones((B, H)), jnp.ones(shape)
    for found, wanted in zip(
        pattern(step, *operands), moved(step, *operands), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    'name', ['a masked matrix', 'a convolution', 'a mask that chooses']
)
def test_it_is_found_while_a_program_is_traced(name):
    step, shape = STEPS[name]
    operands, found = (np.ones((B, H)), np.ones(shape)), []
    jax.jit(lambda x: found.append(pattern(step, *operands)) or x)(0.0)
    for x, wanted in zip(
        found[0], moved(step, *map(jnp.asarray, operands)), strict=True
    ):
        np.testing.assert_array_equal(x, wanted)


eye = np.eye(B * H, dtype=bool)


@jax.custom_jvp
def spike(v):
    return (v > 0) * 1.0


spike.defjvp(lambda primals, tangents: (spike(*primals), 0 * tangents[0]))


@jax.custom_vjp
def spread(v):
    """Its own derivative reaches all units, its body one each."""
    return v * 1.0


spread.defvjp(
    lambda v: (v, None),
    lambda _, bar: (jnp.broadcast_to(bar.sum(-1, keepdims=True), bar.shape),),
)


@pytest.mark.parametrize(
    'closed_path',
    [
        lambda h: jnp.maximum(h, 1e9),
        lambda h: jnp.where(h > 1e9, h, 0),
        lambda h: spike(h - 1e9),
        lambda h: jax.lax.cond(h[0, 0] > 1e9, lambda h: h, jnp.zeros_like, h),
        lambda h: h * spike(h - 1e9),
    ],
)
def test_a_path_that_values_close_is_followed(closed_path):
    (found,) = pattern(closed_path, jnp.zeros((B, H)))
    np.testing.assert_array_equal(found, eye)


def test_a_derivative_that_reaches_more_than_the_body_of_its_call():
    (found,) = pattern(lambda h: spread(h)[:, :2], jnp.zeros((B, H)))
    wanted = moved(lambda h: h @ jnp.ones((H, 2)), jnp.zeros((B, H)))[0]
    assert not (wanted & ~found).any()


def test_a_row_at_a_variable_place_may_be_any():
    table, index = jnp.zeros((5, H)), jnp.zeros(B, int)
    found, _ = pattern(lambda table, index: table[index], table, index)
    wanted = np.tile(np.eye(H, dtype=bool), (5, B))
    np.testing.assert_array_equal(found, wanted)


def test_rounds_are_followed_to_a_fixpoint():
    """The number of rounds is not counted: what three rounds do not reach, more would."""
    found, _ = pattern(rounds, jnp.ones((B, H)), jnp.ones(H))
    np.testing.assert_array_equal(found, np.kron(np.eye(B), np.ones((H, H))) > 0)
