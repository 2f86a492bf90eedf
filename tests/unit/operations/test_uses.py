"""Traces, gradients and factors of every kind of use of a weight, against reverse mode of
the operation itself.

Blocks of random rows P_t ∂h_t/∂y_t, products P_0 and credit γ_0 of two components go
through the layout of a use. What credit gives at the end must be the sum over all steps
of the pull-back of (credit · products · rows); how a trace is stored does not matter.
"""

import functools

import brainevent
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.arrays import cast
from braintrace.compat import is_var
from braintrace.compiled_step import CompiledSite
from braintrace.operations import SharedUse, operation_of, use_of, whole_traces
from braintrace.program.normal import normal_form
from braintrace.solver.factors import FactorLayout

T, B, INPUTS, OUTPUTS, VALUES = 4, 3, 4, 5, 6
COMPONENTS = (0, 1)


def dense(subscripts):
    return lambda x, w: jnp.einsum(subscripts, x, w)


def rows_of_table(mode):
    def take(x, w):
        start = x.ndim
        numbers = jax.lax.GatherDimensionNumbers(
            tuple(range(start, start + w.ndim - 1)), (0,), (0,)
        )
        sizes = (1, *w.shape[1:])
        return jax.lax.gather(w, x[..., None], numbers, sizes, mode=mode, fill_value=0)

    return take


def convolution(numbers, stride=1, groups=1):
    return lambda x, w: jax.lax.conv_general_dilated(
        x,
        w,
        (stride,),
        [(1, 2)],
        dimension_numbers=numbers,
        feature_group_count=groups,
        rhs_dilation=(2,),
    )


PRE = np.array([0, 1, 1, 2, 3, 3], np.int32)
ENDS = np.array([0, 2, 3, 3, 6], np.int32)  # rows of synapses; one is empty


def sparse(x, w):
    matrix = brainevent.CSR((w, PRE % OUTPUTS, ENDS), shape=(4, OUTPUTS))
    return (x.T @ matrix).T if x.ndim == 2 else x @ matrix


CASES = {
    'dense': (dense('bi,io->bo'), (B, INPUTS), (INPUTS, OUTPUTS)),
    'dense, outputs first': (dense('bi,oi->bo'), (B, INPUTS), (OUTPUTS, INPUTS)),
    'dense, one sample': (dense('i,io->o'), (INPUTS,), (INPUTS, OUTPUTS)),
    'dense, samples last': (dense('ib,io->ob'), (INPUTS, B), (INPUTS, OUTPUTS)),
    'dense, samples twice': (dense('bpi,io->bpo'), (B, 2, INPUTS), (INPUTS, OUTPUTS)),
    'dense, groups': (dense('bgi,gio->bgo'), (B, 2, INPUTS), (2, INPUTS, OUTPUTS)),
    'dense, two axes summed': (
        dense('bij,ijo->bo'),
        (B, INPUTS, 2),
        (INPUTS, 2, OUTPUTS),
    ),
    'bias': (lambda x, w: jax.lax.add(x, w), (B, OUTPUTS), (B, OUTPUTS)),
    'gain': (lambda x, w: jax.lax.mul(x, w), (B, OUTPUTS), (B, OUTPUTS)),
    'gain, one row': (lambda x, w: jax.lax.mul(x, w), (B, OUTPUTS), (1, OUTPUTS)),
    'number': (lambda x, w: jax.lax.mul(x, w), (B, OUTPUTS), ()),
    'atan2': (lambda x, w: jax.lax.atan2(x, w), (B, OUTPUTS), (1, OUTPUTS)),
    'embedding': (rows_of_table('clip'), (B,), (VALUES, OUTPUTS)),
    'embedding, fill': (rows_of_table('fill'), (B, 2), (VALUES, OUTPUTS)),
    'embedding, one sample': (rows_of_table('fill'), (), (VALUES, OUTPUTS)),
    'embedding of matrices': (rows_of_table('clip'), (B,), (VALUES, 2, OUTPUTS)),
    'convolution': (convolution(('NWC', 'WIO', 'NWC')), (B, 7, 2), (3, 2, OUTPUTS)),
    'convolution, stride': (
        convolution(('NCW', 'OIW', 'NCW'), 2),
        (B, 2, 7),
        (OUTPUTS, 2, 3),
    ),
    'convolution, groups': (
        convolution(('NWC', 'WIO', 'NWC'), groups=2),
        (B, 7, 4),
        (3, 2, 6),
    ),
    'synapses': (sparse, (4, B), PRE.shape),
    'synapses, one sample': (sparse, (4,), PRE.shape),
    'one weight for all synapses': (sparse, (4, B), (1,)),
    'anything': (lambda x, w: jax.lax.cumsum(w, axis=1), (), (B, OUTPUTS)),
}
BY_INPUT = [name for name in CASES if name.startswith(('dense', 'conv', 'syn', 'one'))]
ELEMENTWISE = ['bias', 'gain', 'gain, one row', 'number', 'atan2']
SHARED = ['dense', 'dense, outputs first', 'dense, groups', 'dense, samples twice']
SHARED += ['bias', 'gain', 'number', 'embedding', 'convolution', 'synapses', 'anything']


