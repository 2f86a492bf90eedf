"""Settings of brainstate that a step reads are part of its programs."""

import copy
import threading

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace.errors import RecompilationWarning

B, H, T = 2, 3, 4
XS = jnp.ones((T, B, H))


class Scaled(brainstate.nn.Module):
    """Leaky units whose input is multiplied by a setting, 1 if it is not set."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones(H))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, H)))

    def update(self, x):
        gain = self.gain()
        self.h.value = 0.5 * self.h.value + gain * self.w.value * x
        return self.h.value

    def gain(self):
        return brainstate.environ.get('gain', 1.0)


class Timed(Scaled):
    """The same with the time step in place of the gain; it must be set."""

    def gain(self):
        dt = brainstate.environ.get_dt()
        return dt.to_decimal(u.ms) if isinstance(dt, u.Quantity) else dt


def compiled(model=Scaled, **options):
    return braintrace.compile(model(), 'd_rtrl', XS[0], batch_size=B, **options)


def called(learner):
    return learner(XS[0])


def differentiated(learner):
    loss = lambda: jnp.mean(learner(XS[0]) ** 2)
    return brainstate.transform.grad(loss, learner.param_states)()


def gradient(learner):
    return learner.etrace_grad(XS, step_fn=learner.step)


def gradient_in_windows(learner):
    return learner.etrace_grad(XS, step_fn=learner.windowed, chunk_size=2)


def evolved(learner):
    return learner.etrace_evolve(XS, return_outputs=True)


def evolved_in_windows(learner):
    return learner.etrace_evolve(XS, chunk_size=2, return_outputs=True)


def trained_online(learner):
    before = learner.weights()
    options = {'step_fn': learner.step, 'optimizer': learner.optimizer}
    losses = learner.etrace_online(XS, **options)
    found = losses, learner.weights()
    learner.set_weights(before)
    return found


def streamed(learner):
    before = learner.weights()
    found = [learner.learning(XS[0]).loss for _ in range(3)], learner.weights()
    learner.set_weights(before)
    return found


def predicted(learner):
    return learner.learning.predict(XS[0])


def gradient_of_stream(learner):
    return learner.learning.gradient(XS[0]).gradient


def evaluated(learner):
    return learner.evaluate(XS), learner.evaluate(XS, step_fn=learner.step)


def checked(learner):
    check = learner.gradient_check(XS, step_fn=learner.step)
    return [row.norm for row in check.rows]


def certified(learner):
    return learner.certificate(XS, step_fn=learner.step, directions=0).norm


CALLS = [
    called,
    differentiated,
    gradient,
    gradient_in_windows,
    evolved,
    evolved_in_windows,
    trained_online,
    streamed,
    predicted,
    gradient_of_stream,
    evaluated,
    checked,
    certified,
]


def ready(learner):
    """A learner with what the calls above need, made once."""
    learner.step = lambda x: jnp.mean(learner(x) ** 2)
    learner.windowed = lambda x: jnp.mean(learner(braintrace.MultiStepData(x)) ** 2)
    learner.optimizer = optax.sgd(0.1)
    learner.learning = learner.stream(learner.step, learner.optimizer)
    return learner


def same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


def differ(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    assert any(np.any(np.abs(x - y) > 1e-3) for x, y in pairs)


def result(call, learner):
    learner.reset_state()
    return call(learner)


@pytest.mark.parametrize('call', CALLS, ids=lambda call: call.__name__)
def test_another_value_gives_another_program(call):
    """The result is that of a learner compiled at the value, whatever was called
    before."""

    def wanted(**settings):
        with brainstate.environ.context(**settings):
            return result(call, ready(compiled()))

    learner = ready(compiled())
    plain = result(call, learner)
    same(plain, wanted())
    for gain in (2.0, jnp.asarray(3.0), 2.0):
        with brainstate.environ.context(gain=gain):
            found = result(call, learner)
        same(found, wanted(gain=gain))
        differ(found, plain)
    same(result(call, learner), plain)  # not set any more
    brainstate.environ.set(gain=2.0)
    differ(result(call, learner), plain)
    brainstate.environ.pop('gain')
    same(result(call, learner), plain)


def test_a_setting_of_the_step_function():
    learner = compiled()
    step = lambda x: brainstate.environ.get('weight') * jnp.mean(learner(x) ** 2)
    found = []
    for weight in (1.0, 3.0):
        brainstate.environ.set(weight=weight)
        grads = learner.etrace_grad(XS, step_fn=step, fresh=True)
        found.append((learner.evaluate(XS, step_fn=step), grads))
    same(jax.tree.map(lambda x: 3 * x, found[0]), found[1])


@pytest.mark.parametrize(
    ('first', 'equal', 'other'),
    [
        (0.5, 0.5, 0.25),
        (np.float32(0.5), np.float32(0.5), np.float32(0.25)),
        (jnp.asarray(0.5), jnp.asarray(0.5), jnp.asarray(0.25)),
        (np.full(H, 0.5), np.full(H, 0.5), np.full(H, 0.25)),
        (jnp.full(H, 0.5), jnp.full(H, 0.5), jnp.arange(H) + 1.0),
        (0.5 * u.ms, 0.5 * u.ms, 0.25 * u.ms),
        (0.5 * u.ms, 0.5 * u.ms, 0.5 * u.second),
        (jnp.full(H, 0.5) * u.ms, jnp.full(H, 0.5) * u.ms, jnp.full(H, 0.25) * u.ms),
    ],
    ids=str,
)
def test_values_are_compared(first, equal, other):
    """An equal value, in another object, is not compiled again."""

    def results(dt):
        with brainstate.environ.context(dt=dt):
            return [result(call, learner) for call in (streamed, evaluated, gradient)]

    with brainstate.environ.context(dt=first):
        learner = ready(compiled(Timed))
    at_first, traced = results(first), []
    learner.model.gain = lambda: (traced.append(1), Timed.gain(learner.model))[1]
    same(results(equal), at_first)
    assert not traced
    differ(results(other), at_first)
    assert traced


def test_a_dictionary_that_is_written_to():
    class Keyed(Scaled):
        def gain(self):
            return brainstate.environ.get('options')['gain']

    options = {'gain': 2.0}
    brainstate.environ.set(options=options)
    learner = ready(compiled(Keyed))
    before = [result(call, learner) for call in (streamed, evaluated)]
    options['gain'] = 3.0
    for call, old in zip((streamed, evaluated), before, strict=True):
        differ(result(call, learner), old)


def test_a_stream_does_not_compile_again_for_other_settings():
    brainstate.environ.set(gain=2.0)
    learner = ready(compiled())
    for t in range(8):
        with brainstate.environ.context(t=t, i=t):
            learner.learning(XS[0])
    assert learner.learning.program_count == 1


def test_a_setting_that_a_step_sets_itself():
    """What the caller has under the same name is not read."""

    class Inside(Scaled):
        def update(self, x):
            with brainstate.environ.context(gain=x[0, 0]):
                return super().update(x)

    learner = ready(compiled(Inside))
    same(evaluated(learner)[0][0], 1.0)
    same(learner.evaluate(3 * XS)[0], 9.0)


def test_a_required_setting_is_that_of_compiling_where_it_is_not_set():
    """In another thread, whose settings are its own, and after a context."""
    with brainstate.environ.context(dt=0.5):
        learner = ready(compiled(Timed))
        wanted = [result(call, learner) for call in CALLS]
    copied = ready(copy.deepcopy(learner))
    found = []

    def run():
        for each in (learner, copied):
            found.append([result(call, each) for call in CALLS])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    run()
    assert len(found) == 4
    for each in found:
        same(each, wanted)
    with brainstate.environ.context(dt=0.25):
        differ(result(evaluated, learner), wanted[CALLS.index(evaluated)])


def test_a_setting_with_many_values_is_warned_of():
    learner = compiled()

    def run():
        for n in range(6):
            with brainstate.environ.context(gain=float(n)):
                learner.evaluate(XS)

    with pytest.warns(RecompilationWarning, match='gain') as caught:
        run()
    assert len(caught) == 1
    assert 'an input of the step' in str(caught[0].message)


def test_threads_record_their_own_settings():
    """Two learners that are compiled at once, in threads with other settings."""
    found, both = {}, threading.Barrier(2)

    class Waiting(Scaled):
        def update(self, x):
            both.wait(10)
            return super().update(x)

    def run(gain):
        with brainstate.environ.context(gain=gain):
            learner = compiled(Waiting)
            found[gain] = learner(XS[0])

    threads = [threading.Thread(target=run, args=(gain,)) for gain in (2.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for gain, value in found.items():
        same(value, gain)
    assert len(found) == 2


def test_precision_is_a_setting():
    class Rounded(Scaled):
        def gain(self):
            return jnp.asarray(1.0 + 2**-9, brainstate.environ.dftype())

    learner = compiled(Rounded)
    before = learner.evaluate(XS)
    with brainstate.environ.context(precision='bf16'):
        assert brainstate.environ.dftype() == jnp.bfloat16
        differ(learner.evaluate(XS), before)
