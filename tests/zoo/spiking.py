"""Hand-written spiking neurons and synapses."""

import brainstate
import braintools
import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from .base import B, H, I, Step, array, case, hidden, linear, other, spike, weight

# one layer driven from outside: nothing mixes


@case(['V'], {'w': 'exact 0', 'b': 'exact 0'})
def lif_feedforward():
    def step(m, x):
        m.V.value = 0.9 * m.V.value + x @ m.w.value + m.b.value
        return spike(m.V.value - 0.1)

    return Step(step, w=weight(I, H), b=weight(H), V=hidden(B, H)), (array(B, I),)


@case(['V'], {'w': 'exact 0'})
def lif_soft_reset():
    def step(m, x):
        V = m.V.value - spike(m.V.value - 0.1)
        m.V.value = 0.9 * V + x @ m.w.value
        return spike(m.V.value - 0.1)

    return Step(step, w=weight(I, H), V=hidden(B, H)), (array(B, I),)


@case(['V'], {'w': 'exact 0'})
def lif_hard_reset():
    def step(m, x):
        V = 0.9 * m.V.value + x @ m.w.value
        fired = spike(V - 0.2)
        m.V.value = jnp.where(V > 0.2, -0.1, V) - 0.05 * stop_gradient(fired)
        return fired

    return Step(step, w=weight(I, H), V=hidden(B, H)), (array(B, I),)


@case(['V a'], {'w': 'exact 0', 'beta': 'exact 0'})
def alif_feedforward():
    def step(m, x):
        fired = spike(m.V.value - 0.1 - 0.2 * m.a.value)
        m.V.value = 0.9 * m.V.value + x @ m.w.value - fired
        m.a.value = m.beta.value * m.a.value + fired
        return spike(m.V.value - 0.1 - 0.2 * m.a.value)

    return Step(
        step,
        w=weight(I, H),
        beta=weight(H, mean=0.9, scale=0.1),
        V=hidden(B, H),
        a=hidden(B, H),
    ), (array(B, I),)


@case(['g V'], {'w': 'exact 0', 'decay': 'exact 0'})
def lif_exponential_synapse():
    def step(m, x):
        m.g.value = jax.nn.sigmoid(m.decay.value) * m.g.value + x @ m.w.value
        m.V.value = 0.9 * m.V.value + 0.5 * m.g.value  # the new g, in the same step
        return spike(m.V.value - 0.1)

    return Step(
        step, w=weight(I, H), decay=weight(H), g=hidden(B, H), V=hidden(B, H)
    ), (array(B, I),)


@case(['ge gi V'], {'we': 'exact 0', 'wi': 'exact 0'})
def lif_coba():
    def step(m, xe, xi):
        m.ge.value = 0.8 * m.ge.value + xe @ jax.nn.softplus(m.we.value)
        m.gi.value = 0.7 * m.gi.value + xi @ jax.nn.softplus(m.wi.value)
        current = m.ge.value * (3.0 - m.V.value) + m.gi.value * (-1.0 - m.V.value)
        m.V.value = 0.9 * m.V.value + 0.1 * current
        return spike(m.V.value - 0.1)

    parts = {
        'we': weight(I, H),
        'wi': weight(5, H),
        'ge': hidden(B, H),
        'gi': hidden(B, H),
        'V': hidden(B, H),
    }
    return Step(step, **parts), (array(B, I), array(B, 5))


@case(
    ['rise decay V'],
    {'w': 'exact 0'},
    note='difference of exponentials: two traces and a membrane',
)
def lif_double_exponential_synapse():
    def step(m, x):
        y = x @ m.w.value
        m.rise.value = 0.5 * m.rise.value + y
        m.decay.value = 0.9 * m.decay.value + y
        m.V.value = 0.95 * m.V.value + 0.3 * (m.decay.value - m.rise.value)
        return spike(m.V.value - 0.1)

    return Step(
        step, w=weight(I, H), rise=hidden(B, H), decay=hidden(B, H), V=hidden(B, H)
    ), (array(B, I),)


