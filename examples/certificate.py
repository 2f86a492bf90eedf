"""Does an approximate gradient still point downhill? Random feedback, measured while it learns.

A recurrent spiking network learns a slow average of its inputs by e-prop, whose learning signals go back through fixed
random weights. Every few updates the derivative of the loss along that gradient is taken by forward mode: exact, and in
memory that does not grow with the length of the sequence. First it is taken over 100,000 steps, and the memory of the
process is printed beside what BPTT would keep. Run it with

    python examples/certificate.py
"""

import resource
import sys
import time

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace


@jax.custom_vjp
def fire(v):
    """A spike where v is positive. Its derivative is written for reverse mode alone, as many are: that is enough."""
    return (v > 0).astype(v.dtype)


def pull_back(v, bar):
    return (bar / (1 + 3 * jnp.abs(v)) ** 2,)


fire.defvjp(lambda v: (fire(v), v), pull_back)  # pyright: ignore[reportFunctionMemberAccess]


class Spiking(brainstate.nn.Module):
    """Leaky units that fire at each other, and a read-out of their filtered spikes."""

    def __init__(self, inputs, units):
        super().__init__()
        self.units = units
        self.feed = brainstate.nn.Linear(inputs, units)
        self.recur = brainstate.nn.Linear(units, units)
        self.readout = brainstate.nn.Linear(units, 1)

    def init_state(self, batch_size=None, **kwargs):
        zeros = jnp.zeros((batch_size, self.units))
        self.v = brainstate.HiddenState(zeros)
        self.rate = brainstate.HiddenState(zeros)

    def update(self, x):
        spikes = fire(self.v.value - 0.5)
        drive = self.feed(x) + 0.3 * self.recur(spikes)
        self.v.value = 0.9 * self.v.value - 0.5 * spikes + drive
        self.rate.value = 0.95 * self.rate.value + 0.05 * fire(self.v.value - 0.5)
        return self.readout(self.rate.value)


def peak() -> float:
    """The most memory that this process has had, in MiB."""
    unit = 2**20 if sys.platform == 'darwin' else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def main(
    updates: int = 200, units: int = 64, steps: int = 200, long: int = 100_000
) -> tuple[float, float]:
    """Loss before and after."""
    batch, inputs = 8, 10
    brainstate.random.seed(0)
    net, example = Spiking(inputs, units), jnp.zeros((batch, inputs))
    learner = braintrace.compile(
        net, 'eprop', example, batch_size=batch, feedback='random'
    )

    def draw(seed, steps):
        rng = np.random.default_rng(seed)
        rates = 0.2 * rng.random((1, batch, inputs))
        xs = (rng.random((steps, batch, inputs)) < rates).astype('float32')
        ys = np.zeros((steps, batch, 1), 'float32')
        for t in range(1, steps):
            ys[t] = 0.97 * ys[t - 1] + 0.03 * xs[t].sum(-1, keepdims=True)
        return xs, ys

    step = lambda x, y: jnp.mean((learner(x) - y) ** 2)

    # A sequence that BPTT would have to keep whole. The short one compiles and loads.
    learner.certificate(*draw(0, 200), step_fn=step)
    data = draw(0, long)
    before, start = peak(), time.perf_counter()
    print(learner.certificate(*data, step_fn=step))
    seconds, more = time.perf_counter() - start, peak() - before
    size = sum(x.nbytes for x in data) / 2**20
    # Of both states of a unit, at every step.
    states = long * batch * units * 2 * 4 / 2**20
    print(
        f'{seconds:.0f} s; peak memory grew by {more:.0f} MiB, which includes a copy of '
        f'the data ({size:.0f} MiB); the states alone would be {states:.0f} MiB'
    )

    history = braintrace.fit(
        learner,
        lambda i: draw(i, steps),
        step_fn=step,
        optimizer=optax.adam(3e-3),
        updates=updates,
        certificate_every=max(updates // 5, 1),
    )
    measured = np.flatnonzero(np.isfinite(history['descent']))
    for i in measured:
        descent, cosine = history['descent'][i], history['cosine'][i]
        print(f'update {i + 1}: descent {descent:.2f}, cosine {cosine:.2f}')
    before, after = history['loss'][:5].mean(), history['loss'][-5:].mean()
    print(
        f'a slow average by random feedback: loss {before:.3f} before, {after:.3f} after'
    )
    return before, after


if __name__ == '__main__':
    main()
