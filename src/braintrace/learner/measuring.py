"""What can be measured of a learner, without any change to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from ..errors import three_parts
from ..program import Path
from ..rules import PRESETS
from .arguments import (
    bytes_of,
    check_call,
    check_choice,
    check_directions,
    length_of,
    rules_of,
)
from .binding import StepBinding
from .calls import Calls
from .certificate import (
    Certificate,
    certificate_of,
    certificate_program,
    parameter_groups,
    random_directions,
)
from .check import GradientCheck, RuleComparison, compare
from .gradients import gradients_of
from .losses import loss_weights
from .memory import MemoryPlan, plan_memory
from .placement import Placement
from .recording import recording
from .sequences import gradient_program


class Measuring(Calls):
    """The calls of a learner that change nothing."""

    def evaluate(
        self, *sequences: Any, step_fn: Callable[..., Any] | None = None
    ) -> Any:
        """What ``step_fn``, by default the learner, gives at every step of a fresh
        sequence.

        Stacked over time. Forward only: nothing is learned, and states, traces and
        random numbers stay as they are.
        """
        length_of(sequences, step_fn)
        run = lambda *xs: brainstate.transform.for_loop(step_fn or self, *xs)
        with self._synchronised():
            sequences = self._placed(sequences, 1)
            program = self._loop('evaluate', (step_fn, *self._held()), run, step_fn)
            with recording(self, ignores_modulators=True), self.unmoved():
                self._restore_start()
                with self._failure_explained(sequences):
                    return program(*sequences)

    @overload
    def gradient_check(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        rules: None = None,
        mask: Any = None,
        reduction: str = 'mean',
    ) -> GradientCheck: ...

    @overload
    def gradient_check(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        rules: Sequence[Any],
        mask: Any = None,
        reduction: str = 'mean',
    ) -> RuleComparison: ...

    def gradient_check(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        rules: Sequence[Any] | None = None,
        mask: Any = None,
        reduction: str = 'mean',
    ) -> GradientCheck | RuleComparison:
        """Compare gradients of a fresh sequence with BPTT's: this rule's, or those of
        ``rules``.

        Nothing is changed. ``rules``: names or classes of rules, with the options they
        have by default, :class:`ETraceConfig`, or learners for their rule with its
        options, as ``braintrace.SnAp(model, n=2)``, its modulator or its predictor.
        """
        check_choice('reduction', reduction, ('mean', 'sum'))
        own = (self.rule, self._rule_value())
        compared = [own] if rules is None else rules_of(rules)
        with self._synchronised(), self.unmoved():
            sequences = self._placed(sequences, 1)
            solve = lambda *rule: self._solve(
                sequences, step_fn, mask, reduction, True, *rule
            )
            binding, _, solved, _ = solve(PRESETS['bptt'].default, None)
            exact = binding.gradients_by_name(solved.gradients)
            credits = self.graph.report.credits
            classes = {r.context['name']: r.context['credit'] for r in credits}
            checks = []
            for rule, state in compared:
                state = rule.init_state(self._groups()) if state is None else state
                binding, solver, solved, _ = solve(rule, state)
                gives = gradients_of(rule, binding, solver, credits)
                mine = binding.gradients_by_name(solved.gradients)
                rows = [
                    compare(
                        n, classes.get(n, 'none'), gives[n].kind, gradient, exact[n]
                    )
                    for n, gradient in mine.items()
                ]
                checks.append(GradientCheck(rule.name, tuple(rows)))
        return checks[0] if rules is None else RuleComparison(tuple(checks))

    def certificate(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any],
        directions: int = 8,
        mask: Any = None,
        reduction: str = 'mean',
        per_parameter: bool = False,
        groups: Mapping[str, Sequence[Path]] | None = None,
        seed: int = 0,
    ) -> Certificate:
        """Whether the rule's gradient of a fresh sequence points downhill.

        ⟨g_true, g⟩/|g|², where g is the gradient of :meth:`etrace_grad` and g_true that
        of BPTT, by forward mode through the uncut steps: exact, at the cost of a few
        forward passes, and in memory that does not grow with the sequence for rules
        that carry traces. Random ``directions`` beside it estimate the cosine.

        ``per_parameter``: a row for each parameter array. ``groups``: a row for each of
        these lists of paths, by name; a path stands for all parameters below it.
        ``step_fn``, ``mask`` and ``reduction`` as in :meth:`etrace_grad`; auxiliary
        values are ignored. Nothing is changed.

        >>> import brainstate, braintrace, jax.numpy as jnp
        >>> net = brainstate.nn.GRUCell(3, 4)
        >>> learner = braintrace.compile(net, 'bptt', jnp.ones((2, 3)), batch_size=2)
        >>> step = lambda x: jnp.mean((learner(x) - 1) ** 2)
        >>> found = learner.certificate(jnp.ones((5, 2, 3)), step_fn=step)
        >>> round(found.descent, 3), found.descends
        (1.0, True)
        """
        check_choice('reduction', reduction, ('mean', 'sum'))
        check_call('step_fn', step_fn, sequences, 'one slice of each sequence')
        check_directions(directions)
        length = length_of(sequences)
        weights, unit = loss_weights(mask, length, 'steps', reduction)
        with self._synchronised(), self.unmoved():
            sequences = self._placed(sequences, 1)
            binding = self._binding(step_fn, sequences)
            own = parameter_groups(
                binding.info.program.parameters, per_parameter, groups
            )
            program = self._certificate_program(binding, length, own)
            parameters, states = self._values(binding, fresh=True)
            drawn = random_directions(parameters, directions, seed)
            inputs, rule_state = binding.inputs(sequences), self._rule_value()
            traces: list = []
            given = (parameters, states, traces, inputs, weights, unit, rule_state)
            measured = program(drawn, *given, masked=mask is not None)
        names = list(own) if per_parameter or groups else []
        return certificate_of(self.rule.name, length, names, measured)

    def _certificate_program(
        self, binding: StepBinding, steps: int, groups: dict
    ) -> Callable:
        """The compiled certificate, whose gradient is made in the way of less memory."""
        solver = self._solver(binding, self.rule, loss=True)
        options = self._options()
        if options.passes is None and self.rule.has_trace:
            traces = bytes_of(solver.trace_shapes)
            fits = traces <= self.max_trace_bytes
            passes = 1 if fits and traces < steps * solver.kept_bytes else 2
            options = replace(options, passes=passes)

        def make() -> Callable:
            solve = gradient_program(solver, self.rule, True, options)
            lists = list(groups.values())
            run = certificate_program(solver.step, solve, lists)
            return jax.jit(run, static_argnames='masked')

        lists = tuple(map(tuple, groups.values()))
        parts = (solver, options, lists)
        return self._program('certificate', parts, make, binding.is_reusable)

    def write_report(self, file: Any, steps: int | None = None) -> None:
        """Write the report as a page; ``steps`` adds what a sequence so long needs in
        memory."""
        self.report.to_html(
            file, memory=None if steps is None else self.memory_plan(steps)
        )

    def memory_plan(
        self, steps: int, mesh: Any = None, shard: Mapping[str, Any] | None = None
    ) -> MemoryPlan:
        """Bytes that a sequence of the compiled inputs needs on each device, before any
        is allocated; ``mesh`` and ``shard``: on other devices, as for ``compile``."""
        if not isinstance(steps, (int, np.integer)) or steps < 1:
            why = 'a sequence has at least one step'
            fix = 'a whole number of at least 1'
            raise ValueError(three_parts(f'memory_plan({steps!r})', why, fix))

        def step_fn(*xs: Any) -> Any:
            leaves = jax.tree.leaves(self(*xs))
            inexact = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
            return sum(jnp.sum(jnp.abs(x) ** 2) for x in inexact)

        _ = self.graph  # refuses a learner that was not compiled
        self._kept.check_shapes(self)
        binding = StepBinding.of_step_fn(self, step_fn, self._example)
        solver = self._solver(binding, self.rule, loss=True)
        options = self._options()
        if mesh is not None:
            other = Placement.of(mesh, shard)
            assert other is not None
            options = replace(options, placement=other.with_size(self._sample_count()))
        with options.on_devices():
            given = (binding, solver, self.rule, steps, options)
            return plan_memory(*given, self._rule_value())
