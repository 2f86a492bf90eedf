"""The descent certificate against gradients by `jax.grad` through the whole sequence."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace.learner import measuring
from formulas import plain_gradient

T, B, N, H = 12, 3, 2, 5


def normal(seed, *shape, scale=1.0):
    drawn = np.random.default_rng(seed).normal(size=shape) * scale
    return jnp.asarray(drawn, jnp.float32)


@jax.custom_vjp
def reverse_spike(v):
    """A surrogate spike that has a derivative for reverse mode alone."""
    return (v > 0).astype(v.dtype)


reverse_spike.defvjp(
    lambda v: (reverse_spike(v), v), lambda v, bar: (bar / (1 + jnp.abs(v)) ** 2,)
)


def rate_step(p, s, x):
    h = jnp.tanh(0.8 * s['h'] + x @ p['w'] + s['h'] @ p['r'])
    return {'h': h}, h @ p['out']


def spiking_step(p, s, x):
    z = reverse_spike(s['v'] - 0.2)
    v = 0.9 * s['v'] - 0.2 * z + x @ p['w'] + z @ p['r']
    return {'v': v}, reverse_spike(v - 0.2) @ p['out']


def substeps(p, s, x):
    """A spike with a reverse rule inside a scan and inside a branch."""

    def one(v, k):
        return v + 0.1 * (x @ p['w'] + reverse_spike(v - 0.1 * k) @ p['r']), None

    v, _ = jax.lax.scan(one, 0.9 * s['v'], jnp.arange(3.0))
    v = jax.lax.cond(v.sum() > 0, lambda: v - 0.1 * reverse_spike(v), lambda: v)
    return {'v': v}, v @ p['out']


def turning_step(p, s, x):
    """Complex states and weights."""
    h = 0.9 * jnp.exp(1j * p['turn']) * s['h'] + x @ p['b']
    h = h + 0.1 * (s['h'] @ p['r'])
    return {'h': h}, h.real @ p['out']


def parameters():
    return {
        'w': normal(1, N, H, scale=0.5),
        'r': normal(2, H, H, scale=0.4),
        'out': normal(3, H, 2, scale=0.5),
    }


MODELS = {
    'rates': (rate_step, parameters(), {'h': jnp.zeros((B, H))}),
    'spikes': (spiking_step, parameters(), {'v': jnp.zeros((B, H))}),
    'sub-steps': (substeps, parameters(), {'v': jnp.zeros((B, H))}),
    'complex': (
        turning_step,
        {
            'turn': normal(4, H),
            'b': normal(5, N, H) + 1j * normal(6, N, H),
            'r': normal(7, H, H, scale=0.4) + 0.4j * normal(8, H, H),
            'out': normal(3, H, 2, scale=0.5),
        },
        {'h': jnp.zeros((B, H), jnp.complex64)},
    ),
}

XS, YS = normal(10, T, B, N), normal(11, T, B, 2)


def compiled(name, rule, **options):
    step, params, state = MODELS[name]
    learner = braintrace.compile(step, rule, params, state, XS[0], **options)
    return learner, lambda x, y: jnp.mean((learner(x) - y) ** 2)


def true_gradient(name, weights=None):
    return plain_gradient(*MODELS[name], XS, YS, weights)


def dot(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return float(sum(jnp.vdot(x, y).real for x, y in pairs))


@pytest.mark.parametrize('rule', ['d_rtrl', 'pp_prop', 'uoro'])
@pytest.mark.parametrize('name', MODELS)
def test_the_derivative_is_that_of_bptt(name, rule):
    """⟨g_true, g⟩/|g|² of approximate gradients, also where spikes have no forward rule."""
    learner, step = compiled(name, rule)
    g = learner.etrace_grad(XS, YS, step_fn=step, fresh=True)
    if rule == 'uoro':  # its signs differ from call to call
        learner, step = compiled(name, rule)
    found = learner.certificate(XS, YS, step_fn=step, directions=0)
    true = true_gradient(name)
    expected = dot(true, g) / dot(g, g)
    assert abs(expected - 1) > 1e-3
    np.testing.assert_allclose(found.descent, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.norm, dot(g, g) ** 0.5, rtol=1e-5)
    assert np.isnan(found.cosine)
    assert found.descends == (expected > 0)


@pytest.mark.parametrize('name', MODELS)
def test_an_exact_gradient_has_all_ones(name):
    learner, step = compiled(name, 'bptt')
    found = learner.certificate(XS, YS, step_fn=step, per_parameter=True)
    for row in (found, *found.rows):
        np.testing.assert_allclose(row.descent, 1, atol=1e-4)
        np.testing.assert_allclose([row.cosine, row.cosine_low], 1, atol=1e-4)
        np.testing.assert_allclose(row.true_norm, row.norm, rtol=1e-3)


def test_the_interval_holds_the_cosine():
    """In 9 of 10 seeds; and the estimates scatter around the cosine."""
    learner, step = compiled('rates', 'pp_prop')
    g = learner.etrace_grad(XS, YS, step_fn=step, fresh=True)
    true = true_gradient('rates')
    cosine = dot(true, g) / (dot(true, true) * dot(g, g)) ** 0.5
    assert 0.2 < cosine < 0.98
    found = [learner.certificate(XS, YS, step_fn=step, seed=seed) for seed in range(60)]
    held = [c.cosine_low <= cosine <= c.cosine_high for c in found]
    # 54 are expected, and fewer than 45 come once in 10,000.
    assert 45 <= sum(held) < 60
    assert abs(np.mean([c.cosine for c in found]) - cosine) < 0.02
    assert all(c.descent == found[0].descent for c in found)


def test_more_directions_narrow_the_interval():
    learner, step = compiled('rates', 'd_rtrl')
    few, many = (
        learner.certificate(XS, YS, step_fn=step, directions=n) for n in (4, 256)
    )
    assert many.cosine_error < 0.5 * few.cosine_error


def test_every_parameter_has_its_row():
    learner, step = compiled('rates', 'pp_prop')
    g = learner.etrace_grad(XS, YS, step_fn=step, fresh=True)
    true = true_gradient('rates')
    found = learner.certificate(
        XS, YS, step_fn=step, per_parameter=True, directions=200
    )
    assert [row.name for row in found.rows] == ['out', 'r', 'w']
    for row in found.rows:
        a, b = true[row.name], g[row.name]
        np.testing.assert_allclose(row.descent, dot(a, b) / dot(b, b), rtol=1e-4)
        np.testing.assert_allclose(row.norm, dot(b, b) ** 0.5, rtol=1e-5)
        assert row.cosine_low - 0.02 < dot(a, b) / (dot(a, a) * dot(b, b)) ** 0.5
        assert abs(row.true_norm / dot(a, a) ** 0.5 - 1) < 0.25
    assert abs(found['out'].cosine - 1) < 1e-4
    whole = learner.certificate(XS, YS, step_fn=step)
    np.testing.assert_allclose(found.descent, whole.descent, rtol=1e-5)
    np.testing.assert_allclose(found.norm, whole.norm, rtol=1e-5)


def test_groups_of_parameters():
    learner, step = compiled('rates', 'd_rtrl')
    g = learner.etrace_grad(XS, YS, step_fn=step, fresh=True)
    true = true_gradient('rates')
    groups = {'inside': [('w',), ('r',)]}
    found = learner.certificate(XS, YS, step_fn=step, groups=groups)
    inside = lambda tree: [tree['w'], tree['r']]
    expected = dot(inside(true), inside(g)) / dot(inside(g), inside(g))
    np.testing.assert_allclose(found['inside'].descent, expected, rtol=1e-4)
    np.testing.assert_allclose(found['(others)'].descent, 1, rtol=1e-4)


def test_masked_steps_contribute_nothing():
    learner, step = compiled('rates', 'd_rtrl')
    mask = jnp.ones(T).at[jnp.array([2, 5])].set(0).at[7].set(0.5)
    ys = YS.at[2].set(jnp.nan)
    g = learner.etrace_grad(
        XS, ys, step_fn=step, mask=mask, reduction='sum', fresh=True
    )
    true = true_gradient('rates', mask)
    found = learner.certificate(
        XS, ys, step_fn=step, mask=mask, reduction='sum', directions=2
    )
    np.testing.assert_allclose(found.descent, dot(true, g) / dot(g, g), rtol=1e-4)
    np.testing.assert_allclose(found.norm, dot(g, g) ** 0.5, rtol=1e-5)


def modulated(sign):
    """Leaky units whose mean is the loss, with a modulator of one sign: the true signal
    is positive."""

    def leaky(p, s, x):
        h = 0.9 * s['h'] + x @ p['w']
        return {'h': h}, h

    state = {'h': jnp.zeros((B, H))}
    params = {'w': parameters()['w']}
    learner = braintrace.compile(leaky, 'three_factor', params, state, XS[0])
    return learner, lambda x, y: jnp.mean(learner(x, modulator=sign * jnp.ones(())))


@pytest.mark.parametrize('sign', [1, -1])
def test_a_gradient_that_points_uphill(sign):
    learner, step = modulated(sign)
    found = learner.certificate(XS, YS, step_fn=step)
    assert found.descends == (sign > 0)
    np.testing.assert_allclose(np.sign(found.descent), sign)
    np.testing.assert_allclose([found.cosine, found.cosine_low], sign, atol=1e-4)
    assert ('does NOT descend' in str(found)) == (sign < 0)


class Noisy(brainstate.nn.Module):
    """A leaky unit with noise, its own counter, and surrogate spikes of braintools."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(normal(1, N, H))
        self.r = brainstate.ParamState(normal(2, H, H, scale=0.3))
        self.seen = brainstate.ShortTermState(jnp.zeros((), jnp.int32))

    def init_state(self, batch_size=None, **kwargs):
        self.v = brainstate.HiddenState(jnp.zeros((batch_size, H)))

    def update(self, x):
        import braintools

        spike = braintools.surrogate.ReluGrad()
        z = spike(self.v.value - 0.3)
        noise = 0.3 * brainstate.random.normal(size=self.v.value.shape)
        self.v.value = 0.9 * self.v.value + x @ self.w.value + z @ self.r.value + noise
        self.seen.value = self.seen.value + 1
        return self.v.value


