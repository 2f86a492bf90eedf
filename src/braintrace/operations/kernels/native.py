"""Loops compiled by LLVM as calls of XLA's foreign function interface.

XLA calls the machine code itself, without Python in between, so that a call takes less
than a microsecond, and compiling takes some 50 ms. llvmlite, a part of numba, gives the
builder of LLVM's instructions. Arguments arrive as a call frame of 64-bit words, laid
out as in ``xla/ffi/api/c_api.h``, which XLA keeps from version to version.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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

_kept: dict[str, Any] = {}
"""What was compiled, by name: XLA holds addresses only."""
_lock = threading.Lock()


# ---------------------------------------------------------------- memory


def word(number: Any) -> Any:
    """A number of Python as a word; words stay what they are."""
    return ir.Constant(WORD, number) if isinstance(number, int) else number


def word_at(build: ir.IRBuilder, words: Any, index: int) -> Any:
    """One of the words at an address."""
    return build.load(build.gep(words, [word(index)]))


def words_at(build: ir.IRBuilder, words: Any, index: int) -> Any:
    """The address of words that one of the words at an address holds."""
    return build.inttoptr(word_at(build, words, index), WORD.as_pointer())


class Buffer:
    """An array of an argument: the address of its numbers, their type, and its sizes."""

    def __init__(self, build: ir.IRBuilder, words: Any, number: Any):
        self.build, self.number = build, number
        address = word_at(build, words, DATA)
        self._data = build.inttoptr(address, number.as_pointer())
        self._sizes = words_at(build, words, DIMENSIONS)

    def size(self, axis: int) -> Any:
        """The length of an axis."""
        return word_at(self.build, self._sizes, axis)

    def load(self, at: Any, size: int) -> Any:
        """``size`` numbers from one on."""
        return self.build.load(self._place(at, size), align=self._alignment)

    def store(self, value: Any, at: Any, size: int) -> None:
        """Write ``size`` numbers."""
        self.build.store(value, self._place(at, size), align=self._alignment)

    def prefetch(self, at: Any, size: int) -> None:
        """Ask for ``size`` numbers from one on, which will be read and written soon."""
        build = self.build
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, SMALL, SMALL, SMALL])
        name = 'llvm.prefetch.p0'
        function = build.module.globals.get(name)
        if function is None:
            function = ir.Function(build.module, kind, name)
        to_write, keep, is_data = (ir.Constant(SMALL, n) for n in (1, 3, 1))
        for start in range(0, size, 64 // self._alignment):
            place = build.gep(self._data, [build.add(at, word(start))])
            given = (build.bitcast(place, byte), to_write, keep, is_data)
            build.call(function, given)

    def _place(self, at: Any, size: int) -> Any:
        place = self.build.gep(self._data, [at])
        if size == 1:
            return place
        return self.build.bitcast(place, several(self.number, size).as_pointer())

    @property
    def _alignment(self) -> int:
        return 4 if self.number in (ir.FloatType(), SMALL) else 8


def place(build: ir.IRBuilder, row: Any, *sizes: Any) -> Any:
    """The number of an entry in memory: of an array (_, width) at (row, column) for
    ``sizes`` width, column; further axes follow likewise."""
    at = word(row)
    for width, index in zip(sizes[::2], sizes[1::2], strict=True):
        at = build.add(build.mul(at, word(width)), word(index))
    return at


# ---------------------------------------------------------------- numbers


def several(number: Any, size: int) -> Any:
    """The type of so many numbers that are taken together."""
    return number if size == 1 else ir.VectorType(number, size)


def zeros(number: Any, size: int) -> Any:
    """``size`` zeros of a type."""
    return ir.Constant(several(number, size), None)


def repeated(build: ir.IRBuilder, value: Any, size: int) -> Any:
    """One number, ``size`` times."""
    if size == 1:
        return value
    empty = ir.Constant(several(value.type, size), ir.Undefined)
    first = build.insert_element(empty, value, ir.Constant(SMALL, 0))
    return build.shuffle_vector(first, empty, zeros(SMALL, size))


def shuffled(build: ir.IRBuilder, a: Any, b: Any, places: Sequence[int]) -> Any:
    """Numbers of two vectors at some places, those of b after those of a."""
    numbers = [ir.Constant(SMALL, n) for n in places]
    mask = ir.Constant(ir.VectorType(SMALL, len(places)), numbers)
    return build.shuffle_vector(a, b, mask)


def plus(build: ir.IRBuilder, total: Any, a: Any, b: Any) -> Any:
    """total + a b."""
    return build.fadd(total, build.fmul(a, b, flags=FLAGS), flags=FLAGS)


def differs_from_zero(build: ir.IRBuilder, value: Any) -> Any:
    """Whether each of some numbers is not zero; NaN is not."""
    return build.fcmp_unordered('!=', value, ir.Constant(value.type, None))


def add_up(build: ir.IRBuilder, value: Any, width: int = 1) -> Any:
    """The sum of the numbers of a vector, or ``width`` numbers that have that sum."""
    size = value.type.count
    while size > width:
        size //= 2
        halves = (range(size), range(size, 2 * size))
        parts = [shuffled(build, value, value, half) for half in halves]
        value = build.fadd(*parts, flags=FLAGS)
    return build.extract_element(value, ir.Constant(SMALL, 0)) if width == 1 else value


# ---------------------------------------------------------------- loops


@contextlib.contextmanager
def loop(build: ir.IRBuilder, start: Any, stop: Any, step: int) -> Iterator[Any]:
    """Instructions inside run for start, start + step, ... as long as a whole step fits
    before stop; gives the number. From 0 on, :func:`rest_of` is where it ends."""
    before = build.block
    head = build.append_basic_block('head')
    body = build.append_basic_block('body')
    after = build.append_basic_block('after')
    build.branch(head)
    build.position_at_end(head)
    at = build.phi(WORD)
    at.add_incoming(word(start), before)
    end = build.add(at, word(step))
    build.cbranch(build.icmp_signed('<=', end, word(stop)), body, after)
    build.position_at_end(body)
    yield at
    at.add_incoming(end, build.block)
    build.branch(head)
    build.position_at_end(after)


class Running:
    """A value that a loop keeps in a register: what is assigned to it is read in the
    next turn, and after the loop."""

    def __init__(self, value: Any):
        self.value = value


@contextlib.contextmanager
def running(
    build: ir.IRBuilder, start: Any, stop: Any, step: int, value: Any
) -> Iterator[tuple[Any, Running]]:
    """The same loop with a running value; gives the number and the value."""
    with running_all(build, start, stop, step, {0: value}) as (at, found):
        yield at, found[0]


@contextlib.contextmanager
def running_all(
    build: ir.IRBuilder, start: Any, stop: Any, step: int, values: Mapping[Any, Any]
) -> Iterator[tuple[Any, dict[Any, Running]]]:
    """The same with several running values by name."""
    before = build.block
    with loop(build, start, stop, step) as at:
        body = build.block
        build.position_after(at)
        kept = {name: build.phi(value.type) for name, value in values.items()}
        build.position_at_end(body)
        found = {name: Running(phi) for name, phi in kept.items()}
        yield at, found
        for name, phi in kept.items():
            phi.add_incoming(values[name], before)
            phi.add_incoming(found[name].value, build.block)
    for name, phi in kept.items():
        found[name].value = phi


def rest_of(build: ir.IRBuilder, stop: Any, step: int) -> Any:
    """Where a loop from 0 that takes whole steps only ends."""
    return build.mul(build.udiv(stop, word(step)), word(step))


def parts(
    build: ir.IRBuilder, stop: Any, sizes: Sequence[int]
) -> Iterator[tuple[Any, int]]:
    """Instructions inside run for every part of the numbers from 0 to stop: where it
    starts, and how many there are, one of ``sizes``, the largest that fits."""
    done: Any = 0
    for size in sizes:
        with loop(build, done, stop, size) as at:
            yield at, size
        done = rest_of(build, stop, size)


# ---------------------------------------------------------------- calls


def call(
    name: str,
    emit: Callable[[ir.IRBuilder, list[Buffer], list[Buffer]], None],
    given: Sequence[Any],
    results: Sequence[jax.ShapeDtypeStruct],
    in_place: Sequence[Any] = (),
    *,
    vmap_method: str = 'sequential',
) -> list[jax.Array]:
    """The results of a kernel; ``emit(build, operands, results)`` adds its instructions.

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
            _kept[name] = _registered(name, emit, (given, results))
    first = len(given) - len(same)
    run = jax.ffi.ffi_call(
        name,
        results,
        input_output_aliases={first + n: n for n in range(len(same))},
        vmap_method=vmap_method,
    )
    return list(run(*given))


