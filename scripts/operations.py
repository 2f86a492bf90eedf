"""Which primitives the operations of the ecosystem are made of, and how the compiler treats each.

Walks cells, neurons, synapses, layers and activations of brainstate, brainpy.state, braintools and brainevent,
`jax.nn` and common functions of `jax.numpy`, traces each on small arrays and lists every primitive with its family.

python scripts/operations.py
"""

import inspect
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator

import brainevent
import brainpy.state
import brainstate
import braintools
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.ode import odeint
from jax.scipy import special

from braintrace.compat import is_differentiable, open_jaxpr, structure, sub_programs
from braintrace.operations import REGISTRY
from braintrace.program import normal_form

OPAQUE = {
    'pure_callback': 'no derivative',
    'io_callback': 'no derivative',
    'debug_callback': 'no derivative',
}
"""Primitives through which no credit passes; the report says so, with the line of the model."""

# ---------------------------------------------------------------- what is walked

CLOCK = {'dt': 0.1 * u.ms, 't': 1.0 * u.ms, 'i': 10}
IMAGES = [(8, 4), (4, 4, 4), (4, 4, 4, 4)]
LAYERS = [
    (),
    (4,),
    (4, 4),
    *((n,) for n in IMAGES),
    *((n, 4, 3) for n in IMAGES),
    (2,),
    ((4,), 4),
    (2, (8, 4)),
]
ARRAYS = [(2, 4), (4,), (8, 4), (2, 8, 4), (2, 4, 4, 4), (2, 4, 4, 4, 4)]
PACKAGES = {
    brainstate.nn: (
        LAYERS,
        [[jnp.full(shape, 0.3)] * n for n in (1, 2) for shape in ARRAYS] + [[]],
    ),
    brainpy.state: (
        [(4,), (), (4, 4)],
        [[], [jnp.full(4, 0.3) * u.mA], [jnp.full(4, 0.3)], [jnp.full(4, 0.3) * u.pA]],
    ),
}
"""Arguments with which to try to build the modules of a package, and inputs with which to try to call them."""


SPARSE = brainevent.CSR((jnp.ones(4), np.arange(4), np.arange(5)), shape=(4, 4))
nn = brainstate.nn
BUILDERS: dict[str, Callable] = {
    'Dropout': lambda: nn.Dropout(0.5),
    'AlphaDropout': lambda: nn.AlphaDropout(0.5),
    'Embedding': lambda: nn.Sequential(
        Step(lambda x: jnp.int32(x)), nn.Embedding(3, 4)
    ),
    'GroupNorm': lambda: nn.GroupNorm((4,), 2),
    'LoRA': lambda: nn.LoRA(4, 2, 4),
    'FixedNumConn': lambda: nn.FixedNumConn(4, 4, 2, 0.1),
    'EventFixedNumConn': lambda: nn.EventFixedNumConn(4, 4, 2, 0.1),
    'EventFixedProb': lambda: nn.EventFixedProb(4, 4, 0.5, 0.1),
    'SparseLinear': lambda: nn.SparseLinear(SPARSE),
    'exp_euler_step': lambda: Step(
        lambda x: nn.exp_euler_step(lambda v: -v / (10.0 * u.ms), x)
    ),
    'brainevent.CSR': lambda: Step(lambda x: x @ SPARSE),
    'brainevent.BinaryArray': lambda: Step(
        lambda x: brainevent.BinaryArray((x > 0.2) * 1.0) @ SPARSE
    ),
}
"""Modules that need arguments of their own."""


