"""The layers: equal to `brainstate.nn` or to the formula they state, and marked."""

import brainevent
import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import nn, ops

DENSE = np.array([[1.0, 0, 2, 0], [0, 3, 0, 0], [4, 0, 0, 5]], np.float32)
SPARSE = brainevent.CSR.fromdense(jnp.asarray(DENSE))
MASK = jnp.asarray(DENSE != 0, jnp.float32)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def drawn(shape):
    """An initialiser that compiles nothing."""
    return normal(
        sum(shape) if isinstance(shape, tuple) else shape, *np.atleast_1d(shape)
    )


def constant(shape):
    return jnp.full(shape, 0.3)


def close(got, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        got,
        expected,
    )


def parameters(module):
    return {
        path: state.value
        for path, state in module.states(brainstate.ParamState).items()
    }


def hidden(module):
    return {
        path: state.value
        for path, state in module.states(brainstate.HiddenState).items()
    }


def copy_parameters(source, target):
    values, states = parameters(source), target.states(brainstate.ParamState)
    assert values.keys() == states.keys()
    for path, state in states.items():
        assert jax.tree.map(jnp.shape, state.value) == jax.tree.map(
            jnp.shape, values[path]
        )
        state.value = values[path]


def jit(fn):
    """Compiled without optimisation: compiling is where these tests spend their time."""
    return brainstate.transform.jit(
        fn, compiler_options={'xla_backend_optimization_level': 0}
    )


def run(module, xs):
    """Outputs of one call per input, states carried along."""
    return jit(lambda: brainstate.transform.for_loop(module, xs))()


def gradients(*pairs):
    """For each (module, inputs by step): parameter gradients of one scalar of all outputs, and the outputs."""

    def gradient(module, xs):
        def loss():
            outputs = brainstate.transform.for_loop(module, xs)
            return jnp.sum(jnp.sin(outputs)), outputs

        return brainstate.transform.grad(
            loss, module.states(brainstate.ParamState), has_aux=True
        )()

    return jit(lambda: [gradient(*pair) for pair in pairs])()


def marks(module, x):
    """Marks in the name stacks of one traced call, by op name."""
    jaxpr, _ = brainstate.transform.make_jaxpr(lambda value: module(value))(x)
    stacks = {str(eqn.source_info.name_stack) for eqn in jaxpr.eqns}
    return {
        part[len(ops.MARK) :]
        for s in stacks
        for part in s.split('/')
        if part.startswith(ops.MARK)
    }


# ---------------------------------------------------------------- layers

W = {'w_init': drawn}
WB = {'w_init': drawn, 'b_init': drawn}

# id: (name, positional arguments, keywords, shape of one input, mark)
LAYERS = {
    'Linear': ('Linear', (3, 4), WB, (3,), 'matmul'),
    'Linear masked': (
        'Linear',
        (3, 4),
        {'w_init': drawn, 'w_mask': MASK, 'b_init': None},
        (3,),
        'matmul',
    ),
    'Linear 2d': ('Linear', ((2, 3), (2, 4)), WB, (2, 3), 'matmul'),
    'SignedWLinear': ('SignedWLinear', (3, 4), W, (3,), 'matmul'),
    'SignedWLinear signs': (
        'SignedWLinear',
        (3, 4),
        {**W, 'w_sign': 1 - 2 * MASK},
        (3,),
        'matmul',
    ),
    'ScaledWSLinear': ('ScaledWSLinear', (3, 4), WB, (3,), 'matmul'),
    'ScaledWSLinear bare': (
        'ScaledWSLinear',
        (3, 4),
        {**W, 'b_init': None, 'ws_gain': False},
        (3,),
        'matmul',
    ),
    'SparseLinear': (
        'SparseLinear',
        (SPARSE,),
        {'b_init': drawn},
        (3,),
        'sparse_matmul',
    ),
    'Conv1d': ('Conv1d', ((6, 3), 4, 3), {**WB, 'stride': 2}, (6, 3), 'conv'),
    'Conv1d masked': ('Conv1d', ((6, 3), 4, 3), {**W, 'w_mask': drawn}, (6, 3), 'conv'),
    'Conv2d': (
        'Conv2d',
        ((4, 4, 2), 4, (3, 2)),
        {**W, 'padding': 'VALID', 'groups': 2},
        (4, 4, 2),
        'conv',
    ),
    'Conv2d first': (
        'Conv2d',
        ((2, 4, 4), 3, 3),
        {**WB, 'channel_first': True},
        (2, 4, 4),
        'conv',
    ),
    'Conv3d': (
        'Conv3d',
        ((3, 3, 3, 2), 2, 2),
        {**W, 'padding': 1},
        (3, 3, 3, 2),
        'conv',
    ),
}


