"""What the rule of a learner keeps for itself: made, read and written."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import brainstate
import jax.numpy as jnp

from ..errors import three_parts
from ..solver import Solved
from .arguments import check_modulator

if TYPE_CHECKING:
    from .learner import Learner


class RuleState(brainstate.State):
    """What a rule keeps for itself: a modulator, a count of gradients, a predictor's
    weights."""

    value: Any


def groups_of(learner: Learner) -> list[tuple[int, tuple[int, ...], Any]] | None:
    """States per position, shape and type of every group; None before compiling."""
    if not learner._example:
        return None
    dtype = lambda group: jnp.finfo(group.hidden_invars[0].aval.dtype).dtype
    groups = learner.graph.hidden_groups
    return [(g.num_state, g.varshape, dtype(g)) for g in groups]


def new_rule_state(learner: Learner) -> RuleState | None:
    """The rule's own state as it is at first; a predictor's once the model is
    compiled."""
    value = learner.rule.init_state(groups_of(learner))
    return None if value is None else RuleState(value)


def rule_value(learner: Learner) -> Any:
    """The value of the rule's own state; None for a rule without one."""
    return None if learner.rule_state is None else learner.rule_state.value


def next_rule_state(learner: Learner, solved: Solved | None) -> Any:
    """The value after a gradient; ``solved``: what a sequence gave, if it was one."""
    if learner.rule_state is None:
        return None
    return learner.rule.next_state(learner.rule_state.value, solved)


def write_rule_state(learner: Learner, value: Any) -> None:
    """Put the value after a call in place."""
    if learner.rule_state is not None and value is not learner.rule_state.value:
        learner.rule_state.value = value


def set_modulator(learner: Learner, value: Any) -> None:
    """Set the standing modulator of a rule that has one."""
    check_modulated(learner, value)
    if learner.rule_state is not None:
        learner.rule_state.value = jnp.asarray(value, jnp.result_type(float))


def set_predictor(learner: Learner, predictor: Any) -> None:
    """Use another predictor of credit at the ends of windows, with weights of its own,
    for a rule that has one."""
    window = learner.rule.window
    if window is None or learner.rule.predictor is None:
        raise ValueError(
            three_parts(
                f'a predictor for {learner.rule.name}',
                'it has no predictor',
                "rule 'dni'",
            )
        )
    learner.rule = replace(learner.rule, window=replace(window, predictor=predictor))
    learner.rule_state = new_rule_state(learner)


def check_modulated(learner: Learner, value: Any) -> None:
    """Raise unless the rule takes modulators, and this is one."""
    if not learner.rule.is_modulated:
        why = 'its traces are multiplied by the derivative of the loss'
        raise ValueError(
            three_parts(
                f'a modulator for {learner.rule.name}', why, "rule 'three_factor'"
            )
        )
    check_modulator(value)
