"""A neuron and a surrogate of your own: resonators learn to classify rhythms.

Each unit is an oscillator with two states that fires above a threshold. Its frequency is learned along with its
weights. Nothing is declared: the compiler finds that x, y and the rate belong together and that no unit feeds another,
so all gradients here are those of BPTT. Run it with

    python examples/own_neuron.py
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace


@jax.custom_jvp
def fire(v):
    """A spike where v is positive."""
    return (v > 0).astype(v.dtype)


@fire.defjvp  # pyright: ignore[reportFunctionMemberAccess]
def _surrogate(primals, tangents):
    (v,), (dv,) = primals, tangents
    return fire(v), dv / (1 + 3 * jnp.abs(v)) ** 2


class Resonators(brainstate.nn.Module):
    """One step of units that turn, fire, and are read out."""

    def __init__(self, units: int, classes: int):
        super().__init__()
        self.units = units
        self.turn = brainstate.ParamState(
            jnp.linspace(0.2, 1.4, units)
        )  # radians a step
        self.feed = brainstate.nn.Linear(1, units)
        self.readout = brainstate.nn.Linear(units, classes)

    def init_state(self, batch_size=None, **kwargs):
        zeros = jnp.zeros((batch_size, self.units))
        self.x = brainstate.HiddenState(zeros)
        self.y = brainstate.HiddenState(zeros)
        self.rate = brainstate.HiddenState(zeros)

    def update(self, current):
        x, y, cos, sin = (
            self.x.value,
            self.y.value,
            jnp.cos(self.turn.value),
            jnp.sin(self.turn.value),
        )
        self.x.value = 0.95 * (cos * x - sin * y) + self.feed(current)
        self.y.value = 0.95 * (sin * x + cos * y)
        self.rate.value = 0.9 * self.rate.value + 0.1 * fire(self.y.value - 1.0)
        return self.readout(self.rate.value)


def main(
    updates: int = 300, units: int = 32, batch: int = 32, steps: int = 80
) -> tuple[float, float]:
    """Accuracy before and after."""
    brainstate.random.seed(0)
    periods = np.array([6.0, 8.0, 11.0, 15.0])
    learner = braintrace.compile(
        Resonators(units, len(periods)),
        'd_rtrl',
        jnp.zeros((batch, 1)),
        batch_size=batch,
    )
    learner.report.show()

    def batches(i):
        rng = np.random.default_rng(i)
        label = rng.integers(0, len(periods), batch)
        angle = (
            2 * np.pi * (np.arange(steps)[:, None] / periods[label] + rng.random(batch))
        )
        xs = np.sin(angle) + rng.normal(0, 1.0, angle.shape)
        return xs[..., None].astype('float32'), np.broadcast_to(label, (steps, batch))

    def step(x, label):
        logits = learner(x)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, label
        ).mean(), logits

    metrics = lambda logits, xs, labels: {
        'accuracy': (logits[-1].argmax(-1) == labels[-1]).mean()
    }
    parts = {'step_fn': step, 'metrics': metrics, 'optimizer': optax.adam(1e-2)}
    history = braintrace.fit(learner, batches, **parts, updates=updates)
    before, after = history['accuracy'][:5].mean(), history['accuracy'][-5:].mean()
    print(
        f'{len(periods)} rhythms in noise: accuracy {before:.2f} before, {after:.2f} after'
    )
    return before, after


if __name__ == '__main__':
    main()
