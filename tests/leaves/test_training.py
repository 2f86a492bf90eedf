"""The training loop: exact resumption, checkpoints that are whole or refused, stops, metrics."""

import gc
import inspect
import json
import os
import shutil
import signal
import threading
import time

import brainstate
import braintools
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as orbax
import pytest

import braintrace
from braintrace import networks, plots, tasks
from braintrace.checkpoint import Checkpoints, complete, states_of
from braintrace.errors import is_explained
from braintrace.files import alone_in
from braintrace.progress import Progress

TASK = tasks.Copying(length=2, lag=2, symbols=3)


def make(rule='d_rtrl', optimizer=None, units=6, **options):
    net = networks.network('gru', TASK.inputs, TASK.outputs, units=units)
    learner = braintrace.compile(
        net, rule, jnp.zeros((4, TASK.inputs)), batch_size=4, **options
    )
    parts = braintrace.Supervised(learner, TASK, 4).parts()
    return learner, {**parts, 'optimizer': optimizer or optax.adam(0.02), 'show': False}


class Noisy(brainstate.nn.Module):
    """Noise from brainstate's generator and from one of its own, dropout, and a count of its steps."""

    def __init__(self):
        super().__init__()
        self.cell = brainstate.nn.GRUCell(TASK.inputs, 5)
        self.dropout = brainstate.nn.Dropout(0.5)
        self.generator = brainstate.random.RandomState(7)
        self.readout = brainstate.nn.Linear(5, TASK.outputs)
        self.steps = brainstate.ShortTermState(jnp.zeros(()))

    def update(self, x):
        self.steps.value = self.steps.value + 1
        noise = brainstate.random.normal(size=x.shape) + self.generator.normal(
            size=x.shape
        )
        return self.readout(self.dropout(self.cell(x + 0.1 * noise)))


@pytest.fixture
def noisy():
    """How to make a learner of a noisy model, always the same one."""

    def made(rule='d_rtrl'):
        brainstate.random.seed(3)
        learner = braintrace.compile(
            Noisy(), rule, jnp.zeros((4, TASK.inputs)), batch_size=4
        )
        parts = braintrace.Supervised(learner, TASK, 4).parts()
        return learner, {**parts, 'optimizer': optax.adam(0.02), 'show': False}

    with brainstate.environ.context(fit=True):
        yield made


def plain(x):
    is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    return np.array(jax.random.key_data(x) if is_key else x)


def everything(learner, optimizer, *more):
    """Values of all that training moves."""
    states = {**states_of(learner, optimizer), **dict(enumerate(more))}
    return {
        name: [plain(x) for x in jax.tree.leaves(s.value)] for name, s in states.items()
    }


def weights(learner):
    return jax.tree.map(
        np.asarray, {path: s.value for path, s in learner.param_states.items()}
    )