class Case:
    """A use, and numbers for some blocks; ``weight``: the type of w, ``data``: that of x."""

    def __init__(self, name, weight='float64', data=None, share=False):
        function, x, w = CASES[name]
        self.random, self.weight_type = np.random.default_rng(len(name)), weight
        self.data_type = data or weight
        if name.startswith('embedding'):
            self.data_type = 'int32'
        self.w = self.draw(weight, *w)
        struct = jax.ShapeDtypeStruct(x, self.data_type)
        closed = normal_form(jax.make_jaxpr(function)(struct, self.w))
        self.jaxpr, weight_var = closed.jaxpr, closed.jaxpr.invars[1]
        env = dict(zip(self.jaxpr.constvars, closed.consts, strict=True))
        constant = lambda v: v.val if not is_var(v) else env.get(v)
        found = []
        for eqn in self.jaxpr.eqns:
            if weight_var in eqn.invars:
                found.append(eqn)
            elif all(constant(v) is not None for v in eqn.invars):
                values = eqn.primitive.bind(*map(constant, eqn.invars), **eqn.params)
                env.update(zip(eqn.outvars, [np.asarray(values)], strict=False))
        (self.equation,) = found
        self.operand = self.equation.invars.index(weight_var)
        self.use = use_of(self.equation, self.operand, 0, constant)
        self.fixed = {self.operand: self.w}
        for k, v in enumerate(self.equation.invars):
            if constant(v) is not None:
                self.fixed[k] = jnp.asarray(constant(v))
        self.y_shape = self.use.result.shape
        size = int(np.prod(self.y_shape))
        self.positions = np.arange(size).reshape(self.y_shape)
        self.group_shape, self.sources = self.y_shape, None
        if share:
            shape = (self.y_shape[0], 3, *self.y_shape[1:])
            own = self.positions[:, None]
            self.sources = np.broadcast_to(own, shape).copy()
            self.sources.reshape(-1)[::7] = -1
            self.use = SharedUse.of(self.use, self.sources)
            self.positions, self.group_shape = self.use.positions, shape

    def draw(self, dtype, *shape):
        if np.dtype(dtype).kind == 'i':
            return jnp.asarray(self.random.integers(0, VALUES + 2, shape), dtype)
        values = self.random.standard_normal(shape)
        if np.dtype(dtype).kind == 'c':
            values = values + 1j * self.random.standard_normal(shape)
        return jnp.asarray(values, dtype)

    def steps(self, length):
        """Operands of some steps that are not fixed."""
        struct = lambda v: (v.aval.dtype, length, *v.aval.shape)
        invars = enumerate(self.equation.invars)
        return {k: self.draw(*struct(v)) for k, v in invars if k not in self.fixed}

    def pull(self, step, y_bar):
        """ȳ · ∂y/∂w of one step by reverse mode, in the type of the weight."""
        if self.sources is not None:
            flat = jnp.where(self.sources >= 0, y_bar, 0).reshape(-1)
            at = np.maximum(self.sources, 0).reshape(-1)
            size = int(np.prod(self.y_shape))
            y_bar = jnp.zeros(size, flat.dtype).at[at].add(flat).reshape(self.y_shape)

        def y(w):
            values = {**self.fixed, **step, self.operand: w}
            given = [values[k] for k in range(len(values))]
            found = self.equation.primitive.bind(*given, **self.equation.params)
            return found[0] if self.equation.primitive.multiple_results else found

        result, back = jax.vjp(y, self.w)
        return back(cast(y_bar, result.dtype))[0]

    def at(self, values):
        """Values of positions at the elements of y, zero where there is none."""
        found = values.reshape(-1)[np.maximum(self.positions, 0)]
        return jnp.where(self.positions >= 0, found, 0)


