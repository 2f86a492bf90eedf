"""The memory that a sequence needs, computed before any of it is allocated."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import bytes_of
from ..compiled_step import Values
from ..errors import printable
from ..rules import PRESETS, Rule
from ..solver import Solver
from ..source_lines import use_name
from ..text import size_text
from .binding import StepBinding
from .carried import trace_table
from .placement import trace_axes
from .sequences import SequenceOptions, gradient_program


@dataclass(frozen=True, repr=False)
class MemoryPlan:
    """The bytes that a sequence of ``steps`` needs on each device, for each way of
    running it."""

    steps: int
    traces: dict[tuple, int]
    one_pass: int
    two_pass: int | None
    bptt: int

    @property
    def ways(self) -> list[tuple[str, int]]:
        """The ways of running the sequence, and the bytes that each needs."""
        once = 'one pass, traces carried' if self.traces else 'one pass, in windows'
        found = [(once, self.one_pass)]
        if self.two_pass is not None:
            found.append(('two passes, fresh=True', self.two_pass))
        return [*found, ('BPTT', self.bptt)]

    def __repr__(self) -> str:
        size, parts = size_text(sum(self.traces.values())), len(self.traces)
        rows = {'traces': f'{size} in {parts} part{"s" * (parts != 1)}'}
        if not self.traces:
            rows = {'traces': 'none'}
        rows |= {name.partition(',')[0]: size_text(n) for name, n in self.ways}
        lines = [f'  {name:10}  {text}' for name, text in rows.items()]
        return '\n'.join([f'MemoryPlan of {self.steps} steps', *lines])

    def __str__(self) -> str:
        lines = [f'memory for {self.steps} steps']
        named: dict[str, list[int]] = {}
        for (parameters, operation, *_), n in self.traces.items():
            name = f'{", ".join(parameters)} in {use_name(operation)}'
            named.setdefault(printable(name), []).append(n)
        parts = lambda sizes: f' in {len(sizes)} parts' if len(sizes) > 1 else ''
        lines += [
            f'  trace of {name}: {size_text(sum(sizes))}{parts(sizes)}'
            for name, sizes in named.items()
        ]
        width = max(len(name) for name, _ in self.ways) + 1
        lines += [f'{name + ":":{width}} {size_text(n)}' for name, n in self.ways]
        return '\n'.join(lines)


def plan_memory(
    binding: StepBinding,
    solver: Solver,
    rule: Rule,
    steps: int,
    options: SequenceOptions,
    rule_state: Any,
) -> MemoryPlan:
    """The bytes that a sequence of this many steps needs on each device, for each way
    of running it."""
    placement = options.placement
    parameters, states = jax.eval_shape(binding.read)
    stack = lambda x: jax.ShapeDtypeStruct((steps, *x.shape), x.dtype)
    inputs = Values((key, stack(x)) for key, x in solver.step.inputs.items())
    traces = solver.trace_shapes if rule.has_trace else []
    if placement is not None:
        parameters = placement.split(parameters, -1)
        axes = trace_axes(solver) if traces else None
        states, traces = placement.split(states), placement.split(traces, axes)
        inputs = placement.split_inputs(inputs, 1)
    weights = jax.ShapeDtypeStruct((steps,), jnp.result_type(float))

    def program(solver: Solver, rule: Rule, passes: int, traces: list) -> Any:
        """A gradient of the sequence, lowered; in two passes it is a fresh one."""
        way = replace(options, passes=passes)
        solve = gradient_program(solver, rule, passes == 2, way)
        run = jax.jit(partial(solve, masked=False))
        return run.lower(parameters, states, traces, inputs, weights, 1.0, rule_state)

    exact = PRESETS['bptt'].default
    ways = [program(solver, rule, 1, traces)]
    ways.append(program(exact.solver(solver.step), exact, 1, []))
    if rule.runs_in_two_passes:
        ways.append(program(solver, rule, 2, []))
    once, whole, *twice = _needed(*ways)
    sizes = {}
    if rule.has_trace:
        keys = trace_table(solver).keys
        sizes = dict(zip(keys, map(_bytes_here, traces), strict=True))
    return MemoryPlan(steps, sizes, once, twice[0] if twice else None, whole)


def _bytes_here(trace: Any) -> int:
    """Bytes of a trace on each device."""

    def here(x: Any) -> Any:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return bytes_of(jax.tree.map(here, trace))


_QUICK = {
    'xla_backend_optimization_level': 0,
    'xla_llvm_disable_expensive_passes': True,
}


def _needed(*programs: Any) -> list[int]:
    """Bytes that each program allocates; XLA compiles them side by side."""
    # Buffers are assigned before LLVM optimises, so that may be left out.
    options = _QUICK if jax.default_backend() == 'cpu' else None
    compiled = lambda program: program.compile(options).memory_analysis()
    with ThreadPoolExecutor(len(programs)) as pool:
        found = list(pool.map(compiled, programs))
    return [int(x.temp_size_in_bytes + x.output_size_in_bytes) for x in found]
