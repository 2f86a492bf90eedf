"""Every family of primitives against brute force: who reaches whom, from dense Jacobians.

A case is a small function. Its equation is run alone on random values (all values of its integer
operands that a case lists), `jax.jacrev` gives the pattern, and the truth for an element of an operand
is the join of the labels it reaches. A rule may lose precision (CONFLICT), never name a wrong position.
"""

import functools
import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import ad, batching, mlir

from braintrace import register_primitive
from braintrace.analysis.dependence import Bits, Relevance, StepDependence, flow
from braintrace.analysis.positions import find_positions
from braintrace.analysis.probe import is_elementwise
from braintrace.compat import Primitive, evaluate, is_differentiable, make_jaxpr
from braintrace.operations import REGISTRY
from braintrace.operations.labels import CONFLICT, NONE, mixing_labels
from braintrace.program import StepProgram, normal_form, with_cuts

CASES = {}
CHUNK = 40  # cases whose Jacobians are compiled together
SAMPLES = 40  # random values at which each is taken


@dataclass(frozen=True)
class Case:
    """A function whose trace holds one equation of the primitive.

    An operand is a shape (floats), ('complex64', shape), or an array that stacks all integer arrays to
    try. With `sound` the rule may say CONFLICT where the truth is a position.
    """

    primitive: str
    fn: Callable
    operands: tuple
    sound: bool

    def draw(self, i):
        """The i-th example of the operands."""
        return [draw(operand, i, k) for k, operand in enumerate(self.operands)]

    @functools.cached_property
    def program(self):
        return normal_form(jax.make_jaxpr(self.fn)(*self.draw(0)))

    @functools.cached_property
    def equation(self):
        (found,) = [
            e for e in self.program.jaxpr.eqns if e.primitive.name == self.primitive
        ]
        return found

    @functools.cached_property
    def constant(self):
        return StepDependence(
            StepProgram(self.program, tuple(self.program.jaxpr.invars), (), (), (), ())
        ).constant

    @property
    def results(self):
        return [v for v in self.equation.outvars if is_differentiable(v)]

    def samples(self):
        count = max(
            [SAMPLES, *(len(o) for o in self.operands if isinstance(o, np.ndarray))]
        )
        return [np.stack(s) for s in zip(*map(self.draw, range(count)), strict=True)]

    def jacobian(self, *inputs):
        """Of the equation alone, with respect to every operand that is not constant; complex ones in two parts."""
        eqn, jaxpr = self.equation, self.program.jaxpr
        before = jaxpr.eqns[: list(jaxpr.eqns).index(eqn)]
        values = evaluate(
            make_jaxpr(jaxpr.constvars, jaxpr.invars, eqn.invars, before),
            self.program.consts,
            *inputs,
        )

        def run(moved):
            filled = [
                whole(moved[k]) if k in moved else v for k, v in enumerate(values)
            ]
            results = eqn.primitive.bind(*filled, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
            return [
                parts(r)
                for v, r in zip(eqn.outvars, results, strict=True)
                if is_differentiable(v)
            ]

        moves = [
            k
            for k, v in enumerate(eqn.invars)
            if is_differentiable(v) and self.constant(v) is None
        ]
        return jax.jacrev(run)({k: parts(values[k]) for k in moves})

    def pattern(self, dense):
        """By operand, for every result: which result elements (rows) see which operand elements (columns)."""
        reaches = {}
        for r, (out, blocks) in enumerate(zip(self.results, dense, strict=True)):
            for part in blocks:
                for k, columns in part.items():
                    for block in columns:
                        seen = (
                            (np.asarray(block) != 0)
                            .reshape(len(block), out.aval.size, -1)
                            .any(0)
                        )
                        rows = reaches.setdefault(k, {})
                        rows[r] = rows.get(r, False) | seen
        return reaches


def draw(operand, i, k):
    if isinstance(operand, np.ndarray):
        return operand[i % len(operand)]
    dtype, shape = operand if operand[:1] == ('complex64',) else ('float32', operand)
    random = np.random.default_rng((i, k))
    value = random.uniform(0.1, 0.9, shape)
    return np.asarray(
        value + (1j * random.uniform(0.1, 0.9, shape) if dtype == 'complex64' else 0),
        dtype,
    )


def parts(value):
    """A complex array as two real ones."""
    return (value.real, value.imag) if jnp.iscomplexobj(value) else (value,)


def whole(values):
    return lax.complex(*values) if len(values) == 2 else values[0]


def case(primitive, fn, *operands, sound=False, note=''):
    number = sum(c.primitive == primitive for c in CASES.values())
    CASES[f'{primitive}-{note or number}'] = Case(primitive, fn, operands, sound)


@functools.cache
def patterns(chunk):
    """Patterns of a chunk of cases, in one compiled program."""
    names = list(CASES)[chunk * CHUNK : (chunk + 1) * CHUNK]
    samples = {name: CASES[name].samples() for name in names}
    dense = jax.jit(
        lambda s: {name: jax.vmap(CASES[name].jacobian)(*s[name]) for name in names}
    )(samples)
    return {name: CASES[name].pattern(dense[name]) for name in names}


def index(shape, values):
    """An integer operand: every assignment of the values to an array of the shape."""
    every = itertools.product(values, repeat=int(np.prod(shape)))
    return np.array([np.reshape(v, shape) for v in every], np.int32)


def words(text):
    return text.split()


A, B = (2, 3), (3, 2)

# ---------------------------------------------------------------- element-wise

for name in words(
    'abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1 '
    'floor lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square stop_gradient tan tanh'
):
    case(name, getattr(lax, name), A)
for name in words('add atan2 div max min mul pow rem sub'):
    case(name, getattr(lax, name), A, A)
for name in words('add mul max'):
    for pair in (((2, 1), A), (A, (1, 3)), ((2, 1), (1, 3)), ((1, 1), A)):
        case(name, getattr(lax, name), *pair, note=f'broadcast {pair}')
case('acosh', lambda x: lax.acosh(1 + x), A)
case('mul', lambda x: x * 2.0, A)
case('polygamma', lambda x: lax.polygamma(jnp.full(A, 1.0), x), A)
case(
    'regularized_incomplete_beta',
    lambda x: lax.betainc(jnp.ones(A), jnp.full(A, 2.0), x),
    A,
)
case('integer_pow', lambda x: lax.integer_pow(x, 3), A)
case('clamp', lambda x: lax.clamp(0.3, x, 0.6), A)
case('clamp', lax.clamp, A, A, A)
case(
    'select_n', lambda x, y: lax.select(np.array([[True, False, True]] * 2), x, y), A, A
)
case(
    'select_n',
    lambda which, x, y: lax.select_n(which > 0, x, y),
    index((2,), [0, 1]),
    (2,),
    (2,),
)
case(
    'select_n',
    lambda which, x, y: lax.select_n(which > 0, x, y),
    index((), [0, 1]),
    A,
    A,
)
case('convert_element_type', lambda x: x.astype(jnp.float16), A)
case('reduce_precision', lambda x: lax.reduce_precision(x, 5, 7), A)
case('copy', jnp.copy, A)
case('optimization_barrier', lambda x, y: lax.optimization_barrier((x, y)), A, B)
case('complex', lax.complex, A, A)
case('conj', jnp.conj, ('complex64', A))
case('real', jnp.real, ('complex64', A))
case('imag', jnp.imag, ('complex64', A))
case('mul', lambda x, y: x * y, ('complex64', A), ('complex64', (1, 3)))

# ---------------------------------------------------------------- movement

case('reshape', lambda x: x.reshape(3, 2), A)
case('reshape', lambda x: x.reshape(2, 1, 3, 1), A)
case('reshape', lambda x: lax.reshape(x, (3, 2), (1, 0)), A)
case('squeeze', lambda x: lax.squeeze(x, (0, 2)), (1, 3, 1))
case('transpose', lambda x: x.T, A)
case('transpose', lambda x: jnp.transpose(x, (2, 0, 1)), (2, 3, 4))
case('broadcast_in_dim', lambda x: jnp.broadcast_to(x, (4, 2, 3)), A)
case('broadcast_in_dim', lambda x: jnp.broadcast_to(x, (2, 4, 3)), (2, 1, 3))
case('broadcast_in_dim', lambda x: lax.broadcast_in_dim(x, (3, 2, 2), (1,)), (2,))
case('broadcast_in_dim', lambda x: jnp.broadcast_to(x, A), ())
case('tile', lambda x: jnp.tile(x, (2, 3)), A)
case('tile', lambda x: jnp.tile(x, (1, 2)), (2, 1))
case('rev', lambda x: lax.rev(x, (0, 1)), A)
case('slice', lambda x: x[:, 1:], A)
case('slice', lambda x: lax.slice(x, (1, 0), (4, 5), (2, 3)), (4, 5))
case('split', lambda x: jnp.split(x, [1, 3], axis=1), (2, 4))
case('concatenate', lambda x, y: jnp.concatenate([x, y, x], 1), A, (2, 1))
case('stack', lambda x, y: jnp.stack([x, y], 1), A, A)
case('unstack', lambda x: jnp.unstack(x, axis=1), (2, 3, 2))
for config in (
    ((1, 2, 0), (0, 0, 0)),
    ((-1, 1, 0), (2, -1, 0)),
    ((0, 0, 2), (1, 0, 1)),
    ((-1, 0, 1), (1, -2, 2)),
):
    case(
        'pad',
        lambda x, v, config=config: lax.pad(x, v, config),
        A,
        (),
        note=str(config),
    )
case('dynamic_slice', lambda x: lax.dynamic_slice(x, (1, 0), (2, 2)), (3, 3))
case(
    'dynamic_slice',
    lambda x: lax.dynamic_slice(x, (5, -1), (2, 2)),
    (3, 3),
    note='clamped',
)
case(
    'dynamic_slice',
    lambda i, x: lax.dynamic_slice(x, (i, 0), (1, 3)),
    index((), range(2)),
    A,
)
case(
    'dynamic_slice',
    lambda i, x: lax.dynamic_slice(x, (i, i), (2, 2)),
    index((), range(3)),
    (3, 4),
    sound=True,
)
case(
    'dynamic_update_slice',
    lambda x, u: lax.dynamic_update_slice(x, u, (1, 0)),
    (3, 3),
    (2, 2),
)
case(
    'dynamic_update_slice',
    lambda x, u: lax.dynamic_update_slice(x, u, (9, 0)),
    (3, 3),
    (1, 3),
    note='clamped',
)
case(
    'dynamic_update_slice',
    lambda i, x, u: lax.dynamic_update_slice(x, u, (i, 0)),
    index((), range(3)),
    B,
    (1, 2),
)
case(
    'dynamic_update_slice', lambda i, x, u: lax.dynamic_update_slice(x, u, (i,)), index((), range(3)), (4,), (2,),
    sound=True, note='window',
)  # fmt: skip

rows = np.array([2, 0, 2])
case('gather', lambda x: x[rows], B)
case('gather', lambda x: x[rows, np.array([0, 1, 1])], B)
case('gather', lambda x: x[:, rows], A)
case(
    'gather',
    lambda x: jnp.take(x, np.array([0, 7, -1]), axis=0, mode='fill'),
    B,
    note='out of bounds, fill',
)
case(
    'gather',
    lambda x: jnp.take(x, np.array([0, 7]), axis=0, mode='clip'),
    B,
    note='out of bounds, clip',
)
case(
    'gather',
    lambda x: jnp.take_along_axis(x, np.array([[2, 0], [1, 1]]), 1),
    A,
    note='along axis',
)
case(
    'gather',
    lambda x: jax.vmap(lambda r, i: lax.dynamic_slice(r, (i,), (2,)))(
        x, np.array([0, 1])
    ),
    A,
    note='slices',
)
case('gather', lambda i, x: x[i], index((2,), range(3)), B, note='dynamic rows')
case('gather', lambda i, x: x[:, i], index((2,), range(3)), A, note='dynamic columns')
case(
    'gather',
    lambda i, x: x[i, i],
    index((2,), range(2)),
    A,
    note='dynamic points',
    sound=True,
)
case(
    'gather',
    lambda i, x: jnp.take_along_axis(x, i, 1),
    index((2, 1), range(3)),
    A,
    note='dynamic along axis',
)
case(
    'gather',
    lambda i, x: jnp.take_along_axis(x, i, 0),
    index((1, 3), range(2)),
    A,
    note='dynamic along axis 0',
)
case(
    'gather',
    lambda i, x: jnp.take_along_axis(x, i, 1),
    index((2, 2, 1), range(2)),
    (2, 2, 2),
    note='two batch axes',
)
case(
    'gather', lambda i, x: jax.vmap(lambda r, i: lax.dynamic_slice(r, (i,), (2,)))(x, i), index((2,), range(2)), A,
    note='dynamic slices', sound=True,
)  # fmt: skip
fill = lambda i, x: jnp.take(x, i, axis=0, mode='fill')
case('gather', fill, index((2,), [0, 2, 7]), B, note='dynamic, fill', sound=True)

at = np.array([0, 2])
case('scatter', lambda x, u: x.at[at].set(u), B, (2, 2))
case('scatter', lambda x, u: x.at[:, at].set(u), A, (2, 2))
case('scatter', lambda x, u: x.at[np.array([0, 9])].set(u), B, (2, 2), note='dropped')
case(
    'scatter',
    lambda x, u: x.at[np.array([0, 9])].set(u, mode='clip'),
    B,
    (2, 2),
    note='clipped',
)
case(
    'scatter',
    lambda x, u: x.at[np.array([1, 1])].set(u),
    B,
    (2, 2),
    note='twice',
    sound=True,
)
case(
    'scatter',
    lambda i, x, u: x.at[i].set(u),
    index((), range(3)),
    B,
    (2,),
    note='dynamic row',
)
case(
    'scatter',
    lambda i, x, u: x.at[:, i].set(u),
    index((), range(3)),
    A,
    (2,),
    note='dynamic column',
)
case(
    'scatter', lambda i, x, u: jax.vmap(lambda r, i, u: r.at[i].set(u))(x, i, u), index((2,), range(3)), A, (2,),
    note='batched',
)  # fmt: skip
case('scatter-add', lambda x, u: x.at[np.array([1, 1])].add(u), B, (2, 2))
case(
    'scatter-add',
    lambda i, x, u: x.at[i].add(u),
    index((2,), range(3)),
    B,
    (2, 2),
    note='dynamic',
)
case('scatter-add', lambda x, u: x.at[0, 1].add(u), A, (), note='one element')
case('scatter-mul', lambda x, u: x.at[at].multiply(u, unique_indices=True), B, (2, 2))
case('scatter-sub', lambda x, u: x.at[at].subtract(u), B, (2, 2))
case('scatter-min', lambda x, u: x.at[at].min(u), B, (2, 2))
case('scatter-max', lambda i, x, u: x.at[i].max(u), index((), range(3)), B, (2,))

# ---------------------------------------------------------------- reductions, whole axes, windows

for name in words('reduce_sum reduce_max reduce_min reduce_prod'):
    fn = getattr(jnp, name.removeprefix('reduce_'))
    case(name, lambda x, fn=fn: fn(x, axis=1), A)
    case(name, lambda x, fn=fn: fn(x, axis=(0, 2)), (2, 3, 2))
for name in words('cumsum cumprod cummax cummin cumlogsumexp'):
    case(name, lambda x, name=name: getattr(lax, name)(x, axis=1), A, sound=True)
case('cumsum', lambda x: lax.cumsum(x, axis=0, reverse=True), (2, 2, 2), sound=True)
case('sort', lambda x: lax.sort(x, dimension=1), A)
case('sort', lambda x: lax.sort(x, dimension=0), B)
case('sort', lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), A, A, sound=True)
case('top_k', lambda x: lax.top_k(x, 2)[0], A, sound=True)
case('top_k', lambda x: lax.top_k(x, 2, axis=0)[0], B, sound=True)
case('top_k', lambda x: lax.top_k(x, 2, axis=0)[0], A, sound=True)
case(
    'approx_top_k',
    lambda x: lax.approx_max_k(x, 2, reduction_dimension=0)[0],
    B,
    sound=True,
)
case('approx_top_k', lambda x: lax.approx_min_k(x, 2)[0], A, sound=True)
case('fft', lambda x: jnp.fft.rfft(x), A)
case('fft', lambda x: jnp.fft.irfft(x, 4), ('complex64', A))
case('fft', lambda x: jnp.fft.fft2(x), ('complex64', (2, 2, 2)))
for window, strides, padding in (
    ((1, 2), (1, 2), 'VALID'),
    ((1, 2), (1, 1), 'SAME'),
    ((2, 2), (1, 2), 'SAME'),
):
    pool = lambda x, parts=(window, strides, padding): lax.reduce_window(
        x, 0.0, lax.add, *parts
    )
    case('reduce_window_sum', pool, (2, 4))