@pytest.mark.parametrize('case', LAYERS)
def test_layer_equals_the_one_of_brainstate(case):
    name, args, kwargs, shape, mark = LAYERS[case]
    ours, theirs = (
        getattr(nn, name)(*args, **kwargs),
        getattr(brainstate.nn, name)(*args, **kwargs),
    )
    assert isinstance(ours, type(theirs))
    copy_parameters(ours, theirs)
    x = normal(0, 2, *shape)
    got, expected, (_, unbatched) = gradients(
        (ours, x[None]), (theirs, x[None]), (ours, x)
    )
    close(got, expected)
    close(unbatched, got[1][0])
    assert unbatched.shape[1:] == ours.out_size
    assert marks(ours, x) == {mark}


def test_grouped_linear():
    layer = nn.GroupedLinear(2, 3, 4, **WB)
    params, x = layer.weight.value, normal(0, 5, 2, 3)
    expected = (
        np.stack([np.asarray(x)[:, g] @ params['weight'][g] for g in range(2)], 1)
        + params['bias']
    )
    close(layer(x), expected)
    close(layer(x[0]), expected[0])
    assert (layer.in_size, layer.out_size) == ((2, 3), (2, 4))
    assert marks(layer, x) == {'grouped_matmul'}
    whole = nn.GroupedLinear(2, 3, 4, w_init=jnp.ones((2, 3, 4)), b_init=None)
    assert whole(x[0]).shape == (2, 4)
    with pytest.raises(ValueError, match='Fix: '):
        nn.GroupedLinear((2, 3), (2, 4), 1)


def test_lora_is_scaled_by_its_rank():
    layer, x = nn.LoRA(3, 2, 4, kernel_init=drawn), normal(0, 5, 3)
    params = layer.weight.value
    close(layer(x), x @ (params['lora_a'] @ params['lora_b']) / 2)
    assert marks(layer, x) == {'lora_matmul'}


def test_lora_adds_to_its_base_module():
    base = nn.Linear(3, 4, **WB)
    layer, x = nn.LoRA(3, 2, 4, base_module=base, kernel_init=drawn), normal(0, 3)
    close(layer(x), nn.LoRA.update(layer, x))
    layer.base_module = None
    alone = layer(x)
    layer.base_module = base
    close(layer(x), alone + base(x))
    assert marks(layer, x) == {'lora_matmul', 'matmul'}


EMBEDDINGS = [(4, {}), ((2, 3), {'padding_idx': 1}), (4, {'freeze': True})]
EMBEDDINGS += [(4, {'scale_grad_by_freq': True}), ((2, 3), {'max_norm': 0.5})]


@pytest.mark.parametrize(('size', 'kwargs'), EMBEDDINGS, ids=str)
def test_embedding_equals_the_one_of_brainstate(size, kwargs):
    ours, theirs = (
        m.Embedding(5, size, embedding_init=drawn, **kwargs)
        for m in (nn, brainstate.nn)
    )
    copy_parameters(ours, theirs)
    indices = jnp.array([[0, 1, 1], [4, 1, 2]])
    close(*gradients((ours, indices), (theirs, indices)))
    assert marks(ours, indices) == {'embedding'}
    assert ours(2).shape == ours.out_size


def test_units_pass_through_a_layer():
    layer = nn.Linear(3, 4, w_init=jnp.ones((3, 4)) * u.mS, b_init=jnp.ones(4) * u.uA)
    y = layer(jnp.ones((2, 3)) * u.mV)
    np.testing.assert_allclose(y.to_decimal(u.uA), 4.0 * np.ones((2, 4)), rtol=1e-6)