@case(['soma dendrite'], {'ws': 'exact 0', 'wd': 'exact 0', 'coupling': 'exact 0'})
def two_compartments():
    def step(m, x):
        soma, dendrite = m.soma.value, m.dendrite.value
        m.soma.value = (
            0.9 * soma + m.coupling.value * (dendrite - soma) + x @ m.ws.value
        )
        m.dendrite.value = (
            0.8 * dendrite + 0.2 * (soma - dendrite) + jnp.tanh(x @ m.wd.value)
        )
        return spike(m.soma.value - 0.1)

    parts = {
        'ws': weight(I, H),
        'wd': weight(I, H),
        'coupling': weight(H),
        'soma': hidden(B, H),
        'dendrite': hidden(B, H),
    }
    return Step(step, **parts), (array(B, I),)


@case(['V u'], {'w': 'exact 0', 'a': 'exact 0', 'd': 'exact 0'})
def izhikevich_by_hand():
    def step(m, x):
        V, u = m.V.value, m.u.value
        fired = spike(V - 0.3)
        m.V.value = (
            V + 0.1 * (0.04 * V**2 + 0.5 * V + 1.4 - u + x @ m.w.value) - 0.65 * fired
        )
        m.u.value = u + 0.1 * m.a.value * (0.2 * V - u) + m.d.value * fired
        return fired * m.V.value

    return Step(
        step, w=weight(I, H), a=weight(H), d=weight(H), V=hidden(B, H), u=hidden(B, H)
    ), (array(B, I),)


@case(
    ['V'],
    {'w': 'exact 0', 'threshold': 'exact 0', 'reset': 'exact 0'},
    note='threshold and reset act on V itself',
)
def learnable_threshold():
    def step(m, x):
        V = 0.9 * m.V.value + x @ m.w.value
        fired = spike(V - m.threshold.value)
        m.V.value = V - fired * m.reset.value
        return fired

    return Step(
        step, w=weight(I, H), threshold=weight(H), reset=weight(H), V=hidden(B, H)
    ), (array(B, I),)


@case(
    ['V'],
    {'w': 'exact 0', 'threshold': 'exact'},
    note='no reset: the threshold is part of the read-out',
)
def threshold_in_readout_only():
    def step(m, x):
        m.V.value = 0.9 * m.V.value + x @ m.w.value
        return spike(m.V.value - m.threshold.value)

    return Step(step, w=weight(I, H), threshold=weight(H), V=hidden(B, H)), (
        array(B, I),
    )


@case(
    ['V'],
    {'w': 'exact 0', 'tau': 'exact 0', 'gain': 'exact 0'},
    note='one time constant and one gain for all',
)
def scalar_time_constant():
    def step(m, x):
        decay = jnp.exp(-1.0 / jax.nn.softplus(m.tau.value))
        m.V.value = decay * m.V.value + (1 - decay) * m.gain.value * (x @ m.w.value)
        return spike(m.V.value - 0.1)

    return Step(
        step, w=weight(I, H), tau=weight(), gain=weight(mean=1.0), V=hidden(B, H)
    ), (array(B, I),)


@case(['V'], {'w': 'exact 0', 'tau': 'exact 0'})
def time_constant_per_neuron():
    def step(m, x):
        decay = jax.nn.sigmoid(m.tau.value)
        m.V.value = decay * m.V.value + (1 - decay) * (x @ m.w.value)
        return spike(m.V.value - 0.1)

    return Step(step, w=weight(I, H), tau=weight(H), V=hidden(B, H)), (array(B, I),)


# recurrent layers


@case(['V'], {'w': 'local 0', 'r': 'local 0'})
def lif_recurrent():
    def step(m, x):
        fired = spike(m.V.value - 0.1)
        m.V.value = 0.9 * m.V.value + x @ m.w.value + fired @ m.r.value - fired
        return spike(m.V.value - 0.1)

    return Step(step, w=weight(I, H), r=weight(H, H), V=hidden(B, H)), (array(B, I),)