@pytest.mark.parametrize(
    'optimizer', [optax.adam, lambda rate: braintools.optim.Adam(lr=rate)]
)
def test_resumed_training_is_the_uninterrupted_one(tmp_path, optimizer):
    whole, parts = make(optimizer=optimizer(0.02))
    history = braintrace.fit(whole, updates=7, **parts)
    first, parts = make(optimizer=optimizer(0.02))
    braintrace.fit(first, updates=4, out=tmp_path, save_every=3, **parts)
    with (tmp_path / 'metrics.jsonl').open('a') as file:
        file.write('{"update": 5, "loss": 1')  # cut off in writing
    again, parts = make(optimizer=optimizer(0.02))
    resumed = braintrace.fit(again, updates=7, out=tmp_path, resume=True, **parts)
    np.testing.assert_array_equal(resumed['loss'], history['loss'])
    jax.tree.map(np.testing.assert_array_equal, weights(again), weights(whole))
    lines = [
        json.loads(line)
        for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()
    ]
    assert [line['update'] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert np.all(np.diff(resumed['seconds']) > 0)


def test_checkpoints_hold_traces_and_random_numbers_and_are_whole_or_refused(tmp_path):
    learner, parts = make()
    states = states_of(learner, parts['optimizer'])
    learner.etrace_evolve(jnp.ones((3, 4, TASK.inputs)))
    kept = Checkpoints(tmp_path, keep=1)
    assert complete(tmp_path) == []
    with pytest.raises(FileNotFoundError, match='none'):
        kept.restore(states)
    kept.save(1, states)
    drawn = lambda: np.asarray(brainstate.random.normal(size=(3,)))
    before = {
        name: jax.tree.map(jnp.copy, s.value)
        for name, s in states.items()
        if name != 'random'
    }
    numbers = drawn()
    assert any('traces' in name for name in before)
    for name in before:
        states[name].value = jax.tree.map(lambda x: x + 1, states[name].value)
    assert kept.restore(states) == 1
    np.testing.assert_array_equal(drawn(), numbers)
    jax.tree.map(
        np.testing.assert_array_equal,
        before,
        {name: states[name].value for name in before},
    )

    other, parts = make(units=5)
    foreign = states_of(other, parts['optimizer'])
    values = weights(other)
    with pytest.raises(ValueError, match='by another'):
        kept.restore(foreign)
    jax.tree.map(np.testing.assert_array_equal, values, weights(other))
    for folder in (tmp_path / '1').iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    with pytest.raises(ValueError, match=r'delete .*1;'):
        kept.restore(states)
    assert complete(tmp_path) == [1]


# The readers of orbax that wait for a damaged part end with its error, too.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_damaged_checkpoint_is_refused(tmp_path):
    values = np.random.default_rng(0).normal(size=(64, 64)).astype('float32')
    states = {'w': brainstate.State(jnp.asarray(values))}
    kept = Checkpoints(tmp_path)
    kept.save(1, states)
    files = [p for p in tmp_path.rglob('*') if p.is_file()]
    file = max(files, key=lambda p: p.stat().st_size)
    whole = file.read_bytes()
    refused = 0
    # Most bits are those of one value, and nothing but our own checksum covers them.
    for at in range(0, len(whole), 997):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        states['w'].value = jnp.zeros((64, 64))
        try:
            Checkpoints(tmp_path).restore(states)
            np.testing.assert_array_equal(states['w'].value, values)
        except ValueError as error:
            refused += 'damaged' in str(error)
            np.testing.assert_array_equal(states['w'].value, 0)
    gc.collect()
    assert refused > 3


def test_a_checkpoint_is_read_in_the_precision_it_was_written_in(tmp_path):
    with jax.enable_x64(True):
        wide = {'w': brainstate.State(jnp.arange(3.0) / 3)}
        Checkpoints(tmp_path).save(1, wide)
        assert Checkpoints(tmp_path).restore(wide) == 1
    narrow = {'w': brainstate.State(jnp.zeros(3))}
    with pytest.raises(ValueError, match='jax_enable_x64'):
        Checkpoints(tmp_path).restore(narrow)


def test_a_checkpoint_of_an_earlier_version_has_no_checksum(tmp_path):
    states = {'w': brainstate.State(jnp.zeros(3))}
    kept = Checkpoints(tmp_path)
    old = orbax.args.StandardSave({'w': {'0': jnp.ones(3)}})
    kept._manager.save(1, args=old)
    assert kept.restore(states) == 1
    np.testing.assert_array_equal(states['w'].value, 1)


def test_a_state_of_size_zero_is_left_as_it_is(tmp_path):
    empty = brainstate.State({'a': jnp.zeros((0, 3)), 'b': jnp.ones(2)})
    states = {'s': empty, 't': brainstate.State(jnp.zeros(0))}
    Checkpoints(tmp_path).save(1, states)
    empty.value = {'a': jnp.zeros((0, 3)), 'b': jnp.zeros(2)}
    assert Checkpoints(tmp_path).restore(states) == 1
    np.testing.assert_array_equal(empty.value['b'], 1)
    assert empty.value['a'].shape == (0, 3)
    assert states['t'].value.shape == (0,)


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    learner, parts = make()

    def full(checkpoints, *given, **options):
        raise ValueError('RESOURCE_EXHAUSTED: No space left on device')

    with monkeypatch.context() as patched:
        patched.setattr('orbax.checkpoint.CheckpointManager.save', full)
        with pytest.raises(OSError, match='No space left'):
            braintrace.fit(learner, updates=2, out=tmp_path, **parts)
    assert braintrace.fit(learner, updates=1, out=tmp_path, resume=True, **parts)


def test_large_checkpoints_are_written_while_training_goes_on(tmp_path, monkeypatch):
    """They hold the values of their update, and an error of writing ends the training."""
    monkeypatch.setattr('braintrace.checkpoint.LARGE', 0)
    threads = []
    write = Checkpoints._write

    def slow(checkpoints, update, values):
        threads.append(threading.current_thread())
        time.sleep(0.3)  # updates go on meanwhile and write over the weights
        write(checkpoints, update, values)

    waited, save = [], Checkpoints.save

    def saved(checkpoints, *given, **options):
        save(checkpoints, *given, **options)
        waited.append(checkpoints._under_way is None)

    monkeypatch.setattr(Checkpoints, '_write', slow)
    monkeypatch.setattr(Checkpoints, 'save', saved)
    brainstate.random.seed(0)
    learner, parts = make()
    braintrace.fit(learner, updates=4, out=tmp_path / 'a', save_every=1, **parts)
    assert len(threads) == 4
    assert threading.main_thread() not in threads
    monkeypatch.setattr('braintrace.checkpoint.LARGE', 2**40)
    brainstate.random.seed(0)
    alone, parts = make()
    braintrace.fit(alone, updates=3, out=tmp_path / 'b', **parts)
    assert waited == [False] * 4 + [True]
    found = []
    for folder, number in (('a', 3), ('b', 3)):
        learner, parts = make()
        states = states_of(learner, parts['optimizer'])
        kept = Checkpoints(tmp_path / folder / 'checkpoints')
        assert kept.restore(states, number) == 3
        found.append(everything(learner, parts['optimizer']))
    jax.tree.map(np.testing.assert_array_equal, *found)

    def full(checkpoints, *given, **options):
        raise ValueError('RESOURCE_EXHAUSTED: No space left on device')

    monkeypatch.setattr('braintrace.checkpoint.LARGE', 0)
    monkeypatch.setattr('orbax.checkpoint.CheckpointManager.save', full)
    learner, parts = make()
    with pytest.raises(OSError, match='No space left'):
        braintrace.fit(learner, updates=2, out=tmp_path / 'c', **parts)


def test_records_survive_an_interrupted_resumption_and_damage(
    tmp_path, monkeypatch, capsys
):
    learner, parts = make()
    first = braintrace.fit(learner, updates=4, out=tmp_path, **parts)
    file = tmp_path / 'metrics.jsonl'
    text = file.read_text()

    written = []

    def killed(record):
        written.append(record)
        if len(written) == 2:
            raise KeyboardInterrupt
        return json.JSONEncoder().encode(record)

    with monkeypatch.context() as patched:
        patched.setattr('braintrace.history.json.dumps', killed)
        with pytest.raises(KeyboardInterrupt):
            braintrace.fit(learner, updates=5, out=tmp_path, resume=True, **parts)
    assert file.read_text() == text
    with monkeypatch.context() as patched:
        patched.setattr(
            'os.replace', lambda *names: (_ for _ in ()).throw(OSError('disk full'))
        )
        with pytest.raises(OSError, match='disk full'):
            braintrace.fit(learner, updates=5, out=tmp_path, resume=True, **parts)
    assert file.read_text() == text

    lines = text.encode().splitlines()
    lines[1] = lines[1][:20]
    foreign = [
        b'[1, 2]',
        b'{"a": 1}',
        b'\xff\xfe',
        b'{"update": "x", "seconds": 1}',
        b'null',
        b'{"update": 4, "seconds": 1' + 400 * b'0' + b'}',
        b'',
    ]
    file.write_bytes(b'\n'.join([*foreign, *lines]) + b'\n')
    capsys.readouterr()
    resumed = braintrace.fit(learner, updates=5, out=tmp_path, resume=True, **parts)
    assert resumed['update'].tolist() == [1, 3, 4, 5]
    assert resumed.updates == 5
    np.testing.assert_array_equal(resumed['loss'][:3], first['loss'][[0, 2, 3]])
    said = capsys.readouterr().err
    assert (
        '7 line(s) hold no record of an update and are left out: 1, 2, 3, 4, 5, ...'
        in said
    )
    assert 'records of 1 of the 4 updates done are missing' in said
    assert [json.loads(line)['update'] for line in file.read_text().splitlines()] == [
        1,
        3,
        4,
        5,
    ]
    assert not list(tmp_path.glob('.*'))


def test_resuming_before_the_first_checkpoint(tmp_path, capsys):
    learner, parts = make()
    with pytest.raises(FileNotFoundError, match='no training'):
        braintrace.fit(
            learner, updates=2, out=tmp_path / 'nowhere', resume=True, **parts
        )
    assert not (tmp_path / 'nowhere').exists()
    (tmp_path / 'checkpoints' / '1.orbax-checkpoint-tmp').mkdir(parents=True)
    (tmp_path / 'metrics.jsonl').write_text(
        '{"update": 1, "loss": 3.0, "seconds": 1.0}\n'
    )
    history = braintrace.fit(learner, updates=2, out=tmp_path, resume=True, **parts)
    assert 'training starts again at update 1' in capsys.readouterr().err
    assert history['update'].tolist() == [1, 2]
    assert len((tmp_path / 'metrics.jsonl').read_text().splitlines()) == 2


def test_a_folder_is_not_written_over(tmp_path):
    learner, parts = make()
    braintrace.fit(learner, updates=1, out=tmp_path, **parts)
    with pytest.raises(FileExistsError, match='up to update 1'):
        braintrace.fit(learner, updates=2, out=tmp_path, **parts)
    with pytest.raises(ValueError, match='without a folder'):
        braintrace.fit(learner, updates=2, resume=True, **parts)
    for batches in (
        lambda i: jnp.ones((3, 4, TASK.inputs)),
        iter([()]),
        parts['batches'](0),
    ):
        with pytest.raises(TypeError, match='returns a tuple'):
            braintrace.fit(learner, updates=2, **{**parts, 'batches': batches})
    with pytest.raises(ValueError, match='updates=0'):
        braintrace.fit(learner, updates=0, **parts)


def test_stops(tmp_path):
    learner, parts = make()
    stops = [lambda r: np.True_ if r['update'] == 3 else 1.0]  # a number is no answer
    early = braintrace.fit(learner, updates=9, callbacks=stops, **parts)
    assert (early.ended, len(early.records)) == ('stopped early', 3)

    def interrupt(record):
        if record['update'] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    stopped = braintrace.fit(
        learner, updates=9, callbacks=[interrupt], out=tmp_path, **parts
    )
    assert (stopped.ended, len(stopped.records)) == ('interrupted', 2)
    assert Checkpoints(tmp_path / 'checkpoints').latest == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_leaves_the_checkpoint_that_is_being_written(
    tmp_path, monkeypatch
):
    """A training that is resumed at once waits for it."""
    learner, parts = make()
    write = Checkpoints._write

    def interrupted(checkpoints, update, values):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        write(checkpoints, update, values)

    def interrupt(record):
        if record['update'] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, '_write', interrupted)
        with pytest.raises(KeyboardInterrupt):
            braintrace.fit(
                learner, updates=9, callbacks=[interrupt], out=tmp_path, **parts
            )
    assert Checkpoints(tmp_path / 'checkpoints').latest == 2
    resumed = braintrace.fit(learner, updates=3, out=tmp_path, resume=True, **parts)
    assert [record['update'] for record in resumed.records] == [1, 2, 3]