class Step(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function

    def update(self, x):
        return self.function(x)


def modules(package) -> dict[str, type]:
    """The modules that a package exports."""
    found = {n: getattr(package, n) for n in dir(package) if n[0] != '_'}
    return {
        n: c
        for n, c in found.items()
        if inspect.isclass(c) and issubclass(c, brainstate.nn.Module)
    }


def traced_module(cls: type, builds: list, calls: list):
    """The program of one step of a module, by the first arguments that fit; None where none do."""
    for sizes in builds:
        try:
            model = brainstate.nn.init_all_states(cls(*sizes))
        except Exception:
            continue
        for inputs in calls:
            try:
                return brainstate.transform.make_jaxpr(
                    lambda *xs, model=model: model(*xs)
                )(*inputs)[0]
            except Exception:
                continue
    return None


def traced_function(function: Callable):
    """The program of a function of one array or two; None where none fits."""
    for arguments in (
        [(2, 4)],
        [(2, 4), (2, 4)],
        [(4,)],
        [(4, 4)],
        [(4, 4), (4,)],
        [(4, 4), (4, 4)],
    ):
        try:
            return jax.make_jaxpr(function)(
                *(
                    jnp.full(shape, 0.3) + jnp.arange(shape[-1]) * 0.1
                    for shape in arguments
                )
            )
        except Exception:
            continue
    return None


@jax.custom_vjp
def own_vjp(v):
    return jnp.where(v > 0, 1.0, 0.0)


own_vjp.defvjp(lambda v: (own_vjp(v), v), lambda v, g: (g / (1 + v * v),))
own_jvp = jax.custom_jvp(lambda v: jnp.clip(v, -0.5, 0.5))
own_jvp.defjvp(lambda primals, tangents: (own_jvp(*primals), tangents[0]))

KEY = jax.random.key(0)
INDEX = np.array([2, 0, 1])
MATRIX = lambda x: x @ x.T + 4 * jnp.eye(len(x))
COMMON: dict[str, Callable] = {
    'where': lambda x: jnp.where(x > 0.4, x, 0.1 * x),
    'clip': lambda x: jnp.clip(x, 0.2, 0.5),
    'sort': jnp.sort,
    'argsort': lambda x: x[:, jnp.argsort(x[0])],
    'top_k': lambda x: lax.top_k(x, 2),
    'cumsum': lambda x: jnp.cumsum(x, 1),
    'cumprod': lambda x: jnp.cumprod(x, 1),
    'cummax': lambda x: lax.cummax(x, 1),
    'logcumsumexp': lambda x: lax.cumlogsumexp(x, 1),
    'associative_scan': lambda x: lax.associative_scan(jnp.add, x, axis=1),
    'fft': lambda x: jnp.fft.fft(x).real,
    'rfft': lambda x: jnp.fft.irfft(jnp.fft.rfft(x)),
    'complex': lambda x: jnp.abs(lax.complex(x, 2 * x) * jnp.exp(1j * x)),
    'angle': lambda x: jnp.angle(x + 1j),
    'integer side path': lambda x: x * jnp.sum(jnp.floor(x).astype(int) % 3),
    'boolean side path': lambda x: x * jnp.any(x > 0.5) * ~jnp.isnan(x),
    'bitcast': lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32), jnp.float32),
    'dynamic_slice': lambda x: lax.dynamic_slice_in_dim(x, jnp.int32(x[0, 0]), 2, 1),
    'dynamic_update_slice': lambda x: lax.dynamic_update_slice(x, x[:, :1], (0, jnp.int32(x[0, 0]))),
    'ring buffer': lambda x: x.at[jnp.int32(x[0, 0]) % 2].set(x[1])[jnp.int32(x[0, 1]) % 2],
    'roll': lambda x: jnp.roll(x, 1, 1),
    'rolled by data': lambda x: jnp.roll(x, jnp.int32(x[0, 0]), 1),
    'random normal': lambda x: x + jax.random.normal(KEY, x.shape),
    'random gamma': lambda x: jax.random.gamma(KEY, x),
    'dropout': lambda x: jnp.where(jax.random.bernoulli(KEY, 0.5, x.shape), x / 0.5, 0.0),
    'stop_gradient': lax.stop_gradient,
    'custom_vjp': own_vjp,
    'custom_jvp': own_jvp,
    'pure_callback': lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    'debug print': lambda x: (jax.debug.print('{}', x[0, 0]), x)[1],
    'while_loop': lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: 2 * c, x),
    'fori_loop': lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c), x),
    'scan': lambda x: lax.scan(lambda c, r: (c + r, c * r), x[0], x),
    'map': lambda x: lax.map(jnp.tanh, x),
    'cond': lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    'switch': lambda x: lax.switch(jnp.int32(x[0, 0]), [jnp.sin, jnp.cos, jnp.tanh], x),
    'remat': jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))),
    'jit': jax.jit(jnp.tanh),
    'vmap': jax.vmap(jnp.cumsum),
    'einsum': lambda x: jnp.einsum('bi,bj,ij->bij', x, x, jnp.ones((4, 4))),
    'tensordot': lambda x: jnp.tensordot(x, x, ((1,), (1,))),
    'kron': lambda x: jnp.kron(x, x),
    'convolve': lambda x: jnp.convolve(x[0], x[1]),
    'conv': lambda x: lax.conv_general_dilated(x[:, None], x[:1, None, :2], (1,), 'SAME'),
    'grouped conv': lambda x: lax.conv_general_dilated(x[None], x[:, None, :2], (1,), 'SAME', feature_group_count=2),
    'transposed conv': lambda x: lax.conv_transpose(x[..., None], x[0, :2, None, None], (2,), 'SAME'),
    'patches': lambda x: lax.conv_general_dilated_patches(x[:, None], (2,), (1,), 'SAME'),
    'max pool': lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), 'VALID'),
    'mean pool': lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), 'VALID') / 2,
    'segment_sum': lambda x: jax.ops.segment_sum(x.T, np.array([0, 1, 1, 0]), 2),
    'segment_max': lambda x: jax.ops.segment_max(x.T, np.array([0, 1, 1, 0]), 2),
    'segment by data': lambda x: jax.ops.segment_sum(x.T, jnp.int32(x[0]), 2),
    'gather': lambda x: x[:, INDEX],
    'gather by data': lambda x: x[:, jnp.int32(x[0])],
    'take_along_axis': lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
    'scatter': lambda x: x.at[:, INDEX].set(1.0),
    'scatter add': lambda x: x.at[:, INDEX].add(x[:, :3]),
    'scatter max': lambda x: x.at[:, INDEX].max(0.5),
    'scatter apply': lambda x: x.at[:, 1].apply(jnp.sin),
    'one_hot': lambda x: jax.nn.one_hot(jnp.int32(x[0]), 3) * x[0, 0],
    'layer norm': lambda x: jax.nn.standardize(x),
    'l2 norm': lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True),
    'var': lambda x: jnp.var(x, 1),
    'median': lambda x: jnp.median(x, 1),
    'quantile': lambda x: jnp.quantile(x, 0.3, 1),
    'solve': lambda x: jnp.linalg.solve(MATRIX(x), x),
    'inv': lambda x: jnp.linalg.inv(MATRIX(x)),
    'det': lambda x: jnp.linalg.slogdet(MATRIX(x)),
    'cholesky': lambda x: jnp.linalg.cholesky(MATRIX(x)),
    'qr': lambda x: jnp.linalg.qr(x.T),
    'svd': lambda x: jnp.linalg.svd(x, full_matrices=False),
    'eigh': lambda x: jnp.linalg.eigh(MATRIX(x)),
    'expm': lambda x: jax.scipy.linalg.expm(MATRIX(x)),
    'triangular solve': lambda x: jax.scipy.linalg.solve_triangular(MATRIX(x), x),
    'interp': lambda x: jnp.interp(x, jnp.array([0.0, 0.5, 1.0]), jnp.array([1.0, 3.0, 2.0])),
    'piecewise': lambda x: jnp.piecewise(x, [x < 0.4], [lambda v: v, lambda v: v**2]),
    'polyval': lambda x: jnp.polyval(jnp.array([1.0, 2.0]), x),
    'erf': lambda x: special.erf(x) + special.erfinv(0.5 * x),
    'gammaln': lambda x: special.gammaln(x) + special.digamma(x) + special.betainc(x, x, x),
    'bessel': lambda x: special.i0e(x) + special.i1e(x),
    'xlogy': lambda x: special.xlogy(x, x) + special.ndtr(x),
    'powers': lambda x: x**3 + x**1.5 + jnp.cbrt(x) + lax.rsqrt(x) + jnp.sqrt(x) + jnp.exp2(x) + jnp.log2(x),
    'trigonometry': lambda x: sum(f(0.5 * x) for f in (jnp.tan, jnp.arcsin, jnp.arccos, jnp.arctan, jnp.sinh, jnp.cosh,
                                                        jnp.arcsinh, jnp.arctanh, jnp.sinc)) + jnp.arccosh(1 + x),
    'rounding': lambda x: jnp.round(x) + jnp.ceil(x) + jnp.trunc(x) + x % 0.3 + x // 0.2 + jnp.nextafter(x, 2.0),
    'joining': lambda x: jnp.concatenate([jnp.stack([x, x])[0], jnp.pad(x, ((1, 0), (0, 0)))[1:], jnp.tile(x, (1, 1))]),
    'splitting': lambda x: jnp.split(x, 2, 1)[0] + jnp.array_split(x, 2, 1)[1],
    'padding': lambda x: sum(jnp.pad(x, 1, mode=mode) for mode in ('reflect', 'wrap', 'edge', 'linear_ramp')),
    'axes': lambda x: jnp.moveaxis(jnp.swapaxes(jnp.expand_dims(x, 0), 1, 2), 0, 1).reshape(4, 2, order='F').squeeze(),
    'triangles': lambda x: jnp.tril(x) + jnp.triu(x) + jnp.diag(x[0])[:2],
    'reductions': lambda x: x.sum() + x.mean() + x.max() + x.min() + x.prod() + jnp.logaddexp.reduce(x[0]),
    'arg reductions': lambda x: x[0, jnp.argmax(x[0])] + jnp.argmin(x),
    'nan handling': lambda x: jnp.nan_to_num(x) + jnp.nansum(x) + jnp.nanmax(x),
    'bfloat16': lambda x: (x.astype(jnp.bfloat16) * 2).astype(jnp.float32) + lax.reduce_precision(x, 5, 10),
    'mixed product': lambda x: lax.dot(jnp.bfloat16(x), jnp.bfloat16(x.T), preferred_element_type=jnp.float32),
    'ragged select': lambda x: lax.select_n(jnp.int32(x) % 3, x, 2 * x, 3 * x),
    'clamped index': lambda x: lax.dynamic_index_in_dim(x, 5, 0),
    'barrier': lambda x: lax.optimization_barrier(x),
    'reduce': lambda x: lax.reduce(x, 1.0, lax.mul, (1,)),
    'searchsorted': lambda x: x * jnp.searchsorted(x[0], 0.5),
    'histogram': lambda x: jnp.bincount(jnp.int32(x[0]), length=3) * x[0, 0],
    'ode solver': lambda x: odeint(lambda y, t: -y, x, jnp.array([0.0, 1.0])),
}  # fmt: skip


