"""How states are laid out, chained, stacked, delayed and read."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .base import B, H, I, Step, array, case, cell, hidden, leaky, other, spike, weight

nn = brainstate.nn

# layouts of a state


@case(['h'], {'w': 'exact 0'}, note='units first, batch last')
def batch_last():
    return leaky(lambda m, x: m.w.value @ x, shape=(H, B), w=weight(H, I)), (
        array(I, B),
    )


@case(['V'], {'w': 'local 0', 'r': 'local 0'})
def no_batch():
    def step(m, x):
        fired = spike(m.V.value - 0.1)
        m.V.value = 0.9 * m.V.value + m.w.value @ x + m.r.value @ fired
        return fired * m.V.value

    return Step(step, w=weight(H, I), r=weight(H, H), V=hidden(H)), (array(I),)


@case(
    ['h'],
    {'w': 'exact 0', 'tau': 'exact 0'},
    note='a sheet of units; one time constant per row',
)
def sheet_of_units():
    def step(m, x):
        m.h.value = jax.nn.sigmoid(m.tau.value) * m.h.value + jnp.einsum(
            'bi,ihw->bhw', x, m.w.value
        )
        return m.h.value

    return Step(step, w=weight(I, H, 5), tau=weight(H, 1), h=hidden(B, H, 5)), (
        array(B, I),
    )


@case(['h'], {'w': 'exact 0', 'decay': 'exact 0'}, note='one number, no axes at all')
def scalar_state():
    def step(m, x):
        m.h.value = jax.nn.sigmoid(m.decay.value) * m.h.value + x @ m.w.value
        return jnp.tanh(m.h.value)

    return Step(step, w=weight(I), decay=weight(), h=hidden()), (array(I),)


@case(['h'], {'w': 'exact 0'}, note='flattened, squared, folded back: nothing moved')
def reshaped_state():
    def step(m, x):
        flat = m.h.value.reshape(B, H * 5)
        m.h.value = (0.9 * flat - 0.01 * flat**2 + x @ m.w.value).reshape(B, H, 5)
        return m.h.value

    return Step(step, w=weight(I, H * 5), h=hidden(B, H, 5)), (array(B, I),)


@case(['h'], {'w': 'exact 0'}, note='computed with the batch last and turned back')
def transposed_and_back():
    def step(m, x):
        m.h.value = (0.9 * jnp.tanh(m.h.value.T) + (x @ m.w.value).T).T
        return m.h.value

    return Step(step, w=weight(I, H), h=hidden(B, H)), (array(B, I),)


@case(['h'], {'w': 'exact 0'}, note='only the first two units are driven')
def partly_driven_state():
    def step(m, x):
        h = 0.9 * m.h.value
        m.h.value = jnp.concatenate([h[:, :2] + x @ m.w.value, h[:, 2:]], axis=-1)
        return m.h.value

    return Step(step, w=weight(I, 2), h=hidden(B, H)), (array(B, I),)


@case(['h'], {'w': 'exact 0'}, note='units 3 and 0 are driven by an indexed update')
def indexed_update():
    def step(m, x):
        m.h.value = (0.9 * m.h.value).at[:, np.array([3, 0])].add(x @ m.w.value)
        return m.h.value

    return Step(step, w=weight(I, 2), h=hidden(B, H)), (array(B, I),)


@case(['h'], {'w': 'exact 0'})
def padded_result():
    return leaky(
        lambda m, x: jnp.pad(x @ m.w.value, ((0, 0), (1, 2))),
        shape=(B, H + 3),
        w=weight(I, H),
    ), (array(B, I),)


# positions that move


@case(
    ['h'],
    {'w': 'instantaneous 0'},
    note='every unit hands its value to the next: nothing stays',
)
def rolled_state():
    def step(m, x):
        m.h.value = 0.9 * jnp.roll(m.h.value, 1, axis=-1) + x @ m.w.value
        return m.h.value

    return Step(step, w=weight(I, H), h=hidden(B, H)), (array(B, I),)


@case(
    ['h'],
    {'w': 'local 0', 'side': 'local 0'},
    note='a ring of units: each keeps some, and reads its neighbour',
)
def ring_of_units():
    def step(m, x):
        m.h.value = (
            0.6 * m.h.value
            + m.side.value * jnp.roll(m.h.value, 1, axis=-1)
            + x @ m.w.value
        )
        return m.h.value

    return Step(step, w=weight(I, H), side=weight(H), h=hidden(B, H)), (array(B, I),)


ORDER = np.array([2, 0, 3, 1])  # no unit stays where it is


@case(['h'], {'w': 'instantaneous 0'})
def permuted_state():
    def step(m, x):
        m.h.value = 0.9 * m.h.value[:, ORDER] + x @ m.w.value
        return m.h.value

    return Step(step, w=weight(I, H), h=hidden(B, H)), (array(B, I),)


@case(
    ['h'], {'w': 'exact 0'}, note='the result of the op is permuted, the state is not'
)
def permuted_result():
    return leaky(lambda m, x: (x @ m.w.value)[:, ORDER], w=weight(I, H)), (array(B, I),)


@case(['h'], {'w': 'exact 0'})
def flipped_result():
    return leaky(lambda m, x: jnp.flip(x @ m.w.value, axis=-1), w=weight(I, H)), (
        array(B, I),
    )


@case(['h'], {'w': 'exact 0'}, note='each row of a square state is written as a column')
def transposed_result():
    return leaky(lambda m, x: (x @ m.w.value).T, shape=(H, H), w=weight(I, H)), (
        array(H, I),
    )


@case(['h'], {'w': 'local 0'}, note='a square state leaks into its transpose')
def transposed_state():
    def step(m, x):
        h = m.h.value
        m.h.value = (
            0.6 * h
            + 0.3 * jnp.swapaxes(h, 1, 2)
            + jnp.einsum('bi,ijk->bjk', x, m.w.value)
        )
        return m.h.value

    return Step(step, w=weight(I, H, H), h=hidden(B, H, H)), (array(B, I),)


@case(
    ['h'],
    {'w': 'instantaneous 0'},
    note='a delay line in one state: every value moves on',
)
def shift_register():
    def step(m, x):
        m.h.value = jnp.concatenate([x @ m.w.value, m.h.value[:, :-1]], axis=-1)
        return m.h.value

    return Step(step, w=weight(I, 1), h=hidden(B, H)), (array(B, I),)


@case(['h'], {'w': 'exact 0'}, note='one result per unit, read at five places')
def broadcast_result():
    return leaky(
        lambda m, x: (x @ m.w.value)[..., None], shape=(B, H, 5), w=weight(I, H)
    ), (array(B, I),)


@case(['h'], {'w': 'local 0'}, note='centred over the batch: samples meet in the mean')
def centred_over_batch():
    def op(m, x):
        y = x @ m.w.value
        return y - y.mean(axis=0)

    return leaky(op, w=weight(I, H)), (array(B, I),)


@case(
    ['h'],
    {'w': 'local 0'},
    note='two variables per unit side by side in one array are two positions',
)
def two_halves_of_one_state():
    def step(m, x):
        V, a = jnp.split(m.h.value, 2, axis=-1)
        m.h.value = jnp.concatenate(
            [0.9 * V - 0.2 * a + x @ m.w.value, 0.95 * a + 0.1 * V], axis=-1
        )
        return m.h.value

    return Step(step, w=weight(I, H), h=hidden(B, 2 * H)), (array(B, I),)


@case(
    ['h'],
    {'w': 'instantaneous 0'},
    note='circular convolution of the state by Fourier transform',
)
def fourier_mixing():
    kernel = jnp.fft.rfft(array(H))

    def step(m, x):
        m.h.value = jnp.fft.irfft(jnp.fft.rfft(m.h.value) * kernel, H) + x @ m.w.value
        return m.h.value

    return Step(step, w=weight(I, H), h=hidden(B, H)), (array(B, I),)


@case(
    ['V'],
    {'w': 'instantaneous'},
    note='an implicit step along a cable: the solve mixes state and input alike',
)
def implicit_cable():
    matrix = (
        np.eye(H, dtype=np.float32) * 1.5
        - 0.3 * np.eye(H, k=1, dtype=np.float32)
        - 0.2 * np.eye(H, k=-1, dtype=np.float32)
    )

    def step(m, x):
        m.V.value = jnp.linalg.solve(matrix, (m.V.value + x @ m.w.value).T).T
        return m.V.value

    return Step(step, w=weight(I, H), V=hidden(B, H)), (array(B, I),)


# several states


@case(
    ['a b c'],
    {'w': 'exact 0'},
    note='a chain: each reads the old value of the one before',
)
def chain_of_states():
    def step(m, x):
        a, b = m.a.value, m.b.value
        m.a.value = 0.9 * a + x @ m.w.value
        m.b.value = 0.8 * b + jnp.tanh(a)
        m.c.value = 0.7 * m.c.value + b
        return m.c.value

    return Step(step, w=weight(I, H), a=hidden(B, H), b=hidden(B, H), c=hidden(B, H)), (
        array(B, I),
    )


@case(['a b'], {'w': 'exact 0'}, note='the two exchange places in every step')
def swapped_states():
    def step(m, x):
        m.a.value, m.b.value = m.b.value, 0.8 * m.a.value + x @ m.w.value
        return m.b.value

    return Step(step, w=weight(I, H), a=hidden(B, H), b=hidden(B, H)), (array(B, I),)


@case(
    ['V copy'],
    {'w': 'exact 0'},
    note='both are given the same new value; the copy is never read',
)
def same_value_twice():
    def step(m, x):
        m.V.value = m.copy.value = 0.9 * m.V.value + x @ m.w.value
        return jnp.tanh(m.copy.value)

    return Step(step, w=weight(I, H), V=hidden(B, H), copy=hidden(B, H)), (array(B, I),)


@case(['V k'], {'w': 'exact 0'}, note='k is read and written back as it was')
def state_passed_through():
    def step(m, x):
        k = m.k.value
        m.V.value = 0.9 * m.V.value + k * (x @ m.w.value)
        m.k.value = k
        return m.V.value

    return Step(step, w=weight(I, H), V=hidden(B, H), k=hidden(B, H)), (array(B, I),)


@case(
    ['context', 'V'],
    {'w': 'exact 1', 'v': 'exact 1'},
    note='of another size than V, hence a group of its own',
)
def context_passed_through():
    def step(m, x):
        m.V.value = 0.9 * m.V.value + x @ m.w.value + m.context.value @ m.v.value
        m.context.value = m.context.value
        return m.V.value

    return Step(
        step, w=weight(I, H), v=weight(5, H), context=hidden(B, 5), V=hidden(B, H)
    ), (array(B, I),)


@case(
    ['h'],
    {'w': 'exact 0'},
    note='nobody reads the old value: there is no time in this model',
)
def state_never_read():
    def step(m, x):
        m.h.value = jnp.tanh(x @ m.w.value)
        return m.h.value

    return Step(step, w=weight(I, H), h=hidden(B, H)), (array(B, I),)


@case(
    ['V', 'rate'],
    {'w': 'exact 0', 'out': 'exact 1'},
    note='the rates are stored, and never read',
)
def readout_stored_never_read():
    def step(m, x):
        m.V.value = 0.9 * m.V.value + x @ m.w.value
        m.rate.value = jnp.tanh(m.V.value) @ m.out.value
        return m.rate.value

    return Step(
        step, w=weight(I, H), out=weight(H, 5), V=hidden(B, H), rate=hidden(B, 5)
    ), (array(B, I),)


@case(
    ['V', 'r'],
    {'w': 'local 0', 'out': 'exact 1', 'b': 'exact 1'},
    note='the read-out leaks, so it is a layer',
)
def leaky_readout():
    def step(m, x):
        m.V.value = 0.9 * m.V.value + x @ m.w.value
        m.r.value = 0.8 * m.r.value + spike(m.V.value - 0.1) @ m.out.value + m.b.value
        return m.r.value

    parts = {
        'w': weight(I, H),
        'out': weight(H, 5),
        'b': weight(5),
        'V': hidden(B, H),
        'r': hidden(B, 5),
    }
    return Step(step, **parts), (array(B, I),)


@case(
    ['p', 'q'],
    {'w': 'local 0', 'pq': 'local 1', 'qp': 'local 0'},
    note='one shape, but they meet only by matmul',
)
def two_populations_of_one_size():
    def step(m, x):
        p, q = m.p.value, m.q.value
        m.p.value = 0.9 * p + jnp.tanh(x @ m.w.value + q @ m.qp.value)
        m.q.value = 0.8 * q + jnp.tanh(p @ m.pq.value)
        return m.p.value * m.q.value

    parts = {
        'w': weight(I, H),
        'pq': weight(H, H),
        'qp': weight(H, H),
        'p': hidden(B, H),
        'q': hidden(B, H),
    }
    return Step(step, **parts), (array(B, I),)


@case(
    ['V', 'theta'],
    {'w': 'local 0', 'rate': 'none 1'},
    note='one threshold per unit, shared by the batch: its shape is not that of V',
)
def threshold_shared_by_batch():
    def step(m, x):
        m.V.value = 0.9 * m.V.value + x @ m.w.value - m.theta.value
        m.theta.value = 0.99 * m.theta.value + m.rate.value * spike(
            m.V.value - 0.1
        ).mean(axis=0)
        return spike(m.V.value - 0.1)

    return Step(
        step, w=weight(I, H), rate=weight(H), V=hidden(B, H), theta=hidden(H)
    ), (array(B, I),)


# what is read, and when


@case(
    ['V'],
    {'w': 'exact 0', 'out': 'exact'},
    note='the output is taken from the old membrane',
)
def output_from_old_state():
    def step(m, x):
        output = spike(m.V.value - 0.1) @ m.out.value
        m.V.value = 0.9 * m.V.value + x @ m.w.value
        return output

    return Step(step, w=weight(I, H), out=weight(H, 5), V=hidden(B, H)), (array(B, I),)


@case(
    ['h'],
    {'w': 'exact 0'},
    note='one step of memory: only the output reads the old value',
)
def output_one_step_late():
    def step(m, x):
        output = m.h.value
        m.h.value = jnp.tanh(x @ m.w.value)
        return output

    return Step(step, w=weight(I, H), h=hidden(B, H)), (array(B, I),)


@case(
    ['h'],
    {'w': 'local 0', 'r': 'local 0'},
    note='no transition, but the output reads the old value',
)
def vanilla_output_from_old_state():
    def step(m, x):
        output = jnp.sin(m.h.value)
        m.h.value = jnp.tanh(x @ m.w.value + m.h.value @ m.r.value)
        return output

    return Step(step, w=weight(I, H), r=weight(H, H), h=hidden(B, H)), (array(B, I),)


@case(
    ['h'],
    {'w': 'instantaneous', 'v': 'exact 0'},
    note='what w leaves behind is kept in no hidden state',
)
def memory_in_short_term_state():
    def step(m, x):
        m.h.value = 0.9 * m.h.value + x @ m.v.value
        m.o.value = 0.9 * m.o.value + x @ m.w.value
        return m.o.value + m.h.value

    return Step(
        step, w=weight(I, H), v=weight(I, H), o=other(array(B, H)), h=hidden(B, H)
    ), (array(B, I),)


@case(
    ['V'],
    {'w': 'local 0'},
    note='the running mean is a live state of its own, fed by the op',
)
def running_mean_of_result():
    def step(m, x):
        y = x @ m.w.value
        m.V.value = 0.9 * m.V.value + y - m.mean.value
        m.mean.value = 0.9 * m.mean.value + 0.1 * y.mean(axis=0)
        return m.V.value

    return Step(step, w=weight(I, H), mean=other(array(H)), V=hidden(B, H)), (
        array(B, I),
    )


@case(
    ['h'],
    {'w': 'local 0', 'norm/weight/scale': 'exact 0', 'norm/weight/bias': 'exact 0'},
)
def batch_norm_on_input():
    def op(m, x):
        with brainstate.environ.context(fit=True):
            return m.norm(x @ m.w.value)

    return leaky(op, shape=(5, H), w=weight(I, H), norm=nn.BatchNorm0d((H,))), (
        array(5, I),
    )


# delays


def ring(m, value):
    """Write `value`, give back what was written when the buffer was here last."""
    at, buffer = m.at.value, m.buffer.value
    m.buffer.value = jax.lax.dynamic_update_index_in_dim(buffer, value, at, 0)
    m.at.value = (at + 1) % buffer.shape[0]
    return jax.lax.dynamic_index_in_dim(buffer, at, keepdims=False)


def ring_of(*shape):
    return {'buffer': other(array(*shape)), 'at': other(jnp.array(1, jnp.int32))}


@case(
    ['V'],
    {'w': 'local 0', 'r': 'local 0'},
    note='spikes come back three steps later through a ring buffer',
)
def delayed_recurrence():
    def step(m, x):
        m.V.value = (
            0.9 * m.V.value
            + x @ m.w.value
            + ring(m, spike(m.V.value - 0.1)) @ m.r.value
        )
        return spike(m.V.value - 0.1)

    return Step(
        step, w=weight(I, H), r=weight(H, H), V=hidden(B, H), **ring_of(3, B, H)
    ), (array(B, I),)


@case(
    ['V'],
    {'w': 'exact 0'},
    note='the delay sits before the weights: no parameter reaches it',
)
def delayed_input():
    def step(m, x):
        m.V.value = 0.9 * m.V.value + ring(m, x) @ m.w.value
        return m.V.value

    return Step(step, w=weight(I, H), V=hidden(B, H), **ring_of(5, B, I)), (
        array(B, I),
    )


@case(
    ['V'],
    {'w': 'none', 'gain': 'exact 0'},
    note='the delay sits between weights and membrane',
)
def delayed_result():
    def step(m, x):
        m.V.value = 0.9 * m.V.value + m.gain.value * ring(m, x @ m.w.value)
        return m.V.value

    return Step(
        step, w=weight(I, H), gain=weight(H), V=hidden(B, H), **ring_of(3, B, H)
    ), (array(B, I),)


@case(['V'], {'w': 'local 0', 'r': 'local 0'})
def brainstate_delay():
    def step(m, x):
        m.V.value = (
            0.9 * m.V.value + x @ m.w.value + m.delay.retrieve_at_step(2) @ m.r.value
        )
        m.delay.update(spike(m.V.value - 0.1))
        return spike(m.V.value - 0.1)

    with brainstate.environ.context(dt=1.0):
        delay = nn.Delay(jnp.zeros((B, H)), time=3.0)
        delay.init_state()
    delay.history.value = array(*delay.history.value.shape)
    return Step(step, w=weight(I, H), r=weight(H, H), V=hidden(B, H), delay=delay), (
        array(B, I),
    )


# stacks


class Layer(nn.Module):
    """Leaky units driven by a matmul, which give spikes."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.w = weight(n_in, n_out)
        self.V = hidden(B, n_out)

    def update(self, x):
        self.V.value = 0.9 * self.V.value + x @ self.w.value
        return spike(self.V.value + 0.2)