def _numbers(value):
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def test_nothing_is_changed_and_noise_is_the_same_in_both_passes():
    pytest.importorskip('braintools')
    brainstate.random.seed(0)
    learner = braintrace.compile(Noisy(), 'bptt', XS[0], batch_size=B)
    step = lambda x: jnp.mean(jnp.tanh(learner(x)) ** 2)
    learner.etrace_evolve(XS)
    states = [*learner.model.states().values(), brainstate.random.DEFAULT]
    before = [_numbers(s.value) for s in states]
    first = learner.certificate(XS, step_fn=step)
    # BPTT's gradient is the derivative only if both see the same noise.
    np.testing.assert_allclose(first.descent, 1, atol=1e-4)
    after = [_numbers(s.value) for s in states]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    assert learner.certificate(XS, step_fn=step) == first


def test_traces_stay():
    learner, step = compiled('rates', 'd_rtrl')
    learner.etrace_evolve(XS, YS, step_fn=step)
    traces = jax.tree.map(np.asarray, learner.traces_of('w'))
    learner.certificate(XS, YS, step_fn=step)
    after = learner.traces_of('w')
    jax.tree.map(np.testing.assert_array_equal, traces, after)


def test_it_is_compiled_once():
    learner, step = compiled('rates', 'd_rtrl')
    learner.certificate(XS, YS, step_fn=step)
    program = next(p for p in learner._kept.programs.values() if _is_certificate(p))
    assert program._cache_size() == 1
    learner.certificate(XS, YS, step_fn=step, seed=1)
    learner.certificate(XS + 1, YS, step_fn=step)
    assert program._cache_size() == 1
    assert sum(map(_is_certificate, learner._kept.programs.values())) == 1


