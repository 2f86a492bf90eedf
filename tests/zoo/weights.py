"""Ways a parameter turns into a weight, and ways one parameter is used."""

import brainevent
import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace

from .base import B, H, I, Step, array, case, hidden, leaky, weight

nn = brainstate.nn

# transforms in weight space: still the operand "computed from parameters only"

MASK = np.array([[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 0, 1]], np.float32)
SIGNS = np.array([[1], [-1], [1]], np.float32)


@case(['h'], {'w': 'exact 0'})
def masked_weight():
    return leaky(lambda m, x: x @ (m.w.value * MASK), w=weight(I, H)), (array(B, I),)


@case(['h'], {'w': 'exact 0'}, note='Dale: one sign per input, the size learned')
def signed_weight():
    return leaky(lambda m, x: x @ (jnp.abs(m.w.value) * SIGNS), w=weight(I, H)), (
        array(B, I),
    )


@case(['h'], {'w': 'exact 0'})
def softplus_weight():
    return leaky(lambda m, x: x @ jax.nn.softplus(m.w.value), w=weight(I, H)), (
        array(B, I),
    )


@case(['h'], {'direction': 'exact 0', 'size': 'exact 0'})
def weight_normalised():
    def op(m, x):
        v = m.direction.value
        return x @ (m.size.value * v / jnp.linalg.norm(v, axis=0))

    return leaky(op, direction=weight(I, H), size=weight(H)), (array(B, I),)


@case(['h'], {'w': 'exact 0'})
def transposed_weight():
    return leaky(lambda m, x: x @ m.w.value.T, w=weight(H, I)), (array(B, I),)


@case(['h'], {'w': 'exact 0'})
def reshaped_weight():
    return leaky(lambda m, x: x @ m.w.value.reshape(I, H), w=weight(I * H)), (
        array(B, I),
    )


@case(['h'], {'a': 'exact 0', 'b': 'exact 0'})
def low_rank_weight():
    return leaky(
        lambda m, x: x @ (m.a.value @ m.b.value), a=weight(I, 2), b=weight(2, H)
    ), (array(B, I),)


@case(
    ['h'],
    {'base': 'exact 0', 'a': 'exact 0', 'b': 'exact 0'},
    note='the adapter is added in weight space',
)
def low_rank_adapter_in_weight_space():
    parts = {'base': weight(I, H), 'a': weight(I, 2), 'b': weight(2, H)}
    return leaky(lambda m, x: x @ (m.base.value + m.a.value @ m.b.value), **parts), (
        array(B, I),
    )


@case(['h'], {'a': 'instantaneous', 'b': 'exact 0'}, note='x A fans out through B')
def low_rank_in_two_steps():
    return leaky(
        lambda m, x: (x @ m.a.value) @ m.b.value, a=weight(I, 2), b=weight(2, H)
    ), (array(B, I),)


@case(
    ['h'],
    {
        'lora/base_module/weight/weight': 'exact 0',
        'lora/base_module/weight/bias': 'exact 0',
        'lora/weight/lora_a': 'instantaneous',
        'lora/weight/lora_b': 'exact 0',
    },
    note='brainstate applies the adapter in two steps',
)
def lora_layer():
    lora = nn.LoRA(I, 2, H, base_module=nn.Linear(I, H))
    return leaky(lambda m, x: m.lora(x), lora=lora), (array(B, I),)


@case(
    ['h'],
    {
        'p/in/w': 'exact 0',
        'p/in/b': 'exact 0',
        'p/gain/0': 'exact 0',
        'p/gain/1': 'exact',
    },
)
def nested_pytree_of_weights():
    def step(m, x):
        p = m.p.value
        m.h.value = 0.9 * m.h.value + p['gain'][0] * (x @ p['in']['w'] + p['in']['b'])
        return p['gain'][1] * m.h.value

    p = {'in': {'w': array(I, H), 'b': array(H)}, 'gain': (array(H), array(H))}
    return Step(step, p=brainstate.ParamState(p), h=hidden(B, H)), (array(B, I),)


@case(['h'], {'layer/weight': 'exact 0'})
def signed_linear_layer():
    layer = nn.SignedWLinear(I, H, w_sign=jnp.asarray(SIGNS))
    return leaky(lambda m, x: m.layer(x), layer=layer), (array(B, I),)


@case(
    ['h'],
    {
        'layer/weight/weight': 'exact 0',
        'layer/weight/gain': 'exact 0',
        'layer/weight/bias': 'exact 0',
    },
    note='standardised over the inputs of each unit, in weight space',
)
def standardised_linear_layer():
    layer = nn.ScaledWSLinear(I, H)
    return leaky(lambda m, x: m.layer(x), layer=layer), (array(B, I),)


