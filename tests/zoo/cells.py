"""Gated and rate cells: the unmodified cells of brainstate, and hand-written ones."""

import brainstate
import jax
import jax.numpy as jnp

from .base import B, H, I, Step, array, case, cell, hidden, linear, other, weight

nn = brainstate.nn


# unmodified brainstate cells, with and without a batch

GRU = {
    'Wrz/weight/weight': 'local 0',  # the reset half is cut, the update half kept
    'Wrz/weight/bias': 'local 0',
    'Wh/weight/weight': 'local 0',
    'Wh/weight/bias': 'local 0',
}


@case(['h'], GRU)
def gru_batched():
    return cell(nn.GRUCell, I, H, batch=B), (array(B, I),)


@case(['h'], GRU)
def gru_unbatched():
    return cell(nn.GRUCell, I, H), (array(I),)


LSTM = {'W/weight/weight': 'local 0', 'W/weight/bias': 'local 0'}


@case(['c h'], LSTM)
def lstm_batched():
    return cell(nn.LSTMCell, I, H, batch=B), (array(B, I),)


@case(['c h'], LSTM)
def lstm_unbatched():
    return cell(nn.LSTMCell, I, H), (array(I),)


MGU = {
    'Wf/weight/weight': 'local 0',
    'Wf/weight/bias': 'local 0',
    'Wh/weight/weight': 'local 0',
    'Wh/weight/bias': 'local 0',
}


@case(['h'], MGU)
def mgu_batched():
    return cell(nn.MGUCell, I, H, batch=B), (array(B, I),)


@case(['h'], MGU)
def mgu_unbatched():
    return cell(nn.MGUCell, I, H), (array(I),)


VANILLA = {'W/weight/weight': 'instantaneous 0', 'W/weight/bias': 'instantaneous 0'}


@case(
    ['h'],
    VANILLA,
    note='the only recurrence is a matmul: sites, but no transition to carry them',
)
def vanilla_batched():
    return cell(nn.ValinaRNNCell, I, H, batch=B, activation='tanh'), (array(B, I),)


@case(['h'], VANILLA)
def vanilla_unbatched():
    return cell(nn.ValinaRNNCell, I, H, activation='tanh'), (array(I),)


URLSTM = {'W/weight/weight': 'local 0', 'bias': 'local 0'}


@case(['c h'], URLSTM)
def urlstm_batched():
    return cell(nn.URLSTMCell, I, H, batch=B), (array(B, I),)


@case(['c h'], URLSTM)
def urlstm_unbatched():
    return cell(nn.URLSTMCell, I, H), (array(I),)


@case(
    ['cell/h'],
    {f'cell/{leaf}': answer for leaf, answer in GRU.items()}
    | {'readout/weight/weight': 'exact', 'readout/weight/bias': 'exact'},
)
def gru_with_readout():
    model = Step(
        lambda m, x: m.readout(m.cell(x)),
        cell=cell(nn.GRUCell, I, H, batch=B),
        readout=linear(H, 5),
    )
    return model, (array(B, I),)


@case(
    ['cell/module/h'],
    {f'cell/module/{leaf}': answer for leaf, answer in GRU.items()}
    | {'readout/weight/weight': 'exact', 'readout/weight/bias': 'exact'},
    note='a cell of one sample, mapped over the batch by brainstate.nn.Vmap',
)
def gru_mapped_by_brainstate():
    mapped = nn.Vmap(
        cell(nn.GRUCell, I, H, batch=B), vmap_states=brainstate.HiddenState
    )
    return Step(lambda m, x: m.readout(m.cell(x)), cell=mapped, readout=linear(H, 5)), (
        array(B, I),
    )


# recurrences that keep positions: no path is cut


@case(['h'], {'wz': 'exact 0', 'wh': 'exact 0'})
def minigru():
    def step(m, x):
        z = jax.nn.sigmoid(x @ m.wz.value)
        m.h.value = (1 - z) * m.h.value + z * (x @ m.wh.value)
        return m.h.value

    return Step(step, wz=weight(I, H), wh=weight(I, H), h=hidden(B, H)), (array(B, I),)


