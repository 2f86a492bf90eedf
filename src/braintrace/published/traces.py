"""Traces by the keys and in the shapes of the published package.

There a trace belongs to one operation and one hidden group. Its key is the identity of
the variable y of the operation and the number of the group, and it has one array for
each parameter of the operation, by role:

    per parameter   {(id(y), group): {role: (*samples, *weight, states)}}
    factorised      {id(x): (*samples, inputs)},
                    {(id(y), 'hidden_group_0'): (*samples, *units, states)}
    projected       {(group, path): as the parameter}

:meth:`Learner.traces_of` gives what is held here: one trace for each part of a
concatenated input, and for those states alone that carry it on. The others are zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..compat import evaluate
from ..errors import three_parts
from ..graph.hidden_group import HiddenGroup
from ..graph.relations import HiddenParamOpRelation, Site, adds
from ..learner.weights import named_arrays, path_of_parameter
from ..program import Path
from ..solver.factors import FactorTrace
from ..solver.influence import InfluenceTrace

Key = tuple[int, int]
"""Identity of the variable y, and number of the hidden group."""


class Use(NamedTuple):
    """What the parameters of one relation, or one site of it, do to one group;
    ``held``: the traces of its pieces, in their order."""

    relation: HiddenParamOpRelation
    group: HiddenGroup
    site: Site
    held: list[Any]

    @property
    def key(self) -> Key:
        """The key of the trace."""
        return id(self.relation.y_var), self.group.index

    @property
    def has_filters(self) -> bool:
        """Whether the weight is the kernel of a convolution."""
        return self.site.mark == 'conv' and not adds(self.site.equation)

    @property
    def positions(self) -> np.ndarray:
        """The position in the group that each element of the site's result reaches."""
        indices = [group.index for group in self.site.hidden_groups]
        return self.site.y_positions[indices.index(self.group.index)]


def uses_of(learner: Any) -> list[Use]:
    """Every site with every group that it reaches, and the traces that are held."""
    values: dict[tuple, Any] = {}
    for path in learner.param_states:
        found = learner.traces_of(path)
        if isinstance(found, tuple):
            found = _paired(*found)
        values |= found
    held: dict[tuple, list[Any]] = {}
    for name in sorted(values, key=lambda name: name[-1]):
        held.setdefault(name[:-1], []).append(values[name])
    uses: dict[tuple, list[Use]] = {}
    for relation in learner.graph.hidden_param_op_relations:
        for site in relation.sites:
            for group in site.hidden_groups:
                names = tuple(p.name for p in site.parameters)
                name = (names, site.primitive.name, tuple(group.hidden_paths))
                uses.setdefault(name, []).append(Use(relation, group, site, []))
    for name, mine in uses.items():
        # Sites of one name have the same number of pieces, in program order.
        given = held.get(name, [])
        each = len(given) // len(mine)
        for n, use in enumerate(mine):
            use.held.extend(given[n * each : (n + 1) * each])
    return [use for mine in uses.values() for use in mine]


def _paired(inputs: dict[tuple, Any], states: dict[tuple, Any]) -> dict[tuple, Any]:
    """Both sides of factors together; traces that are whole have no input side."""
    steps = jnp.zeros((), jnp.int32)
    pair = lambda key: FactorTrace(inputs[key], states[key], steps)
    return {key: pair(key) if key in inputs else x for key, x in states.items()}


# ---------------------------------------------------------------- one trace a weight


def whole_traces(learner: Any) -> dict[Key, dict[str, jax.Array]]:
    """All traces that have an entry for each weight."""
    found: dict[Key, dict[str, jax.Array]] = {}
    for use in uses_of(learner):
        by_role = found.setdefault(use.key, {})
        own = {id(p.invar) for p in use.site.parameters}
        for role, var in use.relation.trainable_vars.items():
            if id(var) in own:
                by_role[role] = _of_role(learner, use, role)
    return {key: dict(sorted(roles.items())) for key, roles in found.items()}


