"""The path of one link, from the operand u of a product to the read-out's new state,
and the derivatives along it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..analysis.groups import Group
from ..compat import (
    Var,
    is_var,
    values_of,
)
from ..compiled_step import Feedback, Signals, Values
from ..operations import run_equation
from .replay import replay
from .stages import Stages

Edge = tuple[int, int]
"""(equation, operand)"""


@dataclass(frozen=True)
class Candidate:
    """A product that a group reaches position by position, on the way to a read-out.

    ``elements``: the element of u that each position of the group acts on, -1 for none.
    """

    edge: Edge
    lower: int
    readout: int | None
    elements: np.ndarray = field(repr=False)


@dataclass(frozen=True)
class LinkPaths:
    """The equations between groups and read-outs, run and differentiated."""

    stages: Stages

    def group(self, g: int) -> Group:
        """A group by its number."""
        return self.stages.analysed.groups[g]

    def making(self, g: int) -> list[int]:
        """Equations that make a group's new states from other new states."""
        own = set(self.group(g).hidden_outvars)
        return self.stages.needed(own, self.stages.new_states - own)

    def source(self, edge: Edge) -> Var:
        """The operand u of a product."""
        i, k = edge
        return self.stages.equations[i].invars[k]

    def between(self, edge: Edge, readout: int) -> list[int]:
        """Equations on the way from an operand to the read-out's new state."""
        moved = set(self.stages.equations[edge[0]].outvars)
        found = [edge[0]]
        for i in self.making(readout):
            eqn = self.stages.equations[i]
            if i != edge[0] and any(is_var(v) and v in moved for v in eqn.invars):
                moved |= set(eqn.outvars)
                found.append(i)
        return sorted(found)

    def read_between(self, edge: Edge, readout: int) -> list[Var]:
        """What the equations from an operand to the read-out read beside each other."""
        equations = [self.stages.equations[i] for i in self.between(edge, readout)]
        made = {v for eqn in equations for v in eqn.outvars}
        read = [v for eqn in equations for v in eqn.invars if is_var(v)]
        return list(dict.fromkeys(v for v in read if v not in made))

    def slopes(
        self, c: Candidate, env: Values
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """∂u/∂h of new and of old states at the positions of h."""
        stages, group = self.stages, self.group(c.lower)
        u = self.source(c.edge)
        new = group.components([env[v] for v in group.hidden_outvars])
        old = group.old_components(env)
        made = stages.differentiated - stages.new_states
        fixed = env.pick(v for v in env if v not in made)
        kept = {v: env[v] for v in stages.tap_results if v in env}

        def source(new: list[jax.Array], old: list[jax.Array]) -> jax.Array:
            known = fixed | group.old_states(old) | group.new_states(new)
            for i in stages.needed([u], known):
                eqn = stages.equations[i]
                operands = values_of(eqn.invars, known)
                known.update(replay(stages.taps.get(i), eqn, operands, kept))
            return known[u]

        value, pull = jax.vjp(source, new, old)
        # Each position acts on one element, so that one pull-back has every slope.
        return pull(jnp.ones_like(value))

    def pull(
        self,
        c: Candidate,
        constants: Values,
        values: Values,
        found: Signals,
        feedback: Feedback,
    ) -> jax.Array:
        """What a read-out sends back to u, at the positions of the lower group."""
        env = constants | values
        i, u = c.edge[0], env[self.source(c.edge)]
        if c.readout is None:
            (y,) = self.stages.taps[i].results
            bar = found.results[y]
            result = lambda x: self._product(c.edge, env, x, feedback)
        else:
            readout = c.readout
            bar = found.signals[readout][0]
            result = lambda x: self.state_of(c.edge, readout, env, x, feedback)
        value, pull = jax.vjp(result, u)
        (q,) = pull(bar.astype(value.dtype))
        shape = self.group(c.lower).varshape
        if np.array_equal(c.elements, np.arange(q.size)):
            return q.reshape(shape)
        taken = q.reshape(-1)[np.maximum(c.elements, 0)]
        return jnp.where(c.elements >= 0, taken, 0).astype(q.dtype).reshape(shape)

    def _operands(
        self, i: int, env: Mapping[Var, Any], feedback: Feedback
    ) -> list[Any]:
        operands = values_of(self.stages.equations[i].invars, env)
        return [feedback.get((i, k), x) for k, x in enumerate(operands)]

    def _product(
        self, edge: Edge, env: Mapping[Var, Any], x: Any, feedback: Feedback
    ) -> jax.Array:
        operands = self._operands(edge[0], env, feedback)
        operands[edge[1]] = x
        return run_equation(self.stages.equations[edge[0]], operands)[0]

    def state_of(
        self,
        edge: Edge,
        readout: int,
        env: Mapping[Var, Any],
        x: Any,
        feedback: Feedback,
    ) -> jax.Array:
        """The read-out's new state as a function of the operand u of one product."""
        # Some of what is read, the loop did not keep.
        read = self.read_between(edge, readout)
        known = self.stages.compute(
            (v for v in read if v is not self.source(edge)), env
        )
        for i in self.between(edge, readout):
            eqn = self.stages.equations[i]
            if i == edge[0]:
                known[eqn.outvars[0]] = self._product(edge, known, x, feedback)
                continue
            results = run_equation(eqn, self._operands(i, known, feedback))
            known.update(zip(eqn.outvars, results, strict=True))
        group = self.group(readout)
        return group.components([known[v] for v in group.hidden_outvars])[0]