@case(
    ['c h'],
    {'w': 'exact 0', 'b': 'exact 0'},
    note='h is written, never read: it rides on c',
)
def minilstm():
    def step(m, x):
        f, i, g, o = jnp.split(x @ m.w.value + m.b.value, 4, axis=-1)
        m.c.value = jax.nn.sigmoid(f) * m.c.value + jax.nn.sigmoid(i) * jnp.tanh(g)
        m.h.value = jax.nn.sigmoid(o) * jnp.tanh(m.c.value)
        return m.h.value

    return Step(
        step, w=weight(I, 4 * H), b=weight(4 * H), c=hidden(B, H), h=hidden(B, H)
    ), (array(B, I),)


@case(['h'], {'w': 'exact 0', 'u': 'exact 0', 'b': 'exact 0'})
def indrnn():
    def step(m, x):
        m.h.value = jnp.tanh(x @ m.w.value + m.u.value * m.h.value + m.b.value)
        return m.h.value

    return Step(step, w=weight(I, H), u=weight(H), b=weight(H), h=hidden(B, H)), (
        array(B, I),
    )


@case(['c'], {'w': 'exact 0', 'v': 'exact 0', 'b': 'exact 0', 'wr': 'exact'})
def sru():
    def step(m, x):
        f, g = jnp.split(x @ m.w.value, 2, axis=-1)
        f = jax.nn.sigmoid(f + m.v.value * m.c.value + m.b.value)
        m.c.value = f * m.c.value + (1 - f) * g
        return jax.nn.sigmoid(x @ m.wr.value) * m.c.value  # highway gate: read-out only

    parts = {
        'w': weight(I, 2 * H),
        'v': weight(H),
        'b': weight(H),
        'wr': weight(I, H),
        'c': hidden(B, H),
    }
    return Step(step, **parts), (array(B, I),)


@case(
    ['c'],
    {'w0': 'exact 0', 'w1': 'exact 0'},
    note='the previous input is a state, but no parameter reaches it',
)
def qrnn():
    def step(m, x):
        f, g, o = jnp.split(x @ m.w0.value + m.previous.value @ m.w1.value, 3, axis=-1)
        m.previous.value = x
        f = jax.nn.sigmoid(f)
        m.c.value = f * m.c.value + (1 - f) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * m.c.value

    parts = {
        'w0': weight(I, 3 * H),
        'w1': weight(I, 3 * H),
        'previous': other(array(B, I)),
        'c': hidden(B, H),
    }
    return Step(step, **parts), (array(B, I),)


@case(['h'], {'log_a': 'exact 0', 'b': 'exact 0', 'c': 'exact', 'd': 'exact'})
def ssm_diagonal():
    def step(m, x):
        m.h.value = jnp.exp(-jnp.exp(m.log_a.value)) * m.h.value + x @ m.b.value
        return m.h.value @ m.c.value + x * m.d.value

    return Step(
        step,
        log_a=weight(H),
        b=weight(I, H),
        c=weight(H, I),
        d=weight(I),
        h=hidden(B, H),
    ), (array(B, I),)


@case(
    ['h'],
    {
        'log_a': 'exact 0',
        'w_delta': 'exact 0',
        'w_b': 'exact 0',
        'w_c': 'exact',
    },
    note='all states of a channel read its step size, and all channels the write vector',
)
def ssm_selective():
    def step(m, x):
        delta = jax.nn.softplus(x @ m.w_delta.value)[..., None]  # (b, channel, 1)
        decay = jnp.exp(-delta * jnp.exp(m.log_a.value))
        m.h.value = (
            decay * m.h.value + delta * (x @ m.w_b.value)[:, None] * x[..., None]
        )
        return jnp.einsum('bcn,bn->bc', m.h.value, x @ m.w_c.value)

    parts = {
        'log_a': weight(I, 5),
        'w_delta': weight(I, I),
        'w_b': weight(I, 5),
        'w_c': weight(I, 5),
        'h': hidden(B, I, 5),
    }
    return Step(step, **parts), (array(B, I),)


