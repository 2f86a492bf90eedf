"""Train a recurrent net online to recall a cue after a delay, and draw what it learned.

A cue (left or right) is shown for three steps, then noise for twenty; at the last step the net says which.
Gradients come from D-RTRL: eligibility traces forward in time, no backpropagation through the sequence.
"""

import time
from pathlib import Path

import brainstate
import braintools
import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt
import numpy as np

import braintrace

STEPS, CUE, BATCH, UNITS = 24, 3, 64, 48


class Net(brainstate.nn.Module):
    """A GRU and a linear read-out."""

    def __init__(self):
        super().__init__()
        self.cell = brainstate.nn.GRUCell(3, UNITS)
        self.readout = brainstate.nn.Linear(UNITS, 2)
        gates = self.cell.Wrz.weight
        gates.value = {**gates.value, 'bias': gates.value['bias'].at[UNITS:].set(-3.0)}  # slow units remember

    def update(self, x):
        return self.readout(self.cell(x))


def trials(rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    """Inputs (time, batch, 3) and the side that was cued."""
    side = rng.integers(0, 2, BATCH)
    x = rng.normal(0, 0.3, (STEPS, BATCH, 3))
    x[:CUE, np.arange(BATCH), side] += 1.0
    x[-1, :, 2] += 1.0
    return jnp.asarray(x, jnp.float32), jnp.asarray(side)


def main(iterations: int = 200, out: Path = Path('out')) -> None:
    rng = np.random.default_rng(0)
    net = Net()
    learner = braintrace.compile(net, 'd_rtrl', trials(rng)[0][0], batch_size=BATCH, seed=0, verbose=1)
    optimizer = braintools.optim.Adam(lr=5e-3)
    optimizer.register_trainable_weights(net.states(brainstate.ParamState))
    recall = jnp.arange(STEPS) == STEPS - 1

    def step(x, side):
        logits = learner(x)
        log_p = jax.nn.log_softmax(logits)[jnp.arange(BATCH), side]
        return -log_p.mean(), (logits.argmax(-1) == side).mean()

    @brainstate.transform.jit
    def update(xs, side):
        sides = jnp.broadcast_to(side, (STEPS, BATCH))
        gradients, losses, correct = learner.etrace_grad(
            xs, sides, step_fn=step, mask=recall, has_aux=True, return_value=True, fresh=True
        )
        optimizer.update(gradients)
        return losses[-1], correct[-1]

    print(f'\ntraining: {STEPS} steps a trial, {BATCH} trials an iteration')
    history, start = [], time.perf_counter()
    for i in range(iterations):
        history.append([float(v) for v in update(*trials(rng))])
        if (i + 1) % 25 == 0:
            value, accuracy = np.mean(history[-20:], axis=0)
            rate = (i + 1) / (time.perf_counter() - start)
            print(
                f'  iteration {i + 1:4}  loss {value:.3f}  accuracy {accuracy:.1%}  {rate:.0f} iterations/s', flush=True
            )
    out.mkdir(exist_ok=True)
    draw(net, trials(rng), np.array(history), out / 'train.png')
    print(f'picture: {out / "train.png"}')


def draw(net: Net, data: tuple[jax.Array, jax.Array], history: np.ndarray, file: Path) -> None:
    """Learning curve, and what each unit remembers of the side."""
    xs, side = data
    brainstate.nn.init_all_states(net, BATCH)

    def step(x):
        net(x)
        return net.cell.h.value

    units = np.asarray(brainstate.transform.for_loop(step, xs))
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout='constrained')
    left.plot(history[:, 0], label='loss')
    left.plot(history[:, 1], label='accuracy')
    left.set(xlabel='iteration', title='learning curve')
    left.legend()
    difference = units[:, side == 0].mean(1) - units[:, side == 1].mean(1)
    image = right.imshow(difference.T, aspect='auto', cmap='RdBu', vmin=-1, vmax=1)
    right.set(xlabel='step', ylabel='unit', title='left minus right trials')
    figure.colorbar(image)
    figure.savefig(file, dpi=120)


if __name__ == '__main__':
    main()
