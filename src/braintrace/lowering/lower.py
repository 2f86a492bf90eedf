"""The narrow waist: an analysed step in, a :class:`CompiledStep` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from ..analysis.graph import Analysed
from ..analysis.sites import MARK
from ..arrays import overlap
from ..compat import Atom, Equation, Var, has_reverse_only, is_var, scope
from ..compiled_step import (
    Box,
    CompiledStep,
    Components,
    Group,
    Jacobian,
    Operands,
    Signals,
    Site,
    Tap,
    Values,
)
from ..operations import SharedUse, operation_of, run_equation, use_of
from ..program import cut_inside
from ..source_lines import source_line
from .effects import effect_box, effects_beyond
from .links import ReadoutLinks
from .local_program import LocalProgram
from .local_step import local_jacobian, local_pull, local_slopes
from .rewrite import split_products
from .run import run_deep, run_open, run_whole
from .stages import Stages
from .taps import TapEquation
from .views import signals_of


def stages_of(
    analysed: Analysed,
    targets: Sequence[Atom],
    aux: Sequence[Var] = (),
    modulator: Var | None = None,
) -> Stages:
    """The equations of a step, sorted by when they run; arguments as for :func:`lower`."""
    extra = () if modulator is None else (modulator,)
    return Stages(split_products(analysed), tuple(targets), tuple(aux), extra)


def lower(
    analysed: Analysed,
    targets: Sequence[Atom],
    aux: Sequence[Var] = (),
    modulator: Var | None = None,
    is_loss: bool = True,
) -> CompiledStep:
    """The step as pure functions on arrays.

    ``targets`` are differentiated, ``aux`` are further values wanted of every step.
    ``modulator``: the variable of the modulator that the step computes itself.
    ``is_loss``: the only target is a loss.
    """
    return lower_stages(
        stages_of(analysed, targets, aux, modulator), modulator, is_loss
    )


def lower_stages(
    stages: Stages, modulator: Var | None = None, is_loss: bool = True
) -> CompiledStep:
    """The record of sorted equations."""
    return _Lowering(stages).record(modulator, is_loss)


def _struct(v: Var) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


@dataclass(frozen=True)
class _Lowering:
    """The functions of a compiled step, as methods on its stages."""

    stages: Stages

    def record(self, modulator: Var | None, is_loss: bool) -> CompiledStep:
        """All of them together."""
        stages, program = self.stages, self.stages.program
        jaxpr = program.closed.jaxpr
        parameters = [p.invar for p in program.parameters]
        rest = {*parameters, *program.inputs}
        return CompiledStep(
            parameters={v: _struct(v) for v in parameters},
            names={p.invar: p.name for p in program.parameters},
            states={v: _struct(v) for v in jaxpr.invars if v not in rest},
            inputs={v: _struct(v) for v in program.inputs},
            carried=stages.carried,
            hidden=tuple((h.invar, h.outvar) for h in program.hidden),
            targets=stages.targets,
            is_loss=is_loss,
            aux=stages.aux,
            groups=tuple(map(self._group, stages.locals)),
            taps=tuple(self._tap(i, tap) for i, tap in stages.taps.items()),
            weights=stages.weights,
            pieces=self._pieces(),
            prepared=frozenset(p.weight for p in stages.prepared.values()),
            constant_targets=stages.constant_targets,
            kept_bytes=self._kept_bytes(),
            constants=self.constants,
            project=self.project,
            advance=self.advance,
            complete=self.complete,
            outputs=self.outputs,
            signals=self.signals,
            transition=self.transition,
            pull=self.pull,
            slopes=self.slopes,
            run=partial(run_whole, stages),
            run_deep=partial(run_deep, stages),
            run_open=partial(run_open, stages),
            other_effects=self.other_effects,
            has_forward_mode=not any(map(has_reverse_only, stages.equations)),
            find_readouts=lambda: self._links.products,
            find_links=lambda: self._links.links,
            modulator=None
            if modulator is None
            else lambda const, at: (const | at)[modulator],
        )

    # ------------------------------------------------------------ forward

    def constants(self, parameters: Values, states: Values) -> Values:
        """Everything that no data reaches, and weights prepared for the time loop."""
        stages, closed = self.stages, self.stages.program.closed
        env = Values(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        written = {old for old, _ in stages.carried}
        env |= parameters | states.pick(v for v in states if v not in written)
        env = stages.compute(stages.constants, env)
        for i, prepared in stages.prepared.items():
            weight = env[stages.equations[i].invars[prepared.operand]]
            env[prepared.weight] = prepared.kernel.prepare(weight)
        return env

    def project(self, constants: Values, inputs: Values) -> Values:
        """What inputs alone determine."""
        projected = self.stages.projected
        return self.stages.compute(projected, constants | inputs).pick(projected)

    def advance(self, constants: Values, values: Values) -> tuple[Values, Values]:
        """The next states, and what derivatives need of the step."""
        stages = self.stages
        wanted = [*(new for _, new in stages.carried), *stages.kept]
        env = stages.compute(wanted, constants | values)
        states = Values()
        for old, new in stages.carried:
            aval = old.aval
            states[old] = (
                env[new] if is_var(new) else jnp.full(aval.shape, new.val, aval.dtype)
            )
        return states, env.pick(stages.kept)

    def complete(self, constants: Values, values: Values) -> Values:
        """The values with all that derivative programs read."""
        env = self.stages.compute(self.stages.derivative_variables, constants | values)
        return env.pick(v for v in env if v not in constants)

    def outputs(self, constants: Values, values: Values) -> Values:
        """Targets and auxiliary values."""
        wanted = dict.fromkeys((*self.stages.targets, *self.stages.aux))
        return self.stages.compute(wanted, constants | values).pick(wanted)

    # ------------------------------------------------------------ derivatives

    def signals(
        self,
        constants: Values,
        values: Values,
        cotangents: Sequence[jax.Array],
        feedback: Mapping[Any, Any] = {},
    ) -> tuple[list[jax.Array], Signals]:
        """Targets, one-step gradients of tap results, signals and direct reads."""
        return signals_of(self.stages, constants | values, cotangents, feedback)

    def transition(self, constants: Values, values: Values) -> list[Jacobian]:
        """D of every group."""
        env = constants | values
        return [local_jacobian(self.stages, local, env) for local in self.stages.locals]

    def pull(
        self, constants: Values, values: Values, credit: Sequence[Components]
    ) -> list[Values]:
        """(∂h/∂y)ᵀ γ by group."""
        env = constants | values
        pairs = zip(self.stages.locals, credit, strict=True)
        return [local_pull(self.stages, local, env, mine) for local, mine in pairs]

    def slopes(self, constants: Values, values: Values) -> list[Values]:
        """∂h/∂y by group, for results that positions share."""
        env = constants | values
        return [local_slopes(self.stages, local, env) for local in self.stages.locals]

    def other_effects(self, group: int, result: Var) -> Box | None:
        """The part of a tap's result that acts on more than the group."""
        return effect_box(self._effects[group], result)

    @cached_property
    def _effects(self) -> list[dict]:
        return [effects_beyond(self.stages, local) for local in self.stages.locals]

    # ------------------------------------------------------------ structure

    def _group(self, local: LocalProgram) -> Group:
        group, direct = local.group, self.stages.direct_reads
        real = [jnp.finfo(v.aval.dtype).dtype for v in group.hidden_invars]
        return Group(
            name=tuple(group.hidden_paths),
            shape=tuple(group.varshape),
            dtypes=tuple(real[k] for k in group.owners),
            pattern=local.pattern,
            direct=frozenset(
                j
                for j, k in enumerate(group.owners)
                if group.hidden_invars[k] in direct
            ),
            reached={y: local.reached(y) for y in local.taps},
            shared=frozenset(local.shared),
            components=lambda env: group.components(
                [env[v] for v in group.hidden_invars]
            ),
            states=lambda parts: Values(
                zip(group.hidden_invars, group.from_components(parts), strict=True)
            ),
        )

    def _tap(self, i: int, tap: TapEquation) -> Tap:
        stages, facts = self.stages, self.stages.facts
        weights = [tap.equation.invars[k] for k in tap.weights]
        by_weight = {}
        for v in weights:
            grads = facts.total[v].grads
            mine = (p for p in facts.program.parameters if grads & facts.bit[p.invar])
            by_weight[v] = tuple(mine)
        made = [stages.equations[j] for j in stages.needed(weights, ())]
        operation = operation_of(tap.equation)
        cut_gradients = {}
        for g, local in enumerate(stages.locals):
            cut = cut_inside(i, tap.equation, local.positions.cuts)
            if cut is not tap.equation:
                cut_gradients[g] = partial(self._gradients, cut, tap.weights)
        return Tap(
            weights=tuple(weights),
            results=tap.results,
            sites=tuple(self._sites(i, tap)),
            operands=partial(self._operands, tap.equation),
            gradients=partial(self._gradients, tap.equation, tap.weights),
            cut_gradients=cut_gradients,
            parameters=tuple(
                dict.fromkeys(p for mine in by_weight.values() for p in mine)
            ),
            by_weight=by_weight,
            operation=tap.equation.primitive.name,
            source=source_line(tap.equation),
            marked=any(MARK in scope(e) for e in (tap.equation, *made)),
            multiplies=operation is not None and operation.multiplies,
        )

    def _sites(self, i: int, tap: TapEquation) -> list[Site]:
        found = []
        for v in tap.results:
            for g, local in enumerate(self.stages.locals):
                if v not in local.taps or not local.reached(v):
                    continue
                equation = cut_inside(i, tap.equation, local.positions.cuts)
                result = equation.outvars.index(v)
                for k in tap.weights:
                    use = use_of(equation, k, result, self.stages.facts.constant)
                    positions = local.positions.labels[v]
                    if v in local.shared:
                        use = SharedUse(use, local.shared[v])
                        positions = use.positions
                    has_input = use.input is None or use.input in tap.data
                    found.append(
                        Site(
                            weight=equation.invars[k],
                            result=v,
                            group=g,
                            use=use,
                            positions=positions,
                            enters=local.sum_of(v),
                            factorises=use.factorises and has_input,
                        )
                    )
        return found

    def _pieces(self) -> dict[Var, tuple[Var, Box]]:
        """Weights that are parts of a parameter, where no two overlap."""
        stages = self.stages
        parameters = {p.invar for p in stages.program.parameters}
        found: dict[Var, tuple[Var, Box]] = {}
        for weight in stages.weights:
            if weight not in stages.facts.producer:
                continue
            maker = stages.equations[stages.facts.producer[weight]]
            operation = operation_of(maker)
            if operation is None or operation.part is None:
                continue
            whole, box = maker.invars[0], operation.part(maker)
            if box is None or whole not in parameters:
                continue
            others = [other for of, other in found.values() if of is whole]
            if not any(overlap(box, other) for other in others):
                found[weight] = (whole, box)
        return found

    @cached_property
    def _fixed(self) -> frozenset[Var]:
        """Variables that ``constants`` gives."""
        stages, jaxpr = self.stages, self.stages.program.closed.jaxpr
        moving = {*stages.program.inputs, *(old for old, _ in stages.carried)}
        given = [v for v in jaxpr.invars if v not in moving]
        return frozenset([*jaxpr.constvars, *given, *stages.constants])

    def _operands(
        self, equation: Equation, constants: Values, values: Values
    ) -> tuple[Operands, Operands]:
        """Operands that stay the same, and those of every step."""
        fixed, steps = {}, {}
        for k, v in enumerate(equation.invars):
            if not is_var(v):
                fixed[k] = v.val
            elif v in self._fixed:
                fixed[k] = constants[v]
            else:
                steps[k] = values[v]
        return fixed, steps

    def _gradients(
        self,
        equation: Equation,
        weights: Sequence[int],
        fixed: Operands,
        steps: Operands,
        y_bars: Mapping[Var, jax.Array],
        boxes: Mapping[Var, Box | None],
    ) -> Values:
        """Gradient of every weight operand: one pull-back over all steps of a block."""
        length = len(next(iter(y_bars.values())))
        if len(weights) == 1 and len(y_bars) == 1:
            (k,), (y,) = weights, y_bars
            result = equation.outvars.index(y)
            use = use_of(equation, k, result, self.stages.facts.constant)
            box = boxes.get(y)
            y_bar = y_bars[y] if box is None else y_bars[y][:, *box]
            return Values({equation.invars[k]: use.gradient(fixed, steps, y_bar, box)})

        def block(moving: Operands) -> list[Any]:
            def one(step: Operands) -> list[Any]:
                values = {**fixed, **step, **moving}
                results = run_equation(
                    equation, [values[k] for k in range(len(values))]
                )
                return [
                    y
                    for v, y in zip(equation.outvars, results, strict=True)
                    if v in y_bars
                ]

            return jax.vmap(one, axis_size=length)(steps)

        _, pull = jax.vjp(block, {k: fixed[k] for k in weights})
        (grads,) = pull([y_bars[v] for v in equation.outvars if v in y_bars])
        total = Values()
        for k, grad in grads.items():
            v = equation.invars[k]
            total[v] = total[v] + grad if v in total else grad
        return total

    @cached_property
    def _links(self) -> ReadoutLinks:
        return ReadoutLinks(self.stages)

    def _kept_bytes(self) -> int:
        stages = self.stages
        projected = [v for v in stages.projected if stages.is_needed(v)]
        hidden = (h.invar for h in stages.program.hidden)
        kept = {*stages.kept, *projected, *hidden}
        return max(sum(v.aval.size * v.aval.dtype.itemsize for v in kept), 1)
