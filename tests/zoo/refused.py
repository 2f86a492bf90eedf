"""Models that are refused: the error says what was written, why it does not work and how to fix it."""

import brainstate
import jax.numpy as jnp

from .base import REFUSED, B, H, I, Step, array, hidden, other, weight


def refused(builder):
    REFUSED[builder.__name__] = builder
    return builder


def small(step, **parts):
    return Step(step, **{'w': weight(I, H), 'h': hidden(B, H)} | parts), (array(B, I),)


@refused
def without_a_hidden_state():
    def step(m, x):
        m.h.value = 0.9 * m.h.value + x @ m.w.value
        return m.h.value

    return small(step, h=other(jnp.zeros((B, H))))


@refused
def without_a_parameter():
    def step(m, x):
        m.h.value = 0.9 * m.h.value + x.sum()
        return m.h.value

    return small(step)


@refused
def state_that_changes_its_shape():
    def step(m, x):
        m.h.value = jnp.concatenate([m.h.value, x @ m.w.value])

    return small(step)


@refused
def parameter_written_by_the_step():
    def step(m, x):
        m.w.value = 0.9 * m.w.value
        m.h.value = 0.9 * m.h.value + x @ m.w.value

    return small(step)


@refused
def state_made_by_the_step():
    def step(m, x):
        m.made = brainstate.HiddenState(x @ m.w.value)
        m.h.value = m.h.value + m.made.value

    return small(step)


@refused
def python_branch_on_a_value():
    def step(m, x):
        m.h.value = 0.9 * m.h.value + (x @ m.w.value if x.sum() > 0 else 0.0)
        return m.h.value

    return small(step)
