"""Number types, units, and hidden states of several components."""

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp

from .base import B, H, I, Step, array, case, hidden, leaky, spike, weight

# number types


def recurrent_of(dtype):
    kind = {'dtype': dtype}

    def step(m, x):
        m.h.value = 0.5 * m.h.value + jnp.tanh(x @ m.w.value + m.h.value @ m.r.value)
        return m.h.value

    return Step(
        step, w=weight(I, H, **kind), r=weight(H, H, **kind), h=hidden(B, H, **kind)
    ), (array(B, I, **kind),)


@case(['h'], {'w': 'local 0', 'r': 'local 0'})
def bfloat16_model():
    return recurrent_of(jnp.bfloat16)


@case(['h'], {'w': 'local 0', 'r': 'local 0'}, x64=True)
def float64_model():
    return recurrent_of(jnp.float64)


@case(
    ['h'],
    {'nu': 'exact 0', 'b': 'exact 0'},
    x64=True,
    note='complex128 state, float64 rates',
)
def complex128_model():
    def step(m, x):
        m.h.value = jnp.exp(-jnp.exp(m.nu.value) + 0.3j) * m.h.value + x @ m.b.value
        return jnp.abs(m.h.value)

    kind = {'dtype': jnp.complex128}
    return Step(
        step,
        nu=weight(H, dtype=jnp.float64),
        b=weight(I, H, **kind),
        h=hidden(B, H, **kind),
    ), (array(B, I, dtype=jnp.float64),)


@case(
    ['h'], {'w': 'exact 0'}, note='the weights are kept in float32 and used in bfloat16'
)
def mixed_bfloat16_and_float32():
    def op(m, x):
        return (x.astype(jnp.bfloat16) @ m.w.value.astype(jnp.bfloat16)).astype(
            jnp.float32
        )

    return leaky(op, w=weight(I, H)), (array(B, I),)


@case(
    ['V s'],
    {'w': 'local 0', 'r': 'local 0'},
    note='spikes stored in another number type than the membrane',
)
def bfloat16_spikes_in_float32_group():
    def step(m, x):
        m.V.value = (
            0.9 * m.V.value + x @ m.w.value + m.s.value.astype(jnp.float32) @ m.r.value
        )
        m.s.value = spike(m.V.value - 0.1).astype(jnp.bfloat16)
        return m.V.value

    parts = {
        'w': weight(I, H),
        'r': weight(H, H),
        'V': hidden(B, H),
        's': hidden(B, H, dtype=jnp.bfloat16),
    }
    return Step(step, **parts), (array(B, I),)


@case(['h'], {'w': 'exact 0'}, note='boolean events in')
def boolean_input():
    return leaky(lambda m, x: x.astype(jnp.float32) @ m.w.value, w=weight(I, H)), (
        array(B, I) > 0,
    )


@case(['h'], {'w': 'exact 0'}, note='small integers in, as counts')
def integer_input():
    return leaky(lambda m, x: x @ m.w.value, w=weight(I, H)), (
        jnp.array([[1, 0, 3], [2, 1, 0]], jnp.int32),
    )


# units


@case(
    ['V'],
    {'w': 'exact 0', 'b': 'exact 0'},
    note='conductances, millivolts, milliseconds',
)
def units_on_everything():
    def step(m, x):
        current = (x @ m.w.value) * (10.0 * u.mV - m.V.value) + m.b.value
        m.V.value = m.V.value + 0.1 * u.ms * (
            -m.V.value / (5.0 * u.ms) + current / (1.0 * u.nfarad)
        )
        return spike((m.V.value - 1.0 * u.mV) / u.mV)

    w, b = (
        brainstate.ParamState(array(I, H) * u.nS),
        brainstate.ParamState(array(H) * u.pA),
    )
    return Step(step, w=w, b=b, V=brainstate.HiddenState(array(B, H) * u.mV)), (
        array(B, I),
    )


