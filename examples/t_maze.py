"""An agent learns, at every step, to remember what it saw at the start of a T-maze.

The first observation shows on which side the goal is. Then follow a corridor that always looks
the same, and a junction, where the agent has to turn to that side. An actor-critic learns online:
one call a step gives the gradient of log-probability and value through the recurrent network, by
D-RTRL; the stream adds it to an eligibility that decays by λγ, and the TD error scales the update.
Nothing is unrolled and nothing is replayed. Run it with

    python examples/t_maze.py
"""

from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace

try:  # the environment works without gymnasium; with it, it is one of its own
    import gymnasium
except ImportError:
    gymnasium = None

Env: Any = gymnasium.Env if gymnasium else object

UP, RIGHT, DOWN, LEFT = range(4)


class TMaze(Env):
    """A corridor of ``delay`` steps from the cue to the junction.

    Observations: cue up, cue down, corridor, junction. The right turn is rewarded by 4,
    the other one and every step that does not move by -0.1. ``info['success']`` says
    at the end whether the goal was reached; an episode is cut off after
    ``3 * delay + 10`` steps.
    """

    def __init__(self, delay: int = 10):
        self.delay = delay
        self.random = np.random.default_rng()
        if gymnasium:
            spaces = gymnasium.spaces
            self.action_space = spaces.Discrete(4)
            self.observation_space = spaces.Box(0.0, 1.0, (4,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode; the goal is on a side drawn at random."""
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.goal = UP if self.random.random() < 0.5 else DOWN
        self.place, self.steps = 0, 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Observation, reward, terminated, truncated, info."""
        self.steps += 1
        at_junction = self.place == self.delay
        turned = action in (UP, DOWN)
        if at_junction and turned:
            success = action == self.goal
            reward = 4.0 if success else -0.1
            return self._observation(), reward, True, False, {'success': success}
        before = self.place
        if action == RIGHT:
            self.place = min(self.place + 1, self.delay)
        elif action == LEFT:
            self.place = max(self.place - 1, 0)
        reward = 0.0 if self.place != before else -0.1
        truncated = self.steps >= 3 * self.delay + 10
        info = {'success': False} if truncated else {}
        return self._observation(), reward, False, truncated, info

    def _observation(self) -> np.ndarray:
        seen = np.zeros(4, np.float32)
        if self.place == self.delay:
            seen[3] = 1.0
        elif self.place > 0 or self.steps > 0:
            seen[2] = 1.0
        else:
            seen[0 if self.goal == UP else 1] = 1.0
        return seen


class Agent(brainstate.nn.Module):
    """One step: an observation into logits of the actions and a value."""

    def __init__(self, cell: str, units: int):
        super().__init__()
        self.cell: brainstate.nn.Module
        if cell == 'rtu':
            self.cell = braintrace.nn.RTU(
                4, units, r_min=0.9, r_max=0.999, max_phase=0.3
            )
            features = 2 * units
        else:
            self.cell = braintrace.nn.GRUCell(4, units)
            features = units
        small = brainstate.nn.init.Normal(0.0, 0.01)
        self.actor = brainstate.nn.Linear(features, 4, w_init=small)
        self.critic = brainstate.nn.Linear(features, 1, w_init=small)

    def update(self, x):
        features = self.cell(x)
        return self.actor(features), self.critic(features)[0]


class Acted(NamedTuple):
    """What a step of the agent gives."""

    action: jax.Array | float
    value: jax.Array | float
    entropy: jax.Array | float


def train(
    delay: int = 10,
    cell: str = 'rtu',
    units: int = 32,
    episodes: int = 3000,
    seed: int = 0,
    rule: str = 'd_rtrl',
    lr: float = 1e-3,
    discount: float = 0.99,
    lambda_: float = 0.8,
    entropy_reward: float = 0.01,
    value_scale: float = 1.0,
    **options: Any,
) -> np.ndarray:
    """Whether each episode ended at the goal, in the order of learning."""
    brainstate.random.seed(seed)
    random = np.random.default_rng(seed)
    env = TMaze(delay)
    agent = Agent(cell, units)
    learner = braintrace.compile(agent, rule, jnp.zeros(4), **options)

    def log_probability_and_value(x, uniform):
        """Draws an action; the gradient is that of its log-probability plus the value."""
        logits, value = learner(x)
        log_probabilities = jax.nn.log_softmax(logits)
        probabilities = jnp.exp(log_probabilities)
        below = jnp.cumsum(jax.lax.stop_gradient(probabilities)) < uniform
        action = jnp.minimum(jnp.sum(below), 3)
        entropy = -jnp.sum(probabilities * log_probabilities)
        scalar = log_probabilities[action] + value_scale * value
        return scalar, Acted(action, value, entropy)

    stream = learner.stream(
        log_probability_and_value, optax.adam(lr), decay=discount * lambda_
    )

    def act(observation):
        found = stream.gradient(observation, np.float32(random.random()))
        return Acted(*map(float, found.outputs))

    successes = []
    for episode in range(episodes):
        observation, info = env.reset(seed=seed if episode == 0 else None)
        stream.reset()
        acted, done = act(observation), False
        while not done:
            observation, reward, terminated, truncated, info = env.step(
                int(acted.action)
            )
            done = terminated or truncated
            reward += entropy_reward * acted.entropy
            # The next value comes from the next call, which adds the next gradient to
            # the eligibility: keep the eligibility of the steps so far.
            eligibility = stream.eligibility
            now, next_value = acted, 0.0
            if not terminated:
                acted = act(observation)
                next_value = acted.value
            error = reward + discount * next_value - now.value
            # The optimiser minimises; log-probability and value are to grow.
            stream.apply(eligibility, np.float32(-error))
        successes.append(bool(info['success']))
    return np.array(successes)


def main(delay: int = 10, episodes: int = 3000, **options: Any) -> np.ndarray:
    """Rates of success in the first and the last tenth of the episodes."""
    successes = train(delay, episodes=episodes, **options)
    part = max(1, episodes // 10)
    first, last = successes[:part].mean(), successes[-part:].mean()
    print(f'T-maze, delay {delay}, {episodes} episodes learned online')
    print(f'success at first: {first:.2f}, at last: {last:.2f}')
    return np.array([first, last])


if __name__ == '__main__':
    main()
