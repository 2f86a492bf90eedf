"""Ops between the input and the state: convolutions, heads, dendrites, norms, gates, noise."""

import brainstate
import jax
import jax.numpy as jnp

from .base import B, H, I, Step, array, case, hidden, leaky, linear, spike, weight

nn = brainstate.nn

# convolutions: one kernel shared by many positions


@case(['h'], {'conv/weight/weight': 'exact 0', 'conv/weight/bias': 'exact 0'})
def conv1d():
    conv = nn.Conv1d((6, I), H, 3, b_init=nn.init.Normal(0.1))
    return leaky(lambda m, x: m.conv(x), shape=(B, 6, H), conv=conv), (array(B, 6, I),)


@case(
    ['V'],
    {
        'conv/weight/weight': 'exact 0',
        'out/weight/weight': 'exact',
        'out/weight/bias': 'exact',
    },
)
def conv2d_spiking():
    def step(m, x):
        m.V.value = 0.9 * m.V.value + m.conv(x) - spike(m.V.value - 0.1)
        return m.out(spike(m.V.value - 0.1).reshape(B, -1))

    parts = {
        'conv': nn.Conv2d((5, 6, I), H, (2, 3)),
        'out': linear(5 * 6 * H, 7),
        'V': hidden(B, 5, 6, H),
    }
    return Step(step, **parts), (array(B, 5, 6, I),)


@case(['V'], {'conv/weight/weight': 'local 0', 'recurrent/weight/weight': 'local 0'})
def conv1d_spiking_recurrent():
    def step(m, x):
        fired = spike(m.V.value - 0.1)
        m.V.value = 0.9 * m.V.value + m.conv(x) + m.recurrent(fired) - fired
        return spike(m.V.value - 0.1)

    parts = {
        'conv': nn.Conv1d((6, I), H, 3),
        'recurrent': nn.Conv1d((6, H), H, 3),
        'V': hidden(B, 6, H),
    }
    return Step(step, **parts), (array(B, 6, I),)


@case(['c h'], {'conv/weight/weight': 'local 0'})
def conv_lstm():
    def step(m, x):
        i, f, g, o = jnp.split(
            m.conv(jnp.concatenate([x, m.h.value], axis=-1)), 4, axis=-1
        )
        m.c.value = jax.nn.sigmoid(f) * m.c.value + jax.nn.sigmoid(i) * jnp.tanh(g)
        m.h.value = jax.nn.sigmoid(o) * jnp.tanh(m.c.value)
        return m.h.value

    parts = {
        'conv': nn.Conv1d((6, I + H), 4 * H, 3),
        'c': hidden(B, 6, H),
        'h': hidden(B, 6, H),
    }
    return Step(step, **parts), (array(B, 6, I),)


@case(['h'], {'conv/weight/weight': 'exact 0'})
def conv1d_depthwise():
    conv = nn.Conv1d((6, I), 2 * I, 3, groups=I)
    return leaky(lambda m, x: m.conv(x), shape=(B, 6, 2 * I), conv=conv), (
        array(B, 6, I),
    )


@case(
    ['h'],
    {'kernel': 'exact 0'},
    note='strided and dilated, without padding, channels first',
)
def conv_by_lax():
    def op(m, x):
        return jax.lax.conv_general_dilated(
            x, m.kernel.value, (2,), 'VALID', rhs_dilation=(2,)
        )

    return leaky(op, shape=(B, H, 3), kernel=weight(H, I, 2)), (array(B, I, 7),)


@case(['h'], {'conv/weight/weight': 'exact 0', 'conv/weight/gain': 'exact 0'})
def conv_weight_standardised():
    return leaky(
        lambda m, x: m.conv(x), shape=(B, 6, H), conv=nn.ScaledWSConv1d((6, I), H, 3)
    ), (array(B, 6, I),)


@case(
    ['h'], {'conv/weight/weight': 'exact 0'}, note='the pooling windows do not overlap'
)
def conv_then_max_pool():
    pool = nn.MaxPool1d(2, 2, channel_axis=-1)
    parts = {'conv': nn.Conv1d((6, I), H, 3), 'pool': pool}
    return leaky(lambda m, x: m.pool(m.conv(x)), shape=(B, 3, H), **parts), (
        array(B, 6, I),
    )


@case(
    ['h'], {'conv/weight/weight': 'exact 0'}, note='the pooling windows do not overlap'
)
def conv_then_average_pool():
    pool = nn.AvgPool1d(2, 2, channel_axis=-1)
    parts = {'conv': nn.Conv1d((6, I), H, 3), 'pool': pool}
    return leaky(lambda m, x: m.pool(m.conv(x)), shape=(B, 3, H), **parts), (
        array(B, 6, I),
    )


