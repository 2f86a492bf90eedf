"""Measures by the names of NeuroBench, on networks that are counted by hand."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import metrics

W = jnp.array([[1.0, 0.0, 2.0], [3.0, 4.0, 0.0]])
"""Four of six weights."""
V = jnp.array([[1.0], [0.0], [1.0]])
"""Two of three."""


class Net(brainstate.nn.Module):
    """Units that keep half of their state, and a read-out of their spikes."""

    def __init__(self, batch=1):
        super().__init__()
        self.batch = batch
        self.w, self.v = brainstate.ParamState(W), brainstate.ParamState(V)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((self.batch, 3)))

    def update(self, x):
        self.h.value = 0.5 * self.h.value + x @ self.w.value
        return braintrace.networks.fire(self.h.value - 1.5) @ self.v.value


# Inputs have one value other than zero at the first step, two at the second.
XS = jnp.array([[[2.0, 0.0]], [[1.0, 1.0]]])
# h = (2, 0, 4), then (5, 4, 4): spikes 101, then 111.


def compiled(batch=1, **options):
    example = jnp.ones((batch, 2))
    return braintrace.compile(
        Net(batch), 'd_rtrl', example, batch_size=batch, **options
    )


LEARNER = compiled()


def step_fn(x):
    return jnp.mean((LEARNER(x) - 1) ** 2)


def test_a_spiking_network_counted_by_hand():
    found = metrics.inference(LEARNER, XS)
    assert found.footprint == 4 * (6 + 3 + 3)
    assert found.connection_sparsity == pytest.approx(3 / 9)
    assert found.activation_sparsity == pytest.approx(1 / 6)  # of spikes, not of inputs
    operations = found.synaptic_operations
    assert operations.dense == 6 + 3
    # The first input meets 2 weights, both together 4; spikes meet 2 of 3 weights.
    assert operations.effective_macs == (2 + 4) / 2
    assert operations.effective_acs == (2 + 2) / 2
    assert 'effective ACs      2.0' in str(found)


def test_a_model_without_a_learner_starts_from_its_states():
    net = Net()
    brainstate.nn.init_all_states(net)
    assert metrics.inference(net, XS) == metrics.inference(LEARNER, XS)
    net.h.value = jnp.full((1, 3), 100.0)
    assert metrics.inference(net, XS).activation_sparsity == 0
    assert float(net.h.value[0, 0]) == 100
    with pytest.raises(TypeError, match='metrics of'):
        metrics.inference(lambda x: x, XS)


def test_operations_are_divided_by_the_batch():
    batched = jnp.broadcast_to(XS, (2, 4, 2))
    net = Net(4)
    brainstate.nn.init_all_states(net)
    found = metrics.inference(net, batched, batch_size=4)
    alone = metrics.inference(LEARNER, XS)
    assert found.synaptic_operations == alone.synaptic_operations
    assert found.connection_sparsity == alone.connection_sparsity
    assert found.footprint == 4 * (6 + 3 + 4 * 3)


def test_inputs_that_are_spikes_are_accumulated():
    found = metrics.inference(LEARNER, jnp.array([[[1.0, 0.0]], [[-1.0, 1.0]]]))
    assert found.synaptic_operations.effective_macs == 0
    assert found.synaptic_operations.effective_acs > 0


class Strange(brainstate.nn.Module):
    """Products in a branch and in a loop, a fixed weight that is used twice, and a
    product of two states."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((2, 2)))
        self.fixed = jnp.array([[0.0, 1.0], [1.0, 1.0]])

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((1, 2)))

    def update(self, x):
        h = self.h.value
        h = jax.lax.cond(x[0, 0] > 0, lambda: x @ self.w.value, lambda: 0 * h)
        h = jax.lax.scan(lambda h, _: (h @ self.fixed, None), h, length=3)[0]
        h = jnp.tanh(h @ self.fixed)
        self.h.value = h
        return h @ h.T


def test_branches_loops_and_fixed_weights():
    net = Strange()
    brainstate.nn.init_all_states(net)
    once = lambda first: metrics.inference(net, jnp.array([[[first, 2.0]]]))
    with_branch, without = once(1.0), once(-1.0)
    # Four products of two by two weights by the fixed matrix, one more in the branch;
    # the product of two states is none of weights.
    assert with_branch.synaptic_operations.dense == 5 * 4
    assert without.synaptic_operations.dense == 4 * 4
    assert with_branch.synaptic_operations.effective_macs == 4 + 4 * 3
    assert with_branch.connection_sparsity == pytest.approx(1 / 8)
    assert without.connection_sparsity == pytest.approx(1 / 4)
    # A branch that is first taken at the second step.
    both = metrics.inference(net, jnp.array([[[-1.0, 2.0]], [[1.0, 2.0]]]))
    assert both.synaptic_operations.dense == (16 + 20) / 2
    assert both.connection_sparsity == with_branch.connection_sparsity