def _is_certificate(program):
    return getattr(program, '__name__', '') == 'measure'


# ---------------------------------------------------------------- long sequences


def needed(learner, steps, monkeypatch):
    """Bytes that the compiled certificate of so many steps allocates, its inputs aside."""
    programs = []
    make = measuring.program_of

    def program(learner, kind, parts, made, *rest):
        found = make(learner, kind, parts, made, *rest)
        if kind != 'certificate':
            return found
        return lambda *given, **how: (
            programs.append(found.lower(*given, **how).compile().memory_analysis())
            or found(*given, **how)
        )

    monkeypatch.setattr(measuring, 'program_of', program)
    xs, ys = jnp.ones((steps, B, N)), jnp.ones((steps, B, 2))
    step = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    found = learner.certificate(xs, ys, step_fn=step, directions=4)
    (memory,) = programs
    return found, memory.temp_size_in_bytes + memory.output_size_in_bytes


@pytest.mark.parametrize('name', ['rates', 'spikes'])
def test_memory_is_flat_in_time(name, monkeypatch):
    """100,000 steps: neither states nor losses are kept; the states would take 6 MB."""
    learner, _ = compiled(name, 'd_rtrl')
    _, short = needed(learner, 1_000, monkeypatch)
    monkeypatch.undo()
    found, long = needed(learner, 100_000, monkeypatch)
    assert np.isfinite(found.descent)
    assert long < 1.1 * short + 4096


