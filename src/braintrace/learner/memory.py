"""What a sequence will need in memory, before any of it is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..analysis.page import size_text
from ..compiled_step import Values
from ..errors import printable
from ..rules import PRESETS, Rule
from ..solver import BlockSolver, InfluenceSolver
from .arguments import bytes_of
from .binding import StepBinding, trace_keys
from .sequences import SequenceOptions


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a sequence of ``steps`` needs, by way of running it."""

    steps: int
    traces: dict[tuple, int]
    one_pass: int
    two_pass: int | None
    bptt: int

    def __str__(self) -> str:
        lines = [f'memory for {self.steps} steps']
        named: dict[str, list[int]] = {}
        for (parameters, operation, *_), n in self.traces.items():
            named.setdefault(
                printable(f'{", ".join(parameters)} in {operation}'), []
            ).append(n)
        parts = lambda sizes: f' in {len(sizes)} parts' if len(sizes) > 1 else ''
        lines += [
            f'  trace of {name}: {size_text(sum(sizes))}{parts(sizes)}'
            for name, sizes in named.items()
        ]
        lines += [
            f'one pass, {"traces carried:" if self.traces else "windows:       "} {size_text(self.one_pass)}',
            *(
                []
                if self.two_pass is None
                else [f'two passes, fresh=True:   {size_text(self.two_pass)}']
            ),
            f'BPTT:                     {size_text(self.bptt)}',
        ]
        return '\n'.join(lines)


def plan_memory(
    binding: StepBinding,
    solver: BlockSolver | InfluenceSolver,
    rule: Rule,
    steps: int,
    options: SequenceOptions,
    rule_state: Any,
) -> MemoryPlan:
    """Bytes that a sequence of so many steps needs, one way and another."""
    parameters, states = jax.eval_shape(binding.read)
    stack = lambda x: jax.ShapeDtypeStruct((steps, *x.shape), x.dtype)
    inputs = Values((key, stack(x)) for key, x in solver.step.inputs.items())
    weights = jax.ShapeDtypeStruct((steps,), jnp.result_type(float))
    sequence = (inputs, weights)
    exact = PRESETS['bptt'].default.solver(solver.step)
    assert isinstance(exact, BlockSolver)

    def windows(length: int) -> int:
        run = lambda *given: exact.windows(*given, length=length, masked=False)
        return _needed(run, parameters, states, [], *sequence)

    if not rule.has_trace:
        own = windows(rule.window.steps or steps) if rule.window else windows(steps)
        return MemoryPlan(steps, {}, own, None, windows(steps))
    traces = jax.eval_shape(solver.init_traces)
    sizes = dict(zip(trace_keys(solver), map(bytes_of, traces), strict=True))
    block = lambda carried: options.block_length(solver, steps, carried)

    def one_pass(p: Values, s: Values, traces: list, xs: Values, w: jax.Array) -> Any:
        if rule.multi_step and isinstance(solver, BlockSolver):
            return solver.windows(p, s, traces, xs, w, length=1, masked=False)
        return solver.one_pass(
            p, s, traces, xs, w, block(True), rule_state, masked=False
        )

    def two_pass(p: Values, s: Values, xs: Values, w: jax.Array) -> Any:
        assert isinstance(solver, BlockSolver)
        return solver.two_pass(p, s, xs, w, block(False), rule_state, masked=False)

    once = _needed(one_pass, parameters, states, traces, *sequence)
    twice = None
    if rule.runs_in_two_passes and not rule.multi_step:
        twice = _needed(two_pass, parameters, states, *sequence)
    return MemoryPlan(steps, sizes, once, twice, windows(steps))


def _needed(run: Callable, *args: Any) -> int:
    """Bytes that a compiled program allocates."""
    found: Any = jax.jit(run).lower(*args).compile().memory_analysis()
    return int(found.temp_size_in_bytes + found.output_size_in_bytes)