# lookups, heads, dendrites


@case(['h'], {'table/weight': 'exact 0'})
def embedding_input():
    return leaky(lambda m, i: m.table(i), table=nn.Embedding(7, H)), (
        jnp.array([5, 2]),
    )


@case(
    ['h'],
    {'table': 'exact 0', 'position': 'exact 0'},
    note='two tables, added; integers in',
)
def embedding_by_indexing():
    def op(m, i, t):
        return m.table.value[i] + m.position.value[t]

    return leaky(op, table=weight(7, H), position=weight(5, H)), (
        jnp.array([5, 2]),
        jnp.array([3, 3]),
    )


@case(['h'], {'table': 'instantaneous', 'w': 'exact 0'})
def embedding_then_matmul():
    return leaky(
        lambda m, i: m.table.value[i] @ m.w.value, table=weight(7, I), w=weight(I, H)
    ), (jnp.array([5, 2]),)


@case(['h'], {'w': 'exact 0'})
def multi_head_einsum():
    return leaky(
        lambda m, x: jnp.einsum('bi,ihd->bhd', x, m.w.value),
        shape=(B, H, 5),
        w=weight(I, H, 5),
    ), (array(B, I),)


@case(['h'], {'w': 'exact 0'}, note='one matrix per head, a batched dot_general')
def matrix_per_head():
    return leaky(
        lambda m, x: jnp.einsum('bhi,hid->bhd', x, m.w.value),
        shape=(B, H, 5),
        w=weight(H, I, 5),
    ), (array(B, H, I),)


@case(['h'], {'w': 'local 0', 'r': 'local 0'}, note='recurrence inside each head')
def recurrent_matrix_per_head():
    def op(m, x):
        return jnp.einsum('bi,ihd->bhd', x, m.w.value) + jnp.einsum(
            'bhd,hde->bhe', m.h.value, m.r.value
        )

    return leaky(op, shape=(B, H, 5), w=weight(I, H, 5), r=weight(H, 5, 5)), (
        array(B, I),
    )


@case(['h'], {'w': 'exact 0', 'b': 'exact 0'})
def dendrites_summed_into_soma():
    def op(m, x):
        return jax.nn.relu(jnp.einsum('bi,ihd->bhd', x, m.w.value) + m.b.value).sum(
            axis=-1
        )

    return leaky(op, w=weight(I, H, 5), b=weight(H, 5)), (array(B, I),)


@case(['h'], {'w': 'exact 0'})
def dendrites_by_max():
    return leaky(
        lambda m, x: jnp.einsum('bi,ihd->bhd', x, m.w.value).max(axis=-1),
        w=weight(I, H, 5),
    ), (array(B, I),)


@case(
    ['h'],
    {'w': 'exact 0'},
    note='the fused columns are reshaped into dendrites, then averaged',
)
def dendrites_by_reshape_and_mean():
    return leaky(
        lambda m, x: (x @ m.w.value).reshape(B, H, 5).mean(axis=-1), w=weight(I, H * 5)
    ), (array(B, I),)


@case(
    ['h'],
    {'w': 'exact 0', 'weighting': 'exact 0'},
    note='dendrites weighed by a second parameter, still in place',
)
def dendrites_weighed():
    def op(m, x):
        return jnp.einsum(
            'bhd,hd->bh',
            jnp.tanh(jnp.einsum('bi,ihd->bhd', x, m.w.value)),
            m.weighting.value,
        )

    return leaky(op, w=weight(I, H, 5), weighting=weight(H, 5)), (array(B, I),)


@case(['h'], {'w': 'exact 0'})
def bilinear():
    return leaky(
        lambda m, x, y: jnp.einsum('bi,bj,ijh->bh', x, y, m.w.value), w=weight(I, 5, H)
    ), (
        array(B, I),
        array(B, 5),
    )


@case(
    ['h'],
    {'w': 'exact 0'},
    note='the input writes the weights that read it: (b, i, h) summed over i',
)
def hypernetwork():
    def op(m, x, context):
        return jnp.einsum('bi,bih->bh', x, (context @ m.w.value).reshape(B, I, H))

    return leaky(op, w=weight(5, I * H)), (array(B, I), array(B, 5))


# between op and state


@case(
    ['h'],
    {'w': 'local 0', 'norm/weight/scale': 'exact 0', 'norm/weight/bias': 'exact 0'},
)
def layer_norm_on_input():
    return leaky(
        lambda m, x: m.norm(x @ m.w.value), w=weight(I, H), norm=nn.LayerNorm(H)
    ), (array(B, I),)


