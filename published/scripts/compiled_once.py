"""A learner compiled once; a jitted update resets it, masks the beginning and clips."""

import brainstate
import braintools
import jax.numpy as jnp
from common import BATCH, STEPS, Net, data, seeded

import braintrace

xs, ys = data()
net = seeded(Net, 'MiniGRU')
brainstate.nn.init_all_states(net, batch_size=BATCH)
learner = braintrace.compile(
    net, braintrace.pp_prop, xs[0], batch_size=BATCH, vmap=False, decay_or_rank=0.95
)
optimizer = braintools.optim.Adam(lr=0.01)
optimizer.register_trainable_weights(net.states(brainstate.ParamState))
mask = (jnp.arange(STEPS) >= 4).astype(jnp.float32)


def reset():
    brainstate.nn.reset_all_states(net, batch_size=BATCH)
    learner.reset_state(batch_size=BATCH)


@brainstate.transform.jit
def update(xs, ys):
    reset()
    gradients, objective = learner.etrace_grad(
        xs,
        ys,
        step_fn=lambda x, y: jnp.mean((learner(x) - y) ** 2),
        mask=mask,
        reduction='mean',
        loss_output='scalar',
        return_value=True,
    )
    optimizer.update(brainstate.nn.clip_grad_norm(gradients, 1.0))
    return objective


losses = [float(update(xs, ys)) for _ in range(4)]
reset()
outputs = learner.etrace_evolve(xs, return_outputs=True)
assert outputs.shape == ys.shape
