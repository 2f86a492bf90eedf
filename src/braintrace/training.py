"""A training loop with progress, validation, checkpoints and early stopping."""

from __future__ import annotations

import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._brainstate import brainstate
from .batches import Batches
from .checkpoint import Checkpoints, states_of
from .errors import ArgumentError, three_parts
from .files import alone_in
from .history import History, Record, metrics_log, notice, read_records
from .learner import Learner
from .learner.arguments import check_call, is_count, length_of
from .learner.batch import BatchError
from .learner.credit_warnings import warn_of_credit
from .learner.models import interface_of
from .learner.weights import named_arrays
from .progress import Progress


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
    """Train a learner, and return a :class:`History`.

    ``batches(i)``: returns the sequences of update i, time first. Use i as the seed, so
    that a resumed training gets the same data. Lists, iterators and loaders are also
    accepted (:class:`Batches`).

    ``step_fn``: the loss of one step, as in :meth:`Learner.etrace_grad`. With
    ``metrics``, it returns ``(loss, outputs)``, and ``metrics(outputs, *sequences)``
    returns a dictionary of numbers.

    ``optimizer``: an optimiser of braintools or optax. Each batch is a fresh sequence
    with one update. With ``update_every``, weights change every so many steps.

    ``validate(i)``: sequences that are measured and not learned, every
    ``validate_every`` updates (``valid_loss`` and so on). An iterable gives its next
    batch each time.

    ``certificate_every``: every so many updates, the descent certificate of the batch
    (:meth:`Learner.certificate`) adds ``descent`` and ``cosine`` to the record. There
    is a warning if the gradient does not point downhill.

    ``callbacks``: called with the record of every update, for example
    :class:`JSONLines` or :class:`TensorBoard`. If one returns True, training stops, as
    with :class:`EarlyStop`. When a training is resumed, a method ``replay`` of a
    callback gets the earlier records. A method ``close`` is called at the end.

    ``out``: a folder for ``metrics.jsonl`` and checkpoints, every ``save_every``
    updates and at the end. ``resume``: continue from the newest checkpoint, or start
    again if the training ended before its first checkpoint was complete. Ctrl-C ends
    the training after the current update, with a checkpoint.

    The first gradient that is not finite (with ``update_every``, the first weight) is
    named in a warning. A loss that is not finite is an error.

    A :class:`braintrace.CreditWarning` names parameters that get no gradient from the
    loss of ``step_fn``, or lose most of it.

    >>> import brainstate, braintrace, jax.numpy as jnp, numpy as np, optax
    >>> net = brainstate.nn.GRUCell(1, 4)
    >>> learner = braintrace.compile(net, 'd_rtrl', jnp.ones((2, 1)), batch_size=2)
    >>> rng = np.random.default_rng
    >>> batches = lambda i: (rng(i).normal(size=(10, 2, 1)).astype('float32'),)
    >>> step = lambda x: jnp.mean((learner(x) - x) ** 2)
    >>> options = {'optimizer': optax.adam(0.01), 'updates': 3, 'show': False}
    >>> history = braintrace.fit(learner, batches, step_fn=step, **options)
    >>> len(history['loss']), history.ended
    (3, 'finished')
    """
    counts: dict[str, Any] = {
        'updates': updates,
        'save_every': save_every,
        'validate_every': validate_every,
    }
    if certificate_every is not None:
        counts['certificate_every'] = certificate_every
    if not isinstance(learner, Learner):
        raise TypeError(
            three_parts(
                f'fit({type(learner).__name__}, ...)',
                'it trains a learner: a model with a learning rule',
                "learner = braintrace.compile(model, 'd_rtrl', x, batch_size=...), and "
                'a step_fn that calls this learner',
            )
        )
    if wrong := {name: n for name, n in counts.items() if not is_count(n)}:
        shown = ', '.join(f'{name}={n!r}' for name, n in wrong.items())
        why = 'each counts updates'
        raise ArgumentError(three_parts(shown, why, 'whole numbers of at least 1'))
    _check_callbacks(callbacks)
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
    data = Batches.of(batches)
    held_out = None if validate is None else Batches.of(validate)
    if held_out is not None:
        _check_alike(*(_first_of(given, learner) for given in (held_out, data)))
    history = History()
    if resume:
        _check_begun(out)
    checkpoints = Checkpoints(Path(out) / 'checkpoints') if out is not None else None
    states = states_of(learner, optimizer)
    if resume and checkpoints is not None and checkpoints.latest is None:
        notice(
            f'{out}: no checkpoint is complete, so training starts again at update 1'
        )
    elif resume and checkpoints is not None:
        history.updates = checkpoints.restore(states)
        history.records = read_records(
            Path(out or '') / 'metrics.jsonl', history.updates
        )
        notices = [data.resumed_at(history.updates)]
        if held_out is not None:
            notices += [held_out.resumed_at(history.updates // validate_every)]
        for text in filter(None, notices):
            notice(text)
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
    are_finite = True
    with (
        alone_in(out if is_first else None),
        metrics_log(out if is_first else None, history.records) as log,
        _stop_asked() as stop,
        _closed(callbacks),
        _finished(checkpoints),
        _other_processes(),
        _batches_explained(),
    ):
        for i in range(done, updates):
            sequences = learner.placed(*data(i))
            if i == done:
                length_of(sequences, step_fn)
                warn_of_credit(learner, step_fn, sequences)
            measured = {}
            if certificate_every is not None and i % certificate_every == 0:
                only = step_fn if metrics is None else _Loss(step_fn)
                measured = _certify(learner, sequences, only, i + 1)
            given = (learner, sequences, step_fn, optimizer, metrics, update_every)
            record, arrays = _one(i + 1, *given)
            record = {'update': i + 1, **record, **measured}
            if are_finite and not bool(_are_finite(arrays)):
                are_finite = False
                _warn_of_numbers(i + 1, arrays, update_every)
            last = i + 1 == updates
            if held_out is not None and ((i + 1) % validate_every == 0 or last):
                # Iterables are counted by the measurements they were used for.
                number = i if held_out.kind == 'function' else i // validate_every
                with learner.unmoved(), _not_fitting():
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
                checkpoints.save(i + 1, states, background=True)
            if history.ended != 'finished':
                break
    if progress is not None:
        progress.close()
    return history


def _check_callbacks(callbacks: Any) -> None:
    """Raise unless they are a list of functions."""
    wrong = [callbacks]
    if isinstance(callbacks, Sequence) and not isinstance(callbacks, str):
        wrong = [c for c in callbacks if not callable(c)]
    if wrong:
        raise TypeError(
            three_parts(
                f'callbacks with a {type(wrong[0]).__name__}',
                'callbacks are a list of functions of a record',
                "callbacks=[braintrace.EarlyStop('loss', patience=3), print]",
            )
        )


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


def _first_of(batches: Batches, learner: Learner) -> tuple:
    """Some batch, none taken."""
    if batches.kind != 'function':
        return batches.peek()
    with learner.unmoved():  # it may be drawn by brainstate.random
        return batches.peek()


def _not_fitting() -> AbstractContextManager[Any]:
    """Set ``fit`` of brainstate to False if it is True, so that dropout and batch
    normalisation measure as they do after training."""
    if brainstate.environ.get('fit', None):
        return brainstate.environ.context(fit=False)
    return nullcontext()


@contextmanager
def _batches_explained() -> Iterator[None]:
    """An error of another batch gets the advice for a training."""
    try:
        yield
    except BatchError as error:
        raise error.in_training() from error


@contextmanager
def _closed(callbacks: Sequence[Any]) -> Iterator[None]:
    """Close the callbacks that can be closed, whatever happens inside."""
    try:
        yield
    finally:
        for callback in callbacks:
            if callable(getattr(callback, 'close', None)):
                callback.close()


@contextmanager
def _finished(checkpoints: Checkpoints | None) -> Iterator[None]:
    """Wait for the checkpoint that is being written, whatever happens inside."""
    try:
        yield
    except BaseException:
        if checkpoints is not None:
            with suppress(OSError):
                checkpoints.finish()
        raise
    if checkpoints is not None:
        checkpoints.finish()


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
                f'the learner trains on {shapes[1]}, and its states have that batch '
                'axis',
                'batches of the same size; several may be measured by learner.evaluate',
            )
        )


