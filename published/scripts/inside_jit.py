"""A learner that is made and compiled inside the jitted training step."""

import brainstate
import braintools
import jax
import jax.numpy as jnp
from common import Net, bptt, data, seeded

import braintrace

xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
net = seeded(Net)
weights = net.states(brainstate.ParamState)
optimizer = braintools.optim.SGD(0.1)
optimizer.register_trainable_weights(weights)


@brainstate.transform.jit
def update(xs, ys):
    brainstate.nn.init_all_states(net, xs.shape[1])
    learner = braintrace.ES_D_RTRL(net, 0.9)
    learner.compile_graph(xs[0])

    def one(total, at):
        x, y = at
        loss = lambda: jnp.mean((learner(x) - y) ** 2)
        grads, value = brainstate.transform.grad(loss, weights, return_value=True)()
        return jax.tree.map(lambda a, b: a + b / len(xs), total, grads), value

    zero = jax.tree.map(jnp.zeros_like, weights.to_dict_values())
    grads, values = brainstate.transform.scan(one, zero, (xs, ys))
    optimizer.update(grads)
    return grads, values.mean()


losses, gradient = [], None
for _ in range(3):
    grads, value = update(xs, ys)
    gradient = gradient or dict(grads)
    losses.append(float(value))