def real_type(dtype):
    return jnp.finfo(dtype).dtype


def check_trace(case, tolerance):
    layout = case.use.layout(case.positions, case.group_shape)
    use, group = case.use, case.group_shape
    real = real_type(use.result.dtype)
    trace_type = jnp.promote_types(real, jnp.complex64)
    trace_type = trace_type if np.dtype(case.weight_type).kind == 'c' else real
    trace = {s: jnp.zeros(layout.shape, trace_type) for s in COMPONENTS}
    # (step, cotangents of y by component) of everything that was added so far.
    added, seen = [], 0
    for length in (3, 1, T):
        steps = case.steps(length)
        size = (length, *use.result.shape)
        draw = functools.partial(case.draw, use.result.dtype, *size)
        reached = case.positions >= 0
        some = COMPONENTS[: 2 - (length == 1)]
        rows = {s: jnp.where(reached, draw(), 0) for s in some}
        product = {k: case.draw(real, *group) for k in [(0, 0), (1, 0), (1, 1)]}
        credit = {s: case.draw(real, *group) for s in COMPONENTS}
        solve = functools.partial(jax.jit(layout.solve), trace, case.fixed, steps)
        trace, gradient = solve(rows, product, credit)
        wanted = jnp.zeros_like(case.w)
        for step, bars in added:
            terms = [case.at(credit[s]) * bar for s, bar in bars.items()]
            wanted = wanted + case.pull(step, sum(terms))
        scale = max(1.0, float(jnp.abs(wanted).max()))
        found = cast(gradient, case.w.dtype)
        assert found.shape == case.w.shape
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * scale)
        seen += float(jnp.abs(wanted).max()) > 0.1
        moved = []
        for step, bars in added:
            new = {}
            for s in COMPONENTS:
                terms = [
                    case.at(product[s, r]) * bar
                    for r, bar in bars.items()
                    if (s, r) in product
                ]
                if terms:
                    new[s] = sum(terms)
            moved.append((step, new))
        for t in range(length):
            step = {k: x[t] for k, x in steps.items()}
            moved.append((step, {s: row[t] for s, row in rows.items()}))
        added = moved
    assert seen == 2  # the first block starts at zero


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize('name', CASES)
def test_traces(name):
    case = Case(name)
    check_trace(case, 1e-10)


@pytest.mark.parametrize('name', ['dense', 'convolution', 'synapses'])
def test_traces_by_kernels(name, monkeypatch):
    monkeypatch.setattr(whole_traces, 'LEAST_FOR_KERNEL', 1)
    check_trace(Case(name), 1e-10)


@pytest.mark.parametrize('name', SHARED)
def test_traces_of_pairs(name):
    check_trace(Case(name, share=True), 1e-10)


@pytest.mark.parametrize('kinds', ['cc', 'rc', 'cr'])
@pytest.mark.parametrize('name', ['dense', 'gain', 'bias', 'convolution', 'number'])
def test_traces_of_complex_numbers(name, kinds):
    """Types of w and x; operations that need equal types have these."""
    types = {'c': 'complex128', 'r': 'float64'}
    weight, data = (types[kind] for kind in kinds)
    if weight != data and name != 'dense':
        pytest.skip('the primitive takes one type')
    check_trace(Case(name, weight, data), 1e-10)


@pytest.mark.parametrize('name', [n for n in CASES if 'syn' not in n])
def test_traces_in_half_precision(name):
    check_trace(Case(name, 'bfloat16'), 0.15)


@pytest.mark.parametrize('name', CASES)
def test_gradients(name):
    case = Case(name)
    steps = case.steps(T)
    y_bars = case.draw(case.use.result.dtype, T, *case.y_shape)
    step = lambda t: {k: x[t] for k, x in steps.items()}
    wanted = sum(case.pull(step(t), y_bars[t]) for t in range(T))
    found = jax.jit(case.use.gradient)(case.fixed, steps, y_bars)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)
    if case.y_shape and case.y_shape[-1] > 2:
        box = tuple(slice(0, n) for n in case.y_shape[:-1])
        box = (*box, slice(1, case.y_shape[-1] - 1))
        inside = jnp.zeros_like(y_bars).at[:, *box].set(1) * y_bars
        wanted = sum(case.pull(step(t), inside[t]) for t in range(T))
        found = case.use.gradient(case.fixed, steps, y_bars[:, *box], box)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize('name', ['dense', 'dense, groups', 'dense, samples last'])
