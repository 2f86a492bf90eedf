"""Neurons and synapses of brainpy.state, with their units, learn to classify spike patterns by when channels fire.

Currents are in mA, potentials in mV, time in ms: the network is one you might have for simulation. Run it with

    python examples/brainpy_units.py
"""

import brainpy.state as bp
import brainstate
import braintools
import brainunit as u
import jax.numpy as jnp
import optax

import braintrace


class Net(brainstate.nn.Module):
    """One millisecond: weights, exponential synapses, LIF neurons, a leaky read-out of their spikes."""

    def __init__(self, inputs: int, units: int, outputs: int):
        super().__init__()
        spike = braintools.surrogate.ReluGrad(alpha=0.3)
        normal, zero = (
            braintools.init.KaimingNormal(20.0, unit=u.mA),
            braintools.init.Constant(0.0 * u.mA),
        )
        self.neurons = bp.LIF(units, tau=20.0 * u.ms, V_th=1.0 * u.mV, spk_fun=spike)
        self.projection = bp.AlignPostProj(
            comm=brainstate.nn.Linear(inputs, units, w_init=normal, b_init=None),
            syn=bp.Expon(units, tau=10.0 * u.ms, g_initializer=zero),
            out=bp.CUBA(1.0),
            post=self.neurons,
        )
        self.readout = braintrace.nn.LeakyRateReadout(units, outputs, tau=20.0 * u.ms)

    def update(self, spikes):
        self.projection(spikes)
        return self.readout(self.neurons())


def main(
    updates: int = 200, units: int = 64, batch: int = 32, steps: int = 60
) -> tuple[float, float]:
    """Accuracy before and after."""
    brainstate.random.seed(0)
    task = braintrace.tasks.Randman(classes=5, units=20, steps=steps)
    with brainstate.environ.context(dt=1.0 * u.ms):
        net = Net(task.inputs, units, task.outputs)
        learner = braintrace.compile(
            net, 'd_rtrl', jnp.zeros((batch, task.inputs)), batch_size=batch
        )
        learner.report.show()
        supervised = braintrace.Supervised(learner, task, batch)
        history = braintrace.fit(
            learner, **supervised.parts(), optimizer=optax.adam(1e-2), updates=updates
        )
    before, after = history['accuracy'][:5].mean(), history['accuracy'][-5:].mean()
    print(
        f'{task.classes} classes of spike times: accuracy {before:.2f} before, {after:.2f} after'
    )
    return before, after


if __name__ == '__main__':
    main()
