"""Runs traced programs in NumPy: tiny programs that are run once are not worth compiling.

A primitive without a line here is run by JAX itself.
"""

import functools
import operator
from collections.abc import Callable

import jax
import numpy as np
from scipy import special

from braintrace.compat import (
    consts_of,
    is_var,
    open_jaxpr,
    read_branches,
    read_scan,
    structure,
    sub_programs,
)

RULES: dict[str, Callable] = {}


def traced(function, *args):
    """A function of arrays that runs in NumPy, traced once on examples of its arguments."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    tree = jax.tree.structure(shape)

    def call(*args):
        with np.errstate(all='ignore'):
            return jax.tree.unflatten(
                tree, run(closed, [np.asarray(x) for x in jax.tree.leaves(args)])
            )

    return call


def is_key(x):
    """Whether a value has random keys, which NumPy does not."""
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)


def array(x):
    return x if is_key(x) else np.asarray(x)


def run(closed, args):
    """The results of a program."""
    jaxpr = open_jaxpr(closed)
    env = dict(zip(jaxpr.constvars, map(array, consts_of(closed)), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    read = lambda v: env[v] if is_var(v) else np.asarray(v.val, v.aval.dtype)
    for eqn in jaxpr.eqns:
        env.update(
            zip(eqn.outvars, results(eqn, [read(v) for v in eqn.invars]), strict=True)
        )
    return [read(v) for v in jaxpr.outvars]


def results(eqn, operands):
    kind = structure(eqn)
    if kind in ('custom', 'call'):
        (sub,) = sub_programs(eqn)
        return run(sub.jaxpr, operands)
    if kind == 'cond':
        branches = read_branches(eqn)
        return run(
            branches[int(np.clip(operands[0], 0, len(branches) - 1))], operands[1:]
        )
    if kind == 'scan' and 'length' in eqn.params:  # a loop has none, and is run by JAX
        return scan(eqn, operands)
    rule = RULES.get(eqn.primitive.name)
    if rule is not None and not any(map(is_key, operands)):
        found = rule(eqn.params, *operands)
        found = found if isinstance(found, list) else [found]
        return [
            np.asarray(x, v.aval.dtype) for x, v in zip(found, eqn.outvars, strict=True)
        ]
    found = eqn.primitive.bind(*operands, **eqn.params)
    return list(map(array, found if eqn.primitive.multiple_results else [found]))


def scan(eqn, operands):
    parts = read_scan(eqn)
    a, b = parts.num_consts, parts.num_consts + parts.num_carry
    carry, ys = operands[a:b], []
    steps = range(eqn.params['length'])
    order = steps[::-1] if eqn.params['reverse'] else steps
    for t in order:
        out = run(parts.body, [*operands[:a], *carry, *(x[t] for x in operands[b:])])
        carry = out[: parts.num_carry]
        ys.append(out[parts.num_carry :])
    stacked = [
        np.stack(y)
        for y in zip(*(ys[::-1] if eqn.params['reverse'] else ys), strict=True)
    ]
    if not ys:
        stacked = [
            np.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars[parts.num_carry :]
        ]
    return [*carry, *stacked]


# ---------------------------------------------------------------- element-wise


def expit(x):
    return 1 / (1 + np.exp(-x)) if np.iscomplexobj(x) else special.expit(x)


for names, function in {
    'add add_any': np.add, 'sub': np.subtract, 'mul': np.multiply, 'neg': np.negative, 'sin': np.sin, 'cos': np.cos,
    'tanh': np.tanh, 'exp': np.exp, 'log': np.log, 'log1p': np.log1p, 'expm1': np.expm1, 'sqrt': np.sqrt,
    'abs': np.abs, 'sign': np.sign, 'floor': np.floor, 'max': np.maximum, 'min': np.minimum, 'pow': np.power,
    'logistic': expit, 'erf': special.erf, 'square': np.square, 'atan2': np.arctan2, 'eq': np.equal,
    'ne': np.not_equal, 'lt': np.less, 'le': np.less_equal, 'gt': np.greater, 'ge': np.greater_equal,
    'and': np.bitwise_and, 'or': np.bitwise_or, 'not': np.bitwise_not, 'real': np.real, 'imag': np.imag,
    'is_finite': np.isfinite, 'rem': np.fmod, 'conj': np.conj, 'rsqrt': lambda x: 1 / np.sqrt(x),
    'stop_gradient copy copy_p cut optimization_barrier mul_any': lambda x: x, 'complex': lambda a, b: a + 1j * b,
    'select_n': lambda c, *x: np.where(c, x[1], x[0]) if len(x) == 2 else np.choose(c, x),
    'clamp': lambda a, x, b: np.clip(x, a, b),
    'div': lambda a, b: a / b if np.issubdtype(a.dtype, np.inexact) else np.fix(a / b).astype(a.dtype),
}.items():  # fmt: skip
    for name in names.split():
        RULES[name] = functools.partial(lambda f, params, *x: f(*x), function)

RULES['convert_element_type'] = lambda p, x: (
    x if np.issubdtype(p['new_dtype'], np.complexfloating) else x.real
).astype(p['new_dtype'])
RULES['integer_pow'] = lambda p, x: x ** p['y'] if p['y'] >= 0 else 1 / x ** -p['y']

# ---------------------------------------------------------------- movement

RULES['reshape'] = lambda p, x: x.transpose(p['dimensions'] or range(x.ndim)).reshape(
    p['new_sizes']
)
RULES['squeeze'] = lambda p, x: np.squeeze(x, tuple(p['dimensions']))
RULES['expand_dims'] = lambda p, x: np.expand_dims(x, tuple(p['dimensions']))
RULES['transpose'] = lambda p, x: np.transpose(x, p['permutation'])
RULES['rev'] = lambda p, x: np.flip(x, p['dimensions'])
RULES['concatenate'] = lambda p, *x: np.concatenate(x, p['dimension'])
RULES['split'] = lambda p, x: np.split(x, np.cumsum(p['sizes'])[:-1], p['axis'])
RULES['unstack'] = lambda p, x: list(np.moveaxis(x, p['axis'], 0))
RULES['stack'] = lambda p, *x: np.stack(x, p['axis'])


@functools.partial(RULES.__setitem__, 'iota')
def iota(p):
    shape = [
        p['shape'][d] if d == p['dimension'] else 1 for d in range(len(p['shape']))
    ]
    return np.broadcast_to(
        np.arange(p['shape'][p['dimension']], dtype=p['dtype']).reshape(shape),
        p['shape'],
    )


@functools.partial(RULES.__setitem__, 'broadcast_in_dim')
def broadcast_in_dim(p, x):
    shape = [1] * len(p['shape'])
    for d, n in zip(p['broadcast_dimensions'], x.shape, strict=True):
        shape[d] = n
    return np.broadcast_to(x.reshape(shape), p['shape'])


@functools.partial(RULES.__setitem__, 'slice')
def slice_(p, x):
    strides = p['strides'] or (1,) * x.ndim
    return x[tuple(map(slice, p['start_indices'], p['limit_indices'], strides))]


def _box(x, sizes, starts):
    at = [
        int(np.clip(s, 0, n - m))
        for s, n, m in zip(starts, x.shape, sizes, strict=True)
    ]
    return tuple(slice(a, a + m) for a, m in zip(at, sizes, strict=True))


RULES['dynamic_slice'] = lambda p, x, *starts: x[_box(x, p['slice_sizes'], starts)]


@functools.partial(RULES.__setitem__, 'dynamic_update_slice')
def dynamic_update_slice(p, x, update, *starts):
    x = np.array(x)
    x[_box(x, update.shape, starts)] = update
    return x


@functools.partial(RULES.__setitem__, 'pad')
def pad(p, x, value):
    if any(low < 0 or high < 0 for low, high, _ in p['padding_config']):
        return np.asarray(jax.lax.pad(x, value, p['padding_config']))
    sizes = [
        (n, low, high, inner)
        for n, (low, high, inner) in zip(x.shape, p['padding_config'], strict=True)
    ]
    wide = lambda n, inner: n + max(n - 1, 0) * inner
    out = np.full(
        [low + high + wide(n, inner) for n, low, high, inner in sizes], value, x.dtype
    )
    out[
        tuple(slice(low, low + wide(n, inner), inner + 1) for n, low, _, inner in sizes)
    ] = x
    return out


# ---------------------------------------------------------------- reductions and products

for name, function in {
    'reduce_sum': np.sum, 'reduce_max': np.max, 'reduce_min': np.min, 'reduce_prod': np.prod, 'reduce_and': np.all,
    'reduce_or': np.any,
}.items():  # fmt: skip
    RULES[name] = functools.partial(
        lambda f, p, x: f(x, tuple(p['axes'])).astype(x.dtype), function
    )


def _cumulative(function, p, x):
    if p['reverse']:
        return np.flip(function(np.flip(x, p['axis']), p['axis']), p['axis'])
    return function(x, p['axis'])


for name, function in {
    'cumsum': np.cumsum,
    'cumprod': np.cumprod,
    'cummax': np.maximum.accumulate,
}.items():
    RULES[name] = functools.partial(_cumulative, function)


@functools.partial(RULES.__setitem__, 'dot_general')
def dot_general(p, a, b):
    (contract_a, contract_b), (batch_a, batch_b) = p['dimension_numbers']
    free_a = [d for d in range(a.ndim) if d not in contract_a and d not in batch_a]
    free_b = [d for d in range(b.ndim) if d not in contract_b and d not in batch_b]
    batch = [a.shape[d] for d in batch_a]
    size = lambda x, dims: functools.reduce(operator.mul, (x.shape[d] for d in dims), 1)
    left = a.transpose([*batch_a, *free_a, *contract_a]).reshape(
        *batch, size(a, free_a), size(a, contract_a)
    )
    right = b.transpose([*batch_b, *contract_b, *free_b]).reshape(
        *batch, size(b, contract_b), size(b, free_b)
    )
    return (left @ right).reshape(
        [*batch, *(a.shape[d] for d in free_a), *(b.shape[d] for d in free_b)]
    )
