"""An unmodified GRU learns to repeat symbols after a pause, in a training loop of your own.

The network is written for one time step with stock layers; nothing in it refers to traces. Run it with

    python examples/gru_copy.py
"""

import brainstate
import jax.numpy as jnp
import numpy as np
import optax

import braintrace


class Net(brainstate.nn.Module):
    """One step: a GRU cell and a linear read-out."""

    def __init__(self, inputs: int, units: int, outputs: int):
        super().__init__()
        self.cell = brainstate.nn.GRUCell(inputs, units)
        self.readout = brainstate.nn.Linear(units, outputs)

    def update(self, x):
        return self.readout(self.cell(x))


def main(
    updates: int = 1500, units: int = 64, batch: int = 64, lag: int = 5
) -> tuple[float, float]:
    """Accuracy before and after."""
    brainstate.random.seed(0)
    task = braintrace.tasks.Copying(length=3, symbols=4, lag=lag)
    rng = np.random.default_rng(0)
    net = Net(task.inputs, units, task.outputs)
    learner = braintrace.compile(
        net, 'd_rtrl', jnp.zeros((batch, task.inputs)), batch_size=batch
    )
    learner.report.show()
    optimizer = optax.adam(3e-3)

    def step(x, y):
        logits = learner(x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, (logits.argmax(-1) == y).mean()

    recall = task.batch(rng, 1).weights  # losses count while the symbols are said again
    accuracy = []
    for i in range(updates):
        xs, ys, _ = task.batch(rng, batch)
        gradients, right = learner.etrace_grad(
            xs, ys, step_fn=step, mask=recall, has_aux=True, fresh=True
        )
        learner.apply(gradients, optimizer)
        accuracy.append(float(jnp.average(right, weights=recall)))
        if (i + 1) % max(1, updates // 10) == 0:
            print(
                f'update {i + 1:5}  accuracy {np.mean(accuracy[-50:]):.3f}', flush=True
            )
    before, after = float(np.mean(accuracy[:10])), float(np.mean(accuracy[-10:]))
    print(
        f'{task.length} of {task.symbols} symbols after {lag} steps: accuracy {before:.2f} before, {after:.2f} after'
    )
    return before, after


if __name__ == '__main__':
    main()
