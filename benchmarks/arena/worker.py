"""One library of the arena on one workload: prints its times and memory as JSON.

    python worker.py times|memory LIBRARY WORKLOAD CORES

LIBRARY is a name of `LIBRARIES`. It runs in the environment that has that library:
those of PyTorch in .venv-arena, the others in .venv. CORES is a number, or `all`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

OUTPUTS = 10
LEAK = 0.95
SIZES = {
    '512': {'inputs': 100, 'units': 512, 'batch': 16, 'steps': 200},
    '256': {'inputs': 100, 'units': 256, 'batch': 8, 'steps': 4000},
    'tiny': {'inputs': 10, 'units': 16, 'batch': 2, 'steps': 10},
}


class Data(NamedTuple):
    """Inputs and targets, time first, and the weights of those that share them."""

    xs: np.ndarray
    ys: np.ndarray
    feed: np.ndarray
    recur: np.ndarray
    readout: np.ndarray


def draw(inputs: int, units: int, batch: int, steps: int) -> Data:
    """The same numbers in every environment."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    return Data(
        xs=(rng.random((steps, batch, inputs)) < 0.2).astype(np.float32),
        ys=normal(steps, batch, OUTPUTS),
        feed=normal(inputs, units) * np.float32(0.5 / np.sqrt(inputs)),
        recur=normal(units, units) * np.float32(0.3 / np.sqrt(units)),
        readout=normal(units, OUTPUTS) / np.float32(np.sqrt(units)),
    )


class Subject(NamedTuple):
    """What is timed: a forward pass, a gradient, and what both hold in between.

    `gradient` returns the loss and a list of arrays. `held` counts the bytes of
    weights, states and traces.
    """

    forward: Callable[[], Any]
    gradient: Callable[[], tuple[float, list]]
    held: Callable[[], int]
    version: str


# ---------------------------------------------------------------- PyTorch


def torch_subject(net: Any, run: Callable, data: Data, version: str) -> Subject:
    """A PyTorch network whose `run(xs)` gives its outputs at all steps."""
    import torch

    xs, ys = torch.from_numpy(data.xs), torch.from_numpy(data.ys)
    loss = lambda: torch.nn.functional.mse_loss(run(xs), ys)

    def forward() -> float:
        with torch.no_grad():
            return loss().item()

    def gradient() -> tuple[float, list]:
        net.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        return value.item(), [p.grad for p in net.parameters()]

    def held() -> int:
        return sum(p.nbytes for p in net.parameters())

    return Subject(forward, gradient, held, version)


def pytorch(data: Data) -> Subject:
    """A loop in Python over the same equations as ours, with the same surrogate."""
    import torch

    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: Any) -> Any:
            ctx.save_for_backward(v)
            return (v >= 0).to(v.dtype)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            (v,) = ctx.saved_tensors
            return grads[0] * torch.clamp(0.3 * (1 - v.abs()), min=0.0)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = lambda array: torch.nn.Parameter(torch.from_numpy(array.copy()))
            self.feed, self.recur = weight(data.feed), weight(data.recur)
            self.readout = weight(data.readout)

        def forward(self, xs: Any) -> Any:
            v = xs.new_zeros(xs.shape[1], self.recur.shape[0])
            spikes = Spike.apply(v - 1.0)
            found = []
            for x in xs:
                v = LEAK * v + x @ self.feed + spikes @ self.recur - spikes
                spikes = Spike.apply(v - 1.0)
                found.append(spikes)
            return torch.stack(found) @ self.readout

    net = Net()
    return torch_subject(net, net, data, torch.__version__)


def snntorch(data: Data) -> Subject:
    """`RLeaky`, whose state the caller passes from step to step."""
    import snntorch as snn
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            units = data.recur.shape[0]
            self.feed = torch.nn.Linear(data.feed.shape[0], units)
            self.units = snn.RLeaky(beta=LEAK, linear_features=units)
            self.readout = torch.nn.Linear(units, OUTPUTS)

        def forward(self, xs: Any) -> Any:
            spikes, voltage = self.units.init_rleaky()
            found = []
            for x in xs:
                spikes, voltage = self.units(self.feed(x), spikes, voltage)
                found.append(self.readout(spikes))
            return torch.stack(found)

    net = Net()
    return torch_subject(net, net, data, version_of('snntorch'))


