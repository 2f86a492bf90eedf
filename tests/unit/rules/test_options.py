"""Options of rules: which spellings mean the same, and which are refused."""

import inspect
from dataclasses import replace

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import (
    ETraceConfig,
    FixedRandomFeedback,
    GradExpon,
    KappaFilter,
    SyntheticGradient,
)
from braintrace.learner.by_rule import RULES
from braintrace.rules import PRESETS, named
from braintrace.rules.exactness import ParameterFacts, SiteFacts, gradient_of

MODEL = brainstate.nn.Linear(1, 1)


def rule(name, **options):
    return RULES[named(name).name](MODEL, **options).rule


def without_words(rule):
    return replace(
        rule, name='', exact_when='', cost=(), use='', multi_step=False
    )  # what a rule does


def test_kappa_and_its_published_name_are_one_option():
    eprop = lambda **options: rule('eprop', **options)
    assert eprop(kappa=0.7) == eprop(kappa_filter_decay=0.7)
    assert eprop(kappa='readout') == eprop(kappa_filter_decay=None) == eprop()
    assert eprop(kappa=None) == eprop(kappa_filter_decay=0.0) != eprop()
    with pytest.raises(ValueError, match='kappa'):
        eprop(kappa=0.5, kappa_filter_decay=0.7)


def test_a_filter_with_kappa_zero_is_no_filter():
    local = without_words(rule('eprop', reach='local'))
    for zero in (0.0, 0, np.float32(0), KappaFilter(0.0)):
        assert without_words(rule('eprop', kappa_filter_decay=zero)) == local
    assert rule('three_factor', kappa_filter_decay=0.0) == rule('three_factor')
    # Windows are exact without a filter; with one their steps are taken one by one.
    for kappa in (0.0, 0.5):
        multi = rule('eprop', kappa_filter_decay=kappa, vjp_method='multi-step')
        assert multi.multi_step == (kappa == 0)
    assert ETraceConfig(kappa=0.0) == ETraceConfig(decay=0.0) == ETraceConfig()
    filtered = ETraceConfig(trace_filter='kappa', kappa=0)
    assert filtered == ETraceConfig()
    assert hash(filtered) == hash(ETraceConfig())
    assert filtered.rule == ETraceConfig().rule
    factors = ETraceConfig('io_factorized', decay=0.9)
    assert factors == replace(factors, trace_filter='kappa', kappa=0.0)


def test_every_rule_says_when_it_is_exact_what_it_costs_and_when_to_use_it():
    for name, preset in PRESETS.items():
        given = preset.default
        assert all([given.name, given.exact_when, *given.cost, given.use])
        assert replace(rule(name), multi_step=False) == given


def test_every_rule_shows_its_options():
    for kind in RULES.values():
        options = inspect.signature(kind).parameters
        assert {'model', 'check_finite'} < set(options)
        assert 'options' not in options
    assert inspect.signature(braintrace.SnAp).parameters['n'].default == 2


PARTS = [
    (ETraceConfig(), 'd_rtrl', {}),
    (ETraceConfig(trace_filter='kappa', kappa=0.5), 'eprop', {'kappa': KappaFilter(0.5)}),
    (ETraceConfig(learning_signal='random_feedback', trace_filter='readout'), 'eprop', {'feedback': 'random'}),
    (ETraceConfig('io_factorized', decay=0.9), 'pp_prop', {'decay_or_rank': 0.9}),
    (ETraceConfig('io_factorized', 'scalar_leak', decay=0.9), 'ostl_feedforward', {'decay_or_rank': 0.9}),
    (ETraceConfig('io_factorized', 'none', decay=0.9), 'ottt', {'leak': 0.9}),
    (ETraceConfig('io_factorized', ('scalar_leak', 'none'), decay=(0.9, None)), 'ottt', {'leak': 0.9}),
    (ETraceConfig(temporal_recursion='scalar_leak', decay=0.6), 'rflo', {'leak': 0.6}),
    (ETraceConfig(recurrence_scope='coupled'), 'rtrl', {}),
    (ETraceConfig(recurrence_scope='sparse_n', sparse_n=1), 'snap', {'n': 1}),
    (ETraceConfig('random_projection', recurrence_scope='coupled'), 'uoro', {}),
    (ETraceConfig(learning_signal='modulatory'), 'three_factor', {}),
    (ETraceConfig('none', update_schedule='sequence_end'), 'bptt', {}),
    (ETraceConfig('none', update_schedule='window', window_size=2), 'tbptt', {'k': 2}),
]  # fmt: skip


@pytest.mark.parametrize(
    ('config', 'name', 'options'),
    PARTS,
    ids=[f'{name}-{n}' for n, (_, name, _) in enumerate(PARTS)],
)
def test_presets_are_their_parts(config, name, options):
    assert without_words(config.rule) == without_words(rule(name, **options))
    couples = name in ('rtrl', 'snap', 'uoro')
    assert config.include_recurrent_mixing == couples


