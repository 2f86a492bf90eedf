"""A GRU of Flax NNX learns online to output its input of three steps ago, with an optimiser of Flax.

Run it: python examples/flax_nnx.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import braintrace

BATCH, STEPS, UNITS, DELAY = 32, 20, 32, 3


class Net(nnx.Module):
    """A stock GRU cell, its hidden state in a Variable, and a read-out."""

    def __init__(self, rngs):
        self.cell = nnx.GRUCell(1, UNITS, rngs=rngs)
        self.out = nnx.Linear(UNITS, 1, rngs=rngs)
        self.h = nnx.Variable(jnp.zeros((BATCH, UNITS)))

    def __call__(self, x):
        self.h[...], y = self.cell(self.h[...], x)
        return self.out(y)


def main(updates=300):
    """Train; the mean loss of the first and of the last update."""
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    learner = braintrace.compile(model, 'd_rtrl', jnp.ones((BATCH, 1)))
    learner.report.show()

    loss_of = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    losses = []
    for i in range(updates):
        xs = jax.random.normal(jax.random.key(i), (STEPS, BATCH, 1))
        ys = jnp.roll(xs, DELAY, axis=0).at[:DELAY].set(0)
        grads, loss = learner.etrace_grad(
            xs, ys, step_fn=loss_of, fresh=True, return_value=True
        )
        optimizer.update(model, grads)
        losses.append(float(loss.mean()))
        if i % 50 == 0 or i == updates - 1:
            print(f'update {i:4d}  loss {losses[-1]:.4f}')
    return losses[0], losses[-1]


if __name__ == '__main__':
    main()
