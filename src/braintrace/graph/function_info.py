"""The traced step of a plain function ``step(params, state, *inputs) -> (state, out)``,
or of a model that a front end has made pure; every float state is hidden."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ..compat import ClosedJaxpr, Jaxpr, Var, changed, evaluate
from ..frontends.functions import run_step
from ..frontends.pure import PureModel, is_float, leaf_paths, state_paths
from ..program import Hidden, OtherState, Parameter, Path, StepProgram, normal_form
from ..program.step import check_shapes, distinct_outputs, path_name


@dataclass(frozen=True)
class ArrayState:
    """One array of the state that a plain step function carries."""

    path: Path
    varshape: tuple[int, ...]
    num_state: int = 1


class FunctionInfo(NamedTuple):
    """One traced step of a plain function."""

    step: Callable[..., Any]
    closed_jaxpr: ClosedJaxpr
    program: StepProgram
    out_tree: Any
    state_tree: Any
    num_var_out: int
    held: tuple[Any, Any] | None = None
    """Parameters and state of a model that holds its own: then a call has inputs only.
    """

    @property
    def jaxpr(self) -> Jaxpr:
        """The step without its constants."""
        return self.closed_jaxpr.jaxpr

    def add_jaxpr_outs(self, jax_vars: Sequence[Var]) -> FunctionInfo:
        """The same record with a jaxpr that also returns the given variables."""
        outvars = [*self.jaxpr.outvars, *jax_vars]
        return self._replace(closed_jaxpr=changed(self.closed_jaxpr, outvars=outvars))

    def flat_inputs(
        self, args: Sequence[Any], old_state_vals: Any, kwargs: dict
    ) -> list[jax.Array]:
        """``(params, state, *inputs)`` in the order of the jaxpr's inputs, checked
        against it."""
        params, state, *inputs = args if self.held is None else (*self.held, *args)
        flat = jax.tree.leaves(
            (
                params,
                state if old_state_vals is None else old_state_vals,
                inputs,
                kwargs,
            )
        )
        check_shapes(self.closed_jaxpr, flat)
        return flat

    def outputs(self, results: Sequence[Any]) -> Any:
        """The function's output from the results of the jaxpr."""
        return jax.tree.unflatten(self.out_tree, results[: self.num_var_out])

    def jaxpr_call(self, *args: Any) -> tuple:
        """Run the step: output, new state, extra outputs by variable."""
        flat = self.flat_inputs(args, None, {})
        results = evaluate(self.jaxpr, self.closed_jaxpr.consts, *flat)
        a, b = self.num_var_out, self.num_var_out + self.state_tree.num_leaves
        new = jax.tree.unflatten(self.state_tree, results[a:b])
        return (
            self.outputs(results),
            new,
            dict(zip(self.jaxpr.outvars[b:], results[b:], strict=True)),
        )

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.step, '__name__', type(self.step).__name__)

    def dict(self) -> dict[str, Any]:
        """The record as a dictionary."""
        return self._asdict()

    def __repr__(self) -> str:
        hidden = ', '.join(path_name(h.path) for h in self.program.hidden)
        weights = ', '.join(p.name for p in self.program.parameters)
        return (
            f'FunctionInfo({len(self.jaxpr.eqns)} equations; hidden: {hidden}; '
            f'parameters: {weights})'
        )


def extract_function_info(
    step: Callable[..., Any], params: Any, state: Any, *inputs: Any
) -> FunctionInfo:
    """Trace ``step(params, state, *inputs)`` and sort its variables by role."""
    is_hidden = list(map(is_float, jax.tree.leaves(state)))
    return _trace(
        step,
        params,
        state,
        inputs,
        leaf_paths(params),
        state_paths(state),
        is_hidden,
        [True] * len(is_hidden),
    )


def extract_pure_info(model: PureModel) -> FunctionInfo:
    """Trace one step of a model that a front end has made pure."""
    info = _trace(
        model.step,
        model.parameters,
        model.state,
        model.inputs,
        model.parameter_paths,
        model.state_paths,
        model.hidden,
        model.written,
    )
    return info._replace(held=(model.parameters, model.state))


def _trace(
    step: Callable[..., Any],
    params: Any,
    state: Any,
    inputs: tuple,
    param_paths: Sequence[Path],
    state_paths: Sequence[Path],
    is_hidden: Sequence[bool],
    is_written: Sequence[bool],
) -> FunctionInfo:
    ordered = lambda params, state, inputs: run_step(step, params, state, inputs)[::-1]
    traced, (out, _) = jax.make_jaxpr(ordered, return_shape=True)(params, state, inputs)
    leaves = jax.tree.leaves(state)
    num_params, num_out = len(jax.tree.leaves(params)), len(jax.tree.leaves(out))
    closed = distinct_outputs(
        normal_form(traced), [num_out + i for i, h in enumerate(is_hidden) if h]
    )
    jaxpr = closed.jaxpr
    old, new_vars = (
        jaxpr.invars[num_params : num_params + len(leaves)],
        jaxpr.outvars[num_out:],
    )
    states = list(zip(state_paths, is_hidden, is_written, old, new_vars, strict=True))
    program = StepProgram(
        closed,
        inputs=tuple(jaxpr.invars[num_params + len(leaves) :]),
        parameters=tuple(
            Parameter(p, (), v) for p, v in zip(param_paths, jaxpr.invars, strict=False)
        ),
        hidden=tuple(
            Hidden(p, a, b, ArrayState(p, a.aval.shape), a.aval.shape)
            for p, hidden, _, a, b in states
            if hidden
        ),
        others=tuple(
            OtherState(p, (), a, b if w else None)
            for p, hidden, w, a, b in states
            if not hidden
        ),
        outputs=tuple(jaxpr.outvars[:num_out]),
    )
    return FunctionInfo(
        step,
        closed,
        program,
        jax.tree.structure(out),
        jax.tree.structure(state),
        num_out,
    )
