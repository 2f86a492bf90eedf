"""What can be measured of a learner, without any change to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ArgumentError, three_parts
from ..program import Path
from ..rules import PRESETS, Rule, named
from .binding import StepBinding
from .calls import GradientCall, failure_explained, solve
from .carried import trace_table
from .certificate import (
    Certificate,
    certificate_of,
    certificate_program,
    parameter_groups,
    random_directions,
)
from .check import GradientCheck, compare
from .losses import loss_weights
from .memory import MemoryPlan, plan_memory
from .model_states import check_shapes, restore_start, sample_count, start_values
from .parameter_gradients import gradients_of
from .placement import Placement, on_mesh
from .recording import recording
from .sequences import gradient_program

if TYPE_CHECKING:
    from .learner import Learner


def evaluate(learner: Learner, sequences: tuple, step_fn: Callable | None) -> Any:
    """What the steps of a fresh sequence give, stacked over time."""
    run = lambda *xs: brainstate.transform.for_loop(step_fn or learner, *xs)
    program = learner._loop('evaluate', (step_fn, *learner._held()), run, step_fn)
    with recording(learner, ignores_modulators=True), learner.unmoved():
        restore_start(learner)
        with failure_explained(learner, sequences):
            return program(*sequences)


def compare_with_bptt(
    learner: Learner, call: GradientCall, rules: Iterable[tuple[Rule, Any]]
) -> tuple[GradientCheck, ...]:
    """The gradient of a fresh sequence by each rule, with the rule's own state, beside
    that of BPTT."""
    found = solve(learner, call, PRESETS['bptt'].default)
    exact = found.binding.gradients_by_name(found.solved.gradients)
    credits = learner.graph.report.credits
    classes = {r.context['name']: r.context['credit'] for r in credits}
    checks = []
    for rule, state in rules:
        state = rule.init_state(learner._groups()) if state is None else state
        binding, _, solved, _ = solve(learner, call, rule, state)
        solver = learner._solver(binding, rule, loss=True)
        gives = gradients_of(rule, binding, solver, credits)
        mine = binding.gradients_by_name(solved.gradients)
        rows = [
            compare(n, classes.get(n, 'none'), gives[n].kind, gradient, exact[n])
            for n, gradient in mine.items()
        ]
        checks.append(GradientCheck(rule.name, tuple(rows)))
    return tuple(checks)


def rules_of(given_rules: Any) -> list[tuple[Rule, Any]]:
    """Rules from their names, classes, configurations or learners, and what those of
    learners read."""
    if (
        isinstance(given_rules, str)
        or not isinstance(given_rules, Sequence)
        or not given_rules
    ):
        raise ArgumentError(
            three_parts(
                f'rules={given_rules!r}',
                'it is a list of rules to compare',
                "rules=['d_rtrl', 'pp_prop']",
            )
        )
    found = []
    for one in given_rules:
        name = one if isinstance(one, str) else getattr(one, '__name__', None)
        rule = named(name).default if name else getattr(one, 'rule', one)
        if not isinstance(rule, Rule):
            raise ArgumentError(
                three_parts(
                    f'{one!r} among rules',
                    'it is no rule',
                    "a name, as 'd_rtrl', or a learner",
                )
            )
        state = getattr(one, 'rule_state', None)
        found.append((rule, None if state is None else state.value))
    return found


def certify(
    learner: Learner,
    call: GradientCall,
    directions: int,
    per_parameter: bool,
    groups: Mapping[str, Sequence[Path]] | None,
    seed: int,
) -> Certificate:
    """Whether the rule's gradient of a fresh sequence points downhill."""
    length = len(jax.tree.leaves(call.sequences)[0])
    weights, unit = loss_weights(call.mask, length, 'steps', call.reduction)
    binding = learner._binding(call.step_fn, call.sequences)
    own = parameter_groups(binding.info.program.parameters, per_parameter, groups)
    program = _certificate_program(learner, binding, length, own)
    parameters, states = binding.read()
    states = binding.with_values(states, start_values(learner))
    drawn = random_directions(parameters, directions, seed)
    inputs, rule_state = binding.inputs(call.sequences), learner._rule_value()
    traces: list = []
    given = (parameters, states, traces, inputs, weights, unit, rule_state)
    measured = program(drawn, *given, masked=call.mask is not None)
    names = list(own) if per_parameter or groups else []
    return certificate_of(learner.rule.name, length, names, measured)


def _certificate_program(
    learner: Learner, binding: StepBinding, steps: int, groups: dict
) -> Callable:
    """The compiled certificate, whose gradient is made in the way of less memory."""
    rule, options = learner.rule, learner._options()
    solver = learner._solver(binding, rule, loss=True, discarded=True)
    if options.passes is None and rule.has_trace:
        traces = trace_table(solver).size
        fits = traces <= learner.max_trace_bytes
        passes = 1 if fits and traces < steps * solver.kept_bytes else 2
        options = replace(options, passes=passes)

    def make() -> Callable:
        solve = gradient_program(solver, rule, True, options)
        run = certificate_program(solver.step, solve, list(groups.values()))
        return jax.jit(run, static_argnames='masked')

    lists = tuple(map(tuple, groups.values()))
    parts = (solver, options, lists)
    return learner._program('certificate', parts, make, binding.is_reusable)


def plan_of(
    learner: Learner, steps: int, mesh: Any, shard: Mapping[str, Any] | None
) -> MemoryPlan:
    """Bytes that a sequence of the compiled inputs needs on each device."""
    if not isinstance(steps, (int, np.integer)) or steps < 1:
        why = 'a sequence has at least one step'
        fix = 'a whole number of at least 1'
        raise ValueError(three_parts(f'memory_plan({steps!r})', why, fix))

    def step_fn(*xs: Any) -> Any:
        leaves = jax.tree.leaves(learner(*xs))
        inexact = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
        return sum(jnp.sum(jnp.abs(x) ** 2) for x in inexact)

    learner.check_compiled()
    check_shapes(learner)
    binding = StepBinding.of_step_fn(learner, step_fn, learner._example)
    solver = learner._solver(binding, learner.rule, loss=True)
    options = learner._options()
    if mesh is not None:
        other = Placement.of(mesh, shard)
        assert other is not None
        options = replace(options, placement=other.with_size(sample_count(learner)))
    with on_mesh(options.placement):
        given = (binding, solver, learner.rule, steps, options)
        return plan_memory(*given, learner._rule_value())
