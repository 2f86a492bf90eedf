"""The marked ops: values, gradients, units, marks and refusals."""

import brainevent
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import ops
from braintrace.errors import ArgumentError

DENSE = np.array([[1.0, 0, 2, 0], [0, 3, 0, 0], [4, 0, 0, 5]], np.float32)
SPARSE = brainevent.CSR.fromdense(jnp.asarray(DENSE))
LAYOUT = ('NHC', 'HIO', 'NHC')


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def dense_of(weight):
    rows, cols = np.nonzero(DENSE)
    return jnp.zeros(DENSE.shape).at[rows, cols].set(weight)


def convolution(x, k, b):
    return (
        jax.lax.conv_general_dilated(x, k, (1,), 'SAME', dimension_numbers=LAYOUT) + b
    )


# name: (op, the same in plain terms, x, weights)
CASES = {
    'matmul': (
        ops.matmul,
        lambda x, w, b: x @ w + b,
        normal(0, 2, 3),
        (normal(1, 3, 4), normal(2, 4)),
    ),
    'grouped_matmul': (
        ops.grouped_matmul,
        lambda x, w, b: jnp.stack([x[:, g] @ w[g] for g in range(3)], 1) + b,
        normal(0, 2, 3, 4),
        (normal(1, 3, 4, 5), normal(2, 3, 5)),
    ),
    'einsum': (
        lambda x, w: ops.einsum('bi,hio->bho', x, w),
        lambda x, w: jnp.tensordot(x, w, ((1,), (1,))),
        normal(0, 2, 3),
        (normal(1, 4, 3, 5),),
    ),
    'embedding': (
        lambda x, w: ops.embedding(jnp.array([[0, 2], [1, 1]]), w) * x,
        lambda x, w: jax.nn.one_hot(jnp.array([[0, 2], [1, 1]]), 3) @ w * x,
        normal(0, 2, 2, 4),
        (normal(1, 3, 4),),
    ),
    'element_wise': (
        lambda x, w: x * ops.element_wise(w, weight_fn=jnp.exp),
        lambda x, w: x * jnp.exp(w),
        normal(0, 2, 3),
        (normal(1, 3),),
    ),
    'conv': (
        lambda x, k, b: ops.conv(x, k, b, dimension_numbers=LAYOUT),
        convolution,
        normal(0, 2, 6, 3),
        (normal(1, 3, 3, 4), normal(2, 4)),
    ),
    'sparse_matmul': (
        lambda x, w, b: ops.sparse_matmul(x, w, sparse_mat=SPARSE, bias=b),
        lambda x, w, b: x @ dense_of(w) + b,
        normal(0, 2, 3),
        (normal(1, 5), normal(2, 4)),
    ),
    'lora_matmul': (
        lambda x, B, A, b: ops.lora_matmul(x, B, A, alpha=0.5, bias=b),
        lambda x, B, A, b: 0.5 * (x @ B) @ A + b,
        normal(0, 2, 3),
        (normal(1, 3, 2), normal(2, 2, 4), normal(3, 4)),
    ),
}
every_op = pytest.mark.parametrize('name', CASES)


@every_op
def test_values_and_gradients_are_those_of_the_plain_formula(name):
    op, plain, x, weights = CASES[name]
    over = tuple(range(1 + len(weights)))

    def both(*args):
        return [
            (f(*args), jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), over)(*args))
            for f in (op, plain)
        ]

    got, expected = jax.jit(
        both, compiler_options={'xla_backend_optimization_level': 0}
    )(x, *weights)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        got,
        expected,
    )


# ---------------------------------------------------------------- marks


def marked_primitives(fn, *args, name):
    """Primitives under the mark, their own or that of the equation whose sub-program they are in."""
    found = []

    def walk(jaxpr, inherited):
        for eqn in jaxpr.eqns:
            marked = inherited or ops.MARK + name in str(eqn.source_info.name_stack)
            subs = [
                getattr(p, 'jaxpr', p)
                for p in eqn.params.values()
                if hasattr(getattr(p, 'jaxpr', p), 'eqns')
            ]
            found.extend([eqn.primitive.name] if marked and not subs else [])
            for sub in subs:
                walk(sub, marked)

    walk(jax.make_jaxpr(fn)(*args).jaxpr, False)
    return found


