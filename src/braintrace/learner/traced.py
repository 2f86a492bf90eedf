"""A step function traced together with its model: the bridge between states and the pure engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from ..analysis.dependence import union
from ..analysis.graph import analyse
from ..analysis.sites import MARK
from ..compat import is_differentiable, is_var, scope
from ..engine.influence import Forward
from ..engine.plan import Plan, Values
from ..engine.rewrite import split_products
from ..engine.sequence import Sequencer
from ..errors import CompilationError, three_parts
from ..frontends.brainstate import ModuleInfo, module_states, trace_step
from ..program import Path, StepProgram
from ..program.step import path_name
from ..rules import Rule


class Traced:
    """One traced step: its plan, and how its variables map to the model's states.

    ``loss_first``: the first output is the loss to differentiate; otherwise all outputs and new states are.
    ``whole``: exact windows may send credit to every state. ``standing``: a state of the learner's own for its rule.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        model: Any,
        args: tuple,
        loss_first: bool,
        rule: Rule,
        trace_dtype: Any = None,
        trace: str | Callable[[Path], bool] = 'auto',
        whole: bool = False,
        standing: brainstate.State | None = None,
    ):
        self.model = model
        self.standing = standing
        self.info: ModuleInfo = trace_step(function, model, args, {})
        program = split_products(self.info.program)
        analysed = analyse(program)
        if loss_first:
            _check_loss(program.outputs)
            targets: tuple = program.outputs[:1]
            aux = program.outputs[1:]
        else:
            new = [*(h.outvar for h in program.hidden), *(o.outvar for o in program.others if o.outvar is not None)]
            targets = tuple(dict.fromkeys(v for v in (*program.outputs, *new) if is_var(v) and is_differentiable(v)))
            aux = program.outputs
        aux = tuple(dict.fromkeys(v for v in aux if is_var(v)))
        found = (analysed.facts, tuple(analysed.members), analysed.groups, tuple(analysed.positions))
        self.plan = Plan(*found, targets, aux, whole, self._standing(program, standing), loss_first)
        self.trace = trace
        self.engine: Sequencer | Forward
        if rule.is_local:
            self.engine = Sequencer(self.plan, rule.scheme, trace_dtype, self._is_traced)
        else:
            self.engine = Forward(self.plan, 0 if rule.trace == 'random_projection' else rule.sparse_n, rule.seed)

    @property
    def sequencer(self) -> Sequencer:
        """The engine, where the rule is local."""
        assert isinstance(self.engine, Sequencer)
        return self.engine

    def _standing(self, program: StepProgram, state: brainstate.State | None) -> tuple:
        """Values of the learner's own state at the end of a step."""
        pairs = zip(self.info.compiled_model_states, self.info.state_tree_invars, strict=True)
        mine = [v for found, tree in pairs if found is state for v in jax.tree.leaves(tree)]
        new = {o.invar: o.outvar for o in program.others if o.outvar is not None}
        return tuple(new.get(v, v) for v in mine)

    def _is_traced(self, equation: int) -> bool:
        """Whether the parameters of a tap are to be traced."""
        if self.trace == 'auto':
            return True
        tap, facts = self.plan.taps[equation], self.plan.facts
        weights = [tap.equation.invars[k] for k in tap.weights]
        if isinstance(self.trace, str):  # 'marked'
            made = [self.plan.equations[i] for i in self.plan.needed(weights, ())]
            return any(MARK in scope(e) for e in (tap.equation, *made))
        grads = union(facts.total[w] for w in weights).grads
        return any(self.trace(p.path) for p in facts.program.parameters if grads & facts.bit[p.invar])

    @property
    def is_reusable(self) -> bool:
        """False if the step closes over values of a trace around it, and ends with that trace."""
        return not any(isinstance(x, jax.core.Tracer) for x in self.info.closed_jaxpr.consts)

    @property
    def trace_keys(self) -> list[tuple]:
        """A name for every trace: parameters, operation, group, and how many like it came before."""
        keys: list[tuple] = []
        for key in self.engine.labels:
            keys.append((*key, sum(k[:3] == key for k in keys)))
        return keys

    @cached_property
    def trace_shapes(self) -> dict[tuple, list[tuple]]:
        """Shapes and types of every trace."""
        traces = jax.eval_shape(self.engine.init_traces)
        return dict(zip(self.trace_keys, map(shapes_of, traces), strict=True))

    # ------------------------------------------------------------ states

    def _objects(self) -> list[tuple[Any, brainstate.State]]:
        """Variables of every state, with the state object that the model has now at its path."""
        current = dict(module_states(self.model))
        found = []
        pairs = zip(self.info.compiled_model_states, self.info.state_tree_invars, strict=True)
        for state, tree in pairs:
            path = self.info.state_id_to_path[id(state)]
            if path in self.info.retrieved_model_states:
                if path not in current:
                    raise _state_gone(path)
                state = current[path]
            found.append((tree, state))
        return found

    def read(self) -> tuple[Values, Values]:
        """Current parameters and other states, by variable."""
        values = Values()
        for tree, state in self._objects():
            leaves = jax.tree.leaves(state.value)
            for v, x in zip(jax.tree.leaves(tree), leaves, strict=True):
                if state is self.standing and jnp.shape(x) != v.aval.shape:
                    x = jnp.zeros(v.aval.shape, v.aval.dtype)  # every step brings its own
                if jnp.shape(x) != v.aval.shape:
                    raise _state_reshaped(self._path_of(state), v.aval.shape, jnp.shape(x))
                values[v] = x
        parameters = [p.invar for p in self.info.program.parameters]
        return values.pick(parameters), values.pick(v for v in values if v not in set(parameters))

    def paths(self) -> dict[Any, Path]:
        """The path of every variable of a state."""
        states = zip(self.info.compiled_model_states, self.info.state_tree_invars, strict=True)
        return {v: self.info.state_id_to_path[id(s)] for s, tree in states for v in jax.tree.leaves(tree)}

    def _path_of(self, state: brainstate.State) -> Path:
        return next((p for p, s in module_states(self.model).items() if s is state), ('<outside>',))

    def write(self, states: Values) -> None:
        """Put new values into the model's states."""
        written = {old for old, _ in self.plan.carried}
        for tree, state in self._objects():
            variables, structure = jax.tree.flatten(tree)
            if state is not self.standing and any(v in written for v in variables):
                state.value = jax.tree.unflatten(structure, [states[v] for v in variables])

    def gradients_by_path(self, gradients: Values) -> dict[Path, Any]:
        """Gradients in the structure of the parameters' values; zero for parameters the step never reads."""
        read = self.info.weight_path_to_invars
        return {
            path: jax.tree.map(gradients.get, read[path]) if path in read else jax.tree.map(jnp.zeros_like, state.value)
            for path, state in self.parameter_states().items()
        }

    def parameter_states(self) -> dict[Path, brainstate.State]:
        """The model's parameters by path."""
        return dict(module_states(self.model, brainstate.ParamState))

    def inputs(self, args: Sequence[Any]) -> Values:
        """Inputs by variable."""
        leaves = map(jnp.asarray, jax.tree.leaves(tuple(args)))
        return Values(zip(self.info.program.inputs, leaves, strict=True))

    def outputs(self, values: Sequence[Any]) -> Any:
        """Outputs in the structure the step function gives."""
        return jax.tree.unflatten(self.info.out_tree, values)

    def stacked(self, values: Values, length: int) -> Any:
        """Outputs of several steps from values by variable, time first; constants repeated."""
        repeated = lambda v: jnp.broadcast_to(jnp.asarray(v.val, v.aval.dtype), (length, *v.aval.shape))
        return self.outputs([values[v] if is_var(v) else repeated(v) for v in self.plan.program.outputs])


