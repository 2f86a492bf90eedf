"""Sub-programs: branches, loops, nested calls, rules of differentiation."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from .base import B, H, I, Step, array, case, hidden, leaky, spike, weight

transform = brainstate.transform


def membrane(advance, **parts):
    """`V' = advance(model, V, *inputs)`, read out as spikes."""

    def step(m, *inputs):
        m.V.value = advance(m, m.V.value, *inputs)
        return spike(m.V.value - 0.1)

    return Step(step, V=hidden(B, H), **parts)


# branches


@case(
    ['V'],
    {'w': 'exact 0', 'v': 'exact 0'},
    note='the inputs choose which matrix drives the layer',
)
def cond_on_data():
    def advance(m, V, x):
        drive = jax.lax.cond(
            x.sum() > 0, lambda: x @ m.w.value, lambda: jnp.tanh(x @ m.v.value)
        )
        return 0.9 * V + drive

    return membrane(advance, w=weight(I, H), v=weight(I, H)), (array(B, I),)


@case(
    ['V'],
    {'w': 'exact 0'},
    note='the choice is made by the state, through a comparison',
)
def cond_on_state():
    def advance(m, V, x):
        return jax.lax.cond(
            V.mean() > 0,
            lambda V, y: 0.9 * V + y,
            lambda V, y: 0.5 * V - y,
            V,
            x @ m.w.value,
        )

    return membrane(advance, w=weight(I, H)), (array(B, I),)


@case(['V'], {'w': 'local 0', 'r': 'local 0'}, note='one of the branches mixes')
def cond_with_recurrence():
    def advance(m, V, x):
        y = x @ m.w.value
        return jax.lax.cond(
            x.sum() < 100,
            lambda: 0.9 * V + jnp.tanh(V @ m.r.value) + y,
            lambda: 0.5 * V + y,
        )

    return membrane(advance, w=weight(I, H), r=weight(H, H)), (array(B, I),)


@case(
    ['V'],
    {'w': 'exact 0', 'v': 'exact 0'},
    note='brainstate branches, which write the state themselves',
)
def cond_of_brainstate():
    def step(m, x):
        def drive():
            m.V.value = 0.9 * m.V.value + x @ m.w.value

        def rest():
            m.V.value = 0.5 * m.V.value - m.v.value

        transform.cond(x.sum() > 0, drive, rest)
        return m.V.value

    return Step(step, w=weight(I, H), v=weight(H), V=hidden(B, H)), (
        array(B, I, mean=0.5),
    )


@case(
    ['V'],
    {'w': 'exact 0', 'gain': 'exact 0'},
    note='an integer input selects among three dynamics',
)
def switch_on_integer():
    def advance(m, V, x, mode):
        branches = [
            lambda V, y: 0.9 * V + y,
            lambda V, y: 0.5 * V + m.gain.value * y,
            lambda V, y: V - 0.1 * y**3,
        ]
        return jax.lax.switch(mode, branches, V, x @ m.w.value)

    return membrane(advance, w=weight(I, H), gain=weight(H)), (
        array(B, I),
        jnp.array(1),
    )


# loops inside one step


@case(['V'], {'w': 'exact 0'}, note='four Euler sub-steps on a drive computed once')
def scan_of_substeps():
    def advance(m, V, x):
        y = x @ m.w.value
        return jax.lax.scan(lambda V, _: (V + 0.1 * (y - V**3), None), V, length=4)[0]

    return membrane(advance, w=weight(I, H)), (array(B, I),)


@case(
    ['V'],
    {'w': 'exact 0', 'leak': 'exact 0'},
    note='the weights are used anew in every sub-step',
)
def scan_with_weights_inside():
    def advance(m, V, x):
        def substep(V, k):
            V = V + 0.1 * (jnp.cos(k * x) @ m.w.value - m.leak.value * V)
            return V, V.sum()

        return jax.lax.scan(substep, V, jnp.arange(3.0))[0]

    return membrane(advance, w=weight(I, H), leak=weight(H)), (array(B, I),)


@case(['V'], {'w': 'local 0', 'r': 'local 0'}, note='sub-steps with a recurrent matmul')
def scan_with_recurrence_inside():
    def advance(m, V, x):
        y = x @ m.w.value
        return jax.lax.scan(
            lambda V, _: (0.9 * V + 0.1 * (y + jnp.tanh(V) @ m.r.value), None),
            V,
            length=3,
        )[0]

    return membrane(advance, w=weight(I, H), r=weight(H, H)), (array(B, I),)


@case(
    ['V a'],
    {'w': 'exact 0'},
    note='two states in the carry, a chunk of five inputs scanned, five outputs',
)
def scan_over_a_chunk_of_inputs():
    def step(m, xs):
        def substep(carry, x):
            V, a = carry
            fired = spike(V - 0.1 - 0.2 * a)
            return (0.9 * V + x @ m.w.value - fired, 0.8 * a + fired), fired

        (m.V.value, m.a.value), spikes = jax.lax.scan(
            substep, (m.V.value, m.a.value), xs
        )
        return spikes

    return Step(step, w=weight(I, H), V=hidden(B, H), a=hidden(B, H)), (array(5, B, I),)


@case(
    ['V'],
    {'w': 'exact 0'},
    note='the brainstate loop reads and writes the state in every turn',
)
def for_loop_of_brainstate():
    def step(m, xs):
        def turn(x):
            m.V.value = 0.9 * m.V.value + jnp.tanh(x @ m.w.value)
            return m.V.value

        return transform.for_loop(turn, xs)

    return Step(step, w=weight(I, H), V=hidden(B, H)), (array(5, B, I),)


@case(['V'], {'w': 'exact 0'})
def fori_loop():
    def advance(m, V, x):
        y = x @ m.w.value
        return jax.lax.fori_loop(0, 3, lambda k, V: V + 0.1 * (y - V) * (k + 1), V)

    return membrane(advance, w=weight(I, H)), (array(B, I),)


@case(
    ['V'],
    {'w': 'exact 0'},
    note='the loop runs as long as the data say, beside the differentiable path',
)
def while_loop_beside_the_path():
    def advance(m, V, x):
        level = stop_gradient(jnp.abs(V).sum())
        halvings = jax.lax.while_loop(
            lambda c: c[1] > 0.5, lambda c: (c[0] + 1, c[1] / 2), (0, level)
        )[0]
        return 0.9 * V + (x @ m.w.value) / (1 + halvings)

    return membrane(advance, w=weight(I, H)), (array(B, I),)


@case(
    ['V'],
    {'w': 'exact 0', 'v': 'exact 0'},
    note='a loop of unknown length, followed',
)
def while_loop_on_the_path():
    def advance(m, V, x):
        y = x @ m.w.value
        return y + jax.lax.while_loop(
            lambda V: jnp.abs(V).sum() > 0.5, lambda V: V / 2, V + y * m.v.value
        )

    return membrane(advance, w=weight(I, H), v=weight(H)), (array(B, I),)


@case(
    ['V'], {'w': 'exact 0'}, note='a loop of unknown length inside one of known length'
)
def while_loop_inside_a_scan():
    def advance(m, V, x):
        halved = lambda V: jax.lax.while_loop(
            lambda V: jnp.abs(V).sum() > 0.5, lambda V: V / 2, V
        )
        return (
            jax.lax.fori_loop(0, 2, lambda k, V: 0.5 * V + halved(V), V) + x @ m.w.value
        )

    return membrane(advance, w=weight(I, H)), (array(B, I),)


@case(['V'], {'w': 'local 0'}, note='Python code inside the step: no credit passes it')
def callback_on_the_path():
    def advance(m, V, x):
        shape = jax.ShapeDtypeStruct(V.shape, V.dtype)
        return (
            0.9 * V
            + x @ m.w.value
            + jax.pure_callback(np.tanh, shape, V, vmap_method='sequential')
        )

    return membrane(advance, w=weight(I, H)), (array(B, I),)


@case(
    ['V'],
    {'w': 'exact 0'},
    note='one result of the loop depends on the inputs only, the other on the state',
)
def loop_whose_results_differ():
    def advance(m, V, x):
        turn = lambda carry, _: ((0.7 * carry[0], 0.8 * carry[1]), None)
        (drive, V), _ = jax.lax.scan(turn, (x, V), None, length=2)
        return V + drive @ m.w.value

    return membrane(advance, w=weight(I, H)), (array(B, I),)


@case(
    ['V'],
    {'w': 'exact 0', 'v': 'exact 0'},
    note='one of three branches, by conditions on the inputs',
)
def ifelse_of_brainstate():
    def advance(m, V, x):
        level = x.mean()
        branches = [
            lambda: x @ m.w.value,
            lambda: jnp.tanh(x @ m.v.value),
            lambda: jnp.zeros_like(V),
        ]
        return 0.9 * V + transform.ifelse(
            [level > 1, level > -1, level <= -1], branches
        )

    return membrane(advance, w=weight(I, H), v=weight(I, H)), (array(B, I),)


# nested calls


@case(['V'], {'w': 'local 0', 'r': 'local 0'})
def nested_jit():
    @jax.jit
    def current(w, r, x, V):
        return jax.jit(jnp.matmul)(x, w) + jnp.tanh(V) @ r

    def advance(m, V, x):
        return jax.jit(lambda V, y: 0.9 * V + y)(V, current(m.w.value, m.r.value, x, V))

    return membrane(advance, w=weight(I, H), r=weight(H, H)), (array(B, I),)


@case(['V'], {'w': 'exact 0'})
def jit_of_brainstate():
    def step(m, x):
        @transform.jit
        def advance(x):
            m.V.value = 0.9 * m.V.value + x @ m.w.value
            return spike(m.V.value - 0.1)

        return advance(x)

    return Step(step, w=weight(I, H), V=hidden(B, H)), (array(B, I),)


@case(['V a'], {'w': 'local 0', 'r': 'local 0'})
def checkpointed_step():
    @jax.checkpoint
    def advance(w, r, V, a, x):
        fired = spike(V - 0.1 - a)
        return 0.9 * V + x @ w + fired @ r - fired, 0.8 * a + 0.1 * fired

    def step(m, x):
        m.V.value, m.a.value = advance(m.w.value, m.r.value, m.V.value, m.a.value, x)
        return spike(m.V.value - 0.1 - m.a.value)

    return Step(step, w=weight(I, H), r=weight(H, H), V=hidden(B, H), a=hidden(B, H)), (
        array(B, I),
    )


@case(
    ['V'],
    {'w': 'exact 0', 'tau': 'exact 0'},
    note='written for one unit of one sample, mapped twice',
)
def vmapped_unit():
    def unit(V, tau, weights, x):
        return jax.nn.sigmoid(tau) * V + jnp.dot(weights, x)

    def advance(m, V, x):
        return jax.vmap(jax.vmap(unit, (0, 0, 0, None)), (0, None, None, 0))(
            V, m.tau.value, m.w.value, x
        )

    return membrane(advance, w=weight(H, I), tau=weight(H)), (array(B, I),)


@case(
    ['module/V'],
    {'module/w': 'exact 0', 'module/tau': 'exact 0'},
    note='a model of one sample, mapped over the batch by brainstate.nn.Vmap',
)
def mapped_by_brainstate():
    def step(m, x):
        m.V.value = m.tau.value * m.V.value + x @ m.w.value
        return spike(m.V.value - 0.1)

    one = Step(step, V=hidden(B, H), w=weight(I, H), tau=weight(H))
    return brainstate.nn.Vmap(one, vmap_states=brainstate.HiddenState), (array(B, I),)


@case(
    ['V'],
    {'w': 'exact 0'},
    note='the voltage step is found from the gradient of an energy',
)
def gradient_inside_the_step():
    def advance(m, V, x):
        def energy(V):
            return jnp.sum(0.25 * V**4 - V * (x @ m.w.value))

        return V - 0.1 * jax.grad(energy)(V)

    return membrane(advance, w=weight(I, H)), (array(B, I),)


# rules of differentiation written by hand, on more than a spike


@jax.custom_vjp
def matmul(x, w):
    return x @ w


matmul.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g)
)


@case(['h'], {'w': 'exact 0'}, note='the op sits inside a custom_vjp')
def matmul_in_custom_vjp():
    return leaky(lambda m, x: matmul(x, m.w.value), w=weight(I, H)), (array(B, I),)


@jax.custom_jvp
def leaky_update(V, y, decay):
    return decay * V + (1 - decay) * y


@leaky_update.defjvp
def _(primals, tangents):
    (V, y, decay), (dV, dy, ddecay) = primals, tangents
    return leaky_update(V, y, decay), decay * dV + (1 - decay) * dy + (V - y) * ddecay


@case(
    ['V'],
    {'w': 'exact 0', 'decay': 'exact 0'},
    note='the whole update sits inside a custom_jvp',
)
def update_in_custom_jvp():
    def advance(m, V, x):
        return leaky_update(V, x @ m.w.value, jax.nn.sigmoid(m.decay.value))

    return membrane(advance, w=weight(I, H), decay=weight(H)), (array(B, I),)


@case(
    ['V'],
    {'w': 'exact 0', 'r': 'exact 0'},
    note='the recurrent spikes are stopped by hand: the rest keeps positions',
)
def recurrence_stopped_by_hand():
    def advance(m, V, x):
        fired = spike(V - 0.1)
        return 0.9 * V + x @ m.w.value + stop_gradient(fired) @ m.r.value - fired

    return membrane(advance, w=weight(I, H), r=weight(H, H)), (array(B, I),)
