"""Operations, layers, configurations, parts and primitives."""

import inspect
import warnings

import brainevent
import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
from checking import (
    CELLS,
    B,
    H,
    I,
    Net,
    Op,
    X,
    check,
    each,
    graph_of,
    ones,
    raises,
    ready,
)

import braintrace
from braintrace import ETraceConfig, nn

CSR = brainevent.CSR(
    (ones(6), jnp.array([0, 1, 2, 3, 0, 1]), jnp.array([0, 2, 4, 6])), shape=(I, H)
)


# ---------------------------------------------------------------- cells


@each(*CELLS)
def check_cell(cell):
    net = getattr(nn, cell)(in_size=I, out_size=H)
    net.init_state(batch_size=B)
    assert net(X).shape == (B, H)
    assert net.in_size == (I,)
    assert net.out_size == (H,)
    net.reset_state(batch_size=B)
    assert all(not np.any(s.value) for s in net.states(brainstate.HiddenState).values())
    net.init_state()
    assert net(X[0]).shape == (H,)


@each(*CELLS)
def check_cell_options(cell):
    options = {'w_init': braintools_init(), 'name': 'cell'}
    net = getattr(nn, cell)(I, H, **options)
    assert net.name == 'cell'
    net.init_state(B)
    assert net(X).shape == (B, H)


def braintools_init():
    import braintools

    return braintools.init.XavierNormal()


@each('ValinaRNNCell', 'GRUCell', 'MGUCell', 'LSTMCell', 'URLSTMCell', 'CFNCell')
def check_activation(cell):
    for activation in ('tanh', 'relu', jnp.tanh):
        net = ready(getattr(nn, cell)(I, H, activation=activation))
        assert net(X).shape == (B, H)


@check
def check_lru():
    net = ready(nn.LRUCell(I, H))
    assert net(X).shape == (B, I)
    assert net.h_re.value.shape == net.h_im.value.shape == (B, H)


@check
def check_readout():
    net = ready(nn.LeakyRateReadout(I, H, tau=5.0 * u.ms))
    assert net(X).shape == (B, H)
    assert net.r.value.shape == (B, H)
    assert 0 < float(net.decay) < 1


# ---------------------------------------------------------------- layers

LAYERS = {
    'Linear': (lambda: nn.Linear(I, H), (B, I), (B, H)),
    'Linear_without_bias': (lambda: nn.Linear(I, H, b_init=None), (B, I), (B, H)),
    'Linear_mask': (lambda: nn.Linear(I, H, w_mask=ones((I, H))), (B, I), (B, H)),
    'SignedWLinear': (lambda: nn.SignedWLinear(I, H), (B, I), (B, H)),
    'ScaledWSLinear': (lambda: nn.ScaledWSLinear(I, H), (B, I), (B, H)),
    'GroupedLinear': (lambda: nn.GroupedLinear(2, I, H), (B, 2, I), (B, 2, H)),
    'LoRA': (lambda: nn.LoRA(I, 2, H), (B, I), (B, H)),
    'SparseLinear': (lambda: nn.SparseLinear(CSR), (B, I), (B, H)),
    'Conv1d': (lambda: nn.Conv1d((5, I), H, 3), (B, 5, I), (B, 5, H)),
    'Conv2d': (lambda: nn.Conv2d((5, 5, I), H, 3), (B, 5, 5, I), (B, 5, 5, H)),
    'Conv2d_stride': (
        lambda: nn.Conv2d((6, 6, I), H, (3, 3), stride=2, padding='SAME'),
        (B, 6, 6, I),
        (B, 3, 3, H),
    ),
    'Conv3d': (
        lambda: nn.Conv3d((4, 4, 4, I), H, 3),
        (B, 4, 4, 4, I),
        (B, 4, 4, 4, H),
    ),
}


@each(*LAYERS)
def check_layer(name):
    make, x, y = LAYERS[name]
    layer = make()
    assert layer(ones(x)).shape == y
    assert isinstance(layer.weight, brainstate.ParamState)
    assert len(layer.states(brainstate.ParamState)) == 1


@each('Linear', 'Conv1d', 'GroupedLinear', 'LoRA', 'SparseLinear')
def check_layer_is_traced(name):
    make, x, y = LAYERS[name]
    layer = make()
    net = Op(lambda s, v: s.layer(v), y[1:])
    net.layer = layer
    (relation,) = graph_of(net, ones(x)).hidden_param_op_relations
    assert relation.path == ('layer', 'weight')


@check
def check_embedding():
    layer = nn.Embedding(5, H)
    assert layer(jnp.array([1, 2])).shape == (2, H)
    assert layer.weight.value.shape == (5, H)
    assert layer.num_embeddings == 5


