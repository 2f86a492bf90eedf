"""Step by step: brainstate's grad around a call of the learner, inside a jitted scan."""

import brainstate
import jax
import jax.numpy as jnp
from common import Net, bptt, data, descend, seeded

import braintrace

xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
net = seeded(Net)
brainstate.nn.init_all_states(net, batch_size=xs.shape[1])
learner = braintrace.D_RTRL(net, 'trainer', 'single-step')
learner.compile_graph(xs[0])
weights = net.states(brainstate.ParamState)


@brainstate.transform.jit
def sequence(xs, ys):
    brainstate.nn.init_all_states(net, batch_size=xs.shape[1])
    learner.init_etrace_state()

    def one(total, at):
        x, y = at
        loss = lambda: jnp.mean((learner(x) - y) ** 2)
        grads, value = brainstate.transform.grad(loss, weights, return_value=True)()
        return jax.tree.map(lambda a, b: a + b / len(xs), total, grads), value

    zero = jax.tree.map(jnp.zeros_like, weights.to_dict_values())
    return brainstate.transform.scan(one, zero, (xs, ys))


losses, gradient = [], None
for _ in range(3):
    grads, values = sequence(xs, ys)
    gradient = gradient or dict(grads)
    losses.append(float(values.mean()))
    descend(weights, grads)
