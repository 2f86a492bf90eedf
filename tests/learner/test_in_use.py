"""Learners as programs use them: inside jit, beside one another, copied."""

import copy
import os
from concurrent.futures import ThreadPoolExecutor

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import MultiStepData

B, INPUTS, H, OUTPUTS, T = 2, 3, 4, 5, 4


class Net(brainstate.nn.Module):
    """A recurrent cell and a read-out."""

    def __init__(self):
        super().__init__()
        self.cell = brainstate.nn.GRUCell(INPUTS, H)
        self.readout = brainstate.nn.Linear(H, OUTPUTS)

    def update(self, x):
        return self.readout(self.cell(x))


@pytest.fixture(scope='module')
def xs():
    return jnp.asarray(
        np.random.default_rng(0).normal(size=(T, B, INPUTS)), jnp.float32
    )


@pytest.fixture(scope='module')
def ys():
    return jnp.asarray(
        np.random.default_rng(1).normal(size=(T, B, OUTPUTS)), jnp.float32
    )


def compiled(xs, rule='d_rtrl', model=None, **options):
    brainstate.random.seed(0)
    return braintrace.compile(
        model or Net(), rule, xs[0], batch_size=B, seed=0, **options
    )


def assert_close(a, b, tolerance=1e-6):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance),
        a,
        b,
    )


def weights_of(learner):
    return {path: state.value for path, state in learner.param_states.items()}


def parameter_gradient(learner, loss):
    return brainstate.transform.grad(loss, learner.param_states)()


# ---------------------------------------------------------------- a step that closes over traced values


