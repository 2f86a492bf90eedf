"""Train a recurrent net to recall a cue after a delay, and draw what it learned.

A cue (left or right) is shown for three steps, then noise for twenty; at the end the net says which.
The gradient is plain BPTT until the online learners are in place; the compile report printed first
shows which credit each parameter of this very model will get from them.
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

    def update(self, x):
        return self.readout(self.cell(x))


def trials(rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    """Inputs (time, batch, 3) and the side that was cued."""
    side = rng.integers(0, 2, BATCH)
    x = rng.normal(0, 0.3, (STEPS, BATCH, 3))
    x[:CUE, np.arange(BATCH), side] += 1.0
    x[-1, :, 2] += 1.0
    return jnp.asarray(x, jnp.float32), jnp.asarray(side)


def main(iterations: int = 300, out: Path = Path('out')) -> None:
    brainstate.random.seed(0)
    net = Net()
    brainstate.nn.init_all_states(net, BATCH)
    rng = np.random.default_rng(0)
    braintrace.compile_etrace_graph(net, trials(rng)[0][0]).report.show()
    weights = net.states(brainstate.ParamState)
    optimizer = braintools.optim.Adam(lr=5e-3)
    optimizer.register_trainable_weights(weights)

    def loss(xs, side):
        brainstate.nn.init_all_states(net, BATCH)
        logits = brainstate.transform.for_loop(net, xs)[-1]
        log_p = jax.nn.log_softmax(logits)[jnp.arange(BATCH), side]
        return -log_p.mean(), (logits.argmax(-1) == side).mean()

    @brainstate.transform.jit
    def update(xs, side):
        gradients, value, accuracy = brainstate.transform.grad(loss, weights, has_aux=True, return_value=True)(xs, side)
        optimizer.update(gradients)
        return value, accuracy

    print(f'\ntraining: {STEPS} steps a trial, {BATCH} trials an iteration')
    history, start = [], time.perf_counter()
    for i in range(iterations):
        history.append([float(v) for v in update(*trials(rng))])
        if (i + 1) % 50 == 0:
            value, accuracy = np.mean(history[-20:], axis=0)
            rate = (i + 1) / (time.perf_counter() - start)
            print(f'  iteration {i + 1:4}  loss {value:.3f}  accuracy {accuracy:.1%}  {rate:.0f} iterations/s')
    out.mkdir(exist_ok=True)
    draw(net, trials(rng), np.array(history), out / 'train.png')
    print(f'picture: {out / "train.png"}')


def draw(net: Net, data: tuple[jax.Array, jax.Array], history: np.ndarray, file: Path) -> None:
    """Learning curve, and the units over one batch, left trials first."""
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
