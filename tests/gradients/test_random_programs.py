"""Random step programs against JAX itself.

For every program: one step's gradient is the plain one; D-RTRL is the dense influence recursion, whatever the
length of its blocks; and each parameter's credit class is proven by numbers: `exact` is BPTT, `instantaneous` the
sum of one-step gradients, `none` no gradient at all. Where states meet position by position only, all credit is
exact: nothing is cut that need not be. By default a few programs; `make fuzz` runs many.
"""

import dataclasses
import functools
import os

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings

from braintrace.analysis.credit import NO_CREDIT, CreditAnalysis
from braintrace.graph.function_info import extract_function_info
from braintrace.program import OtherState
from interpreter import traced
from oracle import Problem, total_of
from programs import Program, draw_position_program, draw_program

STEPS = 4
SEEDS = [int(n) for n in os.environ.get('SEEDS', '0:1').split(':')]
"""Seeds first:last, each good for its own programs."""
PROGRAMS = int(os.environ.get('PROGRAMS', 15))
"""How many a seed."""


def values_of(shapes, seed, dtypes):
    rng = np.random.default_rng(seed)
    numbers = lambda shape: 0.7 * rng.standard_normal(shape)

    def value(name, shape):
        if name == 'k':
            return np.asarray(rng.integers(0, 3, shape), np.int32)
        dtype = np.dtype(dtypes.get(name, 'float64'))
        is_complex = np.issubdtype(dtype, np.complexfloating)
        return np.asarray(
            numbers(shape) + 1j * numbers(shape) if is_complex else numbers(shape),
            dtype,
        )

    return {name: value(name, shape) for name, shape in shapes.items()}


@dataclasses.dataclass
class Grouped:
    """A state that keeps several states of its positions on its last axis."""

    varshape: tuple[int, ...]
    name2index: tuple = ()


def with_roles(program, kinds):
    """The program with some states taken as groups along their last axis, and some as not hidden."""

    def grouped(h):
        shape = h.varshape[:-1]
        return dataclasses.replace(h, varshape=shape, state=Grouped(shape))

    kind = lambda h: kinds[h.path[0]]
    hidden = tuple(
        grouped(h) if kind(h) == 'group' else h
        for h in program.hidden
        if kind(h) != 'other'
    )
    others = tuple(
        OtherState(h.path, (), h.invar, h.outvar)
        for h in program.hidden
        if kind(h) == 'other'
    )
    return dataclasses.replace(program, hidden=hidden, others=others)


class Case:
    """A program with values, and everything that is compared."""

    def __init__(self, program):
        self.step, self.states = (
            program.step,
            values_of(program.states, 0, program.dtypes),
        )
        self.parameters = values_of(program.parameters, 1, program.dtypes)
        self.weights = np.asarray([1.0, 0.5, 0.0, 2.0])
        xs = [values_of(program.inputs, 2 + t, program.dtypes) for t in range(STEPS)]
        self.xs = jax.tree.map(lambda *x: np.stack(x), *xs)
        info = extract_function_info(
            self.loss_step, self.parameters, self.states, xs[0]
        )
        values = jax.tree.map(
            jnp.asarray, [self.parameters, self.states, xs[0], self.xs]
        )
        roles = with_roles(info.program, program.kinds)
        self.problem = Problem(
            roles, jax.tree.leaves(values[:3]), jax.tree.leaves(values[3]), self.weights
        )

    def loss_step(self, p, s, x):
        new, out = self.step(p, s, x)
        return new, total_of(out)

    @property
    def names(self):
        return {p.invar: p.path[0] for p in self.problem.program.parameters}

    @functools.cached_property
    def plain(self):
        """Gradient of the weighted losses by plain JAX; ``through`` scales what goes from step to step."""
        stop = jax.lax.stop_gradient
        scale = lambda a, through: through * a + stop((1 - through) * a)

        def loss(p, weights, through):
            def step(s, at):
                w, x = at
                s, out = self.loss_step(
                    p, jax.tree.map(lambda a: scale(a, through), s), x
                )
                return s, w * out

            return jnp.sum(jax.lax.scan(step, self.states, (weights, self.xs))[1])

        return traced(jax.grad(loss), self.parameters, self.weights, 1.0)

    @functools.cached_property
    def recursion(self):
        """Gradients of every step's loss by the dense influence recursion."""
        return self.problem.gradients(traced)

    def engine(self, way, block):
        """The same by the engine."""
        problem = self.problem
        engine = problem.solver()

        def solve(weights):
            given = (problem.inputs, weights, block)
            if way == 'two_pass':
                return engine.two_pass(
                    problem.parameters, problem.states, *given
                ).gradients
            return engine.one_pass(
                problem.parameters, problem.states, engine.init_traces(), *given
            ).gradients

        return traced(solve, self.weights)

    @functools.cached_property
    def credit(self):
        analysis = CreditAnalysis(self.problem.analysed)
        parameters = analysis.dependence.program.parameters
        return {p.path[0]: analysis.judge(p) for p in parameters}


