"""Learners and weights in files: what was saved continues exactly, and what does not
fit is refused."""

import copy
import pickle

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace

B = 2
XS = np.random.default_rng(0).normal(size=(6, B, 2)).astype('float32')


class Net(brainstate.nn.Module):
    """Leaky units, a read-out, and a running mean that no sequence resets."""

    def __init__(self, seed, units=3):
        super().__init__()
        random = np.random.default_rng(seed)
        drawn = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
        self.units = units
        self.feed = brainstate.ParamState(
            {'weight': drawn(2, units), 'bias': drawn(units)}
        )
        self.out = brainstate.ParamState(drawn(units, 1))
        self.mean = brainstate.LongTermState(jnp.zeros(units))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, self.units)))

    def update(self, x):
        params = self.feed.value
        drive = x @ params['weight'] + params['bias']
        self.h.value = jnp.tanh(0.8 * self.h.value + drive)
        self.mean.value = 0.9 * self.mean.value + 0.1 * self.h.value.mean(0)
        return self.h.value @ self.out.value


def make(seed, rule='d_rtrl', **options):
    return braintrace.compile(Net(seed), rule, XS[0], batch_size=B, **options)


def train(learner, xs, optimizer):
    step_fn = lambda x: jnp.mean((learner(x) - 1) ** 2)
    return learner.etrace_online(xs, step_fn=step_fn, optimizer=optimizer)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def values(learner):
    states = learner.states().items()
    return {path: jax.tree.map(np.array, state.value) for path, state in states}


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """A learner in the middle of a sequence, its optimiser, and its folder."""
    folder = tmp_path_factory.mktemp('saved')
    learner, optimizer = make(0), optax.adam(1e-2)
    train(learner, XS[:3], optimizer)
    learner.save(folder, optimizer)
    return learner, optimizer, folder


def test_a_loaded_learner_continues_exactly(saved):
    learner, optimizer, folder = saved
    other = make(1)
    assert not np.array_equal(other.weights()[('out',)], learner.weights()[('out',)])
    other.load(folder, optimizer)
    equal(values(other), values(learner))
    assert all(np.any(trace.value != 0) for trace in other.traces.values())
    wanted = train(copy.deepcopy(learner), XS[3:], optimizer)
    equal(train(other, XS[3:], optimizer), wanted)


def test_the_state_of_an_optimiser_may_be_left_out(saved):
    learner, _, folder = saved
    other = make(1)
    other.load(folder)
    equal(values(other), values(learner))


def test_the_state_of_a_rule_is_saved(tmp_path):
    learner = make(0, 'three_factor')
    learner.set_modulator(0.25)
    learner.save(tmp_path)
    other = make(0, 'three_factor')
    other.load(tmp_path)
    assert float(other.modulator) == 0.25


def test_folders_that_do_not_fit_are_refused_and_change_nothing(saved, tmp_path):
    _, _, folder = saved
    other = make(1, 'pp_prop', decay_or_rank=0.9)
    before = values(other)
    with pytest.raises(ValueError, match='by another'):
        other.load(folder)
    with pytest.raises(FileNotFoundError, match='no such folder'):
        other.load(tmp_path / 'none')
    assert not (tmp_path / 'none').exists()
    equal(values(other), before)


def test_weights_are_loaded_for_inference(saved):
    learner, _, folder = saved
    net = Net(1)
    assert braintrace.load(folder, net) is net
    equal(net.feed.value, learner.model.feed.value)
    equal(net.mean.value, learner.model.mean.value)
    assert not hasattr(net, 'h')
    # States of another batch stay; those of the same batch are set on demand.
    brainstate.nn.init_all_states(net, batch_size=5)
    braintrace.load(folder, net)
    assert net.h.value.shape == (5, 3)
    with pytest.raises(ValueError, match=r'h is \(2, 3\), not \(5, 3\)'):
        braintrace.load(folder, net, states=True)
    brainstate.nn.init_all_states(net, batch_size=B)
    braintrace.load(folder, net, states=True)
    equal(net.h.value, learner.model.h.value)


def test_a_checkpoint_with_parameters_that_the_model_lacks_is_refused(saved):
    _, _, folder = saved
    net = Net(0)
    del net.out
    with pytest.raises(ValueError, match='out is unknown'):
        braintrace.load(folder, net)
    with pytest.raises(TypeError, match='brainstate module'):
        braintrace.load(folder, lambda x: x)


def test_the_folder_of_a_training_is_loaded_too(tmp_path):
    learner = make(0)
    step_fn = lambda x: jnp.mean((learner(x) - 1) ** 2)
    options = {'updates': 2, 'out': tmp_path, 'show': False}
    adam = optax.adam(1e-2)
    braintrace.fit(learner, lambda i: (XS,), step_fn=step_fn, optimizer=adam, **options)
    equal(braintrace.load(tmp_path, Net(1)).feed.value, learner.model.feed.value)
    other = make(1)
    other.load(tmp_path)
    equal(other.weights(), learner.weights())


def test_weights_are_numpy_arrays_by_path():
    learner, other = make(0), make(1)
    found = learner.weights()
    assert found.keys() == learner.param_states.keys()
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(found))
    found[('out',)][:] = 7  # a copy
    assert not np.any(learner.model.out.value == 7)
    other.set_weights(learner.weights())
    equal(other.weights(), learner.weights())
    other.set_weights({'feed.bias': np.ones(3)})
    equal(other.weights()[('feed',)]['bias'], np.ones(3, 'float32'))
    equal(other.weights()[('out',)], learner.weights()[('out',)])


