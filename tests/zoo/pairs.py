"""Values that several positions read, learned initial states, and skip connections."""

import jax
import jax.numpy as jnp
import numpy as np

from .base import B, H, I, Step, array, case, hidden, leaky, other, weight

# state-space models, attention and memories


@case(
    ['h'],
    {
        'w_delta': 'exact 0',
        'b_delta': 'exact 0',
        'w_b': 'exact 0',
        'w_c': 'exact',
        'log_a': 'exact 0',
        'skip': 'exact',
    },
    note='Δ, B and C from the input; Δ is read by all states of a channel, B by all channels',
)
def selective_ssm_layer():
    def step(m, x):
        delta = jax.nn.softplus(x @ m.w_delta.value + m.b_delta.value)
        b, c = x @ m.w_b.value, x @ m.w_c.value
        decay = jnp.exp(-delta[:, :, None] * jnp.exp(m.log_a.value))
        drive = (delta * x)[:, :, None] * b[:, None, :]
        m.h.value = decay * m.h.value + drive
        return (m.h.value * c[:, None, :]).sum(-1) + m.skip.value * x

    parts = {
        'w_delta': weight(I, I),
        'b_delta': weight(I),
        'w_b': weight(I, 5),
        'w_c': weight(I, 5),
        'log_a': weight(I, 5),
        'skip': weight(I),
        'h': hidden(B, I, 5),
    }
    return Step(step, **parts), (array(B, I),)


@case(
    ['memory'],
    {
        'w_k': 'exact 0',
        'w_v': 'exact 0',
        'w_q': 'exact',
        'w_g': 'exact 0',
        'b_g': 'exact 0',
    },
    note='two heads, each with a decay from the input that all of its memory reads',
)
def linear_attention_with_heads():
    def step(m, x):
        k = (x @ m.w_k.value).reshape(B, 2, 3)
        v = (x @ m.w_v.value).reshape(B, 2, 4)
        q = (x @ m.w_q.value).reshape(B, 2, 3)
        gate = jax.nn.sigmoid(x @ m.w_g.value + m.b_g.value)
        written = jnp.einsum('bhk,bhv->bhkv', k, v)
        m.memory.value = gate[:, :, None, None] * m.memory.value + written
        return jnp.einsum('bhk,bhkv->bhv', q, m.memory.value)

    parts = {
        'w_k': weight(I, 6),
        'w_v': weight(I, 8),
        'w_q': weight(I, 6),
        'w_g': weight(I, 2),
        'b_g': weight(2),
        'memory': hidden(B, 2, 3, 4),
    }
    return Step(step, **parts), (array(B, I),)


@case(
    ['memory'],
    {'w_k': 'exact 0', 'w_v': 'exact 0', 'w_q': 'exact', 'rate': 'exact 0'},
    note='a key times a value, at a learned rate',
)
def outer_product_memory():
    def step(m, x):
        k, v = jnp.tanh(x @ m.w_k.value), x @ m.w_v.value
        outer = k[:, :, None] * v[:, None, :]
        m.memory.value = 0.9 * m.memory.value + m.rate.value * outer
        return jnp.einsum('bk,bkv->bv', jnp.tanh(x @ m.w_q.value), m.memory.value)

    parts = {
        'w_k': weight(I, H),
        'w_v': weight(I, 5),
        'w_q': weight(I, H),
        'rate': weight(mean=0.7),
        'memory': hidden(B, H, 5),
    }
    return Step(step, **parts), (array(B, I),)


@case(
    ['memory'],
    {'w_k': 'instantaneous', 'w_v': 'exact 0'},
    note='the key is both factors: each position reads two of its elements, so it is cut',
)
def outer_product_of_one_value():
    def step(m, x):
        k = jnp.tanh(x @ m.w_k.value)
        outer = k[:, :, None] * k[:, None, :]
        drive = jnp.einsum('bi,ijk->bjk', x, m.w_v.value)
        m.memory.value = 0.9 * m.memory.value + outer + drive
        return m.memory.value

    parts = {
        'w_k': weight(I, H),
        'w_v': weight(I, H, H),
        'memory': hidden(B, H, H),
    }
    return Step(step, **parts), (array(B, I),)


# one value for all units


@case(['h'], {'w': 'exact 0', 'b': 'exact 0', 'a': 'exact 0'})
def shared_drive():
    def step(m, x):
        drive = jnp.tanh(x @ m.w.value + m.b.value)  # (b, 1)
        m.h.value = m.a.value * m.h.value + drive
        return m.h.value

    return Step(step, w=weight(I, 1), b=weight(1), a=weight(H), h=hidden(B, H)), (
        array(B, I),
    )


@case(['h'], {'w_g': 'exact 0', 'w': 'exact 0'})
def shared_gate():
    def step(m, x):
        gate = jax.nn.sigmoid(x @ m.w_g.value)  # (b, 1)
        m.h.value = gate * m.h.value + (1 - gate) * jnp.tanh(x @ m.w.value)
        return m.h.value

    return Step(step, w_g=weight(I, 1), w=weight(I, H), h=hidden(B, H)), (array(B, I),)


@case(
    ['h'],
    {'w_g': 'local 0', 'u_g': 'local 0', 'w': 'local 0'},
    note='the gate reads all units, so units feed each other through it',
)
def shared_gate_that_reads_the_state():
    def step(m, x):
        gate = jax.nn.sigmoid(x @ m.w_g.value + m.h.value @ m.u_g.value)
        m.h.value = gate * m.h.value + x @ m.w.value
        return m.h.value

    return Step(
        step, w_g=weight(I, 1), u_g=weight(H, 1), w=weight(I, H), h=hidden(B, H)
    ), (array(B, I),)