def _one(
    update: int,
    learner: Learner,
    sequences: tuple,
    step_fn: Callable,
    optimizer: Any,
    metrics: Callable | None,
    update_every: int | None,
) -> tuple[Record, dict[tuple, Any]]:
    """One batch: its gradient and one update, or updates along it. Its record, and the
    gradients, or after several updates the weights, by path."""
    has_aux = metrics is not None
    if update_every is not None:
        learner.reset_state()
        found = learner.etrace_online(
            *sequences,
            step_fn=step_fn,
            optimizer=optimizer,
            update_every=update_every,
            has_aux=has_aux,
        )
        losses, *outputs = found if has_aux else (found,)
        weights = {path: state.value for path, state in learner.param_states.items()}
        return _record(losses, outputs, sequences, metrics), weights
    gradients, losses, *outputs = learner.etrace_grad(
        *sequences, step_fn=step_fn, has_aux=has_aux, return_value=True, fresh=True
    )
    record = _record(losses, outputs, sequences, metrics)
    if not np.isfinite(record['loss']):
        raise FloatingPointError(
            three_parts(
                f'update {update}: a batch whose loss is {record["loss"]}',
                'an update by it would make the weights non-finite; they are as they '
                'were before it',
                'finite data, a smaller rate, or optax.clip_by_global_norm',
            )
        )
    learner.apply(gradients, optimizer)
    return record, interface_of(learner.model).by_path(gradients)


@jax.jit
def _are_finite(arrays: Any) -> jax.Array:
    """Whether all numbers are finite: one number, so that one is read from a device."""
    finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(arrays)]
    return jnp.all(jnp.stack(finite)) if finite else jnp.array(True)


def _warn_of_numbers(
    update: int, arrays: Mapping[tuple, Any], update_every: int | None
) -> None:
    """Name the first array that is not finite."""
    named = named_arrays(arrays).items()
    first = next(name for name, x in named if not bool(_are_finite(x)))
    what = 'gradient' if update_every is None else 'value after it'
    text = (
        f'update {update}: {first} has a {what} that is not finite (NaN or infinite); '
        'later updates are not checked. Try a smaller rate, '
        'optax.clip_by_global_norm or optax.apply_if_finite; '
        'braintrace.compile(..., check_finite=True) raises at such a step'
    )
    warnings.warn(text, RuntimeWarning, stacklevel=3)


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