def _registered(
    name: str, emit: Callable[..., None], arrays: tuple[Sequence[Any], Sequence[Any]]
) -> tuple[Any, Any]:
    """A function that XLA knows; ``arrays``: operands and results."""
    module = ir.Module(name)
    pointer = WORD.as_pointer()
    entry = ir.Function(module, ir.FunctionType(WORD, [pointer]), name)
    (frame,) = entry.args
    build = ir.IRBuilder(entry.append_basic_block('start'))
    address = word_at(build, frame, EXTENSION)
    with build.if_then(build.icmp_signed('!=', address, word(0))):
        extension = build.inttoptr(address, pointer)
        kind = build.and_(word_at(build, extension, KIND), word(2**32 - 1))
        with build.if_then(build.icmp_signed('==', kind, word(OF_METADATA))):
            metadata = words_at(build, extension, METADATA)
            build.store(word(OLDEST), build.gep(metadata, [word(VERSION)]))
            build.ret(word(0))
    found = []
    for field, several_ in zip((OPERANDS, RESULTS), arrays, strict=True):
        words = words_at(build, frame, field)
        # Arrays of other types are passed on, not read.
        numbers = [NUMBERS.get(x.dtype.name, WORD) for x in several_]
        every = [words_at(build, words, n) for n in range(len(numbers))]
        found.append(
            [Buffer(build, *pair) for pair in zip(every, numbers, strict=True)]
        )
    emit(build, *found)
    build.ret(word(0))
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
