"""What of a compiled step decides how near a rule's gradient is to BPTT's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..analysis.credit import CreditAnalysis
from ..analysis.dependence import Bits, flow, of, union
from ..arrays import jacobian_rows
from ..compat import Atom, Var, is_var
from ..compiled_step import Jacobian, Values
from ..program import Parameter
from .local_step import local_jacobian, new_components
from .stages import Stages


@dataclass(frozen=True)
class StepInvariants:
    """What holds for all values of a step's parameters, states and inputs."""

    stages: Stages

    @property
    def credit(self) -> CreditAnalysis:
        """The credit analysis of the step itself."""
        return self.stages.analysed.credit

    def _bit(self, parameter: Parameter) -> int:
        return self.stages.dependence.bit[parameter.invar]

    def moves_states(self, parameter: Parameter) -> bool:
        """Whether any state depends on the parameter."""
        total, carried = self.stages.dependence.total, self.stages.carried
        return bool(
            union(of(total, new) for _, new in carried).grads & self._bit(parameter)
        )

    def reaches_outputs(self, parameter: Parameter) -> bool:
        """Whether outputs of the same step depend on the parameter."""
        return bool(self._seen & self._bit(parameter))

    @cached_property
    def _seen(self) -> int:
        """What the outputs depend on."""
        outputs = self.stages.program.outputs
        return union(of(self.stages.dependence.total, out) for out in outputs).grads

    def is_read(self, group: int, y: Var) -> bool:
        """Whether an output reads a state that y reaches within the step, at that step
        or the next."""
        dependence, outputs = self.stages.dependence, self.stages.program.outputs
        direct = union(of(dependence.direct, out) for out in outputs).grads
        record = self.stages.analysed.groups[group]
        for i in self.stages.locals[group].reached[y]:
            k = record.owners[i]
            new = dependence.new_bit[record.hidden_outvars[k]]
            old = dependence.bit[record.hidden_invars[k]]
            if self._seen & new or direct & old:
                return True
        return False

    # ------------------------------------------------------------ constant derivatives

    def leak(self, group: int, y: Var) -> float | None:
        """λ where D is λ times the identity for all states that y ever reaches; else
        None."""
        local = self.stages.locals[group]
        reached = set(local.reached[y])
        while more := {i for i, j in local.pattern if j in reached} - reached:
            reached |= more
        # What y never reaches has no part in its trace, so other columns do not count.
        entries = {(i, j) for i, j in local.pattern if j in reached}
        if entries != {(i, i) for i in reached}:
            return None
        values = [self._constant_jacobians[group].get(entry) for entry in entries]
        first = values[0] if values else None
        return first if all(value == first for value in values) else None

    def kept(self, group: int) -> float | None:
        """The least that a state of a group with a memory keeps of its own value, 0
        without any; None if that is no constant."""
        own = {(i, j) for i, j in self.stages.locals[group].pattern if i == j}
        constant = self._constant_jacobians[group]
        if not own <= constant.keys():
            return None
        return min((abs(constant[entry]) for entry in own), default=0.0)

    @cached_property
    def _constant_jacobians(self) -> list[dict[tuple[int, int], float]]:
        """Entries of D that are one number whatever parameters, states and inputs
        are."""
        found = []
        for local in self.stages.locals:
            jacobian = lambda env, local=local: local_jacobian(self.stages, local, env)
            found.append(_constant_entries(*self.derivative(local.read, jacobian)))
        return found

    def path_is_steady(self, group: int, y: Var) -> bool:
        """Whether ∂h/∂y depends on parameters and constants only."""
        local = self.stages.locals[group]

        def rows(env: Values) -> dict[int, Any]:
            old, taps = local.group.old_components(env), env.pick(local.taps)
            new = lambda value: new_components(
                self.stages, local, env, old, taps | {y: value[0]}
            )
            # One pull-back for each state: derivatives that differ between states must
            # all be steady.
            found = jacobian_rows(new, [taps[y]], {(i, 0) for i in local.reached[y]})
            return {i: row for (i, _), row in found.items()}

        _, sources, _ = self.derivative(local.read, rows)
        return not any(map(self.reads_data, sources.values()))

    def reads_data(self, atoms: Iterable[Atom]) -> bool:
        """Whether any value depends on states or inputs."""
        dependence = self.stages.dependence
        return any(of(dependence.total, v).reads & dependence.data for v in atoms)

    def derivative(
        self, read: Collection[Var], derivative: Callable[[Values], dict]
    ) -> tuple[list[Var], dict, Callable]:
        """The variables among those read that a derivative depends on, those behind
        each of its results, and the derivative as a function of their values."""
        constant = self.stages.dependence.constant
        known = Values((v, constant(v)) for v in read if constant.knows(v))
        variables = [v for v in read if v not in known]

        def run(values: list[Any]) -> dict:
            return derivative(known | Values(zip(variables, values, strict=True)))

        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
        closed, results = jax.make_jaxpr(run, return_shape=True)(shapes)
        env = flow(closed.jaxpr, [Bits(1 << n, 0) for n in range(len(variables))])
        sources = {}
        # Results are flattened in the order of their sorted keys.
        for key, result in zip(sorted(results), closed.jaxpr.outvars, strict=True):
            bits = of(env, result).reads
            sources[key] = [v for n, v in enumerate(variables) if bits >> n & 1]
        return variables, sources, run

    # ------------------------------------------------------------ feedback

    def passes_feedback(
        self, group: int, readouts: Collection[tuple[int, int]]
    ) -> bool:
        """Whether the loss may reach a group through replaced weights.

        ``readouts``: (equation, operand) of these. Always, if the read-out is not in
        this step.
        """
        stages, dependence = self.stages, self.stages.dependence
        if not readouts:
            return True
        members = stages.analysed.members[group]
        bits = dependence.old(members) | dependence.new(members)
        data = [
            stages.equations[i].invars[k]
            for i, _ in readouts
            for k in stages.taps[i].data
        ]
        return any(of(dependence.total, v).grads & bits for v in data if is_var(v))


def _constant_entries(
    variables: list[Var], sources: dict, run: Callable[[list[Any]], Jacobian]
) -> dict[tuple[int, int], float]:
    """The values of results that depend on nothing, where all their elements agree."""
    if all(sources.values()):
        return {}
    constant = lambda given: {e: x for e, x in run(given).items() if not sources[e]}
    with jax.ensure_compile_time_eval():
        zeros = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in variables]
        values = jax.jit(constant)(zeros)
    found = {}
    for entry, value in values.items():
        elements = np.asarray(value).ravel()
        if not elements.size or not np.all(elements == elements[0]):
            continue
        if np.isreal(elements[0]):
            found[entry] = float(np.real(elements[0]))
    return found