def test_traces_of_a_part_of_y(name):
    """Elements without a position have no trace; a box of y holds the others."""
    case = Case(name)
    axis = case.y_shape.index(OUTPUTS)
    index = [slice(None)] * len(case.y_shape)
    index[axis] = slice(1, 3)
    shape = tuple(2 if a == axis else n for a, n in enumerate(case.y_shape))
    positions = np.full(case.y_shape, -1)
    positions[tuple(index)] = np.arange(int(np.prod(shape))).reshape(shape)
    case.positions, case.group_shape = positions, shape
    check_trace(case, 1e-10)


def factor_gradient(case, decay, steps, rows, signals):
    """Gradients by factors of a site with one component."""
    site = CompiledSite('w', 'y', 0, case.use, case.positions, 'y', True)
    layout = FactorLayout(site, decay)
    xs, drives = layout.drive(case.fixed, steps, {0: rows}, len(rows))
    trace, bars, seen = layout.init((0,)), [], []
    for t in range(len(rows)):
        drive = {s: row[t] for s, row in drives.items()}
        trace = layout.advance(trace, xs[t], drive, {}, (0,))
        bars.append(layout.result_gradient(trace, layout.here({0: signals[t]})))
        seen.append(trace.x)
    return layout.gradient(case.fixed, steps, jnp.stack(bars), jnp.stack(seen))


@pytest.mark.parametrize('decay', [(0.6, 0.5), (0.6, 0.0)])
@pytest.mark.parametrize('share', [False, True])
@pytest.mark.parametrize('name', BY_INPUT + ELEMENTWISE)
def test_factors(name, share, decay):
    """ε_x is a sum of inputs, and without D there is no memory in ε_f."""
    if share and len(CASES[name][1]) == 1 and name != 'dense, one sample':
        pytest.skip('no axis for positions')
    case = Case(name, share=share)
    steps, group = case.steps(T), case.group_shape
    is_reached = case.positions >= 0
    rows = jnp.where(is_reached, case.draw('float64', T, *case.use.result.shape), 0)
    signals = case.draw('float64', T, *group)
    decay_x, decay_f = decay
    wanted, data = 0, {k: jnp.zeros_like(x[0]) for k, x in steps.items()}
    sums = []
    for t in range(T):
        step = {k: x[t] for k, x in steps.items()}
        scale = (1 - decay_f) / (1 - decay_f ** (t + 1))
        y_bar = scale * case.at(signals[t]) * rows[t]
        if case.use.input is not None:
            k = case.use.input
            data[k] = decay_x * data[k] + step[k]
            wanted += case.pull({**step, k: data[k]}, y_bar)
        elif decay_f == 0 and name != 'bias':
            sums = [*((decay_x * d, s) for d, s in sums), (1.0, step)]
            wanted += sum(case.pull(s, d * y_bar) for d, s in sums)
        else:
            count = sum(decay_x**n for n in range(t + 1))
            wanted += case.pull(step, count * y_bar)
    found = factor_gradient(case, decay, steps, rows, signals)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)


def test_every_use_is_that_of_its_operation():
    """No case falls back to the general use without notice."""
    names = {type(Case(name).use).__name__ for name in CASES if name != 'anything'}
    assert 'AnyUse' not in names
    assert operation_of(Case('synapses').equation).multiplies


SAMPLES = {
    'dense': 0,
    'dense, one sample': None,
    'dense, samples last': 0,
    'dense, groups': 0,
    'bias': None,
    'gain, one row': 0,
    'number': 0,
    'embedding': 1,
    'embedding, one sample': None,
    'convolution': 0,
    'synapses': 1,
    'synapses, one sample': None,
}


@pytest.mark.parametrize('name', SAMPLES)
def test_letters_name_the_axis_of_samples(name):
    """Of the trace; None where w has every axis of y, or there is no such axis."""
    letters = Case(name).use.letters
    at = letters.trace.find(letters.sample) if letters.sample else None
    assert at == SAMPLES[name]


def test_pairs_keep_the_axis_of_samples():
    letters = Case('dense', share=True).use.letters
    assert letters.trace.index(letters.sample) == 0
    assert letters.operands[0].index(letters.sample) == 0
