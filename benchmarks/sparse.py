"""Sparse networks beside the published package, their own forward pass and BPTT, in one run.

    python benchmarks/sparse.py [--only 20000,131072] [--spikes events] [--rounds 3] [--quick]

Both sides run the same models, weights, data and losses, in turn, on one core. Times are those of the processor, so
that other programs on the machine matter less. Spikes are multiplied as numbers or as events, which the published
package's sparse product does not take. ``MiB`` is the most that a call occupies, inputs and Python itself aside.
Tables go to the screen, to ``sparse.json`` and to ``docs/scale.md``; those of ``--quick`` and ``--no-peer`` to the
screen only.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median

import models
import report
import run
import sparse_table


def workloads(quick: bool = False) -> list[models.Workload]:
    """Two sizes, with spikes as numbers and as events."""
    found = []
    for units, batch, peer_steps in ((20_000, 8, 30), (131_072, 32, 5)):
        for events in (False, True):
            sizes = {'units': units, 'synapses': 8, 'events': events}
            title = f'{units:,} neurons, {8 * units:,} synapses, batch {batch}, T 30, '
            workload = models.Workload(
                str(units),
                title + ('events' if events else 'numbers'),
                models.SparseLIF,
                sizes,
                (units,),
                batch=batch,
                steps=30,
                variants=('pp_prop', 'd_rtrl_fresh', 'd_rtrl_carried'),
                peer=() if events else ('d_rtrl_carried', 'pp_prop'),
                peer_steps=peer_steps,
            )
            found.append(workload)
    return [models.tiny(w) for w in found] if quick else found


def measured(
    index: int, workload: models.Workload, pythons: dict, rounds: int, quick: bool
) -> dict:
    """A workload with seconds, peak memory and agreement of every variant."""
    # At the large size a call of BPTT or of the published package takes a minute.
    is_large = workload.batch > 8
    baselines = ('forward',) if is_large else run.BASELINES
    plan = [('ours', v) for v in (*baselines, *workload.variants)]
    plan += [('peer', v) for v in workload.peer if 'peer' in pythons]
    sides = {name: run.Side(name, python) for name, python in pythons.items()}
    for side in sides.values():
        side('open', index=index, quick=quick, source='sparse')
    found = {}
    for name, variant in plan:
        # Every step of the published package takes the same time.
        steps = workload.peer_steps if name == 'peer' else workload.steps
        print(f'  {name}: {variant}', end='', flush=True)
        answer = sides[name]('setup', variant=variant, steps=steps)
        is_long = is_large and name == 'peer'
        if 'error' not in answer and not is_long:
            answer |= sides[name]('peak', variant=variant)
        count = 1 if is_long else rounds
        times = []
        while 'error' not in answer and len(times) < count:
            answer |= sides[name]('run', variant=variant)
            times.append(answer.pop('processor', 0.0) * workload.steps / steps)
        if is_large:
            sides[name]('drop', variant=variant)
        print(f', {answer.get("error") or f"{median(times):.3g} s"}', flush=True)
        found[name, variant] = answer | {'seconds': times, 'steps': steps}
    if 'peer' in sides and not is_large:
        runs = {
            side: {v: row for (name, v), row in found.items() if name == side}
            for side in sides
        }
        for variant, gradients in run.agreement(workload, sides, runs).items():
            found['ours', variant]['gradients'] = report.verdict(gradients)
    for side in sides.values():
        side.close()
    rows = [{'side': side, 'variant': v} | row for (side, v), row in found.items()]
    return {'key': workload.key, 'title': workload.title, 'rows': rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--only', default='', help='numbers of neurons')
    parser.add_argument('--spikes', default='', choices=('numbers', 'events'))
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--quick', action='store_true', help='tiny sizes')
    parser.add_argument('--no-peer', action='store_true')
    given = parser.parse_args()
    pythons = {'ours': sys.executable}
    if not given.no_peer:
        pythons['peer'] = run.peer_python()
    for index, workload in enumerate(workloads(given.quick)):
        is_wanted = not given.only or workload.key in given.only.split(',')
        if not is_wanted or not workload.title.endswith(given.spikes):
            continue
        print(workload.title, flush=True)
        found = measured(index, workload, pythons, given.rounds, given.quick)
        print(f'\n{sparse_table.table(found, judged=not given.quick)}\n', flush=True)
        for row in found['rows']:
            about = [row[k] for k in ('error', 'gradients') if k in row]
            if about:
                print(f'{row["side"]}, {report.NAMES[row["variant"]]}:', *about)
        if not given.quick and not given.no_peer:
            sparse_table.write([found])


if __name__ == '__main__':
    main()
