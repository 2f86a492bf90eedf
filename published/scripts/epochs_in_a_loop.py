"""All epochs inside brainstate's for_loop, with single steps scanned inside each."""

import brainstate
import braintools
import jax
import jax.numpy as jnp
from common import BATCH, Net, data, seeded

import braintrace

xs, ys = data()
net = seeded(Net, 'MiniGRU')
learner = braintrace.compile(net, braintrace.D_RTRL, xs[0], batch_size=BATCH)
weights = net.states(brainstate.ParamState)
optimizer = braintools.optim.SGD(lr=0.1)
optimizer.register_trainable_weights(weights)


def reset():
    brainstate.nn.reset_all_states(net, batch_size=BATCH)
    learner.reset_state(batch_size=BATCH)


def evaluate():
    reset()
    outputs = brainstate.transform.for_loop(learner, xs)
    return float(jnp.mean((outputs - ys) ** 2))


def epoch(_):
    reset()

    def step(total, pair):
        loss = lambda x, y: jnp.mean((learner(x) - y) ** 2)
        one = brainstate.transform.grad(loss, weights, return_value=True)
        gradients, value = one(*pair)
        return jax.tree.map(jnp.add, total, gradients), value

    zeros = jax.tree.map(jnp.zeros_like, weights.to_dict_values())
    total, values = brainstate.transform.scan(step, zeros, (xs, ys))
    optimizer.update(jax.tree.map(lambda g: g / len(xs), total))
    return values.mean()


before = evaluate()
during = brainstate.transform.for_loop(epoch, jnp.arange(5))
assert float(during[-1]) < before
losses = [before, *map(float, during), evaluate()]