def _of_role(learner: Any, use: Use, role: str) -> jax.Array:
    """The trace of a parameter: samples first, then its own axes, states last."""
    shape = use.site.weight_var.aval.shape
    states = range(use.group.num_state)
    arrays = {}
    for s in states:
        pieces = [trace[s] for trace in use.held if s in trace]
        if pieces:
            arrays[s] = _by_sample(use, pieces, shape)
            if role != 'lora_b':  # which has inputs and outputs there
                arrays[s] = _of_parameter(learner, use, role, arrays[s])
    zero = jnp.zeros(_shape(use, role), use.site.weight_var.aval.dtype)
    if arrays:
        zero = jnp.zeros_like(next(iter(arrays.values())))
    return jnp.stack([arrays.get(s, zero) for s in states], axis=-1)


def _shape(use: Use, role: str) -> tuple[int, ...]:
    """The shape of a trace for one state, where none is held."""
    own = use.relation.trainable_vars[role].aval.shape
    y = use.site.y_var.aval.shape
    if use.has_filters:
        return (*_places(use), *own)
    axes = {'grouped_matmul': 2, 'element_wise': len(own)}.get(use.site.mark or '', 1)
    return (*y[:1], *own) if len(y) > axes else own


def _by_sample(
    use: Use, pieces: Sequence[jax.Array], shape: tuple[int, ...]
) -> jax.Array:
    """The trace of a site, samples first, then the axes of the weight."""
    first, group = pieces[0], use.group.varshape
    if use.has_filters and first.ndim == 4:
        return _filters(use, first, shape)
    if use.site.mark == 'sparse_matmul' and not adds(use.site.equation):
        return jnp.moveaxis(first, 0, -1)
    if first.shape == (math.prod(group), *shape) and group:
        # The whole influence: each weight reaches one unit of a sample.
        over = tuple(range(min(1, len(group) - 1), len(group)))
        return jnp.sum(first.reshape(*group, *shape), axis=over)
    if use.site.mark == 'embedding':
        return jnp.moveaxis(first, 0, -len(shape))
    return _joined(pieces, shape)


