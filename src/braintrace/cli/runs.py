"""Commands that train: train, compare."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .. import compile as compile_model
from .. import plots
from .._brainstate import brainstate
from ..checkpoint import complete
from ..errors import printable, three_parts
from ..files import alone_in, write_whole
from ..history import History
from ..learner import Learner
from ..networks import network
from ..overview import Overview, name_of
from ..rules import named
from ..supervised import Supervised
from ..tasks import task as make_task
from ..training import fit
from . import settings
from .look import Result, attempted, load, say, time_step
from .processes import join
from .settings import Config

_BY_TASK: dict[str, dict[str, Any]] = {
    'evidence': {
        'model': 'alif',
        'batch': 64,
        'updates': 140,
        'lr': 4e-3,
        'rate_target': 0.01,
    },
    'matching': {
        'model': 'gif',
        'batch': 64,
        'updates': 300,
        'lr': 1e-3,
        'rate_target': 0.02,
    },
    'copying': {'model': 'gru', 'batch': 32, 'updates': 1000, 'lr': 2e-3},
    'adding': {'model': 'gru', 'batch': 64, 'updates': 1000, 'lr': 3e-3},
    'pattern': {'model': 'alif', 'batch': 4, 'updates': 300, 'lr': 5e-3},
    'digits': {'model': 'gru', 'batch': 64, 'updates': 1000, 'lr': 3e-3},
    'randman': {'model': 'alif', 'batch': 64, 'updates': 300, 'lr': 5e-3},
}
_READOUT_REACH = {('evidence', 'alif', 'd_rtrl')}
"""Task, network and rule whose traces include the memory of the leaky read-out."""
_HELD_OUT = 10**9
"""Number of the first batch that no training sees."""


def _config(options: argparse.Namespace) -> Config:
    names = ['rule', 'model', 'units', 'batch', 'updates', 'lr', 'seed', 'save_every']
    names += ['certificate_every', 'dt']
    given = {n: getattr(options, n, None) for n in names}
    chosen = {name: value for name, value in given.items() if value is not None}
    defaults = _BY_TASK.get(options.task, {})
    config = Config(options.task, **{**defaults, **chosen, **_tables(options)})
    if (config.task, config.model, config.rule.lower()) in _READOUT_REACH:
        config.rule_options.setdefault('reach', 'readout')
    return config


def _tables(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Options of the task and of the rule."""
    return {
        'task_options': dict(options.task_option),
        'rule_options': dict(options.rule_option),
    }


def _prepare(
    config: Config, mesh: Mesh | None = None
) -> tuple[Learner, Supervised, Any]:
    """Learner, task and optimiser of a training."""
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            three_parts(
                'training',
                'weights are updated by optax, which is not installed',
                "pip install 'braintrace-online[train]'",
            )
        ) from error
    task = make_task(config.task, **config.task_options)
    task.batch(
        np.random.default_rng(0), 1
    )  # missing data is reported before anything is compiled
    brainstate.random.seed(config.seed)
    if config.names_code:
        if config.units is not None:
            raise ValueError(
                three_parts(
                    f'--units with {config.model}',
                    'the size of a model of your own is set by its own arguments',
                    '--model '
                    f"'{config.model.partition('(')[0]}(units={config.units})', if "
                    'it has such an argument',
                )
            )
        net = load(config.model, task.inputs, task.outputs)
    else:
        units = {} if config.units is None else {'units': config.units}
        net = network(
            config.model, task.inputs, task.outputs, seed=config.seed, **units
        )
    example = jnp.zeros((config.batch, task.inputs))
    learner = compile_model(
        net,
        config.rule,
        example,
        batch_size=config.batch,
        mesh=mesh,
        **config.rule_options,
    )
    _check_fit(learner, config, task)
    target = config.rate_target if hasattr(net, 'rate') else None
    penalty = None if target is None else lambda: net.rate.penalty(target)
    supervised = Supervised(
        learner, task, config.batch, seed=config.seed, penalty=penalty
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(config.lr))
    return learner, supervised, optimizer


def _check_fit(learner: Learner, config: Config, task: Any) -> None:
    """Raise unless this learner can be trained on a task."""
    shapes = [v.aval.shape for v in learner.report.program.outputs]
    if shapes != [(config.batch, task.outputs)]:
        raise ValueError(
            three_parts(
                f'--model {config.model}, whose step gives '
                f'{", ".join(map(str, shapes)) or "nothing"}',
                f'{config.task} compares it with targets of shape '
                f'{(config.batch, task.outputs)}',
                'a factory whose second argument is the number of outputs',
            )
        )
    if learner.rule.is_modulated:
        raise ValueError(
            three_parts(
                f'--rule {config.rule}',
                'it learns from a modulator, and a task gives a loss',
                'another rule; in Python, learner(x, modulator=...)',
            )
        )


