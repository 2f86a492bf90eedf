"""Names of rules, feedback weights, and where factors are the exact trace."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import FixedRandomFeedback
from braintrace.rules import PRESETS, Factorised, named
from braintrace.rules.feedback import feedback_signal
from braintrace.rules.numbers import as_decays
from braintrace.solver import JacobianRecursion, ScalarLeak, SiteFacts, Symmetric


@pytest.mark.parametrize('name', ['D_RTRL', 'd-rtrl', 'drtrl', 'D_rtrl'])
def test_a_rule_by_any_way_to_write_its_name(name):
    assert named(name) is PRESETS['d_rtrl']


def test_an_unknown_rule_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"'pp_prop'\?"):
        named('pprop2')


def test_a_rank_is_a_decay():
    """As many steps as a mean over a window of that length: (r - 1) / (r + 1)."""
    assert as_decays('decay', 1) == (0, 0)
    assert as_decays('decay', (19, 0.25)) == (0.9, 0.25)
    with pytest.raises(ValueError, match='decay='):
        as_decays('decay', (0.5, 0.5, 0.5))


def test_weights_of_feedback():
    assert feedback_signal('symmetric') == Symmetric()
    fixed, moving = feedback_signal('random', 3), feedback_signal('adaptive', 3)
    assert (fixed.align, moving.align) == (None, 0.999)
    first, second = (fixed.weights(n, (400, 3), jnp.float32) for n in (0, 1))
    assert np.std(first) == pytest.approx(1 / 20, rel=0.1)  # 1/√inputs
    assert not np.allclose(first, second)  # another read-out, other weights
    np.testing.assert_array_equal(first, moving.weights(0, (400, 3), jnp.float32))
    drawn = FixedRandomFeedback(4, scale=2.0)
    assert np.std(drawn(0, (400, 3), jnp.float32)) == pytest.approx(2, rel=0.1)
    matrix = np.arange(6.0).reshape(2, 3)
    given = feedback_signal(matrix).weights
    np.testing.assert_array_equal(given(0, (2, 3), jnp.float32), matrix)
    np.testing.assert_array_equal(given(0, (3, 2), jnp.float32), matrix.T)
    assert given == feedback_signal([matrix.copy()]).weights
    assert given != feedback_signal(2 * matrix).weights
    for place, shape in ((0, (2, 4)), (1, (2, 3))):
        with pytest.raises(ValueError, match=f'number {place}'):
            given(place, shape, jnp.float32)


def factors(decays, m, f, x):
    """The product of the two factors after all steps."""
    decay_x, decay_f = decays
    state = inputs = 0.0
    for f_s, x_s in zip(f, x, strict=True):
        state = decay_f * m * state + (1 - decay_f) * f_s
        inputs = decay_x * inputs + x_s
    return state * inputs / (1 - decay_f ** len(f))


def test_factors_that_are_called_exact_are_the_trace_of_the_leak():
    """Σ_s λ^(t-s) f_s x_s, on every combination of decays, leaks and steady factors."""
    rng, numbers, steps = np.random.default_rng(0), (0.0, 0.25, 0.5), 5
    exact, rule = set(), PRESETS['pp_prop'].default
    for decays, leak, kind, steady_f, steady_x in itertools.product(
        itertools.product(numbers, repeat=2),
        (*numbers, 1.0),
        (JacobianRecursion(), ScalarLeak(0.5)),
        *[(True, False)] * 2,
    ):
        rule = replace(rule, trace=Factorised(decays), recursion=kind)
        facts = {'steady_path': steady_f, 'steady_input': steady_x}
        site = SiteFacts(factorised=True, leak=leak, **facts)
        if any('factorised' in w or 'decays' in w for w in rule.replaces(site)):
            continue
        f, x = rng.normal(size=(2, steps))
        f, x = (f[0] + 0 * f if steady_f else f), (x[0] + 0 * x if steady_x else x)
        m = leak if kind == JacobianRecursion() else 1.0
        wanted = sum(leak ** (steps - 1 - s) * f[s] * x[s] for s in range(steps))
        assert factors(decays, m, f, x) == pytest.approx(wanted, rel=1e-12)
        exact.add((steady_f, steady_x))
    assert exact == {(True, True), (True, False), (False, True)}