CONVOLUTIONS = {
    'Conv1d': (nn.Conv1d, ((6, 3), 4, 3), {}, 'NWC WIO NWC'),
    'Conv2d': (
        nn.Conv2d,
        ((4, 5, 2), 4, (3, 2)),
        {'groups': 2, 'padding': 'VALID'},
        'NHWC HWIO NHWC',
    ),
    'Conv2d first': (
        nn.Conv2d,
        ((2, 4, 4), 3, 3),
        {'channel_first': True, 'stride': 2},
        'NCHW HWIO NCHW',
    ),
    'Conv3d': (nn.Conv3d, ((3, 3, 3, 2), 2, 2), {}, 'NDHWC DHWIO NDHWC'),
}


def convolved(layer, layout, x, weight):
    """The layer's product of an x in mV and a kernel in mS by JAX alone: numbers in µA."""
    return jax.lax.conv_general_dilated(
        x.to_decimal(u.mV),
        weight.to_decimal(u.mS),
        layer.stride,
        layer.padding,
        dimension_numbers=tuple(layout.split()),
        feature_group_count=layer.groups,
    )


@pytest.mark.parametrize('case', CONVOLUTIONS)
def test_convolutions_take_kernels_with_units(case):
    kind, args, options, layout = CONVOLUTIONS[case]
    kernel = lambda shape: drawn(shape) * u.mS
    bias = lambda shape: drawn(shape) * u.nA
    mask = lambda shape: (jnp.arange(np.prod(shape)) % 3 > 0).reshape(shape)
    layer = kind(*args, **options, w_init=kernel, b_init=bias, w_mask=mask)
    x = normal(0, 2, *args[0]) * u.mV

    def plain(params):
        product = convolved(layer, layout, x, params['weight'] * layer.w_mask)
        return product + params['bias'].to_decimal(u.uA)

    y = layer(x)
    assert y.shape[1:] == layer.out_size
    params = layer.weight.value
    close(y.to_decimal(u.uA), plain(params))
    loss = lambda: jnp.sum(jnp.sin(layer(x).to_decimal(u.uA)))
    found = brainstate.transform.grad(loss, layer.weight)()
    expected = jax.grad(lambda params: jnp.sum(jnp.sin(plain(params))))(params)
    close(*map(jax.tree.leaves, (found, expected)))


class UnitConvolution(brainstate.nn.Module):
    """Leaky units driven by a convolution whose kernel has a unit."""

    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def init_state(self, batch_size=None):
        self.V = brainstate.HiddenState(jnp.zeros((batch_size, *self.conv.out_size)))

    def update(self, x):
        drive = self.conv(x * u.mV).to_decimal(u.uA)
        self.V.value = 0.8 * self.V.value + jnp.tanh(drive)
        return self.V.value


@pytest.mark.parametrize('case', CONVOLUTIONS)
def test_kernels_with_units_are_traced(case):
    kind, args, options, layout = CONVOLUTIONS[case]
    conv = kind(*args, **options, w_init=lambda shape: drawn(shape) * u.mS)
    xs = normal(0, 4, 2, *args[0])
    learner = braintrace.compile(UnitConvolution(conv), 'd_rtrl', xs[0], batch_size=2)
    step_fn = lambda x: jnp.mean(learner(x) ** 2)
    # Two halves, so that what the second knows of the first is in the traces.
    halves = [
        learner.etrace_grad(part, step_fn=step_fn, reduction='sum')
        for part in (xs[:2], xs[2:])
    ]
    found = jax.tree.map(lambda a, b: a + b, *halves)

    def loss(weight):
        V, total = jnp.zeros((2, *conv.out_size)), 0.0
        for x in xs:
            V = 0.8 * V + jnp.tanh(convolved(conv, layout, x * u.mV, weight))
            total += jnp.mean(V**2)
        return total

    expected = jax.grad(loss)(conv.weight.value['weight'])
    (gradient,) = found['conv', 'weight'].values()
    assert u.get_unit(gradient) == u.mS
    close(gradient.mantissa, expected.mantissa)


# ---------------------------------------------------------------- cells

