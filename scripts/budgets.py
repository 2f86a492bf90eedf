"""What calls cost, in numbers that are the same on every machine: no clock is read.

    python scripts/budgets.py            measure, write the file, print what changed
    python scripts/budgets.py --print    measure and print only

    walk        functions and files of the package that a first gradient enters
    calls       Python functions that a warm call enters: of the package, and in all
    lines       lines of StableHLO that a first call compiles, with ``loops`` of them and
                the number of ``programs``; this is what a first call takes
    memory      bytes of ``memory_plan``
    exchanges   collective operations of a gradient whose samples or neurons are split
                over eight devices

``tests/budgets/budgets.json`` has the numbers, and ``tests/budgets/test_budgets.py``
fails if one grows. Everything is measured from outside, by public names of the package
and by dumps of JAX and XLA, in processes of their own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FILE = HERE.parent / 'tests' / 'budgets' / 'budgets.json'
UNITS, BATCH = 64, 16
DEVICES = 8
COLLECTIVE = re.compile(
    r' (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)'
    r'(?:-start)?\('
)

FIRST_CALLS = [
    (cell, layers, *way)
    for cell, layers in (('GRU', 1), ('GRU', 4), ('LSTM', 4))
    for way in (
        ('bptt', 'fresh', 48),
        ('d_rtrl', 'fresh', 48),
        ('d_rtrl', 'carried', 48),
        ('pp_prop', 'carried', 48),
    )
] + [
    # Lengths that no block divides.
    ('GRU', 4, 'd_rtrl', 'carried', 47),
    ('GRU', 4, 'pp_prop', 'carried', 47),
    ('GRU', 4, 'pp_prop', 'carried', 50),
    ('GRU', 1, 'd_rtrl', 'stream', 1),
    ('GRU', 4, 'pp_prop', 'stream', 1),
]
"""Cell, layers, rule, way, steps."""


def made(
    cell: str, layers: int, rule: str, units: int, batch: int, **options: Any
) -> tuple[Any, Callable]:
    """A learner on a stack of layers, and a loss of one step."""
    import brainstate
    import jax.numpy as jnp

    import braintrace

    brainstate.random.seed(0)
    kind = getattr(brainstate.nn, f'{cell}Cell')
    model = brainstate.nn.Sequential(*(kind(units, units) for _ in range(layers)))
    if rule == 'pp_prop':
        options['decay_or_rank'] = 0.9
    x = jnp.ones((batch, units))
    learner = braintrace.compile(model, rule, x, batch_size=batch, **options)
    return learner, lambda x, y: jnp.mean((learner(x) - y) ** 2)


def data(steps: int, batch: int, units: int) -> tuple[Any, Any]:
    """Inputs and targets."""
    import jax.numpy as jnp

    shape = (steps, batch, units)
    return jnp.full(shape, 0.5), jnp.zeros(shape)


# ---------------------------------------------------------------- what is counted


def of_walk() -> dict[str, int]:
    """Counts of ``scripts/walk.py``; caches must be empty, so this is measured first."""
    from walk import walk

    entered = walk()
    return {
        'walk: functions': len(entered),
        'walk: files': len({file for file, _ in entered}),
    }


def of_warm_calls() -> dict[str, int]:
    """Python functions that a call enters when everything is compiled."""
    import optax

    import braintrace

    own = str(Path(braintrace.__file__).parent)
    counts: Counter[str] = Counter()

    def enter(frame: Any, event: str, _: Any) -> None:
        if event == 'call' and not frame.f_code.co_name.startswith('<'):
            counts['in all'] += 1
            counts['own'] += frame.f_code.co_filename.startswith(own)

    def counted(name: str, run: Callable[[], Any]) -> dict[str, int]:
        for _ in range(3):
            run()
        counts.clear()
        gc.collect()
        gc.disable()  # what is collected may have finalizers in Python
        sys.setprofile(enter)
        try:
            run()
        finally:
            sys.setprofile(None)
            gc.enable()
        return {f'calls: {name}, {kind}': counts[kind] for kind in ('own', 'in all')}

    learner, loss = made('GRU', 1, 'd_rtrl', units=4, batch=2)
    xs, ys = data(6, 2, 4)
    x, y = xs[0], ys[0]
    stream = learner.stream(loss, optax.sgd(0.01))
    return {
        **counted('etrace_grad', lambda: learner.etrace_grad(xs, ys, step_fn=loss)),
        **counted('learner(x)', lambda: learner(x)),
        **counted('stream(x, y)', lambda: stream(x, y)),
    }


def of_first_calls() -> dict[str, int]:
    """What the first call of a learner compiles."""
    import jax
    import optax

    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update('jax_dump_ir_to', folder)
        jax.config.update('jax_include_debug_info_in_dumps', 'false')
        for cell, layers, rule, way, steps in FIRST_CALLS:
            jax.clear_caches()  # so that no case depends on those before it
            learner, loss = made(cell, layers, rule, UNITS, BATCH)
            xs, ys = data(steps, BATCH, UNITS)
            x, y = xs[0], ys[0]
            for file in Path(folder).iterdir():
                file.unlink()
            if way == 'stream':
                learner.stream(loss, optax.sgd(0.01))(x, y)
            else:
                learner.etrace_grad(xs, ys, step_fn=loss, fresh=way == 'fresh')
            texts = [file.read_text() for file in Path(folder).iterdir()]
            name = f'{layers} {cell}, {rule} {way}, T {steps}'
            found |= {
                f'lines: {name}': sum(len(t.splitlines()) for t in texts),
                f'loops: {name}': sum(t.count('stablehlo.while') for t in texts),
                f'programs: {name}': len(texts),
            }
        jax.config.update('jax_dump_ir_to', '')
    return found


def of_memory() -> dict[str, int]:
    """Bytes that a sequence is planned to need."""
    found: dict[str, int] = {}
    for cell, rule in (('GRU', 'd_rtrl'), ('GRU', 'pp_prop'), ('LSTM', 'd_rtrl')):
        learner, _ = made(cell, 1, rule, UNITS, BATCH)
        plan = learner.memory_plan(48)
        sizes = {**dict(plan.ways), 'traces': sum(plan.traces.values())}
        found |= {f'memory: {cell}, {rule}, {k}': n for k, n in sizes.items()}
    return found


def of_devices() -> dict[str, int]:
    """Collective operations of gradients on eight devices; XLA has to have been told to
    write its programs to the folder of ``BUDGETS_DUMP``."""
    import jax

    folder = Path(os.environ['BUDGETS_DUMP'])
    splits = {
        'samples': ((8,), {'batch': 'data'}),
        'samples and neurons': ((4, 2), {'batch': 'data', 'neurons': 'model'}),
    }
    found: dict[str, int] = {}
    for cell, layers, rule in (('GRU', 1, 'd_rtrl'), ('LSTM', 2, 'pp_prop')):
        for split, (shape, shard) in splits.items():
            mesh = jax.make_mesh(shape, tuple(shard.values()))
            placed = {'mesh': mesh, 'shard': shard}
            learner, loss = made(cell, layers, rule, units=16, batch=8, **placed)
            for way in ('fresh', 'carried'):
                xs, ys = data(6, 8, 16)
                for file in folder.glob('*after_optimizations.txt'):
                    file.unlink()
                learner.etrace_grad(xs, ys, step_fn=loss, fresh=way == 'fresh')
                after = folder.glob('*after_optimizations.txt')
                count = sum(len(COLLECTIVE.findall(f.read_text())) for f in after)
                found[f'exchanges: {layers} {cell}, {rule} {way}, {split}'] = count
    return found


# ---------------------------------------------------------------- one process each

PARTS = {
    'one': (of_walk, of_warm_calls, of_first_calls, of_memory),
    'devices': (of_devices,),
}


def measured(part: str) -> dict[str, int]:
    """The numbers of a part, in this process."""
    import jax

    jax.config.update('jax_disable_most_optimizations', True)
    return {name: n for count in PARTS[part] for name, n in count().items()}


def in_process(part: str) -> dict[str, int]:
    """The numbers of a part, measured in a process that has done nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            'JAX_PLATFORMS': 'cpu',
            'JAX_NUM_CPU_DEVICES': '1',
            'PYTHONHASHSEED': '0',
            # That of the tests: what was compiled before is only traced and lowered.
            'JAX_COMPILATION_CACHE_DIR': str(HERE.parent / '.cache' / 'xla'),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        }
        if part == 'devices':
            settings['JAX_NUM_CPU_DEVICES'] = str(DEVICES)
            settings['BUDGETS_DUMP'] = folder
            settings['JAX_ENABLE_COMPILATION_CACHE'] = '0'  # it would dump nothing
            settings['XLA_FLAGS'] = f'--xla_dump_to={folder} --xla_dump_hlo_as_text'
        done = subprocess.run(
            [sys.executable, __file__, '--part', part],
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def versions() -> dict[str, str]:
    """Versions that the numbers depend on."""
    packages = ('jax', 'jaxlib', 'brainstate', 'brainunit', 'numpy')
    python = '.'.join(platform.python_version_tuple()[:2])
    return {name: version(name) for name in packages} | {'python': python}


def measure() -> dict[str, Any]:
    """Everything, as it is in the file."""
    numbers = {name: n for part in PARTS for name, n in in_process(part).items()}
    return {'versions': versions(), 'budgets': numbers}


def difference(old: dict[str, int], new: dict[str, int]) -> list[str]:
    """A line for every number that is not the same."""
    lines = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if before is None or after is None:
            lines.append(f'{name}: {before} -> {after}')
        elif before != after:
            percent = f' ({after / before - 1:+.1%})' if before else ''
            lines.append(f'{name}: {before} -> {after}{percent}')
    return lines


def main() -> None:
    """Measure; write the file unless only asked to print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--print', action='store_true', help='write nothing')
    parser.add_argument('--part', choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        print(json.dumps(measured(given.part)))
        return
    found = measure()
    text = json.dumps(found, indent=2, sort_keys=True)
    if given.print:
        print(text)
        return
    old = json.loads(FILE.read_text()) if FILE.exists() else {}
    FILE.write_text(text + '\n')
    changed = difference(old.get('budgets', {}), found['budgets'])
    changed += difference(old.get('versions', {}), found['versions'])
    print('\n'.join(changed) or 'nothing changed')


if __name__ == '__main__':
    main()
