"""The methods of a :class:`Learner` that measure without changing it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import brainstate
import jax
import jax.numpy as jnp

from ..errors import ArgumentError, three_parts
from ..program import Path
from ..rules import PRESETS, Rule, named
from .access import place_inputs, synchronised
from .arguments import is_count, length_of
from .binding import StepBinding, bind_step_fn, check_aux, recording
from .calls import GradientCall, failure_explained, solve
from .carried import groups_of, rule_value, trace_table
from .certificate import (
    Certificate,
    certificate_of,
    certificate_program,
    check_directions,
    parameter_groups,
    random_directions,
)
from .check import GradientCheck, RuleComparison, compare
from .losses import loss_weights
from .memory import MemoryPlan, plan_memory
from .model_states import check_shapes, restore_start, sample_count, start_values
from .parameter_gradients import gradients_of
from .placement import Placement, on_mesh
from .programs import loop_of, program_of
from .sequences import gradient_program, options_of, solver_of
from .transaction import uninterrupted

if TYPE_CHECKING:
    from .learner import Learner


def evaluate(
    learner: Learner, *sequences: Any, step_fn: Callable[..., Any] | None = None
) -> Any:
    """Run a fresh sequence forward and return the outputs of all steps, stacked over
    time.

    ``step_fn``: called at every step instead of the learner. Nothing is learned, and
    states, traces and random numbers do not change.
    """
    length_of(sequences, step_fn)
    with synchronised(learner):
        sequences = place_inputs(learner, sequences, 1)
        run = lambda *xs: brainstate.transform.for_loop(step_fn or learner, *xs)
        program = loop_of(
            learner, 'evaluate', (step_fn, *learner._held()), run, step_fn
        )
        with recording(learner, ignores_modulators=True), unmoved(learner):
            restore_start(learner)
            with failure_explained(learner, sequences):
                return program(*sequences)


@overload
def gradient_check(
    learner: Learner,
    *sequences: Any,
    step_fn: Callable[..., Any],
    rules: None = None,
    mask: Any = None,
    reduction: str = 'mean',
    has_aux: bool | None = None,
) -> GradientCheck: ...


@overload
def gradient_check(
    learner: Learner,
    *sequences: Any,
    step_fn: Callable[..., Any],
    rules: Sequence[Any],
    mask: Any = None,
    reduction: str = 'mean',
    has_aux: bool | None = None,
) -> RuleComparison: ...


def gradient_check(
    learner: Learner,
    *sequences: Any,
    step_fn: Callable[..., Any],
    rules: Sequence[Any] | None = None,
    mask: Any = None,
    reduction: str = 'mean',
    has_aux: bool | None = None,
) -> GradientCheck | RuleComparison:
    """Compare the gradient of a fresh sequence with BPTT, for this rule or for several
    ``rules``.

    ``rules``: names or classes of rules (with default options), :class:`ETraceConfig`,
    or learners such as ``braintrace.SnAp(model, n=2)``, whose rule, options, modulator
    and predictor are used.

    ``step_fn``, ``mask``, ``reduction`` and ``has_aux``: as in :meth:`etrace_grad`.
    Auxiliary values are ignored; without ``has_aux``, both ``loss`` and ``(loss, aux)``
    are accepted. Nothing is changed.
    """
    own = (learner.rule, rule_value(learner))
    compared = [own] if rules is None else _rules_of(rules)
    with synchronised(learner), unmoved(learner):
        sequences = place_inputs(learner, sequences, 1)
        call = GradientCall(sequences, step_fn, mask, reduction, has_aux)
        checks = _compare_with_bptt(learner, call, compared)
    return checks[0] if rules is None else RuleComparison(checks)


def certificate(
    learner: Learner,
    *sequences: Any,
    step_fn: Callable[..., Any],
    directions: int = 8,
    mask: Any = None,
    reduction: str = 'mean',
    per_parameter: bool = False,
    groups: Mapping[str, Sequence[Path]] | None = None,
    seed: int = 0,
    has_aux: bool | None = None,
) -> Certificate:
    """Test whether the gradient of a fresh sequence points downhill.

    The result is ⟨g_true, g⟩/|g|², where g is the gradient of :meth:`etrace_grad` and
    g_true is the gradient of BPTT. It is computed by forward mode through steps without
    cuts. It is exact and costs a few forward passes. For rules that carry traces,
    memory does not grow with the sequence. Derivatives along random ``directions``
    estimate the cosine.

    ``per_parameter``: add a row for each parameter array. ``groups``: add a row for
    each named list of paths; a path includes all parameters below it. ``step_fn``,
    ``mask``, ``reduction`` and ``has_aux``: as in :meth:`gradient_check`. Nothing is
    changed.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> net = brainstate.nn.GRUCell(3, 4)
    >>> learner = braintrace.compile(net, 'bptt', jnp.ones((2, 3)), batch_size=2)
    >>> step = lambda x: jnp.mean((learner(x) - 1) ** 2)
    >>> found = learner.certificate(jnp.ones((5, 2, 3)), step_fn=step)
    >>> round(found.descent, 3), found.descends
    (1.0, True)
    """
    check_directions(directions)
    with synchronised(learner), unmoved(learner):
        sequences = place_inputs(learner, sequences, 1)
        call = GradientCall(sequences, step_fn, mask, reduction, has_aux)
        return _certify(learner, call, directions, per_parameter, groups, seed)


def memory_plan(
    learner: Learner,
    steps: int,
    mesh: Any = None,
    shard: Mapping[str, Any] | None = None,
) -> MemoryPlan:
    """Compute the bytes that a sequence of ``steps`` needs on each device, before
    anything is allocated.

    ``mesh`` and ``shard``: plan for other devices, as in ``compile``.
    """
    if not is_count(steps):
        why = 'a sequence has at least one step'
        fix = 'a whole number of at least 1'
        shown = repr(steps)
        if hasattr(steps, 'shape') and steps.shape:
            shown = f'an array of shape {steps.shape}'
            fix += ', as memory_plan(len(xs))'
        raise ValueError(three_parts(f'memory_plan({shown})', why, fix))

    def step_fn(*xs: Any) -> Any:
        leaves = jax.tree.leaves(learner(*xs))
        inexact = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
        return sum(jnp.sum(jnp.abs(x) ** 2) for x in inexact)

    learner.check_compiled()
    check_shapes(learner)
    binding = StepBinding.of_step_fn(learner, step_fn, learner._example)
    solver = solver_of(learner, binding, learner.rule, loss=True)
    options = options_of(learner)
    if mesh is not None:
        other = Placement.of(mesh, shard)
        assert other is not None
        options = replace(options, placement=other.with_size(sample_count(learner)))
    with on_mesh(options.placement):
        given = (binding, solver, learner.rule, steps, options)
        return plan_memory(*given, rule_value(learner))


@contextlib.contextmanager
def unmoved(learner: Learner) -> Iterator[None]:
    """A context that restores all states that are read or written inside it, the random
    numbers included."""
    with synchronised(learner):
        touched: Any = brainstate.StateTraceStack()
        try:
            with touched, learner._carried.unmoved():
                yield
        finally:
            with uninterrupted:
                touched.recovery_original_values()


# ---------------------------------------------------------------- parts


def _compare_with_bptt(
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
        state = rule.init_state(groups_of(learner)) if state is None else state
        binding, _, solved, _ = solve(learner, call, rule, state)
        solver = solver_of(learner, binding, rule, loss=True)
        gives = gradients_of(rule, binding, solver, credits)
        mine = binding.gradients_by_name(solved.gradients)
        rows = [
            compare(n, classes.get(n, 'none'), gives[n].kind, gradient, exact[n])
            for n, gradient in mine.items()
        ]
        checks.append(GradientCheck(rule.name, tuple(rows)))
    return tuple(checks)


def _rules_of(given_rules: Any) -> list[tuple[Rule, Any]]:
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


def _certify(
    learner: Learner,
    call: GradientCall,
    directions: int,
    per_parameter: bool,
    groups: Mapping[str, Sequence[Path]] | None,
    seed: int,
) -> Certificate:
    """Whether the rule's gradient of a fresh sequence points downhill."""
    length = call.length
    weights, unit = loss_weights(call.mask, length, 'steps', call.reduction)
    binding = bind_step_fn(learner, call.step_fn, call.sequences)
    if call.has_aux is not None:
        check_aux(binding.out_tree, call.has_aux)
    own = parameter_groups(binding.info.program.parameters, per_parameter, groups)
    program = _certificate_program(learner, binding, length, own)
    parameters, states = binding.read()
    states = binding.with_values(states, start_values(learner))
    drawn = random_directions(parameters, directions, seed)
    inputs, rule_state = binding.inputs(call.sequences), rule_value(learner)
    traces: list = []
    given = (parameters, states, traces, inputs, weights, unit, rule_state)
    measured = program(drawn, *given, masked=call.mask is not None)
    names = list(own) if per_parameter or groups else []
    return certificate_of(learner.rule.name, length, names, measured)


def _certificate_program(
    learner: Learner, binding: StepBinding, steps: int, groups: dict
) -> Callable:
    """The compiled certificate, whose gradient is made in the way of less memory."""
    rule, options = learner.rule, options_of(learner)
    solver = solver_of(learner, binding, rule, loss=True, discarded=True)
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
    return program_of(learner, 'certificate', parts, make, binding.is_reusable)