# As brainstate's own, which joins the gates of some cells in one array.
GATES = {
    'ValinaRNNCell': {},
    'GRUCell': {'Wrz': ('Wr', 'Wz')},
    'MGUCell': {},
    'LSTMCell': {'W': ('Wi', 'Wg', 'Wf', 'Wo')},
    'URLSTMCell': {'W': ('Wf', 'Wr', 'Wu', 'Wo')},
}
CELLS = [*GATES, 'MinimalRNNCell', 'MiniGRU', 'MiniLSTM', 'CFNCell', 'LRUCell']
every_batch = pytest.mark.parametrize('batch', [None, 2], ids=['unbatched', 'batched'])


def steps(batch):
    lead = () if batch is None else (batch,)
    return normal(0, 3, *lead, 3)


def joined(name, values):
    """Values by path of one of our cells, as brainstate's cell of that name holds them."""
    values = dict(values)
    for whole, gates in GATES[name].items():
        parts = [values.pop((gate, 'weight')) for gate in gates]
        join = lambda *arrays: jnp.concatenate(arrays, axis=-1)
        values[whole, 'weight'] = jax.tree.map(join, *parts)
    return values


@pytest.mark.parametrize('name', GATES)
def test_cell_equals_the_one_of_brainstate_over_three_steps(name):
    kwargs = W if name == 'URLSTMCell' else WB
    ours, theirs = (
        getattr(m, name)(3, 4, state_init=constant, **kwargs)
        for m in (nn, brainstate.nn)
    )
    values, states = joined(name, parameters(ours)), theirs.states()
    assert values.keys() == parameters(theirs).keys()
    for path, value in values.items():
        states[path].value = value
    brainstate.nn.init_all_states(ours, 2)
    brainstate.nn.init_all_states(theirs, 2)
    assert hidden(ours).keys() == hidden(theirs).keys()
    xs = steps(2)
    got, expected = gradients((ours, xs), (theirs, xs))
    close((joined(name, got[0]), got[1]), expected)
    close(hidden(ours), hidden(theirs))
    ours.reset_state()
    close(run(ours, xs[:, 0]), got[1][:, 0])


@pytest.mark.parametrize('name', CELLS)
@every_batch
def test_states_and_marks_of_a_cell(name, batch):
    cell = getattr(nn, name)(3, 4, **({} if name == 'LRUCell' else W))
    brainstate.nn.init_all_states(cell, batch)
    expected = {
        'LSTMCell': {'c', 'h'},
        'URLSTMCell': {'c', 'h'},
        'LRUCell': {'h_re', 'h_im'},
    }.get(name, {'h'})
    assert {path[-1] for path in hidden(cell)} == expected
    shape = (4,) if batch is None else (batch, 4)
    assert all(value.shape == shape for value in hidden(cell).values())
    outputs = 3 if name == 'LRUCell' else 4
    assert (cell.in_size, cell.out_size) == ((3,), (outputs,))
    x = steps(batch)[0]
    element_wise = {'element_wise'} if name in ('URLSTMCell', 'LRUCell') else set()
    assert marks(cell, x) == {'matmul'} | element_wise
    cell.reset_state(7)
    assert all(value.shape == (7, 4) for value in hidden(cell).values())


def linear(layer, x):
    params = layer.weight.value
    return x @ np.asarray(params['weight']) + np.asarray(params['bias'])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def minimal_rnn(cell, x, h):
    z = linear(cell.phi, x)
    gate = sigmoid(linear(cell.W_u, np.concatenate([z, h], -1)))
    return gate * h + (1 - gate) * z


def mini_gru(cell, x, h):
    z = sigmoid(linear(cell.W_z, np.concatenate([x, h], -1)))
    return (1 - z) * h + z * linear(cell.W_x, x)


def mini_lstm(cell, x, h):
    xh = np.concatenate([x, h], -1)
    f, i = sigmoid(linear(cell.W_f, xh)), sigmoid(linear(cell.W_i, xh))
    return f * h + i * linear(cell.W_x, x)


def chaos_free(cell, x, h):
    xh = np.concatenate([x, h], -1)
    theta, eta = sigmoid(linear(cell.Wf, xh)), sigmoid(linear(cell.Wi, xh))
    return theta * np.tanh(h) + eta * np.tanh(linear(cell.Wh, x))


