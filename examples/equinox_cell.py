"""An Equinox module around a stock GRU cell learns online to output its input of three steps ago.

The module describes one sample; the learner maps it over the batch. Run it: python examples/equinox_cell.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import braintrace

BATCH, STEPS, UNITS, DELAY = 32, 20, 32, 3


class Net(eqx.Module):
    """A stock GRU cell and a read-out."""

    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear

    def __init__(self, key):
        below, above = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(1, UNITS, key=below)
        self.out = eqx.nn.Linear(UNITS, 1, key=above)

    def __call__(self, x, h):
        h = self.cell(x, h)
        return self.out(h), h


def main(updates=300):
    """Train; the mean loss of the first and of the last update."""
    model = Net(jax.random.key(0))
    optimizer = optax.adam(3e-3)
    memory = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    start = jnp.zeros(UNITS)
    learner = braintrace.compile(
        model, 'd_rtrl', jnp.ones(1), state=start, vmap=True, batch_size=BATCH
    )
    learner.report.show()

    loss_of = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    losses = []
    for i in range(updates):
        xs = jax.random.normal(jax.random.key(i), (STEPS, BATCH, 1))
        ys = jnp.roll(xs, DELAY, axis=0).at[:DELAY].set(0)
        grads, loss = learner.etrace_grad(
            xs, ys, step_fn=loss_of, fresh=True, return_value=True
        )
        changes, memory = optimizer.update(
            grads, memory, eqx.filter(model, eqx.is_inexact_array)
        )
        learner.params = model = eqx.apply_updates(model, changes)
        losses.append(float(loss.mean()))
        if i % 50 == 0 or i == updates - 1:
            print(f'update {i:4d}  loss {losses[-1]:.4f}')
    return losses[0], losses[-1]


if __name__ == '__main__':
    main()
