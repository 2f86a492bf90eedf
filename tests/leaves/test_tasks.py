"""Tasks: shapes, seeds, and targets that follow from the inputs."""

import numpy as np
import pytest

from braintrace import tasks
from braintrace.tasks import series

SMALL = [
    tasks.EvidenceAccumulation(cues=3, cue=20, every=30, delay=40, recall=15),
    tasks.DelayedMatchToSample(channels=40, shown=60, delay=20, rate=0.4),
    tasks.Copying(),
    tasks.Adding(steps=30),
    tasks.PatternGeneration(steps=50),
    tasks.Digits(),
    tasks.Digits(by='row', test=True),
    tasks.Randman(steps=20, dimensions=2),
    *(tasks.Series(name, steps=300) for name in ('mackey_glass', 'lorenz', 'henon')),
]


@pytest.mark.parametrize('task', SMALL, ids=str)
def test_shapes_and_seeds(task):
    draw = lambda seed: task.batch(np.random.default_rng(seed), 5)
    xs, ys, weights = draw(0)
    assert xs.shape == (task.steps, 5, task.inputs)
    assert ys.shape[:2] == (task.steps, 5)
    assert weights.shape == (task.steps,)
    assert weights.sum() > 0
    assert task.reference
    assert (
        ys.max() < task.outputs
        if task.kind != 'values'
        else ys.shape[2] == task.outputs
    )
    for a, b in zip(draw(0), draw(0), strict=True):
        np.testing.assert_array_equal(a, b)
    if not isinstance(task, tasks.PatternGeneration):
        assert not np.array_equal(draw(0).inputs, draw(1).inputs)


def test_targets_follow_from_the_inputs():
    rng = np.random.default_rng(0)
    task = tasks.EvidenceAccumulation(rate=0.9, noise=0.0)
    xs, ys, _ = task.batch(rng, 20)
    sides = xs[: task.cues * task.every].reshape(-1, 20, 4, task.group).sum((0, 3))
    np.testing.assert_array_equal(ys[-1], sides[:, 1] > sides[:, 0])
    xs, ys, weights = tasks.Copying().batch(rng, 20)
    np.testing.assert_array_equal(xs[:10].argmax(-1), ys[weights > 0])
    xs, ys, _ = tasks.Adding().batch(rng, 20)
    np.testing.assert_allclose(
        ys[-1, :, 0], (xs[..., 0] * xs[..., 1]).sum(0), rtol=1e-6
    )
    assert np.all(xs[..., 1].sum(0) == 2)
    task = tasks.DelayedMatchToSample(rate=0.9, background=0.0)
    xs, ys, _ = task.batch(rng, 20)
    first = xs[task.fixation : task.fixation + task.shown].mean(0)
    second = xs[-task.shown :].mean(0)
    np.testing.assert_array_equal(ys[-1], np.abs(first - second).max(-1) < 0.3)


def test_series_obey_their_equations():
    rng = np.random.default_rng(0)
    x = series._henon(rng, 100, 3)
    np.testing.assert_allclose(x[2:], 1 - 1.4 * x[1:-1] ** 2 + 0.3 * x[:-2])
    assert np.ptp(series._mackey_glass(rng, 500, 2)) > 0.5
    assert np.ptp(series._lorenz(rng, 500, 2)) > 20
    inputs, targets, _ = tasks.Series('lorenz', 200).batch(rng, 4)
    np.testing.assert_array_equal(inputs[1:], targets[:-1])
    with pytest.raises(ValueError, match='no such series'):
        tasks.Series('noise').batch(rng, 1)


def test_tasks_by_name():
    assert tasks.task('lorenz', steps=7) == tasks.Series('lorenz', 7)
    with pytest.raises(ValueError, match='juggling'):
        tasks.task('juggling')
    with pytest.raises(ValueError, match='speed'):
        tasks.task('copying', speed=3)


