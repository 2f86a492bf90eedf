"""Learning, not only gradients: the reference tasks under several rules, with seeds and spread.

    python experiments/learning.py [TASK ...] [--rules d_rtrl,pp_prop,eprop,bptt] [--seeds 3] [--quick]

Writes one JSON file a task next to itself, and the table of all of them to ``LEARNING.md``.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import networks
import numpy as np
import optax

import braintrace
from braintrace import tasks

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Experiment:
    """A task, its network, how it is trained, and what counts as reached."""

    task: object
    network: Callable
    batch: int
    updates: int
    rate: float
    measure: str
    reached: Callable[[float], bool]
    wanted: str
    rules: tuple = ('d_rtrl', 'pp_prop', 'eprop', 'bptt')
    options: dict = field(default_factory=dict)
    rate_target: float | None = None
    online: bool = False
    clip: float = 1.0


def classes_loss(outputs, targets):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()


SERIES = ('snap', 'rtrl', 'rflo', 'eprop', 'pp_prop', 'd_rtrl')
EXPERIMENTS = {
    'evidence': Experiment(
        tasks.EvidenceAccumulation(),
        lambda seed: networks.Spiking(40, 2, seed=seed),
        64,
        250,
        5e-3,
        'accuracy',
        lambda a: a >= 0.93,
        'accuracy ≥ 0.93',
        options={'pp_prop': {'decay_or_rank': 0.99}, 'eprop': {'feedback': 'random', 'kappa_filter_decay': 0.951}},
        rate_target=0.01,
    ),
    'matching': Experiment(
        tasks.DelayedMatchToSample(),
        lambda seed: networks.Slow(100, 2, seed=seed),
        64,
        300,
        1e-3,
        'accuracy',
        lambda a: a >= 0.95,
        'accuracy ≥ 0.95',
        options={'pp_prop': {'decay_or_rank': 0.99}, 'eprop': {'feedback': 'random'}},
        rate_target=0.02,
    ),
    'copying': Experiment(
        tasks.Copying(),
        lambda seed: networks.Recurrent('GRUCell', 10, 64, 8, slow=1.0),
        32,
        200,
        2e-3,
        'loss',
        lambda v: v < 2.079,
        'cross-entropy below chance, 2.079',
    ),
} | {
    name: Experiment(
        tasks.Series(name, steps=15000),
        lambda seed: networks.Recurrent('ValinaRNNCell', 1, 64, 1),
        8,
        1,
        1e-3,
        'error',
        lambda v, most=most: v <= most,
        f'error / variance ≤ {most}',
        rules=SERIES,
        options={'rflo': {'leak': 0.5}},
        online=True,
    )
    for name, most in [('mackey_glass', 0.018), ('lorenz', 0.0051), ('henon', 0.0704)]
}


def train(experiment: Experiment, rule: str, seed: int, report: Callable[[str], None]) -> dict:
    """One network under one rule; its final measure and its course."""
    rng = np.random.default_rng(seed)
    brainstate.random.seed(seed)
    net, task = experiment.network(seed), experiment.task
    first = task.batch(np.random.default_rng(0), experiment.batch)
    learner = braintrace.compile(
        net, rule, jnp.asarray(first.inputs[0]), batch_size=experiment.batch, **experiment.options.get(rule, {})
    )
    transform = optax.chain(optax.clip_by_global_norm(experiment.clip), optax.adam(experiment.rate))
    loss = classes_loss if task.kind == 'classes' else lambda out, y: jnp.mean((out - y) ** 2)

    def step(x, y, weight):
        outputs, rate = learner(x)
        value = weight * loss(outputs, y)
        if experiment.rate_target is not None:
            value = value + 0.5 * jnp.mean((rate.mean(0) - experiment.rate_target) ** 2) / experiment.rate_target
        return value, outputs

    start = time.perf_counter()
    if experiment.online:
        xs, ys, _ = (jnp.asarray(v) for v in task.batch(rng, experiment.batch))
        losses = learner.etrace_online(xs, ys, step_fn=lambda x, y: step(x, y, 1.0)[0], optimizer=transform)
        final = float(losses[-len(losses) // 5 :].mean())
        course = [float(v) for v in losses.reshape(30, -1).mean(1)]
        report(f'error {final:.4f}')
        return {'final': final, 'course': course, 'seconds': time.perf_counter() - start}

    weights = net.states(brainstate.ParamState)
    state = transform.init({path: s.value for path, s in weights.items()})
    apply = jax.jit(lambda g, s, p: transform.update(g, s, p))
    course = []
    for i in range(experiment.updates):
        xs, ys, w = (jnp.asarray(v) for v in task.batch(rng, experiment.batch))
        scaled = w * len(w) / w.sum()
        gradients, losses, outputs = learner.etrace_grad(
            xs, ys, scaled, step_fn=step, fresh=True, has_aux=True, return_value=True
        )
        values = {path: s.value for path, s in weights.items()}
        changes, state = apply(gradients, state, values)
        for path, s in weights.items():
            s.value = jax.tree.map(jnp.add, s.value, changes[path])
        counted = np.asarray(w) > 0
        said = jnp.asarray(outputs)[counted]
        value = float(loss(said, ys[counted]))
        if task.kind == 'classes' and experiment.measure == 'accuracy':
            value = float((said.mean(0).argmax(-1) == ys[-1]).mean())
        course.append(value)
        if (i + 1) % 20 == 0:
            report(f'{i + 1} of {experiment.updates}: {experiment.measure} {np.mean(course[-20:]):.4f}')
    return {'final': float(np.mean(course[-20:])), 'course': course, 'seconds': time.perf_counter() - start}


def run(name: str, experiment: Experiment, rules: tuple, seeds: int) -> None:
    """Train all, and keep what came out; results of other rules stay."""
    file = HERE / f'{name}.json'
    found = json.loads(file.read_text())['rules'] if file.exists() else {}
    for rule in rules:
        runs = []
        for seed in range(seeds):
            tell = lambda text, rule=rule, seed=seed: print(f'{name:12} {rule:8} seed {seed}  {text}', flush=True)
            runs.append(train(experiment, rule, seed, tell))
        found[rule] = runs
        content = {'wanted': experiment.wanted, 'measure': experiment.measure, 'reference': experiment.task.reference}
        file.write_text(json.dumps({**content, 'rules': found}, indent=1) + '\n')


def table() -> str:
    """All results there are, as Markdown."""
    lines = ['# Learning', '', 'Made by `python experiments/learning.py`; mean [least, most] over seeds.', '']
    lines += [
        '| task | rule | measure | result | wanted | reached | seconds |',
        '| --- | --- | --- | --- | --- | --- | --- |',
    ]
    for name, experiment in EXPERIMENTS.items():
        file = HERE / f'{name}.json'
        if not file.exists():
            continue
        for rule, runs in json.loads(file.read_text())['rules'].items():
            finals = [r['final'] for r in runs]
            good = sum(map(experiment.reached, finals))
            seconds = np.mean([r['seconds'] for r in runs])
            spread = f'[{min(finals):.4f}, {max(finals):.4f}]'
            lines.append(
                f'| {name} | {rule} | {experiment.measure} | {np.mean(finals):.4f} {spread} '
                f'| {experiment.wanted} | {good} of {len(finals)} | {seconds:.0f} |'
            )
    references = [
        f'- {name}: {e.task.reference}' for name, e in EXPERIMENTS.items() if (HERE / f'{name}.json').exists()
    ]
    return '\n'.join([*lines, '', 'References:', '', *references]) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('tasks', nargs='*', choices=[*EXPERIMENTS, []], help='all by default')
    parser.add_argument('--rules', type=lambda text: tuple(text.split(',')))
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--updates', type=int)
    options = parser.parse_args()
    for name in options.tasks or EXPERIMENTS:
        experiment = EXPERIMENTS[name]
        if options.updates:
            experiment = replace(experiment, updates=options.updates)
        run(name, experiment, options.rules or experiment.rules, options.seeds)
    (HERE / 'LEARNING.md').write_text(table())


if __name__ == '__main__':
    main()