FORMULAS = {
    'MinimalRNNCell': minimal_rnn,
    'MiniGRU': mini_gru,
    'MiniLSTM': mini_lstm,
    'CFNCell': chaos_free,
}


@pytest.mark.parametrize('name', FORMULAS)
@every_batch
def test_cell_equals_its_published_formula_over_three_steps(name, batch):
    cell = getattr(nn, name)(3, 4, **WB, state_init=drawn)
    cell.init_state(batch)
    h, xs = np.asarray(cell.h.value), steps(batch)
    for x, y in zip(np.asarray(xs), run(cell, xs), strict=True):
        h = FORMULAS[name](cell, x, h)
        close(y, h)


def test_minimal_rnn_takes_a_function_in_place_of_its_linear_layer():
    cell = nn.MinimalRNNCell(4, 4, w_init=drawn, phi=jnp.tanh)
    cell.init_state()
    x = normal(0, 4)
    gate = jax.nn.sigmoid(cell.W_u(jnp.concatenate([jnp.tanh(x), cell.h.value])))
    close(cell(x), (1 - gate) * jnp.tanh(x))
    assert set(parameters(cell)) == {('W_u', 'weight')}
    with pytest.raises(TypeError, match='Fix: '):
        nn.MinimalRNNCell(3, 4, phi='tanh')


@every_batch
def test_lru_equals_a_complex_recurrence(batch):
    cell = nn.LRUCell(3, 4, r_min=0.4, r_max=0.9, max_phase=1.0)
    cell.init_state(batch)
    one = lambda value: np.asarray(jax.tree.leaves(value)[0])
    p = {path[0]: one(value) for path, value in parameters(cell).items()}
    lam = np.exp(-np.exp(p['nu_log']) + 1j * np.exp(p['theta_log']))
    assert np.all(
        (np.abs(lam) > 0.4)
        & (np.abs(lam) < 0.9)
        & (np.angle(lam) > 0)
        & (np.angle(lam) < 1)
    )
    close(np.exp(p['gamma_log']), np.sqrt(1 - np.abs(lam) ** 2))
    state, xs = np.zeros(4), steps(batch)
    for x, y in zip(np.asarray(xs), run(cell, xs), strict=True):
        state = lam * state + np.exp(p['gamma_log']) * (
            x @ (p['B_re'] + 1j * p['B_im'])
        )
        close(y, np.real(state @ (p['C_re'] + 1j * p['C_im'])) + x * p['D'])
    close((cell.h_re.value, cell.h_im.value), (np.real(state), np.imag(state)))


VARIANTS = pytest.mark.parametrize('linear', [True, False], ids=['linear', 'nonlinear'])


def rtu_by_hand(cell, params, xs):
    """States and outputs of an RTU as one complex recurrence, without its code."""
    nu, theta = params['nu_log',], params['theta_log',]
    lam = jnp.exp(-jnp.exp(nu) + 1j * jnp.exp(theta))
    weight = lambda name: params[name, 'weight']['weight']
    weights = weight('W_re') + 1j * weight('W_im')
    state, outputs = jnp.zeros((*xs.shape[1:-1], cell.units)), []
    parts = lambda z: jnp.concatenate([z.real, z.imag], -1)
    for x in xs:
        state = lam * state + jnp.sqrt(1 - jnp.abs(lam) ** 2) * (x @ weights)
        if not cell.linear:
            state = jnp.tanh(state.real) + 1j * jnp.tanh(state.imag)
        outputs.append(jnp.tanh(parts(state)) if cell.linear else parts(state))
    return state, jnp.stack(outputs)


@every_batch
@VARIANTS
def test_rtu_equals_a_complex_recurrence(linear, batch):
    cell = nn.RTU(3, 4, linear, r_min=0.4, r_max=0.9, max_phase=1.0)
    cell.init_state(batch)
    xs = steps(batch)
    state, outputs = rtu_by_hand(cell, parameters(cell), xs)
    close(run(cell, xs), outputs)
    close((cell.h_re.value, cell.h_im.value), (state.real, state.imag))
    assert (cell.in_size, cell.out_size) == ((3,), (8,))
    assert marks(cell, xs[0]) == {'matmul', 'element_wise'}
    size = np.exp(-np.exp(cell.nu_log.value))
    assert np.all((size > 0.4) & (size < 0.9))
    cell.reset_state(7)
    assert cell.h_re.value.shape == (7, 4)