@case(['h'], {'layer/weight/weight': 'exact 0'})
def one_to_one_layer():
    return leaky(lambda m, x: m.layer(x), layer=nn.OneToOne(H)), (array(B, H),)


@case(
    ['h'], {'w/val': 'exact 0'}, note='a brainstate Param with a transform of its own'
)
def param_module_with_transform():
    w = nn.Param(jnp.abs(array(I, H)) + 0.1, t=nn.SoftplusT(0.0))
    return leaky(lambda m, x: x @ m.w.value(), w=w), (array(B, I),)


# sparse weights: rows of inputs, columns of units, five connections
CONNECTIONS = np.array([0, 2, 1, 3, 0], np.int32), np.array([0, 2, 4, 5], np.int32)


@case(['h'], {'data': 'exact 0'})
def sparse_csr():
    def op(m, x):
        return x @ brainevent.CSR((m.data.value, *CONNECTIONS), shape=(I, H))

    return leaky(op, data=weight(5)), (array(B, I),)


@case(['h'], {'data': 'exact 0'})
def sparse_csr_without_batch():
    def op(m, x):
        return x @ brainevent.CSR((m.data.value, *CONNECTIONS), shape=(I, H))

    return leaky(op, shape=(H,), data=weight(5)), (array(I),)


@case(['h'], {'layer/weight/weight': 'exact 0'})
def sparse_linear_layer():
    layer = nn.SparseLinear(brainevent.CSR((array(5), *CONNECTIONS), shape=(I, H)))
    return leaky(lambda m, x: m.layer(x), layer=layer), (array(B, I),)


@case(['h'], {'w': 'local 0', 'data': 'local 0'})
def sparse_recurrent():
    indices, indptr = (
        np.array([1, 3, 0, 2, 1], np.int32),
        np.array([0, 2, 3, 4, 5], np.int32),
    )

    def op(m, x):
        return x @ m.w.value + m.h.value @ brainevent.CSR(
            (m.data.value, indices, indptr), shape=(H, H)
        )

    return leaky(op, w=weight(I, H), data=weight(5)), (array(B, I),)


@case(
    ['h'],
    {'values': 'exact 0'},
    note='the same five connections, scattered into a dense matrix',
)
def sparse_by_scatter():
    rows, columns = np.array([0, 0, 1, 1, 2]), CONNECTIONS[0]

    def op(m, x):
        return x @ jnp.zeros((I, H)).at[rows, columns].set(m.values.value)

    return leaky(op, values=weight(5)), (array(B, I),)


# one parameter, several uses


@case(
    ['h'],
    {'w': 'exact 0'},
    note='encoder and transposed decoder: the decoder is a read-out',
)
def tied_encoder_decoder():
    def step(m, x):
        m.h.value = 0.9 * m.h.value + x @ m.w.value
        return jnp.tanh(m.h.value) @ m.w.value.T

    return Step(step, w=weight(I, H), h=hidden(B, H)), (array(B, I),)


@case(['h'], {'w': 'local 0', 'r': 'local 0'})
def tied_recurrence_and_readout():
    def step(m, x):
        m.h.value = 0.8 * m.h.value + jnp.tanh(x @ m.w.value + m.h.value @ m.r.value)
        return m.h.value @ m.r.value

    return Step(step, w=weight(I, H), r=weight(H, H), h=hidden(B, H)), (array(B, I),)


@case(['h'], {'w': 'local 0', 'r': 'local 0'}, note='symmetric recurrence R + R^T')
def symmetric_recurrence():
    def op(m, x):
        return x @ m.w.value + m.h.value @ (m.r.value + m.r.value.T)

    return leaky(op, w=weight(I, H), r=weight(H, H)), (array(B, I),)


@case(['h'], {'w': 'exact 0'}, note='two inputs through one matrix')
def one_weight_two_sites():
    return leaky(
        lambda m, x, y: x @ m.w.value * jnp.cos(y @ m.w.value), w=weight(I, H)
    ), (array(B, I), array(B, I))


@case(
    ['h', 'g'], {'w': 'exact 0 1'}, note='one result feeds two groups that never meet'
)
def one_result_two_groups():
    def step(m, x):
        y = x @ m.w.value
        m.h.value = 0.9 * m.h.value + y
        m.g.value = 0.5 * m.g.value + y[:, ::-1]
        return m.h.value.sum(axis=-1) * m.g.value.sum(axis=-1)

    return Step(step, w=weight(I, H), h=hidden(B, H), g=hidden(B, H)), (array(B, I),)