def _folder(options: argparse.Namespace, name: str) -> Path:
    """The given folder, or a new one."""
    if options.out and Path(options.out).is_file():
        raise FileExistsError(
            three_parts(f'--out {options.out}', 'it is a file', 'the name of a folder')
        )
    if options.out:
        return Path(options.out)
    start = Path('out')
    return next(
        p
        for n in range(1, 10**6)
        if not (p := start / (name if n == 1 else f'{name}-{n}')).exists()
    )


def _held_out(supervised: Supervised, batches: int = 8) -> dict[str, float]:
    """Metrics of trials that training never saw."""
    found = []
    for i in range(batches):
        data = supervised.batches(_HELD_OUT + i)
        data = supervised.learner.placed(*data)
        _, outputs = supervised.learner.evaluate(*data, step_fn=supervised.step_fn)
        found.append(supervised.metrics(outputs, *data))
    return {name: float(np.mean([f[name] for f in found])) for name in found[0]}


def train(options: argparse.Namespace) -> Result:
    """Train a network on a task, or go on training it."""
    if (options.task is None) == (options.resume is None):
        given = (
            'neither a task nor a folder'
            if options.task is None
            else f'both {options.task} and --resume'
        )
        raise ValueError(
            three_parts(
                f'train with {given}',
                'it starts on a task, or continues in a folder, whose settings name '
                'the task',
                'train TASK, or train --resume DIR',
            )
        )
    mesh = join(options)
    out, config = _begun(options) if options.resume is None else _resumed(options)
    with time_step(config.dt):
        return _trained(options, out, config, mesh)


def _trained(
    options: argparse.Namespace, out: Path, config: Config, mesh: Mesh | None
) -> Result:
    learner, supervised, optimizer = _prepare(config, mesh)
    memory = learner.memory_plan(supervised.task.steps)
    # Files are written by one process; the others compute with it.
    is_first = jax.process_index() == 0
    no_page = ''
    # A folder with more updates than requested keeps its number of updates.
    if is_first:
        with alone_in(out):
            if max(complete(out / 'checkpoints'), default=0) <= config.updates:
                settings.save(out, config)
        write_whole(out / 'report.txt', f'{learner.report}\n')
        page = lambda: learner.report.to_html(memory=memory)
        _, no_page = attempted(
            'report.html', lambda: write_whole(out / 'report.html', page())
        )
    say(f'{config.task} by {config.rule}, {config.updates} updates, results in {out}')
    say(f'gradients: {_gradients(learner)}')
    history = fit(
        learner,
        **supervised.parts(),
        optimizer=optimizer,
        updates=config.updates,
        out=out,
        save_every=config.save_every,
        certificate_every=config.certificate_every,
        resume=options.resume is not None,
    )
    result: dict[str, Any] = {
        'out': str(out),
        'ended': history.ended,
        'updates': history.updates,
    }
    if history.ended == 'interrupted':
        command = f'braintrace train --resume {printable(out)}'
        text = f'stopped at update {history.updates}; go on with: {command}'
        return result, text, 130
    final = _held_out(supervised)
    result['held_out'] = final
    metrics = ', '.join(f'{name} {value:.3f}' for name, value in final.items())
    if not is_first:
        return result, f'on unseen trials: {metrics}', 0
    # Before the pictures: whatever happens to these, the result is there.
    write_whole(out / 'result.json', json.dumps(result, indent=1) + '\n')
    say('drawing')
    note = f'{metrics} on unseen trials, after {history.updates} updates'
    drawn, failed = _draw(learner, supervised, history, out, note)
    if failed:
        result['failed_pictures'] = failed
    files = ', '.join([*drawn, 'report.txt' if no_page else 'report.html'])
    return (
        result,
        f'on unseen trials: {metrics}\npictures and report in {printable(out)}: '
        f'{files}',
        0,
    )


def _begun(options: argparse.Namespace) -> tuple[Path, Config]:
    """Folder and settings of a new training."""
    config = _config(options)
    out = _folder(options, config.task)
    # One that was ended while it wrote its first checkpoint left none that is complete.
    if complete(out / 'checkpoints'):
        raise FileExistsError(
            three_parts(
                f'--out {out}',
                'it holds the files of a training',
                f'another folder, or braintrace train --resume {out}',
            )
        )
    if (out / 'config.json').exists():
        say(
            f'{out} holds a training without a complete checkpoint; this one takes '
            'its place'
        )
    return out, config


