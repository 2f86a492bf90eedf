"""States of one sample mapped over a batch by hand, inside the jitted training step."""

import brainstate
import jax
import jax.numpy as jnp
from common import Net, bptt, data, descend, seeded

import braintrace

xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
net = seeded(Net)
weights = net.states(brainstate.ParamState)


@brainstate.transform.jit
def update(xs, ys):
    model = braintrace.D_RTRL(net, vjp_method='multi-step')

    @brainstate.transform.vmap_new_states(state_tag='new', axis_size=xs.shape[1])
    def init():
        brainstate.nn.init_all_states(net)
        model.compile_graph(xs[0, 0])

    init()
    learner = brainstate.nn.Vmap(model, vmap_states='new')
    # A warm-up without a loss, then learning on the rest.
    brainstate.transform.for_loop(learner, xs[:2])

    def one(total, at):
        x, y = at
        loss = lambda: jnp.mean((learner(x) - y) ** 2)
        grads, value = brainstate.transform.grad(loss, weights, return_value=True)()
        return jax.tree.map(lambda a, b: a + b / len(xs), total, grads), value

    zero = jax.tree.map(jnp.zeros_like, weights.to_dict_values())
    return brainstate.transform.scan(one, zero, (xs[2:], ys[2:]))


losses, gradient = [], None
for _ in range(3):
    grads, values = update(xs, ys)
    gradient = gradient or dict(grads)
    losses.append(float(values.mean()))
    descend(weights, grads)