case(
    'reduce_window_max',
    lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2), (1, 1), 'SAME'),
    (2, 4),
)
case(
    'reduce_window_min',
    lambda x: lax.reduce_window(x, np.inf, lax.min, (1, 2), (1, 2), 'VALID'),
    (2, 4),
)
case(
    'reduce_window_sum',
    lambda x: lax.reduce_window(
        x, 0.0, lax.add, (2,), (1,), ((1, 1),), base_dilation=(2,), window_dilation=(3,)
    ),
    (4,),
    note='dilated',
)

# ---------------------------------------------------------------- products

for layout, *operands in (
    ('ij,jk->ik', A, B), ('ij,kj->ik', A, (2, 3)), ('ji,jk->ki', B, B), ('bi,bi->b', A, A),
    ('bij,bjk->bik', (2, 2, 3), (2, 3, 2)), ('ibj,jbk->bik', (2, 2, 3), (3, 2, 2)),
    ('i,j->ij', (2,), (3,)), ('bgi,gio->bgo', (2, 2, 3), (2, 3, 2)),
    ('abij,abij->ab', (2, 1, 2, 2), (2, 1, 2, 2)), ('ij,j->i', A, (3,)), ('ij,ij->', A, A),
):  # fmt: skip
    case(
        'dot_general',
        lambda x, y, layout=layout: jnp.einsum(layout, x, y),
        *operands,
        note=layout,
    )
