"""A call changes all of its states or none: interrupts wait for the writing, and what can fail donates nothing."""

import os
import signal
import threading

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace.compat import can_fail
from braintrace.learner.transaction import DeferInterrupts, Transaction

UNITS, BATCH = 4, 2


def made(step=None, **options):
    brainstate.random.seed(0)
    net = brainstate.nn.GRUCell(UNITS, UNITS)
    example = jnp.zeros((BATCH, UNITS))
    learner = braintrace.compile(net, 'd_rtrl', example, batch_size=BATCH)

    def squared(x):
        return jnp.mean((learner(x if step is None else step(x)) - x) ** 2)

    return net, learner, learner.stream(squared, optax.adam(1e-2), **options)


def values_of(learner):
    states = (*learner.states().values(), *learner._kept.optimizers.values())
    return [np.array(x) for s in states for x in jax.tree.leaves(s.value)]


# ---------------------------------------------------------------- interrupts that wait


def send():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_outermost_block():
    before, deferred, done = signal.getsignal(signal.SIGINT), DeferInterrupts(), []

    def nested():
        with deferred:
            with deferred:
                send()
                done.append('inside')
            done.append('between')

    with pytest.raises(KeyboardInterrupt):
        nested()
    assert done == ['inside', 'between']
    assert signal.getsignal(signal.SIGINT) is before


def test_every_interrupt_comes_to_the_handler_of_the_user():
    came, deferred = [], DeferInterrupts()

    def failing():
        with deferred:
            send()
            send()
            assert not came
            raise ZeroDivisionError

    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        with pytest.raises(ZeroDivisionError):
            failing()
        assert came == [signal.SIGINT] * 2
        with deferred:
            pass
        assert came == [signal.SIGINT] * 2  # none comes twice
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize('handler', [signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_that_raises_nothing_stays(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with DeferInterrupts():
            assert signal.getsignal(signal.SIGINT) is handler
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_the_handler():
    seen, deferred = [], DeferInterrupts()

    def work():
        with deferred:
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def test_tracing_and_compiling_are_interrupted_at_once():
    """The first call of a program takes long."""
    asked = []

    def step(x):
        if asked:
            asked.clear()
            send()
            asked.append('this is not reached')
        return x

    _, learner, stream = made(step)
    before = values_of(learner)
    asked.append(True)
    with pytest.raises(KeyboardInterrupt):
        stream(jnp.ones((BATCH, UNITS)))
    assert not asked
    jax.tree.map(np.testing.assert_array_equal, values_of(learner), before)


# ---------------------------------------------------------------- programs that can fail


def test_callbacks_and_effects_are_seen_inside_of_loops():
    def called(x):
        return jax.pure_callback(np.sin, x, x)

    def shown(x):
        jax.debug.print('{}', x)
        return x

    def loop(body):
        return lambda x: jax.lax.scan(lambda c, _: (body(c), None), x, length=2)

    for body, fails in ((called, True), (shown, True), (jnp.sin, False)):
        assert can_fail(jax.make_jaxpr(loop(jax.jit(body)))(1.0)) is fails


def test_results_of_a_program_that_fails_later_are_not_written(monkeypatch):
    """As on devices that run programs in the background: the error is raised when a
    result is waited for."""
    written = []

    def not_ready(results):
        raise RuntimeError('a callback failed')

    transaction = Transaction(jnp.sin, 0, True)
    assert not transaction.donates
    x = jnp.ones(3)
    monkeypatch.setattr(jax, 'block_until_ready', not_ready)
    with pytest.raises(RuntimeError, match='a callback failed'):
        transaction(written.append, x)
    assert not written
    assert not x.is_deleted()


def test_a_stream_with_a_callback_donates_nothing_and_learns_the_same():
    same = lambda x: jax.pure_callback(np.asarray, x, x, vmap_method='sequential')
    xs = np.random.default_rng(0).normal(size=(5, BATCH, UNITS)).astype('float32')
    found = []
    for step in (None, same):
        net, learner, stream = made(step)
        for x in xs:
            old = net.h.value
            stream(x)
        assert old.is_deleted() is (step is None)
        found.append(values_of(learner))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- inputs that are donated


@pytest.mark.parametrize('alias', [False, True])
@pytest.mark.parametrize('kind', ['stream', 'predict', 'gradient', 'apply', 'chunk'])
def test_an_input_may_be_a_state_of_the_model(kind, alias):
    device = jax.devices()[0]
    found = []
    for copied in (False, True):
        # Another array of the same memory is donated with it.
        same = lambda x: jax.device_put(x, device) if alias else x
        of = (lambda x: np.array(x)) if copied else same
        net, learner, stream = made(chunk=BATCH if kind == 'chunk' else None)
        for _ in range(3):
            if kind == 'stream':
                stream(of(net.h.value))
            elif kind == 'predict':
                stream.predict(of(net.h.value))
            elif kind == 'gradient':
                stream.gradient(of(net.h.value))
            elif kind == 'chunk':
                stream(jnp.stack([of(net.h.value)] * BATCH))
            else:
                stream(jnp.ones((BATCH, UNITS)))
                weights = learner.param_states.items()
                stream.apply({p: jax.tree.map(of, s.value) for p, s in weights}, 0.1)
        found.append(values_of(learner))
    jax.tree.map(np.testing.assert_array_equal, *found)
