"""Derivatives of a step that the executor of a graph gives."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace
from braintrace.graph.executor import shared_jacobian
from gradients.cases import B, H, I, drawn


class Weighted(brainstate.nn.Module):
    """Weights and states of some shapes."""

    def __init__(self, weights, states):
        super().__init__()
        for kind, shapes in (
            (brainstate.ParamState, weights),
            (brainstate.HiddenState, states),
        ):
            for seed, (name, shape) in enumerate(shapes.items()):
                value = jnp.asarray(0.7 * drawn(*shape, seed=seed))
                setattr(self, name, kind(value))


def executor_of(model, x):
    executor = braintrace.ETraceGraphExecutor(model)
    executor.compile_graph(x)
    return executor


class Gated(Weighted):
    """One gate for all units."""

    def update(self, x):
        gate = jax.nn.sigmoid(x @ self.w_g.value)
        self.h.value = gate * self.h.value + (1 - gate) * jnp.tanh(x @ self.w.value)
        return self.h.value


def test_the_derivative_by_the_element_that_a_position_reads(x64):
    x = jnp.asarray(drawn(B, I))
    model = Gated({'w_g': (I, 1), 'w': (I, 5)}, {'h': (B, 5)})
    executor = executor_of(model, x)
    sites = executor.graph.hidden_param_op_relations
    _, _, _, h2w, _ = executor.solve_h2w_h2h_jacobian(x)
    found = {r.path[0]: (r.sites[0], j) for r, j in zip(sites, h2w, strict=True)}
    site, jacobian = found['w_g']
    assert site.y_var.aval.shape == (B, 1)
    np.testing.assert_array_equal(site.y_sources[0].reshape(B, 5), [[0] * 5, [1] * 5])
    assert (site.y_positions[0] == -2).all()
    gate = jax.nn.sigmoid(x @ model.w_g.value)
    slope = gate * (1 - gate) * (model.h.value - jnp.tanh(x @ model.w.value))
    np.testing.assert_allclose(jacobian.hidden_to_y[0][..., 0], slope, rtol=1e-9)
    site, _ = found['w']
    assert site.y_sources == (None,)
    positions = site.y_positions[0].ravel()
    np.testing.assert_array_equal(positions, np.arange(positions.size))


class DendritesAndDrive(Weighted):
    """Four elements of a product are summed for two units, one is shared by two others."""

    def update(self, x):
        y = jnp.tanh(x @ self.w.value)
        summed = y[:, :4].reshape(B, 2, 2).sum(-1)
        shared = jnp.broadcast_to(y[:, 4:], (B, 2))
        self.h.value = 0.9 * self.h.value + jnp.concatenate([summed, shared], axis=1)
        return self.h.value


def test_both_derivatives_of_a_value_that_is_summed_and_shared(x64):
    x = jnp.asarray(drawn(B, I))
    model = DendritesAndDrive({'w': (I, 5)}, {'h': (B, 4)})
    executor = executor_of(model, x)
    (site,) = executor.graph.hidden_param_op_relations[0].sites
    np.testing.assert_array_equal(site.y_positions[0][0], [0, 0, 1, 1, -2])
    np.testing.assert_array_equal(site.y_sources[0][:4], [-2, -2, 4, 4])
    _, _, _, (jacobian,), _ = executor.solve_h2w_h2h_jacobian(x)
    single, shared = (j[..., 0] for j in jacobian.hidden_to_y[0])
    slope = 1 - jnp.tanh(x @ model.w.value) ** 2
    np.testing.assert_allclose(single, slope.at[:, 4].set(0), rtol=1e-9)
    np.testing.assert_allclose(shared[:, 2:], slope[:, 4:].repeat(2, 1), rtol=1e-9)
    assert not shared[:, :2].any()


class Skip(Weighted):
    """The upper layer reads the lower one by a product, which is cut, and position by position, which is kept."""

    def update(self, x):
        a = jnp.tanh(0.8 * self.a.value + x @ self.w1.value)
        self.a.value = a
        self.b.value = 0.9 * self.b.value + jnp.tanh(a @ self.w2.value) + 0.3 * a
        return self.b.value @ self.out.value


def test_signals_pass_cuts(x64):
    x = jnp.asarray(drawn(I))
    weights = {'w1': (I, H), 'w2': (H, H), 'out': (H,)}
    model = Skip(weights, {'a': (H,), 'b': (H,)})
    executor = executor_of(model, x)
    (group,) = executor.graph.hidden_groups
    assert group.hidden_paths == [('a',), ('b',)]
    a = jnp.tanh(0.8 * model.a.value + x @ model.w1.value)
    *_, pull = executor.solve_h2w_h2h_l2h_jacobian(x)
    (found,) = pull(jnp.asarray(1.0))
    slope = 1 - jnp.tanh(a @ model.w2.value) ** 2
    through = model.w2.value @ (slope * model.out.value)
    np.testing.assert_allclose(found[:, 0], through, rtol=1e-9)
    np.testing.assert_allclose(found[:, 1], model.out.value, rtol=1e-9)


def test_derivatives_by_one_complex_number_that_all_positions_read(x64):
    factors = jnp.asarray(drawn(H) + 1j * drawn(H, seed=1))
    to_hidden = lambda y: jnp.abs(factors + y**2)[:, None]
    y = jnp.asarray([0.3 - 0.8j])
    found = shared_jacobian(to_hidden, y)[:, 0]
    each = lambda k: jax.grad(lambda y: to_hidden(y)[k, 0])(y)[0]
    np.testing.assert_allclose(found, [each(k) for k in range(H)], rtol=1e-9)
