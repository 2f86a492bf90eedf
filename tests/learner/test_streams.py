"""Streams: one compiled call a step, with the numbers of `etrace_online`."""

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace.learner import online_training, stream_program

B, INPUTS, UNITS, T = 2, 3, 5, 7


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = brainstate.nn.GRUCell(INPUTS, UNITS)
        self.readout = brainstate.nn.Linear(UNITS, 2)

    def update(self, x):
        return self.readout(self.cell(x))


def data(length=T):
    random = np.random.default_rng(0)
    xs = random.normal(size=(length, B, INPUTS)).astype('float32')
    return jnp.asarray(xs), jnp.asarray(np.tanh(xs[..., :2]))


def learner_of(rule='d_rtrl', **options):
    brainstate.random.seed(0)
    net = Net()
    random = np.random.default_rng(1)
    for state in net.states(brainstate.ParamState).values():
        draw = lambda x: jnp.asarray(0.5 * random.normal(size=x.shape), x.dtype)
        state.value = jax.tree.map(draw, state.value)
    xs, _ = data()
    learner = braintrace.compile(net, rule, xs[0], batch_size=B, **options)
    return learner, lambda x, y: jnp.mean((learner(x) - y) ** 2)


def values(learner):
    states = {**learner.param_states, **learner.hidden_states}
    return jax.tree.map(np.array, {path: s.value for path, s in states.items()})


def assert_moved(found, start):
    """Every weight and state is another than at the start."""
    for path, value in start.items():
        change = jax.tree.map(lambda a, b: np.abs(a - b).max(), found[path], value)
        assert all(x > 1e-4 for x in jax.tree.leaves(change)), path