def weighted_error(outputs, labels, scale):
    """Cross-entropy of labels (integers) with weights (floats), one of each for a sample."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(outputs), labels[:, None], -1)
    return -jnp.mean(scale * chosen[:, 0])


def calls_with(learner, xs, labels, scale):
    """Every kind of call, by name, with a loss that closes over labels and weights."""
    step = lambda x: weighted_error(learner(x), labels, scale)
    window = lambda x: weighted_error(learner(MultiStepData(x))[-1], labels, scale)
    sgd = optax.sgd(0.1)
    return {
        'etrace_grad': lambda: learner.etrace_grad(xs, step_fn=step),
        'windows': lambda: learner.etrace_grad(xs, step_fn=window, chunk_size=2),
        'etrace_online': lambda: learner.etrace_online(xs, step_fn=step, optimizer=sgd),
        'etrace_evolve': lambda: learner.etrace_evolve(
            xs, step_fn=step, return_outputs=True
        ),
        'evaluate': lambda: learner.evaluate(xs, step_fn=step),
        'plain': lambda: parameter_gradient(learner, lambda: step(xs[0])),
    }


@pytest.mark.parametrize(
    ('rule', 'options', 'chosen'),
    [
        ('pp_prop', {}, None),
        ('d_rtrl', {}, ('etrace_grad', 'windows')),
        ('eprop', {'feedback': 'random'}, ('etrace_grad', 'plain')),
        ('snap', {}, ('etrace_grad', 'plain')),
        ('uoro', {}, ('etrace_grad',)),
    ],
)
def test_a_step_may_close_over_values_of_the_jit_around_it(xs, rule, options, chosen):
    learner = compiled(xs, rule, **options)
    labels, scale = jnp.array([1, 3]), jnp.array([0.5, 2.0])
    start = {path: state.value for path, state in learner.states().items()}

    def outcome(call):
        """What a call gives, and the weights after it; the learner starts from the same each time."""
        for path, state in learner.states().items():
            state.value = start[path]
        learner.reset_state()
        return call(), weights_of(learner)

    for name in chosen or calls_with(learner, xs, labels, scale):
        eager = outcome(calls_with(learner, xs, labels, scale)[name])
        call = brainstate.transform.jit(
            lambda labels, scale, name=name: calls_with(learner, xs, labels, scale)[
                name
            ]()
        )
        assert_close(outcome(lambda call=call: call(labels, scale)), eager)


class Supervisor:
    """A step function with the labels of the moment as an attribute."""

    def __init__(self, learner):
        self.learner = learner
        self.labels = None

    def step(self, x):
        return weighted_error(self.learner(x), self.labels, 1.0)

    def window(self, x):
        return weighted_error(self.learner(MultiStepData(x))[-1], self.labels, 1.0)


CALLS = {
    'etrace_grad': lambda s, xs: s.learner.etrace_grad(xs, step_fn=s.step, fresh=True),
    'windows': lambda s, xs: s.learner.etrace_grad(
        xs, step_fn=s.window, chunk_size=2, fresh=True
    ),
    'evaluate': lambda s, xs: s.learner.evaluate(xs, step_fn=s.step),
    'etrace_online': lambda s, xs: s.learner.etrace_online(
        xs, step_fn=s.step, optimizer=optax.sgd(0.0)
    ),
}


@pytest.mark.parametrize('name', CALLS)
def test_what_closes_over_one_trace_is_not_used_in_another(xs, name):
    supervisor = Supervisor(compiled(xs))

    def call(labels, xs):
        supervisor.labels = labels
        return CALLS[name](supervisor, xs)

    traced = brainstate.transform.jit(call)
    first, second = jnp.array([1, 3]), jnp.array([0, 2])
    traced(first, xs)
    supervisor.learner.reset_state()
    short = jax.tree.leaves(
        traced(second, xs[:2])
    )  # another shape: the function is traced once more
    supervisor.learner.reset_state()
    fresh = Supervisor(supervisor.learner)
    fresh.labels = second
    assert_close(short, jax.tree.leaves(CALLS[name](fresh, xs[:2])))


def test_traces_of_a_step_that_is_first_seen_inside_jit_go_on(xs):
    found = []
    for transform in (lambda f: f, brainstate.transform.jit):
        learner = compiled(xs)

        def twice(
            x, learner=learner
        ):  # two steps of the model: other traces than those of one
            learner(x)
            return jnp.mean(learner(2 * x) ** 2)

        call = transform(
            lambda xs, learner=learner, twice=twice: learner.etrace_grad(
                xs, step_fn=twice
            )
        )
        found.append([call(xs[: T // 2]), call(xs[T // 2 :])])
    assert_close(*found)


# ---------------------------------------------------------------- optimisers inside jit

OPTIMIZERS = {
    'optax': lambda: optax.adam(0.01),
    'braintools': lambda: braintools.optim.Adam(lr=0.01),
}


def train_step_of(learner, optimizer):
    def train_step(x, y):
        gradients = parameter_gradient(learner, lambda: jnp.mean((learner(x) - y) ** 2))
        learner.apply(gradients, optimizer)

    return train_step


def steps_eagerly(learner, optimizer, xs, ys):
    step = train_step_of(learner, optimizer)
    for x, y in zip(xs, ys, strict=True):
        step(x, y)


def steps_in_jit(learner, optimizer, xs, ys):
    step = brainstate.transform.jit(train_step_of(learner, optimizer))
    for x, y in zip(xs, ys, strict=True):
        step(x, y)


def loop_in_jit(learner, optimizer, xs, ys):
    """Two calls of a jitted loop: the state of the optimiser is first needed inside both."""
    step = train_step_of(learner, optimizer)
    run = brainstate.transform.jit(
        lambda xs, ys: brainstate.transform.for_loop(step, xs, ys)
    )
    run(xs[: T // 2], ys[: T // 2])
    run(xs[T // 2 :], ys[T // 2 :])


def online(learner, optimizer, xs, ys):
    step_fn = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    learner.etrace_online(xs, ys, step_fn=step_fn, optimizer=optimizer)


def online_in_jit(learner, optimizer, xs, ys):
    run = brainstate.transform.jit(lambda xs, ys: online(learner, optimizer, xs, ys))
    run(xs[: T // 2], ys[: T // 2])
    run(xs[T // 2 :], ys[T // 2 :])


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_an_optimizer_goes_on_inside_jit(xs, ys, name):
    found = {}
    for way in (steps_eagerly, steps_in_jit, loop_in_jit, online, online_in_jit):
        learner = compiled(xs)
        way(learner, OPTIMIZERS[name](), xs, ys)
        found[way] = weights_of(learner)
    for weights in found.values():
        assert_close(weights, found[steps_eagerly])


def test_the_state_of_an_optimizer_made_inside_jit_is_the_one_used_outside(xs, ys):
    learner, optimizer = compiled(xs), optax.adam(0.01)
    steps_in_jit(learner, optimizer, xs[:2], ys[:2])
    (state,) = learner.optimizer_states(optimizer).values()
    assert int(state.value[0].count) == 2
    steps_eagerly(learner, optimizer, xs[2:], ys[2:])
    assert int(state.value[0].count) == T
    whole = compiled(xs)
    steps_eagerly(whole, optax.adam(0.01), xs, ys)
    assert_close(weights_of(learner), weights_of(whole))


def test_an_optimizer_that_starts_from_the_weights_is_made_before_jit(xs, ys):
    learner, optimizer = compiled(xs), optax.contrib.schedule_free_sgd(0.01)
    with pytest.raises(braintrace.CompilationError, match='optimizer_states'):
        steps_in_jit(learner, optimizer, xs, ys)
    learner.optimizer_states(optimizer)
    steps_in_jit(learner, optimizer, xs, ys)
    whole = compiled(xs)
    steps_eagerly(whole, optax.contrib.schedule_free_sgd(0.01), xs, ys)
    assert_close(weights_of(learner), weights_of(whole))


# ---------------------------------------------------------------- copies


def held(learner):
    """Weights, states and traces."""
    traces = {key: trace.value for key, trace in learner.traces.items()}
    return {path: state.value for path, state in learner.model.states().items()}, traces


def gradients_of(learner, xs, **options):
    """Gradients by sequence and by plain calls, both of which go on from the learner's states."""
    step_fn = lambda x: jnp.mean(learner(x) ** 2)
    along = learner.etrace_grad(xs, step_fn=step_fn, **options)
    one = parameter_gradient(learner, lambda: step_fn(xs[0]))
    return along, dict(one)