WAYS = [*(('two_pass', k) for k in (4, 3, 1)), *(('one_pass', k) for k in (1, 2, 3, 4))]


def check(program, ways):
    """Everything that must hold for a program; the case for more."""
    case = Case(program)
    close = functools.partial(compare, is_narrow(program))
    start = np.eye(STEPS)[0]
    plain, single, first = (
        case.plain(case.parameters, *given)
        for given in ((case.weights, 1.0), (case.weights, 0.0), (start, 1.0))
    )
    if not all(np.abs(g).max(initial=0) < 1e8 for g in plain.values()):
        hypothesis.reject()  # states that explode: rounding alone changes gradients
    if not all(np.isfinite(g[v]).all() for g in case.recursion for v in case.names):
        hypothesis.reject()  # the oracle multiplies zeros by derivatives that overflow
    found = {}
    for way, block in ways:
        engine = case.engine(way, block)
        found, one = engine(case.weights), engine(start)
        for v, name in case.names.items():
            close(one[v], first[name], f'{name}: one step by {way}')
            wanted = sum(
                w * g[v] for w, g in zip(case.weights, case.recursion, strict=True)
            )
            close(found[v], wanted, f'{name}: {way} in blocks of {block}')
    for v, name in case.names.items():
        credit, reason = case.credit[name]
        if credit == 'none':
            close(found[v], 0 * plain[name], f'{name}: none ({reason})')
            if not reason.startswith(NO_CREDIT):
                close(0 * plain[name], plain[name], f'{name}: none ({reason})')
        elif credit != 'local':
            close(
                found[v],
                (plain if credit == 'exact' else single)[name],
                f'{name}: {credit} ({reason})',
            )
    return case


def is_narrow(program):
    """True if values of single precision are among those the program reads."""
    return any(dtype in ('float32', 'complex64') for dtype in program.dtypes.values())


def compare(narrow, found, wanted, what):
    """Two gradients; in single precision, to what rounding leaves of a few steps of cancelling terms."""
    rtol, atol, least = (1e-2, 1e-3, 1e-4) if narrow else (1e-6, 1e-7, 1e-4)
    size = max(np.abs(wanted).max(initial=0), least)
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol * size, err_msg=what)


def program(text, parameters, states, inputs, kinds={}, dtypes={}):
    """A program from its lines; the last names the new states and the output."""
    *lines, written, output = [line.strip() for line in text.strip().splitlines()]
    kinds = dict.fromkeys(states, 'hidden') | kinds
    written = dict(zip(states, written.split(), strict=True))
    return Program(parameters, states, kinds, inputs, lines, written, [output], dtypes)