def assert_equal(a, b, tolerance=2e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


OPTIMIZERS = {
    'optax adam': lambda: optax.adam(1e-2),
    'braintools adam': lambda: braintools.optim.Adam(1e-2),
    'optax sgd': lambda: optax.sgd(1e-2),
}
RULES = {
    'd_rtrl': {},
    'pp_prop': {'decay_or_rank': 0.8},
    'rtrl': {},
    'uoro': {},
    'three_factor': {},
}


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@pytest.mark.parametrize('rule', RULES)
def test_a_stream_gives_the_numbers_of_etrace_online(rule, optimizer):
    if optimizer != 'optax adam' and rule != 'd_rtrl':
        pytest.skip('optimisers are tried with one rule')
    xs, ys = data()
    learner, step_fn = learner_of(rule, **RULES[rule])
    options = {'step_fn': step_fn, 'optimizer': OPTIMIZERS[optimizer]()}
    losses = learner.etrace_online(xs, ys, **options)
    wanted = values(learner)
    learner, step_fn = learner_of(rule, **RULES[rule])
    assert_moved(wanted, values(learner))
    stream = learner.stream(step_fn, OPTIMIZERS[optimizer]())
    found = [stream(x, y) for x, y in zip(xs, ys, strict=True)]
    assert_equal([step.loss for step in found], list(losses))
    assert_equal(values(learner), wanted)
    assert stream.program_count == 1
    assert found[0].outputs.shape == (B, 2)


def test_chunks_of_any_length_run_by_one_program():
    xs, ys = data()
    learner, step_fn = learner_of()
    losses = learner.etrace_online(xs, ys, step_fn=step_fn, optimizer=optax.adam(1e-2))
    wanted = values(learner)
    learner, step_fn = learner_of()
    stream = learner.stream(step_fn, optax.adam(1e-2), chunk=4)
    found, at = [], 0
    for length in (1, 4, 2):
        step = stream(xs[at : at + length], ys[at : at + length])
        assert step.outputs.shape == (length, B, 2)
        found += list(step.loss)
        at += length
    assert_equal(found, list(losses))
    assert_equal(values(learner), wanted)
    assert stream.program_count == 1
    assert learner.running_index.value == 7
    with pytest.raises(ValueError, match='1 to 4 steps'):
        stream(xs[:5], ys[:5])


def test_auxiliary_values_of_the_step_function_are_the_outputs():
    learner, _ = learner_of()
    xs, ys = data()

    def step_fn(x, y):
        out = learner(x)
        return jnp.mean((out - y) ** 2), {'sign': jnp.sign(out)}

    step = learner.stream(step_fn, optax.sgd(0.1))(xs[0], ys[0])
    assert set(np.unique(step.outputs['sign'])) <= {-1.0, 1.0}


def test_predict_advances_states_and_traces_alone():
    xs, _ = data()
    learner, step_fn = learner_of()
    outputs = learner.etrace_evolve(xs, return_outputs=True)
    wanted = values(learner)
    traces = jax.tree.map(np.array, learner.traces_of(('cell', 'Wh', 'weight')))
    assert all(np.any(x) for x in jax.tree.leaves(traces))
    learner, step_fn = learner_of()
    stream = learner.stream(step_fn, optax.sgd(0.1))
    found = [stream.predict(x) for x in xs]
    assert_equal(found, list(outputs))
    assert_equal(values(learner), wanted)
    assert learner.running_index.value == len(xs)
    assert_equal(learner.traces_of(('cell', 'Wh', 'weight')), traces)


def test_a_gradient_is_that_of_one_step_and_is_applied_with_a_scale():
    xs, ys = data()
    learner, step_fn = learner_of()
    grads = [
        learner.etrace_grad(xs[t : t + 1], ys[t : t + 1], step_fn=step_fn)
        for t in range(3)
    ]
    learner.apply(jax.tree.map(lambda g: -2.5 * g, grads[2]), optax.sgd(0.1))
    wanted = values(learner)
    learner, step_fn = learner_of()
    stream = learner.stream(step_fn, optax.sgd(0.1))
    for t in range(3):
        found = stream.gradient(xs[t], ys[t])
        assert_equal(found.gradient, grads[t])
        assert found.outputs.shape == (B, 2)
    stream.apply(found.gradient, -2.5)
    assert_equal(values(learner), wanted)


def test_the_gradient_of_another_scalar():
    """A log-probability: weights of the read-out get a gradient by hand."""
    learner, step_fn = learner_of()
    xs, _ = data()

    def log_probability(x):
        logits = learner(x)
        return jnp.sum(jax.nn.log_softmax(logits)[:, 0]), logits

    stream = learner.stream(step_fn, optax.sgd(0.1))
    hidden = lambda: learner.model.cell.h.value
    found = stream.gradient(xs[0], step_fn=log_probability)
    error = jnp.array([1.0, 0.0]) - jax.nn.softmax(found.outputs)
    weight = found.gradient['readout', 'weight']['weight']
    assert_equal(weight, hidden().T @ error)


def test_the_gradient_of_a_scalar_of_the_outputs():
    learner, step_fn = learner_of()
    xs, _ = data()
    of = lambda logits: jnp.sum(jax.nn.log_softmax(logits)[:, 0])
    stream = learner.stream(step_fn)
    before = values(learner)
    outputs, gradient = stream.gradient(xs[0], of=of)
    stream.gradient(xs[1], of=of)
    assert stream.program_count == 1
    stream.reset()
    found = stream.gradient(xs[0], step_fn=lambda x: of(learner(x)))
    assert_equal((outputs, gradient), (found.outputs, found.gradient))
    with pytest.raises(ValueError, match='no optimizer'):
        stream.apply(gradient)
    stream.reset()
    assert_equal(values(learner), before)
    with pytest.raises(ValueError, match='one of them'):
        stream.gradient(xs[0], of=of, step_fn=step_fn)


def test_eligibility_is_the_decayed_sum_of_gradients():
    xs, ys = data()
    learner, step_fn = learner_of()
    stream = learner.stream(step_fn, optax.sgd(0.1), decay=0.6)
    wanted = jax.tree.map(jnp.zeros_like, stream.eligibility)
    for t in range(4):
        found = stream.gradient(xs[t], ys[t])
        wanted = jax.tree.map(lambda z, g: 0.6 * z + g, wanted, found.gradient)
    assert_equal(stream.eligibility, wanted)
    before = values(learner)
    stream.apply(scale=0.5)
    for path in learner.param_states:
        change = jax.tree.map(lambda w, z: w - 0.05 * z, before[path], wanted[path])
        assert_equal(learner.param_states[path].value, change)
    stream.reset()
    assert all(not np.any(x) for x in jax.tree.leaves(stream.eligibility))
    with pytest.raises(ValueError, match=r'decay=0\.9'):
        learner.stream(step_fn, optax.sgd(0.1)).apply(scale=1.0)


def test_what_is_set_between_steps_counts_and_what_was_read_stays():
    xs, ys = data()
    learner, step_fn = learner_of()
    stream = learner.stream(step_fn, optax.sgd(0.1))
    stream(xs[0], ys[0])
    trace = learner.traces_of(('cell', 'Wh', 'weight'))
    kept = jax.tree.map(np.array, trace)
    weight = learner.model.readout.weight
    weight.value = jax.tree.map(jnp.zeros_like, weight.value)
    step = stream(xs[1], ys[1])
    assert_equal(step.outputs, np.zeros((B, 2)))
    assert_equal(trace, kept)
    learner.reset_state()
    stream(xs[0], ys[0])
    start = learner_of()[0].hidden_states
    learner.reset_state()
    for path, state in learner.hidden_states.items():
        assert_equal(state.value, start[path].value)


def test_programs_of_a_stream_write_over_the_values_of_one_another():
    """Gradients and updates in turn copy no weights, states or traces."""
    xs, ys = data()
    learner, step_fn = learner_of()
    stream = learner.stream(step_fn, optax.adam(0.1), decay=0.9)
    for t in range(2):
        stream.gradient(xs[t], ys[t])
        weights = jax.tree.leaves([s.value for s in learner.param_states.values()])
        stream.apply(scale=0.5)
        assert all(x.is_deleted() for x in weights)
    weights = jax.tree.leaves([s.value for s in learner.param_states.values()])
    stream(xs[2], ys[2])
    assert all(x.is_deleted() for x in weights)


def test_programs_for_two_batch_sizes_in_turn():
    xs, ys = data()
    learner, step_fn = learner_of()
    stream = learner.stream(step_fn, optax.sgd(0.1))
    for size in (2, 1, 2, 1):
        learner.reset_state(batch_size=size)
        stream.gradient(xs[0, :size], ys[0, :size])
        assert stream(xs[1, :size], ys[1, :size]).outputs.shape == (size, 2)


def test_a_stream_follows_another_batch_size():
    xs, ys = data()
    learner, step_fn = learner_of()
    stream = learner.stream(step_fn, optax.sgd(0.1))
    stream(xs[0], ys[0])
    learner.reset_state(batch_size=1)
    step = stream(xs[0, :1], ys[0, :1])
    assert step.outputs.shape == (1, 2)


def step_of_function(p, s, x):
    h = jnp.tanh(0.5 * s['h'] + x @ p['w'])
    return {'h': h}, h @ p['out']


def test_a_stream_follows_states_that_were_created_again():
    learner, step = learner_of()
    stream = learner.stream(step, optax.sgd(1e-2))
    xs, ys = data()
    for x, y in zip(xs, ys, strict=True):
        stream(x, y)
    old = dict(learner.hidden_states)
    brainstate.nn.init_all_states(learner.model, batch_size=B)
    assert not any(learner.hidden_states[path] is state for path, state in old.items())
    learner.reset_state()
    start, kept = values(learner), {path: s.value for path, s in old.items()}
    # A second learner that never had other states, from the weights so far.
    fresh, fresh_step = learner_of()
    fresh.set_weights(learner.weights())
    other = fresh.stream(fresh_step, optax.sgd(1e-2))
    for x, y in zip(xs, ys, strict=True):
        assert_equal(stream(x, y), other(x, y))
    assert_moved(values(learner), start)
    assert_equal(values(learner), values(fresh))
    assert all(old[path].value is value for path, value in kept.items())


def test_streams_of_functions(tmp_path):
    xs, ys = data()
    random = np.random.default_rng(2)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
    params = {'w': draw(INPUTS, UNITS), 'out': draw(UNITS, 2)}
    state = {'h': jnp.zeros((B, UNITS))}
    make = lambda: braintrace.compile(step_of_function, 'd_rtrl', params, state, xs[0])
    _check_front_end(make, lambda learner: learner.params, xs, ys, tmp_path)


def test_streams_of_flax_modules(tmp_path):
    nnx = pytest.importorskip('flax.nnx')
    xs, ys = data()

    class Cell(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(INPUTS, 2, rngs=nnx.Rngs(0))
            self.h = nnx.Variable(jnp.zeros((B, 2)))

        def __call__(self, x):
            self.h[...] = jnp.tanh(0.5 * self.h[...] + self.linear(x))
            return self.h[...]

    make = lambda: braintrace.compile(Cell(), 'd_rtrl', xs[0])
    _check_front_end(make, lambda learner: learner.params, xs, ys, tmp_path)


def test_streams_of_equinox_modules(tmp_path):
    eqx = pytest.importorskip('equinox')
    xs, ys = data()
    make = lambda: braintrace.compile(
        eqx.nn.GRUCell(INPUTS, 2, key=jax.random.key(0)),
        'd_rtrl',
        xs[0, 0],
        state=jnp.zeros(2),
        batch_size=B,
        vmap=True,
    )
    params_of = lambda learner: eqx.filter(learner.params, eqx.is_array)
    _check_front_end(make, params_of, xs, ys, tmp_path)


def _check_front_end(make, params_of, xs, ys, folder):
    learner = make()
    step_fn = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    losses = learner.etrace_online(xs, ys, step_fn=step_fn, optimizer=optax.adam(1e-2))
    wanted = jax.tree.map(np.array, params_of(learner))
    learner = make()
    stream = learner.stream(step_fn, optax.adam(1e-2))
    found = [stream(x, y).loss for x, y in zip(xs, ys, strict=True)]
    assert_equal(found, list(losses))
    assert_equal(params_of(learner), wanted)

    learner = make()
    stream = learner.stream(step_fn, optax.adam(1e-2), chunk=4)
    parts = [(xs[a:b], ys[a:b]) for a, b in ((0, 1), (1, 5), (5, 7))]
    found = [stream(*part).loss for part in parts]
    assert_equal(jnp.concatenate(found), losses)
    assert_equal(params_of(learner), wanted)
    assert stream.program_count == 1

    # A gradient has the structure that etrace_grad gives, and can be applied.
    learner = make()
    stream = learner.stream(step_fn, optax.sgd(0.1))
    start = jax.tree.map(np.array, params_of(learner))
    wanted = learner.etrace_grad(xs[:1], ys[:1], step_fn=step_fn, fresh=True)
    stream.reset()
    gradient = stream.gradient(xs[0], ys[0]).gradient
    assert_equal(gradient, wanted)
    stream.apply(gradient, scale=0.5)
    down = lambda w, g: w - 0.05 * g
    assert_equal(
        jax.tree.leaves(params_of(learner)),
        list(map(down, jax.tree.leaves(start), jax.tree.leaves(wanted))),
    )

    learner = make()
    stream = learner.stream(step_fn, optax.sgd(0.1), decay=0.5)
    start = jax.tree.map(np.array, params_of(learner))
    first, second = (stream.gradient(xs[t], ys[t]).gradient for t in range(2))
    assert_equal(
        stream.eligibility, jax.tree.map(lambda a, b: 0.5 * a + b, first, second)
    )
    stream.save(folder)
    stream.apply(scale=0.3)
    size = lambda a, b: float(np.linalg.norm(a - b))
    moved = jax.tree.leaves(jax.tree.map(size, params_of(learner), start))
    by = lambda a, b: 0.03 * size(0.5 * a, -b)
    assert_equal(
        sorted(moved), sorted(jax.tree.leaves(jax.tree.map(by, first, second)))
    )
    assert min(moved) > 1e-4
    changed = jax.tree.map(np.array, params_of(learner))
    outputs = stream.predict(xs[2])
    stream.load(folder)
    assert_equal(params_of(learner), start, tolerance=0)
    stream.apply(scale=0.3)
    assert_equal(params_of(learner), changed, tolerance=0)
    assert_equal(stream.predict(xs[2]), outputs, tolerance=0)


def test_online_updates_of_any_length():
    """The last update follows the steps that are left."""
    xs, ys = data()
    learner, step_fn = learner_of()
    options = {'step_fn': step_fn, 'optimizer': optax.sgd(0.1)}
    first = learner.etrace_online(xs[:6], ys[:6], update_every=3, **options)
    last = learner.etrace_online(xs[6:], ys[6:], update_every=1, **options)
    wanted = values(learner)
    learner, step_fn = learner_of()
    options = {'step_fn': step_fn, 'optimizer': optax.sgd(0.1)}
    losses = learner.etrace_online(xs, ys, update_every=3, **options)
    assert_equal(losses, jnp.concatenate([first, last]))
    assert_equal(values(learner), wanted)


def test_inputs_of_another_structure_have_a_program_of_their_own():
    learner, _ = learner_of()
    xs, ys = data()

    def step_fn(given, y=None):
        x, y = given if y is None else (given, y)
        return jnp.mean((learner(x) - y) ** 2)

    stream = learner.stream(step_fn, optax.sgd(0.0))
    first = stream(xs[0], ys[0]).loss
    learner.reset_state()
    assert_equal(stream((xs[0], ys[0])).loss, first)


def test_a_learner_that_checks_values_has_no_stream():
    learner, step_fn = learner_of(check_finite=True)
    with pytest.raises(ValueError, match='check_finite=True'):
        learner.stream(step_fn, optax.sgd(0.1))


def test_wrong_options_of_a_stream():
    learner, step_fn = learner_of()
    with pytest.raises(ValueError, match='chunk=0'):
        learner.stream(step_fn, optax.sgd(0.1), chunk=0)
    with pytest.raises(ValueError, match='decay=2'):
        learner.stream(step_fn, optax.sgd(0.1), decay=2)


def test_a_stream_continues_from_what_was_saved(tmp_path):
    xs, ys = data()
    learner, step_fn = learner_of()
    stream = learner.stream(step_fn, optax.adam(1e-2), decay=0.5)
    for t in range(3):
        stream(xs[t], ys[t])
    stream.gradient(xs[3], ys[3])
    stream.save(tmp_path)
    stream.apply(scale=0.3)
    wanted = [stream(xs[t], ys[t]).loss for t in range(4, T)]
    learner, step_fn = learner_of()
    stream = learner.stream(step_fn, optax.adam(1e-2), decay=0.5)
    stream.load(tmp_path)
    stream.apply(scale=0.3)
    found = [stream(xs[t], ys[t]).loss for t in range(4, T)]
    assert_equal(found, wanted, tolerance=0)


@pytest.mark.parametrize('is_small', [True, False])
@pytest.mark.parametrize('first', [True, False])
def test_a_stream_inside_of_jit_is_refused_and_goes_on(is_small, first, monkeypatch):
    """The programs of small states are compiled with options, which JAX refuses there."""
    least = stream_program.SEQUENTIAL_BYTES if is_small else 0
    monkeypatch.setattr(stream_program, 'SEQUENTIAL_BYTES', least)
    learner, step = learner_of()
    stream, (xs, ys) = learner.stream(step, optax.sgd(0.1)), data()
    if not first:
        stream(xs[0], ys[0])
    before = values(learner)
    for call in (lambda x: stream(x, ys[0]).loss, lambda x: stream(xs[0], ys[0]).loss):
        with pytest.raises(braintrace.CompilationError, match='inside of jit'):
            brainstate.transform.jit(call)(xs[0])
    assert_equal(values(learner), before, 0.0)
    stream(xs[1], ys[1])
    assert_moved(values(learner), before)


def test_arrays_from_before_a_call_of_etrace_online_can_still_be_read():
    (xs, ys), (learner, step_fn) = data(), learner_of()
    states = [*learner.param_states.values(), *learner.hidden_states.values()]
    options = {'step_fn': step_fn, 'optimizer': optax.adam(1e-2)}
    learner.etrace_online(xs, ys, **options)
    kept = [state.value for state in states]
    copies = jax.tree.map(np.array, kept)
    learner.etrace_online(xs, ys, **options)
    assert_equal(kept, copies, 0.0)
    moved = jax.tree.leaves([state.value for state in states])
    pairs = zip(moved, jax.tree.leaves(kept), strict=True)
    assert all(jnp.any(a != b) for a, b in pairs)


@pytest.mark.parametrize('update_every', [1, 3])
def test_etrace_online_inside_of_jit_gives_the_same(update_every):
    xs, ys = data()
    options = {'optimizer': optax.adam(1e-2), 'update_every': update_every}
    learner, step_fn = learner_of()
    before = values(learner)
    wanted = learner.etrace_online(xs, ys, step_fn=step_fn, **options)
    after = values(learner)
    assert_moved(after, before)
    learner, step_fn = learner_of()
    learner.optimizer_states(options['optimizer'])
    train = lambda xs, ys: learner.etrace_online(xs, ys, step_fn=step_fn, **options)
    assert_equal(brainstate.transform.jit(train)(xs, ys), wanted)
    assert_equal(values(learner), after)


def test_etrace_online_compiles_once_and_follows_states_and_shapes(monkeypatch):
    made = []

    class Counted(stream_program.StreamProgram):
        def __init__(self, *given):
            made.append(given)
            super().__init__(*given)

    monkeypatch.setattr(online_training, 'StreamProgram', Counted)
    (xs, ys), (learner, step_fn) = data(), learner_of()
    optimizer = optax.sgd(1e-2)
    train = lambda *data: learner.etrace_online(
        *data, step_fn=step_fn, optimizer=optimizer
    )
    for _ in range(3):
        train(xs, ys)
    assert len(made) == 1
    train(xs[:3], ys[:3])
    assert len(made) == 2
    # A weight that is set between calls counts.
    weight = learner.model.readout.weight
    weight.value = jax.tree.map(jnp.zeros_like, weight.value)
    learner.reset_state()
    first = train(xs, ys)[0]
    np.testing.assert_allclose(first, jnp.mean(ys[0] ** 2), rtol=1e-6)
    assert len(made) == 2


def test_a_step_like_the_last_one_takes_the_short_way(monkeypatch):
    (xs, ys), (learner, step_fn) = data(), learner_of()
    stream = learner.stream(step_fn, optax.sgd(1e-2))
    general, calls = stream._run, []

    def counted(*args, **options):
        calls.append(args)
        return general(*args, **options)

    monkeypatch.setattr(stream, '_run', counted)
    for t in range(4):
        stream(xs[t], ys[t])
    assert len(calls) == 1
    # Not so for inputs of another kind, or after something else has moved the states.
    stream(np.asarray(xs[4]), ys[4])
    assert len(calls) == 2
    learner.reset_state()
    stream(np.asarray(xs[5]), ys[5])
    assert len(calls) == 3
    learner(xs[5])
    stream(np.asarray(xs[6]), ys[6])
    assert len(calls) == 4


def test_sine_and_cosine_of_a_parameter_are_computed_once_a_step():
    """XLA would compute them again wherever they are read, some forty times."""
    brainstate.random.seed(0)
    net = braintrace.nn.RTU(INPUTS, 128)
    xs, _ = data()
    learner = braintrace.compile(net, 'd_rtrl', xs[0], batch_size=B)
    stream = learner.stream(lambda x: jnp.mean(learner(x) ** 2), optax.sgd(1e-2))
    stream(xs[0])
    program = stream._latest_program
    given = (program.leaves, xs[1])
    text = program._transaction.run.lower(*given).compile().as_text()
    # Once for the step, and once for the gradient of each of the two parameters.
    assert 2 <= text.count(' sine(') + text.count(' cosine(') <= 6