@case(['h'], {'w': 'local 0', 'norm/scale/scale': 'exact 0'})
def rms_norm_on_input():
    return leaky(
        lambda m, x: m.norm(x @ m.w.value), w=weight(I, H), norm=nn.RMSNorm(H)
    ), (array(B, I),)


@case(
    ['h'],
    {'w': 'local 0', 'norm/weight/scale': 'local 0', 'norm/weight/bias': 'local 0'},
)
def layer_norm_on_state():
    def step(m, x):
        m.h.value = m.norm(0.9 * m.h.value + x @ m.w.value)
        return m.h.value

    return Step(step, w=weight(I, H), norm=nn.LayerNorm(H), h=hidden(B, H)), (
        array(B, I),
    )


@case(
    ['h'], {'w': 'local 0'}, note='the numerator keeps its place, the sum below is cut'
)
def softmax_on_input():
    return leaky(lambda m, x: jax.nn.softmax(x @ m.w.value), w=weight(I, H)), (
        array(B, I),
    )


@case(
    ['h'],
    {'w': 'exact 0'},
    note='the winner is found by a comparison, which has no derivative',
)
def winner_take_all():
    def op(m, x):
        y = x @ m.w.value
        return jnp.where(y >= y.max(axis=-1, keepdims=True), y, 0.1 * y)

    return leaky(op, w=weight(I, H)), (array(B, I),)


@case(['h'], {'w': 'exact 0'})
def gated_linear_unit():
    def op(m, x):
        y, gate = jnp.split(x @ m.w.value, 2, axis=-1)
        return y * jax.nn.sigmoid(gate)

    return leaky(op, w=weight(I, 2 * H)), (array(B, I),)


@case(
    ['h'],
    {'w': 'exact 0', 'gate': 'exact 0'},
    note='one gate per sample opens every unit',
)
def one_gate_for_all_units():
    def step(m, x):
        z = jax.nn.sigmoid(x @ m.gate.value)  # (b, 1)
        m.h.value = (1 - z) * m.h.value + z * (x @ m.w.value)
        return m.h.value

    return Step(step, w=weight(I, H), gate=weight(I, 1), h=hidden(B, H)), (array(B, I),)


@case(
    ['h'],
    {'w': 'exact 0', 'r': 'exact 0'},
    note='clip, maximum, select and absolute value, all element by element',
)
def where_and_clip():
    def step(m, x):
        y = jnp.clip(x @ m.w.value, -1.0, 1.0)
        y = jax.lax.select(
            y > 0, jnp.maximum(y, 0.1), -jnp.abs(y) * m.r.value * jnp.ones_like(y)
        )
        m.h.value = jnp.where(m.h.value > 0, 0.9, 0.5) * m.h.value + y
        return m.h.value

    return Step(step, w=weight(I, H), r=weight(H), h=hidden(B, H)), (array(B, I),)


# one matmul for all gates, taken apart in different ways


def forget_and_write(m, f, g):
    m.h.value = jax.nn.sigmoid(f) * m.h.value + jnp.tanh(g)
    return m.h.value


@case(['h'], {'w': 'exact 0'})
def fused_gates_by_split():
    def step(m, x):
        return forget_and_write(m, *jnp.split(x @ m.w.value, 2, axis=-1))

    return Step(step, w=weight(I, 2 * H), h=hidden(B, H)), (array(B, I),)


@case(['h'], {'w': 'exact 0'})
def fused_gates_by_slice():
    def step(m, x):
        y = x @ m.w.value
        return forget_and_write(m, y[:, ::2], y[:, 1::2])

    return Step(step, w=weight(I, 2 * H), h=hidden(B, H)), (array(B, I),)


@case(['h'], {'w': 'exact 0'})
def fused_gates_by_reshape():
    def step(m, x):
        return forget_and_write(
            m, *jnp.moveaxis((x @ m.w.value).reshape(B, H, 2), -1, 0)
        )

    return Step(step, w=weight(I, 2 * H), h=hidden(B, H)), (array(B, I),)


@case(
    ['h'],
    {'wf': 'exact 0', 'wg': 'exact 0', 'b': 'exact 0'},
    note='gate results concatenated, a bias added, split',
)
def fused_gates_by_concatenate():
    def step(m, x):
        y = jnp.concatenate([x @ m.wf.value, x @ m.wg.value], axis=-1) + m.b.value
        return forget_and_write(m, *jnp.split(y, 2, axis=-1))

    return Step(
        step, wf=weight(I, H), wg=weight(I, H), b=weight(2 * H), h=hidden(B, H)
    ), (array(B, I),)