def test_digits_are_read_pixel_by_pixel_and_a_fifth_is_held_out():
    from sklearn.datasets import load_digits

    found, shown = load_digits(), []
    for test in (False, True):
        xs, ys, weights = tasks.Digits(test=test).batch(np.random.default_rng(0), 400)
        pictures = xs[:, :, 0].T * 16
        index = {
            picture.tobytes(): i
            for i, picture in enumerate(found.data.astype(np.float32))
        }
        chosen = np.array([index[p.astype(np.float32).tobytes()] for p in pictures])
        np.testing.assert_array_equal(ys[-1], found.target[chosen])
        shown.append(set(chosen.tolist()))
        assert weights.tolist() == [0.0] * 63 + [1.0]
    assert not shown[0] & shown[1]
    rows = tasks.Digits(by='row').batch(np.random.default_rng(0), 3).inputs
    pixels = tasks.Digits().batch(np.random.default_rng(0), 3).inputs
    np.testing.assert_array_equal(rows.swapaxes(0, 1).reshape(3, 64), pixels[:, :, 0].T)
    with pytest.raises(ValueError, match="'pixel' or 'row'"):
        tasks.Digits(by='column')


def test_units_of_randman_fire_once_when_their_class_says():
    task = tasks.Randman(classes=3, units=6, steps=50)
    xs, ys, _ = task.batch(np.random.default_rng(0), 300)
    np.testing.assert_array_equal(xs.sum(0), 1)
    near = task.times(np.zeros(2, int), np.array([[0.3], [0.3001]]))
    far = task.times(np.array([0, 1]), np.array([[0.3], [0.3]]))
    assert np.abs(near[0] - near[1]).max() < 0.01 < np.abs(far[0] - far[1]).max()
    when = xs.argmax(0)
    assert all(np.ptp(when[ys[-1] == c], axis=0).max() > 20 for c in range(3))
    assert set(ys[-1]) == {0, 1, 2}


def test_spoken_digits_are_read_from_their_file(tmp_path):
    import h5py

    times, units = [[0.1, 0.2, 1.39, 2.0], [0.7]], [[5, 699, 0, 1], [10]]
    with h5py.File(tmp_path / 'shd.h5', 'w') as file:
        for name, values, kind in (
            ('times', times, 'float32'),
            ('units', units, 'int64'),
        ):
            made = file.create_dataset(
                f'spikes/{name}', (2,), h5py.vlen_dtype(np.dtype(kind))
            )
            for i, value in enumerate(values):
                made[i] = np.asarray(value, kind)
        file['labels'] = np.array([4, 19])
    task = tasks.SHD(tmp_path / 'shd.h5', steps=14, group=10)
    xs, ys, weights = task.batch(np.random.default_rng(1), 20)
    assert xs.shape == (14, 20, 70)
    assert set(ys[0]) == {4, 19}
    k = int(np.flatnonzero(ys[0] == 4)[0])
    assert sorted(zip(*map(np.ndarray.tolist, np.nonzero(xs[:, k])), strict=True)) == [
        (1, 0),
        (2, 69),
        (13, 0),
    ]
    assert weights.sum() == 7
    (tmp_path / 'other.h5').write_bytes(b'nothing')
    with pytest.raises(ValueError, match='no file of SHD'):
        tasks.SHD(tmp_path / 'other.h5').batch(np.random.default_rng(0), 1)


def test_events_are_read_from_their_folder(tmp_path):
    event = lambda x, y, p, t: bytes([x, y, p << 7 | t >> 16, t >> 8 & 255, t & 255])
    for digit, content in (
        ('3', event(1, 2, 1, 70_000) + event(33, 0, 0, 299_000)),
        ('7', event(0, 0, 1, 0)),
    ):
        (tmp_path / digit).mkdir()
        (tmp_path / digit / '00001.bin').write_bytes(content)
    xs, ys, _ = tasks.NMNIST(tmp_path, steps=30).batch(np.random.default_rng(0), 10)
    seen = xs.reshape(30, 10, 2, 34, 34)
    assert set(ys[0]) == {3, 7}
    k = int(np.flatnonzero(ys[0] == 3)[0])
    assert np.argwhere(seen[:, k]).tolist() == [[7, 1, 2, 1], [29, 0, 0, 33]]
    with pytest.raises(ValueError, match='4 bytes'):
        tasks.recordings.events(b'1234')
    with pytest.raises(ValueError, match='Train or Test'):
        tasks.NMNIST(tmp_path / '3').batch(np.random.default_rng(0), 1)


