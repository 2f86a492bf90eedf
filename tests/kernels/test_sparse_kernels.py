"""Sparse products run by kernels on CPUs: numbers equal those of dense matrices and of the plain operations."""

import brainevent
import brainstate
import brainunit
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace.compat import is_var
from braintrace.operations import kernels, run_equation, sparse_weights, synapses
from braintrace.program.normal import normal_form

ROWS, COLUMNS, FAN, B, T = 5, 6, 3, 4, 6
close = {'rtol': 1e-5, 'atol': 1e-6}


def rng(seed=0):
    return np.random.default_rng(seed)


def structure(layout, shape):
    """Index arrays of a matrix of a shape, and the row and column of each synapse."""
    by_row = layout in ('csr', 'units', 'per_pre')
    major, minor = shape if by_row else shape[::-1]
    indices = rng(major).integers(0, minor, (major, FAN)).astype(np.int32)
    lengths = np.full(major, FAN)
    if layout in ('csr', 'units', 'csc'):
        lengths[1], lengths[2] = 0, 2 * FAN  # an empty row, and a long one
        indices = indices.reshape(-1)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        arrays = (indices, ends)
    else:
        arrays = (indices,)
    outer = np.repeat(np.arange(major), lengths)
    inner = indices.reshape(-1)
    return arrays, (outer, inner) if by_row else (inner, outer)


KINDS = {
    'csr': brainevent.CSR,
    'units': brainunit.sparse.CSR,
    'csc': brainevent.CSC,
    'per_pre': brainevent.FixedNumPerPre,
    'per_post': brainevent.FixedNumPerPost,
}


def sparse_and_dense(layout, shape, shared):
    """Both kinds of matrix as functions of the weights, and weights."""
    arrays, (row, column) = structure(layout, shape)
    size = (1,) if shared else arrays[0].shape
    weights = jnp.asarray(rng(1).normal(size=size), jnp.float32)
    sparse = lambda w: KINDS[layout]((w, *arrays), shape=shape)
    dense = lambda w: jnp.zeros(shape).at[row, column].add(w.reshape(-1))
    return sparse, dense, weights


def spikes(*shape, seed=2):
    return jnp.asarray(rng(seed).random(shape) < 0.4, jnp.float32)


def by_kernels(function, *args):
    """A function whose equations run as the compiler runs them; and names of what ran."""
    closed = normal_form(jax.make_jaxpr(function)(*args))

    def run(*args):
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(closed.jaxpr.invars, args, strict=True))
        read = lambda v: env[v] if is_var(v) else v.val
        for eqn in closed.jaxpr.eqns:
            results = run_equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return read(closed.jaxpr.outvars[0])

    return run


def product(matrix, side, events, mapped):
    """x @ M, or M @ x for the other side; samples first in x and y."""

    def one(w, x):
        given = brainevent.BinaryArray(x) if events else x
        if side == 'left':
            return given @ matrix(w)
        return (matrix(w) @ (given.T if x.ndim == 2 else given)).T

    return jax.vmap(one, (None, 0)) if mapped else one


PRODUCTS = [
    ('csr', 'left', False, False, (B,), False),
    ('csr', 'right', False, False, (B,), False),
    ('csc', 'left', False, False, (B,), False),
    ('csr', 'left', True, False, (B,), False),
    ('csr', 'right', True, False, (B,), False),
    ('csc', 'left', True, False, (B,), True),
    ('csr', 'left', False, True, (B,), False),
    ('csc', 'left', True, True, (B,), False),
    ('csr', 'left', False, False, (), False),
    ('csr', 'right', True, False, (), False),
    ('units', 'left', False, False, (B,), False),
    ('units', 'right', False, False, (), False),
    ('csc', 'left', False, True, (), False),
    ('csr', 'left', True, False, (B,), True),
    ('per_pre', 'left', True, False, (B,), False),
    ('per_pre', 'left', True, True, (), False),
    ('per_post', 'left', True, False, (B,), False),
    ('per_post', 'left', True, True, (), False),
]


