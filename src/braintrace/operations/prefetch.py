"""Rows of an array that a loop compiled by numba will need soon.

Synapses lead to neurons anywhere in memory. Where the neurons do not fit into the
caches, a loop would wait for each of them; asked for a few synapses ahead, they are
there in time.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LINES, LINE = 2, 64
"""Lines of the cache that are asked for, of so many bytes. The processor finds the rest
of a longer row by itself; a loop over lines would take longer than it saves."""


def _load_row_soon(context: Any, array: Any, row: Any) -> Any:
    """Ask for the beginning of a row of an array with two axes."""

    def emit(context: Any, build: Any, signature: Any, given: Any) -> Any:
        kind = signature.args[0]
        values = context.make_array(kind)(context, build, given[0])
        word, small = ir.IntType(64), ir.IntType(32)
        byte = ir.IntType(8).as_pointer()
        stride, _ = cgutils.unpack_tuple(build, values.strides, kind.ndim)
        index = given[1] if given[1].type.width == 64 else build.sext(given[1], word)
        start = build.gep(build.bitcast(values.data, byte), [build.mul(index, stride)])
        prefetch = cgutils.get_or_insert_function(
            build.module,
            ir.FunctionType(ir.VoidType(), [byte, small, small, small]),
            'llvm.prefetch.p0',
        )
        to_write, keep, is_data = (ir.Constant(small, n) for n in (1, 3, 1))
        for line in range(LINES):
            address = build.gep(start, [ir.Constant(word, line * LINE)])
            build.call(prefetch, [address, to_write, keep, is_data])
        return context.get_dummy_value()

    return types.void(array, row), emit


load_row_soon: Any = intrinsic(_load_row_soon)
"""``load_row_soon(array, row)`` inside of compiled functions."""