class OneToOne(nn.Module):
    """Leaky units, each driven by the input of its own index."""

    def __init__(self, n):
        super().__init__()
        self.g = weight(n)
        self.V = hidden(B, n)

    def update(self, x):
        self.V.value = 0.8 * self.V.value + self.g.value * x
        return spike(self.V.value - 0.1)


@case(['layers/0/V', 'layers/1/V'], {'layers/0/w': 'local 0', 'layers/1/w': 'exact 1'})
def stack_in_list():
    return Step(
        lambda m, x: m.layers[1](m.layers[0](x)), layers=[Layer(I, H), Layer(H, 5)]
    ), (array(B, I),)


@case(['lower/V', 'upper/V'], {'lower/w': 'local 0', 'upper/w': 'exact 1'})
def stack_with_names():
    return Step(
        lambda m, x: m.upper(m.lower(x)), lower=Layer(I, H), upper=Layer(H, H)
    ), (array(B, I),)


@case(
    ['net/layers/1/h', 'net/layers/3/h'],
    {
        'net/layers/0/weight/weight': 'instantaneous',
        'net/layers/0/weight/bias': 'instantaneous',
        'net/layers/1/Wrz/weight/weight': 'local 0',
        'net/layers/1/Wrz/weight/bias': 'local 0',
        'net/layers/1/Wh/weight/weight': 'local 0',
        'net/layers/1/Wh/weight/bias': 'local 0',
        'net/layers/3/Wf/weight/weight': 'local 1',
        'net/layers/3/Wf/weight/bias': 'local 1',
        'net/layers/3/Wh/weight/weight': 'local 1',
        'net/layers/3/Wh/weight/bias': 'local 1',
        'net/layers/4/weight/weight': 'exact',
        'net/layers/4/weight/bias': 'exact',
    },
    note='a linear layer before a recurrent cell fans out through the weights of the cell',
)
def stack_by_sequential():
    lower, upper = cell(nn.GRUCell, 5, H, batch=B), cell(nn.MGUCell, H, 6, batch=B)
    net = nn.Sequential(nn.Linear(I, 5), lower, jnp.tanh, upper, nn.Linear(6, 7))
    return Step(lambda m, x: m.net(x), net=net), (array(B, I),)