@pytest.mark.parametrize(
    ('layout', 'side', 'events', 'shared', 'samples', 'mapped'), PRODUCTS
)
def test_products_and_their_derivatives(layout, side, events, shared, samples, mapped):
    shape = (ROWS, COLUMNS)
    sparse, dense, w = sparse_and_dense(layout, shape, shared)
    x = spikes(*samples, shape[0] if side == 'left' else shape[1])
    plain = product(sparse, side, events, mapped)
    ours = by_kernels(plain, w, x)
    names = str(jax.make_jaxpr(ours)(w, x))
    assert 'to_columns' in names or 'to_rows' in names
    oracle = lambda w, x: x @ (dense(w) if side == 'left' else dense(w).T)
    y, pull = jax.vjp(ours, w, x)
    expected, expected_pull = jax.vjp(oracle, w, x)
    np.testing.assert_allclose(y, expected, **close)
    assert jax.eval_shape(plain, w, x) == jax.eval_shape(ours, w, x)
    bar = jnp.asarray(rng(3).normal(size=y.shape), jnp.float32)
    for found, wanted in zip(pull(bar), expected_pull(bar), strict=True):
        np.testing.assert_allclose(found, wanted, **close)
    tangents = (jnp.ones_like(w), bar.sum() * jnp.ones_like(x))
    found, wanted = (jax.jvp(f, (w, x), tangents)[1] for f in (ours, oracle))
    np.testing.assert_allclose(found, wanted, **close)


@pytest.mark.parametrize('events', [False, True])
def test_products_equal_the_plain_operation(events):
    sparse, _, w = sparse_and_dense('csr', (ROWS, COLUMNS), False)
    x = spikes(B, ROWS)
    plain = product(sparse, 'left', events, False)
    ours = by_kernels(plain, w, x)
    np.testing.assert_allclose(ours(w, x), plain(w, x), **close)
    found, wanted = (jax.grad(loss(f))(w, x) for f in (ours, plain))
    np.testing.assert_allclose(found, wanted, **close)


@pytest.mark.parametrize('of', [0, 1])
def test_derivatives_of_second_order(of):
    sparse, dense, w = sparse_and_dense('csr', (ROWS, COLUMNS), False)
    x = jnp.asarray(rng(4).normal(size=(B, ROWS)), jnp.float32)
    ours = by_kernels(product(sparse, 'left', False, False), w, x)
    size = lambda f: lambda w: jnp.sum(jax.grad(loss(f), of)(w, x) ** 2)
    found = jax.grad(size(ours))(w)
    wanted = jax.grad(size(lambda w, x: x @ dense(w)))(w)
    np.testing.assert_allclose(found, wanted, **close)


def loss(f):
    return lambda w, x: jnp.sum(jnp.sin(f(w, x)))


def test_weights_and_data_may_both_be_mapped():
    arrays, _ = structure('csr', (ROWS, COLUMNS))
    ws = jnp.asarray(rng(5).normal(size=(3, len(arrays[0]))), jnp.float32)
    xs = jnp.asarray(rng(6).normal(size=(3, ROWS, B)), jnp.float32)
    one = lambda w, x: synapses.to_columns(w, *arrays, x, COLUMNS)
    found = jax.vmap(one)(ws, xs)
    np.testing.assert_allclose(found, jnp.stack(list(map(one, ws, xs))), **close)


# ---------------------------------------------------------------- models