FACTORS = {'trace_factorization': 'io_factorized', 'decay': 0.9}
NO_MEANING = [
    {'trace_filter': 'kappa'},
    {'kappa': 0.5},
    *({'kappa': wrong} for wrong in (False, -0.1, 'none')),
    {'decay': 0.5},
    {'trace_factorization': 'io_factorized'},
    {**FACTORS, 'temporal_recursion': ('scalar_leak', 'jacobian'), 'decay': (0.9, None)},
    {**FACTORS, 'trace_filter': 'kappa', 'kappa': 0.5},
    {**FACTORS, 'recurrence_scope': 'coupled'},
    {**FACTORS, 'decay': 1.5},
    {'recurrence_scope': 'sparse_n'},
    {'recurrence_scope': 'coupled', 'temporal_recursion': 'none'},
    {'recurrence_scope': 'coupled', 'learning_signal': 'modulatory'},
    {'recurrence_scope': 'coupled', 'decay': 0.5},
    {'temporal_recursion': 'scalar_leak'},
    {'update_schedule': 'window'},
    {'update_schedule': 'window', 'window_size': 3},
    {'trace_factorization': 'none'},
    {'trace_factorization': 'none', 'update_schedule': 'sequence_end', 'recurrence_scope': 'coupled'},
    {'trace_factorization': 'none', 'update_schedule': 'sequence_end', 'decay': 0.5},
    {'trace_factorization': 'none', 'update_schedule': 'window', 'window_size': 0},
    {'learning_signal': 'loud'},
    *({'temporal_recursion': 'scalar_leak', 'decay': d} for d in (1.5, -0.5, np.nan, 5, 'x', (0.5, 0.9))),
    *({'trace_filter': 'kappa', 'kappa': k} for k in (1.5, KappaFilter(0.5))),
    *({'recurrence_scope': 'sparse_n', 'sparse_n': n} for n in (0, -1, 1.5, True)),
]  # fmt: skip
WRONG = [
    ('eprop', {'feedback': 'random', 'reach': 'deep'}),
    ('eprop', {'feedback': 'loud'}),
    ('eprop', {'feedback': np.ones(4)}),
    ('eprop', {'kappa_filter_decay': 0.5, 'reach': 'local'}),
    ('rflo', {'leak': 1.5}),
    ('snap', {'n': 0}),
    ('ottt', {'leak': -1}),
    ('dni', {'predictor': 'good'}),
    ('rtrl', {'reach': 'deep'}),
    *((name, {'reach': 'readout'}) for name in ('pp_prop', 'three_factor', 'rtrl')),
]


def test_combinations_without_a_meaning_are_refused():
    for options in NO_MEANING:
        with pytest.raises(ValueError, match='Fix: '):
            ETraceConfig(**options)
    for name, options in WRONG:
        with pytest.raises(ValueError, match='Fix: '):
            rule(name, **options)
    for kind, options in [
        (FixedRandomFeedback, {'align': 3.0}),
        (FixedRandomFeedback, {'scale': np.nan}),
        (FixedRandomFeedback, {'key': 1.5}),
        (FixedRandomFeedback, {'key': np.ones(2)}),
        (SyntheticGradient, {'rate': np.nan}),
        (SyntheticGradient, {'width': 0}),
        (KappaFilter, {'kappa': 1.0}),
    ]:
        with pytest.raises(ValueError, match='Fix: '):
            kind(**options)


def test_numbers_may_be_those_of_numpy_and_jax():
    for number in (np.float32(0.5), jnp.asarray(0.5), KappaFilter(0.5)):
        assert rule('eprop', kappa_filter_decay=number).filter == 0.5
        assert rule('three_factor', kappa_filter_decay=number).filter == 0.5
    assert rule('snap', n=np.int64(2)).trace.n == 2
    assert rule('pp_prop', decay_or_rank=np.int64(3)).decay == (0.5, 0.5)
    assert rule('pp_prop', decay_or_rank=1).decay == (0.0, 0.0)
    for key in (jax.random.key(7), jax.random.PRNGKey(7), 7):
        random = rule('eprop', feedback='random', random_feedback_key=key)
        assert random.signal.weights.key == 7


def test_random_weights_have_the_scale_of_the_read_out():
    shape = (16, 400)
    for feedback, scale in [
        (FixedRandomFeedback(), 1 / 4),
        (FixedRandomFeedback(scale=3.0), 3),
    ]:
        weights = feedback(0, shape, jnp.float32)
        assert weights.shape == shape
        assert float(weights.std()) == pytest.approx(scale, rel=0.05)
        assert float(abs(weights.mean())) < 0.05 * scale
        assert not np.allclose(weights, feedback(1, shape, jnp.float32))


def test_a_running_mean_of_gradients():
    mean, state = GradExpon(0.5)({'w': jnp.asarray(2.0)})
    assert mean == {'w': 2.0}
    mean, state = GradExpon(0.5)({'w': jnp.asarray(5.0)}, state)
    assert mean == {'w': (0.5 * 0.5 * 2 + 0.5 * 5) / 0.75}


def test_what_a_rule_makes_of_facts():
    silent = ParameterFacts('none', 'unread', temporal=True, sites=(SiteFacts(),))
    given = lambda name, facts: gradient_of(PRESETS[name].default, facts)
    assert given('d_rtrl', silent) == ('none', 'unread')
    assert given('rtrl', silent).kind == 'equal to BPTT'
    assert given('threefactor', silent).kind == 'approximate'
    idle = silent._replace(temporal=False)
    for name in ('d_rtrl', 'rtrl', 'bptt'):
        assert given(name, idle).kind == 'none'
    some = ParameterFacts('exact', '', temporal=True, untraced=True)
    assert given('d_rtrl', some).kind == 'one step'
    assert given('d_rtrl', some._replace(sites=(SiteFacts(),))).kind == 'approximate'
    assert given('d_rtrl', some._replace(temporal=False)).kind == 'equal to BPTT'
    known = some._replace(reason='why', untraced=False, sites=(SiteFacts(leak=0.5),))
    assert given('d_rtrl', known) == ('equal to BPTT', 'why')
    exact = gradient_of(rule('rflo', leak=0.5), known)
    assert exact.kind == 'equal to BPTT'
    assert exact.reason == "why; the rule's own trace is the exact one here"
    assert gradient_of(rule('rflo', leak=0.6), known).kind == 'approximate'
