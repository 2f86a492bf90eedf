"""Classes that users derive from names of the published package, and members that it
gives to records."""

import copy
import dataclasses

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace.rules import parts

KEY = jax.random.PRNGKey(0)
X = jnp.ones((2, 3))


def compiled(rule='d_rtrl', **options):
    brainstate.random.seed(0)
    model = brainstate.nn.Sequential(
        brainstate.nn.GRUCell(3, 4), brainstate.nn.Linear(4, 2)
    )
    return braintrace.compile(model, rule, X, batch_size=2, **options)


def gradients(learner):
    xs = jnp.stack([X, 2 * X, -X])
    return learner.etrace_grad(xs, step_fn=lambda x: jnp.mean(learner(x) ** 2))


def test_a_subclass_of_a_filter_is_a_state_or_a_part_by_its_arguments():
    class Doubled(braintrace.KappaFilter):
        def update(self, x):
            return 2 * super().update(x)

    state, part = Doubled(jnp.zeros(3), 0.5), Doubled(0.5)
    assert isinstance(state, Doubled)
    assert isinstance(state, brainstate.ShortTermState)
    assert type(state).__name__ == 'Doubled'
    np.testing.assert_allclose(state.update(jnp.ones(3)), 1.0)
    assert isinstance(part, Doubled)
    assert isinstance(part, parts.KappaFilter)
    assert part == Doubled(0.5)
    assert part != braintrace.KappaFilter(0.5)
    assert not isinstance(braintrace.KappaFilter(0.5), Doubled)
    assert isinstance(part, braintrace.KappaFilter)
    assert braintrace.EProp(
        brainstate.nn.GRUCell(3, 4), kappa_filter_decay=part
    ).rule.filter == pytest.approx(0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        part.kappa = 0.7
    assert copy.deepcopy(part) == part


def test_a_subclass_with_arguments_of_its_own():
    class Slow(braintrace.GradExpon):
        def __init__(self, gradients, factor):
            self.factor = factor
            super().__init__(gradients, 0.5)

        def update(self, grads):
            super().update(jax.tree.map(lambda g: self.factor * g, grads))

    mean = Slow({'w': jnp.zeros(2)}, 3.0)
    assert isinstance(mean, Slow)
    assert isinstance(mean, brainstate.nn.Module)
    mean.update({'w': jnp.ones(2)})
    np.testing.assert_allclose(mean.gradients.value['w'], 3.0)
    assert list(mean.states()) == [('gradients',)]

    class Silent(braintrace.GradExpon):
        def __init__(self):
            pass

    with pytest.raises(TypeError, match='without super'):
        Silent()


def test_a_subclass_of_feedback_draws_its_own_weights():
    class Signs(braintrace.FixedRandomFeedback):
        def __call__(self, place, shape, dtype):
            return jnp.sign(super().__call__(place, shape, dtype))

    drawn = Signs(3)
    assert isinstance(drawn, Signs)
    np.testing.assert_array_equal(jnp.abs(drawn(0, (4, 2), jnp.float32)), 1.0)
    signs = braintrace.FixedRandomFeedback(3)(0, (4, 2), jnp.float32)
    given = compiled('eprop', feedback=np.sign(np.asarray(signs)))
    own = compiled('eprop', feedback=drawn)
    jax.tree.map(np.testing.assert_allclose, gradients(own), gradients(given))
    matrix = Signs(2, 4, KEY)
    assert isinstance(matrix, Signs)
    assert matrix.project(jnp.ones(2)).shape == (4,)


def test_a_subclass_of_a_predictor_is_the_predictor():
    class Constant(braintrace.SyntheticGradient):
        def __call__(self, weights, states):
            return jax.tree.map(jnp.ones_like, super().__call__(weights, states))

    own = compiled('dni', window=1, predictor=Constant(8))
    plain = compiled('dni', window=1, predictor=braintrace.SyntheticGradient(8))
    assert isinstance(own.rule.predictor, Constant)
    largest = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max()), gradients(own), gradients(plain)
    )
    assert max(jax.tree.leaves(largest)) > 1e-3


def test_hooks_of_a_mixin_are_refused_like_those_of_the_class():
    class Own:
        def _update_etrace_data(self, *args):
            return args

    with pytest.raises(TypeError, match='class Mixed'):

        class Mixed(Own, braintrace.D_RTRL):
            pass

    class Plain(braintrace.D_RTRL):  # none of them
        pass


def test_an_error_inside_a_property_of_a_record_keeps_its_text(monkeypatch):
    learner = compiled()
    (group,) = learner.graph.hidden_groups
    broken = property(lambda owner: None.nothing)
    monkeypatch.setattr(type(group), 'num_state', broken)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = group.num_state
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = group.trace_state_width
    with pytest.raises(AttributeError, match="no attribute 'bogus'"):
        _ = group.bogus
    monkeypatch.setattr(type(learner), 'report', broken)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = learner.report
