"""Inputs that hold no numbers are refused where they come in, and change nothing."""

import copy
import pickle

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace.errors import is_explained

B = 2


def made():
    brainstate.random.seed(0)
    model = brainstate.nn.Sequential(
        brainstate.nn.GRUCell(1, 3), brainstate.nn.Linear(3, 1)
    )
    learner = braintrace.compile(model, 'd_rtrl', jnp.ones((B, 1)), batch_size=B)
    return learner, lambda x: jnp.mean((learner(x) - 1) ** 2)


X = np.ones((B, 1), 'float32')
WRONG = {
    'text': 'abc',
    'bytes': b'abc',
    'texts': np.array([['a'], ['b']]),
    'objects': np.array([[1.0], [None]], object),
    'numbers as objects': X.astype(object),
    'masked': np.ma.masked_array(X, mask=[[True], [False]]),
    'dates': np.zeros((B, 1), 'M8[s]'),
    'records': np.zeros((B, 1), [('a', 'f4')]),
    'texts in a dictionary': {'a': 'b'},
    'an object': object(),
}


def test_what_holds_no_numbers_is_refused_and_changes_nothing():
    learner, step_fn = made()
    stream = learner.stream(step_fn, optax.sgd(0.1))
    stream(X)
    chunks = learner.stream(step_fn, optax.sgd(0.1), chunk=3)
    before = jax.tree.map(np.array, [s.value for s in learner.states().values()])
    for name, x in WRONG.items():
        steps = x[None] if isinstance(x, np.ndarray) else x
        for call in (
            lambda x=x: stream(x),
            lambda x=x: stream.predict(x),
            lambda x=x: stream.gradient(x),
            lambda steps=steps: chunks(steps),
            lambda x=x: learner(x),
            lambda steps=steps: learner.etrace_grad(steps, step_fn=step_fn),
        ):
            with pytest.raises((TypeError, ValueError)) as error:
                call()
            assert is_explained(error.value), name
    after = [s.value for s in learner.states().values()]
    jax.tree.map(np.testing.assert_array_equal, before, after)
    # Types of other packages, and half precision, are numbers.
    for x in (X, jnp.asarray(X), X.astype(jnp.bfloat16), X.astype(bool), X.astype(int)):
        assert jnp.isfinite(stream(x).loss)


def test_a_call_in_chunks_needs_steps():
    learner, step_fn = made()
    stream = learner.stream(step_fn, optax.sgd(0.1), chunk=3)
    for wrong in (None, 1.0, [[1.0], [2.0]], jax.random.key(0)):
        with pytest.raises((TypeError, ValueError)) as error:
            stream(wrong)
        assert is_explained(error.value)


def test_a_stream_says_how_it_is_copied():
    learner, step_fn = made()
    stream = learner.stream(step_fn, optax.adam(0.1))
    stream(X)
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match='step_fn'):
            copied(stream)


def test_the_way_that_it_says_works(tmp_path):
    learner, step_fn = made()
    stream = learner.stream(step_fn, optax.adam(0.1))
    stream(X)
    other = copy.deepcopy(stream.learner)
    second = other.stream(lambda x: jnp.mean((other(x) - 1) ** 2), optax.adam(0.1))
    stream.save(tmp_path)
    second.load(tmp_path)
    for _ in range(3):
        assert float(second(X).loss) == pytest.approx(float(stream(X).loss), abs=1e-7)


def test_what_a_stream_applies_is_checked():
    learner, step_fn = made()
    stream = learner.stream(step_fn, optax.sgd(0.1), decay=0.9)
    gradient = stream.gradient(X).gradient
    one = dict(list(gradient.items())[:1])
    before = learner.weights()
    for wrong in (
        lambda: stream.apply('abc'),
        lambda: stream.apply(X),
        lambda: stream.apply({('no', 'such'): X}),
        lambda: stream.apply(one),
        lambda: stream.apply(scale='x'),
        lambda: stream.apply(scale=None),
        lambda: stream.apply(scale=np.ones(3)),
        lambda: learner.stream(step_fn, optax.sgd(0.1), decay='a'),
        lambda: learner.stream(step_fn, optax.sgd(0.1), decay=[0.5]),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            wrong()
        assert is_explained(error.value)
    jax.tree.map(np.testing.assert_array_equal, learner.weights(), before)
    stream.apply(gradient, scale=np.array([0.5]))
    assert float(jnp.abs(learner.weights()[('layers', 1, 'weight')]['bias']).sum()) > 0


def test_batches_that_hold_no_numbers_are_refused():
    learner, step_fn = made()
    options = {'step_fn': step_fn, 'optimizer': optax.sgd(0.1), 'updates': 1}
    for name in ('texts', 'objects', 'masked', 'text'):
        x = WRONG[name]
        steps = x[None] if isinstance(x, np.ndarray) else x
        with pytest.raises((TypeError, ValueError)) as error:
            braintrace.fit(learner, lambda i, x=steps: (x,), show=False, **options)
        assert is_explained(error.value), name
