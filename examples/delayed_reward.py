"""A reward that arrives long after the action, by three-factor learning.

A cue is shown for one step, an action is drawn, and only ``delay`` steps later a reward says
whether it was the right one. No loss and no error is known at any time. The units of the actions
are leaky, so the traces of their weights still hold what the cue did when the reward comes; the
reward multiplies them, with the sign of what each unit did. Run it with

    python examples/delayed_reward.py
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace


class Actions(brainstate.nn.Module):
    """Leaky units, one for each action."""

    def __init__(self, cues: int, actions: int, leak: float):
        super().__init__()
        self.actions, self.leak = actions, leak
        zero = brainstate.nn.init.ZeroInit()
        self.feed = brainstate.nn.Linear(cues, actions, w_init=zero, b_init=None)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros(self.actions))

    def update(self, x):
        self.h.value = self.leak * self.h.value + self.feed(x)
        return self.h.value


def main(
    trials: int = 600,
    cues: int = 6,
    actions: int = 3,
    delay: int = 20,
    lr: float = 1.0,
    seed: int = 0,
) -> np.ndarray:
    """Rates of the right action in the first and the last fifth of the trials."""
    random = np.random.default_rng(seed)
    learner = braintrace.compile(
        Actions(cues, actions, leak=0.95), 'three_factor', jnp.zeros(cues)
    )

    def step_fn(x, modulator):
        logits = learner(x, modulator=modulator)
        return 0.0, jax.nn.softmax(logits)  # no loss: the modulator takes its place

    stream = learner.stream(step_fn, optax.sgd(lr))
    nothing = np.zeros(cues, np.float32)
    silent = np.zeros(actions, np.float32)
    expected_reward, right = 1 / actions, []
    for _ in range(trials):
        stream.reset()
        cue = random.integers(cues)
        shown = np.eye(cues, dtype=np.float32)[cue]
        probabilities = np.array(stream(shown, silent).outputs, float)
        action = random.choice(actions, p=probabilities / probabilities.sum())
        for _ in range(delay - 1):
            stream(nothing, silent)
        # The reward comes. Each unit knows whether it acted, and how probable that was.
        reward = float(action == cue % actions)
        acted = np.eye(actions)[action] - probabilities
        surprise = reward - expected_reward
        stream(nothing, np.float32(-surprise * acted))
        expected_reward += 0.05 * surprise
        right.append(reward)
    part = max(1, trials // 5)
    found = np.array([np.mean(right[:part]), np.mean(right[-part:])])
    print(f'{cues} cues, {actions} actions, reward {delay} steps after the cue')
    print(f'right actions at first: {found[0]:.2f}, at last: {found[1]:.2f}')
    return found


if __name__ == '__main__':
    main()
