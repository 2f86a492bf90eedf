"""Reference gradients: recorded numbers of every model under every rule, run in every
way, so that a change of the engine shows in which of them it changes anything.

A *pair* is a model and a rule; it is run in several *ways* (a fresh sequence, in two
halves, in blocks, as a stream, ...), in float64. Of each gradient the file keeps its
norm and its products with fixed random arrays, beside what the report says. Ways that
give the same gradient share its numbers. `scripts/reference.py` records and compares.

Only public names are used, so that the file outlives the engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace
from braintrace import MultiStepData
from reference_models import MODELS, STEPS, Built, drawn
from zoo import CASES
from zoo.base import seed

FILE = Path(__file__).parent / 'data' / 'reference.npz'
HALF = STEPS // 2
PROJECTIONS = 16
RATE = 1e-3  # of streams: small, so that rounding does not grow from step to step

# ---------------------------------------------------------------- ways of running


class Run:
    """A learner of a new model, about to be run along the model's sequences."""

    def __init__(self, built: Built, kind: Callable[..., Any], options: dict[str, Any]):
        self.learner = learner = built.learner(kind, options)
        self.sequences = (*built.inputs, *built.targets)
        self.mask = built.mask
        count = len(built.inputs)

        def step(*slices: Any) -> Any:
            outputs = built.call(learner, *slices[:count])
            return built.loss(learner, outputs, *slices[count:])

        def window(*slices: Any) -> Any:
            outputs = built.call(learner, *map(MultiStepData, slices[:count]))
            loss = lambda outputs, *ys: built.loss(learner, outputs, *ys)
            return jax.vmap(loss)(outputs, *slices[count:])

        self.step, self.window = step, window
        brainstate.random.seed(0)  # the draws of a run do not depend on compiling

    def part(self, steps: Any) -> tuple:
        return jax.tree.map(lambda x: x[steps], self.sequences)

    def gradient(self, steps: slice = slice(None), **how: Any) -> dict[str, np.ndarray]:
        """Gradients of a part of the sequences, and its losses."""
        if self.mask is not None:
            how['mask'] = self.mask[steps]
        step_fn = self.window if 'chunk_size' in how else self.step
        options = {'reduction': 'sum', 'return_value': True, **how}
        found = self.learner.etrace_grad(*self.part(steps), step_fn=step_fn, **options)
        gradient, losses = found
        if 'mask' in how:
            losses = losses[how['mask'] != 0]
        return {**named(gradient), '(losses)': np.asarray(losses)}

    def in_calls(self, function: Callable, parts: list) -> dict[str, np.ndarray]:
        """Gradients of a loss under brainstate's own grad, summed over calls."""
        parameters, total = self.learner.param_states, None
        for steps in parts:
            loss = lambda steps=steps: jnp.sum(function(*self.part(steps)))
            found = named(dict(brainstate.transform.grad(loss, parameters)()))
            total = found if total is None else {k: total[k] + found[k] for k in found}
        assert total is not None
        return total

    def moved(self, train: Callable[[optax.GradientTransformation], Any]) -> dict:
        """How far plain descent moves the weights, divided by its rate."""
        before = named(self.learner.weights())
        train(optax.sgd(RATE))
        after = named(self.learner.weights())
        return {name: (after[name] - x) / RATE for name, x in before.items()}


def halves(run: Run) -> dict[str, np.ndarray]:
    first, second = run.gradient(slice(HALF)), run.gradient(slice(HALF, None))
    losses = [x.pop('(losses)') for x in (first, second)]
    total = {name: first[name] + second[name] for name in first}
    return {**total, '(losses)': np.concatenate(losses)}


def padded(run: Run) -> dict[str, np.ndarray]:
    """Weights for the losses of steps, and at the end steps of weight 0 with NaN."""
    run.mask = np.array([1.0, 2.0, 0.0, 0.5, 0.0, 0.0])
    spoil = lambda x: x.at[-2:].set(jnp.nan) if is_float(x) else x
    run.sequences = jax.tree.map(lambda x: spoil(jnp.asarray(x)), run.sequences)
    return run.gradient(fresh=True)


def stream(run: Run) -> dict[str, np.ndarray]:
    def train(optimizer: optax.GradientTransformation) -> None:
        learning = run.learner.stream(run.step, optimizer)
        for t in range(HALF + 1):
            learning(*run.part(t))

    return run.moved(train)


