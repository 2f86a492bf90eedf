"""Values that several positions read: traced by pairs, equal to BPTT, however they run.

Every model keeps positions apart across time, so D-RTRL's gradient is BPTT's. The
oracle is `jax.grad` of a plain scan.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace

B, D, N, T = 2, 3, 4, 8


def normal(seed, *shape):
    return 0.5 * np.random.default_rng(seed).normal(size=shape).astype('float32')


def selective_ssm(p, s, x):
    """Δ, B and C from the input; states (b, d, n)."""
    delta = jax.nn.softplus(x @ p['w_delta'] + p['b_delta'])
    b, c = x @ p['w_b'], x @ p['w_c']
    decay = jnp.exp(-delta[:, :, None] * jnp.exp(p['log_a']))
    h = decay * s['h'] + (delta * x)[:, :, None] * b[:, None, :]
    return {'h': h}, (h * c[:, None, :]).sum(-1) + p['skip'] * x


def linear_attention(p, s, x):
    """Keys and values of two heads, a decay a head; states (b, head, k, v)."""
    k = (x @ p['w_k']).reshape(B, 2, 3)
    v = (x @ p['w_v']).reshape(B, 2, 2)
    q = (x @ p['w_q']).reshape(B, 2, 3)
    gate = jax.nn.sigmoid(x @ p['w_g'] + p['b_g'])
    m = gate[:, :, None, None] * s['m'] + jnp.einsum('bhk,bhv->bhkv', k, v)
    return {'m': m}, jnp.einsum('bhk,bhkv->bhv', q, m).reshape(B, -1)


def outer_product_memory(p, s, x):
    """A fast-weight memory, written by a product with its own surprise."""
    k, v = jnp.tanh(x @ p['w_k']), x @ p['w_v']
    m = 0.9 * s['m'] + p['rate'] * k[:, :, None] * v[:, None, :]
    return {'m': m}, jnp.einsum('bk,bkv->bv', jnp.tanh(x @ p['w_q']), m)


def shared_drive(p, s, x):
    """One learned drive for all units."""
    drive = jnp.tanh(x @ p['w'] + p['b'])
    h = p['a'] * s['h'] + drive
    return {'h': h}, h @ p['out']


def shared_gate(p, s, x):
    """One gate for all units; its own recurrence is local to each unit."""
    gate = jax.nn.sigmoid(x @ p['w_g'])
    h = gate * s['h'] + (1 - gate) * jnp.tanh(x @ p['w'])
    return {'h': h}, h @ p['out']


def neuromodulator(p, s, x):
    """A scalar by a learned product scales what all units learn of their input."""
    level = jax.nn.softplus(x @ p['w_m'])[:, None]
    h = 0.8 * s['h'] + level * (x @ p['w'])
    return {'h': h}, jnp.tanh(h) @ p['out']


def initial_by_flag(p, s, x):
    """The first input switches the learned initial state on."""
    flag = x[:, :1] > 5
    h = jnp.where(flag, jnp.tanh(p['h0']), s['h'])
    h = 0.9 * h + jnp.tanh(x[:, 1:]) @ p['w']
    return {'h': h}, h @ p['out']


def initial_by_counter(p, s, x):
    """A counter switches the learned initial state on."""
    h = jnp.where(s['count'] == 0, p['h0'] * p['scale'], s['h'])
    h = 0.9 * h + x @ p['w']
    return {'h': h, 'count': s['count'] + 1}, h @ p['out']


def head_gates(p, s, x):
    """A gate for each head of a flat state."""
    gate = jnp.repeat(jax.nn.sigmoid(x @ p['w_g']), 2, axis=-1)
    h = gate * s['h'] + x @ p['w']
    return {'h': h}, h @ p['out']


def complex_drive(p, s, x):
    """A complex drive for all units of a complex recurrence."""
    drive = (x @ p['w']) * jnp.exp(1j * p['phase'])
    h = jnp.exp(1j * p['omega']) * 0.9 * s['h'] + drive
    return {'h': h}, jnp.real(h) @ p['out']


def dendrites_and_drive(p, s, x):
    """One product: branches of two units, and a drive that two others share."""
    y, lead = jnp.tanh(x @ p['w'] + p['b']), x.shape[:-1]
    soma = y[..., :4].reshape(*lead, 2, 2).sum(-1)
    drive = jnp.broadcast_to(y[..., 4:], (*lead, 2))
    h = p['a'] * s['h'] + jnp.concatenate([soma, drive, x @ p['rest']], axis=-1)
    return {'h': h}, h @ p['out']


# ------------------------------------------- shared inside branches, loops and calls


def gate_in_a_branch(p, s, x):
    """A value made outside is shared in one branch; the other has its own decay."""
    y = x @ p['w_g']
    gated = lambda h: jax.nn.sigmoid(y) * h
    h = jax.lax.cond(x.sum() > 0, gated, lambda h: 0.7 * h, s['h'])
    h = h + x @ p['w']
    return {'h': h}, h @ p['out']


def weights_in_branches(p, s, x):
    """The products that are shared are in the branches themselves."""
    gated = lambda h: jax.nn.sigmoid(x @ p['w_g']) * h + x @ p['w']
    driven = lambda h: 0.7 * h + jnp.tanh(x @ p['w_g'])
    h = jax.lax.cond(x.sum() > 0, gated, driven, s['h'])
    return {'h': h}, h @ p['out']


def nested_switch(p, s, x):
    """Branches of branches that share in different ways, one not at all."""
    y, zeros = x @ p['w_g'], jnp.zeros_like(s['h'])
    inner = lambda: jax.lax.cond(x.max() > 1, lambda: y * s['h'], lambda: zeros - y)
    cases = [lambda: y + zeros, inner, lambda: zeros]
    drive = jax.lax.switch((jnp.abs(x).sum() * 2).astype(int) % 3, cases)
    h = 0.8 * s['h'] + 0.3 * drive + x @ p['w']
    return {'h': h}, h @ p['out']


def gate_in_a_loop(p, s, x):
    """Small steps with one gate for all units, by a product of each small step."""

    def small(h, k):
        gate = jax.nn.sigmoid((k * x) @ p['w_g'])
        return gate * h + 0.1 * (x @ p['w']), None

    h, _ = jax.lax.scan(small, s['h'], jnp.arange(3.0))
    return {'h': h}, h @ p['out']


def drive_carried_by_a_loop(p, s, x):
    """A drive for all units that small steps change and leave behind."""

    def small(carry, _):
        drive, h = carry
        return (jnp.tanh(p['gain'] * drive), 0.9 * h + drive), drive

    carry = (x @ p['w_g'], s['h'])
    (drive, h), drives = jax.lax.scan(small, carry, None, length=3)
    h = h + x @ p['w'] + drive * drives[1]
    return {'h': h}, h @ p['out']


def branch_in_a_loop(p, s, x):
    """Branches of small steps share the product of the step."""

    def small(h, k):
        y = (k * x) @ p['w_g']
        gated, driven = (lambda: jax.nn.sigmoid(y) * h), (lambda: h + y)
        return jax.lax.cond(k > 1, gated, driven), None

    h, _ = jax.lax.scan(small, s['h'], jnp.arange(3.0))
    h = h + x @ p['w']
    return {'h': h}, h @ p['out']


@jax.custom_jvp
def spread(y):
    """One value for five units, with its own derivative."""
    return jnp.broadcast_to(jnp.tanh(y), (*y.shape[:-1], 5))


@spread.defjvp
def _spread_jvp(primals, tangents):
    slope = 1 - jnp.tanh(primals[0]) ** 2
    shape = (*primals[0].shape[:-1], 5)
    return spread(*primals), jnp.broadcast_to(slope * tangents[0], shape)


def shared_by_a_call(p, s, x):
    """A call with its own derivative shares, alone and in a branch."""
    y = x @ p['w_g']
    more = jax.lax.cond(x.sum() > 0, lambda: spread(2 * y), lambda: 0.1 * s['h'])
    h = 0.8 * s['h'] + spread(y) + more + x @ p['w']
    return {'h': h}, h @ p['out']


def memory_in_a_branch(p, s, x):
    """An outer-product memory that is written in one branch only."""
    k, v = x @ p['w_k'], x @ p['w_v']
    write = lambda m: 0.9 * m + k[..., :, None] * v[..., None, :]
    m = jax.lax.cond(x.sum() > 0, write, lambda m: 0.5 * m, s['m'])
    return {'m': m}, jnp.einsum('...k,...kv->...v', jnp.tanh(k), m)


SHARED = {'w_g': normal(0, D, 1), 'w': normal(1, D, 5), 'out': normal(2, 5, 2)}
INSIDE = {
    f.__name__: (f, SHARED, {'h': np.zeros((B, 5), 'float32')}, D)
    for f in (
        gate_in_a_branch,
        weights_in_branches,
        nested_switch,
        gate_in_a_loop,
        branch_in_a_loop,
        shared_by_a_call,
    )
}
INSIDE['drive_carried_by_a_loop'] = (
    drive_carried_by_a_loop,
    {**SHARED, 'gain': np.float32(1.2)},
    {'h': np.zeros((B, 5), 'float32')},
    D,
)
INSIDE['memory_in_a_branch'] = (
    memory_in_a_branch,
    {'w_k': normal(0, D, 4), 'w_v': normal(1, D, 3)},
    {'m': np.zeros((B, 4, 3), 'float32')},
    D,
)


def first_inputs_flag(x):
    x = np.array(x)
    x[:, :, 0] = 0
    x[0, :, 0] = 9
    return x


MODELS = {
    'selective_ssm': (
        selective_ssm,
        {
            'w_delta': normal(0, D, D),
            'b_delta': normal(1, D),
            'w_b': normal(2, D, N),
            'w_c': normal(3, D, N),
            'log_a': normal(4, D, N),
            'skip': normal(5, D),
        },
        {'h': np.zeros((B, D, N), 'float32')},
        D,
    ),
    'linear_attention': (
        linear_attention,
        {
            'w_k': normal(0, D, 6),
            'w_v': normal(1, D, 4),
            'w_q': normal(2, D, 6),
            'w_g': normal(3, D, 2),
            'b_g': normal(4, 2),
        },
        {'m': np.zeros((B, 2, 3, 2), 'float32')},
        D,
    ),
    'outer_product_memory': (
        outer_product_memory,
        {
            'w_k': normal(0, D, 4),
            'w_v': normal(1, D, 3),
            'w_q': normal(2, D, 4),
            'rate': np.float32(0.7),
        },
        {'m': np.zeros((B, 4, 3), 'float32')},
        D,
    ),
    'shared_drive': (
        shared_drive,
        {
            'w': normal(0, D, 1),
            'b': normal(1, 1),
            'a': normal(2, 5),
            'out': normal(3, 5, 2),
        },
        {'h': np.zeros((B, 5), 'float32')},
        D,
    ),
    'shared_gate': (
        shared_gate,
        {'w_g': normal(0, D, 1), 'w': normal(1, D, 5), 'out': normal(2, 5, 2)},
        {'h': np.zeros((B, 5), 'float32')},
        D,
    ),
    'neuromodulator': (
        neuromodulator,
        {'w_m': normal(0, D), 'w': normal(1, D, 5), 'out': normal(2, 5, 2)},
        {'h': np.zeros((B, 5), 'float32')},
        D,
    ),
    'initial_by_flag': (
        initial_by_flag,
        {'h0': normal(0, 5), 'w': normal(1, D - 1, 5), 'out': normal(2, 5, 2)},
        {'h': np.zeros((B, 5), 'float32')},
        D,
    ),
    'initial_by_counter': (
        initial_by_counter,
        {
            'h0': normal(0, 5),
            'scale': np.float32(1.3),
            'w': normal(1, D, 5),
            'out': normal(2, 5, 2),
        },
        {'h': np.zeros((B, 5), 'float32'), 'count': np.int32(0)},
        D,
    ),
    'head_gates': (
        head_gates,
        {'w_g': normal(0, D, 3), 'w': normal(1, D, 6), 'out': normal(2, 6, 2)},
        {'h': np.zeros((B, 6), 'float32')},
        D,
    ),
    'dendrites_and_drive': (
        dendrites_and_drive,
        {
            'w': normal(0, D, 5),
            'b': normal(1, 5),
            'a': normal(2, 8),
            'rest': normal(3, D, 4),
            'out': normal(4, 8, 2),
        },
        {'h': np.zeros((B, 8), 'float32')},
        D,
    ),
    'complex_drive': (
        complex_drive,
        {
            'w': normal(0, D, 1),
            'phase': np.float32(0.3),
            'omega': normal(1, 5),
            'out': normal(2, 5, 2),
        },
        {'h': np.zeros((B, 5), 'complex64')},
        D,
    ),
    **INSIDE,
}


def inputs_of(name, size):
    x = 2 * normal(10, T, B, size)
    return first_inputs_flag(x) if name == 'initial_by_flag' else x


def bptt(step, params, state, xs, ys):
    """The gradient by reverse mode through a scan."""

    def loss(params):
        def one(state, at):
            x, y = at
            state, out = step(params, state, x)
            return state, jnp.mean((out - y) ** 2)

        return jnp.sum(jax.lax.scan(one, state, (xs, ys))[1])

    return jax.grad(loss)(params)


def setting(name):
    step, params, state, size = MODELS[name]
    params, state = jax.tree.map(jnp.asarray, (params, state))
    xs = jnp.asarray(inputs_of(name, size))
    out = jax.eval_shape(step, params, state, xs[0])[1]
    ys = jnp.asarray(normal(11, T, *out.shape))
    return step, params, state, xs, ys


def gradient(name, rule='d_rtrl', block=None, halves=False, fresh=True, **options):
    step, params, state, xs, ys = setting(name)
    if block is not None:
        options['block'] = block
    learner = braintrace.compile(step, rule, params, state, xs[0], **options)
    step_fn = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    parts = [slice(0, 3), slice(3, T)] if halves else [slice(0, T)]
    grads = [
        learner.etrace_grad(
            xs[p], ys[p], step_fn=step_fn, fresh=fresh and not halves, reduction='sum'
        )
        for p in parts
    ]
    return learner, jax.tree.map(lambda *g: sum(g), *grads)


def distance(found, wanted):
    flat = lambda tree: np.concatenate(
        [np.asarray(x).ravel() for x in jax.tree.leaves(tree)]
    )
    a, b = flat(found), flat(wanted)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


WAYS = {
    'two passes': {},
    'carried': {'fresh': False},
    'halves': {'halves': True},
    'blocks of 3': {'fresh': False, 'block': 3},
    'step by step': {'fresh': False, 'block': 1},
}


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('name', MODELS)
def test_equals_bptt(name, way):
    learner, found = gradient(name, **WAYS[way])
    wanted = bptt(*setting(name))
    assert distance(found, wanted) < 2e-6
    classes = {r.context['credit'] for r in learner.report.credits}
    assert classes == {'exact'}


@pytest.mark.parametrize('way', ['one sample', 'mapped', 'mapped, carried'])
@pytest.mark.parametrize('name', INSIDE)
def test_inside_branches_and_loops_of_one_sample(name, way):
    """Each sample chooses its own branch."""
    step, params, state, xs, ys = setting(name)
    one = jax.tree.map(lambda x: x[0], state)
    mapped = jax.vmap(step, in_axes=(None, 0, 0))
    if way == 'one sample':
        options, xs, ys = {}, xs[:, 0], ys[:, 0]
        wanted = bptt(step, params, one, xs, ys)
    else:
        options = {'vmap': True, 'batch_size': B}
        wanted = bptt(mapped, params, state, xs, ys)
    learner = braintrace.compile(
        step,
        'd_rtrl',
        params,
        one,
        xs[0] if way == 'one sample' else xs[0, 0],
        **options,
    )
    found = learner.etrace_grad(
        xs,
        ys,
        step_fn=lambda x, y: jnp.mean((learner(x) - y) ** 2),
        fresh='carried' not in way,
        reduction='sum',
    )
    credit = {r.context['name']: r.context for r in learner.report.credits}
    if name == 'weights_in_branches' and way != 'one sample':
        # JAX masks the weights of a branch by the choice of every sample, so that they
        # are data: each of three elements a sample reaches five positions.
        assert '30 pairs, a trace holds up to 10' in credit['w_g']['reason']
        found, wanted = ({k: g[k] for k in ('w', 'out')} for g in (found, wanted))
    else:
        assert {c['credit'] for c in credit.values()} == {'exact'}
    assert distance(found, wanted) < 2e-6


@pytest.mark.parametrize('name', [n for n in MODELS if n not in INSIDE])
def test_a_trace_is_no_larger_than_pairs_times_inputs(name):
    learner, _ = gradient(name, fresh=False)
    _, params, state, _, _ = setting(name)
    positions = max(np.size(x) for x in jax.tree.leaves(state))
    for name in params:
        for trace in learner.traces_of((name,)).values():
            assert all(np.size(x) <= positions * D for x in jax.tree.leaves(trace))


def expanded(p, s, x):
    """`shared_gate` with the weight of the gate written out for every unit."""
    gate = jax.nn.sigmoid(x @ jnp.repeat(p['w_g'], 5, axis=1))
    h = gate * s['h'] + (1 - gate) * jnp.tanh(x @ p['w'])
    return {'h': h}, h @ p['out']


@pytest.mark.parametrize('rule', ['d_rtrl', 'pp_prop', 'ottt', 'rflo', 'eprop'])
def test_rules_treat_a_shared_value_like_one_written_out(rule):
    """Σ over positions that share an element, of what each position gives alone."""
    options = {'pp_prop': {'decay_or_rank': 0.8}, 'rflo': {'leak': 0.7}}.get(rule, {})
    _, found = gradient('shared_gate', rule, fresh=False, **options)
    _, *rest = MODELS['shared_gate']
    MODELS['expanded'] = (expanded, *rest)
    try:
        _, wanted = gradient('expanded', rule, fresh=False, **options)
    finally:
        del MODELS['expanded']
    assert distance(found, wanted) < 2e-6


@jax.custom_vjp
def spike(v):
    return (v > 0).astype(v.dtype)


spike.defvjp(lambda v: (spike(v), v), lambda v, bar: (bar / (1 + jnp.abs(v)) ** 2,))


def test_a_shared_spike_without_forward_mode():
    def step(p, s, x):
        drive = spike(x @ p['w'])
        h = 0.9 * s['h'] + drive * p['gain']
        return {'h': h}, h @ p['out']

    params = {'w': normal(0, D, 1), 'gain': normal(1, 5), 'out': normal(2, 5, 2)}
    MODELS['spike'] = (step, params, {'h': np.zeros((B, 5), 'float32')}, D)
    try:
        for way in ({'fresh': True}, {'fresh': False, 'block': 3}):
            learner, found = gradient('spike', **way)
            assert distance(found, bptt(*setting('spike'))) < 2e-6
            assert learner.report.credits[0].context['credit'] == 'exact'
    finally:
        del MODELS['spike']


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

    params, state = {'w': normal(0, D, 5)}, {'h': np.zeros((B, 5), 'float32')}
    args = jax.tree.map(jnp.asarray, (params, state, normal(1, B, D)))
    report = braintrace.compile(step, 'd_rtrl', *args).report
    (credit,) = report.credits
    assert credit.context['credit'] in ('local', 'instantaneous')
    assert f'{pairs} pairs, a trace holds up to 10' in credit.context['reason']


def test_pairs_of_all_uses_are_counted_together():
    def step(p, s, x):
        k = x @ p['w']
        m = 0.9 * s['m'] + k[:, :, None] * k[:, None, :]
        return {'m': m}, m

    params, state = {'w': normal(0, D, 4)}, {'m': np.zeros((B, 4, 4), 'float32')}
    args = jax.tree.map(jnp.asarray, (params, state, normal(1, B, D)))
    (credit,) = braintrace.compile(step, 'd_rtrl', *args).report.credits
    # Each element reaches a row and a column, which meet once.
    assert '56 pairs, a trace holds up to 32' in credit.context['reason']


def summed_and_shared(summed, shared):
    return summed.reshape(B, 2, 2).sum(-1), jnp.broadcast_to(shared, (B, 2))


@pytest.mark.parametrize('shapes', [{'w': 5}, {'a': 4, 'b': 1}])
def test_a_value_may_be_summed_and_shared(shapes):
    """Four elements share two positions, one reaches two more: of one product, and of a
    product each, joined and parted again."""

    def step(p, s, x):
        y = jnp.concatenate([x @ w for w in p.values()], axis=1)
        more = summed_and_shared(y[:, :4], y[:, 4:5])
        h = 0.9 * s['h'] + jnp.concatenate(more, axis=1)
        return {'h': h}, h

    params = {k: normal(n, D, size) for n, (k, size) in enumerate(shapes.items())}
    state, xs = {'h': np.zeros((B, 4), 'float32')}, normal(2, 8, B, D)
    ys = normal(3, 8, B, 4)
    params, state, xs, ys = jax.tree.map(jnp.asarray, (params, state, xs, ys))
    learner = braintrace.compile(step, 'd_rtrl', params, state, xs[0])
    loss = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    found = learner.etrace_grad(xs, ys, step_fn=loss, reduction='sum', fresh=False)
    error = distance(found, bptt(step, params, state, xs, ys))
    assert {c.context['credit'] for c in learner.report.credits} == {'exact'}
    assert error < 1e-6


def test_a_value_that_is_summed_and_shared_in_a_branch_is_cut_with_what_to_write():
    def step(p, s, x):
        y = x @ p['w']
        more = lambda: jnp.concatenate(summed_and_shared(y[:, :4], y[:, 4:5]), axis=1)
        h = 0.9 * s['h'] + jax.lax.cond(x.sum() > 0, more, lambda: -s['h'])
        return {'h': h}, h

    params, state = {'w': normal(0, D, 6)}, {'h': np.zeros((B, 4), 'float32')}
    args = jax.tree.map(jnp.asarray, (params, state, normal(1, B, D)))
    (credit,) = braintrace.compile(step, 'd_rtrl', *args).report.credits
    assert 'give them a product each' in credit.context['reason']


def test_old_states_reach_no_other_position_through_a_shared_value():
    """The gate reads all units: its weights are traced, the way through units is cut."""

    def step(p, s, x):
        gate = jax.nn.sigmoid(x @ p['w_g'] + jax.lax.stop_gradient(s['h']) @ p['u_g'])
        h = gate * s['h'] + x @ p['w']
        return {'h': h}, h @ p['out']

    def uncut(p, s, x):
        gate = jax.nn.sigmoid(x @ p['w_g'] + s['h'] @ p['u_g'])
        h = gate * s['h'] + x @ p['w']
        return {'h': h}, h @ p['out']

    params = {
        'w_g': normal(0, D, 1),
        'u_g': normal(1, 5, 1),
        'w': normal(2, D, 5),
        'out': normal(3, 5, 2),
    }
    state = {'h': np.zeros((B, 5), 'float32')}
    MODELS['uncut'], MODELS['cut'] = (uncut, params, state, D), (step, params, state, D)
    try:
        for way in WAYS.values():
            _, found = gradient('uncut', **way)
            assert distance(found, bptt(*setting('cut'))) < 2e-6
        assert distance(found, bptt(*setting('uncut'))) > 1e-3
    finally:
        del MODELS['uncut'], MODELS['cut']


class Gated(brainstate.nn.Module):
    """`shared_gate` as a module."""

    def __init__(self):
        super().__init__()
        self.w_g = brainstate.ParamState(jnp.asarray(normal(0, D, 1)))
        self.w = brainstate.ParamState(jnp.asarray(normal(1, D, 5)))
        self.h = brainstate.HiddenState(jnp.asarray(normal(2, B, 5)))

    def update(self, x):
        gate = jax.nn.sigmoid(x @ self.w_g.value)
        new = gate * self.h.value + (1 - gate) * jnp.tanh(x @ self.w.value)
        self.h.value = new
        return new


def test_the_executor_gives_the_derivative_by_the_element_that_a_position_reads():
    model, x = Gated(), jnp.asarray(normal(3, B, D))
    executor = braintrace.ETraceGraphExecutor(model)
    executor.compile_graph(x)
    sites = executor.graph.hidden_param_op_relations
    _, _, _, h2w, _ = executor.solve_h2w_h2h_jacobian(x)
    found = {r.path[0]: (r.sites[0], j) for r, j in zip(sites, h2w, strict=True)}
    site, jacobian = found['w_g']
    assert site.y_var.aval.shape == (B, 1)
    np.testing.assert_array_equal(site.y_sources[0].reshape(B, 5), [[0] * 5, [1] * 5])
    assert (site.y_positions[0] == -2).all()
    y = x @ model.w_g.value
    gate, candidate = jax.nn.sigmoid(y), jnp.tanh(x @ model.w.value)
    slope = gate * (1 - gate) * (model.h.value - candidate)
    np.testing.assert_allclose(
        jacobian.hidden_to_y[0][..., 0], slope, rtol=1e-5, atol=1e-6
    )
    site, jacobian = found['w']
    assert site.y_sources == (None,)
    np.testing.assert_array_equal(
        site.y_positions[0].ravel(), np.arange(site.y_positions[0].size)
    )


class DendritesAndDrive(brainstate.nn.Module):
    """`dendrites_and_drive` without its other units, as a module."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.asarray(normal(0, D, 5)))
        self.h = brainstate.HiddenState(jnp.asarray(normal(2, B, 4)))

    def update(self, x):
        y = jnp.tanh(x @ self.w.value)
        more = summed_and_shared(y[:, :4], y[:, 4:])
        self.h.value = 0.9 * self.h.value + jnp.concatenate(more, axis=1)
        return self.h.value


def test_the_executor_gives_both_derivatives_of_a_value_that_is_summed_and_shared():
    model, x = DendritesAndDrive(), jnp.asarray(normal(3, B, D))
    executor = braintrace.ETraceGraphExecutor(model)
    executor.compile_graph(x)
    (site,) = executor.graph.hidden_param_op_relations[0].sites
    np.testing.assert_array_equal(site.y_positions[0][0], [0, 0, 1, 1, -2])
    np.testing.assert_array_equal(site.y_sources[0][:4], [-2, -2, 4, 4])
    _, _, _, (jacobian,), _ = executor.solve_h2w_h2h_jacobian(x)
    single, shared = (j[..., 0] for j in jacobian.hidden_to_y[0])
    slope = 1 - jnp.tanh(x @ model.w.value) ** 2
    np.testing.assert_allclose(single, slope.at[:, 4].set(0), rtol=1e-5)
    np.testing.assert_allclose(shared[:, 2:], slope[:, 4:].repeat(2, 1), rtol=1e-5)
    assert not shared[:, :2].any()