def test_a_checkpoint_with_the_old_name_of_the_rule_state_is_restored(tmp_path):
    learner = braintrace.compile(
        brainstate.nn.GRUCell(2, 3), 'uoro', jnp.ones((1, 2)), batch_size=1
    )
    states = states_of(learner)
    old = {name.replace('rule_state', 'standing'): s for name, s in states.items()}
    assert old.keys() != states.keys()
    learner.rule_state.value = learner.rule_state.value + 5
    kept = Checkpoints(tmp_path)
    kept.save(1, old)
    learner.rule_state.value = learner.rule_state.value + 1
    kept.restore(states)
    assert learner.rule_state.value == 5


@pytest.mark.parametrize(
    ('change', 'told'),
    [
        ({'step_fn': lambda x: 0.0}, 'a function of 3 argument'),
        ({'step_fn': lambda x, y, w: 0.0}, 'return loss, outputs'),
        ({'metrics': lambda outputs, x: {}}, 'a function of 4 argument'),
        ({'metrics': lambda outputs, x, y, w: 1.0}, "{'accuracy': ...}"),
        ({'callbacks': [braintrace.EarlyStop('acuracy')]}, "'accuracy'?"),
        (
            {'callbacks': [braintrace.EarlyStop('valid_los')], 'validate': True},
            "'valid_loss'?",
        ),
        ({'callbacks': [braintrace.EarlyStop('valid_loss')]}, 'validate=...'),
    ],
)
def test_what_does_not_fit_together_is_told(change, told):
    learner, parts = make()
    if 'validate' in change:
        change = {**change, 'validate': parts['batches']}
    if (
        'step_fn' in change
        and len(inspect.signature(change['step_fn']).parameters) == 3
    ):
        change = {'step_fn': lambda x, y, w: jnp.sum(learner(x))}
    before = weights(learner)
    with pytest.raises((TypeError, ValueError, braintrace.CompilationError)) as error:
        braintrace.fit(learner, updates=1, **{**parts, **change})
    assert told in str(error.value)
    assert is_explained(error.value)
    if 'callbacks' not in change:  # which are called after the update
        jax.tree.map(np.testing.assert_array_equal, weights(learner), before)