def online(run: Run) -> dict[str, np.ndarray]:
    how = {'step_fn': run.step, 'update_every': 2, 'mask': run.mask}
    return run.moved(
        lambda optimizer: run.learner.etrace_online(
            *run.sequences, optimizer=optimizer, **how
        )
    )


WAYS: dict[str, tuple[dict[str, Any], Callable[[Run], dict[str, np.ndarray]]]] = {
    'fresh': ({}, lambda run: run.gradient(fresh=True)),
    'halves': ({}, halves),
    'single steps': ({}, lambda run: run.in_calls(run.step, list(range(STEPS)))),
    'stream': ({}, stream),
    'online': ({}, online),
    'blocks of 1': (
        {'passes': 1, 'block': 1},
        lambda run: run.gradient(fresh=True),
    ),
    'blocks of 4': ({'passes': 1, 'block': 4}, lambda run: run.gradient()),
    'two passes': ({'passes': 2, 'block': 4}, lambda run: run.gradient(fresh=True)),
    'windows': ({}, lambda run: run.gradient(chunk_size=HALF)),
    'multi-step': (
        {'vjp_method': 'multi-step'},
        lambda run: run.in_calls(run.window, [slice(HALF), slice(HALF, None)]),
    ),
    'padded': ({}, padded),
}
"""Options of the learner, and what is done with it."""