@case(
    ['layers/0/V', 'layers/1/V', 'layers/2/V'],
    {
        'layers/0/w': 'local 0',
        'layers/1/w': 'local 1',
        'layers/2/w': 'local 2',
        'down': 'instantaneous',
        'skip': 'local 2',
    },
    note='the top feeds back through the weights of the bottom, the bottom skips to the top',
)
def stack_with_skip_and_feedback():
    def step(m, x):
        bottom, middle, top = m.layers
        first = bottom(
            jnp.concatenate([x, jnp.tanh(top.V.value) @ m.down.value], axis=-1)
        )
        top.V.value = top.V.value + first @ m.skip.value
        return top(middle(first))

    layers = [Layer(I + H, H), Layer(H, H), Layer(H, H)]
    return Step(step, layers=layers, down=weight(H, H), skip=weight(H, H)), (
        array(B, I),
    )


@case(
    ['layers/0/V', 'layers/1/V', 'layers/2/V'],
    {'layers/0/w': 'local 0', 'layers/1/w': 'local 1', 'layers/2/w': 'exact 2'},
    note='residual stream of one width: layers of a list are never one group',
)
def stack_with_residuals():
    def step(m, x):
        for layer in m.layers:
            x = x + layer(x)
        return x

    return Step(step, layers=[Layer(H, H) for _ in range(3)]), (array(B, H),)