@case(
    ['h'],
    {'wf': 'exact 0', 'wg': 'exact 0'},
    note='gate results stacked on a new axis and used by index',
)
def fused_gates_by_stack():
    def step(m, x):
        y = jnp.stack([x @ m.wf.value, x @ m.wg.value])
        return forget_and_write(m, y[0], y[1])

    return Step(step, wf=weight(I, H), wg=weight(I, H), h=hidden(B, H)), (array(B, I),)


@case(
    ['h'],
    {'w/f': 'exact 0', 'w/g': 'exact 0'},
    note='weights concatenated to one matmul, results split',
)
def fused_gates_by_concatenated_weights():
    def step(m, x):
        w = jnp.concatenate([m.w.value['f'], m.w.value['g']], axis=-1)
        return forget_and_write(m, *jnp.split(x @ w, 2, axis=-1))

    return Step(
        step,
        w=brainstate.ParamState({'f': array(I, H), 'g': array(I, H)}),
        h=hidden(B, H),
    ), (array(B, I),)


@case(['h'], {'w': 'exact 0'})
def concatenated_inputs():
    return leaky(
        lambda m, x, y: jnp.concatenate([x, y], axis=-1) @ m.w.value, w=weight(I + 5, H)
    ), (
        array(B, I),
        array(B, 5),
    )


@case(
    ['h'],
    {'w': 'local 0', 'b': 'local 0'},
    note='input, old state and a one as a single vector',
)
def concatenated_input_and_state():
    def op(m, x):
        return (
            jnp.concatenate([x, m.h.value, jnp.ones((B, 1))], axis=-1) @ m.w.value
            + m.b.value
        )

    return leaky(op, w=weight(I + H + 1, H), b=weight(H)), (array(B, I),)


# noise


@case(
    ['V'],
    {'w': 'exact 0', 'noise': 'exact 0'},
    note='the amplitude of the noise is learned',
)
def noisy_membrane():
    def step(m, x):
        noise = brainstate.random.randn(B, H)
        m.V.value = 0.9 * m.V.value + x @ m.w.value + jnp.exp(m.noise.value) * noise
        return spike(m.V.value)

    return Step(step, w=weight(I, H), noise=weight(H), V=hidden(B, H)), (array(B, I),)


@case(['h'], {'w': 'exact 0'})
def dropout_on_the_op():
    def op(m, x):
        with brainstate.environ.context(fit=True):
            return m.drop(x @ m.w.value)

    return leaky(op, w=weight(I, H), drop=nn.Dropout(0.6)), (array(B, I),)


@case(['h'], {'w': 'exact 0'}, note='a random mask on the weights, for each sample')
def drop_connect():
    def op(m, x):
        mask = (brainstate.random.rand(B, I, H) < 0.7).astype(jnp.float32)
        return jnp.einsum('bi,bih->bh', x, m.w.value * mask)

    return leaky(op, w=weight(I, H)), (array(B, I),)


# slots and graphs


@case(
    ['slots'],
    {'query': 'instantaneous', 'value': 'local 0'},
    note='all slots read the value; each score reads all slots',
)
def attention_over_slots():
    def step(m, x):
        scores = jax.nn.softmax(
            jnp.einsum('bnd,bd->bn', m.slots.value, x @ m.query.value)
        )
        m.slots.value = (
            0.9 * m.slots.value + scores[..., None] * (x @ m.value.value)[:, None]
        )
        return jnp.einsum('bn,bnd->bd', scores, m.slots.value)

    return Step(step, query=weight(I, H), value=weight(I, H), slots=hidden(B, 3, H)), (
        array(B, I),
    )


@case(
    ['h'],
    {'w': 'local 0', 'u': 'local 0'},
    note='messages between neighbours are cut, and said to be',
)
def graph_recurrence():
    neighbours = jnp.asarray([[0.0, 1, 1], [1, 0, 0], [1, 0, 0]])

    def op(m, x):
        return x @ m.w.value + neighbours @ m.h.value @ m.u.value

    return leaky(op, (3, H), w=weight(I, H), u=weight(H, H)), (array(3, I),)


@case(
    ['h'],
    {'w': 'exact 0'},
    note='only some rows and columns of a batched product reach the state',
)
def part_of_a_batched_product():
    def op(m, x):
        return jnp.einsum('gi,gio->go', x, m.w.value)[1:3, 1:]

    return leaky(op, (2, H - 1), w=weight(4, I, H)), (array(4, I),)
