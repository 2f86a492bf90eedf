"""The generator: loops and arithmetic of Python as machine code that XLA calls.

A kernel is a function ``emit(code, operands, results)``. It runs once, and what it
computes with :class:`Value` becomes instructions: ``for i in code.loop(0, n)`` runs its
body once and writes a loop, ``for n in range(4)`` writes its body four times.

Plain loops compiled by numba would be shorter, but they are slower. Processor time of
each, in turn, best of 8 to 30 rounds on one core (AVX-512, numba 0.68):

    first kernel of a process         0.14 s here; 0.40 by numba from its cache on disk
                                      (0.20 of them its import), 0.9 without the cache
    dense visit, (16, 256, 256)       111 µs here; 123 by numba; (32, 256, 512) 837; 998
    to_rows, 20,000 × 8, batch 8      0.11 ms; 0.51. 131,072 × 8, batch 32: 2.2; 4.1
    to_columns, the same              0.13; 0.15. 7.0; 7.5
    at_synapses, the same             0.16; 0.18. 3.8; 5.4

At every synapse the loops of numba test how many samples there are, and whether arrays
share memory. llvmlite, a part of numba, writes LLVM's instructions; XLA calls them
without Python in between, in less than a microsecond. Arguments arrive as a call frame
of 64-bit words, laid out as in ``xla/ffi/api/c_api.h``, which XLA keeps from version to
version.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import llvmlite.binding as llvm
from llvmlite import ir

BIT, SMALL, WORD = ir.IntType(1), ir.IntType(32), ir.IntType(64)
NUMBERS = {
    'float32': ir.FloatType(),
    'float64': ir.DoubleType(),
    'int32': SMALL,
    'int64': WORD,
}
FLOATS = (ir.FloatType(), ir.DoubleType())
FLAGS = ('reassoc', 'contract', 'nsz')
"""Sums may be reordered; infinities and NaN keep their meaning."""
# Words of a call frame, of a buffer, and of the extension by which XLA reads the
# version of the interface.
EXTENSION, OPERANDS, RESULTS = 1, 9, 14
DATA, DIMENSIONS = 3, 5
KIND, METADATA, VERSION = 1, 3, 3
OF_METADATA = 1
"""The kind of that extension; calls may carry others."""
OLDEST = 1 << 32
"""Version 0.1, the oldest: what is used here is in all of them."""


def _operator(name: str) -> Callable[[Value, Value | int], Value]:
    """An instruction on whole numbers, and that of numbers with an f before it."""

    def apply(self: Value, other: Value | int) -> Value:
        a, b = self._beside(other)
        build = self.code.build
        if self.number in FLOATS:
            return Value(self.code, getattr(build, f'f{name}')(a, b, flags=FLAGS))
        return Value(self.code, getattr(build, name)(a, b))

    return apply


def _comparison(name: str) -> Callable[[Value, Value | int], Value]:
    """Bits: whether each number is smaller, larger, ...; NaN differs from all."""

    def apply(self: Value, other: Value | int) -> Value:
        build = self.code.build
        is_float = self.number in FLOATS
        compare = build.fcmp_unordered if is_float else build.icmp_signed
        return Value(self.code, compare(name, *self._beside(other)))

    return apply


class Value:
    """A number, or several that are taken together, while the kernel runs.

    Operators give further ones; beside several numbers, a single one is repeated.
    Indices are 64-bit words, and all else is of the type of the arrays.
    """

    def __init__(self, code: Code, ir_value: Any):
        self.code, self.ir = code, ir_value
        kind = ir_value.type
        self.is_vector = isinstance(kind, ir.VectorType)
        self.number = kind.element if self.is_vector else kind
        self.size = kind.count if self.is_vector else 1

    __add__ = __radd__ = _operator('add')
    __mul__ = __rmul__ = _operator('mul')
    __sub__, __floordiv__, __mod__ = map(_operator, ('sub', 'udiv', 'urem'))
    __and__, __or__ = map(_operator, ('and_', 'or_'))
    __lshift__, __rshift__ = map(_operator, ('shl', 'lshr'))
    __lt__, __gt__, differs, equals = map(_comparison, ('<', '>', '!=', '=='))

    def _beside(self, other: Value | int) -> tuple[Any, Any]:
        if not isinstance(other, Value):
            other = self.code.constant(other, self.number)
        size = max(self.size, other.size)
        return self.repeated(size).ir, other.repeated(size).ir

    def repeated(self, size: int) -> Value:
        """One number, ``size`` times."""
        if size == self.size:
            return self
        build = self.code.build
        empty = ir.Constant(ir.VectorType(self.number, size), ir.Undefined)
        first = build.insert_element(empty, self.ir, SMALL(0))
        mask = ir.Constant(ir.VectorType(SMALL, size), None)
        return Value(self.code, build.shuffle_vector(first, empty, mask))

    def is_any(self) -> Value:
        """Whether any bit is set."""
        whole = ir.IntType(self.number.width * self.size)
        return Value(self.code, self.code.build.bitcast(self.ir, whole)).differs(0)

    def select(self, a: Value, b: Value) -> Value:
        """Of bits: a where one is set, otherwise b."""
        return Value(self.code, self.code.build.select(self.ir, *a._beside(b)))

    def as_int(self, kind: Any) -> Value:
        """A whole number in another width; bits stay 0 and 1."""
        build, own = self.code.build, self.number
        if own == kind:
            return self
        widen = build.zext if own == BIT else build.sext
        change = widen if own.width < kind.width else build.trunc
        return Value(self.code, change(self.ir, kind))

    def as_bits(self) -> Value:
        """The bits of a whole number, each by itself."""
        bits = ir.VectorType(BIT, self.number.width)
        return Value(self.code, self.code.build.bitcast(self.ir, bits))

    def shuffled(self, other: Value, places: Sequence[int]) -> Value:
        """Numbers at some places, those of the other after the own ones."""
        mask = ir.Constant(ir.VectorType(SMALL, len(places)), [*map(SMALL, places)])
        shuffle = self.code.build.shuffle_vector
        return Value(self.code, shuffle(self.ir, other.ir, mask))

    def one(self, place: int) -> Value:
        if not self.is_vector:
            return self
        return Value(self.code, self.code.build.extract_element(self.ir, SMALL(place)))

    def added_up(self, width: int = 1) -> Value:
        """``width`` numbers with the same sum."""
        value = self
        if value.size < width:
            zeros, build = self.code.zeros(self.number, width), self.code.build
            return Value(self.code, build.insert_element(zeros.ir, self.ir, SMALL(0)))
        while value.size > width:
            half = value.size // 2
            low, high = range(half), range(half, 2 * half)
            value = value.shuffled(value, low) + value.shuffled(value, high)
        return value.one(0) if width == 1 else value


class Variable:
    """A value that loops and branches may change: what is assigned to it is read in the
    next turn, and afterwards."""

    def __init__(self, value: Value):
        self.value = value


class Buffer:
    """An array of an argument. Numbers are read and written by their place in memory,
    ``size`` of them from one on."""

    def __init__(self, code: Code, words: Value, number: Any, rank: int):
        self.code, self.number, build = code, number, code.build
        self.width = 4 if number in (ir.FloatType(), SMALL) else 8  # bytes
        self._data = build.inttoptr(code.word_at(words, DATA).ir, number.as_pointer())
        self._sizes, self._rank = code.word_at(words, DIMENSIONS), rank

    def size(self, axis: int) -> Value:
        return self.code.word_at(self._sizes, axis)

    @property
    def sizes(self) -> list[Value]:
        return [self.size(axis) for axis in range(self._rank)]

    def load(self, at: Value | int, size: int = 1) -> Value:
        place = self._place(at, size)
        return Value(self.code, self.code.build.load(place, align=self.width))

    def index(self, at: Value | int) -> Value:
        """A number of an array of indices."""
        return self.load(at).as_int(WORD)

    def store(self, value: Value, at: Value | int) -> None:
        self.code.build.store(value.ir, self._place(at, value.size), align=self.width)

    def prefetch(self, at: Value | int, size: int) -> None:
        """Ask for ``size`` numbers from one on, which will be read and written soon."""
        build = self.code.build
        byte = ir.IntType(8).as_pointer()
        name = 'llvm.prefetch.p0'
        function = build.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(ir.VoidType(), [byte, SMALL, SMALL, SMALL])
            function = ir.Function(build.module, kind, name)
        to_write, keep, is_data = SMALL(1), SMALL(3), SMALL(1)
        for start in range(0, size, 64 // self.width):
            place = build.bitcast(self._place(at + start, 1), byte)
            build.call(function, (place, to_write, keep, is_data))

    def _place(self, at: Value | int, size: int) -> Any:
        build = self.code.build
        place = build.gep(self._data, [self.code.word(at).ir])
        if size == 1:
            return place
        return build.bitcast(place, ir.VectorType(self.number, size).as_pointer())


class Code:
    """The instructions of a kernel."""

    def __init__(self, build: ir.IRBuilder):
        self.build = build
        self._variables: list[Variable] = []

    def constant(self, number: int, kind: Any) -> Value:
        return Value(self, ir.Constant(kind, number))

    def word(self, number: Value | int) -> Value:
        """A number as a word; words stay what they are."""
        return number if isinstance(number, Value) else self.constant(number, WORD)

    def zeros(self, number: Any, size: int) -> Value:
        kind = number if size == 1 else ir.VectorType(number, size)
        return Value(self, ir.Constant(kind, None))

    def word_at(self, address: Value, index: int) -> Value:
        pointer = self.build.inttoptr(address.ir, WORD.as_pointer())
        return Value(self, self.build.load(self.build.gep(pointer, [WORD(index)])))

    def variable(self, value: Value) -> Variable:
        """A variable; where it is made inside of a loop or a branch, it ends there."""
        self._variables.append(Variable(value))
        return self._variables[-1]

    def loop(
        self, start: Value | int, stop: Value | int, step: int = 1
    ) -> Iterator[Value]:
        """Start, start + step, ... as long as a whole step fits before stop."""
        build, variables = self.build, list(self._variables)
        before = build.block
        head, body, after = (build.append_basic_block() for _ in range(3))
        build.branch(head)
        build.position_at_end(head)
        at = build.phi(WORD)
        phis = [build.phi(v.value.ir.type) for v in variables]
        at.add_incoming(self.word(start).ir, before)
        for phi, variable in zip(phis, variables, strict=True):
            phi.add_incoming(variable.value.ir, before)
            variable.value = Value(self, phi)
        end = build.add(at, WORD(step))
        is_inside = build.icmp_signed('<=', end, self.word(stop).ir)
        build.cbranch(is_inside, body, after)
        build.position_at_end(body)
        yield Value(self, at)
        del self._variables[len(variables) :]
        at.add_incoming(end, build.block)
        for phi, variable in zip(phis, variables, strict=True):
            phi.add_incoming(variable.value.ir, build.block)
            variable.value = Value(self, phi)
        build.branch(head)
        build.position_at_end(after)

    def parts(
        self, stop: Value | int, sizes: Sequence[int], start: Value | int = 0
    ) -> Iterator[tuple[Value, int]]:
        """Parts of the numbers from start to stop: where each starts, and how many
        there are, one of ``sizes``, the largest that fits."""
        done = self.word(start)
        for size in sizes:
            for at in self.loop(done, stop, size):
                yield at, size
            done = done + (self.word(stop) - done) // size * size

    def either(self, condition: Value) -> Iterator[bool]:
        """True for what runs where a condition holds, then False for what runs where it
        does not."""
        build, variables = self.build, list(self._variables)
        old = [v.value for v in variables]
        blocks = [build.append_basic_block() for _ in range(2)]
        after = build.append_basic_block()
        build.cbranch(condition.ir, *blocks)
        ends = []
        for block, holds in zip(blocks, (True, False), strict=True):
            build.position_at_end(block)
            for variable, value in zip(variables, old, strict=True):
                variable.value = value
            yield holds
            del self._variables[len(variables) :]
            ends.append((build.block, [v.value for v in variables]))
            build.branch(after)
        build.position_at_end(after)
        for n, variable in enumerate(variables):
            phi = build.phi(variable.value.ir.type)
            for block, values in ends:
                phi.add_incoming(values[n].ir, block)
            variable.value = Value(self, phi)

    @contextlib.contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """What runs only where a condition holds."""
        for holds in self.either(condition):
            if holds:
                yield


# ---------------------------------------------------------------- calls

Emit = Callable[[Code, list[Buffer], list[Buffer]], None]

_kept: dict[str, Any] = {}
"""What was compiled, by name: XLA holds addresses only."""
_lock = threading.Lock()


def call(
    name: str,
    emit: Emit,
    given: Sequence[Any],
    results: Sequence[jax.ShapeDtypeStruct],
    in_place: Sequence[Any] = (),
    *,
    vmap_method: str = 'sequential',
) -> list[jax.Array]:
    """The results of a kernel.

    ``name`` says, with the types of the operands, which kernel it is. ``in_place``: the
    last operands, where the first results lie.
    """
    given = [*given, *in_place]
    types = dict.fromkeys(x.dtype.name for x in given)
    name = '_'.join(('braintrace', name, *types))
    same = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in in_place]
    results = [*same, *results]
    with _lock:
        if name not in _kept:
            _kept[name] = _registered(name, emit, given, results)
    first = len(given) - len(same)
    run = jax.ffi.ffi_call(
        name,
        results,
        input_output_aliases={first + n: n for n in range(len(same))},
        vmap_method=vmap_method,
    )
    return list(run(*given))


def unchanged(*values: jax.Array) -> tuple[jax.Array, ...]:
    """The same values in the same memory: XLA does not fuse across a call."""
    name = f'unchanged_{len(values)}'
    nothing = lambda *_: None
    return tuple(call(name, nothing, [], [], values, vmap_method='broadcast_all'))


def _registered(
    name: str, emit: Emit, given: Sequence[Any], results: Sequence[Any]
) -> tuple[Any, Any]:
    """A function that XLA knows."""
    module = ir.Module(name)
    entry = ir.Function(module, ir.FunctionType(WORD, [WORD]), name)
    build = ir.IRBuilder(entry.append_basic_block())
    code = Code(build)
    frame = Value(code, entry.args[0])
    extension = code.word_at(frame, EXTENSION)
    with build.if_then(extension.differs(0).ir):
        kind = code.word_at(extension, KIND) & (2**32 - 1)
        with build.if_then(kind.equals(OF_METADATA).ir):
            version = code.word_at(extension, METADATA) + 8 * VERSION
            build.store(WORD(OLDEST), build.inttoptr(version.ir, WORD.as_pointer()))
            build.ret(WORD(0))
    buffers: list[list[Buffer]] = [[], []]
    for field, arrays, found in zip(
        (OPERANDS, RESULTS), (given, results), buffers, strict=True
    ):
        words = code.word_at(frame, field)
        for n, x in enumerate(arrays):
            # Arrays of other types are passed on, not read.
            number = NUMBERS.get(x.dtype.name, WORD)
            found.append(Buffer(code, code.word_at(words, n), number, len(x.shape)))
    emit(code, *buffers)
    build.ret(WORD(0))
    engine = _compiled(str(module))
    call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    function = call(engine.get_function_address(name))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform='cpu')
    return engine, function


def _compiled(text: str) -> Any:
    """Machine code for this processor."""
    with contextlib.suppress(RuntimeError):  # newer versions do so by themselves
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3
    )
    module = llvm.parse_assembly(text)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine
