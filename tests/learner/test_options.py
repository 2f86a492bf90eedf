"""Options of a learner: they are fixed, and another learner may have others."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace

B, I, H, T = 2, 3, 4, 5  # noqa: E741
XS = jnp.asarray(np.random.default_rng(0).normal(size=(T, B, I)), jnp.float32)
OTHERS = {
    'trace': 'marked',
    'trace_dtype': jnp.bfloat16,
    'block': 2,
    'passes': 1,
    'reach': 'deep',
    'vjp_method': 'multi-step',
}


def compiled(rule='d_rtrl', **options):
    brainstate.random.seed(0)
    net = brainstate.nn.GRUCell(I, H)
    return braintrace.compile(net, rule, XS[0], batch_size=B, **options)


def gradient(learner, **options):
    step = lambda x: jnp.mean(learner(x) ** 2)
    return learner.etrace_grad(XS, step_fn=step, **options)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize('name', OTHERS)
def test_options_are_read_only(name):
    learner = compiled()
    before, expected = getattr(learner, name), gradient(learner, fresh=True)
    with pytest.raises(AttributeError) as caught:
        setattr(learner, name, OTHERS[name])
    text = str(caught.value)
    assert text.startswith(f'learner.{name} = ')
    assert f'Fix: learner.with_options({name}=...)' in text
    assert getattr(learner, name) == before
    same(gradient(learner, fresh=True), expected)


@pytest.mark.parametrize('name', OTHERS)
def test_another_learner_is_one_compiled_with_the_option(name):
    learner = compiled()
    learner.etrace_evolve(XS)
    given = {name: OTHERS[name]}
    other = learner.with_options(**given)
    assert other.model is learner.model
    assert getattr(other, name) == OTHERS[name]
    assert getattr(learner, name) != OTHERS[name]
    assert not any(
        np.any(x) for t in other.traces.values() for x in jax.tree.leaves(t.value)
    )
    expected = gradient(compiled(**given), fresh=True)
    same(gradient(other, fresh=True), expected)
    other.reset_state()
    fresh = compiled(**given)
    same(gradient(other), gradient(fresh))
    kinds = lambda learner: [
        x.dtype
        for x in jax.tree.leaves(jax.tree.map(lambda t: t.value, dict(learner.traces)))
    ]
    assert kinds(other) == kinds(fresh)


def test_other_options_stay():
    learner = compiled('pp_prop', decay_or_rank=0.5, passes=1, check_finite=True)
    other = learner.with_options(block=2).with_options(trace_dtype=jnp.float32)
    assert (other.block, other.passes, other.check_finite) == (2, 1, True)
    assert type(other) is type(learner)
    assert other.rule == learner.rule


def test_options_of_the_rule():
    by_position = braintrace.pp_prop(compiled().model, 0.5)
    by_position.compile_graph(XS[0])
    for learner in (compiled('pp_prop', decay_or_rank=0.5), by_position):
        other = learner.with_options(decay_or_rank=0.9)
        assert (
            other.rule.trace.decay
            == compiled('pp_prop', decay_or_rank=0.9).rule.trace.decay
        )
        assert other.rule != learner.rule


def test_weights_are_shared_and_start_values_the_same():
    learner = compiled()
    fresh = gradient(learner, fresh=True)
    learner.etrace_evolve(XS)  # the states have moved
    other = learner.with_options(block=1)
    found = gradient(other, fresh=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, fresh)
    before = other.weights()
    learner.apply(fresh, optax.sgd(0.1))
    assert any(
        np.any(a != b)
        for a, b in zip(*map(jax.tree.leaves, (before, other.weights())), strict=True)
    )


def test_a_modulator_stays():
    learner = compiled('three_factor', modulator=2.0)
    learner.set_modulator(3.0)
    assert float(learner.with_options(block=1).modulator) == 3.0
    assert float(learner.with_options(modulator=4.0).modulator) == 4.0


def test_a_configuration_and_a_learner_that_is_not_compiled():
    config = braintrace.ETraceConfig(temporal_recursion='scalar_leak', decay=0.9)
    learner = compiled(config)
    assert learner.with_options(block=2).rule == learner.rule
    learner = braintrace.D_RTRL(brainstate.nn.GRUCell(I, H))
    other = learner.with_options(passes=2)
    assert other.passes == 2
    assert not other.is_compiled


@pytest.mark.parametrize('name', ['trace_type', 'mesh', 'vmap', 'decay_or_rank'])
def test_unknown_options_are_refused_with_the_list(name):
    with pytest.raises(TypeError, match=rf'with_options\({name}=...\)') as caught:
        compiled().with_options(**{name: 1})
    assert all(repr(each) in str(caught.value) for each in OTHERS)