def _gradients(learner: Learner) -> str:
    """How many arrays of parameters get which gradient."""
    found = Counter(given.kind for given in learner.report.gradients.values())
    return ', '.join(f'{n} {name}' for name, n in found.items()) + ' (report.txt)'


def _resumed(options: argparse.Namespace) -> tuple[Path, Config]:
    """Folder and settings of a training that goes on."""
    out = Path(options.resume)
    config = settings.read(out)
    given = {
        name: getattr(options, name)
        for name in ('rule', 'model', 'units', 'batch', 'lr', 'seed', 'dt')
    }
    given |= _tables(options)
    flags = {name: '--' + name.replace('_options', '-option') for name in given}
    # What is given again as it was is no change; of options, those that are given.
    before = {name: getattr(config, name) for name in given}
    same = lambda old, new: (
        new.items() <= old.items() if isinstance(old, dict) else new in (None, old)
    )
    changed = [flags[name] for name in given if not same(before[name], given[name])]
    changed += ['--out'] if options.out is not None else []
    if changed:
        raise ValueError(
            three_parts(
                f'--resume with {", ".join(changed)}',
                'a training continues with its first settings: only --updates, '
                '--save-every '
                'and --certificate-every may change',
                'train --resume DIR --updates N, or a new training',
            )
        )
    settings.check_trust(config, out, options.trust or options.model is not None)
    new = {name: getattr(options, name) for name in settings.CHANGEABLE}
    return out, replace(
        config, **{name: value for name, value in new.items() if value is not None}
    )


def _draw(
    learner: Learner, supervised: Supervised, history: History, out: Path, note: str
) -> tuple[list[str], dict[str, str]]:
    """Draw all pictures: the names of those drawn, and why others failed."""
    trial, task = supervised.batches(_HELD_OUT), supervised.task
    curves = {learner.rule.name: [history]}
    whole = cache(lambda: Overview(learner, task, trial, history))
    heading = (name_of(task), note)
    pictures: dict[str, Callable[[Path], Any]] = {
        'overview.png': lambda file: whole().save(file, *heading),
        'overview-dark.png': lambda file: whole().save(file, *heading, dark=True),
        'learning.png': lambda file: plots.learning_curves(curves, file),
        'activity.png': lambda file: plots.activity(learner, trial, task.kind, file),
        'traces.png': lambda file: plots.traces(learner, trial[0], file),
    }
    if jax.process_count() > 1:
        # The others need activity of which each process has its own samples.
        pictures = {'learning.png': pictures['learning.png']}
    drawn, failed = [], {}
    for name, draw in pictures.items():
        found, reason = attempted(name, lambda draw=draw, name=name: draw(out / name))
        if reason:
            failed[name] = reason
        elif found is not False:  # a rule without traces has none to draw
            drawn.append(name)
    return drawn, failed


def compare(options: argparse.Namespace) -> Result:
    """Train by several rules from the same seeds."""
    out = _folder(options, f'compare-{options.task}')
    for rule in options.rules:
        named(rule)  # an unknown rule is reported before others are trained
    found: dict[str, list[History]] = {}
    finals: dict[str, list[dict[str, float]]] = {}
    for rule in options.rules:
        for seed in range(options.seed, options.seed + options.seeds):
            options.rule = rule
            config = replace(_config(options), seed=seed)
            learner, supervised, optimizer = _prepare(config)
            say(f'{rule}, seed {seed}')
            history = fit(
                learner,
                **supervised.parts(),
                optimizer=optimizer,
                updates=config.updates,
            )
            if history.ended == 'interrupted':
                raise KeyboardInterrupt
            found.setdefault(rule, []).append(history)
            finals.setdefault(rule, []).append(_held_out(supervised))
    out.mkdir(parents=True, exist_ok=True)
    metric = next(iter(finals[options.rules[0]][0]))
    values = {rule: [f[metric] for f in fs] for rule, fs in finals.items()}
    result = {'out': str(out), 'metric': metric, 'rules': values}
    write_whole(out / 'compare.json', json.dumps(result, indent=1) + '\n')
    picture = out / 'compare.png'
    _, reason = attempted(picture.name, lambda: plots.learning_curves(found, picture))
    if reason:
        result['failed_pictures'] = {picture.name: reason}
    rows = [
        f'{rule:12}{np.mean(v):8.3f}  [{min(v):.3f}, {max(v):.3f}]'
        for rule, v in values.items()
    ]
    rows += [] if reason else [f'picture: {printable(picture)}']
    return result, '\n'.join([f'{metric} on unseen trials', *rows]), 0