@case(
    ['lower/V upper/V'],
    {'lower/w': 'exact 0', 'upper/g': 'exact 0'},
    note='unit k drives unit k only: with names, one group of two states',
)
def one_to_one_stack_with_names():
    return Step(
        lambda m, x: m.upper(m.lower(x)), lower=Layer(I, H), upper=OneToOne(H)
    ), (array(B, I),)


@case(
    ['layers/0/V', 'layers/1/V'],
    {'layers/0/w': 'local 0', 'layers/1/g': 'exact 1'},
    note='the same stack in a list: the integer key keeps the layers apart',
)
def one_to_one_stack_in_list():
    return Step(
        lambda m, x: m.layers[1](m.layers[0](x)), layers=[Layer(I, H), OneToOne(H)]
    ), (array(B, I),)


@case(
    ['encoder/V', 'left/V', 'right/V'],
    {'encoder/w': 'local 0', 'left/w': 'exact 1', 'right/w': 'exact 2'},
    note='two heads on one encoder',
)
def stack_with_two_heads():
    def step(m, x):
        features = m.encoder(x)
        return m.left(features), m.right(features)

    return Step(step, encoder=Layer(I, H), left=Layer(H, 5), right=Layer(H, 6)), (
        array(B, I),
    )


# what else a state may be