@case(
    ['V', 'p'],
    {'w': 'exact 0 1'},
    note='one fused matrix, split over populations of different sizes',
)
def one_weight_split_over_two_groups():
    def step(m, x):
        y = x @ m.w.value
        m.V.value = 0.9 * m.V.value + y[:, :H]
        m.p.value = 0.5 * m.p.value + y[:, H:]
        return m.V.value.sum(axis=-1) * m.p.value.sum(axis=-1)

    return Step(step, w=weight(I, H + 5), V=hidden(B, H), p=hidden(B, 5)), (
        array(B, I),
    )


@case(
    ['V', 'a'],
    {'scale': 'exact 0 1', 'w': 'exact 0', 'v': 'exact 1'},
    note='one scalar, two populations',
)
def one_scalar_two_groups():
    def step(m, x):
        m.V.value = 0.9 * m.V.value + m.scale.value * (x @ m.w.value)
        m.a.value = m.scale.value * m.a.value + x @ m.v.value
        return m.V.value.sum() + m.a.value.sum()

    parts = {
        'scale': weight(mean=0.7),
        'w': weight(I, H),
        'v': weight(I, 5),
        'V': hidden(B, H),
        'a': hidden(B, 5),
    }
    return Step(step, **parts), (array(B, I),)


# gains and biases


@case(['h'], {'w': 'exact 0', 'gain': 'exact 0', 'bias': 'exact 0'})
def gain_and_bias_per_unit():
    def op(m, x):
        return m.gain.value * (x @ m.w.value) + m.bias.value

    return leaky(op, w=weight(I, H), gain=weight(H), bias=weight(H)), (array(B, I),)


@case(['h'], {'w': 'exact 0', 'gain': 'exact 0', 'bias': 'exact 0'})
def gain_and_bias_shared():
    def op(m, x):
        return m.gain.value * (x @ m.w.value) + m.bias.value

    return leaky(op, w=weight(I, H), gain=weight(mean=1.0), bias=weight()), (
        array(B, I),
    )


@case(
    ['h'],
    {'w': 'exact 0', 'gain': 'instantaneous'},
    note='a gain before the matmul fans out through it',
)
def gain_on_the_input():
    return leaky(
        lambda m, x: (m.gain.value * x) @ m.w.value, w=weight(I, H), gain=weight(I)
    ), (array(B, I),)


@case(
    ['h'],
    {'w': 'exact 0', 'gain': 'exact 0'},
    note='the same gain, folded into the weight',
)
def gain_on_the_weight():
    return leaky(
        lambda m, x: x @ (m.gain.value[:, None] * m.w.value),
        w=weight(I, H),
        gain=weight(I),
    ), (array(B, I),)


@case(
    ['h'],
    {'w1': 'instantaneous', 'b1': 'instantaneous', 'w2': 'exact 0', 'b2': 'exact 0'},
)
def mlp_before_state():
    def op(m, x):
        return jax.nn.relu(x @ m.w1.value + m.b1.value) @ m.w2.value + m.b2.value

    return leaky(
        op, w1=weight(I, 5), b1=weight(5, mean=1.0), w2=weight(5, H), b2=weight(H)
    ), (array(B, I),)


# parameters that teach nothing, or only the read-out


@case(['h'], {'w': 'exact 0', 'out': 'exact', 'bias': 'exact'})
def readout_only():
    def step(m, x):
        m.h.value = 0.9 * m.h.value + x @ m.w.value
        return m.h.value @ m.out.value + m.bias.value

    return Step(
        step, w=weight(I, H), out=weight(H, 5), bias=weight(5), h=hidden(B, H)
    ), (array(B, I),)


@case(['h'], {'w': 'exact 0', 'unused': 'none'})
def unused_parameter():
    return leaky(lambda m, x: x @ m.w.value, w=weight(I, H), unused=weight(5)), (
        array(B, I),
    )


@case(
    ['h'],
    {'w': 'exact 0', 'stopped': 'none', 'compared': 'none', 'rounded': 'none'},
    note='stop_gradient, a comparison and a floor let no derivative through',
)
def parameters_without_derivative():
    def op(m, x):
        y = x @ m.w.value + x @ jax.lax.stop_gradient(m.stopped.value)
        return jnp.where(y > m.compared.value, y, 0.5 * y) * jnp.floor(
            3.0 * m.rounded.value
        )

    parts = {
        'w': weight(I, H),
        'stopped': weight(I, H),
        'compared': weight(H),
        'rounded': weight(H),
    }
    return leaky(op, **parts), (array(B, I),)


@case(
    ['h'],
    {'w': 'exact 0', 'v': 'exact 0', 'b': 'exact 0'},
    note='a marked product beside plain ones',
)
def marked_and_plain():
    def op(m, x):
        return braintrace.matmul(x, m.w.value) + x @ m.v.value + m.b.value

    return leaky(op, w=weight(I, H), v=weight(I, H), b=weight(H)), (array(B, I),)