EVENTS = [('x', np.int16), ('y', np.int16), ('t', np.int64), ('p', bool)]


def test_events_are_counted_by_step_polarity_row_and_column():
    events = np.array(
        [
            (0, 0, 0, True),
            (2, 1, 99, False),
            (2, 1, 100, False),
            (2, 1, 150, False),
            (1, 0, 299, True),
            (1, 0, 300, True),  # after the last step
        ],
        EVENTS,
    )
    found = tasks.events_to_steps(events, 3, (3, 2, 2), step=100, flat=False)
    wanted = np.zeros((3, 2, 2, 3))
    wanted[0, 1, 0, 0] = 1
    wanted[0, 0, 1, 2] = 1
    wanted[1, 0, 1, 2] = 2
    wanted[2, 1, 0, 1] = 1
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == np.float32
    flat = tasks.events_to_steps(events, 3, (3, 2, 2), step=100)
    np.testing.assert_array_equal(flat, wanted.reshape(3, -1))
    ones = tasks.events_to_steps(events, 3, (3, 2, 2), step=100, binary=True)
    np.testing.assert_array_equal(ones, wanted.reshape(3, -1) > 0)
    later = tasks.events_to_steps(events, 1, (3, 2, 2), step=100, start=100)
    np.testing.assert_array_equal(later[0], wanted[1].ravel())
    alike = tasks.events_to_steps(events, 3, (3, 2, 1), step=100, flat=False)
    np.testing.assert_array_equal(alike[:, 0], wanted.sum(1))


def test_the_time_of_a_recording_is_divided():
    events = np.array([(0, 20), (1, 29), (1, 30), (2, 40)], [('x', int), ('t', float)])
    steps = lambda **options: tasks.events_to_steps(events, 2, (3, 1, 1), **options)
    np.testing.assert_array_equal(steps(start=None), [[1, 1, 0], [0, 1, 1]])
    np.testing.assert_array_equal(steps(), [[0, 0, 0], [1, 2, 1]])
    empty = tasks.events_to_steps(events[:0], 2, (3, 1, 1), start=None)
    np.testing.assert_array_equal(empty, np.zeros((2, 3)))


def test_polarities_of_either_sign():
    kinds = [('x', int), ('t', int), ('p', int)]
    events = np.array([(0, 0, -1), (0, 0, 1), (0, 0, 1)], kinds)
    found = tasks.events_to_steps(events, 1, (1, 1, 2), step=1)
    np.testing.assert_array_equal(found, [[1, 2]])


def test_recordings_of_events_are_a_task():
    one = lambda x: (np.array([(x, 0, 5, True), (x, 0, 35, False)], EVENTS), x)
    task = tasks.EventRecordings([one(0), one(1), one(2)], (3, 1, 2), 3, 4, step=10)
    inputs, targets, weights = task.batch(np.random.default_rng(0), 6)
    assert inputs.shape == (4, 6, task.inputs)
    np.testing.assert_array_equal(inputs[0].argmax(-1) - 3, targets[0])
    np.testing.assert_array_equal(inputs[3].argmax(-1), targets[3])
    np.testing.assert_array_equal(inputs.sum((0, 2)), 2)
    np.testing.assert_array_equal(weights, [0, 0, 1, 1])
    assert set(targets[0]) == {0, 1, 2}


def test_events_that_do_not_fit_are_refused():
    events = np.array([(3, 0, 5, True)], EVENTS)
    with pytest.raises(ValueError, match='x from 3 to 3'):
        tasks.events_to_steps(events, 2, (3, 1, 2))
    with pytest.raises(ValueError, match='events of type'):
        tasks.events_to_steps(np.zeros((4, 4)), 2, (3, 1, 2))
    with pytest.raises(ValueError, match='steps=0'):
        tasks.events_to_steps(events, 0, (3, 1, 2))