@case(
    ['V a'],
    {
        'w': 'local 0',
        'r': 'local 0',
        'out/weight/weight': 'exact',
        'out/weight/bias': 'exact',
    },
)
def alif_recurrent():
    def step(m, x):
        fired = spike(m.V.value - 0.1 - 0.2 * m.a.value)
        m.V.value = 0.9 * m.V.value + x @ m.w.value + fired @ m.r.value - fired
        m.a.value = 0.95 * m.a.value + fired
        return m.out(spike(m.V.value - 0.1 - 0.2 * m.a.value))

    parts = {
        'w': weight(I, H),
        'r': weight(H, H),
        'out': linear(H, 5),
        'V': hidden(B, H, mean=1.0),
        'a': hidden(B, H),
    }
    return Step(step, **parts), (array(B, I),)


@case(
    ['V s'],
    {'w': 'local 0', 'r': 'local 0'},
    note='old V reaches the stored spikes position by position',
)
def stored_spikes():
    def step(m, x):
        m.V.value = (
            0.9 * m.V.value * (1 - m.s.value) + x @ m.w.value + m.s.value @ m.r.value
        )
        m.s.value = spike(m.V.value - 0.1)
        return m.s.value

    return Step(step, w=weight(I, H), r=weight(H, H), V=hidden(B, H), s=hidden(B, H)), (
        array(B, I),
    )


@case(
    ['V'],
    {'w': 'local 0', 'r': 'local 0'},
    note='the spikes are no hidden state: what they carry to the next step is cut, their reset too',
)
def stored_spikes_in_short_term_state():
    def step(m, x):
        m.V.value = 0.9 * m.V.value - m.s.value + x @ m.w.value + m.s.value @ m.r.value
        m.s.value = spike(m.V.value - 0.1)
        return m.s.value

    return Step(
        step, w=weight(I, H), r=weight(H, H), V=hidden(B, H), s=other(array(B, H))
    ), (array(B, I),)


@case(['g V'], {'w': 'local 0', 'r': 'local 0'})
def recurrent_exponential_synapse():
    def step(m, x):
        fired = spike(m.V.value - 0.5)
        m.g.value = 0.8 * m.g.value + x @ m.w.value + fired @ m.r.value
        m.V.value = 0.9 * m.V.value + m.g.value - fired
        return spike(m.V.value - 0.5)

    return Step(step, w=weight(I, H), r=weight(H, H), g=hidden(B, H), V=hidden(B, H)), (
        array(B, I),
    )


@case(
    ['E', 'P'],
    {'w': 'local 0', 'ei': 'none 1', 'ie': 'local 0'},  # no output reads P in its step
    note='excitatory and inhibitory populations of different sizes, coupled in the same step',
)
def excitation_inhibition():
    def step(m, x):
        m.E.value = (
            0.9 * m.E.value + x @ m.w.value - spike(m.P.value) @ jnp.abs(m.ie.value)
        )
        m.P.value = 0.8 * m.P.value + spike(m.E.value) @ jnp.abs(m.ei.value)
        return spike(m.E.value)

    parts = {
        'w': weight(I, H),
        'ei': weight(H, 5),
        'ie': weight(5, H),
        'E': hidden(B, H),
        'P': hidden(B, 5),
    }
    return Step(step, **parts), (array(B, I),)


@case(
    ['V'],
    {'w': 'local 0', 'g': 'local 0'},
    note='gap junctions: the mean of V, broadcast, mixes',
)
def gap_junction():
    def step(m, x):
        V = m.V.value
        m.V.value = (
            0.9 * V + m.g.value * (V.mean(axis=-1, keepdims=True) - V) + x @ m.w.value
        )
        return spike(m.V.value - 0.5)

    return Step(step, w=weight(I, H), g=weight(H), V=hidden(B, H)), (array(B, I),)


@case(['V'], {'w': 'local 0', 'inhibition': 'local 0'})
def lateral_inhibition():
    def step(m, x):
        fired = spike(m.V.value - 0.1)
        total = fired.sum(axis=-1, keepdims=True) - fired
        m.V.value = 0.9 * m.V.value + x @ m.w.value - m.inhibition.value * total
        return spike(m.V.value - 0.1)

    return Step(step, w=weight(I, H), inhibition=weight(), V=hidden(B, H)), (
        array(B, I),
    )


