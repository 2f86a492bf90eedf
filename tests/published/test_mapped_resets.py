"""Learners that are reset inside a map over the states of their model."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace

B, I, H, T = 4, 3, 5, 3  # noqa: E741
XS = jnp.asarray(np.random.default_rng(0).normal(size=(T, B, I)), jnp.float32)


class Net(brainstate.nn.Module):
    """A GRU and a read-out."""

    def __init__(self):
        super().__init__()
        self.rnn = braintrace.nn.GRUCell(I, H)
        self.out = braintrace.nn.Linear(H, 2)

    def update(self, x):
        return self.out(self.rnn(x))


def for_a_batch():
    """A learner compiled for a batch, on states that were made again by a map."""
    net = Net()
    learner = braintrace.compile(net, 'd_rtrl', XS[0], batch_size=B)
    brainstate.nn.vmap_init_all_states(net, axis_size=B, state_tag='new')
    return learner, learner


def for_a_sample():
    """A learner compiled for one sample inside a map."""
    net = Net()
    learner = braintrace.D_RTRL(net)

    @brainstate.transform.vmap_new_states(state_tag='new', axis_size=B)
    def start(x):
        brainstate.nn.init_all_states(net)
        learner.compile_graph(x)

    start(XS[0])
    return learner, brainstate.nn.Vmap(learner, vmap_states='new')


def reset_in_a_map(learner, reset, size=B):
    states = learner.model.states('new')
    brainstate.transform.vmap(
        lambda: reset(learner), in_states=states, out_states=states, axis_size=size
    )()


def learned(learner, call):
    """Outputs along a sequence, and the gradient of a loss at its last step."""
    outputs = [call(x) for x in XS]
    loss = lambda: jnp.sum(call(XS[0]) ** 2)
    return outputs, brainstate.transform.grad(loss, learner.param_states)()


def void(_):
    """Nothing, for a map over a function without outputs."""


RESETS = {
    'all states': lambda learner: void(brainstate.nn.reset_all_states(learner)),
    'the learner': lambda learner: learner.reset_state(),
}


@pytest.mark.parametrize('jitted', [False, True])
@pytest.mark.parametrize('reset', RESETS)
@pytest.mark.parametrize('made', [for_a_batch, for_a_sample])
def test_states_keep_their_shapes(made, reset, jitted):
    learner, call = made()
    wanted = learned(learner, call)
    run = lambda: reset_in_a_map(learner, RESETS[reset])
    (brainstate.transform.jit(run) if jitted else run)()
    assert learner.model.rnn.h.value.shape == (B, H)
    assert all(
        not np.any(x) for t in learner.traces.values() for x in jax.tree.leaves(t.value)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        learned(learner, call),
        wanted,
    )


def test_every_sample_has_its_own_start():
    net = Net()
    brainstate.nn.init_all_states(net, batch_size=B)
    learner = braintrace.D_RTRL(net)
    net.rnn.h.value = jnp.arange(B * H, dtype=jnp.float32).reshape(B, H)
    first = net.rnn.h.value
    learner.compile_graph(XS[0])
    net.rnn.h.tag = 'new'
    learner(XS[0])
    reset_in_a_map(learner, RESETS['the learner'])
    np.testing.assert_array_equal(net.rnn.h.value, first)


def test_states_that_lost_their_batch_get_it_back():
    """Outside of a map a state of one sample is no part of a batch."""
    net = Net()
    learner = braintrace.compile(net, 'd_rtrl', XS[0], batch_size=B)
    wanted = learned(learner, learner)[0]
    brainstate.nn.init_all_states(net)
    learner.reset_state()
    np.testing.assert_allclose(learned(learner, learner)[0], wanted, atol=1e-6)


def test_a_map_over_another_batch_is_refused():
    learner, _ = for_a_batch()
    brainstate.nn.vmap_init_all_states(learner.model, axis_size=B + 2, state_tag='new')
    with pytest.raises(braintrace.CompilationError, match='compiled for 4'):
        reset_in_a_map(learner, RESETS['the learner'], B + 2)