@case(
    ['V g'],
    {'p/w': 'local 0', 'p/r': 'local 0', 'p/tau': 'local 0'},
    note='a dictionary of quantities; each state in its own unit',
)
def units_in_a_dictionary():
    def step(m, x):
        p, dt = m.p.value, 1.0 * u.ms
        fired = spike(m.V.value / u.mV)
        m.g.value = u.math.exp(-dt / p['tau']) * m.g.value + x @ p['w'] + fired @ p['r']
        m.V.value = 0.9 * m.V.value + 2.0 * u.mohm * m.g.value
        return spike(m.V.value / u.mV)

    p = {
        'w': array(I, H) * u.mA,
        'r': array(H, H) * u.mA,
        'tau': array(H, mean=5.0) * u.ms,
    }
    states = {
        'V': brainstate.HiddenState(array(B, H) * u.mV),
        'g': brainstate.HiddenState(array(B, H) * u.mA),
    }
    return Step(step, p=brainstate.ParamState(p), **states), (array(B, I),)


# one hidden state, several components per position


def group_state(*shape):
    return brainstate.HiddenGroupState(array(*shape))


@case(['h'], {'w': 'exact 0'}, note='membrane and adaptation in one group state')
def group_state_feedforward():
    def step(m, x):
        V, a = m.h.get_value(0), m.h.get_value(1)
        fired = spike(V - a)
        m.h.value = jnp.stack(
            [0.9 * V + x @ m.w.value - fired, 0.8 * a + 0.1 * fired], axis=-1
        )
        return m.h.value

    return Step(step, w=weight(I, H), h=group_state(B, H, 2)), (array(B, I),)


@case(['h'], {'w': 'local 0', 'r': 'local 0'})
def group_state_recurrent():
    def step(m, x):
        V, a = m.h.get_value(0), m.h.get_value(1)
        fired = spike(V - a)
        m.h.set_value(
            {
                0: 0.9 * V + x @ m.w.value + fired @ m.r.value - fired,
                1: 0.8 * a + 0.1 * fired,
            }
        )
        return spike(m.h.get_value(0))

    return Step(step, w=weight(I, H), r=weight(H, H), h=group_state(B, H, 2)), (
        array(B, I),
    )


@case(
    ['h'],
    {'w': 'exact 0', 'a': 'exact 0', 'c': 'exact 0'},
    note='a learned matrix over the components of each unit',
)
def group_state_with_inner_matrix():
    def step(m, x):
        drive = (x @ m.w.value)[
            ..., None
        ] * m.c.value  # one result reaches every component of its unit
        m.h.value = jnp.tanh(jnp.einsum('bhs,st->bht', m.h.value, m.a.value)) + drive
        return m.h.value

    return Step(
        step, w=weight(I, H), a=weight(5, 5), c=weight(5), h=group_state(B, H, 5)
    ), (array(B, I),)


@case(
    ['h'],
    {'w': 'exact 0'},
    note='a delay line along the components: nothing leaves its unit',
)
def group_state_as_delay_line():
    def step(m, x):
        m.h.value = jnp.concatenate(
            [(x @ m.w.value)[..., None], m.h.value[..., :-1]], axis=-1
        )
        return m.h.value[..., -1]

    return Step(step, w=weight(I, H), h=group_state(B, H, 3)), (array(B, I),)


@case(['h'], {'w': 'exact 0'}, note='the state is kept as one array without units')
def tree_state():
    def step(m, x):
        V, g = m.h.get_value('V'), m.h.get_value('g')
        g = 0.8 * g + (x @ m.w.value) * u.mA
        m.h.set_value({'V': 0.9 * V + g * u.ohm, 'g': g})
        return spike((m.h.get_value('V') - 0.1 * u.mV) / u.mV)

    h = brainstate.HiddenTreeState({'V': array(B, H) * u.mV, 'g': array(B, H) * u.mA})
    return Step(step, w=weight(I, H), h=h), (array(B, I),)


@case(['h'], {'w': 'local 0', 'r': 'local 0'})
def tree_state_recurrent():
    def step(m, x):
        c, h = m.h.get_value('c'), m.h.get_value('h')
        i, f, g, o = jnp.split(x @ m.w.value + h @ m.r.value, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        m.h.set_value([c, jax.nn.sigmoid(o) * jnp.tanh(c)])
        return m.h.get_value('h')

    h = brainstate.HiddenTreeState({'c': array(B, H), 'h': array(B, H)})
    return Step(step, w=weight(I, 4 * H), r=weight(H, 4 * H), h=h), (array(B, I),)