@case(['h'], {'nu': 'exact 0', 'phase': 'exact 0', 'b': 'exact 0', 'c': 'exact'})
def lru_complex():
    def step(m, x):
        decay = jnp.exp(-jnp.exp(m.nu.value) + 1j * jnp.exp(m.phase.value))
        m.h.value = decay * m.h.value + x @ m.b.value
        return (m.h.value @ m.c.value).real

    kind = {'dtype': jnp.complex64}
    parts = {
        'nu': weight(H),
        'phase': weight(H),
        'b': weight(I, H, **kind),
        'c': weight(H, I, **kind),
        'h': hidden(B, H, **kind),
    }
    return Step(step, **parts), (array(B, I),)


@case(
    ['real imag'],
    {
        'nu': 'exact 0',
        'phase': 'exact 0',
        'b/real': 'exact 0',
        'b/imag': 'exact 0',
        'c': 'exact',
    },
)
def lru_real_pair():
    def step(m, x):
        radius, real, imag = jnp.exp(-jnp.exp(m.nu.value)), m.real.value, m.imag.value
        cos, sin = radius * jnp.cos(m.phase.value), radius * jnp.sin(m.phase.value)
        m.real.value = cos * real - sin * imag + x @ m.b.value['real']
        m.imag.value = sin * real + cos * imag + x @ m.b.value['imag']
        return jnp.concatenate([m.real.value, m.imag.value], axis=-1) @ m.c.value

    b = brainstate.ParamState({'real': array(I, H), 'imag': array(I, H)})
    parts = {
        'nu': weight(H),
        'phase': weight(H),
        'b': b,
        'c': weight(2 * H, I),
        'real': hidden(B, H),
        'imag': hidden(B, H),
    }
    return Step(step, **parts), (array(B, I),)


# recurrences that mix


@case(['h'], {'w': 'local 0', 'r': 'local 0', 'b': 'local 0'})
def leaky_rnn():
    def step(m, x):
        m.h.value = 0.8 * m.h.value + 0.2 * jnp.tanh(
            x @ m.w.value + m.h.value @ m.r.value + m.b.value
        )
        return m.h.value

    return Step(step, w=weight(I, H), r=weight(H, H), b=weight(H), h=hidden(B, H)), (
        array(B, I),
    )


@case(['h'], {'w': 'local 0', 'out': 'exact'})
def echo_state():
    recurrent = array(H, H)

    def step(m, x):
        m.h.value = 0.7 * m.h.value + 0.3 * jnp.tanh(
            x @ m.w.value + m.h.value @ recurrent
        )
        return m.h.value @ m.out.value

    return Step(step, w=weight(I, H), out=weight(H, 5), h=hidden(B, H)), (array(B, I),)


@case(
    ['c h'],
    {
        'w': 'local 0',
        'peephole/i': 'local 0',
        'peephole/f': 'local 0',
        'peephole/o': 'local 0',
    },
)
def lstm_peephole():
    def step(m, x):
        p, c = m.peephole.value, m.c.value
        i, f, g, o = jnp.split(
            jnp.concatenate([x, m.h.value], axis=-1) @ m.w.value, 4, axis=-1
        )
        m.c.value = jax.nn.sigmoid(f + p['f'] * c) * c + jax.nn.sigmoid(
            i + p['i'] * c
        ) * jnp.tanh(g)
        m.h.value = jax.nn.sigmoid(o + p['o'] * m.c.value) * jnp.tanh(m.c.value)
        return m.h.value

    peephole = brainstate.ParamState({gate: array(H) for gate in 'ifo'})
    return Step(
        step, w=weight(I + H, 4 * H), peephole=peephole, c=hidden(B, H), h=hidden(B, H)
    ), (array(B, I),)


@case(
    ['c', 'h'],
    {'w': 'local 0', 'projection': 'instantaneous 1'},
    note='h is a projection of c, of another size: nothing carries credit from h to h',
)
def lstm_projected():
    def step(m, x):
        i, f, g, o = jnp.split(
            jnp.concatenate([x, m.h.value], axis=-1) @ m.w.value, 4, axis=-1
        )
        m.c.value = jax.nn.sigmoid(f) * m.c.value + jax.nn.sigmoid(i) * jnp.tanh(g)
        m.h.value = (jax.nn.sigmoid(o) * jnp.tanh(m.c.value)) @ m.projection.value
        return m.h.value

    parts = {
        'w': weight(I + 5, 4 * H),
        'projection': weight(H, 5),
        'c': hidden(B, H),
        'h': hidden(B, 5),
    }
    return Step(step, **parts), (array(B, I),)