@each('Linear', 'Dropout', 'ReLU', 'LayerNorm', 'MaxPool2d', 'Flatten')
def check_passed_through(name):
    assert hasattr(nn, name)


# ---------------------------------------------------------------- operations

W = jnp.arange(12.0).reshape(I, H) / 10
b = jnp.arange(4.0)


@each(False, True)
def check_matmul(batch):
    x = X if batch else X[0]
    got = braintrace.matmul(x, W, b)
    np.testing.assert_allclose(got, x @ W + b, rtol=1e-5, atol=1e-6)
    got = braintrace.matmul(x, W, b, weight_fn=jnp.abs, bias_fn=jnp.negative)
    np.testing.assert_allclose(got, x @ W - b, rtol=1e-5, atol=1e-6)


@check
def check_matmul_units():
    got = braintrace.matmul(X * u.mV, W * u.mS, b * u.mV * u.mS)
    assert u.get_unit(got) == u.mV * u.mS


@each('jit', 'vmap', 'grad')
def check_transformed(name):
    f = lambda x: jnp.sum(braintrace.matmul(x, W, b))
    got = {'jit': jax.jit(f), 'vmap': jax.vmap(f), 'grad': jax.grad(f)}[name](X)
    want = {'jit': f(X), 'vmap': jnp.stack([f(x) for x in X]), 'grad': None}[name]
    if want is not None:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert name != 'grad' or got.shape == X.shape


@check
def check_other_operations():
    got = braintrace.lora_matmul(X, ones((I, 2)), ones((2, H)), alpha=0.5, bias=b)
    want = 0.5 * X @ ones((I, 2)) @ ones((2, H)) + b
    np.testing.assert_allclose(got, want, rtol=1e-5)
    got = braintrace.einsum('bi,ij->bj', X, W, weight_fn=jnp.abs)
    np.testing.assert_allclose(got, X @ W, rtol=1e-5, atol=1e-6)
    got = braintrace.embedding(jnp.array([1, 2]), W, weight_fn=lambda w: 2 * w)
    np.testing.assert_allclose(got, 2 * W[1:3])
    np.testing.assert_allclose(
        braintrace.element_wise(b, weight_fn=jnp.sin), jnp.sin(b)
    )
    got = braintrace.sparse_matmul(X, ones(6), sparse_mat=CSR, bias=b)
    np.testing.assert_allclose(got, X @ CSR.todense() + b, rtol=1e-5, atol=1e-6)
    got = braintrace.grouped_matmul(ones((B, 2, I)), ones((2, I, H)), ones((2, H)))
    np.testing.assert_allclose(got, I + 1)


WRONG = {
    'matmul': lambda: braintrace.matmul(X, ones((5, H))),
    'lora': lambda: braintrace.lora_matmul(X, ones((I, 2)), ones((3, H))),
    'embedding': lambda: braintrace.embedding(ones(2), W),
    'groups': lambda: braintrace.grouped_matmul(ones((B, 3, I)), ones((2, I, H))),
    'einsum': lambda: braintrace.einsum('bi,ik->bk', X, ones((5, H))),
}


@each(*WRONG)
def check_wrong_operands(name):
    raises((ValueError, TypeError, AssertionError), WRONG[name])


# ---------------------------------------------------------------- configurations

CONFIGS = {
    'default': {},
    'coupled': {'recurrence_scope': 'coupled'},
    'sparse_n': {'recurrence_scope': 'sparse_n', 'sparse_n': 2},
    'factors': {'trace_factorization': 'io_factorized', 'decay': 0.9},
    'pair': {
        'trace_factorization': 'io_factorized',
        'temporal_recursion': ('scalar_leak', 'jacobian'),
        'decay': (0.9, 0.8),
    },
    'kappa': {'trace_filter': 'kappa', 'kappa': 0.5},
    'random': {'learning_signal': 'random_feedback'},
    'modulatory': {'learning_signal': 'modulatory'},
}


@each(*CONFIGS)
def check_config(name):
    try:
        config = ETraceConfig(**CONFIGS[name])
    except ValueError:
        assert name == 'factors'  # there a pair of recursions is wanted
        return
    for field, value in CONFIGS[name].items():
        if field != 'decay':
            assert getattr(config, field) == value
    assert isinstance(config.describe(), str)
    assert config == ETraceConfig(**CONFIGS[name])
    assert hash(config) == hash(ETraceConfig(**CONFIGS[name]))
    assert config.replace() == config
    assert config.is_factorized == (name in ('pair', 'factors'))
    assert config.include_recurrent_mixing == (name in ('coupled', 'sparse_n'))