# other states, kept outside the trace


@case(
    ['V'],
    {'w': 'exact 0'},
    note='the counter is an integer: nothing differentiable passes it',
)
def refractory_counter_integer():
    def step(m, x):
        V = jnp.where(m.left.value > 0, m.V.value, 0.9 * m.V.value + x @ m.w.value)
        fired = spike(V - 0.2)
        m.left.value = jnp.where(V > 0.2, 2, jnp.maximum(m.left.value - 1, 0))
        m.V.value = V - fired
        return fired

    counter = other(jnp.array([[0, 1, 0, 2], [1, 0, 0, 0]], jnp.int32))
    return Step(step, w=weight(I, H), left=counter, V=hidden(B, H)), (array(B, I),)


@case(
    ['V'],
    {'w': 'exact 0'},
    note='a float counter, but V reaches it only by a comparison',
)
def refractory_counter_float():
    def step(m, x):
        free = (m.left.value <= 0.0).astype(x.dtype)
        m.V.value = 0.9 * m.V.value + free * (x @ m.w.value)
        fired = spike(m.V.value - 0.2)
        m.left.value = jnp.where(stop_gradient(fired) > 0, 3.0, m.left.value - 1.0)
        return fired

    return Step(step, w=weight(I, H), left=other(array(B, H)), V=hidden(B, H)), (
        array(B, I),
    )


@case(
    ['V'],
    {'w': 'local 0'},
    note='a differentiable trace of the spikes feeds back but is no hidden state',
)
def refractory_trace_in_short_term_state():
    def step(m, x):
        m.V.value = 0.9 * m.V.value + x @ m.w.value - m.trace.value
        m.trace.value = 0.5 * m.trace.value + spike(m.V.value - 0.2)
        return spike(m.V.value - 0.2)

    return Step(step, w=weight(I, H), trace=other(array(B, H)), V=hidden(B, H)), (
        array(B, I),
    )


@case(
    ['x', 'V'],
    {'w': 'exact 1'},
    note='a presynaptic trace is its own group; no parameter reaches it',
)
def presynaptic_trace():
    def step(m, spikes):
        m.x.value = 0.7 * m.x.value + spikes
        m.V.value = 0.9 * m.V.value + m.x.value @ m.w.value
        return spike(m.V.value - 0.5)

    return Step(step, w=weight(I, H), x=hidden(B, I), V=hidden(B, H)), (array(B, I),)


@case(
    ['u r', 'V'],
    {'use': 'local 0', 'w': 'exact 1'},
    note='short-term plasticity of the inputs, then a layer: the depression reaches V only by mixing',
)
def short_term_plasticity():
    def step(m, x):
        use = jax.nn.sigmoid(m.use.value)
        m.u.value = 0.9 * m.u.value + use * (1 - m.u.value) * x
        m.r.value = 0.95 * m.r.value + 0.05 - m.u.value * m.r.value * x
        m.V.value = 0.9 * m.V.value + (m.u.value * m.r.value * x) @ m.w.value
        return spike(m.V.value - 0.5)

    parts = {
        'use': weight(I),
        'w': weight(I, H),
        'u': hidden(B, I),
        'r': hidden(B, I),
        'V': hidden(B, H),
    }
    return Step(step, **parts), (jnp.abs(array(B, I)),)


@case(
    ['g', 'V'],
    {'w': 'local 0', 'scale': 'exact 1'},
    note='one conductance per connection, summed into the neuron: another shape, hence another group',
)
def synapse_per_connection():
    def step(m, x):
        m.g.value = 0.8 * m.g.value + x[:, :, None] * m.w.value
        m.V.value = 0.9 * m.V.value + m.scale.value * m.g.value.sum(axis=1)
        return spike(m.V.value - 0.5)

    return Step(
        step, w=weight(I, H), scale=weight(H), g=hidden(B, I, H), V=hidden(B, H)
    ), (array(B, I),)


