"""Training from lists, iterators and loaders, and callbacks that write its records."""

import itertools
import json
import struct

import brainstate
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace.batches import as_array

T, B = 3, 2
FIVE = [np.full((T, B, 1), i + 1, 'float32') for i in range(5)]


class Leaky(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.full((1, 2), 0.3))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 2)))

    def update(self, x):
        self.h.value = jnp.tanh(0.5 * self.h.value + x @ self.w.value)
        return self.h.value


class Loader:
    """Iterable again and again, without items."""

    def __init__(self, batches):
        self.batches, self.begun = batches, 0

    def __iter__(self):
        self.begun += 1
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


class Tensor:
    """What is used of a PyTorch tensor: NumPy comes by ``detach().cpu().numpy()``."""

    def __init__(self, array, calls=()):
        self.array, self.calls = array, calls

    def detach(self):
        return Tensor(self.array, (*self.calls, 'detach'))

    def cpu(self):
        return Tensor(self.array, (*self.calls, 'cpu'))

    def numpy(self):
        assert self.calls == ('detach', 'cpu')
        return self.array


class Exchanged:
    """An array that only DLPack can read."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Protocol:
    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


LEARNER = braintrace.compile(Leaky(), 'd_rtrl', FIVE[0][0], batch_size=B)
STEP = lambda x: jnp.mean((LEARNER(x) - 1) ** 2)
RATE = optax.sgd(0.1)


def train(batches, **options):
    """Losses of a training from the same weights."""
    LEARNER.set_weights({'w': np.full((1, 2), 0.3)})
    parts = {'step_fn': STEP, 'optimizer': RATE, 'show': False}
    return braintrace.fit(LEARNER, batches, **parts, **options)


def by_function(i):
    return (FIVE[i % 5],)


WANTED = train(by_function, updates=7)['loss']

SOURCES = {
    'list': lambda: [(x,) for x in FIVE],
    'list of lists': lambda: [[x] for x in FIVE],
    'loader': lambda: Loader([(x,) for x in FIVE]),
    'loader of arrays': lambda: Loader(FIVE),
    'iterator': lambda: itertools.cycle([(x,) for x in FIVE]),
    'generator': lambda: ((x,) for x in itertools.cycle(FIVE)),
    'tensors': lambda: Loader([(Tensor(x),) for x in FIVE]),
    'exchanged': lambda: Loader([Exchanged(x) for x in FIVE]),
    'protocol': lambda: Loader([Protocol(x) for x in FIVE]),
    'transformed': lambda: braintrace.Batches(
        Loader([(x.swapaxes(0, 1), 0) for x in FIVE]),
        lambda x, label: (x.swapaxes(0, 1),),
    ),
}


@pytest.mark.parametrize('name', SOURCES)
def test_every_source_gives_the_training_of_a_function(name):
    np.testing.assert_array_equal(train(SOURCES[name](), updates=7)['loss'], WANTED)


def test_a_dictionary_is_one_sequence():
    batches = braintrace.Batches([{'x': Tensor(FIVE[0]), 'y': [1.0, 2.0]}])
    (found,) = batches(3)
    assert type(found['x']) is np.ndarray
    np.testing.assert_array_equal(found['y'], [1, 2])


def test_arrays_of_this_package_are_taken_as_they_are():
    for x in (FIVE[0], jnp.ones(2), 1.5):
        assert as_array(x) is x


def test_a_loader_starts_again_when_it_is_exhausted():
    loader = Loader([(x,) for x in FIVE])
    train(loader, updates=11)
    assert loader.begun == 3


def test_data_of_several_trainings():
    batches = braintrace.Batches(Loader(FIVE))
    first = [float(batches(i)[0].max()) for i in range(3)]
    again = [float(batches(i)[0].max()) for i in range(3)]  # a second training
    assert first == again == [1, 2, 3]
    rest = braintrace.Batches(iter(FIVE))
    assert [float(rest(i)[0].max()) for i in (0, 1, 0, 1)] == [1, 2, 3, 4]


REFUSED = [
    (iter([(x,) for x in FIVE]), ValueError, 'ends after 5 batches'),
    (Loader([]), ValueError, 'gives none'),
    ([], ValueError, 'an empty list'),
    (FIVE[0], TypeError, 'that are a ndarray'),
    (tuple(FIVE[:2]), TypeError, 'that are a tuple of arrays'),
    ({'x': FIVE[0]}, TypeError, 'that are a dict'),
    (3, TypeError, 'that are a int'),
    (lambda i: FIVE[0], TypeError, 'that give a ndarray'),
    (braintrace.Batches(FIVE[:0] or [()]), TypeError, 'no sequence'),
    (braintrace.Batches(Loader(FIVE), lambda x: x), TypeError, 'a transform'),
]


@pytest.mark.parametrize(('data', 'kind', 'said'), REFUSED, ids=lambda x: str(x)[:12])
def test_data_without_batches_are_refused(data, kind, said):
    with pytest.raises(kind, match=said):
        train(data, updates=7)


@pytest.mark.parametrize('name', ['list', 'loader', 'generator', 'iterator'])
def test_resuming_is_exact_where_the_data_allow_it_and_says_so(name, tmp_path, capsys):
    train(SOURCES[name](), updates=3, out=tmp_path)
    assert not capsys.readouterr().err
    resumed = train(SOURCES[name](), updates=7, out=tmp_path, resume=True)
    said = capsys.readouterr().err
    if name == 'iterator':  # whose position is not known
        assert 'update 4 takes its next batch' in said
        assert not np.array_equal(resumed['loss'], WANTED)
        return
    np.testing.assert_array_equal(resumed['loss'], WANTED)
    assert ('drawn again and left out' in said) == (name != 'list')


def test_validation_takes_the_next_batch_of_an_iterable():
    options = {'updates': 5, 'validate_every': 2}
    zero = {'optimizer': optax.sgd(0.0)}
    LEARNER.set_weights({'w': np.full((1, 2), 0.3)})
    run = lambda validate: braintrace.fit(
        LEARNER,
        Loader(FIVE),
        step_fn=STEP,
        validate=validate,
        show=False,
        **options,
        **zero,
    )
    found = run(Loader(FIVE))
    # Weights do not move, so a batch has the loss that it has in training.
    np.testing.assert_array_equal(
        found['valid_loss'][[1, 3, 4]], found['loss'][[0, 1, 2]]
    )
    assert np.isnan(found['valid_loss'][[0, 2]]).all()


# ------------------------------------------------------------ loggers


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_records_as_lines_of_json(tmp_path):
    file = tmp_path / 'logs' / 'run.jsonl'
    history = train(by_function, updates=3, callbacks=[braintrace.JSONLines(file)])
    assert lines(file) == history.records
    train(by_function, updates=1, callbacks=[braintrace.JSONLines(file)])
    assert [line['update'] for line in lines(file)] == [1, 2, 3, 1]


def test_a_resumed_training_writes_each_update_once(tmp_path):
    file = tmp_path / 'run.jsonl'
    options = {'out': tmp_path / 'run', 'callbacks': [braintrace.JSONLines(file)]}

    def fail(record):
        if record['update'] == 4:
            raise RuntimeError('power cut')

    with pytest.raises(RuntimeError):
        train(
            by_function,
            updates=6,
            save_every=2,
            out=options['out'],
            callbacks=[*options['callbacks'], fail],
        )
    assert [line['update'] for line in lines(file)] == [1, 2, 3, 4]
    train(by_function, updates=5, resume=True, **options)
    assert [line['update'] for line in lines(file)] == [1, 2, 3, 4, 5]
    np.testing.assert_array_equal([line['loss'] for line in lines(file)], WANTED[:5])


def test_a_training_that_starts_again_writes_each_update_once(tmp_path):
    file = tmp_path / 'run.jsonl'
    logger, out = braintrace.JSONLines(file), tmp_path / 'run'
    with pytest.raises(ZeroDivisionError):
        train(by_function, updates=6, out=out, callbacks=[logger, lambda r: 1 / 0])
    assert [line['update'] for line in lines(file)] == [1]
    train(by_function, updates=2, out=out, callbacks=[logger], resume=True)
    assert [line['update'] for line in lines(file)] == [1, 2]


def test_any_function_is_a_callback_and_loggers_are_closed():
    class Logger(list):
        closed = 0
        replayed = None

        def __call__(self, record):
            self.append(record['update'])

        def close(self):
            self.closed += 1

    logger, seen = Logger(), []
    train(by_function, updates=2, callbacks=[logger, seen.append])
    assert (list(logger), logger.closed) == ([1, 2], 1)
    assert [record['update'] for record in seen] == [1, 2]
    with pytest.raises(ZeroDivisionError):
        train(by_function, updates=2, callbacks=[logger, lambda record: 1 / 0])
    assert logger.closed == 2


def events(folder):
    """Scalars of the event files of a folder, parsed by hand: (name, update, value)."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(folder.glob('events.*')):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack('<Q', content[:8])
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            for value in event.summary.value:
                found.append((value.tag, event.step, value.simple_value))
    return found


def test_scalars_for_tensorboard(tmp_path):
    pytest.importorskip('tensorboardX')
    board = braintrace.TensorBoard(tmp_path, prefix='run/')
    history = train(by_function, updates=3, callbacks=[board])
    found = {(tag, step): value for tag, step, value in events(tmp_path)}
    losses = [found['run/loss', i + 1] for i in range(3)]
    np.testing.assert_allclose(losses, history['loss'], rtol=1e-6)
    assert {tag for tag, _ in found} == {'run/loss', 'run/seconds'}
    board({'update': 4, 'loss': 1.0})  # opens again
    board.close()
    assert ('run/loss', 4, 1.0) in events(tmp_path)