def walk_modules() -> Iterator[tuple[str, object]]:
    """(name, program) of every module; the program is None where no example arguments fit."""
    with brainstate.environ.context(**CLOCK, fit=True):
        for package, examples in PACKAGES.items():
            for name, cls in modules(package).items():
                if name not in BUILDERS:
                    yield f'{package.__name__}.{name}', traced_module(cls, *examples)


def walk_functions() -> Iterator[tuple[str, object]]:
    """The same of functions, and of modules that are built by hand."""
    with brainstate.environ.context(**CLOCK, fit=True):
        for name, build in BUILDERS.items():
            yield name, traced_module(build, [()], PACKAGES[nn][1])
    for package in (jax.nn, braintools.surrogate, brainstate.nn):
        for name in dir(package):
            function = getattr(package, name, None)
            if (
                name[0] != '_' and inspect.isfunction(inspect.unwrap(function))
                if callable(function)
                else False
            ):
                yield f'{package.__name__}.{name}', traced_function(function)
    for name, function in COMMON.items():
        yield (
            name,
            jax.make_jaxpr(function)(jnp.full((2, 4), 0.3) + jnp.arange(4) * 0.1),
        )


# ---------------------------------------------------------------- what is said of each


def primitives(program) -> Iterator:
    """Every equation of a program in normal form, bodies included."""
    for eqn in open_jaxpr(program).eqns:
        yield eqn
        for sub in sub_programs(eqn):
            yield from primitives(sub.jaxpr)


