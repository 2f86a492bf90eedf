"""A training loop with progress, validation, checkpoints and early stop."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .batches import Batches
from .checkpoint import Checkpoints, states_of
from .errors import UnknownName, one_of, printable, three_parts
from .files import write_whole, written
from .learner import Learner
from .learner.arguments import check_call
from .learner.credit_warnings import warn_of_credit

Record = dict[str, float]
"""What one update gave: its number, its loss, the metrics, seconds so far."""


@dataclass
class History:
    """The records of a training, and why it ended: 'finished', 'stopped early' or
    'interrupted'.

    ``updates``: how many were done, those before a resumption included. There are fewer
    records if lines of ``metrics.jsonl`` were lost.
    """

    records: list[Record] = field(default_factory=list)
    ended: str = 'finished'
    updates: int = 0

    def __getitem__(self, name: str) -> np.ndarray:
        """One metric at every update; NaN where it was not measured."""
        known = dict.fromkeys(key for record in self.records for key in record)
        if known and name not in known:
            why = 'no update measured it'
            raise UnknownName(
                three_parts(f'history[{name!r}]', why, one_of(known, name))
            )
        return np.array([record.get(name, np.nan) for record in self.records])


class EarlyStop:
    """Stop when a metric has not become better for ``patience`` of its measurements, or
    is good enough."""

    def __init__(
        self,
        metric: str = 'loss',
        patience: int | None = None,
        target: float | None = None,
        larger: bool = False,
    ):
        self.metric, self.patience, self.target = metric, patience, target
        self._sign = -1.0 if larger else 1.0
        self._best, self._since = np.inf, 0

    def __call__(self, record: Record) -> bool:
        """Whether to stop after this record."""
        if self.metric not in record:
            if not self.metric.startswith('valid_') or any(
                name.startswith('valid_') for name in record
            ):
                names = [name for name in record if name not in ('update', 'seconds')]
                known = one_of(
                    dict.fromkeys([*names, *(f'valid_{name}' for name in names)]),
                    self.metric,
                )
                raise ValueError(
                    three_parts(
                        f'EarlyStop({self.metric!r})', 'it is not measured', known
                    )
                )
            return False
        value = self._sign * record[self.metric]
        self._since = 0 if value < self._best else self._since + 1
        self._best = min(value, self._best)
        enough = self.target is not None and value <= self._sign * self.target
        return enough or (self.patience is not None and self._since >= self.patience)

    def replay(self, records: Sequence[Record]) -> None:
        """Start from the measurements of a training that is resumed."""
        self._best, self._since = np.inf, 0
        for record in records:
            if self.metric in record:
                self(record)


def fit(
    learner: Learner,
    batches: Callable[[int], Sequence[Any]] | Iterable[Any],
    *,
    step_fn: Callable[..., Any],
    optimizer: Any,
    updates: int,
    metrics: Callable[..., Mapping[str, Any]] | None = None,
    validate: Callable[[int], Sequence[Any]] | Iterable[Any] | None = None,
    validate_every: int = 25,
    certificate_every: int | None = None,
    update_every: int | None = None,
    callbacks: Sequence[Callable[[Record], Any]] = (),
    out: str | Path | None = None,
    save_every: int = 25,
    resume: bool = False,
    show: bool = True,
) -> History:
    """Train a learner.

    ``batches(i)``: the sequences of update i, time first; drawn by a generator seeded
    with i, so that a resumed training sees what it would have seen. Lists, iterators
    and loaders of batches are taken as well (:class:`Batches`). ``step_fn`` is that of
    :meth:`Learner.etrace_grad`: the loss of one step; if there are ``metrics``, it
    returns ``(loss, outputs)``, and ``metrics(outputs, *sequences)`` gives numbers by
    name. Each batch is a fresh sequence and one update, unless ``update_every`` says
    after how many steps weights change. ``optimizer``: one of braintools, or any optax
    transformation, with its schedule. ``validate(i)``: sequences to be measured, not
    learned, every ``validate_every`` updates: ``valid_loss`` and so on; of an iterable
    the next batch each time. ``certificate_every``: before the first of so many
    updates, the descent certificate of the batch (:meth:`Learner.certificate`) adds
    ``descent`` and ``cosine`` to the record, with a warning if the rule's gradient does
    not point downhill. ``callbacks`` are called with the record of every update, e.g.
    :class:`JSONLines` or :class:`TensorBoard`; one that returns True stops, e.g.
    :class:`EarlyStop`. A callback with a method ``replay`` gets the earlier records of
    a training that is resumed, and one with a method ``close`` is closed at the end.
    ``out``: a folder for ``metrics.jsonl`` and checkpoints, every ``save_every``
    updates and at the end; with ``resume`` training goes on from the newest, or starts
    again if it was ended before its first checkpoint was complete. Ctrl-C ends after
    the update under way, with a checkpoint. A :class:`braintrace.CreditWarning` names
    parameters that the loss of ``step_fn`` gives no gradient, or little of it.

    >>> import brainstate, braintrace, jax.numpy as jnp, numpy as np, optax
    >>> net = brainstate.nn.GRUCell(1, 4)
    >>> learner = braintrace.compile(net, 'd_rtrl', jnp.ones((2, 1)), batch_size=2)
    >>> batches = lambda i: (np.random.default_rng(i).normal(size=(10, 2, 1)).astype('float32'),)
    >>> step = lambda x: jnp.mean((learner(x) - x) ** 2)
    >>> history = braintrace.fit(learner, batches, step_fn=step, optimizer=optax.adam(0.01), updates=3, show=False)
    >>> len(history['loss']), history.ended
    (3, 'finished')
    """
    counts = {
        'updates': updates,
        'save_every': save_every,
        'validate_every': validate_every,
        'certificate_every': certificate_every,
    }
    given = {name: n for name, n in counts.items() if n is not None}
    if any(n < 1 for n in given.values()):
        shown = ', '.join(f'{name}={n}' for name, n in given.items())
        why = 'each counts updates'
        raise ValueError(three_parts(shown, why, 'numbers of at least 1'))
    if validate is None and any(
        getattr(c, 'metric', '').startswith('valid_') for c in callbacks
    ):
        raise ValueError(
            three_parts(
                'EarlyStop on a metric of validation',
                'there is none',
                'validate=..., or a metric of training',
            )
        )
    data = _as_batches(batches)
    held_out = None if validate is None else _as_batches(validate)
    if held_out is not None:
        _check_alike(*(_first_of(given, learner) for given in (held_out, data)))
    history = History()
    if resume:
        _check_begun(out)
    checkpoints = Checkpoints(Path(out) / 'checkpoints') if out is not None else None
    states = states_of(learner, optimizer)
    if resume and checkpoints is not None and checkpoints.latest is None:
        _notice(
            f'{out}: no checkpoint is complete, so training starts again at update 1'
        )
    elif resume and checkpoints is not None:
        history.updates = checkpoints.restore(states)
        history.records = _read(Path(out or '') / 'metrics.jsonl', history.updates)
        notices = [data.resumed_at(history.updates)]
        if held_out is not None:
            notices += [held_out.resumed_at(history.updates // validate_every)]
        for notice in filter(None, notices):
            _notice(notice)
    elif checkpoints is not None and checkpoints.latest is not None:
        raise FileExistsError(
            three_parts(
                f'out={str(out)!r}',
                f'it holds checkpoints up to update {checkpoints.latest}',
                'resume=True to go on with them, or another folder',
            )
        )
    if resume:
        for callback in callbacks:
            if hasattr(callback, 'replay'):
                callback.replay(history.records)
    done = history.updates
    before = history.records[-1]['seconds'] if history.records else 0.0
    if show and done >= updates:
        print(
            f'nothing to train: update {done} is reached, and {updates} were requested',
            file=sys.stderr,
        )
    # Of several processes the first shows and writes; all call orbax.
    is_first = jax.process_index() == 0
    progress = Progress(updates) if show and is_first else None
    with (
        _log(out if is_first else None, history.records) as log,
        _stop_asked() as stop,
        _closed(callbacks),
        _other_processes(),
    ):
        for i in range(done, updates):
            sequences = learner.placed(*data(i))
            if i == done:
                warn_of_credit(learner, step_fn, sequences)
            measured = {}
            if certificate_every is not None and i % certificate_every == 0:
                only = step_fn if metrics is None else _Loss(step_fn)
                measured = _certify(learner, sequences, only, i + 1)
            record = {
                'update': i + 1,
                **_one(learner, sequences, step_fn, optimizer, metrics, update_every),
                **measured,
            }
            last = i + 1 == updates
            if held_out is not None and ((i + 1) % validate_every == 0 or last):
                # Iterables are counted by the measurements they were used for.
                number = i if held_out.kind == 'function' else i // validate_every
                with learner.unmoved():
                    trials = learner.placed(*held_out(number))
                    found = _measure(learner, trials, step_fn, metrics)
                record |= {f'valid_{name}': value for name, value in found.items()}
            record['seconds'] = before + time.perf_counter() - stop.start
            history.records.append(record)
            history.updates = i + 1
            log(record)
            if progress is not None:
                progress(record, len(jax.tree.leaves(sequences)[0]))
            asked = [callback(record) for callback in callbacks]
            if any(
                isinstance(stopped, (bool, np.bool_)) and stopped for stopped in asked
            ):
                history.ended = 'stopped early'
            if _any_process(stop.is_set()):
                history.ended = 'interrupted'
            if checkpoints is not None and (
                (i + 1) % save_every == 0 or last or history.ended != 'finished'
            ):
                checkpoints.save(i + 1, states)
            if history.ended != 'finished':
                break
    if progress is not None:
        progress.close()
    return history


def _check_begun(out: str | Path | None) -> None:
    """Raise unless a training began in this folder."""
    if out is None:
        raise ValueError(
            three_parts(
                'resume=True without a folder',
                'without one there are no checkpoints to resume from',
                'out=...',
            )
        )
    if not any(
        (Path(out) / name).exists() for name in ('checkpoints', 'metrics.jsonl')
    ):
        raise FileNotFoundError(
            three_parts(
                f'resume=True with out={str(out)!r}',
                'no training began in that folder',
                'the folder of a training, or resume=False to begin one',
            )
        )


def _notice(text: str) -> None:
    """Print a notice, whether or not progress is shown."""
    print(f'notice: {printable(text)}', file=sys.stderr, flush=True)


def _as_batches(given: Any) -> Batches:
    return given if isinstance(given, Batches) else Batches(given)


def _first_of(batches: Batches, learner: Learner) -> tuple:
    """Some batch, none taken."""
    if batches.kind != 'function':
        return batches.peek()
    with learner.unmoved():  # it may be drawn by brainstate.random
        return batches.peek()


@contextmanager
def _closed(callbacks: Sequence[Any]) -> Iterator[None]:
    """Close the callbacks that can be closed, whatever happens inside."""
    try:
        yield
    finally:
        for callback in callbacks:
            if callable(getattr(callback, 'close', None)):
                callback.close()


def _check_alike(held_out: Sequence[Any], sequences: Sequence[Any]) -> None:
    """Raise unless sequences for validation have the shapes of those for training, time
    aside."""
    shapes = [
        [jnp.shape(x)[1:] for x in jax.tree.leaves(part)]
        for part in (held_out, sequences)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            three_parts(
                f'validation on sequences of shapes {shapes[0]}, time aside',
                f'the learner trains on {shapes[1]}, and its states have that batch axis',
                'batches of the same size; several may be measured by learner.evaluate',
            )
        )


def _one(
    learner: Learner,
    sequences: tuple,
    step_fn: Callable,
    optimizer: Any,
    metrics: Callable | None,
    update_every: int | None,
) -> Record:
    """One batch: its gradient and one update, or updates along it."""
    if update_every is not None:
        learner.reset_state()
        only = step_fn if metrics is None else _Loss(step_fn)
        losses = learner.etrace_online(
            *sequences, step_fn=only, optimizer=optimizer, update_every=update_every
        )
        return {'loss': float(losses.mean())}
    has_aux = metrics is not None
    gradients, losses, *outputs = learner.etrace_grad(
        *sequences, step_fn=step_fn, has_aux=has_aux, return_value=True, fresh=True
    )
    record = _record(losses, outputs, sequences, metrics)
    if not np.isfinite(record['loss']):
        raise FloatingPointError(
            three_parts(
                f'a batch whose loss is {record["loss"]}',
                'an update by it would make the weights non-finite; they are as they were before it',
                'finite data, a smaller rate, optax.clip_by_global_norm or optax.apply_if_finite',
            )
        )
    learner.apply(gradients, optimizer)
    return record


def _certify(
    learner: Learner, sequences: tuple, step_fn: Callable, update: int
) -> Record:
    """Whether the rule's gradient of a batch points downhill; a warning if not."""
    found = learner.certificate(*sequences, step_fn=step_fn)
    if not found.descends:
        text = (
            f'update {update}: the gradient of {found.name} does not descend: '
            f'⟨g_true, g⟩/|g|² is {found.descent:.3g}, cosine {found.cosine:.3g} '
            f'({found.cosine_low:.3g} to {found.cosine_high:.3g}); '
            'learner.certificate(..., per_parameter=True) shows which parameters'
        )
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    return {'descent': found.descent, 'cosine': found.cosine}