@case(
    ['h'],
    {'w_m': 'exact 0', 'w': 'exact 0'},
    note='a level by a learned product scales the input of all units',
)
def neuromodulator():
    def step(m, x):
        level = jax.nn.softplus(x @ m.w_m.value)[:, None]
        m.h.value = 0.8 * m.h.value + level * (x @ m.w.value)
        return jnp.tanh(m.h.value)

    return Step(step, w_m=weight(I), w=weight(I, H), h=hidden(B, H)), (array(B, I),)


@case(['h'], {'w_g': 'exact 0', 'w': 'exact 0'}, note='three heads of two units each')
def gate_for_each_head():
    def step(m, x):
        gate = jnp.repeat(jax.nn.sigmoid(x @ m.w_g.value), 2, axis=-1)
        m.h.value = gate * m.h.value + x @ m.w.value
        return m.h.value

    return Step(step, w_g=weight(I, 3), w=weight(I, 6), h=hidden(B, 6)), (array(B, I),)


@case(
    ['h'],
    {'w': 'exact 0'},
    note='four results at nine positions: columns of a constant table name their units',
)
def results_picked_by_a_table():
    table = np.array([3, 0, 0, 2, 1, 1, 3, 3, 0])
    op = lambda m, x: (x @ m.w.value)[:, table]
    return leaky(op, shape=(B, 9), w=weight(I, H)), (array(B, I),)


# initial states


@case(['h'], {'h0': 'exact 0', 'w': 'exact 0'}, note='an input switches it on')
def initial_state_by_flag():
    def step(m, x, flag):
        h = jnp.where(flag[:, None], jnp.tanh(m.h0.value), m.h.value)
        m.h.value = 0.9 * h + x @ m.w.value
        return m.h.value

    return Step(step, h0=weight(H), w=weight(I, H), h=hidden(B, H)), (
        array(B, I),
        jnp.arange(B) == 0,
    )


@case(
    ['h'],
    {'h0': 'exact 0', 'scale': 'exact 0', 'w': 'exact 0'},
    note='a counter switches it on; its start and its scale are learned',
)
def initial_state_by_counter():
    def step(m, x):
        h = jnp.where(m.count.value == 0, m.h0.value * m.scale.value, m.h.value)
        m.h.value = 0.9 * h + x @ m.w.value
        m.count.value = m.count.value + 1
        return m.h.value

    parts = {
        'h0': weight(H),
        'scale': weight(mean=1.3),
        'w': weight(I, H),
        'h': hidden(B, H),
        'count': other(jnp.zeros((), jnp.int32)),
    }
    return Step(step, **parts), (array(B, I),)


# layers that are one group


def two_layers(step):
    parts = {
        'w1': weight(I, H),
        'w2': weight(H, H),
        'gain': weight(H),
        'lower': hidden(B, H),
        'upper': hidden(B, H),
    }
    return Step(step, **parts), (array(B, I),)


@case(
    ['lower upper'],
    {'w1': 'local 0', 'w2': 'exact 0', 'gain': 'exact 0'},
    note='the product is cut between the layers, the skip connection is kept; what moves the upper layer alone '
    'meets no cut',
)
def two_layers_with_a_skip_connection():
    def step(m, x):
        m.lower.value = jnp.tanh(0.8 * m.lower.value + x @ m.w1.value)
        mixed = jnp.tanh(m.lower.value @ m.w2.value)
        skip = m.gain.value * m.lower.value
        m.upper.value = 0.9 * m.upper.value + mixed + skip
        return m.upper.value

    return two_layers(step)


@case(
    ['lower upper'],
    {'w1': 'local 0', 'w2': 'exact 0', 'gain': 'exact 0'},
    note='the same, with the upper layer in a branch: the cut is inside it',
)
def skip_connection_inside_a_branch():
    def step(m, x):
        m.lower.value = jnp.tanh(0.8 * m.lower.value + x @ m.w1.value)
        with_product = lambda h: jnp.tanh(h @ m.w2.value) + m.gain.value * h
        without = lambda h: -m.gain.value * h
        is_up = x.sum() > -1e3
        read = jax.lax.cond(is_up, with_product, without, m.lower.value)
        m.upper.value = 0.9 * m.upper.value + read
        return m.upper.value

    return two_layers(step)


@case(
    ['u1 u2 h'],
    {
        'w': 'local 0',
        'kernel': 'local 0',
        'wa': 'exact 0',
        'wx': 'exact 0',
        'ba': 'exact 0',
        'decay': 'exact 0',
        'out': 'exact',
    },
    note='as in Griffin: gates mix what a convolution over time keeps, and the recurrence itself is linear',
)
def gated_linear_recurrence_behind_a_convolution():
    def step(m, x):
        u = x @ m.w.value
        k = m.kernel.value
        c = k[0] * u + k[1] * m.u1.value + k[2] * m.u2.value
        m.u2.value = m.u1.value
        m.u1.value = u
        rate = jax.nn.sigmoid(c @ m.wa.value + m.ba.value)
        a = jnp.exp(-rate * jax.nn.softplus(m.decay.value))
        drive = jax.nn.sigmoid(c @ m.wx.value) * c
        m.h.value = a * m.h.value + jnp.sqrt(1 - a * a) * drive
        return (jax.nn.gelu(x @ m.w.value) * m.h.value) @ m.out.value

    parts = {
        'w': weight(I, H),
        'kernel': weight(3, H),
        'wa': weight(H, H),
        'wx': weight(H, H),
        'ba': weight(H),
        'decay': weight(H),
        'out': weight(H, 2),
        'u1': hidden(B, H),
        'u2': hidden(B, H),
        'h': hidden(B, H),
    }
    return Step(step, **parts), (array(B, I),)
