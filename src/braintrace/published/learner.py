"""Members of a learner by the names of the published package."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import brainstate
import jax

from ..errors import three_parts
from ..learner.carried import EligibilityTrace, make_traces
from ..rules import ETraceConfig, RandomProjection, Rule
from . import traces


def init_etrace_state(learner: Any, *args: Any, **kwargs: Any) -> None:
    """Reset the traces to zero. The states of the model do not change."""
    learner.check_compiled()
    make_traces(learner)
    learner._carried.clear()


def config_of(rule: Rule) -> ETraceConfig:
    """The parts of a rule by their names."""
    parts = rule.recursion.config | rule.trace.config | rule.signal.config
    if rule.filter is not None:
        parts |= {'trace_filter': 'kappa', 'kappa': rule.filter}
    return ETraceConfig(**parts)


def _absent(learner: Any, what: str) -> AttributeError:
    """The error of a member that such a learner does not have; for `hasattr` a no."""
    return AttributeError(f'{type(learner).__name__!r} object has no {what}')


def _kind(learner: Any) -> str | None:
    """How its traces are factorised."""
    return learner.rule.trace.config.get('trace_factorization')


def _decay(side: int | None) -> Callable[[Any], float]:
    def of(learner: Any) -> float:
        decays = learner.rule.decay
        if decays is None:
            raise _absent(learner, 'decay: its traces are whole')
        if side is None and decays[0] != decays[1]:
            raise AttributeError(f'two decays {decays}: decay_x and decay_f')
        return decays[side or 0]

    return of


def _regime(learner: Any) -> str:
    """Whether the Jacobian of a unit's own states is part of OSTL's trace."""
    regimes = {'OSTLRecurrent': 'with-H', 'OSTLFeedforward': 'without-H'}
    if learner.rule.name not in regimes:
        raise _absent(learner, 'regime')
    return regimes[learner.rule.name]


def _module(learner: Any) -> Any:
    """The learner itself, if it maps a model over a batch: there is no other inside."""
    if not learner.vmap:
        raise _absent(learner, 'module: it maps nothing')
    return learner


def _of_vmap(value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A member that only a learner that maps its model has."""
    return lambda learner: value(_module(learner))


def _axis_size(learner: Any) -> int:
    return jax.tree.leaves(learner._example)[0].shape[0]