def test_convolutions_are_counted_without_their_padding():
    kernel = jnp.zeros((1, 1, 3)).at[0, 0].set(jnp.array([1.0, 0.0, 1.0]))

    class Conv(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.k = brainstate.ParamState(kernel)

        def init_state(self, batch_size=None, **kwargs):
            self.h = brainstate.HiddenState(jnp.zeros((1, 1, 4)))

        def update(self, x):
            layout = ('NCH', 'OIH', 'NCH')
            y = braintrace.conv(
                x, self.k.value, padding='SAME', dimension_numbers=layout
            )
            self.h.value = 0.5 * self.h.value + y
            return self.h.value

    net = Conv()
    brainstate.nn.init_all_states(net)
    found = metrics.inference(net, jnp.array([[[[3.0, 0.0, 2.0, 2.0]]]]))
    assert found.synaptic_operations.dense == 3 * 4 - 2  # the ends have a tap less
    # Taps left and right of each: position 0 has (0), 1 has (3, 2), 2 has (0, 2),
    # 3 has (2).
    assert found.synaptic_operations.effective_macs == 0 + 2 + 1 + 1
    assert found.connection_sparsity == pytest.approx(1 / 3)
    assert np.isnan(found.activation_sparsity)


def test_stored_entries_of_a_sparse_matrix():
    brainevent = pytest.importorskip('brainevent')
    dense = jnp.array([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    layer = braintrace.nn.SparseLinear(brainevent.CSR.fromdense(dense), b_init=None)

    class Sparse(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def init_state(self, batch_size=None, **kwargs):
            self.h = brainstate.HiddenState(jnp.zeros(3))

        def update(self, x):
            self.h.value = 0.5 * self.h.value + self.layer(x)
            return self.h.value

    net = Sparse()
    brainstate.nn.init_all_states(net)
    found = metrics.inference(net, jnp.array([[3.0, 0.0], [3.0, 3.0]]))
    assert found.connection_sparsity == pytest.approx(4 / 6)
    assert found.synaptic_operations.dense == 6
    assert found.synaptic_operations.effective_macs == (1 + 2) / 2


def test_updates_counted_by_hand():
    xs = jnp.ones((4, 1, 2))
    found = metrics.update(LEARNER, xs, step_fn=step_fn)
    assert found.forward == 4 * (6 + 3)
    # Gradients of both weights, and the signal of the read-out sent back.
    assert found.learning == 4 * (6 + 3 + 3)
    assert found.synaptic_operations == 84
    assert found.memory == {'parameters': 4 * 9, 'states': 4 * 3}
    assert found.footprint == 48


def test_updates_that_carry_traces():
    xs = jnp.ones((4, 1, 2))
    before = jax.tree.map(np.array, {k: t.value for k, t in LEARNER.traces.items()})
    optimizer = optax.sgd(0.1, momentum=0.9)
    found = metrics.update(
        LEARNER, xs, step_fn=step_fn, fresh=False, optimizer=optimizer
    )
    # The trace of one weight matrix has six entries, each of four products.
    assert found.learning == 4 * (6 + 3 + 3) + 4 * 6
    assert found.memory['traces'] == 4 * 6
    assert found.memory['optimizer'] == 4 * 9
    assert found.footprint == sum(found.memory.values())
    after = {k: t.value for k, t in LEARNER.traces.items()}
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert 'learning 72' in str(found)


def test_long_sequences_are_counted_over_their_blocks():
    short = metrics.update(LEARNER, jnp.ones((4, 1, 2)), step_fn=step_fn)
    long = metrics.update(LEARNER, jnp.ones((4000, 1, 2)), step_fn=step_fn)
    assert long.forward == 1000 * short.forward
    assert long.learning == 1000 * short.learning


def test_an_update_of_a_sparse_network_counts_its_products():
    brainevent = pytest.importorskip('brainevent')
    dense = np.zeros((5, 5), 'float32')
    dense[np.arange(5), (np.arange(5) + 1) % 5] = 0.5

    class Sparse(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = braintrace.nn.SparseLinear(
                brainevent.CSR.fromdense(dense), b_init=None
            )

        def init_state(self, batch_size=None, **kwargs):
            self.h = brainstate.HiddenState(jnp.zeros((2, 5)))

        def update(self, x):
            self.h.value = 0.5 * self.h.value + self.layer(x + self.h.value)
            return self.h.value

    learner = braintrace.compile(Sparse(), 'd_rtrl', jnp.ones((2, 5)))
    xs = jnp.ones((3, 2, 5))
    step_fn = lambda x: jnp.mean(learner(x) ** 2)
    found = metrics.update(learner, xs, step_fn=step_fn)
    assert found.forward == 3 * 2 * 25
    # The gradient of the weights reads every pair of neurons at every step.
    assert found.learning >= 3 * 2 * 25