FOUND = {  # what random programs have found, made small
    'a step keeps an array without elements': program(
        """v0 = jnp.tensordot(x['x'], p['w'], 1)
        v1 = jnp.concatenate([v0[..., :1], jnp.broadcast_to(v0[..., 1:], (0,))], -1)
        v2 = 0.7 * s['h'] + nn.sigmoid(p['a']) * v1
        v2
        v2""",
        {'w': (2, 2), 'a': ()}, {'h': (1,)}, {'x': (2,)},
    ),
    'no input is read by the core': program(
        """v0 = 0.8 * s['h'] + p['w']
        v0
        v0 * x['x']""",
        {'w': (3,)}, {'h': (3,)}, {'x': ()},
    ),
    'other state beside a weight, read by no loss': program(
        """v0 = 0.8 * s['o'] + (x['x'] @ p['w'])
        v0 v0
        x['x']""",
        {'w': (2, 3)}, {'o': (3,), 'h': (3,)}, {'x': (2,)}, {'o': 'other'},
    ),
    'old value of an other state in the local step': program(
        """v0 = 0.8 * s['o'] + s['h']
        v1 = jnp.tanh(s['h'] @ p['w'] + (s['h'] @ p['w'] + s['o']))
        v0 v1
        x['x'] @ p['w']""",
        {'w': (3, 3)}, {'o': (3,), 'h': (3,)}, {'x': (3,)}, {'o': 'other'},
    ),
    'loop with a result that reads no state': program(
        """v0 = lax.scan(lambda a, b: (0.7 * a, a + b), jnp.zeros(3), s['h'])[0] + x['x']
        v1 = 0.8 * s['h'] + v0
        v1
        (v1 + v0) @ p['w']""",
        {'w': (3, 2)}, {'h': (1, 3)}, {'x': (3,)},
    ),
    'one row of a batched product': program(
        """v0 = 0.8 * s['h'] + jnp.einsum('ij,ijk->ik', x['x'], p['w'])[1, 1]
        v0
        v0""",
        {'w': (2, 3, 3)}, {'h': ()}, {'x': (2, 3)},
    ),
    'part of a product from the left': program(
        """v0 = 0.8 * s['h'] + (p['w'] @ x['x']).ravel()[:2]
        v0
        v0""",
        {'w': (2, 2)}, {'h': (2,)}, {'x': (2, 3)},
    ),
    'weights of a constant state': program(
        """v0 = jnp.full((1, 3), 0.3)
        v1 = 0.8 * s['h'] + v0 @ p['w']
        v0 v1
        v1""",
        {'w': (3, 3)}, {'c': (1, 3), 'h': (1, 3)}, {'x': ()},
    ),
    'state made of parameters only': program(
        """v0 = (jnp.ones(2) @ p['w']).reshape(3)
        v1 = 0.8 * s['h'] + v0 * s['g']
        v1 v0
        v1 * x['x'] + v0""",
        {'w': (2, 3)}, {'h': (3,), 'g': (3,)}, {'x': ()},
    ),
    'state made of two parameters': program(
        """v0 = p['w'] @ p['u']
        v1 = 0.8 * s['h'] + v0 * s['g']
        v1 v0
        v1 * x['x'] + v0""",
        {'w': (2, 3), 'u': (3, 3)}, {'h': (2, 3), 'g': (2, 3)}, {'x': ()},
    ),
    'state set to a parameter': program(
        """v0 = 0.8 * s['h'] + s['g'] @ p['r']
        v0 p['w']
        v0 * x['x']""",
        {'w': (3,), 'r': (3, 3)}, {'h': (3,), 'g': (3,)}, {'x': ()},
    ),
    'columns first': program(
        """v0 = 0.8 * s['h'] + (x['x'] @ p['w']).reshape(3, 2, order='F')
        v0
        v0""",
        {'w': (2, 3)}, {'h': (3, 2)}, {'x': (2, 2)},
    ),
    'real read-out of a complex state': program(
        """v0 = 1j * s['h'] + x['x']
        v0
        jnp.imag(v0 @ p['w'])""",
        {'w': (3, 2)}, {'h': (3,)}, {'x': (3,)}, {}, {'h': 'complex128'},
    ),
    'real weights of a complex input': program(
        """v0 = (0.6 + 0.5j) * s['h'] + x['x'] @ p['w']
        v0
        jnp.imag(v0)""",
        {'w': (3, 2)}, {'h': (2,)}, {'x': (3,)}, {}, {'h': 'complex128', 'x': 'complex128'},
    ),
    'real recurrent weights of a complex state': program(
        """v0 = (0.6 + 0.5j) * s['h'] + squash(s['h'] @ p['w'] + x['x'])
        v0
        jnp.imag(v0)""",
        {'w': (3, 3)}, {'h': (3,)}, {'x': (3,)}, {}, {'h': 'complex128'},
    ),
    'real weights of a batch of complex inputs': program(
        """v0 = (0.6 + 0.5j) * s['h'] + jnp.einsum('bij,ijk->bik', x['x'], p['w'])
        v0
        jnp.imag(v0 @ p['u'])""",
        {'w': (2, 3, 2), 'u': (2, 2)}, {'h': (2, 2, 2)}, {'x': (2, 2, 3)}, {},
        {'h': 'complex128', 'x': 'complex128', 'u': 'complex128'},
    ),
    'complex weights in a real state': program(
        """v0 = 0.8 * s['h'] + lax.scan(lambda a, b: (a, (b * a).real), p['w'], x['x'])[1]
        v0
        v0""",
        {'w': ()}, {'h': (3,)}, {'x': (3,)}, {}, {'w': 'complex128', 'x': 'complex128'},
    ),
    'a real weight as an imaginary part': program(
        """v0 = (0.6 + 0.5j) * s['h'] + lax.complex(x['x'], x['x'] * p['w'])
        v0
        jnp.imag(v0)""",
        {'w': (3,)}, {'h': (3,)}, {'x': (3,)}, {}, {'h': 'complex128'},
    ),
    'a branch that mixes before its result is shared': program(
        """v0 = x['x'] @ p['w']
        v1 = lax.cond(v0[0] > 0, lambda a: nn.softmax(a), lambda a: 2 * a, v0)
        v2 = 0.8 * s['h'] + v1
        v2
        v2""",
        {'w': (2, 2)}, {'h': (3, 2)}, {'x': (2,)},
    ),
    'one column of a product with concatenated inputs feeds one unit': program(
        """v0 = jnp.concatenate([x['x'], s['h']])
        v1 = jnp.concatenate([v0 @ p['w'], v0 @ p['u']])
        v2 = 0.8 * s['h'] + jnp.tanh(v1)
        v2
        v2""",
        {'w': (5, 1), 'u': (5, 2)}, {'h': (3,)}, {'x': (2,)},
    ),
    'branches that move elements before their result is shared': program(
        """v0 = x['x'] @ p['w']
        v1 = lax.cond(v0[0] > 0, lambda a: a[::-1], lambda a: 2 * a, v0)
        v2 = 0.8 * s['h'] + v1
        v2
        v2""",
        {'w': (2, 2)}, {'h': (3, 2)}, {'x': (2,)},
    ),
    'a loop that mixes before its result is shared': program(
        """v0 = x['x'] @ p['w']
        v1 = lax.fori_loop(0, 2, lambda i, a: nn.softmax(a) + a, v0)
        v2 = 0.8 * s['h'] + v1
        v2
        v2""",
        {'w': (2, 2)}, {'h': (3, 2)}, {'x': (2,)},
    ),
    'a state without memory between two states of a group': program(
        """v0 = jnp.prod(s['a'] + 0.1, axis=0)
        v1 = s['b'] * p['w']
        v2 = jnp.broadcast_to(v0, (3,))
        v3 = 0.8 * s['b'] + v2[:2]
        v2 v1 v3
        v1 * x['x']""",
        {'w': ()}, {'o': (3,), 'a': (2,), 'b': (2,)}, {'x': ()},
    ),
    'a loss of parameters alone in single precision': program(
        """v0 = 0.8 * s['h'] + x['x']
        v0
        jnp.full(2, 0.3) @ p['w']""",
        {'w': (2,)}, {'h': (2,)}, {'x': ()}, {}, {'w': 'float32'},
    ),
    'states of a wide type share a narrow value': program(
        """v0 = like(0.8 * s['h'] + x['x'] @ p['w'], s['h'])
        v0
        v0""",
        {'w': (2, 1)}, {'h': (3,)}, {'x': (2,)}, {},
        {'w': 'complex64', 'x': 'complex64'},
    ),
}  # fmt: skip