def scanned(op):
    return lambda x, *weights: jax.lax.scan(
        lambda carry, _: (carry, op(carry, *weights)), x, None, length=2
    )


PRIMITIVE = {
    'embedding': 'gather',
    'element_wise': 'copy',
    'conv': 'conv_general_dilated',
    'sparse_matmul': 'csrmm',
}


@every_op
@pytest.mark.parametrize(
    'transform', ['plain', 'jit', 'vmap', 'grad', 'scan', 'checkpoint']
)
def test_the_mark_survives_transformations(name, transform):
    op, _, x, weights = CASES[name]
    if transform == 'plain':
        fn = op
    elif transform == 'jit':
        fn = jax.jit(op)
    elif transform == 'vmap':
        fn, x = jax.vmap(op, (0, *(None for _ in weights))), jnp.stack([x, x])
    elif transform == 'grad':
        fn = jax.grad(lambda *a: jnp.sum(op(*a) ** 2), 1)
    elif transform == 'scan':
        fn = scanned(op)
    else:
        fn = jax.checkpoint(op)
    assert PRIMITIVE.get(name, 'dot_general') in marked_primitives(
        fn, x, *weights, name=name
    )


def test_unmarked_code_around_an_op_stays_unmarked():
    def fn(x, w):
        return jnp.tanh(ops.matmul(jnp.sin(x), w))

    assert marked_primitives(fn, normal(0, 3), normal(1, 3, 4), name='matmul') == [
        'dot_general'
    ]


def test_element_wise_leaves_an_equation_even_for_a_bare_weight():
    assert marked_primitives(ops.element_wise, normal(0, 3), name='element_wise') == [
        'copy'
    ]


# ---------------------------------------------------------------- units


UNIT_CASES = {
    'matmul': lambda x, w, b: ops.matmul(x, w, b),
    'grouped_matmul': lambda x, w, b: ops.grouped_matmul(x[None], w[None], b)[0],
    'einsum': lambda x, w, b: ops.einsum('i,io->o', x, w) + b,
    'conv': lambda x, w, b: ops.conv(x[None], w[None], b, dimension_numbers=LAYOUT)[0],
    'lora_matmul': lambda x, w, b: ops.lora_matmul(x, w, jnp.eye(4), bias=b),
    'sparse_matmul': lambda x, w, b: ops.sparse_matmul(
        x,
        (w.mantissa if isinstance(w, u.Quantity) else w)[np.nonzero(DENSE)]
        * u.get_unit(w),
        sparse_mat=SPARSE,
        bias=b,
    ),
}


