"""Values that several positions read: how many pairs a trace holds, and where there are too many.

That their gradients are those of BPTT is proven in `test_table`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from formulas import assert_equal
from gradients.cases import B, I, compiled, drawn, oracle_of

NAMES = ('shared_gate', 'initial_by_counter', 'dendrites_and_drive', 'complex_drive')


@pytest.fixture(autouse=True)
def _double(x64):
    """All of this file is in float64."""


@pytest.mark.parametrize('name', NAMES)
def test_a_trace_is_no_larger_than_pairs_times_inputs(name):
    learner, _ = compiled(name, 'd_rtrl')
    o = oracle_of(name)
    positions = max(np.size(x) for x in jax.tree.leaves(o.s))
    for leaf in o.p:
        for trace in learner.traces_of((leaf,)).values():
            assert all(np.size(x) <= positions * I for x in jax.tree.leaves(trace))


def expanded(p, s, x):
    """`shared_gate` with the weight of the gate written out for every unit."""
    gate = jax.nn.sigmoid(x @ jnp.repeat(p['w_g'], 5, axis=1))
    h = gate * s['h'] + (1 - gate) * jnp.tanh(x @ p['w'])
    return {'h': h}, (h @ p['out'], [h])


@pytest.mark.parametrize(
    ('rule', 'options'),
    [('pp_prop', {'decay_or_rank': 0.8}), ('ottt', {}), ('rflo', {'leak': 0.7})],
)
def test_rules_treat_a_shared_value_like_one_written_out(rule, options):
    """Σ over positions that share an element, of what each position gives alone."""
    o, found = oracle_of('shared_gate'), []
    shared, _ = compiled('shared_gate', rule, **options)
    written = braintrace.compile(expanded, rule, o.p, o.s, o.xs[0], **options)
    for learner in (shared, written):
        step = lambda x, y, learner=learner: jnp.mean((learner(x)[0] - y) ** 2)
        found.append(learner.etrace_grad(o.xs, o.ys, step_fn=step))
    assert_equal(*found)


def credit_of(step, size, state, p=None):
    """The credit of the only parameter of a step."""
    params = p or {'w': jnp.asarray(drawn(I, size))}
    learner = braintrace.compile(
        step, 'd_rtrl', params, state, jnp.asarray(drawn(B, I))
    )
    (credit,) = learner.report.credits
    return credit.context


def centred(y):
    return y - y.mean(axis=-1, keepdims=True)


@jax.custom_jvp
def own_softmax(y):
    return jax.nn.softmax(y)


own_softmax.defjvp(lambda p, t: jax.jvp(jax.nn.softmax, p, t))


def some_rounds(x, one, h):
    return jax.lax.fori_loop(0, 1 + (x.sum() > 0).astype(int), one, h)


TOO_MANY = {
    'a mean': (lambda y, h, x: h + centred(y), 50),
    'a mean of all samples': (lambda y, h, x: h + y.mean(), 100),
    'a branch': (
        lambda y, h, x: h + jax.lax.cond(x.sum() > 0, centred, lambda y: y, y),
        50,
    ),
    'a loop': (
        lambda y, h, x: jax.lax.scan(
            lambda h, _: (h + centred(y), None), h, None, length=2
        )[0],
        50,
    ),
    'a loop of unknown length': (
        lambda y, h, x: some_rounds(x, lambda k, h: 0.9 * h + centred(y), h),
        50,
    ),
    'a call': (lambda y, h, x: h + own_softmax(y), 50),
    'a call in a branch': (
        lambda y, h, x: h + jax.lax.cond(x.sum() > 0, own_softmax, jnp.tanh, y),
        50,
    ),
    'a sort': (lambda y, h, x: h + jnp.sort(y, axis=-1), 50),
    'branches together': (
        lambda y, h, x: (
            h + jax.lax.cond(x.sum() > 0, jnp.tanh, lambda y: jnp.roll(y, 1, -1), y)
        ),
        20,
    ),
    'shared branches together': (
        lambda y, h, x: (
            h
            + jax.lax.cond(
                x.sum() > 0, lambda y: y[:, :1] + 0 * h, lambda y: y[:, 1:2] + 0 * h, y
            )
        ),
        20,
    ),
    'rounds together': (
        lambda y, h, x: jax.lax.scan(
            lambda h, y: (h + jnp.tanh(y), None), h, jnp.moveaxis(y, 1, 0)[..., None]
        )[0],
        50,
    ),
}


@pytest.mark.parametrize('name', TOO_MANY)
def test_too_many_pairs_are_cut_and_counted(name):
    new, pairs = TOO_MANY[name]

    def step(p, s, x):
        h = new(x @ p['w'], 0.9 * s['h'], x)
        return {'h': h}, h

    credit = credit_of(step, 5, {'h': jnp.zeros((B, 5))})
    assert credit['credit'] in ('local', 'instantaneous')
    assert f'{pairs} pairs' in credit['reason']


def test_pairs_of_all_uses_are_counted_together():
    def step(p, s, x):
        k = x @ p['w']
        m = 0.9 * s['m'] + k[:, :, None] * k[:, None, :]
        return {'m': m}, m

    # Each element reaches a row and a column, which meet once.
    credit = credit_of(step, 4, {'m': jnp.zeros((B, 4, 4))})
    assert '56 pairs' in credit['reason']


def test_a_value_that_is_summed_and_shared_in_a_branch_is_cut_with_what_to_write():
    def step(p, s, x):
        y = x @ p['w']

        def both():
            summed = y[:, :4].reshape(B, 2, 2).sum(-1)
            shared = jnp.broadcast_to(y[:, 4:5], (B, 2))
            return jnp.concatenate([summed, shared], axis=1)

        h = 0.9 * s['h'] + jax.lax.cond(x.sum() > 0, both, lambda: -s['h'])
        return {'h': h}, h

    credit = credit_of(step, 6, {'h': jnp.zeros((B, 4))})
    assert 'a product each' in credit['reason']


def test_weights_of_a_mapped_branch_are_data():
    """JAX masks the weights of a branch by the choice of every sample: each of three elements a sample reaches five
    positions. The other weights keep their gradient."""
    learner, step = compiled('weights_in_branches', 'd_rtrl', mapped=True)
    o = oracle_of('weights_in_branches', mapped=True)
    found = learner.etrace_grad(o.xs, o.ys, step_fn=step, reduction='sum')
    credit = {r.context['name']: r.context for r in learner.report.credits}
    assert '30 pairs' in credit['w_g']['reason']
    assert_equal(*({k: g[k] for k in ('w', 'out')} for g in (found, o.bptt())))