def test_numbers_that_are_not_finite_end_a_training():
    learner, parts = make()
    lost = lambda i: (parts['batches'](i)[0] * np.nan, *parts['batches'](i)[1:])
    before = weights(learner)
    with pytest.raises(FloatingPointError, match='update 1'):
        braintrace.fit(learner, updates=2, **{**parts, 'batches': lost})
    jax.tree.map(np.testing.assert_array_equal, weights(learner), before)


class Gained(brainstate.nn.Module):
    """Leaky units, and a gain that only the loss reads."""

    def __init__(self):
        super().__init__()
        self.feed = brainstate.ParamState(jnp.full((1, 3), 0.3))
        self.gain = brainstate.ParamState(jnp.ones(3))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3)))

    def update(self, x):
        self.h.value = jnp.tanh(0.5 * self.h.value + x @ self.feed.value)
        return self.h.value


def gained(optimizer):
    """The slope of the gain is 0/0 in batches 1 and 3, whose last input is zero."""
    learner = braintrace.compile(Gained(), 'd_rtrl', jnp.ones((2, 1)), batch_size=2)

    def step_fn(x):
        gain = learner.model.gain.value * jnp.max(jnp.abs(x))
        return jnp.mean(learner(x) ** 2) + jnp.sqrt(jnp.sum(gain**2))

    def batches(i):
        xs = np.random.default_rng(i).normal(size=(5, 2, 1)).astype('float32')
        xs[-1] *= i % 2 == 0
        return (xs,)

    options = {'step_fn': step_fn, 'optimizer': optimizer}
    return learner, batches, options


