"""A recurrent controller learns while the plant runs: its weights change at every single step.

A pendulum is to follow a moving target. A weak spring-and-damper controller does it badly; its
output is the error signal of a GRU beside it (feedback-error learning), at every step, forward in
time. Half-way the pendulum's mass doubles, and the controller adapts. The plant is plain NumPy:
nothing is differentiated through it. Run it with

    python examples/online_control.py
"""

import brainstate
import jax.numpy as jnp
import numpy as np
import optax

import braintrace


class Controller(brainstate.nn.Module):
    """One step: what is wanted and what is, into a torque."""

    def __init__(self, inputs: int, units: int):
        super().__init__()
        self.cell = brainstate.nn.GRUCell(inputs, units)
        self.readout = brainstate.nn.Linear(units, 1)

    def update(self, x):
        return self.readout(self.cell(x))


def main(
    steps: int = 10000, units: int = 32, dt: float = 0.02, lr: float = 1e-3
) -> np.ndarray:
    """Mean distances to the target, before and after the change of mass: without learning, and learned."""
    brainstate.random.seed(0)
    net = Controller(5, units)
    learner = braintrace.compile(net, 'd_rtrl', jnp.zeros(5))

    def step_fn(x, correction):
        (torque,) = learner(x)
        # Its derivative: what the spring and damper had to add.
        return -correction * torque, torque

    stream = learner.stream(step_fn, optax.adam(lr))

    def act_and_learn(x, correction):
        return float(stream(x, np.float32(correction)).outputs)

    def run(learn):
        angle, speed, errors = 0.0, 0.0, []
        for i in range(steps):
            mass, t = 1.0 if i < steps // 2 else 2.0, i * dt
            target, its_speed = (
                np.sin(t) + 0.5 * np.sin(2.3 * t),
                np.cos(t) + 1.15 * np.cos(2.3 * t),
            )
            correction = 6.0 * (target - angle) + 2.0 * (its_speed - speed)
            x = np.array([target, its_speed, angle, speed, 1.0], 'float32')
            learned = act_and_learn(x, correction) if learn else 0.0
            torque = correction + learned
            speed += dt * (torque / mass - 9.81 * np.sin(angle) - 0.5 * speed)
            angle += dt * speed
            errors.append(abs(target - angle))
        ends = np.array(errors).reshape(2, -1)[
            :, -steps // 10 :
        ]  # the end of each half
        return ends.mean(1)

    found = np.array([run(learn=False), run(learn=True)])
    print(
        f'mean distance to the target without learning: {found[0, 0]:.3f}, mass doubled: {found[0, 1]:.3f}'
    )
    print(
        f'                            learned online: {found[1, 0]:.3f}, mass doubled: {found[1, 1]:.3f}'
    )
    return found


if __name__ == '__main__':
    main()
