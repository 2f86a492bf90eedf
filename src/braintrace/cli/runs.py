"""Commands that train: train, compare."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import brainstate
import jax.numpy as jnp
import numpy as np

from .. import compile as compile_model
from .. import plots
from ..errors import three_parts
from ..learner import Learner
from ..networks import network
from ..rules import named
from ..tasks import task as make_task
from ..training import History, Supervised, fit
from .look import Result, load

_BY_TASK: dict[str, dict[str, Any]] = {
    'evidence': {'model': 'alif', 'batch': 64, 'updates': 140, 'lr': 4e-3, 'rate_target': 0.01},
    'matching': {'model': 'gif', 'batch': 64, 'updates': 300, 'lr': 1e-3, 'rate_target': 0.02},
    'copying': {'model': 'gru', 'batch': 32, 'updates': 1000, 'lr': 2e-3},
    'adding': {'model': 'gru', 'batch': 64, 'updates': 1000, 'lr': 3e-3},
    'pattern': {'model': 'alif', 'batch': 4, 'updates': 300, 'lr': 5e-3},
    'digits': {'model': 'gru', 'batch': 64, 'updates': 1000, 'lr': 3e-3},
    'randman': {'model': 'alif', 'batch': 64, 'updates': 300, 'lr': 5e-3},
}
_HELD_OUT = 10**9
"""Number of the first batch that no training sees."""


@dataclass(frozen=True)
class Config:
    """All that a training is made from."""

    task: str
    rule: str = 'd_rtrl'
    model: str = 'gru'
    units: int | None = None
    batch: int = 32
    updates: int = 500
    lr: float = 1e-3
    rate_target: float | None = None
    seed: int = 0
    task_options: dict[str, Any] = field(default_factory=dict)
    rule_options: dict[str, Any] = field(default_factory=dict)


def _config(options: argparse.Namespace) -> Config:
    given = {n: getattr(options, n, None) for n in ('rule', 'model', 'units', 'batch', 'updates', 'lr', 'seed')}
    more = {'task_options': dict(options.task_option), 'rule_options': dict(options.rule_option)}
    chosen = {name: value for name, value in given.items() if value is not None}
    return Config(options.task, **{**_BY_TASK.get(options.task, {}), **chosen, **more})


def _prepare(config: Config) -> tuple[Learner, Supervised, Any]:
    """Learner, task and optimiser of a training."""
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            three_parts('training', 'optax updates weights', "pip install 'braintrace[train]'")
        ) from error
    task = make_task(config.task, **config.task_options)
    task.batch(np.random.default_rng(0), 1)  # data that cannot be had is told before anything is compiled
    brainstate.random.seed(config.seed)
    if ':' in config.model:
        if config.units is not None:
            raise ValueError(
                three_parts(
                    f'--units with {config.model}',
                    'a model of your own says itself how large it is',
                    f"--model '{config.model.partition('(')[0]}(units={config.units})', if it has such an argument",
                )
            )
        net = load(config.model, task.inputs, task.outputs)
    else:
        units = {} if config.units is None else {'units': config.units}
        net = network(config.model, task.inputs, task.outputs, seed=config.seed, **units)
    example = jnp.zeros((config.batch, task.inputs))
    learner = compile_model(net, config.rule, example, batch_size=config.batch, **config.rule_options)
    _check_fit(learner, config, task)
    target = config.rate_target if hasattr(net, 'rate') else None
    penalty = None if target is None else lambda: net.rate.penalty(target)
    supervised = Supervised(learner, task, config.batch, seed=config.seed, penalty=penalty)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(config.lr))
    return learner, supervised, optimizer


def _check_fit(learner: Learner, config: Config, task: Any) -> None:
    """Raise unless a task can teach this learner."""
    shapes = [v.aval.shape for v in learner.report.program.outputs]
    if shapes != [(config.batch, task.outputs)]:
        raise ValueError(
            three_parts(
                f'--model {config.model}, whose step gives {", ".join(map(str, shapes)) or "nothing"}',
                f'{config.task} compares it with targets of shape {(config.batch, task.outputs)}',
                'a factory that makes as many outputs as it is told by its second argument',
            )
        )
    if learner.rule.signal == 'modulatory':
        raise ValueError(
            three_parts(
                f'--rule {config.rule}',
                'it is taught by a modulator, and a task gives a loss',
                'another rule; in Python, learner(x, modulator=...)',
            )
        )


def _folder(options: argparse.Namespace, name: str) -> Path:
    """The folder asked for, or a new one."""
    if options.out and Path(options.out).is_file():
        raise FileExistsError(three_parts(f'--out {options.out}', 'it is a file', 'the name of a folder'))
    if options.out:
        return Path(options.out)
    start = Path('out')
    return next(p for n in range(1, 10**6) if not (p := start / (name if n == 1 else f'{name}-{n}')).exists())


def _held_out(supervised: Supervised, batches: int = 8) -> dict[str, float]:
    """Metrics of trials that training never saw."""
    found = []
    for i in range(batches):
        data = supervised.batches(_HELD_OUT + i)
        _, outputs = supervised.learner.evaluate(*data, step_fn=supervised.step_fn)
        found.append(supervised.metrics(outputs, *data))
    return {name: float(np.mean([f[name] for f in found])) for name in found[0]}


def train(options: argparse.Namespace) -> Result:
    """Train a network on a task, or go on training it."""
    if (options.task is None) == (options.resume is None):
        given = 'neither a task nor a folder' if options.task is None else f'both {options.task} and --resume'
        raise ValueError(
            three_parts(
                f'train with {given}',
                'it starts on a task, or goes on in a folder, which knows its task',
                'train TASK, or train --resume DIR',
            )
        )
    if options.resume:
        out, config = Path(options.resume), _resumed(options)
    else:
        config = _config(options)
        out = _folder(options, config.task)
        if [*(out / 'checkpoints').glob('*')]:  # a training that was stopped before its first update left none
            raise FileExistsError(
                three_parts(
                    f'--out {out}', 'it holds a training', f'another folder, or braintrace train --resume {out}'
                )
            )
    learner, supervised, optimizer = _prepare(config)
    out.mkdir(parents=True, exist_ok=True)
    save = lambda: (out / 'config.json').write_text(json.dumps(asdict(config), indent=1) + '\n')
    if not options.resume:
        save()
    (out / 'report.txt').write_text(f'{learner.report}\n')
    learner.write_report(out / 'report.html', steps=supervised.task.steps)
    tell = lambda text: print(text, file=sys.stderr, flush=True)
    tell(f'{config.task} by {config.rule}, {config.updates} updates, results in {out}')
    tell(f'gradients: {_gradients(learner)}')
    history = fit(
        learner, **supervised.parts(), optimizer=optimizer, updates=config.updates, out=out, resume=bool(options.resume)
    )
    if len(history.records) <= config.updates:
        save()  # with what is asked for from now on
    if history.ended == 'interrupted':
        text = f'stopped at update {len(history.records)}; go on with: braintrace train --resume {out}'
        return {'out': str(out), 'ended': history.ended, 'updates': len(history.records)}, text, 130
    tell('drawing')
    pictures = _draw(learner, supervised, history, out)
    final = _held_out(supervised)
    result = {'out': str(out), 'ended': history.ended, 'updates': len(history.records), 'held_out': final}
    (out / 'result.json').write_text(json.dumps(result, indent=1) + '\n')
    metrics = ', '.join(f'{name} {value:.3f}' for name, value in final.items())
    files = ', '.join(pictures)
    return result, f'on unseen trials: {metrics}\npictures and report in {out}: {files}, report.html', 0


def _gradients(learner: Learner) -> str:
    """How many arrays of parameters get which gradient."""
    found = Counter(given.kind for given in learner.report.gradients.values())
    return ', '.join(f'{n} {name}' for name, n in found.items()) + ' (report.txt)'


def _resumed(options: argparse.Namespace) -> Config:
    file = Path(options.resume) / 'config.json'
    if not file.exists():
        raise FileNotFoundError(
            three_parts(f'--resume {options.resume}', 'it holds no config.json', 'the folder of a training')
        )
    fixed = ('rule', 'model', 'units', 'batch', 'lr', 'seed', 'out')
    changed = [f'--{name}' for name in fixed if getattr(options, name) is not None]
    changed += ['--task-option'] * bool(options.task_option) + ['--rule-option'] * bool(options.rule_option)
    if changed:
        raise ValueError(
            three_parts(
                f'--resume with {", ".join(changed)}',
                'a training goes on as it began: only --updates may change',
                'train --resume DIR --updates N, or a new training',
            )
        )
    config = Config(**json.loads(file.read_text()))
    return config if options.updates is None else replace(config, updates=options.updates)


def _draw(learner: Learner, supervised: Supervised, history: History, out: Path) -> list[str]:
    """All pictures; their names."""
    trial = supervised.batches(_HELD_OUT)
    plots.learning_curves({learner.rule.name: [history]}, out / 'learning.png')
    plots.activity(learner, trial, supervised.task.kind, out / 'activity.png')
    drawn = plots.traces(learner, trial[0], out / 'traces.png')
    return ['learning.png', 'activity.png', *(['traces.png'] if drawn else [])]


def compare(options: argparse.Namespace) -> Result:
    """Train by several rules from the same seeds."""
    out = _folder(options, f'compare-{options.task}')
    for rule in options.rules:
        named(rule)  # one that is not known is told before others are trained
    found: dict[str, list[History]] = {}
    finals: dict[str, list[dict[str, float]]] = {}
    for rule in options.rules:
        for seed in range(options.seed, options.seed + options.seeds):
            options.rule = rule
            config = replace(_config(options), seed=seed)
            learner, supervised, optimizer = _prepare(config)
            print(f'{rule}, seed {seed}', file=sys.stderr, flush=True)
            history = fit(learner, **supervised.parts(), optimizer=optimizer, updates=config.updates)
            if history.ended == 'interrupted':
                raise KeyboardInterrupt
            found.setdefault(rule, []).append(history)
            finals.setdefault(rule, []).append(_held_out(supervised))
    out.mkdir(parents=True, exist_ok=True)
    plots.learning_curves(found, out / 'compare.png')
    metric = next(iter(finals[options.rules[0]][0]))
    values = {rule: [f[metric] for f in fs] for rule, fs in finals.items()}
    result = {'out': str(out), 'metric': metric, 'rules': values}
    (out / 'compare.json').write_text(json.dumps(result, indent=1) + '\n')
    rows = [f'{rule:12}{np.mean(v):8.3f}  [{min(v):.3f}, {max(v):.3f}]' for rule, v in values.items()]
    return result, '\n'.join([f'{metric} on unseen trials', *rows, f'picture: {out / "compare.png"}']), 0