def test_a_gradient_that_is_not_finite_is_named_once():
    skips = lambda: optax.apply_if_finite(optax.sgd(0.1), 9)
    learner, batches, options = gained(skips())
    with pytest.warns(RuntimeWarning) as warned:
        braintrace.fit(learner, batches, updates=5, show=False, **options)
    (text,) = [str(one.message) for one in warned]
    assert text.startswith('update 2: gain has a gradient that is not finite')
    # The training is the same as without the look at it.
    other, _, options = gained(skips())
    for i in range(5):
        xs = batches(i)
        step_fn, optimizer = options['step_fn'], options['optimizer']
        gradients = other.etrace_grad(*xs, step_fn=step_fn, fresh=True)
        other.apply(gradients, optimizer)
    jax.tree.map(np.testing.assert_array_equal, weights(learner), weights(other))


def test_a_loss_that_is_not_finite_is_an_error_with_its_update():
    learner, batches, options = gained(optax.sgd(0.1))
    with (
        pytest.warns(RuntimeWarning, match='update 2: gain'),
        pytest.raises(FloatingPointError, match='update 3'),
    ):
        braintrace.fit(learner, batches, updates=5, show=False, **options)


def test_weights_that_are_not_finite_after_updates_along_a_batch_are_named():
    learner, batches, options = gained(optax.sgd(0.1))
    options |= {'update_every': 1, 'show': False}
    with pytest.warns(RuntimeWarning) as warned:
        history = braintrace.fit(learner, batches, updates=3, **options)
    (text,) = [str(one.message) for one in warned]
    assert text.startswith('update 2: gain has a value after it that is not finite')
    np.testing.assert_array_equal(np.isfinite(history['loss']), [True, True, False])


def test_counts_of_updates_are_whole_numbers():
    learner, parts = make()
    names = ('updates', 'save_every', 'validate_every', 'certificate_every')
    for name in names:
        for wrong in (2.5, '3', 0, True, *([None] * (name != names[-1]))):
            with pytest.raises(ValueError, match='counts updates') as e:
                braintrace.fit(learner, **{'updates': 1, **parts, name: wrong})
            assert f'{name}={wrong!r}' in str(e.value)
    history = braintrace.fit(learner, updates=np.int64(1), **parts)
    assert history.updates == 1


def test_two_trainings_in_one_folder_are_refused(tmp_path):
    learner, parts = make()
    before = weights(learner)
    with (
        alone_in(tmp_path),
        pytest.raises(RuntimeError, match='another process'),
    ):
        braintrace.fit(learner, updates=1, out=tmp_path, **parts)
    assert not (tmp_path / 'metrics.jsonl').exists()
    jax.tree.map(np.testing.assert_array_equal, weights(learner), before)
    assert braintrace.fit(learner, updates=1, out=tmp_path, **parts).updates == 1