def doubled(learner):
    for state in learner.param_states.values():
        state.value = jax.tree.map(lambda x: 2 * x, state.value)


@pytest.mark.parametrize(
    ('rule', 'options'), [('d_rtrl', {}), ('pp_prop', {}), ('d_rtrl', {'vmap': True})]
)
def test_a_deep_copy_is_a_learner_of_its_own(xs, rule, options):
    brainstate.random.seed(0)
    example = xs[0, 0] if options else xs[0]
    learner = braintrace.compile(Net(), rule, example, batch_size=B, seed=0, **options)
    gradients_of(learner, xs[:2])  # there are states, traces and programs to copy
    for first, second in ((0, 1), (1, 0)):
        pair = learner, copy.deepcopy(learner)
        mine, other = pair[first], pair[second]
        assert_close(held(mine), held(other))

        before = held(other)
        doubled(mine)
        changed = gradients_of(mine, xs[2:])
        assert_close(held(other), before)
        unchanged = gradients_of(other, xs[2:])
        with pytest.raises(AssertionError):
            assert_close(changed, unchanged)

        doubled(other)
        for part in pair:
            part.reset_state()
        assert_close(*(gradients_of(part, xs) for part in pair))


def test_a_copy_has_the_gradients_of_its_own_weights(xs):
    learner = compiled(xs)
    gradients_of(learner, xs)
    copied = copy.deepcopy(learner)
    doubled(copied)
    brainstate.random.seed(0)
    twice = compiled(xs)
    doubled(twice)
    assert_close(
        gradients_of(copied, xs, fresh=True), gradients_of(twice, xs, fresh=True)
    )
    brainstate.random.seed(0)
    assert_close(
        gradients_of(learner, xs, fresh=True),
        gradients_of(compiled(xs), xs, fresh=True),
    )


def test_a_copy_goes_on_with_its_own_optimizer_state(xs, ys):
    learner, optimizer = compiled(xs), optax.adam(0.01)
    steps_eagerly(learner, optimizer, xs[:2], ys[:2])
    copied = copy.deepcopy(learner)
    steps_eagerly(copied, optimizer, xs[2:], ys[2:])
    (mine,), (theirs,) = (
        part.optimizer_states(optimizer).values() for part in (learner, copied)
    )
    assert int(mine.value[0].count) == 2
    assert int(theirs.value[0].count) == T
    whole = compiled(xs)
    steps_eagerly(whole, optax.adam(0.01), xs, ys)
    assert_close(weights_of(copied), weights_of(whole))


def test_a_learner_may_be_copied_before_it_is_compiled(xs):
    model = Net()
    brainstate.nn.init_all_states(model, batch_size=B)
    copied = copy.deepcopy(braintrace.D_RTRL(model))
    copied.compile_graph(xs[0])
    doubled(copied)
    assert_close(
        copied(xs[0]), copied.model.readout(copied.hidden_states['cell', 'h'].value)
    )


