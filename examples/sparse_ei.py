"""A sparse network of excitatory and inhibitory units learns by pp_prop, in memory linear in its synapses.

Four fifths of the units only excite, one fifth only inhibits: a weight is a softplus times the sign of the unit
it comes from, and the compiler looks through both to the synapses of the compressed sparse rows. Run it with

    python examples/sparse_ei.py
"""

import brainevent
import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace
from braintrace.networks import fire


class SparseEI(brainstate.nn.Module):
    """One step of LIF units with ``synapses`` targets each, and a leaky read-out."""

    def __init__(self, inputs: int, units: int, outputs: int, synapses: int):
        super().__init__()
        rng = np.random.default_rng(0)
        excites = np.arange(units) < units * 4 // 5
        self.units, self.outputs = units, outputs
        self.signs = jnp.repeat(
            jnp.where(excites, 1.0, -4.0), synapses
        )  # as much inhibition as excitation
        self.targets = jnp.asarray(rng.integers(0, units, units * synapses), jnp.int32)
        self.starts = jnp.arange(0, units * synapses + 1, synapses, dtype=jnp.int32)
        self.synapses = brainstate.ParamState(
            jnp.asarray(rng.normal(-2.5, 0.5, units * synapses), jnp.float32)
        )
        self.feed = brainstate.nn.Linear(inputs, units)
        self.readout = brainstate.nn.Linear(units, outputs)

    def init_state(self, batch_size=None, **kwargs):
        zeros = jnp.zeros((batch_size, self.units))
        self.V = brainstate.HiddenState(zeros)
        self.rate = brainstate.HiddenState(zeros)

    def update(self, x):
        fired = fire(self.V.value - 1.0)
        weights = jax.nn.softplus(self.synapses.value) * self.signs
        recurrent = fired @ brainevent.CSR(
            (weights, self.targets, self.starts), shape=(self.units, self.units)
        )
        self.V.value = (
            0.9 * self.V.value + self.feed(x) + recurrent - jax.lax.stop_gradient(fired)
        )
        self.rate.value = 0.95 * self.rate.value + 0.05 * fire(self.V.value - 1.0)
        return self.readout(self.rate.value)


def main(
    updates: int = 120, units: int = 1000, synapses: int = 10, lr: float = 5e-3
) -> tuple:
    """Accuracy before and after."""
    brainstate.random.seed(0)
    task = braintrace.tasks.Randman(classes=5, units=20, steps=50)
    net = SparseEI(task.inputs, units, task.outputs, synapses)
    learner = braintrace.compile(
        net, 'pp_prop', jnp.zeros((16, task.inputs)), batch_size=16, decay_or_rank=0.95
    )
    learner.report.show()
    supervised = braintrace.Supervised(learner, task, 16)
    history = braintrace.fit(
        learner, **supervised.parts(), optimizer=optax.adam(lr), updates=updates
    )
    before, after = history['accuracy'][:5].mean(), history['accuracy'][-5:].mean()
    print(
        f'{units} units, {units * synapses} synapses: accuracy {before:.2f} before, {after:.2f} after'
    )
    return before, after


if __name__ == '__main__':
    main()
