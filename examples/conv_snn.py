"""A convolutional spiking network learns in which direction a bar moves.

A single picture is not enough: the units' potentials must keep the one before. The weights of a
convolution are shared by all places, so its traces are kept by place (see the report). Run it with

    python examples/conv_snn.py
"""

import brainstate
import jax.numpy as jnp
import numpy as np
import optax

import braintrace
from braintrace.networks import fire


class Net(brainstate.nn.Module):
    """One picture: a convolution into leaky spiking units, and a read-out of their rates."""

    def __init__(self, side: int, channels: int, classes: int):
        super().__init__()
        self.conv = brainstate.nn.Conv2d(
            (side, side, 1), channels, kernel_size=5, padding='SAME'
        )
        self.readout = brainstate.nn.Linear(channels, classes)

    def init_state(self, batch_size=None, **kwargs):
        zeros = jnp.zeros((batch_size, *self.conv.out_size))
        self.V = brainstate.HiddenState(zeros)
        self.rate = brainstate.HiddenState(zeros)

    def update(self, picture):
        spikes = fire(self.V.value - 0.5)
        self.V.value = 0.7 * self.V.value * (1 - spikes) + self.conv(picture)
        self.rate.value = 0.9 * self.rate.value + 0.1 * fire(self.V.value - 0.5)
        return self.readout(self.rate.value.mean((1, 2)) * 20)


def bars(
    rng: np.random.Generator, batch: int, side: int, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pictures (time, batch, side, side, 1) of bars that go right, left, down or up, and which."""
    way, start = rng.integers(0, 4, batch), rng.integers(0, side, batch)
    place = (start + np.outer(np.arange(steps), np.where(way % 2, -1, 1))) % side
    columns = np.broadcast_to(
        np.eye(side)[place][:, :, None], (steps, batch, side, side)
    )
    pictures = np.where((way < 2)[:, None, None], columns, columns.swapaxes(2, 3))
    noisy = pictures + rng.normal(0, 0.2, pictures.shape)
    return noisy[..., None].astype('float32'), np.broadcast_to(way, (steps, batch))


def main(
    updates: int = 150,
    side: int = 10,
    channels: int = 12,
    steps: int = 16,
    batch: int = 32,
) -> tuple:
    """Accuracy before and after."""
    brainstate.random.seed(0)
    net = Net(side, channels, 4)
    learner = braintrace.compile(
        net, 'd_rtrl', jnp.zeros((batch, side, side, 1)), batch_size=batch
    )
    learner.report.show()

    def step(x, way):
        logits = learner(x)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, way
        ).mean(), logits

    metrics = lambda logits, xs, way: {
        'accuracy': (logits[-1].argmax(-1) == way[-1]).mean()
    }
    batches = lambda i: bars(np.random.default_rng(i), batch, side, steps)
    parts = {'step_fn': step, 'metrics': metrics, 'optimizer': optax.adam(1e-2)}
    history = braintrace.fit(learner, batches, **parts, updates=updates)
    before, after = history['accuracy'][:5].mean(), history['accuracy'][-5:].mean()
    print(f'4 ways to move: accuracy {before:.2f} before, {after:.2f} after')
    return before, after


if __name__ == '__main__':
    main()