# ---------------------------------------------------------------- two learners of one model

WIDE = 4
SEQUENCES = jnp.asarray(
    np.random.default_rng(2).normal(size=(T, WIDE, INPUTS)), jnp.float32
)


class Leaky(brainstate.nn.Module):
    """Units whose input is added: a state of one sample would be broadcast to any batch."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((INPUTS, H)))

    def init_state(self, batch_size=None):
        self.V = brainstate.HiddenState(
            jnp.zeros((H,) if batch_size is None else (batch_size, H))
        )

    def update(self, x):
        self.V.value = 0.9 * self.V.value + x @ self.w.value
        return self.V.value


def of_batch(model, batch, rule='d_rtrl', **options):
    example = SEQUENCES[0, 0] if batch is None else SEQUENCES[0, :batch]
    return braintrace.compile(model, rule, example, batch_size=batch, **options)


USES = {
    'plain': lambda learner, xs: learner(xs[0]),
    'etrace_grad': lambda learner, xs: gradients_of(learner, xs)[0],
    'fresh': lambda learner, xs: gradients_of(learner, xs, fresh=True)[0],
    'etrace_evolve': lambda learner, xs: learner.etrace_evolve(xs, return_outputs=True),
    'memory_plan': lambda learner, xs: learner.memory_plan(T).one_pass,
}


@pytest.mark.parametrize('use', USES)
@pytest.mark.parametrize(('kind', 'batch'), [(Net, 2), (Leaky, 1), (Leaky, None)])
def test_states_of_another_learner_are_refused_until_they_are_reset(kind, batch, use):
    model = kind()
    first = of_batch(model, WIDE)
    wanted = USES[use](first, SEQUENCES)
    second = of_batch(model, batch, 'pp_prop')
    with pytest.raises(
        braintrace.CompilationError, match=r'another.*\(pp_prop\)'
    ) as error:
        USES[use](first, SEQUENCES)
    sizes = f'compiled for batch {WIDE}, with states of batch {batch}'
    assert (sizes in str(error.value)) == (batch is not None)
    first.reset_state(batch_size=WIDE)
    assert_close(USES[use](first, SEQUENCES), wanted)
    with pytest.raises(braintrace.CompilationError, match=r'another.*\(D_RTRL\)'):
        USES[use](second, SEQUENCES[:, 0] if batch is None else SEQUENCES[:, :batch])


def test_states_made_anew_in_another_shape_are_refused(xs):
    learner = compiled(xs)
    brainstate.nn.init_all_states(learner.model, batch_size=3)
    with pytest.raises(braintrace.CompilationError, match='made anew') as error:
        learner(xs[0])
    assert 'another learner' not in str(error.value)
    assert f'reset_state(batch_size={B})' in str(error.value)


@pytest.mark.parametrize('vmap', [False, True])
def test_a_jitted_step_follows_states_that_are_made_anew(vmap):
    brainstate.random.seed(0)
    example = SEQUENCES[0, 0] if vmap else SEQUENCES[0]
    learner = braintrace.compile(Net(), 'd_rtrl', example, batch_size=WIDE, vmap=vmap)
    jitted = brainstate.transform.jit(
        lambda x: parameter_gradient(learner, lambda: jnp.mean(learner(x) ** 2))
    )
    along = lambda batch: [dict(jitted(x)) for x in SEQUENCES[:, :batch]]
    wide = along(WIDE)
    for change in (
        lambda: learner.reset_state(batch_size=2),
        lambda: braintrace.compile(
            learner.model,
            'd_rtrl',
            example if vmap else example[:2],
            batch_size=2,
            vmap=vmap,
        ),
    ):
        change()
        learner.reset_state(batch_size=2)
        narrow = along(2)
        learner.reset_state(batch_size=WIDE)
        assert_close(along(WIDE), wide)
        learner.reset_state(batch_size=2)
        assert_close(along(2), narrow)


def test_a_model_may_be_compiled_after_its_states_were_made_inside_jit(xs):
    model = Net()

    @brainstate.transform.jit
    def run(xs):
        brainstate.nn.init_all_states(model, batch_size=B)
        return brainstate.transform.for_loop(model, xs)

    outputs = run(xs)
    learner = braintrace.compile(model, 'd_rtrl', xs[0], batch_size=B)
    assert_close(jnp.stack([learner(x) for x in xs]), outputs)


# ---------------------------------------------------------------- threads, processes, interrupts


def values_of(learner):
    states = learner.states().values()
    return [np.array(x) for s in states for x in jax.tree.leaves(s.value)]


def in_threads(work, count=4):
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work) for _ in range(count)]:
            done.result(timeout=120)


@pytest.mark.parametrize('kind', ['gradients', 'evaluate'])
def test_calls_from_several_threads_wait_for_each_other(xs, kind):
    learner = compiled(xs)
    step = lambda x: jnp.mean(learner(x) ** 2)

    def work():
        for _ in range(5):
            if kind == 'gradients':
                learner.etrace_grad(xs, step_fn=step)
            else:
                learner.evaluate(xs, step_fn=step)

    in_threads(work)
    found = values_of(learner)
    learner.reset_state()
    for _ in range(20 if kind == 'gradients' else 0):
        learner.etrace_grad(xs, step_fn=step)
    jax.tree.map(np.testing.assert_array_equal, found, values_of(learner))


def test_a_learner_in_another_process_by_fork_is_refused(xs, monkeypatch):
    learner = compiled(xs)
    step = lambda x: jnp.mean(learner(x) ** 2)
    parent = os.getpid()
    monkeypatch.setattr(os, 'getpid', lambda: parent + 1)  # as in the child
    for call in (
        lambda: learner(xs[0]),
        lambda: learner.etrace_grad(xs, step_fn=step, fresh=True),
        lambda: learner.evaluate(xs),
    ):
        with pytest.raises(braintrace.NotSupportedError, match='spawn'):
            call()


def test_a_refused_call_leaves_the_traces(xs):
    learner, other = compiled(xs), compiled(xs)
    for each in (learner, other):
        step = lambda x, each=each: jnp.mean(each(x) ** 2)
        # Its arrays are donated to the next call, since nobody else has read them.
        each.etrace_grad(xs, step_fn=step)
        if each is learner:
            with pytest.raises(braintrace.CompilationError, match='has_aux'):
                each.etrace_grad(xs, step_fn=step, has_aux=True)
        each.etrace_grad(xs, step_fn=step)
    jax.tree.map(np.testing.assert_array_equal, values_of(learner), values_of(other))


def test_an_update_that_is_interrupted_is_undone(xs, ys, monkeypatch):
    learner = compiled(xs)
    step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    gradients = learner.etrace_grad(xs, ys, step_fn=step)
    optimizer = optax.adam(0.1)
    learner.apply(gradients, optimizer)
    states = learner.optimizer_states(optimizer)['state']
    before = weights_of(learner), states.value
    first, *rest = learner.param_states.values()
    written = type(rest[0]).value.fset

    def interrupted(state, value):
        written(state, value)
        if state is first and not isinstance(
            jax.tree.leaves(value)[0], jax.core.Tracer
        ):
            monkeypatch.undo()
            raise KeyboardInterrupt

    kind = type(first)
    changed = property(kind.value.fget, interrupted)
    monkeypatch.setattr(kind, 'value', changed, raising=False)
    with pytest.raises(KeyboardInterrupt):
        learner.apply(gradients, optimizer)
    jax.tree.map(
        np.testing.assert_array_equal, before, (weights_of(learner), states.value)
    )


def test_a_copy_keeps_the_settings_of_its_learner():
    class Leaky(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.ones(H))

        def init_state(self, batch_size=None, **kwargs):
            self.h = brainstate.HiddenState(jnp.zeros((batch_size, H)))

        def update(self, x):
            dt = brainstate.environ.get('dt')
            self.h.value = (1 - dt) * self.h.value + dt * self.w.value * x
            return self.h.value

    with brainstate.environ.context(dt=0.5):
        learner = braintrace.compile(Leaky(), 'd_rtrl', jnp.ones((B, H)), batch_size=B)
        copied = copy.deepcopy(learner)
    # The step is known from compiling, so that it is not traced again without dt.
    outputs = [each(jnp.ones((B, H))) for each in (learner, copied)]
    np.testing.assert_array_equal(*outputs)
    assert np.any(outputs[0] != 0)
