"""One picture that summarises a training: the task, the activity, the traces, the
answer, and the learning curves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .history import History
from .learner import Learner
from .plots import (
    Recorded,
    first_sample,
    has_batch,
    new_figure,
    parts_of,
    recorded,
    running_mean,
    trace_maps,
    whole_ticks,
)


@dataclass(frozen=True)
class Style:
    """Colours of a picture; ``heat``: the colour map of magnitudes."""

    page: str
    text: str
    faint: str
    colors: tuple[str, ...]
    heat: str

    @property
    def diverging(self) -> Any:
        """A colour map around zero, which has the colour of the page."""
        from matplotlib.colors import LinearSegmentedColormap

        ends = [self.colors[2], self.page, self.colors[4]]
        return LinearSegmentedColormap.from_list('around zero', ends)


FEW = 3
"""So many channels are drawn as curves."""
LIGHT = Style(
    '#ffffff',
    '#1b2230',
    '#69758a',
    ('#0b5cad', '#c4531a', '#1a7336', '#8a919c', '#7a3fb8', '#8a5a00'),
    'BuPu',
)
DARK = Style(
    '#12161d',
    '#e7ebf1',
    '#97a3b6',
    ('#79b8ff', '#ffab70', '#63ca83', '#7d8897', '#c39bf2', '#e6b651'),
    'magma',
)


class Overview:
    """One trial of a task, with the traces during the trial, and the learning curves.

    ``trial``: inputs and targets of a batch, and optionally the weights of the losses.
    The first sample is shown. The learner is not changed. One object can be drawn in
    several styles.
    """

    def __init__(
        self, learner: Learner, task: Any, trial: Sequence[Any], history: History
    ):
        inputs, targets, self.weights = parts_of(trial, task.kind)
        self.rule, self.task, self.history = learner.rule.name, task, history
        batched = has_batch(learner)
        self.inputs = first_sample(inputs, batched)
        self.targets = first_sample(targets, batched)
        self.found = recorded(learner, inputs)
        self.traces = TracesInTime(learner, inputs)

    def save(
        self, file: str | Path, title: str = '', note: str = '', dark: bool = False
    ) -> None:
        """Draw the picture for a 16:9 slide, with ``title`` and ``note`` above it."""
        import matplotlib

        style = DARK if dark else LIGHT
        settings: Any = _settings(style)
        with matplotlib.rc_context(settings):
            figure = new_figure(12.8, 7.2)
            _Panels(self, style).draw(figure, title, note)
            figure.savefig(file, dpi=150)


def _settings(style: Style) -> dict[str, Any]:
    """The settings of matplotlib for a style."""
    colored = ['axes.edgecolor', 'xtick.color', 'ytick.color']
    settings: dict[str, Any] = dict.fromkeys(colored, style.faint)
    texts = ['text.color', 'axes.labelcolor', 'axes.titlecolor']
    settings |= dict.fromkeys([*texts, 'xtick.labelcolor'], style.text)
    settings |= {'ytick.labelcolor': style.text, 'font.size': 9.5}
    settings |= {'axes.titlesize': 10.5, 'axes.titleweight': 'bold'}
    settings |= {'axes.titlelocation': 'left', 'axes.spines.top': False}
    settings |= {'axes.spines.right': False, 'legend.frameon': False}
    pages = ['figure.facecolor', 'axes.facecolor', 'savefig.facecolor']
    return settings | dict.fromkeys(pages, style.page)


class TracesInTime:
    """The traces of the input weights of one sample during a sequence.

    ``steps``: the steps at which the traces were read. ``states``: for each state with
    traces, an array (time, channels): the mean of |ε| over units. ``last``: units ×
    channels at the end, by state.
    """

    def __init__(self, learner: Learner, inputs: np.ndarray, reads: int = 90):
        every = max(1, len(inputs) // reads)
        found: dict[str, list[np.ndarray]] = {}
        self.steps: list[int] = []
        self.last: dict[str, np.ndarray] = {}
        with learner.unmoved():
            learner.reset_state()
            for start in range(0, len(inputs) - every + 1, every):
                window = jnp.asarray(inputs[start : start + every])
                learner.etrace_evolve(window)
                self.last = _input_maps(learner, inputs.shape[-1])
                if not self.last:
                    break
                self.steps.append(start + every)
                for name, values in self.last.items():
                    found.setdefault(name, []).append(np.abs(values).mean(0))
        self.states = {name: np.array(rows) for name, rows in found.items()}

    def by_memory(self) -> list[str]:
        """Names of the states, those that keep their traces longest first."""

        def change(name: str) -> float:
            """From one read to the next, as a part of the mean."""
            values = self.states[name]
            return float(np.abs(np.diff(values, axis=0)).mean() / values.mean())

        moved = [name for name, values in self.states.items() if values.max() > 0]
        return sorted(moved, key=change) if len(self.steps) > 1 else moved


def _input_maps(learner: Learner, channels: int) -> dict[str, np.ndarray]:
    """Units × channels for each state, of the first parameter that inputs pass."""
    if not learner.rule.has_trace:
        return {}
    for path in learner.param_states:
        maps = [m for m in trace_maps(learner, path) if m[1].shape[1] == channels]
        if maps:
            return {name.rpartition(' on ')[2]: values for name, values in maps}
    return {}


@dataclass(frozen=True)
class _Panels:
    """The panels of an overview in one style."""

    page: Overview
    style: Style

    @property
    def task(self) -> Any:
        return self.page.task

    def draw(self, figure: Any, title: str, note: str) -> None:
        """All panels."""
        inputs, weights = self.page.inputs, self.page.weights
        found, traces = self.page.found, self.page.traces
        kept = traces.by_memory()
        # The slowest state, and the fastest beside it.
        states = list(dict.fromkeys([*kept[-1:], *kept[:1]]))
        top, below = figure.subfigures(2, 1, height_ratios=[0.075, 1])
        left, right = below.subfigures(1, 2, width_ratios=[2.2, 1])
        self._heading(top, title, note)
        heights = [1.3, 1.3, *[1.0] * len(states), 0.95]
        rows = left.subplots(len(heights), sharex=True, height_ratios=heights)
        self._inputs(rows[0], inputs)
        self._activity(rows[1], found)
        speeds = ('Fast traces', 'Slow traces') if len(states) == 2 else ('Traces',)
        for ax, name, speed in zip(rows[2:], states, speeds, strict=False):
            self._traces(ax, traces, name, speed)
        self._answer(rows[-1], found['output'].values, self.page.targets, weights)
        self._mark_answer(rows, weights > 0)
        rows[-1].set_xlim(-0.5, len(inputs) - 0.5)
        rows[-1].set_xlabel(self._time)
        heights = [1.0] * len(self._metrics) + [1.25] * bool(kept)
        panels = right.subplots(len(heights), squeeze=False, height_ratios=heights)[
            :, 0
        ]
        self._learning(panels)
        if kept:
            self._matrix(panels[-1], traces.last[kept[0]], kept[0])

    def _heading(self, figure: Any, title: str, note: str) -> None:
        given = {'va': 'center', 'y': 0.45}
        figure.text(0.008, s=title, ha='left', size=18, weight='bold', **given)
        color = self.style.faint
        figure.text(0.99, s=note, ha='right', size=10.5, color=color, **given)

    def _mark_answer(self, rows: Sequence[Any], counted: np.ndarray) -> None:
        """Where the answer counts, in all panels of the trial."""
        if counted.all() or not counted.any():
            return
        first, last = np.flatnonzero(counted)[[0, -1]]
        for ax in rows:
            if ax.images:
                ax.axvline(first, color=self.style.faint, linestyle=':', linewidth=1)
            else:
                shade = self.style.colors[5]
                ax.axvspan(first, last, color=shade, alpha=0.13, linewidth=0)

    @property
    def _time(self) -> str:
        unit = getattr(self.task, 'step_unit', '')
        return f'time [{unit}]' if unit else 'step'

    @property
    def _groups(self) -> Mapping[str, slice]:
        """Names of the input channels, and which they are."""
        return getattr(self.task, 'channel_groups', {})

    def _colors(self, channels: int) -> list[str]:
        """The colour of each input channel."""
        found = [self.style.text] * channels
        for color, part in zip(self.style.colors, self._groups.values(), strict=False):
            found[part] = [color] * len(found[part])
        return found

    def _name_channels(self, ax: Any, channels: int, along: str = 'y') -> None:
        """Ticks of input channels: the names of their groups, in their colours."""
        axis = ax.yaxis if along == 'y' else ax.xaxis
        if not self._groups:
            axis.set_label_text('input channel')
            whole_ticks(axis)
            return
        colors, parts = self._colors(channels), list(self._groups.values())
        places = [(part.start + part.stop - 1) / 2 for part in parts]
        axis.set_ticks(places, list(self._groups), fontweight='bold')
        for label, part in zip(axis.get_ticklabels(), parts, strict=True):
            label.set_color(colors[part.start])
        axis.set_tick_params(length=0)

    # ------------------------------------------------------------ along the trial

    def _curves(self, ax: Any, values: np.ndarray, what: str, x: Any = None) -> None:
        """A few channels in time."""
        x = range(len(values)) if x is None else x
        for i, color in zip(range(values.shape[1]), self.style.colors, strict=False):
            ax.plot(x, values[:, i], color=color, linewidth=1.2, label=f'{what} {i}')
        if values.shape[1] > 1:
            ax.legend(loc='best', fontsize=8)

    def _inputs(self, ax: Any, values: np.ndarray) -> None:
        self._units(ax, values, self._colors(values.shape[1]))
        if ax.images or np.isin(values, (0, 1)).all():
            self._name_channels(ax, values.shape[1])
        else:
            ax.set_ylabel('input')
        ax.set_title('Task: input of one trial')

    def _activity(self, ax: Any, found: Mapping[str, Recorded]) -> None:
        name, shown = 'spikes', found.get('spikes')
        if shown is None:
            hidden = {n: r for n, r in found.items() if n != 'output'}
            name, shown = max(hidden.items(), key=lambda item: item[1].values.shape[1])
        count = shown.values.shape[1]
        self._units(ax, shown.values, [self.style.text] * count, shown.label(name))
        ax.set_ylabel('unit')
        whole_ticks(ax.yaxis)
        ax.set_title(f'Activity: {name} of {count} units')

    def _units(
        self, ax: Any, values: np.ndarray, colors: list[str], label: str = 'value'
    ) -> None:
        """A raster of zeros and ones, lines of a few channels, or else a heat map."""
        if np.isin(values, (0, 1)).all():
            size = max(1.0, 62 / values.shape[1])
            for i, color in enumerate(colors):
                at = np.flatnonzero(values[:, i])
                ax.plot(at, np.full(len(at), i), '|', color=color, markersize=size)
            ax.set_ylim(-1, values.shape[1])
        elif values.shape[1] <= FEW:
            self._curves(ax, values, 'channel')
        else:
            most = np.abs(values).max() or 1.0
            self._heat(ax, values.T, label, self.style.diverging, -most, most)

    def _heat(
        self,
        ax: Any,
        values: np.ndarray,
        label: str,
        cmap: Any,
        low: float,
        high: float,
        extent: tuple[float, ...] | None = None,
    ) -> None:
        image = ax.imshow(
            values,
            aspect='auto',
            origin='lower',
            interpolation='nearest',
            cmap=cmap,
            vmin=low,
            vmax=high,
            extent=extent,
        )
        bar = ax.figure.colorbar(image, ax=ax, pad=0.01, aspect=12)
        bar.set_label(label)
        bar.outline.set_visible(False)

    def _traces(self, ax: Any, traces: TracesInTime, name: str, speed: str) -> None:
        values = traces.states[name]
        width = traces.steps[0]
        ax.set_title(f'{speed}: ε of the input weights, on the state {name}')
        if values.shape[1] <= FEW and not self._groups:
            self._curves(ax, values, 'channel', traces.steps)
            ax.set_ylabel('mean |ε|')
            return
        most = float(np.percentile(values, 99.5)) or 1.0
        extent = (-0.5, width * len(values) - 0.5, -0.5, values.shape[1] - 0.5)
        self._heat(ax, values.T, 'mean |ε|', self.style.heat, 0, most, extent)
        self._name_channels(ax, values.shape[1])

    def _answer(
        self, ax: Any, outputs: np.ndarray, targets: np.ndarray, weights: np.ndarray
    ) -> None:
        counted = weights > 0
        colors = self.style.colors
        if self.task.kind == 'values':
            for i in range(min(3, outputs.shape[1])):
                wanted = np.where(counted, targets[:, i], np.nan)
                ax.plot(wanted, color=self.style.faint, linewidth=2.5, alpha=0.6)
                ax.plot(outputs[:, i], color=colors[i], linewidth=1.2)
            ax.set_ylabel('output')
            ax.set_title('Answer: outputs, and targets in grey')
        elif outputs.shape[1] <= 3:
            self._few_classes(ax, outputs, targets, counted)
        else:
            chances = np.asarray(jax.nn.softmax(jnp.asarray(outputs), -1))
            self._heat(ax, chances.T, 'probability', self.style.heat, 0, 1)
            at = np.flatnonzero(counted)
            ax.plot(at, targets[counted], '.', color=colors[1], markersize=4)
            ax.set_ylabel('class')
            whole_ticks(ax.yaxis)
            ax.set_title('Answer: probability of each class, targets as dots')

    def _few_classes(
        self, ax: Any, outputs: np.ndarray, targets: np.ndarray, counted: np.ndarray
    ) -> None:
        chances = np.asarray(jax.nn.softmax(jnp.asarray(outputs), -1))
        names = list(self._groups)[: outputs.shape[1]]
        named = self.task.kind == 'decision' and len(names) == outputs.shape[1]
        names = names if named else [f'class {i}' for i in range(outputs.shape[1])]
        for i, line in enumerate(chances.T):
            ax.plot(line, color=self.style.colors[i], linewidth=1.2, label=names[i])
        ax.set(ylim=(-0.05, 1.05), yticks=[0, 0.5, 1], ylabel='probability')
        ax.legend(
            loc='lower right',
            bbox_to_anchor=(1, 0.96),
            ncols=len(names),
            labelcolor='linecolor',
            borderaxespad=0,
        )
        correct = {names[int(c)] for c in targets[counted]}
        text = f'; correct: {correct.pop()}' if len(correct) == 1 else ''
        ax.set_title(f'Answer: counts where shaded{text}')

    # ------------------------------------------------------------ beside it

    @property
    def _metrics(self) -> list[str]:
        """The curves of learning: a metric, if one was measured, and the loss."""
        measured = self.page.history.records[-1]
        named = [n for n in measured if n not in ('update', 'seconds', 'loss')]
        own = [n for n in named if not n.startswith('valid_')]
        return [*own[:1], 'loss']

    def _learning(self, panels: Sequence[Any]) -> None:
        history, metrics = self.page.history, self._metrics
        if metrics[0] == 'accuracy':
            chance = self.task.outputs
            panels[0].axhline(1 / chance, color=self.style.faint, linestyle=':')
            lowest = min(1 / chance - 0.12, np.nanmin(history['accuracy']) - 0.02)
            panels[0].set_ylim(max(0, lowest), 1.02)
            panels[0].annotate(
                'chance',
                (0.02, 1 / chance),
                xycoords=('axes fraction', 'data'),
                ha='left',
                va='top',
                color=self.style.faint,
                fontsize=8,
            )
        for ax, name, color in zip(
            panels, metrics, self.style.colors[4:], strict=False
        ):
            x, values = history['update'], history[name]
            ax.plot(
                x, values, color=color, alpha=0.3, linewidth=0.8, label='each update'
            )
            ax.plot(
                x, running_mean(values), color=color, linewidth=2, label='mean of 10'
            )
            ax.set(xlabel='update', ylabel=name)
            ax.grid(alpha=0.25, color=self.style.faint)
            whole_ticks(ax.xaxis)
            ax.legend(loc='best', fontsize=8)
        panels[0].set_title(f'Learning by {self.page.rule}')

    def _matrix(self, ax: Any, values: np.ndarray, name: str) -> None:
        most = np.percentile(np.abs(values), 99.5) or 1.0
        self._heat(ax, values, 'ε', self.style.diverging, -most, most)
        ax.set(ylabel='unit')
        whole_ticks(ax.yaxis)
        self._name_channels(ax, values.shape[1], along='x')
        ax.set_title(f'Traces on {name} after the trial')


def name_of(task: Any) -> str:
    """The name of a task in words.

    >>> class EvidenceAccumulation: pass
    >>> name_of(EvidenceAccumulation())
    'Evidence accumulation'
    """
    given = getattr(task, 'name', None)
    words = given or re.sub(r'(?<=[a-z])(?=[A-Z])', ' ', type(task).__name__)
    words = str(words).replace('_', ' ')
    return words if words.isupper() else words[:1].upper() + words[1:].lower()
