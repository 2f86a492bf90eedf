"""Loops compiled by LLVM as calls of XLA's foreign function interface.

XLA calls the machine code itself, without Python in between, so that a call takes less
than a microsecond, and compiling takes some 50 ms. llvmlite, a part of numba, gives the
builder of LLVM's instructions. Arguments arrive as a call frame of 64-bit words, laid
out as in ``xla/ffi/api/c_api.h``, which XLA keeps from version to version.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import llvmlite.binding as llvm
from llvmlite import ir

WORD = ir.IntType(64)
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


def word(number: int) -> ir.Constant:
    """A number as a word."""
    return ir.Constant(WORD, number)


def word_at(build: ir.IRBuilder, words: Any, index: int) -> Any:
    """One of the words at an address."""
    return build.load(build.gep(words, [word(index)]))


def words_at(build: ir.IRBuilder, words: Any, index: int) -> Any:
    """The address of words that one of the words at an address holds."""
    return build.inttoptr(word_at(build, words, index), WORD.as_pointer())


class Buffer:
    """An array of an argument: the address of its numbers, and its sizes."""

    def __init__(self, build: ir.IRBuilder, words: Any, number: Any):
        address = word_at(build, words, DATA)
        self._build = build
        self._number = number
        self._data = build.inttoptr(address, number.as_pointer())
        self._sizes = words_at(build, words, DIMENSIONS)

    def holding(self, number: Any) -> Buffer:
        """The same memory read as numbers of another type."""
        other = copy.copy(self)
        other._number = number
        other._data = self._build.bitcast(self._data, number.as_pointer())
        return other

    def size(self, build: ir.IRBuilder, axis: int) -> Any:
        """The length of an axis."""
        return word_at(build, self._sizes, axis)

    def load(self, build: ir.IRBuilder, at: Any, size: int) -> Any:
        """``size`` numbers from one on."""
        return build.load(self._place(build, at, size), align=self._alignment)

    def store(self, build: ir.IRBuilder, value: Any, at: Any, size: int) -> None:
        """Write ``size`` numbers."""
        build.store(value, self._place(build, at, size), align=self._alignment)

    def prefetch(self, build: ir.IRBuilder, at: Any, size: int) -> None:
        """Ask for ``size`` numbers from one on, which will be read and written soon."""
        byte = ir.IntType(8).as_pointer()
        small = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, small, small, small])
        name = 'llvm.prefetch.p0'
        function = build.module.globals.get(name)
        if function is None:
            function = ir.Function(build.module, kind, name)
        to_write, keep, is_data = (ir.Constant(small, n) for n in (1, 3, 1))
        for start in range(0, size, 64 // self._alignment):
            place = build.gep(self._data, [build.add(at, word(start))])
            given = (build.bitcast(place, byte), to_write, keep, is_data)
            build.call(function, given)

    def _place(self, build: ir.IRBuilder, at: Any, size: int) -> Any:
        place = build.gep(self._data, [at])
        if size == 1:
            return place
        return build.bitcast(place, several(self._number, size).as_pointer())

    @property
    def _alignment(self) -> int:
        small = (ir.FloatType(), ir.IntType(32))
        return 4 if self._number in small else 8


def several(number: Any, size: int) -> Any:
    """The type of so many numbers that are taken together."""
    return number if size == 1 else ir.VectorType(number, size)


def number_type(dtype: Any) -> Any:
    """The type of numbers for float32 or float64."""
    return ir.FloatType() if dtype == jnp.float32 else ir.DoubleType()


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
    at.add_incoming(start, before)
    end = build.add(at, word(step))
    build.cbranch(build.icmp_signed('<=', end, stop), body, after)
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


def register(
    name: str, number: Any, counts: tuple[int, int], body: Callable[..., None]
) -> None:
    """Make a function known to XLA; ``body(build, operands, results)`` adds its
    instructions. ``counts``: how many operands and results it has, all of numbers of
    one type."""
    with _lock:
        if name not in _kept:
            _kept[name] = _registered(name, number, counts, body)


def _registered(
    name: str, number: Any, counts: tuple[int, int], body: Callable[..., None]
) -> tuple[Any, Any]:
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
    for field, count in zip((OPERANDS, RESULTS), counts, strict=True):
        buffers = words_at(build, frame, field)
        every = [words_at(build, buffers, n) for n in range(count)]
        found.append([Buffer(build, words, number) for words in every])
    body(build, *found)
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