case(
    'dot_general',
    lambda x, y: x @ y,
    ('complex64', A),
    ('complex64', B),
    note='complex',
)


def conv(note, image, kernel, strides=(1,), padding='SAME', exact=True, **options):
    strides = strides * (len(image) - 2)
    fn = lambda x, k: lax.conv_general_dilated(x, k, strides, padding, **options)
    case('conv_general_dilated', fn, image, kernel, note=note, sound=not exact)


conv('1d', (2, 2, 4), (3, 2, 3))
conv('1x1', (2, 2, 3), (2, 2, 1))
conv('strided', (1, 2, 5), (2, 2, 2), strides=(2,), padding='VALID')
conv('strided, gaps', (1, 1, 7), (1, 1, 2), strides=(3,), padding='VALID')
conv('dilated kernel', (1, 1, 6), (1, 1, 2), padding='VALID', rhs_dilation=(3,))
conv('transposed', (1, 1, 3), (1, 1, 3), padding=[(1, 1)], lhs_dilation=(2,))
conv('grouped', (2, 4, 3), (4, 2, 1), feature_group_count=2)
conv('depthwise', (2, 2, 3), (4, 1, 2), feature_group_count=2)
conv('depthwise 1x1', (2, 3, 2), (3, 1, 1), feature_group_count=3)
conv('channels last', (2, 4, 2), (3, 2, 3), dimension_numbers=('NWC', 'WIO', 'NWC'))
conv('odd layout', (2, 4, 1), (2, 2, 3), dimension_numbers=('CWN', 'IWO', 'WNC'))
conv('2d', (1, 2, 3, 2), (2, 2, 2, 2), padding='VALID')
conv(
    '2d, channels last',
    (1, 3, 2, 2),
    (1, 2, 2, 1),
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
)
conv('negative padding', (1, 1, 5), (1, 1, 2), padding=[(-1, -1)])
conv('batch groups', (4, 1, 2), (2, 1, 1), exact=False, batch_group_count=2)