class Net(brainstate.nn.Module):
    """Leaky units that reach each other by synapses, with one dense input."""

    def __init__(
        self, layout='csr', events=True, shared=False, dense=False, adapts=False
    ):
        super().__init__()
        sparse, full, w = sparse_and_dense(layout, (ROWS, ROWS), shared)
        self.matrix = full if dense else sparse
        self.events, self.adapts = events and not dense, adapts
        self.w = brainstate.ParamState(0.3 * w)
        self.feed = brainstate.ParamState(
            jnp.asarray(rng(7).normal(size=(3, ROWS)), jnp.float32)
        )

    def init_state(self, batch_size=None, **kwargs):
        samples = () if batch_size is None else (batch_size,)
        for name in ('V', 'a') if self.adapts else ('V',):
            setattr(self, name, brainstate.HiddenState(jnp.zeros((*samples, ROWS))))

    def update(self, x):
        fired = braintrace.networks.fire(self.V.value - 0.5)
        given = brainevent.BinaryArray(fired) if self.events else fired
        drive = x @ self.feed.value + given @ self.matrix(self.w.value)
        V = 0.8 * self.V.value + jnp.tanh(drive)
        if self.adapts:
            self.a.value = 0.9 * self.a.value + 0.2 * self.V.value * drive
            V = V - self.a.value
        self.V.value = V
        return V


XS = jnp.asarray(rng(8).normal(size=(T, B, 3)), jnp.float32)
WAYS = jnp.asarray(rng(9).normal(size=(T, B, ROWS)), jnp.float32)


def gradients(rule, *, batch=B, vmap=False, window=None, **options):
    """The gradient of two calls, the second of which starts with the traces of the first."""
    net = Net(**options)
    given = {'decay_or_rank': 0.9} if rule == 'pp_prop' else {}
    xs, ways = (XS, WAYS) if batch else (XS[:, 0], WAYS[:, 0])
    learner = braintrace.compile(net, rule, xs[0], batch_size=batch, vmap=vmap, **given)
    step_fn = lambda x, way: jnp.sum(way * learner(x) ** 2)
    half = T // 2
    first = learner.etrace_grad(xs[:half], ways[:half], step_fn=step_fn)
    second = learner.etrace_grad(xs[half:], ways[half:], step_fn=step_fn)
    return [first[('w',)], first[('feed',)], second[('w',)], second[('feed',)]]


MODELS = {
    'float': {'events': False},
    'events': {},
    'columns': {'layout': 'csc'},
    'shared': {'shared': True},
    'per_pre': {'layout': 'per_pre'},
    'per_post': {'layout': 'per_post'},
    'two_states': {'adapts': True},
}


@pytest.mark.parametrize('rule', ['pp_prop', 'd_rtrl'])
@pytest.mark.parametrize('name', MODELS)
def test_rules_give_what_they_give_for_a_dense_matrix(name, rule):
    """Weights of the dense matrix are made of those of the synapses."""
    found = gradients(rule, **MODELS[name])
    wanted = gradients(rule, dense=True, **MODELS[name])
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert np.abs(b).max() > 1e-3


@pytest.mark.parametrize(
    ('rule', 'batch', 'vmap'), [('d_rtrl', None, False), ('pp_prop', B, True)]
)
def test_samples_mapped_and_alone(rule, batch, vmap):
    found = gradients(rule, batch=batch, vmap=vmap)
    wanted = gradients(rule, batch=batch, vmap=vmap, dense=True)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('rule', ['pp_prop', 'd_rtrl'])
@pytest.mark.parametrize(('adapts', 'least'), [(False, 1), (True, 1), (True, B + 1)])
def test_large_arrays_and_many_samples(rule, adapts, least, monkeypatch):
    """Values are laid out by a kernel, and factors of many samples step by step.

    ``least``: samples from which on products are gathered by column."""
    from braintrace.operations.kernels.cpu import layouts

    monkeypatch.setattr(sparse_weights, 'MANY_SAMPLES', B)
    monkeypatch.setattr(kernels, 'LARGE', 0)
    monkeypatch.setattr(kernels, 'LEAST_SAMPLES', least)
    monkeypatch.setattr(layouts, 'LEAST', 1)
    found = gradients(rule, adapts=adapts)
    wanted = gradients(rule, adapts=adapts, dense=True)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


