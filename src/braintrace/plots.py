"""Pictures of a training: how it went, what the network does, what its traces hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np

from .errors import three_parts
from .learner import Learner
from .program.step import path_name
from .training import History


def _figure(rows: int, height: float = 2.2, columns: int = 1) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            three_parts(
                'a picture', 'matplotlib draws it', "pip install 'braintrace[plot]'"
            )
        ) from error
    figure = Figure(figsize=(9, 0.6 + height * rows), layout='constrained')
    return figure, figure.subplots(rows, columns, squeeze=False)


def _smooth(values: np.ndarray, width: int = 10) -> np.ndarray:
    """A running mean over what is there."""
    return np.array(
        [np.nanmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]
    )


def learning_curves(
    histories: Mapping[str, Sequence[History]], file: str | Path
) -> None:
    """Every metric over updates, one line for each name; several histories as their
    mean and range."""
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
            smooth = np.array([_smooth(v[there]) for v in values])
            x = runs[0]['update'][:length][there]
            (line,) = ax.plot(x, smooth.mean(0), label=label)
            if len(runs) > 1:
                ax.fill_between(
                    x, smooth.min(0), smooth.max(0), alpha=0.2, color=line.get_color()
                )
            else:
                ax.plot(
                    x,
                    values[0][there],
                    alpha=0.25,
                    color=line.get_color(),
                    linewidth=0.8,
                )
        ax.set(ylabel=name.replace('_', ' '), xlabel='update')
        ax.grid(alpha=0.3)
    if len(histories) > 1:
        axes[0, 0].legend()
    figure.savefig(file, dpi=120)


@dataclass(frozen=True)
class _Recorded:
    """Values of the first sample, time × units, and the name of the unit that they are
    in; empty if they have none."""

    values: np.ndarray
    unit: str = ''

    def label(self, name: str) -> str:
        """The name of an axis."""
        return f'{name} [{self.unit}]' if self.unit else name


def record(learner: Learner, inputs: Any) -> dict[str, np.ndarray]:
    """Outputs and hidden states, and spikes if the model tells them, of the first
    sample along a fresh sequence.

    States with a unit are given as numbers in that unit.
    """
    return {name: found.values for name, found in _record(learner, inputs).items()}


def _record(learner: Learner, inputs: Any) -> dict[str, _Recorded]:
    model = learner.model

    def step(x: Any) -> dict[str, Any]:
        found = {'output': learner(x)}
        for path, state in learner.hidden_states.items():
            found |= _by_name(path_name(path), state)
        return found | ({'spikes': model.spikes()} if hasattr(model, 'spikes') else {})

    found = learner.evaluate(inputs, step_fn=step)
    return {name: _recorded(value) for name, value in found.items()}


def _by_name(name: str, state: Any) -> dict[str, Any]:
    """The value of a hidden state; those of a tree, which may differ in their units,
    one by one."""
    if not isinstance(state, brainstate.HiddenTreeState):
        return {name: state.value}
    return {f'{name}.{part}': state.get_value(part) for part in state.name2index}


def _recorded(value: Any) -> _Recorded:
    numbers = np.asarray(u.get_mantissa(value))
    unit = '' if u.is_unitless(value) else str(u.get_unit(value))
    return _Recorded(numbers[:, 0].reshape(len(numbers), -1), unit)


def activity(
    learner: Learner, trial: Sequence[Any], kind: str, file: str | Path
) -> None:
    """One trial: inputs, spikes or units, a few units' states in time, outputs beside
    targets."""
    inputs, targets, weights = (np.asarray(part) for part in trial)
    found = _record(learner, inputs)
    output = found.pop('output')
    spikes = found.pop('spikes', None)
    wide = [
        name
        for name, state in found.items()
        if state.values.shape[1] > output.values.shape[1]
    ]
    shown = wide[:2] or [*found][:2]
    figure, axes = _figure(3 + len(shown), 1.7)
    rows = iter(axes[:, 0])
    _units(next(rows), inputs[:, 0], 'inputs')
    if spikes is not None:
        _units(next(rows), spikes.values, 'spikes')
    else:
        _units(next(rows), found[shown[0]].values, found[shown[0]].label(shown[0]))
    for name in shown:
        ax = next(rows)
        values = found[name].values
        ax.plot(values[:, :: max(1, values.shape[1] // 5)], linewidth=0.8)
        ax.set_ylabel(found[name].label(name))
    _answers(next(rows), output.values, targets[:, 0], weights, kind)
    axes[-1, 0].set_ylabel(output.label('output') if kind == 'values' else 'output')
    for ax in axes[:, 0]:
        ax.set_xlim(-0.5, len(inputs) - 0.5)
    axes[-1, 0].set_xlabel('step')
    figure.savefig(file, dpi=120)


def _units(ax: Any, values: np.ndarray, name: str) -> None:
    """A raster of zeros and ones, a heat map of anything else, a line of one."""
    if values.shape[1] == 1:
        ax.plot(values[:, 0], linewidth=0.8)
    elif np.isin(values, (0, 1)).all():
        ax.plot(
            *np.nonzero(values),
            '|',
            color='black',
            markersize=max(1.0, 90 / values.shape[1]),
        )
        ax.set_ylim(-1, values.shape[1])
    else:
        most = np.abs(values).max() or 1.0
        ax.imshow(
            values.T,
            aspect='auto',
            cmap='RdBu_r',
            vmin=-most,
            vmax=most,
            interpolation='nearest',
        )
    ax.set_ylabel(name)


def _answers(
    ax: Any, outputs: np.ndarray, targets: np.ndarray, weights: np.ndarray, kind: str
) -> None:
    """Probabilities of classes, or values beside their targets; shaded where they
    count."""
    asked = weights > 0
    if kind == 'values':
        ax.plot(
            np.where(asked[:, None], targets, np.nan),
            color='black',
            linewidth=1,
            label='target',
        )
        ax.plot(outputs, linewidth=0.9, label='output')
    else:
        chances = np.asarray(jax.nn.softmax(jnp.asarray(outputs), -1))
        if outputs.shape[1] <= 3:
            for i, line in enumerate(chances.T):
                ax.plot(line, linewidth=0.9, label=f'class {i}')
        else:
            ax.imshow(
                chances.T,
                aspect='auto',
                cmap='Greys',
                vmin=0,
                vmax=1,
                interpolation='nearest',
            )
        ax.plot(
            np.flatnonzero(asked),
            targets[asked],
            '.',
            color='tab:red',
            markersize=3,
            label='target',
        )
    if not asked.all():
        start = np.flatnonzero(asked)
        ax.axvspan(start[0], start[-1], color='tab:orange', alpha=0.12)
    ax.legend(loc='upper left', fontsize=7)


def traces(learner: Learner, inputs: Any, file: str | Path) -> bool:
    """The eligibility traces after a sequence, as heat maps of inputs × units; false if
    there are none to draw.

    The sequence is a fresh one; the learner is afterwards as it was before.
    """
    with learner.unmoved():
        learner.reset_state()
        learner.etrace_evolve(jnp.asarray(inputs))
        found = [
            pair
            for path in learner.param_states
            for key, trace in learner.get_etrace_of(path).items()
            for pair in _maps(key, trace)
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
        most = np.abs(values).max() or 1.0
        image = ax.imshow(
            values,
            aspect='auto',
            cmap='RdBu_r',
            vmin=-most,
            vmax=most,
            interpolation='nearest',
        )
        ax.set_title(name, fontsize=8)
        ax.set(xlabel='input', ylabel='unit')
        figure.colorbar(image, ax=ax)
    figure.savefig(file, dpi=120)
    return True


def _maps(key: tuple, trace: Any) -> list[tuple[str, np.ndarray]]:
    """Units × inputs of the first sample, for each state that a trace is carried on;
    factors multiplied out."""
    parts = trace.f if hasattr(trace, 'f') else trace
    if not isinstance(parts, dict):
        return []
    # A state may stand for several of a position; then the number says which.
    single = max(parts, default=0) < len(key[2])
    several = ', '.join(map(path_name, key[2]))
    on = lambda i: path_name(key[2][i]) if single else f'{several} ({i})'
    found = []
    for i, part in parts.items():
        values = np.asarray(part, np.float32)[0]
        if hasattr(trace, 'f'):
            values = np.multiply.outer(
                values.ravel(), np.asarray(trace.x, np.float32)[0].ravel()
            )
        if values.ndim == 2:
            found.append((f'{", ".join(key[0])} on {on(i)}', values))
    return found
