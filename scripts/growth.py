"""How time and memory grow with the number of synapses, beside the model's own forward pass and BPTT.

    python scripts/growth.py                         # 1e3 to 1e7 synapses, one sample
    python scripts/growth.py --sizes 20000x8 131072x8 --batch 32 --steps 30 --rules pp_prop bptt
    python scripts/growth.py --most 1e5 --markdown

Every row is a process of its own on one core, and times are processor times. The model has leaky spiking neurons
with a fixed number of targets each, four fifths of which excite; `forward` is the same model run by brainstate with
brainevent's own operations, `own_bptt` the gradient of that by `brainstate.transform.grad`. `compile` is the time of
`braintrace.compile`, `first` that of the first call with XLA's compilation, both in seconds; all others are
milliseconds for each step.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time

RULES = ('pp_prop', 'd_rtrl', 'bptt', 'own_bptt')
OUTPUTS, INPUTS = 5, 10


def sizes_up_to(most: float, fan: int) -> list[tuple[int, int]]:
    """(neurons, targets of each) by powers of ten."""
    counts = [10**n for n in range(3, 9) if 10**n <= most]
    return [(count // fan, fan) for count in counts]


def model(neurons: int, fan: int, events: bool):
    """A network of the workload."""
    import brainevent
    import brainstate
    import jax
    import jax.numpy as jnp
    import numpy as np

    from braintrace.networks import fire

    class Network(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            rng = np.random.default_rng(0)
            array = lambda x: jnp.asarray(x, jnp.float32)
            count = neurons * fan
            signs = np.where(np.arange(neurons) < 0.8 * neurons, 1.0, -4.0)
            self.scale = array(np.repeat(signs, fan) / np.sqrt(fan))
            targets = rng.integers(0, neurons, count)
            self.targets = jnp.asarray(targets, jnp.int32)
            self.starts = jnp.arange(0, count + 1, fan, dtype=jnp.int32)
            self.synapses = brainstate.ParamState(array(rng.normal(-1, 0.3, count)))
            self.feed = array(rng.normal(0, 0.1, (INPUTS, neurons)))
            self.members = rng.integers(0, neurons, (OUTPUTS, max(neurons // 50, 1)))

        def init_state(self, batch_size=None, **kwargs):
            samples = () if batch_size is None else (batch_size,)
            self.V = brainstate.HiddenState(jnp.zeros((*samples, neurons)))

        def update(self, x):
            fired = fire(self.V.value - 1.0)
            given = brainevent.BinaryArray(fired) if events else fired
            weights = jax.nn.softplus(self.synapses.value) * self.scale
            matrix = (weights, self.targets, self.starts)
            current = given @ brainevent.CSR(matrix, shape=(neurons, neurons))
            current = current + x @ self.feed + 0.1
            self.V.value = 0.9 * self.V.value + current - jax.lax.stop_gradient(fired)
            return fire(self.V.value - 1.0)[..., self.members].mean(axis=-1)

    return Network()


def timed(run, least: float = 0.5) -> float:
    """Seconds of the fastest of at least two runs."""
    found: list[float] = []
    while len(found) < 2 or sum(found) < least:
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


def measure(
    neurons: int, fan: int, batch: int, steps: int, events: bool, what: str
) -> dict[str, float]:
    """Times of one rule, or of the forward pass, and the memory that the process used."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import brainstate
    import jax
    import jax.numpy as jnp
    import numpy as np

    import braintrace

    samples = batch or None
    net = model(neurons, fan, events)
    rng = np.random.default_rng(1)
    shape = (steps, batch) if batch else (steps,)
    xs = jnp.asarray(rng.normal(size=(*shape, INPUTS)), jnp.float32)
    found = {}
    if what in ('forward', 'own_bptt'):
        brainstate.nn.init_all_states(net, batch_size=samples)

        def outputs():
            net.V.value = jnp.zeros_like(net.V.value)
            return brainstate.transform.for_loop(net.update, xs)

        loss = lambda: jnp.mean((outputs() - 0.1) ** 2)
        gradient = brainstate.transform.grad(loss, net.states(brainstate.ParamState))
        run = brainstate.transform.jit(outputs if what == 'forward' else gradient)
    else:
        given = {'decay_or_rank': 0.9} if what == 'pp_prop' else {}
        start = time.process_time()
        learner = braintrace.compile(net, what, xs[0], batch_size=samples, **given)
        found['compile'] = time.process_time() - start
        step_fn = lambda x: jnp.mean((learner(x) - 0.1) ** 2)
        run = lambda: learner.etrace_grad(xs, step_fn=step_fn)
    start = time.process_time()
    jax.block_until_ready(run())
    found['first'] = time.process_time() - start
    found[what] = 1000 * timed(lambda: jax.block_until_ready(run())) / steps
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found['GiB'] = used / 2**20
    return found


def in_process(arguments: list, limit: float) -> dict[str, float] | None:
    """What :func:`measure` gives in a process of its own; None if it takes too long."""
    command = [sys.executable, __file__, '--one', json.dumps(arguments)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        print(done.stderr[-500:], file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--sizes', nargs='*', help='neurons x targets, as 20000x8')
    parser.add_argument('--most', type=float, default=1e7, help='synapses')
    parser.add_argument('--fan', type=int, default=20, help='targets of each neuron')
    parser.add_argument('--batch', type=int, default=0, help='0: no axis of samples')
    parser.add_argument('--steps', type=int, default=20)
    parser.add_argument('--rules', nargs='*', default=['pp_prop'], choices=RULES)
    parser.add_argument('--float', action='store_true', help='spikes as plain numbers')
    parser.add_argument('--limit', type=float, default=600, help='seconds of a row')
    parser.add_argument('--markdown', action='store_true')
    parser.add_argument('--one', help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(*json.loads(given.one))))
        return
    sizes = sizes_up_to(given.most, given.fan)
    if given.sizes:
        sizes = [tuple(map(int, size.split('x'))) for size in given.sizes]
    columns = ['neurons', 'synapses', 'forward']
    for rule in given.rules:
        columns += [rule, 'ratio', 'compile', 'first', 'GiB']
    line = ' | '.join if given.markdown else '  '.join
    show = lambda cells: print(line(f'{c:>10}' for c in cells).strip(), flush=True)
    show(columns)
    if given.markdown:
        show(['---:'] * len(columns))
    for neurons, fan in sizes:
        cells = [f'{neurons:,}', f'{neurons * fan:,}']
        rest = [neurons, fan, given.batch, given.steps, not given.float]
        forward = in_process([*rest, 'forward'], given.limit)
        cells.append(f'{forward["forward"]:.3g}' if forward else '-')
        for rule in given.rules:
            found = in_process([*rest, rule], given.limit)
            if found is None or forward is None:
                cells += ['-'] * 5
                continue
            ratio = found[rule] / forward['forward']
            compiled = found.get('compile', 0.0)
            cells += [f'{found[rule]:.3g}', f'{ratio:.2f}', f'{compiled:.1f}']
            cells += [f'{found["first"]:.1f}', f'{found["GiB"]:.2f}']
        show(cells)


if __name__ == '__main__':
    main()