def chosen(model: str, rule: str, ways: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Some of the ways, the same ones every time, others for other models."""
    order = lambda way: zlib.crc32(f'{model}/{rule}/{way}'.encode())
    return tuple(sorted(ways, key=order)[:count])


# ---------------------------------------------------------------- pairs


@dataclass(frozen=True)
class Pair:
    """A model under a rule, and the ways in which it is run."""

    model: str
    rule: str
    kind: Callable[..., Any]
    options: Mapping[str, Any]
    ways: tuple[str, ...]

    @property
    def tolerance(self) -> float:
        """The relative distance beyond which a number has changed."""
        return 0.05 if 'float16' in self.model else 1e-9


MAIN = {'d_rtrl': braintrace.D_RTRL, 'pp_prop': braintrace.pp_prop}
MAIN['eprop'] = braintrace.EProp
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    'ostlrecurrent': (braintrace.OSTLRecurrent, {}),
    'ostlfeedforward': (braintrace.OSTLFeedforward, {}),
    'ottt': (braintrace.OTTT, {}),
    'rflo': (braintrace.RFLO, {}),
    'snap': (braintrace.SnAp, {}),
    'rtrl': (braintrace.RTRL, {}),
    'uoro': (braintrace.UORO, {}),
    'threefactor': (braintrace.ThreeFactor, {'modulator': 0.7}),
    'dni': (braintrace.DNI, {'window': 2}),
    'bptt': (braintrace.BPTT, {}),
    'tbptt': (braintrace.TBPTT, {'k': 2}),
}
SHORT = ('fresh', 'halves', 'stream')
CARRIED = (*SHORT, 'blocks of 4', 'two passes', 'single steps')


def of_zoo(model: str) -> Iterator[Pair]:
    """Four ways are run of the rules that are used most, and three of the seven others;
    all of them would take twice as long."""
    always = ('fresh', 'halves', 'single steps', 'stream')
    rest = tuple(way for way in WAYS if way not in always)
    for rule, kind in MAIN.items():
        yield Pair(model, rule, kind, {}, (*always, *chosen(model, rule, rest, 3)))
    for rule, (kind, options) in OTHERS.items():
        ways = ('fresh', *chosen(model, rule, SHORT[1:], 1))
        yield Pair(model, rule, kind, options, ways)
    deep = {'reach': 'deep'}
    ways = ('fresh', *chosen(model, 'deep', ('halves', 'windows', 'blocks of 4'), 2))
    yield Pair(model, 'd_rtrl deep', braintrace.D_RTRL, deep, ways)
    random = {'feedback': 'random'}
    ways = chosen(model, 'random', SHORT, 1)
    yield Pair(model, 'eprop random', braintrace.EProp, random, ways)
    ways = chosen(model, 'kappa', CARRIED, 1)
    yield Pair(model, 'eprop kappa', braintrace.EProp, {'kappa': 0.6}, ways)


def of_readouts(model: str) -> Iterator[Pair]:
    every = tuple(WAYS)
    readout = {'reach': 'readout'}
    units = {'readout_of_two_populations': 8}.get(model, 6)
    back: Any = drawn(units, 4, seed=4)
    if model == 'two_readouts':
        back = [drawn(units, 1, seed=5), back]
    elif model == 'readout_of_rows':
        back = drawn(2, 3, 4, seed=4)
    elif model == 'leaky_layer_below_a_readout':
        back = drawn(4, 4, seed=4)
    yield Pair(model, 'd_rtrl', braintrace.D_RTRL, {}, SHORT)
    yield Pair(model, 'd_rtrl readout', braintrace.D_RTRL, readout, every)
    deep = ('fresh', 'halves', 'windows')
    yield Pair(model, 'd_rtrl deep', braintrace.D_RTRL, {'reach': 'deep'}, deep)
    yield Pair(model, 'ostl readout', braintrace.OSTLRecurrent, readout, SHORT)
    yield Pair(model, 'eprop', braintrace.EProp, {}, every)
    signals: dict[str, dict[str, Any]] = {
        'random': {'feedback': 'random', 'random_feedback_key': 3},
        'array': {'feedback': back},
        'adaptive': {'feedback': 'adaptive'},
        'kappa': {'kappa': 0.6},
        'kappa array': {'kappa': 0.6, 'feedback': back},
        'no kappa': {'kappa': None},
    }
    some = lambda rule: ('fresh', *chosen(model, rule, CARRIED[1:], 2))
    for name, options in signals.items():
        rule = f'eprop {name}'
        yield Pair(model, rule, braintrace.EProp, options, some(rule))
    rule = 'rflo array'
    yield Pair(model, rule, braintrace.RFLO, {'feedback': back}, some(rule))
    rule, filtered = 'threefactor kappa', {'kappa_filter_decay': 0.6, 'modulator': 0.7}
    yield Pair(model, rule, braintrace.ThreeFactor, filtered, some(rule))
    rule, decays = 'pp_prop of two decays', {'decay_or_rank': (0.9, 0.5)}
    yield Pair(model, rule, braintrace.pp_prop, decays, some(rule))
    for rule in ('threefactor', 'rtrl', 'bptt'):
        yield Pair(model, rule, *OTHERS[rule], ('fresh',))


def pairs() -> Iterator[Pair]:
    """Everything that is recorded."""
    for model in CASES:
        yield from of_zoo(model)
    # Losses under brainstate's own grad are masked by the caller.
    unmasked = ('padded', 'stream', 'single steps', 'multi-step')
    masked = tuple(way for way in WAYS if way not in unmasked)
    for model, (family, _) in MODELS.items():
        if family == 'readout':
            yield from of_readouts(model)
            continue
        if family == 'modulated':
            for name, kappa in (('threefactor', None), ('threefactor kappa', 0.6)):
                options = {'kappa_filter_decay': kappa}
                ways = (*CARRIED, 'online', 'blocks of 1')
                yield Pair(model, name, braintrace.ThreeFactor, options, ways)
            continue
        ways = masked if family == 'masked' else tuple(WAYS)
        for rule, kind in MAIN.items():
            yield Pair(model, rule, kind, {}, ways)
        yield Pair(model, 'd_rtrl deep', braintrace.D_RTRL, {'reach': 'deep'}, ways)
        for rule, (kind, options) in OTHERS.items():
            short = ('fresh', 'halves', 'online' if family == 'masked' else 'stream')
            yield Pair(model, rule, kind, options, short)


# ---------------------------------------------------------------- measuring

Numbers = dict[str, np.ndarray]
"""Of each parameter, its norm and projections."""


@dataclass
class Entry:
    """What is recorded of a pair: labels by parameter, and the numbers of each way, or
    the name of the error that it ends in."""

    labels: dict[str, str]
    ways: dict[str, Numbers | str]


def build(name: str) -> Built:
    """A model in float64, with the same weights and states at every build."""
    if name in MODELS:
        seed()
        return MODELS[name][1]()
    model, inputs = CASES[name].build()
    for state in model.states().values():
        state.value = jax.tree.map(widened, state.value)
    moving = jax.tree.map(lambda x: sequence(widened(jnp.asarray(x))), inputs)
    return Built(model, moving)


def widened(x: Any) -> Any:
    wide = {'float32': 'float64', 'complex64': 'complex128'}
    kind = wide.get(str(getattr(x, 'dtype', '')))
    return x if kind is None else x.astype(kind)


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def sequence(x: jax.Array) -> jax.Array:
    """Inputs that change from step to step: floats their size, whole numbers and flags
    their order."""
    scales = 1 + 0.3 * np.sin(np.arange(STEPS))
    moved = lambda t: (x * scales[t]).astype(x.dtype) if is_float(x) else jnp.roll(x, t)
    return jnp.stack([moved(t) for t in range(STEPS)])


@contextlib.contextmanager
def settings() -> Iterator[None]:
    with jax.enable_x64(True), brainstate.environ.context(precision=64, dt=1.0):
        yield


def named(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of gradients by name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found = {}
    for path, leaf in leaves:
        keys = []
        for entry in path:
            key = getattr(entry, 'key', getattr(entry, 'idx', None))
            key = getattr(entry, 'name', key) if key is None else key
            keys += key if isinstance(key, tuple) else [key]
        found['.'.join(map(str, keys))] = np.asarray(leaf)
    return found


def measure(pair: Pair, ways: tuple[str, ...] | None = None) -> Entry:
    """Run a pair, in all its ways or in some of them."""
    entry = Entry({}, {})
    with settings():
        for way in pair.ways if ways is None else ways:
            options, function = WAYS[way]
            try:
                run = Run(build(pair.model), pair.kind, {**pair.options, **options})
                found = function(run)
            except Exception as error:
                entry.ways[way] = type(error).__name__
                continue
            entry.ways[way] = {
                name: projections(pair.model, name, x) for name, x in found.items()
            }
            # Options of a way may change what the report says.
            if not entry.labels and not options:
                entry.labels = labels_of(run.learner)
    return entry


def labels_of(learner: Any) -> dict[str, str]:
    """The credit class of each parameter, what the rule gives it, and the groups."""
    report = learner.report
    labels = {
        r.context[
            'name'
        ]: f'{r.context["credit"]}; {report.gradients[r.context["name"]].kind}'
        for r in report.credits
    }
    for group in report.hidden_groups:
        paths = sorted('.'.join(map(str, path)) for path in group.hidden_paths)
        labels[f'(group {group.index})'] = ', '.join(paths)
    return labels


def projections(model: str, name: str, x: np.ndarray) -> np.ndarray:
    """The norm of an array, and its products with uniform draws from [-1, 1).

    The draws depend on the names alone: NumPy promises the words of a bit generator for
    all versions and platforms, but not what its distributions make of them.
    """
    x = np.asarray(x).reshape(-1)
    if np.iscomplexobj(x):
        x = np.concatenate([x.real, x.imag])
    x = x.astype(np.float64)
    digest = hashlib.sha256(f'{model}/{name}'.encode()).digest()
    words = np.random.PCG64(int.from_bytes(digest[:8], 'little')).random_raw(
        PROJECTIONS * x.size
    )
    draws = (words >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
    products = draws.reshape(PROJECTIONS, x.size) @ x
    return np.concatenate([[np.linalg.norm(x)], products])


# ---------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Change:
    """A number, an error or a label of a pair that is not as recorded.

    ``distance`` is relative to the norm; infinite where there is no number on one side.
    ``way`` is '' for labels.
    """

    model: str
    rule: str
    way: str
    name: str
    distance: float
    text: str


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """An estimate of the norm of the difference of two arrays from their projections,
    whose draws have a variance of a third."""
    if (np.isfinite(a) != np.isfinite(b)).any():
        return float('inf')
    gap = np.nan_to_num(a - b, nan=0.0, posinf=0.0, neginf=0.0)
    return max(abs(gap[0]), float(np.sqrt(3 * np.mean(gap[1:] ** 2))))


def changes(pair: Pair, new: Entry, old: Entry | None) -> Iterator[Change]:
    """What differs from the record; ways that were not run are not compared."""
    if old is None:
        yield Change(pair.model, pair.rule, '', '', float('inf'), 'not recorded yet')
        return
    if new.labels and new.labels != old.labels:
        for name in sorted({*new.labels, *old.labels}):
            was, now = (
                old.labels.get(name, 'no label'),
                new.labels.get(name, 'no label'),
            )
            if was != now:
                yield Change(
                    pair.model, pair.rule, '', name, float('inf'), f'{was} -> {now}'
                )
    for way, found in new.ways.items():
        was = old.ways.get(way)
        given = (pair.model, pair.rule, way)
        if was is None:
            yield Change(*given, '', float('inf'), 'not recorded yet')
        elif isinstance(found, str) or isinstance(was, str):
            if found != was:
                what = lambda x: x if isinstance(x, str) else 'a gradient'
                text = f'{what(was)} -> {what(found)}'
                yield Change(*given, '', float('inf'), text)
        else:
            yield from _changed_numbers(pair, way, found, was)


def _changed_numbers(pair: Pair, way: str, new: Numbers, old: Numbers):
    given = (pair.model, pair.rule, way)
    for name in sorted(new.keys() ^ old.keys()):
        text = 'no longer there' if name in old else 'new'
        yield Change(*given, name, float('inf'), text)
    # What cancels to zero differs by the rounding of the largest gradient beside it.
    norms = [x[0] for x in old.values() if np.isfinite(x[0])]
    floor = 1e-3 * pair.tolerance * max(1.0, *norms) if norms else 0.0
    for name in sorted(new.keys() & old.keys()):
        a, b = new[name], old[name]
        gap, scale = distance(a, b), np.nanmax([a[0], b[0], 0.0])
        if gap > pair.tolerance * scale + floor:
            relative = gap / scale if np.isfinite(scale) else float('inf')
            text = f'{relative:.1e}, norm {b[0]:.4g} -> {a[0]:.4g}'
            yield Change(*given, name, float(relative), text)


# ---------------------------------------------------------------- the file

Record = dict[tuple[str, str], Entry]
"""Entries by model and rule."""


def load(file: Path = FILE) -> Record:
    if not file.exists():
        return {}
    with np.load(file) as stored:
        numbers = stored['numbers']
        index = json.loads(stored['index'].tobytes())
    record: Record = {}
    for model, (names, rules) in index.items():
        for rule, (labels, ways) in rules.items():
            entry = Entry(labels, {})
            for way, rows in ways.items():
                entry.ways[way] = (
                    rows
                    if isinstance(rows, str)
                    else {
                        name: numbers[row]
                        for name, row in zip(names, rows, strict=True)
                        if row >= 0
                    }
                )
            record[model, rule] = entry
    return record


def save(record: Record, file: Path = FILE) -> None:
    """Write a record; equal numbers of one parameter are stored once, whatever the rule
    and the way."""
    numbers: list[np.ndarray] = []
    index: dict[str, Any] = {}
    by_model: dict[str, dict[str, Entry]] = {}
    for (model, rule), entry in sorted(record.items()):
        by_model.setdefault(model, {})[rule] = entry
    for model, rules in by_model.items():
        runs = [w for e in rules.values() for w in e.ways.values()]
        names = sorted({name for w in runs if not isinstance(w, str) for name in w})
        rows: dict[str, list[int]] = {name: [] for name in names}

        def row(name: str, x: np.ndarray, rows: dict = rows) -> int:
            for at in rows[name]:
                if distance(x, numbers[at]) <= 1e-11 * np.nan_to_num(x[0]):
                    return at
            rows[name].append(len(numbers))
            numbers.append(x)
            return rows[name][-1]

        stored = {}
        for rule, entry in rules.items():
            ways = {
                way: w
                if isinstance(w, str)
                else [row(name, w[name]) if name in w else -1 for name in names]
                for way, w in sorted(entry.ways.items())
            }
            stored[rule] = entry.labels, ways
        index[model] = names, stored
    text = json.dumps(index, separators=(',', ':'))
    temporary = file.with_suffix('.new.npz')
    np.savez_compressed(
        temporary,
        numbers=np.array(numbers).reshape(-1, 1 + PROJECTIONS),
        index=np.frombuffer(text.encode(), np.uint8),
    )
    temporary.replace(file)


def merged(pair: Pair, new: Entry, old: Entry | None) -> Entry:
    """A new entry that keeps recorded numbers where they have not changed, so that
    recording the same again leaves the file as it is."""
    if old is None:
        return new
    changed = {(c.way, c.name) for c in changes(pair, new, old)}
    ways = {}
    for way, found in new.ways.items():
        was = old.ways.get(way)
        if not isinstance(found, str) and isinstance(was, dict):
            keep = lambda name, x, way=way, was=was: (
                x if (way, name) in changed or name not in was else was[name]
            )
            found = {name: keep(name, x) for name, x in found.items()}
        ways[way] = found
    return Entry(new.labels, ways)