@pytest.mark.parametrize('name', UNIT_CASES)
def test_units_multiply(name):
    op, x, bias = UNIT_CASES[name], normal(0, 3), normal(1, 4)
    y = op(x * u.mV, DENSE * u.mS, bias * u.nA)
    assert u.have_same_dim(y, u.amp)
    np.testing.assert_allclose(
        y.to_decimal(u.uA), op(x, jnp.asarray(DENSE), bias * 1e-3), rtol=1e-5
    )
    # units that cancel leave a plain array, scaled
    np.testing.assert_allclose(
        op(x * u.ms, DENSE * u.Hz, bias),
        op(x, jnp.asarray(DENSE), bias * 1e3) * 1e-3,
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize('name', [name for name in UNIT_CASES if name != 'einsum'])
def test_a_bias_of_another_dimension_is_refused(name):
    with pytest.raises(u.UnitMismatchError, match=r'mV.*uA'):
        UNIT_CASES[name](normal(0, 3) * u.mV, DENSE * u.mS, normal(1, 4) * u.mV)


def test_transforms_of_quantities_see_numbers():
    x, weight, bias = normal(0, 3) * u.mV, DENSE * u.mS, normal(1, 4) * u.uA
    y = ops.matmul(x, weight, bias, weight_fn=jnp.tanh, bias_fn=jnp.abs)
    assert u.get_unit(y) == u.uA
    expected = ops.matmul(x.mantissa, jnp.tanh(DENSE), jnp.abs(bias.mantissa))
    np.testing.assert_allclose(y.mantissa, expected, rtol=1e-5)
    rows = ops.embedding(np.array([1]), weight, weight_fn=lambda w: w**2)
    assert u.get_unit(rows) == u.mS
    # A unit that the transform gives itself is kept beside that of the weight.
    scaled = ops.element_wise(weight, weight_fn=lambda w: w * u.mV)
    assert u.have_same_dim(scaled, u.uA)


def test_element_wise_and_embedding_keep_the_unit():
    weight = normal(0, 3, 2) * u.mV
    assert u.get_unit(ops.element_wise(weight, weight_fn=lambda w: 2 * w)) == u.mV
    rows = ops.embedding(np.array([2, 0]), weight)
    assert u.get_unit(rows) == u.mV
    np.testing.assert_array_equal(rows.mantissa, weight.mantissa[jnp.array([2, 0])])


# ---------------------------------------------------------------- arguments


def test_transforms_of_weight_and_bias():
    x, w, b = normal(0, 3), normal(1, 3, 4), normal(2, 4)
    np.testing.assert_allclose(
        ops.matmul(x, w, b, weight_fn=jnp.abs, bias_fn=jnp.exp),
        x @ jnp.abs(w) + jnp.exp(b),
    )
    y = ops.grouped_matmul(
        x[None], w[None], b[None], weight_fn=jnp.abs, bias_fn=jnp.exp
    )[0]
    np.testing.assert_allclose(y, x @ jnp.abs(w) + jnp.exp(b), rtol=1e-5)
    image, kernel = normal(0, 2, 6, 3), normal(1, 3, 3, 4)
    y = ops.conv(
        image, kernel, b, kernel_fn=jnp.abs, bias_fn=jnp.exp, dimension_numbers=LAYOUT
    )
    np.testing.assert_allclose(
        y, convolution(image, jnp.abs(kernel), jnp.exp(b)), rtol=1e-5
    )


@pytest.mark.parametrize('lead', [(), (2,), (2, 5)])
def test_leading_axes(lead):
    x = normal(0, *lead, 3)
    weight, expected = jnp.asarray(DENSE), x @ jnp.asarray(DENSE)
    kwargs = {'rtol': 1e-5, 'atol': 1e-6}
    np.testing.assert_allclose(ops.matmul(x, weight), expected, **kwargs)
    np.testing.assert_allclose(
        ops.lora_matmul(x, weight, jnp.eye(4)), expected, **kwargs
    )
    np.testing.assert_allclose(
        ops.sparse_matmul(x, SPARSE.data, sparse_mat=SPARSE), expected, **kwargs
    )
    y = ops.grouped_matmul(x[..., None, :], weight[None])
    np.testing.assert_allclose(y[..., 0, :], expected, **kwargs)


def test_spikes_are_accepted_as_bool_or_int():
    spikes = jnp.array([True, False, True])
    expected = jnp.asarray(DENSE)[0] + jnp.asarray(DENSE)[2]
    for x in (spikes, spikes.astype(jnp.int32)):
        np.testing.assert_allclose(ops.matmul(x, jnp.asarray(DENSE)), expected)
        np.testing.assert_allclose(
            ops.sparse_matmul(x, SPARSE.data, sparse_mat=SPARSE), expected
        )
        np.testing.assert_allclose(
            ops.conv(x[None], DENSE[None], dimension_numbers=LAYOUT)[0], expected
        )


def test_conv_options_and_missing_batch():
    x, kernel, bias = normal(0, 2, 4, 8, 8), normal(1, 6, 2, 3, 3), normal(2, 6)
    options = {'padding': [(1, 0), (2, 1)], 'feature_group_count': 2}
    y = ops.conv(x, kernel, bias, strides=2, rhs_dilation=(1, 2), **options)
    expected = (
        jax.lax.conv_general_dilated(x, kernel, (2, 2), rhs_dilation=(1, 2), **options)
        + bias[:, None, None]
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        ops.conv(x[0], kernel, bias, strides=2, rhs_dilation=(1, 2), **options),
        y[0],
        rtol=1e-5,
    )


# ---------------------------------------------------------------- refusals


BAD = {
    'matmul, inner sizes': (
        lambda: ops.matmul(jnp.ones(3), jnp.ones((4, 5))),
        '(3,)',
        '(4, 5)',
    ),
    'matmul, weight axes': (
        lambda: ops.matmul(jnp.ones(3), jnp.ones((2, 3, 5))),
        '(2, 3, 5)',
        'grouped_matmul',
    ),
    'matmul, scalar': (lambda: ops.matmul(1.0, jnp.ones((3, 5))), '()', '(3, 5)'),
    'matmul, bias': (
        lambda: ops.matmul(jnp.ones(3), jnp.ones((3, 5)), jnp.ones(4)),
        '(4,)',
        '(5,)',
    ),
    'matmul, larger bias': (
        lambda: ops.matmul(jnp.ones(3), jnp.ones((3, 5)), jnp.ones((2, 5))),
        '(2, 5)',
        '(5,)',
    ),
    'grouped_matmul': (
        lambda: ops.grouped_matmul(jnp.ones((2, 3)), jnp.ones((3, 3, 5))),
        '(2, 3)',
        '(3, 3, 5)',
    ),
    'einsum, sizes': (
        lambda: ops.einsum('i,io->o', jnp.ones(3), jnp.ones((4, 5))),
        '(3,)',
        '(4, 5)',
    ),
    'einsum, operands': (
        lambda: ops.einsum('i,io,o->o', jnp.ones(3), jnp.ones((3, 5))),
        'i,io,o->o',
    ),
    'embedding, type': (
        lambda: ops.embedding(jnp.ones(3), jnp.ones((4, 5))),
        'float32',
    ),
    'embedding, scalar': (lambda: ops.embedding(jnp.arange(3), 1.0), '()'),
    'conv, axes': (lambda: ops.conv(jnp.ones((3, 5)), jnp.ones((3, 5))), '(3, 5)'),
    'conv, channels': (
        lambda: ops.conv(jnp.ones((2, 3, 8)), jnp.ones((4, 2, 3))),
        '3 channels',
        'takes 2',
    ),
    'sparse_matmul, x': (
        lambda: ops.sparse_matmul(jnp.ones(4), SPARSE.data, sparse_mat=SPARSE),
        '(4,)',
        '(3, 4)',
    ),
    'sparse_matmul, weight': (
        lambda: ops.sparse_matmul(jnp.ones(3), jnp.ones(4), sparse_mat=SPARSE),
        '(4,)',
        '(5,)',
    ),
    'sparse_matmul, matrix': (
        lambda: ops.sparse_matmul(jnp.ones(3), jnp.ones(3), sparse_mat=jnp.eye(3)),
        'ArrayImpl',
        'CSR',
    ),
    'lora_matmul, rank': (
        lambda: ops.lora_matmul(jnp.ones(3), jnp.ones((3, 2)), jnp.ones((3, 4))),
        '(3, 2)',
        '(3, 4)',
    ),
    'lora_matmul, x': (
        lambda: ops.lora_matmul(jnp.ones(4), jnp.ones((3, 2)), jnp.ones((2, 4))),
        '(4,)',
        '(3, 4)',
    ),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_arguments_are_refused(name):
    call, *mentions = BAD[name]
    with pytest.raises(ArgumentError) as error:
        call()
    assert all(part in str(error.value) for part in mentions)