def test_a_checkpoint_that_is_a_link_does_not_stop_later_ones(tmp_path):
    learner, _ = make()
    states, kept = states_of(learner), Checkpoints(tmp_path / 'kept')
    for update in (1, 2):
        kept.save(update, states)
    shutil.move(tmp_path / 'kept' / '1', tmp_path / 'elsewhere')
    (tmp_path / 'kept' / '1').symlink_to(tmp_path / 'elsewhere')
    for update in (3, 4):
        kept.save(update, states)
        assert complete(tmp_path / 'kept') == [update - 1, update]
    assert (tmp_path / 'elsewhere').is_dir()  # what the link led to stays


def test_validation_has_the_batch_size_of_training():
    learner, parts = make()
    other = braintrace.Supervised(learner, TASK, 3).batches
    before = weights(learner)
    with pytest.raises(ValueError, match='of the same size'):
        braintrace.fit(learner, updates=2, validate=other, **parts)
    jax.tree.map(np.testing.assert_array_equal, weights(learner), before)


def test_early_stop_counts_measurements():
    stop = braintrace.EarlyStop('valid_loss', patience=2)
    assert [
        stop(r)
        for r in ({'valid_loss': 2.0}, {}, {'valid_loss': 1.0}, {'valid_loss': 1.5}, {})
    ] == [False] * 5
    assert stop({'valid_loss': 1.0})
    assert braintrace.EarlyStop('accuracy', target=0.9, larger=True)({'accuracy': 0.95})
    assert not braintrace.EarlyStop('accuracy', target=0.9, larger=True)(
        {'accuracy': 0.85}
    )


def test_early_stop_counts_what_came_before_a_resumption(tmp_path):
    learner, parts = make(
        optimizer=optax.sgd(0.0)
    )  # the loss of validation stays as it is
    parts |= {
        'validate': lambda i: parts['batches'](0),
        'validate_every': 1,
        'out': tmp_path,
    }
    stop = lambda: braintrace.EarlyStop('valid_loss', patience=4)
    first = braintrace.fit(learner, updates=3, callbacks=[stop()], **parts)
    assert first.ended == 'finished'
    resumed = braintrace.fit(
        learner, updates=9, callbacks=[stop()], resume=True, **parts
    )
    assert (resumed.ended, resumed.updates) == ('stopped early', 5)


def test_it_learns_validates_and_changes_nothing_by_measuring():
    learner, parts = make(optimizer=optax.adam(0.05))
    history = braintrace.fit(
        learner,
        updates=60,
        validate=lambda i: parts['batches'](10**6),
        validate_every=20,
        **parts,
    )
    assert history['loss'][-10:].mean() < 0.8 * history['loss'][:5].mean()
    assert np.flatnonzero(~np.isnan(history['valid_loss'])).tolist() == [19, 39, 59]
    plain, parts = make(optimizer=optax.adam(0.05))
    assert braintrace.fit(plain, updates=60, **parts)['loss'][-1] == history['loss'][-1]


@pytest.mark.parametrize('rule', ['d_rtrl', 'dni'])
def test_measuring_moves_nothing(noisy, tmp_path, rule):
    learner, parts = noisy(rule)
    optimizer = parts['optimizer']
    data = parts['batches'](0)
    outside = brainstate.ShortTermState(jnp.zeros(()))  # no part of the model

    def step(*slices):
        outside.value = outside.value + 1
        return parts['step_fn'](*slices)[0]

    gradients = learner.etrace_grad(
        *data, step_fn=step
    )  # traces and states that are not zero
    learner.apply(gradients, optimizer)
    measuring = {
        'evaluate': lambda: learner.evaluate(*data, step_fn=step),
        'evaluate the learner': lambda: learner.evaluate(data[0]),
        'gradient_check': lambda: learner.gradient_check(*data, step_fn=step),
        'gradient_check of rules': lambda: learner.gradient_check(
            *data, step_fn=step, rules=['uoro', 'pp_prop']
        ),
        'memory_plan': lambda: learner.memory_plan(5),
        'report': lambda: str(learner.report),
        'write_report': lambda: learner.write_report(tmp_path / 'report.html', steps=4),
        'record': lambda: plots.record(learner, data[0]),
        'activity': lambda: plots.activity(
            learner, data, TASK.kind, tmp_path / 'activity.png'
        ),
        'traces': lambda: plots.traces(learner, data[0], tmp_path / 'traces.png'),
    }
    for name, measure in measuring.items():
        held = [trace.value for trace in learner.traces.values()]
        before = everything(learner, optimizer, outside)
        measure()
        after = everything(learner, optimizer, outside)
        assert before.keys() == after.keys()
        for state in before:
            for x, y in zip(before[state], after[state], strict=True):
                np.testing.assert_array_equal(x, y, err_msg=f'{state} after {name}')
        learner.etrace_evolve(
            data[0][:1]
        )  # does not write into arrays that were seen before
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(held))