@each(
    ('trace_factorization', 'other'),
    ('temporal_recursion', 'other'),
    ('recurrence_scope', 'other'),
    ('learning_signal', 'other'),
    ('trace_filter', 'other'),
    ('update_schedule', 'other'),
    ('kappa', 1.5),
)
def check_config_refuses(field, value):
    raises((ValueError, TypeError), ETraceConfig, **{field: value})


@check
def check_config_pair():
    config = ETraceConfig(**CONFIGS['pair'])
    assert config.recursion_x == 'scalar_leak'
    assert config.recursion_f == 'jacobian'
    assert config.decay_x == 0.9
    assert config.decay_f == 0.8
    assert config.replace(decay=(0.5, 0.5)).decay_x == 0.5


@check
def check_config_of_no_filter():
    assert ETraceConfig(trace_filter='kappa', kappa=0.0) == ETraceConfig()


@each('default', 'coupled', 'kappa')
def check_config_in_a_learner(name):
    config = ETraceConfig(**CONFIGS[name])
    learner = braintrace.ParamDimVjpAlgorithm(ready(Net()), config=config)
    learner.compile_graph(X)
    assert learner.config == config
    assert learner(X).shape == (B, 2)


# ---------------------------------------------------------------- parts


@check
def check_kappa_filter():
    kept = braintrace.KappaFilter(jnp.zeros(3), 0.5)
    assert isinstance(kept, braintrace.KappaFilter)
    np.testing.assert_allclose(kept.update(ones(3)), 0.5)
    np.testing.assert_allclose(kept.update(ones(3)), 0.75)
    np.testing.assert_allclose(kept.value, 0.75)
    raises(ValueError, braintrace.KappaFilter, jnp.zeros(3), 1.5)


@check
def check_random_feedback():
    feedback = braintrace.FixedRandomFeedback(2, H, jax.random.PRNGKey(0))
    assert feedback.B.shape == (2, H)
    assert feedback.project(ones((B, 2))).shape == (B, H)


@check
def check_running_gradients():
    kept = braintrace.GradExpon({'w': jnp.zeros(3)}, 0.5)
    kept.update({'w': ones(3)})
    kept.update({'w': ones(3)})
    np.testing.assert_allclose(kept.gradients.value['w'], 1.5)


@check
def check_predictor():
    predictor = braintrace.SyntheticGradient({0: (B, H, 1)})
    values = predictor.param_values()
    found = predictor.apply(values, {0: ones((B, H, 1))})
    assert found[0].shape == (B, H, 1)
    assert len(predictor.states_dict()) > 0


# ---------------------------------------------------------------- primitives


@check
def check_own_primitive():
    made = braintrace.register_primitive('check_own', lambda x, w: x @ w)
    assert isinstance(made, braintrace.ETPPrimitive)
    assert made.name == 'check_own'
    np.testing.assert_allclose(made.bind(X, W), X @ W, rtol=1e-5, atol=1e-6)
    assert str(made) == 'check_own'


@check
def check_own_primitive_with_rules():
    made = braintrace.register_primitive('check_rules', lambda x, w: x @ w)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        made.register_etp_rules(
            dt_to_t=lambda *a: None,
            xy_to_dw=lambda *a: None,
            init_drtrl=lambda *a: None,
            init_pp=lambda *a: None,
        )


@check
def check_own_primitive_in_a_relation():
    made = braintrace.register_primitive(
        'check_related',
        lambda x, w: x @ w,
        batched=True,
        gradient_enabled=True,
        trainable_invars_fn=lambda params: {'weight': 1},
        x_invar_index=0,
        y_outvar_index=0,
    )
    net = Op(lambda s, x: made.bind(x, s.W.value), W=ones((I, H)))
    (relation,) = graph_of(net, X).hidden_param_op_relations
    assert relation.primitive is made
    assert relation.trainable_paths == {'weight': ('W',)}


@each(
    'ConvOp',
    'ElemWiseOp',
    'ElemWiseParam',
    'ETraceOp',
    'ETraceParam',
    'FakeElemWiseParam',
    'FakeETraceParam',
    'LoraOp',
    'MatMulOp',
    'NonTempParam',
    'SpMatMulOp',
)
def check_first_names(name):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        assert inspect.isclass(getattr(braintrace, name))
    assert any(issubclass(w.category, DeprecationWarning) for w in said)


@check
def check_version():
    major, minor = braintrace.__version_info__[:2]
    assert (major, minor) >= (0, 2)
    assert braintrace.__version__.startswith(f'{major}.{minor}')
    assert 'D_RTRL' in braintrace.__all__


@each('CompilationError', 'NotSupportedError')
def check_errors(name):
    kind = getattr(braintrace, name)
    assert issubclass(kind, Exception)
    assert str(kind('text')) == 'text'
