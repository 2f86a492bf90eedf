"""A learning rule of your own from parts, compared with BPTT, with a picture.

``ETraceConfig`` combines how traces are stored, carried forward and filtered, and which signal
multiplies them. The rule here has traces that decay by a number and are low-passed, and errors sent
back by fixed random weights. Run it with

    python examples/own_rule.py rules.png
"""

import sys

import brainstate
import jax.numpy as jnp
import numpy as np
import optax

import braintrace

RULE = braintrace.ETraceConfig(
    trace_factorization='per_param',
    temporal_recursion='scalar_leak',
    decay=0.9,
    trace_filter='kappa',
    kappa=0.5,
    learning_signal='random_feedback',
)
OTHERS = ('rflo', 'eprop', 'd_rtrl', 'rtrl')


class Net(brainstate.nn.Module):
    """Leaky tanh units and a linear read-out."""

    def __init__(self, inputs: int, units: int, outputs: int):
        super().__init__()
        self.units = units
        self.feed = brainstate.nn.Linear(inputs, units)
        self.recur = brainstate.nn.Linear(units, units, b_init=None)
        self.readout = brainstate.nn.Linear(units, outputs)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, self.units)))

    def update(self, x):
        drive = self.feed(x) + self.recur(jnp.tanh(self.h.value))
        self.h.value = 0.9 * self.h.value + 0.1 * drive
        return self.readout(jnp.tanh(self.h.value))


def main(
    updates: int = 200,
    units: int = 48,
    steps: int = 150,
    others: tuple = OTHERS,
    picture: str | None = None,
):
    """Squared error over variance, before and after."""
    brainstate.random.seed(0)
    task = braintrace.tasks.Series('mackey_glass', steps=steps)
    learner = braintrace.compile(
        Net(1, units, 1), RULE, jnp.zeros((4, 1)), batch_size=4
    )
    step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    batches = lambda i: task.batch(np.random.default_rng(i), 4)[:2]
    history = braintrace.fit(
        learner, batches, step_fn=step, optimizer=optax.adam(5e-3), updates=updates
    )
    before, after = history['loss'][0], history['loss'][-5:].mean()
    print(
        f'next value of a chaotic series: error {before:.3f} before, {after:.3f} after'
    )
    found = learner.gradient_check(*batches(0), step_fn=step, rules=[RULE, *others])
    print(f'\n{found}')
    if picture is not None:
        found.plot(picture)
    return before, after


if __name__ == '__main__':
    main(picture=sys.argv[1] if len(sys.argv) > 1 else None)
