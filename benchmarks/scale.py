"""Time of a gradient on several devices and processes of this machine, as ratios.

    python benchmarks/scale.py [--rounds 5] [--workloads gru,adaptive] [--short]

Strong scaling: the same batch on more devices. Weak scaling: the same number of samples
on each. Devices are those that JAX emulates on the CPU, so only as many help as there
are cores; beyond that the tables show what splitting costs. The ratio is that to one
device on one core.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
WORKLOADS = {
    'gru': {'units': 256, 'inputs': 16, 'batch': 32, 'steps': 200},
    'adaptive': {'units': 512, 'inputs': 100, 'batch': 16, 'steps': 200},
}


def measure(given: dict) -> dict:
    """One process: milliseconds of a gradient, fresh and carried."""
    import jax

    if given['processes'] > 1:
        jax.distributed.initialize(
            given['address'], given['processes'], given['process']
        )
    import brainstate
    import jax.numpy as jnp
    import models
    import numpy as np

    import braintrace

    work = WORKLOADS[given['workload']]
    batch, inputs, units = given['batch'], work['inputs'], work['units']
    brainstate.random.seed(0)
    if given['workload'] == 'gru':
        net = models.Gated(brainstate.nn, 'GRUCell', inputs, units)
    else:
        net = models.AdaptiveLIF(brainstate.nn, inputs, units)
    count = jax.device_count()
    options = {} if count == 1 else {'mesh': jax.make_mesh((count,), ('data',))}
    learner = braintrace.compile(
        net, 'd_rtrl', jnp.zeros((batch, inputs)), batch_size=batch, **options
    )
    rng = np.random.default_rng(1)
    xs = rng.normal(size=(work['steps'], batch, inputs)).astype('float32')
    ys = rng.normal(size=(work['steps'], batch, models.OUTPUTS)).astype('float32')
    xs, ys = learner.placed(xs[:, learner.own_samples], ys[:, learner.own_samples])
    step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    found = {}
    for name, fresh in (('fresh', True), ('carried', False)):
        run = lambda fresh=fresh: jax.block_until_ready(
            learner.etrace_grad(xs, ys, step_fn=step, fresh=fresh)
        )
        run()
        run()
        times = []
        for _ in range(given['rounds']):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        found[name] = 1e3 * min(times)
    plan = learner.memory_plan(work['steps'])
    return {**found, 'trace_bytes': sum(plan.traces.values())}


def timed(workload: str, batch: int, devices: int, processes: int, **more) -> dict:
    """What processes with so many devices each measure; the slowest counts."""
    with socket.socket() as found:
        found.bind(('localhost', 0))
        address = f'localhost:{found.getsockname()[1]}'
    given = {'workload': workload, 'batch': batch, 'processes': processes}
    given |= {'address': address, **more}
    started = []
    for process in range(processes):
        text = json.dumps({**given, 'process': process})
        started.append(
            subprocess.Popen(
                [sys.executable, __file__, '--measure', text],
                env=os.environ
                | {'JAX_NUM_CPU_DEVICES': str(devices), 'JAX_PLATFORMS': 'cpu'},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    found = [json.loads(p.communicate()[0].splitlines()[-1]) for p in started]
    return {name: max(f[name] for f in found) for name in found[0]}


def table(title: str, rows: list[tuple], best: dict) -> None:
    """Rows of label, samples and what was measured, beside one device on one core."""
    print(f'\n{title}\n')
    print('| on | samples | fresh ms | ratio | carried ms | ratio | trace a device |')
    print('| --- | --- | --- | --- | --- | --- | --- |')
    for label, samples, work, found in rows:
        ratio = lambda way, found=found, work=work: work * best[way] / found[way]
        print(
            f'| {label} | {samples} | {found["fresh"]:.0f} | {ratio("fresh"):.2f} '
            f'| {found["carried"]:.0f} | {ratio("carried"):.2f} '
            f'| {found["trace_bytes"] / 2**20:.1f} MiB |',
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--workloads', default='gru,adaptive')
    parser.add_argument('--short', action='store_true', help='one and two devices')
    parser.add_argument('--measure', help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        given = json.loads(options.measure)
        if given.get('core') is not None:
            os.sched_setaffinity(0, {given['core']})
        print(json.dumps(measure(given)))
        return
    counts = (1, 2) if options.short else (1, 2, 4, 8)
    print(f'{os.cpu_count()} cores; the ratio is that to one device on one core')
    for workload in options.workloads.split(','):
        batch = WORKLOADS[workload]['batch']
        more = {'rounds': options.rounds}
        alone = timed(workload, batch, 1, 1, core=0, **more)
        rows = [('1 device, 1 core', batch, 1, alone)]
        for n in counts:
            rows.append(
                (f'{n} devices', batch, 1, timed(workload, batch, n, 1, **more))
            )
        for n in counts[1:3]:
            rows.append(
                (f'{n} processes', batch, 1, timed(workload, batch, 1, n, **more))
            )
        table(f'{workload}, strong scaling', rows, alone)
        if options.short:
            continue
        each = batch // 2
        alone = timed(workload, each, 1, 1, core=0, **more)
        rows = [('1 device, 1 core', each, 1, alone)]
        for n in counts[1:]:
            found = timed(workload, each * n, n, 1, **more)
            rows.append((f'{n} devices', each * n, n, found))
        table(f'{workload}, weak scaling: {each} samples a device', rows, alone)


if __name__ == '__main__':
    main()