def in_trace() -> bool:
    """True inside jit and the like, where new arrays are tracers."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def shapes_of(tree: Any) -> list[tuple]:
    """Shapes and types of the arrays in a tree."""
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def _check_loss(outputs: Sequence[Any]) -> None:
    if not outputs or outputs[0].aval.shape != () or not jnp.issubdtype(outputs[0].aval.dtype, jnp.floating):
        got = outputs[0].aval.str_short() if outputs else 'nothing'
        raise CompilationError(
            three_parts(
                f'a step_fn whose loss is {got}',
                'gradients are taken of one real number for each step',
                'return a scalar, e.g. jnp.mean(...), or (scalar, aux) with has_aux=True',
            )
        )


def _state_gone(path: Path) -> CompilationError:
    return CompilationError(
        three_parts(
            f'a call after state {path_name(path)} disappeared from the model',
            'the compiled step reads and writes it',
            'keep the model as it was compiled, or compile it again',
        )
    )


def _state_reshaped(path: Path, compiled: tuple, got: tuple) -> CompilationError:
    return CompilationError(
        three_parts(
            f'a call with state {path_name(path)} of shape {tuple(got)}',
            f'the step was compiled for shape {tuple(compiled)}',
            'learner.reset_state(batch_size=...) to change the batch, or compile again',
        )
    )
