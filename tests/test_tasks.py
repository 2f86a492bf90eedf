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
    *(tasks.Series(name, steps=300) for name in ('mackey_glass', 'lorenz', 'henon')),
]


@pytest.mark.parametrize('task', SMALL, ids=lambda t: getattr(t, 'name', type(t).__name__))
def test_shapes_and_seeds(task):
    draw = lambda seed: task.batch(np.random.default_rng(seed), 5)
    xs, ys, weights = draw(0)
    assert xs.shape == (task.steps, 5, task.inputs)
    assert ys.shape[:2] == (task.steps, 5)
    assert weights.shape == (task.steps,)
    assert weights.sum() > 0
    assert task.reference
    assert ys.max() < task.outputs if task.kind != 'values' else ys.shape[2] == task.outputs
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
    np.testing.assert_allclose(ys[-1, :, 0], (xs[..., 0] * xs[..., 1]).sum(0), rtol=1e-6)
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