@case(
    ['branch', 'soma'],
    {'w': 'local 0', 'reach': 'exact 1'},
    note='dendritic branches with a membrane of their own',
)
def dendrites_with_state():
    def step(m, x):
        m.branch.value = 0.8 * m.branch.value + jnp.einsum('bi,ihd->bhd', x, m.w.value)
        m.soma.value = 0.9 * m.soma.value + (
            m.reach.value * jnp.tanh(m.branch.value)
        ).sum(axis=-1)
        return spike(m.soma.value - 0.5)

    parts = {
        'w': weight(I, H, 5),
        'reach': weight(H, 5),
        'branch': hidden(B, H, 5),
        'soma': hidden(B, H),
    }
    return Step(step, **parts), (array(B, I),)


# ways to write a surrogate spike


@jax.custom_jvp
def spike_jvp(V):
    return (V > 0).astype(V.dtype)


@spike_jvp.defjvp
def _(primals, tangents):
    (V,), (dV,) = primals, tangents
    return spike_jvp(V), dV / (1 + jnp.abs(V)) ** 2


@jax.custom_vjp
def spike_vjp(V):
    return (V > 0).astype(V.dtype)


spike_vjp.defvjp(lambda V: (spike_vjp(V), V), lambda V, g: (g * jnp.exp(-jnp.abs(V)),))


def spike_straight_through(V):
    smooth = jax.nn.sigmoid(V)
    return smooth + stop_gradient((V > 0).astype(V.dtype) - smooth)


def recurrent_layer(spike):
    def step(m, x):
        fired = spike(m.V.value - 0.1)
        m.V.value = 0.9 * m.V.value + x @ m.w.value + fired @ m.r.value - fired
        return m.V.value * spike(m.V.value - 0.1)

    return Step(step, w=weight(I, H), r=weight(H, H), V=hidden(B, H)), (array(B, I),)


RECURRENT = {'w': 'local 0', 'r': 'local 0'}


@case(['V'], RECURRENT)
def spike_by_custom_jvp():
    return recurrent_layer(spike_jvp)


@case(['V'], RECURRENT)
def spike_by_custom_vjp():
    return recurrent_layer(spike_vjp)


@case(['V'], RECURRENT)
def spike_straight_through_estimator():
    return recurrent_layer(spike_straight_through)


@case(['V'], RECURRENT)
def spike_by_braintools_object():
    return recurrent_layer(braintools.surrogate.Arctan(alpha=2.0))


@case(['V'], RECURRENT)
def spike_by_braintools_relu_grad():
    return recurrent_layer(braintools.surrogate.ReluGrad(alpha=0.3, width=4.0))


@case(
    ['V'],
    {'w': 'exact 0', 'r': 'exact 0'},
    note='a bare comparison carries no derivative: the recurrence is data',
)
def spike_without_derivative():
    return recurrent_layer(lambda V: (V > 0).astype(V.dtype))


@case(
    ['V'],
    {'w': 'exact 0', 'tau': 'exact 0'},
    note='a derivative taken inside the step',
)
def exponential_euler_step():
    def step(m, x):
        y, tau = x @ m.w.value, 5.0 + m.tau.value**2
        with brainstate.environ.context(dt=0.1):
            m.V.value = brainstate.nn.exp_euler_step(lambda V: (y - V) / tau, m.V.value)
        return spike(m.V.value - 0.1)

    return Step(step, w=weight(I, H), tau=weight(H), V=hidden(B, H)), (array(B, I),)


@case(
    ['V late later'],
    {'w': 'exact 0', 'delay': 'exact 0'},
    note='a delay per neuron, between one step and two',
)
def learnable_delay():
    def step(m, x):
        share = jax.nn.sigmoid(m.delay.value)
        m.V.value = 0.9 * m.V.value + share * m.late.value + (1 - share) * m.later.value
        m.later.value = m.late.value
        m.late.value = x @ m.w.value
        return spike(m.V.value - 0.1)

    states = {'V': hidden(B, H), 'late': hidden(B, H), 'later': hidden(B, H)}
    return Step(step, w=weight(I, H), delay=weight(H), **states), (array(B, I),)