@case(
    ['h'],
    {'w': 'exact 0', 'start': 'exact 0'},
    note='the first step starts from a parameter',
)
def learnable_initial_state():
    def step(m, x):
        h = jnp.where(m.count.value == 0, m.start.value, m.h.value)
        m.count.value = m.count.value + 1
        m.h.value = 0.9 * h + x @ m.w.value
        return m.h.value

    return Step(
        step, w=weight(I, H), start=weight(H), h=hidden(B, H), count=other(jnp.int32(0))
    ), (array(B, I),)


@case(
    ['h'],
    {'w': 'exact 0', 'v': 'exact 0'},
    note='the second value counts, made from the first',
)
def state_written_twice():
    def step(m, x):
        m.h.value = 0.9 * m.h.value + x @ m.w.value
        m.h.value = jnp.tanh(m.h.value) + m.v.value
        return m.h.value

    return Step(step, w=weight(I, H), v=weight(H), h=hidden(B, H)), (array(B, I),)


@case(['h'], {'w': 'exact 0', 'v': 'exact 0'}, note='named arrays in and out')
def pytrees_in_and_out():
    def step(m, inputs):
        left, (right, gain) = inputs['left'], inputs['rest']
        m.h.value = 0.9 * m.h.value + gain * (left @ m.w.value + right @ m.v.value)
        return {'h': m.h.value, 'parts': [m.h.value.sum(), (m.h.value**2,)]}

    inputs = {'left': array(B, I), 'rest': (array(B, 2), array())}
    return Step(step, w=weight(I, H), v=weight(2, H), h=hidden(B, H)), (inputs,)