class Driven(brainstate.nn.Module):
    """Leaky units with an input that is always the same."""

    def __init__(self, shared, dense):
        super().__init__()
        sparse, full, w = sparse_and_dense('csr', (ROWS, ROWS), shared)
        self.matrix = full if dense else sparse
        self.w = brainstate.ParamState(w)

    def init_state(self, batch_size=None, **kwargs):
        self.V = brainstate.HiddenState(jnp.zeros((B, ROWS)))

    def update(self):
        x = jnp.linspace(-1, 1, B * ROWS).reshape(B, ROWS)
        self.V.value = 0.8 * self.V.value + x @ self.matrix(self.w.value)
        return self.V.value


@pytest.mark.parametrize(
    ('rule', 'shared'), [('pp_prop', False), ('d_rtrl', True), ('d_rtrl', False)]
)
def test_an_input_that_no_data_reaches(rule, shared):
    found = []
    for dense in (False, True):
        given = {'decay_or_rank': 0.9} if rule == 'pp_prop' else {}
        learner = braintrace.compile(Driven(shared, dense), rule, **given)
        step_fn = lambda way, learner=learner: jnp.sum(way * learner() ** 2)
        learner.etrace_grad(WAYS, step_fn=step_fn)
        found.append(learner.etrace_grad(WAYS, step_fn=step_fn)[('w',)])
    assert np.abs(found[1]).max() > 1e-3
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)


def test_without_llvm_the_plain_operations_run(monkeypatch):
    found = gradients('d_rtrl', adapts=True)
    monkeypatch.setattr(kernels, '_is_installed', lambda package: False)
    assert not synapses.has_kernels(np.float32)
    for a, b in zip(found, gradients('d_rtrl', adapts=True), strict=True):
        np.testing.assert_allclose(a, b, **close)


def local_loss(w, feed, xs, ways, start, dense):
    """The loss of a window of the local step: no gradient through the recurrent input."""
    V = start
    total = 0.0
    for x, way in zip(xs, ways, strict=True):
        fired = jax.lax.stop_gradient((V > 0.5).astype(jnp.float32))
        V = 0.8 * V + jnp.tanh(x @ feed + fired @ dense(w))
        total = total + jnp.sum(way * V**2)
    return total


@pytest.mark.parametrize('events', [False, True])
def test_d_rtrl_against_jax_grad_of_both_windows(events):
    """Traces carry all credit from window to window: the sum is that of one long window."""
    first_w, first_feed, second_w, second_feed = gradients('d_rtrl', events=events)
    _, dense, _ = sparse_and_dense('csr', (ROWS, ROWS), False)
    net = Net(events=events)
    found = jax.grad(local_loss, (0, 1))(
        net.w.value, net.feed.value, XS, WAYS, jnp.zeros((B, ROWS)), dense
    )
    half = T // 2  # a call gives the mean over its steps
    np.testing.assert_allclose(
        half * (first_w + second_w), found[0], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        half * (first_feed + second_feed), found[1], rtol=1e-4, atol=1e-5
    )