@dataclass(frozen=True)
class _Loss:
    """The loss alone of a step function that gives outputs too; equal to another of the
    same."""

    step_fn: Callable

    def __call__(self, *slices: Any) -> Any:
        return self.step_fn(*slices)[0]


def _measure(
    learner: Learner, sequences: tuple, step_fn: Callable, metrics: Callable | None
) -> Record:
    """Loss and metrics of a fresh sequence, nothing learned."""
    found = learner.evaluate(*sequences, step_fn=step_fn)
    losses, *outputs = found if isinstance(found, tuple) else (found,)
    return _record(losses, outputs, sequences, metrics)


def _record(
    losses: jax.Array,
    outputs: Sequence[Any],
    sequences: tuple,
    metrics: Callable | None,
) -> Record:
    found: Any = {}
    if metrics is not None:
        check_call(
            'metrics', metrics, (*outputs, *sequences), 'the outputs and each sequence'
        )
        found = metrics(*outputs, *sequences)
    if not isinstance(found, Mapping):
        raise TypeError(
            three_parts(
                f'metrics that return a {type(found).__name__}',
                'each has a name',
                "a dictionary: {'accuracy': ...}",
            )
        )
    return {
        'loss': float(jnp.mean(losses)),
        **{name: float(value) for name, value in found.items()},
    }


