"""Figures of a training: learning curves, the activity of the network, and its
traces."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np

from ._brainstate import brainstate
from .errors import one_of, three_parts
from .history import History
from .learner import Learner
from .learner.batch import batch_of
from .program.step import path_name


def _figure(
    rows: int, height: float = 2.2, columns: int = 1, **shared: Any
) -> tuple[Any, Any]:
    figure = new_figure(9, 0.6 + height * rows)
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def new_figure(width: float, height: float) -> Any:
    """A figure of matplotlib, in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            three_parts(
                'a picture',
                'it is drawn by matplotlib, which is not installed',
                "pip install 'braintrace-online[plot]'",
            )
        ) from error
    return Figure(figsize=(width, height), layout='constrained')


def whole_ticks(*axes: Any) -> None:
    """Ticks at whole numbers: channels, units and updates have no fractions."""
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True, nbins=5, min_n_ticks=1))


def _heat(ax: Any, values: np.ndarray, label: str, **limits: Any) -> None:
    """A heat map with its colour bar; around zero unless limits are given."""
    most = np.abs(values).max() or 1.0
    shown = {'cmap': 'RdBu_r', 'vmin': -most, 'vmax': most, **limits}
    image = ax.imshow(values, aspect='auto', interpolation='nearest', **shown)
    ax.figure.colorbar(image, ax=ax, label=label, pad=0.01)


def _legend(ax: Any) -> None:
    """A legend beside the axes, where it covers nothing."""
    ax.legend(loc='upper left', bbox_to_anchor=(1, 1.03), fontsize=7, frameon=False)


def running_mean(values: np.ndarray, width: int = 10) -> np.ndarray:
    """A running mean over the existing values."""
    return np.array(
        [np.nanmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]
    )


def learning_curves(
    histories: History | Mapping[str, History | Sequence[History]], file: str | Path
) -> None:
    """Plot every metric over updates, with one line for each name. Several histories
    are shown as their mean and range.

    ``histories``: the result of :func:`fit`, or a dictionary of results by name, with
    one or several for each name: ``{'d_rtrl': history, 'bptt': [first, second]}``.
    """
    histories = _by_label(histories)
    names = [
        n
        for n in next(iter(histories.values()))[0].records[-1]
        if n not in ('update', 'seconds')
    ]
    figure, axes = _figure(len(names))
    for ax, name in zip(axes[:, 0], names, strict=True):
        for label, runs in histories.items():
            length = min(len(run.records) for run in runs)
            values = np.array([run[name][:length] for run in runs])
            there = ~np.isnan(values).any(0)
            smooth = np.array([running_mean(v[there]) for v in values])
            x = runs[0]['update'][:length][there]
            (line,) = ax.plot(x, smooth.mean(0), label=f'{label}, mean of 10')
            thin = {'color': line.get_color(), 'linewidth': 0.8}
            if len(runs) > 1:
                line.set_label(f'{label}, mean of {len(runs)} seeds')
                spread = (smooth.min(0), smooth.max(0))
                ax.fill_between(
                    x, *spread, alpha=0.2, **thin, label='lowest to highest'
                )
            else:
                ax.plot(x, values[0][there], alpha=0.25, **thin, label='each update')
        ax.set(ylabel=name.replace('_', ' '), xlabel='update')
        ax.grid(alpha=0.3)
        whole_ticks(ax.xaxis)
        _legend(ax)
    figure.savefig(file, dpi=120)


def _by_label(
    given: History | Mapping[str, History | Sequence[History]],
) -> dict[str, Sequence[History]]:
    """Histories by name, a list of them for each."""
    named = {'training': given} if isinstance(given, History) else given
    return {
        name: [runs] if isinstance(runs, History) else runs
        for name, runs in named.items()
    }


@dataclass(frozen=True)
class Recorded:
    """Values of the first sample, time × units, and the name of the unit that they are
    in; empty if they have none."""

    values: np.ndarray
    unit: str = ''

    def label(self, name: str) -> str:
        """The name of an axis."""
        return f'{name} [{self.unit}]' if self.unit else name


