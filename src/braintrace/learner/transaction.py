"""A call as one transaction: a compiled program runs and its results are written, or
nothing changes. Neither Ctrl-C nor an error of the program leaves something between.

A program may write its results into the memory of its arguments (donation). Between its
start and the writing of the results, the states then refer to arrays that no longer
exist. An interrupt must wait for that time, and a program that may raise an error
itself donates nothing.
"""

from __future__ import annotations

import sys
import threading

# The functions of the module signal convert handlers to enums and back, which takes
# 3 µs each: a step of a small network takes 50.
from _signal import SIGINT, getsignal, signal
from collections.abc import Callable
from typing import Any

import jax

from ..compat import is_at_top
from .programs import shapes_of

_MAIN = threading.main_thread().ident


class DeferInterrupts:
    """A block in which Ctrl-C waits: the handler that was set before is called when the
    block ends. Blocks may be nested.

    Python runs handlers of signals in the main thread. Other threads are never
    interrupted, so a block does nothing in them.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._handler: Any = None
        self._waiting = 0

    def __enter__(self) -> None:
        if threading.get_ident() != _MAIN:
            return
        if self._depth:
            self._depth += 1
        elif callable(getsignal(SIGINT)):  # otherwise no exception is raised
            self._waiting = 0
            # Python first runs the handler of a signal that has already come: if that
            # raises, nothing has changed. From here on nothing can raise.
            self._handler = signal(SIGINT, self._receive)
            self._depth = 1

    def __exit__(self, *error: Any) -> None:
        if not self._depth or threading.get_ident() != _MAIN:
            return
        self._depth -= 1
        if not self._depth:
            signal(SIGINT, self._handler)
            while self._waiting:
                self._waiting -= 1
                self._handler(SIGINT, sys._getframe(1))

    def _receive(self, number: int, frame: Any) -> None:
        self._waiting += 1


uninterrupted = DeferInterrupts()
"""``with uninterrupted:`` Ctrl-C is raised at the end of the block."""


class Transaction:
    """A function of arrays that is compiled, and whose results are written to states.

    ``donated``: the number of the argument whose memory is used for the results; None
    if old values must stay. ``can_fail``: the function runs code that may raise an
    error (:func:`braintrace.compat.can_fail`). ``options``: those of ``jax.jit``.

    ``run`` is the compiled function alone, for use inside another program.
    """

    def __init__(
        self, function: Callable, donated: int | None, can_fail: bool, **options: Any
    ):
        self.donates = donated is not None and not can_fail
        self._can_fail = can_fail
        self._compiled: set[tuple] = set()
        numbers = donated if self.donates else ()
        self.run: Any = jax.jit(function, donate_argnums=numbers, **options)

    def compile(self, *given: Any, **static: Any) -> None:
        """Compile for such arguments: a call then takes no longer than it runs, and an
        interrupt does not wait for the compiler."""
        if self.donates and is_at_top():
            key = shapes_of((given, static))
            if key not in self._compiled:
                self.run.lower(*given, **static).compile()
                self._compiled.add(key)

    def __call__(self, write: Callable[[Any], Any], *given: Any, **static: Any) -> Any:
        """Run it and write its results; what ``write`` returns."""
        if self.donates:
            with uninterrupted:
                return write(self.run(*given, **static))
        results = self.run(*given, **static)
        if self._can_fail:
            # On devices that run programs in the background, an error is raised only
            # when a result is read.
            jax.block_until_ready(results)
        with uninterrupted:
            return write(results)