@case(['h'], {'w': 'exact 0'}, note='columns first')
def reshaped_in_column_order():
    def step(m, x):
        y = (x @ m.w.value).reshape(H, B, order='F')
        m.h.value = 0.9 * m.h.value + jnp.tanh(y)
        return m.h.value

    return Step(step, w=weight(I, H), h=hidden(H, B)), (array(B, I),)


@case(
    ['V', 'buffer'],
    {'w': 'local 0'},
    note='the places of a hidden buffer are positions of their own',
)
def ring_buffer_of_hidden_states():
    def step(m, x):
        late = jax.lax.dynamic_index_in_dim(
            m.buffer.value, (m.at.value + 1) % 3, keepdims=False
        )
        m.V.value = 0.9 * m.V.value + x @ m.w.value + 0.3 * late
        m.buffer.value = jax.lax.dynamic_update_index_in_dim(
            m.buffer.value, m.V.value, m.at.value % 3, 0
        )
        m.at.value = m.at.value + 1
        return m.V.value

    return Step(
        step,
        w=weight(I, H),
        V=hidden(B, H),
        buffer=hidden(3, B, H),
        at=other(jnp.int32(0)),
    ), (array(B, I),)


@case(['h', 'nothing'], {'w': 'exact 0'}, note='a state without elements')
def state_of_size_zero():
    def step(m, x):
        y = x @ m.w.value
        m.h.value = 0.9 * m.h.value + y
        m.nothing.value = 0.9 * m.nothing.value + y[:, :0]
        return m.h.value

    return Step(step, w=weight(I, H), h=hidden(B, H), nothing=hidden(B, 0)), (
        array(B, I),
    )


@case(
    ['h', 'k'],
    {'w': 'exact 0'},
    note='a state that is always set to the same value, seen through weights',
)
def state_set_to_a_constant():
    def step(m, x):
        m.k.value = jnp.full((B, I), 0.3)
        m.h.value = 0.9 * m.h.value + m.k.value @ m.w.value + x.sum()
        return m.h.value

    return Step(step, w=weight(I, H), h=hidden(B, H), k=hidden(B, I)), (array(B, I),)


@case(
    ['h'],
    {'w': 'exact 0'},
    note='a trace of the inputs, not hidden, drives the state beside the weights',
)
def short_term_state_beside_the_weights():
    def step(m, x):
        m.h.value = 0.9 * m.h.value + (x @ m.w.value + m.trace.value)
        m.trace.value = 0.8 * m.trace.value + x.sum()
        return jnp.tanh(m.h.value)

    return Step(step, w=weight(I, H), h=hidden(B, H), trace=other(array(B, H))), (
        array(B, I),
    )
