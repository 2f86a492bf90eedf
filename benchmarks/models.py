"""The models, weights, data and losses of the benchmark, the same in every environment.

Each model takes the namespace of its layers: ``brainstate.nn`` as it is, or the layers that the published package
asks for. Weights are drawn by name, so that a fused gate matrix and separate ones hold the same numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np

OUTPUTS = 10
FUSED = {'Wrz': ('Wr', 'Wz'), 'W': ('Wi', 'Wg', 'Wf', 'Wo')}
"""Matrices of the stock cells that other layers keep apart."""

spike = braintools.surrogate.ReluGrad()


def zeros(batch_size: int | None, *shape: int) -> jax.Array:
    return jnp.zeros(shape if batch_size is None else (batch_size, *shape))


class Gated(brainstate.nn.Module):
    """A stock GRU or LSTM cell and a linear read-out."""

    def __init__(self, nn: Any, cell: str, inputs: int, units: int):
        super().__init__()
        self.cell = getattr(nn, cell)(inputs, units)
        self.readout = nn.Linear(units, OUTPUTS)

    def update(self, x: jax.Array) -> jax.Array:
        return self.readout(self.cell(x))


class AdaptiveLIF(brainstate.nn.Module):
    """Recurrent spiking units whose threshold rises with their own spikes; read out by their spikes."""

    def __init__(self, nn: Any, inputs: int, units: int):
        super().__init__()
        self.units = units
        self.feed = nn.Linear(inputs, units)
        self.recur = nn.Linear(units, units, b_init=None)
        self.readout = nn.Linear(units, OUTPUTS)

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        self.V = brainstate.HiddenState(zeros(batch_size, self.units))
        self.a = brainstate.HiddenState(zeros(batch_size, self.units))

    def update(self, x: jax.Array) -> jax.Array:
        V, a = self.V.value, self.a.value
        fired = spike(V - 1.0 - 0.2 * a)
        self.V.value = 0.95 * V + self.feed(x) + self.recur(fired) - fired
        self.a.value = 0.99 * a + fired
        return self.readout(spike(self.V.value - 1.0 - 0.2 * self.a.value))


class SynapticLayer(brainstate.nn.Module):
    """Leaky units with exponential synapses, driven from below and by their own last spikes."""

    def __init__(self, nn: Any, inputs: int, units: int):
        super().__init__()
        self.units = units
        self.feed = nn.Linear(inputs, units)
        self.recur = nn.Linear(units, units, b_init=None)

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        self.V = brainstate.HiddenState(zeros(batch_size, self.units))
        self.g = brainstate.HiddenState(zeros(batch_size, self.units))

    def update(self, x: jax.Array) -> jax.Array:
        V = self.V.value
        fired = spike(V - 0.5)
        self.g.value = 0.8 * self.g.value + self.feed(x) + self.recur(fired)
        self.V.value = 0.95 * V + 0.3 * self.g.value - 0.5 * fired
        return spike(self.V.value - 0.5)


class SynapticStack(brainstate.nn.Module):
    """Layers of leaky units with exponential synapses, and a read-out of the last."""

    def __init__(self, nn: Any, inputs: int, units: int, layers: int):
        super().__init__()
        self.layers = [
            SynapticLayer(nn, inputs if i == 0 else units, units) for i in range(layers)
        ]
        self.readout = nn.Linear(units, OUTPUTS)

    def update(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.readout(x)


class ConvLIF(brainstate.nn.Module):
    """A convolution into leaky spiking units, and a dense read-out of their spikes."""

    def __init__(self, nn: Any, side: int, inputs: int, channels: int):
        super().__init__()
        self.shape = (side, side, channels)
        self.conv = nn.Conv2d((side, side, inputs), channels, 3)
        self.readout = nn.Linear(side * side * channels, OUTPUTS)

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        self.V = brainstate.HiddenState(zeros(batch_size, *self.shape))

    def update(self, x: jax.Array) -> jax.Array:
        V = self.V.value
        self.V.value = 0.9 * V + self.conv(x) - spike(V - 1.0)
        return self.readout(spike(self.V.value - 1.0).reshape(len(x), -1))


class SparseLIF(brainstate.nn.Module):
    """Leaky units with a few synapses each, read out as the mean activity of equal populations.

    ``events``: the product takes spikes as events, not as numbers.
    """

    def __init__(self, nn: Any, units: int, synapses: int, events: bool = False):
        super().__init__()
        import brainevent

        self.units = units
        self.given = brainevent.BinaryArray if events else jnp.asarray
        targets = (
            np.random.default_rng(1)
            .integers(0, units, units * synapses)
            .astype(np.int32)
        )
        starts = np.arange(0, units * synapses + 1, synapses, dtype=np.int32)
        matrix = brainevent.CSR(
            (jnp.zeros(units * synapses), targets, starts), shape=(units, units)
        )
        self.recur = nn.SparseLinear(matrix)

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        self.V = brainstate.HiddenState(zeros(batch_size, self.units))

    def update(self, x: jax.Array) -> jax.Array:
        V = self.V.value
        fired = spike(V - 1.0)
        self.V.value = 0.9 * V + x + self.recur(self.given(fired)) - fired
        counted = self.V.value[:, : self.units // OUTPUTS * OUTPUTS]
        return spike(counted - 1.0).reshape(len(x), OUTPUTS, -1).mean(-1)


# ------------------------------------------------------------ workloads


@dataclass(frozen=True)
class Workload:
    """One row group of the table.

    ``variants`` are what we run of it, ``peer`` the same for the published package. ``peer_steps`` shortens its slow
    rules, whose cost is the same at every step. ``differs`` names gradients (as shell patterns) that the
    published package is known to get wrong, with the reason; all others must agree.
    """

    key: str
    title: str
    model: Callable[..., brainstate.nn.Module]
    sizes: dict[str, Any]
    inputs: tuple[int, ...]
    batch: int
    steps: int
    spikes: bool = True
    variants: tuple[str, ...] = ('d_rtrl_fresh', 'd_rtrl_carried', 'pp_prop')
    peer: tuple[str, ...] = ('d_rtrl_carried', 'pp_prop')
    peer_steps: int | None = None
    differs: dict[str, str] = field(default_factory=dict)

    def steps_of(self, side: str, variant: str) -> int:
        """Length of the sequence that a side runs."""
        short = side == 'peer' and self.peer_steps is not None and variant != 'pp_prop'
        return min(self.peer_steps, self.steps) if short else self.steps

    def build(self, nn: Any) -> brainstate.nn.Module:
        """The model with its weights; states are made by who runs it."""
        model = self.model(nn, **self.sizes)
        for path, state in model.states(brainstate.ParamState).items():
            state.value = {
                key: draw((*path[:-1], key), value.shape)
                for key, value in state.value.items()
            }
        return model

    def data(self) -> tuple[jax.Array, jax.Array]:
        """Inputs and targets, time first."""
        rng = np.random.default_rng(0)
        shape = (self.steps, self.batch, *self.inputs)
        xs = (
            rng.random(shape, np.float32) < 0.2
            if self.spikes
            else rng.standard_normal(shape, np.float32)
        )
        ys = rng.standard_normal((self.steps, self.batch, OUTPUTS), np.float32)
        return jnp.asarray(xs, jnp.float32), jnp.asarray(ys)


def loss(output: jax.Array, target: jax.Array) -> jax.Array:
    """Squared error of one step."""
    return jnp.mean((output - target) ** 2)


def gates(path: tuple) -> Iterator[str]:
    """Names of the separate matrices that a parameter holds, in order."""
    *where, last, leaf = map(str, path)
    for gate in FUSED.get(last, (last,)):
        yield '.'.join((*where, gate, leaf))


def draw(path: tuple, shape: tuple[int, ...]) -> jax.Array:
    """The weights of a parameter, from the names of its gates."""
    names = list(gates(path))
    shape = (*shape[:-1], shape[-1] // len(names))
    dense = len(shape) > 1
    scale = (
        np.prod(shape[:-1]) ** -0.5 if dense else {'bias': 0.1, 'weight': 0.3}[path[-1]]
    )
    parts = [
        np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape) * scale
        for name in names
    ]
    return jnp.asarray(np.concatenate(parts, -1), jnp.float32)


def by_gate(gradients: dict) -> dict[str, np.ndarray]:
    """Gradients under the names of the gates, whatever the layout of the parameters."""
    found = {}
    for path, tree in gradients.items():
        if not isinstance(tree, dict):
            found['.'.join(map(str, path))] = np.asarray(tree)
            continue
        for key, value in tree.items():
            names = list(gates((*path[:-1], key)))
            found.update(
                zip(names, np.split(np.asarray(value), len(names), -1), strict=True)
            )
    return found


READOUT = {'readout.*': 'a read-out gets zero'}


def adaptive(
    key: str, title: str, units: int = 512, inputs: int = 100, **options: Any
) -> Workload:
    sizes = {'inputs': inputs, 'units': units}
    return Workload(
        key,
        title,
        AdaptiveLIF,
        sizes,
        (inputs,),
        differs=READOUT,
        **{'steps': 200, **options},
    )


def workloads(quick: bool = False) -> list[Workload]:
    """All workloads; ``quick`` makes them tiny."""
    twice = 'a state that feeds another inside a step counts twice'
    found = [
        Workload(
            '1',
            'GRU 256, batch 32, T 200',
            Gated,
            {'cell': 'GRUCell', 'inputs': 64, 'units': 256},
            (64,),
            batch=32,
            steps=200,
            spikes=False,
            peer_steps=20,
            differs=READOUT | {'cell.Wr.*': 'the reset gate gets no trace'},
        ),
        adaptive('2', 'adaptive LIF 512, batch 16, T 200', batch=16, peer_steps=10),
        adaptive('3', 'adaptive LIF 512, batch 1, T 200', batch=1, peer_steps=40),
        Workload(
            '4',
            'LIF, exponential synapses, 3 x 256, batch 16, T 500',
            SynapticStack,
            {'inputs': 100, 'units': 256, 'layers': 3},
            (100,),
            batch=16,
            steps=500,
            peer_steps=10,
            differs=READOUT | {'layers.*': twice},
        ),
        Workload(
            '5',
            'LSTM 256, batch 32, T 200',
            Gated,
            {'cell': 'LSTMCell', 'inputs': 64, 'units': 256},
            (64,),
            batch=32,
            steps=200,
            spikes=False,
            peer_steps=10,
            differs=READOUT | {'cell.W[igf].*': twice},
        ),
        Workload(
            '6',
            'convolution 16x16x2 to 16 channels, LIF, batch 8, T 100',
            ConvLIF,
            {'side': 16, 'inputs': 2, 'channels': 16},
            (16, 16, 2),
            batch=8,
            steps=100,
            differs=READOUT,
        ),
        adaptive(
            '7',
            'adaptive LIF 256, weights updated every step, batch 1, T 200',
            256,
            batch=1,
            variants=('online',),
            peer=('online',),
        ),
        adaptive(
            '7',
            'adaptive LIF 256, weights updated every step, batch 16, T 200',
            256,
            batch=16,
            variants=('online',),
            peer=('online',),
            peer_steps=40,
        ),
        Workload(
            '8',
            'sparse LIF, 20,000 neurons, 160,000 synapses, batch 8, T 30',
            SparseLIF,
            {'units': 20_000, 'synapses': 8},
            (20_000,),
            batch=8,
            steps=30,
            variants=('pp_prop',),
            peer=('pp_prop',),
        ),
        Workload(
            '8',
            'sparse LIF, 40,000 neurons, 320,000 synapses, batch 8, T 30',
            SparseLIF,
            {'units': 40_000, 'synapses': 8},
            (40_000,),
            batch=8,
            steps=30,
            variants=('pp_prop',),
            peer=(),
        ),
        *(
            adaptive(
                '9',
                f'adaptive LIF 256, batch 8, T {n}',
                256,
                32,
                batch=8,
                steps=n,
                peer=('pp_prop',),
            )
            for n in (1000, 4000, 16000)
        ),
        *(
            adaptive(
                '10',
                f'adaptive LIF {units}, batch 16, T 40',
                units,
                batch=16,
                steps=40,
                peer_steps=5,
            )
            for units in (128, 256, 512, 1024)
        ),
    ]
    return [tiny(w) for w in found] if quick else found


def tiny(workload: Workload) -> Workload:
    """The same workload, small enough to prove that the benchmark works."""
    small = {
        'units': 2000 if workload.model is SparseLIF else 16,
        'side': 6,
        'channels': 4,
    }
    sizes = {key: small.get(key, value) for key, value in workload.sizes.items()}
    inputs = {SparseLIF: (sizes.get('units'),), ConvLIF: (6, 6, 2)}.get(
        workload.model, workload.inputs
    )
    steps = max(10, workload.steps // 100)
    title = f'tiny: {workload.title}'
    return replace(
        workload,
        title=title,
        sizes=sizes,
        inputs=inputs,
        batch=min(workload.batch, 2),
        steps=steps,
    )
