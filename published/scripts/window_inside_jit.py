"""Multi-step data given to a mapped learner inside jit, one gradient for the whole."""

import brainstate
import jax.numpy as jnp
from common import Net, bptt, data, descend, seeded

import braintrace

xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
net = seeded(Net)
weights = net.states(brainstate.ParamState)


@brainstate.transform.jit
def update(xs, ys):
    brainstate.nn.init_all_states(net, xs.shape[1])
    learner = braintrace.ParamDimVjpAlgorithm(net, vjp_method='multi-step')
    learner.compile_graph(xs[0])

    def loss():
        outputs = learner(braintrace.MultiStepData(xs))
        return jnp.mean((outputs - ys) ** 2)

    return brainstate.transform.grad(loss, weights, return_value=True)()


losses, gradient = [], None
for _ in range(3):
    grads, value = update(xs, ys)
    gradient = gradient or dict(grads)
    losses.append(float(value))
    descend(weights, grads)