# ---------------------------------------------------------------- linear algebra: anything may mix

case('custom_linear_solve', jnp.linalg.solve, (2, 2), (2, 3), sound=True)
case('cholesky', lambda x: jnp.linalg.cholesky(x), (2, 2), sound=True)
case(
    'triangular_solve',
    lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True),
    (2, 2),
    (2, 2),
    sound=True,
)


def label_draws(random, shapes):
    """Labels for every result: by chance, mostly none, conflicts too, by axis, for one result only."""
    for values in ([0, 1, NONE], [0, NONE, NONE, NONE], [0, 1, 2, CONFLICT, NONE], [3]):
        yield [random.choice(values, s) for s in shapes]
    for axis in range(max(map(len, shapes))):
        yield [np.indices(s)[axis] for s in shapes]
        yield [random.permutation(9)[np.indices(s)[axis]] for s in shapes]
    for only in range(len(shapes)) if len(shapes) > 1 else ():
        yield [
            random.choice([0, 1, NONE], s) if i == only else None
            for i, s in enumerate(shapes)
        ]


def truth(reaches, labels, shape):
    """The join, element by element, of the labels reached."""
    sets = [set() for _ in range(int(np.prod(shape)))]
    for r, label in enumerate(labels):
        for out, element in np.argwhere(reaches[r]) if label is not None else ():
            sets[element] |= {int(label.reshape(-1)[out])} - {NONE}
    return np.array(
        [NONE if not s else s.pop() if len(s) == 1 else CONFLICT for s in sets],
        np.int32,
    ).reshape(shape)