def spikingjelly(data: Data) -> Subject:
    """`LinearRecurrentContainer` around `LIFNode`, in its multi-step mode."""
    from spikingjelly.activation_based import functional, layer, neuron
    from torch import nn

    units = data.recur.shape[0]
    lif = neuron.LIFNode(tau=1 / (1 - LEAK), decay_input=False, v_reset=None)
    net = nn.Sequential(
        layer.Linear(data.feed.shape[0], units),
        layer.LinearRecurrentContainer(lif, in_features=units, out_features=units),
        layer.Linear(units, OUTPUTS),
    )
    functional.set_step_mode(net, step_mode='m')

    def run(xs: Any) -> Any:
        functional.reset_net(net)
        return net(xs)

    return torch_subject(net, run, data, version_of('spikingjelly'))


def norse(data: Data) -> Subject:
    """`LIFRecurrent`, which takes the sequence; its units have a synaptic current too."""
    import norse.torch
    import torch

    units = data.recur.shape[0]
    net = torch.nn.Module()
    net.units = norse.torch.LIFRecurrent(data.feed.shape[0], units)
    net.readout = torch.nn.Linear(units, OUTPUTS)

    def run(xs: Any) -> Any:
        spikes, _ = net.units(xs)
        return net.readout(spikes)

    return torch_subject(net, run, data, version_of('norse'))


# ---------------------------------------------------------------- JAX