# ---------------------------------------------------------------- what is shown, and errors


def test_text():
    learner, step = compiled('rates', 'd_rtrl')
    found = learner.certificate(XS, YS, step_fn=step)
    text = str(found)
    assert text == repr(found)
    assert len(text.splitlines()) == 5
    assert text.startswith('D_RTRL over 12 steps: descends')
    assert '8 random directions' in text
    rows = learner.certificate(XS, YS, step_fn=step, per_parameter=True)
    assert len(str(rows).splitlines()) == 9
    plain = learner.certificate(XS, YS, step_fn=step, per_parameter=True, directions=0)
    assert 'nan' not in str(plain)
    assert str(plain).count('—') == 3 * len(plain.rows)
    with pytest.raises(KeyError, match="one of 'out'"):
        _ = rows['nothing']
    with pytest.raises(KeyError, match='per_parameter=True'):
        _ = found['w']


def test_a_gradient_of_zero():
    learner, _ = compiled('rates', 'd_rtrl')
    found = learner.certificate(XS, step_fn=lambda x: 0.0 * jnp.sum(learner(x)))
    assert found.norm == 0
    assert not found.descends
    assert 'the gradient is zero' in str(found)
    assert 'nan' not in str(found)


@pytest.mark.parametrize(
    ('options', 'word'),
    [
        ({'directions': -1}, 'directions=-1'),
        ({'directions': 2.5}, 'directions=2.5'),
        ({'reduction': 'median'}, 'median'),
        ({'groups': {'a': [('nothing',)]}}, 'nothing'),
        ({'groups': {'a': [('w',)], 'b': [('w',)]}}, "'a' and 'b'"),
        ({'groups': ['w']}, 'groups='),
        ({'groups': {'a': [('w',)]}, 'per_parameter': True}, 'per_parameter'),
        ({'mask': jnp.ones(3)}, 'a mask'),
    ],
    ids=str,
)
def test_options_that_are_refused(options, word):
    learner, step = compiled('rates', 'd_rtrl')
    with pytest.raises(ValueError, match=word):
        learner.certificate(XS, YS, step_fn=step, **options)