def _of_projection(value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A member that only a learner by a random projection has."""

    def of(learner: Any) -> Any:
        if _kind(learner) != 'random_projection':
            raise _absent(learner, 'projection')
        return value(learner.rule.trace)

    return of


def _drawn_from(trace: RandomProjection) -> brainstate.State:
    """The key that signs are drawn from, as a state."""
    return brainstate.ShortTermState(jax.random.key(trace.seed))


def _of_executor(name: str) -> Callable[[Any], Any]:
    """A member of the executor of a compiled learner."""

    def of(learner: Any) -> Any:
        learner.check_compiled()
        return getattr(learner.executor, name)

    return of


def _states_of_traces(learner: Any) -> dict[tuple, EligibilityTrace]:
    """Traces for each weight, in states by the keys of operation and group."""
    _check_has_traces(learner)
    if _kind(learner) in ('io_factorized', 'random_projection'):
        raise _absent(learner, 'etrace_bwg: its traces are factors')
    if not learner.rule.is_local:
        return dict(learner.traces)  # one influence of all parameters
    if not learner.rule.has_trace:
        return {}
    return _in_states(traces.whole_traces(learner))


def _in_states(values: dict[Any, Any]) -> dict[Any, Any]:
    """Copies of traces, each in a state."""
    return {key: EligibilityTrace(value) for key, value in values.items()}


def _check_has_traces(learner: Any) -> None:
    if not learner.is_compiled:
        raise _absent(learner, 'traces: it is not compiled')


def _factors(side: int) -> Callable[[Any], dict[Any, EligibilityTrace]]:
    """One side of factorised traces: 0 inputs, 1 states."""

    def of(learner: Any) -> dict[Any, EligibilityTrace]:
        _check_has_traces(learner)
        if learner.rule.decay is None:
            raise _absent(learner, 'factors: traces are whole')
        return _in_states(traces.factors(learner)[side])

    return of


def _projection(side: int) -> Callable[[Any], dict[Any, EligibilityTrace]]:
    """One side of a random projection: 0 states, 1 parameters."""

    def of(learner: Any) -> dict[Any, EligibilityTrace]:
        _check_has_traces(learner)
        _of_projection(lambda trace: trace)(learner)
        return _in_states(traces.projection(learner)[side])

    return of


def _projection_step(learner: Any) -> brainstate.State:
    """How often signs were drawn, as a state."""
    _of_projection(lambda trace: trace)(learner)
    return brainstate.ShortTermState(learner.running_index.value)


def _feedback(learner: Any) -> str:
    return 'random' if learner.rule.signal.has_feedback_weights else 'symmetric'


def _sparse_n(learner: Any) -> int:
    if 'sparse_n' not in learner.rule.trace.config:
        raise _absent(learner, 'n')
    return learner.rule.trace.config['sparse_n']


# ---------------------------------------------------------------- synthetic gradients


def group_signal_shapes(learner: Any) -> dict[int, tuple[int, ...]]:
    """The shape of the credit of every hidden group, states last."""
    groups = learner.graph.hidden_groups
    return {group.index: (*group.varshape, group.num_state) for group in groups}


MEMBERS: dict[str, Callable[[Any], Any]] = {
    'axis_name': _of_vmap(lambda learner: None),
    'axis_size': _of_vmap(_axis_size),
    'in_axes': _of_vmap(lambda learner: 0),
    'out_axes': _of_vmap(lambda learner: 0),
    'projection_eps': _of_projection(lambda trace: 1e-12),
    'projection_key': _of_projection(lambda trace: trace.seed),
    'projection_rng': _of_projection(_drawn_from),
    'projection_step': _projection_step,
    'attach_synthesizer': lambda learner: learner.set_predictor,
    # Automatic here, and always so.
    'chunked_trace': lambda learner: True,
    'fast_solve': lambda learner: True,
    'etrace_bwg': _states_of_traces,
    'etrace_dfs': _factors(1),
    'etrace_s': _projection(0),
    'etrace_theta': _projection(1),
    'etrace_xs': _factors(0),
    'feedback': _feedback,
    'get_etrace_of': lambda learner: partial(traces.get_etrace_of, learner),
    'config': lambda learner: config_of(learner.rule),
    'decay': _decay(None),
    'decay_f': _decay(1),
    'decay_x': _decay(0),
    'graph_executor': lambda learner: learner.executor,
    'group_signal_shapes': lambda learner: partial(group_signal_shapes, learner),
    'init_etrace_state': lambda learner: partial(init_etrace_state, learner),
    'kappa_filter_decay': lambda learner: learner.rule.filter or 0.0,
    'model4compile': lambda learner: learner.model,
    'module': _module,
    'n': _sparse_n,
    'path_to_states': _of_executor('path_to_states'),
    'regime': _regime,
    'state_id_to_path': _of_executor('state_id_to_path'),
    'synthesizer': lambda learner: learner.rule.predictor,
}


_SOLVE = ('fast_solve', 'trace_dtype', 'chunked_trace', 'control_flow')
_LAST = ('config', 'random_feedback_key', 'snap_max_jacobian_elements')
_WHOLE = ('name', 'vjp_method', *_SOLVE, *_LAST)
_FACTORS = ('decay_or_rank', 'name', 'vjp_method', 'fast_solve', 'control_flow')
_DRAWN = ('projection_key', 'projection_eps', *_LAST[1:])

POSITIONS: dict[str, tuple[str, ...]] = {
    'D_RTRL': _WHOLE,
    'OSTLRecurrent': _WHOLE,
    'ParamDimVjpAlgorithm': _WHOLE,
    'pp_prop': (*_FACTORS, *_LAST[:2]),
    'IODimVjpAlgorithm': (*_FACTORS, *_LAST[:2]),
    'EProp': (
        *('feedback', 'kappa_filter_decay', 'random_feedback_key'),
        *('name', 'vjp_method', 'fast_solve'),
    ),
    'SnAp': ('n', 'name', 'vjp_method', 'fast_solve', _LAST[-1]),
    'UORO': ('name', 'vjp_method', 'fast_solve', 'control_flow', *_DRAWN),
    'RandomProjectionVjpAlgorithm': (
        *('name', 'vjp_method', 'fast_solve', 'control_flow', 'config'),
        *_DRAWN,
    ),
    'ThreeFactor': ('name', 'vjp_method', 'modulator', *_SOLVE, _LAST[-1]),
    'DNI': ('synthesizer', 'name', 'vjp_method', *_SOLVE, _LAST[-1]),
}
"""Arguments of its learner classes after the model, in their order."""


# ---------------------------------------------------------------- overridden hooks

HOOKS = (
    '_assign_etrace_data',
    '_compute_learning_signal',
    '_default_config',
    '_get_etrace_data',
    '_inject_exit_cotangent',
    '_make_etrace_stepper',
    '_solve_weight_gradients',
    '_substitute_hidden_jacobians',
    '_update_etrace_data',
    '_update_fn',
    '_update_fn_bwd',
    '_update_fn_fwd',
    'init_etrace_state',
)
"""Methods that the published package calls on a subclass; none of them is called
here."""


def check_subclass(kind: type) -> None:
    """Raise if a learner class has such a method, its own or one of a mixin: it would
    be ignored."""
    if own := [name for name in HOOKS if hasattr(kind, name)]:
        raise TypeError(
            three_parts(
                f'class {kind.__name__} with its own {", ".join(own)}',
                'learners here do not call these methods, so the class would '
                'silently be '
                'its base',
                'a rule from parts, ETraceConfig(...) or a Rule of its own with '
                'rules.register, as examples/own_rule.py does',
            )
        )