@pytest.mark.parametrize('name', FOUND)
def test_found(name, x64):
    check(FOUND[name], [('two_pass', 3), ('one_pass', 2)])


@pytest.mark.parametrize(
    'body',
    [
        'lax.cond(v0[0] > 0, jnp.tanh, jnp.sin, v0)',
        'lax.fori_loop(0, 2, lambda i, a: jnp.tanh(a), v0)',
    ],
)
def test_bodies_that_keep_elements_apart_are_exact_before_their_result_is_shared(
    body, x64
):
    text = f"v0 = x['x'] @ p['w']\nv1 = 0.8 * s['h'] + {body}\nv1\nv1"
    found = check(
        program(text, {'w': (2, 2)}, {'h': (3, 2)}, {'x': (2,)}), [('one_pass', 2)]
    )
    assert found.credit['w'][0] == 'exact'


def drawn(data, draw):
    """A program, and one way to solve it or two."""
    pick = lambda options: data.draw(st.sampled_from(options))
    program = draw(pick)
    assume(
        program.parameters and any(kind != 'other' for kind in program.kinds.values())
    )
    return program, pick([[pick(WAYS)], [pick(WAYS), pick(WAYS)]])


def examples(seed, programs):
    """Run a function of drawn data so many times."""
    options = {'max_examples': programs, 'deadline': None, 'database': None}
    chosen = settings(suppress_health_check=list(HealthCheck), **options)
    return lambda run: hypothesis.seed(seed)(chosen(given(st.data())(run)))


def fuzz(seed, programs, draw=draw_program, local=False):
    """Check random programs, if they are local that nothing is cut; the smallest that fails is shown as Python."""

    @examples(seed, programs)
    def run(data):
        program, ways = drawn(data, draw)
        hypothesis.note(f'{program}\n# solved by {ways}')
        case = check(program, ways)
        if local:
            found = case.credit
            assert {credit for credit, _ in found.values()} <= {'exact', 'none'}, found
            assert not any(
                reason.startswith(NO_CREDIT) for _, reason in found.values()
            ), found

    run()


@pytest.mark.parametrize('seed', range(*SEEDS))
def test_random_programs(seed, x64):
    fuzz(seed, PROGRAMS)


@pytest.mark.parametrize('seed', range(*SEEDS))
def test_what_keeps_its_position_is_exact(seed, x64):
    fuzz(seed, PROGRAMS // 2, draw_position_program, local=True)
