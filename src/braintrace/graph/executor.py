"""The executor: compiles the graph of a module and runs the derivative programs of one
step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..analysis.analysed import Analysed, analyse, check_hidden, check_parameters
from ..compat import Var, evaluate, is_differentiable, is_var
from ..compiled_step import Values
from ..derivatives import joint_signals, transitions
from ..errors import printable, three_parts
from ..frontends import class_as_model
from ..frontends.brainstate import TracedStep, check_arguments, is_module, trace_step
from ..lowering import Stages, lower
from ..operations.labels import CONFLICT, Labels
from ..program import Path
from ..program.data import first_step
from ..program.step import path_name
from .etrace_graph import ETraceGraph, compiling, graph_of
from .module_info import module_info


class SiteJacobian(NamedTuple):
    """∂h/∂θ of one relation in parts: its input x, its weight operand, and ∂h/∂y for
    each group.

    The form of ``hidden_to_y[g]`` depends on how elements of y reach positions:

    - If each element of y reaches one position, the shape is ``(*y.shape, num_state)``.
      The last axis has the derivative of each state at this position.
    - If elements of y reach several positions, the shape is ``(*varshape, num_state)``:
      the derivative at every position with respect to the element that reaches it,
      ``y_sources``.
    - If y has elements of both kinds, it is a pair of both forms, with zeros for the
      elements and positions of the other kind.
    """

    x: jax.Array | None
    weight: jax.Array
    hidden_to_y: dict[int, jax.Array | tuple[jax.Array, jax.Array]]


ToHidden = Callable[[jax.Array], jax.Array]
"""From y to the new states of a group, stacked along the last axis."""


def state_jacobian(to_hidden: ToHidden, y: jax.Array) -> jax.Array:
    """∂h/∂y, ``(*y.shape, num_state)``: one reverse pass for each state."""
    new, pull = jax.vjp(to_hidden, y)
    columns = [
        pull(jnp.zeros_like(new).at[..., s].set(1))[0] for s in range(new.shape[-1])
    ]
    return jnp.stack(columns, axis=-1)


def shared_jacobian(
    to_hidden: ToHidden, y: jax.Array, elements: np.ndarray | None = None
) -> jax.Array:
    """∂h/∂y, ``(*varshape, num_state)``, where one element of y reaches each position.

    A tangent of ones at all elements, or those given by a mask, has the derivative by
    that one. Forward mode is the transpose of reverse mode, which every operation has.
    """
    new, pull = jax.vjp(to_hidden, y)
    along = jax.linear_transpose(lambda bar: pull(bar)[0], new)
    ones = jnp.ones_like(y) if elements is None else jnp.asarray(elements, y.dtype)
    slopes = along(ones)[0]
    if jnp.iscomplexobj(y):
        # As a pull-back has it: ∂h/∂Re y - i ∂h/∂Im y.
        return slopes - 1j * along(1j * ones)[0]
    return slopes


def path_jacobian(
    to_hidden: ToHidden, y: jax.Array, positions: np.ndarray, sources: Labels
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """∂h/∂y of one path in the form that :class:`SiteJacobian` has for its pairs."""
    if sources is None:
        return state_jacobian(to_hidden, y)
    if not (sources == CONFLICT).any():
        return shared_jacobian(to_hidden, y)
    several = positions == CONFLICT
    single = jnp.where(several[..., None], 0, state_jacobian(to_hidden, y))
    return single, shared_jacobian(to_hidden, y, several)


_writing = threading.Lock()
"""Held while a graph is written, or replaced."""


class ETraceGraphExecutor:
    """Compiles a module once and computes the Jacobians of its steps.

    ``call`` runs the module instead of ``model(...)``, for example mapped over a batch.
    ``trained``: the module is trained, so a step without parameters raises an error.
    ``vjp_method``: that of its learner.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> gru = brainstate.nn.GRUCell(3, 4)
    >>> _ = brainstate.nn.init_all_states(gru)
    >>> executor = ETraceGraphExecutor(gru)
    >>> executor.compile_graph(jnp.ones(3))
    >>> out, hidden, others, h2w, h2h = executor.solve_h2w_h2h_jacobian(jnp.ones(3))
    >>> h2h[0].shape
    (4, 1, 1)
    """

    def __init__(
        self,
        model: Any,
        *,
        call: Callable[..., Any] | None = None,
        trained: bool = False,
        vjp_method: str = 'single-step',
    ):
        if isinstance(model, type):
            raise class_as_model(model)
        if not is_module(model):
            raise TypeError(
                three_parts(
                    f'ETraceGraphExecutor({type(model).__name__})',
                    'the executor reads and writes the states of a brainstate module',
                    'a brainstate.nn.Module; compile_etrace_graph takes plain '
                    'functions',
                )
            )
        self.model: Any = model
        self.call = model if call is None else call
        self.trained = trained
        self.vjp_method = vjp_method
        self._step: tuple[TracedStep, Analysed] | None = None
        self._graph: ETraceGraph | None = None

    def compile_graph(self, *args: Any, **kwargs: Any) -> None:
        """Trace and analyse one step on example inputs.

        The inputs may be wrapped in :class:`SingleStepData`, or in
        :class:`MultiStepData`, whose first step is used.
        """
        args, kwargs = first_step((args, kwargs))
        with compiling():
            if self.call is self.model:
                check_arguments(self.model, args, kwargs)
            traced = trace_step(self.call, self.model, args, kwargs)
            check_hidden(traced.program)
            if self.trained:
                check_parameters(traced.program)
            step = traced, analyse(traced.program)
        with _writing:
            self._step, self._graph = step, None

    @property
    def is_compiled(self) -> bool:
        """Whether a step was traced and analysed."""
        return self._step is not None

    @property
    def step(self) -> tuple[TracedStep, Analysed]:
        """The step as it was traced, and what was found in it."""
        if self._step is None:
            raise ValueError(
                three_parts(
                    'executor.graph before compiling',
                    'the graph is made from a traced step, and none was traced yet',
                    'executor.compile_graph(*example_inputs) first',
                )
            )
        return self._step

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph. A gradient needs none of its records, so they are
        written when it is first read."""
        with _writing:
            if self._graph is None:
                traced, analysed = self.step
                self._graph = graph_of(module_info(traced), analysed)
            return self._graph

    @property
    def states(self) -> Any:
        """All states of the model by path, in a ``brainstate.util.FlattedDict``."""
        return self.model.states()

    @property
    def path_to_states(self) -> Any:
        """The same as :attr:`states`."""
        return self.states

    @property
    def state_id_to_path(self) -> dict[int, Path]:
        """Path of each state by the identity of its object."""
        return {id(state): path for path, state in self.path_to_states.items()}

    def show_graph(self, verbose: bool = True, return_msg: bool = False) -> str | None:
        """Print the groups, the dynamic other states, the parameters tied to groups,
        and the other parameters."""
        message = self.graph_text()
        if verbose:
            print(message)
        return message if return_msg else None

    def graph_text(self, gives: Mapping[Path, str] | None = None) -> str:
        """What :meth:`show_graph` prints.

        ``gives``: what a rule gives each parameter, shown in place of its credit class.
        """
        graph = self.graph
        report = graph.report
        lines = ['Hidden groups:', *(f'  {group!r}' for group in graph.hidden_groups)]
        lines.append('Dynamic states that are not hidden:')
        lines += [f'  {path_name(p)}' for p in report.dynamic_states]
        lines.append('Parameters tied to groups:')
        for path, credit in report.etrace_weights.items():
            own = [
                r
                for r in graph.hidden_param_op_relations
                if path in r.trainable_paths.values()
            ]
            into = sorted({g.index for r in own for g in r.hidden_groups})
            credit = credit if gives is None else gives.get(path, credit)
            lines.append(
                f'  {path_name(path)} → group {", ".join(map(str, into))} ({credit})'
            )
        lines.append('Other parameters:')
        lines += [
            f'  {path_name(p)}: {why}' for p, why in report.excluded_weights.items()
        ]
        return '\n'.join(map(printable, lines))

    # ------------------------------------------------------------ Jacobians

    def _run(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[Var, Any], list[Any]]:
        """Results of the step, the value of every variable it gives, and its flat
        inputs."""
        info = self.graph.module_info
        flat = info.flat_inputs(args, None, kwargs)
        results = evaluate(info.jaxpr, info.closed_jaxpr.consts, *flat)
        env = dict(zip(info.jaxpr.constvars, info.closed_jaxpr.consts, strict=True))
        env.update(zip(info.jaxpr.invars, flat, strict=True))
        env.update(
            (v, x)
            for v, x in zip(info.jaxpr.outvars, results, strict=True)
            if is_var(v)
        )
        out, hidden, others, _ = info.arrange(results)
        return (out, hidden, others), env, flat

    def solve_h2w_h2h_jacobian(self, *args: Any, **kwargs: Any) -> tuple:
        """Run one step and return outputs, new hidden values, other states, ∂h/∂θ of
        every relation, and D_t of every group.

        It starts from the current states and writes no state.
        """
        results, env, _ = self._run(args, kwargs)
        return (*results, *self._jacobians(env))

    def _jacobians(
        self, env: dict[Var, Any]
    ) -> tuple[list[SiteJacobian], list[jax.Array]]:
        h2w = []
        for relation in self.graph.hidden_param_op_relations:
            program = relation.sites[0].weight_jaxpr
            constants = [env[v] for v in program.constvars]
            (weight,) = evaluate(program, constants, *(env[v] for v in program.invars))
            jacobians: dict[int, Any] = {}
            site = relation.sites[-1]
            for group, path, positions, sources in zip(
                relation.hidden_groups,
                relation.y_to_hidden_group_jaxprs,
                site.y_positions,
                site.y_sources,
                strict=True,
            ):
                constants = [env[v] for v in path.constvars]
                to_hidden = lambda y, group=group, path=path, constants=constants: (
                    group.concat_hidden(evaluate(path, constants, y))
                )
                jacobians[group.index] = path_jacobian(
                    to_hidden, env[relation.y_var], positions, sources
                )
            x = None if relation.x_var is None else env[relation.x_var]
            h2w.append(SiteJacobian(x, weight, jacobians))
        h2h = [
            group.diagonal_jacobian(
                [env[v] for v in group.hidden_invars],
                [env[v] for v in group.transition_jaxpr_constvars],
            )
            for group in self.graph.hidden_groups
        ]
        return h2w, h2h

    def solve_h2w_h2h_l2h_jacobian(self, *args: Any, **kwargs: Any) -> tuple:
        """The same, and a function that computes learning signals.

        The function takes cotangents of the outputs and returns the signal of every
        group, each of shape ``(*varshape, num_state)``.
        """
        results, env, flat = self._run(args, kwargs)
        info, (_, analysed) = self.graph.module_info, self.step
        program = analysed.dependence.program
        differentiated = lambda v: is_var(v) and is_differentiable(v)
        targets = [v for v in program.outputs if differentiated(v)]
        step = lower(Stages(analysed, list(dict.fromkeys(targets))), is_loss=False)
        given = Values(zip(program.closed.jaxpr.invars, flat, strict=True))
        constants = step.constants(given.pick(step.parameters), given.pick(step.states))
        new = Values((v, env[v]) for _, v in step.hidden)
        values = step.complete(constants, given | new)
        inner = [t for _, t in transitions(step, constants, values)]
        outputs, to_outputs = jax.vjp(
            info.outputs, [env[v] if is_var(v) else v.val for v in program.outputs]
        )
        del outputs

        def signals(cotangents: Any) -> list[jax.Array]:
            (flat_bars,) = to_outputs(cotangents)
            bars: dict[Any, jax.Array] = {}
            for v, bar in zip(program.outputs, flat_bars, strict=True):
                if differentiated(v):
                    bars[v] = bars[v] + bar if v in bars else bar
            slopes: list = [[] for _ in step.groups]
            mine = [bars[v] for v in step.targets]
            _, _, found, _ = joint_signals(step, constants, values, mine, inner, slopes)
            stacked = []
            for group, by_component in zip(step.groups, found, strict=True):
                zeros = [jnp.zeros(group.shape, dtype) for dtype in group.dtypes]
                parts = [by_component.get(i, zero) for i, zero in enumerate(zeros)]
                stacked.append(jnp.stack(parts, axis=-1))
            return stacked

        return (*results, *self._jacobians(env), signals)
