"""A JAX primitive of your own inside a model: one line declares how it treats positions.

Without that line the compiler tests it numerically (and the report says so). The primitive here is
a soft threshold, as a kernel of your own would be: an evaluation, shapes, a derivative. Run it with

    python examples/own_op.py
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import braintrace

shrink_p = Primitive('shrink')


def shrink(x: jax.Array) -> jax.Array:
    """x brought nearer to zero by 0.1, and zero where it is nearer than that."""
    return shrink_p.bind(x)


def _evaluate(x):
    return jnp.sign(x) * jnp.maximum(jnp.abs(x) - 0.1, 0.0)


shrink_p.def_impl(_evaluate)
shrink_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(shrink_p, mlir.lower_fun(_evaluate, multiple_results=False))
batching.defvectorized(shrink_p)
ad.defjvp(shrink_p, lambda dx, x: dx * (jnp.abs(x) > 0.1))


class Net(brainstate.nn.Module):
    """Leaky units with a soft threshold."""

    def __init__(self, units: int):
        super().__init__()
        self.units = units
        self.feed = brainstate.nn.Linear(1, units)
        self.readout = brainstate.nn.Linear(units, 1)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, self.units)))

    def update(self, x):
        self.h.value = shrink(0.9 * self.h.value + jnp.tanh(self.feed(x)))
        return self.readout(self.h.value)


def main(
    updates: int = 300, units: int = 48, steps: int = 50, batch: int = 16
) -> tuple[float, float]:
    """Squared error before and after."""
    brainstate.random.seed(0)
    unknown = braintrace.compile(
        Net(units), 'd_rtrl', jnp.zeros((batch, 1)), batch_size=batch
    )
    unknown.report.show()
    braintrace.register_primitive(shrink_p, 'elementwise')
    learner = braintrace.compile(
        Net(units), 'd_rtrl', jnp.zeros((batch, 1)), batch_size=batch
    )
    learner.report.show()

    def batches(i):
        xs = np.random.default_rng(i).normal(size=(steps, batch, 1)).astype('float32')
        sums = np.cumsum(xs, 0)
        return xs, sums - np.concatenate(
            [np.zeros_like(xs[:5]), sums[:-5]]
        )  # of the last five steps

    step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    history = braintrace.fit(
        learner, batches, step_fn=step, optimizer=optax.adam(5e-3), updates=updates
    )
    before, after = history['loss'][0], history['loss'][-5:].mean()
    print(
        f'sum of the last five inputs: squared error {before:.3f} before, {after:.3f} after'
    )
    return before, after


if __name__ == '__main__':
    main()