def test_bptt_against_jax_grad():
    net = Net(events=False)
    _, dense, _ = sparse_and_dense('csr', (ROWS, ROWS), False)
    learner = braintrace.compile(net, 'bptt', XS[0], batch_size=B)
    found = learner.etrace_grad(
        XS, WAYS, step_fn=lambda x, way: jnp.sum(way * learner(x) ** 2), reduction='sum'
    )

    def total(w, feed):
        V, total = jnp.zeros((B, ROWS)), 0.0
        for x, way in zip(XS, WAYS, strict=True):
            fired = braintrace.networks.fire(V - 0.5)
            V = 0.8 * V + jnp.tanh(x @ feed + fired @ dense(w))
            total = total + jnp.sum(way * V**2)
        return total

    wanted = jax.grad(total, (0, 1))(net.w.value, net.feed.value)
    np.testing.assert_allclose(found[('w',)], wanted[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[('feed',)], wanted[1], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- programs


def test_the_program_has_kernels_on_cpu_and_exports_for_others():
    from torture.export import HARMLESS, calls_in, program_of

    net = Net(events=False)
    learner = braintrace.compile(net, 'd_rtrl', XS[0], batch_size=B)
    program, given = program_of(learner, (XS[:4],), False)
    flat, tree = jax.tree.flatten(given)
    run = jax.jit(
        lambda *leaves: jax.tree.leaves(program(*jax.tree.unflatten(tree, leaves)))
    )
    names = str(jax.make_jaxpr(run)(*flat))
    assert 'to_columns' in names
    assert 'at_synapses' in names
    here = calls_in(run.lower(*flat).as_text())
    assert any('braintrace_to_columns' in name for name in here)
    text = jax.export.export(run, platforms=('cuda', 'tpu'))(*flat).mlir_module()
    assert not [name for name in calls_in(text) if not HARMLESS.search(name)]


# ---------------------------------------------------------------- vectors of samples


@pytest.mark.parametrize('columns', [7, 9000])
@pytest.mark.parametrize('samples', [1, 5, 8, 33, 43])
def test_products_for_any_number_of_samples(samples, columns):
    # 9,000 columns of 33 samples are above what stays in a core's own cache.
    lengths = np.array([3, 0, 9, 1, 14])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    indices = rng(4).integers(0, columns, starts[-1]).astype(np.int32)
    weights = rng(5).normal(size=len(indices)).astype(np.float32)
    dense = np.zeros((len(lengths), columns))
    row = np.repeat(np.arange(len(lengths)), lengths)
    np.add.at(dense, (row, indices), weights)
    x = rng(6).normal(size=(len(lengths), samples)).astype(np.float32)
    x[2] = 0
    z = rng(7).normal(size=(columns, samples)).astype(np.float32)
    y = synapses.to_columns(weights, indices, starts, x, columns)
    np.testing.assert_allclose(y, dense.T @ x, **close)
    y = synapses.to_rows(weights, indices, starts, z)
    np.testing.assert_allclose(y, dense @ z, rtol=1e-5, atol=1e-5)
    found = synapses.at_synapses(indices, starts, x, z)
    wanted = np.sum(x[row] * z[indices], axis=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('shared', [False, True])
@pytest.mark.parametrize('of_spikes', [False, True])
@pytest.mark.parametrize('samples', [1, 8, 32, 43])
def test_large_products_for_any_number_of_samples(
    samples, of_spikes, shared, monkeypatch
):
    """A matrix that is known is gathered by column, with x as bits or as numbers."""
    monkeypatch.setattr(kernels, 'LARGE', 0)
    monkeypatch.setattr(kernels, 'LEAST_SAMPLES', 1)
    rows, columns, count = 37, 150, 400
    row = np.sort(rng(3).integers(0, rows, count))
    starts = np.searchsorted(row, np.arange(rows + 1)).astype(np.int32)
    indices = rng(4).integers(0, columns, count).astype(np.int32)
    weights = rng(5).normal(size=1 if shared else count).astype(np.float32)
    dense = np.zeros((rows, columns))
    np.add.at(dense, (row, indices), weights)
    x = rng(6).normal(size=(rows, samples)).astype(np.float32)
    z = rng(7).normal(size=(columns, samples)).astype(np.float32)
    x, z = ((v > 0).astype(np.float32) if of_spikes else v for v in (x, z))
    to_columns = lambda w, x: synapses.to_columns(w, indices, starts, x, columns)
    text = str(jax.make_jaxpr(to_columns)(weights, x))
    assert 'ByColumn' in text
    near = {'rtol': 1e-4, 'atol': 1e-4}
    y, pull = jax.vjp(jax.jit(lambda x: to_columns(weights, x)), x)
    np.testing.assert_allclose(y, dense.T @ x, **near)
    np.testing.assert_allclose(pull(jnp.asarray(z))[0], dense @ z, **near)
    if not shared:  # one weight for all is multiplied afterwards
        (found,) = jax.vjp(lambda w: to_columns(w, x), weights)[1](jnp.asarray(z))
        np.testing.assert_allclose(found, np.sum(x[row] * z[indices], axis=1), **near)
    y = synapses.to_rows(weights, indices, starts, z)
    np.testing.assert_allclose(y, dense @ z, **near)


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize(
    'shape', [(8, 8), (9, 21), (21, 9), (16, 40), (7, 30), (43, 8)]
)
def test_transposed_copies(shape, dtype):
    from braintrace.operations.kernels.cpu.layouts import transposed

    with jax.enable_x64(dtype == 'float64'):
        x = jnp.asarray(rng().normal(size=shape), dtype)
        np.testing.assert_array_equal(jax.jit(transposed)(x), np.asarray(x).T)


@pytest.mark.parametrize('is_sorted', [False, True])
@pytest.mark.parametrize('spikes', [False, True])
@pytest.mark.parametrize('neurons', [6, 64, 150])
@pytest.mark.parametrize('samples', [1, 8, 43, 64])
def test_visits_for_any_number_of_samples(samples, neurons, spikes, is_sorted):
    from braintrace.operations.kernels.cpu import synapse_visit

    sources, count = 37, 40
    pre = rng(3).integers(0, sources, count).astype(np.int32)
    post = rng(4).integers(0, neurons, count).astype(np.int32)
    order = np.arange(count) if is_sorted else np.argsort(post, kind='stable')
    post = np.sort(post) if is_sorted else post
    ends = np.cumsum(np.bincount(post, minlength=neurons))
    starts = np.concatenate([[0], ends]).astype(np.int32)
    normal = lambda seed, *shape: rng(seed).normal(size=shape).astype(np.float32)
    x = normal(1, T, samples, sources)
    x = (x > 0).astype(np.float32) if spikes else x
    row, y_bar = normal(2, T, samples, neurons), normal(10, T, samples, neurons)
    factors = {s: normal(3 + s[0], samples, neurons) for s in [(0, 0), (1, 0)]}
    credit = normal(6, samples, neurons)
    old = [normal(s, count, samples) for s in (7, 8)]
    by_neuron = lambda v: jnp.asarray(np.swapaxes(v, -1, -2))
    new, gradient = synapse_visit(
        {s: jnp.asarray(e) for s, e in enumerate(old)},
        by_neuron(x),
        {0: by_neuron(row)},
        jax.tree.map(by_neuron, factors),
        {1: by_neuron(credit)},
        by_neuron(y_bar),
        None,
        (pre[order], starts, None if is_sorted else order),
    )
    near = {'rtol': 1e-4, 'atol': 1e-4}
    drive = np.einsum('tke,tke->ek', row[..., post], x[..., pre])
    at_post = lambda values: values[:, post].T
    np.testing.assert_allclose(new[0], at_post(factors[0, 0]) * old[0] + drive, **near)
    np.testing.assert_allclose(new[1], at_post(factors[1, 0]) * old[0], **near)
    wanted = np.sum(at_post(credit) * old[1], 1)
    wanted += np.einsum('tke,tke->e', y_bar[..., post], x[..., pre])
    np.testing.assert_allclose(gradient, wanted, **near)


def test_a_module_may_hold_its_sparse_matrix():
    """brainevent keeps a work space in a matrix, which must not hold a tracer."""
    numbers = np.random.default_rng(0)
    targets = jnp.asarray(numbers.integers(0, 12, 36), jnp.int32)
    starts = jnp.arange(0, 37, 3, dtype=jnp.int32)
    weights = jnp.asarray(numbers.normal(size=36), jnp.float32)
    make = lambda: brainevent.CSR((weights, targets, starts), shape=(12, 12))

    class Reservoir(brainstate.nn.Module):
        def __init__(self, held):
            super().__init__()
            self.held = make() if held else None
            self.out = brainstate.ParamState(jnp.full((12, 2), 0.1))

        def init_state(self, batch_size=None, **kwargs):
            self.h = brainstate.HiddenState(jnp.zeros((batch_size, 12)))

        def update(self, x):
            matrix = make() if self.held is None else self.held
            spikes = brainevent.BinaryArray((self.h.value > 0.5).astype('float32'))
            self.h.value = 0.8 * self.h.value + x + spikes @ matrix
            return self.h.value @ self.out.value

    xs = jnp.asarray(numbers.normal(size=(9, 4, 12)), jnp.float32)
    found = []
    for held in (True, False):
        net = Reservoir(held)
        brainstate.nn.init_all_states(net, 4)
        brainstate.transform.for_loop(net, xs)  # a loop of the user's own
        learner = braintrace.compile(net, 'd_rtrl', xs[0], batch_size=4)
        step = lambda x, learner=learner: jnp.mean(learner(x) ** 2)
        outputs = [learner.evaluate(xs), learner.evaluate(xs[:5])]
        learner.etrace_evolve(xs)
        gradients = learner.etrace_grad(xs, step_fn=step, fresh=True)
        losses = learner.etrace_online(xs, step_fn=step, optimizer=optax.sgd(0.1))
        found.append((outputs, gradients, losses, learner.evaluate(xs)))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize('samples', [1, 7])
@pytest.mark.parametrize('sums_steps', [False, True])
def test_visits_by_row(samples, sums_steps):
    """The kernel for few samples, in the order of the matrix."""
    from braintrace.operations.kernels.cpu import synapse_visit

    starts = np.array([0, 3, 3, 8], np.int32)
    post = rng(4).integers(0, 6, 8).astype(np.int32)
    pre = np.repeat(np.arange(3), np.diff(starts))
    normal = lambda seed, *shape: rng(seed).normal(size=shape).astype(np.float32)
    x, row = normal(1, T, 3, samples), normal(2, T, 6, samples)
    y_bar = normal(10, T, 6, samples) if sums_steps else None
    factors = {(0, 0): normal(3, 6, samples), (1, 0): normal(5, 6, samples)}
    credit, old = normal(6, 6, samples), [normal(s, 8, samples) for s in (7, 8)]
    traces = {s: jnp.asarray(e) for s, e in enumerate(old)}
    given = jax.tree.map(jnp.asarray, (x, {0: row}, factors, {1: credit}, y_bar))
    new, gradient = synapse_visit(traces, *given, (post, starts, True), ())
    drive = np.einsum('tek,tek->ek', row[:, post], x[:, pre])
    near = {'rtol': 1e-4, 'atol': 1e-5}
    np.testing.assert_allclose(new[0], factors[0, 0][post] * old[0] + drive, **near)
    np.testing.assert_allclose(new[1], factors[1, 0][post] * old[0], **near)
    wanted = np.sum(credit[post] * old[1], 1)
    if sums_steps:
        wanted += np.einsum('tek,tek->e', y_bar[:, post], x[:, pre])
    np.testing.assert_allclose(gradient, wanted, **near)


@pytest.mark.parametrize('name', MODELS)
def test_both_orders_of_a_visit_give_the_same(name, monkeypatch):
    """Carried traces of few samples: in the order of the matrix, and in that of
    ``post``, which many samples have."""
    from braintrace.operations.kernels.cpu import trace_visits as visits

    found = []
    for few in (0, 10**6):
        monkeypatch.setattr(visits, 'FEW_SAMPLES', few)
        found.append(gradients('d_rtrl', **MODELS[name]))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        assert np.any(a)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