@case(['y z'], {'w': 'local 0', 'r': 'local 0', 'b': 'local 0'})
def coupled_oscillators():
    def step(m, x):
        drive = jnp.tanh(x @ m.w.value + m.y.value @ m.r.value + m.b.value)
        m.z.value = m.z.value + 0.1 * (drive - 1.5 * m.y.value - 0.7 * m.z.value)
        m.y.value = m.y.value + 0.1 * m.z.value
        return m.y.value

    return Step(
        step,
        w=weight(I, H),
        r=weight(H, H),
        b=weight(H),
        y=hidden(B, H),
        z=hidden(B, H),
    ), (array(B, I),)


@case(
    ['memory', 'h'],
    {
        'encoder': 'instantaneous 0',
        'wx': 'instantaneous 1',
        'wh': 'instantaneous 1',
        'wm': 'instantaneous 1',
    },
    note='the memory mixes through a constant matrix and its one input fans out over it',
)
def legendre_memory():
    transition, write = array(5, 5), array(5)

    def step(m, x):
        m.memory.value = m.memory.value @ transition + (x @ m.encoder.value) * write
        m.h.value = jnp.tanh(
            x @ m.wx.value + m.h.value @ m.wh.value + m.memory.value @ m.wm.value
        )
        return m.h.value

    parts = {
        'encoder': weight(I, 1),
        'wx': weight(I, H),
        'wh': weight(H, H),
        'wm': weight(5, H),
    }
    return Step(step, **parts, memory=hidden(B, 5), h=hidden(B, H)), (array(B, I),)


# matrix-valued states


@case(
    ['memory'],
    {'wk': 'exact 0', 'wv': 'exact 0', 'wq': 'exact', 'decay': 'exact 0'},
    note='a row or a column of the state reads each key and value',
)
def linear_attention():
    def step(m, x):
        q, k, v = x @ m.wq.value, x @ m.wk.value, x @ m.wv.value
        m.memory.value = (
            jax.nn.sigmoid(m.decay.value) * m.memory.value
            + k[:, :, None] * v[:, None, :]
        )
        return jnp.einsum('bk,bkv->bv', q, m.memory.value)

    parts = {
        'wq': weight(I, 4),
        'wk': weight(I, 4),
        'wv': weight(I, 5),
        'decay': weight(4, 1),
        'memory': hidden(B, 4, 5),
    }
    return Step(step, **parts), (array(B, I),)


@case(
    ['memory'],
    {
        'wk': 'local 0',
        'wv': 'local 0',
        'wq': 'exact',
        'strength': 'local 0',
    },
    note='S - b (S k) k^T keeps S itself and mixes the rest; k is cut in S k, kept in the write',
)
def delta_rule():
    def step(m, x):
        q, k, v = x @ m.wq.value, x @ m.wk.value, x @ m.wv.value
        error = v - jnp.einsum('bk,bkv->bv', k, m.memory.value)
        strength = jax.nn.sigmoid(x @ m.strength.value)  # (b, 1)
        m.memory.value = m.memory.value + jnp.einsum('bk,bv->bkv', k, strength * error)
        return jnp.einsum('bk,bkv->bv', q, m.memory.value)

    parts = {
        'wq': weight(I, 4),
        'wk': weight(I, 4),
        'wv': weight(I, 5),
        'strength': weight(I, 1),
        'memory': hidden(B, 4, 5),
    }
    return Step(step, **parts), (array(B, I),)


@case(['fast', 'h'], {'w': 'instantaneous 1', 'decay': 'none 0', 'rate': 'none 0'})
def fast_weights():
    def step(m, x):
        m.h.value = jnp.tanh(
            x @ m.w.value + jnp.einsum('bij,bj->bi', m.fast.value, m.h.value)
        )
        outer = m.h.value[:, :, None] * m.h.value[:, None, :]
        m.fast.value = m.decay.value * m.fast.value + m.rate.value * outer
        return m.h.value

    parts = {
        'w': weight(I, H),
        'decay': weight(mean=0.9),
        'rate': weight(mean=0.3),
        'fast': hidden(B, H, H),
        'h': hidden(B, H),
    }
    return Step(step, **parts), (array(B, I),)