def treatment(eqn) -> str:
    """The family of an equation, how it is entered, or why no credit passes it; 'gap' if the compiler does not know."""
    name, kind = eqn.primitive.name, structure(eqn)
    if name in OPAQUE:
        return f'opaque, diagnosed: {OPAQUE[name]}'
    if kind != 'none':
        return f'entered ({kind})'
    if name in REGISTRY:
        return REGISTRY[name].family
    if not any(map(is_differentiable, eqn.invars)) or not any(
        map(is_differentiable, eqn.outvars)
    ):
        return 'no derivative'
    return 'gap'


class Coverage:
    """What the walk found."""

    def __init__(self, items):
        self.users: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.walked, self.skipped = [], []
        for name, program in items:
            if program is None:
                self.skipped.append(name)
                continue
            self.walked.append(name)
            for eqn in primitives(normal_form(program)):
                users = self.users[treatment(eqn), eqn.primitive.name]
                if name not in users:
                    users.append(name)

    @property
    def gaps(self) -> dict[str, list[str]]:
        """Primitives on differentiable paths that the compiler does not know, and who uses them."""
        return {
            primitive: users
            for (how, primitive), users in self.users.items()
            if how == 'gap'
        }

    def __str__(self) -> str:
        lines = [
            f'{len(self.walked)} operations, {len({p for _, p in self.users})} primitives'
        ]
        for how in sorted({h for h, _ in self.users}):
            names = sorted(p for h, p in self.users if h == how)
            lines += [f'\n{how} ({len(names)})', '  ' + ' '.join(names)]
        lines += [
            f'\nno example arguments fit ({len(self.skipped)})',
            '  ' + ' '.join(self.skipped),
        ]
        return '\n'.join(lines)


def coverage(all_modules: bool) -> Coverage:
    """What is found in functions, and in every module of the packages if that is wanted."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return Coverage([*walk_functions(), *(walk_modules() if all_modules else ())])


if __name__ == '__main__':
    found = coverage(all_modules=True)
    print(found)
    for primitive, users in found.gaps.items():
        print(f'gap: {primitive} in {", ".join(users)}')
    sys.exit(bool(found.gaps))