def _joined(pieces: Sequence[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """The pieces of a weight side by side, along the axis by which they make it up."""
    for axis in range(-len(shape), 0) if len(pieces) > 1 else ():
        others = {x.shape[:axis] + x.shape[x.ndim + axis + 1 :] for x in pieces}
        size = sum(x.shape[axis] for x in pieces)
        if len(others) == 1 and size == shape[axis]:
            return jnp.concatenate(pieces, axis=axis)
    return pieces[0]


def _places(use: Use) -> tuple[int, ...]:
    """Samples and places of the result of a convolution."""
    spec = use.site.equation.params['dimension_numbers'].out_spec
    y = use.site.y_var.aval.shape
    return tuple(y[axis] for axis in (spec[0], *spec[2:]))


def _filters(use: Use, trace: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """(r, g, c, o) of a convolution: samples, places, and the axes of the kernel."""
    spec = use.site.equation.params['dimension_numbers'].rhs_spec
    by_filter = jnp.moveaxis(trace, -1, 2)  # r g o c
    kernels = by_filter.reshape(len(trace), *(shape[axis] for axis in spec))
    kernels = kernels.transpose(0, *(1 + np.argsort(spec)))
    return kernels.reshape(*_places(use), *shape)


def _of_parameter(learner: Any, use: Use, role: str, trace: jax.Array) -> jax.Array:
    """The trace of a parameter from that of the weight that is made of it."""
    site = use.site
    program = site.weight_jaxpr
    if not program.eqns or program.constvars:
        return trace
    values = [_leaf(learner, p) for p in site.parameters]
    at = [p.invar for p in site.parameters].index(use.relation.trainable_vars[role])

    def weight(own: jax.Array) -> jax.Array:
        given = [own if i == at else x for i, x in enumerate(values)]
        return evaluate(program, (), *given)[0]

    made, pull = jax.vjp(weight, values[at])
    samples = trace.shape[: trace.ndim - made.ndim]
    if trace.shape[len(samples) :] != made.shape:
        return trace
    flat = trace.reshape(-1, *made.shape).astype(made.dtype)
    (found,) = jax.vmap(pull)(flat)
    return found.reshape(*samples, *values[at].shape)


def _leaf(learner: Any, parameter: Any) -> jax.Array:
    """The present value of a parameter's array."""
    value = learner.param_states[parameter.path].value
    return named_arrays({parameter.path: value})[parameter.name]


# ---------------------------------------------------------------- factors


def factors(learner: Any) -> tuple[dict[int, jax.Array], dict[tuple[int, str], Any]]:
    """Both sides of factorised traces: inputs, and states."""
    inputs: dict[int, jax.Array] = {}
    states: dict[tuple[int, str], Any] = {}
    whole = None
    for use in uses_of(learner):
        key = (id(use.relation.y_var), f'hidden_group_{use.group.index}')
        pieces = [trace for trace in use.held if isinstance(trace, FactorTrace)]
        if pieces and key not in states:
            parts = [piece.x for piece in pieces if piece.x.ndim]
            if parts:
                inputs[id(use.relation.x_var)] = jnp.concatenate(parts, axis=-1)
            states[key] = _at_positions(use, pieces[0].f)
        elif use.held and key not in states:
            # Sites that cannot be factorised have a whole trace.
            whole = whole or whole_traces(learner)
            states[key] = whole[use.key]
    return inputs, states


def _at_positions(use: Use, found: dict[int, jax.Array]) -> jax.Array:
    """Factors of states at the positions of the group, states last."""
    shape, arrays = use.group.varshape, []
    size = math.prod(shape)
    places = np.where(use.positions < 0, size, use.positions).ravel()
    for s in range(use.group.num_state):
        zero = jnp.zeros(size, use.group.hidden_invars[0].aval.dtype)
        if s in found and found[s].size == len(places):
            zero = zero.at[places].set(found[s].ravel(), mode='drop')
        arrays.append(zero.reshape(shape))
    return jnp.stack(arrays, axis=-1)


# ---------------------------------------------------------------- projections


def projection(learner: Any) -> tuple[dict[int, Any], dict[tuple[int, Path], Any]]:
    """Both factors of a random projection: of the states of every group, and of the
    parameters that reach it."""
    _, solver = learner.step_solver()
    (trace,) = (state.value for state in learner.traces.values())
    by_state, by_parameter = solver.influence.factors(trace)
    groups = learner.graph.hidden_groups
    sides = zip(groups, solver.step.groups, strict=True)
    states = {
        group.index: jnp.stack(own.components(by_state), axis=-1)
        for group, own in sides
    }
    names = solver.step.names
    by_name = {names[key]: value for key, value in by_parameter.items()}
    parameters = {}
    for relation in learner.graph.hidden_param_op_relations:
        for path in dict.fromkeys(relation.trainable_paths.values()):
            tree = learner.param_states[path].value
            leaves = [by_name[name] for name in named_arrays({path: tree})]
            whole = jax.tree.unflatten(jax.tree.structure(tree), leaves)
            for group in relation.hidden_groups:
                parameters[group.index, path] = whole
    return states, parameters


# ---------------------------------------------------------------- of one parameter


def get_etrace_of(learner: Any, weight: Any) -> Any:
    """The traces of one parameter; a ValueError if it has none."""
    held = learner.traces_of(weight)  # checks the learner and the parameter
    path = path_of_parameter(weight, learner.param_states)
    relations = [
        relation
        for relation in learner.graph.hidden_param_op_relations
        if path in relation.trainable_paths.values()
    ]
    if not relations or not learner.rule.has_trace:
        raise ValueError(
            three_parts(
                f'get_etrace_of({path!r})',
                'this parameter has no trace: no step later depends on it, or the '
                'rule keeps no traces',
                'a parameter of learner.graph.hidden_param_op_relations',
            )
        )
    values = held if isinstance(held, dict) else {}
    if any(isinstance(trace, InfluenceTrace) for trace in values.values()):
        return _of_influence(learner, path, held)
    own = {id(relation.y_var) for relation in relations}
    if learner.rule.decay is not None:
        inputs, states = factors(learner)
        read = {id(relation.x_var) for relation in relations}
        return (
            {key: x for key, x in inputs.items() if key in read},
            {key: x for key, x in states.items() if key[0] in own},
        )
    return {key: x for key, x in whole_traces(learner).items() if key[0] in own}


def _of_influence(learner: Any, path: Path, held: dict[tuple, Any]) -> Any:
    """The part of one parameter in an influence that is held in one piece."""
    (trace,) = held.values()
    if isinstance(trace.value, tuple):
        return {k: x for k, x in projection(learner)[1].items() if k[1] == path}
    return held
