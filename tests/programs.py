"""Random step programs: a grammar over everything the families know, written out as Python.

`draw_program(pick)` makes a program from choices: ``pick(options)`` gives one of a list. A program is text,
``def step(p, s, x) -> (new states, outputs)``, with the shapes of its parameters, states and inputs.

A program is of real numbers, of real and complex ones, or also of narrow ones (single precision). Every kind of
statement meets every type: one that is not defined for complex values reads their real or imaginary part, size or
angle.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import braintools
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Shape = tuple[int, ...]
Pick = Callable[[Sequence], object]


@jax.custom_vjp
def spike(v):
    """A step with a smooth slope, by custom_vjp."""
    return jnp.where(v > 0, 1.0, 0.0).astype(v.dtype)


spike.defvjp(lambda v: (spike(v), v), lambda v, g: (g / (1 + v * v),))


@jax.custom_jvp
def clamped(v):
    """A clip that lets gradient through, by custom_jvp."""
    return jnp.clip(v, -0.5, 0.5)


clamped.defjvp(lambda primals, tangents: (clamped(*primals), 0.5 * tangents[0]))


def norm(v, axis=-1):
    """Zero mean and unit variance along an axis."""
    v = v - jnp.mean(v, axis, keepdims=True)
    return v / jnp.sqrt(jnp.mean(v * v, axis, keepdims=True) + 0.1)


def delta(m, k, v):
    """A matrix of fast weights moved towards the pair (k, v)."""
    return m + jnp.outer(v - m @ k, k)


def squash(z):
    """A bounded function of complex values that is not holomorphic."""
    return z / (1 + jnp.abs(z) ** 2)


def like(x, y):
    """A value in the type of another; where that is real, both parts of a complex value count."""
    x = x.real - 0.5 * x.imag if jnp.iscomplexobj(x) and not jnp.iscomplexobj(y) else x
    return jnp.asarray(x, y.dtype)


def matmul(a, b):
    """A product that is summed in double precision, whatever its operands are."""
    return jnp.matmul(
        a, b, preferred_element_type=jnp.promote_types(jnp.result_type(a, b), 'float64')
    )


def conv(x, kernel):
    """A convolution in the wider type of its operands."""
    dtype = jnp.promote_types(x.dtype, kernel.dtype)
    return lax.conv_general_dilated(x.astype(dtype), kernel.astype(dtype), (1,), 'SAME')


NAMES = {
    'jnp': jnp, 'jax': jax, 'lax': lax, 'np': np, 'nn': jax.nn, 'spike': spike, 'clamped': clamped, 'norm': norm,
    'delta': delta, 'surrogate': braintools.surrogate, 'squash': squash, 'like': like, 'conv': conv,
    'matmul': matmul,
}  # fmt: skip

REAL = ('float64',)
COMPLEX = ('float64', 'complex128')
NARROW = ('float64', 'float32', 'complex64', 'complex128')


@dataclass(frozen=True)
class Value:
    """An expression of the step, its shape and its type."""

    text: str
    shape: Shape
    dtype: str = 'float64'

    @property
    def is_complex(self) -> bool:
        return self.dtype.startswith('complex')

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass
class Program:
    """A step as text, with what it reads. ``kinds``: 'hidden', 'group' (its last axis is not a position) or 'other'.

    ``dtypes`` has the types of parameters, states and inputs that are not of double precision.
    """

    parameters: dict[str, Shape] = field(default_factory=dict)
    states: dict[str, Shape] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, Shape] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        typed = lambda name, shape: (
            f'{name}: {shape} {self.dtypes.get(name, "")}'.strip()
        )

        def shapes(role, found):
            return [f'# {role} {typed(name, shape)}' for name, shape in found.items()]

        kinds = [
            f'# {kind} state {typed(name, self.states[name])}'
            for name, kind in self.kinds.items()
        ]
        new = ', '.join(f'{name!r}: {text}' for name, text in self.written.items())
        body = [
            f'    {line}'
            for line in [
                *self.lines,
                f'return {{{new}}}, ({"".join(o + ", " for o in self.outputs)})',
            ]
        ]
        heads = [
            *shapes('parameter', self.parameters),
            *kinds,
            *shapes('input', self.inputs),
        ]
        return '\n'.join([*heads, 'def step(p, s, x):', *body])

    @property
    def step(self) -> Callable:
        """The function."""
        scope = dict(NAMES)
        exec(str(self), scope)
        return scope['step']


class Writer:
    """Writes a program, choice by choice."""

    def __init__(self, pick: Pick):
        self.pick = pick
        self.program = Program()
        self.values: list[Value] = []
        self.types: Sequence[str] = REAL
        self.real_only = False
        """True while a statement is written that is not defined for complex values."""

    # ------------------------------------------------------------ types

    def typed(self, name: str) -> str:
        """Draw the type of a parameter, state or input."""
        dtype = self.pick(self.types) if len(self.types) > 1 else 'float64'
        if dtype != 'float64':
            self.program.dtypes[name] = dtype
        return dtype

    def dtype_of(self, text: str) -> str:
        """The type of an expression."""
        if self.types is REAL:
            return 'float64'
        p = self.program
        spec = lambda found: {
            name: jax.ShapeDtypeStruct(
                shape, 'int32' if name == 'k' else p.dtypes.get(name, 'float64')
            )
            for name, shape in found.items()
        }
        values = {
            v.text: jax.ShapeDtypeStruct(v.shape, v.dtype)
            for v in self.values
            if v.text.isidentifier()
        }
        env = {
            'p': spec(p.parameters),
            's': spec(p.states),
            'x': spec(p.inputs),
            **values,
        }
        return str(
            jax.eval_shape(lambda env: jnp.asarray(eval(text, NAMES | env)), env).dtype
        )

    def real(self, v: Value) -> Value:
        """A real value: of a complex one its real or imaginary part, size or angle."""
        if not v.is_complex:
            return v
        ways = ['jnp.real({})', 'jnp.imag({})', 'jnp.abs({})', 'jnp.angle(2 + {})']
        dtype = {'complex64': 'float32', 'complex128': 'float64'}[v.dtype]
        return Value(self.pick(ways).format(v.text), v.shape, dtype)

    # ------------------------------------------------------------ choices

    def chance(self, n: int) -> bool:
        """True one time in n; no is simplest."""
        return self.pick(range(n)) == n - 1

    def value(self, test: Callable[[Value], bool] = lambda v: True) -> Value | None:
        """A value made before, late ones more often; None where none passes the test."""
        found = [v for v in self.values if test(v)]
        if not found:
            return None
        late = found[-3:] if not self.chance(3) else found
        v = self.pick(late[::-1])
        return self.real(v) if self.real_only else v

    def like(self, v: Value) -> Value:
        """A value that broadcasts to the shape of another."""
        return self.value(lambda u: _fits(u.shape, v.shape)) or v

    def axis(self, v: Value) -> int:
        return self.pick(range(len(v.shape)))

    def size(self) -> int:
        return self.pick([2, 3, 3, 2, 1, 4])

    def shape(self) -> Shape:
        return self.pick(
            [(3,), (2, 3), (2,), (3, 3), (2, 2), (2, 3, 2), (), (2, 1), (1, 3)]
        )

    # ------------------------------------------------------------ weights

    def parameter(self, *shape: int) -> str:
        """A weight of a shape, real where that is needed."""
        text = self.any_parameter(*shape)
        if self.real_only and self.dtype_of(text).startswith('complex'):
            return self.pick(['jnp.real({})', 'jnp.imag({})', 'jnp.abs({})']).format(
                text
            )
        return text

    def any_parameter(self, *shape: int) -> str:
        """A new parameter, one used before, one transposed or transformed."""
        way = self.pick(['new', 'old', 'old', 'turned', 'transformed', 'new'])
        found = self.program.parameters
        if way == 'old' and (same := [n for n, s in found.items() if s == shape]):
            return f"p['{self.pick(same)}']"
        if (
            way == 'turned'
            and len(shape) == 2
            and (same := [n for n, s in found.items() if s == shape[::-1]])
        ):
            return f"p['{self.pick(same)}'].T"
        if way == 'transformed':
            return self.transformed(shape)
        name = f'w{len(found)}'
        found[name] = shape
        self.typed(name)
        return f"p['{name}']"

    def transformed(self, shape: Shape) -> str:
        ways = [
            'jnp.abs(W)',
            'nn.softplus(W)',
            '(0.5 * W + 0.1)',
            'lax.stop_gradient(W)',
        ]
        if self.types is not REAL:
            ways += [
                'jnp.conj(W)',
                '(W * (0.5 + 0.5j))',
                'lax.complex(jnp.real(W), jnp.abs(W))',
                'jnp.imag(1j * W)',
            ]
        if shape:
            ways += [
                '(W / jnp.linalg.norm(W))',
                f'(W * (np.arange({shape[-1]}) % 2))',
                'jnp.flip(W, 0)',
                '(W + W[])',
            ]
            ways += [f'W{[shape[0] + 1, *shape[1:]]}[1:]', '(W - jnp.mean(W))']
        if len(shape) == 2:
            ways += [f'(W[{shape[0]}, 1] @ W[1, {shape[1]}])', 'nn.softmax(W)']
        way = self.pick(ways)
        before, self.real_only = self.real_only, self.real_only or 'soft' in way
        text = self.filled(way.replace('W[', 'U['), shape)
        self.real_only = before
        return text

    def filled(self, text: str, shape: Shape = ()) -> str:
        """Text with parameters in place: one for each ``U[2, 3]``, and one for all ``W``, of the given shape."""
        text = re.sub(
            r'U\[([\d, ]*)\]',
            lambda m: self.parameter(*map(int, re.findall(r'\d+', m[1]))),
            text,
        )
        return (
            re.sub(r'\bW\b', self.parameter(*shape), text)
            if re.search(r'\bW\b', text)
            else text
        )

    # ------------------------------------------------------------ statements

    def name(self, made: tuple[str, Shape] | None) -> Value | None:
        """Give an expression a line of its own."""
        if made is None or math.prod(made[1]) > 40 or len(made[1]) > 4:
            return None
        name = f'v{len(self.program.lines)}'
        dtype = self.dtype_of(made[0])
        self.program.lines.append(f'{name} = {made[0]}')
        self.values.append(Value(name, tuple(made[1]), dtype))
        return self.values[-1]

    def fitted(self, v: Value, shape: Shape) -> str:
        """A value brought to a shape, one way or another."""
        if v.shape == shape:
            return v.text
        if _fits(v.shape, shape) and not self.chance(3):
            return f'jnp.broadcast_to({v.text}, {shape})'
        if v.shape and shape and v.shape[:-1] == shape[:-1] and not self.chance(3):
            return f'({v.text} @ {self.parameter(v.shape[-1], shape[-1])})'
        n = math.prod(shape)
        if v.size == n:
            return f'{v.text}.reshape({shape})'
        if v.shape and shape and self.chance(2):
            return f'({v.text}.ravel() @ {self.parameter(v.size, n)}).reshape({shape})'
        if v.size > n:
            return f'{v.text}.ravel()[:{n}].reshape({shape})'
        if v.size:
            return f'jnp.pad({v.text}.ravel(), (0, {n - v.size})).reshape({shape})'
        return f'jnp.zeros({shape})'

    def small(self, shape: Shape) -> Shape:
        """A shape with fewer elements that broadcasts to the given one."""
        ways = [(1,) * len(shape), (*shape[:-1], 1), (1, *shape[1:]), shape[1:], ()]
        return self.pick([way for way in ways if _fits(way, shape)])

    def drive(self, v: Value, shape: Shape) -> str:
        """A value of a shape: by a product with weights, or as it comes."""
        if not v.shape or self.chance(3):
            return f'({self.fitted(v, shape)})'
        if shape and v.shape[:-1] == shape[:-1]:
            return f'({v.text} @ {self.parameter(v.shape[-1], shape[-1])})'
        weight = self.parameter(v.size, math.prod(shape))
        return f'({v.text}.ravel() @ {weight}).reshape({shape})'

    def gate(self, shape: Shape) -> str:
        """A real value of a shape, between zero and one."""
        before, self.real_only = self.real_only, True
        text = f'nn.sigmoid({self.drive(self.value(), shape)})'
        self.real_only = before
        return text

    def flag(self) -> str:
        """A switch: by the input, or by a counter of steps, on at the first one."""
        if self.chance(2):
            return "jnp.sum(jnp.real(x['x'])) > 0"
        if 'n' not in self.program.states:
            self.program.states['n'] = ()
            self.program.kinds['n'] = self.pick(['other', 'hidden'])
            self.program.written['n'] = "s['n'] + 1"
        return "s['n'] < 1"

    def statement(self) -> None:
        self.name(self.pick(STATEMENTS)(self))

    def inner(self, *names: str, shape: Shape) -> str:
        """An expression of one shape for a body of control flow, in the type of its first name."""
        a, b = names[0], names[-1]
        if self.types is not REAL:
            return self.filled(f'like({self.pick(self.inner_ways(a, b, shape))}, {a})')
        ways = [
            f'jnp.tanh({a} + {b})',
            f'0.5 * {a} * {b}',
            f'{a} - 0.3 * jnp.sin({b})',
            f'0.7 * {a}',
            f'{b} + 0 * {a}',
        ]
        ways += [f'{a} * U[] + {b}']
        if shape:
            n = shape[-1]
            ways += [
                f'jnp.tanh({a} @ U[{n}, {n}] + {b})',
                f'jnp.roll({a}, 1, -1) + {b}',
                f'nn.softmax({a}) + {b}',
            ]
            ways += [
                f'{a} * nn.sigmoid(U[{n}]) + {b}',
                f'jnp.cumsum({a}, -1) * 0.5 + {b}',
            ]
            ways += [f'jnp.where({b} > 0, {a}, 0.3 * {b})']
        return self.filled(self.pick(ways))

    @staticmethod
    def inner_ways(a: str, b: str, shape: Shape) -> list[str]:
        """The same for values that may be complex."""
        ways = [
            f'squash({a} + {b})',
            f'0.5 * {a} * {b}',
            f'{a} - 0.3 * squash({b})',
            f'0.7 * {a}',
            f'{b} + 0 * {a}',
        ]
        ways += [
            f'{a} * U[] + {b}',
            f'jnp.conj({a}) * 0.5 + {b}',
            f'1j * {a} + {b}',
            f'jnp.abs({a}) * {b}',
        ]
        if shape:
            n = shape[-1]
            ways += [f'squash({a} @ U[{n}, {n}] + {b})', f'jnp.roll({a}, 1, -1) + {b}']
            ways += [
                f'nn.softmax(jnp.real({a})) + {b}',
                f'{a} * U[{n}] + {b}',
                f'jnp.cumsum({a}, -1) * 0.5 + {b}',
            ]
            ways += [f'jnp.where(jnp.real({b}) > 0, {a}, 0.3 * {b})']
        return ways

    # ------------------------------------------------------------ states and results

    def new_state(self, name: str) -> None:
        shape = self.program.states[name]
        old = Value(f"s['{name}']", shape, self.program.dtypes.get(name, 'float64'))
        text = self.pick(WRITES)(self, name, old)
        made = self.name((self.as_state(text, old), shape))
        self.program.written[name] = made.text
        if self.chance(4):  # no second-hand reads of this one
            self.values.remove(made)

    def as_state(self, text: str, old: Value) -> str:
        """An expression in the type of a state."""
        return text if self.dtype_of(text) == old.dtype else f'like({text}, {old.text})'

    def draw_types(self) -> None:
        self.types = self.pick([REAL, REAL, COMPLEX, COMPLEX, REAL, NARROW])

    def write(self) -> Program:
        program = self.program
        self.draw_types()
        for i in range(self.pick([1, 2, 1, 2, 3])):
            name = f'h{i}'
            previous = list(program.states.values())
            shape = (
                self.pick(previous) if previous and not self.chance(3) else self.shape()
            )
            kind = self.pick(['hidden'] * 6 + ['group', 'other'])
            program.states[name], program.kinds[name] = (
                shape,
                'hidden' if kind == 'group' and not shape else kind,
            )
            self.typed(name)
        program.inputs['x'] = self.pick([(2,), (3,), (2, 3), ()])
        self.values.append(Value("x['x']", program.inputs['x'], self.typed('x')))
        for name, shape in program.states.items():
            if not self.chance(5):
                self.values.append(
                    Value(f"s['{name}']", shape, program.dtypes.get(name, 'float64'))
                )
        waiting = list(program.states)
        for _ in range(self.pick([2, 3, 4, 5, 6, 8, 1])):
            self.statement()
            if len(waiting) > 1 and self.chance(4):
                self.new_state(waiting.pop(self.pick(range(len(waiting)))))
        for name in waiting:
            self.new_state(name)
        program.outputs = [self.output() for _ in range(self.pick([1, 1, 2, 3]))]
        return program

    def output(self) -> str:
        new = [v for v in self.values if v.text in self.program.written.values()]
        v = self.pick(new) if new and not self.chance(3) else self.value()
        if v.shape and not self.chance(3):
            return f'{v.text} @ {self.parameter(v.shape[-1], 2)}'
        return v.text


def _fits(small: Shape, large: Shape) -> bool:
    """True if an array of the small shape broadcasts to the large one."""
    return len(small) <= len(large) and all(
        a in (1, b) for a, b in zip(small[::-1], large[::-1], strict=False)
    )


STATEMENTS: list[Callable[[Writer], tuple[str, Shape] | None]] = []


def statement(times: int = 1, rank: int = 0, real: bool = False):
    """Register a way to make a value from one of at least the given rank; ``real``: from real ones only."""

    def register(function):
        @functools.wraps(function)
        def made(w):
            w.real_only = real
            v = w.value(lambda v: len(v.shape) >= rank and v.size)
            made = None if v is None else function(w, v)
            w.real_only = False
            return made

        STATEMENTS.extend([made] * times)
        return function

    return register


@statement(5)
def elementwise(w, v):
    ways = [
        'jnp.tanh({})',
        'nn.sigmoid({})',
        'jnp.sin({})',
        'nn.softplus({})',
        'nn.relu({})',
        '0.3 * {} ** 2',
    ]
    ways += [
        'jnp.abs({})',
        'jnp.exp(-{} ** 2)',
        'lax.erf({})',
        'nn.gelu({})',
        'jnp.sqrt(1 + {} ** 2)',
        '(-{})',
    ]
    ways += [
        'jnp.clip({}, -0.5, 0.5)',
        'jnp.log1p(jnp.abs({}))',
        'jnp.floor({})',
        '({} + 0.1j).real',
        '({} * 1j).imag',
    ]
    ways += [
        'jnp.arctan2({0}, 1 + {0} ** 2)',
        '({0} > 0) * 0.5',
        '{}.astype(np.float32).astype(np.float64)',
    ]
    if v.is_complex:
        ways = [
            'jnp.real({})',
            'jnp.imag({})',
            'jnp.conj({})',
            'jnp.abs({})',
            'jnp.angle(2 + {})',
            'squash({})',
        ]
        ways += [
            '1j * {}',
            '0.3 * {} ** 2',
            'jnp.exp(-0.5 * {})',
            'jnp.sin({})',
            'jnp.sqrt(2 + {})',
            '(-{})',
        ]
        ways += [
            'jnp.log(2 + {})',
            '1 / (2 + {})',
            '{0} * {0}.conj()',
            'lax.complex({0}.imag, jnp.tanh({0}.real))',
        ]
    elif w.types is not REAL:
        ways += [
            '1j * {}',
            'jnp.exp(1j * {})',
            '{}.astype(np.complex128)',
            'lax.complex({0}, jnp.tanh({0}))',
        ]
        ways += [
            '{} * (0.6 + 0.8j)',
            'jnp.conj({})',
            'jnp.real({})',
            'jnp.sqrt({} + 0.3j)',
        ]
    return w.pick(ways).format(v.text), v.shape


@statement(2, real=True)
def surrogate(w, v):
    ways = [
        'spike({})',
        'clamped({})',
        'surrogate.sigmoid({})',
        'surrogate.relu_grad({})',
        'lax.stop_gradient({})',
    ]
    return w.pick(ways).format(v.text), v.shape


@statement(5)
def binary(w, v):
    ways = [
        '{0} + {1}',
        '{0} * {1}',
        '{0} - {1}',
        'jnp.maximum({0}, {1})',
        'jnp.where({0} > 0, {0}, 0.2 * {1})',
    ]
    ways += [
        'nn.sigmoid({1}) * {0}',
        '{0} / (1 + {1} ** 2)',
        'jnp.where({1} > 0.1, {0}, 0.0)',
        'jnp.hypot({0}, 1 + {1})',
    ]
    u = w.like(v)
    if v.is_complex or u.is_complex:
        ways = [
            '{0} + {1}',
            '{0} * {1}',
            '{0} - {1}',
            '{0} * jnp.conj({1})',
            'jnp.real({0} * {1})',
        ]
        ways += [
            'nn.sigmoid(jnp.real({1})) * {0}',
            '{0} / (1 + jnp.abs({1}) ** 2)',
            'jnp.imag({0} * jnp.conj({1}))',
        ]
        ways += [
            'jnp.where(jnp.imag((1 + 1j) * {1}) > 0.1, {0}, 0.0)',
            'jnp.where(jnp.real({0}) > 0, {0}, 0.2 * {1})',
        ]
        ways += [
            'lax.complex(jnp.real({0}), like(jnp.imag({0} + {1}), {0}.real))',
            'jnp.abs({0} + 1j * {1})',
        ]
    elif w.types is not REAL:
        ways += ['{0} + 1j * {1}', 'jnp.abs({0} + 1j * {1})', '{0} * jnp.exp(1j * {1})']
    return w.pick(ways).format(v.text, u.text), v.shape


@statement(5)
def weighted(w, v):
    """An element-wise parameter: whole, of one axis, or a scalar."""
    options = [v.shape[-1:], v.shape, ()]
    if len(v.shape) > 1:
        options += [v.shape[:-1] + (1,), v.shape[1:]]
    weight = w.parameter(*w.pick(options))
    ways = [
        '{0} * {1}',
        '{0} + {1}',
        'nn.sigmoid({1}) * {0}',
        'jnp.tanh({0} - {1})',
        'jnp.where({0} > 0, {0}, {1} * {0})',
    ]
    if w.types is not REAL:
        ways = [
            '{0} * {1}',
            '{0} + {1}',
            'squash({0} - {1})',
            'jnp.where(jnp.real({0}) > 0, {0}, {1} * {0})',
        ]
        ways += [
            '{0} * jnp.exp(1j * {1})',
            'jnp.conj({0}) * {1}',
            'jnp.imag({0} * {1})',
            'nn.sigmoid({1}) * {0}',
        ]
        ways += [
            'lax.complex(jnp.real({0}), like(jnp.imag({0}) + jnp.real({1}), {0}.real))',
            '{0} / (2 + {1})',
        ]
        ways += [
            'lax.complex(jnp.broadcast_to(jnp.real({1}), {0}.shape), jnp.real({0}).astype(jnp.real({1}).dtype))'
        ]
    return w.pick(ways).format(v.text, weight), v.shape


@statement(6, rank=1)
def dense(w, v):
    n = w.pick([v.shape[-1], w.size()])
    shape = (*v.shape[:-1], n)
    if w.types is NARROW and w.chance(2):
        return f'matmul({v.text}, {w.parameter(v.shape[-1], n)})', shape
    return f'{v.text} @ {w.parameter(v.shape[-1], n)}', shape


@statement(3, rank=1)
def dense_on_the_left(w, v):
    axis = -2 if len(v.shape) > 1 else -1
    n = w.pick([v.shape[axis], w.size()])
    shape = list(v.shape)
    shape[axis] = n
    return f'{w.parameter(n, v.shape[axis])} @ {v.text}', tuple(shape)


@statement(2, rank=2)
def heads(w, v):
    *front, a, b = v.shape
    n = w.pick([b, w.size()])
    text, weight = 'abc'[: len(front)], w.parameter(a, b, n)
    return f"jnp.einsum('{text}ij,ijk->{text}ik', {v.text}, {weight})", (*front, a, n)


@statement(2, rank=2)
def summed_heads(w, v):
    *front, a, b = v.shape
    text, weight = 'abc'[: len(front)], w.parameter(a, b)
    kept, n = w.pick([('i', a), ('j', b)])
    return f"jnp.einsum('{text}ij,ij->{text}{kept}', {v.text}, {weight})", (*front, n)


@statement(2, rank=1)
def between_values(w, v):
    n = v.shape[-1]
    u = w.value(lambda u: len(u.shape) in (1, 2) and u.shape[-1] == n)
    if u is None:
        return None
    if len(v.shape) == 1 and len(u.shape) == 1:
        return w.pick(
            [(f'jnp.outer({v.text}, {u.text})', (n, n)), (f'{v.text} @ {u.text}', ())]
        )
    return f'{v.text} @ {u.text}.T', (*v.shape[:-1], *u.shape[:-1])


@statement(3, rank=1)
def shared(w, v):
    """A small value, by weights or from data, that many elements of another read."""
    small, u = w.small(v.shape), w.value()
    text = w.drive(u, small)
    ways = ['jnp.broadcast_to({1}, {2})', '{0} * {1}', '{0} + {1}', '{1} - {0}']
    ways += ['{0} * {1} + {1}', 'jnp.where({3} > 0, {1}, {0})']
    return w.pick(ways).format(v.text, text, v.shape, w.real(v).text), v.shape


@statement(2, rank=1)
def outer_product(w, v):
    """Of two values that share their leading axes, by weights or from data."""
    u = w.value(lambda u: u.shape and u.shape[:-1] == v.shape[:-1]) or v
    *front, _ = v.shape
    a, b = w.size(), w.size()
    one, two = w.drive(v, (*front, a)), w.drive(u, (*front, b))
    if w.chance(2):
        return f"jnp.einsum('...i,...j->...ij', {one}, {two})", (*front, a, b)
    return f'{one}[..., :, None] * {two}[..., None, :]', (*front, a, b)


@statement(2, rank=1)
def repeated_heads(w, v):
    """A value for each head, repeated over the units of the head."""
    n = v.shape[-1]
    at = w.pick([[0] * n, [i // 2 for i in range(n)], [i % 2 for i in range(n)]])
    text = w.drive(w.value(), (*v.shape[:-1], max(at) + 1))
    spread = f'{text}[..., np.array({at})]'
    if at == [i // 2 for i in range(n)] and n % 2 == 0:
        spread = f'jnp.repeat({text}, 2, axis=-1)'
    return w.pick([f'{v.text} * {spread}', spread, f'{v.text} + {spread}']), v.shape


@statement(1, rank=1, real=True)
def attention(w, v):
    n = v.shape[-1]
    scores = f'nn.softmax({v.text} @ {w.parameter(n, n)})'
    return f'{scores} * {v.text}', v.shape


@statement(1)
def fast_weights(w, v):
    m = w.value(lambda m: len(m.shape) == 2)
    w.real_only = True  # of the pair; the matrix may be complex
    v = w.real(v)
    if m is None:
        return None
    k, u = w.fitted(v, (m.shape[1],)), w.fitted(v, (m.shape[0],))
    return f'delta({m.text}, nn.softmax({k}), jnp.tanh({u}))', m.shape


@statement(3, rank=1)
def reduced(w, v):
    axis = w.axis(v)
    keep = w.chance(2)
    ways = [
        'jnp.sum',
        'jnp.mean',
        'jnp.max',
        'nn.logsumexp',
        'jnp.linalg.norm',
        'jnp.prod',
    ]
    if v.is_complex:
        ways = ['jnp.sum', 'jnp.mean', 'jnp.linalg.norm', 'jnp.prod']
    text = f'{w.pick(ways)}({v.text}{" + 0.1" if v.size else ""}, axis={axis}, keepdims={keep})'
    return text, v.shape[:axis] + (1,) * keep + v.shape[axis + 1 :]


@statement(2, rank=1)
def normalised(w, v):
    axis = w.axis(v)
    if v.is_complex:
        ways = [
            'nn.softmax(jnp.abs({}), axis={})',
            '({0} - jnp.mean({0}, axis={1}, keepdims=True))',
        ]
        ways += ['{0} / (1 + jnp.linalg.norm({0}, axis={1}, keepdims=True))']
        return w.pick(ways).format(v.text, axis), v.shape
    ways = [
        'nn.softmax({}, axis={})',
        'norm({}, axis={})',
        '({0} - jnp.mean({0}, axis={1}, keepdims=True))',
    ]
    return w.pick(ways).format(v.text, axis), v.shape


@statement(3, rank=1)
def along(w, v):
    axis = w.axis(v)
    ways = [
        'jnp.cumsum({}, {})',
        'jnp.sort({}, {})',
        'jnp.roll({}, 1, {})',
        'jnp.flip({}, {})',
        'lax.cummax({}, {})',
    ]
    ways += [
        'jnp.cumprod({}, {})',
        'lax.cumlogsumexp({}, {})',
        'jnp.fft.fft({}, axis={}).real',
    ]
    if v.is_complex:
        ways = [
            'jnp.cumsum({}, {})',
            'jnp.roll({}, 1, {})',
            'jnp.flip({}, {})',
            'jnp.cumprod({}, {})',
        ]
        ways += ['jnp.fft.fft({}, axis={})', 'jnp.fft.ifft({}, axis={}).imag']
    elif w.types is not REAL:
        ways += ['jnp.fft.fft({}, axis={})']
    return w.pick(ways).format(v.text, axis), v.shape


@statement(4, rank=1)
def moved(w, v):
    axis = w.axis(v)
    n = v.shape[axis]
    with_n = lambda m: (*v.shape[:axis], m, *v.shape[axis + 1 :])
    order = tuple(range(len(v.shape)))[::-1]
    ways = [
        (f'{v.text}.ravel()', (v.size,)),
        (f'{v.text}.transpose({order})', v.shape[::-1]),
    ]
    ways += [
        (f'jnp.repeat({v.text}, 2, axis={axis})', with_n(2 * n)),
        (f'{v.text}[None]', (1, *v.shape)),
    ]
    ways += [
        (
            f'jnp.pad({v.text}, {[(1, 0) if a == axis else (0, 0) for a in order[::-1]]})',
            with_n(n + 1),
        )
    ]
    ways += [
        (f'{v.text}[..., None]', (*v.shape, 1)),
        (f'jnp.broadcast_to({v.text}, {(2, *v.shape)})', (2, *v.shape)),
    ]
    ways += [(f'jnp.take({v.text}, np.array([0, {n - 1}, 0]), axis={axis})', with_n(3))]
    ways += [
        (
            f'jnp.split({v.text}, [1], axis={axis})[{1 if n > 1 else 0}]',
            with_n(max(n - 1, 1)),
        )
    ]
    if n > 1:
        ways += [(f'lax.slice_in_dim({v.text}, 1, {n}, axis={axis})', with_n(n - 1))]
        ways += [
            (
                f'lax.slice_in_dim({v.text}, 0, {n}, 2, axis={axis})',
                with_n((n + 1) // 2),
            )
        ]
    if v.size % 2 == 0:
        ways += [
            (f'{v.text}.reshape(2, -1)', (2, v.size // 2)),
            (f'{v.text}.reshape(-1, 2)', (v.size // 2, 2)),
        ]
        ways += [(f"{v.text}.reshape(2, -1, order='F')", (2, v.size // 2))]
    return w.pick(ways)


@statement(3, rank=1)
def joined(w, v):
    axis = w.axis(v)
    same = lambda u: (
        len(u.shape) == len(v.shape)
        and all(
            a == b
            for d, (a, b) in enumerate(zip(u.shape, v.shape, strict=True))
            if d != axis
        )
    )
    u = w.value(same) or v
    if u.shape == v.shape and w.chance(3):
        return f'jnp.stack([{v.text}, {u.text}], axis={axis})', (
            *v.shape[:axis],
            2,
            *v.shape[axis:],
        )
    total = v.shape[axis] + u.shape[axis]
    return f'jnp.concatenate([{v.text}, {u.text}], axis={axis})', (
        *v.shape[:axis],
        total,
        *v.shape[axis + 1 :],
    )


@statement(2, rank=1)
def indexed(w, v):
    """Gathers and scatters, at constant places and at places told by the data."""
    n = v.shape[0]
    at = w.pick(
        [
            '0',
            f"(x['k'] % {n})",
            f'np.array([{n - 1}, 0])',
            f"np.array([0, 0]) + x['k'] % {n}",
        ]
    )
    if "'k'" in at:
        w.program.inputs['k'] = ()
    picked = f'{v.text}[{at}]'
    many = 'array' in at
    row = ((2,) if many else ()) + v.shape[1:]
    u = w.value(lambda u: _fits(u.shape, row))
    ways = [(picked, row)]
    if u is not None:
        same = u.text if w.types is REAL else f'like({u.text}, {v.text})'
        ways += [
            (f'{v.text}.at[{at}].{how}({same})', v.shape) for how in ('set', 'add')
        ]
    ways += [
        (
            f'lax.dynamic_slice_in_dim({v.text}, {_start(w)}, {max(n - 1, 1)})',
            (max(n - 1, 1), *v.shape[1:]),
        )
    ]
    one = w.value(lambda u: _fits(u.shape, (1, *v.shape[1:])))
    if one is not None:
        row = f'jnp.broadcast_to({one.text}, {(1, *v.shape[1:])})'
        row = row if w.types is REAL else f'like({row}, {v.text})'
        ways += [
            (
                f'lax.dynamic_update_slice_in_dim({v.text}, {row}, {_start(w)}, 0)',
                v.shape,
            )
        ]
    ways += [
        (
            f'jax.ops.segment_sum({v.text}, np.arange({n}) // 2, {(n + 1) // 2})',
            ((n + 1) // 2, *v.shape[1:]),
        )
    ]
    key = f'jnp.real({v.text})' if v.is_complex else v.text
    ways += [
        (f'jnp.take_along_axis({v.text}, jnp.argsort({key}, axis=0), axis=0)', v.shape)
    ]
    ways += [(f'lax.top_k({key}, 1)[0]', (*v.shape[:-1], 1))]
    return w.pick(ways)


def _start(w):
    start = w.pick(['1', "x['k']"])
    if start != '1':
        w.program.inputs['k'] = ()
    return start


@statement(1, rank=1)
def convolved(w, v):
    *front, n = v.shape
    kernel, channels = w.parameter(2, 1, w.pick([2, 3, 1])), 2
    image = f'{v.text}.reshape({(math.prod(front), 1, n)})'
    if w.types is not REAL:
        return f'conv({image}, {kernel})', (math.prod(front), channels, n)
    return f"lax.conv_general_dilated({image}, {kernel}, (1,), 'SAME')", (
        math.prod(front),
        channels,
        n,
    )


@statement(1, rank=1)
def pooled(w, v):
    how, start = w.pick([('lax.add', '0.0'), ('lax.max', '-np.inf')])
    if how == 'lax.max':
        v = w.real(v)
    start = start if w.types is REAL else f'np.array({start}, {v.text}.dtype)'
    window = (1,) * (len(v.shape) - 1) + (2,)
    ones = (1,) * len(v.shape)
    return (
        f"lax.reduce_window({v.text}, {start}, {how}, {window}, {ones}, 'SAME')",
        v.shape,
    )


@statement(2)
def branched(w, v):
    u, c = w.like(v), w.value()
    whole, b = f'jnp.broadcast_to({u.text}, {v.shape})', 'b'
    if w.chance(2):  # shared inside the branches
        whole, b = u.text, f'jnp.broadcast_to(b, {v.shape})'
    u = whole
    one, two = w.inner('a', b, shape=v.shape), w.inner(b, 'a', shape=v.shape)
    c = w.real(c)
    two = two if w.types is REAL else f'like({two}, a)'
    return (
        f'lax.cond(jnp.sum({c.text}) > 0, lambda a, b: {one}, lambda a, b: {two}, {v.text}, {u})',
        v.shape,
    )


@statement(2)
def looped(w, v):
    u = w.like(v)
    body = w.inner('a', f'jnp.broadcast_to({u.text}, {v.shape})', shape=v.shape)
    return (
        f'lax.fori_loop(0, {w.pick([1, 2, 3])}, lambda i, a: {body}, {v.text})',
        v.shape,
    )


@statement(2, rank=1)
def scanned(w, v):
    _, *rest = v.shape
    first = w.value(lambda u: _fits(u.shape, tuple(rest)))
    start = (
        f'jnp.zeros({tuple(rest)}, {v.text}.dtype)'
        if first is None or w.chance(3)
        else f'jnp.broadcast_to({first.text}, {tuple(rest)})'
    )
    body, out = (
        w.inner('a', 'b', shape=tuple(rest)),
        w.inner('a', 'b', shape=tuple(rest)),
    )
    which, shape = w.pick([(0, tuple(rest)), (1, v.shape)])
    return (
        f'lax.scan(lambda a, b: ({body}, {out}), {start}, {v.text}{w.pick(["", ", reverse=True"])})[{which}]',
        shape,
    )


@statement(2, rank=1)
def called(w, v):
    """A nested jit, remat or vmap."""
    how = w.pick(['jax.jit', 'jax.checkpoint', 'jax.vmap'])
    u = w.like(v)
    shape = v.shape[1:] if how == 'jax.vmap' else v.shape
    body = w.inner('a', 'b', shape=shape)
    return (
        f'{how}(lambda a, b: {body})({v.text}, jnp.broadcast_to({u.text}, {v.shape}))',
        v.shape,
    )


# ---------------------------------------------------------------- new states

WRITES: list[Callable[[Writer, str, Value], str]] = []


def writes(times: int = 1):
    """Register a way to write a new state."""

    def register(function):
        WRITES.extend([function] * times)
        return function

    return register


@writes(6)
def leaky(w, name, old):
    return f'0.8 * {old.text} + {w.fitted(w.value(), old.shape)}'


@writes(2)
def decaying(w, name, old):
    weight = w.parameter(*w.pick([old.shape[-1:], (), old.shape]))
    return f'nn.sigmoid({weight}) * {old.text} + {w.fitted(w.value(), old.shape)}'


@writes(2)
def turning(w, name, old):
    """A leak that turns a complex state; of a real one, a leak."""
    factor = '(0.6 + 0.5j)' if old.is_complex else '0.7'
    return f'{factor} * {old.text} + {w.fitted(w.value(), old.shape)}'


@writes(2)
def gated(w, name, old):
    v, gate = w.value(), w.value()
    gate = f'nn.sigmoid({w.fitted(w.real(gate), old.shape)})'
    return f'(1 - {gate}) * {old.text} + {gate} * {w.fitted(v, old.shape)}'


@writes(3)
def replaced(w, name, old):
    return w.fitted(w.value(), old.shape)


@writes(1)
def constant(w, name, old):
    return f'jnp.full({old.shape}, 0.3)'


@writes(1)
def unchanged(w, name, old):
    return f'{old.text} * 1.0'


@writes(1)
def delayed(w, name, old):
    same = [n for n, s in w.program.states.items() if s == old.shape]
    return f"s['{w.pick(same)}'] + 0.0"


@writes(1)
def shifted(w, name, old):
    if not old.shape:
        return old.text
    return f'0.5 * jnp.roll({old.text}, 1, {w.axis(old)}) + {w.fitted(w.value(), old.shape)}'


@writes(2)
def per_position(w, name, old):
    """Mixes the last axis: inside a position for a group state, across positions else."""
    if not old.shape:
        return f'0.9 * {old.text}'
    n = old.shape[-1]
    if w.types is not REAL:
        return f'squash({old.text} @ {w.parameter(n, n)} + {w.fitted(w.value(), old.shape)})'
    return (
        f'jnp.tanh({old.text} @ {w.parameter(n, n)} + {w.fitted(w.value(), old.shape)})'
    )


@writes(2)
def shared_drive(w, name, old):
    return f'0.8 * {old.text} + {w.drive(w.value(), w.small(old.shape))}'


@writes(2)
def shared_gate(w, name, old):
    gate = w.gate(w.small(old.shape))
    return f'{gate} * {old.text} + {w.fitted(w.value(), old.shape)}'


@writes(2)
def outer_memory(w, name, old):
    """A key times a value, with a decay for all or for each key."""
    if len(old.shape) < 2:
        return shared_drive(w, name, old)
    *front, a, b = old.shape
    key, value = w.drive(w.value(), (*front, a)), w.drive(w.value(), (*front, b))
    decay = w.pick(['0.8', w.gate((*front, a, 1)), w.gate(w.small(old.shape))])
    return f'{decay} * {old.text} + {key}[..., :, None] * {value}[..., None, :]'


@writes(1)
def head_gates(w, name, old):
    if not old.shape:
        return shared_gate(w, name, old)
    n = old.shape[-1]
    at = w.pick([[i // 2 for i in range(n)], [i % 2 for i in range(n)]])
    gate = w.gate((*old.shape[:-1], max(at) + 1))
    spread = f'{gate}[..., np.array({at})]'
    return f'{spread} * {old.text} + {w.fitted(w.value(), old.shape)}'


@writes(2)
def summed_and_shared(w, name, old):
    """One value: two elements summed into one position, a third read by the others."""
    if not old.shape:
        return shared_drive(w, name, old)
    shape = (*old.shape[:-1], 3)
    made = w.name((w.drive(w.value(), shape), shape))
    if made is None:
        return leaky(w, name, old)
    return f'0.8 * {old.text} + {summed_and_shared_over(made.text, old.shape)}'


def summed_and_shared_over(text, shape):
    *front, n = shape
    total = f'{text}[..., :2].sum(-1, keepdims=True)'
    others = f'jnp.broadcast_to({text}[..., 2:], {(*front, n - 1)})'
    return f'jnp.concatenate([{total}, {others}], -1)'


@writes(2)
def switched(w, name, old):
    """A learned initial state, switched on by the input or by a counter."""
    shape = w.pick([old.shape, old.shape[-1:], ()])
    flag, start = w.flag(), w.parameter(*shape)
    drive = w.fitted(w.value(), old.shape)
    return f'0.8 * jnp.where({flag}, {start}, {old.text}) + {drive}'


@writes(3)
def skipping(w, name, old):
    """Reads a new state of its shape twice: by a product, and position by position."""
    new = w.program.written.values()
    below = [v for v in w.values if v.text in new and v.shape == old.shape]
    if not below or not old.shape:
        return leaky(w, name, old)
    a, n = w.pick(below).text, old.shape[-1]
    bounded = 'jnp.tanh' if w.types is REAL else 'squash'
    skip = w.pick([a, f'{a} * {w.parameter(n)}', f'jnp.sin({a})'])
    return f'0.8 * {old.text} + {bounded}({a} @ {w.parameter(n, n)}) + {skip}'


@writes(3)
def units_apart(w, name, old):
    """Reads inputs beside states in one array: by one product for the first unit, by another for the rest."""
    if not old.shape or old.shape[-1] < 2:
        return leaky(w, name, old)
    *front, n = old.shape
    x = w.fitted(next(v for v in w.values if v.text == "x['x']"), (*front, 2))
    state = w.pick([old, w.value(lambda v: v.shape == old.shape) or old]).text
    made = w.name((f'jnp.concatenate([{x}, {state}], -1)', (*front, n + 2)))
    if made is None:
        return leaky(w, name, old)
    first, rest = (f'{made.text} @ {w.parameter(n + 2, m)}' for m in (1, n - 1))
    bounded = 'jnp.tanh' if w.types is REAL else 'squash'
    return f'0.8 * {old.text} + {bounded}(jnp.concatenate([{first}, {rest}], -1))'


def draw_program(pick: Pick) -> Program:
    """A program, choice by choice; shapes that the grammar does not tell are found by evaluation."""
    return Writer(pick).write()


class PositionWriter(Writer):
    """Writes programs whose states meet element by element only; inputs enter by one product each."""

    def statement(self) -> None:
        kept = {'elementwise', 'surrogate', 'binary', 'weighted'}
        self.name(
            self.pick([made for made in STATEMENTS if made.__name__ in kept])(self)
        )

    def new_state(self, name: str) -> None:
        shape = self.program.states[name]
        old = Value(f"s['{name}']", shape, self.program.dtypes.get(name, 'float64'))
        text = self.pick(
            [leaky, decaying, turning, gated, replaced, unchanged, delayed, switched]
        )(self, name, old)
        self.program.written[name] = self.name((self.as_state(text, old), shape)).text

    def entering(self, shape: Shape) -> str:
        """A drive by the input: one element for each position, or for several."""
        product = lambda shape: f"jnp.tensordot(x['x'], {self.parameter(2, *shape)}, 1)"
        way = self.pick(['whole', 'shared', 'shared', 'outer', 'repeated', 'both'])
        if way == 'shared':
            text = self.pick(['{}', 'jnp.sin({})', '{0} * {1}', '{0} + {1}'])
            small = self.small(shape)
            text = text.format(product(small), self.parameter(*small))
            return self.spread(text, shape)
        if way == 'outer' and len(shape) > 1:
            *front, a, b = shape
            one, two = product((*front, a)), product((*front, b))
            return f'{one}[..., :, None] * {two}[..., None, :]'
        if way == 'repeated' and shape:
            at = [i // 2 for i in range(shape[-1])]
            return f'{product((*shape[:-1], max(at) + 1))}[..., np.array({at})]'
        if way == 'both' and shape:
            spread = summed_and_shared_over('a', shape)
            return f'(lambda a: {spread})({product((*shape[:-1], 3))})'
        return product(shape)

    def spread(self, text: str, shape: Shape) -> str:
        """A small value for all positions, spread as it is or inside a sub-program."""
        spread = f'jnp.broadcast_to(a, {shape})'
        one, two = spread.replace('a,', 'jnp.sin(a),'), f'0.5 * {spread}'
        choice = "jnp.sum(jnp.real(x['x'])) > 0"
        return self.pick(
            [
                f'jnp.broadcast_to({text}, {shape})',
                f'lax.cond({choice}, lambda a: {one}, lambda a: {two}, {text})',
                f'lax.scan(lambda a, b: (a, b * {spread}), {text}, np.arange(3.0))[1].sum(0)',
                f'jax.checkpoint(lambda a: {two})({text})',
            ]
        )

    def write(self) -> Program:
        program, shape = self.program, self.shape()
        self.draw_types()
        program.states = {f'h{i}': shape for i in range(self.pick([1, 2, 3]))}
        program.kinds = dict.fromkeys(program.states, 'hidden')
        program.inputs['x'] = (2,)
        for name in (*program.states, 'x'):
            self.typed(name)
        for _ in range(self.pick([1, 2, 3])):
            self.name((self.entering(shape), shape))
        kind = lambda name: program.dtypes.get(name, 'float64')
        self.values += [
            Value(f"s['{name}']", shape, kind(name)) for name in program.states
        ]
        for _ in range(self.pick([2, 3, 4, 5, 1])):
            self.statement()
        for name in list(program.states):  # a counter may be added
            self.new_state(name)
        program.outputs = [self.output()]
        return program


def draw_position_program(pick: Pick) -> Program:
    """A program that keeps positions, so that the credit of every parameter is exact."""
    return PositionWriter(pick).write()