def test_weights_that_do_not_fit_are_refused_and_change_nothing():
    learner = make(0)
    before = learner.weights()
    wrong = {('out',): np.ones((3, 1)), ('feed',): {'weight': 1.0, 'other': 2.0}}
    with pytest.raises(ValueError, match=r'feed\.other is no') as e:
        learner.set_weights(wrong)
    assert 'feed.weight is (), not (2, 3)' in str(e.value)
    equal(learner.weights(), before)


def test_a_single_number_in_a_file_of_safetensors(tmp_path):
    pytest.importorskip('safetensors.numpy')
    step = lambda params, h, x: (0.9 * h + params['gain'] * x, h)
    start = {'gain': jnp.array(2.0)}, jnp.zeros((2, 3)), jnp.ones((2, 3))
    learner = braintrace.compile(step, 'd_rtrl', *start)
    learner.save_weights(tmp_path / 'gain.safetensors')
    learner.set_weights({'gain': np.float32(0)})
    learner.load_weights(tmp_path / 'gain.safetensors')
    assert jax.tree.leaves(learner.weights()) == [2.0]


def test_weights_in_a_file_of_safetensors(tmp_path):
    safetensors = pytest.importorskip('safetensors.numpy')
    learner, file = make(0), tmp_path / 'net.safetensors'
    learner.save_weights(file)
    names = ['feed.bias', 'feed.weight', 'out']
    assert sorted(safetensors.load_file(file)) == names
    assert [p.name for p in tmp_path.iterdir()] == [file.name]
    other = make(1)
    other.load_weights(file)
    equal(other.weights(), learner.weights())
    equal(braintrace.load(file, Net(1)).out.value, learner.model.out.value)
    safetensors.save_file({'feed.bias': np.ones(3, 'float32')}, file)
    with pytest.raises(ValueError, match=r'no feed\.weight; no out'):
        other.load_weights(file)
    file.write_bytes(b'nothing')
    with pytest.raises(ValueError, match='cannot be read'):
        other.load_weights(file)
    with pytest.raises(FileNotFoundError):
        other.load_weights(tmp_path / 'none.safetensors')


def test_a_learner_of_a_function_saves_and_sets_its_weights(tmp_path):
    def step(params, h, x):
        h = jnp.tanh(0.5 * h + x @ params['w'])
        return h, h

    params = {'w': jnp.ones((2, 3))}
    learner = braintrace.compile(step, 'd_rtrl', params, jnp.zeros((B, 3)), XS[0])
    learner.save(tmp_path)
    learner.set_weights({('w',): np.zeros((2, 3))})
    assert not np.any(learner.params['w'])
    learner.load(tmp_path)
    equal(learner.params['w'], params['w'])


def test_weights_of_a_flax_module_are_those_of_the_module():
    nnx = pytest.importorskip('flax.nnx')

    class Cell(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
            self.h = nnx.Variable(jnp.zeros((B, 3)))

        def __call__(self, x):
            self.h[...] = jnp.tanh(0.5 * self.h[...] + self.linear(x))
            return self.h[...]

    cell = Cell()
    learner = braintrace.compile(cell, 'd_rtrl', XS[0])
    cell.linear.bias[...] = jnp.ones(3)
    weights = learner.weights()
    (bias,) = [path for path in weights if 'bias' in path]
    equal(weights[bias], np.ones(3))
    learner.set_weights({bias: 2 * np.ones(3)})
    equal(np.asarray(cell.linear.bias[...]), 2 * np.ones(3))


def test_learners_are_not_pickled_but_copied():
    learner = make(0)
    with pytest.raises(TypeError, match='pickling'):
        pickle.dumps(learner)
    equal(copy.deepcopy(learner).weights(), learner.weights())
    assert copy.copy(learner).model is learner.model


def test_values_that_the_type_of_a_parameter_cannot_hold_are_refused(tmp_path):
    from safetensors.numpy import save_file

    learner, before = make(0), make(0).weights()
    whole = {
        'feed.bias': np.zeros(3),
        'feed.weight': np.ones((2, 3)),
        'out': np.ones((3, 1)),
    }
    large = np.array([0, 1, 2**53 + 1])
    for name, wrong, told in [
        ('out', np.full((3, 1), 1e300), '1e+300 would become inf'),
        ('feed.bias', large, '9007199254740993 would become 9007199254740992'),
        ('feed.bias', np.ones(3) * 1j, 'complex128'),
        ('feed.bias', np.array(['a', 'b', 'c']), '<U1'),
    ]:
        calls = [lambda: learner.set_weights({name: wrong})]  # noqa: B023
        if wrong.dtype.kind in 'fi':
            save_file({**whole, name: wrong}, tmp_path / 'w.safetensors')
            calls += [lambda: learner.load_weights(tmp_path / 'w.safetensors')]
        for call in calls:
            with pytest.raises(ValueError, match='Fix: ') as error:
                call()
            assert name in str(error.value)
            assert told in str(error.value)
            equal(learner.weights(), before)
    # Rounding is no change, nor is a whole number that the type has.
    learner.set_weights({'out': np.full((3, 1), 0.1), 'feed.bias': np.arange(3)})
    np.testing.assert_allclose(learner.weights()[('out',)], 0.1, rtol=1e-7)
    learner.set_weights({'out': np.full((3, 1), np.inf)})  # it is what was given