VANISHING = words('round rem')  # derivatives that are zero at the values drawn


def check_origins(case, operation, k, reached, precise):
    """No element of a result comes from another element than the rule says.

    Where the rule gives up, some element comes from several: of a rule that is precise.
    """
    eqn = case.equation
    origins = operation.origins(eqn, k, case.constant)
    if origins is None:
        several = [(seen.sum(axis=1) > 1).any() for seen in reached.values()]
        assert any(several) or not precise, f'operand {k}: no origins'
        return
    assert len(origins) == len(eqn.outvars)
    size = eqn.invars[k].aval.size
    for r, seen in reached.items():
        v = case.results[r]
        origin = origins[eqn.outvars.index(v)]
        assert origin.shape == v.aval.shape
        assert (origin >= NONE).all()
        assert (origin < size).all()
        said = origin.reshape(-1, 1) == np.arange(size)
        assert not (seen & ~said).any(), f'operand {k}: {origin} is not the origin'
        is_moved = operation.family == 'movement'  # nothing is selected or vanishes
        if precise and is_moved:
            np.testing.assert_array_equal(said, seen, f'operand {k}')


@pytest.mark.parametrize('name', CASES)
def test_rule(name):
    case, eqn = CASES[name], CASES[name].equation
    operation = REGISTRY[case.primitive]
    random = np.random.default_rng(zlib.crc32(name.encode()))
    reaches = patterns(list(CASES).index(name) // CHUNK)[name]
    assert reaches
    for drawn in label_draws(random, [v.aval.shape for v in case.results]):
        drawn = [None if d is None else d.astype(np.int32) for d in drawn]
        given = iter(drawn)
        outs = [next(given) if v in case.results else None for v in eqn.outvars]
        answers = operation.labels(eqn, outs, case.constant)
        assert len(answers) == len(eqn.invars)
        for k, reached in reaches.items():
            shape = eqn.invars[k].aval.shape
            true = truth(reached, drawn, shape)
            if not operation.differentiates(eqn, k):
                assert (true == NONE).all()
                continue
            got = np.full(shape, NONE) if answers[k] is None else answers[k]
            assert got.shape == shape
            wrong = (got != CONFLICT) & (got != true) & ~((got >= 0) & (true == NONE))
            assert not wrong.any(), f'operand {k}: {got} where the truth is {true}'
            unseen = case.primitive in VANISHING or (
                case.primitive == 'conv_general_dilated' and k == 1
            )  # padding
            if not (case.sound or unseen or operation.family == 'mixing'):
                np.testing.assert_array_equal(got, true, f'operand {k}')
    for k, reached in reaches.items():
        if not operation.differentiates(eqn, k):
            continue
        precise = not (case.sound or case.primitive in VANISHING)
        if operation.origins is not None:
            check_origins(case, operation, k, reached, precise)


def test_origins_are_tried_both_ways():
    """Rules of every kind: that give origins, and that give none."""
    given = set()
    for case in CASES.values():
        operation, eqn = REGISTRY[case.primitive], case.equation
        for k in range(len(eqn.invars)):
            if operation.origins is not None and operation.differentiates(eqn, k):
                origins = operation.origins(eqn, k, case.constant)
                given.add((operation.family, origins is not None))
    assert given >= {
        ('elementwise', True),
        ('movement', True),
        ('movement', False),
        ('product', True),
        ('product', False),
    }


def test_every_primitive_of_jax_in_the_table_is_tried():
    """Left out: those without a derivative or slow to compile, and the operators of brainevent."""
    tried = {c.primitive.replace('-', '_') for c in CASES.values()}
    here = {n.removesuffix('_p') for n in dir(lax) if n.endswith('_p')}
    silent = words(
        'and argmax argmin bitcast_convert_type clz device_put eq ge gt iota is_finite le lt ne nextafter not or '
        'population_count igamma igammac reduce reduce_and reduce_or reduce_xor rng_bit_generator rng_uniform '
        'shift_left shift_right_arithmetic shift_right_logical xor igamma_grad_a reduce_window '
        'select_and_gather_add select_and_scatter_add while zeta'
    )
    assert {n for n in REGISTRY if n in here} - tried - set(silent) == set()


# ---------------------------------------------------------------- whole programs: sub-programs, cuts, the probe


def positions_of(fn, h, *others):
    """The pass over `fn(h, *others) -> new h`, and the Jacobian [new, old] of the program with its cuts."""
    closed = normal_form(jax.make_jaxpr(fn)(h, *others))
    jaxpr = closed.jaxpr
    bits = [Bits(1 << i, 1 << i) for i in range(len(jaxpr.invars))]
    numbers = np.arange(h.size, dtype=np.int32).reshape(h.shape)
    program = StepProgram(closed, tuple(jaxpr.invars), (), (), (), ())
    found = find_positions(
        jaxpr, flow(jaxpr, bits), Relevance(1, (1 << len(bits)) - 1), [(jaxpr.outvars[0], numbers)],
        {jaxpr.invars[0]: numbers}, (), h.size, StepDependence(program).constant,
    )  # fmt: skip
    cut = make_jaxpr(
        jaxpr.constvars, jaxpr.invars, jaxpr.outvars, with_cuts(jaxpr.eqns, found.cuts)
    )
    local = lambda h: evaluate(cut, closed.consts, h, *others)[0]
    moved, jacobian = jax.jit(
        lambda h: (local(h) - fn(h, *others), jax.jacrev(local)(h))
    )(h)
    assert not moved.any()
    return found, np.asarray(jacobian).reshape(h.size, h.size)


def jacobian(fn):
    return np.asarray(jax.jit(jax.jacrev(fn))(H))


@jax.custom_jvp
def straight_through(x):
    return jnp.round(x)


straight_through.defjvp(lambda primals, tangents: (jnp.round(primals[0]), tangents[0]))


@jax.custom_vjp
def clipped(x, y):
    return x * y


clipped.defvjp(
    lambda x, y: (x * y, (x, y)), lambda kept, g: (g * kept[1], g * kept[0] * 0.5)
)


@jax.custom_jvp
def mixed(x):
    return x + jnp.sum(x)


mixed.defjvp(
    lambda primals, tangents: (mixed(primals[0]), tangents[0] + jnp.sum(tangents[0]))
)


@jax.custom_vjp
def norm_clipped(x):
    return x


norm_clipped.defvjp(lambda x: (x, None), lambda _, g: (g / (1 + jnp.linalg.norm(g)),))


@jax.custom_vjp
def blurred(x):
    return x


blurred.defvjp(lambda x: (x, None), lambda _, g: (g + jnp.roll(g, 1),))

H = jnp.asarray(np.random.default_rng(1).uniform(0.2, 0.8, 4), jnp.float32)
W = jnp.asarray(np.random.default_rng(2).uniform(0.2, 0.8, (4, 4)), jnp.float32)


@jax.custom_jvp
def turned(x):
    return 2 * x


turned.defjvp(
    lambda primals, tangents: (2 * primals[0], 2 * tangents[0] + jnp.flip(tangents[0]))
)

SWAP = jnp.array([1, 0, 3, 2])

KEEPS = {
    'custom_jvp': lambda h: straight_through(3 * h) + h,
    'custom_vjp': lambda h: clipped(h, jnp.sin(h)),
    'cond': lambda h: lax.cond(h.sum() > 0, lambda a: a**2, lambda a: a * 3, h),
    'cond with constants': lambda h: lax.cond(h[0] > 9, lambda: h, lambda: h * h),
    'switch': lambda h: lax.switch(2, [jnp.sin, jnp.cos, jnp.tanh], h),
    'scan carry': lambda h: lax.scan(lambda c, _: (jnp.sin(c) * h, None), h, None, length=3)[0],
    'scan over time': lambda h: lax.scan(lambda c, x: (c + x, c), h, jnp.ones((3, 4)))[1].sum(0) * h,
    'scan, two carries': lambda h: lax.scan(lambda c, _: ((c[0] * c[1], c[1] + h), None), (h, h), None, length=2)[0][0],
    'scan, reversed': lambda h: lax.scan(lambda c, x: (c * x, None), h, jnp.ones((3, 4)) * 0.5, reverse=True)[0],
    'fori_loop': lambda h: lax.fori_loop(0, 3, lambda i, c: c * h, h),
    'cond in scan': lambda h: lax.scan(
        lambda c, i: (lax.cond(i > 1, jnp.sin, jnp.cos, c), None), h, jnp.arange(3)
    )[0],
    'scan, one element written': lambda h: lax.scan(lambda c, _: (c.at[0].mul(h[0]), None), h, None, length=2)[0],
    'scan, constants inside and around': lambda h: lax.scan(
        lambda c, _: (jnp.sin(c)[SWAP][np.array([1, 0, 3, 2])], None), h, None, length=2
    )[0],
    'cond, constant indices': lambda h: lax.cond(h[0] > 9, lambda h: h, lambda h: h[SWAP][SWAP], h),
    'remat in jit': jax.jit(jax.checkpoint(lambda h: jnp.sin(h) * h)),
    'vmap': jax.vmap(lambda h: jnp.tanh(h) * h),
    'scan slices rounds': lambda h: lax.scan(lambda c, _: (c, c * h), h, None, length=2)[1][1],
    'relu': jax.nn.relu,
    'logsumexp of one': lambda h: jax.nn.logsumexp(jnp.stack([h, h * h]), axis=0),
}  # fmt: skip


@pytest.mark.parametrize('name', KEEPS)
def test_a_program_that_keeps_positions_is_not_cut(name):
    found, local = positions_of(KEEPS[name], H)
    assert not found.found
    assert not found.cuts
    np.testing.assert_allclose(local, jacobian(KEEPS[name]), rtol=1e-6)
    assert np.diag(local).all()


def own_and_rolled(own, rolled):
    return own.reshape(-1)[:4] + jnp.roll(rolled.reshape(-1)[:4], 1)


@jax.jit
def twice(x):
    return x, x


MIXES = {
    'matmul': lambda h: h + h @ W,
    'roll': lambda h: h * 0.5 + jnp.roll(h, 1),
    'transpose': lambda h: (h.reshape(2, 2).T + h.reshape(2, 2)).reshape(4),
    'mean': lambda h: h - h.mean(),
    'custom_jvp': lambda h: mixed(h) + h,
    'custom_vjp whose derivative rolls': lambda h: blurred(h) + h,
    'custom_jvp whose derivative reaches what its body does not': lambda h: (
        h + turned(jnp.stack([h, h]))[0]
    ),
    'custom_vjp whose derivative sees a norm': lambda h: norm_clipped(h) + h,
    'one value as two results of a loop': lambda h: own_and_rolled(
        *lax.scan(lambda c, _: twice(jnp.tanh(c)), h, None, length=2)
    ),
    'one value as two results of a branch': lambda h: own_and_rolled(
        *lax.cond(h[0] > 9, lambda a: (2 * a, a), twice, h)
    ),
    'cond, one branch': lambda h: (
        h + lax.cond(h.sum() > 0, lambda a: a @ W, lambda a: a * 0.0, h)
    ),
    'scan body': lambda h: lax.scan(
        lambda c, _: (jnp.sin(c) + c @ W, None), h, None, length=2
    )[0],
    'scan constant': lambda h: lax.scan(
        lambda c, w: (c + h @ W, None), h, jnp.ones((2, 4))
    )[0],
    'scan over positions': lambda h: (
        lax.scan(lambda c, x: (c + x, c + x), 0.0, h)[1] + h
    ),
    'carries that swap': lambda h: (
        h
        + lax.scan(lambda c, _: (c[::-1], None), (h, jnp.roll(h, 1)), None, length=3)[
            0
        ][0]
    ),
    'custom in scan': lambda h: lax.scan(
        lambda c, _: (mixed(c) + h, None), h, None, length=2
    )[0],
    'a carry turned round': lambda h: (
        h + lax.scan(lambda c, _: (c[::-1], None), h, None, length=1)[0]
    ),
    'cumsum': lambda h: jnp.cumsum(h) + h,
    'sort': lambda h: jnp.sort(h) + h,
    'dynamic index': lambda h: h + h[jnp.argmax(h)],
    'softmax': lambda h: jax.nn.softmax(h) + h,
}


@pytest.mark.parametrize('name', MIXES)
def test_a_program_that_mixes_is_cut_to_its_diagonal(name):
    found, local = positions_of(MIXES[name], H)
    assert found.found
    assert not local[~np.eye(4, dtype=bool)].any()
    assert np.diag(local).all()


LEAVES_NOTHING = {
    'stacked rounds are the state': lambda h: lax.scan(
        lambda c, x: (c + x, c + x), 0.0, h
    )[1],
    'stacked rounds of a branch': lambda h: lax.cond(
        h.sum() > 0,
        lambda h: lax.scan(lambda c, x: (c + x, c * x), 0.0, h)[1],
        lambda h: h[::-1],
        h,
    ),
    'stacked rounds of rounds': lambda h: lax.scan(
        lambda c, _: (c, lax.scan(lambda c, x: (c + x, c + x), 0.0, h)[1]),
        0.0,
        None,
        length=1,
    )[1][0],
    'a shift': lambda h: jnp.concatenate([jnp.zeros(1), h[:-1]]),
}


@pytest.mark.parametrize('name', LEAVES_NOTHING)
def test_a_program_that_only_mixes_is_cut_whole(name):
    _, local = positions_of(LEAVES_NOTHING[name], H)
    assert jacobian(LEAVES_NOTHING[name])[~np.eye(4, dtype=bool)].any()
    assert not local[~np.eye(4, dtype=bool)].any()


def primitive(name, fn):
    """A primitive with a derivative and no rule in the table."""
    p = Primitive(name)
    p.def_impl(fn)
    p.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(p, mlir.lower_fun(fn, multiple_results=False))
    ad.primitive_jvps[p] = lambda xs, ts: jax.jvp(
        fn, xs, tuple(ad.instantiate_zeros(t) for t in ts)
    )
    batching.primitive_batchers[p] = lambda xs, dims: (jax.vmap(fn, dims)(*xs), 0)
    return p


bump_p = primitive('test_bump', lambda x: jnp.exp(-x * x))
swap_p = primitive('test_swap', lambda x: x[::-1] * 2)
sometimes_p = primitive(
    'test_sometimes', lambda x: x + jnp.where(x > 0.5, 1.0, 0.0) * x[::-1]
)


@pytest.fixture
def table():
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


@pytest.mark.parametrize(
    ('p', 'kind'),
    [(bump_p, 'elementwise'), (swap_p, 'mixing'), (sometimes_p, 'mixing')],
)
def test_the_probe_finds_out(p, kind):
    fn = lambda h: p.bind(h) + h
    eqn = jax.make_jaxpr(fn)(H).jaxpr.eqns[0]
    assert is_elementwise(eqn) == (kind == 'elementwise')
    found, local = positions_of(fn, H)
    assert [(e.primitive.name, k) for e, k in found.gaps] == [(p.name, kind)]
    assert not local[~np.eye(4, dtype=bool)].any()
    assert bool(found.found) == (kind == 'mixing')


def test_register_primitive(table):
    swap = lambda h: swap_p.bind(h) + h
    register_primitive(swap_p, 'mixing')
    found, local = positions_of(swap, H)
    assert not found.gaps
    np.testing.assert_allclose(local, np.eye(4))

    bump = lambda h: bump_p.bind(h)
    register_primitive('test_bump', 'elementwise')
    found, local = positions_of(bump, H)
    assert not found.gaps
    np.testing.assert_allclose(local, jacobian(bump), rtol=1e-6)

    def reverse(eqn, outs, const):
        return [outs[0][::-1]]

    register_primitive(swap_p, reverse)
    twice = lambda h: swap_p.bind(swap_p.bind(h))
    found, local = positions_of(twice, H)
    assert not found.found
    np.testing.assert_allclose(local, 4 * np.eye(4))
    assert positions_of(swap, H)[0].found

    register_primitive(bump_p, mixing_labels, constant_operands=(0,))
    assert not positions_of(lambda h: bump(h) + h, H)[0].found
    with pytest.raises(ValueError, match="'diagonal'"):
        register_primitive(bump_p, 'diagonal')