def record(learner: Learner, inputs: Any) -> dict[str, np.ndarray]:
    """Outputs and hidden states of the first sample along a fresh sequence, by name:
    time × units. Spikes are included if the model has a method ``spikes``.

    States with a unit are returned as numbers in that unit.
    """
    return {name: found.values for name, found in recorded(learner, inputs).items()}


@dataclass(frozen=True)
class _RecordedStep:
    """A step with all that is recorded; equal ones share a compiled program."""

    learner: Learner

    def __call__(self, x: Any) -> dict[str, Any]:
        model = self.learner.model
        found = {'output': self.learner(x)}
        for path, state in self.learner.hidden_states.items():
            found |= _by_name(path_name(path), state)
        return found | ({'spikes': model.spikes()} if hasattr(model, 'spikes') else {})


def recorded(learner: Learner, inputs: Any) -> dict[str, Recorded]:
    """The same as :func:`record`, with units."""
    found = learner.evaluate(inputs, step_fn=_RecordedStep(learner))
    batched = has_batch(learner)
    return {name: _one_recorded(value, batched) for name, value in found.items()}


def has_batch(learner: Learner) -> bool:
    """Whether the inputs and states of a learner have a batch axis."""
    shapes = {
        path: jnp.shape(u.get_mantissa(jax.tree.leaves(state.value)[0]))
        for path, state in learner.hidden_states.items()
    }
    return batch_of(learner._example, shapes) is not None


def first_sample(sequence: np.ndarray, batched: bool) -> np.ndarray:
    """The first sample of a sequence (time, batch, ...), or the only one."""
    return sequence[:, 0] if batched else sequence


def _by_name(name: str, state: Any) -> dict[str, Any]:
    """The value of a hidden state; those of a tree, which may differ in their units,
    one by one."""
    if not isinstance(state, brainstate.HiddenTreeState):
        return {name: state.value}
    return {f'{name}.{part}': state.get_value(part) for part in state.name2index}


def _one_recorded(value: Any, batched: bool) -> Recorded:
    numbers = np.asarray(u.get_mantissa(value))
    unit = '' if u.is_unitless(value) else str(u.get_unit(value))
    return Recorded(first_sample(numbers, batched).reshape(len(numbers), -1), unit)


KINDS = ('classes', 'decision', 'values')
"""The kinds of targets that a task may have."""


def parts_of(trial: Sequence[Any], kind: str) -> tuple[np.ndarray, ...]:
    """Inputs, targets and weights of a trial. Without weights, all steps have the same
    weight."""
    if kind not in KINDS:
        why = 'outputs are drawn beside their targets'
        raise ValueError(three_parts(f'kind={kind!r}', why, one_of(KINDS, kind)))
    if not isinstance(trial, (tuple, list)) or len(trial) not in (2, 3):
        raise TypeError(
            three_parts(
                f'a trial that is a {type(trial).__name__}'
                + (f' of {len(trial)}' if isinstance(trial, (tuple, list)) else ''),
                'a picture shows inputs, outputs and their targets',
                '(inputs, targets), or (inputs, targets, weights of the steps)',
            )
        )
    inputs, targets, *weights = (np.asarray(part) for part in trial)
    return inputs, targets, weights[0] if weights else np.ones(len(inputs))