@pytest.mark.parametrize('method', ['certificate', 'gradient_check'])
def test_step_functions_with_outputs(method):
    """``has_aux`` as in etrace_grad; without it, outputs beside the loss are left out."""
    learner, step = compiled('rates', 'd_rtrl')
    measure = getattr(learner, method)
    pair = lambda x, y: (step(x, y), x)
    expected = str(measure(XS, YS, step_fn=step, has_aux=False))
    assert str(measure(XS, YS, step_fn=pair, has_aux=True)) == expected
    assert str(measure(XS, YS, step_fn=pair)) == expected
    with pytest.raises(ValueError, match='has_aux=True'):
        measure(XS, YS, step_fn=step, has_aux=True)
    with pytest.raises(ValueError, match='has_aux=False'):
        measure(XS, YS, step_fn=pair, has_aux=False)


# ---------------------------------------------------------------- in training


def fitted(learner, step, updates, **options):
    return braintrace.fit(
        learner,
        lambda i: (XS, YS),
        step_fn=step,
        optimizer=optax.sgd(0.01),
        updates=updates,
        show=False,
        **options,
    )


def test_fit_measures_it_every_few_updates():
    learner, step = compiled('rates', 'd_rtrl')
    expected = learner.certificate(XS, YS, step_fn=step)
    history = fitted(learner, step, 5, certificate_every=2)
    measured = np.isfinite(history['descent'])
    assert measured.tolist() == [True, False, True, False, True]
    np.testing.assert_allclose(history['descent'][0], expected.descent, rtol=1e-5)
    np.testing.assert_allclose(history['cosine'][0], expected.cosine, rtol=1e-5)
    again, step = compiled('rates', 'd_rtrl')
    without = fitted(again, step, 5)
    np.testing.assert_array_equal(without['loss'], history['loss'])
    assert 'descent' not in without.records[0]


def test_fit_measures_it_of_step_functions_with_outputs():
    learner, loss = compiled('rates', 'd_rtrl')
    step = lambda x, y: (loss(x, y), y)
    metrics = lambda outputs, *_: {'mean': outputs.mean()}
    history = fitted(learner, step, 2, certificate_every=1, metrics=metrics)
    assert np.isfinite(history['descent']).all()


def test_fit_warns_when_the_rule_does_not_descend():
    learner, step = modulated(-1)
    with pytest.warns(RuntimeWarning, match='update 1: .*descend'):
        fitted(learner, step, 2, certificate_every=2)
    learner, step = modulated(1)
    fitted(learner, step, 2, certificate_every=1)  # warnings are errors


def test_fit_refuses_a_wrong_number():
    learner, step = compiled('rates', 'd_rtrl')
    with pytest.raises(ValueError, match='certificate_every=0'):
        fitted(learner, step, 2, certificate_every=0)


def test_the_command_measures_it(tmp_path):
    from braintrace.cli import main

    options = [
        '--updates',
        '4',
        '--units',
        '4',
        '--batch',
        '2',
        '--certificate-every',
        '2',
    ]
    task = [
        '--task-option',
        'lag=1',
        '--task-option',
        'length=1',
        '--task-option',
        'symbols=2',
    ]
    out = ['--out', str(tmp_path / 'run')]
    assert main(['train', 'copying', *options, *task, *out]) == 0
    lines = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
    assert ['descent' in line for line in lines] == [True, False, True, False]


# ---------------------------------------------------------------- other frameworks


def test_flax_and_equinox_modules():
    eqx, nnx = pytest.importorskip('equinox'), pytest.importorskip('flax.nnx')
    cell = nnx.SimpleCell(N, H, rngs=nnx.Rngs(0))
    flax = braintrace.compile(cell, 'bptt', XS[0])
    gru = eqx.nn.GRUCell(N, H, key=jax.random.key(0))
    equinox = braintrace.compile(gru, 'bptt', XS[0, 0], batch_size=B, vmap=True)
    for learner in (flax, equinox):
        step = lambda x, learner=learner: jnp.mean((learner(x) - 1) ** 2)
        found = learner.certificate(XS, step_fn=step, per_parameter=True)
        for row in (found, *found.rows):
            np.testing.assert_allclose(row.descent, 1, atol=1e-3)