def test_validation_and_resumption_leave_a_noisy_training_as_it_is(noisy, tmp_path):
    trials = braintrace.Supervised(None, TASK, 4).batches

    def held_out(i):
        inputs, *rest = trials(10**6)
        return (inputs + 0.1 * brainstate.random.normal(size=inputs.shape), *rest)

    validation = {'validate': held_out, 'validate_every': 2}
    learner, parts = noisy()
    unvalidated = braintrace.fit(learner, updates=6, **parts)
    whole, parts = noisy()
    history = braintrace.fit(whole, updates=6, **validation, **parts)
    np.testing.assert_array_equal(history['loss'], unvalidated['loss'])

    def killed(record):
        if record['update'] == 5:
            raise RuntimeError('killed')

    first, parts = noisy()
    given = {'out': tmp_path, 'save_every': 3, **validation, **parts}
    with pytest.raises(RuntimeError, match='killed'):
        braintrace.fit(first, updates=6, callbacks=[killed], **given)
    again, parts = noisy()
    brainstate.random.seed(99)
    resumed = braintrace.fit(
        again, updates=6, out=tmp_path, resume=True, **validation, **parts
    )
    for name in ('loss', 'accuracy', 'valid_loss', 'valid_accuracy'):
        np.testing.assert_array_equal(resumed[name], history[name])
    jax.tree.map(np.testing.assert_array_equal, weights(again), weights(whole))


def test_updates_along_the_sequence():
    learner, parts = make(optimizer=optax.sgd(0.1))
    history = braintrace.fit(learner, updates=2, update_every=3, **parts)
    other, parts = make(optimizer=optax.sgd(0.1))
    for i in range(2):
        other.reset_state()
        step = lambda *slices: parts['step_fn'](*slices)[0]
        losses = other.etrace_online(
            *parts['batches'](i),
            step_fn=step,
            optimizer=parts['optimizer'],
            update_every=3,
        )
    assert float(losses.mean()) == pytest.approx(history['loss'][-1])
    jax.tree.map(np.testing.assert_allclose, weights(learner), weights(other))


def test_empty_batches_and_sequences_are_refused(tmp_path):
    learner, parts = make()
    step = lambda x: jnp.sum(learner(x))
    empty = jnp.zeros((3, 0, TASK.inputs))
    compiled = lambda x, size: braintrace.compile(
        brainstate.nn.GRUCell(3, 4), 'd_rtrl', x, batch_size=size
    )
    refused = {
        'batch_size=0': lambda: compiled(jnp.ones((2, 3)), 0),
        'batch_size=-2': lambda: compiled(jnp.ones((2, 3)), -2),
        'batch_size=2.0': lambda: compiled(jnp.ones((2, 3)), 2.0),
        'batch_size=0 ': lambda: learner.reset_state(batch_size=0),
        'shapes [(0, 3)]': lambda: compiled(jnp.ones((0, 3)), None),
        'batch axis or its time axis': lambda: learner(empty[0]),
        'time axis is empty': lambda: learner(
            braintrace.MultiStepData(empty.swapaxes(0, 1))
        ),
        'axis is empty': lambda: learner.etrace_grad(empty, step_fn=step),
        'its batch axis': lambda: learner.evaluate(empty),
        'at least one': lambda: learner.etrace_grad(empty.swapaxes(0, 1), step_fn=step),
        'memory_plan(0)': lambda: learner.memory_plan(0),
        'nothing to learn': lambda: braintrace.fit(
            learner,
            **{**parts, **braintrace.Supervised(learner, TASK, 0).parts()},
            updates=1,
        ),
    }
    for told, call in refused.items():
        with pytest.raises((ValueError, braintrace.CompilationError)) as error:
            call()
        assert told.strip() in str(error.value)
        assert is_explained(error.value)