def activity(
    learner: Learner, trial: Sequence[Any], kind: str, file: str | Path
) -> None:
    """Plot one trial: inputs, spikes or units, the states of a few units over time, and
    outputs with targets.

    ``trial``: inputs and targets of a batch, time first, and optionally the weights of
    the losses. The first sample is drawn. ``kind`` of the targets: 'classes' at every
    step, one 'decision' for each trial, or 'values'.
    """
    inputs, targets, weights = parts_of(trial, kind)
    batched = has_batch(learner)
    found = recorded(learner, inputs)
    output = found.pop('output')
    spikes = found.pop('spikes', None)
    wide = [
        name
        for name, state in found.items()
        if state.values.shape[1] > output.values.shape[1]
    ]
    shown = wide[:2] or [*found][:2]
    figure, axes = _figure(3 + len(shown), 1.7, sharex=True)
    rows = iter(axes[:, 0])
    shown_inputs = first_sample(inputs, batched).reshape(len(inputs), -1)
    _units(next(rows), shown_inputs, 'inputs', 'channel')
    if spikes is not None:
        _units(next(rows), spikes.values, 'spikes')
    else:
        _units(next(rows), found[shown[0]].values, found[shown[0]].label(shown[0]))
    for name in shown:
        ax = next(rows)
        _lines(ax, found[name].values)
        ax.set_ylabel(found[name].label(name))
    wanted = first_sample(targets, batched)
    _answers(next(rows), output.values, wanted, weights, kind)
    if kind == 'values':
        axes[-1, 0].set_ylabel(output.label('output'))
    for ax in axes[:, 0]:
        ax.set_xlim(-0.5, len(inputs) - 0.5)
    axes[-1, 0].set_xlabel('step')
    figure.savefig(file, dpi=120)


def _units(ax: Any, values: np.ndarray, name: str, what: str = 'unit') -> None:
    """A raster of zeros and ones, a heat map of anything else, a line of one."""
    if values.shape[1] == 1:
        ax.plot(values[:, 0], linewidth=0.8, label=f'{what} 0')
        ax.set_ylabel(name)
        _legend(ax)
        return
    if np.isin(values, (0, 1)).all():
        size = max(1.0, 90 / values.shape[1])
        ax.plot(*np.nonzero(values), '|', color='black', markersize=size)
        ax.set_ylim(-1, values.shape[1])
        ax.set_ylabel(f'{name}\n{what}')
    else:
        _heat(ax, values.T, name)
        ax.set_ylabel(what)
    whole_ticks(ax.yaxis)