def jax_model(data: Data, adaptive: bool = False) -> Any:
    """The network as a brainstate module; `adaptive` units have a second state."""
    import brainstate
    import braintools
    import jax.numpy as jnp

    spike = braintools.surrogate.ReluGrad()
    shape = (data.xs.shape[1], data.recur.shape[0])

    class Net(brainstate.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            linear = lambda w: brainstate.nn.Linear(
                *w.shape, w_init=jnp.asarray(w), b_init=None
            )
            self.feed, self.recur = linear(data.feed), linear(data.recur)
            self.readout = linear(data.readout)

        def init_state(self, batch_size: int | None = None, **_: Any) -> None:
            self.v = brainstate.HiddenState(jnp.zeros(shape))
            if adaptive:
                self.a = brainstate.HiddenState(jnp.zeros(shape))

        def clear(self) -> None:
            for state in self.states(brainstate.HiddenState).values():
                state.value = jnp.zeros(shape)

        def spikes(self) -> Any:
            threshold = 1.0 + 0.2 * self.a.value if adaptive else 1.0
            return spike(self.v.value - threshold)

        def update(self, x: Any) -> Any:
            spikes = self.spikes()
            drive = self.feed(x) + self.recur(spikes)
            self.v.value = LEAK * self.v.value + drive - spikes
            if adaptive:
                self.a.value = 0.99 * self.a.value + spikes
            return self.readout(self.spikes())

    return Net()


def step_loss(model: Any) -> Callable:
    return lambda x, y: ((model(x) - y) ** 2).mean()


def jax_subject(model: Any, gradient: Callable, data: Data, version: str) -> Subject:
    """A JAX network; `gradient(xs, ys)` gives the loss and the gradients by path."""
    import brainstate
    import jax

    xs, ys = jax.device_put(data.xs), jax.device_put(data.ys)
    inputs = xs.nbytes + ys.nbytes

    @brainstate.transform.jit
    def whole(xs: Any, ys: Any) -> Any:
        model.clear()
        return brainstate.transform.for_loop(step_loss(model), xs, ys).mean()

    def run() -> tuple[float, list]:
        loss, found = jax.block_until_ready(gradient(xs, ys))
        return float(loss.mean()), jax.tree.leaves(found)

    return Subject(
        forward=lambda: float(whole(xs, ys)),
        gradient=run,
        held=lambda: sum(x.nbytes for x in jax.live_arrays()) - inputs,
        version=version,
    )


def bptt(data: Data) -> Subject:
    """Reverse mode of JAX through a loop over the steps."""
    import brainstate
    import jax

    model = jax_model(data)
    brainstate.nn.init_all_states(model)
    weights = model.states(brainstate.ParamState)

    @brainstate.transform.jit
    def gradient(xs: Any, ys: Any) -> Any:
        def whole() -> Any:
            model.clear()
            return brainstate.transform.for_loop(step_loss(model), xs, ys).mean()

        found, loss = brainstate.transform.grad(whole, weights, return_value=True)()
        return loss, found

    return jax_subject(model, gradient, data, f'JAX {jax.__version__}')


def ours(rule: str, fresh: bool = False, adaptive: bool = False) -> Callable:
    """A rule of this library; traces are carried on unless `fresh`."""

    def subject(data: Data) -> Subject:
        import braintrace

        model = jax_model(data, adaptive)
        options = {'decay_or_rank': 0.9} if rule == 'pp_prop' else {}
        learner = braintrace.compile(model, rule, data.xs[0], **options)
        step = step_loss(learner)  # one function, so that it is compiled once

        def gradient(xs: Any, ys: Any) -> Any:
            if not fresh:
                learner.reset_state()
            found, loss = learner.etrace_grad(
                xs, ys, step_fn=step, fresh=fresh, return_value=True
            )
            return loss, found

        return jax_subject(model, gradient, data, braintrace.__version__)

    return subject


# ---------------------------------------------------------------- measuring

LIBRARIES: dict[str, Callable[[Data], Subject]] = {
    'PyTorch': pytorch,
    'Norse': norse,
    'snnTorch': snntorch,
    'SpikingJelly': spikingjelly,
    'JAX BPTT': bptt,
    'D-RTRL, fresh': ours('d_rtrl', fresh=True),
    'D-RTRL, carried': ours('d_rtrl'),
    'pp_prop': ours('pp_prop'),
    'D-RTRL, fresh, adaptive LIF': ours('d_rtrl', fresh=True, adaptive=True),
}
TORCH = ('PyTorch', 'Norse', 'snnTorch', 'SpikingJelly')


def version_of(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def status(field: str) -> int:
    """A size of this process, in bytes."""
    lines = Path('/proc/self/status').read_text().splitlines()
    line = next(line for line in lines if line.startswith(field))
    return int(line.split()[1]) * 1024


def peak(subject: Subject) -> int | None:
    """Most bytes during a gradient: what is held before, and what the call adds.

    Inputs and targets are not counted. None where the system does not tell. The
    process needs the variables `MALLOC` of run.py: without them freed memory may stay
    with the process, and a call that takes it again seems to add nothing.
    """
    gc.collect()
    with contextlib.suppress(OSError):
        ctypes.CDLL('libc.so.6').malloc_trim(0)
    held = subject.held()
    try:
        Path('/proc/self/clear_refs').write_text('5')
    except OSError:
        return None
    before = status('VmRSS')
    subject.gradient()
    return held + status('VmHWM') - before


def timed(function: Callable, repeats: int) -> list[float]:
    """Seconds of some calls."""
    found = []
    for _ in range(repeats):
        gc.collect()
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return found


def measure(what: str, library: str, workload: str) -> dict:
    """Times or memory of one library, with its loss and the norm of its gradient."""
    data = draw(**SIZES[workload])
    subject = LIBRARIES[library](data)
    loss, gradients = subject.gradient()
    norm = float(np.sqrt(sum(float((np.asarray(g) ** 2).sum()) for g in gradients)))
    del gradients
    subject.gradient()  # JAX may compile once more, for states that a call has written
    if what == 'memory':
        peaks = [peak(subject) for _ in range(3)]
        return {'peak': None if None in peaks else int(np.median(peaks))}
    subject.forward()
    repeats = 5 if len(data.xs) < 1000 else 3
    return {
        'loss': loss,
        'norm': norm,
        'gradient': timed(subject.gradient, repeats),
        'forward': timed(subject.forward, repeats),
        'version': subject.version,
    }


def main() -> None:
    what, library, workload, cores = sys.argv[1:]
    if cores != 'all':
        os.sched_setaffinity(0, set(range(int(cores))))
    if library in TORCH:
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch.manual_seed(0)
    warnings.filterwarnings('ignore')
    print('\n' + json.dumps(measure(what, library, workload)))


if __name__ == '__main__':
    main()