class Membrane(brainstate.nn.Module):
    """A potential in millivolts, and beside it a tree of states with units of their own."""

    def __init__(self):
        super().__init__()
        self.weight = brainstate.nn.Linear(TASK.inputs, 6)
        self.readout = brainstate.nn.Linear(6, TASK.outputs)

    def init_state(self, batch_size=None, **options):
        zeros = jnp.zeros((batch_size, 6))
        self.v = brainstate.HiddenState(zeros * u.mV)
        self.tree = brainstate.HiddenTreeState({'current': zeros * u.nA, 'gate': zeros})

    def update(self, x):
        v = 0.9 * self.v.value + self.weight(x) * u.mV
        self.v.value = v
        current = 0.5 * self.tree.get_value('current') + 0.1 * v / u.mV * u.nA
        self.tree.set_value({'current': current, 'gate': jnp.tanh(v / u.mV)})
        return self.readout(current / u.nA)


def test_pictures_of_states_with_units(tmp_path, monkeypatch):
    learner = braintrace.compile(
        Membrane(), 'd_rtrl', jnp.zeros((4, TASK.inputs)), batch_size=4
    )
    trial = braintrace.Supervised(learner, TASK, 4).batches(0)
    figures = []
    figure = plots._figure

    def kept(*given, **shared):
        figures.append(figure(*given, **shared))
        return figures[-1]

    monkeypatch.setattr(plots, '_figure', kept)
    plots.activity(learner, trial, TASK.kind, tmp_path / 'activity.png')
    labels = [ax.get_ylabel() for ax in figures[0][1].flat]
    assert labels == [
        'inputs\nchannel',
        'unit',
        'tree.current [nA]',
        'tree.gate',
        'probability',
    ]
    # The heat map of all units has its unit at the colour bar.
    assert 'tree.current [nA]' in [ax.get_ylabel() for ax in figures[0][0].axes[5:]]
    found = plots.record(learner, trial[0])
    values = learner.evaluate(
        trial[0], step_fn=lambda x: (learner(x), learner.model.v.value)[1]
    )
    np.testing.assert_array_equal(found['v'], values.to_decimal(u.mV)[:, 0])
    assert plots.traces(learner, trial[0], tmp_path / 'traces.png')
    assert all(
        '(' in ax.get_title() or ' on v' in ax.get_title()
        for ax in figures[1][1].flat
        if ax.get_title()
    )


def test_evaluating_is_running_the_model():
    learner, _ = make()
    xs = jax.random.normal(jax.random.key(0), (5, 4, TASK.inputs))
    learner.etrace_evolve(xs)
    before = [
        jnp.copy(x) for s in learner.states().values() for x in jax.tree.leaves(s.value)
    ]
    outputs = learner.evaluate(xs)
    for x, y in zip(
        before,
        [x for s in learner.states().values() for x in jax.tree.leaves(s.value)],
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)
    brainstate.nn.init_all_states(learner.model, 4)
    np.testing.assert_allclose(
        outputs, brainstate.transform.for_loop(learner.model, xs), rtol=1e-6
    )


def test_applying_by_optax_is_optax():
    learner, _ = make()
    transform = optax.adam(0.1)
    values = {path: s.value for path, s in learner.param_states.items()}
    gradients = jax.tree.map(lambda x: jnp.cos(x + 1), values)
    state = transform.init(values)
    for _ in range(2):
        learner.apply(gradients, transform)
        changes, state = transform.update(gradients, state, values)
        values = optax.apply_updates(values, changes)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        weights(learner),
        values,
    )
    with pytest.raises(TypeError, match='optimizer='):
        learner.apply(gradients, 'adam')


def test_rates_are_held_near_their_target():
    rate = braintrace.nn.FiringRate(3, decay=0.5)
    brainstate.nn.init_all_states(rate, 2)
    rate(jnp.array([[1.0, 0, 0], [1.0, 0, 1.0]]))
    np.testing.assert_allclose(rate.r.value, [[0.5, 0, 0], [0.5, 0, 0.5]])
    means = np.array([0.5, 0, 0.25])
    assert float(rate.penalty(0.1)) == pytest.approx(
        0.5 * np.mean((means - 0.1) ** 2) / 0.1
    )
    with pytest.raises(ValueError, match='positive'):
        rate.penalty(0.0)
    with pytest.raises(ValueError, match='0 < decay < 1'):
        braintrace.nn.FiringRate(3, decay=1.0)


def test_progress_says_the_same_in_a_pipe(capsys):
    progress = Progress(3, every=0.0)
    for i in range(3):
        progress({'update': i + 1, 'loss': 3.0 - i, 'seconds': i + 1.0}, 100)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(
        'update 2/3  loss 2.5  (means of 2)  100 steps/s  0:01 left'
    )
    assert 'MiB' in lines[1]