def _lines(ax: Any, values: np.ndarray, most: int = 5) -> None:
    """A few units in time."""
    chosen = range(0, values.shape[1], max(1, values.shape[1] // most))
    for unit in list(chosen)[:most]:
        ax.plot(values[:, unit], linewidth=0.8, label=f'unit {unit}')
    _legend(ax)


def _answers(
    ax: Any, outputs: np.ndarray, targets: np.ndarray, weights: np.ndarray, kind: str
) -> None:
    """Probabilities of classes, or values beside their targets; shaded where they
    count."""
    counted = weights > 0
    if kind == 'values':
        wanted = np.where(counted[:, None], targets, np.nan)
        black = {'color': 'black', 'linewidth': 1}
        for i in range(outputs.shape[1]):
            ax.plot(wanted[:, i], **black, label='target' if i == 0 else None)
            ax.plot(
                outputs[:, i], linewidth=0.9, label=f'output {i}' if i < 5 else None
            )
    else:
        chances = np.asarray(jax.nn.softmax(jnp.asarray(outputs), -1))
        if outputs.shape[1] <= 3:
            for i, line in enumerate(chances.T):
                ax.plot(line, linewidth=0.9, label=f'class {i}')
            ax.set(ylabel='probability', ylim=(-0.05, 1.12))
            # Above the curves: which class is the right one while answers count.
            right = np.where(counted, targets, -1)
            for i in range(outputs.shape[1]):
                at = np.where(right == i, 1.06, np.nan)
                label = f'target: class {i}' if (right == i).any() else None
                ax.plot(at, color=f'C{i}', linewidth=4, label=label)
        else:
            _heat(ax, chances.T, 'probability', cmap='Greys', vmin=0, vmax=1)
            dots = (np.flatnonzero(counted), targets[counted])
            ax.plot(*dots, '.', color='tab:red', markersize=3, label='target')
            ax.set_ylabel('class')
            whole_ticks(ax.yaxis)
    if not counted.all():
        start = np.flatnonzero(counted)
        shade = {'color': 'tab:orange', 'alpha': 0.12, 'label': 'loss counts'}
        ax.axvspan(start[0], start[-1], **shade)
    if kind != 'values' and outputs.shape[1] > 3:
        ax.legend(loc='upper left', fontsize=7)  # beside it is the colour bar
    else:
        _legend(ax)


def traces(learner: Learner, inputs: Any, file: str | Path) -> bool:
    """Plot the eligibility traces after a fresh sequence, as heat maps of inputs ×
    units. Returns False if there are no traces to draw.

    The learner is not changed.
    """
    with learner.unmoved():
        learner.reset_state()
        learner.etrace_evolve(jnp.asarray(inputs))
        found = [
            pair for path in learner.param_states for pair in trace_maps(learner, path)
        ]
    if not found:
        return False
    found = found[:6]
    columns = min(3, len(found))
    figure, axes = _figure(-(-len(found) // columns), 2.6, columns)
    for ax in axes.flat:
        ax.axis('off')
    for ax, (name, values) in zip(axes.flat, found, strict=False):
        ax.axis('on')
        _heat(ax, values, 'trace ∂state/∂weight')
        ax.set_title(textwrap.fill(name, 34), fontsize=8)
        ax.set(xlabel='input', ylabel='unit')
        whole_ticks(ax.xaxis, ax.yaxis)
    figure.savefig(file, dpi=120)
    return True


def trace_maps(learner: Learner, path: Any) -> list[tuple[str, np.ndarray]]:
    """The traces of a parameter for the first sample: units × inputs for each state, by
    the names of parameter and state."""
    found = learner.traces_of(path)
    inputs, traces = found if isinstance(found, tuple) else ({}, found)
    batched = has_batch(learner)
    return [
        pair
        for key, trace in traces.items()
        for pair in _maps(
            key,
            _of_first(trace, batched),
            _of_first(inputs.get(key), batched),
            _units_of(learner, key, batched),
            _names(learner, key),
        )
    ]


def _of_first(trace: Any, batched: bool) -> Any:
    """The part of a trace that belongs to the first sample."""
    if isinstance(trace, dict):
        return {i: _of_first(part, batched) for i, part in trace.items()}
    has_samples = batched and trace is not None and jnp.ndim(trace) > 0
    return trace[0] if has_samples else trace


def _units_of(learner: Learner, key: tuple, batched: bool) -> int:
    """How many units the states of a trace have, samples aside."""
    shape = learner.graph.hid_path_to_group[key[2][0]].varshape
    return math.prod(shape[1:] if batched else shape)


def _names(learner: Learner, key: tuple) -> Callable[[int], str]:
    """How the parts of a trace are called: by the state that each is carried on. Parts
    beyond the states of the group hold the memory of read-outs."""
    group = learner.graph.hid_path_to_group[key[2][0]]
    count, found = group.num_state, []
    # A state may stand for several of a position; then a number says which.
    for path, state in zip(group.hidden_paths, group.hidden_states, strict=True):
        parts = getattr(state, 'num_state', 1)
        name = path_name(path)
        found += [name] if parts == 1 else [f'{name} ({i})' for i in range(parts)]
    more = lambda i: 'read-out' if i == count else f'read-out ({i - count})'
    return lambda i: found[i] if i < count else more(i)


def _maps(
    key: tuple, trace: Any, inputs: Any, units: int, on: Callable[[int], str]
) -> list[tuple[str, np.ndarray]]:
    """Units × inputs of one sample, for each state that a trace is carried on; a
    factor is multiplied by that of its inputs."""
    if not isinstance(trace, dict):
        return []
    if inputs is not None and jnp.ndim(inputs) == 0:
        return []  # a bias, which has no inputs
    found = []
    for i, part in trace.items():
        values = np.asarray(part, np.float32)
        if inputs is not None:
            first = np.asarray(inputs, np.float32)
            values = np.multiply.outer(values.ravel(), first.ravel())
        elif values.ndim == 2 and (
            values.shape[0] != units or len({*values.shape}) == 1
        ):
            values = values.T  # a weight is a matrix of inputs × units
        if values.ndim == 2:
            found.append((f'{", ".join(key[0])} on {on(i)}', values))
    return found
