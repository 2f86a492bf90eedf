"""A learner whose states are mapped over a batch by hand."""

import brainstate
import jax.numpy as jnp
from common import Net, bptt, data, descend, seeded

import braintrace

xs, ys = data()
exact = bptt(seeded(Net), xs, ys)
net = seeded(Net)
learner = braintrace.ES_D_RTRL(net, 0.9)


@brainstate.transform.vmap_new_states(state_tag='new', axis_size=xs.shape[1])
def init(x):
    brainstate.nn.init_all_states(net)
    learner.compile_graph(x)


init(xs[0])
mapped = braintrace.ETraceVmap(learner, vmap_states='new')
step = lambda x, y: jnp.mean((mapped(x) - y) ** 2)
gradient, values = mapped.etrace_grad(xs, ys, step_fn=step, return_value=True)
losses = [float(values.mean())]
descend(net.states(brainstate.ParamState), gradient)