class Supervised:
    """A task for a learner, in the parts that :func:`fit` takes: :meth:`batches`,
    :meth:`step_fn`, :meth:`metrics`.

    ``penalty``: called after each step, its value is added to the loss; for instance of
    a :class:`braintrace.nn.FiringRate`.

    >>> import braintrace, jax.numpy as jnp, optax
    >>> task = braintrace.tasks.Copying(length=2, lag=3)
    >>> net = braintrace.networks.network('gru', task.inputs, task.outputs, units=8)
    >>> learner = braintrace.compile(net, 'd_rtrl', jnp.zeros((4, task.inputs)), batch_size=4)
    >>> parts = Supervised(learner, task, 4)
    >>> history = fit(learner, **parts.parts(), optimizer=optax.adam(0.01), updates=2, show=False)
    >>> sorted(history.records[0])
    ['accuracy', 'loss', 'seconds', 'update']
    """

    def __init__(
        self,
        learner: Learner,
        task: Any,
        batch_size: int,
        *,
        seed: int = 0,
        penalty: Callable[[], jax.Array] | None = None,
    ):
        self.learner, self.task, self.batch_size, self.seed, self.penalty = (
            learner,
            task,
            batch_size,
            seed,
            penalty,
        )

    def parts(self) -> dict[str, Any]:
        """The arguments of :func:`fit`."""
        return {
            'batches': self.batches,
            'step_fn': self.step_fn,
            'metrics': self.metrics,
        }

    def batches(self, update: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs, targets and weights of one update; weights are 1 in the mean."""
        inputs, targets, weights = self.task.batch(
            np.random.default_rng([self.seed, update]), self.batch_size
        )
        # Batches can be drawn without a learner too.
        own = getattr(self.learner, 'own_samples', slice(None))
        return inputs[:, own], targets[:, own], weights / weights.mean()

    def step_fn(
        self, x: jax.Array, y: jax.Array, weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Loss and outputs of one step: cross-entropy of classes, squared distance of
        values."""
        outputs = self.learner(x)
        if self.task.kind == 'values':
            loss = jnp.mean((outputs - y) ** 2)
        else:
            loss = -jnp.mean(
                jnp.take_along_axis(jax.nn.log_softmax(outputs), y[..., None], -1)
            )
        return weight * loss + (
            0.0 if self.penalty is None else self.penalty()
        ), outputs

    def metrics(
        self, outputs: jax.Array, inputs: Any, targets: Any, weights: Any
    ) -> dict[str, jax.Array]:
        """Accuracy of classes; the squared error of values over their variance."""
        mean = lambda x: jnp.average(x, axis=0, weights=weights)
        if self.task.kind == 'values':
            squares = mean(
                jnp.square(outputs - targets).reshape(len(targets), -1)
            ).mean()
            return {'error': squares / jnp.var(targets[jnp.asarray(weights) > 0])}
        if self.task.kind == 'decision':
            return {'accuracy': jnp.mean(mean(outputs).argmax(-1) == targets[-1])}
        return {'accuracy': mean((outputs.argmax(-1) == targets).mean(1))}


class Progress:
    """A line of progress: rewritten in a terminal, a new one every few seconds in a
    pipe."""

    def __init__(self, updates: int, file: Any = None, every: float = 5.0):
        self.updates = updates
        self.file = file or sys.stderr
        self.live = self.file.isatty()
        self.every = 0.2 if self.live else every
        self._shown = 0.0
        self._recent: list[Record] = []

    def __call__(self, record: Record, steps: int) -> None:
        """Show a record, if it is time to or the last one."""
        self._recent = [*self._recent[-19:], record]
        now, number = time.perf_counter(), int(record['update'])
        if now - self._shown < self.every and number != self.updates:
            return
        self._shown = now
        first = self._recent[0]
        gone = (record['seconds'] - first['seconds'], number - int(first['update']))
        names = [n for n in record if n not in ('update', 'seconds')]
        mean = lambda name: np.mean([r[name] for r in self._recent if name in r])
        parts = [
            f'update {number}/{self.updates}',
            *(f'{name} {mean(name):.4g}' for name in names),
        ]
        parts += [f'(means of {len(self._recent)})'] if len(self._recent) > 1 else []
        if gone[1]:  # the first update also compiles
            rate = gone[1] / gone[0]
            parts += [
                f'{steps * rate:,.0f} steps/s',
                f'{_clock((self.updates - number) / rate)} left',
            ]
        parts.append(f'{peak_memory() / 2**20:,.0f} MiB')
        text = printable('  '.join(parts))
        print(
            f'\r\033[K{text}' if self.live else text,
            end='' if self.live else '\n',
            file=self.file,
            flush=True,
        )

    def close(self) -> None:
        """Leave the line."""
        if self.live:
            print(file=self.file, flush=True)


def peak_memory() -> int:
    """The most bytes that this process has held so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == 'darwin' else most * 1024


def _clock(seconds: float) -> str:
    return f'{int(seconds) // 60}:{int(seconds) % 60:02}'


def _read(file: Path, most: int) -> list[Record]:
    """Records of updates up to that of the checkpoint; lines that hold no record are
    left out, with a notice."""
    found: dict[int, Record] = {}
    unread = []
    # Bytes that are not text affect their own line only.
    text = file.read_text('utf-8', errors='replace') if file.exists() else ''
    for number, line in enumerate(text.split('\n'), 1):
        record = _record_of(line)
        if record is not None:
            found[int(record['update'])] = record
        elif line.strip():
            unread.append(number)
    if unread:
        lines = ', '.join(map(str, unread[:5])) + (', ...' if len(unread) > 5 else '')
        _notice(
            f'{file}: {len(unread)} line(s) hold no record of an update and are left out: {lines}'
        )
    kept = [found[update] for update in sorted(found) if update <= most]
    if len(kept) < most:
        _notice(
            f'{file}: records of {most - len(kept)} of the {most} updates done are missing'
        )
    return kept


def _record_of(line: str) -> Record | None:
    """The record that a line holds; none if it was cut off in writing or is something
    else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    # A whole number of hundreds of digits is no float.
    is_number = lambda x: (
        isinstance(x, float)
        or (isinstance(x, int) and not isinstance(x, bool) and abs(x) < 2**1000)
    )
    if not isinstance(record, dict) or not all(map(is_number, record.values())):
        return None
    update = record.get('update')
    is_known = isinstance(update, int) and update >= 1 and 'seconds' in record
    return record if is_known else None


@contextmanager
def _log(
    out: str | Path | None, records: list[Record]
) -> Iterator[Callable[[Record], None]]:
    """Records go to a file, line by line, after those of earlier updates."""
    if out is None:
        yield lambda record: None
        return
    path = Path(out) / 'metrics.jsonl'
    # Replaced whole: a crash here must not lose the records of earlier updates.
    write_whole(path, ''.join(f'{json.dumps(record)}\n' for record in records))
    # Unbuffered: text that a full disk did not take must not be written again on close.
    with path.open('ab', buffering=0) as file:

        def log(record: Record) -> None:
            line = f'{json.dumps(record)}\n'.encode()
            with written(str(path)):
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        yield log


def _any_process(flag: bool) -> bool:
    """Whether something is so in any process; all must ask."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def _is_of_connection(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, is that processes lost each other."""
    while error is not None:
        names_it = any(w in str(error) for w in ('Gloo', 'UNAVAILABLE', 'heartbeat'))
        if names_it or isinstance(error, jax.errors.JaxRuntimeError):
            return True
        error = error.__cause__
    return False


@contextmanager
def _other_processes() -> Iterator[None]:
    """What to do when another process of the training has ended."""
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1 or not _is_of_connection(error):
            raise
        raise RuntimeError(
            three_parts(
                f'a training of {jax.process_count()} processes',
                f'one of them has ended or cannot be reached: {str(error)[:200]}',
                'start all of them again with resume=True (--resume DIR); training '
                'goes on from the last checkpoint',
            )
        ) from error


class _Stop(threading.Event):
    """Set when the user interrupts the training."""

    def __init__(self) -> None:
        super().__init__()
        self.start = time.perf_counter()


@contextmanager
def _stop_asked() -> Iterator[_Stop]:
    """An event that Ctrl-C sets; a second one interrupts at once."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        print(
            '\nstopping after this update; again to stop at once',
            file=sys.stderr,
            flush=True,
        )

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