@VARIANTS
def test_d_rtrl_of_an_rtu_is_bptt(linear):
    """Eight steps, batched, in two calls: the second has the first in its traces."""
    cell = nn.RTU(3, 4, linear)
    xs, ys = normal(0, 8, 2, 3), normal(1, 8, 2, 8)
    params = parameters(cell)
    learner = braintrace.compile(cell, 'd_rtrl', xs[0], batch_size=2)
    step_fn = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    halves = [
        learner.etrace_grad(xs[part], ys[part], step_fn=step_fn, reduction='sum')
        for part in (slice(4), slice(4, 8))
    ]
    found = jax.tree.map(lambda a, b: a + b, *halves)

    def loss(params):
        _, outputs = rtu_by_hand(cell, params, xs)
        return jnp.sum(jnp.mean((outputs - ys) ** 2, (1, 2)))

    expected = jax.grad(loss)(params)
    assert found.keys() == expected.keys()
    for path, gradient in expected.items():
        got, wanted = jax.tree.leaves((found[path], gradient))
        assert np.max(np.abs(wanted)) > 1e-3
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


def test_activation_by_name_or_function():
    for activation in ('sigmoid', jax.nn.sigmoid):
        cell = nn.ValinaRNNCell(3, 4, **W, activation=activation)
        cell.init_state()
        x = normal(0, 3)
        close(cell(x), jax.nn.sigmoid(x @ cell.W.weight.value['weight'][:3]))
    for activation in ('no_such_function', 3):
        with pytest.raises(ValueError, match='Fix: '):
            nn.GRUCell(3, 4, activation=activation)


# ---------------------------------------------------------------- read-out


@every_batch
def test_leaky_rate_readout(batch):
    with brainstate.environ.context(dt=0.5 * u.ms):
        layer = nn.LeakyRateReadout(3, 4, 2.0 * u.ms, drawn)
        layer.init_state(batch)
        assert isinstance(layer.r, brainstate.HiddenState)
        r, xs = np.zeros(layer.r.value.shape), steps(batch)
        for x, y in zip(np.asarray(xs), run(layer, xs), strict=True):
            r = np.exp(-0.25) * r + x @ np.asarray(layer.W.value)
            close(y, r)
        assert marks(layer, xs[0]) == {'matmul'}
        layer.reset_state(batch)
        assert not np.any(layer.r.value)


def test_leaky_rate_readout_wants_one_unit_of_time():
    layer = nn.LeakyRateReadout(3, 4, 2.0, drawn)
    layer.init_state()
    with brainstate.environ.context(dt=0.5):
        assert layer(jnp.ones(3)).shape == (4,)
    with (
        brainstate.environ.context(dt=0.5 * u.ms),
        pytest.raises(ValueError, match='Fix: '),
    ):
        layer(jnp.ones(3))


# ---------------------------------------------------------------- the namespace and refusals


def test_other_names_of_brainstate_pass_through():
    assert braintrace.nn.ReLU is brainstate.nn.ReLU
    assert set(brainstate.nn.__all__) | set(nn.__all__) <= set(dir(nn))
    for name in brainstate.nn.__all__:
        assert getattr(nn, name) is not None
        assert (getattr(nn, name) is getattr(brainstate.nn, name)) == (
            name not in nn.__all__
        )
    for name in ('NoSuchLayer', '_module'):
        with pytest.raises(AttributeError, match=name):
            getattr(nn, name)


def test_an_input_of_the_wrong_shape_is_refused():
    cell = nn.GRUCell(3, 4, **W)
    cell.init_state()
    for layer, shape in (
        (nn.Linear(3, 4, **W), (2,)),
        (cell, (5,)),
        (nn.Conv1d((6, 3), 4, 3, **W), (5, 3)),
    ):
        with pytest.raises(ValueError, match='Fix: '):
            layer(jnp.ones(shape))
